"""The simulator and the server have one loop: the same classes, and the same decisions from the same requests."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import weft.engine.engine
import weft.engine.for_requests
import weft.serving.dispatch
import weft.simulation.prediction
import weft.simulation.requests
import weft.simulation.saturated
from tests.engine.agreement import FATES, TICK, assert_same_fates, scaled, served_by_machine, shared_loads
from tests.engine.hosts import Kind, Load, Machine, Order, Sent, WatchedHost, kind, run_load
from tests.engine.workloads import SERVING
from weft.base.errors import InvalidStart
from weft.engine import Arrivals, Ending, Engine, request_engine
from weft.engine.arrivals import DROPPED, REFUSED
from weft.engine.lateness import SOFT
from weft.engine.policies import POLICIES, Start, make_policy, make_request_policy
from weft.engine.steering import ExitShares, Steered, Steering
from weft.engine.tickets import WaitingLine
from weft.serving.exit_rules import EXIT

SOURCES = Path(weft.engine.engine.__file__).parents[1]


# The same objects


def test_simulator_and_server_have_the_same_loop_source_and_policies():
    for module in (weft.simulation.requests.plain, weft.simulation.prediction, weft.serving.dispatch):
        assert module.request_engine is weft.engine.for_requests.request_engine
    for module in (weft.simulation.saturated, weft.engine.for_requests):
        assert module.Engine is Engine is weft.engine.engine.Engine
    for module in (weft.simulation.requests.run, weft.serving.dispatch):
        assert module.make_request_policy is make_request_policy


def calls(path: Path, name: str) -> int:
    text = path.read_text()
    if f".{name}(" not in text:
        return 0
    tree = ast.parse(text)
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return sum(isinstance(func, ast.Attribute) and func.attr == name for func in called)


def test_nobody_but_the_loop_asks_a_policy():
    asking = {
        path.relative_to(SOURCES).as_posix(): calls(path, "decide")
        for path in SOURCES.rglob("*.py")
        if path.parent.name != "policies" and calls(path, "decide")
    }
    assert asking == {"engine/engine.py": 1}


def test_a_server_has_every_policy_by_its_name(monkeypatch):
    for name in SERVING:
        machine = Machine(monkeypatch, name)
        machine.close()
        assert type(machine.dispatcher.policy) is POLICIES[name]


# The same decisions


@pytest.mark.parametrize("policy", SERVING)
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=shared_loads())
def test_the_server_issues_answers_drops_and_refuses_what_the_simulator_does(policy, load, monkeypatch):
    assert_same_fates(monkeypatch, policy, load)


@st.composite
def crowded_loads(draw: st.DrawFn) -> Load:
    """More short segments than lanes, so that much is queued, batches meet, and some go on on another lane."""
    models = []
    for _ in range(draw(st.integers(1, 3))):
        ticks = draw(st.lists(st.integers(1, 4), min_size=2, max_size=5))
        exits = tuple(sorted(draw(st.sets(st.integers(1, len(ticks) - 1), max_size=1))))
        sizes = range(draw(st.integers(1, 4)))
        steering = Steering(0.75) if exits else None
        models.append(Kind(tuple(tuple(t + size for t in ticks) for size in sizes), 0, exits, steering, 256))
    one = st.tuples(
        st.integers(0, 12), st.integers(5, 60), st.sampled_from([1, 3]), st.booleans(), st.sampled_from([0.0, 1.0])
    )
    orders = draw(st.lists(st.tuples(st.integers(0, len(models) - 1), one), min_size=4, max_size=20))
    orders.sort(key=lambda order: order[1][0])
    numbers: dict[int, int] = {}
    for model, _ in orders:
        numbers.setdefault(model, len(numbers))
    return Load(
        tuple(models[model] for model in numbers),
        tuple(
            Order(numbers[model], at, at + allowed, priority, strict, sure=(sure,) * len(models[model].exits))
            for model, (at, allowed, priority, strict, sure) in orders
        ),
        late=draw(st.sampled_from(SOFT)),
    )


@pytest.mark.parametrize("policy", SERVING)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=shared_loads() | crowded_loads(), lanes=st.integers(1, 2))
def test_that_holds_where_lanes_take_segments_ahead(policy, load, lanes, monkeypatch):
    assert_same_fates(monkeypatch, policy, replace(load, lanes=lanes, ahead=1))


@pytest.mark.parametrize("policy", ["edf", "punctual", "top-up"])
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=shared_loads() | crowded_loads(), lanes=st.integers(1, 2))
def test_that_holds_where_several_short_segments_wait(policy, load, lanes, monkeypatch):
    monkeypatch.setattr("weft.engine.lane_queues.SHORT_TICKS", 6 * TICK)
    assert_same_fates(monkeypatch, policy, replace(load, lanes=lanes, ahead=1))


@pytest.mark.parametrize("policy", ["edf", "top-up"])
@settings(
    max_examples=18,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=crowded_loads(), ahead=st.integers(1, 2))
def test_that_holds_where_batches_meet_and_go_on_elsewhere(policy, load, ahead, monkeypatch):
    assert_same_fates(monkeypatch, policy, replace(load, lanes=2, ahead=ahead))


@pytest.mark.parametrize("policy", SERVING)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=shared_loads() | crowded_loads(), lanes=st.integers(2, 3))
def test_that_holds_where_batches_stay_on_their_lanes(policy, load, lanes, monkeypatch):
    assert_same_fates(monkeypatch, policy, replace(load, lanes=lanes, ahead=1, apart=True))


@st.composite
def uniform_loads(draw: st.DrawFn) -> Load:
    """Loads whose streams each have one deadline and one priority, as those of a workload do."""
    load = draw(shared_loads())
    allowed = [draw(st.integers(1, 150)) for _ in load.kinds]
    priorities = [draw(st.sampled_from([1, 3, 9])) for _ in load.kinds]
    strict = draw(st.booleans())
    orders = [
        order._replace(due=order.arrival + allowed[order.stream], priority=priorities[order.stream], strict=strict)
        for order in load.orders
    ]
    return replace(load, orders=tuple(sorted(orders, key=lambda order: (order.arrival, order.stream))))


def simulated_arrivals(policy: str, load: Load) -> tuple[list[tuple[int, int, int]], list[Ending]]:
    """What is issued and answered when simulated clients send the requests, as in ``weft simulate``."""
    mine = [[order for order in load.orders if order.stream == stream] for stream in range(len(load.kinds))]
    terms = [
        term._replace(deadline=orders[0].due - orders[0].arrival, priority=orders[0].priority)
        for term, orders in zip(load.terms, mine, strict=True)
    ]
    feed = Arrivals(
        terms,
        [iter([order.arrival for order in orders]) for orders in mine],
        end=0,
        strict=load.orders[0].strict,
        leaves=[iter([0] * len(orders)) if each.exits else None for each, orders in zip(load.kinds, mine, strict=True)],
        confidences=[
            iter([dict(zip(each.exits, order.sure, strict=True)) for order in orders]) if each.exits else None
            for each, orders in zip(load.kinds, mine, strict=True)
        ],
        lines=[WaitingLine(each.places) for each in load.kinds],
    )
    chooser, host = make_policy(policy, load.setting), WatchedHost(load)
    rests = [each.remaining for each in load.setting.programs]
    engine, source = request_engine(chooser, feed, host, rests, late=load.late, places=load.places)
    for term, each in zip(terms, load.kinds, strict=True):
        source.open(term, Steered(each.steering) if each.steering else None)
    engine.run()
    return [(c.stream, c.query, c.layer) for c in host.issues], feed.answers


@pytest.mark.parametrize("policy", SERVING)
@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=uniform_loads())
def test_that_holds_for_simulated_clients(policy, load, monkeypatch):
    assert_clients_alike(monkeypatch, policy, load)


def assert_clients_alike(monkeypatch: pytest.MonkeyPatch, policy: str, load: Load) -> None:
    """Simulated clients are told what those of the server are."""
    monkeypatch.setattr(ExitShares, "count_exit", lambda *_: False)
    issues, answers = simulated_arrivals(policy, scaled(load))
    machine = served_by_machine(monkeypatch, policy, load)
    assert machine.issues == issues
    assert Counter(map(tuple, answers)) == Counter(
        (order.stream, machine.start + order.arrival * TICK, *told(sent, machine, load.kinds[order.stream]))
        for order, sent in zip(load.orders, machine.sent, strict=True)
    )


def told(sent: Sent, machine: Machine, kind: Kind) -> tuple[int, int]:
    """When a request was answered, and after how many segments where it may leave early."""
    if sent.fate != "served":
        return DROPPED if FATES[sent.fate] == "dropped" else REFUSED, 0
    left = int(sent.outcome[EXIT][0]) if kind.exits else 0
    return machine.start + sent.replies[0][0], kind.exits[left - 1] if 0 < left <= len(kind.exits) else 0


def test_that_includes_segments_that_are_stopped_half_way(monkeypatch):
    load = Load((kind(100), kind(5)), (Order(0, 0, 1000), Order(1, 10, 20)), abortable=frozenset({0}))
    simulated = run_load("punctual", scaled(load))
    machine = served_by_machine(monkeypatch, "punctual", load)
    assert len(simulated.host.aborts) == 1
    assert machine.issues == simulated.issues == [(0, 0, 0), (1, 0, 0), (0, 0, 0)]
    assert [sent.end_ms for sent in machine.sent] == [115, 15]


def test_and_those_that_are_stopped_though_somebody_else_waits_already(monkeypatch):
    load = Load(
        (kind(100), kind(30), kind(5)),
        (Order(0, 0, 1000), Order(1, 4, 2000), Order(2, 10, 20)),
        abortable=frozenset({0, 1}),
    )
    simulated = run_load("punctual", scaled(load))
    machine = served_by_machine(monkeypatch, "punctual", load)
    assert machine.issues == simulated.issues
    assert machine.issues[:2] == [(0, 0, 0), (2, 0, 0)]
    assert [sent.end_ms for sent in machine.sent][2] == 15


def test_a_request_that_expires_as_another_comes_does_not_stand_in_its_way(monkeypatch):
    # until 30 the long one runs, until 40 the late one; at 36 the strict one expires and another comes
    orders = (Order(0, 0, 1000), Order(1, 12, 36, strict=True), Order(2, 14, 15), Order(1, 36, 46, strict=True))
    load = Load((kind(30), kind(5), kind(10)), orders, late="keep")
    simulated = run_load("edf", scaled(load))
    machine = served_by_machine(monkeypatch, "edf", load)
    assert [what for what, _ in simulated.fates] == ["served", "dropped", "served", "served"]
    assert [sent.fate for sent in machine.sent] == ["served", "expired", "served", "served"]


def test_of_a_batch_one_member_may_expire_on_its_way_and_the_others_go_on(monkeypatch):
    # two as a batch: 7 ms a segment, until one is due at 13; from the exit at 14 the other goes on alone
    net = Kind(((4, 4, 4), (7, 7, 7)), exits=(2,), steering=Steering(0.75))
    load = Load((net,), (Order(0, 0, 13, strict=True, sure=(0.0,)), Order(0, 0, 60, strict=True, sure=(0.0,))))
    assert run_load("fifo", load).fates == [("dropped", 13), ("served", 18)]
    assert_same_fates(monkeypatch, "fifo", load)


def test_who_expired_in_a_batch_is_not_answered_with_it(monkeypatch):
    # the batch is full at 5 and ends at 17; the first was due at 16
    load = Load((Kind(((4, 4), (6, 6)), timeout=9),), tuple(Order(0, at, at + 16, strict=True) for at in (0, 5)))
    assert sorted(simulated_arrivals("fifo", load)[1]) == [(0, 0, DROPPED, 0), (0, 5, 17, 0)]
    assert_clients_alike(monkeypatch, "fifo", load)


# The same loop at work


@pytest.fixture
def steps(monkeypatch):
    """How often each kind of executor was driven by the one loop, and how often that issued something."""
    seen: Counter[tuple[str, bool]] = Counter()
    plain = Engine.step

    def step(engine: Engine) -> bool:
        went = plain(engine)
        seen[type(engine._executor).__name__, went] += 1
        return went

    monkeypatch.setattr(Engine, "step", step)
    return seen


BUSY = Load((kind(4, 4, batch=2), kind(30)), tuple(Order(n % 2, 7 * n, 7 * n + 50) for n in range(12)))


def test_every_issue_of_either_world_is_a_step_of_the_loop(steps, monkeypatch):
    simulated = run_load("edf", scaled(BUSY))
    machine = served_by_machine(monkeypatch, "edf", BUSY)
    assert (
        steps["WatchedHost", True] == steps["LaneExecutor", True] == len(simulated.issues) == len(machine.issues) > 12
    )
    assert steps["WatchedHost", False] > 0
    assert steps["LaneExecutor", False] > 0


def test_what_changes_the_loop_changes_both_worlds(monkeypatch):
    """The loop asks ``decide`` and checks the answer; a policy that cheats is found out in both."""
    before = run_load("edf", scaled(BUSY)).issues

    class Last(POLICIES["edf"]):
        def decide(self, view):
            return Start(view.candidates[-1])

    monkeypatch.setitem(POLICIES, "edf", Last)
    changed = run_load("edf", scaled(BUSY)).issues
    assert changed != before
    assert served_by_machine(monkeypatch, "edf", BUSY).issues == changed


def test_a_policy_that_wants_no_more_is_asked_again_when_something_has_happened(monkeypatch):
    """With a lane for each, the second waits until the first has ended, and all are served."""
    load = scaled(Load((kind(4), kind(4)), (Order(0, 0, 50), Order(1, 0, 50)), lanes=2))

    def began() -> set[int]:
        return {times.compute_start for _, times in run_load("edf", load).host.log}

    assert len(began()) == 1

    class Modest(POLICIES["edf"]):
        def decide(self, view):
            return super().decide(view)._replace(more=False)

    monkeypatch.setitem(POLICIES, "edf", Modest)
    assert len(began()) == 2


def test_a_policy_that_chooses_what_is_not_on_offer_is_refused_in_both_worlds(monkeypatch):
    class Cheat(POLICIES["edf"]):
        def decide(self, view):
            return Start(view.candidates[0]._replace(layer=99))

    monkeypatch.setitem(POLICIES, "edf", Cheat)
    with pytest.raises(InvalidStart, match="Cheat chose"):
        run_load("edf", scaled(BUSY))
    machine = served_by_machine(monkeypatch, "edf", BUSY)
    assert machine.issues == []
    assert {sent.fate for sent in machine.sent} == {"internal"}
    assert "Cheat chose" in str(machine.sent[0].outcome)
