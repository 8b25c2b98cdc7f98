"""What models ask of machines: per request (``Need``), and altogether (``Demand``). Values only; see ``needs``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from weft.base.errors import PlacingError


@dataclass(frozen=True, slots=True)
class Need:
    """What one request of a model takes of a machine of one kind."""

    compute_s: float
    memory_s: float
    """Time of the memory channel, which runs beside computing as far as the kind's overlap goes."""
    other_s: float = 0.0
    """Launches and the host: time in which nothing else runs."""
    weight_bytes: int = 0
    activation_bytes: int = 0
    segment_s: float = 0.0
    """The longest piece that cannot be interrupted: what a neighbour waits for."""
    alone_s: float = 0.0
    """From arrival to answer on an idle machine."""

    def __post_init__(self) -> None:
        times = (self.compute_s, self.memory_s, self.other_s, self.segment_s, self.alone_s)
        if not all(math.isfinite(time) and time >= 0 for time in times) or self.busy_s == 0:
            raise PlacingError(f"{self} has times that are none, or no busy time at all; check its profile")

    @property
    def busy_s(self) -> float:
        """What it takes where nothing overlaps."""
        return self.compute_s + self.memory_s + self.other_s

    @property
    def resident_bytes(self) -> int:
        """What it holds of a machine's memory as long as it is placed there."""
        return self.weight_bytes + self.activation_bytes

    def at_speed(self, speed: float) -> Need:
        """The same on a machine that is *speed* times as fast."""
        times = ("compute_s", "memory_s", "other_s", "segment_s", "alone_s")
        return replace(self, **{key: getattr(self, key) / speed for key in times})


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """A model with how often it is asked, by when it must answer, and where it may go."""

    model: str
    rate: float
    """Requests per second."""
    deadline_s: float
    """From arrival to answer; infinite where nothing is late."""
    needs: Mapping[str, Need]
    """Kind of machine -> what a request takes there; kinds that are missing cannot run it."""
    replicas: int = 1
    """On how many machines it is at least..."""
    apart: Literal["machine", "zone"] = "machine"
    """... and whether these lie in zones of their own."""
    machine: str | None = None
    """The only machine that may have it."""
    zone: str | None = None
    """The only zone that may have it."""
    cv: float = 1.0
    """Standard deviation of the gaps between requests over their mean; 1: independent arrivals."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise PlacingError(f"{self.model}: rate = {self.rate:g} must be above 0; leave out models nobody asks for")
        if not self.deadline_s > 0:
            raise PlacingError(f"{self.model}: deadline_s = {self.deadline_s:g} must be above 0")
        if not self.needs:
            raise PlacingError(f"{self.model}: no kind of machine can run it; give one of them a profile of it")

    def scaled(self, factor: float) -> Demand:
        """The same model asked *factor* times as often."""
        return replace(self, rate=self.rate * factor)
