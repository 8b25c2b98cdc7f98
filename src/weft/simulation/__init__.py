"""What a policy would do: ``simulate`` for streams that never run dry; ``requests`` has the same for those that arrive.

``saturated`` and ``requests`` run one case each; ``sustain`` looks for the largest load, ``sweep`` for thresholds,
``prediction`` runs again what a server was measured to do.
"""

from weft.simulation.saturated import Run, simulate

__all__ = ["Run", "simulate"]
