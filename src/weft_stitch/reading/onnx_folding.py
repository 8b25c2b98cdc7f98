"""Nodes of an ONNX file that only compute on constants, run while it is read: shapes, indices, scaled weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from weft.base.errors import ModelError
from weft_stitch.net import Array
from weft_stitch.reading.draft import Foreign
from weft_stitch.reading.onnx_source import SourceNode, to_array

_MOST_ELEMENTS = 2**28
"""More than any weight; a damaged shape asks for more."""

_SPREADING = {"Add", "Sub", "Mul", "Div", "Pow", "Where", "Equal", "Greater", "Less", "And", "Or", "Min", "Max", "Mod"}
_SMALLER = {
    "Cast", "Gather", "Concat", "Unsqueeze", "Squeeze", "Reshape", "Slice", "Floor", "Ceil", "Sqrt", "Transpose", "Neg",
    "Flatten", "ReduceProd", "ReduceSum", "ReduceMax", "Reciprocal", "Exp", "Not", "DequantizeLinear", "CastLike",
    "ScatterND", "Abs", "Size", "Shape", "ReduceL2",
}  # fmt: skip
_TO_SHAPE = {"ConstantOfShape": 0, "Expand": 1}
"""Operators whose output is as large as one of their inputs says."""

_EVALUATED_SINCE = {"DequantizeLinear": 19}
"""The first operator set that onnx's own evaluator runs them in; they mean the same before."""

FOLDED = _SPREADING | _SMALLER | set(_TO_SHAPE)

_PLAIN = ("value_float", "value_int", "value_floats", "value_ints")


def constant_node(node: SourceNode, folder: Path | None) -> Array:
    """What a node ``Constant`` holds."""
    if node.has("value"):
        return to_array(node.attributes["value"].t, folder)
    for name in _PLAIN:
        if node.has(name):
            held = helper.get_attribute_value(node.attributes[name])
            return np.asarray(held, np.float32 if "float" in name else np.int64)
    raise Foreign("it holds neither numbers nor a tensor")


def fold(node: SourceNode, inputs: Mapping[str, Array], opset: int) -> Sequence[Array]:
    """The outputs of *node*, run by onnx itself."""
    if node.op not in FOLDED:
        raise Foreign("it computes on constants only; simplify the file first")
    _require_small(node, inputs)
    graph = helper.make_graph(
        [node.proto],
        "constants",
        [onnx.ValueInfoProto(name=name) for name in inputs],
        [onnx.ValueInfoProto(name=name) for name in node.outputs],
    )
    known = max(opset, _EVALUATED_SINCE.get(node.op, 0))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", known)])
    try:
        from onnx.reference import ReferenceEvaluator

        with np.errstate(all="ignore"):
            return [np.asarray(each) for each in ReferenceEvaluator(model).run(None, dict(inputs))]
    except Exception as error:  # the evaluator raises whatever numpy does
        raise ModelError("what it computes from constants makes no sense") from error


def float32(array: Array, tensor: str) -> Array:
    """Weights as the net keeps them."""
    if array.dtype.kind in "iub":
        raise Foreign(f"{tensor} holds {array.dtype} numbers, not floats")
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(array.astype(np.float32))


def is_float(dtype: int) -> bool:
    return dtype in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)


def _require_small(node: SourceNode, inputs: Mapping[str, Array]) -> None:
    try:
        if node.op in _TO_SHAPE:
            shape = [int(size) for size in inputs[node.inputs[_TO_SHAPE[node.op]]].reshape(-1)]
            elements = math.prod(shape) * max([1, *(each.size for each in inputs.values())])
        elif node.op in _SPREADING:
            elements = math.prod(np.broadcast_shapes(*(each.shape for each in inputs.values())))
        elif node.op == "Gather":
            elements = math.prod(each.size for each in inputs.values())
        else:
            elements = sum(each.size for each in inputs.values())
    except (ValueError, KeyError, IndexError) as error:
        raise ModelError("its constants do not fit each other") from error
    if not 0 <= elements <= _MOST_ELEMENTS:
        raise ModelError(f"it would make a constant of {elements} numbers")
