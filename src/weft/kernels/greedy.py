"""Layerweaver's greedy choice, compiled; twin of ``weft.policies.layerweaver``.

Two loops: one for any number of streams, and one for two streams, the common case, whose candidates
stay in registers. Both rank a candidate by twice its idle ticks, plus one for a layer that waits for
buffer space wherever it is placed; equal ranks go to the larger decoupling distance.
"""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NEVER = -(1 << 62)


@numba.njit(cache=True)
def weave_greedy(
    fetch: Ints, compute: Ints, first: Ints, compute_bound: Bools, buffer: int, work: int, chosen: Ints
) -> int:
    """Issue the least idle candidate until *work* is issued or *chosen* is full; returns the number of issues.

    before[j] is P and peak[j + 1] is PM of issue j (see the package); before[n] already holds what the
    next issue will have before it, so the pointers stop there without a test of their own.
    """
    if len(first) == 3:
        return _weave_two(fetch, compute, first, compute_bound, buffer, work, chosen)
    streams = len(first) - 1
    largest = fetch.max()
    position = first[:-1].copy()
    sizes, busies = fetch[position], compute[position]
    seen = np.zeros(streams, np.int64)
    before = np.empty(len(chosen) + 1, np.int64)
    peak = np.empty(len(chosen) + 1, np.int64)
    before[0], peak[0] = 0, NEVER
    channel = array = fetched = issued = n = 0
    highest = NEVER
    while issued < work and n < len(chosen):
        best, best_end, least, distance = 0, 0, 1 << 62, 0
        wants_weights = wants_space = True
        for stream in range(streams):
            size, busy = sizes[stream], busies[stream]
            over = fetched - buffer + size
            end = channel + size
            limit = highest + over
            if limit > end:  # the buffer may be full: only then does the exact entry matter
                j = seen[stream]
                while before[j] < over:
                    j += 1
                seen[stream] = j
                end = max(end, peak[j] + over)
            rank, compute_idle, memory_idle, ahead = _rank(size, busy, end, limit, array, buffer, largest)
            wants_weights &= compute_idle > 0
            wants_space &= memory_idle > 0
            if rank < least or (rank == least and ahead > distance):
                best, best_end, least, distance = stream, end, rank, ahead
        if wants_weights or wants_space:
            best, best_end = _unstarve(
                wants_weights, best, best_end, sizes, busies, compute_bound,
                seen, peak, channel, array, fetched, highest, buffer, largest,
            )  # fmt: skip
        size, busy = sizes[best], busies[best]
        channel = best_end
        array = max(array, channel) + busy
        highest = max(highest, array - fetched)
        chosen[n] = best
        n += 1
        fetched += size
        before[n], peak[n] = fetched, highest
        issued += max(size, busy)
        at = position[best] + 1
        if at == first[best + 1]:
            at = first[best]
        position[best], sizes[best], busies[best] = at, fetch[at], compute[at]
    return n


@numba.njit(cache=True, inline="always")
def _rank(size, busy, end, limit, array, buffer, largest):
    """Rank of a candidate, the compute and the memory idle time it causes, and the distance after it."""
    late = end - array
    compute_idle = max(0, late)
    ahead = max(0, -late) + busy
    room = buffer - size
    prefetch = max(0, array - max(end, limit))
    memory_idle = max(0, busy - room + prefetch) - max(0, busy - room)
    rank = 2 * (compute_idle + memory_idle + max(0, largest - ahead)) + (busy > room)
    return rank, compute_idle, memory_idle, ahead


@numba.njit(cache=True)
def _unstarve(
    wanted, best, best_end, sizes, busies, compute_bound,
    seen, peak, channel, array, fetched, highest, buffer, largest,
):  # fmt: skip
    """The starvation rules: the best candidate of the compute-bound (or else memory-bound) models, if there is one.

    Rare, so the candidates are priced again rather than kept.
    """
    found = False
    least = distance = 0
    for stream in range(len(sizes)):
        if compute_bound[stream] != wanted:
            continue
        size, busy = sizes[stream], busies[stream]
        over = fetched - buffer + size
        end = channel + size
        limit = highest + over
        if limit > end:
            end = max(end, peak[seen[stream]] + over)
        rank, _, _, ahead = _rank(size, busy, end, limit, array, buffer, largest)
        if not found or rank < least or (rank == least and ahead > distance):
            found = True
            best, best_end, least, distance = stream, end, rank, ahead
    return best, best_end


@numba.njit(cache=True)
def _weave_two(
    fetch: Ints, compute: Ints, first: Ints, compute_bound: Bools, buffer: int, work: int, chosen: Ints
) -> int:
    """The loop above for two streams."""
    largest = fetch.max()
    before = np.empty(len(chosen) + 1, np.int64)
    peak = np.empty(len(chosen) + 1, np.int64)
    before[0], peak[0] = 0, NEVER
    begin_a, begin_b, stop_b = first[0], first[1], first[2]
    at_a, at_b = begin_a, begin_b
    size_a, busy_a, size_b, busy_b = fetch[at_a], compute[at_a], fetch[at_b], compute[at_b]
    heavy_a, heavy_b = compute_bound[0], compute_bound[1]
    seen_a = seen_b = 0
    channel = array = fetched = issued = n = 0
    highest = NEVER
    while issued < work and n < len(chosen):
        over = fetched - buffer + size_a
        end_a = channel + size_a
        limit = highest + over
        if limit > end_a:
            while before[seen_a] < over:
                seen_a += 1
            end_a = max(end_a, peak[seen_a] + over)
        rank_a, compute_idle_a, memory_idle_a, ahead_a = _rank(size_a, busy_a, end_a, limit, array, buffer, largest)
        over = fetched - buffer + size_b
        end_b = channel + size_b
        limit = highest + over
        if limit > end_b:
            while before[seen_b] < over:
                seen_b += 1
            end_b = max(end_b, peak[seen_b] + over)
        rank_b, compute_idle_b, memory_idle_b, ahead_b = _rank(size_b, busy_b, end_b, limit, array, buffer, largest)

        second = rank_b < rank_a or (rank_b == rank_a and ahead_b > ahead_a)
        if heavy_a != heavy_b:
            wants_weights = compute_idle_a > 0 and compute_idle_b > 0
            wants_space = memory_idle_a > 0 and memory_idle_b > 0
            if wants_weights or wants_space:
                second = heavy_b == wants_weights
        if second:
            size, busy, channel = size_b, busy_b, end_b
            at_b += 1
            if at_b == stop_b:
                at_b = begin_b
            size_b, busy_b = fetch[at_b], compute[at_b]
            chosen[n] = 1
        else:
            size, busy, channel = size_a, busy_a, end_a
            at_a += 1
            if at_a == begin_b:
                at_a = begin_a
            size_a, busy_a = fetch[at_a], compute[at_a]
            chosen[n] = 0
        array = max(array, channel) + busy
        highest = max(highest, array - fetched)
        n += 1
        fetched += size
        before[n], peak[n] = fetched, highest
        issued += max(size, busy)
    return n
