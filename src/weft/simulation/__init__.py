"""What a policy would do: ``simulate`` for streams that never run dry, ``simulate_requests`` for requests that arrive.

``saturated`` and ``requests`` run one case each; ``sustain`` looks for the largest load, ``sweep`` for thresholds,
``prediction`` runs again what a server was measured to do.
"""

from weft.simulation.requests import Case, RequestRun, prepare, simulate_requests
from weft.simulation.saturated import Run, simulate

__all__ = ["Case", "RequestRun", "Run", "prepare", "simulate", "simulate_requests"]
