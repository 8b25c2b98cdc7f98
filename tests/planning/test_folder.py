"""The folder of a plan: whole or not at all, in the place of an older one, and movable."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.planning.plans import plan_of, predicted, scaling, workload, written
from weft.base.errors import InputError, PlanError
from weft.base.files import replacing_folder
from weft.base.tomlfile import as_toml
from weft.planning.folder import (
    ModelToServe,
    changed_models,
    check_place,
    plan_settings,
    planned_model,
    source_digests,
    write_plan,
)
from weft.planning.plan import PlanSettings, Prediction, is_plan, planned_workload, read_plan
from weft.serving.config import ModelConfig, SchedulingSettings
from weft.serving.repository import Repository
from weft.workloads.requests import parse_workload


def test_a_plan_is_served_from_where_it_was_moved_to(tmp_path: Path) -> None:
    config = ModelConfig(max_batch=4, batch_timeout_ms=1.5, slo_ms=50.0, shapes={"x": [1, 2]})
    settings = PlanSettings(lanes=2, policy="punctual", policy_options={"margin": 20}, late="keep")
    plan = written(tmp_path / "plan", {"camera": 2.0}, config, settings=settings)
    moved = (tmp_path / "plan").rename(tmp_path / "elsewhere")
    assert str(tmp_path) not in "".join(each.read_text() for each in moved.glob("*.toml"))
    found = plan_settings(moved)
    assert found.execution.lanes == 2
    assert found.scheduling == SchedulingSettings(policy="punctual", policy_options={"margin": 20}, late="keep")
    entry = Repository(found.loading.models, tmp_path).entry("camera")
    assert (entry.path, entry.config) == (moved / "models/camera/1/model.onnx", config)
    assert read_plan(moved) == plan and plan.models[0].max_batch == 4
    assert [stream.model for stream in planned_workload(moved).stream] == ["camera"]


def test_weights_and_samples_that_lie_in_files_go_along(tmp_path: Path) -> None:
    given = scaling(tmp_path / "camera.onnx", 2.0)
    model = onnx.load(given)
    onnx.save(model, given, save_as_external_data=True, location="weights.bin", size_threshold=0)
    np.savez(tmp_path / "frames.npz", x=np.zeros((3, 2), np.float32))
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    models = {"camera": ModelToServe(given, ModelConfig(labels={"y": "classes.txt"}))}
    asked = {"model": "camera.onnx", "rate": 1, "deadline_ms": 9, "samples": "frames.npz"}
    plan = plan_of(models)
    load = parse_workload({"stream": [asked], "folder": str(tmp_path)}, "the test")
    write_plan(plan, tmp_path / "plan", models=models, workload=load, report="<p>fine</p>")
    assert set(plan.models[0].others) == {"models/camera/1/weights.bin", "models/camera/1/classes.txt"}
    assert plan.models[0].bytes == sum(
        (tmp_path / name).stat().st_size for name in ("camera.onnx", "weights.bin", "classes.txt")
    )
    (stream,) = planned_workload(tmp_path / "plan").stream
    assert (tmp_path / "plan" / str(stream.samples)).read_bytes() == (tmp_path / "frames.npz").read_bytes()
    assert (tmp_path / "plan/report.html").read_text() == "<p>fine</p>"
    assert changed_models(tmp_path / "plan", plan) == []


def test_a_newer_plan_takes_the_place_of_an_older_one_and_keeps_what_was_set_besides(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    written(folder, {"camera": 2.0, "intent": 3.0})
    with (folder / "weft.toml").open("a") as file:
        file.write('host = "0.0.0.0"\n')
    assert plan_settings(folder).loading.learn_first  # what is predicted is what runs
    same = os.stat(folder / "models/intent/1/model.onnx").st_ino
    written(folder, {"intent": 3.0, "depth": 5.0}, settings=PlanSettings(lanes=3))
    found = plan_settings(folder)
    assert (found.execution.lanes, found.network.host) == (3, "0.0.0.0")
    assert sorted(os.listdir(folder / "models")) == ["depth", "intent"]
    assert os.stat(folder / "models/intent/1/model.onnx").st_ino == same  # it need not be loaded again
    assert sorted(os.listdir(tmp_path)) == ["given", "plan"]


@pytest.mark.parametrize("held", ["notes.txt", "models/extra/1/model.onnx", ".git/config"])
def test_what_is_not_of_a_plan_is_never_replaced(tmp_path: Path, held: str) -> None:
    folder = tmp_path / "plan"
    written(folder, {"camera": 2.0})
    (folder / held).parent.mkdir(parents=True, exist_ok=True)
    (folder / held).write_text("mine")
    with pytest.raises(PlanError, match="which is not of its plan"):
        written(folder, {"camera": 3.0})
    assert (folder / held).read_text() == "mine"


def test_a_folder_without_a_plan_and_a_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan/notes.txt").write_text("mine")
    with pytest.raises(PlanError, match=r"holds notes\.txt and no plan"):
        written(tmp_path / "plan", {"camera": 2.0})
    check_place(tmp_path / "new")
    with pytest.raises(PlanError, match=r"holds notes\.txt and no plan"):
        check_place(tmp_path / "plan")
    with pytest.raises(PlanError, match="is not a folder"):
        written(tmp_path / "plan/notes.txt", {"camera": 2.0})
    with pytest.raises(InputError, match="cannot write"), replacing_folder(tmp_path / "none/plan"):
        pass


def test_a_plan_that_cannot_be_written_whole_leaves_the_older_one(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    before = written(folder, {"camera": 2.0})
    models = {"camera": ModelToServe(scaling(tmp_path / "camera.onnx", 7.0))}
    plan = plan_of(models)
    scaling(tmp_path / "camera.onnx", 8.0)
    with pytest.raises(PlanError, match="has changed since it was planned"):
        write_plan(plan, folder, models=models, workload=workload("camera"))
    with pytest.raises(PlanError, match="unknown model 'lidar'"):
        write_plan(plan_of(models), folder, models=models, workload=workload("lidar"))
    with pytest.raises(InputError, match="isolation"):
        settings = PlanSettings(lanes=1, isolation="glass")
        write_plan(plan_of(models, settings=settings), folder, models=models, workload=workload("camera"))
    assert read_plan(folder) == before and changed_models(folder, before) == []
    assert sorted(os.listdir(tmp_path)) == ["camera.onnx", "given", "plan"]


def test_a_plan_whose_models_changed_is_refused_unless_told_otherwise(tmp_path: Path) -> None:
    folder = tmp_path / "plan"
    written(folder, {"camera": 2.0, "intent": 3.0})
    scaling(folder / "models/camera/1/model.onnx", 4.0)
    with pytest.raises(PlanError, match=r"models/camera/1/model\.onnx has changed since the plan was written; plan"):
        plan_settings(folder)
    assert plan_settings(folder, unchecked=True).execution.lanes == 1
    (folder / "models/intent/1/model.onnx").unlink()
    with pytest.raises(PlanError, match=r"and 1 more"):
        plan_settings(folder)


def test_only_a_folder_with_a_plan_is_one(tmp_path: Path) -> None:
    written(tmp_path / "plan", {"camera": 2.0})
    assert is_plan(tmp_path / "plan")
    assert not is_plan(tmp_path) and not is_plan(tmp_path / "plan/plan.json") and not is_plan(tmp_path / "none")


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_folder_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool) -> None:
    if not exchanges:  # a system that cannot let folders change places
        monkeypatch.setattr("weft.base.files._exchange", lambda first, second: False)
    place = tmp_path / "place"
    for text in ("old", "new"):
        with replacing_folder(place) as fresh:
            (fresh / text).write_text(text)
    assert [each.name for each in place.iterdir()] == ["new"]
    with pytest.raises(RuntimeError), replacing_folder(place) as fresh:
        (fresh / "half").write_text("half")
        raise RuntimeError
    assert [each.name for each in tmp_path.rglob("*")] == ["place", "new"]


def test_settings_come_back_from_toml_as_they_were() -> None:
    values = {
        "text": 'quotes " and \\ and \x7f and ä',
        "numbers": [1, 2.5, 1e-9],
        "yes": True,
        "table": {"free key": {"x": [1, 2]}, "plain": {}},
        "none": [],
        "stream": [{"model": "a"}, {"model": "b", "shapes": {"x:0": [1, 3]}}],
    }
    assert tomllib.loads(as_toml(values)) == values


def test_a_prediction_can_be_of_models_that_one_file_holds(tmp_path: Path) -> None:
    models = {"camera": ModelToServe(scaling(tmp_path / "camera.onnx", 2.0))}
    streams = (predicted("camera"), predicted("camera", rate=None))
    plan = plan_of(models, predicted=Prediction(streams=streams, load=0.5))
    write_plan(plan, tmp_path / "plan", models=models, workload=workload("camera", "camera"))
    assert len(planned_workload(tmp_path / "plan").stream) == 2


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    missing = ModelToServe(tmp_path / "camera.onnx")
    for look in (lambda: planned_model("camera", missing), lambda: source_digests(missing.path)):
        with pytest.raises(PlanError, match=r"camera\.onnx: cannot read it: No such file"):
            look()
    models = {"camera": ModelToServe(scaling(tmp_path / "camera.onnx", 2.0))}
    load = parse_workload({"stream": [{"model": "camera", "rate": 1, "samples": "frames.npz"}]}, "the test")
    with pytest.raises(PlanError, match=r"frames\.npz: there is no such file"):
        write_plan(plan_of(models), tmp_path / "plan", models=models, workload=load)
