"""What no way of serving can exceed: worked by hand, and against simulation."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.machines import arrangement, asked, brief, host
from weft.planning.bounds import (
    Bound,
    blocking,
    bound_of,
    fastest_s,
    lane_factor,
    lane_speed,
    late_alone,
    least_row_s,
)
from weft.planning.choice import choose
from weft.planning.trials import OptionTrial
from weft.simulation.run_length import RunLength

__all__ = ["brief"]


def test_lanes_carry_no_more_than_fits_into_their_time():
    machine = host(a=[10.0], b=[5.0])
    question = asked(("a", 20.0, 100.0), ("b", 20.0, 100.0), limit=0.01)
    busy = 20 * 0.010 + 20 * 0.005
    assert lane_factor(question, arrangement(machine)) == pytest.approx(1 / (busy * 0.99))
    assert bound_of(question, arrangement(machine)).factor == pytest.approx(1 / (busy * 0.99))


def test_a_row_takes_least_in_the_best_batch_that_is_allowed():
    machine = host(a={1: [4.0], 2: [6.0], 4: [10.0]}).model_copy(update={"hand_over_s": (0.001,)})
    assert least_row_s(machine, "a", 1) == pytest.approx(0.005)
    assert least_row_s(machine, "a", 4) == pytest.approx(0.011 / 4)


def test_two_lanes_that_slow_each_other_down_are_less_than_two():
    assert lane_speed(host(2, a=[1.0])) == 2.0
    assert lane_speed(host(2, loss=0.25, a=[1.0])) == pytest.approx(1.5)
    assert lane_speed(host(2, loss=0.8, a=[1.0])) == 1.0  # one of them alone is faster


def test_nobody_is_answered_sooner_than_a_request_alone():
    slow = host(a=[4.0, 6.0]).model_copy(update={"hand_over_s": (0.001, 0.0005)})
    model = slow.models["a"].model_copy(update={"spread": ((1.0, 1.0), (1.5, 2.0)), "overhead_s": (0.002, 0.001)})
    machine = slow.model_copy(update={"models": {"a": model}})
    assert fastest_s(machine, "a") == pytest.approx(0.010 + 2 * 0.0005 + 0.001)
    question = asked(("a", 1.0, 15.0))
    assert late_alone(machine, question.workload.stream[0]) == 0.5  # the second run takes 18 ms
    assert bound_of(question, arrangement(machine)) == Bound(0.0, 0.5, pytest.approx(0.012 / 0.015))


def test_a_segment_on_the_only_lane_makes_others_late_whatever_the_policy():
    machine = host(long=[30.0], quick=[1.0]).model_copy(update={"abort_from_s": 1.0})
    question = asked(("long", 10.0, 200.0), ("quick", 10.0, 11.0))
    found = blocking(question, arrangement(machine))
    assert found is not None and (found.runs, found.waits, found.segment) == ("long", "quick", "s0")
    assert found.share == pytest.approx(10 * (0.030 - 0.010))
    assert bound_of(question, arrangement(machine)).missed == pytest.approx(0.2 / 1.2)
    assert blocking(question, arrangement(host(2, long=[30.0], quick=[1.0]))) is None


def test_a_segment_that_a_policy_may_stop_blocks_nobody():
    machine = host(long=[30.0], quick=[1.0])
    question = asked(("long", 10.0, 200.0), ("quick", 10.0, 11.0))
    assert blocking(question, arrangement(machine, "punctual")) is None
    assert blocking(question, arrangement(machine, "fifo")) is not None


def test_streams_without_a_rate_can_be_turned_up_without_end():
    machine, question = host(a=[1.0]), asked(("a", 1.0, 50.0))
    closed = question.workload.stream[0].model_copy(update={"arrival": "closed", "rate": None})
    workload = question.workload.model_copy(update={"stream": (closed,)})
    assert bound_of(asked(("a", 1.0, 50.0)), arrangement(machine)).factor < inf
    object.__setattr__(question, "workload", workload)
    assert bound_of(question, arrangement(machine)).factor == inf


TIMES = st.lists(st.sampled_from([0.5, 2.0, 5.0, 14.0]), min_size=1, max_size=2)


@settings(max_examples=6)
@given(
    a=TIMES,
    b=TIMES,
    saving=st.sampled_from([0.5, 0.9]),
    loss=st.sampled_from([0.0, 0.3]),
    due=st.tuples(st.sampled_from([20.0, 40.0]), st.sampled_from([30.0, 50.0])),
)
def test_what_bounds_leave_out_would_not_have_won(a, b, saving, loss, due):
    def machine(lanes: int):
        return host(lanes, loss=loss, a={1: a, 2: [2 * saving * each for each in a]}, b=b)

    question = asked(("a", 30.0, due[0]), ("b", 10.0, due[1]))
    options = [
        arrangement(machine(lanes), policy, batch)
        for lanes, policy, batch in ((2, "edf", 2), (1, "edf", 2), (1, "edf", 1), (2, "fifo", 1), (1, "fifo", 2))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.planning.trials.SHORT", RunLength(60, 15))
        chosen = choose(question, options, lambda option: 1)
        for left in chosen.left_out:
            unbounded = OptionTrial(question, left.arrangement, Bound(inf, 0.0, 0.0), 1)
            assert not unbounded.sustained(max(0, chosen.best.level() + 1)), left.why
