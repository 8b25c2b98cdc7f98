"""Shares of one GPU, what work is like, and how fast everybody goes who runs at the same time.

A GPU's multiprocessors (SMs) can be cut in two, and each side runs work as if it were a smaller GPU; or models run
beside each other on streams of the whole. What they take from each other: on the same SMs the kernels of one wait for
those of the other, about one for one, as far as both fill the SMs; on any SMs they share the memory, and the way
kernels are started. How much of each was fitted to pairs measured on an H200 (``weft.devices.gpu_pairs``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field, model_validator

from weft.devices.seen_speeds import HOPE, Pair, SeenSpeeds

Speed = Annotated[float, Field(gt=0, le=4, allow_inf_nan=False)]
Bound = Literal["compute", "memory", "launches"]

COMPUTE_FILL = 0.5
"""Work that fills more of the SMs than this is bound by computing."""
MEMORY_TRAFFIC = 0.25
"""Other work that takes more of the memory's bandwidth than this is bound by memory; what is left, by launches."""
MOST_KEPT = 4096
"""Sets of work on lanes whose speeds are remembered."""


class Share(NamedTuple):
    """A lane of a GPU: some of its SMs, the first of them at *first*, with high or low priority."""

    first: int
    sms: int
    high: bool = False

    def within(self, other: Share) -> float:
        """The part of its SMs that another share has, too."""
        both = min(self.first + self.sms, other.first + other.sms) - max(self.first, other.first)
        return max(0, both) / self.sms

    def __str__(self) -> str:
        return f"{self.sms}{' high' * self.high}"


class GpuLikeness(BaseModel, extra="forbid", frozen=True):
    """What work is like, by what was measured of it alone."""

    speeds: Annotated[dict[int, Speed], Field(min_length=1)]
    """SMs of a share -> its speed there, over that on the whole GPU."""
    kernel_us: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    """Mean length of its kernels on the whole GPU."""
    memory: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """The part of the memory's bandwidth that it takes."""

    @model_validator(mode="after")
    def _sms(self) -> GpuLikeness:
        if any(sms < 1 for sms in self.speeds):
            raise ValueError("speeds has a share without multiprocessors")
        return self

    def __hash__(self) -> int:
        """Cheap: it is in the keys of caches."""
        return hash((self.kernel_us, self.memory))

    def speed(self, sms: int, whole: int) -> float:
        """Alone on a share: as measured, or as follows from how much of the GPU it fills."""
        if sms >= whole:
            return 1.0
        if sms in self.speeds:
            return self.speeds[sms]
        return 1.0 / (1.0 + self.fill(whole) * (whole / sms - 1.0))

    def fill(self, whole: int) -> float:
        """The part of the SMs that it keeps busy: 1 if half of them take it twice the time, 0 if they do as well."""
        fills = [(1.0 / speed - 1.0) / (whole / sms - 1.0) for sms, speed in self.speeds.items() if sms < whole]
        return min(1.0, max(0.0, sum(fills) / len(fills))) if fills else 1.0

    def bound(self, whole: int) -> Bound:
        """What it is bound by."""
        if self.fill(whole) > COMPUTE_FILL:
            return "compute"
        return "memory" if self.memory > MEMORY_TRAFFIC else "launches"


class Contention(BaseModel, extra="forbid", frozen=True):
    """What running together costs, as it was fitted: each a part of the time that work takes alone."""

    beside: float = 0.0885
    """For anybody beside anybody."""
    turns: float = 0.0955
    """Waiting for a kernel of the other on the same SMs, where neither fills them."""
    filled: float = 0.7769
    """The same where both do, in addition."""
    order: float = 1.1728
    """How far the lengths of kernels decide who waits more."""
    favour: float = 0.3424
    """By which part of its waiting one of high priority waits less for one of low, which waits so much more."""
    memory: float = 0.6175
    """The memory: times what the other takes of it, and times what one takes oneself and ``reach``."""
    reach: float = 0.1787


@dataclass(frozen=True, eq=False)
class Shares:
    """The lanes of a GPU. Work is of a kind, which is the number of its program."""

    sms: int
    lanes: tuple[Share, ...]
    kinds: Sequence[GpuLikeness]
    """A server appends to it as models are loaded."""
    contention: Contention
    bodies: Sequence[int] = ()
    """Kind -> the number of who has it: one at a time runs of each body; empty where every stream has its own."""
    tags: Sequence[int] = ()
    """Kind -> a number that only kinds have which go as fast as it does; empty where each kind has its own."""
    seen: SeenSpeeds = field(default_factory=SeenSpeeds)
    """What was seen of bodies that ran together."""
    _kept: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = field(default_factory=dict, init=False)
    """Speeds by lanes and tags."""

    def body(self, stream: int, kind: int) -> int:
        """The body of work of a stream."""
        return self.bodies[kind] if self.bodies else stream

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The lanes that are streams of the whole GPU with low priority."""
        return tuple(at for at, each in enumerate(self.lanes) if each.sms == self.sms and not each.high)

    @cached_property
    def high(self) -> int:
        """The lane that is the whole GPU with high priority; that with low where there is none."""
        return next((at for at, each in enumerate(self.lanes) if each.sms == self.sms and each.high), self.whole[0])

    @cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """The pairs of lanes that are the two sides of a cut."""
        sides = [(at, each) for at, each in enumerate(self.lanes) if each.sms < self.sms and not each.high]
        return tuple((a, b) for a, one in sides for b, two in sides if a < b and one.sms + two.sms == self.sms)

    def ticks(self, kind: int, lane: int, ticks: int) -> int:
        """How long work that takes so many ticks on the whole GPU takes on a lane, nobody beside it."""
        return round(ticks / self.kinds[kind].speed(self.lanes[lane].sms, self.sms))

    def speeds(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """How fast each of those that run goes, by the kinds of work and the lanes they are on; 1 is alone on all."""
        key = tuple(lanes), self.tagged(kinds)
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = self._corrected(kinds, lanes)
        return self._kept[key]

    def _corrected(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """As predicted, and as was seen of pairs."""
        found = self.predicted(kinds, lanes)
        if len(kinds) > 1 and self.seen:
            for at in range(len(kinds)):
                for other in range(len(kinds)):
                    if at != other:
                        found[at] *= self.seen.factor(self.pair(kinds[at], lanes[at], kinds[other], lanes[other]))
        return found

    def hope(self, kinds: Sequence[int], lanes: Sequence[int]) -> float:
        """By how much those that run may go faster than predicted: two that were not seen together yet."""
        if not self.tags or len(kinds) != 2:
            return 1.0
        (one, other), (lane, others_lane) = kinds, lanes
        pairs = self.pair(one, lane, other, others_lane), self.pair(other, others_lane, one, lane)
        return 1.0 if all([each in self.seen for each in pairs]) else HOPE

    def pair(self, kind: int, lane: int, other: int, others_lane: int) -> Pair:
        """Work on a lane and what runs beside it, as that is remembered."""
        own, beside = self.body(kind, kind), self.body(other, other)
        return Pair(own, self._one_whole(lane), beside, self._one_whole(others_lane))

    def _one_whole(self, lane: int) -> int:
        """A lane; the first of the streams of the whole GPU for all of those."""
        return self.whole[0] if lane in self.whole else lane

    def tagged(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """What the speeds of these kinds depend on."""
        tags = self.tags
        return tuple([tags[kind] for kind in kinds] if tags else kinds)

    def predicted(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """The same by what was measured of each alone."""
        shares, works = [self.lanes[lane] for lane in lanes], [self.kinds[kind] for kind in kinds]
        alone = [work.speed(share.sms, self.sms) for work, share in zip(works, shares, strict=True)]
        if len(works) == 1:
            return alone
        fills = [work.fill(self.sms) for work in works]
        running, slower = list(zip(works, shares, alone, fills, strict=True)), [1.0] * len(works)
        for own in range(len(works)):
            for other in range(len(works)):
                if own != other:
                    slower[own] += self._taken(*running[own], *running[other])
        return [speed / slow for speed, slow in zip(alone, slower, strict=True)]

    def _taken(
        self,
        own: GpuLikeness,
        share: Share,
        _: float,
        fill: float,
        other: GpuLikeness,
        others: Share,
        speed: float,
        others_fill: float,
    ) -> float:
        """How much longer one takes beside another, which is on a share that it has so much speed on alone."""
        rules = self.contention
        found = rules.beside + rules.memory * (rules.reach + own.memory) * other.memory * speed
        within = share.within(others)
        if within:
            both = (fill + others_fill) / 2
            waits = (rules.turns + rules.filled * both) * (other.kernel_us / own.kernel_us) ** rules.order
            if share.high != others.high:
                waits *= 1 - rules.favour if share.high else 1 + rules.favour
            found += within * waits
        return found


def ladder(sms: int, cuts: Sequence[tuple[int, int]], streams: int) -> tuple[Share, ...]:
    """The lanes of a GPU of so many SMs: some streams of the whole, one of high priority, and the sides of all cuts."""
    sides = [side for large, small in cuts for side in (Share(0, large), Share(large, small))]
    return (*[Share(0, sms)] * streams, Share(0, sms, high=True), *sides)
