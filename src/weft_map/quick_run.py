"""Fast simulation of mappings, and search for delays that improve them.

``run_mapping`` is the simulator's answer for a schedule without planned starts, compiled. ``idle_freely`` leaves the
class of schedules that the search covers: it lets steps wait for any time at all, where that keeps them out of
another's way, and looks for the best delays by pattern search. That is no proof of anything, but often gains a percent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft_map.kernels.soc import follow
from weft_map.kernels.soc_bound import BoundRules, shift, value_of
from weft_map.limits import TaskLimits
from weft_map.problem import Floats, Ints, Objective, Problem
from weft_map.schedule import Outcome, Schedule
from weft_map.search import rules
from weft_map.simulator import simulate

MOST_STEPS = 200
"""Cap on the steps of all tasks up to which delays are tried: every trial simulates all of them."""
LONGEST, SHORTEST = 1 / 8, 1 / 4096
"""Strides of the pattern search, as shares of the makespan."""


def run_mapping(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """When each task ends under a mapping without planned starts."""
    units, order, ended = _units(problem, schedule), _order(problem, schedule), np.zeros(len(problem.tasks))
    nothing = np.zeros(units.shape)
    follow(problem.tables, units, order, nothing, nothing.copy(), ended)
    return tuple(ended.tolist())


def ends_s(problem: Problem, schedule: Schedule) -> tuple[float, ...]:
    """When each task ends, whether starts are planned or not."""
    return run_mapping(problem, schedule) if schedule.starts_s is None else simulate(problem, schedule).finish_s


def idle_freely(outcome: Outcome, objective: Objective) -> Schedule:
    """Return the schedule with better delays; itself if none help or the problem has more than ``MOST_STEPS`` steps."""
    problem, schedule = outcome.problem, outcome.schedule
    if int(problem.tables.steps.sum()) > MOST_STEPS:
        return schedule
    given = rules(problem, objective, TaskLimits(), strict=True)
    units, order = _units(problem, schedule), _order(problem, schedule)
    delays, starts, ended = _delays(outcome), np.zeros(units.shape), np.zeros(len(problem.tasks))
    before = _value(problem, given, units, order, delays, ended)
    best = _without_needless(problem, given, units, order, delays, before)
    stride = outcome.makespan_s * LONGEST
    while stride > outcome.makespan_s * SHORTEST:
        better = float(shift(problem.tables, given, units, order, delays, starts, ended, best, stride))
        if better >= best:
            stride /= 2
        best = better
    if best >= outcome.value(objective) - 1e-6 * abs(best):
        return schedule
    follow(problem.tables, units, order, delays, starts, ended)
    rows = tuple(tuple(row[:steps].tolist()) for row, steps in zip(starts, problem.tables.steps.tolist(), strict=True))
    return replace(schedule, starts_s=rows, made_by=f"{schedule.made_by}, idling")


def _without_needless(
    problem: Problem, given: BoundRules, units: Ints, order: Ints, delays: Floats, best: float
) -> float:
    """Remove delays during which the unit was busy anyway."""
    for place in np.argwhere(delays > 0):
        kept, delays[tuple(place)] = delays[tuple(place)], 0.0
        value = _value(problem, given, units, order, delays, np.zeros(len(order)))
        if value > best:
            delays[tuple(place)] = kept
        best = min(best, value)
    return best


def _value(problem: Problem, given: BoundRules, units: Ints, order: Ints, delays: Floats, ended: Floats) -> float:
    follow(problem.tables, units, order, delays, np.zeros(units.shape), ended)
    return float(value_of(given, ended))


def _delays(outcome: Outcome) -> Floats:
    """How long each step stood ready before it started."""
    tables = outcome.problem.tables
    delays = np.zeros(tables.time.shape[:2])
    starts: dict[tuple[int, int], float] = {}
    ready: dict[tuple[int, int], float] = {}
    for piece in outcome.pieces:
        starts.setdefault((piece.task, piece.step), piece.start_s)
        ready[piece.task, piece.step + 1] = piece.end_s
    for move in outcome.moves:
        ready[move.task, move.step] = move.end_s
    for (task, step), start_s in starts.items():
        waited_for = max((outcome.finish_s[m] for m in np.flatnonzero(tables.waits[task])), default=0.0)
        delays[task, step] = max(0.0, start_s - ready.get((task, step), waited_for))
    return delays


def _units(problem: Problem, schedule: Schedule) -> Ints:
    units = np.full(problem.tables.time.shape[:2], -1, dtype=np.int64)
    for n, chosen in enumerate(schedule.units):
        units[n, : len(chosen)] = chosen
    return units


def _order(problem: Problem, schedule: Schedule) -> Ints:
    return np.array(schedule.order or range(len(problem.tasks)), dtype=np.int64)
