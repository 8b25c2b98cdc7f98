"""Bisection: the largest value for which a condition still holds, between a value that passes and one that fails."""

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
