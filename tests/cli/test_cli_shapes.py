"""Shapes on the command line and in files: one spelling wherever a model is named."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cli.test_cli import refused, run
from tests.models.onnx_graphs import node, proto, tensor
from weft.base.errors import InputError, ModelError
from weft.cli.streams import parse_stream
from weft.planning.survey.measuring import subject
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
    from weft.planning.asked import ask

    asked = ask(parse_workload({"stream": [parse_stream(f"{STREAM},{key}")]}), words / "scratch")
    assert asked.models[0].config.shapes == {"ids": [1, 128], "mask": [1, 128]}
    assert asked.workload.stream[0].shapes == {"ids": (1, 128), "mask": (1, 128)}


def test_plan_takes_the_option_too(capsys, words):
    said = refused(capsys, "plan", "-s", STREAM, "--shape", "seqq=128")
    assert "words.onnx: unknown input 'seqq'; the inputs are: ids [batch, seq]; mask [batch, seq]" in said


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
    assert ServerConfig(shapes=("words:ids=1x32",)).shapes == ("words:ids=1x32",)


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
