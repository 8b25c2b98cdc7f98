"""Requests with deadlines on the decoupled NPU, compiled; twin of ``weft.engine.Engine`` over ``Requests``.

One loop: admit, part with the late, list what could go next, choose, issue, answer. All state lives in the arrays of
``LoopState``, so a run is fed its arrivals block by block and its memory does not grow. Times are ticks. One pointer
into the columns of ``buffer`` serves all heads, because the ends of issued layers only move forward.
"""

from __future__ import annotations

import numpy as np

from weft.kernels.buffer import caught_up, columns, issued, on_chip
from weft.kernels.choosing import choose, price
from weft.kernels.compiling import borrowed, inlined, loop, part
from weft.kernels.request_state import (
    ANSWERED,
    ARRAY,
    ARRIVED,
    BATCHES,
    BEGUN,
    BELATED,
    CAME,
    CHANNEL,
    COMPUTED,
    DEEPEST,
    DUE,
    FETCHED,
    HEAD,
    ISSUES,
    JOB,
    KEEP,
    LAST,
    LATE,
    LAYER,
    LAYERWEAVER,
    LENGTH,
    LOGGED,
    NEXT,
    NONE,
    OF,
    ON_TIME,
    PLACES,
    POINTER,
    PROGRAM,
    PUNCTUAL,
    QUERIES,
    QUERY,
    READY,
    RUNS,
    SIZE,
    STEPS,
    USED,
    WAS_REFUSED,
    WEAVE,
    Bools,
    Ints,
    LoopHeads,
    LoopLog,
    LoopNpu,
    LoopRules,
    LoopState,
    LoopTerms,
    Models,
    count_done,
    count_refused,
)


def serve(
    models: Models,
    terms: LoopTerms,
    rules: LoopRules,
    state: LoopState,
    log: LoopLog,
    arrivals: Ints,
    known: Ints,
    more: Bools,
) -> bool:
    """Serve until a stream's known arrivals are used up and more are to come (False), or all is done (True).

    Also False, and to be called again, where more layers are on chip than ``before`` and ``peak`` have places for.

    arrivals: ascending ticks, stream by stream; known: (streams, 2) where a stream's next one is and where they end;
    more: whether further ones follow.
    """
    most = len(terms.base) * (state.jobs.shape[1] + 2)
    heads = LoopHeads(np.empty((most, 6), np.int64), np.empty(most, np.int64), np.empty(most, np.bool_))
    return bool(serve_until(NONE, models, terms, rules, state, log, heads, arrivals, known, more))


@loop
def serve_until(until, models, terms, rules, state, log, heads, arrivals, known, more):
    """``serve`` that also ends, with False, before it decides anything at *until* or later; who came by then waits."""
    models, terms, state, log, heads = borrowed((models, terms, state, log, heads))
    arrivals, known, more = borrowed((arrivals, known, more))
    clocks = state.clocks
    npu = LoopNpu(clocks[CHANNEL], clocks[ARRAY], clocks[FETCHED], clocks[ISSUES], clocks[POINTER])
    done = False
    while npu.channel < until:
        if npu.n + 1 >= len(state.before):
            npu = _forget(rules, state, npu)
            if npu.n + 1 >= len(state.before):  # all of them are still in the buffer: the caller makes room
                break
        event = _admit(rules, terms, state, log, npu.channel, arrivals, known, more)
        if event < 0:
            break
        count, on_time, event = _list(models, terms, rules, state, log, heads, npu, event)
        if count == 0:
            if event == NONE and until == NONE:
                done = True
                break
            npu = LoopNpu(min(event, until), npu.array, npu.fetched, npu.n, npu.seen)
            continue
        _allow(models, rules, state, heads, count, on_time, npu)
        best = choose(models, terms, rules, state, heads, count, npu)
        head = heads.table[best]
        stream, job, at, program = head[OF], head[JOB], head[NEXT], head[RUNS]
        if job < 0:
            job = _begin(terms, state, stream, program, at, job == BELATED)
        npu = _issue(models, rules, state, log, stream, job, at, program, npu)
        if at + 1 == models.first[program + 1]:
            _end(state, stream, job)
            _answer(terms, rules, state, log, stream, job, npu.array)
    if until < NONE:
        _admit(rules, terms, state, log, until, arrivals, known, more)
    clocks[CHANNEL], clocks[ARRAY], clocks[FETCHED] = npu.channel, npu.array, npu.fetched
    clocks[ISSUES], clocks[POINTER] = npu.n, npu.seen
    return done


@part
def _forget(rules, state, npu):
    """Make room in the columns: leave out issues that can no longer matter."""
    before, peak = state.before, state.peak
    shift = max(0, npu.seen - 1)
    latest = npu.channel - npu.fetched + rules.buffer
    while shift < npu.n and peak[shift + 1] <= latest:  # computed too long ago to delay a fetch
        shift += 1
    for i in range(npu.n + 1 - shift):
        before[i], peak[i] = before[i + shift], peak[i + shift]
    return LoopNpu(npu.channel, npu.array, npu.fetched, npu.n - shift, max(0, npu.seen - shift))


# Requests come


@inlined
def _push(ring, at, stream, value):
    place = at[stream, HEAD] + at[stream, LENGTH]
    ring[stream, place if place < ring.shape[1] else place - ring.shape[1]] = value
    at[stream, LENGTH] += 1


@inlined
def _pop(ring, at, stream):
    place = at[stream, HEAD]
    at[stream, HEAD] = place + 1 if place + 1 < ring.shape[1] else 0
    at[stream, LENGTH] -= 1
    return ring[stream, place]


@part
def _admit(rules, terms, state, log, now, arrivals, known, more):
    """Put who has come into the queues; when the next one comes, or -1 where that is not known yet."""
    event = NONE
    for s in range(len(terms.base)):
        while known[s, HEAD] < known[s, LENGTH] and arrivals[known[s, HEAD]] <= now:
            _enter(rules, terms, state, log, s, arrivals[known[s, HEAD]], now)
            known[s, HEAD] += 1
        if known[s, HEAD] < known[s, LENGTH]:
            event = min(event, arrivals[known[s, HEAD]])
        elif more[s]:
            return -1
        while state.returning_at[s, LENGTH] > 0 and state.returning[s, state.returning_at[s, HEAD]] <= now:
            arrival = _pop(state.returning, state.returning_at, s)
            if arrival < rules.end:
                _enter(rules, terms, state, log, s, arrival, now)
        if state.returning_at[s, LENGTH] > 0:
            event = min(event, state.returning[s, state.returning_at[s, HEAD]])
        state.counts[s, DEEPEST] = max(state.counts[s, DEEPEST], state.queue_at[s, LENGTH])
    return event


@part
def _enter(rules, terms, state, log, stream, arrival, now):
    if arrival >= rules.warm:
        state.counts[stream, ARRIVED] += 1
    if state.queue_at[stream, LENGTH] < state.queue.shape[1]:
        _push(state.queue, state.queue_at, stream, arrival)
    else:
        _refuse(rules, terms, state, log, stream, arrival, now)


@part
def _refuse(rules, terms, state, log, stream, arrival, now):
    """There is no place for a request; its client is back when it would have been due."""
    _write_answer(state, log, stream, arrival, WAS_REFUSED)
    if arrival >= rules.warm:
        count_refused(state.counts[stream])
    _return(terms, state, stream, max(now, arrival + terms.deadline[stream]))


@inlined
def _return(terms, state, stream, now):
    """The client of a closed stream will be back."""
    if terms.think[stream] >= 0:
        _push(state.returning, state.returning_at, stream, now + terms.think[stream])


@inlined
def _write_answer(state, log, stream, arrival, end):
    row = state.clocks[ANSWERED]
    if row < len(log.answers):
        log.answers[row, 0], log.answers[row, 1], log.answers[row, 2] = stream, arrival, end
        state.clocks[ANSWERED] = row + 1


# What could go next


@part
def _list(models, terms, rules, state, log, heads, npu, event):
    """List the next layers of batches under way and of those that could begin: how many, and how many on time.

    Also when something happens that nobody decides. Late batches are listed where they may go, or where
    a policy looks at everything that runs.
    """
    clock = max(npu.array, npu.channel)
    with_late = rules.late == WEAVE or (rules.policy >= LAYERWEAVER and rules.failsafe == 1)
    count = on_time = 0
    for s in range(len(terms.base)):
        if rules.late != KEEP:
            event = min(event, _sort_out(models, terms, rules, state, log, s, clock))
        punctual = state.under_way[s, PUNCTUAL] - 1
        if with_late:
            count = _list_jobs(terms, state, heads, s, count)
        elif punctual >= 0:
            count = _list_job(terms, state, heads, s, punctual, count)
        if punctual >= 0:
            on_time += 1
        if state.queue_at[s, LENGTH] > 0:
            ready = _ready_at(models, terms, state, s)
            if ready > npu.channel:
                event = min(event, ready)
            elif punctual < 0 and state.under_way[s, BEGUN] < state.jobs.shape[1]:
                count = _list_batch(models, terms, state.queue, state.queue_at, heads, s, READY, count)
                on_time += 1
    if on_time == 0 and not with_late:
        for s in range(len(terms.base)):
            count = _list_jobs(terms, state, heads, s, count)
    if on_time == 0 or rules.late == WEAVE:
        count = _list_belated(models, terms, state, heads, count)
    return count, on_time, event


@part
def _list_belated(models, terms, state, heads, count):
    """Batches of late requests that could begin."""
    for s in range(len(terms.base)):
        if state.late_at[s, LENGTH] > 0 and state.under_way[s, BEGUN] < state.jobs.shape[1]:
            count = _list_batch(models, terms, state.late, state.late_at, heads, s, BELATED, count)
    return count


@inlined
def _sort_out(models, terms, rules, state, log, stream, clock):
    """Part with requests that cannot be on time; when a client whose request was lost is back, if there is one."""
    lost = _sort_out_queue(models, terms, rules, state, log, stream, clock)
    _sort_out_job(models, terms, rules, state, stream, clock)
    return clock + terms.think[stream] if lost and terms.think[stream] >= 0 else NONE


@part
def _sort_out_queue(models, terms, rules, state, log, stream, clock):
    """Take requests that cannot be on time out of the queue; whether any was lost."""
    lost = False
    rest = models.remaining[models.first[terms.base[stream]]] * rules.foresight // 100
    latest = clock + rest - terms.deadline[stream]
    while state.queue_at[stream, LENGTH] > 0 and state.queue[stream, state.queue_at[stream, HEAD]] < latest:
        arrival = _pop(state.queue, state.queue_at, stream)
        if state.late_at[stream, LENGTH] < state.late.shape[1]:
            _push(state.late, state.late_at, stream, arrival)
        else:
            _refuse(rules, terms, state, log, stream, arrival, clock)
            lost = True
    return lost


@part
def _sort_out_job(models, terms, rules, state, stream, clock):
    """See who of the batch on time still can be; without anybody it is late."""
    place = state.under_way[stream, PUNCTUAL] - 1
    if place < 0:
        return
    job = state.jobs[stream, place]
    latest = clock + models.remaining[job[LAYER]] * rules.foresight // 100 - terms.deadline[stream]
    while job[ON_TIME] < job[SIZE] and state.members[stream, place, job[ON_TIME]] < latest:
        job[ON_TIME] += 1
    if job[ON_TIME] == job[SIZE]:
        job[LATE], state.under_way[stream, PUNCTUAL] = 1, 0


@inlined
def _ready_at(models, terms, state, stream):
    """When what waits becomes a batch: it is full, its time is up, or it would be late."""
    if state.queue_at[stream, LENGTH] >= terms.max_batch[stream] or terms.timeout[stream] == 0:
        return 0
    rest = models.remaining[models.first[terms.base[stream]]]
    oldest = state.queue[stream, state.queue_at[stream, HEAD]]
    return oldest + min(terms.timeout[stream], terms.deadline[stream] - rest)


@part
def _list_jobs(terms, state, heads, stream, count):
    for job in range(state.under_way[stream, PLACES]):
        if state.jobs[stream, job, USED] == 1:
            count = _list_job(terms, state, heads, stream, job, count)
    return count


@inlined
def _list_job(terms, state, heads, stream, place, count):
    """The next layer of a batch under way."""
    job, row = state.jobs[stream, place], heads.table[count]
    row[OF], row[JOB], row[NEXT], row[RUNS] = stream, place, job[LAYER], job[PROGRAM]
    row[CAME], row[DUE] = state.members[stream, place, 0], NONE
    if job[LATE] == 0:
        row[DUE] = state.members[stream, place, job[ON_TIME]] + terms.deadline[stream]
    return count + 1


@part
def _list_batch(models, terms, ring, at, heads, stream, kind, count):
    """The first layer of a batch of those who wait."""
    row, oldest = heads.table[count], ring[stream, at[stream, HEAD]]
    program = terms.base[stream] + min(at[stream, LENGTH], terms.max_batch[stream]) - 1
    row[OF], row[JOB], row[NEXT], row[RUNS] = stream, kind, models.first[program], program
    row[CAME], row[DUE] = oldest, oldest + terms.deadline[stream] if kind == READY else NONE
    return count + 1


@part
def _allow(models, rules, state, heads, count, on_time, npu):
    """Say which heads may go: all, or those on time, or also late ones that make none of those late."""
    for i in range(count):
        heads.may_go[i] = on_time == 0 or rules.late == WEAVE or heads.table[i, DUE] < NONE
    if rules.policy >= LAYERWEAVER:
        price(models, rules, state, heads, count, npu)
    if rules.late == WEAVE and 0 < on_time < count:
        _let_fill(models, heads, count, npu.array)


@part
def _let_fill(models, heads, count, array):
    """Late heads may go where they fill what those on time leave idle; twin of ``engine.lateness.woven``."""
    latest = _latest_end(heads.table, count, models.remaining, array)
    array_bound = channel_bound = False
    for i in range(count):
        if heads.table[i, DUE] < NONE:
            array_bound |= models.compute_bound[heads.table[i, RUNS]]
            channel_bound |= not models.compute_bound[heads.table[i, RUNS]]
    for i in range(count):
        if heads.table[i, DUE] == NONE:
            taken = array_bound if models.compute_bound[heads.table[i, RUNS]] else channel_bound
            end = max(array, heads.ends[i]) + models.compute[heads.table[i, NEXT]]
            heads.may_go[i] = not taken and end <= latest


@loop
def _latest_end(table, count, remaining, now):
    """Twin of ``engine.lateness.latest_end``: by deadlines, equal ones in order."""
    latest, need, last = NONE, 0, -1
    while True:
        due = NONE
        for i in range(count):
            if last < table[i, DUE] < due:
                due = table[i, DUE]
        if due == NONE:
            return latest
        for i in range(count):
            if table[i, DUE] == due and now + need + remaining[table[i, NEXT]] <= due:
                need += remaining[table[i, NEXT]]
                latest = min(latest, due - need)
        last = due


# One of them goes


@part
def _begin(terms, state, stream, program, at, belated):
    """Make a batch of those who wait longest, in the queue or among the late ones; returns its place."""
    place = 0
    while state.jobs[stream, place, USED] == 1:
        place += 1
    size = program - terms.base[stream] + 1
    for i in range(size):
        if belated:
            state.members[stream, place, i] = _pop(state.late, state.late_at, stream)
        else:
            state.members[stream, place, i] = _pop(state.queue, state.queue_at, stream)
    job = state.jobs[stream, place]
    job[USED], job[LATE], job[PROGRAM], job[LAYER] = 1, belated, program, at
    job[ON_TIME], job[SIZE], job[QUERY] = 0, size, state.counts[stream, QUERIES]
    state.counts[stream, QUERIES] += 1
    under_way = state.under_way[stream]
    under_way[BEGUN] += 1
    under_way[PLACES] = max(under_way[PLACES], place + 1)
    if not belated:
        under_way[PUNCTUAL] = place + 1
    return place


@inlined
def _end(state, stream, place):
    """Nothing of a batch runs any more."""
    state.jobs[stream, place, USED] = 0
    under_way = state.under_way[stream]
    under_way[BEGUN] -= 1
    if under_way[PUNCTUAL] == place + 1:
        under_way[PUNCTUAL] = 0
    while under_way[PLACES] > 0 and state.jobs[stream, under_way[PLACES] - 1, USED] == 0:
        under_way[PLACES] -= 1


@part
def _issue(models, rules, state, log, stream, place, at, program, npu):
    """Issue the next layer of a batch; the device after it."""
    before, peak, clocks, job = state.before, state.peak, state.clocks, state.jobs[stream, place]
    size, busy = models.fetch[at], models.compute[at]
    x = npu.fetched - rules.buffer + size
    seen = caught_up(before, npu.seen, x)
    end, _ = on_chip(before, peak, seen, peak[npu.n], npu.channel, size, x)
    array, fetched, n = issued(before, peak, npu.n, npu.array, end, npu.fetched, size, busy)
    if clocks[LOGGED] < len(log.issues):
        row = log.issues[clocks[LOGGED]]
        row[0], row[1], row[2], row[3] = stream, job[QUERY], at - models.first[program], program
        row[4], row[5], row[6], row[7] = npu.channel, end, array - busy, array
        clocks[LOGGED] += 1
    job[LAYER], job[LAST] = at + 1, clocks[STEPS]
    clocks[STEPS] += 1
    clocks[COMPUTED] += busy
    return LoopNpu(end, array, fetched, n, seen)


@part
def _answer(terms, rules, state, log, stream, place, now):
    """Answer the requests of a batch."""
    if state.members[stream, place, 0] >= rules.warm:
        state.counts[stream, BATCHES] += 1
    for i in range(state.jobs[stream, place, SIZE]):
        arrival = state.members[stream, place, i]
        _write_answer(state, log, stream, arrival, now)
        if arrival >= rules.warm:
            bins = state.histogram[terms.bins[stream]]
            count_done(state.counts[stream], bins, now - arrival, terms.deadline[stream])
        _return(terms, state, stream, now)


# Estimates


def remaining_alone(fetch: Ints, compute: Ints, buffer: int, out: Ints) -> None:
    """Ticks from each layer to the end when the device is empty and serves nothing else: the precise estimate."""
    _remaining_alone(fetch, compute, buffer, columns(len(fetch) + 1), out)


@loop
def _remaining_alone(fetch, compute, buffer, issues, out):
    fetch, compute, issues, out = borrowed((fetch, compute, issues, out))
    before, peak = issues[0], issues[1]
    for first in range(len(fetch)):
        channel = array = fetched = seen = n = 0
        for at in range(first, len(fetch)):
            x = fetched - buffer + fetch[at]
            channel, seen = on_chip(before, peak, seen, peak[n], channel, fetch[at], x)
            array, fetched, n = issued(before, peak, n, array, channel, fetched, fetch[at], compute[at])
        out[first] = array
