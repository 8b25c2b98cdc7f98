"""Small ONNX classifiers of many shapes, and a slow twin that rounds inside the whole graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from tests.models.onnx_graphs import graph, node, tensor
from weft_tune.numbers.arrays import rounded
from weft_tune.numbers.configuration import Configuration
from weft_tune.quantised.opened import OpenedModel

CLASSES = 5


def draw(seed: int, *shape: int) -> np.ndarray:
    fan = max(1, int(np.prod(shape[1:])))
    return (np.random.default_rng(seed).standard_normal(shape) / np.sqrt(fan)).astype(np.float32)


def model_of(nodes, inputs, outputs, weights: Mapping[str, np.ndarray], opset: int = 17) -> ModelProto:
    constants = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    body = graph(nodes, inputs, outputs, constants)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def chain(batch: int | str = "n") -> ModelProto:
    """Two convolutions and a transposed Gemm, the kind that is drawn in every textbook."""
    weights = {
        "conv1.weight": draw(1, 4, 1, 3, 3),
        "conv1.bias": draw(2, 4) / 10,
        "conv2.weight": draw(3, 6, 4, 3, 3),
        "fc.weight": draw(4, CLASSES, 96),
        "fc.bias": draw(5, CLASSES) / 10,
    }
    nodes = [
        node("Conv", ["x", "conv1.weight", "conv1.bias"], ["a"]),
        node("Relu", ["a"], ["b"]),
        node("Conv", ["b", "conv2.weight"], ["c"]),
        node("Flatten", ["c"], ["d"]),
        node("Gemm", ["d", "fc.weight", "fc.bias"], ["y"], transB=1),
    ]
    return model_of(nodes, [tensor("x", batch, 1, 8, 8)], [tensor("y", batch, CLASSES)], weights)


def residual() -> ModelProto:
    """A tensor that two layers and a sum read; a depthwise convolution, two branches that are joined."""
    weights = {
        "stem.weight": draw(1, 4, 1, 3, 3),
        "left.weight": draw(2, 4, 4, 3, 3),
        "depth.weight": draw(3, 4, 1, 3, 3),
        "up.weight": draw(4, 8, 2, 2, 2),
        "fc.weight": draw(5, 2, CLASSES),
        "axes": np.array([2, 3], np.int64),
    }
    nodes = [
        node("Conv", ["x", "stem.weight"], ["s"], pads=[1] * 4),
        node("Conv", ["s", "left.weight"], ["l"], pads=[1] * 4),
        node("Conv", ["s", "depth.weight"], ["d"], pads=[1] * 4, group=4),
        node("Relu", ["l"], ["lr"]),
        node("Add", ["lr", "s"], ["sum"]),
        node("Concat", ["sum", "d"], ["both"], axis=1),
        node("ConvTranspose", ["both", "up.weight"], ["u"], strides=[2, 2]),
        node("ReduceMean", ["u"], ["m"], axes=[2, 3], keepdims=0),
        node("Gemm", ["m", "fc.weight"], ["y"]),
    ]
    return model_of(nodes, [tensor("x", "n", 1, 8, 8)], [tensor("y", "n", CLASSES)], weights)


def tokens() -> ModelProto:
    """Whole numbers enter, matrix products are three-dimensional, and one weight is transposed by a node."""
    weights = {
        "table": draw(1, 11, 6),
        "up.weight": draw(2, 6, 8),
        "down.weight": draw(3, 6, 8),
        "head.weight": draw(4, 6, CLASSES),
    }
    nodes = [
        node("Gather", ["table", "ids"], ["e"]),
        node("MatMul", ["e", "up.weight"], ["h"]),
        node("Relu", ["h"], ["hr"]),
        node("Transpose", ["down.weight"], ["dt"], perm=[1, 0]),
        node("MatMul", ["hr", "dt"], ["g"]),
        node("Add", ["g", "e"], ["r"]),
        node("ReduceMean", ["r"], ["m"], axes=[1], keepdims=0),
        node("MatMul", ["m", "head.weight"], ["y"]),
    ]
    return model_of(nodes, [tensor("ids", "n", 7, dtype=onnx.TensorProto.INT64)], [tensor("y", "n", CLASSES)], weights)


def old_file() -> ModelProto:
    """As files were up to version 3: every constant is an input, too."""
    model = chain()
    model.ir_version, model.opset_import[0].version = 3, 8
    model.graph.input.extend(tensor(each.name, *each.dims) for each in model.graph.initializer)
    return model


def tangle(seed: int) -> ModelProto:
    """Convolutions and sums that read any of the tensors made before them."""
    rng = np.random.default_rng(seed)
    weights = {"fc.weight": draw(seed, 4, CLASSES)}
    nodes = [node("Conv", ["x", "stem.weight"], ["t0"], pads=[1] * 4)]
    weights["stem.weight"] = draw(seed + 1, 4, 1, 3, 3)
    for at in range(1, 10):
        one, other = (f"t{rng.integers(at)}" for _ in range(2))
        kind = ("Conv", "Conv", "Relu", "Add", "Mul")[rng.integers(5)]
        if kind == "Conv":
            group = int(rng.choice([1, 2, 4]))
            weights[f"c{at}.weight"] = draw(seed + at, 4, 4 // group, 3, 3)
            nodes.append(node("Conv", [one, f"c{at}.weight"], [f"t{at}"], pads=[1] * 4, group=group))
        else:
            nodes.append(node(kind, [one] if kind == "Relu" else [one, other], [f"t{at}"]))
    nodes += [
        node("Sum", [f"t{at}" for at in range(3, 10)], ["all"]),
        node("ReduceMean", ["all"], ["m"], axes=[2, 3], keepdims=0),
        node("Gemm", ["m", "fc.weight"], ["y"]),
    ]
    return model_of(nodes, [tensor("x", "n", 1, 6, 6)], [tensor("y", "n", CLASSES)], weights)


NETS: dict[str, Callable[[], ModelProto]] = {
    "chain": chain,
    "fixed batch": lambda: chain(4),
    "old file": old_file,
    "residual": residual,
    "tokens": tokens,
}


def samples(model: ModelProto, count: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    entry = model.graph.input[0]
    shape = [count, *(each.dim_value for each in entry.type.tensor_type.shape.dim[1:])]
    if entry.type.tensor_type.elem_type == onnx.TensorProto.INT64:
        return {entry.name: rng.integers(0, 11, shape)}
    return {entry.name: rng.standard_normal(shape).astype(np.float32)}


def save(model: ModelProto, folder: Path, name: str = "net.onnx") -> Path:
    onnx.save(model, folder / name)
    return folder / name


def float_classes(model: ModelProto, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """What the float model says; labels that it gets all right."""
    free = ModelProto()
    free.CopyFrom(model)
    return np.argmax(ReferenceEvaluator(free).run(None, dict(inputs))[0], axis=1)


def nearly_right(model: ModelProto, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Labels of which the float model gets every tenth wrong."""
    labels = float_classes(model, inputs)
    labels[::10] = (labels[::10] + 1) % CLASSES
    return labels


def outputs_by_twin(opened: OpenedModel, configuration: Configuration, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """The whole graph at once, with a node that rounds before every layer."""

    class Round(OpRun):
        op_domain = "weft"

        def _run(self, x, layer=None):
            return (rounded(x, configuration[f"{layer}.input"]),)

    model = ModelProto()
    model.CopyFrom(opened.model)
    nodes = [NodeProto.FromString(each.SerializeToString()) for each in opened.model.graph.node]
    del model.graph.node[:]
    layers = {layer.position: layer for layer in opened.layers}
    for position, each in enumerate(nodes):
        if position in layers:
            layer = layers[position]
            model.graph.node.append(
                helper.make_node("Round", [each.input[0]], [layer.name], domain="weft", layer=layer.name)
            )
            held = rounded(layer.weight, configuration[f"{layer.name}.weight"])
            model.graph.initializer.append(numpy_helper.from_array(held, f"{layer.name}!"))
            each.input[0], each.input[1] = layer.name, f"{layer.name}!"
        model.graph.node.append(each)
    model.opset_import.append(helper.make_opsetid("weft", 1))
    return ReferenceEvaluator(model, new_ops=[Round]).run(None, dict(inputs))[0]
