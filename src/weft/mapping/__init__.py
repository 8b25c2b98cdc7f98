"""Mapping: which unit of a SoC runs which layers of several models, and when, contention at the memory included.

A ``Problem`` is tasks on a SoC; ``solve`` finds the best schedule and says how sure that is; ``simulate`` says what any
schedule comes to. ``map_models`` goes from names to a solution, ``run_dynamic`` keeps up with models that change.
"""

from weft.mapping.baselines import BASELINES
from weft.mapping.dynamic import DynamicLog, run_dynamic
from weft.mapping.finding import find_profile
from weft.mapping.limits import TaskLimits
from weft.mapping.problem import Group, Objective, Problem, Task, UnitCost
from weft.mapping.profiles import SocProfile, read_soc_profile, write_soc_profile
from weft.mapping.scenario import Scenario, map_models, read_scenario
from weft.mapping.schedule import Outcome, Schedule, Stint, Transfer
from weft.mapping.simulator import simulate
from weft.mapping.solver import Certificate, Improvement, Options, Solution, solve

__all__ = [
    "BASELINES",
    "Certificate",
    "DynamicLog",
    "Group",
    "Improvement",
    "Objective",
    "Options",
    "Outcome",
    "Problem",
    "Scenario",
    "Schedule",
    "SocProfile",
    "Solution",
    "Stint",
    "Task",
    "TaskLimits",
    "Transfer",
    "UnitCost",
    "find_profile",
    "map_models",
    "read_scenario",
    "read_soc_profile",
    "run_dynamic",
    "simulate",
    "solve",
    "write_soc_profile",
]
