"""Ours for models with exits: how much to take from the queue, by looking ahead once for every answer.

Fluid Batching takes all that fits or nothing. Here every size is priced: taking more makes the device work better
for all who come later, and delays those who are under way. Whoever is under way is not given up lightly, or the few who
have far to go would be put off again and again. Requests that cannot be on time any more wait behind the others.
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

NOBODY = Refill((), 0)
"""What is known of requests in streams that never run dry."""
UNDER_WAY = 10
"""How many misses one costs that befalls a request under way: it needs little more, and has overtaken others."""


class Standing(NamedTuple):
    """Requests that stand at one layer."""

    layer: int
    size: int
    dues: Sequence[int]
    """When those are due whose deadlines are known, in order."""


class Road(NamedTuple):
    """What lies ahead of a stream's requests."""

    program: Program
    stops: Sequence[int]
    """Layer counts at which requests may leave or join, the end included."""
    rests: Sequence[tuple[int, ...]]
    """Ticks to the end from each layer, at batch 1, 2, ..."""


@dataclass(frozen=True)
class TopUp(Refilling):
    """Goes on with the batch that is least far, or begins with 1, 2, ... of those who wait: what costs least.

    A sweep from the first layer to the end, which takes along every batch it passes, says when each exit is passed;
    nobody is expected to make it shorter by leaving. A request costs the time until the exit it takes and, if it is
    due before, a missed deadline, each exit weighed with its rate; to one under way a miss counts ``UNDER_WAY`` times.
    Those left in the queue go in a second sweep, the rest of them in full batches. Last, every tick until all are done
    is paid for by a few requests yet to come.
    """

    traits: ClassVar[Traits] = replace(Refilling.traits, for_deadlines=True, defers_late=True, late_work=LateWork.LAST)

    miss: int = 400
    """What a missed deadline costs: percent of the time that one request takes alone."""
    backlog: int = 4
    """Requests yet to come that wait until all who are here are done."""
    foresight: int = 100
    """Percent of the time of a request alone that counts when it is judged too late to be on time."""

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
        most = sum([each.size for each in flight.batches]) + seen.size  # as large as a batch can become
        first = seen.program - seen.size + 1
        programs = self.setting.programs[first : first + most]
        ends = {*programs[0].exits, len(programs[0]), *[each.layer for each in flight.batches]}
        return Road(programs[0], sorted(ends), [(*each.remaining, 0) for each in programs])

    def _cost(self, first: Candidate, flight: Flight, road: Road, now: int) -> float:
        """All that is to be paid from now on if *first* goes."""
        batches, seen = flight.batches, flight.beginnings[-1]
        most = len(road.rests)
        taken = 0 if first.layer else first.size
        under_way = batches if first.layer else (first, *batches)
        cost, end = self._sweep(road, [_standing(batch) for batch in under_way], now, now)
        dues, waiting = seen.refill or NOBODY
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
        """What the requests of *parts*, in order of layers, cost if the first of them starts then; and its end."""
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
    dues, _ = batch.refill or NOBODY
    return Standing(batch.layer, batch.size, sorted(dues))


@lru_cache(maxsize=4096)
def leaving(program: Program, layer: int) -> dict[int, float]:
    """Of the requests that stand at a layer, the share that leaves by each exit ahead; all at the end if not known."""
    ends = (*program.exits, len(program))
    rates = program.exit_rates or (0.0,) * (len(ends) - 1) + (1.0,)
    ahead = {end: rate for end, rate in zip(ends, rates, strict=True) if end > layer}
    whole = sum(ahead.values())
    return {end: rate / whole for end, rate in ahead.items()} if whole else {len(program): 1.0}
