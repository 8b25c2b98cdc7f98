"""Exit thresholds under load: while a model's queue is long, less confidence is required of an early answer.

Arithmetic only: the caller measures the queue and gets the threshold. ``ExitShares`` learns how many samples leave at
each exit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from weft.base.errors import InputError

CALM_PRESSURE, FULL_PRESSURE = 0.25, 0.75
"""Pressure (waiting time over slack) at which the threshold begins to sink, and at which it reaches its floor; below 1,
so that requests leave early before they are late."""
MEMORY = 0.5
"""Time constant of the smoothed pressure, as a part of a request's slack: a shorter one follows every burst, a longer
one reacts only after requests are late."""
WEIGHT = 64.0
"""Number of samples that the initial exit shares are worth, so that the first few observations do not overturn them."""
FORGETTING = 0.995
"""Factor on the weight of all earlier samples whenever a new sample is counted: about the last 200 samples count."""
LEAST_CHANGE = 0.02
"""Least change of an exit's share for which shares are published: then predictions have to be computed again."""


@dataclass(frozen=True, slots=True)
class Steering:
    """The rule for an exit threshold: *top* without load, *floor* under full load; None as *floor*: always *top*."""

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
        load = min(max((pressure - CALM_PRESSURE) / (FULL_PRESSURE - CALM_PRESSURE), 0.0), 1.0)
        return self.top - (self.top - self.floor) * load


class Steered:
    """The current exit threshold of one model, by its load."""

    def __init__(self, steering: Steering) -> None:
        self.steering = steering
        self.pressure = 0.0
        """The load: waiting time over slack, exponentially smoothed over half the slack of a request."""
        self._updated_ns: int | None = None
        self._spare_ns = 1

    def update(self, now_ns: int, queue_ns: int, spare_ns: int) -> None:
        """Update the pressure: a request that came now would wait *queue_ns* and has *spare_ns* of slack."""
        self._spare_ns = max(1, spare_ns)
        observed = min(queue_ns / self._spare_ns, 2 * FULL_PRESSURE)  # a larger value would only take longer to decay
        since_ns = now_ns - self._updated_ns if self._updated_ns is not None else 0
        weight = 1 - math.exp(-since_ns / (MEMORY * self._spare_ns))
        self.pressure += weight * (observed - self.pressure)
        self._updated_ns = now_ns

    def relax(self, now_ns: int) -> None:
        """Let the pressure decay: the model has no queue now."""
        self.update(now_ns, 0, self._spare_ns)

    @property
    def threshold(self) -> float:
        """The threshold for requests that do not state their own."""
        return self.steering.threshold(self.pressure)


class ExitShares:
    """The share of samples that leaves at each exit: an exponentially weighted count."""

    def __init__(self, expected: Sequence[float]) -> None:
        """expected: the initial shares, from the plan or the model's file; the end of the network is the last exit."""
        self._counts = [share * WEIGHT for share in expected]
        self.published = tuple(expected)
        """The shares when they last changed by at least ``LEAST_CHANGE``."""

    def count_exit(self, exit_index: int) -> bool:
        """Count a sample that left at an exit; return whether ``published`` changed."""
        self._counts = [count * FORGETTING for count in self._counts]
        self._counts[exit_index] += 1
        total = sum(self._counts)
        shares = tuple([count / total for count in self._counts])
        if max(abs(new - old) for new, old in zip(shares, self.published, strict=True)) < LEAST_CHANGE:
            return False
        self.published = shares
        return True
