"""A request on a machine as the engine runs it: pieces that each take some of the array and some of the channel.

A machine that overlaps a share e of its two resources is busy max(C, M) + (1 - e) min(C, M) + O. So is a decoupled
device whose array is taken for C + (1 - e) M + O and whose channel for M + (1 - e) C + O, the two loads that a
placement fills machines by (``placing.problem``). The channel's work comes one piece later than the array's, so that a
request alone takes the longer of the two and not a piece more.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from weft.costs.program import Clock, Program
from weft.placing.demand import Need

MOST_PIECES = 64
AHEAD = 4
"""How many of its longest pieces a machine is given ahead."""

CLOCK = Clock.nanoseconds()


class Work(NamedTuple):
    """What a request takes of a machine, in ticks."""

    compute: int
    fetch: int
    besides: int
    """What it takes alone beyond the longer of the two: its own computing and memory do not overlap."""
    pieces: int


def work_of(need: Need, overlap: float, speed: float = 1.0) -> Work:
    """What a request with this need takes of a machine, altogether."""
    at = need.at_speed(speed)
    compute = at.compute_s + (1 - overlap) * at.memory_s + at.other_s
    fetch = at.memory_s + (1 - overlap) * at.compute_s + at.other_s
    pieces = math.ceil(max(compute, fetch) / at.segment_s - 1e-9) if at.segment_s else 1
    besides = max(0.0, at.alone_s - max(compute, fetch))
    ticks = (max(1, CLOCK.ticks(compute)), max(1, CLOCK.ticks(fetch)), CLOCK.ticks(besides))
    return Work(*ticks, min(MOST_PIECES, max(1, pieces)))


def program_of(name: str, work: Work) -> Program:
    """The pieces, one more than there are segments: the array's work begins with the first, the channel's ends it."""
    compute, fetch = (*_parted(work.compute, work.pieces), 0), (1, *_parted(work.fetch, work.pieces))
    return Program(name, tuple(f"{name}[{place}]" for place in range(len(fetch))), fetch, compute, fetch)


def _parted(total: int, count: int) -> tuple[int, ...]:
    return tuple(total * (part + 1) // count - total * part // count for part in range(count))
