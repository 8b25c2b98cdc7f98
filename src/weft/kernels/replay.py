"""The times of a given order of issues; twin of ``weft.devices.decoupled.issue``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.kernels.buffer import columns, issued, on_chip
from weft.kernels.compiling import borrowed, loop

Ints = npt.NDArray[np.int64]

COMPUTE_END = 3
"""Column of *times* with the end of each compute."""


def replay(
    fetch: Ints, compute: Ints, offsets: Ints, buffer: int, chosen: Ints, times: Ints, *, in_step: bool = False
) -> None:
    """Fill *times*, shape (issues, 4): fetch start, fetch end, compute start, compute end.

    fetch, compute: ticks of the layers, stream after stream; stream i owns ``offsets[i]`` to ``offsets[i + 1]``.
    buffer: the weight buffer in ticks. chosen: the stream of each issue, in order. A fetch starts as soon as the
    channel is free, and with *in_step* not before the previous layer begins to compute.
    """
    _replay(fetch, compute, offsets, buffer, offsets[:-1].copy(), columns(len(chosen) + 1), chosen, in_step, times)


@loop
def _replay(fetch, compute, offsets, buffer, position, issues, chosen, in_step, times):
    """The loop of ``replay``, with its parameters. issues: the columns of ``buffer``. position: next layers."""
    fetch, compute, offsets = borrowed((fetch, compute, offsets))
    position, issues, chosen, times = borrowed((position, issues, chosen, times))
    before, peak = issues[0], issues[1]
    channel = array = compute_start = fetched = pointer = n = 0
    for stream in chosen:
        layer = position[stream]
        size = fetch[layer]
        start = max(channel, compute_start) if in_step else channel
        end, pointer = on_chip(before, peak, pointer, peak[n], start, size, fetched - buffer + size)
        compute_start = max(array, end)
        times[n, 0], times[n, 1], times[n, 2] = start, end, compute_start
        array, fetched, n = issued(before, peak, n, array, end, fetched, size, compute[layer])
        channel, times[n - 1, 3] = end, array
        position[stream] = layer + 1 if layer + 1 < offsets[stream + 1] else offsets[stream]
