"""Lanes whose device has gates: batches are started to their next exit, and leave at the next gate when revoked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.agreement import assert_same_fates, shared_loads
from tests.engine.hosts import Kind, ListedFeed, Load, Order, Ran, WatchedHost, kind, loads, run_load
from tests.engine.workloads import SERVING
from weft.devices.shares import Contention, GpuLikeness, Shares, ladder
from weft.engine import Completion, SimulatedHost, request_engine
from weft.engine.lane_plan import LanePlanner, next_gate
from weft.engine.lane_queues import BatchKey
from weft.engine.policies import ON_SHARES, POLICIES, Candidate, Policy, Setting, Start, View, make_policy
from weft.engine.policies.base import Traits
from weft.engine.simulated_host import Crowd, DrawnWork

GATED = [name for name in SERVING if POLICIES[name].traits.by_events]
"""Policies that are asked on events only."""


def gated(*kinds: Kind, orders: tuple[Order, ...], **how: object) -> Load:
    return replace(Load(kinds, orders, ahead=1, gated=True), **how)


def pieces(ran: Ran) -> list[tuple[int, int, int, int, int]]:
    """Stream, first layer, computed layers, begin and end of everything that lanes computed, in order."""
    found = [(p.candidate.stream, p.candidate.layer, p.layers or 0, p.begin, p.end) for p in ran.host.pieces]
    return sorted([each for each in found if each[2]], key=lambda each: each[3])


LONG, URGENT = kind(5, 5, 5), kind(2)


# By hand


def test_an_urgent_arrival_revokes_a_long_batch_at_the_next_gate_and_the_rest_goes_on_from_there():
    ran = run_load("edf", gated(LONG, URGENT, orders=(Order(0, 0, 100), Order(1, 6, 12))))
    assert pieces(ran) == [(0, 0, 2, 0, 10), (1, 0, 1, 10, 12), (0, 2, 1, 12, 17)]
    assert ran.letters == "ABa" and ran.ends == [17, 12]


def test_to_leave_and_to_be_launched_take_their_time():
    load = gated(LONG, URGENT, orders=(Order(0, 0, 100), Order(1, 7, 12)), launch=1, leave=2)
    # launched until 1; the gate at 11 is left until 13; then the urgent one is launched, and at last the rest
    assert pieces(run_load("edf", load)) == [(0, 0, 2, 1, 13), (1, 0, 1, 14, 16), (0, 2, 1, 17, 22)]


def test_nothing_is_revoked_where_the_policy_prefers_what_runs():
    orders = (Order(0, 0, 100), Order(1, 6, 120))
    assert pieces(run_load("edf", gated(LONG, URGENT, orders=orders))) == [(0, 0, 3, 0, 15), (1, 0, 1, 15, 17)]
    assert run_load("fifo", gated(LONG, URGENT, orders=(Order(0, 0, 100), Order(1, 6, 12)))).ends == [15, 17]


@pytest.mark.parametrize(("last", "end"), [(3, 19), (4, 20), (5, 18)])
def test_a_batch_whose_rest_is_shorter_than_leaving_and_starting_it_again_is_not_revoked(last, end):
    """It is at its gate at 12; to leave and to be launched take 2 each."""
    load = gated(kind(5, 5, last), URGENT, orders=(Order(0, 0, 100), Order(1, 8, 12)), leave=2, launch=2)
    assert run_load("edf", load).ends[1] == end


def test_a_batch_in_its_last_layer_ends_by_itself():
    ran = run_load("edf", gated(LONG, URGENT, orders=(Order(0, 0, 100), Order(1, 11, 14))))
    assert ran.ends == [15, 17] and not ran.host.aborts


def test_a_start_ends_at_an_exit_where_some_may_leave():
    net = Kind(((4, 4, 4), (4, 4, 4)), exits=(2,))
    orders = (Order(0, 0, 90, leaves=2), Order(0, 0, 90, leaves=3), Order(1, 1, 50))
    ran = run_load("fifo", gated(net, kind(1), orders=orders))  # the other was queued behind the exit
    assert pieces(ran) == [(0, 0, 2, 0, 8), (1, 0, 1, 8, 9), (0, 2, 1, 9, 13)] and sorted(ran.ends) == [8, 9, 13]


def test_a_strict_request_that_expires_while_it_runs_leaves_at_the_next_gate():
    load = gated(LONG, URGENT, orders=(Order(0, 0, 7, strict=True), Order(1, 1, 50)), late="keep")
    ran = run_load("fifo", replace(load, kinds=(kind(5, 1, 1), URGENT)))
    assert ran.fates == [("served", 7), ("served", 9)]
    slow = replace(load, orders=(Order(0, 0, 15, strict=True), Order(1, 0, 14, priority=9), Order(1, 3, 50)))
    ran = run_load("edf", slow)
    assert ran.fates[0][0] == "dropped" and ran.fates[0][1] <= 15


def test_work_that_waits_with_slack_is_begun_before_the_slack_is_lost():
    """punctual lets the quick one pass while the other can wait, and nothing happens meanwhile that could remind it."""
    quick, pressed = kind(*[1] * 20), kind(10, batch=1)
    orders = (Order(1, 0, 18), Order(0, 0, 1000, priority=9))
    ran = run_load("punctual", gated(quick, pressed, orders=orders))
    assert ran.on_time == 2 and ran.letters.startswith("A"), ran.letters


def test_a_request_that_can_only_be_on_time_because_a_batch_leaves_is_accepted():
    orders = (Order(0, 0, 1000), Order(1, 1, 8, strict=True))
    assert run_load("edf", gated(LONG, URGENT, orders=orders)).fates[1] == ("served", 7)
    assert run_load("fifo", gated(LONG, URGENT, orders=orders)).fates[1][0] == "refused"


def test_what_waits_on_a_lane_gives_way_to_what_comes_first_by_the_plan():
    three = (Order(0, 0, 100), Order(1, 1, 90), Order(2, 2, 80))
    ran = run_load("priority", gated(kind(5), kind(5), kind(5), orders=three))
    assert [stream for stream, *_ in pieces(ran)] == [0, 2, 1]


def test_the_next_batch_is_queued_shortly_before_the_end_of_the_one_that_runs():
    """Several of one model wait, of which one at a time is offered."""
    orders = tuple(Order(0, 0, 100 * MS) for _ in range(3))
    host, _ = on_gpu("streams", replace(Load((kind(MS),), orders), gated=True, launch=5))
    assert [each.times.compute_start for each in host.computed] == [5, MS + 10, 2 * MS + 15]
    submitted = [when for when, *_ in host.submitted]
    assert submitted[0] == 0 and all(MS - 300_000 <= when % MS <= MS for when in submitted[1:])


@dataclass
class Waiting:
    """A segment on a lane that has not begun."""

    candidate: Candidate
    layers: int | None
    began = None
    aborted = stoppable = False

    @property
    def batch(self) -> BatchKey:
        return self.candidate[:2]

    @property
    def compute(self) -> int:
        return self.candidate.compute

    __hash__ = object.__hash__


def test_a_batch_that_waits_behind_several_segments_without_gates_is_not_revoked_for_that():
    """One may be queued behind them, so it may also stay there."""
    setting = gated(kind(5), kind(5, 5), orders=()).setting
    without_gates, with_gates = (
        Candidate(stream, 0, 0, compute, compute, 100, program=stream) for stream, compute in ((0, 5), (1, 10))
    )
    tasks = [Waiting(without_gates, None), Waiting(without_gates._replace(query=1), None)]
    lane = SimpleNamespace(index=0, tasks=tasks, is_open=True)
    policy, planner = make_policy("edf", setting), LanePlanner()
    assert planner.plan(policy, [lane], 0).takes_more
    tasks.append(Waiting(with_gates, 2))
    plan = planner.plan(policy, [lane], 0)
    assert plan.takes_more
    plan.add(Start(with_gates))
    assert plan.settle() == ([], [])


@dataclass(frozen=True)
class FailsForTheThird(Policy):
    """The lowest stream; streams from 2 on raise."""

    def decide(self, view: View) -> Start:
        first = min(view.candidates)
        if first.stream == 2:
            raise ValueError
        return Start(first)


def test_batches_that_were_issued_before_the_policy_failed_are_submitted_and_so_they_end(monkeypatch):
    monkeypatch.setitem(POLICIES, "fails", FailsForTheThird)
    load = gated(LONG, LONG, URGENT, orders=tuple(Order(stream, 0, 100) for stream in range(3)), lanes=3)
    feed, host = ListedFeed(load.orders, load.kinds), WatchedHost(load)
    rests = [program.remaining for program in load.setting.programs]
    engine, source = request_engine(make_policy("fails", load.setting), feed, host, rests)
    for term in load.terms:
        source.open(term)
    with pytest.raises(ValueError):
        engine.run()
    assert engine.plan is None and [candidate.stream for candidate in host.issues] == [0, 1]


@pytest.mark.parametrize(
    ("done", "gate"),
    [(None, (0, 0, 9)), (0, (1, 3, 6)), (2, (1, 1, 6)), (3, (1, 0, 6)), (4, (2, 1, 4)), (9, (3, 0, 0))],
)
def test_the_next_gate_is_the_end_of_the_layer_that_is_computed(done, gate):
    (program,) = Kind(((3, 2, 4),)).programs
    assert next_gate(program, 0, 3, done) == gate


# Shares of a GPU


MS = 1_000_000
FILLS = GpuLikeness(speeds={84: 0.7, 48: 0.42}, kernel_us=40, memory=0.1)
SMALL = GpuLikeness(speeds={84: 1.0, 48: 0.97}, kernel_us=5, memory=0.05)


class GpuHost(SimulatedHost):
    """A simulated GPU that remembers what it was asked to stop, and what it computed."""

    def __init__(self, setting: Setting) -> None:
        crowd = Crowd(setting.shares, range(len(setting.programs)), lambda each: DrawnWork(0, each.compute))
        super().__init__(setting, crowd=crowd)
        self.stopped: list[tuple[int, int, int]] = []
        self.computed: list[Completion] = []
        self.submitted: list[tuple[int, Start]] = []

    def submit(self, start: Start, batch: object = None) -> None:
        self.submitted.append((self.now(), start))
        super().submit(start, batch)

    def stop(self, stream: int, query: int) -> None:
        self.stopped.append((self.now(), stream, query))
        super().stop(stream, query)

    def completions(self) -> list[Completion]:
        ended = super().completions()
        self.computed += [each for each in ended if each.layers != 0]
        return ended


def on_gpu(policy: str, load: Load, *cuts: tuple[int, int]) -> tuple[GpuHost, ListedFeed]:
    """Serve a load on lanes that are shares; every other model fills the GPU."""
    likes = [(FILLS, SMALL)[at % 2] for at, each in enumerate(load.kinds) for _ in each.batches]
    shares = Shares(132, ladder(132, cuts, streams=3), likes, Contention())
    setting = replace(load.setting, lanes=1, ahead=1, apart=False, shares=shares)
    feed, host = ListedFeed(load.orders, load.kinds), GpuHost(setting)
    rests = [program.remaining for program in setting.programs]
    engine, source = request_engine(make_policy(policy, setting), feed, host, rests, late=load.late)
    for term in load.terms:
        source.open(term)
    engine.run()
    return host, feed


def test_lanes_that_slow_each_other_down_are_planned_for_once_before_they_are_free(monkeypatch):
    times = []

    def counted(self: LanePlanner, policy: Policy, lanes: object, now: int) -> object:
        times.append(now)
        return plan(self, policy, lanes, now)

    plan = LanePlanner.plan
    monkeypatch.setattr(LanePlanner, "plan", counted)
    orders = tuple(Order(stream, 0, 900 * MS) for stream in (0, 1) for _ in range(2))
    load = replace(Load((kind(8 * MS), kind(8 * MS)), orders), gated=True)
    host, _ = on_gpu("streams", load)
    ends = sorted(each.times.compute_end for each in host.computed)
    assert ends[0] > 9 * MS, "they run beside each other"
    while_both_run = [now for now in times if 0 < now < ends[0]]
    assert 1 <= len(while_both_run) <= 4 and min(while_both_run) > ends[0] - MS


@dataclass(frozen=True)
class PairUntilOneIsAlone(Policy):
    """Streams 0 and 1 beside each other on their lanes; 1 alone while a request of stream 2 waits, which goes last."""

    traits = Traits(shares=True)

    def decide(self, view: View) -> Start | None:
        first = min(view.candidates, key=lambda head: (head.stream == 0, head.stream))
        lane = min(first.stream, 1)
        alone = first.stream == 0 and any(head.stream == 2 for head in view.heads)
        return Start(first, lane=lane) if view.lanes[lane].room and not alone else None


def test_where_one_of_a_pair_is_to_be_alone_exactly_the_other_is_revoked(monkeypatch):
    monkeypatch.setitem(POLICIES, "pair", PairUntilOneIsAlone)
    long_one, arrival = kind(*[MS // 4] * 32), 3 * MS + 7
    orders = (Order(0, 0, 500 * MS), Order(1, 0, 500 * MS), Order(2, arrival, 500 * MS))
    host, _ = on_gpu("pair", replace(Load((long_one, long_one, kind(MS)), orders), gated=True))
    assert host.stopped == [(arrival, 0, 0)]
    first, *others = [each.candidate.stream for each in host.computed]
    assert (first, sorted(others)) == (0, [0, 1, 2]), "it left at its next gate, and went on when the others had ended"


@pytest.mark.parametrize("policy", ON_SHARES)
@settings(max_examples=10, deadline=None)
@given(load=loads(soft=True, timeouts=(0,), layers=(1, 12), orders=12), costs=st.sampled_from([(0, 0), (1, 2)]))
def test_on_shares_every_layer_runs_once_and_in_order_and_no_lane_is_used_twice(policy, load, costs):
    host, feed = on_gpu(policy, replace(load, gated=True, launch=costs[0], leave=costs[1]), (84, 48))
    assert all(fate.what == "served" for fates in feed.fates.values() for fate in fates)
    layers: dict[tuple[int, int], list[int]] = {}
    for each in sorted(host.computed, key=lambda each: each.times.compute_start):
        first = each.candidate.layer
        layers.setdefault(each.candidate[:2], []).extend(range(first, first + (each.layers or 1)))
    for (stream, _), found in layers.items():
        assert found == list(range(len(load.kinds[stream].batches[0])))
    for lane in set(host.lanes_used):
        spans = sorted(
            (t.compute_start, t.compute_end) for (_, t), at in zip(host.log, host.lanes_used, strict=True) if at == lane
        )
        assert all(this[1] <= after[0] for this, after in pairwise(spans))


# Any workload


@st.composite
def gated_loads(draw: st.DrawFn) -> Load:
    load = replace(draw(loads(layers=(1, 12))), gated=True, abortable=frozenset(), abort_ticks=0)
    ahead, costs = draw(st.integers(0, 1)), st.sampled_from([0, 0, 1, 3])
    kinds = tuple(
        replace(each, exits=tuple(sorted(draw(st.sets(st.integers(1, len(each.batches[0]) - 1), max_size=2)))))
        if len(each.batches[0]) > 1
        else each
        for each in load.kinds
    )
    return replace(
        load, kinds=kinds, ahead=ahead, apart=ahead > 0 and draw(st.booleans()), launch=draw(costs), leave=draw(costs)
    )


@pytest.mark.parametrize("policy", SERVING)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(load=gated_loads())
def test_every_layer_of_every_batch_runs_once_in_order_and_every_request_is_answered(policy, load):
    ran = run_load(policy, load)
    for fates in ran.feed.fates.values():
        (fate,) = fates
        assert fate.what in ("served", "dropped", "refused")
    if POLICIES[policy].traits.refills:
        return  # batches that meet change their programs
    begins = sorted((piece.begin, piece.end) for piece in ran.host.pieces if piece.end > piece.begin)
    for begin, _ in begins:
        assert sum(one <= begin < end for one, end in begins) <= load.lanes
    served = {(t.stream, fate.query) for t, (fate,) in ran.feed.fates.items() if fate.what == "served"}
    for batch, found in ran.batches.items():
        program = load.setting.programs[found[0].candidate.program]
        assert all(piece.layers is not None for piece in found) == POLICIES[policy].traits.by_events
        computed = [piece for piece in found if piece.layers]
        for this, following in pairwise(computed):
            assert following.begin >= this.end
            assert following.candidate.layer == this.candidate.layer + this.layers
        for piece in computed:
            compute = load.setting.programs[piece.candidate.program].compute
            ticks = sum(compute[piece.candidate.layer : piece.candidate.layer + piece.layers])
            assert piece.end - piece.begin == ticks + load.leave * piece.aborted
        assert sum(piece.layers for piece in computed) <= len(program)
        if batch in served:
            assert computed[-1].candidate.layer + computed[-1].layers in (*program.exits, len(program))


@st.composite
def loads_without_ties(draw: st.DrawFn) -> Load:
    """One request in a batch, and no arrival at the instant at which anything ends."""
    load = draw(loads(timeouts=(0,), most_lanes=1, soft=True, layers=(1, 12)))
    kinds = tuple(Kind((tuple(1000 * ticks for ticks in each.batches[0]),)) for each in load.kinds)
    orders = [
        order._replace(arrival=1000 * order.arrival + number, due=1000 * order.due + number)
        for number, order in enumerate(load.orders)
    ]
    return Load(kinds, tuple(orders))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(single=loads_without_ties(), ahead=st.integers(0, 1))
def test_edf_on_gates_that_cost_nothing_serves_every_request_when_edf_does_that_is_asked_at_every_layer(single, ahead):
    """With ties and batches they differ by an instant: what is queued behind a batch that leaves begins as that has
    left, before anybody can look at what came just then; and it was formed when it was queued, not when it begins."""
    asked_at_layers = run_load("edf", single)
    on_gates = run_load("edf", replace(single, gated=True, ahead=ahead))
    assert on_gates.ends == asked_at_layers.ends


# The server


@pytest.mark.parametrize("policy", ["fifo", "edf", "priority", "punctual", "top-up"])
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=shared_loads(), lanes=st.integers(1, 2))
def test_the_server_does_on_gates_what_the_simulator_does(policy, load, lanes, monkeypatch):
    assert_same_fates(monkeypatch, policy, replace(load, lanes=lanes, ahead=1, apart=lanes > 1, gated=True))
