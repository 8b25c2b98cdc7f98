"""Events on a SoC between decisions, compiled; and how good a schedule through a state can be at best.

The phase of every task is one number (step, unit, phase, packed); beside it stands how much of its move or of its step
is left. ``advance`` goes to the next event, ``follow`` runs a whole mapping in which no step waits without need. The
plain twin is ``weft_map.simulator``.

Prices make activities of different tasks comparable (``weft_map.prices`` finds them); here the priced ways to the end
are summed up for a state.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import untyped_called, untyped_loop

WAITING, BOUNDARY, MOVING, READY, RUNNING, LEAVING, DONE, HELD = range(8)
"""Phases of a task: for others to end; at an event, its next unit to be chosen (its unit is the one it comes from); on
its way to a unit; there, not begun; running; on its way out; through; let wait at an earlier event, and still free to
choose a unit to which there is no way to go."""

TINY_S = 1e-13
"""Two events closer than this are one; a gain smaller than this is none."""


@numba.njit(cache=True, inline="always")
def pack(step, unit, phase):
    return (step << 7) | (unit << 3) | phase


@numba.njit(cache=True, inline="always")
def phase_of(code):
    return code & 7


@numba.njit(cache=True, inline="always")
def unit_of(code):
    return (code >> 3) & 15


@numba.njit(cache=True, inline="always")
def step_of(code):
    return code >> 7


@untyped_loop
def advance(tables, code, left, ended, pace, time, until):
    """Advance to the next end of a step or move, or to *until*; return the new time."""
    total = 0.0
    for n in range(len(code)):
        if phase_of(code[n]) == RUNNING:
            total += tables.demand[n, step_of(code[n]), unit_of(code[n])]
    passed = until - time
    for n in range(len(code)):
        phase = phase_of(code[n])
        if phase == RUNNING:
            unit = unit_of(code[n])
            own = tables.demand[n, step_of(code[n]), unit]
            pace[n] = slow_down(tables.contention[unit], own, total - own)
            passed = min(passed, left[n] * pace[n])
        elif phase in (MOVING, LEAVING):
            pace[n] = 1.0
            passed = min(passed, left[n])
    time += passed
    through = False
    for n in range(len(code)):
        phase = phase_of(code[n])
        if phase not in (RUNNING, MOVING, LEAVING):
            continue
        left[n] -= passed / pace[n]
        if left[n] * pace[n] > TINY_S:
            continue
        left[n] = 0.0
        step, unit = step_of(code[n]), unit_of(code[n])
        if phase == MOVING:
            code[n] = pack(step, unit, READY)
        elif phase == RUNNING and step + 1 < tables.steps[n]:
            code[n] = pack(step + 1, unit, BOUNDARY)
        elif phase == RUNNING and tables.leave[n, unit] > 0:
            code[n], left[n] = pack(step, unit, LEAVING), tables.leave[n, unit]
        else:
            code[n], ended[n], through = pack(0, 0, DONE), time, True
    if through:
        release(tables, code)
    return time


@untyped_loop
def release(tables, code):
    """Let tasks begin whose predecessors have ended."""
    outside = tables.time.shape[2]
    for n in range(len(code)):
        if phase_of(code[n]) == WAITING:
            free = True
            for m in range(len(code)):
                if tables.waits[n, m] and phase_of(code[m]) != DONE:
                    free = False
            if free:
                code[n] = pack(0, outside, BOUNDARY)


@untyped_loop
def finished(code):
    running = 0
    for n in range(len(code)):
        running += phase_of(code[n]) != DONE
    return running == 0


@untyped_loop
def follow(tables, units, order, delays, starts, ended):
    """Run a mapping, first come, first served: a step is there when its data is and its delay has passed.

    units and delays: [task, step]; order: tasks from the one that goes first where two come at once. Fills *starts* and
    *ended*; returns when all is done."""
    tasks, outside = len(order), tables.time.shape[2]
    code, left = np.full(tasks, pack(0, 0, WAITING)), np.zeros(tasks)
    due, pace, busy = np.full(tasks, np.inf), np.ones(tasks), np.zeros(outside, np.int64)
    release(tables, code)
    time = 0.0
    while not finished(code):
        busy[:] = 0
        for n in range(tasks):
            if phase_of(code[n]) == BOUNDARY:
                step = step_of(code[n])
                unit = units[n, step]
                left[n] = tables.move[n, step, unit_of(code[n]), unit]
                code[n] = pack(step, unit, MOVING if left[n] > 0 else READY)
                due[n] = np.inf
            if phase_of(code[n]) == READY and due[n] == np.inf:
                due[n] = time + delays[n, step_of(code[n])]
            if phase_of(code[n]) == RUNNING:
                busy[unit_of(code[n])] += 1
        until = np.inf
        while True:
            first = -1
            for n in order:
                if phase_of(code[n]) != READY:
                    continue
                if due[n] > time + TINY_S:
                    until = min(until, due[n])
                elif busy[unit_of(code[n])] < tables.instances[unit_of(code[n])] and (
                    first < 0 or due[n] < due[first] - TINY_S
                ):
                    first = n
            if first < 0:
                break
            step, unit = step_of(code[first]), unit_of(code[first])
            busy[unit] += 1
            code[first], left[first], due[first] = pack(step, unit, RUNNING), tables.time[first, step, unit], np.inf
            starts[first, step] = time
        time = advance(tables, code, left, ended, pace, time, until)
    return time


@numba.njit(cache=True, error_model="numpy")
def slow_down(row: npt.NDArray[np.float64], own: float, others: float) -> float:
    """How many times longer work of demand *own* takes beside *others*; *row* is one of ``Soc.contention_table``."""
    if own <= 0.0 or others <= 0.0:
        return 1.0
    peak: float = row[1]
    if row[0] == 0.0:
        return max(1.0, (own + others) / peak)
    mrmc_pct, pbw, tbwdc, cbp, rate_n = row[4], row[5], row[6], row[7], row[8]
    floor_pct: float = row[9]
    minor = mrmc_pct * min(others, pbw) / pbw
    plateau = max(0.0, own + cbp - tbwdc) * rate_n
    if own <= row[2]:
        lost = minor
    elif own <= row[3]:
        lost = max(minor, min(plateau, (own + others - tbwdc) * rate_n))
    elif cbp > 0.0:
        lost = plateau * (min(others, cbp) / cbp)
    else:
        lost = plateau
    kept: float = min(100.0, max(floor_pct, 100.0 - lost))
    return 100.0 / kept


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
