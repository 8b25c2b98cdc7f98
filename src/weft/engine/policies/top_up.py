"""Policy for models with early exits: it prices every number of waiting requests that could refill a batch.

Fluid Batching takes all that fits or none. Here every size has a price: a larger one uses the device better for later
requests, and delays the ones in flight. A missed deadline of a request in flight is expensive; otherwise the few
requests with many layers left would be put off again and again. Requests that can no longer be on time wait behind the
others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

from weft.base.errors import InputError
from weft.devices.costs.program import Program
from weft.engine.policies.base import Candidate, LateWork, LoopOptions, Refill, Traits
from weft.engine.policies.refilling import Flight, Refilling
from weft.kernels import rules

NO_REFILL = Refill((), 0)
"""The refill facet in saturated streams, which have no waiting requests and no deadlines."""
UNDER_WAY = 10
"""Cost of a missed deadline of a request in flight, in misses of a waiting one: it needs little more work, and others
have already waited for it."""


class Standing(NamedTuple):
    """Requests that wait at one layer."""

    layer: int
    size: int
    dues: Sequence[int]
    """Their deadlines, as far as they are known, in order."""


class Road(NamedTuple):
    """The layers ahead of a stream's requests, with their times."""

    program: Program
    stops: Sequence[int]
    """Layers at which requests may leave or join, and the end."""
    rests: Sequence[tuple[int, ...]]
    """Ticks to the end from each layer, at batch 1, 2, ..."""


@dataclass(frozen=True)
class TopUp(Refilling):
    """Goes on with the batch at the earliest layer, or begins 1, 2, ... waiting requests: the step of lowest cost.

    The cost comes from a sweep: from the first layer to the end it takes along every batch it reaches, and gives the
    time of each exit (samples that leave do not make it shorter). A request costs its time to each exit and, if its
    deadline is before that, a miss, weighted with the rate of the exit; a miss in flight counts ``UNDER_WAY`` times.
    Requests left in the queue go in a second sweep, the rest of them in full batches. Finally, every tick until all
    have ended delays ``backlog`` future requests.
    """

    traits: ClassVar[Traits] = replace(Refilling.traits, for_deadlines=True, defers_late=True, late_work=LateWork.LAST)

    miss: int = 400
    """Cost of a missed deadline, in percent of the time of a request alone."""
    backlog: int = 4
    """Future requests that are assumed to wait until all present ones have ended."""
    foresight: int = 100
    """Percent of its time alone by which a request counts as late before its deadline."""

    def __post_init__(self) -> None:
        for name, value in (("miss", self.miss), ("backlog", self.backlog), ("foresight", self.foresight)):
            if not 0 <= value <= 10_000:
                raise InputError(f"top-up: {name} = {value} must be 0 to 10000")

    @property
    def loop_options(self) -> LoopOptions:
        return LoopOptions(miss=self.miss, backlog=self.backlog)

    def propose(self, flight: Flight, now: int) -> Candidate:
        batches, beginnings = flight
        if not beginnings or (batches and not self.at_exit(batches[0])):
            return batches[0]
        road = self._road(flight)
        return min((*batches[:1], *beginnings), key=lambda first: self._cost(first, flight, road, now))

    def _road(self, flight: Flight) -> Road:
        seen = flight.beginnings[-1]
        most = sum([batch.size for batch in flight.batches]) + seen.size  # the largest batch that merging can give
        first = seen.program - seen.size + 1
        programs = self.setting.programs[first : first + most]
        ends = {*programs[0].exits, len(programs[0]), *[batch.layer for batch in flight.batches]}
        return Road(programs[0], sorted(ends), [(*program.remaining, 0) for program in programs])

    def _cost(self, first: Candidate, flight: Flight, road: Road, now: int) -> float:
        """Return the total cost from now on if *first* is issued."""
        batches, seen = flight.batches, flight.beginnings[-1]
        most = len(road.rests)
        taken = 0 if first.layer else first.size
        under_way = batches if first.layer else (first, *batches)
        cost, end = self._sweep(road, [_standing(batch) for batch in under_way], now, now)
        dues, waiting = seen.refill or NO_REFILL
        left = seen.size + waiting - taken
        following = min(left, most)
        if following:
            more, end = self._sweep(road, [Standing(0, following, sorted(dues[taken:]))], end, now)
            cost += more
        left -= following
        if left:
            full = road.rests[-1][0]
            cost += rules.backlog_cost(left, most, full, end - now)
            end += rules.backlog_ticks(left, most, full)
        return cost + self.backlog * (end - now)

    def _sweep(self, road: Road, parts: Sequence[Standing], start: int, now: int) -> tuple[float, int]:
        """Return cost and end of a sweep that begins with the first of *parts*, which are in order of layers."""
        miss = road.rests[0][0] * self.miss // 100
        ahead = [(part, leaving(road.program, part.layer), UNDER_WAY if part.layer else 1) for part in parts]
        layer, time, size, cost = parts[0].layer, start, 0, 0.0
        for stop in road.stops:
            if stop <= layer:
                continue
            size += sum([part.size for part in parts if part.layer == layer])
            rest = road.rests[size - 1]
            time += rest[layer] - rest[stop]
            for part, shares, worth in ahead:
                share = shares.get(stop)
                if share:
                    late = bisect_left(part.dues, time) * worth
                    cost += rules.leaving_cost(share, part.size, time - now, late, miss)
            layer = stop
        return cost, time


def _standing(batch: Candidate) -> Standing:
    dues, _ = batch.refill or NO_REFILL
    return Standing(batch.layer, batch.size, sorted(dues))


@lru_cache(maxsize=4096)
def leaving(program: Program, layer: int) -> dict[int, float]:
    """Return the share of requests at a layer that leaves at each exit ahead; all at the end if no rates are known."""
    ends = (*program.exits, len(program))
    rates = program.exit_rates or (0.0,) * (len(ends) - 1) + (1.0,)
    ahead = {end: rate for end, rate in zip(ends, rates, strict=True) if end > layer}
    whole = sum(ahead.values())
    return {end: rate / whole for end, rate in ahead.items()} if whole else {len(program): 1.0}
