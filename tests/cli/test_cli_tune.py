"""``weft tune``: what it prints and writes, that it goes on where it stopped, and how it refuses."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
import typer
from onnx import TensorProto, helper, numpy_helper

from tests import ROOT
from tests.support.commands import CommandResult, run
from tests.tuning.files import HIDDEN, INPUTS, points, save_data, save_model
from weft.base.errors import TuneError
from weft.cli.main import main
from weft_tune import Network, Target, find_formats, tune
from weft_tune.cli import SearchProgress, sentences
from weft_tune.evaluation import CallableEvaluator
from weft_tune.numbers.configuration import read_configuration
from weft_tune.packed import read_packed
from weft_tune.result import Progress, TuningResult
from weft_tune.subject import load_descriptor
from weft_tune.tuning_run import TuneProgress

PATIENCE_S = 600
"""After that something that should have happened has not; nothing here is meant to come near it."""
SMALL = """
name = "tiny"
[[layer]]
name = "fc1"
weights = 100
inputs = 10
weight_max = 1.0
input_max = 2.0
"""
BY_BYTES = "n=$(wc -c < {config}); echo Accuracy: $((1000 - n))"
"""A command whose score falls with every object that is no longer FLOAT 32: nothing smaller passes at a margin of 0."""
FEW = ("--platform", "few.toml")
"""Few formats, so that a search by commands is short."""
INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
"""A process that a shell started in the background ignores Ctrl-C, and what it starts does so too."""


Run = Callable[..., CommandResult]


@pytest.fixture
def weft(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in a folder of its own that holds a model, its samples and a description."""
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "points.onnx", points())
    save_data(tmp_path / "samples.npz", points())
    (tmp_path / "tiny.toml").write_text(SMALL)
    (tmp_path / "few.toml").write_text('name = "few"\nformats = ["FIXED 2..4", "EXP 2..3"]\n')
    return partial(run, capsys, "tune")


class Tuned(NamedTuple):
    """One run with everything it writes."""

    folder: Path
    out: str
    result: dict[str, Any]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder = tmp_path_factory.mktemp("tuned")
    net = points()
    model, data = save_model(folder / "points.onnx", net), save_data(folder / "samples.npz", net)
    test = save_data(folder / "test.npz", points(seed=1))
    said = io.StringIO()
    with contextlib.redirect_stdout(said), pytest.raises(SystemExit, match="0"):
        main(
            [
                *("tune", str(model), "--data", str(data), "--test", str(test), "--margin", "0.02", "--workers", "1"),
                *("--device", "tpuv3-like", "--baseline", "ristretto", "--baseline", "int8", "-o", f"{folder}/out"),
                *(
                    "--json",
                    f"{folder}/again.json",
                    "--figure",
                    f"{folder}/search.svg",
                    "--html",
                    f"{folder}/page.html",
                ),
            ]
        )
    return Tuned(folder / "out", said.getvalue(), json.loads((folder / "out/tuning.json").read_text()))


def rounded_by_hand(folder: Path, x: np.ndarray) -> np.ndarray:
    """Classes by the formats that were written, without the evaluator that chose them."""
    from weft_tune.numbers.arrays import rounded

    formats, net = read_configuration(folder / "formats.txt"), points()
    for name in ("fc1", "fc2"):
        x = rounded(x, formats[f"{name}.input"]) @ rounded(net.weights[name], formats[f"{name}.weight"])
        x = np.maximum(x, 0) if name == "fc1" else x
    return x.argmax(axis=1)


def test_the_formats_it_writes_keep_the_score_it_tells(tuned: Tuned) -> None:
    net, other = points(), points(seed=1)
    score = tuned.result["score"]
    assert (rounded_by_hand(tuned.folder, net.x) == net.label).mean() == pytest.approx(score["tuned"], abs=0.003)
    assert (rounded_by_hand(tuned.folder, other.x) == other.label).mean() == pytest.approx(score["test"], abs=0.003)
    assert score["tuned"] >= score["threshold"] == pytest.approx(score["base"] * 0.98)


def test_the_model_it_writes_runs_in_stock_onnx_runtime_with_that_score(tuned: Tuned) -> None:
    net, session = points(), onnxruntime.InferenceSession(tuned.folder / "points.onnx")
    found = session.run(None, {"x": net.x})[0].argmax(axis=1)
    assert (found == net.label).mean() == pytest.approx(tuned.result["score"]["tuned"], abs=0.003)
    assert tuned.result["score"]["exported"] == pytest.approx((found == net.label).mean(), abs=0.003)


def test_packed_weights_are_as_small_as_told(tuned: Tuned) -> None:
    stored = (tuned.folder / "weights.bin").read_bytes()
    header = int.from_bytes(stored[8:12], "little")
    assert len(stored) - 12 - header == sum(layer["weight"]["bytes"] for layer in tuned.result["layers"])
    assert {name: each.shape for name, each in read_packed(tuned.folder / "weights.bin").items()} == {
        "fc1.weight": (INPUTS, HIDDEN),
        "fc2.weight": (HIDDEN, 4),
    }


def test_sizes_add_up(tuned: Tuned) -> None:
    result = tuned.result
    for role, total in (("weight", "weight_bits"), ("input", "activation_bits")):
        assert sum(layer[role]["values"] * layer[role]["bits"] for layer in result["layers"]) == result[total]
    values = sum(layer["weight"]["values"] for layer in result["layers"])
    assert result["weight_reduction"] == pytest.approx(32 * values / result["weight_bits"])
    assert result["objective"] == {
        "expression": "weights + activations",
        "before": 32 * (values + INPUTS + HIDDEN),
        "after": result["weight_bits"] + result["activation_bits"],
    }


def test_the_way_leads_to_the_result(tuned: Tuned) -> None:
    result = tuned.result
    last = result["trials"][result["path"][-1]]
    assert last["formats"] == (tuned.folder / "formats.txt").read_text()
    assert last["chosen"] and last["feasible"] and last["score"] == result["score"]["tuned"]
    assert max(trial["iteration"] for trial in result["trials"]) == result["iterations"]


def test_the_table_has_a_line_for_every_layer_and_method(tuned: Tuned) -> None:
    firsts = [line.split()[0] for line in tuned.out.splitlines() if line.strip()]
    assert firsts[:5] == ["points:", "layer", "fc1", "fc2", "all"]
    assert [word for word in firsts if word in ("FLOAT", "weft", "Ristretto", "int8")][:4] == [
        "FLOAT",
        "weft",
        "Ristretto",
        "int8",
    ]
    assert [other["method"] for other in tuned.result["baselines"]] == ["Ristretto", "int8"]
    assert "on the test set" in tuned.out and "alone on tpuv3-like" in tuned.out


def test_every_file_is_named_and_there(tuned: Tuned) -> None:
    told = re.findall(rf"{re.escape(str(tuned.folder))}/(\S+)", tuned.out.replace("\n", " "))
    assert sorted(told) == sorted(path.name for path in tuned.folder.iterdir())
    assert set(told) == {
        *("formats.txt", "points.onnx", "weights.bin", "profile.json", "points.int8.onnx"),
        *("tuning.json", "scores.db", "network.toml"),
    }
    beside = {path for path in tuned.folder.parent.iterdir() if path.suffix in (".svg", ".html")}
    assert beside == {tuned.folder.parent / "search.svg", tuned.folder.parent / "page.html"}
    assert all(f"  {path}\n" in tuned.out for path in beside)
    described = load_descriptor(tuned.folder / "network.toml")
    assert [layer.name for layer in described.layer] == ["fc1", "fc2"] and all(
        layer.weights for layer in described.layer
    )
    assert json.loads((tuned.folder.parent / "again.json").read_text()) == tuned.result


def test_the_profile_is_lighter_and_can_be_simulated(tuned: Tuned) -> None:
    from weft.devices import load_npu
    from weft.devices.costs.layer_costs import estimate, read_profile
    from weft.models.sources import load_model

    model = load_model(str(tuned.folder.parent / "points.onnx"), shapes={"x": (1, INPUTS)})
    before = estimate(model, load_npu("tpuv3-like"))
    assert read_profile(tuned.folder / "profile.json").weight_bytes < before.weight_bytes


def test_scores_are_kept_and_forgotten_and_faithful_or_not_it_is_the_same(weft: Run, tmp_path: Path) -> None:
    command = ("points.onnx", "--data", "samples.npz", "--workers", "1", "--export", "none", "--layers", "fc2")
    results = []
    for more in ((), (), ("--fresh", "--faithful")):
        answer = weft(*command, *more)
        assert answer.code == 0, answer.error
        results.append(json.loads((tmp_path / "points-tuned/tuning.json").read_text()))
        assert (f"{results[-1]['reused']} scores were known from before" in answer.out) == (len(results) == 2)
    first, again, faithful = results
    assert (first["reused"], faithful["reused"]) == (0, 0)
    assert {**first, "reused": 0, "seconds": 0} == {**again, "reused": 0, "seconds": 0}
    assert first["layers"] == faithful["layers"] and first["score"] == faithful["score"]
    assert sum(first["samples"].values()) < sum(faithful["samples"].values())
    assert not (tmp_path / "points-tuned/points.onnx").exists()


def test_the_command_and_the_function_find_the_same(weft: Run, tmp_path: Path) -> None:
    typed = weft(
        *("points.onnx", "--data", "samples.npz", "--test", "samples.npz", "--platform", "int8", "--layers", "fc2"),
        *("--margin", "0.02", "--baseline", "stripes", "--baseline", "int8", "--device", "tpuv3-like", "-o", "typed"),
        *("--workers", "1"),
    )
    assert typed.code == 0, typed.error
    options: dict[str, Any] = {
        "data": "samples.npz", "test": "samples.npz", "platform": "int8", "layers": "fc2", "margin": 0.02,
        "baselines": ["stripes", "int8"], "device": "tpuv3-like", "workers": 1,
    }  # fmt: skip
    called, alone = tune("points.onnx", **options, output=Path("called")), tune("points.onnx", **options)
    found = json.loads((tmp_path / "typed/tuning.json").read_text())
    assert {**called.as_dict(), "seconds": found["seconds"], "run_s": found["run_s"]} == found
    for name in ("formats.txt", "network.toml", "points.onnx", "weights.bin", "profile.json"):
        assert (tmp_path / "called" / name).read_bytes() == (tmp_path / "typed" / name).read_bytes()
    assert {path.name for path in called.files.values()} == {path.name for path in (tmp_path / "called").iterdir()}
    assert not alone.files and alone.tuning == called.tuning and alone.others == called.others
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["called", "typed"]


def test_a_result_is_shown_in_a_line() -> None:
    network = Network("net", (Target("fc1", 100, 10, 1.0, 2.0),))
    tuning = find_formats(network, CallableEvaluator(lambda configuration, subset: 0.9), platform="int8")
    shown = (
        f"Tuning(net on int8: weights 4.0 times smaller, score 0.9000 after 0.9000, {tuning.iterations} configurations)"
    )
    result = TuningResult(tuning=tuning, objective="weights + activations", seconds=1.5)
    assert repr(tuning) == shown and repr(result) == f"TuningResult({shown}, 1.5 s)"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"margin": 7}, "margin = 7: give a part of the score"),
        ({"timeout_s": 0}, "timeout_s = 0: give seconds above 0"),
        ({"export": "qdr"}, "export = qdr: unknown choice 'qdr'"),
        ({"baselines": ["x"]}, "baselines = x: unknown choice 'x'"),
        ({"data": "x.npz", "score": "(.*)"}, "score = (.*) goes with command = ..."),
        ({"metric": "top2"}, "unknown metric 'top2'"),
    ],
)
def test_the_function_names_its_arguments(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(TuneError, match=re.escape(complaint)):
        tune("mlp-m", **options)


def test_a_trained_classifier_brings_its_own_samples(weft: Run, tmp_path: Path) -> None:
    answer = weft("mlp-m", "--platform", "int8", "--layerwise", "NONE", "--workers", "1", "--export", "none")
    assert answer.code == 0, answer.error
    layers = json.loads((tmp_path / "mlp-m-tuned/tuning.json").read_text())["layers"]
    assert {layer["weight"]["bits"] for layer in layers} == {8}


@pytest.mark.parametrize("name", ["mobilenet-v2", "mnist-vit", "light-squeezenet"])
def test_a_model_of_the_list_lacks_nothing_but_samples(weft: Run, name: str) -> None:
    assert weft(name).error.endswith(
        f"weft: {name}: give labelled samples with --data FILE.npz, or score it with --command ...\n"
    )
    unlabelled = weft(name, "--data", "samples.npz", "--target", "onnxruntime")
    assert "x has the shape 400x8, the input " in unlabelled.error


def test_without_samples_a_model_is_priced_with_the_shapes_that_are_given(weft: Run, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="fc1")]
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", "seq", 8]) for name in "xy"]
    weights = numpy_helper.from_array(np.eye(8, dtype=np.float32), "w")
    graph = helper.make_graph(nodes, "rows", ports[:1], ports[1:], [weights])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "rows.onnx"
    )
    priced = ("rows.onnx", "--network", "tiny.toml", "--command", "echo score 1 in {config}", "--score", "score (\\d+)")
    priced += ("--device", "tpuv3-like", "--platform", "int8", "--export", "none")
    assert weft(*priced).error.endswith("pass --shape x=1xAx8\n")
    assert "latency" in weft(*priced, "--shape", "seq=16").out
    assert "rows.onnx: unknown input 'y'" in weft(*priced, "--shape", "y=16").error
    assert (
        "--shape does not apply to --target: samples have sizes"
        in weft(*priced, "--target", "onnxruntime", "--shape", "seq=16").error
    )


def test_layers_and_an_objective_with_the_latency_on_a_device_can_be_chosen(weft: Run) -> None:
    answer = weft(
        *("points.onnx", "--data", "samples.npz", "--layers", "fc2", "--workers", "1", "--export", "none"),
        *("--objective", "max(l.weight_bits for l in layers) + 0 * latency_s", "--platform", "int8"),
        *("--device", "tpuv3-like"),
    )
    assert answer.code == 0, answer.error
    assert "objective: 8 after 32 before (max(l.weight_bits for l in layers) + 0 * latency_s)" in answer.out


def test_layers_of_a_group_share_formats(weft: Run, tmp_path: Path) -> None:
    answer = weft(
        *("points.onnx", "--data", "samples.npz", "--group", "both=fc1,fc2"),
        *("--platform", "int8", "--export", "none", "--workers", "1"),
    )
    assert answer.code == 0, answer.error
    (layer,) = json.loads((tmp_path / "points-tuned/tuning.json").read_text())["layers"]
    assert layer["branches"] == ["fc1", "fc2"] and layer["weight"]["values"] == INPUTS * HIDDEN + HIDDEN * 4


def test_a_network_file_picks_layers_and_sets_ranges_of_a_model(weft: Run, tmp_path: Path) -> None:
    (tmp_path / "pick.toml").write_text(
        'name = "picked"\nplatform = "int8"\n[[layer]]\nname = "fc2"\nweight_max = 4.0\n'
    )
    asked = ("points.onnx", "--data", "samples.npz", "--network", "pick.toml", "--workers", "1", "--export", "qonnx")
    answer = weft(*asked, "--bias-rule", "keep")
    assert answer.code == 0, answer.error
    result = json.loads((tmp_path / "points-tuned/tuning.json").read_text())
    assert result["bias_rule"] == "keep"
    assert result["network"] == "picked" and [layer["name"] for layer in result["layers"]] == ["fc2"]
    first = next(trial for trial in result["trials"] if "fc2.weight FIXED" in trial["formats"])
    assert "fc2.weight FIXED 16 -2" in first["formats"]
    assert result["score"]["exported"] is None and (tmp_path / "points-tuned/points.onnx").exists()


def test_a_command_scores_a_described_network(weft: Run, tmp_path: Path) -> None:
    answer = weft("tiny.toml", "--command", BY_BYTES, "--score", "Accuracy: (.*)", "--margin", "0.05", *FEW)
    assert answer.code == 0, answer.error
    assert re.search(r"search: \d+ configurations, [\d.]+ s$", answer.out, re.M)
    result = json.loads((tmp_path / "tiny-tuned/tuning.json").read_text())
    assert result["score"]["tuned"] == 1000 - len((tmp_path / "tiny-tuned/formats.txt").read_text()) >= 950
    assert {path.name for path in (tmp_path / "tiny-tuned").iterdir()} == {
        "formats.txt",
        "network.toml",
        "tuning.json",
        "scores.db",
    }


def test_the_network_file_may_hold_the_command_and_options_win(weft: Run, tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text(
        f"platform = 'int8'\nmargin = 0.5\nfull = '{BY_BYTES}'\nscore = 'Accuracy: (.*)'\n{SMALL}"
    )
    answer = weft("own.toml", "--margin", "0")
    assert answer.code == 0, answer.error
    result = json.loads((tmp_path / "own-tuned/tuning.json").read_text())
    assert (result["platform"], result["margin"], result["weight_bits"]) == ("int8", 0.0, 3200)
    assert result["score"]["small_base"] is None


def test_a_failing_command_is_shown_with_its_output(weft: Run) -> None:
    command = "echo details of the trouble; test ! -s {config} && echo Accuracy: 1"
    answer = weft("tiny.toml", "--command", command, "--score", "Accuracy: (.*)")
    assert answer.code == 2
    assert "ended with status 1; it last said: details of the trouble" in answer.error
    assert "--on-failure skip goes on" in answer.error
    assert answer.error.startswith("details of the trouble\n")


def test_failures_can_be_skipped(weft: Run) -> None:
    command = "grep -q EXP {config} && exit 7; echo Accuracy: 1"
    asked = ("tiny.toml", "--command", command, "--score", "Accuracy: (.*)", "--on-failure", "skip", *FEW)
    answer = weft(*asked)
    assert answer.code == 0, answer.error
    assert "left out; the first: command" in answer.out and "ended with status 7" in answer.out
    assert "FIXED 2" in answer.out


@pytest.mark.parametrize(
    ("score", "doubt"),
    [(0.0, "the network scored 0 before anything was rounded"), (0.9, "no format changed the score")],
)
def test_what_looks_like_a_mistake_is_said(score: float, doubt: str) -> None:
    network = Network("net", (Target("fc1", 100, 10, 1.0, 2.0),))
    tuning = find_formats(network, CallableEvaluator(lambda configuration, subset: score))
    told = sentences(TuningResult(tuning=tuning, objective="weights + activations", seconds=1.0))
    assert any(line.startswith(f"doubtful: {doubt}") for line in told)


def test_scores_that_differ_and_wide_formats_raise_no_doubt(tuned: Tuned) -> None:
    assert "doubtful" not in tuned.out
    network = Network("net", (Target("fc1", 100, 10, 1.0, 2.0),))
    wide = find_formats(network, CallableEvaluator(lambda configuration, subset: 0.9), platform="int8")
    told = sentences(TuningResult(tuning=wide, objective="weights + activations", seconds=1.0))
    assert not any("doubtful" in line for line in told)


def test_a_model_of_a_fixed_batch_and_two_outputs_is_priced_exported_and_put_beside_int8(
    weft: Run, tmp_path: Path
) -> None:
    """The scored output is not the first, and the last batch is not full."""
    model = onnx.load(tmp_path / "points.onnx")
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 7
    model.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 7
    model.graph.node.append(onnx.helper.make_node("ReduceMax", ["y"], ["top"], keepdims=0))
    model.graph.output.insert(0, onnx.helper.make_tensor_value_info("top", onnx.TensorProto.FLOAT, []))
    onnx.save(model, tmp_path / "seven.onnx")
    answer = weft(
        *("seven.onnx", "--data", "samples.npz", "--scored-output", "y", "--workers", "1", "--platform", "int8"),
        *("--baseline", "int8", "--device", "tpuv3-like"),
    )
    assert answer.code == 0, answer.error
    result = json.loads((tmp_path / "seven-tuned/tuning.json").read_text())
    assert result["score"]["exported"] == pytest.approx(result["score"]["tuned"], abs=0.003)
    (int8,) = result["baselines"]
    assert int8["score"] == pytest.approx(result["score"]["base"], abs=0.02)
    assert result["latency_s"]["after"] <= result["latency_s"]["before"] and result["speedups"]


def test_a_base_that_fails_ends_it_whatever_is_asked(weft: Run) -> None:
    asked = ("tiny.toml", "--command", "exit 1; {config}", "--score", "(.*)", "--on-failure", "skip")
    answer = weft(*asked)
    assert answer.code == 2 and "ended with status 1" in answer.error and "--on-failure" not in answer.error


def interrupted(folder: Path) -> tuple[int, str, list[str]]:
    """Start a search whose fourth command hangs, stop it there; code, error and arguments."""
    (folder / "tiny.toml").write_text(SMALL)
    (folder / "slow.sh").write_text(
        "n=$(wc -c < $1); echo run >> runs; [ -f fast ] || [ $(wc -l < runs) -lt 4 ] || { touch began; sleep 1000; }\n"
        "echo Accuracy: $((1000 - n))\n"
    )
    (folder / "few.toml").write_text('name = "few"\nformats = ["FIXED 2..4", "EXP 2..3"]\n')
    arguments = ["tiny.toml", "--command", "sh slow.sh {config}", "--score", "Accuracy: (.*)", "--margin", "0.05", *FEW]
    code = f"{INTERRUPTIBLE}\nfrom weft.cli.main import main\nmain()"
    command = [sys.executable, "-c", code, "tune", *arguments]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + PATIENCE_S
        while not (folder / "began").exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=PATIENCE_S)[1]
    finally:
        process.kill()
    return process.returncode, error, arguments


def test_an_interrupted_search_goes_on_where_it_was_and_comes_to_the_same(weft: Run, tmp_path: Path) -> None:
    code, error, arguments = interrupted(tmp_path)
    assert code == 130
    assert "scores are in tiny-tuned/scores.db, and the same command goes on from there" in error
    (tmp_path / "fast").touch()
    (tmp_path / "runs").unlink()
    assert weft(*arguments).code == 0
    rest = len((tmp_path / "runs").read_text().splitlines())
    resumed = json.loads((tmp_path / "tiny-tuned/tuning.json").read_text())
    assert weft(*arguments, "-o", "whole").code == 0
    whole = json.loads((tmp_path / "whole/tuning.json").read_text())
    assert resumed["reused"] == 3
    assert len((tmp_path / "runs").read_text().splitlines()) - rest == rest + 3
    assert {**whole, "reused": 0, "seconds": 0} == {**resumed, "reused": 0, "seconds": 0}


def test_a_search_that_is_stopped_before_it_began_promises_no_scores(
    weft: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("weft_tune.tuning_run.carry_out", stopped)
    answer = weft("points.onnx", "--data", "samples.npz")
    assert (answer.code, answer.error) == (130, "weft: stopped before the search began\n")


REFUSED: list[tuple[tuple[str, ...], str]] = [
    (("nothing",), "unknown model 'nothing'"),
    (("points.onnx",), "points.onnx: give labelled samples with --data FILE.npz, or score it with --command"),
    (("points.onnx", "--data", "samples.npz", "--margin", "7"), "--margin 7: give a part of the score"),
    (("points.onnx", "--data", "samples.npz", "--small", "0"), "--small 0: give a part of the samples"),
    (("points.onnx", "--data", "samples.npz", "--export", "qdr"), "--export qdr: unknown choice 'qdr'; did you mean"),
    (("points.onnx", "--data", "samples.npz", "--baseline", "x"), "--baseline x: unknown choice 'x'"),
    (("points.onnx", "--data", "samples.npz", "--on-failure", "x"), "--on-failure x: unknown choice 'x'"),
    (("points.onnx", "--data", "samples.npz", "--platform", "fpgaa"), "unknown platform 'fpgaa'; did you mean fpga"),
    (("points.onnx", "--data", "samples.npz", "--layerwise", "ALL"), "--layerwise 'ALL' must be one of BOTH"),
    (("points.onnx", "--data", "samples.npz", "--bias-rule", "up"), "unknown bias rule 'up'"),
    (("points.onnx", "--data", "samples.npz", "--metric", "top2"), "unknown metric 'top2'"),
    (("points.onnx", "--data", "samples.npz", "--layers", "fc3"), "unknown layer 'fc3'"),
    (("points.onnx", "--data", "samples.npz", "--layers", ","), "--layers names nothing"),
    (("points.onnx", "--data", "samples.npz", "--group", "fc1"), "--group 'fc1' is not of the form NAME=layer,layer"),
    (("points.onnx", "--data", "samples.npz", "--group", "a=fc1", "--group", "a=fc2"), "--group a is given twice"),
    (("points.onnx", "--data", "samples.npz", "--objective", "weight"), "unknown name 'weight'; did you mean"),
    (("points.onnx", "--data", "samples.npz", "--objective", ""), "objective '' is no expression"),
    (("points.onnx", "--data", "samples.npz", "--group", "fc1=fc2"), "'fc1' is a layer already; call the group"),
    (("points.onnx", "--data", "samples.npz", "--objective", "latency_s"), "name the device that it is the time on"),
    (("points.onnx", "--data", "samples.npz", "--device", "tpu"), "tpu"),
    (("points.onnx", "--data", "samples.npz", "--scale", "a/b"), "--scale 'a/b' is no number to multiply by"),
    (("points.onnx", "--data", "samples.npz", "--scale", "1/0"), "--scale '1/0' is no number"),
    (("points.onnx", "--data", "none.npz"), "none.npz"),
    (("points.onnx", "--data", "samples.npz", "--workers", "0"), "--workers 0: give 1 or more"),
    (("points.onnx", "--data", "samples.npz", "--score", "(.*)"), "--score (.*) goes with --command"),
    (("points.onnx", "--data", "samples.npz", "--timeout", "1"), "--timeout 1 goes with --command"),
    (("points.onnx", "--data", "samples.npz", "-o", "samples.npz"), "samples.npz: name a folder, it is a file"),
    (("points.onnx", "--data", "samples.npz", "--json", "no/where.json"), "there is no folder no"),
    (("points.onnx", "--data", "samples.npz", "--database", "samples.npz"), "cannot keep scores there"),
    (("points.onnx", "--data", "samples.npz", "--network", "no.toml"), "no.toml: cannot read the descriptor"),
    (("points.onnx", "--command", "a {config}", "--score", "(.*)"), "nothing says how large its layers' inputs get"),
    (("tiny.toml",), "tiny.toml names no command (full = ...); give --command ... and --score ..."),
    (("tiny.toml", "--command", "a {config}"), "a command needs --score 'Accuracy: (.*)'"),
    (("tiny.toml", "--command", "a", "--score", "(.*)"), "does not say {config}"),
    (("tiny.toml", "--command", "a {config}", "--score", "x"), "has no group"),
    (("tiny.toml", "--command", "a {config}", "--score", "(.*)", "--timeout", "0"), "--timeout 0: give seconds"),
    (("tiny.toml", "--command", "a {config}", "--score", "(.*)", "--test", "x.npz"), "--test x.npz is scored by weft"),
    (("tiny.toml", "--command", "a {config}", "--score", "(.*)", "--data", "x.npz"), "--data x.npz needs an .onnx"),
    (("tiny.toml", "--command", "a {config}", "--score", "(.*)", "--metric", "top5"), "a command measures as it likes"),
    (("tiny.toml", "--command", "a {config}", "--score", "(.*)", "--small", "0.5"), "--small 0.5: a command chooses"),
    (("tiny.toml", "--command", "a {config}", "--score", "(.*)", "--baseline", "int8"), "int8 needs an .onnx model"),
    (("lenet", "--command", "a {config}", "--score", "(.*)", "--baseline", "int8"), "and is not scored by a command"),
    (("tiny.toml", "--network", "tiny.toml"), "both describe the network"),
    (("points.onnx", "--network", "tiny.toml", "--data", "samples.npz", "--layers", "fc1"), "lists its layers already"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "why"), REFUSED, ids=lambda each: each if isinstance(each, str) else None)
def test_what_makes_no_sense_is_refused_in_one_line(weft: Run, arguments: tuple[str, ...], why: str) -> None:
    answer = weft(*arguments)
    assert answer.code == 2
    assert why in answer.error
    assert answer.error.startswith("weft: ") and answer.error.count("\n") == 1


def test_scores_are_not_deleted_by_a_call_that_is_refused(weft: Run, tmp_path: Path) -> None:
    usual = ("points.onnx", "--data", "samples.npz", "-o", "out", "--workers", "1", "--platform", "int8")
    assert weft(*usual).code == 0
    kept = (tmp_path / "out/scores.db").read_bytes()
    refused = weft(*usual, "--fresh", "--objective", "latency_s")
    assert refused.code == 2 and "latency_s" in refused.error
    assert (tmp_path / "out/scores.db").read_bytes() == kept


def test_a_file_of_another_kind_is_not_deleted_by_fresh(weft: Run, tmp_path: Path) -> None:
    answer = weft("points.onnx", "--data", "samples.npz", "--database", "samples.npz", "--fresh")
    assert answer.code == 2 and (tmp_path / "samples.npz").exists()


def test_progress_says_phase_share_and_score_and_what_other_methods_tried() -> None:
    shown = SearchProgress()
    assert shown.text(TuneProgress("reading")) == ""
    told = [
        shown.text(TuneProgress("net", Progress(1, "coarse", 0, 0.9, 0.8, 200.0))),
        shown.text(TuneProgress("net", Progress(2, "width", 7, 0.85, 0.8, 50.0))),
        shown.text(TuneProgress("stripes", tried=3, score=0.5)),
    ]
    assert told == [
        "phase 1, coarse, 0: 100.0% of the start, score 0.9000, needs 0.8000",
        "phase 2, fine-tuning, 7: 25.0% of the start, score 0.8500, needs 0.8000",
        "configuration 3, score 0.5000",
    ]
    assert shown.iteration == 7


def blocks(kind: str) -> list[str]:
    """The blocks of a kind on the page, in order."""
    parts = re.split(r"^```(\w*)\n", (ROOT / "docs/tuning.md").read_text(), flags=re.M)
    return [text for name, text in list(zip(parts[1::2], parts[2::2], strict=True))[::2] if name == kind]


def test_the_command_of_the_documentation_runs(weft: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its eval.py and net.toml, on a platform of one format so that it is quick."""
    (script,) = [each for each in blocks("python") if each.startswith("# eval.py")]
    (network,) = blocks("toml")
    (line,) = [line for each in blocks("") for line in each.splitlines() if line.startswith("$ weft tune net.toml")]
    net = points()
    assert {name: weight.size for name, weight in net.weights.items()} == {"fc1": 128, "fc2": 64}
    np.savez(tmp_path / "net.npz", **net.weights)
    (tmp_path / "eval.py").write_text(script)
    (tmp_path / "net.toml").write_text(network)
    (tmp_path / "half.toml").write_text('name = "half"\nformats = ["FLOAT 16"]\n')
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    answer = weft(*shlex.split(line)[3:], "--platform", "half.toml")
    assert answer.code == 0, answer.error
    result = json.loads((tmp_path / "net-tuned/tuning.json").read_text())
    assert result["score"]["small_base"] != result["score"]["base"] > 0.9
    assert result["weight_bits"] == 16 * 192


def test_the_python_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [each for each in blocks("python") if "CallableEvaluator" in each]
    exec(compile(code, "docs/tuning.md", "exec"), {})
    reduction, form = capsys.readouterr().out.split(" ", 1)
    assert float(reduction) == 6.4 and form.startswith("<1, ")


def test_the_call_of_the_documentation_runs(weft: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = [each for each in blocks("python") if "weft.tune(" in each]
    (tmp_path / "points.onnx").rename(tmp_path / "model.onnx")
    (tmp_path / "samples.npz").rename(tmp_path / "validation.npz")
    exec(compile(code.replace("margin=", "platform='int8', margin="), "docs/tuning.md", "exec"), {})
    assert capsys.readouterr().out == "4.0 tuned/model.onnx\n"


def test_the_package_shows_the_names_of_the_page() -> None:
    import weft
    import weft_tune

    page = (ROOT / "docs/tuning.md").read_text()
    assert [name for name in weft_tune.__all__ if not re.search(rf"\b{name}\b", page)] == []
    assert all(hasattr(weft_tune, name) for name in weft_tune.__all__) and weft.tune is weft_tune.tune


def test_the_torch_of_the_documentation_rounds_weights_and_inputs() -> None:
    torch = pytest.importorskip("torch")
    from weft_tune.numbers.arrays import rounded
    from weft_tune.numbers.configuration import Configuration
    from weft_tune.numbers.format import FIXED

    (code,) = [each for each in blocks("python") if "named_modules" in each]
    names: dict[str, Any] = {}
    exec(compile(code, "docs/tuning.md", "exec"), names)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3))
    weight, x = model[0].weight.detach().numpy().copy(), torch.randn(2, 4)
    forms = {"0.weight": FIXED(4, 1), "0.input": FIXED(3, -1)}
    names["quantise"](model, Configuration(forms))
    by_hand = rounded(x.numpy(), forms["0.input"]) @ rounded(weight, forms["0.weight"]).T
    with torch.no_grad():
        np.testing.assert_allclose(model(x).numpy() - model[0].bias.numpy(), by_hand, atol=1e-6)


def test_the_page_names_every_option_platform_and_baseline() -> None:
    from weft.cli.app import app
    from weft_tune.baselines import BASELINES
    from weft_tune.export import STYLES
    from weft_tune.platform import platforms

    page = (ROOT / "docs/tuning.md").read_text()
    command = typer.main.get_command(app).commands["tune"]  # type: ignore[attr-defined]
    options = [name for option in command.params for name in option.opts if name.startswith("--")]
    assert [name for name in options if name not in page and name != "--json"] == []
    assert [
        name
        for name in (*platforms(), *BASELINES, "int8", *STYLES, "none")
        if f"`{name}`" not in page and name not in page
    ] == []
