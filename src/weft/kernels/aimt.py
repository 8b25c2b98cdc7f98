"""AI-MT's two-threshold rule, compiled; twin of ``weft.engine.policies.aimt``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.kernels import rules
from weft.kernels.band import KernelBand, advance, hold_back
from weft.kernels.buffer import columns, issued, on_chip
from weft.kernels.compiling import borrowed, inlined, loop

Ints = npt.NDArray[np.int64]

aimt_key = inlined(rules.aimt_key)


def weave_aimt(
    fetch: Ints,
    compute: Ints,
    first: Ints,
    buffer: int,
    compute_threshold: int,
    memory_threshold: int,
    work: int,
    chosen: Ints,
    band: KernelBand | None = None,
) -> int:
    """Issue by thresholds (ticks) until *work* is issued or *chosen* is full; returns the number of issues."""
    position = first[:-1].copy()
    heads = position, np.full(len(position), -1, np.int64), np.zeros(len(position), np.bool_)
    issues, done = columns(len(chosen) + 1), np.empty(len(chosen), np.int64)
    thresholds = compute_threshold, memory_threshold
    return int(_weave(fetch, compute, first, heads, band, issues, done, buffer, thresholds, work, chosen))


@loop
def _weave(fetch, compute, first, heads, band, issues, done, buffer, thresholds, work, chosen):
    """heads: where each stream is, when it was last issued, and whether the band holds it back."""
    fetch, compute, first, heads = borrowed((fetch, compute, first, heads))
    issues, done, chosen = borrowed((issues, done, chosen))
    position, last_issued, held = heads
    before, peak = issues[0], issues[1]
    seen = freed = 0
    channel = array = fetched = issued_work = n = 0
    while issued_work < work and n < len(chosen):
        while freed < n and done[freed] <= channel:
            freed += 1
        free = buffer - (fetched - before[freed])
        distance = array - channel
        best, least = -1, (0, 0)
        if band is not None:
            hold_back(band, position, held)
        for stream in range(len(position)):
            if held[stream]:
                continue
            at = position[stream]
            key = aimt_key(fetch[at], compute[at], last_issued[stream], free, distance, thresholds[0], thresholds[1])
            if best < 0 or key < least:
                best, least = stream, key
        at = position[best]
        size, busy = fetch[at], compute[at]
        channel, seen = on_chip(before, peak, seen, peak[n], channel, size, fetched - buffer + size)
        array, fetched, n = issued(before, peak, n, array, channel, fetched, size, busy)
        done[n - 1], chosen[n - 1], last_issued[best] = array, best, n - 1
        issued_work += max(size, busy)
        if band is not None:
            advance(band, best, at, at + 1 == first[best + 1])
        position[best] = at + 1 if at + 1 < first[best + 1] else first[best]
    return n
