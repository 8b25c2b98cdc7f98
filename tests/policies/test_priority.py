"""Priority classes, worked by hand: who goes first, and how who waits climbs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.hosts import Load, Order, kind, run_load
from tests.engine.naive import program
from tests.policies.candidates import NOW, flood, head, view
from weft.base.errors import InputError
from weft.engine.policies import Candidate, Setting, make_policy


def chosen(*heads: Candidate, **options: int) -> int:
    policy = make_policy("priority", Setting((program("p", (0, 1)),), 100), options)
    return policy.decide(view(*heads)).candidate.stream


def test_the_highest_class_goes_first_however_late_it_is_due():
    assert chosen(head(0, 10, 20), head(1, 10, 900, priority=3), head(2, 10, 900, priority=9)) == 2
    assert chosen(head(0, 10, 20), head(1, 10, 900, priority=3)) == 1


def test_within_a_class_the_earliest_deadline_goes_first():
    assert chosen(head(0, 10, 30), head(1, 50, 29), head(2, 1, 31)) == 1


def test_of_two_that_are_due_together_the_older_goes_first():
    assert chosen(head(0, 10, 30), head(1, 10, 30, arrival=NOW - 1)) == 1


def test_who_has_waited_patience_times_its_length_is_a_class_higher():
    urgent = head(0, 10, 20, priority=3)
    patient = head(1, 10, 10, arrival=NOW - 199)
    assert chosen(urgent, patient) == 0
    assert chosen(urgent, patient._replace(arrival=NOW - 200)) == 1  # the same class, and due first
    assert chosen(urgent, patient._replace(arrival=NOW - 399, deadline=NOW + 900)) == 0
    assert chosen(urgent, patient._replace(arrival=NOW - 400, deadline=NOW + 900)) == 1


def test_long_ones_are_more_patient_than_short_ones():
    urgent = head(0, 10, 20, priority=3)
    assert chosen(urgent, head(1, 11, 10, arrival=NOW - 200)) == 0


def test_being_computed_is_not_waiting():
    urgent = head(0, 10, 20, priority=3)
    begun = head(1, 10, 10, whole=15, arrival=NOW - 300)  # 5 of the 300 were computing
    assert chosen(urgent, begun) == 0
    assert chosen(urgent, begun._replace(arrival=NOW - 305)) == 1


def test_patience_is_an_option():
    urgent, waiting = head(0, 10, 20, priority=3), head(1, 10, 10, arrival=NOW - 20)
    assert chosen(urgent, waiting) == 0
    assert chosen(urgent, waiting, patience=2) == 1


@pytest.mark.parametrize("patience", [0, -5, 1_000_001])
def test_a_patience_beyond_reason_is_refused(patience):
    with pytest.raises(InputError, match=f"patience = {patience} must be from 1 to 1000000"):
        chosen(head(0, 1, 1), patience=patience)


def test_who_waited_for_ages_is_still_ranked():
    ages = head(0, 1, 1, arrival=NOW - 10**15)
    assert chosen(ages, head(1, 1, 1, priority=9), patience=1) == 0


def test_a_higher_class_overtakes_between_segments():
    ran = run_load("priority", Load((kind(10, 10, 10), kind(5, 5)), (Order(0, 0, 50), Order(1, 12, 900, 3))))
    assert ran.letters == "AaBba"
    assert ran.ends == [40, 30]


@settings(max_examples=20, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1, 3, 9]), st.integers(1, 12), st.integers(1, 500)),
        min_size=1,
        max_size=6,
    )
)
def test_of_those_that_came_together_no_lower_class_goes_before_a_higher(jobs):
    kinds = tuple(kind(ticks) for _, ticks, _ in jobs)
    orders = tuple(Order(stream, 0, due, priority) for stream, (priority, _, due) in enumerate(jobs))
    ran = run_load("priority", Load(kinds, orders), patience=1_000_000)
    order = [(-jobs[stream][0], jobs[stream][2]) for stream, _, _ in ran.issues]
    assert order == sorted(order)


@pytest.mark.parametrize("load", [0.95, 1.1])
def test_a_low_class_is_slow_beside_a_flood_of_the_highest_but_does_not_starve(load):
    orders = [*flood(load, ticks=10, allowed=40, requests=4000, priority=9), Order(1, 50, 60)]
    cases = Load((kind(10), kind(*[20] * 5)), tuple(orders))
    ran = run_load("priority", cases, patience=5)
    (end,) = (end for end, ticket in zip(ran.ends, ran.feed.tickets, strict=True) if ticket.stream == 1)
    # after 500 ticks for each of the two classes it has climbed it competes, and after 500 more it is above them
    assert end < 50 + 4 * 500 + 5 * 100
    quick = run_load("priority", Load(cases.kinds, (*orders[:-1], Order(1, 50, 60, 9))), patience=5)
    (level,) = (end for end, ticket in zip(quick.ends, quick.feed.tickets, strict=True) if ticket.stream == 1)
    assert level <= end
