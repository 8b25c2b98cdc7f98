"""The times of a given order of issues; twin of ``weft.devices.decoupled.issue``."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@numba.njit(cache=True)
def replay(fetch: Ints, compute: Ints, first: Ints, buffer: int, chosen: Ints, times: Ints) -> None:
    """Fill *times*, shape (issues, 4): fetch start, fetch end, compute start, compute end.

    chosen: stream of each issue, in order; every fetch starts as soon as the channel is free.
    """
    issues = len(chosen)
    position = first[:-1].copy()
    fetched_before = np.empty(issues + 1, np.int64)
    peak = np.empty(issues + 1, np.int64)
    channel = array = fetched = 0
    seen = 0
    for n in range(issues):
        stream = chosen[n]
        at = position[stream]
        size = fetch[at]
        over = fetched + size - buffer
        while seen < n and fetched_before[seen] < over:
            seen += 1
        end = channel + size
        if seen > 0:
            end = max(end, peak[seen - 1] + over)
        start = max(array, end)
        times[n, 0] = channel
        times[n, 1] = end
        times[n, 2] = start
        channel, array = end, start + compute[at]
        times[n, 3] = array
        fetched_before[n] = fetched
        peak[n] = array - fetched if n == 0 else max(peak[n - 1], array - fetched)
        fetched += size
        position[stream] = at + 1 if at + 1 < first[stream + 1] else first[stream]
