"""The ``weft`` policy, compiled; twin of ``weft.policies.weft`` run by ``weft.engine.Engine``.

Storeys: ``weave_rollout`` issues layers, ``_play`` plays one candidate out, ``_greedy`` and
``_priced`` choose the next layer of a play. A play writes its issues behind the real ones in
``before`` and ``peak`` and is forgotten by not advancing ``n``.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from weft.kernels.greedy import NEVER, _rank

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

DONE = 1 << 62


class Streams(NamedTuple):
    """The layers of all streams, the progress each makes, and which models are compute-bound."""

    fetch: Ints
    compute: Ints
    gains: Ints
    first: Ints
    compute_bound: Bools


class Rules(NamedTuple):
    """What stays the same during a run: ticks, prices of an idle tick, progress units."""

    buffer: int
    largest: int
    compute_price: int
    memory_price: int
    shortest: int
    longest: int
    max_lag: int


class Front(NamedTuple):
    """Where each stream is: its next layer, its pointer into the issues, its progress."""

    position: Ints
    seen: Ints
    progress: Ints


class Issues(NamedTuple):
    """The issues so far: what was fetched before each, and the running peak (see the package)."""

    before: Ints
    peak: Ints


class Clocks(NamedTuple):
    """The device: when channel and array are free, ticks fetched so far, number of issues."""

    channel: int
    array: int
    fetched: int
    n: int


@numba.njit(cache=True)
def weave_rollout(
    streams: Streams, rules: Rules, horizon: int, commit: int, work: int, quota: Ints, chosen: Ints
) -> int:
    """Issue the best plays until *work* is issued or *chosen* is full; returns the number of issues.

    quota: queries each stream may issue in all; -1 for no limit.
    """
    count = len(streams.first) - 1
    front, play = _new_front(streams.first), _new_front(streams.first)
    queries = np.zeros(count, np.int64)
    room = len(chosen) + horizon + 1
    issues = Issues(np.empty(room, np.int64), np.empty(room, np.int64))
    issues.before[0], issues.peak[0] = 0, NEVER
    plan, best_plan = np.empty(horizon, np.int64), np.empty(horizon, np.int64)
    clocks = Clocks(0, 0, 0, 0)
    issued = 0
    while issued < work and clocks.n < len(chosen):
        found, least = False, 0
        behind = _furthest_behind(front.progress)
        for stream in range(count):
            if _may_go(stream, behind, streams, front, rules.max_lag):
                for priced in range(2):
                    cost = _play(stream, priced == 1, streams, rules, front, play, issues, clocks, plan)
                    if not found or cost < least:
                        found, least = True, cost
                        best_plan[:] = plan
        for step in range(commit):
            stream = best_plan[step]
            at = front.position[stream]
            behind = _furthest_behind(front.progress)
            if issued >= work or clocks.n >= len(chosen) or not _may_go(stream, behind, streams, front, rules.max_lag):
                break
            end = _fetch_end(stream, streams, rules.buffer, front, issues, clocks)
            chosen[clocks.n] = stream
            clocks = _issue(stream, end, streams, front, issues, clocks)
            issued += max(streams.fetch[at], streams.compute[at])
            if front.position[stream] == streams.first[stream]:
                queries[stream] += 1
                if queries[stream] == quota[stream]:
                    front.progress[stream] = DONE
    return clocks.n


@numba.njit(cache=True)
def _new_front(first):
    count = len(first) - 1
    return Front(first[:-1].copy(), np.zeros(count, np.int64), np.zeros(count, np.int64))


@numba.njit(cache=True)
def _play(first_stream, priced, streams, rules, front, play, issues, clocks, plan):
    """Priced idle time of issuing *first_stream* next and then filling *plan* by one rule; *front* stays as it is."""
    for stream in range(len(front.position)):
        play.position[stream] = front.position[stream]
        play.seen[stream] = front.seen[stream]
        play.progress[stream] = front.progress[stream]
    began = clocks
    computed = 0
    stream = first_stream
    end = _fetch_end(stream, streams, rules.buffer, play, issues, clocks)
    for step in range(len(plan)):
        if step > 0:
            if priced:
                stream, end = _priced(streams, rules, play, issues, clocks)
            else:
                stream, end = _greedy(streams, rules, play, issues, clocks)
        plan[step] = stream
        computed += streams.compute[play.position[stream]]
        clocks = _issue(stream, end, streams, play, issues, clocks)
    array_idle = clocks.array - began.array - computed
    channel_idle = clocks.channel - began.channel - (clocks.fetched - began.fetched)
    return rules.compute_price * array_idle + rules.memory_price * channel_idle


@numba.njit(cache=True)
def _greedy(streams, rules, front, issues, clocks):
    """Layerweaver's choice among the streams that may go, with both starvation rules."""
    behind = _furthest_behind(front.progress)
    highest = issues.peak[clocks.n]
    best, heavy, light = -1, -1, -1
    end_best = end_heavy = end_light = 0
    rank_best = rank_heavy = rank_light = 0
    ahead_best = ahead_heavy = ahead_light = 0
    wants_weights = wants_space = True
    for stream in range(len(front.position)):
        if not _may_go(stream, behind, streams, front, rules.max_lag):
            continue
        at = front.position[stream]
        end = _fetch_end(stream, streams, rules.buffer, front, issues, clocks)
        size = streams.fetch[at]
        limit = highest + clocks.fetched - rules.buffer + size
        rank, compute_idle, memory_idle, ahead = _rank(
            size, streams.compute[at], end, limit, clocks.array, rules.buffer, rules.largest
        )
        wants_weights &= compute_idle > 0
        wants_space &= memory_idle > 0
        if best < 0 or rank < rank_best or (rank == rank_best and ahead > ahead_best):
            best, end_best, rank_best, ahead_best = stream, end, rank, ahead
        if streams.compute_bound[stream]:
            if heavy < 0 or rank < rank_heavy or (rank == rank_heavy and ahead > ahead_heavy):
                heavy, end_heavy, rank_heavy, ahead_heavy = stream, end, rank, ahead
        elif light < 0 or rank < rank_light or (rank == rank_light and ahead > ahead_light):
            light, end_light, rank_light, ahead_light = stream, end, rank, ahead
    if wants_weights:
        return (heavy, end_heavy) if heavy >= 0 else (best, end_best)
    if wants_space and light >= 0:
        return light, end_light
    return best, end_best


@numba.njit(cache=True)
def _priced(streams, rules, front, issues, clocks):
    """Least priced idle time now, the distance kept where both resources can go on; ties to the stream behind."""
    behind = _furthest_behind(front.progress)
    best, best_end, least = -1, 0, 0
    for stream in range(len(front.position)):
        if not _may_go(stream, behind, streams, front, rules.max_lag):
            continue
        at = front.position[stream]
        end = _fetch_end(stream, streams, rules.buffer, front, issues, clocks)
        ahead = max(clocks.array, end) + streams.compute[at] - end
        array_idle = max(0, end - clocks.array) + max(0, rules.shortest - ahead)
        channel_idle = end - clocks.channel - streams.fetch[at] + max(0, ahead - rules.longest)
        cost = rules.compute_price * array_idle + rules.memory_price * channel_idle
        if best < 0 or cost < least or (cost == least and front.progress[stream] < front.progress[best]):
            best, best_end, least = stream, end, cost
    return best, best_end


@numba.njit(cache=True, inline="always")
def _fetch_end(stream, streams, buffer, front, issues, clocks):
    """When the stream's next layer would be on chip."""
    size = streams.fetch[front.position[stream]]
    over = clocks.fetched - buffer + size
    end = clocks.channel + size
    if issues.peak[clocks.n] + over > end:
        j = front.seen[stream]
        while issues.before[j] < over:
            j += 1
        front.seen[stream] = j
        end = max(end, issues.peak[j] + over)
    return end


@numba.njit(cache=True, inline="always")
def _issue(stream, end, streams, front, issues, clocks):
    """Move the stream on; returns the clocks after its layer."""
    at = front.position[stream]
    array = max(clocks.array, end) + streams.compute[at]
    fetched = clocks.fetched + streams.fetch[at]
    n = clocks.n + 1
    issues.before[n] = fetched
    issues.peak[n] = max(issues.peak[n - 1], array - clocks.fetched)
    front.progress[stream] += streams.gains[at]
    front.position[stream] = at + 1 if at + 1 < streams.first[stream + 1] else streams.first[stream]
    return Clocks(end, array, fetched, n)


@numba.njit(cache=True, inline="always")
def _furthest_behind(progress):
    behind = 0
    for stream in range(1, len(progress)):
        if progress[stream] < progress[behind]:
            behind = stream
    return behind


@numba.njit(cache=True, inline="always")
def _may_go(stream, behind, streams, front, max_lag):
    """The fairness rule: twin of ``weft.policies.fairness.may_go``."""
    gain = streams.gains[front.position[stream]]
    return stream == behind or front.progress[stream] + gain - front.progress[behind] <= max_lag
