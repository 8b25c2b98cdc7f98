"""A problem for list schedulers: chains of stretches, in plain lists, without contention.

A *stretch* is groups that must stay on one unit (no leaving between them), so that a move between two stretches is
always legal and no method can paint itself into a corner. Very long problems are seen as one run per task; the
mapping of that run is then copied to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import permutations
from math import inf, isfinite
from typing import NamedTuple

import numpy as np

from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule, Units

MOST_STEPS = 256
"""Above this many steps together only one run of each task is looked at."""

Mapping = list[list[int]]
"""[task][stretch]: index of the unit."""


class ChainTimes(NamedTuple):
    """Seconds, per task and stretch."""

    time: list[list[list[float]]]
    """[task][stretch][unit]; infinite where the unit may not run it."""
    move: list[list[list[list[float]]]]
    """[task][stretch][from][to]: before the stretch; from = -1 is the outside."""
    leave: list[list[float]]
    """[task][unit]: after the last stretch."""
    waits: list[list[int]]
    """Tasks each task waits for."""
    fresh: list[list[bool]]
    """[task][stretch]: whether a run begins here."""
    steps: list[list[int]]
    """[task][stretch]: how many steps it has."""
    copies: list[int]
    """How often the chain of a task is laid out."""
    instances: list[int]

    @property
    def tasks(self) -> range:
        return range(len(self.time))

    @property
    def units(self) -> range:
        return range(len(self.instances))


def chains_of(problem: Problem) -> ChainTimes:
    """The chains of all tasks."""
    tables = problem.tables
    whole = int(tables.steps.sum()) <= MOST_STEPS
    waits = [np.flatnonzero(row).tolist() for row in tables.waits]
    chains = ChainTimes([], [], tables.leave.tolist(), waits, [], [], [], tables.instances.tolist())
    for n, task in enumerate(problem.tasks):
        runs = task.repeats if whole else 1
        cuts = [i for i in range(len(task.groups)) if i == 0 or task.groups[i - 1].leave]
        heads = [run * len(task.groups) + cut for run in range(runs) for cut in cuts]
        end = runs * len(task.groups)
        chains.time.append(np.add.reduceat(tables.time[n, :end], heads, axis=0).tolist())
        chains.move.append(tables.move[n, heads].tolist())
        chains.fresh.append([head % len(task.groups) == 0 for head in heads])
        chains.steps.append(np.diff([*heads, end]).tolist())
        chains.copies.append(task.repeats // runs)
    return chains


def spread(chains: ChainTimes, mapping: Mapping) -> Units:
    """A mapping of stretches as one of steps."""
    return tuple(
        tuple(unit for unit, steps in zip(mapping[n], chains.steps[n], strict=True) for _ in range(steps))
        * chains.copies[n]
        for n in chains.tasks
    )


def in_turn(chains: ChainTimes) -> list[int]:
    """The tasks as listed, but each after those it waits for."""
    order: list[int] = []
    while len(order) < len(chains.tasks):
        order.append(next(n for n in chains.tasks if n not in order and set(chains.waits[n]) <= set(order)))
    return order


def alone_s(chains: ChainTimes, task: int, units: Sequence[int]) -> float:
    """The duration of a task on these units, without other tasks."""
    total, at = 0.0, -1
    for i, unit in enumerate(units):
        total += chains.move[task][i][at][unit] + chains.time[task][i][unit]
        at = unit
    return total + chains.leave[task][at]


def finishes(chains: ChainTimes, mapping: Mapping, sequence: Iterable[int]) -> list[float]:
    """When each task is through if stretches are placed in this order of tasks, each as early as it can then be."""
    time, move = chains.time, chains.move
    free = [[0.0] * count for count in chains.instances]
    ready, at, done = [0.0] * len(time), [-1] * len(time), [0] * len(time)
    for n in sequence:
        i = done[n]
        unit = mapping[n][i]
        if i == 0 and chains.waits[n]:
            ready[n] = max(ready[m] + chains.leave[m][at[m]] for m in chains.waits[n])
        start = ready[n] + move[n][i][at[n]][unit]
        lane = free[unit]
        slot = 0 if len(lane) == 1 else lane.index(min(lane))
        ready[n] = lane[slot] = max(start, lane[slot]) + time[n][i][unit]
        at[n], done[n] = unit, i + 1
    return [ready[n] + chains.leave[n][at[n]] for n in chains.tasks]


def candidates(name: str, chains: ChainTimes, mappings: Iterable[Mapping]) -> tuple[Schedule, ...]:
    """One schedule per distinct mapping and order in which ties are broken."""
    distinct = dict.fromkeys(spread(chains, mapping) for mapping in mappings)
    return tuple(Schedule(units, order=order, made_by=name) for units in distinct for order in _ties(chains))


def in_series(name: str, chains: ChainTimes, mapping: Mapping, objective: Objective) -> tuple[Schedule, ...]:
    """For throughput: planned starts that run models on a shared unit one after another, so that the first ends early.

    First come, first served interleaves such models group by group, which gives the same makespan but a later end of
    every run.
    """
    if objective != "throughput" or len(mapping) < 2:
        return ()
    units = spread(chains, mapping)
    starts = (_series_starts(chains, mapping, order) for order in _orders(chains))
    return tuple(
        Schedule(units, starts_s=_release_times(units, first), made_by=name) for first in dict.fromkeys(starts)
    )


def _ties(chains: ChainTimes) -> list[tuple[int, ...] | None]:
    count = len(chains.tasks)
    return [None] if count == 1 else [None, tuple(reversed(range(count)))]


def _orders(chains: ChainTimes) -> list[tuple[int, ...]]:
    """All orders of up to three tasks, otherwise as listed and the shortest first; all respect which task waits."""
    if len(chains.tasks) <= 3:
        return [order for order in permutations(chains.tasks) if _is_allowed(chains, order)]
    best = [sum(min(times) for times in chains.time[n]) * chains.copies[n] for n in chains.tasks]
    short = tuple(sorted(chains.tasks, key=best.__getitem__))
    return [tuple(in_turn(chains)), *([short] if _is_allowed(chains, short) else [])]


def _is_allowed(chains: ChainTimes, order: Sequence[int]) -> bool:
    place = {n: k for k, n in enumerate(order)}
    return all(place[m] < place[n] for n in chains.tasks for m in chains.waits[n])


def _series_starts(chains: ChainTimes, mapping: Mapping, order: Sequence[int]) -> tuple[float, ...]:
    """When the first step of each task is to begin."""
    free = [[0.0] * count for count in chains.instances]
    starts, ends = [0.0] * len(order), [0.0] * len(order)
    for n in order:
        used = set(mapping[n])
        entry = chains.move[n][0][-1][mapping[n][0]]
        whole = alone_s(chains, n, mapping[n])
        ready = entry + max((ends[m] for m in chains.waits[n]), default=0.0)
        starts[n] = max(ready, *(min(free[unit]) for unit in used))
        ends[n] = starts[n] - entry + whole * chains.copies[n]
        for unit in used:
            free[unit].remove(min(free[unit]))
            free[unit].append(ends[n] - chains.leave[n][mapping[n][-1]])
    return tuple(starts)


def _release_times(units: Units, first: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    return tuple((start, *[0.0] * (len(row) - 1)) for start, row in zip(first, units, strict=True))


def fallback(chains: ChainTimes, task: int, home: int) -> list[int]:
    """Every stretch on *home*; where home may not run it, on the unit that is through with it first."""
    units: list[int] = []
    for times, move in zip(chains.time[task], chains.move[task], strict=True):
        came = move[units[-1] if units else -1]
        there = min(chains.units, key=lambda unit: times[unit] + came[unit])
        units.append(home if isfinite(times[home] + came[home]) else there)
    return units


def quickest(values: Sequence[float]) -> int:
    """Index of the smallest; the first of equals."""
    best, at = inf, 0
    for index, value in enumerate(values):
        if value < best:
            best, at = value, index
    return at
