"""Compiled simulation of a SoC from event to event, and lower bounds for the schedules through a state.

The state of a task is one packed number (step, unit, phase), and the seconds that are left of its move or step.
``advance`` goes to the next event; ``follow`` runs a whole mapping. The plain twin is ``weft_map.simulator``.

Prices make activities of different tasks comparable (``weft_map.prices`` finds them); ``estimate`` sums up the priced
ways to the end for a state.

Arguments of the kernels: tables: ``weft_map.problem.Tables``. code: [task], packed state. left_s: [task], seconds left
of its move, or stand-alone seconds of its step. ended_s: [task], when it ended. n, m: tasks; i: a step; p: a price set.
The number of units (tables.time.shape[2]), as the index of a unit, is the outside, where the first runs begin.
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
    """Pack a task's state into one number: 3 bits of phase, 4 of unit (so at most 15 units), the rest for the step."""
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
def advance(tables, code, left_s, ended_s, slow_downs, now_s, until_s):
    """Advance from *now_s* to the next end of a step or move, or to *until_s* if that is earlier; return the new time.

    Changes *code*, *left_s* and *ended_s*; *slow_downs* is scratch memory, [task].
    """
    total_gb_s = 0.0
    for n in range(len(code)):
        if phase_of(code[n]) == RUNNING:
            total_gb_s += tables.demand[n, step_of(code[n]), unit_of(code[n])]
    passed_s = until_s - now_s
    for n in range(len(code)):
        phase = phase_of(code[n])
        if phase == RUNNING:
            unit = unit_of(code[n])
            own_gb_s = tables.demand[n, step_of(code[n]), unit]
            slow_downs[n] = slow_down(tables.contention[unit], own_gb_s, total_gb_s - own_gb_s)
            passed_s = min(passed_s, left_s[n] * slow_downs[n])
        elif phase in (MOVING, LEAVING):
            slow_downs[n] = 1.0
            passed_s = min(passed_s, left_s[n])
    now_s += passed_s
    any_done = False
    for n in range(len(code)):
        phase = phase_of(code[n])
        if phase not in (RUNNING, MOVING, LEAVING):
            continue
        left_s[n] -= passed_s / slow_downs[n]
        if left_s[n] * slow_downs[n] > TINY_S:
            continue
        left_s[n] = 0.0
        step, unit = step_of(code[n]), unit_of(code[n])
        if phase == MOVING:
            code[n] = pack(step, unit, READY)
        elif phase == RUNNING and step + 1 < tables.steps[n]:
            code[n] = pack(step + 1, unit, BOUNDARY)
        elif phase == RUNNING and tables.leave[n, unit] > 0:
            code[n], left_s[n] = pack(step, unit, LEAVING), tables.leave[n, unit]
        else:
            code[n], ended_s[n], any_done = pack(0, 0, DONE), now_s, True
    if any_done:
        release(tables, code)
    return now_s


@untyped_loop
def release(tables, code):
    """Set waiting tasks to BOUNDARY if all tasks that they wait for are done; their first move is from outside."""
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
def follow(tables, unit_of_step, order, delays_s, starts_s, ended_s):
    """Simulate a mapping, first come, first served; return the makespan, and fill *starts_s* and *ended_s*.

    unit_of_step, delays_s, starts_s: [task, step]; a step enters the queue of its unit when it is ready there and its
    delay has passed. order: tasks by priority, highest first, for steps that enter a queue at the same time.
    """
    # due_s: [task], when the delay of its ready step has passed; infinite without one. running: [unit], its steps.
    tasks, outside = len(order), tables.time.shape[2]
    code, left_s = np.full(tasks, pack(0, 0, WAITING)), np.zeros(tasks)
    due_s, slow_downs, running = np.full(tasks, np.inf), np.ones(tasks), np.zeros(outside, np.int64)
    release(tables, code)
    now_s = 0.0
    while not finished(code):
        running[:] = 0
        for n in range(tasks):
            if phase_of(code[n]) == BOUNDARY:
                step = step_of(code[n])
                unit = unit_of_step[n, step]
                left_s[n] = tables.move[n, step, unit_of(code[n]), unit]
                code[n] = pack(step, unit, MOVING if left_s[n] > 0 else READY)
                due_s[n] = np.inf
            if phase_of(code[n]) == READY and due_s[n] == np.inf:
                due_s[n] = now_s + delays_s[n, step_of(code[n])]
            if phase_of(code[n]) == RUNNING:
                running[unit_of(code[n])] += 1
        until_s = np.inf
        while True:
            next_task = -1
            for n in order:
                if phase_of(code[n]) != READY:
                    continue
                if due_s[n] > now_s + TINY_S:
                    until_s = min(until_s, due_s[n])
                elif running[unit_of(code[n])] < tables.instances[unit_of(code[n])] and (
                    next_task < 0 or due_s[n] < due_s[next_task] - TINY_S
                ):
                    next_task = n
            if next_task < 0:
                break
            step, unit = step_of(code[next_task]), unit_of(code[next_task])
            running[unit] += 1
            code[next_task], left_s[next_task] = pack(step, unit, RUNNING), tables.time[next_task, step, unit]
            due_s[next_task] = np.inf
            starts_s[next_task, step] = now_s
        now_s = advance(tables, code, left_s, ended_s, slow_downs, now_s, until_s)
    return now_s


@numba.njit(cache=True, error_model="numpy")
def slow_down(row: npt.NDArray[np.float64], own_gb_s: float, others_gb_s: float) -> float:
    """The slow-down (1 or more) of work that demands *own_gb_s* while all other work demands *others_gb_s* together.

    row: the unit's row of ``Soc.contention_table``; row[0] is 0 for plain sharing of the bandwidth, else PCCS. As in
    PCCS, work is in the minor, normal or intensive region by its own demand; the names are those of ``Pccs``.
    """
    if own_gb_s <= 0.0 or others_gb_s <= 0.0:
        return 1.0
    peak: float = row[1]
    if row[0] == 0.0:
        return max(1.0, (own_gb_s + others_gb_s) / peak)
    normal_bw, intensive_bw, mrmc_pct, pbw = row[2], row[3], row[4], row[5]
    tbwdc, cbp, rate_n = row[6], row[7], row[8]
    floor_pct: float = row[9]
    minor_pct = mrmc_pct * min(others_gb_s, pbw) / pbw
    plateau_pct = max(0.0, own_gb_s + cbp - tbwdc) * rate_n
    if own_gb_s <= normal_bw:
        lost_pct = minor_pct
    elif own_gb_s <= intensive_bw:
        lost_pct = max(minor_pct, min(plateau_pct, (own_gb_s + others_gb_s - tbwdc) * rate_n))
    elif cbp > 0.0:
        lost_pct = plateau_pct * (min(others_gb_s, cbp) / cbp)
    else:
        lost_pct = plateau_pct
    speed_pct: float = min(100.0, max(floor_pct, 100.0 - lost_pct))
    return 100.0 / speed_pct


Floats = npt.NDArray[np.float64]


class ActivityPrices(NamedTuple):
    """Several sets of prices; in each set, activities that can run together cost at most 1 per second in all.

    So the least cost of a task's remaining steps, summed over the tasks, is a lower bound on the seconds left.
    """

    run: Floats
    """[task, step, unit, set]: price of a second of stand-alone work."""
    move: Floats
    """[task, set]: price of a second in which the task moves."""
    cost_to_end: Floats
    """[task, step, from, switches left, set]: least cost of this step and all later ones, coming from unit *from*."""
    energy: Floats
    """[task, step, from]: least energy in joules of this step and all later ones, coming from unit *from*."""


SAME_LATER, NOWHERE_EARLIER = range(2)
"""Dominance rules: which of two states with the same phases the search drops. SAME_LATER: the same state at a later
time, which is certainly no better. NOWHERE_EARLIER: a state in which no task is further ahead, which is rarely wrong.
"""


class SearchRules(NamedTuple):
    """The objective and the limits of a search."""

    throughput: bool
    """Whether to maximise the throughput; otherwise the makespan is minimised."""
    repeats: Floats
    """[task]: its runs, for the throughput."""
    max_switches: int
    """Cap on a task's changes of unit within a run; -1: no cap."""
    deadline_s: float
    """Seconds by which all tasks must have ended; infinite without a limit."""
    budget_j: float
    """Joules that all tasks together may take; infinite without a limit."""
    dominance: int
    """The dominance rule: ``SAME_LATER`` or ``NOWHERE_EARLIER``."""


@untyped_called
def estimate(tables, rules, prices, work, now_s):
    """A lower bound for the values of schedules through the state in *work* at *now_s*; infinite if it breaks a limit.

    *work* is a ``soc_search.Scratch``; this fills its ``costs``: the least cost of each task's remaining steps.
    """
    if rules.budget_j < np.inf and work.spent_j[0] + _energy_to_go(tables, prices, work) > rules.budget_j:
        return np.inf
    sets = prices.move.shape[1]
    for n in range(len(work.code)):
        code, left_s = work.code[n], work.left_s[n]
        phase, step, unit = phase_of(code), step_of(code), unit_of(code)
        switches_left = rules.max_switches - work.switches_used[n] if rules.max_switches >= 0 else 0
        if phase == DONE:
            for p in range(sets):
                work.costs[n, p] = 0.0
        elif phase == LEAVING:
            for p in range(sets):
                work.costs[n, p] = prices.move[n, p] * left_s
        elif phase in (BOUNDARY, HELD, WAITING):
            if phase == WAITING:
                unit = tables.time.shape[2]
            for p in range(sets):
                work.costs[n, p] = prices.cost_to_end[n, step, unit, switches_left, p]
        else:
            move_s, run_s = 0.0, left_s
            if phase != RUNNING:
                move_s, run_s = left_s, tables.time[n, step, unit]
            for p in range(sets):
                work.costs[n, p] = (
                    prices.move[n, p] * move_s
                    + prices.run[n, step, unit, p] * run_s
                    + prices.cost_to_end[n, step + 1, unit, switches_left, p]
                )
    least_s = 0.0  # every set gives a lower bound on the seconds left; the largest is the best
    for p in range(sets):
        cost = 0.0
        for n in range(len(work.code)):
            cost += work.costs[n, p]
        least_s = max(least_s, cost)
    if now_s + least_s > rules.deadline_s:
        return np.inf
    if rules.throughput:
        return _least_negated_throughput(rules, work, now_s, sets)
    return now_s + least_s


@untyped_called
def _energy_to_go(tables, prices, work):
    """The least energy in joules of all steps whose unit is not chosen yet."""
    least_j = 0.0
    for n in range(len(work.code)):
        code = work.code[n]
        phase, step, unit = phase_of(code), step_of(code), unit_of(code)
        if phase == WAITING:
            least_j += prices.energy[n, 0, tables.time.shape[2]]
        elif phase in (BOUNDARY, HELD):
            least_j += prices.energy[n, step, unit]
        elif phase in (MOVING, READY, RUNNING):
            least_j += prices.energy[n, step + 1, unit]
    return least_j


@untyped_called
def _least_negated_throughput(rules, work, now_s, sets):
    """A lower bound on the negated throughput, by dynamic programming over the sets of tasks that end first.

    The k tasks that end first need at least the largest sum of their costs in any price set, and the last of them ends
    no earlier. work.subsets[bits]: an upper bound of the throughput of this set of tasks if it ends before all others;
    bit n stands for task n; -1 if the set holds a task that has ended already.
    """
    tasks = len(work.code)
    done_rate = 0.0
    for n in range(tasks):
        if phase_of(work.code[n]) == DONE:
            done_rate += rules.repeats[n] / max(work.ended_s[n], TINY_S)
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
                rate = rules.repeats[n] / max(now_s + need_s, TINY_S)
                work.subsets[subset] = max(work.subsets[subset], work.subsets[subset ^ (1 << n)] + rate)
    most = 0.0
    for subset in range(1 << tasks):
        most = max(most, work.subsets[subset])
    return -(done_rate + most)


@untyped_loop
def value_of(rules, ended_s):
    """The value to minimise if the tasks end at *ended_s*: the makespan, or the negated throughput."""
    if not rules.throughput:
        return ended_s.max()
    runs_per_s = 0.0
    for n in range(len(ended_s)):
        runs_per_s += rules.repeats[n] / max(ended_s[n], TINY_S)
    return -runs_per_s


@untyped_loop
def shift(tables, rules, unit_of_step, order, delays_s, starts_s, ended_s, best, stride_s):
    """One round of the pattern search over delays: try each delay *stride_s* longer, then *stride_s* shorter.

    Changes that improve the value *best* stay in *delays_s* ([task, step]). Returns the best value; *starts_s* and
    *ended_s* are those of the last trial.
    """
    for n in range(len(tables.steps)):
        for i in range(tables.steps[n]):
            for sign in (1.0, -1.0):
                delay_s = delays_s[n, i]
                delays_s[n, i] = max(0.0, delay_s + sign * stride_s)
                if delays_s[n, i] == delay_s:
                    continue
                follow(tables, unit_of_step, order, delays_s, starts_s, ended_s)
                value = value_of(rules, ended_s)
                if value < best - 1e-9 * abs(best):
                    best = value
                else:
                    delays_s[n, i] = delay_s
    return best
