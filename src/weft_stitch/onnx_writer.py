"""Graph -> ONNX: ``to_onnx`` in memory, ``write_onnx`` to a file (weights beside it where one file is too small)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import onnx
from onnx import helper, numpy_helper

from weft.base.errors import StitchError
from weft.base.files import replacing
from weft_stitch.graph import DYNAMIC, Graph, GraphStep, GraphTensor

OPSET, OPSET_OF_16_BITS = 20, 21
IR_VERSION = 10
"""What onnxruntime reads since 1.18."""

MOST_BYTES_IN_FILE = 1_800_000_000
"""Protobuf ends at 2 GiB; larger weights go into a file of their own."""

_TORCH_ONLY = {
    "FusedConv": "is in the form 'fused'; plan for ONNX, whose forms are the others",
    "Island": "is an operator of torch; read the model from an ONNX file to keep it as an island of the result",
}
_NOTHING: Mapping[str, str] = MappingProxyType({})


def to_onnx(graph: Graph, metadata: Mapping[str, str] = _NOTHING) -> onnx.ModelProto:
    """*graph* as an ONNX model; *metadata* becomes its metadata_props."""
    body = helper.make_graph(
        [_node(step) for step in graph.steps],
        graph.name or "stitched",
        [_described(each) for each in graph.inputs],
        [_described(each) for each in graph.outputs],
        [numpy_helper.from_array(array, name) for name, array in graph.constants.items()],
    )
    opsets = [helper.make_opsetid("", _opset(graph))]
    model = helper.make_model(
        body,
        opset_imports=opsets,
        ir_version=max(IR_VERSION, helper.find_min_ir_version_for(opsets)),
        producer_name="weft",
    )
    helper.set_model_props(model, dict(metadata))
    return model


def write_onnx(graph: Graph, path: str | os.PathLike[str], metadata: Mapping[str, str] = _NOTHING) -> None:
    """Write *graph* to *path*; weights of more than ``MOST_BYTES_IN_FILE`` go to ``<path>.data`` beside it."""
    model = to_onnx(graph, metadata)
    outside = sum(array.nbytes for array in graph.constants.values()) > MOST_BYTES_IN_FILE
    data = os.path.basename(os.path.realpath(path)) + ".data"
    with replacing(path, StitchError) as beside:
        onnx.save_model(model, str(beside), save_as_external_data=outside, location=data)


def _opset(graph: Graph) -> int:
    """The graph's own, or ``OPSET``, or the first in which what is quantised to 16 bits has operators."""
    if graph.opset is not None:
        return graph.opset
    zeros = (step.inputs[2] for step in graph.steps if step.op == "QuantizeLinear" and len(step.inputs) > 2)
    wide = any(name in graph.constants and graph.constants[name].dtype.itemsize > 1 for name in zeros)
    return OPSET_OF_16_BITS if wide else OPSET


def _node(step: GraphStep) -> onnx.NodeProto:
    if step.op in _TORCH_ONLY:
        raise StitchError(f"{step.layer or step.op} cannot be written to ONNX: it {_TORCH_ONLY[step.op]}")
    inputs = list(step.inputs)
    while inputs and not inputs[-1]:
        inputs.pop()
    return helper.make_node(step.op, inputs, list(step.outputs), name=step.outputs[0], **step.attributes)


def _described(tensor: GraphTensor) -> onnx.ValueInfoProto:
    opened = {axis: tensor.length if axis else f"{tensor.name}_rows" for axis in (0, *tensor.long)}
    sizes = [opened[axis] if size == DYNAMIC else size for axis, size in enumerate(tensor.shape)]
    if not tensor.dtype:
        return onnx.ValueInfoProto(name=tensor.name)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(tensor.dtype))
    return helper.make_tensor_value_info(tensor.name, kind, sizes)
