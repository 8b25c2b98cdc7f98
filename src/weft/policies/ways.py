"""The ways in which models can share a GPU, and how fast each goes in each of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.devices.shares import Shares

NOWHERE = -1


class Ways(NamedTuple):
    """Ways to share a GPU among some works: a row for each way, a column for each work."""

    lanes: npt.NDArray[np.int64]
    """The lane that a work is on, or ``NOWHERE``; the first stream of the whole GPU stands for all of those."""
    speeds: npt.NDArray[np.float64]
    """Its speed, over that alone on the whole GPU; 0 where it waits."""


@lru_cache(maxsize=4096)
def ways(shares: Shares, programs: tuple[int, ...]) -> Ways:
    """All that are worth a thought: one alone, two on the sides of a cut, and two or more on streams of the whole."""
    rows, speeds = [], []
    for members, lanes in _settled(shares, len(programs)):
        row, speed = [NOWHERE] * len(programs), [0.0] * len(programs)
        found = shares.speeds([programs[each] for each in members], lanes)
        for member, lane, fast in zip(members, lanes, found, strict=True):
            row[member], speed[member] = shares.whole[0] if lane in shares.whole else lane, fast
        rows.append(row)
        speeds.append(speed)
    return Ways(np.array(rows, np.int64), np.array(speeds))


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
