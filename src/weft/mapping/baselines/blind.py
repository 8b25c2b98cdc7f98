"""The best there is if nobody slowed anybody: what a perfect scheduler without a model of contention would do."""

from __future__ import annotations

from dataclasses import replace

from weft.mapping.cpsat import contention_free
from weft.mapping.problem import Objective, Problem
from weft.mapping.schedule import Schedule

TIME_LIMIT_S = 10.0


def contention_blind(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``contention-blind``: the mapping with its planned starts, and left to first come, first served."""
    plan = replace(contention_free(problem, objective, time_limit_s=TIME_LIMIT_S).schedule, made_by="contention-blind")
    loose = replace(plan, starts_s=None)
    count = len(problem.tasks)
    turned = [replace(loose, order=tuple(reversed(range(count))))] if count > 1 else []
    return (loose, *turned, plan)
