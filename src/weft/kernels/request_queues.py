"""Requests that come, wait, form batches and are answered, in the compiled loop: twin of ``weft.engine.Requests``."""

from __future__ import annotations

from weft.kernels.compiling import called, inlined
from weft.kernels.host_lanes import rest_of
from weft.kernels.request_state import (
    ANSWERED,
    ARRAY,
    ARRIVAL,
    ARRIVED,
    BACK,
    BASE,
    BATCH_DUE,
    BATCHES,
    BATCHES_IN_FLIGHT,
    BELATED_RING,
    BINS_OF,
    CHANNEL,
    COMPUTING,
    DEADLINE,
    DROPPED,
    EXIT,
    EXITS,
    FIRST,
    GIVEN_UP,
    GONE,
    HEAD,
    KEEP,
    LAST,
    LAST_OF,
    LAST_QUERY,
    LATE,
    LAYER,
    LEAVES,
    LENGTH,
    MAX_BATCH,
    NONE,
    NPU,
    NUMBER,
    NUMBERED,
    OLDEST,
    OVER,
    OVERHEADS,
    OVERS,
    PLACES,
    PROGRAM,
    QUERIES,
    QUERY,
    REMAINING,
    RUNNING,
    SEG_OF,
    SEG_QUERY,
    SERVED,
    SIZE,
    STEPS,
    THINK,
    TIMEOUT,
    USED,
    VIOLATED,
    WAITING,
    WAITS,
    WAS_DROPPED,
    WAS_REFUSED,
    count_done,
    count_refused,
)

# Rings


@inlined
def front(ring, rings, stream, which):
    """The first entry of a ring."""
    return ring[stream, rings[stream, which, HEAD]]


@inlined
def _turned(ring, place):
    """A place in a ring, counted on from one before its end."""
    return place if place < ring.shape[1] else place - ring.shape[1]


@called
def _push(ring, rings, stream, arrival, leaves, number):
    """Insert a request in order of arrivals, mostly at the end."""
    at = rings[stream, WAITING]
    place = at[LENGTH]
    while place > 0 and ring[stream, _turned(ring, at[HEAD] + place - 1), ARRIVAL] > arrival:
        ring[stream, _turned(ring, at[HEAD] + place)] = ring[stream, _turned(ring, at[HEAD] + place - 1)]
        place -= 1
    row = ring[stream, _turned(ring, at[HEAD] + place)]
    row[ARRIVAL], row[LEAVES], row[NUMBER] = arrival, leaves, number
    at[LENGTH] += 1


@inlined
def _drop_front(ring, rings, stream, which):
    at = rings[stream, which]
    at[HEAD] = _turned(ring, at[HEAD] + 1)
    at[LENGTH] -= 1


@called
def _return(terms, state, stream, now):
    """The client of a closed stream will send again."""
    think = terms[stream, THINK]
    if think < 0:
        return
    ring, at, back = state.returning, state.rings[stream, BACK], now + think
    place = at[LENGTH]
    while place > 0 and ring[stream, _turned(ring, at[HEAD] + place - 1)] > back:
        ring[stream, _turned(ring, at[HEAD] + place)] = ring[stream, _turned(ring, at[HEAD] + place - 1)]
        place -= 1
    ring[stream, _turned(ring, at[HEAD] + place)] = back
    at[LENGTH] += 1


# Requests come and are answered


@inlined
def _short(coming, terms, stream):
    """Whether a stream's next request is not known, and follows."""
    known, leaves = coming.known[stream], coming.leaves_known[stream]
    without = coming.more[stream] and known[HEAD] == known[LENGTH]
    return without or (terms[stream, EXITS] and leaves[HEAD] == leaves[LENGTH])


@called
def take(models, terms, rules, state, log, heads, coming):
    """Put the requests that have arrived into the queues; False where some are not known yet."""
    now, known = state.clocks[CHANNEL], coming.known
    for s in range(len(terms)):
        while known[s, HEAD] < known[s, LENGTH] and coming.times[known[s, HEAD]] <= now:
            if _short(coming, terms, s):
                return False
            _enter(models, terms, rules, state, log, heads, coming, s, coming.times[known[s, HEAD]])
            known[s, HEAD] += 1
        if coming.more[s] and known[s, HEAD] == known[s, LENGTH]:
            return False
        while state.rings[s, BACK, LENGTH] > 0 and front(state.returning, state.rings, s, BACK) <= now:
            if _short(coming, terms, s):
                return False
            arrival = front(state.returning, state.rings, s, BACK)
            _drop_front(state.returning, state.rings, s, BACK)
            if arrival < rules.end:
                _enter(models, terms, rules, state, log, heads, coming, s, arrival)
    return True


@called
def next_arrival(terms, state, coming):
    """When the next request comes; NONE if no more will."""
    soonest = NONE
    for s in range(len(terms)):
        if coming.known[s, HEAD] < coming.known[s, LENGTH]:
            soonest = min(soonest, coming.times[coming.known[s, HEAD]])
        if state.rings[s, BACK, LENGTH] > 0:
            soonest = min(soonest, front(state.returning, state.rings, s, BACK))
    return soonest


@called
def _enter(models, terms, rules, state, log, heads, coming, stream, arrival):
    """Put a request into its queue, or refuse it."""
    clocks, leaves, due = state.clocks, 0, arrival + terms[stream, DEADLINE]
    if terms[stream, EXITS]:
        leaves = coming.leaves[coming.leaves_known[stream, HEAD]]
        coming.leaves_known[stream, HEAD] += 1
    accepted = state.rings[stream, WAITING, LENGTH] < state.queue.shape[1]
    if rules.strict:
        accepted = accepted and _can_be_met(models, terms, rules, state, heads, stream, due)
    if not accepted:
        answer(models, terms, rules, state, log, stream, arrival, leaves, WAS_REFUSED, max(clocks[CHANNEL], due))
        return
    if not _busy(state, stream):
        least = NONE
        for s in range(len(terms)):
            if _busy(state, s):
                least = min(least, state.streams[s, SERVED])
        if least < NONE:
            state.streams[stream, SERVED] = max(state.streams[stream, SERVED], least)
    _push(state.queue, state.rings, stream, arrival, leaves, clocks[NUMBERED])
    clocks[NUMBERED] += 1


@inlined
def _busy(state, stream):
    """Whether a stream has requests that wait or run."""
    rings = state.rings[stream]
    return rings[WAITING, LENGTH] + rings[BELATED_RING, LENGTH] + state.streams[stream, BATCHES_IN_FLIGHT] > 0


@inlined
def any_busy(state):
    """Whether any stream has requests that wait or run."""
    busy = False
    for s in range(len(state.streams)):
        busy |= _busy(state, s)
    return busy


@called
def answer(models, terms, rules, state, log, stream, arrival, leaves, end, now):
    """Record what became of a request, and schedule the next one of a closed stream's client."""
    clocks, counts, deadline = state.clocks, state.counts[stream], terms[stream, DEADLINE]
    if clocks[GIVEN_UP]:
        return
    if clocks[ANSWERED] < len(log.answers):
        row = log.answers[clocks[ANSWERED]]
        row[0], row[1], row[2], row[3] = stream, arrival, end, leaves if end >= 0 else 0
        clocks[ANSWERED] += 1
    if arrival >= rules.warm:
        counts[ARRIVED] += 1
        if end == WAS_DROPPED:
            counts[VIOLATED] += 1
            counts[DROPPED] += 1
        elif end < 0:
            count_refused(counts)
        else:
            over, row = terms[stream, OVERS], state.streams[stream]
            besides = models.times[terms[stream, OVER] + row[OVERHEADS] % over] if over else 0
            row[OVERHEADS] += 1
            count_done(counts, state.histogram[terms[stream, BINS_OF]], end - arrival + besides, deadline)
        if end < 0 or end > arrival + deadline:
            state.patience[stream] -= 1
            clocks[GIVEN_UP] = state.patience[stream] < 0
    _return(terms, state, stream, now)


# Strict deadlines


@called
def _can_be_met(models, terms, rules, state, heads, stream, due):
    """Whether a strict deadline can be met after all work ahead of it; twin of ``engine.admission``."""
    now = state.clocks[CHANNEL]
    own = models.layers[models.programs[terms[stream, BASE], FIRST], REMAINING]
    return now + _free_in(models, terms, rules, state, heads.order, due, now) + own <= due


@called
def _free_in(models, terms, rules, state, begun, deadline, now):
    """Ticks until a lane would be free for a request with this deadline; *begun*: room for what lanes have begun."""
    latest = deadline if rules.by_deadline else NONE
    earliest = now if rules.late_gives_way else 0
    clocks, ahead, count = state.clocks, 0, 0
    if rules.device == NPU:
        if clocks[STEPS]:
            begun[0], count = max(0, clocks[ARRAY] - now), 1
    else:
        for i in range(clocks[RUNNING]):
            begun[i] = rest_of(models, state, i)
        count = clocks[RUNNING]
    running = count
    for s in range(len(terms)):
        ahead += _whole(
            models, terms, s, _between(state, s, earliest - terms[s, DEADLINE], latest - terms[s, DEADLINE])
        )
        for place in range(state.streams[s, PLACES]):
            job = state.jobs[s, place]
            if not job[USED]:
                continue
            first, last = NONE, -NONE
            for i in range(job[SIZE]):
                arrival = state.members[s, place, i, ARRIVAL]
                first, last = min(first, arrival), max(last, arrival)
            if first + terms[s, DEADLINE] > latest or last + terms[s, DEADLINE] < earliest:
                continue
            own = -1
            for i in range(running):
                if rules.device == NPU:
                    here = clocks[LAST_OF] == s and clocks[LAST_QUERY] == job[QUERY]
                else:
                    here = state.segments[i, SEG_OF] == s and state.segments[i, SEG_QUERY] == job[QUERY]
                if here:
                    own = i
            if own < 0:
                own, count = count, count + 1
                begun[own] = 0
            begun[own] += rest_of_batch(models, job)
    return _poured(rules, begun, count, ahead)


@inlined
def rest_of_batch(models, job):
    """Expected ticks of the layers of a batch that were not issued."""
    at = models.programs[job[PROGRAM], FIRST] + job[LAYER]
    return models.layers[at, REMAINING] if at < models.programs[job[PROGRAM] + 1, FIRST] else 0


@inlined
def _between(state, stream, earliest, latest):
    """How many requests of a queue arrived within two ticks."""
    ring, at, count = state.queue, state.rings[stream, WAITING], 0
    for i in range(at[LENGTH]):
        count += earliest <= ring[stream, _turned(ring, at[HEAD] + i), ARRIVAL] <= latest
    return count


@inlined
def _whole(models, terms, stream, requests):
    """Expected ticks of a number of requests; two and more are taken as full batches."""
    base, most = terms[stream, BASE], terms[stream, MAX_BATCH]
    if requests <= 1:
        return requests * models.layers[models.programs[base, FIRST], REMAINING]
    return requests * models.layers[models.programs[base + most - 1, FIRST], REMAINING] // most


@called
def _poured(rules, begun, count, waiting):
    """When the first lane is free: begun work keeps its lane, the longest placed first; the rest is divided freely."""
    lanes = begun[len(begun) - rules.lanes :]
    lanes[:] = 0
    for taken in range(count):
        longest = taken
        for i in range(taken + 1, count):
            if begun[i] > begun[longest]:
                longest = i
        begun[taken], begun[longest] = begun[longest], begun[taken]
        least = 0
        for lane in range(1, rules.lanes):
            if lanes[lane] < lanes[least]:
                least = lane
        lanes[least] += begun[taken]
    for place in range(1, rules.lanes):  # ``sort`` would take longer to compile than all else here
        while place > 0 and lanes[place] < lanes[place - 1]:
            lanes[place - 1], lanes[place] = lanes[place], lanes[place - 1]
            place -= 1
    total = waiting
    for filled in range(1, rules.lanes):
        total += lanes[filled - 1]
        if total // filled <= lanes[filled]:
            return total // filled
    return (total + lanes[rules.lanes - 1]) // rules.lanes


@called
def first_strict(terms, state):
    """The unanswered strict request that is due first: its deadline, stream, place in flight or -1, and member."""
    due, number, stream, place, member = NONE, NONE, -1, -1, -1
    for s in range(len(terms)):
        if state.rings[s, WAITING, LENGTH] > 0:
            row = front(state.queue, state.rings, s, WAITING)
            its = row[ARRIVAL] + terms[s, DEADLINE]
            if its < due or (its == due and row[NUMBER] < number):
                due, number, stream, place = its, row[NUMBER], s, -1
        for p in range(state.streams[s, PLACES]):
            if not state.jobs[s, p, USED]:
                continue
            for i in range(state.jobs[s, p, SIZE]):
                row = state.members[s, p, i]
                its = row[ARRIVAL] + terms[s, DEADLINE]
                if not row[GONE] and (its < due or (its == due and row[NUMBER] < number)):
                    due, number, stream, place, member = its, row[NUMBER], s, p, i
    return due, stream, place, member


@called
def drop_front(models, terms, rules, state, log, stream, now):
    """Drop the first request of a queue."""
    row = front(state.queue, state.rings, stream, WAITING)
    arrival, leaves = row[ARRIVAL], row[LEAVES]
    _drop_front(state.queue, state.rings, stream, WAITING)
    answer(models, terms, rules, state, log, stream, arrival, leaves, WAS_DROPPED, now)


@called
def drop_member(models, terms, rules, state, log, stream, place, member, now):
    """Drop a request of a batch."""
    row = state.members[stream, place, member]
    row[GONE] = 1
    answer(models, terms, rules, state, log, stream, row[ARRIVAL], row[LEAVES], WAS_DROPPED, now)


@called
def forsaken(state, stream, place):
    """Whether all requests of a batch are gone."""
    gone = 0
    for i in range(state.jobs[stream, place, SIZE]):
        gone += state.members[stream, place, i, GONE]
    return gone == state.jobs[stream, place, SIZE]


# Late requests


@called
def sort_out_waiting(models, terms, rules, state, log, stream, clock):
    """Take requests that cannot be on time out of the queue: drop the strict ones, keep the others as late."""
    if not rules.strict and rules.late == KEEP:
        return
    rings, deadline = state.rings, terms[stream, DEADLINE]
    rest = models.layers[models.programs[terms[stream, BASE], FIRST], REMAINING]
    latest = clock + rest * rules.foresight // 100 - deadline
    while rings[stream, WAITING, LENGTH] > 0:
        row = front(state.queue, rings, stream, WAITING)
        arrival, leaves = row[ARRIVAL], row[LEAVES]
        if arrival >= latest:
            return
        if rules.strict:
            drop_front(models, terms, rules, state, log, stream, clock)
            continue
        _drop_front(state.queue, rings, stream, WAITING)
        at = rings[stream, BELATED_RING]
        if at[LENGTH] < state.late.shape[1]:
            belated = state.late[stream, _turned(state.late, at[HEAD] + at[LENGTH])]
            belated[ARRIVAL], belated[LEAVES] = arrival, leaves
            at[LENGTH] += 1
        else:
            answer(
                models, terms, rules, state, log, stream, arrival, leaves, WAS_REFUSED, max(clock, arrival + deadline)
            )


@called
def sort_out_batches(models, terms, rules, state, log, stream, clock):
    """Mark batches that have become late, and end those whose requests are all gone."""
    if not rules.strict and rules.late == KEEP:
        return
    for place in range(state.streams[stream, PLACES]):
        job = state.jobs[stream, place]
        if not job[USED] or job[COMPUTING]:
            continue
        if rules.strict and forsaken(state, stream, place):
            _give_up(models, terms, rules, state, log, stream, place, clock)
            continue
        if job[LATE] and not rules.refills:
            continue
        at = models.programs[job[PROGRAM], FIRST] + job[LAYER]
        latest = clock + models.layers[at, REMAINING] * rules.foresight // 100
        if not rules.refills:
            if latest <= job[BATCH_DUE] and job[SIZE] == 1:
                continue
            latest = max(latest, job[BATCH_DUE])  # a request that counted as late does not count as on time again
        saved = NONE
        for i in range(job[SIZE]):
            row = state.members[stream, place, i]
            if not row[GONE] and row[ARRIVAL] + terms[stream, DEADLINE] >= latest:
                saved = min(saved, row[ARRIVAL] + terms[stream, DEADLINE])
        if saved < NONE:
            job[LATE], job[BATCH_DUE] = 0, saved
        elif rules.strict:
            _give_up(models, terms, rules, state, log, stream, place, clock)
        else:
            job[LATE], job[BATCH_DUE] = 1, NONE


@called
def _give_up(models, terms, rules, state, log, stream, place, clock):
    """End a batch half-way, because its requests are gone or strict and too late."""
    size = state.jobs[stream, place, SIZE]
    _free(state, stream, place)
    for i in range(size):
        if not state.members[stream, place, i, GONE]:
            drop_member(models, terms, rules, state, log, stream, place, i, clock)


# Batches


@inlined
def ready_at(models, terms, state, stream):
    """When the waiting requests become a batch that is not full: its wait is over, or it would be late."""
    term, oldest = terms[stream], front(state.queue, state.rings, stream, WAITING)[ARRIVAL]
    if term[WAITS] >= 0:
        return oldest + term[DEADLINE] * term[WAITS] // 100
    if term[TIMEOUT] == 0:
        return 0
    rest = models.layers[models.programs[term[BASE], FIRST], REMAINING]
    return oldest + min(term[TIMEOUT], term[DEADLINE] - rest)


@called
def may_begin(terms, rules, state, stream):
    """Whether another batch may begin: one per lane, and beyond that one that is due before all of them."""
    streams, jobs = state.streams, state.jobs
    if streams[stream, BATCHES_IN_FLIGHT] == 0:
        return True
    if streams[stream, BATCHES_IN_FLIGHT] == jobs.shape[1]:
        return False
    on_time, oldest = 0, NONE
    for place in range(streams[stream, PLACES]):
        if jobs[stream, place, USED] and not jobs[stream, place, LATE]:
            on_time += 1
            oldest = min(oldest, jobs[stream, place, OLDEST])
    return on_time < rules.lanes or front(state.queue, state.rings, stream, WAITING)[ARRIVAL] < oldest


@called
def begin(terms, state, stream, program, belated):
    """Make a batch of the requests that wait longest, in the queue or among the late ones; returns its place."""
    jobs, streams, place = state.jobs, state.streams, 0
    while jobs[stream, place, USED]:
        place += 1
    size = program - terms[stream, BASE] + 1
    oldest = NONE
    for i in range(size):
        ring, which = state.queue, WAITING
        if belated or state.rings[stream, WAITING, LENGTH] == 0:
            ring, which = state.late, BELATED_RING
        row, member = front(ring, state.rings, stream, which), state.members[stream, place, i]
        oldest = min(oldest, row[ARRIVAL])
        member[ARRIVAL], member[LEAVES], member[NUMBER], member[GONE] = row[ARRIVAL], row[LEAVES], row[NUMBER], 0
        _drop_front(ring, state.rings, stream, which)
    job = jobs[stream, place]
    job[USED], job[LATE], job[PROGRAM], job[LAYER], job[SIZE] = 1, belated, program, 0, size
    job[QUERY], job[LAST], job[OLDEST], job[COMPUTING] = state.counts[stream, QUERIES], -1, oldest, 0
    job[BATCH_DUE] = NONE if belated else state.members[stream, place, 0, ARRIVAL] + terms[stream, DEADLINE]
    state.counts[stream, QUERIES] += 1
    streams[stream, BATCHES_IN_FLIGHT] += 1
    streams[stream, PLACES] = max(streams[stream, PLACES], place + 1)
    return place


@inlined
def _free(state, stream, place):
    """End a batch: its place is free."""
    row = state.streams[stream]
    state.jobs[stream, place, USED] = 0
    row[BATCHES_IN_FLIGHT] -= 1
    while row[PLACES] > 0 and state.jobs[stream, row[PLACES] - 1, USED] == 0:
        row[PLACES] -= 1


@called
def advance(models, terms, rules, state, log, stream, place, end):
    """Account for a computed layer: the batch ends, or requests leave at an exit, or it is merged with another."""
    job = state.jobs[stream, place]
    at = models.programs[job[PROGRAM], FIRST] + job[LAYER]
    done = at == models.programs[job[PROGRAM] + 1, FIRST]
    stays = not (done or models.layers[at - 1, EXIT]) or _leave(
        models, terms, rules, state, log, stream, place, end, done
    )
    if stays and rules.refills:
        _merge(terms, state, stream, place)


@called
def _leave(models, terms, rules, state, log, stream, place, end, done):
    """Answer the requests that are done after a layer, all of them or those that leave; whether any stay."""
    job = state.jobs[stream, place]
    members, size, staying = state.members[stream, place], job[SIZE], 0
    if rules.strict:
        for i in range(size):
            due = members[i, ARRIVAL] + terms[stream, DEADLINE]
            if not members[i, GONE] and due < end:
                drop_member(models, terms, rules, state, log, stream, place, i, due)
    first = members[0, ARRIVAL]
    for i in range(size):
        if not members[i, GONE] and not done and members[i, LEAVES] > job[LAYER]:
            staying += 1
    if done and not state.clocks[GIVEN_UP]:
        state.counts[stream, BATCHES] += first >= rules.warm
    if done:
        _free(state, stream, place)
    for i in range(size):
        if not members[i, GONE] and (done or members[i, LEAVES] <= job[LAYER]):
            leaves = members[i, LEAVES] if done else job[LAYER]
            members[i, GONE] = 1
            answer(models, terms, rules, state, log, stream, members[i, ARRIVAL], leaves, end, end)
    if done:
        return False
    if staying == 0:
        if not state.clocks[GIVEN_UP]:
            state.counts[stream, BATCHES] += first >= rules.warm
        _free(state, stream, place)
        return False
    kept = 0
    for i in range(size):
        if not members[i, GONE]:
            members[kept] = members[i]
            kept += 1
    job[SIZE], job[PROGRAM] = kept, terms[stream, BASE] + kept - 1
    _set_due(terms, state, stream, place)
    return True


@called
def _merge(terms, state, stream, place):
    """Merge a batch with others at the same layer, as far as they fit; the one that began first stays."""
    jobs, members = state.jobs[stream], state.members[stream]
    for other in range(state.streams[stream, PLACES]):
        if other == place or not jobs[other, USED] or jobs[other, COMPUTING]:
            continue
        together = jobs[place, SIZE] + jobs[other, SIZE]
        if jobs[other, LAYER] != jobs[place, LAYER] or together > terms[stream, MAX_BATCH]:
            continue
        kept, joining = (place, other) if jobs[place, QUERY] < jobs[other, QUERY] else (other, place)
        for i in range(jobs[joining, SIZE]):
            members[kept, jobs[kept, SIZE] + i] = members[joining, i]
        jobs[kept, SIZE], jobs[kept, PROGRAM] = together, terms[stream, BASE] + together - 1
        for column in (LATE, BATCH_DUE):
            jobs[kept, column] = min(jobs[kept, column], jobs[joining, column])
        jobs[kept, LAST] = max(jobs[kept, LAST], jobs[joining, LAST])
        _free(state, stream, joining)
        _set_due(terms, state, stream, kept)
        place = kept


@called
def _set_due(terms, state, stream, place):
    """The oldest request and the deadline of a batch with other members."""
    job, members, oldest, saved = state.jobs[stream, place], state.members[stream, place], NONE, NONE
    for i in range(job[SIZE]):
        oldest = min(oldest, members[i, ARRIVAL])
        due = members[i, ARRIVAL] + terms[stream, DEADLINE]
        if due >= job[BATCH_DUE]:
            saved = min(saved, due)
    job[OLDEST] = oldest
    if not job[LATE]:
        job[BATCH_DUE] = saved if saved < NONE else oldest + terms[stream, DEADLINE]
