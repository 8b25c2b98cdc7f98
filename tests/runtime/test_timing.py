"""Variants that take turns, what they are measured by, and when one is called faster."""

from __future__ import annotations

import pytest

from weft.runtime.timing import CLOCK_STEP_S, TURN_S, Turns, least_seconds, measure_in_turns, time_in_turns


class Runner:
    """A clock that stands still but for runs, which take a known time each."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.order: list[str] = []

    def run(self, name: str, seconds: float) -> None:
        self.now_s += seconds
        self.order.append(name)


def test_variants_take_turns_there_and_back() -> None:
    runner = Runner()
    runs = [lambda name=name: runner.run(name, TURN_S) for name in "abc"]
    took = time_in_turns(runs, 4, lambda: runner.now_s)
    assert [each.seconds for each in took] == [pytest.approx((TURN_S,) * 4)] * 3
    assert "".join(runner.order[-12:]) == "abccbaabccba"


def test_a_turn_of_a_short_run_is_filled_with_many() -> None:
    runner = Runner()
    (took,) = time_in_turns([lambda: runner.run("a", TURN_S / 50)], 2, lambda: runner.now_s)
    assert took.median_s == pytest.approx(TURN_S / 50)
    assert len(runner.order) == 1 + 3 + 2 * 50  # to warm up, to see how long one takes, two turns


@pytest.mark.parametrize(
    ("seconds", "faster"),
    [
        ((0.9, 0.9, 0.9, 0.9), True),
        ((0.99, 0.99, 0.99, 0.99), False),  # by too little
        ((0.5, 0.5, 1.1, 1.1), False),  # in too few of the turns
        ((0.9, 0.9, 0.9, 1.1), True),
        ((1.0, 1.0, 1.0, 1.0), False),
    ],
)
def test_faster_is_by_some_and_in_most_turns(seconds: tuple[float, ...], faster: bool) -> None:
    assert Turns(seconds).faster_than(Turns((1.0,) * 4)) is faster


def test_no_round_begins_after_the_longest_time_once_there_were_the_fewest() -> None:
    calls: list[str] = []
    measures = [lambda name=name: calls.append(name) or len(calls) for name in "ab"]
    assert measure_in_turns(measures, 9, warm_ups=1, fewest=2, longest_s=-1.0) == [[3, 5], [4, 6]]
    assert "".join(calls) == "ababab"


def test_the_least_time_leaves_warm_ups_out_and_is_never_nothing() -> None:
    runner, durations = Runner(), iter([1.0, 1.0, 9.0, 4.0, 5.0])
    variants = {"parts": [lambda: runner.run("a", next(durations)), lambda: None], "still": [lambda: None]}
    seconds = least_seconds(variants, clock=lambda: runner.now_s, rounds=3, warm_ups=2)
    assert seconds == {"parts": 4.0, "still": CLOCK_STEP_S}
