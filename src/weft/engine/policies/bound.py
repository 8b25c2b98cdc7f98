"""The two-resource bound: the throughput that no schedule can exceed, its dual prices and its mix.

A query of stream i keeps the PE array busy for C_i ticks and the memory channel for M_i; alone on the device it takes
T_i. With x_i queries per tick, the system throughput is sum x_i T_i, under sum x_i C_i <= 1 and sum x_i M_i <= 1: a
linear program with two constraints. Its optimum is at a corner, where at most two streams have queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations

import numpy as np

from weft.devices.costs.program import Program

LEAST_SHARE = 0.1
"""Least throughput of a stream, as a share of an equal division of the time; a stream below it counts as starved."""

EQUALITY_LOSS = 0.001
"""Share of the throughput that may be given up to divide the time equally: users expect equal models to be treated
alike."""

_SETTLE_LAYERS = 200_000
"""Most layers that ``alone_ticks`` replays before it measures: a model that fetches little fills the buffer slowly."""


def least_share(streams: int) -> float:
    """Return the least share of the system throughput of each stream."""
    return LEAST_SHARE / streams


def raise_starved(shares: Sequence[float]) -> list[float]:
    """Return the throughput of each stream if every starved stream ran alone until it has its least share.

    This makes a schedule that starves a stream comparable with one that does not. While a stream runs alone, the
    throughput is 1; *shares* are earned in the rest of the time.
    """
    least, time_left = least_share(len(shares)), 1.0
    for _ in shares:  # with less time left, more streams fall below their least share
        starved = [share for share in shares if share * time_left < least]
        # Solved for time_left: 1 - time_left = len(starved) * least - sum(starved) * time_left, the time alone.
        time_left = (1 - len(starved) * least) / (1 - sum(starved))
    return [max(least, share * time_left) for share in shares]


@dataclass(frozen=True, slots=True)
class QueryDemand:
    """The use of both resources by one query of a stream, in ticks."""

    compute: int
    memory: int
    alone: float
    """Time per query when the model has the device to itself, back to back."""


@dataclass(frozen=True, slots=True)
class Prices:
    """Throughput lost per idle tick of each resource (the linear program's dual variables)."""

    compute: float
    memory: float

    @property
    def bound(self) -> float:
        """The largest system throughput any schedule can reach."""
        return self.compute + self.memory

    def of(self, demand: QueryDemand) -> float:
        """Return the price of the resources that a query uses."""
        return self.compute * demand.compute + self.memory * demand.memory

    def queries(self, program: Program, layers: int) -> float:
        """Return the number of queries in *layers* layers issued in order.

        An unfinished query counts as the part of its price that its issued layers have.
        """
        complete, issued = divmod(layers, len(program))
        total = self.of(QueryDemand(program.total_compute, program.total_fetch, 0.0))
        issued_price = self.of(QueryDemand(sum(program.compute[:issued]), sum(program.fetch[:issued]), 0.0))
        return complete + (issued_price / total if total else 0.0)


def demand_of(program: Program, buffer: int) -> QueryDemand:
    return QueryDemand(program.total_compute, program.total_fetch, alone_ticks(program, buffer))


@lru_cache(maxsize=256)  # one run asks for the same few models many times
def alone_ticks(program: Program, buffer: int) -> float:
    """Return the steady-state ticks per query of a model that runs alone with eager prefetch.

    Measured between two completions, the earlier one late enough that the buffer has filled.
    """
    # imported here: a server imports all policies but must not compile kernels
    from weft.kernels.replay import COMPUTE_END, replay

    layers = len(program)
    settle = 4 + -(-buffer // max(1, program.total_fetch))  # queries until the buffer has filled, and a few more
    settle = min(settle, max(4, _SETTLE_LAYERS // layers))
    queries = 2 * settle
    times = np.empty((queries * layers, 4), np.int64)
    replay(
        np.array(program.fetch, np.int64),
        np.array(program.compute, np.int64),
        np.array([0, layers], np.int64),
        buffer,
        np.zeros(queries * layers, np.int64),
        times,
    )
    ends = times[layers - 1 :: layers, COMPUTE_END]  # of the last layer of each query
    return float(ends[-1] - ends[settle - 1]) / (queries - settle)


def prices(demands: Sequence[QueryDemand]) -> Prices:
    """Return the optimal dual prices: the lowest at which no stream's T_i exceeds the price of its query."""
    corners = [(max(d.alone / d.compute for d in demands), 0.0)] if all(d.compute for d in demands) else []
    if all(d.memory for d in demands):
        corners.append((0.0, max(d.alone / d.memory for d in demands)))
    for a, b in combinations(demands, 2):
        determinant = a.compute * b.memory - b.compute * a.memory
        if determinant:
            corner = (
                (a.alone * b.memory - b.alone * a.memory) / determinant,
                (a.compute * b.alone - b.compute * a.alone) / determinant,
            )
            if min(corner) >= 0 and _covers(corner, demands):
                corners.append(corner)
    return Prices(*min(corners, key=sum))


def _covers(corner: tuple[float, float], demands: Sequence[QueryDemand]) -> bool:
    """Return whether the prices of a corner satisfy the constraint of every stream, up to rounding."""
    compute_price, memory_price = corner
    return all(compute_price * d.compute + memory_price * d.memory >= d.alone * (1 - 1e-12) for d in demands)


def mix_prices(demands: Sequence[QueryDemand], mix: Sequence[float]) -> Prices:
    """Return the prices for a given mix of queries: only the busier resource has a price above 0."""
    throughput = sum(part * d.alone for part, d in zip(mix, demands, strict=True))
    compute = sum(part * d.compute for part, d in zip(mix, demands, strict=True))
    memory = sum(part * d.memory for part, d in zip(mix, demands, strict=True))
    return Prices(throughput / compute, 0.0) if compute >= memory else Prices(0.0, throughput / memory)


def best_mix(demands: Sequence[QueryDemand]) -> tuple[float, ...]:
    """Return the queries per tick of each stream at the highest throughput that gives every stream its least share."""
    least = [least_share(len(demands)) / d.alone for d in demands]
    array_room = 1 - sum(rate * d.compute for rate, d in zip(least, demands, strict=True))
    channel_room = 1 - sum(rate * d.memory for rate, d in zip(least, demands, strict=True))
    best, extra = -1.0, [0.0] * len(demands)  # extra: queries per tick beyond the least ones
    for streams, rates in _corners(demands, array_room, channel_room):
        throughput = sum(rate * demands[stream].alone for stream, rate in zip(streams, rates, strict=True))
        if throughput > best * (1 + 1e-12):  # among equal corners the first wins, whatever the rounding
            best, extra = throughput, [0.0] * len(demands)
            for stream, rate in zip(streams, rates, strict=True):
                extra[stream] = rate
    return _prefer_equal([rate + extra_rate for rate, extra_rate in zip(least, extra, strict=True)], demands)


def _prefer_equal(rates: Sequence[float], demands: Sequence[QueryDemand]) -> tuple[float, ...]:
    """Return *rates*, or those of an equal division of the time if it costs at most EQUALITY_LOSS of the throughput."""
    equal = [1 / (len(demands) * max(d.compute, d.memory)) for d in demands]
    throughput, equal_throughput = (
        sum(x * d.alone for x, d in zip(mix, demands, strict=True)) for mix in (rates, equal)
    )
    return tuple(equal if equal_throughput >= (1 - EQUALITY_LOSS) * throughput else rates)


def _corners(
    demands: Sequence[QueryDemand], array_room: float, channel_room: float
) -> list[tuple[tuple[int, ...], tuple[float, ...]]]:
    """Return the streams with queries, and their rates, at every vertex of the linear program.

    array_room, channel_room: the capacity of the PE array and of the memory channel, as fractions of the time.
    """
    corners: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
    for i, d in enumerate(demands):
        limits = [room / need for room, need in ((array_room, d.compute), (channel_room, d.memory)) if need]
        corners.append(((i,), (min(limits),)))
    for (i, a), (j, b) in combinations(enumerate(demands), 2):
        determinant = a.compute * b.memory - b.compute * a.memory
        if determinant:
            rates = (
                (array_room * b.memory - channel_room * b.compute) / determinant,
                (channel_room * a.compute - array_room * a.memory) / determinant,
            )
            if min(rates) >= 0:
                corners.append(((i, j), rates))
    return corners
