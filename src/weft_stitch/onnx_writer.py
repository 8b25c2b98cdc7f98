"""Graph -> ONNX: ``to_onnx`` in memory, ``write_onnx`` to a file (very large weights go to a second one)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from weft.base.errors import StitchError
from weft.models.element_types import element_type
from weft.models.onnx_graph import OnnxModel, declared, least_ir_version, make_model, make_node, to_tensor, write_model
from weft_stitch.graph import DYNAMIC, Graph, GraphStep, GraphTensor

OPSET, OPSET_OF_16_BITS = 20, 21
"""Operator sets of written files; 21 is the first with 16-bit integers in QuantizeLinear."""
IR_VERSION = 10
"""The version of the file format that onnxruntime reads since 1.18."""

_TORCH_ONLY = {
    "FusedConv": "is in the form 'fused'; plan for ONNX, whose forms are the others",
    "Island": "is an operator of torch; read the model from an ONNX file to keep it as an island of the result",
}
"""Operators of torch only -> why a step cannot be written, and what to do."""
_NOTHING: Mapping[str, str] = MappingProxyType({})


def to_onnx(graph: Graph, metadata: Mapping[str, str] = _NOTHING) -> OnnxModel:
    """*graph* as an ONNX model; *metadata* becomes its metadata_props."""
    opset = _opset(graph)
    return make_model(
        [_node(step) for step in graph.steps],
        graph.name or "stitched",
        [_describe_tensor(tensor) for tensor in graph.inputs],
        [_describe_tensor(tensor) for tensor in graph.outputs],
        [to_tensor(array, name) for name, array in graph.constants.items()],
        opset=opset,
        ir_version=max(IR_VERSION, least_ir_version(opset)),
        producer="weft",
        metadata=metadata,
    )


def refuse_overwriting(
    read: Iterable[str | os.PathLike[str]], written: Iterable[str | os.PathLike[str] | None]
) -> None:
    """Raise ``StitchError`` if a file of *written* is also one of *read*."""
    models = {Path(path).resolve() for path in read}
    for path in written:
        if path and Path(path).resolve() in models:
            raise StitchError(f"{path} is one of the models; write to another file")


def write_onnx(graph: Graph, path: str | os.PathLike[str], metadata: Mapping[str, str] = _NOTHING) -> None:
    """Write *graph* to *path*; very large weights go to ``<path>.data`` beside it."""
    write_model(path, to_onnx(graph, metadata), StitchError)


def _opset(graph: Graph) -> int:
    """The graph's operator set; by default ``OPSET``, or ``OPSET_OF_16_BITS`` if it quantises to 16 bits."""
    if graph.opset is not None:
        return graph.opset
    zero_points = (step.inputs[2] for step in graph.steps if step.op == "QuantizeLinear" and len(step.inputs) > 2)
    has_16_bits = any(name in graph.constants and graph.constants[name].dtype.itemsize > 1 for name in zero_points)
    return OPSET_OF_16_BITS if has_16_bits else OPSET


def _node(step: GraphStep) -> Any:
    """*step* as an ONNX node, without the omitted inputs at its end."""
    if step.op in _TORCH_ONLY:
        raise StitchError(f"{step.layer or step.op} cannot be written to ONNX: it {_TORCH_ONLY[step.op]}")
    inputs = list(step.inputs)
    while inputs and not inputs[-1]:
        inputs.pop()
    return make_node(step.op, inputs, step.outputs, step.outputs[0], **step.attributes)


def _describe_tensor(tensor: GraphTensor) -> Any:
    """The declaration of an input or output; sizes known at run time only are named."""
    symbols = {axis: tensor.length if axis else f"{tensor.name}_rows" for axis in (0, *tensor.long)}
    sizes = [symbols[axis] if size == DYNAMIC else size for axis, size in enumerate(tensor.shape)]
    return declared(tensor.name, element_type(np.dtype(tensor.dtype)) if tensor.dtype else 0, sizes)
