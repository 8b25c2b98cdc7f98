"""A cluster, compiled: a router in front of machines that each serve requests by ``request_loop``.

Twin of ``weft_cluster.routing.plain``. Time is divided into periods. At the start of a period, gates (routers) read the
reports that machines wrote ``lag`` periods ago, and update them by the work that they have sent since; during the
period they route by these estimates; at its end every machine has served its requests up to there. Within a period
machines do not depend on each other, so they run one after another. A machine's clock is that of the gates: the network
delay is part of ``overhead`` and is subtracted from deadlines.

The state is in arrays, that of a machine as in ``request_state``. Times are ticks. Parameters are those of ``run``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.kernels import request_state as k
from weft.kernels.buffer import NEVER
from weft.kernels.compiling import borrowed, inlined, part, untyped_loop
from weft.kernels.request_loop import serve_until
from weft.kernels.request_state import Bools, Ints
from weft_cluster.kernels import routing_rules as rules

Floats = npt.NDArray[np.float64]

SLACK, TWO_CHOICES, TWO_IN_FLIGHT, TWO_AGED, RANDOM, ROUND_ROBIN = range(6)
"""Routers."""
WORK_ARRAY, WORK_CHANNEL, WAITING, UP = range(4)
"""Columns of a report."""
IN_FLIGHT = UP
"""Column of ``ClusterState.ahead`` that takes the place of UP: requests in flight."""
PERIOD, REQUEST, NUMBER = range(3)
"""Columns of ``ClusterState.progress``."""


class ClusterTables(NamedTuple):
    """The tables of a run that do not change.

    A stream is a model on a machine; the streams of a machine have consecutive numbers.
    """

    first: Ints
    """(models + 1): index of a model's first entry in ``stream`` and ``cumulative_share``."""
    stream: Ints
    """Numbers of the streams, model by model."""
    cumulative_share: Floats
    """Cumulative share of the model's requests, up to and including the stream; parallel to ``stream``."""
    machine: Ints
    """(streams): the machine."""
    begin: Ints
    """(machines + 1): the first stream of each machine."""
    compute: Ints
    """(streams): array time of a request, as gates expect it."""
    fetch: Ints
    """(streams): its expected channel time."""
    overhead: Ints
    """(streams): time of a request in the network and outside both array and channel."""
    rest_compute: Ints
    """(layers of all programs): array work from the layer to the end of its program."""
    rest_fetch: Ints
    """(layers of all programs): channel work from there to the end."""
    buffer: Ints
    """(machines): ticks of fetches that a machine may hold ahead."""
    largest: Ints
    """(machines): the longest fetch."""
    failures: Ints
    """(failures, 3): machine, and the periods from which and until which it is down."""


class ClusterRules(NamedTuple):
    """How gates route, and the period and age of their reports."""

    router: int
    gates: int
    period: int
    lag: int
    """Age of a report, in periods, when it is first used."""


class ClusterState(NamedTuple):
    """The state of the gates and of the run; machines have a ``LoopState``."""

    progress: Ints
    """PERIOD: the next period; REQUEST: the first request of the block that is not routed; NUMBER: requests in earlier
    blocks."""
    reports: Ints
    """(lag + 1, machines, 4): a ring of reports, by period."""
    sent: Ints
    """(gates, lag + 1, machines, 2): work that a gate sent in each period, a ring."""
    ahead: Ints
    """(gates, machines, 4): a gate's estimates: array and channel work before a new request, the requests on the
    machine as reported, and the requests in flight."""
    as_of: Ints
    """(gates, machines): the time of the values in ``ahead``."""
    up: Bools
    """(machines): whether a machine runs."""
    turns: Ints
    """(gates, models): requests of each model that a gate has seen."""


class ClusterRequests(NamedTuple):
    """A block of requests in order, and buffers to sort them by stream."""

    time: Ints
    model: Ints
    draws: Floats
    """(requests, 2): random numbers from 0 to 1, for routers that draw."""
    routed: Ints
    """(requests): the stream that each was sent to."""
    by_stream: Ints
    """Times of a period's requests, stream by stream."""
    counts: Ints
    """(streams): number of a period's requests."""
    known: Ints
    """(streams, 2): begin and end of a stream's requests in ``by_stream``."""


aged = inlined(rules.aged)
carried = inlined(rules.carried)
finish = inlined(rules.finish)
place_of_turn = inlined(rules.place_of_turn)
other_place = inlined(rules.other_place)


@untyped_loop
def run(end, models, terms, loop_rules, state, log, heads, tables, routing, cluster, requests):
    """Run the periods that begin before *end*; NONE: one last period until all requests are answered.

    terms: (streams, TERMS). loop_rules: LoopRules of the machines. log, heads: buffers of their loops. routing:
    ClusterRules. Returns False if a machine has more layers ahead than its buffers hold, else True.
    """
    models, terms, state, log, heads = borrowed((models, terms, state, log, heads))
    tables, cluster, requests = borrowed((tables, cluster, requests))
    no_more = np.zeros(len(tables.compute), np.bool_)
    while cluster.progress[PERIOD] * routing.period < end:
        period = cluster.progress[PERIOD]
        until = (period + 1) * routing.period if end < k.NONE else k.NONE
        _apply_failures(loop_rules, state, tables, cluster, period)
        _update_estimates(routing, cluster, period)
        first = cluster.progress[REQUEST]
        last = _route_period(tables, routing, cluster, requests, period, until)
        _sort_by_stream(tables, requests, first, last)
        for machine in range(len(tables.begin) - 1):
            if not cluster.up[machine]:
                _lose_arrivals(machine, until, loop_rules, state, tables, requests)
            elif not _serve_machine(
                machine, until, models, terms, loop_rules, state, log, heads, tables, requests, no_more
            ):
                return False
            _write_report(machine, until, state, terms, models, tables, routing, cluster, period + 1)
        cluster.progress[PERIOD] = period + 1
        cluster.progress[REQUEST] = last
        if end == k.NONE:
            break
    return True


# Failures


@part
def _apply_failures(loop_rules, state, tables, cluster, period):
    """Stop machines that fail in a period, which lose all their requests; restart, idle, those whose failure ends."""
    for row in range(len(tables.failures)):
        machine, begin, end = tables.failures[row, 0], tables.failures[row, 1], tables.failures[row, 2]
        if begin == period:
            cluster.up[machine] = False
            for stream in range(tables.begin[machine], tables.begin[machine + 1]):
                _lose_all(loop_rules, state, stream)
        elif end == period:
            cluster.up[machine] = True
            _restart(state, machine)


@part
def _lose_all(loop_rules, state, stream):
    """End all waiting and running requests of a stream, and count them as lost."""
    row = state.streams[stream]
    for place in range(row[k.PLACES]):
        if state.jobs[stream, place, k.USED] == 1:
            for i in range(state.jobs[stream, place, k.SIZE]):
                _lose(loop_rules, state, stream, state.members[stream, place, i, k.ARRIVAL])
            state.jobs[stream, place, k.USED] = 0
    row[k.BATCHES_IN_FLIGHT] = row[k.PLACES] = 0
    _lose_ring(loop_rules, state, stream, state.queue, state.rings[stream, k.WAITING])
    _lose_ring(loop_rules, state, stream, state.late, state.rings[stream, k.BELATED_RING])


@part
def _lose_ring(loop_rules, state, stream, ring, bounds):
    """Empty a stream's queue, and count its requests as lost.

    ring: (streams, places, ...) ring buffers. bounds: HEAD and LENGTH of the stream's ring.
    """
    for i in range(bounds[k.LENGTH]):
        _lose(loop_rules, state, stream, ring[stream, (bounds[k.HEAD] + i) % ring.shape[1], k.ARRIVAL])
    bounds[k.HEAD] = bounds[k.LENGTH] = 0


@inlined
def _lose(loop_rules, state, stream, arrival):
    """Count a request as lost, unless it arrived during the warm-up."""
    if arrival >= loop_rules.warm:
        state.counts[stream, k.ARRIVED] += 1
        state.counts[stream, k.VIOLATED] += 1
        state.counts[stream, k.DROPPED] += 1


@part
def _lose_arrivals(machine, until, loop_rules, state, tables, requests):
    """Count the requests that were routed until *until* to a machine that is down as lost."""
    for stream in range(tables.begin[machine], tables.begin[machine + 1]):
        for i in range(requests.known[stream, k.HEAD], requests.known[stream, k.LENGTH]):
            _lose(loop_rules, state, stream, requests.by_stream[i])
    if until < k.NONE:
        state.clocks[machine, k.CHANNEL] = until


@inlined
def _restart(state, machine):
    """Reset a device to idle."""
    clocks = state.clocks[machine]
    clocks[k.ARRAY] = clocks[k.FETCHED] = clocks[k.ISSUES] = clocks[k.POINTER] = 0
    state.before[machine, 0], state.peak[machine, 0] = 0, NEVER


# Gates route


@part
def _update_estimates(routing, cluster, period):
    """Set every gate's estimates at the start of a period: the newest report, plus the work sent since.

    A gate assumes that the other gates sent as much as it did.
    """
    ring, now = routing.lag + 1, period * routing.period
    newest = max(0, period - routing.lag)
    for gate in range(routing.gates):
        for machine in range(cluster.reports.shape[1]):
            report = cluster.reports[newest % ring, machine]
            array, channel, waiting = report[WORK_ARRAY], report[WORK_CHANNEL], report[WAITING]
            for index in range(newest, period):
                sent = cluster.sent[gate, index % ring, machine]
                array = carried(array, sent[WORK_ARRAY] * routing.gates, routing.period)
                channel = carried(channel, sent[WORK_CHANNEL] * routing.gates, routing.period)
            ahead = cluster.ahead[gate, machine]
            ahead[WORK_ARRAY], ahead[WORK_CHANNEL], ahead[WAITING] = array, channel, waiting
            ahead[IN_FLIGHT] = cluster.reports[period % ring, machine, WAITING]
            cluster.as_of[gate, machine] = now
            cluster.sent[gate, period % ring, machine, :] = 0


@part
def _route_period(tables, routing, cluster, requests, period, until):
    """Choose a stream for every request before *until*; return the index of the first request after it."""
    i = cluster.progress[REQUEST]
    reports = cluster.reports[max(0, period - routing.lag) % (routing.lag + 1)]  # the newest that gates have read
    while i < len(requests.time) and requests.time[i] < until:
        model, now, gate = requests.model[i], requests.time[i], (cluster.progress[NUMBER] + i) % routing.gates
        first, count = tables.first[model], tables.first[model + 1] - tables.first[model]
        turn = cluster.turns[gate, model]
        cluster.turns[gate, model] = turn + 1
        place = 0
        if count > 1:
            if routing.router == SLACK:
                place = _pick_earliest(tables, cluster, reports, first, count, gate, turn, now)
            elif routing.router == ROUND_ROBIN:
                place = _pick_by_share(tables, reports, first, count, place_of_turn(turn))
            else:
                place = _pick_by_share(tables, reports, first, count, requests.draws[i, 0])
                if routing.router != RANDOM:
                    other = other_place(requests.draws[i, 1], count, place)
                    place = _pick_of_two(tables, routing, cluster, reports, first, gate, now, place, other)
        stream = tables.stream[first + place]
        requests.routed[i] = stream
        _count_sent(tables, routing, cluster, period, gate, stream, now)
        i += 1
    return i


@inlined
def _expected_answer(tables, cluster, gate, stream, now):
    """Return the time at which a request of a stream would be answered, by a gate's estimates."""
    machine = tables.machine[stream]
    ahead, as_of = cluster.ahead[gate, machine], cluster.as_of[gate, machine]
    return finish(
        now,
        aged(ahead[WORK_ARRAY], as_of, now),
        aged(ahead[WORK_CHANNEL], as_of, now),
        tables.compute[stream],
        tables.fetch[stream],
        tables.overhead[stream],
    )


@part
def _pick_earliest(tables, cluster, reports, first, count, gate, turn, now):
    """Return the index, among *count* replicas of a model, of the one that would answer first; of equals the next.

    reports: (machines, 4), the newest. first: the model's first entry in ``ClusterTables.stream``. turn: the number of
    the model's requests before this.
    """
    best, earliest = turn % count, k.NONE
    for step in range(count):
        place = (turn + step) % count
        stream = tables.stream[first + place]
        if reports[tables.machine[stream], UP] == 1:
            end = _expected_answer(tables, cluster, gate, stream, now)
            if end < earliest:
                best, earliest = place, end
    return best


@part
def _pick_by_share(tables, reports, first, count, draw):
    """Return the index of the replica whose share contains *draw*, from 0 to 1, or of the next one that is up.

    reports, first, count: as in ``_pick_earliest``.
    """
    place = 0
    while place < count - 1 and tables.cumulative_share[first + place] <= draw:
        place += 1
    for step in range(count):
        index = (place + step) % count
        if reports[tables.machine[tables.stream[first + index]], UP] == 1:
            return index
    return place


@part
def _pick_of_two(tables, routing, cluster, reports, first, gate, now, place, other_place):
    """Return the better of two replica indices, by requests on the machine or by expected answer.

    *place* if the machine of *other_place* is down.
    """
    stream, other_stream = tables.stream[first + place], tables.stream[first + other_place]
    if reports[tables.machine[other_stream], UP] == 0:
        return place
    if routing.router == TWO_CHOICES or routing.router == TWO_IN_FLIGHT:
        column = WAITING if routing.router == TWO_CHOICES else IN_FLIGHT
        cost = cluster.ahead[gate, tables.machine[stream], column]
        other_cost = cluster.ahead[gate, tables.machine[other_stream], column]
    else:
        cost, other_cost = (
            _expected_answer(tables, cluster, gate, stream, now),
            _expected_answer(tables, cluster, gate, other_stream, now),
        )
    return other_place if other_cost < cost else place


@part
def _count_sent(tables, routing, cluster, period, gate, stream, now):
    """Add a request to a gate's estimates.

    Each gate assumes that the others send the same, so its work counts once per gate.
    """
    machine = tables.machine[stream]
    ahead, as_of = cluster.ahead[gate, machine], cluster.as_of[gate, machine]
    sent = cluster.sent[gate, period % (routing.lag + 1), machine]
    compute, fetch = tables.compute[stream], tables.fetch[stream]
    ahead[WORK_ARRAY] = aged(ahead[WORK_ARRAY], as_of, now) + compute * routing.gates
    ahead[WORK_CHANNEL] = aged(ahead[WORK_CHANNEL], as_of, now) + fetch * routing.gates
    ahead[IN_FLIGHT] += 1
    cluster.as_of[gate, machine] = now
    sent[WORK_ARRAY] += compute
    sent[WORK_CHANNEL] += fetch


# Machines serve


@part
def _sort_by_stream(tables, requests, first, last):
    """Copy the times of requests *first* to *last* into ``by_stream``, and set ``known``: a counting sort by stream."""
    counts, known = requests.counts, requests.known
    counts[:] = 0
    for i in range(first, last):
        counts[requests.routed[i]] += 1
    end = 0
    for stream in range(len(counts)):
        known[stream, k.HEAD] = known[stream, k.LENGTH] = end
        end += counts[stream]
    for i in range(first, last):
        stream = requests.routed[i]
        requests.by_stream[known[stream, k.LENGTH]] = requests.time[i]
        known[stream, k.LENGTH] += 1


@part
def _serve_machine(machine, until, models, terms, base, state, log, heads, tables, requests, no_more):
    """Let a machine serve until a time; return False if its buffers were too small to get there.

    base: the rules that all machines share. heads: scratch space of ``serve_until``. no_more: False for every stream:
    all arrivals are known.
    """
    a, b = tables.begin[machine], tables.begin[machine + 1]  # the machine's streams
    clocks = state.clocks[machine]
    if a == b:
        return True
    # Views of the arrays that are this machine's.
    machine_state = k.LoopState(
        clocks, state.before[machine], state.peak[machine], state.queue[a:b], state.late[a:b], state.returning[a:b],
        state.rings[a:b], state.streams[a:b], state.jobs[a:b], state.members[a:b], state.counts[a:b], state.histogram,
        state.segments, state.speeds, state.unseen, state.patience[a:b],
    )  # fmt: skip
    machine_rules = k.LoopRules(
        base.device, base.policy, base.late, base.refills, base.strict, base.by_deadline,
        base.late_gives_way, base.foresight, base.stretch, base.failsafe, base.margin, base.patience,
        tables.buffer[machine], tables.largest[machine], base.lanes, base.cores, base.least_speed,
        base.abort_from, base.abort, base.step, base.hand_overs, base.warm, base.end,
    )  # fmt: skip
    machine_log = k.LoopLog(log.issues[machine], log.answers[machine])
    no_exits = requests.by_stream[:0]
    arrivals = k.LoopArrivals(requests.by_stream, requests.known[a:b], no_exits, requests.known[a:b], no_more[a:b])
    done = serve_until(until, models, terms[a:b], machine_rules, machine_state, machine_log, heads, arrivals, None)
    return done or clocks[k.CHANNEL] >= until


@part
def _write_report(machine, now, state, terms, models, tables, routing, cluster, period):
    """Write a machine's report at the start of a period: the work ahead of a new request that is on time."""
    clocks, report = state.clocks[machine], cluster.reports[period % (routing.lag + 1), machine]
    array, channel, waiting = max(0, clocks[k.ARRAY] - now), max(0, clocks[k.CHANNEL] - now), 0
    for stream in range(tables.begin[machine], tables.begin[machine + 1]):
        first = models.programs[terms[stream, k.BASE], k.FIRST]
        queued = state.rings[stream, k.WAITING, k.LENGTH]
        array += queued * tables.rest_compute[first]
        channel += queued * tables.rest_fetch[first]
        waiting += queued + state.rings[stream, k.BELATED_RING, k.LENGTH] + state.streams[stream, k.BATCHES_IN_FLIGHT]
        for place in range(state.streams[stream, k.PLACES]):
            job = state.jobs[stream, place]
            if job[k.USED] == 1 and job[k.LATE] == 0:
                layer_row = models.programs[job[k.PROGRAM], k.FIRST] + job[k.LAYER]
                array += tables.rest_compute[layer_row]
                channel += tables.rest_fetch[layer_row]
    report[WORK_ARRAY], report[WORK_CHANNEL], report[WAITING] = array, channel, waiting
    report[UP] = 1 if cluster.up[machine] else 0
