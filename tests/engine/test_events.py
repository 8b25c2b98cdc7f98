"""What a policy is asked on, and starts that cover a whole batch until they are revoked."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings

from tests.engine.agreement import assert_same_fates, shared_loads
from tests.engine.hosts import Kind, Load, Order, kind, run_load
from weft.engine.policies import POLICIES, Candidate, Policy, Start, View
from weft.engine.policies.base import Event, EventKind, Running

ARRIVAL, SEGMENT_END, BATCH_END, DEADLINE, REVOKED = EventKind


@dataclass(frozen=True)
class WholeBatches(Policy):
    """Whoever is due first, to the end of the batch; nothing is taken back."""

    asked: list[tuple[Event, ...]] = field(default_factory=list, init=False, compare=False)

    def decide(self, view: View) -> Start:
        self.asked.append(view.events)
        return Start(min(view.candidates, key=_urgency), to_end=True)


@dataclass(frozen=True)
class Revoking(WholeBatches):
    """The same, but who is due sooner takes the place of who is due later."""

    def aborts(self, view: View, running: tuple[Running, ...]) -> Candidate | None:
        last = max((layer.candidate for layer in running), key=_urgency)
        return last if _urgency(min(view.candidates, key=_urgency)) < _urgency(last) else None


def _urgency(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.deadline, candidate.arrival, candidate.stream


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(POLICIES, "whole", WholeBatches)
    monkeypatch.setitem(POLICIES, "revoking", Revoking)


LONG_AND_URGENT = Load((kind(5, 5, 5), kind(2)), (Order(0, 0, 100), Order(1, 6, 12)))


def test_a_batch_that_is_started_whole_goes_on_without_a_question():
    ran = run_load("whole", LONG_AND_URGENT)
    assert ran.ends == [15, 17]
    (first, second) = ran.policy.asked
    assert first == (Event(ARRIVAL, 0),)
    segments = (Event(SEGMENT_END, 0, 0),)
    assert second == (*segments, Event(ARRIVAL, 1), *segments, Event(BATCH_END, 0, 0))


def test_a_batch_that_is_revoked_ends_its_segment_and_is_asked_about_again():
    ran = run_load("revoking", LONG_AND_URGENT)
    assert ran.ends == [17, 12], "the segment that ran from 5 to 10 was not lost"
    assert [Event(REVOKED, 0, 0) in events for events in ran.policy.asked] == [False, True, False]
    assert not ran.host.aborts


def test_a_long_segment_of_it_is_stopped_half_way_where_it_can_be():
    load = Load((kind(50, 5), kind(2)), (Order(0, 0, 500), Order(1, 6, 12)), abortable=frozenset({0}))
    ran = run_load("revoking", load)
    assert ran.ends == [63, 8], "what was stopped is done again"
    assert [when for when, _ in ran.host.aborts] == [6]


def test_nobody_is_asked_to_take_back_what_was_started_by_segments():
    seen: list[tuple[Running, ...]] = []

    @dataclass(frozen=True)
    class BySegments(Revoking):
        def decide(self, view: View) -> Start:
            return super().decide(view)._replace(to_end=False)

        def aborts(self, view: View, running: tuple[Running, ...]) -> Candidate | None:
            seen.append(running)
            return super().aborts(view, running)

    POLICIES["by segments"] = BySegments
    try:
        ran = run_load("by segments", LONG_AND_URGENT)
    finally:
        del POLICIES["by segments"]
    assert ran.ends == [17, 12] and not seen


def test_who_will_be_late_is_an_event():
    load = Load((kind(10), kind(10)), (Order(0, 0, 100), Order(1, 1, 5)), late="demote")
    ran = run_load("whole", load)
    assert ran.on_time == 1
    assert Event(DEADLINE, 1) in [event for events in ran.policy.asked for event in events]


def test_a_batch_of_which_some_leave_goes_on_with_the_others():
    load = Load(
        (Kind(((4, 4), (4, 4)), exits=(1,)), kind(1)),
        (Order(0, 0, 90, leaves=1), Order(0, 0, 90, leaves=2), Order(1, 1, 5)),
    )
    ran = run_load("whole", load)
    assert sorted(ran.ends) == [4, 8, 9]


@pytest.mark.parametrize("policy", ["whole", "revoking"])
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(load=shared_loads())
def test_the_server_does_with_whole_batches_what_the_simulator_does(policy, load, monkeypatch):
    assert_same_fates(monkeypatch, policy, load)
