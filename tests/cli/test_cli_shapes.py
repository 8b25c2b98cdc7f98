"""Shapes on the command line and in files: one spelling wherever a model is named."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.onnx_graphs import node, proto, tensor, weight
from tests.support.commands import refused, run
from weft.base.errors import InputError, ModelError
from weft.cli.common import parse_stream, with_shapes
from weft.planning.survey.host_measurement import subject
from weft.serving.config import ModelConfig, ServerConfig
from weft.serving.repository import Repository
from weft.workloads.requests import parse_workload
from weft_map.scenario import ScenarioTask

STREAM = "words.onnx:rate=5,deadline=100"


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """words.onnx, which takes two inputs of one free length; more.onnx is the same."""
    inputs = [tensor("ids", "batch", "seq"), tensor("mask", "batch", "seq")]
    model = proto([node("Add", ["ids", "mask"], ["y"])], inputs, [tensor("y", "batch", "seq")])
    model.ir_version = 9
    del model.opset_import[1:]  # ONNX Runtime knows no others
    for name in ("words.onnx", "more.onnx"):
        (tmp_path / name).write_bytes(model.SerializeToString())
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("shape", ["ids=1x128", "seq=128", "words:seq=128", "words.onnx:mask=1x128"])
def test_an_axis_is_given_once(capsys, words, shape):
    code, out, _ = run(capsys, "models", "show", "words.onnx", "--shape", shape, "--json", "-")
    assert code == 0 and json.loads(out)["inputs"] == {"ids": [1, 128], "mask": [1, 128]}


@pytest.mark.parametrize("key", ["shape=seq=128", "shape=ids=1x128", "shape=ids=1x128,shape=mask=1x128"])
def test_plans_carry_an_axis_over_too(words, key):
    from weft.planning.plan_request import ask

    asked = ask(parse_workload({"stream": [parse_stream(f"{STREAM},{key}")]}), words / "scratch")
    assert asked.models[0].config.shapes == {"ids": [1, 128], "mask": [1, 128]}
    assert asked.workload.stream[0].shapes == {"ids": (1, 128), "mask": (1, 128)}


def test_plan_takes_the_option_too(capsys, words):
    said = refused(capsys, "plan", "-s", STREAM, "--shape", "seqq=128")
    assert "words.onnx: unknown input 'seqq'; the inputs are: ids [batch, seq]; mask [batch, seq]" in said


LOAD = """
device = "tpuv3-like"
duration_s = 0.05
warmup_s = 0.01
[[stream]]
model = "words.onnx"
rate = 1000
deadline_ms = 100
"""
MACHINES = """
[kinds.npu]
device = "tpuv3-like"
memory_gib = 16
[[machine]]
kind = "npu"
"""


@pytest.mark.parametrize(
    "command",
    [("simulate", "load.toml"), ("sustain", "load.toml", "-p", "edf", "--seeds", "1", "-j", "1", "--tolerance", "0.5"),
     ("place", "load.toml", "--machines", "machines.toml", "--fluid")],
)  # fmt: skip
def test_commands_of_workloads_take_the_option_too(capsys, words, command):
    product = [node("MatMul", ["ids", "w"], ["y"])], [tensor("ids", "batch", "seq", 4)], ["y"], [weight("w", 4, 4)]
    (words / "words.onnx").write_bytes(proto(*product).SerializeToString())
    (words / "load.toml").write_text(LOAD)
    (words / "machines.toml").write_text(MACHINES)
    assert run(capsys, *command, "--shape", "seq=128")[0] == 0
    assert "unknown input 'seqq'; the inputs are: ids" in refused(capsys, *command, "--shape", "seqq=128")


def test_the_option_counts_more_than_the_file_and_leaves_other_streams_alone(words):
    stream = {"model": "words.onnx", "rate": 1, "shapes": {"ids": "1x8", "mask": "1x8"}}
    workload = parse_workload({"stream": [stream, {**stream, "model": "more.onnx"}]})
    changed = with_shapes(workload, ["words:ids=1x16"])
    assert changed.stream[0].shapes == {"ids": (1, 16), "mask": (1, 8)}
    assert changed.stream[1] == workload.stream[1] and with_shapes(workload, None) is workload


def test_a_shape_that_would_come_to_nothing_is_refused(capsys, words):
    (words / "load.toml").write_text(LOAD)
    for command in (("simulate", "load.toml"), ("compare", "-w", "load.toml"), ("sustain", "load.toml")):
        said = refused(capsys, *command, "--device", "h200", "--shape", "seq=128")
        assert "--shape does not apply to h200: its models are measured already" in said
    workload = parse_workload({"stream": [{"model": "m.onnx", "rate": 1, "profiles": ["p.json"], "max_batch": 1}]})
    with pytest.raises(InputError, match=r"--shape does not apply to m\.onnx, whose stream has profiles"):
        with_shapes(workload, ["seq=128"])


def test_the_former_spelling_is_read_with_a_note(capsys):
    assert parse_stream("m.onnx:rate=1,shape=x:1x3,value=sr:16000") == parse_stream(
        "m.onnx:rate=1,shape=x=1x3,value=sr=16000"
    )
    notes = capsys.readouterr().err.splitlines()
    assert notes == [
        "weft: write shape=x=1x3; the next release does not read shape=x:1x3",
        "weft: write value=sr=16000; the next release does not read value=sr:16000",
    ]


@pytest.mark.parametrize("shape", ["1x3", 7, [1, 3]])
def test_all_files_take_what_the_command_line_takes(shape):
    read = [7] if shape == 7 else [1, 3]
    assert ModelConfig(shapes={"x": shape}).shapes == {"x": read}
    stream = parse_workload({"stream": [{"model": "m", "rate": 1, "shapes": {"x": shape}}]}).stream[0]
    assert stream.shapes == {"x": tuple(read)} == ScenarioTask(model="m", shapes={"x": shape}).shapes


def test_a_server_is_given_shapes_over_those_of_its_files(words):
    (words / "words.toml").write_text('[shapes]\nids = "1x16"\n')
    sources, scratch = ["words.onnx", "more.onnx"], words / "scratch"
    found = Repository(sources, scratch, shapes=["words:ids=1x32", "more.onnx:seq=8"])
    for _ in range(2):
        assert found.entry("words").config.shapes == {"ids": [1, 32]}
        assert found.entry("more").config.shapes == {"seq": [8]}
        found.scan()
    assert ServerConfig(shapes=("words:ids=1x32",)).loading.shapes == ("words:ids=1x32",)


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (("models", "show", "words.onnx"), "pass --shape ids=1xA"),
        (("compare", "-m", "words.onnx,more.onnx"), "pass --shape words.onnx:ids=1xA"),
        (("explore", "npu", "-m", "words.onnx", "-m", "more.onnx"), "pass --shape words.onnx:ids=1xA"),
        (("map", "--soc", "xavier", "-m", "words.onnx,more.onnx"), "pass --shape words.onnx:ids=1xA"),
        (("plan", "-s", STREAM), f"as -s {STREAM},shape=ids=1x128, or give samples"),
        (("plan", "load.toml"), 'as shapes = { "ids" = "1x128" } in its [[stream]], or give samples'),
        (("simulate", "-w", "load.toml"), 'as shapes = { "ids" = "1xA" } in its [[stream]]'),
        (("map", "map.toml"), 'add shapes = { "ids" = "1xA" } to its [[task]]'),
    ],
)
def test_advice_is_in_the_form_in_which_it_was_asked(capsys, words, command, advice):
    (words / "load.toml").write_text('[[stream]]\nmodel = "words.onnx"\nrate = 5\ndeadline_ms = 100\n')
    (words / "map.toml").write_text('soc = "xavier"\n[[task]]\nmodel = "words.onnx"\n')
    code, _, error = run(capsys, *command)
    assert code == 2 and error.splitlines()[-1].endswith(advice)


def test_models_are_measured_with_the_shapes_of_axes(words):
    assert subject("words.onnx", {"seq": (128,)}).shapes == {"ids": (1, 128), "mask": (1, 128)}
    with pytest.raises(ModelError, match=r"words.onnx: unknown input 'idx'"):
        subject("words.onnx", {"idx": (1, 2)})


@pytest.mark.long
def test_this_machine_measures_a_model_with_the_shape_that_is_given(capsys, words):
    measured = ("profile", "words.onnx", "--device", "host", "--lanes", "1", "--seconds", "0.2")
    code, out, _ = run(capsys, *measured, "--shape", "seq=128")
    assert code == 0 and "words" in out
    code, _, error = run(capsys, *measured)
    assert code == 2 and error.splitlines()[-1].endswith("pass --shape ids=1x128")


@settings(max_examples=40)
@given(st.one_of(st.text(max_size=40), st.from_regex(r"m:(shape|value|rate)=[a-z:=0-9x,.]{0,20}", fullmatch=True)))
def test_reading_a_stream_raises_nothing_but_our_error(text):
    with contextlib.suppress(InputError):
        assert parse_stream(text)["model"]
