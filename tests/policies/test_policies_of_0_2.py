"""Policies that users wrote for 0.2 run as they are; what moved to a facet warns, and is the same.

``examples/own_policy.py`` is another one; ``tests/test_examples.py`` runs it.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import pytest

from tests.engine.hosts import Load, Order, kind, run_load
from weft.engine.policies import POLICIES, Candidate, Policy, Start, Traits, View
from weft.engine.policies.base import NO_DEADLINE

LOAD = Load(
    (kind(3, 3, batch=2), kind(5), kind(1, 1, 1, batch=3)),
    tuple(Order(at % 3, at, at + 14 + 5 * (at % 4), priority=1 + 2 * (at % 2)) for at in range(24)),
)


@dataclass(frozen=True)
class LeastSlack(Policy):
    """The least time to spare, in parts of the whole query."""

    def decide(self, view: View) -> Start:
        now = view.device.channel_free
        return Start(
            min(view.candidates, key=lambda c: ((c.deadline - now - c.remaining) // max(1, c.whole), c.stream))
        )


@dataclass(frozen=True)
class LeastServed(Policy):
    """The stream that was given least, by priority; whoever waited longest where that is equal."""

    def decide(self, view: View) -> Start:
        return Start(min(view.candidates, key=lambda c: (c.served / c.priority, c.last_issued, c.stream)))


@dataclass(frozen=True)
class FullestBatch(Policy):
    """Refills: the batch of which the most are still on time, where few wait behind it."""

    traits: ClassVar[Traits] = Traits(refills=True)

    def decide(self, view: View) -> Start:
        now = view.device.channel_free
        return Start(max(view.candidates, key=lambda c: (sum(due >= now for due in c.dues), -c.waiting, -c.stream)))


NEW = {
    LeastSlack: lambda c, now: ((c.deadline - now - c.remaining) // max(1, c.work.whole), c.stream),
    LeastServed: lambda c, now: (c.work.served / c.priority, c.last_issued, c.stream),
    FullestBatch: lambda c, now: (-sum(due >= now for due in c.refill.dues), c.refill.waiting, c.stream),
}


@pytest.mark.parametrize("policy", NEW)
def test_a_policy_of_0_2_decides_as_if_it_read_the_facets(policy, monkeypatch):
    @dataclass(frozen=True)
    class Today(Policy):
        traits: ClassVar[Traits] = policy.traits

        def decide(self, view: View) -> Start:
            now = view.device.channel_free
            return Start(min(view.candidates, key=lambda c: NEW[policy](c, now)))

    monkeypatch.setitem(POLICIES, "then", policy)
    monkeypatch.setitem(POLICIES, "now", Today)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        then = run_load("then", LOAD)
    assert {each.category for each in said} == {DeprecationWarning}
    now = run_load("now", LOAD)
    assert then.issues == now.issues and then.ends == now.ends and len(then.ends) == len(LOAD.orders)


def test_a_member_whose_facet_is_off_is_what_it_was_and_others_are_refused():
    candidate = Candidate(0, 0, 0, 1, 1, -1, 0)
    for name, value in (("dues", ()), ("waiting", 0), ("lately", 0.0), ("behind", NO_DEADLINE)):
        with pytest.warns(DeprecationWarning, match=rf"candidate\.{name} is candidate\."):
            assert getattr(candidate, name) == value
    with pytest.raises(AttributeError, match="no 'hurry'"):
        candidate.hurry  # noqa: B018


def test_a_candidate_is_small_and_features_that_are_off_are_not_seen():
    candidate = Candidate(0, 0, 0, 1, 1, -1, 0)
    facets = ("work", "home", "refill", "share")
    assert Candidate._fields[-len(facets) :] == facets and len(Candidate._fields) - len(facets) <= 12
    assert (candidate.home, candidate.refill, candidate.share) == (None, None, None)
