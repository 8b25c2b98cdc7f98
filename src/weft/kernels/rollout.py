"""The ``weft`` policy, compiled; twin of ``weft.engine.policies.weft`` run by ``weft.engine.Engine``.

``weave_rollout`` issues layers; ``_play`` plays a candidate out: it simulates the layers after that candidate. A play
writes its issues behind the real ones in ``before`` and ``peak``, and is forgotten by not advancing ``n``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels import rules as shared
from weft.kernels.band import DONE, furthest_behind, within_lag
from weft.kernels.buffer import caught_up, columns, issued, on_chip
from weft.kernels.compiling import borrowed, inlined, loop, part
from weft.kernels.greedy import helps_starved, priced

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

priced_idle = inlined(shared.priced_idle)


class RolloutStreams(NamedTuple):
    """The layers of all streams, stream after stream, and which models are compute-bound.

    gains: the progress that each layer adds; offsets: stream i owns the layers ``offsets[i]`` to ``offsets[i + 1]``.
    """

    fetch: Ints
    compute: Ints
    gains: Ints
    offsets: Ints
    compute_bound: Bools


class RolloutRules(NamedTuple):
    """The constants of a run."""

    buffer: int
    largest: int
    """Ticks of the longest fetch."""
    compute_price: int
    memory_price: int
    """Prices of an idle tick of the array and of the channel (``Weft.prices``)."""
    shortest: int
    longest: int
    """The least and the largest decoupling distance (``Weft.distances``)."""
    max_lag: int
    """Of the band, in units of progress."""


class Front(NamedTuple):
    """For each stream, the index of its next layer, its pointer into the issues (``buffer``), and its progress."""

    position: Ints
    pointer: Ints
    progress: Ints


class Clocks(NamedTuple):
    """The device: when channel and array are free, ticks fetched so far, number of issues."""

    channel: int
    array: int
    fetched: int
    n: int


def weave_rollout(
    streams: RolloutStreams, rules: RolloutRules, horizon: int, commit: int, work: int, quota: Ints, chosen: Ints
) -> int:
    """Issue the first *commit* layers of the best play again and again, until *work* ticks are issued.

    horizon: the layers of a play. quota: the queries that each stream may issue in the run; -1: no limit. chosen:
    filled with the stream of each issue; a full one ends the run. Returns the number of issues.
    """
    front, play = _new_front(streams.offsets), _new_front(streams.offsets)
    issues, plans = columns(len(chosen) + horizon + 1), np.empty((2, horizon), np.int64)
    queries = np.zeros(len(quota), np.int64)
    return int(_weave(streams, rules, front, play, issues, plans, commit, work, quota, queries, chosen))


@loop
def _weave(streams, rules, front, play, issues, plans, commit, work, quota, queries, chosen):
    """The loop of ``weave_rollout``, with its parameters.

    issues: the columns of ``buffer``. queries: the completed queries of each stream. front: the next layers. plans: (2,
    horizon), the streams of a play and of the best one so far. play: scratch space.
    """
    streams, front, play, issues = borrowed((streams, front, play, issues))
    plans, quota, queries, chosen = borrowed((plans, quota, queries, chosen))
    plan, best_plan = plans[0], plans[1]
    clocks = Clocks(0, 0, 0, 0)
    issued_work = 0
    while issued_work < work and clocks.n < len(chosen):
        _find_best_play(streams, rules, front, play, issues, clocks, plan, best_plan)
        for step in range(commit):
            stream = best_plan[step]
            layer = front.position[stream]
            behind = furthest_behind(front.progress)
            if issued_work >= work or clocks.n >= len(chosen):
                break
            if not _may_go(stream, behind, streams, front, rules.max_lag):
                break
            chosen[clocks.n] = stream
            clocks = _issue(stream, streams, rules, front, issues, clocks)
            issued_work += max(streams.fetch[layer], streams.compute[layer])
            if front.position[stream] == streams.offsets[stream]:
                queries[stream] += 1
                if queries[stream] == quota[stream]:
                    front.progress[stream] = DONE
    return clocks.n


@part
def _find_best_play(streams, rules, front, play, issues, clocks, plan, best_plan):
    """Play every candidate out by both rules, and write the play with the least priced idle time to *best_plan*.

    front, clocks: the state at which plays begin. play, plan: scratch space.
    """
    any_allowed, least_cost = False, 0
    _catch_up(streams, rules.buffer, front, issues, clocks)
    behind = furthest_behind(front.progress)
    for stream in range(len(front.position)):
        if _may_go(stream, behind, streams, front, rules.max_lag):
            for by_price in (False, True):
                cost = _play(stream, by_price, streams, rules, front, play, issues, clocks, plan)
                if not any_allowed or cost < least_cost:
                    any_allowed, least_cost = True, cost
                    for step in range(len(plan)):
                        best_plan[step] = plan[step]


def _new_front(offsets: Ints) -> Front:
    """Return the state in which every stream is at its first layer."""
    count = len(offsets) - 1
    return Front(offsets[:-1].copy(), np.zeros(count, np.int64), np.zeros(count, np.int64))


@part
def _play(first_stream, by_price, streams, rules, front, play, issues, clocks, plan):
    """Return the priced idle time of issuing *first_stream* next and filling the rest of *plan* by a rule.

    by_price: the rule of the least priced idle time, ties to the stream that is behind; otherwise Layerweaver's least
    idle time with its starvation rules. The state *front* is copied to *play*, and does not change.
    """
    fetch, compute, gains, offsets, compute_bound = streams
    position, pointers, progress = play
    before, peak = issues[0], issues[1]
    channel, array, fetched, n = clocks
    buffer, largest, compute_price, memory_price, shortest, longest, max_lag = rules
    count = len(position)
    for stream in range(count):
        position[stream], pointers[stream] = front.position[stream], front.pointer[stream]
        progress[stream] = front.progress[stream]
    channel_began, array_began, fetched_before, computed = channel, array, fetched, 0
    for step in range(len(plan)):
        highest = peak[n]
        behind = furthest_behind(progress)
        least_progress = progress[behind]
        best = compute_best = memory_best = -1
        end_best = end_compute = end_memory = 0
        # The best of all streams, of the compute-bound ones, and of the memory-bound ones.
        key_best = key_compute = key_memory = (0, 0)
        wants_weights = wants_space = not by_price
        for stream in range(count):
            layer = position[stream]
            if step == 0:
                if stream != first_stream:
                    continue
            elif stream != behind and not within_lag(progress[stream], gains[layer], least_progress, max_lag):
                continue
            size, busy = fetch[layer], compute[layer]
            if by_price:
                x = fetched - buffer + size  # X of ``buffer``
                end, pointers[stream] = on_chip(before, peak, pointers[stream], highest, channel, size, x)
                cost = priced_idle(size, busy, end, channel, array, compute_price, memory_price, shortest, longest)
                key = cost, progress[stream]
            else:
                clocks_now = channel, array, fetched, highest
                end, pointers[stream], key, compute_idle, memory_idle = priced(
                    before, peak, pointers[stream], clocks_now, size, busy, buffer, largest
                )
                wants_weights &= compute_idle > 0
                wants_space &= memory_idle > 0
                if compute_bound[stream]:
                    if compute_best < 0 or key < key_compute:
                        compute_best, end_compute, key_compute = stream, end, key
                elif memory_best < 0 or key < key_memory:
                    memory_best, end_memory, key_memory = stream, end, key
            if best < 0 or key < key_best:
                best, end_best, key_best = stream, end, key
        if wants_weights or wants_space:
            if helps_starved(wants_weights, wants_space, True):
                if compute_best >= 0:
                    best, end_best = compute_best, end_compute
            elif memory_best >= 0:
                best, end_best = memory_best, end_memory
        plan[step] = best
        layer = position[best]
        channel = end_best
        array, fetched, n = issued(before, peak, n, array, channel, fetched, fetch[layer], compute[layer])
        computed += compute[layer]
        progress[best] += gains[layer]
        position[best] = layer + 1 if layer + 1 < offsets[best + 1] else offsets[best]
    array_idle = array - array_began - computed
    channel_idle = channel - channel_began - (fetched - fetched_before)
    return compute_price * array_idle + memory_price * channel_idle


@part
def _issue(stream, streams, rules, front, issues, clocks):
    """Issue the next layer of a stream on the device; change *front*, and return the clocks after it."""
    layer = front.position[stream]
    size = streams.fetch[layer]
    before, peak = issues[0], issues[1]
    x = clocks.fetched - rules.buffer + size  # X of ``buffer``
    end, front.pointer[stream] = on_chip(before, peak, front.pointer[stream], peak[clocks.n], clocks.channel, size, x)
    array, fetched, n = issued(before, peak, clocks.n, clocks.array, end, clocks.fetched, size, streams.compute[layer])
    front.progress[stream] += streams.gains[layer]
    front.position[stream] = layer + 1 if layer + 1 < streams.offsets[stream + 1] else streams.offsets[stream]
    return Clocks(end, array, fetched, n)


@inlined
def _catch_up(streams, buffer, front, issues, clocks):
    """Move every stream's pointer on as far as its next layer needs, so that plays do not repeat that walk."""
    for stream in range(len(front.position)):
        x = clocks.fetched - buffer + streams.fetch[front.position[stream]]
        front.pointer[stream] = caught_up(issues[0], front.pointer[stream], x)


@inlined
def _may_go(stream, behind, streams, front, max_lag):
    """Return whether the fairness rule lets a stream issue its next layer; twin of ``policies.fairness.may_go``.

    behind: the stream that is furthest behind. front: the next layers and the progress of all streams. max_lag: as of
    ``RolloutRules``.
    """
    gain = streams.gains[front.position[stream]]
    return stream == behind or within_lag(front.progress[stream], gain, front.progress[behind], max_lag)
