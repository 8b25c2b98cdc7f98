"""Requests with deadlines, compiled; twin of ``weft.engine.Engine`` over ``Requests``, on an NPU or a host.

One loop: account for what has ended, drop what is overdue, admit, list what could go next, choose, issue. All state
lives in the arrays of ``LoopState``, so a run is fed its arrivals block by block and its memory does not grow. The
device is a parameter: on an NPU, layers are computed in the order of issue and one pointer into the columns of
``buffer`` serves all heads; on a host (``host_lanes``), a lane computes a segment at a time.
"""

from __future__ import annotations

import numpy as np

from weft.kernels import request_state as k
from weft.kernels.buffer import caught_up, columns, issued, on_chip
from weft.kernels.choosing import choose, price, row_worth, slack, with_margin
from weft.kernels.compiling import borrowed, called, inlined, is_kept, loop, shared, uncounted_loop
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


def serve(
    models: k.Models,
    terms: k.Ints,
    rules: k.LoopRules,
    state: k.LoopState,
    log: k.LoopLog,
    coming: k.LoopArrivals,
    refilling: Refills | None = None,
) -> bool:
    """Serve until a stream's known arrivals are used up and more are to come (False), or all is done (True).

    Also False, and to be called again, where more layers are on chip than ``before`` and ``peak`` have places for.
    refilling: for a policy that refills batches; the loop is compiled for such policies apart.
    """
    heads = fresh_heads(state, rules.lanes)
    return bool(serve_until(k.NONE, models, terms, rules, state, log, heads, coming, refilling))


def is_compiled() -> bool:
    """Whether the loop need not be compiled first."""
    return is_kept(serve_until)


def fresh_heads(state: k.LoopState, lanes: int) -> k.LoopHeads:
    """Make room for a decision."""
    most = len(state.jobs) * (state.jobs.shape[1] + 2) + 1
    return k.LoopHeads(np.empty((most, k.HEADS), np.int64), np.empty(most), np.empty(most + 2 * lanes, np.int64))


@uncounted_loop
def serve_until(until, models, terms, rules, state, log, heads, coming, refilling):
    """``serve`` that also ends, with False, before it decides anything at *until* or later; later arrivals wait."""
    clocks = state.clocks
    done = False
    while clocks[k.CHANNEL] < until:
        if rules.device == k.NPU and clocks[k.ISSUES] + 1 >= len(state.before):
            _forget(rules, state)
            if clocks[k.ISSUES] + 1 >= len(state.before):  # all of them are still in the buffer: the caller makes room
                break
        if not _account(models, terms, rules, state, log, heads, coming):
            break
        if not clocks[k.GIVEN_UP] and _step(models, terms, rules, state, log, heads, refilling):
            continue
        soonest = next_arrival(terms, state, coming)
        if clocks[k.GIVEN_UP] or (soonest == k.NONE and until == k.NONE and not any_busy(state)):
            done = True
            break
        soonest = min(soonest, _next_event(models, terms, state))
        _idle(models, rules, state, min(max(soonest, clocks[k.CHANNEL]), until))
    if until < k.NONE:
        take(models, terms, rules, state, log, heads, coming)
    return done


@called
def _account(models, terms, rules, state, log, heads, coming):
    """Account for what has ended, drop what is overdue and admit arrivals; False where some are not known yet."""
    clocks = state.clocks
    if rules.device == k.HOST:
        end_segments(models, rules, state, log)
        for i in range(clocks[k.UNSEEN]):
            segment = state.unseen[i]
            stream, place = segment[k.SEG_OF], segment[k.SEG_JOB]
            state.jobs[stream, place, k.COMPUTING] = 0
            if segment[k.ABORTED]:
                state.jobs[stream, place, k.LAYER] -= 1
            elif not clocks[k.GIVEN_UP]:
                advance(models, terms, rules, state, log, stream, place, segment[k.SEG_END])
        clocks[k.UNSEEN] = 0
    if not rules.strict:
        clocks[k.FIRST_DUE] = k.NONE
        return take(models, terms, rules, state, log, heads, coming)
    _expire(models, terms, rules, state, log)
    known = take(models, terms, rules, state, log, heads, coming)
    clocks[k.FIRST_DUE], _, _, _ = first_strict(terms, state)
    return known


@called
def _expire(models, terms, rules, state, log):
    """Drop strict requests that are due, and stop running batches whose requests are all gone."""
    clocks = state.clocks
    while not clocks[k.GIVEN_UP]:
        due, stream, place, member = first_strict(terms, state)
        if due > clocks[k.CHANNEL]:
            return
        if place < 0:
            drop_front(models, terms, rules, state, log, stream, due)
            continue
        drop_member(models, terms, rules, state, log, stream, place, member, due)
        if rules.device == k.HOST and state.jobs[stream, place, k.COMPUTING] and forsaken(state, stream, place):
            stop_segment(models, rules, state, stream, place)


@called
def _step(models, terms, rules, state, log, heads, refilling):
    """Issue one layer, if there is one and the device can take it; whether there may be another one to issue."""
    clocks = state.clocks
    if rules.device == k.HOST and clocks[k.RUNNING] == rules.lanes:
        _reconsider(models, terms, rules, state, log, heads)
        return False
    if refilling is None:
        count = _list(models, terms, rules, state, log, heads)
        if count == 0 or clocks[k.GIVEN_UP]:
            return False
        row = heads.table[choose(models, terms, rules, state, heads, count)]
        stream, place, program = row[k.OF], row[k.JOB], row[k.RUNS]
        if place < 0:
            place = begin(terms, state, stream, program, place == k.BELATED)
    else:
        stream, place = 0, next_refilled(models, terms, rules, state, log, refilling)
        if place == NO_BATCH or clocks[k.GIVEN_UP]:
            return False
    job = state.jobs[stream, place]
    at = models.programs[job[k.PROGRAM], k.FIRST] + job[k.LAYER]
    job[k.LAYER] += 1
    job[k.LAST], clocks[k.STEPS] = clocks[k.STEPS], clocks[k.STEPS] + 1
    state.streams[stream, k.SERVED] += max(models.layers[at, k.FETCH], models.layers[at, k.COMPUTE])
    if rules.device == k.HOST:
        job[k.COMPUTING] = 1
        start_segment(models, terms, rules, state, log, stream, place, at)
    else:
        _issue(models, rules, state, log, stream, place, at)
        advance(models, terms, rules, state, log, stream, place, clocks[k.ARRAY])
    return True


@called
def _next_event(models, terms, state):
    """When something may happen besides an arrival and the end of a segment: a deadline, or a batch becomes ready."""
    soonest, now = state.clocks[k.FIRST_DUE], state.clocks[k.CHANNEL]
    for s in range(len(terms)):
        if state.rings[s, k.WAITING, k.LENGTH] > 0:
            ready = ready_at(models, terms, state, s)
            if ready > now:
                soonest = min(soonest, ready)
    return soonest


@called
def _idle(models, rules, state, tick):
    """Wait until *tick*, or until something changes on the device."""
    clocks = state.clocks
    if rules.device == k.NPU:
        clocks[k.CHANNEL] = max(clocks[k.CHANNEL], tick)
        return
    if not clocks[k.STEPPED]:
        pass_time(models, rules, state, tick)
    clocks[k.STEPPED] = 0


# What could go next


@shared
def _list(models, terms, rules, state, log, heads):
    """List the next layers of batches in flight and of those that could begin, and which of them may go; how many.

    Late batches are listed where they may go, or where a policy looks at everything that runs.
    """
    clocks, table = state.clocks, heads.table
    now = clocks[k.CHANNEL]
    clock = now if rules.device == k.HOST else max(now, clocks[k.ARRAY])
    with_late = rules.late == k.WEAVE or (rules.policy >= k.LAYERWEAVER and rules.failsafe == 1)
    count = on_time = 0
    for s in range(len(terms)):
        waiting = state.rings[s, k.WAITING, k.LENGTH]
        if waiting > 0:
            state.counts[s, k.DEEPEST] = max(state.counts[s, k.DEEPEST], waiting)
            sort_out_waiting(models, terms, rules, state, log, s, clock)
        if state.streams[s, k.BATCHES_IN_FLIGHT] > 0:
            sort_out_batches(models, terms, rules, state, log, s, clock)
        if clocks[k.GIVEN_UP]:
            return 0
        for place in range(state.streams[s, k.PLACES]):
            job = state.jobs[s, place]
            if job[k.USED] and not job[k.COMPUTING] and (with_late or not job[k.LATE]):
                count = _list_job(models, state, table, s, place, count)
                on_time += 1 - job[k.LATE]
        waiting = state.rings[s, k.WAITING, k.LENGTH]
        ready = waiting > 0 and (waiting >= terms[s, k.MAX_BATCH] or now >= ready_at(models, terms, state, s))
        if ready and may_begin(terms, rules, state, s):
            count = _list_batch(models, terms, state, state.queue, table, s, k.READY, count)
            on_time += 1
    if on_time == 0 and not with_late:
        for s in range(len(terms)):
            for place in range(state.streams[s, k.PLACES]):
                if state.jobs[s, place, k.USED] and not state.jobs[s, place, k.COMPUTING]:
                    count = _list_job(models, state, table, s, place, count)
    if on_time == 0 or rules.late == k.WEAVE:
        for s in range(len(terms)):
            has_place = state.streams[s, k.BATCHES_IN_FLIGHT] < state.jobs.shape[1]
            if has_place and state.rings[s, k.BELATED_RING, k.LENGTH] > 0:
                count = _list_batch(models, terms, state, state.late, table, s, k.BELATED, count)
    _allow(models, rules, state, table, count, on_time)
    return count


@inlined
def _list_job(models, state, table, stream, place, count):
    """List the next layer of a batch in flight."""
    job, row = state.jobs[stream, place], table[count]
    row[k.OF], row[k.JOB], row[k.RUNS] = stream, place, job[k.PROGRAM]
    row[k.BATCH], row[k.MEMBERS] = job[k.QUERY], job[k.SIZE]
    row[k.NEXT] = models.programs[job[k.PROGRAM], k.FIRST] + job[k.LAYER]
    row[k.CAME], row[k.DUE] = job[k.OLDEST], job[k.BATCH_DUE]
    return count + 1


@called
def _list_batch(models, terms, state, ring, table, stream, kind, count):
    """List the first layer of a batch of waiting requests."""
    which = k.WAITING if kind == k.READY else k.BELATED_RING
    row, oldest = table[count], front(ring, state.rings, stream, which)[k.ARRIVAL]
    size = min(state.rings[stream, which, k.LENGTH], terms[stream, k.MAX_BATCH])
    program = terms[stream, k.BASE] + size - 1
    row[k.OF], row[k.JOB], row[k.RUNS] = stream, kind, program
    row[k.BATCH], row[k.MEMBERS] = state.counts[stream, k.QUERIES], size
    row[k.NEXT] = models.programs[program, k.FIRST]
    row[k.CAME], row[k.DUE] = oldest, oldest + terms[stream, k.DEADLINE] if kind == k.READY else k.NONE
    return count + 1


@called
def _allow(models, rules, state, table, count, on_time):
    """Mark the heads that may go: all, or those on time, or also late ones that make none of those late."""
    for i in range(count):
        table[i, k.MAY_GO] = on_time == 0 or rules.late == k.WEAVE or table[i, k.DUE] < k.NONE
    if rules.policy >= k.LAYERWEAVER or rules.late == k.WEAVE:
        price(models, rules, state, table, count)
    if rules.late == k.WEAVE and 0 < on_time < count:
        _let_fill(models, table, count, state.clocks[k.CHANNEL if rules.device == k.HOST else k.ARRAY])


@called
def _let_fill(models, table, count, array):
    """Let late heads go that fill what those on time leave idle; twin of ``engine.lateness.weave_late_heads``."""
    latest = _latest_end(models, table, count, array)
    array_bound = channel_bound = False
    for i in range(count):
        if table[i, k.DUE] < k.NONE:
            array_bound |= models.programs[table[i, k.RUNS], k.COMPUTE_BOUND] == 1
            channel_bound |= models.programs[table[i, k.RUNS], k.COMPUTE_BOUND] == 0
    for i in range(count):
        if table[i, k.DUE] == k.NONE:
            taken = array_bound if models.programs[table[i, k.RUNS], k.COMPUTE_BOUND] else channel_bound
            end = max(array, table[i, k.ON_CHIP]) + models.layers[table[i, k.NEXT], k.COMPUTE]
            table[i, k.MAY_GO] = not taken and end <= latest


@called
def _latest_end(models, table, count, now):
    """Twin of ``engine.lateness.latest_end``: by deadlines, equal ones in order."""
    latest, need, last = k.NONE, 0, -1
    while True:
        due = k.NONE
        for i in range(count):
            if last < table[i, k.DUE] < due:
                due = table[i, k.DUE]
        if due == k.NONE:
            return latest
        for i in range(count):
            rest = models.layers[table[i, k.NEXT], k.REMAINING]
            if table[i, k.DUE] == due and now + need + rest <= due:
                need += rest
                latest = min(latest, due - need)
        last = due


# Preemption on a host


@shared
def _reconsider(models, terms, rules, state, log, heads):
    """Stop running work for waiting work if the policy does; requests are sorted out where any could be stopped."""
    victim, lost, free = -1, 0, k.NONE
    for i in range(state.clocks[k.RUNNING]):
        rest = rest_of(models, state, i)
        free = min(free, rest)
        if stoppable(models, rules, state, i):
            done = models.layers[models.programs[state.segments[i, k.SEG_PROGRAM], k.FIRST], k.REMAINING] - rest
            if victim < 0 or done < lost:
                victim, lost = i, done
    if victim < 0:
        return
    count = _list(models, terms, rules, state, log, heads)
    if count == 0 or rules.policy != k.PUNCTUAL or state.clocks[k.GIVEN_UP]:
        return
    segment, row = state.segments[victim], heads.table[count]
    row[k.OF], row[k.JOB], row[k.NEXT] = segment[k.SEG_OF], segment[k.SEG_JOB], segment[k.SEG_AT]
    row[k.RUNS], row[k.CAME], row[k.DUE] = segment[k.SEG_PROGRAM], segment[k.SEG_CAME], segment[k.SEG_DUE]
    row[k.MEMBERS], row[k.BATCH] = segment[k.SEG_SIZE], segment[k.SEG_QUERY]
    row[k.MAY_GO] = 1
    best = choose(models, terms, rules, state, heads, count + 1)
    now, chosen = state.clocks[k.CHANNEL], heads.table[best]
    need = with_margin(rules, models.layers[chosen[k.NEXT], k.REMAINING])
    if best == count or not now + need <= chosen[k.DUE] < now + free + need:
        return
    spare = slack(row[k.DUE], now, models.layers[row[k.NEXT], k.REMAINING], 100 + rules.margin)
    if spare >= need or row_worth(models, terms, chosen, now) > row_worth(models, terms, row, now):
        stop_segment(models, rules, state, row[k.OF], row[k.JOB])


# Layers on an NPU


@shared
def _forget(rules, state):
    """Make room in the columns: leave out issues that can no longer matter."""
    clocks, before, peak = state.clocks, state.before, state.peak
    n, shift = clocks[k.ISSUES], max(0, clocks[k.POINTER] - 1)
    latest = clocks[k.CHANNEL] - clocks[k.FETCHED] + rules.buffer
    while shift < n and peak[shift + 1] <= latest:  # computed too long ago to delay a fetch
        shift += 1
    for i in range(n + 1 - shift):
        before[i], peak[i] = before[i + shift], peak[i + shift]
    clocks[k.ISSUES], clocks[k.POINTER] = n - shift, max(0, clocks[k.POINTER] - shift)


@called
def _issue(models, rules, state, log, stream, place, at):
    """Issue the next layer of a batch."""
    before, peak, clocks, job = state.before, state.peak, state.clocks, state.jobs[stream, place]
    size, busy, n = models.layers[at, k.FETCH], models.layers[at, k.COMPUTE], clocks[k.ISSUES]
    x = clocks[k.FETCHED] - rules.buffer + size
    seen = caught_up(before, clocks[k.POINTER], x)
    end, _ = on_chip(before, peak, seen, peak[n], clocks[k.CHANNEL], size, x)
    array, fetched, n = issued(before, peak, n, clocks[k.ARRAY], end, clocks[k.FETCHED], size, busy)
    if clocks[k.LOGGED] < len(log.issues):
        row = log.issues[clocks[k.LOGGED]]
        row[0], row[1], row[2], row[3] = stream, job[k.QUERY], job[k.LAYER] - 1, job[k.PROGRAM]
        row[4], row[5], row[6], row[7] = clocks[k.CHANNEL], end, array - busy, array
        clocks[k.LOGGED] += 1
    clocks[k.COMPUTED] += busy
    clocks[k.CHANNEL], clocks[k.ARRAY], clocks[k.FETCHED] = end, array, fetched
    clocks[k.ISSUES], clocks[k.POINTER] = n, seen
    clocks[k.LAST_OF], clocks[k.LAST_QUERY] = stream, job[k.QUERY]


# Estimates


def remaining_alone(fetch: k.Ints, compute: k.Ints, buffer: int, out: k.Ints) -> None:
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
