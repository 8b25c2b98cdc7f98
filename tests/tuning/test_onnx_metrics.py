"""Scores of samples: worked by hand, ties and NaN included."""

from __future__ import annotations

import numpy as np
import pytest

from weft.base.errors import EvaluationError, TuneError
from weft_tune.quantised.metrics import fingerprint, make_metric

LOGITS = np.array([[3, 1, 2], [1, 3, 2], [2, 2, 1], [2, 2, 1], [0, np.nan, 1]], np.float32)
LABELS = np.array([0, 2, 0, 1, 2])


def test_the_earlier_of_equal_classes_wins_and_nan_is_wrong():
    assert make_metric("top1").scores(LOGITS, LABELS).tolist() == [1, 0, 1, 0, 0]
    assert np.argmax(LOGITS[:4], axis=1).tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize("top", [1, 5])
def test_the_best_classes_are_those_of_a_stable_sort(top):
    rng = np.random.default_rng(top)
    logits = rng.integers(0, 6, (400, 9)).astype(np.float32)  # many ties
    labels = rng.integers(0, 9, 400)
    ranks = np.argsort(-logits, axis=1, kind="stable")[:, :top]
    metric = make_metric(f"top{top}")
    assert np.array_equal(metric.scores(logits, labels), (ranks == labels[:, None]).any(axis=1))
    assert np.array_equal(metric.hardness(logits, labels) > 0, metric.scores(logits, labels) > 0)


def test_wrong_samples_are_harder_than_near_ties_and_these_than_sure_ones():
    logits = np.array([[9, 0], [1, 0], [0.1, 0], [0, 1], [np.nan, 0]], np.float32)
    assert np.argsort(make_metric("top1").hardness(logits, np.zeros(5, int))).tolist() == [4, 3, 2, 1, 0]


@pytest.mark.parametrize(("probability", "outputs"), [(False, [-1, 0, 2, 0.4]), (True, [0.1, 0.5, 0.9, 0.6])])
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_one_output_tells_two_classes_apart(probability, outputs, shape):
    metric = make_metric("top1", gives_probability=probability)
    found = np.array(outputs, np.float32).reshape(shape)
    metric.check_classes(found, np.array([0, 1, 1, 0]))
    assert metric.scores(found, np.array([0, 0, 1, 0])).tolist() == [1, 1, 1, 0]
    assert metric.scores(found, np.array([1, 1, 0, 1])).tolist() == [0, 0, 0, 1]


def test_a_model_may_name_the_class_itself():
    assert make_metric("top1").scores(np.array([1, 2, 0]), np.array([1, 0, 0])).tolist() == [1, 0, 1]


def test_labels_must_be_classes():
    with pytest.raises(TuneError, match="labels are 1 to 3, but the model has the classes 0 to 2; number them from 0"):
        make_metric("top1").check_classes(LOGITS, np.array([1, 3, 2]))
    with pytest.raises(TuneError, match="tells only 3 classes apart; use top1"):
        make_metric("top5").check_classes(LOGITS, LABELS)
    with pytest.raises(TuneError, match="shape 2x3x4, not one number per class and sample"):
        make_metric("top1").check_classes(np.zeros((2, 3, 4), np.float32), LABELS)


def test_a_function_of_the_users_own(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def near(outputs, labels):\n    return (abs(outputs[:, 0] - labels) < 1) * 0.5\n")
    metric = make_metric(f"{path}:near")
    assert metric.scores(np.array([[0.0], [5.0]]), np.array([0, 1])).tolist() == [0.5, 0.0]
    before = fingerprint(metric)
    path.write_text("def near(outputs, labels):\n    return (abs(outputs[:, 0] - labels) < 2) * 0.5\n")
    assert fingerprint(make_metric(f"{path}:near")) != before


def test_what_is_no_metric_is_refused(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("x = 1\n")
    for text, message in {
        "top3": r"unknown metric 'top3'; did you mean .*; or give your own as file\.py:function",
        "none.py:f": r"there is no file 'none\.py'",
        f"{path}:f": "has no function 'f'",
        f"{path}:x": "has no function 'x'",
    }.items():
        with pytest.raises(TuneError, match=message):
            make_metric(text)
    with pytest.raises(TuneError, match="metric 5 is no function"):
        make_metric(5)
    path.write_text("1 / 0\n")
    with pytest.raises(TuneError, match=r"importing .*mine\.py failed: ZeroDivisionError"):
        make_metric(f"{path}:f")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([0.5], "gave the shape 1 for 2 samples"),
        ([0.5, 2.0], "gave 0.5 to 2.0, must be from 0 to 1"),
        ([0, np.nan], "nan"),
        (["good", "bad"], "failed: ValueError: could not convert string to float"),
    ],
)
def test_what_a_function_gives_is_checked(given, message):
    with pytest.raises(TuneError, match=message):
        make_metric(lambda outputs, labels: np.array(given)).scores(np.zeros((2, 3)), np.zeros(2, int))


def test_a_function_that_fails_is_a_configuration_without_a_score():
    def spread(outputs, labels):
        raise ZeroDivisionError("all outputs\nare the same")

    with pytest.raises(EvaluationError, match="spread failed: ZeroDivisionError: all outputs are the same") as caught:
        make_metric(spread).scores(np.zeros((2, 3)), np.zeros(2, int))
    assert "in spread" in caught.value.output
