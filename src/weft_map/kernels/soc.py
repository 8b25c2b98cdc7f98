"""Events on a SoC between decisions, compiled: time passes until a step or a move ends.

The phase of every task is one number (step, unit, phase, packed); beside it stands how much of its move or of its step
is left. ``advance`` goes to the next event, ``follow`` runs a whole mapping in which no step waits without need.
The plain twin is ``weft_map.simulator``.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import untyped_loop

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
