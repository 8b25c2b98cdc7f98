"""What a policy is asked on, where lanes start every segment and where the device has gates."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from tests.engine.hosts import MS, Load, Order, kind, run_load
from weft.engine.policies import POLICIES, Policy, Start, View
from weft.engine.policies.base import Event, EventKind

ARRIVAL, SEGMENT_END, BATCH_END, DEADLINE, REVOKED = EventKind


@dataclass(frozen=True)
class Asked(Policy):
    """Whoever is due first; remembers what it was asked on."""

    asked: list[tuple[Event, ...]] = field(default_factory=list, init=False, compare=False)

    def decide(self, view: View) -> Start:
        self.asked.append(view.events)
        return Start(min(view.candidates, key=lambda c: (c.deadline, c.arrival, c.stream)))


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(POLICIES, "asked", Asked)


LONG_AND_URGENT = Load((kind(5, 5, 5), kind(2)), (Order(0, 0, 100), Order(1, 6, 12)))


def test_a_policy_is_asked_at_the_end_of_every_segment():
    ran = run_load("asked", LONG_AND_URGENT)
    assert ran.ends == [17, 12]
    assert ran.policy.asked == [
        (Event(ARRIVAL, 0),),
        (Event(SEGMENT_END, 0, 0),),
        (Event(ARRIVAL, 1), Event(SEGMENT_END, 0, 0)),
        (Event(BATCH_END, 1, 0),),
    ]


def test_on_a_device_with_gates_it_is_asked_at_an_arrival_and_when_something_has_ended():
    ran = run_load("asked", replace(LONG_AND_URGENT, gated=True))
    assert ran.ends == [17, 12]
    assert [events for events in ran.policy.asked if events] == [
        (Event(ARRIVAL, 0),),
        (Event(ARRIVAL, 1),),
        (Event(REVOKED, 0, 0), Event(BATCH_END, 1, 0)),  # between them the lane took no more
    ]


def test_on_a_device_with_gates_it_is_not_asked_again_while_nothing_waits():
    ran = run_load("asked", Load((kind(MS, MS),), (Order(0, 0, 100 * MS),), ahead=1, gated=True))
    assert ran.policy.asked == [(Event(ARRIVAL, 0),)] and ran.ends == [2 * MS]


@pytest.mark.parametrize("gated", [False, True])
def test_who_will_be_late_is_an_event(gated):
    load = Load((kind(10), kind(10)), (Order(0, 0, 100), Order(1, 1, 5)), late="demote", gated=gated)
    ran = run_load("asked", load)
    assert ran.on_time == 1
    assert Event(DEADLINE, 1) in [event for events in ran.policy.asked for event in events]
