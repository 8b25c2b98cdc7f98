"""Requests with deadlines, compiled; twin of ``weft.engine.Engine`` over ``Requests``, on an NPU or a host.

One loop: account for what has ended, drop what is overdue, admit, list what could go next, choose, issue. All state
lives in the arrays of ``LoopState``, so a run is fed its arrivals block by block and its memory does not grow. The
device is a parameter: on an NPU, layers are computed in the order of issue and one pointer into the columns of
``buffer`` serves all heads; on a host (``host_lanes``), a lane computes a segment at a time.
"""

from __future__ import annotations

import numpy as np

from weft.kernels.buffer import caught_up, columns, issued, on_chip
from weft.kernels.choosing import choose, price, row_worth, slack, with_margin
from weft.kernels.compiling import borrowed, called, inlined, is_kept, loop
from weft.kernels.host_lanes import end_segments, pass_time, rest_of, start_segment, stop_segment, stoppable
from weft.kernels.refilling import NO_BATCH, Refills, next_refilled
from weft.kernels.request_queues import (
    advance,
    any_busy,
    begin,
    drop_front,
    drop_member,
    first_strict,
    forsaken,
    front,
    may_begin,
    next_arrival,
    ready_at,
    sort_out_batches,
    sort_out_waiting,
    take,
)
from weft.kernels.request_state import (
    ABORTED,
    ARRAY,
    ARRIVAL,
    BASE,
    BATCH,
    BATCH_DUE,
    BATCHES_IN_FLIGHT,
    BELATED,
    BELATED_RING,
    CAME,
    CHANNEL,
    COMPUTE,
    COMPUTE_BOUND,
    COMPUTED,
    COMPUTING,
    DEADLINE,
    DEEPEST,
    DUE,
    FETCH,
    FETCHED,
    FIRST,
    FIRST_DUE,
    GIVEN_UP,
    HEADS,
    HOST,
    ISSUES,
    JOB,
    LAST,
    LAST_OF,
    LAST_QUERY,
    LATE,
    LAYER,
    LAYERWEAVER,
    LENGTH,
    LOGGED,
    MAX_BATCH,
    MAY_GO,
    MEMBERS,
    NEXT,
    NONE,
    NPU,
    OF,
    OLDEST,
    ON_CHIP,
    PLACES,
    POINTER,
    PROGRAM,
    PUNCTUAL,
    QUERIES,
    QUERY,
    READY,
    REMAINING,
    RUNNING,
    RUNS,
    SEG_AT,
    SEG_CAME,
    SEG_DUE,
    SEG_END,
    SEG_JOB,
    SEG_OF,
    SEG_PROGRAM,
    SEG_QUERY,
    SEG_SIZE,
    SERVED,
    SIZE,
    STEPPED,
    STEPS,
    UNSEEN,
    USED,
    WAITING,
    WEAVE,
    Ints,
    LoopArrivals,
    LoopHeads,
    LoopLog,
    LoopRules,
    LoopState,
    Models,
)


def serve(
    models: Models,
    terms: Ints,
    rules: LoopRules,
    state: LoopState,
    log: LoopLog,
    coming: LoopArrivals,
    refilling: Refills | None = None,
) -> bool:
    """Serve until a stream's known arrivals are used up and more are to come (False), or all is done (True).

    Also False, and to be called again, where more layers are on chip than ``before`` and ``peak`` have places for.
    refilling: for a policy that refills batches; the loop is compiled for such policies apart.
    """
    heads = fresh_heads(state, rules.lanes)
    return bool(serve_until(NONE, models, terms, rules, state, log, heads, coming, refilling))


def is_compiled() -> bool:
    """Whether the loop need not be compiled first."""
    return is_kept(serve_until)


def fresh_heads(state: LoopState, lanes: int) -> LoopHeads:
    """Make room for a decision."""
    most = len(state.jobs) * (state.jobs.shape[1] + 2) + 1
    return LoopHeads(np.empty((most, HEADS), np.int64), np.empty(most), np.empty(most + 2 * lanes, np.int64))


@loop
def serve_until(until, models, terms, rules, state, log, heads, coming, refilling):
    """``serve`` that also ends, with False, before it decides anything at *until* or later; later arrivals wait."""
    models, terms, state, log, heads, coming = borrowed((models, terms, state, log, heads, coming))
    clocks = state.clocks
    done = False
    while clocks[CHANNEL] < until:
        if rules.device == NPU and clocks[ISSUES] + 1 >= len(state.before):
            _forget(rules, state)
            if clocks[ISSUES] + 1 >= len(state.before):  # all of them are still in the buffer: the caller makes room
                break
        if not _account(models, terms, rules, state, log, heads, coming):
            break
        if not clocks[GIVEN_UP] and _step(models, terms, rules, state, log, heads, refilling):
            continue
        soonest = next_arrival(terms, state, coming)
        if clocks[GIVEN_UP] or (soonest == NONE and until == NONE and not any_busy(state)):
            done = True
            break
        soonest = min(soonest, _next_event(models, terms, state))
        _idle(models, rules, state, min(max(soonest, clocks[CHANNEL]), until))
    if until < NONE:
        take(models, terms, rules, state, log, heads, coming)
    return done


@called
def _account(models, terms, rules, state, log, heads, coming):
    """Account for what has ended, drop what is overdue and admit arrivals; False where some are not known yet."""
    clocks = state.clocks
    if rules.device == HOST:
        end_segments(models, rules, state, log)
        for i in range(clocks[UNSEEN]):
            segment = state.unseen[i]
            stream, place = segment[SEG_OF], segment[SEG_JOB]
            state.jobs[stream, place, COMPUTING] = 0
            if segment[ABORTED]:
                state.jobs[stream, place, LAYER] -= 1
            elif not clocks[GIVEN_UP]:
                advance(models, terms, rules, state, log, stream, place, segment[SEG_END])
        clocks[UNSEEN] = 0
    if not rules.strict:
        clocks[FIRST_DUE] = NONE
        return take(models, terms, rules, state, log, heads, coming)
    _expire(models, terms, rules, state, log)
    known = take(models, terms, rules, state, log, heads, coming)
    clocks[FIRST_DUE], _, _, _ = first_strict(terms, state)
    return known


@called
def _expire(models, terms, rules, state, log):
    """Drop strict requests that are due, and stop running batches whose requests are all gone."""
    clocks = state.clocks
    while not clocks[GIVEN_UP]:
        due, stream, place, member = first_strict(terms, state)
        if due > clocks[CHANNEL]:
            return
        if place < 0:
            drop_front(models, terms, rules, state, log, stream, due)
            continue
        drop_member(models, terms, rules, state, log, stream, place, member, due)
        if rules.device == HOST and state.jobs[stream, place, COMPUTING] and forsaken(state, stream, place):
            stop_segment(models, rules, state, stream, place)


@called
def _step(models, terms, rules, state, log, heads, refilling):
    """Issue one layer, if there is one and the device can take it; whether there may be another one to issue."""
    clocks = state.clocks
    if rules.device == HOST and clocks[RUNNING] == rules.lanes:
        _reconsider(models, terms, rules, state, log, heads)
        return False
    if refilling is None:
        count = _list(models, terms, rules, state, log, heads)
        if count == 0 or clocks[GIVEN_UP]:
            return False
        row = heads.table[choose(models, terms, rules, state, heads, count)]
        stream, place, program = row[OF], row[JOB], row[RUNS]
        if place < 0:
            place = begin(terms, state, stream, program, place == BELATED)
    else:
        stream, place = 0, next_refilled(models, terms, rules, state, log, refilling)
        if place == NO_BATCH or clocks[GIVEN_UP]:
            return False
    job = state.jobs[stream, place]
    at = models.programs[job[PROGRAM], FIRST] + job[LAYER]
    job[LAYER] += 1
    job[LAST], clocks[STEPS] = clocks[STEPS], clocks[STEPS] + 1
    state.streams[stream, SERVED] += max(models.layers[at, FETCH], models.layers[at, COMPUTE])
    if rules.device == HOST:
        job[COMPUTING] = 1
        start_segment(models, terms, rules, state, log, stream, place, at)
    else:
        _issue(models, rules, state, log, stream, place, at)
        advance(models, terms, rules, state, log, stream, place, clocks[ARRAY])
    return True


@called
def _next_event(models, terms, state):
    """When something may happen besides an arrival and the end of a segment: a deadline, or a batch becomes ready."""
    soonest, now = state.clocks[FIRST_DUE], state.clocks[CHANNEL]
    for s in range(len(terms)):
        if state.rings[s, WAITING, LENGTH] > 0:
            ready = ready_at(models, terms, state, s)
            if ready > now:
                soonest = min(soonest, ready)
    return soonest


@called
def _idle(models, rules, state, tick):
    """Wait until *tick*, or until something changes on the device."""
    clocks = state.clocks
    if rules.device == NPU:
        clocks[CHANNEL] = max(clocks[CHANNEL], tick)
        return
    if not clocks[STEPPED]:
        pass_time(models, rules, state, tick)
    clocks[STEPPED] = 0


# What could go next


@called
def _list(models, terms, rules, state, log, heads):
    """List the next layers of batches in flight and of those that could begin, and which of them may go; how many.

    Late batches are listed where they may go, or where a policy looks at everything that runs.
    """
    clocks, table = state.clocks, heads.table
    now = clocks[CHANNEL]
    clock = now if rules.device == HOST else max(now, clocks[ARRAY])
    with_late = rules.late == WEAVE or (rules.policy >= LAYERWEAVER and rules.failsafe == 1)
    count = on_time = 0
    for s in range(len(terms)):
        waiting = state.rings[s, WAITING, LENGTH]
        if waiting > 0:
            state.counts[s, DEEPEST] = max(state.counts[s, DEEPEST], waiting)
            sort_out_waiting(models, terms, rules, state, log, s, clock)
        if state.streams[s, BATCHES_IN_FLIGHT] > 0:
            sort_out_batches(models, terms, rules, state, log, s, clock)
        if clocks[GIVEN_UP]:
            return 0
        for place in range(state.streams[s, PLACES]):
            job = state.jobs[s, place]
            if job[USED] and not job[COMPUTING] and (with_late or not job[LATE]):
                count = _list_job(models, state, table, s, place, count)
                on_time += 1 - job[LATE]
        waiting = state.rings[s, WAITING, LENGTH]
        ready = waiting > 0 and (waiting >= terms[s, MAX_BATCH] or now >= ready_at(models, terms, state, s))
        if ready and may_begin(terms, rules, state, s):
            count = _list_batch(models, terms, state, state.queue, table, s, READY, count)
            on_time += 1
    if on_time == 0 and not with_late:
        for s in range(len(terms)):
            for place in range(state.streams[s, PLACES]):
                if state.jobs[s, place, USED] and not state.jobs[s, place, COMPUTING]:
                    count = _list_job(models, state, table, s, place, count)
    if on_time == 0 or rules.late == WEAVE:
        for s in range(len(terms)):
            if state.rings[s, BELATED_RING, LENGTH] > 0 and state.streams[s, BATCHES_IN_FLIGHT] < state.jobs.shape[1]:
                count = _list_batch(models, terms, state, state.late, table, s, BELATED, count)
    _allow(models, rules, state, table, count, on_time)
    return count


@inlined
def _list_job(models, state, table, stream, place, count):
    """List the next layer of a batch in flight."""
    job, row = state.jobs[stream, place], table[count]
    row[OF], row[JOB], row[RUNS], row[BATCH], row[MEMBERS] = stream, place, job[PROGRAM], job[QUERY], job[SIZE]
    row[NEXT] = models.programs[job[PROGRAM], FIRST] + job[LAYER]
    row[CAME], row[DUE] = job[OLDEST], job[BATCH_DUE]
    return count + 1


@called
def _list_batch(models, terms, state, ring, table, stream, kind, count):
    """List the first layer of a batch of waiting requests."""
    which = WAITING if kind == READY else BELATED_RING
    row, oldest = table[count], front(ring, state.rings, stream, which)[ARRIVAL]
    size = min(state.rings[stream, which, LENGTH], terms[stream, MAX_BATCH])
    program = terms[stream, BASE] + size - 1
    row[OF], row[JOB], row[RUNS], row[BATCH], row[MEMBERS] = stream, kind, program, state.counts[stream, QUERIES], size
    row[NEXT] = models.programs[program, FIRST]
    row[CAME], row[DUE] = oldest, oldest + terms[stream, DEADLINE] if kind == READY else NONE
    return count + 1


@called
def _allow(models, rules, state, table, count, on_time):
    """Mark the heads that may go: all, or those on time, or also late ones that make none of those late."""
    for i in range(count):
        table[i, MAY_GO] = on_time == 0 or rules.late == WEAVE or table[i, DUE] < NONE
    if rules.policy >= LAYERWEAVER or rules.late == WEAVE:
        price(models, rules, state, table, count)
    if rules.late == WEAVE and 0 < on_time < count:
        _let_fill(models, table, count, state.clocks[CHANNEL if rules.device == HOST else ARRAY])


@called
def _let_fill(models, table, count, array):
    """Let late heads go that fill what those on time leave idle; twin of ``engine.lateness.woven``."""
    latest = _latest_end(models, table, count, array)
    array_bound = channel_bound = False
    for i in range(count):
        if table[i, DUE] < NONE:
            array_bound |= models.programs[table[i, RUNS], COMPUTE_BOUND] == 1
            channel_bound |= models.programs[table[i, RUNS], COMPUTE_BOUND] == 0
    for i in range(count):
        if table[i, DUE] == NONE:
            taken = array_bound if models.programs[table[i, RUNS], COMPUTE_BOUND] else channel_bound
            end = max(array, table[i, ON_CHIP]) + models.layers[table[i, NEXT], COMPUTE]
            table[i, MAY_GO] = not taken and end <= latest


@called
def _latest_end(models, table, count, now):
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
            rest = models.layers[table[i, NEXT], REMAINING]
            if table[i, DUE] == due and now + need + rest <= due:
                need += rest
                latest = min(latest, due - need)
        last = due


# Preemption on a host


@called
def _reconsider(models, terms, rules, state, log, heads):
    """Stop running work for waiting work if the policy does; requests are sorted out where any could be stopped."""
    victim, lost, free = -1, 0, NONE
    for i in range(state.clocks[RUNNING]):
        rest = rest_of(models, state, i)
        free = min(free, rest)
        if stoppable(models, rules, state, i):
            done = models.layers[models.programs[state.segments[i, SEG_PROGRAM], FIRST], REMAINING] - rest
            if victim < 0 or done < lost:
                victim, lost = i, done
    if victim < 0:
        return
    count = _list(models, terms, rules, state, log, heads)
    if count == 0 or rules.policy != PUNCTUAL or state.clocks[GIVEN_UP]:
        return
    segment, row = state.segments[victim], heads.table[count]
    row[OF], row[JOB], row[NEXT], row[RUNS] = segment[SEG_OF], segment[SEG_JOB], segment[SEG_AT], segment[SEG_PROGRAM]
    row[CAME], row[DUE], row[MEMBERS], row[BATCH] = (
        segment[SEG_CAME], segment[SEG_DUE], segment[SEG_SIZE], segment[SEG_QUERY],
    )  # fmt: skip
    row[MAY_GO] = 1
    best = choose(models, terms, rules, state, heads, count + 1)
    now, chosen = state.clocks[CHANNEL], heads.table[best]
    need = with_margin(rules, models.layers[chosen[NEXT], REMAINING])
    if best == count or not now + need <= chosen[DUE] < now + free + need:
        return
    spare = slack(row[DUE], now, models.layers[row[NEXT], REMAINING], 100 + rules.margin)
    if spare >= need or row_worth(models, terms, chosen, now) > row_worth(models, terms, row, now):
        stop_segment(models, rules, state, row[OF], row[JOB])


# Layers on an NPU


@called
def _forget(rules, state):
    """Make room in the columns: leave out issues that can no longer matter."""
    clocks, before, peak = state.clocks, state.before, state.peak
    n, shift = clocks[ISSUES], max(0, clocks[POINTER] - 1)
    latest = clocks[CHANNEL] - clocks[FETCHED] + rules.buffer
    while shift < n and peak[shift + 1] <= latest:  # computed too long ago to delay a fetch
        shift += 1
    for i in range(n + 1 - shift):
        before[i], peak[i] = before[i + shift], peak[i + shift]
    clocks[ISSUES], clocks[POINTER] = n - shift, max(0, clocks[POINTER] - shift)


@called
def _issue(models, rules, state, log, stream, place, at):
    """Issue the next layer of a batch."""
    before, peak, clocks, job = state.before, state.peak, state.clocks, state.jobs[stream, place]
    size, busy, n = models.layers[at, FETCH], models.layers[at, COMPUTE], clocks[ISSUES]
    x = clocks[FETCHED] - rules.buffer + size
    seen = caught_up(before, clocks[POINTER], x)
    end, _ = on_chip(before, peak, seen, peak[n], clocks[CHANNEL], size, x)
    array, fetched, n = issued(before, peak, n, clocks[ARRAY], end, clocks[FETCHED], size, busy)
    if clocks[LOGGED] < len(log.issues):
        row = log.issues[clocks[LOGGED]]
        row[0], row[1], row[2], row[3] = stream, job[QUERY], job[LAYER] - 1, job[PROGRAM]
        row[4], row[5], row[6], row[7] = clocks[CHANNEL], end, array - busy, array
        clocks[LOGGED] += 1
    clocks[COMPUTED] += busy
    clocks[CHANNEL], clocks[ARRAY], clocks[FETCHED], clocks[ISSUES], clocks[POINTER] = end, array, fetched, n, seen
    clocks[LAST_OF], clocks[LAST_QUERY] = stream, job[QUERY]


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
