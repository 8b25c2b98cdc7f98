"""Counts of a simulated cluster, plain or compiled, and its requests in ticks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft_cluster.placing.pieces import CLOCK
from weft_cluster.routing.traffic import RequestBlock

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ClusterTally:
    """Counts by stream and by machine."""

    counts: Ints
    """(streams, 10), by the columns of ``kernels.request_state``; latencies are those within machines."""
    histogram: Ints
    """Latencies of all streams, by ``request_state.bin_of``."""
    busy: Ints
    """(machines): ticks in which its array was taken..."""
    through: Ints
    """... and when it was through with what it was last given."""
    routed: Ints
    """(requests): the stream that each went to; none where that was not asked for."""


class TickedRequests(NamedTuple):
    """Requests as a run takes them."""

    time: Ints
    model: Ints
    draws: Floats
    """(requests, 2): from 0 to 1, for routers that draw lots."""

    @classmethod
    def none(cls) -> TickedRequests:
        return cls(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 2)))

    def after(self, others: TickedRequests) -> TickedRequests:
        """These behind others."""
        return TickedRequests(
            np.concatenate([others.time, self.time]),
            np.concatenate([others.model, self.model]),
            np.concatenate([others.draws, self.draws]),
        )

    def rest(self, count: int) -> TickedRequests:
        """All but the first *count*."""
        return TickedRequests(self.time[count:], self.model[count:], self.draws[count:])


def in_ticks(blocks: Iterable[RequestBlock], seed: int) -> Iterator[TickedRequests]:
    """Requests block by block; *seed*: of the lots that routers draw."""
    rng = np.random.default_rng([seed, 1])
    for block in blocks:
        time = np.rint(block.times_s / CLOCK.tick_s).astype(np.int64)
        yield TickedRequests(time, block.model, rng.random((len(time), 2)))
