"""Models of a few nodes, and what they give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from weft.runtime.tensors import Array

WIDTH = 8


def chain(path: Path, layers: int = 3, sizes: tuple[int | str, ...] = ("n", WIDTH)) -> Path:
    """x -> products with weights and a positive part, layer by layer -> y; exits e0, e1, ... of two scores beside."""
    rng, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    for at in range(layers):
        weights.append(numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32), f"w{at}"))
        nodes.append(helper.make_node("MatMul", [x, f"w{at}"], [f"m{at}"], name=f"product{at}"))
        x = "y" if at == layers - 1 else f"r{at}"
        nodes.append(helper.make_node("Tanh", [f"m{at}"], [x], name=f"tanh{at}"))
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, "chain", [value("x", TensorProto.FLOAT, sizes)], [value("y", TensorProto.FLOAT, sizes)], weights
    )
    return _saved(graph, path)


def skipping(path: Path, layers: int = 3) -> Path:
    """As ``chain``, and the sum of the input and of what every layer gives -> y: all of them cross cuts."""
    rng, nodes, weights, x = np.random.default_rng(0), [], [], "x"
    for at in range(layers):
        weights.append(numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32), f"w{at}"))
        nodes.append(helper.make_node("MatMul", [x, f"w{at}"], [f"m{at}"], name=f"product{at}"))
        nodes.append(helper.make_node("Tanh", [f"m{at}"], [f"r{at}"], name=f"tanh{at}"))
        x = f"r{at}"
    nodes.append(helper.make_node("Sum", ["x", *(f"r{at}" for at in range(layers))], ["y"], name="sum"))
    value = helper.make_tensor_value_info
    sizes = ("n", WIDTH)
    inputs, outputs = [value("x", TensorProto.FLOAT, sizes)], [value("y", TensorProto.FLOAT, sizes)]
    return _saved(helper.make_graph(nodes, "skipping", inputs, outputs, weights), path)


def convolving(path: Path, layers: int = 3, side: int = 6) -> Path:
    """x, an image of three channels -> convolutions with positive parts, the mean of each channel -> y."""
    rng, nodes, weights, x, channels = np.random.default_rng(0), [], [], "x", 3
    for at in range(layers):
        drawn_weight = rng.standard_normal((WIDTH, channels, 3, 3)).astype(np.float32) / (3 * channels**0.5)
        weights.append(numpy_helper.from_array(drawn_weight, f"w{at}"))
        nodes.append(helper.make_node("Conv", [x, f"w{at}"], [f"c{at}"], name=f"conv{at}", pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Relu", [f"c{at}"], [f"r{at}"], name=f"relu{at}"))
        x, channels = f"r{at}", WIDTH
    nodes += [helper.make_node("GlobalAveragePool", [x], ["g"]), helper.make_node("Flatten", ["g"], ["y"])]
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, ["n", 3, side, side])]
    outputs = [value("y", TensorProto.FLOAT, ["n", WIDTH])]
    return _saved(helper.make_graph(nodes, "convolving", inputs, outputs, weights), path)


def leaving(path: Path) -> Path:
    """Two exits: samples may leave at ``early``, and all others at ``late``."""
    rng, value = np.random.default_rng(1), helper.make_tensor_value_info
    weights = [
        numpy_helper.from_array(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32), "w"),
        numpy_helper.from_array(rng.standard_normal((WIDTH, 2)).astype(np.float32), "head0"),
        numpy_helper.from_array(rng.standard_normal((WIDTH, 2)).astype(np.float32), "head1"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["m"], name="body"),
        helper.make_node("Tanh", ["m"], ["h"], name="bend"),
        helper.make_node("MatMul", ["h", "head0"], ["early"], name="first"),
        helper.make_node("MatMul", ["h", "w"], ["k"], name="more"),
        helper.make_node("MatMul", ["k", "head1"], ["late"], name="last"),
    ]
    inputs = [value("x", TensorProto.FLOAT, ["n", WIDTH])]
    outputs = [value(name, TensorProto.FLOAT, ["n", 2]) for name in ("early", "late")]
    return _saved(helper.make_graph(nodes, "leaving", inputs, outputs, weights), path)


def choosing(path: Path) -> Path:
    """Control flow, which no device takes."""
    value = helper.make_tensor_value_info
    branches = [
        helper.make_graph([helper.make_node(kind, ["x"], ["b"])], kind, [], [value("b", TensorProto.FLOAT, [1, WIDTH])])
        for kind in ("Relu", "Neg")
    ]
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
        helper.make_node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y"], then_branch=branches[0], else_branch=branches[1]),
    ]
    inputs, outputs = [value("x", TensorProto.FLOAT, [1, WIDTH])], [value("y", TensorProto.FLOAT, [1, WIDTH])]
    return _saved(helper.make_graph(nodes, "choosing", inputs, outputs), path)


def _saved(graph: onnx.GraphProto, path: Path) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def drawn(rows: int, seed: int = 0, width: int = WIDTH) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)}


def wanted(path: Path, feed: dict[str, Array], output: str = "y") -> Array:
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found: Array = session.run([output], feed)[0]
    return found
