"""Every trade of time against energy of one model alone, and the fastest mapping within a budget, exactly.

AxoNN (Dagli et al., DAC 2022) solves the same problem with Z3; here it is a dynamic program along the model's chain of
groups, for one model or several that run one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isinf
from typing import NamedTuple

import numpy as np

from weft.base.errors import ProfileError, WorkloadError
from weft_map.problem import Floats, Ints, Problem
from weft_map.schedule import Schedule, Units

MOST_TRADES = 1_000_000
"""Trades kept per unit and step; more than that is refused rather than answered inexactly."""


class Trade(NamedTuple):
    """A mapping that no other beats in both time and energy."""

    latency_s: float
    energy_j: float
    units: Units
    """[task][step], for the tasks asked about."""


@dataclass(frozen=True, slots=True)
class EnergyResult:
    """The fastest mapping within a budget."""

    problem: Problem
    """The tasks asked about, each after the one before."""
    schedule: Schedule
    latency_s: float
    energy_j: float
    budget_j: float


class _Layer(NamedTuple):
    """The trades that end on one unit after one step; sorted by time, so that energy falls."""

    time: Floats
    energy: Floats
    unit: Ints
    """The unit on which the step before ran."""
    parent: Ints
    """Which of that unit's trades this one continues."""


def least_latency(
    problem: Problem, task: int | Sequence[int], budget_j: float, *, switch_j: float = 0.0, move_w: float = 0.0
) -> EnergyResult:
    """The fastest mapping whose energy stays within the budget.

    *task* is one task, or several that run one after the other. A switch costs *switch_j*, and every move *move_w*
    watts while it lasts.
    """
    trades = pareto(problem, task, switch_j=switch_j, move_w=move_w)
    chosen = next((trade for trade in trades if trade.energy_j <= budget_j * (1 + 1e-12)), None)
    alone = _in_a_row(problem, _listed(task))
    if chosen is None:
        least = trades[-1].energy_j
        names = ", ".join(each.name for each in alone.tasks)
        raise WorkloadError(
            f"{names}: the energy budget is {budget_j:g} J and the least possible is {least:g} J, "
            f"{least - budget_j:g} J more; raise the budget to {least:g} J at least"
        )
    return EnergyResult(alone, Schedule(chosen.units, made_by="energy"), chosen.latency_s, chosen.energy_j, budget_j)


def pareto(
    problem: Problem, task: int | Sequence[int], *, switch_j: float = 0.0, move_w: float = 0.0
) -> tuple[Trade, ...]:
    """Every trade of latency against energy that is worth making, the fastest first."""
    tasks = _listed(task)
    layers: list[list[_Layer]] = []
    last = [_Layer(np.zeros(1), np.zeros(1), np.full(1, -1), np.zeros(1, dtype=np.int64))]
    for n in tasks:
        energy = _energies(problem, n)
        for i in range(int(problem.tables.steps[n])):
            last = _step(problem, n, i, last, energy, switch_j, move_w)
            layers.append(last)
        last = [_merged(_left(problem, n, last, move_w))]
        layers.append(last)
    final = last[0]
    counts = [int(problem.tables.steps[n]) for n in tasks]
    return tuple(
        Trade(float(final.time[k]), float(final.energy[k]), _walk_back(layers, counts, k))
        for k in range(len(final.time))
    )


def _listed(task: int | Sequence[int]) -> tuple[int, ...]:
    return (task,) if isinstance(task, int) else tuple(task)


def _in_a_row(problem: Problem, tasks: Sequence[int]) -> Problem:
    """The problem with only these tasks, each after the one before."""
    chosen = [problem.tasks[n] for n in tasks]
    before: list[tuple[str, ...]] = [(), *((task.name,) for task in chosen)]
    return Problem(problem.soc, tuple(replace(task, after=after) for task, after in zip(chosen, before, strict=False)))


def _energies(problem: Problem, n: int) -> Floats:
    """[group, unit], in joules; infinite where the unit may not run the group."""
    task = problem.tasks[n]
    energy = np.full((len(task.groups), len(problem.units)), np.inf)
    for i, group in enumerate(task.groups):
        for u, unit in enumerate(problem.units):
            if unit not in group.costs:
                continue
            joules = group.costs[unit].energy_j
            if joules is None:
                raise ProfileError(f"{task.name}: group {group.name!r} has no energy_j on {unit}; a budget needs it")
            energy[i, u] = joules
    return energy


def _step(
    problem: Problem, n: int, i: int, last: Sequence[_Layer], energy: Floats, switch_j: float, move_w: float
) -> list[_Layer]:
    """One layer per unit, from those of the step before (or the single one of the task before)."""
    tables, run = problem.tables, len(problem.tasks[n].groups)
    layers = []
    for unit in range(len(problem.units)):
        ways = []
        for at, layer in enumerate(last):
            move = float(tables.move[n, i, at if i else -1, unit])
            seconds = move + float(tables.time[n, i, unit])
            if isinf(seconds):
                continue
            joules = float(energy[i % run, unit]) + move_w * move + (switch_j if i % run and at != unit else 0.0)
            ways.append(_from(layer, at, seconds, joules))
        layers.append(_merged(ways))
    return layers


def _left(problem: Problem, n: int, last: Sequence[_Layer], move_w: float) -> list[_Layer]:
    leave = problem.tables.leave[n].tolist()
    return [_from(layer, at, leave[at], move_w * leave[at]) for at, layer in enumerate(last)]


def _from(layer: _Layer, at: int, seconds: float, joules: float) -> _Layer:
    count = len(layer.time)
    return _Layer(layer.time + seconds, layer.energy + joules, np.full(count, at), np.arange(count))


def _merged(ways: Sequence[_Layer]) -> _Layer:
    """The trades of all ways that none of the others beats; the first of equals."""
    if not ways:
        return _Layer(np.empty(0), np.empty(0), np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    time, energy = np.concatenate([way.time for way in ways]), np.concatenate([way.energy for way in ways])
    unit, parent = np.concatenate([way.unit for way in ways]), np.concatenate([way.parent for way in ways])
    if not len(time):
        return _Layer(time, energy, unit, parent)
    # twelve digits, so that sums taken in another order count as equal
    order = np.lexsort((rounded := _rounded(energy), _rounded(time)))
    lowest = np.minimum.accumulate(rounded[order])
    kept = order[np.r_[True, lowest[1:] < lowest[:-1]]]
    if len(kept) > MOST_TRADES:
        raise WorkloadError(
            f"more than {MOST_TRADES} trades of time against energy are left to compare; use fewer groups or repeats"
        )
    return _Layer(time[kept], energy[kept], unit[kept], parent[kept])


def _rounded(values: Floats) -> Floats:
    return np.round(values / max(float(values.max()), 1e-300), 12)


def _walk_back(layers: Sequence[Sequence[_Layer]], counts: Sequence[int], k: int) -> Units:
    """The units that led to trade *k* of the last layer."""
    rows: list[tuple[int, ...]] = []
    place = len(layers) - 1
    for count in reversed(counts):
        end = layers[place][0]
        unit, k = int(end.unit[k]), int(end.parent[k])
        row = []
        for _ in range(count):
            place -= 1
            row.append(unit)
            layer = layers[place][unit]
            unit, k = int(layer.unit[k]), int(layer.parent[k])
        place -= 1
        rows.append(tuple(reversed(row)))
    return tuple(reversed(rows))
