"""Punctual, worked by hand, and against every order there is: who is kept on time, who goes first, who is stopped."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.hosts import Kind, Load, Order, kind, run_load
from tests.engine.naive import program
from tests.policies.candidates import NOW, flood, head, view
from weft.base.errors import InputError
from weft.engine.policies import Candidate, Policy, Setting, make_policy
from weft.engine.policies.base import Running


def punctual(lanes: int = 1, **options: int) -> Policy:
    return make_policy("punctual", Setting((program("p", (0, 1)),), 100, lanes=lanes), {"margin": 0} | options)


def chosen(*heads: Candidate, lanes: int = 1, **options: int) -> int:
    return punctual(lanes, **options).decide(view(*heads)).candidate.stream


# Who goes


def test_the_only_one_goes():
    assert chosen(head(3, 10, 5)) == 3


def test_all_can_be_on_time_so_the_slack_is_spent_on_the_shortest():
    assert chosen(head(0, 50, 60), head(1, 5, 500)) == 1  # 5 now and 50 then is 55
    assert chosen(head(0, 50, 55), head(1, 5, 500)) == 1
    assert chosen(head(0, 50, 54), head(1, 5, 500)) == 0


def test_only_the_next_segment_has_to_fit_into_the_slack():
    long_one = head(1, 30, 500, segment=10, whole=300, layer=3, arrival=NOW - 270)
    assert chosen(head(0, 50, 60), long_one) == 1
    assert chosen(head(0, 50, 59), long_one) == 0


def test_an_urgent_one_goes_between_the_segments_of_a_long_one():
    begun = head(0, 90, 1000, segment=10, whole=100, layer=1, arrival=NOW - 10)
    assert chosen(begun, head(1, 30, 30)) == 1
    assert chosen(begun, head(1, 30, 35)) == 1
    load = Load((kind(*[10] * 10), kind(5)), (Order(0, 0, 1000), Order(1, 12, 30)))
    ran = run_load("punctual", load)
    assert ran.letters == "AaB" + "a" * 8
    assert ran.ends == [105, 25]


def test_of_two_that_cannot_both_be_on_time_the_shorter_is_kept():
    assert chosen(head(0, 30, 30), head(1, 20, 40)) == 1
    assert chosen(head(0, 20, 30), head(1, 30, 40)) == 0


def test_one_that_is_worth_more_is_kept_though_it_is_longer():
    assert chosen(head(0, 30, 30, priority=3), head(1, 20, 40)) == 0
    assert chosen(head(0, 30, 30, size=2), head(1, 20, 40)) == 0  # two requests are on time instead of one


def test_the_shortest_of_the_hopeless_goes_first_where_nobody_can_be_saved():
    load = Load((kind(50), kind(20)), (Order(0, 0, 10), Order(1, 0, 10)))
    assert run_load("punctual", load, margin=0).letters == "BA"


def test_who_has_waited_long_counts_for_more():
    fresh, old = head(0, 20, 1000), head(1, 25, 1000)
    assert chosen(fresh, old) == 0
    assert chosen(fresh, old._replace(arrival=NOW - 100)) == 1


def test_being_computed_is_not_waiting():
    fresh, begun = head(0, 20, 1000), head(1, 25, 1000, whole=125, arrival=NOW - 100)
    assert chosen(fresh, begun) == 0
    assert chosen(fresh, begun._replace(arrival=NOW - 300)) == 1


def test_the_margin_makes_remaining_times_longer():
    pair = head(0, 50, 57), head(1, 5, 500)
    assert chosen(*pair, margin=0) == 1
    assert chosen(*pair, margin=10) == 0  # 55 leave 2, and 5 do not fit


def test_several_lanes_do_more_in_the_same_time():
    pair = head(0, 30, 30), head(1, 20, 40)
    assert chosen(*pair) == 1
    assert chosen(*pair, lanes=2) == 0  # both can be on time, so the one that is due first goes


@pytest.mark.parametrize("margin", [-1, 1001])
def test_a_margin_beyond_reason_is_refused(margin):
    with pytest.raises(InputError, match=f"margin = {margin} must be from 0 to 1000 percent"):
        punctual(margin=margin)
    with pytest.raises(InputError, match="must be of the kind of its default, 10"):
        make_policy("punctual", Setting((), 100), {"margin": 0.5})


@pytest.mark.parametrize("margin", [0, 1000])
def test_the_bounds_of_the_margin_are_fine(margin):
    assert chosen(head(0, 10, 5), head(1, 10, 500), margin=margin) in (0, 1)


# As many on time as can be


def most_on_time(jobs: list[tuple[int, int]]) -> int:
    """Of (ticks, deadline), in the best of all orders."""
    best = 0
    for order in permutations(jobs):
        now, met = 0, 0
        for ticks, due in order:
            now += ticks
            met += now <= due
        best = max(best, met)
    return best


def on_time(jobs: list[tuple[int, int]]) -> int:
    orders = tuple(Order(stream, 0, due) for stream, (_, due) in enumerate(jobs))
    return run_load("punctual", Load(tuple(kind(ticks) for ticks, _ in jobs), orders), margin=0).on_time


def test_moore_and_hodgsons_own_kind_of_case():
    # by deadline: 4, 3, 5 end at 4, 7, 12; the second would be late, so the longest so far goes
    assert on_time([(4, 4), (3, 6), (5, 8)]) == 2 == most_on_time([(4, 4), (3, 6), (5, 8)])


def test_one_that_was_given_up_does_not_cost_another_its_deadline():
    # 3 and 5 end at 3 and 8; the one of 4 was left out for that, and must not come between them
    assert most_on_time([(4, 4), (3, 3), (5, 8)]) == 2
    assert on_time([(4, 4), (3, 3), (5, 8)]) == 2


def test_one_that_was_hopeless_from_the_start_does_not_either():
    assert on_time([(5, 4), (6, 9)]) == 1


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(4, 12), st.integers(1, 70)), min_size=1, max_size=6))
def test_no_order_has_more_of_them_on_time(jobs):
    assert on_time(jobs) == most_on_time(jobs)


# Nobody starves


def lone_end(long_one: tuple[int, ...], *, load: float, priority: int = 1, **case: int) -> int:
    """When a long request, due long before it can be done, is answered beside a flood of short urgent ones."""
    orders = [*flood(load, ticks=10, requests=3000, priority=priority, **case), Order(1, 50, 60)]
    ran = run_load("punctual", Load((kind(10), kind(*long_one)), tuple(orders)))
    (end,) = (end for end, ticket in zip(ran.ends, ran.feed.tickets, strict=True) if ticket.stream == 1)
    return end


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("long_one", [(200,), (20,) * 10], ids=["whole", "segments"])
def test_a_late_one_is_served_beside_a_flood_that_leaves_a_twentieth_of_the_lane(long_one, seed):
    # with only what the flood leaves it, it would take twenty times its length on average
    assert lone_end(long_one, load=0.95, allowed=40, seed=seed) < 50 + 100 * 200


@pytest.mark.parametrize("long_one", [(200,), (20,) * 10], ids=["whole", "segments"])
def test_not_even_a_flood_that_leaves_nothing_keeps_it_away(long_one):
    assert lone_end(long_one, load=1.1, allowed=40) < 3000 * 10


def test_a_low_priority_waits_longer_and_still_not_for_ever():
    low, level = (lone_end((200,), load=0.95, allowed=40, priority=priority) for priority in (9, 1))
    assert level <= low < 50 + 100 * 200


def test_all_of_many_late_ones_are_served_in_bounded_time():
    shorts = flood(0.75, ticks=10, allowed=30, requests=4000)
    longs = [Order(1, at, at + 50) for at in range(0, 40_000, 1000)]  # a fifth of the lane
    ran = run_load("punctual", Load((kind(10), kind(*[20] * 10)), (*shorts, *longs)))
    waits = [end - t.arrival for end, t in zip(ran.ends, ran.feed.tickets, strict=True) if t.stream == 1]
    assert len(waits) == 40
    assert max(waits) < 10_000
    met = sum(end <= t.due for end, t in zip(ran.ends, ran.feed.tickets, strict=True) if t.stream == 0)
    assert met > 0.6 * len(shorts)


# Who is stopped half-way


def stopped(*heads: Candidate, running: tuple[Running, ...], lanes: int = 1, **options: int) -> int | None:
    victim = punctual(lanes, **options).aborts(view(*heads), running)
    return None if victim is None else victim.stream


LONG = head(7, 100, 1000, arrival=NOW - 50)
AMID = (Running(LONG, 50),)


def test_a_running_segment_is_stopped_for_one_that_would_be_late_if_it_waited():
    assert stopped(head(0, 10, 59), running=AMID) == 7
    assert stopped(head(0, 10, 60), running=AMID) is None  # it can wait 50 and take 10
    assert stopped(head(0, 10, 10), running=AMID) == 7
    assert stopped(head(0, 10, 9), running=AMID) is None  # it is lost anyway


def test_not_if_that_would_make_the_other_one_late():
    tight = (Running(LONG._replace(deadline=NOW + 110), 50),)
    assert stopped(head(0, 10, 30), running=tight) == 7  # 10, and then all its 100 again
    assert stopped(head(0, 11, 30), running=tight) is None
    assert stopped(head(0, 11, 30, priority=3), running=tight) == 7


def test_the_margin_counts_for_both():
    tight = (Running(LONG._replace(deadline=NOW + 110), 50),)
    assert stopped(head(0, 10, 30), running=tight, margin=10) is None
    assert stopped(head(0, 10, 10), running=AMID, margin=10) is None


def test_the_one_that_has_lost_least_is_stopped():
    young = Running(head(8, 100, 1000, arrival=NOW - 20), 80)
    assert stopped(head(0, 10, 20), running=(*AMID, young), lanes=2) == 8


def test_nothing_is_stopped_for_nobody():
    assert stopped(head(0, 10, 900), running=AMID) is None


def test_stopping_saves_a_deadline_that_waiting_would_lose():
    load = Load((kind(100), kind(5)), (Order(0, 0, 1000), Order(1, 10, 20)), abortable=frozenset({0}))
    assert run_load("punctual", load).on_time == 2
    assert run_load("punctual", Load(load.kinds, load.orders)).on_time == 1


def test_a_lane_that_is_free_soon_makes_stopping_another_pointless():
    # lane 1 is free at 12; who comes at 10 and is due at 20 can wait for that
    kinds, orders = (kind(100), kind(12), kind(5)), (Order(0, 0, 1000), Order(1, 0, 1000), Order(2, 10, 20))
    ran = run_load("punctual", Load(kinds, orders, lanes=2, abortable=frozenset({0})))
    assert ran.on_time == 3
    assert ran.host.aborts == []


def test_one_is_stopped_for_one_and_not_another_while_that_takes_its_time():
    # from 10 on a lane is being made free, until 15; what comes at 12 is in no hurry and no reason to stop the other
    kinds = kind(100), kind(100), kind(5), kind(5)
    orders = Order(0, 0, 1000), Order(1, 0, 1000), Order(2, 10, 25), Order(3, 12, 1000)
    load = Load(kinds, orders, lanes=2, abortable=frozenset({0, 1}), abort_ticks=5)
    ran = run_load("punctual", load)
    assert ran.on_time == 4
    assert len(ran.host.aborts) == 1


def test_nothing_is_stopped_for_one_that_cannot_be_saved_on_a_single_lane():
    # its segments run one after another, however many lanes there are
    late = head(0, 30, 20, segment=15)
    running = (Running(LONG, 50), Running(LONG._replace(stream=8), 50))
    assert stopped(late, running=running, lanes=2) is None


def test_who_was_stopped_does_not_take_the_lane_back_before_the_one_it_was_stopped_for():
    load = Load((kind(100), kind(50)), (Order(0, 0, 110), Order(1, 0, 140, 9)), abortable=frozenset({0}))
    ran = run_load("punctual", load, margin=0)
    for at, _ in ran.host.aborts:
        assert next(p.candidate.stream for p in ran.host.pieces if p.begin >= at) == 1


@st.composite
def contested(draw: st.DrawFn) -> Load:
    """Few long segments that may be stopped, and short requests that may want them to be."""
    kinds = tuple(kind(draw(st.integers(20, 100))) for _ in range(2)) + tuple(
        kind(draw(st.integers(1, 30))) for _ in range(2)
    )
    one = st.builds(
        lambda stream, arrival, allowed, priority: Order(stream, arrival, arrival + allowed, priority),
        st.integers(0, 3),
        st.integers(0, 200),
        st.integers(1, 200),
        st.sampled_from([1, 3, 9]),
    )
    orders = tuple(draw(st.lists(one, min_size=2, max_size=8)))
    return Load(kinds, orders, lanes=draw(st.integers(1, 2)), abortable=frozenset({0, 1}))


@settings(max_examples=25, deadline=None)
@given(load=contested())
def test_after_stopping_somebody_else_goes(load):
    ran = run_load("punctual", load, margin=0)
    for at, victim in ran.host.aborts:
        after = [candidate for candidate, begin in ((p.candidate, p.begin) for p in ran.host.pieces) if begin == at]
        assert any((c.stream, c.query) != (victim.stream, victim.query) for c in after), (at, victim)


def test_a_long_segment_of_low_priority_is_not_stopped_for_ever():
    # a fifth of the lane is enough to keep a segment of 100 ticks from ever ending
    orders = [Order(0, 0, 100), *(Order(1, at, at + 15, 9) for at in range(20, 20_000, 50))]
    ran = run_load("punctual", Load((kind(100), kind(10)), tuple(orders), abortable=frozenset({0})))
    assert ran.ends[0] < 10_000


def test_who_goes_does_not_depend_on_the_order_of_the_candidates():
    """A late one whose renewed deadline ties with an urgent one's took the lane back that it was stopped for."""
    load = Load(
        kinds=(Kind(batches=((66,),)), Kind(batches=((32,),))),
        orders=(Order(0, 0, 1, 1, False), Order(0, 0, 1, 1, False), Order(1, 0, 64, 3, False)),
        lanes=2,
        abortable=frozenset({0, 1}),
    )
    assert len(run_load("punctual", load).host.aborts) <= 2
