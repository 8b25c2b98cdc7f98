"""Shares of one GPU, the likeness of work, and the speed of all work that runs at the same time.

A GPU's multiprocessors (SMs) can be cut in two, and each side runs work as if it were a smaller GPU; or models run
concurrently on streams of the whole GPU. Contention: on the same SMs, kernels of two models run about in turns, as far
as both models fill the SMs; on any SMs, models share the memory and the launch of kernels. The constants were fitted
to pairs measured on an H200 (``weft.devices.gpu_pairs``). ``SeenSpeeds`` are corrections of these predictions that a
server learns.
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
"""Work not bound by computing that takes more of the memory's bandwidth than this is bound by memory, else by kernel
launches."""
MOST_KEPT = 4096
"""Sets of work on lanes whose speeds are cached; the cache is cleared when it is full."""

LEAST_FACTOR, MOST_FACTOR = 0.5, 2.0
"""Smallest and largest factor by which observations correct a prediction."""
LEARNING = 0.05
"""Least weight of the last observation; the first observations have equal weights, so that a factor settles quickly."""
LEAST_CHANGE, LEAST_OBSERVED = 0.04, 32
"""A factor is published again when it has moved by more than LEAST_CHANGE and was observed LEAST_OBSERVED times since:
with each change, everything that was computed with it has to be computed again."""
HOPE = 1.1
"""Assumed speed of a pair that was not observed yet, over its prediction: slightly more than the error of predictions.
Without urgent work such a pair is preferred, so that every alternative that may be the best is tried."""


class Pair(NamedTuple):
    """A body on a lane, and the body that ran beside it on another lane; all streams of the whole GPU are one lane."""

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
        """The correction of the predicted speed of ``pair.body`` beside ``pair.other``; 1 if none is published."""
        return self._published.get(pair, 1.0)

    def learn(self, pair: Pair, ratio: float) -> bool:
        """Record *ratio*, the observed speed over the uncorrected prediction; True if the published factor changes."""
        old_mean, observed = self._mean.get(pair, 1.0), self._observed.get(pair, 0) + 1
        weight = LEARNING if pair in self._published else max(LEARNING, 1 / observed)
        self._mean[pair] = mean = old_mean + weight * (min(MOST_FACTOR, max(LEAST_FACTOR, ratio)) - old_mean)
        self._observed[pair] = observed
        publishes = observed >= LEAST_OBSERVED and (
            pair not in self._published or abs(mean - self._published[pair]) > LEAST_CHANGE
        )
        if publishes:
            self._published[pair], self._observed[pair] = mean, 0
        return publishes

    def forget(self, body: int) -> None:
        """Drop all pairs of a body that was unloaded; a new body may get its number."""
        for pairs in (self._mean, self._published, self._observed):
            for pair in [pair for pair in pairs if body in (pair.body, pair.other)]:
                del pairs[pair]


class Share(NamedTuple):
    """A lane of a GPU: some of its SMs, the first of them at *first*, with high or low priority."""

    first: int
    sms: int
    high: bool = False

    def within(self, other: Share) -> float:
        """The fraction of this share's SMs that belong to *other* as well."""
        common_sms = min(self.first + self.sms, other.first + other.sms) - max(self.first, other.first)
        return max(0, common_sms) / self.sms

    def __str__(self) -> str:
        return f"{self.sms}{' high' * self.high}"


class GpuLikeness(BaseModel, extra="forbid", frozen=True):
    """The likeness of work on a GPU: measurements of it alone, from which contention is predicted."""

    speeds: Annotated[dict[int, Speed], Field(min_length=1)]
    """SMs of a share -> speed on this share over the speed on the whole GPU."""
    kernel_us: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
    """Mean duration of the work's kernels on the whole GPU."""
    memory: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """The fraction of the memory's bandwidth that the work takes."""

    @model_validator(mode="after")
    def _sms(self) -> GpuLikeness:
        if any(sms < 1 for sms in self.speeds):
            raise ValueError("speeds has a share without multiprocessors")
        return self

    def __hash__(self) -> int:
        """A hash of two fields only, since it is computed for keys of caches."""
        return hash((self.kernel_us, self.memory))

    def speed(self, sms: int, whole: int) -> float:
        """The speed alone on a share of *sms* multiprocessors of *whole*: measured, or computed from ``fill``."""
        if sms >= whole:
            return 1.0
        if sms in self.speeds:
            return self.speeds[sms]
        return 1.0 / (1.0 + self.fill(whole) * (whole / sms - 1.0))

    def fill(self, whole: int) -> float:
        """The fraction of the SMs that the work keeps busy, from its speeds on shares of *whole* SMs.

        1 if it takes twice as long on half of the SMs, 0 if it is as fast there.
        """
        fills = [(1.0 / speed - 1.0) / (whole / sms - 1.0) for sms, speed in self.speeds.items() if sms < whole]
        return min(1.0, max(0.0, sum(fills) / len(fills))) if fills else 1.0

    def bound(self, whole: int) -> Bound:
        """The resource that limits the work on a GPU of *whole* SMs."""
        if self.fill(whole) > COMPUTE_FILL:
            return "compute"
        return "memory" if self.memory > MEMORY_TRAFFIC else "launches"


class Contention(BaseModel, extra="forbid", frozen=True):
    """Fitted constants of the slow-down of work by other work, as fractions of its time alone."""

    beside: float = 0.0885
    """Slow-down by any other work."""
    turns: float = 0.0955
    """Waiting for kernels of other work on the same SMs, if neither fills the SMs."""
    filled: float = 0.7769
    """Additional waiting if both fill the SMs."""
    order: float = 1.1728
    """Exponent of the ratio of kernel lengths, which decides which of the two waits longer."""
    favour: float = 0.3424
    """Fraction of its waiting that high priority saves beside low priority, and that low priority waits in addition."""
    memory: float = 0.6175
    """Slow-down per (own bandwidth fraction + ``reach``) * other bandwidth fraction."""
    reach: float = 0.1787
    """See ``memory``."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The lanes of a GPU, and the speeds of work on them. The kind of work is the number of its program."""

    sms: int
    lanes: tuple[Share, ...]
    kinds: Sequence[GpuLikeness]
    """The likeness of each kind; a server appends to this list as models are loaded."""
    contention: Contention
    bodies: Sequence[int] = ()
    """Kind -> its body (backbone), of which only one segment runs at a time; empty: every stream is its own body."""
    tags: Sequence[int] = ()
    """Kind -> a number that all kinds of equal speed share; empty: each kind has its own tag."""
    seen: SeenSpeeds = field(default_factory=SeenSpeeds)
    """Observed speeds of bodies that ran concurrently."""
    _speed_cache: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = field(default_factory=dict, init=False)
    """Cache: lanes and tags -> speeds."""

    def body(self, stream: int, kind: int) -> int:
        """The number of the body that work of this stream and kind runs."""
        return self.bodies[kind] if self.bodies else stream

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """The lanes that are streams of the whole GPU with low priority."""
        return tuple(lane for lane, share in enumerate(self.lanes) if share.sms == self.sms and not share.high)

    @cached_property
    def high(self) -> int:
        """The lane that is the whole GPU with high priority; without such a lane, the first of ``whole``."""
        high_lanes = (lane for lane, share in enumerate(self.lanes) if share.sms == self.sms and share.high)
        return next(high_lanes, self.whole[0])

    @cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """The pairs of lanes that are the two sides of a cut."""
        sides = [(lane, share.sms) for lane, share in enumerate(self.lanes) if share.sms < self.sms and not share.high]
        return tuple((a, b) for a, a_sms in sides for b, b_sms in sides if a < b and a_sms + b_sms == self.sms)

    def ticks(self, kind: int, lane: int, ticks: int) -> int:
        """The time on a lane, without contention, of work that takes *ticks* on the whole GPU."""
        return round(ticks / self.kinds[kind].speed(self.lanes[lane].sms, self.sms))

    def speeds(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """The speed of each running kind of work on its lane; 1 is the speed alone on the whole GPU."""
        key = tuple(lanes), self.tagged(kinds)
        if key not in self._speed_cache:
            if len(self._speed_cache) >= MOST_KEPT:
                self._speed_cache.clear()
            self._speed_cache[key] = self._correct_speeds(kinds, lanes)
        return self._speed_cache[key]

    def _correct_speeds(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """Predicted speeds, corrected by the factors of observed pairs."""
        speeds = self.predicted(kinds, lanes)
        if len(kinds) > 1 and self.seen:
            for index in range(len(kinds)):
                for other_index in range(len(kinds)):
                    if index != other_index:
                        speeds[index] *= self.seen.factor(
                            self.pair(kinds[index], lanes[index], kinds[other_index], lanes[other_index])
                        )
        return speeds

    def hope(self, kinds: Sequence[int], lanes: Sequence[int]) -> float:
        """``HOPE`` for two kinds that were not observed together on these lanes yet; otherwise 1."""
        if not self.tags or len(kinds) != 2:
            return 1.0
        (kind, other), (lane, others_lane) = kinds, lanes
        pairs = self.pair(kind, lane, other, others_lane), self.pair(other, others_lane, kind, lane)
        return 1.0 if all([pair in self.seen for pair in pairs]) else HOPE

    def pair(self, kind: int, lane: int, other: int, others_lane: int) -> Pair:
        """The key in ``SeenSpeeds`` of work of *kind* on *lane* beside work of kind *other* on *others_lane*."""
        body, others_body = self.body(kind, kind), self.body(other, other)
        return Pair(body, self._representative(lane), others_body, self._representative(others_lane))

    def _representative(self, lane: int) -> int:
        """The lane itself, or the first stream of the whole GPU for all such streams, since they are alike."""
        return self.whole[0] if lane in self.whole else lane

    def tagged(self, kinds: Sequence[int]) -> tuple[int, ...]:
        """The tags of *kinds*: kinds with equal tags have equal speeds. Without tags, the kinds themselves."""
        tags = self.tags
        return tuple([tags[kind] for kind in kinds] if tags else kinds)

    def predicted(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """The speeds on *lanes* that the contention model predicts, without learned corrections."""
        running = [self._running(self.kinds[kind], self.lanes[lane]) for kind, lane in zip(kinds, lanes, strict=True)]
        if len(running) == 1:
            return [running[0].alone]
        durations = [1.0] * len(running)
        for index, work in enumerate(running):
            for other_index in range(len(running)):
                if index != other_index:
                    durations[index] += self._slow_down(work, running[other_index])
        return [work.alone / duration for work, duration in zip(running, durations, strict=True)]

    def _running(self, work: GpuLikeness, share: Share) -> _Running:
        return _Running(work, share, work.speed(share.sms, self.sms), work.fill(self.sms))

    def _slow_down(self, work: _Running, other: _Running) -> float:
        """The additional time of *work* beside *other*, as a fraction of its time alone."""
        rules = self.contention
        added_time = rules.beside + rules.memory * (rules.reach + work.like.memory) * other.like.memory * other.alone
        within = work.share.within(other.share)
        if within:
            filled = (work.fill + other.fill) / 2
            # Work with shorter kernels waits longer, since each of its kernels queues behind a longer one.
            waits = (rules.turns + rules.filled * filled) * (other.like.kernel_us / work.like.kernel_us) ** rules.order
            if work.share.high != other.share.high:
                waits *= 1 - rules.favour if work.share.high else 1 + rules.favour
            added_time += within * waits
        return added_time


class _Running(NamedTuple):
    """Running work: its share, its speed alone on that share, and the fraction of the whole GPU that it fills."""

    like: GpuLikeness
    share: Share
    alone: float
    fill: float


def ladder(sms: int, cuts: Sequence[tuple[int, int]], streams: int) -> tuple[Share, ...]:
    """The lanes of a GPU, in order: *streams* of the whole GPU, one of high priority, the two sides of every cut."""
    sides = [side for large, small in cuts for side in (Share(0, large), Share(large, small))]
    return (*[Share(0, sms)] * streams, Share(0, sms, high=True), *sides)
