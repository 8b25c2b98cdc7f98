"""Requests with deadlines, compiled; twin of ``weft.engine.Engine`` over ``Requests``, on an NPU or a host.

One loop: account for ended layers, drop overdue requests, admit arrivals, list the heads (layers that could be issued
next), choose a head, issue it. All state lives in the arrays of ``LoopState``, so a run is fed its arrivals block by
block and its memory does not grow. The device is a parameter: on an NPU, layers are computed in the order of issue and
one pointer into the columns of ``buffer`` serves all heads; on a host (``host_lanes``), a lane computes a segment at a
time. Parameters are the arrays of ``request_state`` (*terms*: (streams, TERMS)); its constants number their columns.
"""

from __future__ import annotations

import numpy as np

from weft.kernels import request_state as k
from weft.kernels.buffer import caught_up, columns, issued, on_chip
from weft.kernels.choosing import choose, compute_on_chip, row_worth, slack, with_margin
from weft.kernels.compiling import borrowed, called, is_kept, loop, shared, uncounted_loop
from weft.kernels.host_lanes import end_segments, pass_time, rest_of, start_segment, stop_segment, stoppable
from weft.kernels.refilling import NO_BATCH, Refills, next_refilled
from weft.kernels.request_queues import (
    advance,
    all_gone,
    any_busy,
    begin,
    drop_front,
    drop_member,
    first_strict,
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
    """Serve requests; return True if the run is done, False if it has to be called again.

    False: the known arrivals of a stream are used up and the next block is needed, or more layers are on chip than
    ``before`` and ``peak`` have places for. log: filled as far as it has room. refilling: for a policy that refills
    batches; numba compiles the loop for such policies apart.
    """
    heads = fresh_heads(state, rules.lanes)
    return bool(serve_until(k.NONE, models, terms, rules, state, log, heads, coming, refilling))


def is_compiled() -> bool:
    """Return whether the loop is already compiled, in this process or on disk."""
    return is_kept(serve_until)


def fresh_heads(state: k.LoopState, lanes: int) -> k.LoopHeads:
    """Allocate the table of heads, for as many heads as a decision can have."""
    # Per stream: its jobs, a READY and a BELATED batch; one more for the segment that ``_preempt`` compares. The last
    # array is also the scratch space of ``_free_in``, for begun batches and for lanes.
    max_heads = len(state.jobs) * (state.jobs.shape[1] + 2) + 1
    return k.LoopHeads(
        np.empty((max_heads, k.HEADS), np.int64), np.empty(max_heads), np.empty(max_heads + 2 * lanes, np.int64)
    )


@uncounted_loop
def serve_until(until, models, terms, rules, state, log, heads, coming, refilling):
    """Run the loop as ``serve`` does, but return False before any decision at *until* or later; later arrivals wait."""
    clocks = state.clocks
    finished = False
    while clocks[k.CHANNEL] < until:
        if rules.device == k.NPU and clocks[k.ISSUES] + 1 >= len(state.before):
            _forget_old_issues(rules, state)
            if clocks[k.ISSUES] + 1 >= len(state.before):  # all of them are still in the buffer: the caller makes room
                break
        if not _account(models, terms, rules, state, log, heads, coming):
            break
        if not clocks[k.GIVEN_UP] and _step(models, terms, rules, state, log, heads, refilling):
            continue
        soonest = next_arrival(terms, state, coming)
        if clocks[k.GIVEN_UP] or (soonest == k.NONE and until == k.NONE and not any_busy(state)):
            finished = True
            break
        soonest = min(soonest, _next_event(models, terms, state))
        _wait(models, rules, state, min(max(soonest, clocks[k.CHANNEL]), until))
    if until < k.NONE:
        take(models, terms, rules, state, log, heads, coming)
    return finished


@called
def _account(models, terms, rules, state, log, heads, coming):
    """Account for ended segments, drop overdue requests and admit arrivals.

    Returns False if arrivals of this time are only in the next block.
    """
    clocks = state.clocks
    if rules.device == k.HOST:
        end_segments(models, rules, state, log)
        for i in range(clocks[k.UNSEEN]):
            segment = state.unseen[i]
            stream, place = segment[k.HEAD_STREAM], segment[k.HEAD_PLACE]
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
    all_known = take(models, terms, rules, state, log, heads, coming)
    clocks[k.FIRST_DUE], _, _, _ = first_strict(terms, state)
    return all_known


@called
def _expire(models, terms, rules, state, log):
    """Drop strict requests that are due, and stop running batches whose requests have all ended."""
    clocks = state.clocks
    while not clocks[k.GIVEN_UP]:
        due, stream, place, member = first_strict(terms, state)
        if due > clocks[k.CHANNEL]:
            return
        if place < 0:
            drop_front(models, terms, rules, state, log, stream, due)
            continue
        drop_member(models, terms, rules, state, log, stream, place, member, due)
        if rules.device == k.HOST and state.jobs[stream, place, k.COMPUTING] and all_gone(state, stream, place):
            stop_segment(models, rules, state, stream, place)


@called
def _step(models, terms, rules, state, log, heads, refilling):
    """Issue one layer if the device can take one; return whether another layer may be issued at once."""
    clocks = state.clocks
    if rules.device == k.HOST and clocks[k.RUNNING] == rules.lanes:
        _preempt(models, terms, rules, state, log, heads)
        return False
    if refilling is None:
        count = _list_heads(models, terms, rules, state, log, heads)
        if count == 0 or clocks[k.GIVEN_UP]:
            return False
        row = heads.table[choose(models, terms, rules, state, heads, count)]
        stream, place, program = row[k.HEAD_STREAM], row[k.HEAD_PLACE], row[k.HEAD_PROGRAM]
        if place < 0:
            place = begin(terms, state, stream, program, place == k.BELATED)
    else:
        stream, place = 0, next_refilled(models, terms, rules, state, log, refilling)
        if place == NO_BATCH or clocks[k.GIVEN_UP]:
            return False
    job = state.jobs[stream, place]
    layer_row = k.next_layer(models, job)
    job[k.LAYER] += 1
    job[k.LAST_ISSUED], clocks[k.STEPS] = clocks[k.STEPS], clocks[k.STEPS] + 1
    state.streams[stream, k.SERVED] += max(models.layers[layer_row, k.FETCH], models.layers[layer_row, k.COMPUTE])
    if rules.device == k.HOST:
        job[k.COMPUTING] = 1
        start_segment(models, terms, rules, state, log, stream, place, layer_row)
    else:
        _issue(models, rules, state, log, stream, place, layer_row)
        advance(models, terms, rules, state, log, stream, place, clocks[k.ARRAY])
    return True


@called
def _next_event(models, terms, state):
    """Return the tick of the next deadline, or at which a waiting batch becomes ready, whichever is first."""
    soonest, now = state.clocks[k.FIRST_DUE], state.clocks[k.CHANNEL]
    for s in range(len(terms)):
        if state.rings[s, k.WAITING, k.LENGTH] > 0:
            ready = ready_at(models, terms, state, s)
            if ready > now:
                soonest = min(soonest, ready)
    return soonest


@called
def _wait(models, rules, state, tick):
    """Advance the clock to *tick*; on a host, at most to the next end of a segment.

    On a host, the clock stays if the engine was busy: arrivals and ends of that time have to be accounted for first.
    """
    clocks = state.clocks
    if rules.device == k.NPU:
        clocks[k.CHANNEL] = max(clocks[k.CHANNEL], tick)
        return
    if not clocks[k.WAS_BUSY]:
        pass_time(models, rules, state, tick)
    clocks[k.WAS_BUSY] = 0


# Heads: the layers that could be issued next


@shared
def _list_heads(models, terms, rules, state, log, heads):
    """Fill the table of heads with the next layers of batches in flight and of batches that could begin.

    Sorts out late requests first, and marks the heads that may be issued. Late batches are listed only if they may be
    issued, or if the policy looks at all heads. Returns the number of heads.
    """
    clocks, table = state.clocks, heads.table
    now = clocks[k.CHANNEL]
    clock = now if rules.device == k.HOST else max(now, clocks[k.ARRAY])  # when the device could compute
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
                k.write_head(models, state, s, place, table, count)
                count += 1
                on_time += 1 - job[k.LATE]
        waiting = state.rings[s, k.WAITING, k.LENGTH]
        ready = waiting > 0 and (waiting >= terms[s, k.MAX_BATCH] or now >= ready_at(models, terms, state, s))
        if ready and may_begin(terms, rules, state, s):
            count = _list_batch(models, terms, state, state.queue, table, s, k.READY, count)
            on_time += 1
    if on_time == 0 and not with_late:  # the batches in flight are late, and were not listed above
        for s in range(len(terms)):
            for place in range(state.streams[s, k.PLACES]):
                job = state.jobs[s, place]
                if job[k.USED] and not job[k.COMPUTING]:
                    k.write_head(models, state, s, place, table, count)
                    count += 1
    if on_time == 0 or rules.late == k.WEAVE:
        for s in range(len(terms)):
            has_place = state.streams[s, k.BATCHES_IN_FLIGHT] < state.jobs.shape[1]
            if has_place and state.rings[s, k.BELATED_RING, k.LENGTH] > 0:
                count = _list_batch(models, terms, state, state.late, table, s, k.BELATED, count)
    _mark_allowed(models, rules, state, table, count, on_time)
    return count


@called
def _list_batch(models, terms, state, ring, table, stream, kind, count):
    """Write the first layer of a batch of waiting requests to row *count* of the table; return the new number of heads.

    kind: READY for waiting requests, BELATED for late ones; ring: the table of such requests.
    """
    ring_kind = k.WAITING if kind == k.READY else k.BELATED_RING
    row, oldest = table[count], front(ring, state.rings, stream, ring_kind)[k.ARRIVAL]
    size = min(state.rings[stream, ring_kind, k.LENGTH], terms[stream, k.MAX_BATCH])
    program = terms[stream, k.BASE] + size - 1
    row[k.HEAD_STREAM], row[k.HEAD_PLACE], row[k.HEAD_PROGRAM] = stream, kind, program
    row[k.HEAD_QUERY], row[k.HEAD_SIZE] = state.counts[stream, k.QUERIES], size
    row[k.HEAD_LAYER] = models.programs[program, k.FIRST]
    row[k.HEAD_ARRIVAL], row[k.HEAD_DUE] = oldest, oldest + terms[stream, k.DEADLINE] if kind == k.READY else k.NONE
    return count + 1


@called
def _mark_allowed(models, rules, state, table, count, on_time):
    """Mark the heads that may be issued: all if none is on time; else heads on time, and late ones as the rule says.

    on_time: the number of heads on time.
    """
    for i in range(count):
        table[i, k.MAY_GO] = on_time == 0 or rules.late == k.WEAVE or table[i, k.HEAD_DUE] < k.NONE
    if rules.policy >= k.LAYERWEAVER or rules.late == k.WEAVE:
        compute_on_chip(models, rules, state, table, count)
    if rules.late == k.WEAVE and 0 < on_time < count:
        _allow_late_heads(models, table, count, state.clocks[k.CHANNEL if rules.device == k.HOST else k.ARRAY])


@called
def _allow_late_heads(models, table, count, array):
    """Mark late heads that use an idle resource and make no other late; twin of ``lateness.weave_late_heads``."""
    latest = _latest_end(models, table, count, array)
    array_bound = channel_bound = False
    for i in range(count):
        if table[i, k.HEAD_DUE] < k.NONE:
            array_bound |= models.programs[table[i, k.HEAD_PROGRAM], k.COMPUTE_BOUND] == 1
            channel_bound |= models.programs[table[i, k.HEAD_PROGRAM], k.COMPUTE_BOUND] == 0
    for i in range(count):
        if table[i, k.HEAD_DUE] == k.NONE:
            busy = array_bound if models.programs[table[i, k.HEAD_PROGRAM], k.COMPUTE_BOUND] else channel_bound
            end = max(array, table[i, k.ON_CHIP]) + models.layers[table[i, k.HEAD_LAYER], k.COMPUTE]
            table[i, k.MAY_GO] = not busy and end <= latest


@called
def _latest_end(models, table, count, now):
    """Return the tick until which other work makes no head late; twin of ``engine.lateness.latest_end``.

    Heads by deadline, those with equal deadlines in the order of the table.
    """
    latest, need, last_due = k.NONE, 0, -1
    while True:
        due = k.NONE
        for i in range(count):
            if last_due < table[i, k.HEAD_DUE] < due:
                due = table[i, k.HEAD_DUE]
        if due == k.NONE:
            return latest
        for i in range(count):
            remaining = models.layers[table[i, k.HEAD_LAYER], k.REMAINING]
            if table[i, k.HEAD_DUE] == due and now + need + remaining <= due:
                need += remaining
                latest = min(latest, due - need)
        last_due = due


# Preemption on a host


@shared
def _preempt(models, terms, rules, state, log, heads):
    """Stop running work for waiting work if the policy, punctual, would do so; twin of ``Punctual.aborts``.

    Late requests are sorted out for every policy as soon as a segment could be stopped, as in the plain engine.
    """
    victim, lost_ticks, next_end = -1, 0, k.NONE
    for i in range(state.clocks[k.RUNNING]):
        remaining = rest_of(models, state, i)
        next_end = min(next_end, remaining)
        if stoppable(models, rules, state, i):
            program = state.segments[i, k.HEAD_PROGRAM]
            computed = models.layers[models.programs[program, k.FIRST], k.REMAINING] - remaining
            if victim < 0 or computed < lost_ticks:
                victim, lost_ticks = i, computed
    if victim < 0:
        return
    count = _list_heads(models, terms, rules, state, log, heads)
    if count == 0 or rules.policy != k.PUNCTUAL or state.clocks[k.GIVEN_UP]:
        return
    # The segment that would lose least joins the heads; it is stopped only if another head is chosen.
    segment, row = state.segments[victim], heads.table[count]
    k.copy_row(segment[: k.SEG_BEGIN], row)
    row[k.MAY_GO] = 1
    best = choose(models, terms, rules, state, heads, count + 1)
    now, chosen = state.clocks[k.CHANNEL], heads.table[best]
    need = with_margin(rules, models.layers[chosen[k.HEAD_LAYER], k.REMAINING])
    # Stopping must help: the waiting batch can be on time if it starts now, but not if it waits for the next end.
    if best == count or not now + need <= chosen[k.HEAD_DUE] < now + next_end + need:
        return
    spare = slack(row[k.HEAD_DUE], now, models.layers[row[k.HEAD_LAYER], k.REMAINING], 100 + rules.margin)
    if spare >= need or row_worth(models, terms, chosen, now) > row_worth(models, terms, row, now):
        stop_segment(models, rules, state, row[k.HEAD_STREAM], row[k.HEAD_PLACE])


# Layers on an NPU


@shared
def _forget_old_issues(rules, state):
    """Make room in the columns: remove the issues that can no longer delay a fetch."""
    clocks, before, peak = state.clocks, state.before, state.peak
    n, shift = clocks[k.ISSUES], max(0, clocks[k.POINTER] - 1)
    latest = clocks[k.CHANNEL] - clocks[k.FETCHED] + rules.buffer
    while shift < n and peak[shift + 1] <= latest:  # computed too long ago to delay a fetch
        shift += 1
    for i in range(n + 1 - shift):
        before[i], peak[i] = before[i + shift], peak[i + shift]
    clocks[k.ISSUES], clocks[k.POINTER] = n - shift, max(0, clocks[k.POINTER] - shift)


@called
def _issue(models, rules, state, log, stream, place, layer_row):
    """Issue the next layer of a batch, row *layer_row* of ``Models.layers``, on the NPU."""
    before, peak, clocks, job = state.before, state.peak, state.clocks, state.jobs[stream, place]
    size, busy, n = models.layers[layer_row, k.FETCH], models.layers[layer_row, k.COMPUTE], clocks[k.ISSUES]
    x = clocks[k.FETCHED] - rules.buffer + size  # X of ``buffer``
    pointer = caught_up(before, clocks[k.POINTER], x)
    end, _ = on_chip(before, peak, pointer, peak[n], clocks[k.CHANNEL], size, x)
    array, fetched, n = issued(before, peak, n, clocks[k.ARRAY], end, clocks[k.FETCHED], size, busy)
    if clocks[k.LOGGED] < len(log.issues):
        # Stream, query, layer, program; start and end of the fetch and of the compute.
        row = log.issues[clocks[k.LOGGED]]
        row[0], row[1], row[2], row[3] = stream, job[k.QUERY], job[k.LAYER] - 1, job[k.PROGRAM]
        row[4], row[5], row[6], row[7] = clocks[k.CHANNEL], end, array - busy, array
        clocks[k.LOGGED] += 1
    clocks[k.COMPUTED] += busy
    clocks[k.CHANNEL], clocks[k.ARRAY], clocks[k.FETCHED] = end, array, fetched
    clocks[k.ISSUES], clocks[k.POINTER] = n, pointer


# Estimates


def remaining_alone(fetch: k.Ints, compute: k.Ints, buffer: int, out: k.Ints) -> None:
    """Fill *out* with the ticks from each layer to the end on an empty device that serves no other work."""
    _remaining_alone(fetch, compute, buffer, columns(len(fetch) + 1), out)


@loop
def _remaining_alone(fetch, compute, buffer, issues, out):
    """The loop of ``remaining_alone``, with its parameters; *issues*: scratch space, the columns of ``buffer``."""
    fetch, compute, issues, out = borrowed((fetch, compute, issues, out))
    before, peak = issues[0], issues[1]
    for first in range(len(fetch)):
        channel = array = fetched = pointer = n = 0
        for layer in range(first, len(fetch)):
            x = fetched - buffer + fetch[layer]
            channel, pointer = on_chip(before, peak, pointer, peak[n], channel, fetch[layer], x)
            array, fetched, n = issued(before, peak, n, array, channel, fetched, fetch[layer], compute[layer])
        out[first] = array
