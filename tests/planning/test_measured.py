"""Measurements for every division of the cores, made once and kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planning.plans import scaling
from tests.planning.questions import Surveyor
from weft.base.errors import InputError
from weft.devices import Host
from weft.planning.measured import MEASURED, LaneShape, lane_shapes, measured_hosts, measurement_key
from weft.planning.plan_request import PlanRequest
from weft.serving.config import ModelConfig


def measured(question: PlanRequest, cache: Path, survey: Surveyor, told: list[Any] | None = None) -> list[Host]:
    progress = (lambda *said: told.append(said)) if told is not None else lambda *said: None
    return measured_hosts(question, cache, survey=survey, progress=progress).hosts


def test_cores_are_divided_in_every_way_worth_a_look():
    assert lane_shapes(1) == [(1, 1)]
    assert lane_shapes(2) == [(1, 1), (2, 1), (1, 2)]
    assert lane_shapes(6) == [(1, 1), (2, 1), (4, 1), (6, 1), (1, 2), (2, 2), (1, 4)]


def test_what_was_measured_is_not_measured_again(tmp_path, question):
    first, told = Surveyor(), []
    hosts = measured(question, tmp_path / "cache", first, told)
    assert first.asked == [(2, [1]), (1, [1, 2])]
    assert [(each.lanes, each.threads) for each in hosts] == lane_shapes(2)
    assert told == [("something, 2 threads", 1, 4), ("something", 3, 4)]
    again = Surveyor()
    assert measured(question, tmp_path / "cache", again) == hosts and not again.asked


def test_fresh_measures_again_and_keeps_that(tmp_path, question):
    measured(question, tmp_path / "cache", Surveyor())
    again, after = Surveyor(), Surveyor()
    measured_hosts(question, tmp_path / "cache", fresh=True, survey=again, progress=lambda *said: None)
    assert again.asked == [(2, [1]), (1, [1, 2])]
    assert measured(question, tmp_path / "cache", after) and not after.asked


def test_after_an_interruption_only_the_rest_is_measured(tmp_path, question):
    with pytest.raises(KeyboardInterrupt):
        measured(question, tmp_path, Surveyor(fail_at=1))
    rest = Surveyor()
    measured(question, tmp_path, rest)
    assert rest.asked == [(1, [1, 2])]


def test_a_damaged_measurement_is_made_again(tmp_path, question):
    measured(question, tmp_path, Surveyor())
    for file in (tmp_path / MEASURED).iterdir():
        file.write_text("{")
    again = Surveyor()
    measured(question, tmp_path, again)
    assert len(again.asked) == 2


def test_the_server_measures_models_with_the_settings_of_the_plan(tmp_path, question):
    survey = Surveyor()
    measured(question, tmp_path / "cache", survey)
    assert survey.served["camera"].shapes == {"x": [1, 2]}


def test_a_key_knows_all_that_a_measurement_depends_on(tmp_path, question):
    (model,) = question.models
    shape = LaneShape(1, 1)
    keys = {
        measurement_key([model], shape, 1.5),
        measurement_key([model], LaneShape(2, 1), 1.5),
        measurement_key([model], shape, 2.0),
        measurement_key([replace(model, name="other")], shape, 1.5),
        measurement_key([replace(model, config=ModelConfig(shapes={"x": [1, 3]}))], shape, 1.5),
        measurement_key([replace(model, path=scaling(tmp_path / "other.onnx", 3.0))], shape, 1.5),
    }
    assert len(keys) == 6
    same = replace(model, path=scaling(tmp_path / "elsewhere.onnx", 2.0))
    assert measurement_key([same], shape, 1.5) == measurement_key([model], shape, 1.5)


def test_a_cache_that_cannot_be_written_is_told(tmp_path, question):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write there"):
        measured(question, tmp_path / "file" / "cache", Surveyor())
