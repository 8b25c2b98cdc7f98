"""What every policy obeys on a host of several lanes, and queues whose waiting times are known from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.hosts import Kind, ListedFeed, Load, Order, Ran, WatchedHost, kind, loads, run_load
from tests.engine.naive import program
from tests.engine.workloads import SERVING
from weft.engine import SimulatedHost, request_engine
from weft.engine.policies import POLICIES, make_policy
from weft.engine.policies.base import NO_BUFFER, NO_DEADLINE, Candidate, Policy, Setting, Start
from weft.engine.tickets import Ticket

PROMPT = [name for name in SERVING if POLICIES[name].waits is Policy.waits]
"""Those that do not wait for a batch to be filled longer than its stream says."""

WHOLE = [name for name in SERVING if not POLICIES[name].traits.refills]
"""Those whose batches keep their requests."""

TIMED = [name for name in PROMPT if name in WHOLE and POLICIES[name].traits.batches]
"""Those that wait as long as its stream says."""


Claim = Callable[[Load, Ran], None]
CLAIMS: list[tuple[Claim, list[str]]] = []
"""What is true of every run under some policies; all look at the same runs, which take longer to make."""


def claim(policies: list[str]) -> Callable[[Claim], Claim]:
    def add(check: Claim) -> Claim:
        CLAIMS.append((check, policies))
        return check

    return add


@pytest.mark.parametrize("policy", SERVING)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(load=loads())
def test_what_is_claimed_of_every_run_is_true(policy, load):
    ran = run_load(policy, load)
    for check, policies in CLAIMS:
        if policy in policies:
            check(load, ran)
    again = run_load(policy, load)
    assert ran.host.pieces == again.host.pieces
    assert list(ran.feed.fates.values()) == list(again.feed.fates.values())


def test_there_are_policies_to_try():
    assert {"fifo", "edf", "prema", "priority", "punctual", "weft+"} <= set(SERVING)
    assert all(POLICIES[name].traits.serves_requests for name in SERVING)


# Every policy


@claim(WHOLE)
def the_segments_of_a_batch_run_once_and_in_order_never_two_at_a_time(load, ran):
    programs = load.setting.programs
    served = {(t.stream, fate.query) for t, (fate,) in ran.feed.fates.items() if fate.what == "served"}
    for batch, pieces in ran.batches.items():
        assert len({piece.candidate.program for piece in pieces}) == 1
        program = programs[pieces[0].candidate.program]
        for this, following in pairwise(pieces):
            assert following.begin >= this.end
            assert following.candidate.layer == this.candidate.layer + (not this.aborted)
        whole = [piece for piece in pieces if not piece.aborted]
        assert [piece.candidate.layer for piece in whole] == list(range(len(whole)))
        assert [piece.end - piece.begin for piece in whole] == list(program.compute[: len(whole)])
        assert (len(whole) == len(program)) == (batch in served)
    assert served <= ran.batches.keys()


@claim(SERVING)
def no_more_segments_run_at_a_time_than_there_are_lanes(load, ran):
    pieces = ran.host.pieces
    for now in {piece.begin for piece in pieces}:
        assert sum(piece.begin <= now < piece.end for piece in pieces) <= load.lanes


@claim(WHOLE)
def every_request_is_answered_once_and_with_the_end_of_its_batch(load, ran):
    assert len(ran.feed.fates) == len(load.orders)
    sizes: Counter[tuple[int, int]] = Counter()
    for ticket, fates in ran.feed.fates.items():
        (fate,) = fates
        if fate.what == "refused":
            assert ticket.strict
            assert fate.when == ticket.arrival
        elif fate.what == "dropped":
            assert ticket.strict
            assert ticket.arrival <= fate.when <= ticket.due
        else:
            assert fate.when <= ticket.due or not ticket.strict
            pieces = ran.batches[ticket.stream, fate.query]
            assert fate == ("served", pieces[-1].end, fate.query)
            assert pieces[0].begin >= ticket.arrival
            sizes[ticket.stream, fate.query] += 1
    assert len(ran.feed.ended_batches) == len(set(ran.feed.ended_batches)) == len(ran.batches)
    for batch, size in sizes.items():
        began = ran.batches[batch][0].candidate
        assert began.size >= size  # some may have been dropped on the way
        assert began.program == load.terms[batch[0]].programs + began.size - 1


@pytest.mark.parametrize("policy", PROMPT)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(load=loads(timeouts=(0,)))
def test_no_lane_is_idle_while_something_could_go(policy, load):
    ran = run_load(policy, load)
    waits = []
    for ticket, (fate,) in ran.feed.fates.items():
        pieces = ran.batches.get((ticket.stream, fate.query), [])
        waits.append((ticket.arrival, pieces[0].begin if pieces else None))
        waits += [(this.end, following.begin) for this, following in pairwise(pieces)]
    for begin, end in idle_spells(ran):
        for since, until in waits:
            assert until is None or not (since < end and begin < until), (since, until)


def idle_spells(ran: Ran) -> list[tuple[int, int]]:
    """When a lane was free, from the first request to the end of the last piece."""
    pieces = ran.host.pieces
    instants = sorted({0, *(piece.begin for piece in pieces), *(piece.end for piece in pieces)})
    return [
        (now, following)
        for now, following in pairwise(instants)
        if sum(piece.begin <= now < piece.end for piece in pieces) < ran.load.lanes
    ]


@claim(TIMED)
def a_batch_goes_when_it_is_full_or_has_waited_or_would_be_late(load, ran):
    for (stream, query), pieces in ran.batches.items():
        terms = load.terms[stream]
        members = [t for t, (fate,) in ran.feed.fates.items() if (t.stream, fate.query) == (stream, query)]
        if len(members) != pieces[0].candidate.size or len(members) == terms.max_batch:
            continue  # somebody was dropped on the way, or it was full
        late = pieces[0].candidate.deadline == NO_DEADLINE
        waited = min(ticket.arrival for ticket in members) + terms.timeout
        urgent = min(ticket.due for ticket in members) - load.setting.programs[terms.programs].remaining[0]
        assert late or pieces[0].begin >= min(waited, urgent)


def test_a_batch_is_as_old_as_the_oldest_of_its_requests():
    # at 10 stream 1 has a request from 1 that is due late, and one from 3 that is due early; stream 2 has one from 2
    kinds = kind(10), kind(5, batch=2), kind(5)
    orders = Order(0, 0, 100), Order(1, 1, 200), Order(1, 3, 150), Order(2, 2, 100)
    ran = run_load("fifo", Load(kinds, orders))
    assert ran.letters == "ABC"
    assert [c.arrival for c in ran.host.issues] == [0, 1, 2]


@pytest.mark.parametrize("policy", SERVING)
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_overload_neither_hangs_nor_loses_a_request(policy, lanes):
    kinds = (kind(20, 20, batch=3), kind(3, 3, 3), kind(60))
    orders = [Order(n % 3, 2 * n, 2 * n + (40, 25, 70)[n % 3], (1, 3, 9)[n // 3 % 3], n % 2 == 0) for n in range(150)]
    ran = run_load(policy, Load(kinds, tuple(orders), lanes=lanes, abortable=frozenset({2})))
    fates = Counter(fate.what for (fate,) in ran.feed.fates.values())
    assert fates["served"] >= 75
    assert fates["served"] + fates["dropped"] + fates["refused"] == 150
    assert fates["refused"] > 20


# The lanes themselves


def candidate(stream: int, compute: int) -> Candidate:
    return Candidate(stream, 0, 0, 0, compute, -1, program=stream)


def test_a_lane_takes_a_segment_as_soon_as_it_is_free():
    load = Load((kind(5), kind(9)), (), lanes=2, abortable=frozenset({1}), abort_ticks=2)
    host = SimulatedHost(load.setting, load.abortable_programs, load.abort_ticks)
    assert host.ready() == (0, 0, 0, ())
    host.submit(Start(candidate(0, 5)))
    assert host.ready() is not None
    host.submit(Start(candidate(1, 9)))
    assert host.ready() is None
    host.idle_until(100)
    assert host.now() == 5
    assert [done.candidate.stream for done in host.completions()] == [0]
    assert host.completions() == []
    assert host.ready() == (5, 5, 5, ())
    assert [(running.candidate.stream, running.rest) for running in host.abortable()] == [(1, 4)]
    assert host.rests() == [(candidate(1, 9), 4)]
    host.stop(1, 0)
    assert host.abortable() == ()  # not twice
    host.idle_until(100)
    (stopped,) = host.completions()
    assert (stopped.aborted, stopped.times.compute_end) == (True, 7)
    assert [done.stream for done, _ in host.log] == [0]
    host.idle_until(100)
    assert host.now() == 100


def test_a_stopped_segment_is_done_again_and_its_request_answered_once():
    # the long one runs from 0; at 10 comes one that is lost unless it goes at once
    load = Load((kind(100), kind(5)), (Order(0, 0, 1000), Order(1, 10, 20, 9)), abortable=frozenset({0}), abort_ticks=2)
    ran = run_load("punctual", load)
    assert [(p.candidate.stream, p.begin, p.end, p.aborted) for p in ran.host.pieces] == [
        (0, 0, 12, True),
        (1, 12, 17, False),
        (0, 17, 117, False),
    ]
    assert ran.ends == [117, 17]


# One lane is a queue


def naive_fifo(load: Load) -> list[tuple[int, int, int]]:
    """Whole batches by the arrival of their oldest request: stream, begin and end."""
    waiting = sorted(load.orders, key=lambda order: order.arrival)
    now, found = 0, []
    while waiting:
        now = max(now, waiting[0].arrival)
        here = [order for order in waiting if order.arrival <= now]
        stream = min(here, key=lambda order: (order.arrival, order.stream)).stream
        batches = load.kinds[stream].batches
        batch = [order for order in here if order.stream == stream][: len(batches)]
        for order in batch:
            waiting.remove(order)
        found.append((stream, now, now + sum(batches[len(batch) - 1])))
        now = found[-1][2]
    return found


@st.composite
def one_deadline_each(draw: st.DrawFn) -> Load:
    """A soft load on one lane whose streams have one deadline each, as a model's default gives."""
    load = draw(loads(timeouts=(0,), most_lanes=1, soft=True, layers=(1, 12)))
    return Load(load.kinds, tuple(order._replace(due=order.arrival + 10 * order.stream) for order in load.orders))


@settings(max_examples=30, deadline=None)
@given(load=one_deadline_each())
def test_fifo_on_one_lane_is_the_queue_everybody_knows(load):
    ran = run_load("fifo", load)
    whole = [(stream, pieces[0].begin, pieces[-1].end) for (stream, _), pieces in ran.batches.items()]
    assert sorted(whole, key=lambda batch: batch[1]) == naive_fifo(load)


def naive_edf(load: Load) -> dict[int, list[int]]:
    """One request at a time, whoever here is due first: ends by stream, in order of service."""
    waiting = sorted(load.orders, key=lambda order: order.arrival)
    now, ends = 0, {}
    while waiting:
        now = max(now, waiting[0].arrival)
        here = [order for order in waiting if order.arrival <= now]
        order = min(here, key=lambda order: (order.due, order.arrival, order.stream))
        waiting.remove(order)
        now += load.kinds[order.stream].batches[0][0]
        ends.setdefault(order.stream, []).append(now)
    return ends


@st.composite
def single_segments(draw: st.DrawFn) -> Load:
    load = draw(loads(timeouts=(0,), most_lanes=1, soft=True, layers=(1, 12)))
    return Load(tuple(Kind((each.batches[0][:1],)) for each in load.kinds), load.orders)


@settings(max_examples=30, deadline=None)
@given(load=single_segments())
def test_edf_on_one_lane_serves_whoever_is_due_first(load):
    ran = run_load("edf", load)
    ends: dict[int, list[int]] = {}
    for piece in ran.host.pieces:
        ends.setdefault(piece.candidate.stream, []).append(piece.end)
    assert ends == naive_edf(load)


# Outside truth

SERVICE = 10_000


def poisson(load: float, lanes: int, requests: int, seed: int) -> Load:
    gaps = np.random.default_rng(seed).exponential(SERVICE / load / lanes, requests)
    arrivals = np.cumsum(gaps).astype(int).tolist()
    return Load((kind(SERVICE),), tuple(Order(0, at, at + 10 * SERVICE) for at in arrivals), lanes=lanes)


def waits(ran: Ran) -> list[int]:
    return [end - ticket.arrival - SERVICE for end, ticket in zip(ran.ends, ran.feed.tickets, strict=True)]


def recursion(load: Load) -> list[int]:
    """Kiefer and Wolfowitz: every request takes the lane that is free first."""
    free, found = [0] * load.lanes, []
    for order in load.orders:
        begin = max(order.arrival, min(free))
        free[free.index(min(free))] = begin + SERVICE
        found.append(begin - order.arrival)
    return found


def test_poisson_arrivals_wait_as_long_as_in_the_queue_m_d_1():
    means = []
    for seed in range(3):
        short = poisson(0.5, 1, 2_000, seed)
        assert waits(run_load("fifo", short)) == recursion(short)
        found = recursion(poisson(0.5, 1, 20_000, seed))
        means.append(sum(found) / len(found))
    assert sum(means) / len(means) == pytest.approx(0.5 * SERVICE / (2 * (1 - 0.5)), rel=0.03)


@pytest.mark.parametrize("lanes", [2, 3])
def test_several_lanes_are_the_queue_with_as_many_servers(lanes):
    load = poisson(0.8, lanes, 2_000, 1)
    assert waits(run_load("fifo", load)) == recursion(load)
    assert sum(recursion(load)) > 0


@pytest.mark.parametrize("policy", SERVING)
def test_with_one_stream_every_policy_is_that_queue(policy):
    load = poisson(0.8, 1, 500, 2)
    assert waits(run_load(policy, load)) == recursion(load)


@pytest.mark.parametrize("policy", SERVING)
def test_evenly_spaced_arrivals_never_wait(policy):
    orders = tuple(Order(0, n * SERVICE, (n + 1) * SERVICE, strict=True) for n in range(200))
    ran = run_load(policy, Load((kind(SERVICE // 2, SERVICE // 2),), orders))
    assert ran.ends == [order.due for order in orders]


def test_the_watch_on_the_host_sees_a_run_that_stands_still():
    host = WatchedHost(Load((kind(5),), ()))
    with pytest.raises(AssertionError, match="nothing moves"):
        for _ in range(20):
            host.idle_until(0)


def test_a_segment_that_is_stopped_ends_no_later_than_it_would_have():
    load = Load((kind(5),), (), abort_ticks=20)
    host = SimulatedHost(load.setting, load.abortable_programs, load.abort_ticks)
    host.submit(Start(candidate(0, 5)))
    host.stop(0, 0)
    host.idle_until(100)
    (stopped,) = host.completions()
    assert (stopped.aborted, stopped.times.compute_end) == (True, 5)


def test_a_batch_that_expires_is_stopped_though_its_feed_knows_it_by_another_stream():
    class Elsewhere(ListedFeed):
        def dropped(self, ticket: Ticket, now: int) -> None:
            super().dropped(ticket, now)
            ticket.stream = 1

    load = Load((kind(5, 5), kind(5)), (Order(0, 0, 12, strict=True), Order(0, 0, 1000)))
    slow = replace(load, kinds=(kind(5, 50), kind(5)))
    chooser, feed, host = make_policy("fifo", load.setting), Elsewhere(load.orders), WatchedHost(slow)
    engine, source = request_engine(chooser, feed, host, [each.remaining for each in load.setting.programs])
    for term in load.terms:
        source.open(term)
    host.submit, plain = lambda start, _: plain(start._replace(candidate=_slower(start.candidate))), host.submit
    engine.run()
    assert [(when, stopped.stream) for when, stopped in host.aborts] == [(12, 0)]


def _slower(segment: Candidate) -> Candidate:
    """The second segment takes longer than anybody expects."""
    return segment._replace(compute=50) if segment.layer else segment


def test_who_starts_a_segment_sees_nothing_for_as_long_as_that_takes() -> None:
    """An end is told of after it, and time has passed."""
    programs = program("a", (0, 3)), program("b", (0, 5))
    host = SimulatedHost(Setting(programs, NO_BUFFER, lanes=2), step_ticks=4)
    host.submit(Start(Candidate(0, 0, 0, 0, 3, -1, 0)))
    assert host.now() == 4
    host.submit(Start(Candidate(1, 0, 0, 0, 5, -1, 1)))
    assert host.now() == 8
    (ended,) = host.completions()
    assert (ended.candidate.stream, ended.times.compute_start, ended.times.compute_end) == (0, 4, 7)
    host.idle_until(100)
    host.idle_until(100)
    (ended,) = host.completions()
    assert (ended.candidate.stream, ended.times.compute_end, host.now()) == (1, 13, 13)


def test_what_came_and_ended_in_a_step_is_looked_at_before_anybody_waits() -> None:
    """Waiting for something else would let time pass in which it is not seen."""
    programs = program("a", (0, 3)), program("b", (0, 50))
    host = SimulatedHost(Setting(programs, NO_BUFFER, lanes=2), step_ticks=4)
    host.submit(Start(Candidate(0, 0, 0, 0, 3, -1, 0)))
    host.submit(Start(Candidate(1, 0, 0, 0, 50, -1, 1), more=False))
    host.idle_until(100)
    assert host.now() == 8 and [each.candidate.stream for each in host.completions()] == [0]
    host.idle_until(100)
    assert host.now() == 58
