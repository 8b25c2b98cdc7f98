"""Predicted beside measured: how far they are apart, and what keeps them from being compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planning.plans import plan_of, predicted, scaling, workload, written
from tests.planning.questions import SETTINGS, run_of
from weft.cli import bench
from weft.cli.main import main
from weft.load import LoadResult
from weft.planning.folder import ModelToServe
from weft.planning.plan import Plan, PlanSettings, Prediction, planned_workload
from weft.planning.prediction import PlanComparison, compare
from weft.workloads.requests import Workload


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    models = {name: ModelToServe(scaling(tmp_path / f"{name}.onnx", 2.0)) for name in ("camera", "intent")}
    streams = (predicted("camera"), predicted("intent", p99_ms=None, missed=0.5))
    return plan_of(models, predicted=Prediction(streams=streams, load=0.5))


def test_streams_are_compared_by_percentiles_and_missed_deadlines(plan: Plan) -> None:
    found = compare(plan, run_of(workload("camera", "intent"), [3.0] * 9 + [5.0], [60.0] * 3 + [0.0]))
    camera, intent = found.streams
    assert (camera.p50_off, camera.p99_off, camera.missed_off) == (0.5, 0.25, -0.01)
    assert (intent.measured.p50_ms, intent.p99_off, intent.missed_off) == (60.0, None, 0.5)
    assert (found.worst_p99_off, found.worst_missed_off, found.remarks) == (0.25, 0.5, ())
    assert found.verdict() == "furthest apart: p99 25 % above the prediction, missed deadlines 50.0 points above it"
    assert PlanComparison(()).verdict() == "nothing was measured that could be compared"


def test_what_keeps_the_two_from_being_compared_is_said(plan: Plan) -> None:
    load, times = workload("camera", "intent"), ([3.0], [4.0])

    def remarks(load: Workload = load, **run: Any) -> tuple[str, ...]:
        return compare(plan, run_of(load, *times[: len(load.stream)], **run)).remarks

    assert remarks(deadlines="soft") == ("the run had soft deadlines, the prediction assumed strict ones",)
    assert remarks(profile=None) == ("the server does not tell its settings; is it the one of the plan?",)
    assert remarks(profile={**SETTINGS, "lanes": 4}) == ("the server has lanes = 4, the plan has 1",)
    assert remarks(load.scaled(0.5)) == (
        "camera was sent 10 requests/s, the prediction assumed 20",
        "intent was sent 10 requests/s, the prediction assumed 20",
    )
    assert remarks(workload("camera")) == ("not all streams that were sent were predicted, or the other way round",)


def test_two_streams_of_one_model_have_their_predictions_in_order(tmp_path: Path) -> None:
    models = {"camera": ModelToServe(scaling(tmp_path / "camera.onnx", 2.0))}
    streams = (predicted("camera", p50_ms=1.0), predicted("camera", p50_ms=2.0))
    plan = plan_of(models, predicted=Prediction(streams=streams, load=0.5))
    found = compare(plan, run_of(workload("camera", "camera"), [2.0], [3.0]))
    assert [each.p50_off for each in found.streams] == [1.0, 0.5]


def test_a_plan_is_benched_with_its_workload_and_its_kind_of_deadlines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "plan"
    plan = written(folder, {"camera": 2.0}, deadlines="soft", settings=PlanSettings(lanes=1))
    asked: list[tuple[Workload, str]] = []

    def sent(load: Workload, url: str, *, deadlines: str, **_: Any) -> LoadResult:
        asked.append((load, deadlines))
        return run_of(load, [4.0, 6.0], deadlines=deadlines)

    monkeypatch.setattr("weft.load.run_load", sent)
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(folder), "--json", str(tmp_path / "bench.json"), "--seed", "5"])
    assert ended.value.code == 0
    ((load, deadlines),) = asked
    assert load == planned_workload(folder).model_copy(update={"seed": 5}) and deadlines == "soft"
    text = capsys.readouterr().out
    assert "predicted and measured" in text and "furthest apart: p99 50 % above the prediction" in text
    found = json.loads((tmp_path / "bench.json").read_text())
    assert found["streams"][0]["p99_s"] == 0.006 and found["plan"]["streams"][0] == {
        "model": "camera",
        "predicted": {"p50_ms": 2.0, "p99_ms": 4.0, "missed": 0.01, "p99_max_of": None},
        "measured": {"p50_ms": 4.0, "p99_ms": 6.0, "missed": 0.0, "p99_max_of": 2},
        "p50_off": 1.0,
        "p99_off": 0.5,
        "missed_off": -0.01,
    }
    assert plan.deadlines == "soft"


def test_a_workload_file_has_nothing_to_compare_with(tmp_path: Path) -> None:
    assert bench._plan(None) is None
    (tmp_path / "load.toml").write_text("[[stream]]\nmodel = 'camera'\nrate = 1\n")
    assert bench._plan(str(tmp_path / "load.toml")) is None
