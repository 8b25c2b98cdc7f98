"""The largest of something that still holds, between one that does and one that does not."""

from __future__ import annotations

from collections.abc import Callable

STEP = 1.15
"""By which it is raised or lowered until one holds and one does not."""
TOLERANCE = 0.04
"""Width of the last bracket, relative."""


def largest(holds: Callable[[float], bool], begin: float) -> float:
    """The middle of the last bracket; the search begins at *begin*."""
    low = high = begin
    if holds(begin):
        while holds(high := high * STEP):
            low = high
    else:
        while not holds(low := low / STEP):
            high = low
    while high > low * (1 + TOLERANCE):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return (low * high) ** 0.5
