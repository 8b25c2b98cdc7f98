"""Repeats runs that other machines on the same hardware disturbed.

A run says nothing about weft if others took its processors (time that Linux calls stolen), or if the same piece of work
took far longer than its minimum before or after the run (others on the same cores). Repetitions are counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

STOLEN = 0.05
"""Share of the processors' time that others may take during a run; on one that does not tell it, nothing is stolen."""
SLOWER = 1.5
"""How much longer than the least time ever a piece of work may take where a run counts."""
PATIENCE_S = 3600.0
"""How long runs are done again, all in all; after that they count as they are."""
LOOK_S, PIECES_S, FIRST_S = 0.5, 0.3, 3.0

Result = TypeVar("Result")


class Undisturbed:
    """Calls what it is given until nobody disturbed that, or its patience is at an end."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.again = 0
        """How often something was done again."""
        self.counted = 0
        """How many disturbed ones counted in the end."""
        self._until_s = time.monotonic() + patience_s
        self._least_s = piece_s(FIRST_S)[0]

    def __call__(self, run: Callable[[], Result]) -> Result:
        while True:
            self._await_calm()
            before = processor_ticks()
            result = run()
            if stolen_since(before) <= STOLEN and self._at_full_speed():
                return result
            if time.monotonic() > self._until_s:
                self.counted += 1
                return result
            self.again += 1

    def _await_calm(self) -> None:
        while time.monotonic() < self._until_s:
            before = processor_ticks()
            time.sleep(LOOK_S)
            if stolen_since(before) <= STOLEN and self._at_full_speed():
                return

    def _at_full_speed(self) -> bool:
        least_s, median_s, _ = piece_s(PIECES_S)
        self._least_s = min(self._least_s, least_s)
        return median_s <= SLOWER * self._least_s


def piece_s(seconds: float) -> list[float]:
    """Seconds of the same piece of work, over and over for a while: least, median and most."""
    found, until_s = [], time.monotonic() + seconds
    while time.monotonic() < until_s:
        began = time.perf_counter()
        sum(n * n for n in range(100_000))
        found.append(time.perf_counter() - began)
    return [min(found), statistics.median(found), max(found)]


def processor_ticks() -> tuple[int, int]:
    """Time of all processors since the start that others took, and all there was."""
    try:
        ticks = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0, 0
    return ticks[7], sum(ticks)


def stolen_since(before: tuple[int, int]) -> float:
    """The share of the processors' time that others took."""
    stolen, every = (now - then for now, then in zip(processor_ticks(), before, strict=True))
    return stolen / every if every else 0.0
