"""Whole queries one after another, compiled; twin of ``weft.engine.policies.in_order``.

Such an order does not depend on how long layers take: it follows from the order of the queries, and from the band that
holds streams back.
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
    ticks: Ints, offsets: Ints, factors: Ints, divisor: int, work: int, chosen: Ints, band: KernelBand | None = None
) -> int:
    """Issue whole queries until *work* ticks are issued or *chosen* is full; return the number of issues.

    ticks: the work of each layer, stream after stream. offsets: the index where each stream begins, and the number of
    layers. chosen: filled with the stream of each issue. A begun query continues; otherwise the stream with the least
    ``completed_queries * factor // divisor`` goes next (*factors*: by stream), the lower number among equals.
    """
    position = offsets[:-1].copy()
    heads = position, np.full(len(position), -1, np.int64), np.zeros(len(position), np.bool_), position * 0
    return int(_order(ticks, offsets, factors, divisor, heads, band, work, chosen))


@loop
def _order(ticks, offsets, factors, divisor, heads, band, work, chosen):
    """The loop of ``order_queries``, with its parameters.

    heads: for each stream its position among all layers, its last issue or -1, whether the band holds it back, and its
    completed queries.
    """
    ticks, offsets, factors, heads, chosen = borrowed((ticks, offsets, factors, heads, chosen))
    position, last_issued, held, completed_queries = heads
    issued_work = n = 0
    best, ends_query = -1, True
    while issued_work < work and n < len(chosen):
        if band is not None:
            hold_back(band, position, held)
        if ends_query or band is not None:  # only a band interrupts a query
            best, best_key = -1, (0, 0)
            for stream in range(len(position)):
                if held[stream]:
                    continue
                key = (
                    resumes(position[stream] - offsets[stream], last_issued[stream]),
                    completed_queries[stream] * factors[stream] // divisor,
                )
                if best < 0 or key < best_key:
                    best, best_key = stream, key
        layer = position[best]
        chosen[n], last_issued[best] = best, n
        issued_work += ticks[layer]
        n += 1
        ends_query = layer + 1 == offsets[best + 1]
        if band is not None:
            advance(band, best, layer, ends_query)
        if ends_query:
            completed_queries[best] += 1
        position[best] = offsets[best] if ends_query else layer + 1
    return n
