"""Compiled models in pieces, on a device's twin; programs of torch stand for compiled ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.runtime.cuda.nets import WIDTH, chain, convolving, drawn, leaving, wanted
from tests.runtime.cuda.uncompiled import packaged, without_compiler
from tests.runtime.exit_nets import EXITS, SIDE, conv_net, samples
from weft.base.errors import ModelError
from weft.models import zoo
from weft.models.onnx_graph import load, save
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda import packager, reference_answers
from weft.runtime.cuda.compiling import CompileLimits, NotCompiled, compile_model
from weft.runtime.cuda.device import TWIN_CUTS, HostDevice
from weft.runtime.cuda.packager import Packager
from weft.runtime.cuda.packages import CompileJob, find
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.torch_compiler import ExportedModel, choose_cuts
from weft.runtime.onnxruntime_cpu.sessions import open_model

OPTIONS = LoadOptions(max_batch=4, engine="compiled", grain_s=1e-9, max_pieces=3, independent_rows=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    without_compiler(monkeypatch)


def job(path: Path, shapes: dict[str, tuple[int, ...]], **more: Any) -> CompileJob:
    wanted = {"rows": (1, 2, 4), "batched": True, "precision": "fp32", "grain_s": 1e-9, "max_pieces": 3}
    return CompileJob(model=path, shapes=shapes, device="cpu", device_name="cpu", **{**wanted, **more})


def cut(whole: CompileJob, folder: Path) -> Path:
    """The packages of a model in the pieces that the compiler chooses."""
    uncut = packaged(whole, folder / "whole")
    cuts = choose_cuts(whole, uncut)
    return packaged(whole.model_copy(update={"cuts": cuts}), folder / "cut") if cuts else uncut


def opened(path: Path, folder: Path, tmp_path: Path, options: LoadOptions = OPTIONS) -> Any:
    prepare_on(HostDevice(), path, options, tmp_path / "cache")
    return prepare_on(HostDevice(), path, replace(options, packages=str(folder)), tmp_path / "cache", learn=False)


def test_a_model_in_pieces_answers_as_the_file_and_its_batches_join_at_cuts(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    model = opened(path, cut(job(path, {"x": (1, WIDTH)}), tmp_path), tmp_path)
    assert model.segments == ("piece 0", "piece 1", "piece 2") and model.timing.engine == "compiled"
    assert "compiled, in 3 pieces" in model.remarks[-1]
    assert all(len(times_s) == 3 for times_s in model.timing.times_s.values()) and model.batching.mergeable
    for rows in (1, 2, 3, 4, 11):  # the last in parts of 4, 4 and 3
        np.testing.assert_allclose(model.run(drawn(rows))["y"], wanted(path, drawn(rows)), rtol=1e-5, atol=1e-6)
    first = [model.launch(Step(0, [BatchPart(drawn(rows))], rows=rows)).outputs[0] for rows in (1, 3)]
    values = model.launch(Step(1, [BatchPart(output.values) for output in first], rows=4)).outputs[0].values
    answers = model.launch(Step(2, [BatchPart(values)], rows=4)).outputs[0].answers["y"]
    both = np.concatenate([wanted(path, drawn(rows)) for rows in (1, 3)])
    np.testing.assert_allclose(answers, both, rtol=1e-5, atol=1e-6)
    model.evict()
    model.restore()
    np.testing.assert_allclose(model.run(drawn(2))["y"], wanted(path, drawn(2)), rtol=1e-5, atol=1e-6)


BERT = {"layers": 2, "hidden": 32, "heads": 2, "seq_len": 5}


@pytest.mark.parametrize(
    ("name", "sizes", "precision"),
    [
        ("convolving", {}, "fp16"),
        pytest.param("bert-base", BERT, "fp32", marks=pytest.mark.long),
        pytest.param("bert-base", BERT, "fp16", marks=pytest.mark.long),
        pytest.param("mobilenet-v2", {"resolution": 32}, "fp32", marks=pytest.mark.long),
        pytest.param("densenet121", {"resolution": 32}, "fp16", marks=pytest.mark.long),
    ],
)
def test_networks_in_pieces_answer_as_the_file(
    name: str, sizes: dict[str, int], precision: str, tmp_path: Path
) -> None:
    path = tmp_path / "net.onnx"
    built = load(convolving(path)) if name == "convolving" else zoo.materialise(zoo.build(name, **sizes))
    save(built, path)
    shapes = {v.name: (1, *(d.dim_value for d in v.type.tensor_type.shape.dim[1:])) for v in built.graph.input}
    options = replace(OPTIONS, precision=precision, max_pieces=6)
    whole = job(path, shapes, precision=precision, max_pieces=6)
    model = opened(path, cut(whole, tmp_path), tmp_path, options)
    assert len(model.segments) == 6, model.remarks
    session, rng = open_model(path, 1), np.random.default_rng(0)
    feed = {spec.name: rng.standard_normal((4, *shapes[spec.name][1:])).astype(np.float32) for spec in model.inputs}
    feed = {name: array if name in _floats(session) else array.astype(np.int64) * 0 for name, array in feed.items()}
    results = model.run(feed)
    for spec, expected in zip(model.outputs, session.run([spec.name for spec in model.outputs], feed), strict=True):
        near = np.abs(expected).max() * (1e-2 if precision == "fp16" else 1e-4)
        np.testing.assert_allclose(results[spec.name], expected, atol=near)


def _floats(session: Any) -> set[str]:
    return {value.name for value in session.get_inputs() if value.type == "tensor(float)"}


@pytest.mark.parametrize(
    ("precision", "max_pieces"),
    [("fp32", 3), ("fp16", 9), pytest.param("fp32", 9, marks=pytest.mark.long)],
)
def test_samples_leave_a_compiled_model_at_its_exits(precision: str, max_pieces: int, tmp_path: Path) -> None:
    path, sizes = conv_net(tmp_path / "exits.onnx"), (1, SIDE, SIDE)
    options = replace(OPTIONS, exits=EXITS, precision=precision)
    at_exits = job(path, {"x": (1, *sizes)}, exits=EXITS, precision=precision, max_pieces=max_pieces)
    model = opened(path, cut(at_exits, tmp_path), tmp_path, options)
    pieces = len(model.segments)
    assert model.timing.engine == "compiled" and model.batching.mergeable and (pieces > 3) == (max_pieces > 3)
    ends = {spec.segment: spec.output for spec in model.exits.specs}
    assert tuple(ends.values()) == EXITS and [*ends] == sorted(ends) and max(ends) == pieces - 1
    session = open_model(path, 1)

    def launched(segment: int, feed: Any, *parts: BatchPart) -> Any:
        """The values after a segment; *feed*: the inputs of the rows that are there."""
        step = model.launch(Step(segment, parts, rows=len(feed)))
        assert [*step.outputs[0].answers] == [name for at, name in ends.items() if at == segment]
        assert step.onward == (segment not in ends)
        check(step.outputs[0].answers, feed)
        return step.outputs[0].values

    def check(answers: dict[str, Any], feed: Any) -> None:
        for name, answer in answers.items():
            expected = session.run([name], {"x": feed})[0]
            near = np.abs(expected).max() * (1e-2 if precision == "fp16" else 1e-5)
            np.testing.assert_allclose(answer, expected, atol=near)

    one, other = samples(3, sizes), samples(9, sizes, seed=2)
    assert [*model.run({"x": other})] == [*EXITS]
    check(model.run({"x": other}), other)  # more than the largest batch: in parts
    first, second, both = {"x": one}, {"x": other[:2]}, np.concatenate([one[[2, 0]], other[:2]])
    after_exit = min(ends) + 1
    for segment in range(after_exit):
        first, second = launched(segment, one, BatchPart(first)), launched(segment, other[:2], BatchPart(second))
    values = launched(after_exit, both, BatchPart(first, [2, 0]), BatchPart(second))
    for segment in range(after_exit + 1, pieces):
        values = launched(segment, both, BatchPart(values))


def test_a_compiled_model_is_checked_at_its_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = leaving(tmp_path / "leaving.onnx")
    exits, options = ("early", "late"), replace(OPTIONS, exits=("early", "late"))
    folder = packaged(job(path, {"x": (1, WIDTH)}, exits=exits), tmp_path / "packages")
    read = reference_answers.read
    wrong = ((inputs, {**answers, "early": answers["early"] + 1}) for inputs, answers in read(folder))
    monkeypatch.setattr(reference_answers, "read", lambda folder: wrong)
    model = opened(path, folder, tmp_path, options)
    assert "stays with ONNX Runtime: compiled, it differs from float32 by" in model.remarks[-1]


def test_a_compiled_model_is_captured_and_measured_on_parts_of_the_device(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    shared = replace(OPTIONS, shares=True)
    model = opened(path, cut(job(path, {"x": (1, WIDTH)}), tmp_path), tmp_path, shared)
    assert model.timing.engine == "compiled" and len(model.segments) == 3
    assert model.shares.cuts == TWIN_CUTS and sorted(model.shares.like) == [1, 2, 3, 4]
    assert all(len(rung.parts) == len(TWIN_CUTS.parts) for rung in model._rungs)
    np.testing.assert_allclose(model.run(drawn(3))["y"], wanted(path, drawn(3)), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_fast_enough_stays_whole(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    slow = job(path, {"x": (1, WIDTH)}, grain_s=10.0)
    assert choose_cuts(slow, packaged(slow, tmp_path / "packages")) == ()


def test_no_cut_is_crossed_by_a_tensor_without_rows(tmp_path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper

    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0]),
        helper.make_node("Tanh", ["t"], ["u"]),
        helper.make_node("Transpose", ["u"], ["r"], perm=[1, 0]),
        helper.make_node("Relu", ["r"], ["s"]),
        helper.make_node("Tanh", ["s"], ["y"]),
    ]
    both = [value(name, TensorProto.FLOAT, ["n", WIDTH]) for name in "xy"]
    graph = helper.make_graph(nodes, "turned", both[:1], both[1:])
    path = tmp_path / "turned.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    program = ExportedModel(job(path, {"x": (1, WIDTH)}), 4).cut_program()
    assert [name.partition("_")[0] for name in program.choose_cuts([1.0], 1e-3, 10)] == ["relu", "tanh", "to"]


def test_what_onnx_runtime_cuts_is_compiled_with_a_grain_unless_sizes_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[CompileJob] = []

    def compile_model(job: CompileJob, folder: Path, limits: CompileLimits) -> Path:
        seen.append(job)
        return folder

    monkeypatch.setattr(packager, "compile_model", compile_model)
    for sizes in (("n", WIDTH), ("n", "w")):
        path = chain(tmp_path / "chain.onnx", sizes=sizes)
        for grain_s in (1e-9, 1.0):
            options = replace(OPTIONS, grain_s=grain_s, shapes={"x": (1, WIDTH)})
            model = prepare_on(HostDevice(), path, options)
            Packager("cuda:twin", "cpu").packages(path, options, model, tmp_path, compile_now=True)
    assert [each.grain_s for each in seen] == [1e-9, None, None, None] and all(each.batched for each in seen)
    path = chain(tmp_path / "chain.onnx")
    model = prepare_on(HostDevice(runs_sessions=False), path, replace(OPTIONS, grain_s=1.0))
    Packager("cuda:twin", "cpu").packages(path, replace(OPTIONS, grain_s=1.0), model, tmp_path, compile_now=True)
    assert seen[-1].grain_s == 1.0, "torch cuts nothing, so the compiler has to find out"


def test_a_model_with_exits_is_compiled_unless_sizes_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CompileJob] = []
    monkeypatch.setattr(packager, "compile_model", lambda job, folder, limits: seen.append(job))
    path, options = conv_net(tmp_path / "exits.onnx", marked=True), replace(OPTIONS, grain_s=1.0)
    model = prepare_on(HostDevice(), path, options)
    Packager("cuda:twin", "cpu").packages(path, options, model, tmp_path, compile_now=True)
    assert [(job.exits, job.grain_s, job.first_stage().exits) for job in seen] == [(EXITS, None, EXITS)]
    model.inputs = tuple(spec._replace(shape=(-1, 1, -1, -1)) for spec in model.inputs)
    with pytest.raises(ModelError, match="it has exits and free sizes"):
        Packager("cuda:twin", "cpu").packages(path, options, model, tmp_path, compile_now=True)


def test_one_row_and_the_largest_batch_are_compiled_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, seen, cache = chain(tmp_path / "chain.onnx"), list[CompileJob](), tmp_path / "cache"

    def compile_model(job: CompileJob, folder: Path, limits: CompileLimits) -> Path:
        seen.append(job)
        if job.grain_s is not None:
            raise NotCompiled("time is up")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return packaged(job, job.folder(folder))

    monkeypatch.setattr(packager, "compile_model", compile_model)
    options = replace(OPTIONS, grain_s=1e-9, shapes={"x": (1, WIDTH)})
    model = prepare_on(HostDevice(), path, options)

    def code(*, compile_first: bool, compile_now: bool = True) -> Any:
        asked = replace(options, compile_first=compile_first)
        return Packager("cuda:twin", "cpu").packages(path, asked, model, cache, compile_now=compile_now)

    assert code(compile_first=True, compile_now=False) is None
    first = code(compile_first=True)
    assert not first.complete and find(first.folder) is not None
    assert code(compile_first=True) == code(compile_first=False, compile_now=False) == first
    assert code(compile_first=False) == first._replace(complete=True)
    assert "is compiled for 1 and 4 rows only: time is up" in caplog.text
    assert [(each.rows, each.grain_s) for each in seen] == [((1, 4), None), ((1, 2, 4), 1e-9)]


@pytest.mark.long
def test_the_compiler_cuts_what_takes_longer_than_a_grain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = chain(tmp_path / "chain.onnx")
    folder = compile_model(job(path, {"x": (1, WIDTH)}), tmp_path / "packages", CompileLimits(1800, 8 << 30, 2))
    manifest = find(folder)
    assert manifest is not None and len(manifest.pieces) == 3 and sorted(manifest.packages) == [1, 2, 4]
    model = opened(path, folder, tmp_path)
    for rows in (1, 4, 11):
        np.testing.assert_allclose(model.run(drawn(rows))["y"], wanted(path, drawn(rows)), rtol=1e-5, atol=1e-6)


@pytest.mark.long
def test_the_compiler_cuts_at_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    path = conv_net(tmp_path / "exits.onnx")
    at_exits = job(path, {"x": (1, 1, SIDE, SIDE)}, exits=EXITS, rows=(1, 4), grain_s=None)
    folder = compile_model(at_exits, tmp_path / "packages", CompileLimits(1800, 8 << 30, 2))
    model = opened(path, folder, tmp_path, replace(OPTIONS, exits=EXITS, grain_s=1.0))
    assert model.timing.engine == "compiled" and len(model.segments) == 3, model.remarks
    answers, session = model.run({"x": samples(3)}), open_model(path, 1)
    for name, expected in zip(EXITS, session.run([*EXITS], {"x": samples(3)}), strict=True):
        np.testing.assert_allclose(answers[name], expected, atol=1e-5 * np.abs(expected).max())
