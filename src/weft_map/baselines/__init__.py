"""Other people's mappings, to be judged in the same simulator and to start our own search from.

Each baseline returns candidates: mappings without planned starts, where a step begins as soon as its data is there
and its unit free (``gpu-only`` and shared ``per-unit`` add planned starts for throughput). The caller simulates all
of them and keeps the best of each. None of these methods models contention.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from weft_map.baselines.blind import contention_blind
from weft_map.baselines.h2h import h2h
from weft_map.baselines.heft import heft
from weft_map.baselines.herald import herald
from weft_map.baselines.mensa import mensa
from weft_map.baselines.naive import one_unit, per_unit
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule

Baseline = Callable[[Problem, Objective], tuple[Schedule, ...]]


def either_order(method: Baseline) -> Baseline:
    """A list scheduler that is also shown the tasks the other way round, which matters to it."""

    def both(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
        listed = method(problem, objective)
        if len(problem.tasks) == 1:
            return listed
        turned = method(Problem(problem.soc, problem.tasks[::-1]), objective)
        return tuple(dict.fromkeys((*listed, *(_turned_back(schedule) for schedule in turned))))

    return both


def _turned_back(schedule: Schedule) -> Schedule:
    last = len(schedule.units) - 1
    order = schedule.order or range(last + 1)
    starts = schedule.starts_s[::-1] if schedule.starts_s else None
    return replace(schedule, units=schedule.units[::-1], starts_s=starts, order=tuple(last - task for task in order))


BASELINES: dict[str, Baseline] = {
    "gpu-only": one_unit,
    "per-unit": per_unit,
    "mensa": mensa,
    "herald": either_order(herald),
    "h2h": either_order(h2h),
    "heft": either_order(heft),
    "contention-blind": contention_blind,
}
"""The names a user may write. All but the last take a few milliseconds together; the last is a search of its own."""

__all__ = ["BASELINES", "Baseline"]
