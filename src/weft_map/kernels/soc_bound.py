"""How good a schedule through a state on a SoC can be at best, compiled.

Prices make activities of different tasks comparable (``weft_map.prices`` finds them); here the priced ways to the
end are summed up for a state.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import untyped_called, untyped_loop
from weft_map.kernels.soc import (
    BOUNDARY,
    DONE,
    HELD,
    LEAVING,
    MOVING,
    READY,
    RUNNING,
    TINY_S,
    WAITING,
    follow,
    phase_of,
    step_of,
    unit_of,
)

Floats = npt.NDArray[np.float64]


class ActivityPrices(NamedTuple):
    """What a second of each activity costs, such that whatever goes on at once costs at most 1 a second; several sets.

    So the priced cheapest way to the end, summed over the tasks, is a lower bound on the time left."""

    run: Floats
    """[task, step, unit, set]: a second of stand-alone work."""
    move: Floats
    """[task, set]: a second on the way."""
    togo: Floats
    """[task, step, from, switches left, set]: the cheapest way from before a step to the end."""
    energy: Floats
    """[task, step, from]: the fewest joules from before a step to the end."""


SAME_LATER, NOWHERE_EARLIER = range(2)
"""A state that only lies later: what follows it follows the other as well, sooner. Or any that is nowhere earlier."""


class BoundRules(NamedTuple):
    """The objective and the limits of a search."""

    throughput: bool
    """Else the least makespan."""
    repeats: Floats
    """Runs of each task, for the throughput."""
    switches: int
    """A task may change its unit this often within a run; -1: as often as it likes."""
    deadline: float
    """All must be through by then; infinite where there is no limit."""
    budget: float
    """Joules all tasks together may take; infinite where there is no limit."""
    dominance: int
    """Which states are dropped for another of the same phases: ``SAME_LATER`` or ``NOWHERE_EARLIER``."""


@untyped_called
def estimate(tables, rules, prices, work, time):
    """The best value a schedule through the state in *work* can have."""
    if rules.budget < np.inf and work.spent[0] + _energy_to_go(tables, prices, work) > rules.budget:
        return np.inf
    sets = prices.move.shape[1]
    for n in range(len(work.code)):
        code, left = work.code[n], work.left[n]
        phase, step, unit = phase_of(code), step_of(code), unit_of(code)
        spare = rules.switches - work.used[n] if rules.switches >= 0 else 0
        if phase == DONE:
            for p in range(sets):
                work.costs[n, p] = 0.0
        elif phase == LEAVING:
            for p in range(sets):
                work.costs[n, p] = prices.move[n, p] * left
        elif phase in (BOUNDARY, HELD, WAITING):
            if phase == WAITING:
                unit = tables.time.shape[2]
            for p in range(sets):
                work.costs[n, p] = prices.togo[n, step, unit, spare, p]
        else:
            way, rest = 0.0, left
            if phase != RUNNING:
                way, rest = left, tables.time[n, step, unit]
            for p in range(sets):
                work.costs[n, p] = (
                    prices.move[n, p] * way
                    + prices.run[n, step, unit, p] * rest
                    + prices.togo[n, step + 1, unit, spare, p]
                )
    most = 0.0
    for p in range(sets):
        cost = 0.0
        for n in range(len(work.code)):
            cost += work.costs[n, p]
        most = max(most, cost)
    if time + most > rules.deadline:
        return np.inf
    if rules.throughput:
        return _least_negated_throughput(rules, work, time, sets)
    return time + most


@untyped_called
def _energy_to_go(tables, prices, work):
    """The fewest joules the steps without a unit can take."""
    least = 0.0
    for n in range(len(work.code)):
        code = work.code[n]
        phase, step, unit = phase_of(code), step_of(code), unit_of(code)
        if phase == WAITING:
            least += prices.energy[n, 0, tables.time.shape[2]]
        elif phase in (BOUNDARY, HELD):
            least += prices.energy[n, step, unit]
        elif phase in (MOVING, READY, RUNNING):
            least += prices.energy[n, step + 1, unit]
    return least


@untyped_called
def _least_negated_throughput(rules, work, time, sets):
    """A bound on the throughput: whatever the order in which tasks end, the first few need their time together."""
    tasks = len(work.code)
    reached = 0.0
    for n in range(tasks):
        if phase_of(work.code[n]) == DONE:
            reached += rules.repeats[n] / max(work.ended[n], TINY_S)
    work.subsets[0] = 0.0
    for subset in range(1, 1 << tasks):
        work.subsets[subset] = -1.0
        need = 0.0
        for p in range(sets):
            cost = 0.0
            for n in range(tasks):
                if subset >> n & 1:
                    cost += work.costs[n, p]
            need = max(need, cost)
        for n in range(tasks):
            if subset >> n & 1 and phase_of(work.code[n]) != DONE and work.subsets[subset ^ (1 << n)] >= 0:
                gain = rules.repeats[n] / max(time + need, TINY_S)
                work.subsets[subset] = max(work.subsets[subset], work.subsets[subset ^ (1 << n)] + gain)
    most = 0.0
    for subset in range(1 << tasks):
        most = max(most, work.subsets[subset])
    return -(reached + most)


@untyped_loop
def value_of(rules, ended):
    """The value of a finished schedule: lower is better."""
    if not rules.throughput:
        return ended.max()
    total = 0.0
    for n in range(len(ended)):
        total += rules.repeats[n] / max(ended[n], TINY_S)
    return -total


@untyped_loop
def shift(tables, rules, units, order, delays, starts, ended, best, stride):
    """Try every delay a stride longer and shorter, and keep what helps; returns the value then."""
    for n in range(len(tables.steps)):
        for i in range(tables.steps[n]):
            for sign in (1.0, -1.0):
                kept = delays[n, i]
                delays[n, i] = max(0.0, kept + sign * stride)
                if delays[n, i] == kept:
                    continue
                follow(tables, units, order, delays, starts, ended)
                value = value_of(rules, ended)
                if value < best - 1e-9 * abs(best):
                    best = value
                else:
                    delays[n, i] = kept
    return best
