"""The steps of the search one by one, on scores that are plain functions of widths and biases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from weft.base.errors import EvaluationError
from weft_tune.evaluation import CallableEvaluator, Database, Evaluator, OnScore, Score, Subset
from weft_tune.judge import Judge, Point
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import FIXED, Format
from weft_tune.objective import parse_objective
from weft_tune.platform import Platform, Unbiased, parse_platform
from weft_tune.result import Phase
from weft_tune.search_space import space_of
from weft_tune.tuner import BiasRule, climb, coarse, exchange, fine, raise_biases, recover, repair, uniform_settings

NET = Network("net", (Target("small", 10, 10, 1.0, 1.0), Target("large", 1000, 10, 1.0, 1.0)))
FIXED_ONLY = parse_platform({"name": "fixed", "formats": ["FIXED 2..8"]}, "test")


def judge_of(
    score: Callable[[Configuration], float], threshold: float, platform: Platform = FIXED_ONLY, layerwise="BOTH"
) -> Judge:
    return judging(
        CallableEvaluator(lambda configuration, subset: score(configuration)), threshold, platform, layerwise
    )


def judging(evaluator: Evaluator, threshold: float, platform: Platform = FIXED_ONLY, layerwise="BOTH") -> Judge:
    measure = parse_objective("weights + activations")
    judge = Judge(
        space_of(NET, platform, layerwise), evaluator, lambda configuration: measure(NET, configuration), Database()
    )
    judge.threshold = threshold
    return judge


def uniform(judge: Judge, bits: int) -> Point:
    found = judge.scored(judge.space.uniform(lambda group: Unbiased("FIXED", bits)), "coarse")
    assert found is not None
    return found


def weight_bits(point: Point | None) -> tuple[int, int]:
    assert point is not None
    return point.configuration["small.weight"].bits, point.configuration["large.weight"].bits


def test_coarse_bisects_between_the_last_pass_and_the_first_failure():
    platform = parse_platform({"name": "any", "formats": ["FLOAT 32", "FIXED 2..32"]}, "test")
    judge = judge_of(lambda c: float(c["small.weight"].bits >= 11), 1.0, platform)
    assert weight_bits(coarse(judge)) == (11, 11)
    tried = [trial.configuration["small.weight"].bits for trial in judge.trials]
    assert tried == [32, 16, 8, 12, 10, 11]
    assert [kept.configuration["small.weight"].bits for kept in judge.path] == [32, 16, 16, 12, 11]


def test_coarse_goes_on_in_powers_of_two():
    platform = parse_platform({"name": "any", "formats": ["FLOAT 32", "FIXED 2..32", "EXP 2..9"]}, "test")
    judge = judge_of(lambda c: float(c["small.weight"].kind == "EXP" or c["small.weight"].bits >= 12), 1.0, platform)
    found = coarse(judge)
    assert found is not None and found.configuration["large.input"].kind == "EXP" and weight_bits(found) == (2, 2)


def test_coarse_without_a_passing_format():
    judge = judge_of(lambda c: 0.0, 1.0)
    assert coarse(judge) is None
    assert [setting.types[0].bits for setting in uniform_settings(judge)] == [2, 4, 8]


@pytest.mark.parametrize(("rule", "expected"), [("chapter", 5), ("keep", 2)])
def test_how_far_biases_are_raised(rule: BiasRule, expected: int):
    """Best at 2, feasible up to 5."""
    judge = judge_of(lambda c: 1.0 - 0.1 * abs(c["large.weight"].bias - 2) - 10 * (c["large.input"].bias > 0), 0.65)
    point = raise_biases(judge, uniform(judge, 4), rule)
    assert point.configuration["large.weight"] == FIXED(4, expected)


def test_repair_gives_a_narrower_width_the_bias_it_needs():
    """Below four bits the range must be a quarter."""

    def score(configuration: Configuration) -> float:
        form = configuration["large.weight"]
        return 1.0 - 0.06 * form.bias if form.bits >= 4 else 0.5 + 0.2 * min(2, form.bias)

    judge = judge_of(score, 0.9)
    start = uniform(judge, 4)
    assert weight_bits(fine(judge, start, "keep")) == (2, 4)
    found = repair(judge, start)
    assert found is not None and found.configuration["large.weight"] == FIXED(3, 2)
    assert weight_bits(fine(judge, start, "repair")) == (2, 2)


@pytest.mark.parametrize(
    ("raises", "expected", "tried"), [(0, FIXED(3, 0), {0}), (1, FIXED(3, 1), {0, 1}), (2, FIXED(4, 0), {-1, 0, 1})]
)
def test_repair_of_the_second_pass_moves_one_bias_once(raises: int, expected: Format, tried: set[int]):
    """With three bits so many raises are needed; two are one too many, and the next best group is narrowed."""

    def score(configuration: Configuration) -> float:
        form = configuration["large.weight"]
        return 1.0 if form.bits >= 4 else 0.2 * (form.bias - raises)

    judge = judge_of(score, 0.0)
    judge.phase = 4
    found = repair(judge, uniform(judge, 4))
    assert found is not None and found.configuration["large.weight"] == expected
    assert {trial.configuration["large.weight"].bias for trial in judge.trials} == tried


class Stopping:
    """Scores nothing above a half, and notes what it was asked to reach."""

    fingerprint, stops_early = "stopping", True

    def __init__(self) -> None:
        self.needed: set[float] = set()

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        self.needed.add(needed)
        return Score(0.5, exact=needed <= 0.5)

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        return [self.evaluate(each, subset) for each in configurations]

    def close(self) -> None:
        """Nothing was started."""


@pytest.mark.parametrize(("phase", "asked"), [(2, {-math.inf, math.nextafter(0.5, 1)}), (4, {0.9})])
def test_repair_of_the_second_pass_asks_only_whether_a_score_passes(phase: Phase, asked: set[float]):
    evaluator = Stopping()
    judge = judging(evaluator, 0.9)
    judge.phase = phase
    assert repair(judge, judge.point(judge.space.uniform(lambda group: Unbiased("FIXED", 3)))) is None
    assert evaluator.needed == asked


def test_exchange_takes_bits_from_what_is_large():
    def score(configuration: Configuration) -> float:
        return 1.0 - 0.01 * sum(4.0 ** (4 - configuration[f"{name}.weight"].bits) for name in ("small", "large"))

    judge = judge_of(score, 0.83)
    assert weight_bits(exchange(judge, uniform(judge, 3))) == (4, 2)
    judge.threshold = 0.9
    assert exchange(judge, uniform(judge, 3)) is None


def test_recovery_takes_the_most_accurate_step_up():
    judge = judge_of(lambda c: (c["small.weight"].bits + 2 * c["large.weight"].bits) / 24, 14 / 24)
    found = recover(judge, uniform(judge, 3).setting)
    assert weight_bits(found) == (3, 6)
    assert recover(judge, uniform(judge, 6).setting) == uniform(judge, 6)


def test_recovery_can_lower_a_bias():
    judge = judge_of(lambda c: -float(c["small.weight"].bias + 1), 0.0)
    found = recover(judge, uniform(judge, 3).setting)
    assert found is not None and found.configuration["small.weight"] == FIXED(3, -1)


def test_recovery_gives_up():
    judge = judge_of(lambda c: 0.0, math.inf)
    assert recover(judge, uniform(judge, 2).setting) is None


def test_biases_alone_can_make_the_widest_setting_pass():
    judge = judge_of(lambda c: -abs(c["large.weight"].bias - 3.0) - abs(c["small.input"].bias + 1.0), 0.0)
    found = climb(judge, uniform(judge, 8).setting)
    assert found is not None
    assert (found.configuration["large.weight"], found.configuration["small.input"]) == (FIXED(8, 3), FIXED(8, -1))
    assert climb(judge_of(lambda c: -abs(c["large.weight"].bias - 99.0), 0.0), uniform(judge, 8).setting) is None
