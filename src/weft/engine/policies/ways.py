"""The ways in which models can share a GPU, and how fast each goes in each of them."""

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
STAY = 0.97
"""What another way than the present one counts for: until all have changed, nobody runs as that way says."""
MOST_KEPT = 4096
"""Sets of programs whose ways are remembered."""

K = TypeVar("K")
V = TypeVar("V")


class SharingWay(NamedTuple):
    """A way to share a GPU among some works, which are known by their places."""

    lanes: tuple[int, ...]
    """The lane that each is on, or ``NOWHERE``; the first stream of the whole GPU stands for all of those."""
    speeds: tuple[float, ...]
    """How fast each goes, over its speed alone on the whole GPU; 0 where it waits."""
    total: float
    """The sum of the speeds."""


class OpenWays(NamedTuple):
    """The ways that are open to works of which some are on lanes."""

    ways: tuple[SharingWay, ...]
    counts: Floats
    """Way, work -> the speed, less for those ways that are not the present one."""


class _AllWays(NamedTuple):
    """All ways to share among some programs."""

    ways: tuple[SharingWay, ...]
    lanes: Ints
    """The lanes of all of them, and the speeds: way, work."""
    speeds: Floats
    hopes: Floats
    """By how much the works of each way may go faster than that."""


class _Known(NamedTuple):
    """What was worked out for some shares, by the tags of programs."""

    ways: dict[tuple[tuple[int, ...], bool], _AllWays]
    open_ways: dict[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool], OpenWays]


def ways(shares: Shares, programs: tuple[int, ...]) -> tuple[SharingWay, ...]:
    """All of them, the highest total first: one runs alone, two on the sides of a cut, or two and more on streams of
    the whole. Also those that are slower for everybody than another: they may be the ones that leave works where they
    are."""
    return _all(shares, programs, plain=False).ways


def _all(shares: Shares, programs: tuple[int, ...], *, plain: bool) -> _AllWays:
    """plain: without those on the sides of a cut, and without three and more on streams."""
    kept, key = _known(shares).ways, (shares.tagged(programs), plain)
    found = kept.get(key)
    return _keep(kept, key, _found(shares, programs, plain)) if found is None else found


def open_ways(
    shares: Shares,
    programs: tuple[int, ...],
    held: tuple[int, ...],
    staying: tuple[int, ...] = (),
    *,
    hurried: bool = True,
) -> OpenWays:
    """Those of the ways that leave the works at the places *staying* where they are.

    held: the lane that has something of each work, or ``NOWHERE``. hurried: only ways that are well known and that
    works change to at once: one alone, or two on streams of the whole GPU; all where somebody has to stay elsewhere.
    """
    kept, key = _known(shares).open_ways, (shares.tagged(programs), held, staying, hurried)
    found = kept.get(key)
    if found is None:
        plain = hurried and all([held[at] == shares.whole[0] for at in staying])
        found = _keep(kept, key, _open(_all(shares, programs, plain=plain), held, staying, hurried))
    return found


def _open(known: _AllWays, held: tuple[int, ...], staying: tuple[int, ...], hurried: bool) -> OpenWays:
    at_home, counts = known.lanes == held, known.speeds.copy()
    moved = ~(at_home | (np.array(held) == NOWHERE)).all(axis=1)
    counts[moved] *= STAY
    if not hurried:
        counts *= known.hopes[:, None]
    if not staying:
        return OpenWays(known.ways, counts)
    kept = np.flatnonzero(at_home[:, staying].all(axis=1))
    return OpenWays(tuple([known.ways[at] for at in kept]), counts[kept])


@lru_cache(maxsize=64)
def _known(shares: Shares) -> _Known:
    return _Known({}, {})


def _keep(kept: dict[K, V], key: K, value: V) -> V:
    """Remember something, and forget all if that is too much."""
    if len(kept) >= MOST_KEPT:
        kept.clear()
    kept[key] = value
    return value


def _found(shares: Shares, programs: tuple[int, ...], plain: bool) -> _AllWays:
    found = []
    for members, on, lanes in _settled(shares, len(programs), plain):
        kinds, own = [programs[each] for each in members], [0.0] * len(programs)
        fast = shares.speeds(kinds, on)
        for member, speed in zip(members, fast, strict=True):
            own[member] = speed
        found.append((SharingWay(lanes, tuple(own), sum(fast)), shares.hope(kinds, on)))
    found.sort(key=lambda each: -each[0].total)
    every = tuple([way for way, _ in found])
    return _AllWays(
        every,
        np.array([way.lanes for way in every]),
        np.array([way.speeds for way in every]),
        np.array([hope for _, hope in found]),
    )


class _Settled(NamedTuple):
    """Who runs, by their places, on which lanes, and the lanes of everybody as a way has them."""

    members: tuple[int, ...]
    on: tuple[int, ...]
    lanes: tuple[int, ...]


@lru_cache(maxsize=256)
def _settled(shares: Shares, works: int, plain: bool) -> list[_Settled]:
    found = []
    for members, on in _seatings(shares, works, plain):
        lanes = [NOWHERE] * works
        for member, lane in zip(members, on, strict=True):
            lanes[member] = shares.whole[0] if lane in shares.whole else lane
        found.append(_Settled(members, on, tuple(lanes)))
    return found


def _seatings(shares: Shares, works: int, plain: bool) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Who runs, by their places, and on which lanes."""
    everybody, most = range(works), min(2 if plain else works, len(shares.whole))
    for one in everybody:
        yield (one,), (shares.whole[0],)
    for count in range(2, most + 1):
        for some in combinations(everybody, count):
            yield some, shares.whole[:count]
    for pair in () if plain else combinations(everybody, 2):
        for large, small in shares.cuts:
            yield pair, (large, small)
            yield pair, (small, large)
