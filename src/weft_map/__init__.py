"""Mapping: which unit of a SoC runs which layers of several models, and when, contention at the memory included.

``map_models`` goes from names to a ``Solution``. Beneath it, a ``Problem`` is tasks of groups on a SoC, each group with
its cost on every unit; ``solve`` finds the best ``Schedule`` and a bound for it; ``simulate`` returns the ``Outcome``
of any schedule.

Its modules: ``profiles.py``, ``estimate.py``, ``trtexec.py`` (what groups cost) lead to ``problem.py``;
``simulator.py``; ``prices.py``, ``search.py``, ``solver.py`` (the best schedule, proved); ``cpsat.py``,
``z3_model.py``; ``baselines/``; ``dynamic.py``, plans that improve while the system runs;
``memory_contention.py``, this machine measured, and ``pccs_fit.py``, a SoC's contention model from such measurements.

A model on a SoC is a chain of groups; a group has a time, a memory demand and moving costs on each unit that may run
it. ``Problem.tables`` lays the chains out as arrays. ``simulator.simulate`` is the engine's loop again: ``Chains``
offers the next group of every model on every unit, the policy ``Planned`` picks what a schedule says, and
``SimulatedSoc`` lets time jump from event to event, each running group progressing at one over its slow-down. The
search (``kernels/soc_search.py``) walks over the states between events; ``kernels/soc.py`` bounds what can follow
a state by prices, which ``prices.py`` gets from weights of the units at first and then from a linear programme over all
that can run together. ``solver.solve`` begins with the baselines, dives, and proves.
"""

from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.scenario import map_models
from weft_map.schedule import Schedule
from weft_map.simulator import simulate
from weft_map.solver import Options, Solution, solve

__all__ = ["Group", "Options", "Problem", "Schedule", "Solution", "Task", "UnitCost", "map_models", "simulate", "solve"]
