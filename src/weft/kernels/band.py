"""The fairness rule, compiled: which streams a band holds back; twin of ``weft.engine.policies.fairness.may_go``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels import rules
from weft.kernels.compiling import inlined

Ints = npt.NDArray[np.int64]

DONE = 1 << 62
"""Progress of a stream that has issued all its queries: never behind, never to go."""

within_lag = inlined(rules.within_lag)


class KernelBand(NamedTuple):
    """A band and where the streams are in it.

    Loops get None instead if no stream is held back. numba then leaves out the branches under ``band is not None``,
    but only if the loop tests the argument under its own name.
    """

    gains: Ints
    """Progress that each layer makes, all streams one after another."""
    max_lag: int
    quota: Ints
    """Queries each stream may issue in all; -1 for no limit."""
    progress: Ints
    queries: Ints

    @classmethod
    def at_start(cls, gains: Ints, max_lag: int, quota: Sequence[int] | None, streams: int) -> KernelBand:
        limits = np.array(quota if quota else [-1] * streams, np.int64)
        return cls(gains, max_lag, limits, np.zeros(streams, np.int64), np.zeros(streams, np.int64))


@inlined
def furthest_behind(progress):
    """The first of the streams with the least progress."""
    behind = 0
    for stream in range(1, len(progress)):
        if progress[stream] < progress[behind]:
            behind = stream
    return behind


@inlined
def hold_back(band, position, held):
    """Mark the streams that may not issue their next layer; position: where each is among all layers."""
    behind = furthest_behind(band.progress)
    least = band.progress[behind]
    for stream in range(len(held)):
        held[stream] = stream != behind and not within_lag(
            band.progress[stream], band.gains[position[stream]], least, band.max_lag
        )


@inlined
def advance(band, stream, at, ends_query):
    """Count the layer *at* that a stream has issued."""
    band.progress[stream] += band.gains[at]
    if ends_query:
        band.queries[stream] += 1
        if band.queries[stream] == band.quota[stream]:
            band.progress[stream] = DONE
