"""AI-MT's two-threshold rule, compiled; twin of ``weft.engine.policies.aimt``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.kernels import rules
from weft.kernels.band import KernelBand, advance, hold_back
from weft.kernels.buffer import StreamLayers, columns, issued, on_chip
from weft.kernels.compiling import borrowed, inlined, loop

Ints = npt.NDArray[np.int64]

aimt_key = inlined(rules.aimt_key)


def weave_aimt(
    layers: StreamLayers,
    buffer: int,
    thresholds: tuple[int, int],
    work: int,
    chosen: Ints,
    band: KernelBand | None = None,
) -> int:
    """Issue layers by AI-MT's rule until *work* ticks are issued or *chosen* is full; return the number of issues.

    buffer: the weight buffer in ticks. thresholds: for compute and for memory, in ticks. chosen: filled with the stream
    of each issue. band: the fairness rule; None: no stream is held back.
    """
    position = layers.offsets[:-1].copy()
    heads = position, np.full(len(position), -1, np.int64), np.zeros(len(position), np.bool_)
    issues, compute_ends = columns(len(chosen) + 1), np.empty(len(chosen), np.int64)
    return int(_weave(layers, heads, band, issues, compute_ends, buffer, thresholds, work, chosen))


@loop
def _weave(layers, heads, band, issues, compute_ends, buffer, thresholds, work, chosen):
    """The loop of ``weave_aimt``, with its parameters.

    heads: for each stream its position among all layers, its last issue or -1, whether it is held back. issues: the
    columns of ``buffer``. compute_ends: scratch space, when the array ends each issue.
    """
    fetch, compute, offsets = borrowed(layers)
    heads, issues, compute_ends, chosen = borrowed((heads, issues, compute_ends, chosen))
    position, last_issued, held = heads
    before, peak = issues[0], issues[1]
    pointer = freed = 0
    channel = array = fetched = issued_work = n = 0
    while issued_work < work and n < len(chosen):
        while freed < n and compute_ends[freed] <= channel:
            freed += 1
        free = buffer - (fetched - before[freed])
        distance = array - channel
        best, best_key = -1, (0, 0)
        if band is not None:
            hold_back(band, position, held)
        for stream in range(len(position)):
            if held[stream]:
                continue
            layer = position[stream]
            key = aimt_key(
                fetch[layer], compute[layer], last_issued[stream], free, distance, thresholds[0], thresholds[1]
            )
            if best < 0 or key < best_key:
                best, best_key = stream, key
        layer = position[best]
        size, busy = fetch[layer], compute[layer]
        channel, pointer = on_chip(before, peak, pointer, peak[n], channel, size, fetched - buffer + size)
        array, fetched, n = issued(before, peak, n, array, channel, fetched, size, busy)
        compute_ends[n - 1], chosen[n - 1], last_issued[best] = array, best, n - 1
        issued_work += max(size, busy)
        if band is not None:
            advance(band, best, layer, layer + 1 == offsets[best + 1])
        position[best] = layer + 1 if layer + 1 < offsets[best + 1] else offsets[best]
    return n
