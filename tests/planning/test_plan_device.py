"""Plans for a GPU, on its twin on the cores: measured there, planned for it, served by it."""

from __future__ import annotations

import json
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.planning.machines import arrangement, asked, brief, host
from tests.planning.plans import plan_of, predicted, scaling, scaling_together, workload
from tests.planning.questions import SETTINGS, Surveyor, question_of, run_of
from tests.runtime.cuda.nets import chain, drawn, wanted
from tests.serving.live import PATIENCE_S, save
from tests.support.commands import refused, run
from weft.base.version import runtime_version
from weft.devices import Host, read_host
from weft.devices.host import write_host
from weft.engine.lane_queues import DEVICE_AHEAD
from weft.planning.candidates import arrangements
from weft.planning.folder import ModelToServe, plan_settings
from weft.planning.measured import LaneShape, measured_hosts, measurement_key
from weft.planning.plan import PlanSettings, Prediction, read_plan
from weft.planning.plan_check import drift
from weft.planning.plan_request import PlanRequest
from weft.planning.plan_shown import options_table
from weft.planning.planning_run import make_plan
from weft.planning.prediction import compare
from weft.planning.segment_length import longer_segments
from weft.runtime.cuda.cpu_twins import TWIN
from weft.serving.process import ServerProcess
from weft.workloads.requests import read_workload
from weft_tune.plan_int8 import with_int8

__all__ = ["brief"]

LOAD = """
device = "cuda:twin"
duration_s = 0.5
warmup_s = 0.0
[[stream]]
model = "camera.onnx"
rate = 20.0
deadline_ms = 30000.0
[[stream]]
model = "words.onnx"
rate = 10.0
deadline_ms = 30000.0
"""


def gpu(memory_bytes: int | None = None, **models: Any) -> Host:
    """A measured GPU, with the times that a test says."""
    return host(memory_bytes=memory_bytes, **models).model_copy(update={"name": "cuda:0", "ahead": DEVICE_AHEAD})


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models, and machines that were measured with them; few options are simulated, and those not for long."""
    monkeypatch.setattr("weft.simulation.run_length.MOST_TIMES", 1)
    monkeypatch.setattr("weft.planning.candidates.MORE_OPTIONS", {})
    chain(tmp_path / "camera.onnx")
    (tmp_path / "camera.toml").write_text("max_batch = 2\ngrain_ms = 0.0001\n")
    chain(tmp_path / "words.onnx", layers=2)
    (tmp_path / "words.toml").write_text("max_batch = 1\n")
    (tmp_path / "load.toml").write_text(LOAD)
    for name, machine in (("gpu", gpu(2**27, camera=[0.1, 0.1], words=[0.2])), ("cores", host(camera=[1], words=[1]))):
        write_host(machine, tmp_path / f"{name}.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(url: str, model: str, feed: dict[str, Any]) -> Any:
    rows = [{"name": "x", "shape": feed["x"].shape, "datatype": "FP32", "data": feed["x"].ravel().tolist()}]
    body = json.dumps({"inputs": rows}).encode()
    with urllib.request.urlopen(f"{url}/v2/models/{model}/infer", body, timeout=PATIENCE_S) as said:
        (output,) = json.load(said)["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


@pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
def test_models_are_measured_on_a_device_planned_for_it_and_served_by_it(brief, capsys, place, monkeypatch):
    monkeypatch.setattr("weft.planning.survey.measure.WARM_S", 0.05)
    made = make_plan(read_workload("load.toml"), seconds=0.2, cache="kept")
    made.write("plan")
    assert options_table(made.plan).title == "camera / words on the twin of a GPU" and TWIN in repr(made)
    assert any(each.startswith("Lanes, threads, pinning and isolation are left out") for each in made.plan.reasons.won)

    settings = tomllib.loads(Path("plan/weft.toml").read_text())
    assert settings["device"] == TWIN and settings.keys().isdisjoint({"lanes", "threads", "pin", "isolation"})
    assert plan_settings("plan").execution.device == TWIN
    measured = read_host("plan/host.json")
    assert (measured.name, measured.ahead) == (TWIN, DEVICE_AHEAD) and "the twin of a GPU" in measured.source
    assert tomllib.loads(Path("plan/models/words/weft.toml").read_text())["grain_ms"] == 0.25
    plan = read_plan("plan")
    assert (plan.settings.device, plan.machine.gpu) == (TWIN, "the twin of a GPU") and drift("plan") == []
    assert "are left out" in Path("plan/report.html").read_text()

    with ServerProcess("plan") as server:
        for name in ("camera", "words"):
            found = answer(server.url, name, drawn(2))
            np.testing.assert_allclose(found, wanted(place / f"{name}.onnx", drawn(2)), rtol=1e-4, atol=1e-6)
        assert run(capsys, "bench", "plan", "--url", server.url, "--json", "seen.json")[0] == 0
    seen = json.loads(Path("seen.json").read_text())
    assert seen["plan"]["remarks"] == [] and [each["statuses"].keys() for each in seen["streams"]] == [{"200"}] * 2


def test_a_gpu_that_was_measured_elsewhere_is_planned_for(brief, capsys, place):
    code, shown, said = run(capsys, "plan", "load.toml", "-d", "gpu.json", "--cache", "kept", "-o", "plan")
    assert code == 0, said
    assert " lane" not in shown.splitlines()[2] and "Lanes, threads, pinning and isolation are left out" in shown
    assert "--isolation process" not in shown and "more cores" not in shown
    settings = json.loads(Path("plan/plan.json").read_text())["settings"]
    assert settings["device"] == "cuda:0" and settings.keys().isdisjoint({"lanes", "threads", "isolation"})
    assert read_plan("plan").budget.cores is None and "cuda:0 computes" in shown


def test_what_would_help_on_a_gpu_is_told(brief, capsys, place):
    for name in ("camera", "words"):
        weights = [numpy_helper.from_array(np.full((20, 20), 3, np.float32), "w")]
        ends = [[helper.make_tensor_value_info(each, TensorProto.FLOAT, ["n", 20])] for each in ("x", "y")]
        nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
        save(helper.make_graph(nodes, name, *ends, weights), place / f"{name}.onnx")
    streams = ("-s", "camera.onnx:rate=4500,deadline=9", "-s", "words.onnx:rate=200,deadline=9")
    shown = run(capsys, "plan", *streams, "-d", "gpu.json", "--cache", "kept")[1]
    assert "A second GPU of that kind" in shown and "The server's own work" in shown
    assert "share 100% of their weights: weft stitch" in " ".join(shown.split())
    assert 'A faster camera: with precision = "fp16" in its settings' in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-d", "cuda:0,cuda:1"), "--device cuda:0,cuda:1: a plan is for one device, by its name; name it alone"),
        (("-d", "cuda:0", "-d", "cuda:1"), "--device cuda:0: a plan is for one device, by its name; name it alone"),
        (("-d", "cuda:first"), "--device cuda:first: a plan is for one device, by its name"),
        (("-d", "gpu.json", "-d", "cores.json"), "--device cuda:0: a plan is for one device, measured once"),
        (("-d", "gpu.json", "--cores", "1"), "--cores 1: cuda:0 has one lane, for which no cores are divided"),
        (("-d", "gpu.json", "--isolation", "process"), "--isolation process cannot go with --device cuda:0"),
        (("-d", "cuda:99"), "cuda:99: "),
    ],
)
def test_what_no_gpu_can_be_planned_for_is_one_line(capsys, place, arguments, said):
    assert said in refused(capsys, "plan", "load.toml", *arguments, "--cache", "kept")


def test_the_device_of_a_workload_is_planned_for_if_it_is_a_gpu(brief, capsys, place):
    (place / "load.toml").write_text(LOAD.replace("cuda:twin", "cuda:0,cuda:1"))
    assert "a plan is for one device" in refused(capsys, "plan", "load.toml", "--cache", "kept")
    (place / "load.toml").write_text(LOAD.replace("cuda:twin", "tpuv3-like"))
    assert run(capsys, "plan", "load.toml", "-d", "cores.json", "--cache", "kept", "-o", "plan")[0] == 0
    assert read_plan("plan").settings.device is None


def test_models_are_measured_once_for_each_device(tmp_path, question):
    class Noting(Surveyor):
        where: tuple[str, ...] = ()

        def __call__(self, subjects: Any, *, device: str, **how: Any) -> Any:
            self.where += (device,)
            return super().__call__(subjects, **how)

    survey = Noting()
    for device in (TWIN, TWIN, None):
        there = PlanRequest(workload=question.workload, models=question.models, cores=2, device=device)
        measured_hosts(there, tmp_path / "cache", survey=survey, progress=lambda *said: None)
    assert survey.where == (TWIN, "host", "host") and survey.asked == [(1, [1]), (2, [1]), (1, [1, 2])]
    keys = {measurement_key(question.models, LaneShape(1, 1), 1.5, device=each) for each in (None, TWIN, "cuda:0")}
    assert len(keys) == 3


def test_options_on_a_gpu_differ_by_policy_and_batches_alone():
    there = asked(("camera", 1.0, 50.0), device="cuda:0")
    found = arrangements(there, [gpu(camera={1: [0.1], 8: [0.4]})])
    assert {each.batches["camera"] for each in found} == {1, 2, 8}
    assert {(each.settings.device, each.settings.lanes) for each in found} == {("cuda:0", 1)}
    assert found[0].label == "punctual, batches to 8"
    assert all(each.settings.model_dump().keys().isdisjoint({"lanes", "threads", "isolation"}) for each in found)


def test_longer_segments_are_those_that_a_gpu_would_cut_at_its_largest_batch():
    machine = gpu(net={1: [0.1] * 4, 8: [0.8] * 4})  # a batch of 8 counts a quarter: 0.2 ms a segment
    way = arrangement(machine, batch=8)
    twice, whole = longer_segments(type(way)(machine, way.settings, way.batches, {"net": 0.25}))
    assert [len(each.host.models["net"].segments) for each in (twice, whole)] == [2, 1]
    assert (twice.grain_ms, whole.grain_ms) == ({"net": 0.5}, {"net": 2.0})
    (alone,) = longer_segments(type(way)(machine, way.settings, {"net": 1}, {"net": 0.25}))
    assert len(alone.host.models["net"].segments) == 1 and alone.grain_ms == {"net": 0.5}


def test_what_gains_nothing_on_a_gpu_is_told_in_a_line_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    scaling(tmp_path / "camera.onnx", 2.0)
    scaling_together(tmp_path / "pets.onnx", {"cats": 2.0, "dogs": 3.0})
    value = helper.make_tensor_value_info
    weights = [numpy_helper.from_array(np.array(0.5, np.float32), "scale")]
    nodes = [helper.make_node("QuantizeLinear", ["x", "scale"], ["q"])]
    nodes += [helper.make_node("DequantizeLinear", ["q", "scale"], ["y"])]
    ends = [[value(name, TensorProto.FLOAT, ["n", 2])] for name in ("x", "y")]
    save(helper.make_graph(nodes, "eight", *ends, weights), tmp_path / "eight.onnx")
    files = ("camera.onnx", "eight.onnx", "pets.onnx/cats", "pets.onnx/dogs")
    found = question_of(*(f"{file}:rate=1,deadline=50" for file in files), device=TWIN)
    assert with_int8(found, tmp_path, lambda what: None).remarks[1:] == (
        "eight is in 8 bits, which cuda:twin computes in floating point, with conversions between.",
        "int8 is left out: cuda:twin computes 8 bits in floating point, with conversions between.",
    )
    assert {model.config.grain_ms for model in found.models} == {0.25}


def test_a_server_elsewhere_than_planned_is_told(tmp_path):
    models = {"camera": ModelToServe(scaling(tmp_path / "camera.onnx", 2.0))}
    there = Prediction(streams=(predicted("camera"),), load=0.5)
    plan = plan_of(models, predicted=there, settings=PlanSettings(device="cuda:0"))
    same, other = (
        compare(plan, run_of(workload("camera"), [3.0], profile={**SETTINGS, "lanes": 7, "device": device})).remarks
        for device in ("cuda:0", None)
    )
    assert (same, other) == ((), ("the server has device = None, the plan has cuda:0",))


def test_onnx_runtime_has_a_version_under_either_of_its_names(monkeypatch):
    from importlib.metadata import PackageNotFoundError

    def installed(package: str) -> str:
        if package != "onnxruntime-gpu":
            raise PackageNotFoundError(package)
        return "1.2.3"

    monkeypatch.setattr("importlib.metadata.version", installed)
    assert runtime_version() == "1.2.3"
