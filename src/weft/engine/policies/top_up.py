"""Policy for models with early exits: it prices every number of waiting requests that could refill a batch.

Fluid Batching takes as many requests as fit, or none. Here every number has a price: more requests use the device
better for later requests, and delay the requests in flight. A missed deadline of a request in flight is expensive;
otherwise the few requests with many layers left would be put off again and again. Requests that can no longer be on
time wait behind the others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar, NamedTuple

from weft.devices.costs.program import Program
from weft.engine.policies.base import Candidate, LateWork, OptionRange, Refill, Traits
from weft.engine.policies.refilling import Flight, Refilling
from weft.kernels import rules

NO_REFILL = Refill((), 0)
"""The refill facet in saturated streams, which have no waiting requests and no deadlines."""
UNDER_WAY = 10
"""A missed deadline of a request in flight costs as much as this number of misses of waiting requests: it needs little
more work, and others have already waited for it."""


class WaitingGroup(NamedTuple):
    """Requests that wait at the same layer: a batch in flight, or requests that have not begun."""

    layer: int
    size: int
    dues: Sequence[int]
    """Their known deadlines, ascending; those of requests far back in the queue are not known."""


class RemainingLayers(NamedTuple):
    """The layers that a stream's requests have ahead of them, with their times."""

    program: Program
    stops: Sequence[int]
    """Layers at which requests may leave or join, and the end."""
    rests: Sequence[tuple[int, ...]]
    """Ticks to the end from each layer, at batch 1, 2, ..."""


@dataclass(frozen=True)
class TopUp(Refilling):
    """Goes on with the batch at the earliest layer, or begins 1, 2, ... waiting requests: the step of lowest cost.

    The cost is estimated by a sweep: a batch that runs from its layer to the end is merged with every batch that it
    reaches, which gives the time of each exit (leaving samples are not taken to make it shorter). A request costs its
    time to each exit and, if its deadline is before that, a miss, both weighted with the rate of the exit; a miss in
    flight counts ``UNDER_WAY`` times. Requests that would stay in the queue go in a second sweep, and the rest of them
    in full batches. Finally, every tick until all have ended delays ``backlog`` future requests.
    """

    traits: ClassVar[Traits] = replace(Refilling.traits, for_deadlines=True, defers_late=True, late_work=LateWork.LAST)
    ranges: ClassVar = {
        "miss": OptionRange(0, 10_000, "percent"),
        "backlog": OptionRange(0, 10_000),
        "foresight": OptionRange(0, 10_000, "percent"),
    }

    miss: int = 400
    """Cost of a missed deadline, in percent of the time of a request alone."""
    backlog: int = 4
    """Future requests that are assumed to wait until all present ones have ended."""
    foresight: int = 100
    """A request counts as late if less than this percentage of its remaining time is left to its deadline."""

    def propose(self, flight: Flight, now: int) -> Candidate:
        """Choose the step of lowest cost; between exits, go on with the earliest batch."""
        batches, beginnings = flight
        if not beginnings or (batches and not self.at_exit(batches[0])):
            return batches[0]
        path = self._remaining_layers(flight)
        return min((*batches[:1], *beginnings), key=lambda first: self._cost(first, flight, path, now))

    def _remaining_layers(self, flight: Flight) -> RemainingLayers:
        """Return the layers ahead of a stream's batches, with times for all sizes that merging can give."""
        largest_beginning = flight.beginnings[-1]
        # The largest batch that merging can give.
        max_batch = sum([batch.size for batch in flight.batches]) + largest_beginning.size
        first_program = largest_beginning.program - largest_beginning.size + 1
        programs = self.setting.programs[first_program : first_program + max_batch]
        ends = {*programs[0].exits, len(programs[0]), *[batch.layer for batch in flight.batches]}
        return RemainingLayers(programs[0], sorted(ends), [(*program.remaining, 0) for program in programs])

    def _cost(self, first: Candidate, flight: Flight, path: RemainingLayers, now: int) -> float:
        """Return the total cost of a stream's requests, from *now* on, if *first* is issued next."""
        batches, largest_beginning = flight.batches, flight.beginnings[-1]
        max_batch = len(path.rests)
        taken = 0 if first.layer else first.size
        under_way = batches if first.layer else (first, *batches)
        cost, end = self._sweep(path, [_waiting_group(batch) for batch in under_way], now, now)
        dues, waiting = largest_beginning.refill or NO_REFILL
        unserved = largest_beginning.size + waiting - taken
        next_size = min(unserved, max_batch)
        if next_size:
            next_cost, end = self._sweep(path, [WaitingGroup(0, next_size, sorted(dues[taken:]))], end, now)
            cost += next_cost
        unserved -= next_size
        if unserved:
            full = path.rests[-1][0]  # the time of a full batch
            cost += rules.backlog_cost(unserved, max_batch, full, end - now)
            end += rules.backlog_ticks(unserved, max_batch, full)
        return cost + self.backlog * (end - now)

    def _sweep(self, path: RemainingLayers, groups: Sequence[WaitingGroup], start: int, now: int) -> tuple[float, int]:
        """Return the cost and the end of a sweep. groups: the requests that it takes along, in order of layers.

        The sweep begins with the first group, at tick *start*. Times in the cost count from *now*.
        """
        miss = path.rests[0][0] * self.miss // 100  # rests[0][0]: the time of a request alone
        ahead = [
            (group, remaining_exit_shares(path.program, group.layer), UNDER_WAY if group.layer else 1)
            for group in groups
        ]
        layer, time, size, cost = groups[0].layer, start, 0, 0.0
        for stop in path.stops:
            if stop <= layer:
                continue
            size += sum([group.size for group in groups if group.layer == layer])
            rest = path.rests[size - 1]
            time += rest[layer] - rest[stop]
            for group, shares, miss_weight in ahead:
                share = shares.get(stop)
                if share:
                    late = bisect_left(group.dues, time) * miss_weight
                    cost += rules.leaving_cost(share, group.size, time - now, late, miss)
            layer = stop
        return cost, time


def _waiting_group(batch: Candidate) -> WaitingGroup:
    dues, _ = batch.refill or NO_REFILL
    return WaitingGroup(batch.layer, batch.size, sorted(dues))


@lru_cache(maxsize=4096)
def remaining_exit_shares(program: Program, layer: int) -> dict[int, float]:
    """Return, for the requests at a layer, the share that leaves at each exit ahead, by the exit's number of layers.

    All leave at the end if the exit rates are not known.
    """
    ends = (*program.exits, len(program))
    rates = program.exit_rates or (0.0,) * (len(ends) - 1) + (1.0,)
    ahead = {end: rate for end, rate in zip(ends, rates, strict=True) if end > layer}
    total = sum(ahead.values())
    return {end: rate / total for end, rate in ahead.items()} if total else {len(program): 1.0}
