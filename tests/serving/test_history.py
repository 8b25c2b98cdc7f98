"""The last ten minutes as the server keeps them: what a sample says, and that there are never too many."""

from __future__ import annotations

import json
import math
from typing import Any

import orjson
import pytest

from weft.serving.history import FIGURES, KEPT_SAMPLES, MOST_ANSWERS, MOST_MODELS, STEP_S, History
from weft.serving.statistics import Statistics

STEP_NS = round(STEP_S * 1e9)
MS = 1_000_000
NET = "net", "1"


def told(history: History, since_s: float = 0.0) -> dict[str, Any]:
    """The samples as a client reads them."""
    return dict(json.loads(orjson.dumps(history.samples_since(since_s))))


def answered(seen: Statistics, now_ns: int, *latencies_ms: float, met: bool | None = None) -> None:
    for latency_ms in latencies_ms:
        seen.answered(now_ns, round(latency_ms * MS), met)


def test_a_sample_says_what_came_since_the_one_before() -> None:
    history, seen = History(0), Statistics()
    answered(seen, STEP_NS // 2, 1, 2, 3, met=True)
    answered(seen, STEP_NS // 2, 10, met=False)
    seen.failed(STEP_NS // 2, 0, "queue_full", had_deadline=True)
    history.sample(STEP_NS, {NET: seen})
    answered(seen, STEP_NS + 1, 5)
    history.sample(2 * STEP_NS, {NET: seen})
    said = told(history)
    assert said["times_s"] == [STEP_S, 2 * STEP_S]
    assert said["totals"] == {
        "rate": [4 / STEP_S, 1 / STEP_S],
        "p50_ms": [2.0, 5.0],
        "p99_ms": [10.0, 5.0],
        "missed": [pytest.approx(2 / 5), None],
        "failed": [1 / STEP_S, 0.0],
    }
    assert said["models"] == [{"name": "net", "version": "1", **said["totals"]}]


def test_totals_are_over_all_models() -> None:
    history, fast, slow = History(0), Statistics(), Statistics()
    answered(fast, 1, 1, 1, 1)
    answered(slow, 1, 9)
    history.sample(STEP_NS, {("fast", "1"): fast, ("slow", "1"): slow})
    said = told(history)
    assert said["totals"]["rate"] == [4 / STEP_S]
    assert said["totals"]["p50_ms"] == [1.0]
    assert {each["name"]: each["p50_ms"] for each in said["models"]} == {"fast": [1.0], "slow": [9.0]}


def test_only_what_is_later_is_told() -> None:
    history = History(0)
    for n in range(1, 6):
        history.sample(n * STEP_NS, {})
    assert told(history, 3 * STEP_S)["times_s"] == [4 * STEP_S, 5 * STEP_S]
    assert told(history, 99.0)["totals"]["rate"] == []


def test_the_oldest_samples_make_room() -> None:
    history, seen = History(0), Statistics()
    for n in range(1, KEPT_SAMPLES + 8):
        answered(seen, n * STEP_NS, 1.0)
        history.sample(n * STEP_NS, {NET: seen})
    said = told(history)
    assert said["times_s"] == [n * STEP_S for n in range(8, KEPT_SAMPLES + 8)]
    assert [len(said["models"][0][figure]) for figure in FIGURES] == [KEPT_SAMPLES] * len(FIGURES)
    assert said["kept_s"] == STEP_S * KEPT_SAMPLES == 600


def test_a_model_that_begins_late_has_no_figures_before_that() -> None:
    history, seen = History(0), Statistics()
    history.sample(STEP_NS, {NET: seen})
    answered(seen, STEP_NS + 1, 1.0)
    for n in (2, 3):
        history.sample(n * STEP_NS, {NET: seen})
    assert told(history)["models"][0]["rate"] == [None, 1 / STEP_S, 0.0]
    assert told(history)["models"][0]["p99_ms"] == [None, 1.0, None]


def test_however_many_models_there_are_those_that_served_last_have_a_history() -> None:
    history = History(0)
    seen = {(f"m{k}", "1"): Statistics() for k in range(MOST_MODELS + 2)}
    names = list(seen)
    for n, key in enumerate(names, start=1):
        answered(seen[key], n * STEP_NS, 1.0)
        history.sample(n * STEP_NS, seen)
    assert [each["name"] for each in told(history)["models"]] == [name for name, _ in names[2:]]
    now_ns = (len(names) + 1) * STEP_NS
    for each in seen.values():
        answered(each, now_ns, 1.0)
    history.sample(now_ns, seen)
    said = told(history)
    assert len(said["models"]) == MOST_MODELS
    assert said["totals"]["rate"][-1] == len(names) / STEP_S  # those without a ring are counted all the same


def test_a_model_that_is_gone_or_new_under_its_name_is_no_trouble() -> None:
    history, seen = History(0), Statistics()
    answered(seen, 1, 1.0, 1.0, 1.0)
    history.sample(STEP_NS, {NET: seen})
    history.sample(2 * STEP_NS, {})
    assert told(history)["models"] == []
    again = Statistics()
    answered(again, 2 * STEP_NS + 1, 1.0)
    history.sample(3 * STEP_NS, {NET: again})
    assert told(history)["totals"]["rate"] == [3 / STEP_S, 0.0, 1 / STEP_S]


def test_a_model_replaced_between_two_samples_counts_from_nothing() -> None:
    history, first, second = History(0), Statistics(), Statistics()
    answered(first, 1, 1.0, 1.0, 1.0)
    history.sample(STEP_NS, {NET: first})
    answered(second, STEP_NS + 1, 1.0)
    history.sample(2 * STEP_NS, {NET: second})
    assert told(history)["totals"]["rate"] == [3 / STEP_S, 1 / STEP_S]


def test_a_clock_that_stands_still_breaks_nothing() -> None:
    history, seen = History(7), Statistics()
    answered(seen, 8, 1.0)
    history.sample(7, {NET: seen})
    assert math.isfinite(told(history)["totals"]["rate"][0])


def test_percentiles_are_those_of_the_last_answers_where_there_were_very_many() -> None:
    history, seen = History(0), Statistics()
    answered(seen, 1, *[9.0] * 100, *[1.0] * MOST_ANSWERS)
    history.sample(STEP_NS, {NET: seen})
    said = told(history)
    assert said["totals"]["p99_ms"] == [1.0] and said["totals"]["rate"] == [(MOST_ANSWERS + 100) / STEP_S]
