"""Stitched models on a device, on its twin: every mix of tasks, rounds, coming and going, and graphs for known rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.runtime.cuda.stitched import CUT, Steady, begin, check_answers, opened, samples, through
from tests.support.stitched import NETS, head_output, needs_rows, net_output, pictures, stitched_file, task_metadata
from weft.base.errors import ModelError
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda import onnx_files, segments
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.engine import CudaEngine
from weft.runtime.cuda.preparing import prepare_on
from weft.runtime.cuda.round_graphs import RoundGraphs, weights_outside
from weft.runtime.cuda.rounds import StitchedDeviceModel, busiest, round_times, rounds
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import prepare
from weft.runtime.onnxruntime_cpu.sessions import WEIGHTS
from weft.runtime.stitched import TaskSpec

UNTOLD = "not in the form fused: it does not say how its models share weights; stitch it again"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stitched_file(tmp_path_factory.mktemp("stitched") / "body.onnx", form="mts")


@pytest.fixture(scope="module")
def body(file: Path) -> CpuModel:
    return prepare(file, LoadOptions(max_batch=2))


@pytest.fixture(scope="module")
def model(file: Path) -> StitchedDeviceModel:
    return opened(file)


# --- any mix ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["mts", "split"])
def test_every_mix_of_tasks_gives_what_the_cpu_gives(form: str, tmp_path: Path) -> None:
    path = stitched_file(tmp_path / "body.onnx", form=form)
    found, body = opened(path), prepare(path, LoadOptions(max_batch=2))
    assert len(found.segments) == 6 and not found.batching.mergeable and found.batching.batchable
    assert [each.rows for each in found._rungs] == [1, 2], "so that three rows of a task take two rounds"
    for mix in itertools.product(range(4), repeat=3):
        if any(mix):
            check_answers(through(found, samples(found, mix)), body, samples(found, mix))


def test_requests_of_one_task_keep_their_order(model: StitchedDeviceModel, body: CpuModel) -> None:
    port = model.tasks.specs[1].inputs["image"]
    given = [{port: pictures(1, 7)}, *samples(model, (1, 0, 1)), {port: pictures(2, 8)}, {port: pictures(0)}]
    check_answers(through(model, given), body, given)


def test_a_batch_of_no_rows_gives_none(model: StitchedDeviceModel) -> None:
    found = through(model, [{model.tasks.specs[0].inputs["image"]: pictures(0)}])
    assert [each.shape for each in found.values()] == [(0, *net.outputs[0].shape) for net in NETS]


def test_of_a_request_some_rows_may_be_taken(model: StitchedDeviceModel) -> None:
    port, (output,) = model.tasks.specs[2].inputs["image"], model.tasks.specs[2].outputs.values()
    (made,) = model.launch(Step(0, [BatchPart({port: pictures(3)}, [2, 0])], 2)).outputs
    for segment in range(1, len(model.segments)):
        (made,) = model.launch(Step(segment, [BatchPart(made.values)], 0)).outputs
    np.testing.assert_allclose(made.answers[output], net_output(NETS[2], pictures(3)[[2, 0]]), atol=1e-5)


def test_batches_in_turns_keep_what_is_theirs(model: StitchedDeviceModel, body: CpuModel) -> None:
    given = [samples(model, mix, 10 * at) for at, mix in enumerate([(1, 0, 2), (0, 2, 1), (3, 0, 0), (5, 1, 0)])]
    values = [begin(model, each).values for each in given]
    for segment in range(1, len(model.segments)):  # some side by side in one step, as where they met half-way
        made = [*model.launch(Step(segment, [BatchPart(each) for each in values[:2]], 0)).outputs]
        made += [model.launch(Step(segment, [BatchPart(each)], 0)).outputs[0] for each in values[2:]]
        values = [each.values for each in made]
    for one, each in zip(given, made, strict=True):
        check_answers(dict(each.answers), body, one)


def test_inputs_that_a_later_segment_takes_are_kept_while_others_begin(tmp_path: Path) -> None:
    path = needs_rows(tmp_path / "both.onnx")
    model = opened(path)
    (late,) = {name[0] for each in model.blueprint.segments[1:] for name in each.inputs if name in ("a.x", "b.x")}
    given = [np.full((2, 2, 2), fill, np.float32) for fill in (1, 2)]
    values = [begin(model, [{f"{late}.x": each}]).values for each in given]
    for segment in range(1, len(model.segments)):
        made = [model.launch(Step(segment, [BatchPart(each)], 2)).outputs[0] for each in values]
        values = [each.values for each in made]
    for row, each in zip(given, made, strict=True):
        np.testing.assert_allclose(each.answers[f"{late}.y"], head_output(path, late, row), rtol=1e-5)


def test_a_graph_that_needs_rows_of_every_task_has_them(tmp_path: Path) -> None:
    path = needs_rows(tmp_path / "both.onnx")
    model = opened(path)
    row = np.random.default_rng(0).standard_normal((2, 2, 2)).astype(np.float32)
    found = through(model, [{"b.x": row}])
    np.testing.assert_allclose(found["b.y"], head_output(path, "b", row), rtol=1e-5)
    assert found["a.y"].shape == (0, 3) and model.remarks == (UNTOLD,)


# --- rounds -----------------------------------------------------------------------------------------------------------


def test_the_busiest_task_of_random_batches() -> None:
    rng = np.random.default_rng(0)
    for rows, tasks in ((1, 3), (4, 3), (6, 3), (32, 3), (8, 8), (32, 32), (128, 32)):
        drawn = rng.multinomial(rows, [1 / tasks] * tasks, 4000).max(axis=1)
        most = busiest(rows, tasks)
        assert np.mean(drawn <= most) >= 0.45 and np.mean(drawn <= most - 1) < 0.55, (rows, tasks)
    assert [busiest(rows, 1) for rows in (1, 2, 50)] == [1, 2, 50], "of a task alone"


def test_a_batch_takes_the_largest_rounds_and_a_smaller_one_for_the_rest() -> None:
    sizes = [1, 2, 4, 6]
    assert [rounds(most, sizes) for most in (0, 1, 3, 6, 7, 15)] == [[1], [1], [4], [6], [6, 1], [6, 6, 4]]


def test_a_batch_is_expected_to_take_what_its_busiest_task_does() -> None:
    found = {1: (1.0, 10.0), 2: (2.0, 20.0)}
    assert [busiest(rows, 3) for rows in range(1, 8)] == [1, 1, 2, 2, 3, 3, 4]
    times = round_times(found, 7, 3)
    assert [times[rows] for rows in (1, 2, 3, 4)] == [(1.0, 10.0), (1.0, 10.0), (2.0, 20.0), (2.0, 20.0)]
    assert times[5] == times[6] == (3.0, 30.0), "a round of two rows and one of one"
    assert times[7] == (4.0, 40.0)


class Dull(HostDevice):
    """A twin on which a row takes as long in any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def timed(self, run: Callable[[], None]) -> float:
        self.rows += 1
        return 1e-3 * self.rows


def test_rounds_are_as_large_as_pays_and_batches_as_was_asked(tmp_path: Path) -> None:
    few = prepare_on(Dull(), needs_rows(tmp_path / "both.onnx"), LoadOptions(max_batch=8))
    assert isinstance(few, StitchedDeviceModel) and [each.rows for each in few._rungs] == [1]
    told = "rounds of each model's rows up to 1: batch 2 gains less than 5%"
    assert few.batching.max_batch == 8 and few.remarks == (UNTOLD, told)
    assert sum(few.timing.times_s[8]) > sum(few.timing.times_s[1]), "in several rounds"


def test_batches_hold_what_rounds_do_where_nothing_was_asked(tmp_path: Path) -> None:
    path = needs_rows(tmp_path / "both.onnx")
    assert prepare_on(Dull(), path, LoadOptions()).batching.max_batch == 2
    most = opened(path, LoadOptions())
    assert most.batching.max_batch == 32 and [each.rows for each in most._rungs] == [1, 2, 4, 8, 16, busiest(32, 2)]


# --- coming and going -------------------------------------------------------------------------------------------------


def test_a_model_that_rests_answers_when_it_is_back(file: Path, body: CpuModel) -> None:
    engine = CudaEngine(TWIN)
    engine._device = Steady()
    found = engine.open(file, LoadOptions(grain_s=1e-9, max_pieces=3, max_batch=4, rests=True), None, learn=True)
    assert isinstance(found, StitchedDeviceModel) and found.residency.moving_bytes > 0
    with pytest.raises(MemoryError, match="not in the device's memory"):
        begin(found, samples(found, (1, 0, 0)))
    for turn, mix in enumerate([(1, 0, 2), (0, 1, 0)]):
        found.restore()
        inputs = [rung.tensors[spec.name] for rung in found._rungs for spec in found.inputs]
        assert all(np.isfinite(each).all() for each in inputs), "of what nobody asks for"
        check_answers(through(found, samples(found, mix, turn)), body, samples(found, mix, turn))
        found.evict()


def test_it_is_learned_once(file: Path, body: CpuModel, tmp_path: Path) -> None:
    learned = opened(file, CUT, tmp_path)
    again = opened(file, CUT, tmp_path, learn=False)
    assert (again.segments, again.timing.times_s, again.tasks) == (
        learned.segments,
        learned.timing.times_s,
        learned.tasks,
    )
    assert [each.rows for each in again._rungs] == [1, 2] and again.batching.max_batch == 4
    check_answers(through(again, samples(again, (2, 1, 0))), body, samples(again, (2, 1, 0)))


def test_weights_lie_there_once_for_all_rounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "SHARED_FROM_BYTES", 1)
    path = stitched_file(tmp_path / "body.onnx", form="separate")  # others have tables by row
    one, several = (opened(path, LoadOptions(grain_s=1e-9, max_pieces=2, max_batch=most)) for most in (1, 4))
    assert len(several._rungs) > len(one._rungs) and several._weights.bytes == one._weights.bytes > 0


# --- what cannot be ---------------------------------------------------------------------------------------------------


def mixing(path: Path) -> Path:
    """Two tasks whose rows are compared with one another."""
    nodes = [
        helper.make_node("Concat", ["a.x", "b.x"], ["both"], axis=0),
        helper.make_node("ReduceMax", ["both", "axes"], ["most"], keepdims=1),
        helper.make_node("Sub", ["a.x", "most"], ["a.y"]),
        helper.make_node("Sub", ["b.x", "most"], ["b.y"]),
    ]
    ports = [helper.make_tensor_value_info(f"{name}.x", TensorProto.FLOAT, [f"{name}_rows", 4]) for name in "ab"]
    outputs = [helper.make_tensor_value_info(f"{name}.y", TensorProto.FLOAT, [f"{name}_out", 4]) for name in "ab"]
    axes = numpy_helper.from_array(np.array([0]), "axes")
    graph = helper.make_graph(nodes, "mixing", ports, outputs, [axes])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    tasks = [TaskSpec(name=name, inputs={"x": f"{name}.x"}, outputs={"y": f"{name}.y"}) for name in "ab"]
    helper.set_model_props(proto, task_metadata(tasks))
    onnx.save(proto, path)
    return path


@pytest.mark.parametrize("most", [1, 2])
def test_models_whose_rows_are_not_kept_apart_are_refused(most: int, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="is stitched, but its models cannot be run together"):
        prepare_on(HostDevice(), mixing(tmp_path / "mixing.onnx"), LoadOptions(max_batch=most))


def test_exits_and_fixed_rows_are_refused(file: Path, tmp_path: Path) -> None:
    outputs = tuple(
        name for task in prepare(file, LoadOptions(max_batch=1)).tasks.specs for name in task.outputs.values()
    )
    with pytest.raises(ModelError, match="stitched models cannot be left at exits"):
        prepare_on(HostDevice(), file, LoadOptions(exits=outputs))
    with pytest.raises(ModelError, match="stitched with a fixed number of rows"):
        prepare_on(HostDevice(), stitched_file(tmp_path / "fixed.onnx", dynamic=False), LoadOptions())


def choosy(path: Path) -> Path:
    """One task, and what crosses every cut is a choice."""
    nodes = [
        helper.make_node("Greater", ["a.x", "zero"], ["chosen"]),
        helper.make_node("Not", ["chosen"], ["other"]),
        helper.make_node("Where", ["other", "zero", "a.x"], ["a.y"]),
    ]
    port, output = (helper.make_tensor_value_info(f"a.{name}", TensorProto.FLOAT, [f"{name}_rows", 4]) for name in "xy")
    zero = numpy_helper.from_array(np.zeros(1, np.float32), "zero")
    graph = helper.make_graph(nodes, "choosy", [port], [output], [zero])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    helper.set_model_props(proto, task_metadata([TaskSpec(name="a", inputs={"x": "a.x"}, outputs={"y": "a.y"})]))
    onnx.save(proto, path)
    return path


def test_what_cannot_be_cut_stays_whole_and_says_so(tmp_path: Path) -> None:
    found = opened(choosy(tmp_path / "choosy.onnx"))
    assert len(found.segments) == 1
    assert found.remarks == (UNTOLD, "stays whole: something else than floating-point numbers crosses every cut")
    row = np.arange(-4, 4, dtype=np.float32).reshape(2, 4)
    np.testing.assert_array_equal(through(found, [{"a.x": row}])["a.y"], np.maximum(row, 0))


# --- graphs for known rows --------------------------------------------------------------------------------------------


def computed(model: onnx.ModelProto, feed: dict[str, Any], folder: Path) -> list[Any]:
    onnx.save(model, folder / "computed.onnx")
    session = ort.InferenceSession(str(folder / "computed.onnx"), providers=["CPUExecutionProvider"])
    return list(session.run(None, feed))


@pytest.mark.parametrize("form", ["mts", "split"])
def test_a_graph_for_known_rows_works_out_no_sizes_and_joins_equals(form: str, tmp_path: Path) -> None:
    path = stitched_file(tmp_path / "body.onnx", form=form)
    source = onnx.load(path)
    weights_outside(source, tmp_path)
    assert (tmp_path / WEIGHTS).stat().st_size > 0

    def feed(rows: int) -> dict[str, Any]:
        return {each.name: pictures(rows, seed) for seed, each in enumerate(source.graph.input)}

    def run(model: onnx.ModelProto, rows: int) -> list[Any]:
        return computed(model, {each.name: feed(rows)[each.name] for each in model.graph.input}, tmp_path)

    made = RoundGraphs(source, run)
    tensors = seen(made.graph_for(1), feed(1), tmp_path)
    filled = made.plan_concat_padding(tensors)
    assert bool(filled) == (form != "mts")
    graphs = [made.graph_for(rows) for rows in (1, 3)]
    assert [node.name for node in graphs[0].graph.node] == [node.name for node in graphs[1].graph.node]
    assert not {"Shape", "Expand"} & {node.op_type for node in graphs[0].graph.node}
    for rows, graph in zip((1, 3), graphs, strict=True):
        for node in graph.graph.node:
            (axis,) = [each.i for each in node.attribute if each.name == "axis"] if node.op_type == "Concat" else [0]
            assert axis == 0 or len({tensors[name].shape[axis] for name in node.input}) == 1
        for got, wanted in zip(computed(graph, feed(rows), tmp_path), run(source, rows), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


def seen(model: onnx.ModelProto, feed: dict[str, Any], folder: Path) -> Any:
    """The tensors of a run, as the preparation sees them."""

    def profiled(path: Path, trace: Path) -> Any:
        return onnx_files.open_on(HostDevice(), path, channels_last=False, profile=trace)

    return onnx_files.seen_tensors(model, folder, feed, profiled)
