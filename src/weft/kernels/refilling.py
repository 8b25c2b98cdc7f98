"""Batches that shrink at exits and are refilled, in the compiled loop over requests: one stream on one lane.

Twins of the policies that derive from ``policies.refilling``. Times are ticks; only the costs of ``top-up`` are floats,
added up in the same order as there, so that rounding does not change a choice. *models*, *terms*, *rules*, *state* and
*log* are the arrays of ``request_state``; row 0 of *terms* is the only stream.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.kernels import request_state as k
from weft.kernels import rules as shared
from weft.kernels.choosing import slack
from weft.kernels.compiling import called, inlined
from weft.kernels.request_queues import begin, rest_from, sort_out_batches, sort_out_waiting

fluid_overhead = inlined(shared.fluid_overhead)
leaving_cost = inlined(shared.leaving_cost)
backlog_cost = inlined(shared.backlog_cost)
backlog_ticks = inlined(shared.backlog_ticks)

LAZY, FLUID, TOP_UP = range(3)
"""Values of ``Refills.policy``."""
AT_LAYER, COUNT, KNOWN_DUES = range(3)
"""Columns of ``Refills.flight``: a layer, the number of requests there, and how many of their deadlines are known."""
NO_BATCH = -1
"""Instead of the place of a job, if there is none."""


class Refills(NamedTuple):
    """The options of a policy that refills, and scratch space for top-up."""

    policy: int
    miss: int
    """top-up: cost of a missed deadline in ticks."""
    under_way: int
    """top-up: factor on ``miss`` for a request in flight."""
    backlog: int
    """top-up: future requests that are assumed to wait until all present ones have ended."""
    leaving: k.Floats
    """(layers, layers + 1): of the requests at a layer (row), the share that leaves after a number of layers (column);
    for top-up."""
    flight: k.Ints
    """(batches + 1, 3): AT_LAYER to KNOWN_DUES of the requests that could begin, then of each batch in flight."""
    dues: k.Ints
    """(batches + 1, largest batch): the known deadlines of the same requests."""


@called
def next_refilled(models, terms, rules, state, log, refilling):
    """Return the place of the job whose next layer is issued, a new job if it begins now; NO_BATCH if there is none.

    refilling: the policy's options. A new batch takes requests that can be on time first, then late ones.
    """
    clock, bounds = state.clocks[k.CHANNEL], state.rings[0, k.WAITING]
    if bounds[k.LENGTH] > 0:
        state.counts[0, k.DEEPEST] = max(state.counts[0, k.DEEPEST], bounds[k.LENGTH])
        sort_out_waiting(models, terms, rules, state, log, 0, clock)
    sort_out_batches(models, terms, rules, state, log, 0, clock)
    waiting = bounds[k.LENGTH] + state.rings[0, k.BELATED_RING, k.LENGTH]
    batches, in_flight, front = 0, 0, NO_BATCH
    for place in range(state.streams[0, k.PLACES]):
        job = state.jobs[0, place]
        if job[k.USED]:
            batches += 1
            in_flight += job[k.SIZE]
            if front == NO_BATCH or job[k.LAYER] < state.jobs[0, front, k.LAYER]:
                front = place
    room, size = min(terms[0, k.MAX_BATCH] - in_flight, waiting), 0
    if room > 0:
        size = _size_to_begin(models, terms, state, refilling, batches, in_flight, front, room, waiting)
    if size:
        program, only_late = terms[0, k.BASE] + size - 1, bounds[k.LENGTH] == 0  # a program per batch size, from 1
        return begin(terms, state, 0, program, only_late)
    return front


@called
def _size_to_begin(models, terms, state, refilling, batches, in_flight, front, room, waiting):
    """Return how many requests begin now; 0: the batch at the earliest layer goes on.

    batches, in_flight: the number of batches in flight, and of their requests. front: the place of the batch at the
    earliest layer. room: how many requests fit beside them. waiting: the number of waiting requests.
    """
    now = state.clocks[k.CHANNEL]
    at_exit = batches > 0 and _is_exit(models, terms, state.jobs[0, front, k.LAYER])
    if refilling.policy == TOP_UP:
        if batches and not at_exit:
            return 0
        return _top_up(models, terms, state, refilling, in_flight + room, room, waiting)
    if batches == 0:
        return room
    if refilling.policy == LAZY:
        return _lazy(models, terms, state, now, room)
    return _fluid(models, terms, state.jobs[0, front], now, room) if batches == 1 and at_exit else 0


@inlined
def _is_exit(models, terms, layer):
    """Return whether there is an early exit before a layer."""
    return layer > 0 and models.layers[models.programs[terms[0, k.BASE], k.FIRST] + layer - 1, k.EXIT] == 1


@inlined
def _rest(models, terms, size, layer):
    """Return the estimated ticks from a layer to the end at a batch size."""
    return rest_from(models, terms[0, k.BASE] + size - 1, layer)


@called
def _lazy(models, terms, state, now, room):
    """Lazy Batching: return the largest number of requests with which all would be on time if all ran one by one.

    room: the largest number to try.
    """
    need, due, bounds = 0, k.NONE, state.rings[0, k.WAITING]
    if bounds[k.LENGTH] > 0:
        due = state.queue[0, bounds[k.HEAD], k.ARRIVAL] + terms[0, k.DEADLINE]
    for place in range(state.streams[0, k.PLACES]):
        job = state.jobs[0, place]
        if job[k.USED]:
            need += job[k.SIZE] * _rest(models, terms, 1, job[k.LAYER])  # one by one: at batch size 1
            due = min(due, job[k.BATCH_DUE])
    for size in range(room, 0, -1):
        if slack(due, now, need + size * _rest(models, terms, 1, 0), 100) >= 0:
            return size
    return 0


@called
def _fluid(models, terms, job, now, room):
    """Fluid Batching: return *room* if the batch at the exit, *job*, has the slack for it, else 0."""
    exit_layer, together = job[k.LAYER], job[k.SIZE] + room
    overhead = fluid_overhead(
        _rest(models, terms, room, 0),
        _rest(models, terms, room, exit_layer),
        _rest(models, terms, together, exit_layer),
    )
    return room if slack(job[k.BATCH_DUE], now, overhead, 100) > 0 else 0


@called
def _fill_flight(terms, state, refilling, room):
    """Fill ``flight`` and ``dues``: row 0, the requests that could begin; then the batches in order of layers.

    room: how many requests could begin. Returns the number of rows. COUNT and KNOWN_DUES of row 0 are left to the
    caller.
    """
    flight, dues, deadline = refilling.flight, refilling.dues, terms[0, k.DEADLINE]
    bounds, late_bounds = state.rings[0, k.WAITING], state.rings[0, k.BELATED_RING]
    flight[0, AT_LAYER] = 0
    for place in range(room):
        if place < bounds[k.LENGTH]:
            arrival = state.queue[0, (bounds[k.HEAD] + place) % state.queue.shape[1], k.ARRIVAL]
        else:
            arrival = state.late[0, (late_bounds[k.HEAD] + place - bounds[k.LENGTH]) % state.late.shape[1], k.ARRIVAL]
        dues[0, place] = arrival + deadline
    count = 1
    while True:
        next_place = NO_BATCH
        for place in range(state.streams[0, k.PLACES]):
            job = state.jobs[0, place]
            further = job[k.USED] and job[k.LAYER] > flight[count - 1, AT_LAYER]
            if further and (next_place == NO_BATCH or job[k.LAYER] < state.jobs[0, next_place, k.LAYER]):
                next_place = place
        if next_place == NO_BATCH:
            return count
        job = state.jobs[0, next_place]
        flight[count, AT_LAYER] = job[k.LAYER]
        flight[count, COUNT] = flight[count, KNOWN_DUES] = job[k.SIZE]
        for member in range(job[k.SIZE]):
            dues[count, member] = state.members[0, next_place, member, k.ARRIVAL] + deadline
        count += 1


@called
def _top_up(models, terms, state, refilling, max_batch, room, waiting):
    """top-up: return the number of requests to begin at the least cost, the smallest number among equal costs.

    0: the batch at the earliest layer goes on. max_batch: the largest batch that merging can give. room: the largest
    number to try. The cost of a number is that of its sweep, of one more batch of waiting requests, and of the backlog
    in full batches after that.
    """
    flight, now = refilling.flight, state.clocks[k.CHANNEL]
    rows = _fill_flight(terms, state, refilling, room)
    best, chosen = np.inf, 0
    for taken in range(1 if rows == 1 else 0, room + 1):
        flight[0, COUNT] = flight[0, KNOWN_DUES] = taken
        cost, end = _sweep(models, terms, refilling, 0 if taken else 1, rows, 0, now, now)
        unserved = waiting - taken
        next_size = min(unserved, max_batch)
        if next_size:
            flight[0, COUNT], flight[0, KNOWN_DUES] = next_size, room - taken
            next_cost, end = _sweep(models, terms, refilling, 0, 1, taken, end, now)
            cost += next_cost
        unserved -= next_size
        if unserved:
            full = _rest(models, terms, max_batch, 0)
            cost += backlog_cost(unserved, max_batch, full, end - now)
            end += backlog_ticks(unserved, max_batch, full)
        cost += refilling.backlog * (end - now)
        if cost < best:
            best, chosen = cost, taken
    return chosen


@called
def _sweep(models, terms, refilling, low, high, skip, start, now):
    """Return the cost and the end of a sweep that begins with row *low* at tick *start* and takes rows below *high*.

    A sweep runs to the last layer, and merges with each row of ``flight`` when it reaches the layer of that row. skip:
    how many dues of row 0 to pass over. Times in the cost count from *now*.
    """
    flight, dues, leaving = refilling.flight, refilling.dues, refilling.leaving
    layers = len(leaving)
    time, size, cost = start, 0, 0.0
    for layer in range(flight[low, AT_LAYER], layers):
        for row in range(low, high):
            if flight[row, AT_LAYER] == layer:
                size += flight[row, COUNT]
        time += _rest(models, terms, size, layer) - _rest(models, terms, size, layer + 1)
        if layer + 1 < layers and not _is_exit(models, terms, layer + 1):
            continue
        for row in range(low, high):
            share = leaving[flight[row, AT_LAYER], layer + 1]
            if share > 0:
                late, first_known = 0, skip if row == 0 else 0
                for place in range(first_known, first_known + flight[row, KNOWN_DUES]):
                    late += dues[row, place] < time
                late *= refilling.under_way if flight[row, AT_LAYER] else 1
                cost += leaving_cost(share, flight[row, COUNT], time - now, late, refilling.miss)
    return cost, time
