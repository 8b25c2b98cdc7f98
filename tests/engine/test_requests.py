"""Requests that arrive, worked by hand: batching, lateness, closed streams, and the policies that know deadlines.

A layer is (fetch, compute) in ticks; a request that finds an idle device is answered fetch + compute later.
"""

from __future__ import annotations

import pytest

from tests.engine.hosts import ListedFeed, Order
from tests.engine.naive import program
from tests.engine.workloads import Flow, case_of, flow, serve
from weft.base.errors import InputError
from weft.devices.decoupled import DeviceClocks
from weft.engine import SimulatedHost, request_engine, requests
from weft.engine.policies import Candidate, Policy, Setting, View, make_policy
from weft.engine.policies.base import NO_BUFFER, NO_DEADLINE, Work
from weft.engine.tickets import Terms
from weft.simulation.requests import estimates, request_trace, simulate_requests

DROPPED, REFUSED = -1, -2


def ends(served, stream: int = 0) -> list[tuple[int, int]]:
    """Arrival and end of a stream's requests, in the order they were answered."""
    return [(arrival, end) for owner, arrival, end, _ in served.answers if owner == stream]


# Batches


def test_a_batch_goes_when_it_is_full():
    served = serve("fifo", flow((2, 5), batch=3, arrivals=(0, 4, 6), timeout=50))
    assert [(c.program, *times) for c, times in served.log] == [(2, 6, 8, 8, 13)]
    assert ends(served) == [(0, 13), (4, 13), (6, 13)]


def test_a_batch_that_is_not_full_goes_when_its_first_request_has_waited_long_enough():
    served = serve("fifo", flow((2, 5), batch=3, arrivals=(0, 4, 11), timeout=10))
    assert [(c.program, times.fetch_start) for c, times in served.log] == [(1, 10), (0, 21)]
    assert ends(served) == [(0, 17), (4, 17), (11, 28)]


def test_without_a_timeout_a_request_goes_at_once_and_others_gather_behind_it():
    served = serve("fifo", flow((2, 5), batch=3, arrivals=(0, 1, 1)))
    assert [(c.program, *times) for c, times in served.log] == [(0, 0, 2, 2, 7), (1, 2, 4, 7, 12)]


def test_a_batch_takes_no_more_than_its_limit_and_the_rest_waits_its_own_time():
    served = serve("fifo", flow((2, 5), batch=2, arrivals=(0, 0, 3), timeout=20))
    assert [(c.program, times.fetch_start) for c, times in served.log] == [(1, 0), (0, 23)]


def test_a_batch_costs_what_its_size_costs():
    sized = Flow(([(2, 5)], [(2, 8)], [(3, 11)]), arrivals=(0, 0, 0, 30, 30), timeout=1)
    served = serve("fifo", sized)
    assert [(c.fetch, c.compute) for c in served.candidates] == [(3, 11), (2, 8)]
    assert ends(served) == [(0, 14)] * 3 + [(30, 31 + 2 + 8)] * 2


def test_the_batches_of_each_stream_are_its_own():
    served = serve("fifo", flow((2, 5), batch=2, arrivals=(0,), timeout=9), flow((1, 1), batch=2, arrivals=(1, 2)))
    assert [(c.stream, c.program) for c in served.candidates] == [(1, 2), (1, 2), (0, 0)]


# One batch at a time, and several

LONG = flow((2, 5), (2, 5), arrivals=(0,), deadline=100)
SHORT = flow((1, 1), (1, 1), arrivals=(1,), deadline=4)


def test_fifo_runs_a_batch_to_its_end_whoever_else_is_due():
    assert serve("fifo", LONG, SHORT, late="keep").letters == "AaBb"


def test_fifo_serves_by_arrival_not_by_stream():
    late_first = flow((2, 5), arrivals=(3, 4))
    early = flow((9, 5), arrivals=(0, 2))
    assert serve("fifo", late_first, early).letters == "BBAA"


def test_edf_goes_over_to_whoever_is_due_first_at_every_layer():
    assert serve("edf", LONG, SHORT, late="keep").letters == "ABba"


def test_edf_serves_the_older_of_two_that_are_due_together():
    first, second = flow((2, 5), arrivals=(1,), deadline=50), flow((2, 5), arrivals=(0,), deadline=51)
    other = flow((5, 1), arrivals=(0,), deadline=5)
    assert serve("edf", first, second, other).letters == "CBA"


@pytest.mark.parametrize("policy", ["layerweaver", "layerweaver+", "weft+", "edf", "prema", "aimt"])
def test_other_policies_have_batches_of_several_models_in_flight(policy):
    heavy = flow((1, 10), (1, 10), (1, 10), batch=2, arrivals=(0, 0, 0, 0))
    light = flow((10, 1), (8, 1), batch=2, arrivals=(1, 1, 1, 1), deadline=100)
    letters = serve(policy, heavy, light, buffer=12, late="keep").letters
    assert sorted(letters) == sorted("AaaAaaBbBb")
    assert "AaaAaa" not in letters  # somebody went between the layers of another


def test_one_batch_of_a_stream_is_under_way_at_a_time_while_it_is_on_time():
    assert serve("layerweaver", flow((1, 9), (1, 9), arrivals=(0, 0, 0)), buffer=50).letters == "AaAaAa"


# Late requests: at 22, when the channel is next free, the third request can no longer be on time and the fourth can

LATE_THIRD = flow((1, 20), arrivals=(0, 0, 0, 15), deadline=30)


def test_kept_late_requests_are_served_in_their_turn():
    assert ends(serve("fifo", LATE_THIRD, buffer=1, late="keep")) == [(0, 21), (0, 42), (0, 63), (15, 84)]


def test_demoted_requests_do_not_stand_in_the_way_of_fresh_ones_of_their_stream():
    assert ends(serve("fifo", LATE_THIRD, buffer=1, late="demote")) == [(0, 21), (0, 42), (15, 63), (0, 84)]


def test_strict_requests_that_cannot_be_on_time_are_refused_as_they_come():
    # behind 20 ticks of work, 20 of one's own end after 30; at 15 only 6 are left
    assert ends(serve("fifo", LATE_THIRD, buffer=1, late="drop")) == [(0, REFUSED), (0, REFUSED), (0, 21), (15, 42)]


def test_a_strict_request_that_ends_late_all_the_same_is_dropped_at_its_deadline():
    # 20 ticks of work by estimate, 21 with the first fetch
    late_one = flow((1, 10), (1, 10), clients=1, think=4, deadline=20)
    served = serve("fifo", late_one, buffer=1, end=50, late="drop")
    assert ends(served) == [(0, DROPPED), (24, DROPPED), (48, DROPPED)]
    assert served.letters == "AaAaAa"


def test_the_report_counts_them():
    case = case_of([LATE_THIRD], buffer=1)
    keep, demote, drop = (
        simulate_requests(case, "fifo", late=late).report.streams[0] for late in ("keep", "demote", "drop")
    )
    assert (keep.arrived, keep.completed, keep.violated, keep.dropped) == (4, 4, 3, 0)
    assert (demote.arrived, demote.completed, demote.violated, demote.dropped) == (4, 4, 3, 0)  # 15 + 30 < 63
    assert (drop.arrived, drop.completed, drop.violated, drop.dropped, drop.refused) == (4, 2, 2, 0, 2)
    assert drop.violation_rate == 0.5


def test_a_request_answered_on_its_deadline_is_in_time():
    for deadline, violated in ((21, 0), (20, 1)):
        report = simulate_requests(case_of([flow((1, 20), arrivals=(0,), deadline=deadline)]), "fifo").report
        assert report.streams[0].violated == violated


@pytest.mark.parametrize(("late", "letters"), [("keep", "AaaB"), ("demote", "AaBa"), ("drop", "B")])
def test_a_batch_that_has_become_late_makes_way(late, letters):
    # layers of A: computed from 1 to 11, from 12 to 22; at 12 the array is taken until 22, and A was due at 15
    late_one = flow((1, 10), (1, 10), (1, 10), arrivals=(0,), deadline=15)
    served = serve("fifo", late_one, flow((1, 3), arrivals=(12,)), buffer=1, late=late)
    assert served.letters == letters
    assert ends(served, 0) == [(0, {"keep": 33, "demote": 37, "drop": REFUSED}[late])]
    assert ends(served, 1) == [(12, {"keep": 37, "demote": 26, "drop": 16}[late])]


def test_a_batch_is_due_when_its_first_request_is_that_can_still_be_on_time():
    batch = Flow(([(1, 2)] * 3, [(1, 10)] * 3), arrivals=(0, 8), deadline=15, timeout=100)
    served = serve("fifo", batch, buffer=1)
    # formed at 8; the array is then taken until 19, and until 30
    assert [c.deadline for c in served.candidates] == [15, 23, NO_DEADLINE]
    assert [c.deadline for c in serve("fifo", batch, buffer=1, late="keep").candidates] == [15, 15, 15]


def test_late_requests_are_served_in_batches_when_nothing_on_time_waits():
    served = serve("fifo", Flow(([(1, 20)], [(1, 20)]), arrivals=(0, 0, 0, 0, 0, 0), deadline=20), buffer=1)
    assert ends(served) == [(0, 21), (0, 21), (0, 42), (0, 42), (0, 63), (0, 63)]
    assert [c.deadline for c in served.candidates] == [20, NO_DEADLINE, NO_DEADLINE]


def test_a_full_queue_refuses_and_counts(monkeypatch):
    monkeypatch.setattr(requests, "QUEUE_PLACES", 2)
    served = serve("fifo", flow((1, 20), arrivals=(0, 0, 0, 0, 30)), buffer=1, late="keep")
    assert ends(served) == [(0, REFUSED), (0, REFUSED), (0, 21), (0, 42), (30, 63)]
    assert served.source.queues.deepest == [2]


def test_the_place_for_late_requests_is_bounded_too(monkeypatch):
    monkeypatch.setattr(requests, "QUEUE_PLACES", 3)
    served = serve(
        "fifo", flow((1, 100), arrivals=(0, 1)), flow((1, 10), arrivals=(1, 2, 3, 4, 5, 6), deadline=5), buffer=1
    )
    # at 1 the first is late and waits; at 102 five more come, of which the queue takes three and the late ones two
    assert ends(served, 1) == [(5, REFUSED), (6, REFUSED), (4, REFUSED), (1, 213), (2, 224), (3, 235)]


def test_a_demoted_request_that_is_withdrawn_is_not_computed_and_the_others_are():
    term = Terms(0, NO_DEADLINE, 1, 0, 1)
    chooser = make_policy("fifo", Setting((program("p", (0, 10)),), NO_BUFFER, rounds=1 << 40))
    feed = ListedFeed([Order(0, 0, due) for due in (5, 6, 500)])
    host = SimulatedHost(chooser.setting)
    engine, source = request_engine(chooser, feed, host, [(10,)], late="demote")
    source.open(term)
    gone, late, fresh = feed.tickets
    assert list(source.at(20)) == []
    source.offer(DeviceClocks(20, 20))
    assert list(source.queues[0].waiting) == [fresh]
    assert source.queues.withdraw(gone) is None and gone.gone
    engine.run()
    assert {ticket: [fate.what for fate in fates] for ticket, fates in feed.fates.items()} == {
        gone: [],
        late: ["served"],
        fresh: ["served"],
    }
    assert host.now() == 20 and source.done()


def test_an_unknown_rule_for_late_requests_is_refused_with_the_nearest():
    with pytest.raises(InputError, match=r"unknown rule for late requests 'demoted'; did you mean demote\?"):
        simulate_requests(case_of([LATE_THIRD]), "fifo", late="demoted")


# Closed streams


@pytest.mark.parametrize("think", [0, 7])
@pytest.mark.parametrize("policy", ["fifo", "weft+"])
def test_a_closed_stream_keeps_its_clients_outstanding(policy, think):
    served = serve(policy, flow((2, 5), batch=2, clients=3, think=think), flow((3, 1), arrivals=(5, 50, 51)), end=200)
    mine = ends(served)
    assert all(arrival < 200 for arrival, _ in mine)
    for now in range(200):  # each client is either served or thinking
        assert sum(arrival <= now < end + think for arrival, end in mine) == 3
    assert len(mine) > 3


def test_the_client_of_a_refused_request_comes_back_too():
    # all three want the device at once
    closed = flow((1, 20), clients=3, think=5, deadline=30)
    run = simulate_requests(case_of([closed], buffer=1, end=400), "fifo", late="drop", record=True)
    fates = [end for _, _, end, _ in run.tally.answers]
    assert fates.count(REFUSED) > 5
    assert run.tally.answers[-1].arrival > 350
    assert len(fates) == run.report.streams[0].arrived


def test_who_was_served_comes_back_before_who_was_refused():
    # of two who come at once one is refused until 30; the other is served at 21, and again
    served = serve("fifo", flow((1, 20), clients=2, deadline=30), buffer=1, end=40, late="drop")
    assert ends(served)[:3] == [(0, REFUSED), (0, 21), (21, 42)]


def test_clients_whose_every_request_is_refused_rest_until_it_would_have_been_due():
    hopeless = case_of([flow((4, 20), clients=1, deadline=19)], end=100)
    for policy in ("weft+", "fifo"):
        refused = simulate_requests(hopeless, policy, late="drop").report.streams[0]
        assert (refused.arrived, refused.refused, refused.completed) == (6, 6, 0)
    assert simulate_requests(hopeless, "weft+", late="demote").report.violation_rate == 1
    just = case_of([flow((4, 20), clients=1, deadline=20)], end=100)
    assert simulate_requests(just, "weft+", late="drop").report.streams[0].arrived == 5


def test_a_closed_stream_that_is_alone_is_answered_back_to_back():
    served = serve("fifo", flow((2, 5), clients=1), end=40)
    assert ends(served) == [(7 * i, 7 * i + 7) for i in range(6)]


# What a request still needs

WORK = program("w", (4, 2), (4, 6), (1, 1))


def remaining(buffer: int, **options: bool) -> list[tuple[int, ...]]:
    case = case_of([flow((4, 2), (4, 6), (1, 1))], buffer=buffer)
    return [tuple(rest) for rest in estimates(make_policy("layerweaver+", case.setting, options))]


def test_the_approximate_rest_adds_up_the_longer_halves_of_the_layers():
    assert remaining(100) == [(4 + 6 + 1, 6 + 1, 1)]


def test_the_precise_rest_is_what_an_empty_device_takes():
    # fetched at 4, 8 and 9; computed from 4 to 6, from 8 to 14 and from 14 to 15
    assert remaining(100, precise=True) == [(15, 4 + 6 + 1, 2)]


def test_the_precise_rest_counts_waiting_for_a_full_buffer():
    # the second layer is fetched from 6 to 10 and computed to 16, the third fetched from 16 to 17
    assert remaining(4, precise=True) == [(18, 12, 2)]


# Layerweaver+

HEAVY, LIGHT = program("heavy", (10, 200)), program("light", (100, 10))
BUSY = DeviceClocks(channel_free=0, array_free=50)


def head(stream: int, fetch: int, compute: int, **known: int) -> Candidate:
    return Candidate(stream, 0, known.pop("layer", 0), fetch, compute, -1, program=stream, **known)


def chosen(policy: Policy, *heads: Candidate, device: DeviceClocks = BUSY) -> int:
    return policy.decide(View(device, heads, heads)).candidate.stream


def plus(name: str = "layerweaver+", programs=(HEAVY, LIGHT, LIGHT), **options: bool | int) -> Policy:
    return make_policy(name, Setting(programs, 100), options)


def test_layerweaver_plus_switches_exactly_when_the_urgent_request_could_no_longer_finish_in_time():
    # the second leaves less idle time and frees the array at 50 + 80; the first then needs 25 more
    woven = head(1, 10, 80, deadline=10_000)
    assert chosen(plus(), head(0, 5, 10, remaining=25, deadline=130 + 25), woven) == 1
    assert chosen(plus(), head(0, 5, 10, remaining=25, deadline=130 + 24), woven) == 0
    assert chosen(plus(), head(0, 5, 10, remaining=25, deadline=5_000), woven) == 1


def test_the_urgent_request_is_the_one_due_first_and_the_only_one_looked_at():
    woven = head(1, 10, 80, deadline=10_000)
    short = head(0, 5, 10, remaining=10, deadline=150)
    hopeless = head(2, 5, 10, remaining=500, deadline=151)
    assert chosen(plus(), hopeless, short, woven) == 1
    assert chosen(plus(), hopeless._replace(deadline=149), short, woven) == 2


def test_late_requests_have_no_deadline_to_switch_for():
    assert chosen(plus(), head(0, 5, 10, remaining=25), head(1, 10, 80)) == 1


def test_equally_idle_candidates_go_by_deadline():
    twins = [head(0, 10, 40, deadline=9_001), head(1, 10, 40, deadline=9_000)]
    assert chosen(plus(programs=(HEAVY, LIGHT)), *twins) == 1
    assert chosen(plus(programs=(HEAVY, LIGHT)), twins[0]._replace(deadline=8_999), twins[1]) == 0


@pytest.mark.parametrize("name", ["layerweaver+", "weft+"])
def test_models_on_one_side_of_the_balance_point_go_one_after_another_until_one_is_short_of_time(name):
    heads = head(0, 10, 40, arrival=8, deadline=9_000), head(1, 5, 10, arrival=7, deadline=9_001)
    policy = plus(name, programs=(LIGHT, LIGHT))
    assert chosen(policy, *heads) == 1
    assert chosen(policy, heads[0]._replace(layer=1), heads[1]) == 0  # it has begun
    assert chosen(plus(name, programs=(LIGHT, LIGHT), failsafe=False), *heads) == 0  # less idle
    short = heads[0]._replace(remaining=20, deadline=50 + 10 + 19)
    assert chosen(policy, short, heads[1]) == 0
    assert chosen(policy, short._replace(deadline=50 + 10 + 20), heads[1]) == 1


def test_layerweaver_plus_saves_a_tight_request_that_layerweaver_lets_wait():
    heavy = flow(*[(10, 2)] * 20, arrivals=(0,), deadline=10_000)
    tight = flow((1, 9), (1, 9), arrivals=(30,), deadline=40)
    by = {name: ends(serve(name, heavy, tight, buffer=60), 1) for name in ("fifo", "layerweaver+", "weft+")}
    assert by["fifo"][0][1] > 200
    assert by["layerweaver+"][0][1] <= 70
    assert by["weft+"][0][1] <= 70


# weft+


def test_weft_plus_takes_a_woven_rest_to_last_longer_than_alone():
    woven = head(1, 10, 80, deadline=10_000)
    tight = head(0, 5, 10, remaining=25)
    assert chosen(plus("weft+", stretch=200), tight._replace(deadline=130 + 50), woven) == 1
    assert chosen(plus("weft+", stretch=200), tight._replace(deadline=130 + 49), woven) == 0
    assert chosen(plus("weft+", stretch=100), tight._replace(deadline=130 + 25), woven) == 1
    assert chosen(plus("weft+", stretch=100), tight._replace(deadline=130 + 24), woven) == 0


def test_weft_plus_rescues_whoever_is_shortest_of_time_not_whoever_is_due_first():
    woven = head(1, 10, 80, deadline=10_000)
    due_first = head(0, 5, 10, remaining=30, deadline=150)  # 10 short
    shorter = head(2, 5, 10, remaining=60, deadline=160)  # 30 short
    assert chosen(plus("weft+", stretch=100), due_first, shorter, woven) == 2
    assert chosen(plus("layerweaver+"), due_first, shorter, woven) == 0


def test_weft_plus_lets_go_of_a_request_that_cannot_make_it_any_more():
    hopeless = flow((4, 2), (4, 6), (1, 1), arrivals=(3,), deadline=10)  # 11 ticks of work
    assert ends(serve("weft+", hopeless, late="drop")) == [(3, REFUSED)]
    assert serve("weft+", hopeless, late="drop").letters == ""
    assert ends(serve("layerweaver+", hopeless, late="keep")) == [(3, 18)]
    tight = flow((4, 2), (4, 6), (1, 1), arrivals=(3,), deadline=15)
    assert ends(serve("weft+", tight, late="drop")) == [(3, 18)]


def test_other_policies_let_go_of_a_request_only_when_its_deadline_has_passed():
    # 11 ticks of work by estimate; after two layers the array is taken until 17, after its deadline of 14
    hopeless = flow((4, 2), (4, 6), (1, 1), arrivals=(3,), deadline=11)
    assert serve("layerweaver+", hopeless, late="drop").letters == "Aa"


def test_weft_plus_lets_go_of_a_batch_on_its_way():
    # after its first layer the array is taken until 11; the second needs 10 more, and was due at 20
    lost = flow((1, 10), (1, 10), arrivals=(0,), deadline=20)
    assert ends(serve("weft+", lost, late="drop")) == [(0, DROPPED)]
    assert serve("weft+", lost, late="drop").letters == "A"
    assert ends(serve("weft+", flow((1, 10), (1, 10), arrivals=(0,), deadline=21), late="drop")) == [(0, 21)]


@pytest.mark.parametrize("stretch", [-1, 10_001])
def test_a_stretch_that_is_no_percentage_is_refused(stretch):
    with pytest.raises(InputError, match=f"stretch = {stretch} must be from 0 to 10000 percent"):
        plus("weft+", stretch=stretch)


# PREMA: tokens are priority x (1 + time waited / time alone)


def waiting(stream: int, whole: int, *, arrival: int = 0, remaining: int | None = None, priority: int = 1) -> Candidate:
    rest = whole if remaining is None else remaining
    return head(stream, 1, 1, arrival=arrival, remaining=rest, priority=priority)._replace(work=Work(whole))


def prema_at(now: int, *heads: Candidate) -> int:
    return chosen(plus("prema"), *heads, device=DeviceClocks(channel_free=now))


def test_prema_takes_the_shortest_rest_among_equals():
    assert prema_at(0, waiting(0, 10), waiting(1, 9)) == 1
    assert prema_at(0, waiting(0, 10), waiting(1, 10)) == 0


def test_prema_prefers_a_higher_priority_however_long():
    assert prema_at(0, waiting(0, 10), waiting(1, 500, priority=3)) == 1
    assert prema_at(0, waiting(0, 5, priority=3), waiting(1, 500, priority=9)) == 1


def test_prema_lets_a_request_that_has_waited_into_the_next_class():
    # 1 + 20/10 = 3 tokens at 20, 2.9 at 19; the other has 1 + 1/5 at most
    assert prema_at(19, waiting(0, 10), waiting(1, 5, arrival=19)) == 1
    assert prema_at(20, waiting(0, 10), waiting(1, 5, arrival=19)) == 0


def test_prema_has_a_class_of_nine_too():
    three = waiting(1, 5, arrival=80, priority=3)
    assert prema_at(80, waiting(0, 10), three) == 0  # 1 + 80/10 = 9
    assert prema_at(79, waiting(0, 10), three._replace(arrival=79)) == 1  # 8.9: both are in the class of three


def test_prema_does_not_count_being_served_as_waiting():
    begun = waiting(0, 10, remaining=4)  # 6 of 10 done
    assert prema_at(6 + 20, begun, waiting(1, 3, arrival=26)) == 0
    assert prema_at(6 + 19, begun, waiting(1, 3, arrival=25)) == 1


def test_prema_serves_the_richest_class_by_the_shortest_rest():
    richest, rich = waiting(0, 10, priority=3), waiting(1, 9, priority=3)
    assert prema_at(0, richest, rich, waiting(2, 1)) == 1


# The trace of a run


@pytest.mark.parametrize("compiled", [True, False])
def test_a_recorded_run_can_be_drawn(compiled):
    sized = Flow(([(2, 5), (1, 1)], [(3, 8), (1, 1)]), arrivals=(0, 0, 30))
    case = case_of([sized, flow((7, 1), arrivals=(4,))])
    trace = request_trace(case, simulate_requests(case, "fifo", record=True, compiled=compiled))
    spans = [(s.stream, s.query, s.layer, s.weight_bytes, round(s.fetch_start_s * 1e3)) for s in trace.spans]
    assert spans == [
        (0, 0, "b10", 3, 0),
        (0, 0, "b11", 1, 3),
        (1, 0, "b10", 7, 4),
        (0, 1, "b10", 2, 30),
        (0, 1, "b11", 1, 32),
    ]
    assert trace.settings["late"] == "weave"
