"""Routers: pure functions, worked by hand."""

from __future__ import annotations

import pytest

from weft.base.errors import InputError
from weft_cluster.routing.router import ROUTERS, Estimate, Replica, RoutedRequest, check_router, expected

IDLE = Estimate()
PAIR = (Replica(0, 10, 4, cumulative_share=0.5), Replica(1, 10, 4, cumulative_share=1.0))


def routed(name: str, estimates: list[Estimate], *replicas: Replica, now: int = 0, turn: int = 0, **more) -> int:
    return ROUTERS[name](estimates, RoutedRequest(replicas or PAIR, turn, **more), now)


def test_a_request_is_expected_when_the_later_resource_is_through_with_it():
    known = [Estimate(array=30, channel=50, as_of=100)]
    assert expected(known, Replica(0, 10, 4, overhead=7), 100) == 100 + 7 + max(30 + 10, 50 + 4)
    assert expected(known, Replica(0, 10, 4, overhead=7), 140) == 140 + 7 + max(0 + 10, 10 + 4)
    assert expected(known, Replica(0, 10, 4, overhead=7), 900) == 900 + 7 + max(10, 4)


def test_slack_goes_where_the_answer_comes_first_though_more_waits_there():
    busy_array, busy_channel = Estimate(array=40, waiting=1), Estimate(channel=40, waiting=9)
    computes, fetches = ((Replica(0, *work, cumulative_share=0.5), Replica(1, *work)) for work in ((20, 1), (1, 20)))
    assert routed("slack", [busy_array, busy_channel], *computes) == 1
    assert routed("slack", [busy_array, busy_channel], *fetches) == 0
    assert routed("two-choices", [busy_array, busy_channel], *computes) == 0


def test_slack_knows_slow_machines_and_long_ways():
    assert routed("slack", [IDLE, IDLE], Replica(0, 20, 8), Replica(1, 10, 4)) == 1
    assert routed("slack", [IDLE, IDLE], Replica(0, 10, 4, overhead=3), Replica(1, 10, 4, overhead=2)) == 1


def test_of_equals_slack_takes_the_next_in_turn():
    three = tuple(Replica(machine, 5, 5) for machine in range(3))
    assert [routed("slack", [IDLE] * 3, *three, turn=turn) for turn in range(5)] == [0, 1, 2, 0, 1]


def test_what_was_sent_ages_an_estimate():
    known = Estimate(array=30, channel=5, as_of=100).sent(Replica(0, 10, 4), 120)
    assert (known.array, known.channel, known.as_of, known.in_flight) == (10 + 10, 0 + 4, 120, 1)
    assert Estimate(array=3).sent(Replica(0, 10, 4), 0, gates=3).array == 3 + 30
    later = Estimate(array=30, channel=5, as_of=100).carried(compute=10, fetch=1, passed=20)
    assert (later.array, later.channel, later.as_of) == (20, 0, 120)


def test_two_choices_look_at_two_that_are_drawn():
    known = [Estimate(waiting=5), Estimate(waiting=3), Estimate(waiting=0)]
    three = tuple(Replica(machine, 5, 5, cumulative_share=(machine + 1) / 3) for machine in range(3))
    assert routed("two-choices", known, *three, draws=(0.1, 0.0)) == 1  # the first, and the first of the others
    assert routed("two-choices", known, *three, draws=(0.1, 0.9)) == 2
    assert routed("two-choices", known, *three, draws=(0.5, 0.0)) == 1  # the second; the other is worse
    flying = [Estimate(in_flight=5), Estimate(in_flight=3, waiting=9), Estimate(in_flight=0, waiting=9)]
    assert routed("two-in-flight", flying, *three, draws=(0.1, 0.0)) == 1
    aged = [Estimate(array=9), Estimate(), Estimate(array=50)]
    assert routed("two-aged", aged, *three, draws=(0.1, 0.0)) == 1
    assert routed("two-aged", aged, *three, draws=(0.1, 0.9)) == 0


@pytest.mark.parametrize("name", ["random", "round-robin"])
def test_shares_are_kept(name):
    unequal = (Replica(0, 5, 5, cumulative_share=0.7), Replica(1, 5, 5, cumulative_share=1.0))
    draws = [(number + 0.5) / 100 for number in range(100)]
    places = [routed(name, [IDLE, IDLE], *unequal, turn=turn, draws=(draw, 0)) for turn, draw in enumerate(draws)]
    assert sum(places) == pytest.approx(30, abs=1)


def test_turns_keep_shares_at_every_moment():
    thirds = tuple(Replica(machine, 5, 5, cumulative_share=(machine + 1) / 3) for machine in range(3))
    places = [routed("round-robin", [IDLE] * 3, *thirds, turn=turn) for turn in range(60)]
    for last in range(3, 60):
        assert all(abs(places[:last].count(machine) - last / 3) < 2 for machine in range(3))


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("turn", range(4))
def test_a_machine_that_is_down_gets_nothing_unless_all_are(name, turn):
    down = Estimate(up=False)
    for draws in ((0.1, 0.2), (0.9, 0.8)):
        assert routed(name, [down, Estimate(array=10**6, waiting=99)], turn=turn, draws=draws) == 1
        assert routed(name, [Estimate(array=10**6, waiting=99), down], turn=turn, draws=draws) == 0
        assert routed(name, [down, down], turn=turn, draws=draws) in (0, 1)
        assert routed(name, [down], Replica(0, 5, 5), turn=turn, draws=draws) == 0


def test_an_unknown_router_is_told_with_the_nearest_names():
    with pytest.raises(InputError, match="unknown router 'slak'; did you mean slack"):
        check_router("slak")
