"""The weight buffer within compiled loops: when a layer is on chip, and what an issue adds to the columns.

Twin of ``weft.devices.decoupled``, which scans what is resident. Columns, P and PM, and X are those of the package's
first page: before[j] is P and peak[j + 1] is PM of issue j; before[n] already holds what the next issue will have
before it, so pointers stop there without a test of their own. Each function becomes part of the loop that calls it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import inlined

NEVER = -(1 << 62)
"""Before every tick; half of the least int64, so that sums with it do not overflow."""


def columns(places: int) -> npt.NDArray[np.int64]:
    """P and PM before anything was issued, shape (2, places): room for one issue less."""
    pair = np.empty((2, places), np.int64)
    pair[:, 0] = 0, NEVER
    return pair


@inlined
def caught_up(before, seen, x):
    """The last issue that must have been computed before a layer is on chip: its pointer, moved on from *seen*."""
    while before[seen] < x:
        seen += 1
    return seen


@inlined
def on_chip(before, peak, seen, highest, channel, size, x):
    """When a layer would be on chip, and its pointer; highest: the peak so far.

    Only if the buffer may be full does the exact entry matter.
    """
    end = channel + size
    if highest + x > end:
        while before[seen] < x:
            seen += 1
        end = max(end, peak[seen] + x)
    return end, seen


@inlined
def prefetchable(array, end, limit):
    """Ticks of later layers that the channel can bring in until the array is free; limit: the peak so far plus X."""
    return max(0, array - max(end, limit))


@inlined
def issued(before, peak, n, array, end, fetched, size, busy):
    """Write an issue down; when the array is free after it, what was fetched by then, and how many issues there are."""
    array = max(array, end) + busy
    peak[n + 1] = max(peak[n], array - fetched)
    before[n + 1] = fetched + size
    return array, fetched + size, n + 1
