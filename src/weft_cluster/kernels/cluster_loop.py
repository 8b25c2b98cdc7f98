"""A cluster, compiled: a router in front of machines that each serve requests by ``request_loop``.

Twin of ``weft_cluster.routing.plain``. Time goes in periods. At the start of one, gates learn what machines reported
some periods ago, and carry it on by what they have sent since; during it they route by that and by what they send; at
its end every machine has served what came. Machines do not wait for each other within a period, so each runs through it
at a time. A machine's clock is that of the gates: what the way takes is in ``besides`` and in its deadlines.

What it keeps are arrays; machines keep what ``request_state`` says. Times are ticks.
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
"""What gates know of a machine in the place of that."""
PERIOD, REQUEST, NUMBER = range(3)
"""Columns of ``ClusterState.at``."""


class ClusterTables(NamedTuple):
    """What stays the same: streams are models on machines, those of a machine beside each other."""

    first: Ints
    """(models + 1): where the streams of each model begin in the next three."""
    stream: Ints
    """Streams, model by model."""
    until: Floats
    """Up to where the share of each reaches, of its model's requests."""
    machine: Ints
    """(streams): where it is."""
    begin: Ints
    """(machines + 1): the first stream of each machine."""
    compute: Ints
    """(streams): what gates take a request to need of the array..."""
    fetch: Ints
    """... of the channel..."""
    besides: Ints
    """... and on the way and besides."""
    rest_compute: Ints
    """Of every layer of the programs: what is left of the array's work from there on..."""
    rest_fetch: Ints
    """... and of the channel's."""
    buffer: Ints
    """(machines): ticks that a machine may be given ahead."""
    largest: Ints
    """(machines): its longest fetch."""
    failures: Ints
    """(failures, 3): machine, and the periods from which and until which it is down."""


class ClusterRules(NamedTuple):
    """How gates route, and what they know."""

    router: int
    gates: int
    period: int
    lag: int
    """How many periods a report is old when it is first used."""


class ClusterState(NamedTuple):
    """What gates know and how far the run is; machines have a ``LoopState``."""

    at: Ints
    """The period that comes next, the first request of the block that was not routed, and how many came before it."""
    reports: Ints
    """(lag + 1, machines, 4): a ring of reports, by period."""
    sent: Ints
    """(gates, lag + 1, machines, 2): work that a gate sent in each period, a ring."""
    ahead: Ints
    """(gates, machines, 4): array and channel work before a new request, requests there, and those in flight."""
    as_of: Ints
    """(gates, machines): since when."""
    up: Bools
    """(machines): whether it runs."""
    turns: Ints
    """(gates, models): requests of each model that a gate has seen."""


class ClusterRequests(NamedTuple):
    """A block of requests in order, and room to sort them by stream."""

    time: Ints
    model: Ints
    draws: Floats
    """(requests, 2): for routers that draw lots."""
    routed: Ints
    """(requests): the stream that each went to."""
    by_stream: Ints
    """Times of a period's requests, stream by stream."""
    many: Ints
    """(streams): how many of a period's requests came to each."""
    known: Ints
    """(streams, 2): where those begin and end in ``by_stream``."""


aged = inlined(rules.aged)
carried = inlined(rules.carried)
finish = inlined(rules.finish)
place_of_turn = inlined(rules.place_of_turn)
other_place = inlined(rules.other_place)


@untyped_loop
def run(end, models, terms, served, state, log, heads, tables, how, cluster, requests):
    """Run the periods that begin before *end*; NONE: one that lasts until all is done.

    Returns whether all machines could be served: False where one has more layers ahead than it has places for.
    """
    models, terms, state, log, heads = borrowed((models, terms, state, log, heads))
    tables, cluster, requests = borrowed((tables, cluster, requests))
    no_more = np.zeros(len(tables.compute), np.bool_)
    while cluster.at[PERIOD] * how.period < end:
        period = cluster.at[PERIOD]
        until = (period + 1) * how.period if end < k.NONE else k.NONE
        _fail(served, state, tables, cluster, period)
        _learn(how, cluster, period)
        first = cluster.at[REQUEST]
        last = _route(tables, how, cluster, requests, period, until)
        _sort(tables, requests, first, last)
        for machine in range(len(tables.begin) - 1):
            if not cluster.up[machine]:
                _lose_arrivals(machine, until, served, state, tables, requests)
            elif not _serve(machine, until, models, terms, served, state, log, heads, tables, requests, no_more):
                return False
            _report(machine, until, state, terms, models, tables, how, cluster, period + 1)
        cluster.at[PERIOD] = period + 1
        cluster.at[REQUEST] = last
        if end == k.NONE:
            break
    return True


# Machines come and go


@part
def _fail(served, state, tables, cluster, period):
    """Let machines that go down lose all they have; those that come back are empty."""
    for row in range(len(tables.failures)):
        machine, begin, end = tables.failures[row, 0], tables.failures[row, 1], tables.failures[row, 2]
        if begin == period:
            cluster.up[machine] = False
            for stream in range(tables.begin[machine], tables.begin[machine + 1]):
                _lose_all(served, state, stream)
        elif end == period:
            cluster.up[machine] = True
            _restart(state, machine)


@part
def _lose_all(served, state, stream):
    """Count everything that waits or runs of a stream as lost."""
    row = state.streams[stream]
    for place in range(row[k.PLACES]):
        if state.jobs[stream, place, k.USED] == 1:
            for i in range(state.jobs[stream, place, k.SIZE]):
                _lose(served, state, stream, state.members[stream, place, i, k.ARRIVAL])
            state.jobs[stream, place, k.USED] = 0
    row[k.BATCHES_IN_FLIGHT] = row[k.PLACES] = 0
    _lose_ring(served, state, stream, state.queue, state.rings[stream, k.WAITING])
    _lose_ring(served, state, stream, state.late, state.rings[stream, k.BELATED_RING])


@part
def _lose_ring(served, state, stream, ring, at):
    for i in range(at[k.LENGTH]):
        _lose(served, state, stream, ring[stream, (at[k.HEAD] + i) % ring.shape[1], k.ARRIVAL])
    at[k.HEAD] = at[k.LENGTH] = 0


@inlined
def _lose(served, state, stream, arrival):
    if arrival >= served.warm:
        state.counts[stream, k.ARRIVED] += 1
        state.counts[stream, k.VIOLATED] += 1
        state.counts[stream, k.DROPPED] += 1


@part
def _lose_arrivals(machine, until, served, state, tables, requests):
    """Count requests that arrive at a machine that is down as lost."""
    for stream in range(tables.begin[machine], tables.begin[machine + 1]):
        for i in range(requests.known[stream, k.HEAD], requests.known[stream, k.LENGTH]):
            _lose(served, state, stream, requests.by_stream[i])
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
def _learn(how, cluster, period):
    """Estimates of gates at the start of a period: the newest report, plus what they sent since."""
    ring, now = how.lag + 1, period * how.period
    newest = max(0, period - how.lag)
    for gate in range(how.gates):
        for machine in range(cluster.reports.shape[1]):
            report = cluster.reports[newest % ring, machine]
            array, channel, waiting = report[WORK_ARRAY], report[WORK_CHANNEL], report[WAITING]
            for index in range(newest, period):
                sent = cluster.sent[gate, index % ring, machine]
                array = carried(array, sent[WORK_ARRAY] * how.gates, how.period)
                channel = carried(channel, sent[WORK_CHANNEL] * how.gates, how.period)
            ahead = cluster.ahead[gate, machine]
            ahead[WORK_ARRAY], ahead[WORK_CHANNEL], ahead[WAITING] = array, channel, waiting
            ahead[IN_FLIGHT] = cluster.reports[period % ring, machine, WAITING]
            cluster.as_of[gate, machine] = now
            cluster.sent[gate, period % ring, machine, :] = 0


@part
def _route(tables, how, cluster, requests, period, until):
    """Send every request of a period to a stream; the first that is not of it."""
    i = cluster.at[REQUEST]
    up = cluster.reports[max(0, period - how.lag) % (how.lag + 1)]
    while i < len(requests.time) and requests.time[i] < until:
        model, now, gate = requests.model[i], requests.time[i], (cluster.at[NUMBER] + i) % how.gates
        first, count = tables.first[model], tables.first[model + 1] - tables.first[model]
        turn = cluster.turns[gate, model]
        cluster.turns[gate, model] = turn + 1
        place = 0
        if count > 1:
            if how.router == SLACK:
                place = _earliest(tables, cluster, up, first, count, gate, turn, now)
            elif how.router == ROUND_ROBIN:
                place = _by_share(tables, up, first, count, place_of_turn(turn))
            else:
                place = _by_share(tables, up, first, count, requests.draws[i, 0])
                if how.router != RANDOM:
                    other = other_place(requests.draws[i, 1], count, place)
                    place = _better(tables, how, cluster, up, first, gate, now, place, other)
        stream = tables.stream[first + place]
        requests.routed[i] = stream
        _note(tables, how, cluster, period, gate, stream, now)
        i += 1
    return i


@inlined
def _expected_answer(tables, cluster, gate, stream, now):
    """When a request of a stream would be answered, as a gate knows it."""
    machine = tables.machine[stream]
    ahead, as_of = cluster.ahead[gate, machine], cluster.as_of[gate, machine]
    return finish(
        now,
        aged(ahead[WORK_ARRAY], as_of, now),
        aged(ahead[WORK_CHANNEL], as_of, now),
        tables.compute[stream],
        tables.fetch[stream],
        tables.besides[stream],
    )


@part
def _earliest(tables, cluster, up, first, count, gate, turn, now):
    """The place where a request would be answered first; of equals the next in turn."""
    best, least = turn % count, k.NONE
    for step in range(count):
        place = (turn + step) % count
        stream = tables.stream[first + place]
        if up[tables.machine[stream], UP] == 1:
            end = _expected_answer(tables, cluster, gate, stream, now)
            if end < least:
                best, least = place, end
    return best


@part
def _by_share(tables, up, first, count, draw):
    """The replica whose share contains a random draw, or the next one that is up."""
    place = 0
    while place < count - 1 and tables.until[first + place] <= draw:
        place += 1
    for step in range(count):
        index = (place + step) % count
        if up[tables.machine[tables.stream[first + index]], UP] == 1:
            return index
    return place


@part
def _better(tables, how, cluster, up, first, gate, now, place, other):
    """The better of two places: by the requests that wait there, or by when it would be answered."""
    one, two = tables.stream[first + place], tables.stream[first + other]
    if up[tables.machine[two], UP] == 0:
        return place
    if how.router == TWO_CHOICES or how.router == TWO_IN_FLIGHT:
        column = WAITING if how.router == TWO_CHOICES else IN_FLIGHT
        here = cluster.ahead[gate, tables.machine[one], column]
        there = cluster.ahead[gate, tables.machine[two], column]
    else:
        here, there = (
            _expected_answer(tables, cluster, gate, one, now),
            _expected_answer(tables, cluster, gate, two, now),
        )
    return other if there < here else place


@part
def _note(tables, how, cluster, period, gate, stream, now):
    """What was sent counts from now on; each gate takes the others to do as it does."""
    machine = tables.machine[stream]
    ahead, as_of = cluster.ahead[gate, machine], cluster.as_of[gate, machine]
    sent = cluster.sent[gate, period % (how.lag + 1), machine]
    compute, fetch = tables.compute[stream], tables.fetch[stream]
    ahead[WORK_ARRAY] = aged(ahead[WORK_ARRAY], as_of, now) + compute * how.gates
    ahead[WORK_CHANNEL] = aged(ahead[WORK_CHANNEL], as_of, now) + fetch * how.gates
    ahead[IN_FLIGHT] += 1
    cluster.as_of[gate, machine] = now
    sent[WORK_ARRAY] += compute
    sent[WORK_CHANNEL] += fetch


# Machines serve


@part
def _sort(tables, requests, first, last):
    """Lay the times of a period's requests out stream by stream."""
    many, known = requests.many, requests.known
    many[:] = 0
    for i in range(first, last):
        many[requests.routed[i]] += 1
    end = 0
    for stream in range(len(many)):
        known[stream, k.HEAD] = known[stream, k.LENGTH] = end
        end += many[stream]
    for i in range(first, last):
        stream = requests.routed[i]
        requests.by_stream[known[stream, k.LENGTH]] = requests.time[i]
        known[stream, k.LENGTH] += 1


@part
def _serve(machine, until, models, terms, served, state, log, heads, tables, requests, no_more):
    """Let a machine serve until then; whether it came so far."""
    a, b = tables.begin[machine], tables.begin[machine + 1]
    clocks = state.clocks[machine]
    if a == b:
        return True
    its = k.LoopState(
        clocks, state.before[machine], state.peak[machine], state.queue[a:b], state.late[a:b], state.returning[a:b],
        state.rings[a:b], state.streams[a:b], state.jobs[a:b], state.members[a:b], state.counts[a:b], state.histogram,
        state.segments, state.speeds, state.unseen, state.patience[a:b],
    )  # fmt: skip
    by = k.LoopRules(
        served.device, served.policy, served.late, served.refills, served.strict, served.by_deadline,
        served.late_gives_way, served.foresight, served.stretch, served.failsafe, served.margin, served.patience,
        tables.buffer[machine], tables.largest[machine], served.lanes, served.cores, served.least_speed,
        served.abort_from, served.abort, served.step, served.hand_overs, served.warm, served.end,
    )  # fmt: skip
    written = k.LoopLog(log.issues[machine], log.answers[machine])
    none = requests.by_stream[:0]
    coming = k.LoopArrivals(requests.by_stream, requests.known[a:b], none, requests.known[a:b], no_more[a:b])
    done = serve_until(until, models, terms[a:b], by, its, written, heads, coming, None)
    return done or clocks[k.CHANNEL] >= until


@part
def _report(machine, now, state, terms, models, tables, how, cluster, period):
    """Report of a machine at the start of a period: the work ahead of a new request that is on time."""
    clocks, report = state.clocks[machine], cluster.reports[period % (how.lag + 1), machine]
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
                at = models.programs[job[k.PROGRAM], k.FIRST] + job[k.LAYER]
                array += tables.rest_compute[at]
                channel += tables.rest_fetch[at]
    report[WORK_ARRAY], report[WORK_CHANNEL], report[WAITING] = array, channel, waiting
    report[UP] = 1 if cluster.up[machine] else 0
