"""Batches that shrink at exits and are refilled, in the compiled loop over requests: one stream on one lane.

Twins of the policies that derive from ``policies.refilling``. Times are ticks; only what ``top-up`` compares are
floats, added up in the same order as there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.kernels import request_state as k
from weft.kernels import rules as shared
from weft.kernels.choosing import slack
from weft.kernels.compiling import called, inlined
from weft.kernels.request_queues import begin, sort_out_batches, sort_out_waiting

fluid_overhead = inlined(shared.fluid_overhead)
leaving_cost = inlined(shared.leaving_cost)
backlog_cost = inlined(shared.backlog_cost)
backlog_ticks = inlined(shared.backlog_ticks)

LAZY, FLUID, TOP_UP = range(3)
"""Policies."""
AT, MANY, KNOWN = range(3)
"""top-up's notes: at which layer, how many, and of how many the deadlines are known."""
NO_BATCH = -1
"""In place of the place of a batch."""


class Refills(NamedTuple):
    """The terms of a policy that refills, and room for its notes."""

    policy: int
    miss: int
    """top-up: cost of a missed deadline in ticks."""
    under_way: int
    """top-up: cost of one of a request in flight, in those of a waiting one."""
    backlog: int
    leaving: k.Floats
    """(layers, layers + 1): of the requests at a layer, the share that leaves after that many; for top-up."""
    flight: k.Ints
    """(batches + 1, 3): AT to KNOWN."""
    dues: k.Ints
    """(batches + 1, largest batch)."""


@called
def next_refilled(models, terms, rules, state, log, refilling):
    """The batch whose next layer is issued, which may begin only now; NO_BATCH where there is none."""
    clock, at = state.clocks[k.CHANNEL], state.rings[0, k.WAITING]
    if at[k.LENGTH] > 0:
        state.counts[0, k.DEEPEST] = max(state.counts[0, k.DEEPEST], at[k.LENGTH])
        sort_out_waiting(models, terms, rules, state, log, 0, clock)
    sort_out_batches(models, terms, rules, state, log, 0, clock)
    waiting = at[k.LENGTH] + state.rings[0, k.BELATED_RING, k.LENGTH]
    batches, begun, front = 0, 0, NO_BATCH
    for place in range(state.streams[0, k.PLACES]):
        job = state.jobs[0, place]
        if job[k.USED]:
            batches += 1
            begun += job[k.SIZE]
            if front == NO_BATCH or job[k.LAYER] < state.jobs[0, front, k.LAYER]:
                front = place
    room, size = min(terms[0, k.MAX_BATCH] - begun, waiting), 0
    if room > 0:
        size = _beginning(models, terms, state, refilling, batches, begun, front, room, waiting)
    if size:
        return begin(terms, state, 0, terms[0, k.BASE] + size - 1, at[k.LENGTH] == 0)
    return front


@called
def _beginning(models, terms, state, refilling, batches, begun, front, room, waiting):
    """How many requests begin now; 0: the batch that is least far goes on."""
    now = state.clocks[k.CHANNEL]
    at_exit = batches > 0 and _is_exit(models, terms, state.jobs[0, front, k.LAYER])
    if refilling.policy == TOP_UP:
        if batches and not at_exit:
            return 0
        return _top_up(models, terms, state, refilling, begun + room, room, waiting)
    if batches == 0:
        return room
    if refilling.policy == LAZY:
        return _lazy(models, terms, state, now, room)
    return _fluid(models, terms, state.jobs[0, front], now, room) if batches == 1 and at_exit else 0


@inlined
def _is_exit(models, terms, layer):
    """Whether requests may leave at a layer."""
    return layer > 0 and models.layers[models.programs[terms[0, k.BASE], k.FIRST] + layer - 1, k.EXIT] == 1


@inlined
def _rest(models, terms, size, layer):
    """Estimated ticks from a layer to the end at a batch size."""
    program = terms[0, k.BASE] + size - 1
    at = models.programs[program, k.FIRST] + layer
    return models.layers[at, k.REMAINING] if at < models.programs[program + 1, k.FIRST] else 0


@called
def _lazy(models, terms, state, now, room):
    """The most that leaves all requests on time, were all computed one by one."""
    need, due, at = 0, k.NONE, state.rings[0, k.WAITING]
    if at[k.LENGTH] > 0:
        due = state.queue[0, at[k.HEAD], k.ARRIVAL] + terms[0, k.DEADLINE]
    for place in range(state.streams[0, k.PLACES]):
        job = state.jobs[0, place]
        if job[k.USED]:
            need += job[k.SIZE] * _rest(models, terms, 1, job[k.LAYER])
            due = min(due, job[k.BATCH_DUE])
    for size in range(room, 0, -1):
        if slack(due, now, need + size * _rest(models, terms, 1, 0), 100) >= 0:
            return size
    return 0


@called
def _fluid(models, terms, job, now, room):
    """All that fits, if the batch at the exit can afford it."""
    there, together = job[k.LAYER], job[k.SIZE] + room
    over = fluid_overhead(
        _rest(models, terms, room, 0), _rest(models, terms, room, there), _rest(models, terms, together, there)
    )
    return room if slack(job[k.BATCH_DUE], now, over, 100) > 0 else 0


@called
def _note(terms, state, refilling, room):
    """Write down in row 0 the requests that could begin, then the batches in order of layers; how many rows."""
    flight, dues, deadline = refilling.flight, refilling.dues, terms[0, k.DEADLINE]
    at, late_at = state.rings[0, k.WAITING], state.rings[0, k.BELATED_RING]
    flight[0, AT] = 0
    for place in range(room):
        if place < at[k.LENGTH]:
            arrival = state.queue[0, (at[k.HEAD] + place) % state.queue.shape[1], k.ARRIVAL]
        else:
            arrival = state.late[0, (late_at[k.HEAD] + place - at[k.LENGTH]) % state.late.shape[1], k.ARRIVAL]
        dues[0, place] = arrival + deadline
    rows = 1
    while True:
        following = NO_BATCH
        for place in range(state.streams[0, k.PLACES]):
            job = state.jobs[0, place]
            further = job[k.USED] and job[k.LAYER] > flight[rows - 1, AT]
            if further and (following == NO_BATCH or job[k.LAYER] < state.jobs[0, following, k.LAYER]):
                following = place
        if following == NO_BATCH:
            return rows
        job = state.jobs[0, following]
        flight[rows, AT], flight[rows, MANY], flight[rows, KNOWN] = job[k.LAYER], job[k.SIZE], job[k.SIZE]
        for member in range(job[k.SIZE]):
            dues[rows, member] = state.members[0, following, member, k.ARRIVAL] + deadline
        rows += 1


@called
def _top_up(models, terms, state, refilling, most, room, waiting):
    """How many to begin with at the least cost; 0: the batch that is least far goes on. Few before many."""
    flight, now = refilling.flight, state.clocks[k.CHANNEL]
    rows = _note(terms, state, refilling, room)
    best, chosen = np.inf, 0
    for taken in range(1 if rows == 1 else 0, room + 1):
        flight[0, MANY] = flight[0, KNOWN] = taken
        cost, end = _sweep(models, terms, refilling, 0 if taken else 1, rows, 0, now, now)
        left = waiting - taken
        following = min(left, most)
        if following:
            flight[0, MANY], flight[0, KNOWN] = following, room - taken
            more, end = _sweep(models, terms, refilling, 0, 1, taken, end, now)
            cost += more
        left -= following
        if left:
            full = _rest(models, terms, most, 0)
            cost += backlog_cost(left, most, full, end - now)
            end += backlog_ticks(left, most, full)
        cost += refilling.backlog * (end - now)
        if cost < best:
            best, chosen = cost, taken
    return chosen


@called
def _sweep(models, terms, refilling, low, high, skip, start, now):
    """What the requests of some rows cost if the first starts then, and its end; skip: dues of row 0 to pass over."""
    flight, dues, leaving = refilling.flight, refilling.dues, refilling.leaving
    layers = len(leaving)
    time, size, cost = start, 0, 0.0
    for at in range(flight[low, AT], layers):
        for row in range(low, high):
            if flight[row, AT] == at:
                size += flight[row, MANY]
        time += _rest(models, terms, size, at) - _rest(models, terms, size, at + 1)
        if at + 1 < layers and not _is_exit(models, terms, at + 1):
            continue
        for row in range(low, high):
            share = leaving[flight[row, AT], at + 1]
            if share > 0:
                late, passed = 0, skip if row == 0 else 0
                for place in range(passed, passed + flight[row, KNOWN]):
                    late += dues[row, place] < time
                late *= refilling.under_way if flight[row, AT] else 1
                cost += leaving_cost(share, flight[row, MANY], time - now, late, refilling.miss)
    return cost, time
