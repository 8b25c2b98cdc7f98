"""One stream of requests whose batches shrink at exits and are refilled, on a device that computes one layer at a time.

Compiled twin of ``weft.engine.Engine`` over ``Requests`` and ``SimulatedHost`` with one lane. All state lives in the
arrays of ``State``, so a run is fed its arrivals block by block and its memory does not grow. Times are ticks; only
what ``top-up`` compares are floats, added up in the same order as there.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from weft.kernels.online import (
    ANSWERED,
    ARRAY,
    ARRIVED,
    BATCHES,
    BINS,
    CHANNEL,
    COMPLETED,
    COMPUTED,
    DEEPEST,
    DEMOTE,
    DROP,
    DROPPED,
    HEAD,
    LATENCY_MAX,
    LATENCY_SUM,
    LENGTH,
    LOGGED,
    NONE,
    QUERIES,
    REFUSED,
    STEPS,
    VIOLATED,
    bin_of,
)

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

WHOLE, LAZY, FLUID, TOP_UP = range(4)
"""Policies; WHOLE runs batches to their end: ``serial`` and ``adaptive``."""
ARRIVAL, LEAVES = range(2)
USED, QUERY, LAYER, SIZE, LATE, DUE, LAST = range(7)
AT, MANY, KNOWN = range(3)
"""top-up's notes: at which layer, how many, and of how many the deadlines are known."""
NOBODY = -1


class Model(NamedTuple):
    """The stream's programs; row b - 1 is batch b."""

    compute: Ints
    """(sizes, layers)."""
    remaining: Ints
    """(sizes, layers + 1): estimated ticks from each layer to the end; the last is 0."""
    exits: Bools
    """(layers + 1): whether samples may leave after so many layers; not at the end."""
    leaving: Floats
    """(layers, layers + 1): of those who stand at a layer, the share that leaves after so many; for top-up."""
    program: int
    """The number of the first program, for the log."""


class Rules(NamedTuple):
    """The policy's terms and the run's."""

    policy: int
    late: int
    most_jobs: int
    """WHOLE: batches under way."""
    foresight: int
    max_batch: int
    deadline: int
    wait: int
    """WHOLE: how long the first request waits for a batch that is not full."""
    miss: int
    """top-up: what a missed deadline costs, in ticks."""
    under_way: int
    """top-up: how many of these one costs that befalls a request under way."""
    backlog: int
    warm: int
    """Requests that arrive earlier are served but not counted."""


class State(NamedTuple):
    """Everything that changes."""

    clocks: Ints
    """As in ``online``; the time is CHANNEL."""
    queue: Ints
    """(places, 2): arrival and layers each needs, a ring; where it begins and how long it is stands in queue_at."""
    queue_at: Ints
    late: Ints
    late_at: Ints
    jobs: Ints
    """(slots, 7)."""
    members: Ints
    """(slots, largest batch, 2): arrival and layers each needs."""
    counts: Ints
    histogram: Ints


class Log(NamedTuple):
    """Room for what happened, or none.

    issues: stream, query, layer, program, four times; answers: stream, arrival, end, layers.
    """

    issues: Ints
    answers: Ints


def fresh_state(max_batch: int, slots: int, places: int) -> State:
    """Nothing has happened yet. slots: how many batches may be under way; places: how many requests a queue holds."""

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return State(
        zeros(9), np.empty((places, 2), np.int64), zeros(2), np.empty((places, 2), np.int64), zeros(2),
        zeros(slots, 7), zeros(slots, max_batch, 2), zeros(10), zeros(BINS),
    )  # fmt: skip


@numba.njit(cache=True)
def serve(
    model: Model, rules: Rules, state: State, log: Log, arrivals: Ints, leaves: Ints, known: Ints, more: bool
) -> bool:
    """Serve until the known arrivals are used up and more are to come (False), or all is done (True).

    arrivals: ascending ticks; leaves: after how many layers each is done, 0 without exits; known: (2) the next one
    and how many; more: whether further ones follow.
    """
    compute, remaining, exits, leaving, program = model
    clocks, queue, queue_at, late, late_at, jobs, members, counts, histogram = state
    log_issues, log_answers = log
    rows = rules.max_batch + 1
    flight = np.zeros((rows, 3), np.int64)
    dues = np.zeros((rows, rules.max_batch), np.int64)
    while True:
        # admit
        while known[HEAD] < known[LENGTH] and arrivals[known[HEAD]] <= clocks[CHANNEL]:
            arrival, needs = arrivals[known[HEAD]], leaves[known[HEAD]]
            known[HEAD] += 1
            if queue_at[LENGTH] < len(queue):
                _push(queue, queue_at, arrival, needs)
            else:
                _answer(rules, clocks, counts, histogram, log_answers, arrival, needs, -2)
        if known[HEAD] == known[LENGTH] and more:
            return False
        coming = arrivals[known[HEAD]] if known[HEAD] < known[LENGTH] else NONE
        waiting, (batches, begun, front) = queue_at[LENGTH] + late_at[LENGTH], _in_flight(jobs)
        if waiting + batches == 0:
            if coming == NONE:
                return True
            clocks[CHANNEL] = coming
            continue
        counts[DEEPEST] = max(counts[DEEPEST], queue_at[LENGTH])
        # part with the late
        if rules.late == DEMOTE or rules.late == DROP:
            latest = clocks[CHANNEL] + remaining[0, 0] * rules.foresight // 100
            while queue_at[LENGTH] > 0 and queue[queue_at[HEAD], ARRIVAL] + rules.deadline < latest:
                arrival, needs = _pop(queue, queue_at)
                if rules.late == DEMOTE and late_at[LENGTH] < len(late):
                    _push(late, late_at, arrival, needs)
                else:
                    fate = -1 if rules.late == DROP else -2
                    _answer(rules, clocks, counts, histogram, log_answers, arrival, needs, fate)
            for slot in range(len(jobs)):
                if jobs[slot, USED] and _lost(rules, remaining, clocks[CHANNEL], jobs[slot], members[slot]):
                    for place in range(jobs[slot, SIZE]):
                        arrival, needs = members[slot, place, ARRIVAL], members[slot, place, LEAVES]
                        _answer(rules, clocks, counts, histogram, log_answers, arrival, needs, -1)
                    jobs[slot, USED] = 0
            waiting, (batches, begun, front) = queue_at[LENGTH] + late_at[LENGTH], _in_flight(jobs)
        # choose: a batch to go on with, or NOBODY and how many to begin with
        room = min(rules.max_batch - begun, waiting)
        job, size = front, 0
        if rules.policy == WHOLE:
            job, size = _choose_whole(rules, clocks[CHANNEL], queue, queue_at, late_at, jobs)
        elif room > 0 and rules.policy == TOP_UP:
            if front == NOBODY or exits[jobs[front, LAYER]]:
                high = _see(rules, queue, queue_at, late, late_at, jobs, members, room, flight, dues)
                size = _top_up(
                    rules, remaining, exits, leaving, clocks[CHANNEL], flight, dues, high, begun + room, room, waiting
                )
        elif room > 0 and batches == 0:
            size = room
        elif room > 0 and rules.policy == LAZY:
            due = queue[queue_at[HEAD], ARRIVAL] + rules.deadline if queue_at[LENGTH] > 0 else NONE
            size = _lazy(remaining[0], clocks[CHANNEL], due, jobs, room)
        elif room > 0 and batches == 1 and exits[jobs[front, LAYER]]:
            size = _fluid(remaining, clocks[CHANNEL], jobs[front], room)
        if size:
            apart = queue_at[LENGTH] == 0
            if rules.policy == WHOLE:
                apart = apart or _waits(rules, clocks[CHANNEL], queue, queue_at)
            job = _begin(rules, queue, queue_at, late, late_at, jobs, members, counts, size, apart)
        elif job == NOBODY:  # a batch waits to be filled, or the last requests were dropped
            if queue_at[LENGTH] > 0:
                ready = queue[queue_at[HEAD], ARRIVAL] + rules.wait
                clocks[CHANNEL] = min(coming, ready) if ready > clocks[CHANNEL] else coming
            continue
        # compute a layer
        at, end = jobs[job, LAYER], clocks[CHANNEL] + compute[jobs[job, SIZE] - 1, jobs[job, LAYER]]
        if clocks[LOGGED] < len(log_issues):
            row = log_issues[clocks[LOGGED]]
            row[0], row[1], row[2], row[3] = 0, jobs[job, QUERY], at, program + jobs[job, SIZE] - 1
            row[4] = row[5] = row[6] = clocks[CHANNEL]
            row[7] = end
            clocks[LOGGED] += 1
        clocks[COMPUTED] += end - clocks[CHANNEL]
        clocks[CHANNEL] = clocks[ARRAY] = end
        jobs[job, LAST] = clocks[STEPS]
        clocks[STEPS] += 1
        jobs[job, LAYER] = at + 1
        # all are done, or some leave, or the batch meets another
        if at + 1 == compute.shape[1] or exits[at + 1]:
            first, staying = members[job, 0, ARRIVAL], 0
            for place in range(jobs[job, SIZE]):
                arrival, needs = members[job, place, ARRIVAL], members[job, place, LEAVES]
                if at + 1 == compute.shape[1] or needs <= at + 1:
                    _answer(rules, clocks, counts, histogram, log_answers, arrival, needs, end)
                else:
                    members[job, staying, ARRIVAL], members[job, staying, LEAVES] = arrival, needs
                    staying += 1
            jobs[job, SIZE] = staying
            if staying == 0:
                counts[BATCHES] += first >= rules.warm
                jobs[job, USED] = 0
                continue
            _set_due(rules, jobs[job], members[job])
        if rules.policy != WHOLE:
            _merge(rules, jobs, members, job)


# Requests


@numba.njit(cache=True)
def _push(ring: Ints, at: Ints, arrival: int, needs: int) -> None:
    place = (at[HEAD] + at[LENGTH]) % len(ring)
    ring[place, ARRIVAL], ring[place, LEAVES] = arrival, needs
    at[LENGTH] += 1


@numba.njit(cache=True)
def _pop(ring: Ints, at: Ints) -> tuple[int, int]:
    place = at[HEAD]
    at[HEAD] = (place + 1) % len(ring)
    at[LENGTH] -= 1
    return ring[place, ARRIVAL], ring[place, LEAVES]


@numba.njit(cache=True)
def _answer(
    rules: Rules, clocks: Ints, counts: Ints, histogram: Ints, answers: Ints, arrival: int, needs: int, end: int
) -> None:
    """Count a request that is done (its end), was dropped (-1) or refused (-2)."""
    if clocks[ANSWERED] < len(answers):
        row = answers[clocks[ANSWERED]]
        row[0], row[1], row[2], row[3] = 0, arrival, end, needs if end >= 0 else 0
        clocks[ANSWERED] += 1
    if arrival < rules.warm:
        return
    counts[ARRIVED] += 1
    if end < 0:
        counts[VIOLATED] += 1
        counts[DROPPED if end == -1 else REFUSED] += 1
        return
    latency = end - arrival
    counts[COMPLETED] += 1
    counts[LATENCY_SUM] += latency
    counts[LATENCY_MAX] = max(counts[LATENCY_MAX], latency)
    counts[VIOLATED] += latency > rules.deadline
    histogram[bin_of(latency)] += 1


@numba.njit(cache=True)
def _waits(rules: Rules, now: int, queue: Ints, queue_at: Ints) -> bool:
    """Whether the queue waits to become a full batch."""
    return bool(queue_at[LENGTH] < rules.max_batch and queue[queue_at[HEAD], ARRIVAL] + rules.wait > now)


# Batches


@numba.njit(cache=True)
def _in_flight(jobs: Ints) -> tuple[int, int, int]:
    """How many batches, their requests, and the batch that is least far."""
    batches, begun, front = 0, 0, NOBODY
    for slot in range(len(jobs)):
        if jobs[slot, USED]:
            batches += 1
            begun += jobs[slot, SIZE]
            if front == NOBODY or jobs[slot, LAYER] < jobs[front, LAYER]:
                front = slot
    return batches, begun, front


@numba.njit(cache=True)
def _first_due(rules: Rules, size: int, members: Ints, latest: int) -> int:
    """The first deadline of a batch's members that is not before *latest*; NONE if there is none."""
    first = NONE
    for place in range(size):
        due = members[place, ARRIVAL] + rules.deadline
        if due >= latest:
            first = min(first, due)
    return first


@numba.njit(cache=True)
def _set_due(rules: Rules, job: Ints, members: Ints) -> None:
    """When a batch with other members is due."""
    if not job[LATE]:
        first = _first_due(rules, job[SIZE], members, job[DUE])
        job[DUE] = first if first < NONE else _first_due(rules, job[SIZE], members, -NONE)


@numba.njit(cache=True)
def _lost(rules: Rules, remaining: Ints, now: int, job: Ints, members: Ints) -> bool:
    """See whether a batch is late; whether it is to be dropped."""
    if job[LATE] and rules.policy == WHOLE:
        return False
    latest = now + remaining[job[SIZE] - 1, job[LAYER]] * rules.foresight // 100
    if rules.policy == WHOLE:
        latest = max(latest, job[DUE])  # who was lost stays lost
    saved = _first_due(rules, job[SIZE], members, latest)
    if saved == NONE and rules.late == DROP:
        return True
    job[LATE], job[DUE] = saved == NONE, saved
    return False


@numba.njit(cache=True)
def _begin(
    rules: Rules,
    queue: Ints,
    queue_at: Ints,
    late: Ints,
    late_at: Ints,
    jobs: Ints,
    members: Ints,
    counts: Ints,
    size: int,
    apart: bool,
) -> int:
    """Make a batch of those who wait first and then of late ones; apart: of late ones alone. Returns its slot."""
    slot = 0
    while jobs[slot, USED]:
        slot += 1
    for place in range(size):
        if apart or queue_at[LENGTH] == 0:
            members[slot, place, ARRIVAL], members[slot, place, LEAVES] = _pop(late, late_at)
        else:
            members[slot, place, ARRIVAL], members[slot, place, LEAVES] = _pop(queue, queue_at)
    job = jobs[slot]
    job[USED], job[LAYER], job[SIZE], job[LATE], job[QUERY] = 1, 0, size, apart, counts[QUERIES]
    job[DUE] = NONE if apart else members[slot, 0, ARRIVAL] + rules.deadline
    counts[QUERIES] += 1
    return slot


@numba.njit(cache=True)
def _merge(rules: Rules, jobs: Ints, members: Ints, slot: int) -> None:
    """Let the batch that stands where this one stands join it; the one that began first stays."""
    for other in range(len(jobs)):
        if other == slot or not jobs[other, USED] or jobs[other, LAYER] != jobs[slot, LAYER]:
            continue
        kept, joining = (slot, other) if jobs[slot, QUERY] < jobs[other, QUERY] else (other, slot)
        for place in range(jobs[joining, SIZE]):
            members[kept, jobs[kept, SIZE] + place] = members[joining, place]
        jobs[kept, SIZE] += jobs[joining, SIZE]
        jobs[kept, LATE] = min(jobs[kept, LATE], jobs[joining, LATE])
        jobs[kept, DUE] = min(jobs[kept, DUE], jobs[joining, DUE])
        jobs[kept, LAST] = max(jobs[kept, LAST], jobs[joining, LAST])
        jobs[joining, USED] = 0
        _set_due(rules, jobs[kept], members[kept])
        return


# Decisions


@numba.njit(cache=True)
def _choose_whole(rules: Rules, now: int, queue: Ints, queue_at: Ints, late_at: Ints, jobs: Ints) -> tuple[int, int]:
    """One batch after another; those of late requests when there is no other."""
    count, last = 0, NOBODY
    for slot in range(len(jobs)):
        if jobs[slot, USED] and not jobs[slot, LATE]:
            return slot, 0
        if jobs[slot, USED]:
            count += 1
            if last == NOBODY or jobs[slot, LAST] > jobs[last, LAST]:
                last = slot
    if count < rules.most_jobs and queue_at[LENGTH] > 0 and not _waits(rules, now, queue, queue_at):
        return NOBODY, min(queue_at[LENGTH], rules.max_batch)
    return (last, 0) if count else (NOBODY, min(late_at[LENGTH], rules.max_batch))


@numba.njit(cache=True)
def _lazy(alone: Ints, now: int, due: int, jobs: Ints, room: int) -> int:
    """The most that leaves everybody on time, were all computed one by one; *due*: the first of those who wait."""
    need = 0
    for slot in range(len(jobs)):
        if jobs[slot, USED]:
            need += jobs[slot, SIZE] * alone[jobs[slot, LAYER]]
            due = min(due, jobs[slot, DUE])
    for size in range(room, 0, -1):
        if due - now - need - size * alone[0] >= 0:
            return size
    return 0


@numba.njit(cache=True)
def _fluid(remaining: Ints, now: int, job: Ints, room: int) -> int:
    """All that fits, if the batch that stands at the exit can afford it."""
    over = remaining[room - 1, 0] - remaining[room - 1, job[LAYER]] + remaining[job[SIZE] + room - 1, job[LAYER]]
    return room if over < job[DUE] - now else 0


@numba.njit(cache=True)
def _see(
    rules: Rules,
    queue: Ints,
    queue_at: Ints,
    late: Ints,
    late_at: Ints,
    jobs: Ints,
    members: Ints,
    room: int,
    flight: Ints,
    dues: Ints,
) -> int:
    """Row 0: those who could begin; then the batches, in order of layers. How many rows that takes."""
    flight[0, AT] = 0
    for place in range(room):
        if place < queue_at[LENGTH]:
            arrival = queue[(queue_at[HEAD] + place) % len(queue), ARRIVAL]
        else:
            arrival = late[(late_at[HEAD] + place - queue_at[LENGTH]) % len(late), ARRIVAL]
        dues[0, place] = arrival + rules.deadline
    rows = 1
    while True:
        found = NOBODY
        for slot in range(len(jobs)):
            further = jobs[slot, USED] and jobs[slot, LAYER] > flight[rows - 1, AT]
            if further and (found == NOBODY or jobs[slot, LAYER] < jobs[found, LAYER]):
                found = slot
        if found == NOBODY:
            return rows
        flight[rows, AT], flight[rows, MANY], flight[rows, KNOWN] = (
            jobs[found, LAYER],
            jobs[found, SIZE],
            jobs[found, SIZE],
        )
        for place in range(jobs[found, SIZE]):
            dues[rows, place] = members[found, place, ARRIVAL] + rules.deadline
        rows += 1


@numba.njit(cache=True)
def _top_up(
    rules: Rules,
    remaining: Ints,
    exits: Bools,
    leaving: Floats,
    now: int,
    flight: Ints,
    dues: Ints,
    rows: int,
    most: int,
    room: int,
    waiting: int,
) -> int:
    """How many to begin with at the least cost; none: the batch that is least far goes on. Few before many."""
    best, chosen = np.inf, 0
    for taken in range(1 if rows == 1 else 0, room + 1):
        flight[0, MANY] = flight[0, KNOWN] = taken
        low = 0 if taken else 1
        cost, end = _sweep(rules, remaining, exits, leaving, flight, dues, low, rows, 0, now, now)
        left = waiting - taken
        following = min(left, most)
        if following:
            flight[0, MANY], flight[0, KNOWN] = following, room - taken
            more, end = _sweep(rules, remaining, exits, leaving, flight, dues, 0, 1, taken, end, now)
            cost += more
        left -= following
        if left:
            full = remaining[most - 1, 0]
            cost += left * (end - now) + full * (left * (left + most) / (2 * most))
            end += full * left // most
        cost += rules.backlog * (end - now)
        if cost < best:
            best, chosen = cost, taken
    return chosen


@numba.njit(cache=True)
def _sweep(
    rules: Rules,
    remaining: Ints,
    exits: Bools,
    leaving: Floats,
    flight: Ints,
    dues: Ints,
    low: int,
    high: int,
    skip: int,
    start: int,
    now: int,
) -> tuple[float, int]:
    """What the requests of some rows cost if the first starts then, and its end; skip: dues of row 0 to pass over."""
    layers = len(exits) - 1
    time, size, cost = start, 0, 0.0
    for at in range(flight[low, AT], layers):
        for row in range(low, high):
            if flight[row, AT] == at:
                size += flight[row, MANY]
        time += remaining[size - 1, at] - remaining[size - 1, at + 1]
        if at + 1 < layers and not exits[at + 1]:
            continue
        for row in range(low, high):
            share = leaving[flight[row, AT], at + 1]
            if share > 0:
                late, passed = 0, skip if row == 0 else 0
                for place in range(passed, passed + flight[row, KNOWN]):
                    late += dues[row, place] < time
                late *= rules.under_way if flight[row, AT] else 1
                cost += share * (flight[row, MANY] * (time - now) + rules.miss * late)
    return cost, time
