"""Resources that models need: per request (``Need``), and with their rates (``Demand``). Values only; see ``needs``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from weft.base.errors import PlacingError
from weft.devices.costs.program import Clock, Program


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


# Cap on segments per request. More: simulations take longer in proportion. Fewer: segments are longer than on the real
# machine, and urgent requests wait longer for them.
MOST_SEGMENTS = 32
LONGEST_S = 600.0
"""Cap on the slack of a simulated request: files allow deadlines whose nanoseconds do not fit into 64 bits, and no
simulation runs that long."""
AHEAD = 2
"""How many of its longest pieces a machine is given ahead."""

CLOCK = Clock.nanoseconds()


class Pieces(NamedTuple):
    """A request in weft's simulator: equal segments that use a compute array and a memory channel, in ticks.

    A machine that overlaps a share of its two resources is simulated as one whose channel and array run side by side
    without loss, and each model takes of them the two loads of ``problem``: together these fill such a machine exactly
    when they fill the real one. A request can wait for as long as it could there: its deadline is what it takes alone
    in the simulation, and its slack.
    """

    segments: int
    array: int
    """What each takes of the array..."""
    channel: int
    """... and of the channel before."""

    @property
    def alone(self) -> int:
        """What all of them take on an idle machine."""
        return self.channel + (self.segments - 1) * max(self.channel, self.array) + self.array

    def due(self, slack_s: float) -> int:
        """The deadline of a request that could wait so long on the real machine; at least a tick."""
        return max(1, self.alone + CLOCK.ticks(min(slack_s, LONGEST_S)))

    def program(self, model: str) -> Program:
        names = tuple(f"{number}" for number in range(self.segments))
        channel = (self.channel,) * self.segments
        return Program(model, names, channel, (self.array,) * self.segments, channel)


def pieces_of(need: Need, overlap: float) -> Pieces:
    """Divide a request into as many pieces as it has segments, for a machine with this *overlap*."""
    apart = 1 - overlap
    count = int(min(MOST_SEGMENTS, max(1, np.ceil(need.alone_s / need.segment_s - 1e-9)))) if need.segment_s else 1
    array = max(1, CLOCK.ticks((need.compute_s + apart * need.memory_s + need.other_s) / count))
    channel = max(1, CLOCK.ticks((need.memory_s + apart * need.compute_s + need.other_s) / count))
    return Pieces(count, array, channel)


def buffer_of(programs: Iterable[Program]) -> int:
    """The weight buffer of a machine with these programs, which limits what is queued ahead."""
    return AHEAD * max((program.largest_fetch for program in programs), default=1)
