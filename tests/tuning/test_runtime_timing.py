"""Variants that take turns, and when one is called faster."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weft_tune.runtime_target.layer_times import middle
from weft_tune.runtime_target.processor import described
from weft_tune.runtime_target.timing import TURN_S, Turns, in_turns


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
    took = in_turns(runs, 4, lambda: runner.now_s)
    assert [each.seconds for each in took] == [pytest.approx((TURN_S,) * 4)] * 3
    assert "".join(runner.order[-12:]) == "abccbaabccba"


def test_a_turn_of_a_short_run_is_filled_with_many() -> None:
    runner = Runner()
    (took,) = in_turns([lambda: runner.run("a", TURN_S / 50)], 2, lambda: runner.now_s)
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


def test_disturbed_runs_do_not_count() -> None:
    assert middle([3, 3, 4, 4, 3, 4, 900, 1]) == pytest.approx((3 + 3 + 4 + 4) / 4)
    assert middle([5]) == 5


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ("model name : Xeon\nflags : avx2 avx512bw avx512_vnni\n", r"Xeon, which has instructions .* \(AVX-512 VNNI\)"),
        ("model name : i7\nflags : sse avx2\n", r"i7, which has none made for 8-bit products \(AVX2\)"),
        ("Features : asimd asimddp i8mm\n", r".*, which has instructions .* \(i8mm, dot products\)"),
        ("model name : old\nflags : sse\n", "old$"),
    ],
)
def test_a_processor_is_described_by_what_the_system_says(told: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(told)
    assert re.match(words, described(tmp_path / "cpuinfo"))


def test_a_system_that_says_nothing_has_a_processor_too(tmp_path: Path) -> None:
    assert described(tmp_path / "none")
