"""The fairness rule, compiled: which streams a band holds back.

Twin of ``weft.engine.policies.fairness.may_go``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels import rules
from weft.kernels.compiling import inlined

Ints = npt.NDArray[np.int64]

DONE = 1 << 62
"""Progress of a stream that has issued all its queries: so far ahead that it is always held back."""

within_lag = inlined(rules.within_lag)


class KernelBand(NamedTuple):
    """A band and the progress of the streams in it.

    Loops get None instead if no stream is held back. numba then leaves out the branches under ``band is not None``,
    but only if the loop tests the argument under its own name.
    """

    gains: Ints
    """Progress that each layer adds, stream after stream."""
    max_lag: int
    """In units of progress."""
    quota: Ints
    """The queries that each stream may issue in the run; -1: no limit."""
    progress: Ints
    queries: Ints
    """The queries that each stream has completed."""

    @classmethod
    def at_start(cls, gains: Ints, max_lag: int, quota: Sequence[int] | None, streams: int) -> KernelBand:
        """Return the band at the start of a run with *streams* streams; *quota* None: no limits."""
        limits = np.array(quota if quota else [-1] * streams, np.int64)
        return cls(gains, max_lag, limits, np.zeros(streams, np.int64), np.zeros(streams, np.int64))


@inlined
def furthest_behind(progress):
    """Return the stream with the least progress, the lowest number among equals."""
    behind = 0
    for stream in range(1, len(progress)):
        if progress[stream] < progress[behind]:
            behind = stream
    return behind


@inlined
def hold_back(band, position, held):
    """Mark in *held* the streams that may not issue their next layer; *position*: its index among all layers."""
    behind = furthest_behind(band.progress)
    least = band.progress[behind]
    for stream in range(len(held)):
        held[stream] = stream != behind and not within_lag(
            band.progress[stream], band.gains[position[stream]], least, band.max_lag
        )


@inlined
def advance(band, stream, layer, ends_query):
    """Count the progress of an issued layer; *layer*: its index among all layers; *ends_query*: if it is the last."""
    band.progress[stream] += band.gains[layer]
    if ends_query:
        band.queries[stream] += 1
        if band.queries[stream] == band.quota[stream]:
            band.progress[stream] = DONE
