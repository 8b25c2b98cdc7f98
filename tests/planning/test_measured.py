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


WORSE = {(1, 2): 200.0, (1, 1): 90.0, (2, 1): 150.0}
"""Requests per second, so that divisions of one thread per lane are left out."""


def test_what_cannot_be_the_best_is_left_out_and_kept_as_such(tmp_path, question):
    first, again = Surveyor(per_s=WORSE), Surveyor(per_s=WORSE)
    found = measured_hosts(question, tmp_path, survey=first)
    assert [(each.lanes, each.threads) for each in found.hosts] == [(1, 2)]
    assert [each.shape for each in found.left_out] == [(1, 1), (2, 1)]
    assert found.left_out[1][1:] == (
        "2 lanes",
        "150 requests/s where 1 lane x 2 threads has 200, and no model is faster; not measured further",
    )
    assert measured_hosts(question, tmp_path, survey=again) == found and not again.asked


def test_what_was_left_out_is_measured_where_another_objective_may_choose_it(tmp_path, question):
    measured_hosts(question, tmp_path, survey=Surveyor(per_s=WORSE))
    survey, last = Surveyor(per_s=WORSE), Surveyor()
    hosts = measured(replace(question, objective="memory"), tmp_path, survey)
    assert survey.asked == [(1, [1, 2])] and len(hosts) == 3
    assert measured(question, tmp_path, last) == hosts and not last.asked  # it is there now


def test_fresh_numbers_that_leave_a_division_out_replace_its_measurement(tmp_path, question):
    measured(question, tmp_path, Surveyor())
    fresh = measured_hosts(question, tmp_path, survey=Surveyor(per_s=WORSE), fresh=True)
    assert len(fresh.hosts) == 1 and measured_hosts(question, tmp_path, survey=Surveyor()) == fresh


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
