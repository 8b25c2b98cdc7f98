"""The weight buffer within compiled loops: when a layer is on chip, and the columns that record the issues.

Twin of ``weft.devices.decoupled``, which scans the resident layers. The docstring of the package ``weft.kernels``
defines the columns P and PM, and X: *before*[j] is P of issue j, *peak*[j + 1] is PM of issue j, and *x* is X.
*before*[n] already holds P of the next issue, so pointers stop there without a test of their own. *size* and *busy* are
a layer's fetch and compute ticks. Each function becomes part of the loop that calls it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels.compiling import inlined

Ints = npt.NDArray[np.int64]

NEVER = -(1 << 62)
"""A tick before every other tick; half of the least int64, so that sums with it do not overflow."""


class StreamLayers(NamedTuple):
    """The layers of all streams, stream after stream."""

    fetch: Ints
    compute: Ints
    offsets: Ints
    """The index where each stream begins, and the number of layers."""


def columns(places: int) -> Ints:
    """Return the columns P and PM without issues, shape (2, places), with room for *places* - 1 issues."""
    pair = np.empty((2, places), np.int64)
    pair[:, 0] = 0, NEVER
    return pair


@inlined
def caught_up(before, pointer, x):
    """Advance *pointer* to the first issue j with P[j] >= X, and return it."""
    while before[pointer] < x:
        pointer += 1
    return pointer


@inlined
def on_chip(before, peak, pointer, highest, channel, size, x):
    """Return when a layer's weights would be on chip if its fetch began at *channel*, and its pointer.

    highest: the peak so far. The pointer is moved only if the buffer may be full, when the exact entry matters.
    """
    end = channel + size
    if highest + x > end:
        while before[pointer] < x:
            pointer += 1
        end = max(end, peak[pointer] + x)
    return end, pointer


@inlined
def prefetchable(array, end, limit):
    """Return the ticks of later layers that the channel can fetch until the array is free.

    end: when the channel is free. limit: the peak so far plus X.
    """
    return max(0, array - max(end, limit))


@inlined
def issued(before, peak, n, array, end, fetched, size, busy):
    """Add issue number *n*, whose weights are on chip at *end*, to the columns.

    Returns when the array is free after it, the ticks fetched so far, and the number of issues.
    """
    array = max(array, end) + busy
    peak[n + 1] = max(peak[n], array - fetched)
    before[n + 1] = fetched + size
    return array, fetched + size, n + 1
