"""Resources that models need: per request (``Need``), and with their rates (``Demand``). Values only; see ``needs``."""

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
    """Time of the memory channel; a part of it, the kind's overlap, is hidden behind computing."""
    other_s: float = 0.0
    """Kernel launches and the host: time that overlaps with nothing."""
    weight_bytes: int = 0
    activation_bytes: int = 0
    segment_s: float = 0.0
    """The longest piece that cannot be interrupted; a request of another model may wait this long."""
    alone_s: float = 0.0
    """From arrival to answer on an idle machine."""

    def __post_init__(self) -> None:
        times = (self.compute_s, self.memory_s, self.other_s, self.segment_s, self.alone_s)
        if not all(math.isfinite(time) and time >= 0 for time in times) or self.busy_s == 0:
            raise PlacingError(f"{self} has times that are none, or no busy time at all; check its profile")

    @property
    def busy_s(self) -> float:
        """Its total time without overlap."""
        return self.compute_s + self.memory_s + self.other_s

    @property
    def resident_bytes(self) -> int:
        """Memory that it occupies on a machine as long as it is placed there."""
        return self.weight_bytes + self.activation_bytes

    def at_speed(self, speed: float) -> Need:
        """The same on a machine that is *speed* times as fast."""
        times = ("compute_s", "memory_s", "other_s", "segment_s", "alone_s")
        return replace(self, **{key: getattr(self, key) / speed for key in times})


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """A model: its request rate, its deadline, its need per kind of machine, and the rules for its machines."""

    model: str
    rate: float
    """Requests per second."""
    deadline_s: float
    """Longest time from arrival to answer; infinite if no request is ever late."""
    needs: Mapping[str, Need]
    """Kind of machine -> need of one request; other kinds cannot run the model."""
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
        """Return the same model with *factor* times the rate."""
        return replace(self, rate=self.rate * factor)
