"""The ways in which models can share a GPU, and how fast each goes in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from weft.devices.shares import Shares

NOWHERE = -1
MOST_KEPT = 4096
"""Sets of programs whose ways are remembered."""


class SharingWay(NamedTuple):
    """A way to share a GPU among some works, which are known by their places."""

    lanes: tuple[int, ...]
    """The lane that each is on, or ``NOWHERE``; the first stream of the whole GPU stands for all of those."""
    speeds: tuple[float, ...]
    """How fast each goes, over its speed alone on the whole GPU; 0 where it waits."""
    total: float
    """The sum of the speeds."""


def ways(shares: Shares, programs: tuple[int, ...]) -> tuple[SharingWay, ...]:
    """Those in which nobody can go faster without another going slower, the highest total first.

    One runs alone, two on the sides of a cut, or two and more on streams of the whole.
    """
    kept, key = _kept(shares), shares.tagged(programs)
    found = kept.get(key)
    if found is None:
        if len(kept) >= MOST_KEPT:
            kept.clear()
        found = kept[key] = _found(shares, programs)
    return found


@lru_cache(maxsize=64)
def _kept(shares: Shares) -> dict[tuple[int, ...], tuple[SharingWay, ...]]:
    """The ways of those who were asked for, by the tags of their programs."""
    return {}


def _found(shares: Shares, programs: tuple[int, ...]) -> tuple[SharingWay, ...]:
    found = []
    for members, on in _settled(shares, len(programs)):
        lanes, speeds = [NOWHERE] * len(programs), [0.0] * len(programs)
        fast = _speeds(shares, [programs[each] for each in members], on)
        for member, lane, speed in zip(members, on, fast, strict=True):
            lanes[member], speeds[member] = shares.whole[0] if lane in shares.whole else lane, speed
        found.append(SharingWay(tuple(lanes), tuple(speeds), sum(fast)))
    found.sort(key=lambda way: -way.total)
    kept: list[SharingWay] = []
    for way in found:
        if not _beaten(way.speeds, kept):
            kept.append(way)
    return tuple(kept)


def _speeds(shares: Shares, programs: list[int], lanes: tuple[int, ...]) -> list[float]:
    """How fast programs go on lanes; few others are like them, whatever runs besides."""
    kept, key = _kept_speeds(shares), (lanes, shares.tagged(programs))
    if key not in kept:
        if len(kept) >= MOST_KEPT:
            kept.clear()
        kept[key] = shares.speeds(programs, lanes)
    return kept[key]


@lru_cache(maxsize=64)
def _kept_speeds(shares: Shares) -> dict[tuple[object, ...], list[float]]:
    """What was worked out of them."""
    return {}


def _beaten(speeds: tuple[float, ...], kept: list[SharingWay]) -> bool:
    """Whether in one of the ways everybody goes at least as fast."""
    for other in kept:
        for fast, speed in zip(other.speeds, speeds, strict=True):
            if fast < speed:
                break
        else:
            return True
    return False


def _settled(shares: Shares, works: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Who runs, by their places, and on which lanes."""
    everybody, most = range(works), len(shares.whole)
    for one in everybody:
        yield (one,), (shares.whole[0],)
    for count in range(2, min(works, most) + 1):
        for some in combinations(everybody, count):
            yield some, shares.whole[:count]
    for pair in combinations(everybody, 2):
        for large, small in shares.cuts:
            yield pair, (large, small)
            yield pair, (small, large)
