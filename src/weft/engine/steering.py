"""Exit thresholds under load: the confidence that an early answer must have sinks while a model's queue is long.

Arithmetic only: the caller measures the queue and gets the threshold. ``ExitShares`` learns how many samples leave at
each exit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.base.errors import InputError

CALM, FULL = 0.25, 0.75
"""Waiting time as a part of a request's slack: the threshold begins to sink at the first, and reaches its floor at the
second, which is below 1 so that requests leave early before they are late."""
MEMORY = 0.5
"""Time constant of the smoothed pressure, as a part of a request's slack: shorter follows every burst, longer reacts
only after requests are late."""
WEIGHT = 64.0
"""Samples that the expected exit shares count for, so that the first few observations do not overturn them."""
FORGETTING = 0.995
"""Factor on the weight of earlier samples with each new one: about the last 200 samples count."""
NOTICED = 0.02
"""Least change of a share that is published: each one makes predictions be computed again."""


@dataclass(frozen=True, slots=True)
class Steering:
    """A threshold between *top* without load and *floor* under full load; constant without a floor."""

    top: float = 0.8
    floor: float | None = None

    def __post_init__(self) -> None:
        if not self.top > 0:
            raise InputError(f"exit_threshold = {self.top:g} must be above 0")
        if self.floor is not None and not 0 < self.floor <= self.top:
            raise InputError(f"exit_floor = {self.floor:g} must be above 0 and at most exit_threshold = {self.top:g}")

    def threshold(self, pressure: float) -> float:
        """Return the threshold at a pressure: a request's waiting time over its slack."""
        if self.floor is None:
            return self.top
        sunk = min(max((pressure - CALM) / (FULL - CALM), 0.0), 1.0)
        return self.top - (self.top - self.floor) * sunk


@dataclass(eq=False, slots=True)
class Pressure:
    """The load of one model, as waiting time over slack, smoothed over half the slack of a request."""

    value: float = 0.0
    seen_ns: int | None = None

    def feel(self, now_ns: int, queue_ns: int, spare_ns: int) -> float:
        """Update and return the pressure: a request that came now would wait *queue_ns* and has *spare_ns* of slack."""
        spare_ns = max(1, spare_ns)
        now = min(queue_ns / spare_ns, 2 * FULL)
        since_ns = now_ns - self.seen_ns if self.seen_ns is not None else 0
        share = 1 - math.exp(-since_ns / (MEMORY * spare_ns))
        self.value += share * (now - self.value)
        self.seen_ns = now_ns
        return self.value


class Steered:
    """The current exit threshold of one model."""

    def __init__(self, steering: Steering) -> None:
        self.steering = steering
        self._pressure = Pressure()
        self._spare_ns = 1

    def feel(self, now_ns: int, queue_ns: int, spare_ns: int) -> None:
        """Update the pressure: a request that came now would wait *queue_ns* and has *spare_ns* of slack."""
        self._spare_ns = spare_ns
        self._pressure.feel(now_ns, queue_ns, spare_ns)

    def relax(self, now_ns: int) -> None:
        """Let the pressure fall while the model has no queue."""
        self._pressure.feel(now_ns, 0, self._spare_ns)

    @property
    def threshold(self) -> float:
        """The threshold for requests that state none themselves."""
        return self.steering.threshold(self._pressure.value)


class ExitShares:
    """The share of samples that leaves at each exit: an exponentially weighted count."""

    def __init__(self, expected: Sequence[float]) -> None:
        self._counts = [share * WEIGHT for share in expected]
        self.published = tuple(expected)
        """The shares when they last changed by at least ``NOTICED``."""

    def left(self, exit_index: int) -> bool:
        """Count a sample that left at an exit; return whether that changed ``published``."""
        self._counts = [count * FORGETTING for count in self._counts]
        self._counts[exit_index] += 1
        total = sum(self._counts)
        shares = tuple([count / total for count in self._counts])
        if max(abs(new - old) for new, old in zip(shares, self.published, strict=True)) < NOTICED:
            return False
        self.published = shares
        return True
