"""Requests that come, wait, form batches and are answered, in the compiled loop: twin of ``weft.engine.Requests``.

*models*, *terms*, *rules*, *state*, *log*, *heads* and *coming* are the arrays of ``request_state``, whose constants
number their columns; *stream* and *place* name a job (a batch in flight), ``state.jobs[stream, place]``. A ring is a
row of a table whose first place and length are in ``LoopState.rings``.
"""

from __future__ import annotations

from weft.kernels import request_state as k
from weft.kernels.compiling import called, inlined, shared
from weft.kernels.host_lanes import rest_of

# Rings


@inlined
def front(ring, rings, stream, ring_kind):
    """Return the first entry of a stream's ring; *ring_kind*: WAITING, BELATED_RING or RETURNING."""
    return ring[stream, rings[stream, ring_kind, k.HEAD]]


@inlined
def _entry(ring, rings, stream, ring_kind, place):
    """Return the entry at a place of a stream's ring, counted from its first entry."""
    index = rings[stream, ring_kind, k.HEAD] + place
    return ring[stream, index if index < ring.shape[1] else index - ring.shape[1]]


@called
def _insert(ring, rings, stream, ring_kind, arrival, leaves, number):
    """Insert a request into a stream's ring, in order of arrivals: mostly at the end.

    leaves: layers after which it leaves. number: its number in order of admission.
    """
    place = rings[stream, ring_kind, k.LENGTH]
    while place > 0 and _entry(ring, rings, stream, ring_kind, place - 1)[k.ARRIVAL] > arrival:
        k.copy_row(_entry(ring, rings, stream, ring_kind, place - 1), _entry(ring, rings, stream, ring_kind, place))
        place -= 1
    row = _entry(ring, rings, stream, ring_kind, place)
    row[k.ARRIVAL], row[k.LEAVES], row[k.NUMBER] = arrival, leaves, number
    rings[stream, ring_kind, k.LENGTH] += 1


@inlined
def _pop_front(ring, rings, stream, ring_kind):
    """Remove the first entry of a stream's ring; return its arrival, and the layers after which it leaves."""
    bounds, row = rings[stream, ring_kind], front(ring, rings, stream, ring_kind)
    bounds[k.HEAD] = bounds[k.HEAD] + 1 if bounds[k.HEAD] + 1 < ring.shape[1] else 0
    bounds[k.LENGTH] -= 1
    return row[k.ARRIVAL], row[k.LEAVES]


# Requests come and are answered


@inlined
def _next_unknown(coming, terms, stream):
    """Return whether a stream's next request, or the exit at which that leaves, is only in the next block."""
    known, leaves = coming.known[stream], coming.leaves_known[stream]
    used_up = coming.more[stream] and known[k.HEAD] == known[k.LENGTH]
    return used_up or (terms[stream, k.EXITS] and leaves[k.HEAD] == leaves[k.LENGTH])


@inlined
def _next_return(state, stream):
    """Return the tick at which the next client of a closed stream sends again; NONE if none will."""
    waits = state.rings[stream, k.RETURNING, k.LENGTH] > 0
    return front(state.returning, state.rings, stream, k.RETURNING)[k.ARRIVAL] if waits else k.NONE


@called
def take(models, terms, rules, state, log, heads, coming):
    """Put the requests that have arrived into the queues; return False if the next block is needed to know them all."""
    now, known = state.clocks[k.CHANNEL], coming.known
    for s in range(len(terms)):
        while known[s, k.HEAD] < known[s, k.LENGTH] and coming.times[known[s, k.HEAD]] <= now:
            if _next_unknown(coming, terms, s):
                return False
            _admit_or_refuse(models, terms, rules, state, log, heads, coming, s, coming.times[known[s, k.HEAD]])
            known[s, k.HEAD] += 1
        if coming.more[s] and known[s, k.HEAD] == known[s, k.LENGTH]:
            return False
        while _next_return(state, s) <= now:
            if _next_unknown(coming, terms, s):
                return False
            arrival, _ = _pop_front(state.returning, state.rings, s, k.RETURNING)
            if arrival < rules.end:
                _admit_or_refuse(models, terms, rules, state, log, heads, coming, s, arrival)
    return True


@called
def next_arrival(terms, state, coming):
    """Return the tick of the next request; NONE if no request will come."""
    soonest = k.NONE
    for s in range(len(terms)):
        if coming.known[s, k.HEAD] < coming.known[s, k.LENGTH]:
            soonest = min(soonest, coming.times[coming.known[s, k.HEAD]])
        soonest = min(soonest, _next_return(state, s))
    return soonest


@called
def _admit_or_refuse(models, terms, rules, state, log, heads, coming, stream, arrival):
    """Put a request that has arrived into its queue, or refuse it."""
    now, leaves, due = state.clocks[k.CHANNEL], 0, arrival + terms[stream, k.DEADLINE]
    if terms[stream, k.EXITS]:
        leaves = coming.leaves[coming.leaves_known[stream, k.HEAD]]
        coming.leaves_known[stream, k.HEAD] += 1
    accepted = state.rings[stream, k.WAITING, k.LENGTH] < state.queue.shape[1]
    if accepted and rules.strict:  # can the deadline be met after all work ahead?
        alone = rest_from(models, terms[stream, k.BASE], 0)
        accepted = now + _free_in(models, terms, rules, state, heads.order, due, now) + alone <= due
    if not accepted:  # as if answered at its deadline: a client that sent again at once would be refused for ever
        record_end(models, terms, rules, state, log, stream, arrival, leaves, k.WAS_REFUSED, max(now, due))
        return
    if not _busy(state, stream):  # an idle stream must not claim the service that it did not use (policy fair)
        least_served = k.NONE
        for s in range(len(terms)):
            if _busy(state, s):
                least_served = min(least_served, state.streams[s, k.SERVED])
        if least_served < k.NONE:
            state.streams[stream, k.SERVED] = max(state.streams[stream, k.SERVED], least_served)
    _insert(state.queue, state.rings, stream, k.WAITING, arrival, leaves, state.clocks[k.ADMITTED])
    state.clocks[k.ADMITTED] += 1


@inlined
def _busy(state, stream):
    """Return whether a stream has waiting requests or batches in flight."""
    rings = state.rings[stream]
    return rings[k.WAITING, k.LENGTH] + rings[k.BELATED_RING, k.LENGTH] + state.streams[stream, k.BATCHES_IN_FLIGHT] > 0


@inlined
def any_busy(state):
    """Return whether any stream has waiting requests or batches in flight."""
    busy = False
    for s in range(len(state.streams)):
        busy |= _busy(state, s)
    return busy


@shared
def record_end(models, terms, rules, state, log, stream, arrival, leaves, end, now):
    """Record the end of a request, and schedule the next request of a closed stream's client.

    arrival: its tick. leaves: the number of layers after which it leaves; 0 without early exits. end: the tick of the
    answer, or WAS_DROPPED or WAS_REFUSED. now: the tick from which the think time counts. The run is given up if its
    stream has now missed more deadlines than ``LoopState.patience``; nothing is recorded after that.
    """
    clocks, counts, deadline = state.clocks, state.counts[stream], terms[stream, k.DEADLINE]
    if clocks[k.GIVEN_UP]:
        return
    if clocks[k.ANSWERED] < len(log.answers):
        row = log.answers[clocks[k.ANSWERED]]  # stream, arrival, end, leaves
        row[0], row[1], row[2], row[3] = stream, arrival, end, leaves if end >= 0 else 0
        clocks[k.ANSWERED] += 1
    if arrival >= rules.warm:
        counts[k.ARRIVED] += 1
        if end == k.WAS_DROPPED:
            counts[k.VIOLATED] += 1
            counts[k.DROPPED] += 1
        elif end < 0:
            k.count_refused(counts)
        else:
            # measured overheads are taken in turn, as in ``plain``
            count, row = terms[stream, k.OVERHEAD_COUNT], state.streams[stream]
            overhead = models.times[terms[stream, k.FIRST_OVERHEAD] + row[k.OVERHEADS] % count] if count else 0
            row[k.OVERHEADS] += 1
            k.count_done(counts, state.histogram[terms[stream, k.HISTOGRAM_ROW]], end - arrival + overhead, deadline)
        if end < 0 or end > arrival + deadline:
            state.patience[stream] -= 1
            clocks[k.GIVEN_UP] = state.patience[stream] < 0
    if terms[stream, k.THINK] >= 0:
        _insert(state.returning, state.rings, stream, k.RETURNING, now + terms[stream, k.THINK], 0, 0)


# Strict deadlines


@called
def _free_in(models, terms, rules, state, begun, deadline, now):
    """Return the ticks until a lane would be free for a request with this deadline, after all work ahead of it.

    Twin of ``engine.admission`` where no work yields.
    begun: scratch space, first for the ticks of every batch that has begun, at the end for the ticks of every lane.
    Requests due after *deadline* are not ahead if the policy orders by deadlines, nor are late ones that give way.
    """
    latest = deadline if rules.by_deadline else k.NONE
    earliest = now if rules.late_gives_way else 0
    clocks, waiting_ticks = state.clocks, 0
    # The array of an NPU has one entry for all issued work.
    running = count = clocks[k.RUNNING] if rules.device == k.HOST else min(1, clocks[k.STEPS])
    for i in range(running):
        begun[i] = rest_of(models, state, i) if rules.device == k.HOST else max(0, clocks[k.ARRAY] - now)
    for s in range(len(terms)):
        waiting_ticks += _expected_ticks(
            models, terms, s, _count_between(state, s, earliest - terms[s, k.DEADLINE], latest - terms[s, k.DEADLINE])
        )
        for place in range(state.streams[s, k.PLACES]):
            job = state.jobs[s, place]
            if not job[k.USED]:
                continue
            first, last = k.NONE, -k.NONE
            for i in range(job[k.SIZE]):
                arrival = state.members[s, place, i, k.ARRIVAL]
                first, last = min(first, arrival), max(last, arrival)
            if first + terms[s, k.DEADLINE] > latest or last + terms[s, k.DEADLINE] < earliest:
                continue
            slot = -1  # the entry of the lane that already runs this batch
            for i in range(running):
                if rules.device == k.NPU:
                    same_batch = job[k.LAST_ISSUED] == clocks[k.STEPS] - 1
                else:
                    same_batch = (
                        state.segments[i, k.HEAD_STREAM] == s and state.segments[i, k.HEAD_QUERY] == job[k.QUERY]
                    )
                if same_batch:
                    slot = i
            if slot < 0:
                slot, count = count, count + 1
                begun[slot] = 0
            begun[slot] += rest_from(models, job[k.PROGRAM], job[k.LAYER])
    return _free_time(rules, begun, count, waiting_ticks)


@inlined
def rest_from(models, program, layer):
    """Return the expected ticks from a layer of a program to its end; 0 behind the last layer."""
    layer_row = models.programs[program, k.FIRST] + layer
    return models.layers[layer_row, k.REMAINING] if layer_row < models.programs[program + 1, k.FIRST] else 0


@inlined
def _count_between(state, stream, earliest, latest):
    """Return the number of waiting requests of a stream that arrived from *earliest* to *latest*."""
    count = 0
    for i in range(state.rings[stream, k.WAITING, k.LENGTH]):
        count += earliest <= _entry(state.queue, state.rings, stream, k.WAITING, i)[k.ARRIVAL] <= latest
    return count


@inlined
def _expected_ticks(models, terms, stream, requests):
    """Return the expected ticks of a number of requests of a stream; two or more count as parts of full batches."""
    base, max_batch = terms[stream, k.BASE], terms[stream, k.MAX_BATCH]
    if requests <= 1:
        return requests * models.layers[models.programs[base, k.FIRST], k.REMAINING]
    return requests * models.layers[models.programs[base + max_batch - 1, k.FIRST], k.REMAINING] // max_batch


@called
def _free_time(rules, begun, count, waiting):
    """Return the ticks until the first lane is free.

    Each of the first *count* entries of *begun* keeps one lane, the longest placed first; *waiting* ticks are divided
    freely, so that the least loaded lanes fill up evenly. The last entries of *begun* are scratch space for the lanes.
    """
    lanes = begun[len(begun) - rules.lanes :]
    for lane in range(rules.lanes):
        lanes[lane] = 0
    for placed in range(count):
        longest = placed  # selection sort: bring the longest of the others to the front
        for i in range(placed + 1, count):
            if begun[i] > begun[longest]:
                longest = i
        begun[placed], begun[longest] = begun[longest], begun[placed]
        least_loaded = 0
        for lane in range(1, rules.lanes):
            if lanes[lane] < lanes[least_loaded]:
                least_loaded = lane
        lanes[least_loaded] += begun[placed]
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
    """Return the unanswered strict request that is due first: deadline, stream, place of its job, and member.

    The place is -1 for a waiting request; the deadline is NONE if there is no strict request. Among equal deadlines,
    the request admitted first.
    """
    due, number, stream, place, member = k.NONE, k.NONE, -1, -1, -1
    for s in range(len(terms)):
        if state.rings[s, k.WAITING, k.LENGTH] > 0:
            row = front(state.queue, state.rings, s, k.WAITING)
            row_due = row[k.ARRIVAL] + terms[s, k.DEADLINE]
            if row_due < due or (row_due == due and row[k.NUMBER] < number):
                due, number, stream, place = row_due, row[k.NUMBER], s, -1
        for p in range(state.streams[s, k.PLACES]):
            if not state.jobs[s, p, k.USED]:
                continue
            for i in range(state.jobs[s, p, k.SIZE]):
                row = state.members[s, p, i]
                row_due = row[k.ARRIVAL] + terms[s, k.DEADLINE]
                if not row[k.GONE] and (row_due < due or (row_due == due and row[k.NUMBER] < number)):
                    due, number, stream, place, member = row_due, row[k.NUMBER], s, p, i
    return due, stream, place, member


@shared
def drop_front(models, terms, rules, state, log, stream, now):
    """Drop the first waiting request of a stream."""
    arrival, leaves = _pop_front(state.queue, state.rings, stream, k.WAITING)
    record_end(models, terms, rules, state, log, stream, arrival, leaves, k.WAS_DROPPED, now)


@shared
def drop_member(models, terms, rules, state, log, stream, place, member, now):
    """Drop a request of a batch."""
    row = state.members[stream, place, member]
    row[k.GONE] = 1
    record_end(models, terms, rules, state, log, stream, row[k.ARRIVAL], row[k.LEAVES], k.WAS_DROPPED, now)


@called
def all_gone(state, stream, place):
    """Return whether every request of the batch at *place* of *stream* has ended, so that its result is not needed.

    Requests of a batch that still runs end when they are dropped, or when they leave at an exit.
    """
    ended = 0
    for i in range(state.jobs[stream, place, k.SIZE]):
        ended += state.members[stream, place, i, k.GONE]
    return ended == state.jobs[stream, place, k.SIZE]


# Late requests


@called
def sort_out_waiting(models, terms, rules, state, log, stream, clock):
    """Take requests that cannot be on time out of the queue: strict ones are dropped, others become late requests.

    clock: the earliest tick at which the device could compute for them.
    """
    if not rules.strict and rules.late == k.KEEP:
        return
    rings, deadline = state.rings, terms[stream, k.DEADLINE]
    remaining = models.layers[models.programs[terms[stream, k.BASE], k.FIRST], k.REMAINING]
    # Requests of a stream have the same time to the deadline, so arrivals are compared instead of deadlines.
    earliest_arrival = clock + remaining * rules.foresight // 100 - deadline
    while rings[stream, k.WAITING, k.LENGTH] > 0:
        if front(state.queue, rings, stream, k.WAITING)[k.ARRIVAL] >= earliest_arrival:
            return
        if rules.strict:
            drop_front(models, terms, rules, state, log, stream, clock)
            continue
        arrival, leaves = _pop_front(state.queue, rings, stream, k.WAITING)
        if rings[stream, k.BELATED_RING, k.LENGTH] < state.late.shape[1]:
            _insert(state.late, rings, stream, k.BELATED_RING, arrival, leaves, 0)
        else:
            refused_at = max(clock, arrival + deadline)
            record_end(models, terms, rules, state, log, stream, arrival, leaves, k.WAS_REFUSED, refused_at)


@called
def sort_out_batches(models, terms, rules, state, log, stream, clock):
    """Mark batches that have become late, and end batches whose requests have all ended.

    clock: the earliest tick at which the device could compute for them.
    """
    if not rules.strict and rules.late == k.KEEP:
        return
    for place in range(state.streams[stream, k.PLACES]):
        job = state.jobs[stream, place]
        if not job[k.USED] or job[k.COMPUTING]:
            continue
        if rules.strict and all_gone(state, stream, place):
            _give_up(models, terms, rules, state, log, stream, place, clock)
            continue
        if job[k.LATE] and not rules.refills:
            continue
        # Deadlines before this are missed.
        expected_end = clock + models.layers[k.next_layer(models, job), k.REMAINING] * rules.foresight // 100
        if not rules.refills:
            if expected_end <= job[k.BATCH_DUE] and job[k.SIZE] == 1:
                continue
            # A request that counted as late does not count as on time again.
            expected_end = max(expected_end, job[k.BATCH_DUE])
        first_due = k.NONE
        for i in range(job[k.SIZE]):
            row = state.members[stream, place, i]
            if not row[k.GONE] and row[k.ARRIVAL] + terms[stream, k.DEADLINE] >= expected_end:
                first_due = min(first_due, row[k.ARRIVAL] + terms[stream, k.DEADLINE])
        if first_due < k.NONE:
            job[k.LATE], job[k.BATCH_DUE] = 0, first_due
        elif rules.strict:
            _give_up(models, terms, rules, state, log, stream, place, clock)
        else:
            job[k.LATE], job[k.BATCH_DUE] = 1, k.NONE


@shared
def _give_up(models, terms, rules, state, log, stream, place, clock):
    """End a batch half-way, because every request of it has ended or is strict and too late."""
    size = state.jobs[stream, place, k.SIZE]
    _free_place(state, stream, place)
    for i in range(size):
        if not state.members[stream, place, i, k.GONE]:
            drop_member(models, terms, rules, state, log, stream, place, i, clock)


# Batches


@inlined
def ready_at(models, terms, state, stream):
    """Return the tick at which the waiting requests become a batch although they do not fill one.

    Then the wait of the oldest request is over, or it would be late. 0: at once.
    """
    term, oldest = terms[stream], front(state.queue, state.rings, stream, k.WAITING)[k.ARRIVAL]
    if term[k.WAITS] >= 0:
        return oldest + term[k.DEADLINE] * term[k.WAITS] // 100
    if term[k.TIMEOUT] == 0:
        return 0
    remaining = models.layers[models.programs[term[k.BASE], k.FIRST], k.REMAINING]
    return oldest + min(term[k.TIMEOUT], term[k.DEADLINE] - remaining)


@called
def may_begin(terms, rules, state, stream):
    """Return whether another batch may begin: fewer than one on time per lane, or it is due before all these."""
    streams, jobs = state.streams, state.jobs
    if streams[stream, k.BATCHES_IN_FLIGHT] == 0:
        return True
    if streams[stream, k.BATCHES_IN_FLIGHT] == jobs.shape[1]:
        return False
    on_time, oldest = 0, k.NONE
    for place in range(streams[stream, k.PLACES]):
        if jobs[stream, place, k.USED] and not jobs[stream, place, k.LATE]:
            on_time += 1
            oldest = min(oldest, jobs[stream, place, k.OLDEST])
    return on_time < rules.lanes or front(state.queue, state.rings, stream, k.WAITING)[k.ARRIVAL] < oldest


@called
def begin(terms, state, stream, program, belated):
    """Begin a batch of the oldest waiting requests, as many as *program* is for; return the place of its job.

    belated: take late requests; otherwise late ones are taken only when the queue is empty.
    """
    jobs, streams, place = state.jobs, state.streams, 0
    while jobs[stream, place, k.USED]:
        place += 1
    size = program - terms[stream, k.BASE] + 1
    oldest = k.NONE
    for i in range(size):
        ring, ring_kind = state.queue, k.WAITING
        if belated or state.rings[stream, k.WAITING, k.LENGTH] == 0:
            ring, ring_kind = state.late, k.BELATED_RING
        row, member = front(ring, state.rings, stream, ring_kind), state.members[stream, place, i]
        oldest = min(oldest, row[k.ARRIVAL])
        k.copy_row(row, member)
        member[k.GONE] = 0
        _pop_front(ring, state.rings, stream, ring_kind)
    job = jobs[stream, place]
    job[k.USED], job[k.LATE], job[k.PROGRAM], job[k.LAYER], job[k.SIZE] = 1, belated, program, 0, size
    job[k.QUERY], job[k.LAST_ISSUED], job[k.OLDEST], job[k.COMPUTING] = state.counts[stream, k.QUERIES], -1, oldest, 0
    job[k.BATCH_DUE] = k.NONE if belated else state.members[stream, place, 0, k.ARRIVAL] + terms[stream, k.DEADLINE]
    state.counts[stream, k.QUERIES] += 1
    streams[stream, k.BATCHES_IN_FLIGHT] += 1
    streams[stream, k.PLACES] = max(streams[stream, k.PLACES], place + 1)
    return place


@inlined
def _free_place(state, stream, place):
    """Free the place of a batch that has ended."""
    row = state.streams[stream]
    state.jobs[stream, place, k.USED] = 0
    row[k.BATCHES_IN_FLIGHT] -= 1
    while row[k.PLACES] > 0 and state.jobs[stream, row[k.PLACES] - 1, k.USED] == 0:
        row[k.PLACES] -= 1


@called
def advance(models, terms, rules, state, log, stream, place, end):
    """Account for a layer computed at *end*: end the batch, answer requests that leave at an exit, or merge batches."""
    job = state.jobs[stream, place]
    layer_row = k.next_layer(models, job)
    done = layer_row == models.programs[job[k.PROGRAM] + 1, k.FIRST]
    nobody_leaves = not (done or models.layers[layer_row - 1, k.EXIT])
    stays = nobody_leaves or _answer_done(models, terms, rules, state, log, stream, place, end, done)
    if stays and rules.refills:
        _merge(terms, state, stream, place)


@shared
def _answer_done(models, terms, rules, state, log, stream, place, end, done):
    """Answer the requests that are done after a layer: all if *done*, else the requests that leave at this exit.

    end: the tick at which the layer was computed. Returns whether any requests stay in the batch.
    """
    job = state.jobs[stream, place]
    members, size, staying = state.members[stream, place], job[k.SIZE], 0
    if rules.strict:
        for i in range(size):
            due = members[i, k.ARRIVAL] + terms[stream, k.DEADLINE]
            if not members[i, k.GONE] and due < end:
                drop_member(models, terms, rules, state, log, stream, place, i, due)
    for i in range(size):
        staying += not members[i, k.GONE] and not done and members[i, k.LEAVES] > job[k.LAYER]
    if staying == 0:
        if not state.clocks[k.GIVEN_UP]:  # before any answer, which may give the run up
            state.counts[stream, k.BATCHES] += members[0, k.ARRIVAL] >= rules.warm
        _free_place(state, stream, place)
    for i in range(size):
        if not members[i, k.GONE] and (done or members[i, k.LEAVES] <= job[k.LAYER]):
            leaves = members[i, k.LEAVES] if done else job[k.LAYER]
            members[i, k.GONE] = 1
            record_end(models, terms, rules, state, log, stream, members[i, k.ARRIVAL], leaves, end, end)
    if staying == 0:
        return False
    next_row = 0
    for i in range(size):
        if not members[i, k.GONE]:
            k.copy_row(members[i], members[next_row])
            next_row += 1
    job[k.SIZE], job[k.PROGRAM] = next_row, terms[stream, k.BASE] + next_row - 1
    _set_due(terms, state, stream, place)
    return True


@shared
def _merge(terms, state, stream, place):
    """Merge a batch with batches that wait at the same layer, up to the largest batch; the oldest query stays."""
    jobs, members = state.jobs[stream], state.members[stream]
    for other in range(state.streams[stream, k.PLACES]):
        if other == place or not jobs[other, k.USED] or jobs[other, k.COMPUTING]:
            continue
        together = jobs[place, k.SIZE] + jobs[other, k.SIZE]
        if jobs[other, k.LAYER] != jobs[place, k.LAYER] or together > terms[stream, k.MAX_BATCH]:
            continue
        target, joining = (place, other) if jobs[place, k.QUERY] < jobs[other, k.QUERY] else (other, place)
        for i in range(jobs[joining, k.SIZE]):
            k.copy_row(members[joining, i], members[target, jobs[target, k.SIZE] + i])
        jobs[target, k.SIZE], jobs[target, k.PROGRAM] = together, terms[stream, k.BASE] + together - 1
        for column in (k.LATE, k.BATCH_DUE):  # late only if both are; a late batch has the largest deadline, NONE
            jobs[target, column] = min(jobs[target, column], jobs[joining, column])
        jobs[target, k.LAST_ISSUED] = max(jobs[target, k.LAST_ISSUED], jobs[joining, k.LAST_ISSUED])
        _free_place(state, stream, joining)
        _set_due(terms, state, stream, target)
        place = target


@called
def _set_due(terms, state, stream, place):
    """Set the first arrival and the deadline of a batch whose members have changed.

    The deadline is the first that is not before the batch's previous deadline: requests due earlier counted as late,
    and do not count as on time again. If all did, it is that of the oldest. A late batch keeps NONE, which is later
    than any tick.
    """
    job, members, oldest, first_due = state.jobs[stream, place], state.members[stream, place], k.NONE, k.NONE
    for i in range(job[k.SIZE]):
        oldest = min(oldest, members[i, k.ARRIVAL])
        due = members[i, k.ARRIVAL] + terms[stream, k.DEADLINE]
        if due >= job[k.BATCH_DUE]:
            first_due = min(first_due, due)
    job[k.OLDEST] = oldest
    if not job[k.LATE]:
        job[k.BATCH_DUE] = first_due if first_due < k.NONE else oldest + terms[stream, k.DEADLINE]
