"""The ways in which models can share a GPU, and how fast each goes in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

from weft.devices.shares import Shares

NOWHERE = -1


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
    return _ways(shares, programs, shares.seen.version)


@lru_cache(maxsize=4096)
def _ways(shares: Shares, programs: tuple[int, ...], version: int) -> tuple[SharingWay, ...]:
    """The same for what is known of the shares in a version."""
    found = []
    for members, on in _settled(shares, len(programs)):
        lanes, speeds = [NOWHERE] * len(programs), [0.0] * len(programs)
        fast = shares.speeds([programs[each] for each in members], on)
        for member, lane, speed in zip(members, on, fast, strict=True):
            lanes[member], speeds[member] = shares.whole[0] if lane in shares.whole else lane, speed
        found.append(SharingWay(tuple(lanes), tuple(speeds), sum(fast)))
    found.sort(key=lambda way: -way.total)
    kept: list[SharingWay] = []
    for way in found:
        if not any(all(a >= b for a, b in zip(other.speeds, way.speeds, strict=True)) for other in kept):
            kept.append(way)
    return tuple(kept)


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
