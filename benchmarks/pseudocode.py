"""The baseline of the scheduler benchmark: Layerweaver's pseudo-code (Figs. 7 and 9), compiled as it is printed.

Every candidate gets a copy of the schedule state with its list of layers in the buffer, and every
fetch walks that list. The formulas are those of ``weft.engine.policies.layerweaver``, so its choices are the
same; only the data structure is the paper's.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(cache=True)
def schedule(fetch, compute, first, compute_bound, buffer, work, chosen):
    """Issue the least idle candidate until *work* is issued or *chosen* is full; returns the number of issues."""
    models = len(first) - 1
    largest = fetch.max()
    window = first[:-1].copy()
    # a state: t_m, t_c, and the list of (size, completion)
    capacity = 1 << 14
    t_m = t_c = length = 0
    sizes, dones = np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    new_m, new_c = np.empty(models, np.int64), np.empty(models, np.int64)
    new_length = np.empty(models, np.int64)
    new_sizes, new_dones = np.empty((models, capacity), np.int64), np.empty((models, capacity), np.int64)
    issued = n = 0
    while issued < work and n < len(chosen):
        for model in range(models):
            at = window[model]
            end = fetch_end(t_m, sizes, dones, length, fetch[at], buffer)
            new_m[model] = end
            new_c[model] = max(t_c, end) + compute[at]
            kept = 0
            for j in range(length):
                if dones[j] > end:
                    new_sizes[model, kept], new_dones[model, kept] = sizes[j], dones[j]
                    kept += 1
            new_sizes[model, kept], new_dones[model, kept] = fetch[at], new_c[model]
            new_length[model] = kept + 1
        best = select(
            t_c, new_m, new_c, new_sizes, new_dones, new_length, fetch, compute, window, compute_bound, buffer, largest
        )
        t_m, t_c, length = new_m[best], new_c[best], new_length[best]
        sizes[:length], dones[:length] = new_sizes[best, :length], new_dones[best, :length]
        at = window[best]
        issued += max(fetch[at], compute[at])
        chosen[n] = best
        n += 1
        window[best] = at + 1 if at + 1 < first[best + 1] else first[best]
    return n


@numba.njit(cache=True)
def fetch_end(t_m, sizes, dones, length, size, buffer):
    """ScheduleMemFetch."""
    remaining = buffer
    for j in range(length):
        remaining -= sizes[j]
    if size <= remaining:
        return t_m + size
    time = t_m + remaining
    need = size - remaining
    for j in range(length):
        time = max(time, dones[j])
        if need <= sizes[j]:
            return time + need
        need -= sizes[j]
        time += sizes[j]
    return time


@numba.njit(cache=True)
def fetchable(t_m, t_c, sizes, dones, length, buffer):
    """How much more can be fetched from t_m to t_c into the state's free space."""
    room = buffer
    for j in range(length):
        room -= sizes[j]
    time, amount = t_m, 0
    for j in range(length):
        if time >= t_c:
            break
        amount += min(room, t_c - time)
        time = max(time + room, dones[j])
        room = sizes[j]
    return max(0, amount)


@numba.njit(cache=True)
def select(t_c, new_m, new_c, new_sizes, new_dones, new_length, fetch, compute, window, compute_bound, buffer, largest):
    """Select: least total idle time, the tie-breaks, both starvation rules."""
    models = len(window)
    total, inherent = np.empty(models, np.int64), np.empty(models, np.bool_)
    compute_idle, memory_idle = np.empty(models, np.int64), np.empty(models, np.int64)
    for model in range(models):
        size, busy = fetch[window[model]], compute[window[model]]
        more = fetchable(new_m[model], t_c, new_sizes[model], new_dones[model], new_length[model], buffer)
        compute_idle[model] = max(0, new_m[model] - t_c)
        memory_idle[model] = max(0, busy - (buffer - size - more)) - max(0, busy - (buffer - size))
        potential = max(0, largest - (new_c[model] - new_m[model]))
        total[model] = compute_idle[model] + memory_idle[model] + potential
        inherent[model] = busy > buffer - size
    wants_weights, wants_space = (compute_idle > 0).all(), (memory_idle > 0).all()
    starved = wants_weights or wants_space
    any_wanted = False
    for model in range(models):
        any_wanted |= compute_bound[model] == wants_weights
    best = -1
    for model in range(models):
        if starved and any_wanted and compute_bound[model] != wants_weights:
            continue
        distance = new_c[model] - new_m[model]
        if (
            best < 0
            or total[model] < total[best]
            or (total[model] == total[best] and inherent[best] and not inherent[model])
            or (
                total[model] == total[best]
                and inherent[model] == inherent[best]
                and distance > new_c[best] - new_m[best]
            )
        ):
            best = model
    return best
