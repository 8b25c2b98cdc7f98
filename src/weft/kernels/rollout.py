"""The ``weft`` policy, compiled; twin of ``weft.policies.weft`` run by ``weft.engine.Engine``.

Two storeys: ``weave_rollout`` issues layers, ``_play`` plays one candidate out. A play writes its
issues behind the real ones in ``before`` and ``peak`` and is forgotten by not advancing ``n``.
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
        _catch_up(streams, rules.buffer, front, issues, clocks)
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
            chosen[clocks.n] = stream
            clocks = _issue(stream, streams, rules, front, issues, clocks)
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
    """Priced idle time of issuing *first_stream* next and then filling *plan* by one rule; *front* stays as it is.

    The rules: least priced idle time with the distance kept where both resources can go on, ties to the
    stream behind (*priced*); or Layerweaver's least idle time with its starvation rules. One body for
    both, and tuples taken apart once: an array handed to a function, or taken from a tuple, inside the
    loop would cost a reference count every time.
    """
    fetch, compute, gains, first, compute_bound = streams
    position, seen, progress = play
    before, peak = issues
    channel, array, fetched, n = clocks
    buffer, largest, compute_price, memory_price, shortest, longest, max_lag = rules
    count = len(position)
    for stream in range(count):
        position[stream], seen[stream] = front.position[stream], front.seen[stream]
        progress[stream] = front.progress[stream]
    channel_began, array_began, fetched_before, computed = channel, array, fetched, 0
    for step in range(len(plan)):
        highest = peak[n]
        behind = 0
        for stream in range(1, count):
            if progress[stream] < progress[behind]:
                behind = stream
        reach = progress[behind] + max_lag
        best = heavy = light = -1
        end_best = end_heavy = end_light = 0
        cost_best = cost_heavy = cost_light = 0
        tie_best = tie_heavy = tie_light = 0
        wants_weights = wants_space = not priced
        for stream in range(count):
            at = position[stream]
            if stream != first_stream if step == 0 else stream != behind and progress[stream] + gains[at] > reach:
                continue
            size, busy = fetch[at], compute[at]
            over = fetched - buffer + size
            end = channel + size
            limit = highest + over
            if limit > end:
                j = seen[stream]
                while before[j] < over:
                    j += 1
                seen[stream] = j
                end = max(end, peak[j] + over)
            if priced:
                ahead = max(array, end) + busy - end
                array_idle = max(0, end - array) + max(0, shortest - ahead)
                channel_idle = end - channel - size + max(0, ahead - longest)
                cost, tie = compute_price * array_idle + memory_price * channel_idle, progress[stream]
            else:
                cost, compute_idle, memory_idle, ahead = _rank(size, busy, end, limit, array, buffer, largest)
                tie = -ahead
                wants_weights &= compute_idle > 0
                wants_space &= memory_idle > 0
                if compute_bound[stream]:
                    if heavy < 0 or cost < cost_heavy or (cost == cost_heavy and tie < tie_heavy):
                        heavy, end_heavy, cost_heavy, tie_heavy = stream, end, cost, tie
                elif light < 0 or cost < cost_light or (cost == cost_light and tie < tie_light):
                    light, end_light, cost_light, tie_light = stream, end, cost, tie
            if best < 0 or cost < cost_best or (cost == cost_best and tie < tie_best):
                best, end_best, cost_best, tie_best = stream, end, cost, tie
        if wants_weights:
            if heavy >= 0:
                best, end_best = heavy, end_heavy
        elif wants_space and light >= 0:
            best, end_best = light, end_light
        plan[step] = best
        at = position[best]
        channel = end_best
        array = max(array, channel) + compute[at]
        computed += compute[at]
        n += 1
        peak[n] = max(highest, array - fetched)
        fetched += fetch[at]
        before[n] = fetched
        progress[best] += gains[at]
        position[best] = at + 1 if at + 1 < first[best + 1] else first[best]
    array_idle = array - array_began - computed
    channel_idle = channel - channel_began - (fetched - fetched_before)
    return compute_price * array_idle + memory_price * channel_idle


@numba.njit(cache=True, inline="always")
def _furthest_behind(progress):
    behind = 0
    for stream in range(1, len(progress)):
        if progress[stream] < progress[behind]:
            behind = stream
    return behind


@numba.njit(cache=True)
def _issue(stream, streams, rules, front, issues, clocks):
    """Issue the stream's next layer for good; returns the clocks after it."""
    at = front.position[stream]
    size = streams.fetch[at]
    over = clocks.fetched - rules.buffer + size
    j = front.seen[stream]
    while issues.before[j] < over:
        j += 1
    front.seen[stream] = j
    end = max(clocks.channel + size, issues.peak[j] + over)
    array = max(clocks.array, end) + streams.compute[at]
    n = clocks.n + 1
    issues.before[n] = clocks.fetched + size
    issues.peak[n] = max(issues.peak[n - 1], array - clocks.fetched)
    front.progress[stream] += streams.gains[at]
    front.position[stream] = at + 1 if at + 1 < streams.first[stream + 1] else streams.first[stream]
    return Clocks(end, array, clocks.fetched + size, n)


@numba.njit(cache=True)
def _catch_up(streams, buffer, front, issues, clocks):
    """Move every stream's pointer to where it must be by now, so that no play walks there again."""
    for stream in range(len(front.position)):
        over = clocks.fetched - buffer + streams.fetch[front.position[stream]]
        j = front.seen[stream]
        while issues.before[j] < over:
            j += 1
        front.seen[stream] = j


@numba.njit(cache=True)
def _may_go(stream, behind, streams, front, max_lag):
    """The fairness rule: twin of ``weft.policies.fairness.may_go``."""
    gain = streams.gains[front.position[stream]]
    return stream == behind or front.progress[stream] + gain - front.progress[behind] <= max_lag
