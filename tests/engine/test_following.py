"""A policy that is replaced while requests wait and run: nobody is lost, whatever the two are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.hosts import ListedFeed, Load, Order, WatchedHost, kind, loads
from weft.engine import request_engine
from weft.engine.lateness import SOFT
from weft.engine.policies import POLICIES, make_policy

SERVING = [name for name, policy in POLICIES.items() if policy.traits.serves_requests]


def served(load: Load, rules: list[tuple[str, str]], steps: int) -> tuple[ListedFeed, WatchedHost]:
    """Serve a load under policies, each with its rule for late requests: for so many steps, and the last to the end."""
    setting = load.setting
    (policy, late), *others = rules
    feed, host = ListedFeed(load.orders, load.kinds), WatchedHost(load)
    remaining = [each.remaining for each in setting.programs]
    engine, source = request_engine(make_policy(policy, setting), feed, host, remaining, late=late)
    for term in load.terms:
        source.open(term)
    for policy, late in others:
        for _ in range(steps):
            if not source.done() and not engine.step() and not source.done():
                host.idle_until(source.next_event())
        follower = make_policy(policy, setting)
        engine.follow(follower)
        source.follow(follower, late)
    engine.run()
    return feed, host


@settings(max_examples=30, deadline=None)
@given(
    loads(soft=True),
    st.lists(st.tuples(st.sampled_from(SERVING), st.sampled_from(SOFT)), min_size=2, max_size=4),
    st.integers(1, 12),
)
def test_everybody_is_served_once_under_policies_that_follow_each_other(
    load: Load, rules: list[tuple[str, str]], steps: int
) -> None:
    feed, _ = served(load, rules, steps)
    assert [[fate.what for fate in feed.fates[ticket]] for ticket in feed.tickets] == [["served"]] * len(load.orders)


@settings(max_examples=20, deadline=None)
@given(loads(), st.lists(st.tuples(st.sampled_from(SERVING), st.sampled_from(SOFT)), min_size=2, max_size=4))
def test_strict_requests_have_one_fate_each_too(load: Load, rules: list[tuple[str, str]]) -> None:
    feed, _ = served(load, rules, 3)
    assert all(len(feed.fates[ticket]) == 1 for ticket in feed.tickets)


@pytest.mark.parametrize(("policy", "order"), [("fifo", [0, 1, 2]), ("edf", [0, 2, 1])])
def test_the_policy_that_follows_decides_over_what_waits(policy: str, order: list[int]) -> None:
    load = Load((kind(10), kind(10), kind(10)), (Order(0, 0, 100), Order(1, 1, 90), Order(2, 2, 40)))
    _, host = served(load, [("fifo", "keep"), (policy, "keep")], 1)
    assert [candidate.stream for candidate in host.issues] == order


def test_a_policy_that_batches_finds_what_one_that_does_not_left_waiting() -> None:
    load = Load((kind(10, batch=4),), tuple(Order(0, 0, 100) for _ in range(5)))
    _, host = served(load, [("serial", "keep"), ("edf", "keep")], 1)
    assert [candidate.size for candidate in host.issues] == [1, 4]
