"""How sure an early answer must be: a threshold that sinks while a model's queue presses, and what leaves where.

Arithmetic only: whoever knows the queue says how long it is, and gets the threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.base.errors import InputError

CALM, FULL = 0.25, 0.75
"""Parts of its spare time that a request spends in the queue: at the first the threshold begins to sink, from the
second on it lies at its floor, before requests are late."""
MEMORY = 0.5
"""How long a moment of pressure is felt, as a part of the time a request has to spare."""
WEIGHT = 64.0
"""Samples that what was known beforehand counts for."""
FORGETTING = 0.995
"""What a sample counts for after the next one."""
NOTICED = 0.02
"""Shares that moved less than this are not worth telling."""


@dataclass(frozen=True, slots=True)
class Steering:
    """A threshold between *top*, when a model is calm, and *floor*, when it is pressed; without a floor it stays."""

    top: float = 0.8
    floor: float | None = None

    def __post_init__(self) -> None:
        if not self.top > 0:
            raise InputError(f"exit_threshold = {self.top:g} must be above 0")
        if self.floor is not None and not 0 < self.floor <= self.top:
            raise InputError(f"exit_floor = {self.floor:g} must be above 0 and at most exit_threshold = {self.top:g}")

    def threshold(self, pressure: float) -> float:
        """The threshold at a pressure, which is the part of its spare time that a request would wait."""
        if self.floor is None:
            return self.top
        sunk = min(max((pressure - CALM) / (FULL - CALM), 0.0), 1.0)
        return self.top - (self.top - self.floor) * sunk


@dataclass(eq=False, slots=True)
class Pressure:
    """The pressure on one model, smoothed: it rises and falls over about half the time a request has to spare."""

    value: float = 0.0
    seen_ns: int | None = None

    def feel(self, now_ns: int, queue_ns: int, spare_ns: int) -> float:
        """A request that came now would wait *queue_ns* and has *spare_ns* beyond its own computing."""
        spare_ns = max(1, spare_ns)
        now = min(queue_ns / spare_ns, 2 * FULL)
        since_ns = now_ns - self.seen_ns if self.seen_ns is not None else 0
        share = 1 - math.exp(-since_ns / (MEMORY * spare_ns))
        self.value += share * (now - self.value)
        self.seen_ns = now_ns
        return self.value


class Steered:
    """The threshold of one model as it is now."""

    def __init__(self, steering: Steering) -> None:
        self.steering = steering
        self._pressure = Pressure()
        self._spare_ns = 1

    def feel(self, now_ns: int, queue_ns: int, spare_ns: int) -> None:
        """A request that came now would wait so long, and has so much time beyond its own computing."""
        self._spare_ns = spare_ns
        self._pressure.feel(now_ns, queue_ns, spare_ns)

    def relax(self, now_ns: int) -> None:
        """The model has no queue: the pressure falls."""
        self._pressure.feel(now_ns, 0, self._spare_ns)

    @property
    def threshold(self) -> float:
        """How sure answers to requests that state no threshold must be now."""
        return self.steering.threshold(self._pressure.value)


class ExitShares:
    """Which part of the samples leaves at each exit, learned from those that left, the last ones most."""

    def __init__(self, expected: Sequence[float]) -> None:
        self._counts = [each * WEIGHT for each in expected]
        self.told = tuple(expected)
        """The shares as they were when they last moved by more than is noticed."""

    def left(self, exit_index: int) -> bool:
        """A sample left; whether that moved the shares."""
        self._counts = [each * FORGETTING for each in self._counts]
        self._counts[exit_index] += 1
        total = sum(self._counts)
        now = tuple([each / total for each in self._counts])
        if max(abs(new - old) for new, old in zip(now, self.told, strict=True)) < NOTICED:
            return False
        self.told = now
        return True
