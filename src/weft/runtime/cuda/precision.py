"""Conversion of models to 16 bits on load, and how far their results differ."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import ModelError
from weft.models.element_types import ElementType, numpy_dtype
from weft.models.onnx_graph import (
    OnnxGraph,
    OnnxModel,
    OnnxTensor,
    OnnxValue,
    fill,
    load,
    make_node,
    opsets,
    save,
    to_array,
    to_tensor,
)
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.tensors import Array

FP32, FP16, BF16 = "fp32", "fp16", "bf16"
BF16_OPSET = 13
"""The first opset in which most operators take bfloat16."""
_HALVES = (ElementType.FLOAT16, ElementType.BFLOAT16)
_TAKE_SIZES = frozenset({"Resize", "Upsample"})
"""Operators whose inputs after the first are sizes, always in float32."""
WITHIN = 1e-4
"""Largest difference between float32 on a device and the CPU, relative to the largest output, without a remark."""


def converted(path: Path, precision: str, folder: Path) -> Path:
    """The file to open for a precision: *path*, or a copy in *folder* with weights and computation in 16 bits.

    Inputs and outputs keep their types.
    """
    if precision == FP32:
        return path
    try:
        model = load(path, weights=True)
        half = with_bfloat16(model) if precision == BF16 else _with_float16(model)
        target = folder / "half.onnx"
        save(half, target, outside=half.ByteSize() > 1 << 30)  # a file of protocol buffers has at most 2 GiB
    except Exception as error:  # the converter raises several unrelated kinds
        raise ModelError(f"cannot be converted to {precision}: {first_line(error)}") from error
    return target


def _with_float16(model: OnnxModel) -> OnnxModel:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half: OnnxModel = convert_float_to_float16(model, keep_io_types=True)
    return half


def with_bfloat16(model: OnnxModel) -> OnnxModel:
    """Convert a model in place from float32 to bfloat16; its inputs and outputs stay float32, and are cast."""
    graph = model.graph
    opset = opsets(model).get("", 0)
    if opset < BF16_OPSET:
        raise ModelError(f"opset {opset} has no bfloat16; export it with {BF16_OPSET} or later, or use fp16")
    float32_names = {name for node in graph.node if node.op_type in _TAKE_SIZES for name in node.input[1:]}
    for weight in graph.initializer:
        if weight.data_type == ElementType.FLOAT and weight.name not in float32_names:
            weight.CopyFrom(_narrow(weight))
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.name == "to" and attribute.i == ElementType.FLOAT:  # of a Cast
                attribute.i = ElementType.BFLOAT16
            is_float = attribute.HasField("t") and attribute.t.data_type == ElementType.FLOAT
            if is_float and node.output[0] not in float32_names:
                attribute.t.CopyFrom(_narrow(attribute.t))
    inward = [_rename_at_border(graph, value.name, is_input=True) for value in graph.input if _is_float(value)]
    outward = [_rename_at_border(graph, value.name, is_input=False) for value in graph.output if _is_float(value)]
    fill(graph.node, [*inward, *graph.node, *outward])
    del graph.value_info[:]
    return model


def _narrow(weight: OnnxTensor) -> Any:
    """The weight in bfloat16."""
    return to_tensor(to_array(weight).astype(numpy_dtype(ElementType.BFLOAT16)), weight.name)


def _is_float(value: OnnxValue) -> bool:
    return bool(value.type.tensor_type.elem_type == ElementType.FLOAT)


def _rename_at_border(graph: OnnxGraph, name: str, *, is_input: bool) -> Any:
    """Rename an input or an output inside the graph, where it is bfloat16; return the cast between the two names."""
    inside = f"{name}/bfloat16"
    for node in graph.node:
        for index, tensor in enumerate(node.input):
            node.input[index] = inside if tensor == name else tensor
        for index, tensor in enumerate(node.output):
            node.output[index] = inside if tensor == name else tensor
    kind = ElementType.BFLOAT16 if is_input else ElementType.FLOAT
    names = ([name], [inside]) if is_input else ([inside], [name])
    return make_node("Cast", *names, f"{name}/cast", to=kind)


def is_half(model: OnnxModel) -> bool:
    """Whether most of the weights of a model have 16 bits."""
    half_count: int = sum(weight.data_type in _HALVES for weight in model.graph.initializer)
    return 2 * half_count > len(list(model.graph.initializer))


def difference(wanted: Mapping[str, Array], actual: Mapping[str, Array]) -> float:
    """The largest difference between results, relative to the largest number of each output *wanted*."""
    return max(
        (_difference(np.asarray(array), np.asarray(actual[name])) for name, array in wanted.items()), default=0.0
    )


def _difference(wanted: Any, actual: Any) -> float:
    """The difference of one output, relative to its largest finite number.

    Infinite for other shapes, for values other than numbers that differ, and where only one is not a finite number.
    """
    if wanted.shape != actual.shape:
        return float("inf")
    if not wanted.size or wanted.dtype.kind not in "fiu":
        return 0.0 if np.array_equal(wanted, actual) else float("inf")
    wanted, actual = np.asarray(wanted, np.float64), np.asarray(actual, np.float64)
    with np.errstate(invalid="ignore"):  # of infinities
        errors = np.abs(wanted - actual)
    equal = (wanted == actual) | (np.isnan(wanted) & np.isnan(actual))
    largest_error = np.where(equal, 0.0, np.where(np.isnan(errors), np.inf, errors)).max()
    return float(largest_error / (np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0) or 1.0))


def remark(precision: str, deviation: float) -> str | None:
    """A sentence about results with this ``difference`` from the CPU's; None for float32 within ``WITHIN``."""
    if precision != FP32:
        return f"{precision}: differs from float32 by up to {deviation:.1e} of the largest output on made-up inputs"
    text = f"differs from the CPU by up to {deviation:.1e} of the largest output on made-up inputs"
    return None if deviation <= WITHIN else text
