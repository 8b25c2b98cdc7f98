"""Whole queries one after another, compiled; twin of ``weft.engine.policies.in_order``.

Such an order does not depend on how long layers take: it follows from whose query is next, and from the band that holds
streams back.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.kernels import rules
from weft.kernels.band import KernelBand, advance, hold_back
from weft.kernels.compiling import borrowed, inlined, loop

Ints = npt.NDArray[np.int64]

resumes = inlined(rules.resumes)


def order_queries(
    ticks: Ints,
    first: Ints,
    weights: Ints,
    divisor: int,
    work: int,
    chosen: Ints,
    band: KernelBand | None = None,
) -> int:
    """Issue until *work* is issued or *chosen* is full; returns the number of issues.

    ticks: work of each layer, all streams one after another. A stream's turn is its queries times its weight over the
    divisor; the least turn is next, and the first stream of equals.
    """
    position = first[:-1].copy()
    heads = position, np.full(len(position), -1, np.int64), np.zeros(len(position), np.bool_), position * 0
    return int(_order(ticks, first, weights, divisor, heads, band, work, chosen))


@loop
def _order(ticks, first, weights, divisor, heads, band, work, chosen):
    """heads: where each stream is, when it was last issued, whether the band holds it back, and its queries so far."""
    ticks, first, weights, heads, chosen = borrowed((ticks, first, weights, heads, chosen))
    position, last_issued, held, queries = heads
    issued_work = n = 0
    best, ends_query = -1, True
    while issued_work < work and n < len(chosen):
        if band is not None:
            hold_back(band, position, held)
        if ends_query or band is not None:  # only a band interrupts a query
            best, least = -1, (0, 0)
            for stream in range(len(position)):
                if held[stream]:
                    continue
                key = (
                    resumes(position[stream] - first[stream], last_issued[stream]),
                    queries[stream] * weights[stream] // divisor,
                )
                if best < 0 or key < least:
                    best, least = stream, key
        at = position[best]
        chosen[n], last_issued[best] = best, n
        issued_work += ticks[at]
        n += 1
        ends_query = at + 1 == first[best + 1]
        if band is not None:
            advance(band, best, at, ends_query)
        if ends_query:
            queries[best] += 1
        position[best] = first[best] if ends_query else at + 1
    return n
