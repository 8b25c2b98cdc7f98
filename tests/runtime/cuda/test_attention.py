"""Attention as exporters write it becomes one operator that gives the same; anything odd stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from weft.models import zoo
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.attention import fuse_attention, with_attention
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.model import DeviceModel
from weft.runtime.cuda.preparing import prepare_on

ROWS, HEADS, WIDTH = 6, 2, 4
ALL = HEADS * WIDTH


class Attention:
    """One layer of attention over x, in the words of an exporter."""

    def __init__(self, **ways: Any) -> None:
        self.ways, self.nodes, self.weights = ways, list[Any](), list[Any]()
        self._rng = np.random.default_rng(3)

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def weight(self, array: Any) -> str:
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def heads(self, x: str, order: tuple[int, ...]) -> str:
        linear = self.node("MatMul", x, self.weight(self._rng.standard_normal((ALL, ALL)).astype(np.float32)))
        split = self.node("Reshape", linear, self.weight(np.array(self.ways.get("split", [0, ROWS, HEADS, WIDTH]))))
        return self.node("Transpose", split, perm=order)

    def scaled(self, x: str, number: float) -> str:
        if self.ways.get("divided"):
            return self.node("Div", x, self.weight(np.float32(1 / number)))
        factor = self.weight(np.array([number], np.float32))
        return self.node("Mul", *((factor, x) if self.ways.get("swapped") else (x, factor)))

    def model(self) -> ModelProto:
        ways = self.ways
        queries = self.heads("x", (0, 2, 1, 3))
        if ways.get("turned"):
            keys = self.node("Transpose", self.heads("x", (0, 2, 1, 3)), perm=(0, 1, 3, 2))
        else:
            keys = self.heads("x", (0, 2, 3, 1))
        values = self.heads("x", ways.get("order", (0, 2, 1, 3)))
        if ways.get("early"):
            queries, keys = self.scaled(queries, 0.7), self.scaled(keys, 0.7)
        scores = self.node("MatMul", queries, keys)
        scores = scores if ways.get("early") else self.scaled(scores, 0.5)
        if mask := ways.get("mask"):
            scores = self.node("Add", *(["mask", scores] if ways.get("before") else [scores, "mask"]))
        if ways.get("late"):
            scores = self.scaled(scores, 0.5)
        axis = {} if ways.get("usual_axis") else {"axis": ways.get("axis", -1)}
        weighed = self.node("MatMul", self.node("Softmax", scores, **axis), values)
        joined = self.node("Transpose", weighed, perm=(0, 2, 1, 3))
        self.nodes.append(helper.make_node("Reshape", [joined, self.weight(np.array([0, ROWS, ALL]))], ["y"], "end"))
        value = helper.make_tensor_value_info
        inputs = [value("x", TensorProto.FLOAT, ["n", ROWS, ALL])]
        inputs += [value("mask", TensorProto.FLOAT, mask)] if mask else []
        graph = helper.make_graph(
            self.nodes, "g", inputs, [value("y", TensorProto.FLOAT, ["n", ROWS, ALL])], self.weights
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", ways.get("opset", 17))], ir_version=8)


def computed(model: ModelProto, seed: int = 0) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(seed)
    sizes = {each.name: [3 if isinstance(size, str) else size for size in each.shape] for each in session.get_inputs()}
    return session.run(None, {name: rng.standard_normal(size).astype(np.float32) for name, size in sizes.items()})[0]


@pytest.mark.parametrize(
    "ways",
    [
        {},
        {"divided": True},
        {"swapped": True},
        {"opset": 12, "axis": 3},
        {"turned": True},
        {"early": True},
        {"early": True, "turned": True},
        {"mask": ["n", 1, 1, ROWS]},
        {"mask": [1, 1, ROWS, ROWS], "before": True},
        {"mask": ["n", HEADS, ROWS, ROWS]},
        {"axis": 3},
        {"usual_axis": True},
        {"split": [-1, ROWS, HEADS, WIDTH]},
    ],
)
def test_attention_is_one_operator_and_gives_the_same(ways: dict[str, Any]) -> None:
    model = Attention(**ways).model()
    wanted = computed(model)
    assert fuse_attention(model) == 1
    kinds = [node.op_type for node in model.graph.node]
    assert kinds.count("MultiHeadAttention") == 1 and not {"Softmax", "Transpose", "Reshape"} & {*kinds}
    np.testing.assert_allclose(computed(model), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "ways",
    [
        {"mask": ["n", 1, 1, ROWS], "late": True},
        {"axis": 2},
        {"opset": 12, "axis": -1},
        {"opset": 12, "usual_axis": True},
        {"order": (0, 2, 3, 1), "split": [0, 4, 2, 6]},
        {"mask": [ROWS]},
        {"mask": [3, 1, ROWS, ROWS]},
        {"mask": ["n", 1, ROWS, 1]},
        {"split": [0, ROWS // 2, HEADS, 2 * WIDTH]},
    ],
)
def test_what_is_not_attention_stays_as_it_is(ways: dict[str, Any]) -> None:
    model = Attention(**ways).model()
    before = model.SerializeToString()
    assert fuse_attention(model) == 0 and model.SerializeToString() == before


def test_scores_that_somebody_else_needs_are_still_computed() -> None:
    attention = Attention()
    model = attention.model()
    softmax = next(node for node in model.graph.node if node.op_type == "Softmax")
    model.graph.output.append(helper.make_tensor_value_info(softmax.output[0], TensorProto.FLOAT, None))
    assert fuse_attention(model) == 0


def test_an_encoder_of_the_zoo_has_one_operator_for_each_layer_and_answers_as_before(tmp_path: Path) -> None:
    path = tmp_path / "bert.onnx"
    zoo.export("bert-base", path, layers=2, seq_len=8, hidden=128, heads=2)
    fused = with_attention(path, tmp_path)
    kinds = [node.op_type for node in onnx.load(str(fused)).graph.node]
    assert kinds.count("MultiHeadAttention") == 2 and "Softmax" not in kinds
    model = prepare_on(HostDevice(), path, LoadOptions(max_batch=2))
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    feed = {each.name: np.ones((2, 8), np.int64) for each in session.get_inputs()}
    (wanted,) = session.run(None, feed)
    np.testing.assert_allclose(next(iter(model.run(feed).values())), wanted, rtol=1e-4, atol=1e-5)
    model.close()


@pytest.mark.parametrize("scale", [1e-25, float("inf")])
def test_a_scale_that_is_none_is_left_alone(scale: float) -> None:
    model = Attention(early=True).model()
    for each in model.graph.initializer:
        if list(each.dims) == [1]:
            each.CopyFrom(numpy_helper.from_array(np.array([scale], np.float32), each.name))
    assert fuse_attention(model) == 0


def test_attention_over_a_spectrum_is_found_though_the_transform_leaves_its_defaults_out() -> None:
    model = Attention().model()
    samples = helper.make_tensor_value_info("samples", TensorProto.FLOAT, [3, 2 * (ALL - 1) + ROWS - 1])
    model.graph.input[0].CopyFrom(samples)
    sizes = {"step": 1, "length": 2 * (ALL - 1), "real": 0}
    model.graph.initializer.extend(numpy_helper.from_array(np.int64(size), name) for name, size in sizes.items())
    transform = helper.make_node("STFT", ["samples", "step", "", "length"], ["spectrum"])
    model.graph.node.insert(0, helper.make_node("Gather", ["spectrum", "real"], ["x"], axis=3))
    model.graph.node.insert(0, transform)
    wanted = computed(model)
    assert fuse_attention(model) == 1 and transform in model.graph.node  # as it stood in the file
    np.testing.assert_allclose(computed(model), wanted, rtol=1e-4, atol=1e-5)


def test_weights_that_are_inputs_as_well_stay() -> None:
    model = Attention().model()
    wanted = computed(model)
    split = model.graph.initializer[1]
    model.graph.input.append(helper.make_tensor_value_info(split.name, split.data_type, split.dims))
    assert fuse_attention(model) == 1 and split.name in {each.name for each in model.graph.initializer}
    np.testing.assert_allclose(computed(model), wanted, rtol=1e-4, atol=1e-5)


def test_a_model_whose_fused_form_cannot_be_opened_runs_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, broken = tmp_path / "x.onnx", tmp_path / "broken.onnx"
    onnx.save(Attention().model(), path)
    broken.write_bytes(b"no model")
    monkeypatch.setattr("weft.runtime.cuda.onnx_files.with_attention", lambda path, folder: broken)
    model = prepare_on(HostDevice(), path, LoadOptions(max_batch=1))
    assert isinstance(model, DeviceModel)
    model.close()


def test_a_model_without_a_softmax_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    onnx.save(Attention().model(), path)
    assert with_attention(path, tmp_path) == tmp_path / "attention.onnx"
    plain = helper.make_model(helper.make_graph([], "g", [], []))
    onnx.save(plain, path)
    assert with_attention(path, tmp_path) == path
