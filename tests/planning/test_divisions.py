"""Divisions of the cores that are not measured in full: which, and never one that may be the best."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.machines import asked, first_numbers, host
from weft.load import LoadResult
from weft.planning.divisions import MARGIN, is_clearly_worse, why_left_out
from weft.planning.survey.first_numbers import FirstNumbers, Surveyed
from weft.planning.survey.measure import ROUNDS, SlowDown, Subject, _LoadMeasurement, _Survey, agree, slow_down
from weft.planning.survey.spans import SeenSpan

QUESTION = asked(("camera", 20.0, 100.0), ("words", 5.0, 200.0))
BETTER = first_numbers(1, 2, per_s=137.0, camera=6.0, words=8.0)
FULL = [(BETTER, host(1, 2, camera=[6.0], words=[4.0, 4.0]))]
TWO_LANES = first_numbers(2, 1, per_s=94.0, camera=10.0, words=13.0)


def test_a_division_that_is_slower_and_carries_less_is_left_out_with_the_numbers_that_show_it():
    assert why_left_out(QUESTION, TWO_LANES, FULL) == (
        "94 requests/s where 1 lane x 2 threads has 137, and no model is faster; not measured further"
    )
    one_lane = first_numbers(1, 1, per_s=80.0, camera=10.0, words=13.0)
    assert why_left_out(QUESTION, one_lane, FULL).startswith("80 requests/s")
    assert why_left_out(QUESTION, TWO_LANES, []) == ""


@pytest.mark.parametrize(
    "first",
    [
        first_numbers(2, 1, per_s=130.0, camera=10.0, words=13.0),
        first_numbers(2, 1, per_s=94.0, camera=6.1, words=13.0),
        first_numbers(2, 1, per_s=94.0, batch=2, camera=10.0, words=13.0),
        TWO_LANES.model_copy(update={"too_long": 0.5}),
        TWO_LANES.model_copy(update={"per_s": {"camera": 150.0, "words": 50.0}}),
    ],
    ids=["throughput within the margin", "a time within it", "batches", "a busy machine", "throughput of one model"],
)
def test_what_is_not_clear_is_measured(first):
    assert why_left_out(QUESTION, first, FULL) == ""


@pytest.mark.parametrize(
    ("question", "left_out"),
    [
        (QUESTION, True),
        (replace(QUESTION, objective="load"), True),
        (replace(QUESTION, objective="memory"), False),
        (replace(QUESTION, objective="latency"), False),
        (replace(QUESTION, memory_bytes=2**30), True),
        (replace(QUESTION, memory_bytes=2**20), False),
        (replace(QUESTION, soonest=((0.5, 0.5), ())), False),
        (asked(("camera", 20.0, 12.5), ("words", 5.0, 200.0)), True),
        (asked(("camera", 20.0, 11.5), ("words", 5.0, 200.0)), False),
    ],
    ids=["deadlines", "load", "memory", "latency", "fits", "too large", "exits", "room", "no room"],
)
def test_only_where_the_better_division_is_as_good_for_every_request(question, left_out):
    full = [(BETTER, host(1, 2, memory_bytes=2**28, camera=[6.0], words=[4.0, 4.0]))]
    assert bool(why_left_out(question, TWO_LANES, full)) == left_out


def test_without_rates_loads_do_not_decide():
    stream = QUESTION.workload.stream[0].model_copy(update={"arrival": "closed", "rate": None, "clients": 2})
    closed = replace(QUESTION, workload=QUESTION.workload.model_copy(update={"stream": (stream,)}))
    assert not closed.has_rates and why_left_out(closed, TWO_LANES, FULL) == ""


def test_one_lane_with_longer_segments_needs_time_for_them():
    finer = first_numbers(1, 1, per_s=80.0, camera=10.0, words=13.0)
    finer = finer.model_copy(update={"longest_s": {"camera": 0.002, "words": 0.002}})
    tight = asked(("camera", 20.0, 9.0), ("words", 5.0, 200.0))
    assert why_left_out(QUESTION, finer, FULL) and not why_left_out(tight, finer, FULL)
    assert why_left_out(tight, first_numbers(1, 1, per_s=80.0, camera=10.0, words=13.0), FULL)


def test_more_lanes_of_as_many_threads_need_less_throughput_alone():
    one = first_numbers(1, 1, per_s=100.0, camera=10.0, words=10.0)
    full = [(one, host(camera=[10.0], words=[10.0]))]
    for per_s, left_out in ((85.0, True), (95.0, False)):
        two = first_numbers(2, 1, per_s=per_s, camera=10.0, words=10.0)
        assert bool(why_left_out(QUESTION, two, full)) == left_out


TIMES = st.floats(0.1, 100.0)


@given(st.lists(st.tuples(TIMES, TIMES, TIMES, TIMES), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 2))
def test_a_division_that_is_better_for_a_model_is_never_left_out(rows, lanes, threads):
    names = [f"m{place}" for place in range(len(rows))]
    shared = {"longest_s": {}, "max_batch": {}, "answered_per_s": 1.0}
    first, better = (
        FirstNumbers(
            lanes=count,
            threads=per_lane,
            alone_s={name: row[at] for name, row in zip(names, rows, strict=True)},
            per_s={name: row[at + 1] for name, row in zip(names, rows, strict=True)},
            **shared,
        )
        for at, count, per_lane in ((0, lanes, threads), (2, 2, 2))
    )
    if is_clearly_worse(first, better):
        assert lanes >= 2
        assert all(mine_per_s * (1 + MARGIN) <= per_s for _, mine_per_s, _, per_s in rows)
        assert all(alone_s >= (1 - MARGIN if threads == 2 else 1 + MARGIN) * than_s for alone_s, _, than_s, _ in rows)
    else:
        clear = all(row[0] >= 1.2 * row[2] and 1.2 * row[1] <= row[3] for row in rows)
        assert lanes < 2 or not clear


def test_rounds_agree_within_their_error_if_that_is_small():
    def rounds(one: float, other: float, error: float, b: float = 2.0) -> tuple[dict[str, SlowDown], ...]:
        return tuple({"a": SlowDown(factor, error), "b": SlowDown(b, 0.05)} for factor in (one, other))

    assert agree(*rounds(1.5, 1.65, 0.06))
    assert not agree(*rounds(1.5, 1.7, 0.06))  # further apart than by chance
    assert not agree(*rounds(1.5, 1.5, 0.15))  # not known well enough
    assert not agree(*rounds(1.5, 1.5, inf))


def test_a_slow_down_is_a_ratio_of_means_with_its_error():
    found = slow_down([2.0, 3.0, 4.0, 3.0], [1.0, 1.0])
    assert found.factor == 3.0 and found.error == pytest.approx(np.std([2, 3, 4, 3], ddof=1) / 2)
    assert slow_down([1.0], [1.0, 1.0]).error == inf


# The survey, with spans made up


SUBJECTS = (Subject("camera"), Subject("words"))


class Machine:
    """Runs every request in 10 ms, of all lanes together in more; notes what is measured and told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, slow_downs: Sequence[float] = (1.5,)) -> None:
        """slow_downs: of each round of all lanes together; the last of them goes on."""
        self.watched: list[str] = []
        self.told: list[tuple[int, int]] = []
        self.slow_downs = slow_downs
        instead = {"_server": server, "_read_profiles": learn, "_measure_load": lambda *given: self.watch(*given)}
        for name, function in instead.items():
            monkeypatch.setattr(_Survey, name, function)
        monkeypatch.setattr(_Survey, "_held_bytes", lambda *_: 2**27)

    def watch(self, survey: _Survey, _: Any, streams: Any, what: str, *seconds: float) -> _LoadMeasurement:
        survey._report_progress(what)
        survey.done += 1
        rounds = self.watched.count("2 lanes")
        self.watched.append(what)
        took_s = 0.01 * (self.slow_downs[: rounds + 1][-1] if what == "2 lanes" else 1.0)
        spans = [
            SeenSpan(lane, stream["model"], 0, 2 * query * took_s, (2 * query + 1) * took_s, 1, query)
            for lane, stream in enumerate(streams)
            for query in range(20)
        ]
        figures = SimpleNamespace(figures=SimpleNamespace(answered_per_s=50.0), latency_s=np.full(20, 0.012))
        return _LoadMeasurement(
            spans, 0.0, 100.0, cast("LoadResult", SimpleNamespace(streams=[figures] * len(streams)))
        )

    def survey(self, lanes: tuple[int, ...], left_out: Container[int] = ()) -> list[Surveyed]:
        survey = _Survey(SUBJECTS, lanes, 1, 1.0, Path(), None, lambda _, *steps: self.told.append(steps))
        survey.left_out = lambda first: first.lanes in left_out
        return list(survey.results())


@contextmanager
def server(survey: _Survey, lanes: int) -> Iterator[None]:
    yield


def learn(survey: _Survey, _: Any) -> None:
    profile = {"segments": ["all"], "max_batch": 1, "exits": [], "times_s": {"1": [0.01]}, "shapes": {"x": (1, 2)}}
    survey.served = {subject.name: profile for subject in survey.subjects}
    survey.bodies = {subject.name: subject.name for subject in survey.subjects}


FIRST = ["camera", "words", "capacity of 1 lane"]
REST = ["all models on one lane", "overhead of camera", "overhead of words"]
ROUND = ["camera alone", "words alone", "2 lanes"]


@pytest.mark.parametrize(
    ("left_out", "watched"),
    [
        (set(), [*FIRST, *REST, "capacity of 2 lanes", *ROUND, *ROUND]),
        ({2}, [*FIRST, *REST, "capacity of 2 lanes"]),
        ({1, 2}, [*FIRST, "capacity of 2 lanes"]),
        ({1}, [*FIRST, "capacity of 2 lanes", *ROUND, *ROUND, *REST]),
    ],
    ids=["nothing", "two lanes", "both", "one lane"],
)
def test_what_is_left_out_is_not_measured_further(monkeypatch, left_out, watched):
    machine = Machine(monkeypatch)
    surveyed = machine.survey((1, 2), left_out)
    assert machine.watched == watched
    assert [(first.lanes, host_of is None) for first, host_of in surveyed] == [
        (each, each in left_out) for each in (1, 2)
    ]
    steps = 2 + 2 + 2 + 1 + 3 * ROUNDS
    assert {of for _, of in machine.told} == {steps} and machine.told[-1] == (steps, steps)
    assert machine.told == sorted(machine.told)


def test_rounds_are_measured_until_two_agree(monkeypatch):
    for slow_downs, rounds in (([1.5], 2), ([1.5, 1.8], 3), ([1.5, 1.8, 2.4], 3)):
        machine = Machine(monkeypatch, slow_downs)
        machine.survey((2,))
        assert machine.watched.count("2 lanes") == rounds
