"""Layerweaver's greedy choice, compiled; twin of ``weft.engine.policies.layerweaver``.

Two loops: one for any number of streams, and one for two streams, the common case, whose candidates
stay in registers. The cost of a candidate and the order of candidates are in ``rules``. *size* and *busy* are a layer's
fetch and compute ticks.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.kernels import rules
from weft.kernels.band import KernelBand, advance, hold_back
from weft.kernels.buffer import StreamLayers, columns, issued, on_chip, prefetchable
from weft.kernels.compiling import borrowed, inlined, loop

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

idle = inlined(rules.idle)
weave_key = inlined(rules.weave_key)
helps_starved = inlined(rules.helps_starved)


def weave_greedy(
    layers: StreamLayers, compute_bound: Bools, buffer: int, work: int, chosen: Ints, band: KernelBand | None = None
) -> int:
    """Issue the layer that causes the least idle time until *work* ticks are issued or *chosen* is full.

    compute_bound: by stream. buffer: the weight buffer in ticks. chosen: filled with the stream of each issue. band:
    the fairness rule; None: no stream is held back. Returns the number of issues.
    """
    issues = columns(len(chosen) + 1)
    if len(layers.offsets) == 3 and band is None:  # two streams
        return int(_weave_two(layers, compute_bound, issues, buffer, work, chosen))
    position = layers.offsets[:-1].copy()
    heads = position, layers.fetch[position], layers.compute[position], np.zeros(len(position), np.int64)
    held = np.zeros(len(position), np.bool_)
    return int(_weave(layers, compute_bound, issues, heads, held, band, buffer, work, chosen))


@loop
def _weave(layers, compute_bound, issues, heads, held, band, buffer, work, chosen):
    """The loop of ``weave_greedy`` for any number of streams, with its parameters.

    heads: for each stream its position among all layers, fetch and compute ticks of the layer there, and its pointer
    into the columns *issues*. held: scratch space, the streams that the band holds back.
    """
    largest = layers.fetch.max()
    fetch, compute, offsets = borrowed(layers)
    compute_bound, chosen, issues, heads, held = borrowed((compute_bound, chosen, issues, heads, held))
    before, peak = issues[0], issues[1]
    position, sizes, busies, _ = heads
    channel = array = fetched = issued_work = n = 0
    while issued_work < work and n < len(chosen):
        if band is not None:
            hold_back(band, position, held)
        clocks = channel, array, fetched, peak[n]
        # First among all streams, then among those that help a resource that all candidates starve.
        best, channel, wants_weights, wants_space = _least_idle(
            before, peak, clocks, heads, held, compute_bound, buffer, largest, False, False
        )
        if wants_weights or wants_space:
            helper, end, _, _ = _least_idle(
                before, peak, clocks, heads, held, compute_bound, buffer, largest, wants_weights, wants_space
            )
            if helper >= 0:
                best, channel = helper, end
        size, busy = sizes[best], busies[best]
        array, fetched, n = issued(before, peak, n, array, channel, fetched, size, busy)
        chosen[n - 1] = best
        issued_work += max(size, busy)
        layer = position[best] + 1
        if band is not None:
            advance(band, best, layer - 1, layer == offsets[best + 1])
        if layer == offsets[best + 1]:
            layer = offsets[best]
        position[best], sizes[best], busies[best] = layer, fetch[layer], compute[layer]
    return n


@inlined
def _least_idle(before, peak, clocks, heads, held, compute_bound, buffer, largest, wants_weights, wants_space):
    """Return the candidate with the least idle time, when it is on chip, and whether all starve the array or channel.

    before, peak: the columns of ``buffer``. clocks: as of ``priced``. heads, held, compute_bound: as of ``_weave``.
    wants_weights, wants_space: whether all candidates were found to let the array, or the channel, wait; then only
    streams that help that resource count (``rules.helps_starved``). The candidate is -1 if no stream counts.
    """
    _, sizes, busies, pointers = heads
    best, best_end, best_key = -1, 0, (0, 0)
    all_weights = all_space = True
    for stream in range(len(sizes)):
        if held[stream] or not helps_starved(wants_weights, wants_space, compute_bound[stream]):
            continue
        end, pointers[stream], key, for_weights, for_space = priced(
            before, peak, pointers[stream], clocks, sizes[stream], busies[stream], buffer, largest
        )
        all_weights &= for_weights > 0
        all_space &= for_space > 0
        if best < 0 or key < best_key:
            best, best_end, best_key = stream, end, key
    return best, best_end, all_weights, all_space


@inlined
def priced(before, peak, pointer, clocks, size, busy, buffer, largest):
    """Return when a candidate is on chip, its pointer, its key, and how long it lets the array and the channel wait.

    clocks: when channel and array are free, ticks fetched, the peak so far. pointer: its pointer into *before* so far.
    size, busy: its fetch and compute ticks. buffer, largest: the weight buffer and the largest fetch, in ticks. The
    candidate with the least key goes first.
    """
    channel, array, fetched, highest = clocks
    x = fetched - buffer + size  # X of ``buffer``
    end, pointer = on_chip(before, peak, pointer, highest, channel, size, x)
    ahead = prefetchable(array, end, highest + x)
    for_weights, for_space, potential, inherent, distance = idle(size, busy, end, ahead, array, buffer, largest)
    return end, pointer, weave_key(for_weights + for_space + potential, inherent, distance), for_weights, for_space


@loop
def _weave_two(layers, compute_bound, issues, buffer, work, chosen):
    """The loop of ``weave_greedy`` for two streams, a and b, whose state fits into local variables."""
    largest = layers.fetch.max()
    fetch, compute, offsets = borrowed(layers)
    issues, chosen = borrowed((issues, chosen))
    before, peak = issues[0], issues[1]
    begin_a, begin_b, stop_b = offsets[0], offsets[1], offsets[2]
    at_a, at_b = begin_a, begin_b
    fetch_a, compute_a, fetch_b, compute_b = fetch[at_a], compute[at_a], fetch[at_b], compute[at_b]
    compute_bound_a, compute_bound_b = compute_bound[0], compute_bound[1]
    pointer_a = pointer_b = 0
    channel = array = fetched = issued_work = n = 0
    while issued_work < work and n < len(chosen):
        clocks = channel, array, fetched, peak[n]
        end_a, pointer_a, key_a, for_weights_a, for_space_a = priced(
            before, peak, pointer_a, clocks, fetch_a, compute_a, buffer, largest
        )
        end_b, pointer_b, key_b, for_weights_b, for_space_b = priced(
            before, peak, pointer_b, clocks, fetch_b, compute_b, buffer, largest
        )
        takes_b = key_b < key_a
        if compute_bound_a != compute_bound_b:  # otherwise neither stream helps the resource that starves
            wants_weights = for_weights_a > 0 and for_weights_b > 0
            wants_space = for_space_a > 0 and for_space_b > 0
            if wants_weights or wants_space:
                takes_b = helps_starved(wants_weights, wants_space, compute_bound_b)
        if takes_b:
            size, busy, channel = fetch_b, compute_b, end_b
            at_b += 1
            if at_b == stop_b:
                at_b = begin_b
            fetch_b, compute_b = fetch[at_b], compute[at_b]
            chosen[n] = 1
        else:
            size, busy, channel = fetch_a, compute_a, end_a
            at_a += 1
            if at_a == begin_b:
                at_a = begin_a
            fetch_a, compute_a = fetch[at_a], compute[at_a]
            chosen[n] = 0
        array, fetched, n = issued(before, peak, n, array, channel, fetched, size, busy)
        issued_work += max(size, busy)
    return n
