"""The paper's own way, for comparison: the same problem given to Z3, and its answer judged like any other."""

from __future__ import annotations

from weft.base.errors import WorkloadError
from weft_map.limits import TaskLimits
from weft_map.problem import Problem
from weft_map.simulator import simulate
from weft_map.solver import Certificate, Improvement, Solution
from weft_map.z3_model import TICKS, solve_z3

CLASS = "a task moves on as soon as a step has ended; a step whose data is there may wait for any length of time"
ROUNDED = f"times in {TICKS} parts of the longest step"


def solve_like_the_paper(problem: Problem, limits: TaskLimits | None = None, time_limit_s: float = 60.0) -> Solution:
    """The least makespan by Z3: a proof for a handful of groups, and whatever it has when the time is up beyond."""
    limits = limits or TaskLimits()
    if limits.energy_budget_j is not None:
        raise WorkloadError("the Z3 model knows no energy budget; use the search")
    found = solve_z3(problem, time_limit_s=time_limit_s, max_switches=limits.max_switches)
    if found.schedule is None:
        raise WorkloadError(f"Z3 found no schedule within {time_limit_s:g} s; allow more time, or use the search")
    outcome = simulate(problem, found.schedule)
    bound = outcome.makespan_s if found.proved else 0.0
    certificate = Certificate(
        objective="latency",
        schedules=CLASS,
        assumes=ROUNDED,
        proved=found.proved,
        value=outcome.makespan_s,
        bound=bound,
        any_idling_bound=bound,
        states=0,
        seconds=found.seconds,
        ended="proof" if found.proved else "time limit",
        first_proof_s=found.seconds if found.proved else None,
    )
    only = Improvement(found.seconds, outcome.makespan_s, bound, found.schedule)
    return Solution(outcome, {"z3": outcome}, ("z3",), (only,), certificate)
