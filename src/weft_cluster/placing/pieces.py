"""A request in weft's simulator: equal segments that use a compute array and a memory channel.

A machine that overlaps a share of its two resources is simulated as one whose channel and array run side by side
without loss, and each model takes of them the two loads of ``problem``: together these fill such a machine exactly when
they fill the real one. A request can wait for as long as it could there: its deadline is what it takes alone in the
simulation, and its slack.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from weft.devices.costs.program import Clock, Program
from weft_cluster.placing.demand import Need

# Cap on segments per request. More: simulations take longer in proportion. Fewer: segments are longer than on the real
# machine, and urgent requests wait longer for them.
MOST_SEGMENTS = 32
LONGEST_S = 600.0
"""Cap on the slack of a simulated request: files allow deadlines whose nanoseconds do not fit into 64 bits, and no
simulation runs that long."""
AHEAD = 2
"""How many of its longest pieces a machine is given ahead."""

CLOCK = Clock.nanoseconds()


class Pieces(NamedTuple):
    """Equal pieces, in ticks."""

    segments: int
    array: int
    """What each takes of the array..."""
    channel: int
    """... and of the channel before."""

    @property
    def alone(self) -> int:
        """What all of them take on an idle machine."""
        return self.channel + (self.segments - 1) * max(self.channel, self.array) + self.array

    def due(self, slack_s: float) -> int:
        """The deadline of a request that could wait so long on the real machine; at least a tick."""
        return max(1, self.alone + CLOCK.ticks(min(slack_s, LONGEST_S)))

    def program(self, model: str) -> Program:
        names = tuple(f"{number}" for number in range(self.segments))
        channel = (self.channel,) * self.segments
        return Program(model, names, channel, (self.array,) * self.segments, channel)


def pieces_of(need: Need, overlap: float) -> Pieces:
    """Divide a request into as many pieces as it has segments, for a machine with this *overlap*."""
    apart = 1 - overlap
    count = int(min(MOST_SEGMENTS, max(1, np.ceil(need.alone_s / need.segment_s - 1e-9)))) if need.segment_s else 1
    array = max(1, CLOCK.ticks((need.compute_s + apart * need.memory_s + need.other_s) / count))
    channel = max(1, CLOCK.ticks((need.memory_s + apart * need.compute_s + need.other_s) / count))
    return Pieces(count, array, channel)


def buffer_of(programs: Iterable[Program]) -> int:
    """The weight buffer of a machine with these programs, which limits what is queued ahead."""
    return AHEAD * max((program.largest_fetch for program in programs), default=1)
