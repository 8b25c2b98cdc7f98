"""``weft plan --int8``: models in 8 bits where they are faster and answer alike; no clock decides."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.planning.machines import brief, host
from tests.planning.questions import question_of
from tests.runtime.exit_nets import conv_net
from tests.support.commands import refused, run
from tests.support.tuning import fix_times
from tests.tuning.files import points, save_data, save_model
from weft.devices.host import write_host
from weft.planning.plan import read_plan
from weft.planning.plan_check import drift
from weft.planning.plan_request import PlanRequest
from weft_tune.plan_int8 import CACHE_FOLDER, with_int8

__all__ = ["brief"]

STREAM = "points.onnx:rate=20,deadline=50,samples=samples.npz"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    save_model(tmp_path / "points.onnx", points())
    save_data(tmp_path / "samples.npz", points(40))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.planning.plan_request.usable_cores", lambda: 2)
    return tmp_path


def in_eight_bits(*streams: str) -> PlanRequest:
    return with_int8(question_of(*streams), Path("kept"), lambda what: None)


def operators(path: Path) -> set[str]:
    return {node.op_type for node in onnx.load(path).graph.node}


def test_a_model_that_is_faster_in_8_bits_takes_the_place_of_the_one_that_was_given(monkeypatch):
    fix_times(monkeypatch, 1.0)
    found = in_eight_bits(STREAM)
    (model,) = found.models
    assert (
        model.preparation is not None
        and model.preparation.original == Path("points.onnx").absolute()
        and model.name == "points"
    )
    assert "QuantizeLinear" in operators(model.path) and "QuantizeLinear" not in operators(model.preparation.original)
    assert model.preparation.same_answers is not None and model.preparation.same_answers >= 0.99
    assert (
        model.preparation.change.startswith("int8 by calibration: ")
        and "of 40 samples answered alike" in model.preparation.change
    )
    assert found.remarks == (f"points: {model.preparation.change}; 2.00 times as fast alone.",)


def test_what_was_found_is_kept_and_made_again_where_the_samples_are_others(monkeypatch):
    fix_times(monkeypatch, 1.0)
    before = in_eight_bits(STREAM)
    monkeypatch.setattr("weft_tune.runtime_target.fastest.find_fastest", None)  # who asks for more fails
    assert in_eight_bits(STREAM).remarks == before.remarks
    fix_times(monkeypatch, 3.0)
    save_data(Path("samples.npz"), points(50))
    with pytest.raises(TypeError):
        in_eight_bits(STREAM)
    assert len([*Path("kept", CACHE_FOLDER).iterdir()]) == 2


def test_a_model_that_is_slower_in_8_bits_stays(monkeypatch):
    fix_times(monkeypatch, 3.0)
    found = in_eight_bits(STREAM)
    assert found.models[0].preparation is None and found.models[0].path == Path("points.onnx").absolute()
    assert found.remarks == ("points stays as it is: nothing in 8 bits is faster here.",)


def test_models_without_samples_and_with_exits_stay(monkeypatch):
    fix_times(monkeypatch, 1.0)
    save_model(Path("other.onnx"), points())
    conv_net(Path("net.onnx"), marked=True)
    np.savez("images.npz", x=np.zeros((12, 1, 6, 6), np.float32))
    found = in_eight_bits(STREAM, "other.onnx:rate=1,deadline=50", "net.onnx:rate=1,deadline=50,samples=images.npz")
    assert [model.preparation is None for model in found.models] == [False, True, True]
    assert found.remarks[1] == "other stays as it is: its stream has no samples."
    assert "models with exits" in found.remarks[2]


def test_a_model_that_cannot_be_had_in_8_bits_stays_and_it_is_said_why(monkeypatch):
    save_data(Path("samples.npz"), points(5))
    assert in_eight_bits(STREAM).remarks == (
        "points stays as it is: int8 cannot be had (samples.npz: 5 samples are too few to measure anything; "
        "give at least 10).",
    )


def test_a_plan_serves_8_bits_and_tells_what_they_cost(brief, capsys, monkeypatch):
    fix_times(monkeypatch, 1.0)
    write_host(host(points=[4.0]), "one.json")
    code, shown, _ = run(capsys, "plan", "-s", STREAM, "--int8", "-d", "one.json", "--cache", "kept", "-o", "plan")
    assert code == 0 and "points: int8 by calibration: " in shown and "2.00 times as fast alone" in shown
    plan = read_plan("plan")
    (model,) = plan.models
    assert model.done.startswith("int8 by calibration") and model.done == plan.options[0].models["points"].done
    assert model.accuracy is not None and model.accuracy >= 0.99 and model.accuracy_as_given == 1.0
    assert list(model.sources) == [str(Path("points.onnx").absolute())]
    assert "QuantizeLinear" in operators(Path("plan") / model.file)
    assert drift("plan") == []


def test_int8_without_samples_is_refused_with_the_words_to_add(capsys):
    said = refused(capsys, "plan", "-s", "points.onnx:rate=20,deadline=50", "--int8", "--cache", "kept")
    assert "-s points.onnx:...,samples=FILE.npz" in said
