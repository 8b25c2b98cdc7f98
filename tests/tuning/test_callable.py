"""Scores from functions."""

from __future__ import annotations

import threading

import pytest

from weft.base.errors import EvaluationError, TuneError
from weft_tune.evaluation import CallableEvaluator, Evaluator, Score, Subset
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import FIXED


def of_width(bits: int) -> Configuration:
    return Configuration({"fc1.weight": FIXED(bits)})


def width(configuration: Configuration, subset: Subset) -> float:
    return configuration["fc1.weight"].bits + (0.5 if subset == "small" else 0)


def test_the_function_sees_the_configuration_and_the_subset() -> None:
    evaluator: Evaluator = CallableEvaluator(width)
    assert evaluator.evaluate(of_width(4), "full") == Score(4.0)
    assert evaluator.evaluate(of_width(4), "small") == Score(4.5)
    assert evaluator.evaluate(Configuration({}), "full") == Score(32.0)
    assert not evaluator.stops_early


def test_what_the_function_raises_becomes_an_evaluation_error_with_the_traceback() -> None:
    def broken(configuration: Configuration, subset: Subset) -> float:
        raise RuntimeError("no\nmemory")

    with pytest.raises(EvaluationError, match=r"broken failed: RuntimeError: no$") as caught:
        CallableEvaluator(broken).evaluate(of_width(4), "full")
    assert 'raise RuntimeError("no\\nmemory")' in caught.value.output


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_is_finite(value: float) -> None:
    with pytest.raises(EvaluationError, match="a score is finite"):
        CallableEvaluator(lambda configuration, subset: value).evaluate(of_width(4), "full")


@pytest.mark.parametrize("workers", [1, 3])
def test_many_keep_their_order_and_failures_their_place(workers: int) -> None:
    def picky(configuration: Configuration, subset: Subset) -> float:
        if configuration["fc1.weight"].bits == 3:
            raise ValueError("three")
        return width(configuration, subset)

    told: dict[int, Score] = {}
    evaluator = CallableEvaluator(picky, workers=workers)
    found = evaluator.evaluate_many([of_width(bits) for bits in (5, 3, 4)], "full", told.__setitem__)
    assert [each.value if isinstance(each, Score) else str(each)[-17:] for each in found] == [
        5.0,
        "ValueError: three",
        4.0,
    ]
    assert told == {0: Score(5.0), 2: Score(4.0)}


def test_workers_call_at_the_same_time() -> None:
    """Each call waits for the other; one after another they would break the barrier."""
    both = threading.Barrier(2, timeout=600)
    evaluator = CallableEvaluator(lambda configuration, subset: float(both.wait() >= 0), workers=2)
    assert evaluator.evaluate_many([of_width(2), of_width(3)], "full") == [Score(1.0), Score(1.0)]


def test_an_interrupt_is_passed_on() -> None:
    def interrupted(configuration: Configuration, subset: Subset) -> float:
        raise KeyboardInterrupt

    for workers in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            CallableEvaluator(interrupted, workers=workers).evaluate_many([of_width(2)] * 3, "full")


def test_the_fingerprint_is_the_name() -> None:
    assert CallableEvaluator(width).fingerprint == f"callable-{__name__}.width"
    assert CallableEvaluator(width, name="second").fingerprint == "callable-second"
    assert CallableEvaluator(Fine()).fingerprint == f"callable-{__name__}.Fine"


class Fine:
    def __call__(self, configuration: Configuration, subset: Subset) -> float:
        return 1.0


def test_no_worker_is_refused() -> None:
    with pytest.raises(TuneError, match="workers = 0"):
        CallableEvaluator(width, workers=0)
