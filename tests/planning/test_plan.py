"""A plan as a value: what it may hold, and that it comes back from its file as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from weft.base.errors import PlanError
from weft.planning.plan import _PARTS, PlanOption, PlanSettings, parse_plan, read_plan, write_plan_file

MODEL = {"name": "camera", "file": "models/camera/1/model.onnx", "sha256": "0" * 64, "bytes": 10}
STREAM = {"model": "camera", "rate": 50.0, "deadline_ms": 20.0, "p50_ms": 2.0, "p99_ms": 9.0, "missed": 0.02}
RAW: dict[str, Any] = {
    "format": 1,
    "made": "by hand",
    "objective": "deadlines",
    "machine": {"cores": 2, "memory_bytes": 1 << 30, "processor": "abacus"},
    "models": [MODEL],
    "settings": {"lanes": 1},
    "predicted": {"streams": [STREAM, {**STREAM, "model": "intent", "missed": 0.5}], "load": 0.4},
}


def refused(raw: Any) -> str:
    with pytest.raises(PlanError) as caught:
        parse_plan(raw, "plan.json")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plan_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    settings = PlanSettings(lanes=2, policy="edf", policy_options={})
    left_out = PlanOption(label="edf, 2 lanes", settings=settings, left_out="its lanes would be overrun")
    plan = parse_plan(RAW, "plan.json").model_copy(update={"options": (left_out,)})
    write_plan_file(plan, tmp_path / "plan.json")
    assert read_plan(tmp_path) == read_plan(tmp_path / "plan.json") == plan
    assert plan.predicted.worst_missed == 0.5
    assert "camera" in repr(plan)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"format": 2}, "not a plan of format 1"),
        ({"lanes": 2}, "unknown key 'lanes'"),
        ({"settings": {"lanes": 0}}, "settings.lanes = 0"),
        ({"settings": {}}, "lanes is missing"),
        ({"settings": {"device": "cuda:0", "threads": 1}}, "threads does not go with device = cuda:0; leave it out"),
        ({"models": [MODEL, MODEL]}, "two models have the name 'camera'"),
        ({"models": [MODEL, {**MODEL, "name": "other"}]}, "two models have the file 'models/camera/1/model.onnx'"),
        ({"models": [{**MODEL, "file": "../model.onnx"}]}, "must be a path inside the plan's folder"),
        ({"models": [{**MODEL, "file": "/model.onnx"}]}, "must be a path inside the plan's folder"),
        ({"options": [{"label": "fifo", "settings": {"lanes": 1}}]}, "either predicted or left_out"),
        ({"predicted": {"streams": [{**STREAM, "missed": 1.5}], "load": 0.4}}, "missed = 1.5"),
    ],
)
def test_what_no_plan_can_say_is_refused_in_one_line(changes: dict[str, Any], said: str) -> None:
    assert said in refused({**RAW, **changes})


def test_what_is_no_plan_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps({"format": 1, "streams": []}))
    with pytest.raises(PlanError, match=r"plan\.json: not a plan of format 1"):
        read_plan(tmp_path)
    assert "not a plan" in refused([])


def test_every_key_of_a_plan_is_described() -> None:
    page = (ROOT / "docs/formats.md").read_text().split("## Plan (")[1].split("\n## ")[0]
    keys = [key for part in _PARTS for key in part.model_fields]
    assert len(keys) > 40 and [key for key in keys if f"`{key}`" not in page] == []
