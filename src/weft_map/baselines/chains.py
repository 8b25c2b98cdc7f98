"""A problem for list schedulers: chains of stretches, in plain lists, without contention.

A *stretch* is a sequence of groups that must run on one unit. Between two stretches a model may change units, so no
method can get stuck. For very long problems only one run per task is mapped; the other runs get the same mapping.
Indices: n, m: tasks; i: a stretch of a task; -1 in place of a unit: the outside, where runs begin and end.
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
"""If all tasks have more steps together, only one run of each task is mapped."""

Mapping = list[list[int]]
"""[task][stretch]: index of the unit."""


class ChainTimes(NamedTuple):
    """The stretches of all tasks with their times in seconds."""

    time: list[list[list[float]]]
    """[task][stretch][unit]: seconds alone; infinite where the unit may not run the stretch."""
    move: list[list[list[list[float]]]]
    """[task][stretch][from][to]: seconds of the move before the stretch; from = -1 is the outside."""
    leave: list[list[float]]
    """[task][unit]: seconds after the last stretch."""
    waits: list[list[int]]
    """[task]: the tasks that it waits for."""
    begins_run: list[list[bool]]
    """[task][stretch]: whether a run begins with the stretch."""
    steps: list[list[int]]
    """[task][stretch]: number of its steps."""
    repeats: list[int]
    """[task]: how often its mapping is repeated to cover all its runs; 1 if the mapping has all runs."""
    instances: list[int]
    """[unit]: number of its instances."""

    @property
    def tasks(self) -> range:
        return range(len(self.time))

    @property
    def units(self) -> range:
        return range(len(self.instances))


def chains_of(problem: Problem) -> ChainTimes:
    """Build the stretches of all tasks of *problem*."""
    tables = problem.tables
    all_runs = int(tables.steps.sum()) <= MOST_STEPS
    waits = [np.flatnonzero(row).tolist() for row in tables.waits]
    chains = ChainTimes(
        time=[], move=[], leave=tables.leave.tolist(), waits=waits, begins_run=[], steps=[], repeats=[],
        instances=tables.instances.tolist(),
    )  # fmt: skip
    for n, task in enumerate(problem.tasks):
        runs = task.repeats if all_runs else 1
        # ``leave``: the model may change its unit after the group, so a stretch ends there.
        first_groups = [i for i in range(len(task.groups)) if i == 0 or task.groups[i - 1].leave]
        first_steps = [run * len(task.groups) + first_group for run in range(runs) for first_group in first_groups]
        stop = runs * len(task.groups)
        # A stretch takes the sum of its steps' times; the move before it is that before its first step.
        chains.time.append(np.add.reduceat(tables.time[n, :stop], first_steps, axis=0).tolist())
        chains.move.append(tables.move[n, first_steps].tolist())
        chains.begins_run.append([first_step % len(task.groups) == 0 for first_step in first_steps])
        chains.steps.append(np.diff([*first_steps, stop]).tolist())
        chains.repeats.append(task.repeats // runs)
    return chains


def spread(chains: ChainTimes, mapping: Mapping) -> Units:
    """Turn a mapping of stretches ([task][stretch]: unit) into one of steps ([task][step]: unit)."""
    return tuple(
        tuple(unit for unit, steps in zip(mapping[n], chains.steps[n], strict=True) for _ in range(steps))
        * chains.repeats[n]
        for n in chains.tasks
    )


def in_turn(chains: ChainTimes) -> list[int]:
    """A topological order of the tasks: as listed, but each after the tasks that it waits for."""
    order: list[int] = []
    while len(order) < len(chains.tasks):
        order.append(next(n for n in chains.tasks if n not in order and set(chains.waits[n]) <= set(order)))
    return order


def alone_s(chains: ChainTimes, task: int, units: Sequence[int]) -> float:
    """Seconds of one run of the chain of *task* without other tasks; *units*: one per stretch."""
    total_s, source = 0.0, -1  # a run comes from outside
    for i, unit in enumerate(units):
        total_s += chains.move[task][i][source][unit] + chains.time[task][i][unit]
        source = unit
    return total_s + chains.leave[task][source]


def finishes(chains: ChainTimes, mapping: Mapping, sequence: Iterable[int]) -> list[float]:
    """The end of each task in seconds if stretches are placed one by one, each as early as possible.

    sequence: the task whose next stretch is placed, for each stretch of all tasks.
    """
    time, move = chains.time, chains.move
    free_s = [[0.0] * count for count in chains.instances]
    ready_s, unit_of_task, done = [0.0] * len(time), [-1] * len(time), [0] * len(time)
    for n in sequence:
        i = done[n]
        unit = mapping[n][i]
        if i == 0 and chains.waits[n]:
            ready_s[n] = max(ready_s[m] + chains.leave[m][unit_of_task[m]] for m in chains.waits[n])
        start_s = ready_s[n] + move[n][i][unit_of_task[n]][unit]
        lane_free_s = free_s[unit]
        instance = lane_free_s.index(min(lane_free_s)) if len(lane_free_s) > 1 else 0  # one instance needs no search
        ready_s[n] = lane_free_s[instance] = max(start_s, lane_free_s[instance]) + time[n][i][unit]
        unit_of_task[n], done[n] = unit, i + 1
    return [ready_s[n] + chains.leave[n][unit_of_task[n]] for n in chains.tasks]


def candidates(name: str, chains: ChainTimes, mappings: Iterable[Mapping]) -> tuple[Schedule, ...]:
    """Make schedules without planned starts: for each distinct mapping, one per order of tasks that breaks ties."""
    distinct = dict.fromkeys(spread(chains, mapping) for mapping in mappings)
    return tuple(Schedule(units, order=order, made_by=name) for units in distinct for order in _tie_orders(chains))


def in_series(name: str, chains: ChainTimes, mapping: Mapping, objective: Objective) -> tuple[Schedule, ...]:
    """Make schedules with planned starts in which models that share a unit run one after another, for throughput.

    First come, first served interleaves such models group by group, with the same makespan but a later end of every
    run. Empty for the objective latency or a single task.
    """
    if objective != "throughput" or len(mapping) < 2:
        return ()
    units = spread(chains, mapping)
    starts_of_orders = (_series_starts(chains, mapping, order) for order in _orders(chains))
    return tuple(
        Schedule(units, starts_s=_release_times(units, first_starts), made_by=name)
        for first_starts in dict.fromkeys(starts_of_orders)
    )


def _tie_orders(chains: ChainTimes) -> list[tuple[int, ...] | None]:
    """Values of ``Schedule.order`` to try: as listed, and reversed."""
    tasks = len(chains.tasks)
    return [None] if tasks == 1 else [None, tuple(reversed(range(tasks)))]


def _orders(chains: ChainTimes) -> list[tuple[int, ...]]:
    """Orders of the tasks to try: all for up to three tasks, otherwise as listed, and the shortest first.

    In each, tasks come after the tasks that they wait for.
    """
    if len(chains.tasks) <= 3:
        return [order for order in permutations(chains.tasks) if _is_allowed(chains, order)]
    least_s = [sum(min(times) for times in chains.time[n]) * chains.repeats[n] for n in chains.tasks]
    shortest_first = tuple(sorted(chains.tasks, key=least_s.__getitem__))
    return [tuple(in_turn(chains)), *([shortest_first] if _is_allowed(chains, shortest_first) else [])]


def _is_allowed(chains: ChainTimes, order: Sequence[int]) -> bool:
    position = {n: index for index, n in enumerate(order)}
    return all(position[m] < position[n] for n in chains.tasks for m in chains.waits[n])


def _series_starts(chains: ChainTimes, mapping: Mapping, order: Sequence[int]) -> tuple[float, ...]:
    """[task]: planned start of its first step, if each task in *order* waits until all its units are free."""
    free_s = [[0.0] * count for count in chains.instances]
    starts_s, ends_s = [0.0] * len(order), [0.0] * len(order)
    for n in order:
        units = set(mapping[n])
        entry_s = chains.move[n][0][-1][mapping[n][0]]
        run_s = alone_s(chains, n, mapping[n])
        ready_s = entry_s + max((ends_s[m] for m in chains.waits[n]), default=0.0)
        starts_s[n] = max(ready_s, *(min(free_s[unit]) for unit in units))
        ends_s[n] = starts_s[n] - entry_s + run_s * chains.repeats[n]
        for unit in units:
            free_s[unit].remove(min(free_s[unit]))
            free_s[unit].append(ends_s[n] - chains.leave[n][mapping[n][-1]])  # to leave the SoC occupies no unit
    return tuple(starts_s)


def _release_times(units: Units, first_starts: Sequence[float]) -> tuple[tuple[float, ...], ...]:
    """Planned starts by [task][step]: *first_starts* for first steps, 0 (as soon as possible) for all others."""
    return tuple((start, *[0.0] * (len(row) - 1)) for start, row in zip(first_starts, units, strict=True))


def fallback(chains: ChainTimes, task: int, home: int) -> list[int]:
    """Map every stretch of *task* to the unit *home*, or, if it may not run there, to the unit that ends it first."""
    units: list[int] = []
    for times, moves in zip(chains.time[task], chains.move[task], strict=True):
        moves_from_here = moves[units[-1] if units else -1]
        earliest = min(chains.units, key=lambda unit: times[unit] + moves_from_here[unit])
        units.append(home if isfinite(times[home] + moves_from_here[home]) else earliest)
    return units


def quickest(values: Sequence[float]) -> int:
    """Index of the smallest value, the first on a tie; 0 if all are infinite."""
    best, best_index = inf, 0
    for index, value in enumerate(values):
        if value < best:
            best, best_index = value, index
    return best_index
