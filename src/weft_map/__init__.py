"""Mapping: which unit of a SoC runs which layers of several models, and when, contention at the memory included.

``map_models`` goes from names to a ``Solution``. Beneath it, a ``Problem`` is tasks of groups on a SoC, each group with
its cost on every unit; ``solve`` finds the best ``Schedule`` and says how sure that is; ``simulate`` says what any
schedule comes to.
"""

from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.scenario import map_models
from weft_map.schedule import Schedule
from weft_map.simulator import simulate
from weft_map.solver import Options, Solution, solve

__all__ = ["Group", "Options", "Problem", "Schedule", "Solution", "Task", "UnitCost", "map_models", "simulate", "solve"]
