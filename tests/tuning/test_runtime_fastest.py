"""``weft.tune(target=...)``: what is written and told, what is refused, samples without labels; no clock decides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import weft
from tests.support.tuning import fix_times
from tests.tuning.files import points, save_data, save_model
from weft.base.errors import InputError, TuneError
from weft.cli.main import main
from weft_tune.cli import fastest_sentences
from weft_tune.quantised.metrics import agreement, closeness


@pytest.fixture
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_times(monkeypatch, 1.0)


@pytest.fixture
def slower(monkeypatch: pytest.MonkeyPatch) -> None:
    fix_times(monkeypatch, 3.0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "points.onnx", points())
    save_data(tmp_path / "samples.npz", points())
    yield tmp_path


def test_the_fastest_variant_is_written_and_scores_what_is_said(faster: None, folder: Path) -> None:
    test = save_data(folder / "test.npz", points(seed=1))
    result = weft.tune("points.onnx", target="onnxruntime", data="samples.npz", test=test, output="out")
    assert result.changed and result.kind == "int8" and result.speedup == 2
    assert result.score >= result.threshold == pytest.approx(0.99 * result.base)
    written = onnx.load(str(result.files["model"]))
    assert {each.op_type for each in written.graph.node} >= {"QuantizeLinear", "DequantizeLinear", "MatMul"}
    session = ort.InferenceSession(str(result.files["model"]), providers=["CPUExecutionProvider"])
    (outputs,) = session.run(None, {"x": points().x})
    assert float((outputs.argmax(axis=1) == points().label).mean()) == pytest.approx(result.score)
    assert result.test_base is not None and result.test_score is not None
    assert [each.name for each in result.layers] == ["fc1", "fc2"]
    assert [(each.before_s, each.int8_s, each.after_s, each.format) for each in result.layers] == [
        (1, 0.5, 0.5, "int8")
    ] * 2
    told = json.loads((folder / "out/tuning.json").read_text())
    assert told["speedup"] == 2 and told["kind"] == "int8" and told["latency_s"] == {"before": 2.0, "after": 1.0}
    assert told["layers"][0]["name"] == "fc1" and told["tried"][-1]["kept"]
    assert repr(result).startswith("RuntimeTuning(points: int8, 2.00 times as fast")


def test_the_model_as_it_was_is_the_result_if_nothing_is_faster(slower: None, folder: Path) -> None:
    result = weft.tune("points.onnx", target="onnxruntime", data="samples.npz", output="out")
    assert not result.changed and result.speedup == 1 and result.score == result.base
    assert onnx.load("out/points.onnx") == onnx.load("points.onnx")
    assert "nothing was faster than the model as it is" in fastest_sentences(result)[0]
    assert result.bytes_after == result.bytes_before


def test_nothing_is_written_without_a_folder(faster: None, folder: Path) -> None:
    before = sorted(folder.iterdir())
    assert weft.tune("points.onnx", target="onnxruntime", data="samples.npz").files == {}
    assert sorted(folder.iterdir()) == before


def test_samples_without_labels_are_scored_by_what_the_model_said(faster: None, folder: Path) -> None:
    np.savez("bare.npz", anything=points().x)
    result = weft.tune("points.onnx", target="onnxruntime", data="bare.npz", metric="agreement", margin=0.02)
    assert result.base == 1 and 0.98 <= result.score <= 1
    with pytest.raises(TuneError, match=r"bare\.npz: has no array called label"):
        weft.tune("points.onnx", target="onnxruntime", data="bare.npz")


def test_layers_that_are_not_named_stay_as_they_are(faster: None) -> None:
    result = weft.tune("points.onnx", target="onnxruntime", data="samples.npz", layers=["fc2"])
    assert [each.name for each in result.layers] == ["fc2"]


def test_the_command_shows_times_and_says_that_small_is_not_fast(
    faster: None, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "points.onnx", "--data", "samples.npz", "--target", "onnxruntime", "--json", "told.json"])
    said = " ".join(capsys.readouterr().out.split())
    assert "points: fastest in onnxruntime, keeping 0.99 of the score" in said
    assert "the whole model int8 2000.000 1000.000" in said
    assert "2.00 times as fast, with 2 of 2 layers in int8" in said
    assert "the smallest file is not the fastest" in said
    assert json.loads(Path("told.json").read_text()) == json.loads(Path("points-tuned/tuning.json").read_text())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"target": "tensorrt"}, "target = tensorrt: unknown choice 'tensorrt'"),
        ({"platform": "int8"}, "platform = int8: is of the search for the smallest formats, and target = onnxruntime"),
        ({"faithful": True}, "faithful = True: is of the search for the smallest formats"),
        ({"metric": "nothing"}, "unknown metric 'nothing'"),
        ({"model": "net.toml"}, r"net\.toml only describes a network; target = onnxruntime needs an \.onnx model"),
        ({"layers": "nothing"}, "unknown layer 'nothing'"),
    ],
)
def test_what_makes_no_sense_is_refused_in_one_line(options: dict[str, Any], why: str) -> None:
    asked = {"model": "points.onnx", "target": "onnxruntime", "data": "samples.npz"} | options
    with pytest.raises(InputError, match=why) as refused:
        weft.tune(**asked)
    assert "\n" not in str(refused.value)


def test_pictures_of_a_search_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "points.onnx", "--data", "samples.npz", "--target", "onnxruntime", "--html", "page.html"])
    assert "--html does not apply to --target" in capsys.readouterr().err


def test_a_model_that_scores_nothing_is_refused() -> None:
    np.savez("wrong.npz", x=points().x, label=np.full(len(points().x), 3) - np.sign(points().label))
    labels = np.load("wrong.npz")["label"]
    (outputs,) = ort.InferenceSession("points.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": points().x})
    wrong = outputs.argmax(axis=1) != labels
    np.savez("wrong.npz", x=points().x[wrong], label=labels[wrong])
    with pytest.raises(TuneError, match="scores 0 as it is"):
        weft.tune("points.onnx", target="onnxruntime", data="wrong.npz")


def test_agreement_counts_answers_and_closeness_measures_distances() -> None:
    first = np.array([[[1, 2], [3, 0]], [[5, 1], [0, 9]]], np.float32)
    other = np.array([[[1, 3], [0, 3]], [[5, 1], [0, 9]]], np.float32)
    assert agreement(other, first).tolist() == [0.5, 1]
    spoilt = other.copy()
    spoilt[1, 0, 0] = np.nan
    assert agreement(spoilt, first).tolist() == [0.5, 0] and closeness(spoilt, first)[1] == 0
    assert closeness(first, first).tolist() == [1, 1]
    assert closeness(np.array([[3.0, 3.0]]), np.array([[3.0, 4.0]])).tolist() == [pytest.approx(0.8)]
    assert closeness(np.array([[1.0]]), np.array([[0.0]])).tolist() == [0]
    with pytest.raises(TuneError, match="metric = closeness compares numbers"):
        agreement(np.zeros((3, 1)), np.zeros((3, 1)))
