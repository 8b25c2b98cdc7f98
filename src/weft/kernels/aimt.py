"""AI-MT's two-threshold rule, compiled; twin of ``weft.policies.aimt``."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

from weft.kernels.greedy import NEVER

Ints = npt.NDArray[np.int64]


@numba.njit(cache=True)
def weave_aimt(
    fetch: Ints,
    compute: Ints,
    first: Ints,
    buffer: int,
    compute_threshold: int,
    memory_threshold: int,
    work: int,
    chosen: Ints,
) -> int:
    """Issue by thresholds (ticks) until *work* is issued or *chosen* is full; returns the number of issues."""
    streams = len(first) - 1
    position = first[:-1].copy()
    last_issued = np.full(streams, -1, np.int64)
    before = np.empty(len(chosen) + 1, np.int64)
    peak = np.empty(len(chosen) + 1, np.int64)
    done = np.empty(len(chosen) + 1, np.int64)
    before[0], peak[0] = 0, NEVER
    seen = freed = 0
    channel = array = fetched = issued = n = 0
    while issued < work and n < len(chosen):
        while freed < n and done[freed] <= channel:
            freed += 1
        free = buffer - (fetched - before[freed])
        best = _choose(
            fetch, compute, position, last_issued, free, array - channel, compute_threshold, memory_threshold
        )
        at = position[best]
        size, busy = fetch[at], compute[at]
        over = fetched + size - buffer
        while before[seen] < over:
            seen += 1
        channel = max(channel + size, peak[seen] + over)
        array = max(array, channel) + busy
        done[n], chosen[n], last_issued[best] = array, best, n
        n += 1
        peak[n] = max(peak[n - 1], array - fetched)
        fetched += size
        before[n] = fetched
        issued += max(size, busy)
        position[best] = at + 1 if at + 1 < first[best + 1] else first[best]
    return n


@numba.njit(cache=True)
def _choose(fetch, compute, position, last_issued, free, distance, compute_threshold, memory_threshold):
    evict = free < memory_threshold
    rebuild = not evict and distance < compute_threshold
    best, waiting = -1, 0
    for stream in range(len(position)):
        if last_issued[stream] < last_issued[waiting]:
            waiting = stream
        size, busy = fetch[position[stream]], compute[position[stream]]
        if evict:
            if best < 0 or busy < compute[position[best]]:
                best = stream
        elif rebuild:
            if busy > size and (best < 0 or busy - size > compute[position[best]] - fetch[position[best]]):
                best = stream
        elif size >= busy and (best < 0 or last_issued[stream] < last_issued[best]):
            best = stream
    return best if best >= 0 else waiting
