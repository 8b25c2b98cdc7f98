"""Simulation of policies: ``simulate`` for saturated streams, and ``requests`` for requests that arrive.

``saturated`` and ``requests`` run one case each; ``sustain`` looks for the largest load, ``sweep`` for thresholds,
``prediction`` repeats a measured run of a server.

Its modules: ``comparison.py`` and ``loads.py``, behind ``weft compare`` and ``weft sustain``; ``saturated.py``;
``requests/`` (``case.py`` prepares a workload for any device, ``run.py`` serves it on the plain engine or a compiled
loop); ``prediction.py``, a server's measured run again; ``sustain.py``, the largest load; ``run_length.py``, the length
of runs that judge it; ``sweep.py``, thresholds.
"""

from weft.simulation.saturated import Run, simulate

__all__ = ["Run", "simulate"]
