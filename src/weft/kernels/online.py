"""Requests with deadlines on the decoupled NPU, compiled; twin of ``weft.engine.Engine`` over ``Requests``.

One flat loop: admit, part with the late, form batches, choose, issue, count. All state lives in the
arrays of ``State``, so a run is fed its arrivals block by block and its memory does not grow. Times
are ticks. The buffer columns are those of the package's first page; one pointer serves all, because
the ends of issued layers only move forward.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from weft.kernels.greedy import NEVER as NEVER
from weft.kernels.greedy import _rank

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NONE = 1 << 62
"""No deadline, no arrival, no event."""
FIFO, EDF, PREMA, LAYERWEAVER, LAYERWEAVER_PLUS, WEFT_PLUS = range(6)
KEEP, DEMOTE, WEAVE, DROP = range(4)
"""What becomes of late requests."""
CHANNEL, ARRAY, FETCHED, ISSUES, POINTER, STEPS, COMPUTED, LOGGED, ANSWERED = range(9)
HEAD, LENGTH = range(2)
BEGUN, PLACES = range(2)
USED, LATE, PROGRAM, LAYER, ON_TIME, SIZE, QUERY, LAST = range(8)
ARRIVED, COMPLETED, VIOLATED, DROPPED, REFUSED, LATENCY_SUM, LATENCY_MAX, DEEPEST, BATCHES, QUERIES = range(10)
MANTISSA_BITS = 9
BINS = 64 << MANTISSA_BITS


class Models(NamedTuple):
    """The programs of all streams, one per batch size, one after another."""

    fetch: Ints
    compute: Ints
    remaining: Ints
    """Estimated ticks from each layer to the end of its program."""
    first: Ints
    """Where each program begins, and where the last ends."""
    compute_bound: Bools
    """Per program."""


class Terms(NamedTuple):
    """What was agreed for each stream."""

    base: Ints
    """Its program at batch 1; batch b is base + b - 1."""
    deadline: Ints
    max_batch: Ints
    timeout: Ints
    priority: Ints
    think: Ints
    """Ticks from an answer to the client's next request; -1 for open streams."""


class Rules(NamedTuple):
    """The policy's terms and the run's."""

    policy: int
    late: int
    foresight: int
    stretch: int
    """weft+: how long a woven rest is taken to last, in percent of its time alone."""
    failsafe: int
    buffer: int
    largest: int
    warm: int
    """Requests that arrive earlier are served but not counted."""
    end: int
    """Closed streams send nothing from here on."""


class State(NamedTuple):
    """Everything that changes."""

    clocks: Ints
    before: Ints
    peak: Ints
    queue: Ints
    """(streams, places) arrival times, a ring; where it begins and how long it is stands in queue_at."""
    queue_at: Ints
    late: Ints
    late_at: Ints
    returning: Ints
    returning_at: Ints
    jobs: Ints
    """(streams, places, 8)."""
    members: Ints
    """(streams, places, largest batch) arrival times."""
    under_way: Ints
    """(streams, 2) batches that have begun, and the place after the last of them."""
    counts: Ints
    """(streams, 10)."""
    histogram: Ints
    """(streams, BINS) latencies by ``bin_of``."""


class Log(NamedTuple):
    """Room for what happened, or none.

    issues: stream, query, layer, program, four times; answers: stream, arrival, end.
    """

    issues: Ints
    answers: Ints


@numba.njit(cache=True)
def bin_of(latency: int) -> int:
    """Bin of a latency: its magnitude and the MANTISSA_BITS bits that follow, a resolution of 0.2 %."""
    shift = 0
    while latency >> (shift + MANTISSA_BITS + 1):
        shift += 1
    return (shift << MANTISSA_BITS) + (latency >> shift)


@numba.njit(cache=True)
def serve(
    models: Models, terms: Terms, rules: Rules, state: State, log: Log, arrivals: Ints, known: Ints, more: Bools
) -> bool:
    """Serve until a stream's known arrivals are used up and more are to come (False), or all is done (True).

    Also False, and to be called again, where more layers are on chip than ``before`` and ``peak`` have places for.

    arrivals: (streams, places) ascending ticks; known: (streams, 2) next one and how many; more: whether
    further ones follow.
    """
    fetch, compute, remaining, first, compute_bound = models
    base, deadline, max_batch, timeout, priority, think = terms
    policy, late_rule, foresight, stretch, failsafe, buffer, largest, warm, end_of_run = rules
    (
        clocks, before, peak, queue, queue_at, late, late_at, returning, returning_at, jobs, members, under_way, counts,
        histogram,
    ) = state  # fmt: skip
    log_issues, log_answers = log
    streams = len(base)
    places = queue.shape[1]
    most_jobs = jobs.shape[1]
    heads = np.empty((streams * (most_jobs + 2), 6), np.int64)  # stream, job, layer, program, arrival, deadline
    ends = np.empty(len(heads), np.int64)
    may_go = np.empty(len(heads), np.bool_)
    channel, array, fetched, n, pointer = (
        clocks[CHANNEL],
        clocks[ARRAY],
        clocks[FETCHED],
        clocks[ISSUES],
        clocks[POINTER],
    )
    while True:
        # forget issues that can no longer matter
        if n + 1 >= len(before):
            shift = max(0, pointer - 1)
            while shift < n and peak[shift + 1] <= channel - fetched + buffer:  # computed too long ago to delay a fetch
                shift += 1
            for i in range(n + 1 - shift):
                before[i], peak[i] = before[i + shift], peak[i + shift]
            n -= shift
            pointer = max(0, pointer - shift)
            if n + 1 >= len(before):  # all of them are still in the buffer: the caller makes room
                break
        now = channel
        clock = max(array, now)
        event = NONE
        count = on_time = 0
        starving = False
        for s in range(streams):
            # admit
            while True:
                if known[s, HEAD] == known[s, LENGTH]:
                    starving = more[s]
                    break
                arrival = arrivals[s, known[s, HEAD]]
                if arrival > now:
                    event = min(event, arrival)
                    break
                known[s, HEAD] += 1
                if arrival >= warm:
                    counts[s, ARRIVED] += 1
                if queue_at[s, LENGTH] < places:
                    queue[s, (queue_at[s, HEAD] + queue_at[s, LENGTH]) % places] = arrival
                    queue_at[s, LENGTH] += 1
                else:
                    _refuse(s, arrival, -2, warm, clocks, counts, log_answers)
            if starving:
                break
            while returning_at[s, LENGTH] > 0:
                arrival = returning[s, returning_at[s, HEAD]]
                if arrival > now:
                    event = min(event, arrival)
                    break
                returning_at[s, HEAD] = (returning_at[s, HEAD] + 1) % returning.shape[1]
                returning_at[s, LENGTH] -= 1
                if arrival < end_of_run:
                    if arrival >= warm:
                        counts[s, ARRIVED] += 1
                    queue[s, (queue_at[s, HEAD] + queue_at[s, LENGTH]) % places] = arrival
                    queue_at[s, LENGTH] += 1
            counts[s, DEEPEST] = max(counts[s, DEEPEST], queue_at[s, LENGTH])
            # part with the late
            if late_rule != KEEP:
                rest = remaining[first[base[s]]] * foresight // 100
                while queue_at[s, LENGTH] > 0 and queue[s, queue_at[s, HEAD]] + deadline[s] < clock + rest:
                    arrival = queue[s, queue_at[s, HEAD]]
                    queue_at[s, HEAD] = (queue_at[s, HEAD] + 1) % places
                    queue_at[s, LENGTH] -= 1
                    if late_rule == DROP or late_at[s, LENGTH] == places:
                        _refuse(s, arrival, -1 if late_rule == DROP else -2, warm, clocks, counts, log_answers)
                        _return(s, clock, think, returning, returning_at)
                        if think[s] >= 0:
                            event = min(event, clock + think[s])
                    else:
                        late[s, (late_at[s, HEAD] + late_at[s, LENGTH]) % places] = arrival
                        late_at[s, LENGTH] += 1
            has_on_time = False
            for j in range(under_way[s, PLACES]):
                if jobs[s, j, USED] == 0:
                    continue
                if late_rule != KEEP and jobs[s, j, LATE] == 0:
                    rest = remaining[jobs[s, j, LAYER]] * foresight // 100
                    size = jobs[s, j, SIZE]
                    k = jobs[s, j, ON_TIME]
                    while k < size and members[s, j, k] + deadline[s] < clock + rest:
                        k += 1
                    jobs[s, j, ON_TIME] = k
                    if k == size:
                        jobs[s, j, LATE] = 1
                        if late_rule == DROP:
                            _end(s, j, jobs, under_way)
                            for i in range(size):
                                _refuse(s, members[s, j, i], -1, warm, clocks, counts, log_answers)
                                _return(s, clock, think, returning, returning_at)
                            if think[s] >= 0:
                                event = min(event, clock + think[s])
                            continue
                heads[count, 0], heads[count, 1], heads[count, 2] = s, j, jobs[s, j, LAYER]
                heads[count, 3], heads[count, 4] = jobs[s, j, PROGRAM], members[s, j, 0]
                if jobs[s, j, LATE] == 1:
                    heads[count, 5] = NONE
                else:
                    heads[count, 5] = members[s, j, jobs[s, j, ON_TIME]] + deadline[s]
                    has_on_time = True
                    on_time += 1
                count += 1
            # a batch that is ready
            waiting = queue_at[s, LENGTH]
            if waiting > 0:
                oldest = queue[s, queue_at[s, HEAD]]
                ready = oldest
                if timeout[s] > 0:  # its time is up, or it would be late
                    ready = oldest + min(timeout[s], deadline[s] - remaining[first[base[s]]])
                if waiting >= max_batch[s] or now >= ready:
                    if under_way[s, BEGUN] < most_jobs and not has_on_time:
                        program = base[s] + min(waiting, max_batch[s]) - 1
                        heads[count, 0], heads[count, 1], heads[count, 2] = s, -1, first[program]
                        heads[count, 3], heads[count, 4], heads[count, 5] = program, oldest, oldest + deadline[s]
                        count += 1
                        on_time += 1
                else:
                    event = min(event, ready)
        if starving:
            break
        if on_time == 0 or late_rule == WEAVE:
            for s in range(streams):
                if late_at[s, LENGTH] > 0 and under_way[s, BEGUN] < most_jobs:
                    program = base[s] + min(late_at[s, LENGTH], max_batch[s]) - 1
                    heads[count, 0], heads[count, 1], heads[count, 2] = s, -2, first[program]
                    heads[count, 3], heads[count, 4], heads[count, 5] = program, late[s, late_at[s, HEAD]], NONE
                    count += 1
        if count == 0:
            if event == NONE:
                clocks[CHANNEL], clocks[ARRAY], clocks[FETCHED], clocks[ISSUES], clocks[POINTER] = (
                    channel, array, fetched, n, pointer
                )  # fmt: skip
                return True
            channel = event
            continue

        # when each candidate would be on chip
        highest = peak[n]
        for i in range(count):
            may_go[i] = on_time == 0 or late_rule == WEAVE or heads[i, 5] < NONE
            if not may_go[i]:
                continue
            size = fetch[heads[i, 2]]
            over = fetched - buffer + size
            end = channel + size
            if highest + over > end:
                j = pointer
                while before[j] < over:
                    j += 1
                end = max(end, peak[j] + over)
            ends[i] = end
        if late_rule == WEAVE and 0 < on_time < count:
            latest = _latest_end(heads, count, remaining, array)
            array_bound = channel_bound = False
            for i in range(count):
                if heads[i, 5] < NONE:
                    array_bound |= compute_bound[heads[i, 3]]
                    channel_bound |= not compute_bound[heads[i, 3]]
            for i in range(count):
                if heads[i, 5] == NONE:
                    idle = not array_bound if compute_bound[heads[i, 3]] else not channel_bound
                    may_go[i] = idle and max(array, ends[i]) + compute[heads[i, 2]] <= latest

        # choose
        best = -1
        in_order = policy == FIFO
        if policy == EDF:
            for i in range(count):
                if (
                    best < 0
                    or heads[i, 5] < heads[best, 5]
                    or (heads[i, 5] == heads[best, 5] and heads[i, 4] < heads[best, 4])
                ):
                    best = i
        elif policy == PREMA:
            threshold = 1
            for i in range(count):
                if not may_go[i]:
                    continue
                whole = remaining[first[heads[i, 3]]]
                waited = max(0, now - heads[i, 4] - (whole - remaining[heads[i, 2]]))
                tokens = priority[heads[i, 0]] * (whole + waited)
                threshold = max(threshold, 9 if tokens >= 9 * whole else (3 if tokens >= 3 * whole else 1))
            for i in range(count):
                if not may_go[i]:
                    continue
                whole = remaining[first[heads[i, 3]]]
                waited = max(0, now - heads[i, 4] - (whole - remaining[heads[i, 2]]))
                tokens = priority[heads[i, 0]] * (whole + waited)
                if tokens >= threshold * whole and (best < 0 or remaining[heads[i, 2]] < remaining[heads[best, 2]]):
                    best = i
        elif policy >= LAYERWEAVER:
            heavy = light = False
            for i in range(count):
                if compute_bound[heads[i, 3]]:
                    heavy = True
                else:
                    light = True
            one_sided = failsafe == 1 and heavy != light
            in_order = one_sided
            wants_weights = wants_space = True
            least = tie_best = 0
            if not in_order:
                for i in range(count):
                    if not may_go[i]:
                        continue
                    at = heads[i, 2]
                    limit = highest + fetched - buffer + fetch[at]
                    rank, compute_idle, memory_idle, ahead = _rank(
                        fetch[at], compute[at], ends[i], limit, array, buffer, largest
                    )
                    wants_weights &= compute_idle > 0
                    wants_space &= memory_idle > 0
                    tie = -ahead
                    if policy != LAYERWEAVER:
                        rank, tie = rank >> 1, heads[i, 5]
                    if best < 0 or rank < least or (rank == least and tie < tie_best):
                        best, least, tie_best = i, rank, tie
                if wants_weights or wants_space:
                    found = False
                    for i in range(count):
                        if not may_go[i] or compute_bound[heads[i, 3]] != wants_weights:
                            continue
                        at = heads[i, 2]
                        limit = highest + fetched - buffer + fetch[at]
                        rank, _, _, ahead = _rank(fetch[at], compute[at], ends[i], limit, array, buffer, largest)
                        tie = -ahead
                        if policy != LAYERWEAVER:
                            rank, tie = rank >> 1, heads[i, 5]
                        if not found or rank < least or (rank == least and tie < tie_best):
                            found, best, least, tie_best = True, i, rank, tie
        if in_order:
            best = begun = -1
            latest = -1
            for i in range(count):
                if not may_go[i]:
                    continue
                if heads[i, 1] >= 0 and jobs[heads[i, 0], heads[i, 1], LAST] > latest:
                    begun, latest = i, jobs[heads[i, 0], heads[i, 1], LAST]
                if best < 0 or heads[i, 4] < heads[best, 4]:
                    best = i
            if begun >= 0:
                best = begun

        if policy >= LAYERWEAVER_PLUS:
            done = max(array, ends[best]) + compute[heads[best, 2]]
            if policy == LAYERWEAVER_PLUS:
                urgent = -1
                for i in range(count):
                    if heads[i, 5] < NONE and (urgent < 0 or heads[i, 5] < heads[urgent, 5]):
                        urgent = i
                if urgent >= 0 and heads[urgent, 5] - done < remaining[heads[urgent, 2]]:
                    best = urgent
            else:
                worst = 0
                woven = 100 if in_order else stretch  # nothing is woven, so nothing is stretched
                for i in range(count):
                    if heads[i, 5] < NONE:
                        slack = heads[i, 5] - done - remaining[heads[i, 2]] * woven // 100
                        if slack < worst:
                            best, worst = i, slack

        # begin a batch
        s, j = heads[best, 0], heads[best, 1]
        if j < 0:
            is_late = j == -2
            j = 0
            while jobs[s, j, USED] == 1:
                j += 1
            size = heads[best, 3] - base[s] + 1
            for i in range(size):
                if is_late:
                    members[s, j, i] = late[s, late_at[s, HEAD]]
                    late_at[s, HEAD] = (late_at[s, HEAD] + 1) % places
                    late_at[s, LENGTH] -= 1
                else:
                    members[s, j, i] = queue[s, queue_at[s, HEAD]]
                    queue_at[s, HEAD] = (queue_at[s, HEAD] + 1) % places
                    queue_at[s, LENGTH] -= 1
            jobs[s, j, USED], jobs[s, j, LATE], jobs[s, j, PROGRAM] = 1, 1 if is_late else 0, heads[best, 3]
            jobs[s, j, LAYER], jobs[s, j, ON_TIME], jobs[s, j, SIZE] = heads[best, 2], 0, size
            jobs[s, j, QUERY] = counts[s, QUERIES]
            counts[s, QUERIES] += 1
            under_way[s, BEGUN] += 1
            under_way[s, PLACES] = max(under_way[s, PLACES], j + 1)

        # issue
        at = heads[best, 2]
        program = heads[best, 3]
        over = fetched - buffer + fetch[at]
        while before[pointer] < over:
            pointer += 1
        start = max(array, ends[best])
        if clocks[LOGGED] < len(log_issues):
            row = log_issues[clocks[LOGGED]]
            row[0], row[1], row[2], row[3] = s, jobs[s, j, QUERY], at - first[program], program
            row[4], row[5], row[6], row[7] = channel, ends[best], start, start + compute[at]
            clocks[LOGGED] += 1
        channel = ends[best]
        array = start + compute[at]
        n += 1
        peak[n] = max(highest, array - fetched)
        fetched += fetch[at]
        before[n] = fetched
        jobs[s, j, LAYER], jobs[s, j, LAST] = at + 1, clocks[STEPS]
        clocks[STEPS] += 1
        clocks[COMPUTED] += compute[at]

        # answer
        if at + 1 == first[program + 1]:
            _end(s, j, jobs, under_way)
            size = jobs[s, j, SIZE]
            if members[s, j, 0] >= warm:
                counts[s, BATCHES] += 1
            for i in range(size):
                arrival = members[s, j, i]
                if clocks[ANSWERED] < len(log_answers):
                    row = log_answers[clocks[ANSWERED]]
                    row[0], row[1], row[2] = s, arrival, array
                    clocks[ANSWERED] += 1
                if arrival >= warm:
                    latency = array - arrival
                    counts[s, COMPLETED] += 1
                    counts[s, LATENCY_SUM] += latency
                    counts[s, LATENCY_MAX] = max(counts[s, LATENCY_MAX], latency)
                    if latency > deadline[s]:
                        counts[s, VIOLATED] += 1
                    histogram[s, bin_of(latency)] += 1
                _return(s, array, think, returning, returning_at)
    clocks[CHANNEL], clocks[ARRAY], clocks[FETCHED], clocks[ISSUES], clocks[POINTER] = (
        channel,
        array,
        fetched,
        n,
        pointer,
    )
    return False


@numba.njit(cache=True)
def _latest_end(heads, count, remaining, now):
    """Twin of ``engine.lateness.latest_end``: by deadlines, equal ones in order."""
    latest, need, last = NONE, 0, -1
    while True:
        due = NONE
        for i in range(count):
            if last < heads[i, 5] < due:
                due = heads[i, 5]
        if due == NONE:
            return latest
        for i in range(count):
            if heads[i, 5] == due and now + need + remaining[heads[i, 2]] <= due:
                need += remaining[heads[i, 2]]
                latest = min(latest, due - need)
        last = due


@numba.njit(cache=True)
def _end(s, j, jobs, under_way):
    """Nothing of a batch runs any more."""
    jobs[s, j, USED] = 0
    under_way[s, BEGUN] -= 1
    while under_way[s, PLACES] > 0 and jobs[s, under_way[s, PLACES] - 1, USED] == 0:
        under_way[s, PLACES] -= 1


@numba.njit(cache=True)
def _refuse(s, arrival, end, warm, clocks, counts, log_answers):
    """A request that is not served: dropped (-1), or no place for it (-2)."""
    if clocks[ANSWERED] < len(log_answers):
        row = log_answers[clocks[ANSWERED]]
        row[0], row[1], row[2] = s, arrival, end
        clocks[ANSWERED] += 1
    if arrival >= warm:
        counts[s, VIOLATED] += 1
        counts[s, DROPPED if end == -1 else REFUSED] += 1


@numba.njit(cache=True)
def _return(s, now, think, returning, returning_at):
    """The client of a closed stream will be back."""
    if think[s] >= 0:
        returning[s, (returning_at[s, HEAD] + returning_at[s, LENGTH]) % returning.shape[1]] = now + think[s]
        returning_at[s, LENGTH] += 1


@numba.njit(cache=True)
def remaining_alone(fetch: Ints, compute: Ints, buffer: int, out: Ints) -> None:
    """Ticks from each layer to the end when the device is empty and serves nothing else: the precise estimate."""
    layers = len(fetch)
    before = np.empty(layers + 1, np.int64)
    peak = np.empty(layers + 1, np.int64)
    for begin in range(layers):
        channel = array = fetched = pointer = 0
        before[0], peak[0] = 0, NEVER
        for n in range(layers - begin):
            size = fetch[begin + n]
            over = fetched - buffer + size
            while before[pointer] < over:
                pointer += 1
            channel = max(channel + size, peak[pointer] + over)
            array = max(array, channel) + compute[begin + n]
            peak[n + 1] = max(peak[n], array - fetched)
            fetched += size
            before[n + 1] = fetched
        out[begin] = array
