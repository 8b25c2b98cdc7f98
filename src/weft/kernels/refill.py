"""One stream of requests whose batches shrink at exits and are refilled, on a device that computes one layer at a time.

Compiled twin of ``weft.engine.Engine`` over ``Requests`` and ``SimulatedHost`` with one lane. All state lives in the
arrays of ``RefillState``, so a run is fed its arrivals block by block and its memory does not grow. Times are ticks;
only what ``top-up`` compares are floats, added up in the same order as there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels import rules as shared
from weft.kernels.choosing import resumes, slack
from weft.kernels.compiling import borrowed, inlined, loop, part
from weft.kernels.request_state import (
    ANSWERED,
    ARRAY,
    ARRIVED,
    BATCHES,
    BINS,
    CHANNEL,
    COMPUTED,
    DEEPEST,
    DEMOTE,
    HEAD,
    LENGTH,
    LOGGED,
    NONE,
    QUERIES,
    STEPS,
    WAS_REFUSED,
    count_done,
    count_refused,
)

fluid_overhead = inlined(shared.fluid_overhead)
leaving_cost = inlined(shared.leaving_cost)
backlog_cost = inlined(shared.backlog_cost)
backlog_ticks = inlined(shared.backlog_ticks)

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


class RefillModel(NamedTuple):
    """The stream's programs; row b - 1 is batch b."""

    compute: Ints
    """(sizes, layers): ticks that each layer takes at each batch size."""
    remaining: Ints
    """(sizes, layers + 1): estimated ticks from each layer to the end; the last is 0."""
    exits: Bools
    """(layers + 1): whether samples may leave after so many layers; not at the end."""
    leaving: Floats
    """(layers, layers + 1): of those who stand at a layer, the share that leaves after so many; for top-up."""
    program: int
    """The number of the first program, for the log."""


class RefillRules(NamedTuple):
    """The policy's terms and the run's."""

    policy: int
    late: int
    most_jobs: int
    """How many batches may be under way under WHOLE."""
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


class RefillState(NamedTuple):
    """Everything that changes during a run."""

    clocks: Ints
    """The same as in ``request_loop``; the time is CHANNEL."""
    queue: Ints
    """(places, 2): arrival and layers each needs, a ring; where it begins and how long it is stands in queue_at."""
    queue_at: Ints
    late: Ints
    late_at: Ints
    jobs: Ints
    """(slots, 7): the batch in each slot; its columns are USED to LAST."""
    members: Ints
    """(slots, largest batch, 2): arrival and layers each needs."""
    counts: Ints
    histogram: Ints


class RefillLog(NamedTuple):
    """Room for what happened, or none.

    issues: stream, query, layer, program, four times; answers: stream, arrival, end, layers.
    """

    issues: Ints
    answers: Ints


def fresh_state(max_batch: int, slots: int, places: int) -> RefillState:
    """Nothing has happened yet. slots: how many batches may be under way; places: how many requests a queue holds."""

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return RefillState(
        zeros(9), np.empty((places, 2), np.int64), zeros(2), np.empty((places, 2), np.int64), zeros(2),
        zeros(slots, 7), zeros(slots, max_batch, 2), zeros(10), zeros(BINS),
    )  # fmt: skip


def serve(
    model: RefillModel,
    rules: RefillRules,
    state: RefillState,
    log: RefillLog,
    arrivals: Ints,
    leaves: Ints,
    known: Ints,
    more: bool,
) -> bool:
    """Serve until the known arrivals are used up and more are to come (False), or all is done (True).

    arrivals: ascending ticks; leaves: after how many layers each is done, 0 without exits; known: (2) the next one
    and how many; more: whether further ones follow.
    """
    rows = rules.max_batch + 1
    notes = np.zeros((rows, 3), np.int64), np.zeros((rows, rules.max_batch), np.int64)
    return bool(_serve(model, rules, state, log, notes, arrivals, leaves, known, more))


@loop
def _serve(model, rules, state, log, notes, arrivals, leaves, known, more):
    model, state, log, notes = borrowed((model, state, log, notes))
    arrivals, leaves, known = borrowed((arrivals, leaves, known))
    clocks, queue_at, late_at = state.clocks, state.queue_at, state.late_at
    while True:
        _admit(rules, state, log, arrivals, leaves, known)
        coming = arrivals[known[HEAD]] if known[HEAD] < known[LENGTH] else NONE
        if coming == NONE and more:
            return False
        waiting, (batches, begun, front) = queue_at[LENGTH] + late_at[LENGTH], _in_flight(state.jobs)
        if waiting + batches == 0:
            if coming == NONE:
                return True
            clocks[CHANNEL] = coming
            continue
        state.counts[DEEPEST] = max(state.counts[DEEPEST], queue_at[LENGTH])
        if rules.late == DEMOTE:
            _sort_out_queue(model, rules, state, log)
            _sort_out_jobs(model, rules, state)
            waiting = queue_at[LENGTH] + late_at[LENGTH]
        job, size = _choose(model, rules, state, notes, waiting, batches, begun, front)
        if size:
            job = _begin(rules, state, size)
        elif job == NOBODY:  # a batch waits to be filled
            if queue_at[LENGTH] > 0:
                ready = state.queue[queue_at[HEAD], ARRIVAL] + rules.wait
                clocks[CHANNEL] = min(coming, ready) if ready > clocks[CHANNEL] else coming
            continue
        _compute(model, state, log, job)
        _part(model, rules, state, log, job)


@part
def _compute(model, state, log, job):
    """Compute the next layer of a batch."""
    clocks, jobs = state.clocks, state.jobs
    at, began = jobs[job, LAYER], clocks[CHANNEL]
    end = began + model.compute[jobs[job, SIZE] - 1, at]
    if clocks[LOGGED] < len(log.issues):
        row = log.issues[clocks[LOGGED]]
        row[0], row[1], row[2], row[3] = 0, jobs[job, QUERY], at, model.program + jobs[job, SIZE] - 1
        row[4] = row[5] = row[6] = began
        row[7] = end
        clocks[LOGGED] += 1
    clocks[COMPUTED] += end - began
    clocks[CHANNEL] = clocks[ARRAY] = end
    jobs[job, LAST], jobs[job, LAYER] = clocks[STEPS], at + 1
    clocks[STEPS] += 1


@part
def _part(model, rules, state, log, job):
    """Part with whoever is done after a layer of a batch: all of them, or some who leave; or join a batch it meets."""
    jobs, members = state.jobs, state.members
    at = jobs[job, LAYER]
    done = at == model.compute.shape[1]
    if done or model.exits[at]:
        first, staying = members[job, 0, ARRIVAL], 0
        for place in range(jobs[job, SIZE]):
            arrival, needs = members[job, place, ARRIVAL], members[job, place, LEAVES]
            if done or needs <= at:
                _answer(rules, state, log, arrival, needs, state.clocks[CHANNEL])
            else:
                members[job, staying, ARRIVAL], members[job, staying, LEAVES] = arrival, needs
                staying += 1
        jobs[job, SIZE] = staying
        if staying == 0:
            state.counts[BATCHES] += first >= rules.warm
            jobs[job, USED] = 0
            return
        _set_due(rules, jobs[job], members[job])
    if rules.policy != WHOLE:
        _merge(rules, jobs, members, job)


# Requests


@inlined
def _push(ring, at, arrival, needs):
    place = (at[HEAD] + at[LENGTH]) % len(ring)
    ring[place, ARRIVAL], ring[place, LEAVES] = arrival, needs
    at[LENGTH] += 1


@inlined
def _pop(ring, at):
    place = at[HEAD]
    at[HEAD] = (place + 1) % len(ring)
    at[LENGTH] -= 1
    return ring[place, ARRIVAL], ring[place, LEAVES]


@part
def _admit(rules, state, log, arrivals, leaves, known):
    """Put who has come into the queue."""
    while known[HEAD] < known[LENGTH] and arrivals[known[HEAD]] <= state.clocks[CHANNEL]:
        arrival, needs = arrivals[known[HEAD]], leaves[known[HEAD]]
        known[HEAD] += 1
        if state.queue_at[LENGTH] < len(state.queue):
            _push(state.queue, state.queue_at, arrival, needs)
        else:
            _answer(rules, state, log, arrival, needs, WAS_REFUSED)


@part
def _answer(rules, state, log, arrival, needs, end):
    """Count a request that is done, was dropped or refused."""
    row = state.clocks[ANSWERED]
    if row < len(log.answers):
        log.answers[row, 0], log.answers[row, 1] = 0, arrival
        log.answers[row, 2], log.answers[row, 3] = end, needs if end >= 0 else 0
        state.clocks[ANSWERED] = row + 1
    if arrival >= rules.warm:
        state.counts[ARRIVED] += 1
        if end < 0:
            count_refused(state.counts)
        else:
            count_done(state.counts, state.histogram, end - arrival, rules.deadline)


@part
def _sort_out_queue(model, rules, state, log):
    """Take requests that cannot be on time out of the queue."""
    queue, queue_at = state.queue, state.queue_at
    latest = state.clocks[CHANNEL] + model.remaining[0, 0] * rules.foresight // 100
    while queue_at[LENGTH] > 0 and queue[queue_at[HEAD], ARRIVAL] + rules.deadline < latest:
        arrival, needs = _pop(queue, queue_at)
        if state.late_at[LENGTH] < len(state.late):
            _push(state.late, state.late_at, arrival, needs)
        else:
            _answer(rules, state, log, arrival, needs, WAS_REFUSED)


@part
def _sort_out_jobs(model, rules, state):
    """See which batches have become late."""
    for slot in range(len(state.jobs)):
        if state.jobs[slot, USED]:
            _judge(rules, model.remaining, state.clocks[CHANNEL], state.jobs[slot], state.members[slot])


@part
def _waits(rules: RefillRules, now: int, queue: Ints, queue_at: Ints) -> bool:
    """Whether the queue waits to become a full batch."""
    return bool(queue_at[LENGTH] < rules.max_batch and queue[queue_at[HEAD], ARRIVAL] + rules.wait > now)


# Batches


@part
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


@part
def _first_due(rules: RefillRules, size: int, members: Ints, latest: int) -> int:
    """The first deadline of a batch's members that is not before *latest*; NONE if there is none."""
    first = NONE
    for place in range(size):
        due = members[place, ARRIVAL] + rules.deadline
        if due >= latest:
            first = min(first, due)
    return first


@part
def _set_due(rules: RefillRules, job: Ints, members: Ints) -> None:
    """When a batch with other members is due."""
    if not job[LATE]:
        first = _first_due(rules, job[SIZE], members, job[DUE])
        job[DUE] = first if first < NONE else _first_due(rules, job[SIZE], members, -NONE)


@part
def _judge(rules: RefillRules, remaining: Ints, now: int, job: Ints, members: Ints) -> None:
    """See whether a batch is late."""
    if job[LATE] and rules.policy == WHOLE:
        return
    latest = now + remaining[job[SIZE] - 1, job[LAYER]] * rules.foresight // 100
    if rules.policy == WHOLE:
        latest = max(latest, job[DUE])  # who was lost stays lost
    saved = _first_due(rules, job[SIZE], members, latest)
    job[LATE], job[DUE] = saved == NONE, saved


@part
def _begin(rules, state, size):
    """Make a batch of those who wait first and then of late ones, or of late ones alone. Returns its slot."""
    apart = state.queue_at[LENGTH] == 0
    if rules.policy == WHOLE:
        apart = apart or _waits(rules, state.clocks[CHANNEL], state.queue, state.queue_at)
    slot = 0
    while state.jobs[slot, USED]:
        slot += 1
    job, members = state.jobs[slot], state.members[slot]
    for place in range(size):
        if apart or state.queue_at[LENGTH] == 0:
            members[place, ARRIVAL], members[place, LEAVES] = _pop(state.late, state.late_at)
        else:
            members[place, ARRIVAL], members[place, LEAVES] = _pop(state.queue, state.queue_at)
    job[USED], job[LAYER], job[SIZE], job[LATE], job[QUERY] = 1, 0, size, apart, state.counts[QUERIES]
    job[DUE] = NONE if apart else members[0, ARRIVAL] + rules.deadline
    state.counts[QUERIES] += 1
    return slot


@part
def _merge(rules: RefillRules, jobs: Ints, members: Ints, slot: int) -> None:
    """Let the batch that stands where this one stands join it; the one that began first stays."""
    for other in range(len(jobs)):
        if other == slot or not jobs[other, USED] or jobs[other, LAYER] != jobs[slot, LAYER]:
            continue
        kept, joining = (slot, other) if jobs[slot, QUERY] < jobs[other, QUERY] else (other, slot)
        for place in range(jobs[joining, SIZE]):
            for column in (ARRIVAL, LEAVES):
                members[kept, jobs[kept, SIZE] + place, column] = members[joining, place, column]
        jobs[kept, SIZE] += jobs[joining, SIZE]
        jobs[kept, LATE] = min(jobs[kept, LATE], jobs[joining, LATE])
        jobs[kept, DUE] = min(jobs[kept, DUE], jobs[joining, DUE])
        jobs[kept, LAST] = max(jobs[kept, LAST], jobs[joining, LAST])
        jobs[joining, USED] = 0
        _set_due(rules, jobs[kept], members[kept])
        return


# Decisions


@part
def _choose(model, rules, state, notes, waiting, batches, begun, front):
    """A batch to go on with, or NOBODY, and how many to begin with."""
    now, jobs, at = state.clocks[CHANNEL], state.jobs, NONE
    if rules.policy == WHOLE:
        return _choose_whole(rules, now, state.queue, state.queue_at, state.late_at, jobs)
    room = min(rules.max_batch - begun, waiting)
    if room <= 0:
        return front, 0
    if batches > 0:
        at = jobs[front, LAYER]
    size = 0
    if rules.policy == TOP_UP:
        if batches == 0 or model.exits[at]:
            size = _top_up(model, rules, state, notes, begun + room, room, waiting)
    elif batches == 0:
        size = room
    elif rules.policy == LAZY:
        due = state.queue[state.queue_at[HEAD], ARRIVAL] + rules.deadline if state.queue_at[LENGTH] > 0 else NONE
        size = _lazy(model.remaining[0], now, due, jobs, room)
    elif batches == 1 and model.exits[at]:
        size = _fluid(model.remaining, now, jobs[front], room)
    return front, size


@part
def _choose_whole(rules, now, queue, queue_at, late_at, jobs):
    """One batch after another; those of late requests when there is no other."""
    count, first, least = 0, NOBODY, 0
    for slot in range(len(jobs)):
        if jobs[slot, USED] and not jobs[slot, LATE]:
            return slot, 0
        if jobs[slot, USED]:
            count += 1
            key = resumes(1, jobs[slot, LAST])
            if first == NOBODY or key < least:
                first, least = slot, key
    if count < rules.most_jobs and queue_at[LENGTH] > 0 and not _waits(rules, now, queue, queue_at):
        return NOBODY, min(queue_at[LENGTH], rules.max_batch)
    return (first, 0) if count else (NOBODY, min(late_at[LENGTH], rules.max_batch))


@part
def _lazy(alone, now, due, jobs, room):
    """The most that leaves everybody on time, were all computed one by one; *due*: the first of those who wait."""
    need = 0
    for slot in range(len(jobs)):
        if jobs[slot, USED]:
            need += jobs[slot, SIZE] * alone[jobs[slot, LAYER]]
            due = min(due, jobs[slot, DUE])
    for size in range(room, 0, -1):
        if slack(due, now, need + size * alone[0], 100) >= 0:
            return size
    return 0


@part
def _fluid(remaining, now, job, room):
    """All that fits, if the batch that stands at the exit can afford it."""
    newcomers, together = remaining[room - 1], remaining[job[SIZE] + room - 1]
    over = fluid_overhead(newcomers[0], newcomers[job[LAYER]], together[job[LAYER]])
    return room if slack(job[DUE], now, over, 100) > 0 else 0


@part
def _see(rules, state, notes, room):
    """Row 0: those who could begin; then the batches, in order of layers. How many rows that takes."""
    flight, dues = notes
    queue, queue_at, late, late_at, jobs = state.queue, state.queue_at, state.late, state.late_at, state.jobs
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
        size = jobs[found, SIZE]
        flight[rows, AT], flight[rows, MANY], flight[rows, KNOWN] = jobs[found, LAYER], size, size
        for place in range(size):
            dues[rows, place] = state.members[found, place, ARRIVAL] + rules.deadline
        rows += 1


@part
def _top_up(model, rules, state, notes, most, room, waiting):
    """How many to begin with at the least cost; none: the batch that is least far goes on. Few before many."""
    flight, now = notes[0], state.clocks[CHANNEL]
    rows = _see(rules, state, notes, room)
    best, chosen = np.inf, 0
    for taken in range(1 if rows == 1 else 0, room + 1):
        flight[0, MANY] = flight[0, KNOWN] = taken
        cost, end = _sweep(model, rules, notes, 0 if taken else 1, rows, 0, now, now)
        left = waiting - taken
        following = min(left, most)
        if following:
            flight[0, MANY], flight[0, KNOWN] = following, room - taken
            more, end = _sweep(model, rules, notes, 0, 1, taken, end, now)
            cost += more
        left -= following
        if left:
            full = model.remaining[most - 1, 0]
            cost += backlog_cost(left, most, full, end - now)
            end += backlog_ticks(left, most, full)
        cost += rules.backlog * (end - now)
        if cost < best:
            best, chosen = cost, taken
    return chosen


@loop
def _sweep(model, rules, notes, low, high, skip, start, now):
    """What the requests of some rows cost if the first starts then, and its end; skip: dues of row 0 to pass over."""
    remaining, exits, leaving, (flight, dues) = borrowed((model.remaining, model.exits, model.leaving, notes))
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
                cost += leaving_cost(share, flight[row, MANY], time - now, late, rules.miss)
    return cost, time
