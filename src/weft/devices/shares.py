"""Shares of one GPU, the likeness of work, and the speed of all work that runs at the same time.

A GPU's multiprocessors (SMs) can be cut in two, and each side runs work as if it were a smaller GPU; or models run
concurrently on streams of the whole. Contention: on the same SMs the kernels of one wait for those of the other, about
one for one, as far as both fill the SMs; on any SMs they share the memory, and the way kernels are started. The
constants were fitted to pairs measured on an H200 (``weft.devices.gpu_pairs``). ``SeenSpeeds`` are corrections of
these predictions that a server learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

from pydantic import BaseModel, Field, model_validator

Speed = Annotated[float, Field(gt=0, le=4, allow_inf_nan=False)]
Bound = Literal["compute", "memory", "launches"]

COMPUTE_FILL = 0.5
"""Work that fills more of the SMs than this is bound by computing."""
MEMORY_TRAFFIC = 0.25
"""Other work that takes more of the memory's bandwidth than this is bound by memory; what is left, by launches."""
MOST_KEPT = 4096
"""Sets of work on lanes whose speeds are cached; the cache is cleared when it is full."""

LEAST, MOST = 0.5, 2.0
"""Smallest and largest factor by which observations correct a prediction."""
LEARNING = 0.05
"""Least weight of the last observation; the first ones have equal weights, so that a factor settles quickly."""
NOTICED, WAITS = 0.04, 32
"""A factor is published again when it has moved by more than this and was observed this often since: with each change,
everything that was computed with it has to be computed again."""
HOPE = 1.1
"""Assumed speed of a pair that was not observed yet, over its prediction: slightly more than the error of predictions.
Without urgent work such a pair is preferred, so that every alternative that may be the best is tried."""


class Pair(NamedTuple):
    """A body on a lane, and the body that ran concurrently on another lane; all streams of the whole count as one."""

    body: int
    lane: int
    other: int
    others_lane: int


class SeenSpeeds:
    """Observed speeds of pairs over predicted ones: a factor for each pair that was observed often enough."""

    def __init__(self) -> None:
        self._mean: dict[Pair, float] = {}
        self._observed: dict[Pair, int] = {}
        """Observations since the factor was published last."""
        self._published: dict[Pair, float] = {}

    def __len__(self) -> int:
        return len(self._published)

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._published

    def factor(self, pair: Pair) -> float:
        """The factor of the predicted speed of a pair's first body."""
        return self._published.get(pair, 1.0)

    def learn(self, pair: Pair, ratio: float) -> bool:
        """Record an observed speed over the predicted one, without any factor; True if that changes the factor."""
        before, observed = self._mean.get(pair, 1.0), self._observed.get(pair, 0) + 1
        weight = LEARNING if pair in self._published else max(LEARNING, 1 / observed)
        self._mean[pair] = mean = before + weight * (min(MOST, max(LEAST, ratio)) - before)
        self._observed[pair] = observed
        changes = observed >= WAITS and (pair not in self._published or abs(mean - self._published[pair]) > NOTICED)
        if changes:
            self._published[pair], self._observed[pair] = mean, 0
        return changes

    def forget(self, body: int) -> None:
        """Drop all pairs of a body that was unloaded; its number may be given to another one."""
        for pairs in (self._mean, self._published, self._observed):
            for pair in [pair for pair in pairs if body in (pair.body, pair.other)]:
                del pairs[pair]


class Share(NamedTuple):
    """A lane of a GPU: some of its SMs, the first of them at *first*, with high or low priority."""

    first: int
    sms: int
    high: bool = False

    def within(self, other: Share) -> float:
        """The part of its SMs that another share has as well."""
        both = min(self.first + self.sms, other.first + other.sms) - max(self.first, other.first)
        return max(0, both) / self.sms

    def __str__(self) -> str:
        return f"{self.sms}{' high' * self.high}"


class GpuLikeness(BaseModel, extra="forbid", frozen=True):
    """The likeness of work on a GPU: what was measured of it alone."""

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
        """The resource that limits it."""
        if self.fill(whole) > COMPUTE_FILL:
            return "compute"
        return "memory" if self.memory > MEMORY_TRAFFIC else "launches"


class Contention(BaseModel, extra="forbid", frozen=True):
    """Fitted costs of running concurrently, each a part of the time that work takes alone."""

    beside: float = 0.0885
    """For any work beside any other."""
    turns: float = 0.0955
    """Waiting for a kernel of the other on the same SMs, where neither fills them."""
    filled: float = 0.7769
    """The same where both do, in addition."""
    order: float = 1.1728
    """How strongly the ratio of kernel lengths decides which of the two waits more."""
    favour: float = 0.3424
    """The part of its waiting that high priority saves beside low priority, and that low priority waits in addition."""
    memory: float = 0.6175
    """Factor of the product of the other's part of the memory's bandwidth and the own part plus ``reach``."""
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
    """Kind -> its body, of which one segment runs at a time; empty where every stream is a body of its own."""
    tags: Sequence[int] = ()
    """Kind -> a number that all kinds of equal speed share; empty where each kind has its own."""
    seen: SeenSpeeds = field(default_factory=SeenSpeeds)
    """Observed speeds of bodies that ran concurrently."""
    _kept: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = field(default_factory=dict, init=False)
    """Speeds by lanes and tags."""

    def body(self, stream: int, kind: int) -> int:
        """The body of work of a stream."""
        return self.bodies[kind] if self.bodies else stream

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The lanes that are streams of the whole GPU with low priority."""
        return tuple(at for at, share in enumerate(self.lanes) if share.sms == self.sms and not share.high)

    @cached_property
    def high(self) -> int:
        """The lane that is the whole GPU with high priority; that with low where there is none."""
        return next((at for at, share in enumerate(self.lanes) if share.sms == self.sms and share.high), self.whole[0])

    @cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """The pairs of lanes that are the two sides of a cut."""
        sides = [(at, share) for at, share in enumerate(self.lanes) if share.sms < self.sms and not share.high]
        return tuple((a, b) for a, one in sides for b, two in sides if a < b and one.sms + two.sms == self.sms)

    def ticks(self, kind: int, lane: int, ticks: int) -> int:
        """The time on a lane, with nothing beside it, of work that takes *ticks* on the whole GPU."""
        return round(ticks / self.kinds[kind].speed(self.lanes[lane].sms, self.sms))

    def speeds(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """The speed of each running kind of work on its lane; 1 is the speed alone on the whole GPU."""
        key = tuple(lanes), self.tagged(kinds)
        if key not in self._kept:
            if len(self._kept) >= MOST_KEPT:
                self._kept.clear()
            self._kept[key] = self._correct_speeds(kinds, lanes)
        return self._kept[key]

    def _correct_speeds(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """Predicted speeds, corrected by the factors of observed pairs."""
        speeds = self.predicted(kinds, lanes)
        if len(kinds) > 1 and self.seen:
            for at in range(len(kinds)):
                for other in range(len(kinds)):
                    if at != other:
                        speeds[at] *= self.seen.factor(self.pair(kinds[at], lanes[at], kinds[other], lanes[other]))
        return speeds

    def hope(self, kinds: Sequence[int], lanes: Sequence[int]) -> float:
        """Factor by which two kinds may be faster than predicted because they were not observed together yet."""
        if not self.tags or len(kinds) != 2:
            return 1.0
        (one, other), (lane, others_lane) = kinds, lanes
        pairs = self.pair(one, lane, other, others_lane), self.pair(other, others_lane, one, lane)
        return 1.0 if all([pair in self.seen for pair in pairs]) else HOPE

    def pair(self, kind: int, lane: int, other: int, others_lane: int) -> Pair:
        """The key of observations: work on a lane, and what runs beside it."""
        bodies = self.body(kind, kind), self.body(other, other)
        return Pair(bodies[0], self._one_whole(lane), bodies[1], self._one_whole(others_lane))

    def _one_whole(self, lane: int) -> int:
        """The lane itself, or for all streams of the whole GPU the first of them: they are alike."""
        return self.whole[0] if lane in self.whole else lane

    def tagged(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """The tags of kinds, which their speeds depend on."""
        tags = self.tags
        return tuple([tags[kind] for kind in kinds] if tags else kinds)

    def predicted(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """The speeds by what was measured of each kind alone, without corrections."""
        running = [self._running(self.kinds[kind], self.lanes[lane]) for kind, lane in zip(kinds, lanes, strict=True)]
        if len(running) == 1:
            return [running[0].alone]
        slower = [1.0] * len(running)
        for at, work in enumerate(running):
            for other in range(len(running)):
                if at != other:
                    slower[at] += self._slow_down(work, running[other])
        return [work.alone / slow for work, slow in zip(running, slower, strict=True)]

    def _running(self, work: GpuLikeness, share: Share) -> _Running:
        return _Running(work, share, work.speed(share.sms, self.sms), work.fill(self.sms))

    def _slow_down(self, work: _Running, other: _Running) -> float:
        """The additional time of work beside other work, as a part of its time alone."""
        rules = self.contention
        longer = rules.beside + rules.memory * (rules.reach + work.like.memory) * other.like.memory * other.alone
        within = work.share.within(other.share)
        if within:
            filled = (work.fill + other.fill) / 2
            # The one with the shorter kernels waits more: it queues behind a longer one each time.
            waits = (rules.turns + rules.filled * filled) * (other.like.kernel_us / work.like.kernel_us) ** rules.order
            if work.share.high != other.share.high:
                waits *= 1 - rules.favour if work.share.high else 1 + rules.favour
            longer += within * waits
        return longer


class _Running(NamedTuple):
    """Work on a share, its speed there alone, and the part of the whole GPU that it fills."""

    like: GpuLikeness
    share: Share
    alone: float
    fill: float


def ladder(sms: int, cuts: Sequence[tuple[int, int]], streams: int) -> tuple[Share, ...]:
    """The lanes of a GPU: streams of the whole, one of high priority, and the two sides of every cut."""
    sides = [side for large, small in cuts for side in (Share(0, large), Share(large, small))]
    return (*[Share(0, sms)] * streams, Share(0, sms, high=True), *sides)
