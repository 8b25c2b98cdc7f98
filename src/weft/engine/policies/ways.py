"""The ways in which models can share a GPU, with the speed of each model in each way."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from weft.devices.shares import Shares

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

NOWHERE = -1
"""The lane of a work that waits."""
MOVE_FACTOR = 0.97
"""Factor on the throughput of ways in which a work changes lanes: their speeds are reached only when all works have
changed."""
MOST_KEPT = 4096
"""Entries of each cache of ways; it is emptied when full, since a server sees ever new combinations of models."""

K = TypeVar("K")
V = TypeVar("V")


class SharingWay(NamedTuple):
    """A way to share a GPU among works, which are identified by their places in a list."""

    lanes: tuple[int, ...]
    """The lane of each work, or ``NOWHERE``; the first stream of the whole GPU stands for any stream of it."""
    speeds: tuple[float, ...]
    """The speed of each work, over its speed alone on the whole GPU; 0 if it waits."""
    total: float
    """The sum of the speeds."""


class OpenWays(NamedTuple):
    """The ways that are possible while some works are on lanes."""

    ways: tuple[SharingWay, ...]
    expected_speeds: Floats
    """By way and work; times ``MOVE_FACTOR`` for ways in which a work changes lanes."""


class _AllWays(NamedTuple):
    """All ways to share a GPU among some programs."""

    ways: tuple[SharingWay, ...]
    lanes: Ints
    """Lanes by way and work."""
    speeds: Floats
    """Speeds by way and work."""
    hopes: Floats
    """By way, the factor by which its works may run faster than estimated (``Shares.hope``)."""


class _WaysCache(NamedTuple):
    """Caches of the ways for one ``Shares``; keys begin with the tags of the programs (``Shares.tagged``)."""

    ways: dict[tuple[tuple[int, ...], bool], _AllWays]
    open_ways: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool], OpenWays]


def ways(shares: Shares, programs: tuple[int, ...]) -> tuple[SharingWay, ...]:
    """Return all ways to share a GPU among works that run *programs*, the highest total speed first.

    One work alone, two on the sides of a cut, or two and more on streams of the whole GPU. Dominated ways are included,
    since they may be the only ways in which works stay on their lanes.
    """
    return _all_ways(shares, programs, plain=False).ways


def _all_ways(shares: Shares, programs: tuple[int, ...], *, plain: bool) -> _AllWays:
    """Return all ways, from the cache if known. plain: only the ways with one work alone or two on streams."""
    cache, key = _ways_cache(shares).ways, (shares.tagged(programs), plain)
    all_ways = cache.get(key)
    return _store(cache, key, _compute_ways(shares, programs, plain)) if all_ways is None else all_ways


def open_ways(
    shares: Shares,
    programs: tuple[int, ...],
    held: tuple[int, ...],
    staying: tuple[int, ...] = (),
    *,
    hurried: bool = True,
) -> OpenWays:
    """Return the ways in which the works at the places *staying* keep their lanes.

    held: the lane that holds a segment of each work, or ``NOWHERE``. hurried: only ways with reliable speeds that take
    effect at once: one work alone, or two on streams of the whole GPU; all ways if a work has to stay on a cut.
    """
    cache, key = _ways_cache(shares).open_ways, (shares.tagged(programs), held, staying, hurried)
    options = cache.get(key)
    if options is None:
        plain = hurried and all([held[place] == shares.whole[0] for place in staying])
        options = _store(cache, key, _filter_ways(_all_ways(shares, programs, plain=plain), held, staying, hurried))
    return options


def _filter_ways(all_ways: _AllWays, held: tuple[int, ...], staying: tuple[int, ...], hurried: bool) -> OpenWays:
    """Return the ways in which the works at the places *staying* keep their lanes; parameters as of ``open_ways``."""
    on_same_lane, expected_speeds = all_ways.lanes == held, all_ways.speeds.copy()
    moved = ~(on_same_lane | (np.array(held) == NOWHERE)).all(axis=1)
    expected_speeds[moved] *= MOVE_FACTOR
    if not hurried:
        expected_speeds *= all_ways.hopes[:, None]
    if not staying:
        return OpenWays(all_ways.ways, expected_speeds)
    possible = np.flatnonzero(on_same_lane[:, staying].all(axis=1))
    return OpenWays(tuple([all_ways.ways[index] for index in possible]), expected_speeds[possible])


@lru_cache(maxsize=64)
def _ways_cache(shares: Shares) -> _WaysCache:
    return _WaysCache({}, {})


def _store(cache: dict[K, V], key: K, value: V) -> V:
    """Store a value in a cache and return it; a full cache is emptied first."""
    if len(cache) >= MOST_KEPT:
        cache.clear()
    cache[key] = value
    return value


def _compute_ways(shares: Shares, programs: tuple[int, ...], plain: bool) -> _AllWays:
    """Compute all ways, sorted by total speed; parameters as of ``_all_ways``."""
    with_hopes = []
    for members, member_lanes, lanes in _seatings_with_lanes(shares, len(programs), plain):
        kinds, speeds = [programs[member] for member in members], [0.0] * len(programs)
        member_speeds = shares.speeds(kinds, member_lanes)
        for member, speed in zip(members, member_speeds, strict=True):
            speeds[member] = speed
        with_hopes.append((SharingWay(lanes, tuple(speeds), sum(member_speeds)), shares.hope(kinds, member_lanes)))
    with_hopes.sort(key=lambda way_and_hope: -way_and_hope[0].total)
    all_ways = tuple([way for way, _ in with_hopes])
    return _AllWays(
        all_ways,
        np.array([way.lanes for way in all_ways]),
        np.array([way.speeds for way in all_ways]),
        np.array([hope for _, hope in with_hopes]),
    )


class _Seating(NamedTuple):
    """Which works run, and on which lanes; works are identified by their places in a list."""

    members: tuple[int, ...]
    """Places of the works that run."""
    member_lanes: tuple[int, ...]
    """The lane of each member."""
    lanes: tuple[int, ...]
    """``SharingWay.lanes``: the lane of every work, or ``NOWHERE`` if it waits."""


@lru_cache(maxsize=256)
def _seatings_with_lanes(shares: Shares, works: int, plain: bool) -> list[_Seating]:
    """Return every way to put some of *works* works on lanes; *plain*: as of ``_all_ways``."""
    seatings = []
    for members, member_lanes in _seatings(shares, works, plain):
        lanes = [NOWHERE] * works
        for member, lane in zip(members, member_lanes, strict=True):
            lanes[member] = shares.whole[0] if lane in shares.whole else lane
        seatings.append(_Seating(members, member_lanes, tuple(lanes)))
    return seatings


def _seatings(shares: Shares, works: int, plain: bool) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield, for every way to put some of *works* works on lanes, the places of the works that run and their lanes."""
    places, max_streams = range(works), min(2 if plain else works, len(shares.whole))
    for place in places:
        yield (place,), (shares.whole[0],)
    for count in range(2, max_streams + 1):
        for members in combinations(places, count):
            yield members, shares.whole[:count]
    for pair in () if plain else combinations(places, 2):
        for large, small in shares.cuts:
            yield pair, (large, small)
            yield pair, (small, large)
