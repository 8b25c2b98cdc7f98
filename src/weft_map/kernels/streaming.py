"""Reading memory at a chosen intensity, for measurements of contention; releases the interpreter's lock."""

from __future__ import annotations

import numba
import numpy as np
import numpy.typing as npt

BLOCK = 64
"""Doubles (512 bytes) that are read before each piece of arithmetic."""


@numba.njit(cache=True, nogil=True, fastmath=True)
def _add_up(data: npt.NDArray[np.float64], first: int, stop: int) -> float:
    total = 0.0
    for index in range(first, stop):  # with fastmath the sum may be reordered, so the loop is vectorised
        total += data[index]
    return total


@numba.njit(cache=True, nogil=True)
def stream(data: npt.NDArray[np.float64], first: int, blocks: int, steps: int) -> float:
    """Read *blocks* blocks of ``BLOCK`` doubles from index *first* on, and do *steps* multiply-adds after each block.

    Returns a number that depends on every read and operation, so that the compiler cannot leave them out.
    """
    total = 0.0
    for block in range(blocks):
        start = first + block * BLOCK
        total += _add_up(data, start, start + BLOCK)
        for _ in range(steps):
            total = total * 0.5 + 1.0
    return total
