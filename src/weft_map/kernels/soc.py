"""Compiled simulation of a SoC from event to event, and lower bounds for the schedules through a state.

The state of a task is one packed number (step, unit, phase), and the seconds that are left of its move or step.
``advance`` goes to the next event; ``follow`` runs a whole mapping. The plain twin is ``weft_map.simulator``.

Prices make activities of different tasks comparable (``weft_map.prices`` finds them); ``estimate`` sums up the priced
ways to the end for a state.

Arguments of the kernels: tables: ``weft_map.problem.Tables``. code: packed state per task. left: seconds left of each
task's move, or stand-alone seconds of its step. ended: end of each task. n, m: tasks; i: a step; p: a set of prices.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import untyped_called, untyped_loop

WAITING, BOUNDARY, MOVING, READY, RUNNING, LEAVING, DONE, HELD = range(8)
"""Phases of a task. WAITING: for other tasks to end. BOUNDARY: the unit of the next step is to be chosen at this event;
the packed unit is the one that the task comes from. MOVING: to its unit. READY: on its unit, step not begun. RUNNING.
LEAVING: the SoC, after the last step. DONE. HELD: the search let it wait at an earlier event; it may still choose a
unit to which the move takes no time."""

TINY_S = 1e-13
"""Events closer than this count as one; values that differ by less count as equal."""


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
    """Advance from *time* to the next end of a step or move, or to *until* if that is earlier; return the new time.

    Changes *code*, *left* and *ended*; *pace* is scratch for the slow-down of each task.
    """
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
    any_done = False
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
            code[n], ended[n], any_done = pack(0, 0, DONE), time, True
    if any_done:
        release(tables, code)
    return time


@untyped_loop
def release(tables, code):
    """Set waiting tasks to BOUNDARY if all tasks that they wait for are done; they come from outside."""
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
    """Whether all tasks are done."""
    unfinished = 0
    for n in range(len(code)):
        unfinished += phase_of(code[n]) != DONE
    return unfinished == 0


@untyped_loop
def follow(tables, units, order, delays, starts, ended):
    """Simulate a mapping, first come, first served; return the makespan, and fill *starts* and *ended*.

    units, delays, starts: [task, step]; a step enters the queue of its unit when it is ready there and its delay has
    passed. order: tasks by priority, highest first, for steps that enter a queue at once.
    """
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
    """How many times longer work takes that demands *own* GB/s while others demand *others* GB/s together.

    row: the unit's row of ``Soc.contention_table``; row[0] is 0 for plain sharing of the bandwidth, else PCCS. As in
    PCCS, work is in the minor, normal or intensive region by its own demand.
    """
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
    """Several sets of prices; in each set, activities that can run at once cost at most 1 per second together.

    So the cost of the cheapest way to the end, summed over the tasks, is a lower bound on the seconds left.
    """

    run: Floats
    """[task, step, unit, set]: price of a second of stand-alone work."""
    move: Floats
    """[task, set]: price of a second in which the task moves."""
    togo: Floats
    """[task, step, from, switches left, set]: cost of the cheapest way from before the step to the end."""
    energy: Floats
    """[task, step, from]: the fewest joules from before the step to the end."""


SAME_LATER, NOWHERE_EARLIER = range(2)
"""Which states the search drops in favour of another state with the same phases. SAME_LATER: the same state at a later
time, which is certainly no better. NOWHERE_EARLIER: a state in which no task is further ahead, which is rarely wrong.
"""


class BoundRules(NamedTuple):
    """The objective and the limits of a search."""

    throughput: bool
    """Whether to maximise the throughput; otherwise the makespan is minimised."""
    repeats: Floats
    """[task]: its runs, for the throughput."""
    switches: int
    """How often a task may change its unit within a run; -1: any number of times."""
    deadline: float
    """Seconds by which all tasks must have ended; infinite without a limit."""
    budget: float
    """Joules that all tasks together may take; infinite without a limit."""
    dominance: int
    """Which states are dropped for another state: ``SAME_LATER`` or ``NOWHERE_EARLIER``."""


@untyped_called
def estimate(tables, rules, prices, work, time):
    """A lower bound for the values of schedules through the state in *work* at *time*; infinite if it breaks a limit.

    *work* is a ``soc_search.Scratch``; this fills its ``costs`` with the priced rest of each task.
    """
    if rules.budget < np.inf and work.spent[0] + _energy_to_go(tables, prices, work) > rules.budget:
        return np.inf
    sets = prices.move.shape[1]
    for n in range(len(work.code)):
        code, left = work.code[n], work.left[n]
        phase, step, unit = phase_of(code), step_of(code), unit_of(code)
        switches_left = rules.switches - work.used[n] if rules.switches >= 0 else 0
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
                work.costs[n, p] = prices.togo[n, step, unit, switches_left, p]
        else:
            move_s, run_s = 0.0, left
            if phase != RUNNING:
                move_s, run_s = left, tables.time[n, step, unit]
            for p in range(sets):
                work.costs[n, p] = (
                    prices.move[n, p] * move_s
                    + prices.run[n, step, unit, p] * run_s
                    + prices.togo[n, step + 1, unit, switches_left, p]
                )
    least_s = 0.0  # every set gives a lower bound on the seconds left; the largest is the best
    for p in range(sets):
        cost = 0.0
        for n in range(len(work.code)):
            cost += work.costs[n, p]
        least_s = max(least_s, cost)
    if time + least_s > rules.deadline:
        return np.inf
    if rules.throughput:
        return _least_negated_throughput(rules, work, time, sets)
    return time + least_s


@untyped_called
def _energy_to_go(tables, prices, work):
    """The fewest joules of all steps whose unit is not chosen yet."""
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
    """A lower bound on the negated throughput.

    In whatever order the tasks end, the last task of the first k to end ends no earlier than those k tasks need
    together by the prices. work.subsets[bits]: the most throughput if just this set of tasks ends first, built up by
    adding the task that ends last; -1 if the set holds a task that has ended already.
    """
    tasks = len(work.code)
    done_rate = 0.0
    for n in range(tasks):
        if phase_of(work.code[n]) == DONE:
            done_rate += rules.repeats[n] / max(work.ended[n], TINY_S)
    work.subsets[0] = 0.0
    for subset in range(1, 1 << tasks):
        work.subsets[subset] = -1.0
        need_s = 0.0
        for p in range(sets):
            cost = 0.0
            for n in range(tasks):
                if subset >> n & 1:
                    cost += work.costs[n, p]
            need_s = max(need_s, cost)
        for n in range(tasks):
            if subset >> n & 1 and phase_of(work.code[n]) != DONE and work.subsets[subset ^ (1 << n)] >= 0:
                rate = rules.repeats[n] / max(time + need_s, TINY_S)
                work.subsets[subset] = max(work.subsets[subset], work.subsets[subset ^ (1 << n)] + rate)
    most = 0.0
    for subset in range(1 << tasks):
        most = max(most, work.subsets[subset])
    return -(done_rate + most)


@untyped_loop
def value_of(rules, ended):
    """The value to minimise if the tasks end at *ended*: the makespan, or the negated throughput."""
    if not rules.throughput:
        return ended.max()
    total = 0.0
    for n in range(len(ended)):
        total += rules.repeats[n] / max(ended[n], TINY_S)
    return -total


@untyped_loop
def shift(tables, rules, units, order, delays, starts, ended, best, stride):
    """One round of the pattern search over delays: make each delay *stride* seconds longer, then shorter.

    Changes that improve *best* stay in *delays* ([task, step]). Returns the best value; *starts* and *ended* are those
    of the last trial.
    """
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
