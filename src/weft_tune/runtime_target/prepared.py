"""A model as ONNX Runtime simplifies it before it looks for 8-bit kernels, with its layers under their own names.

Normalisations are folded into convolutions and constants are computed. Pairs of QuantizeLinear and DequantizeLinear
would be in the way of that, so it is done before they are written.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import ModelProto, NodeProto, helper, numpy_helper

from weft.base.errors import TuneError
from weft.models.weighted_layers import WeightedLayer, find_layers, load_flat
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft_tune.export.opsets import LEAST, raised

Floats = npt.NDArray[np.float32]

FUSED = "/MatMulAddFusion"
"""What ONNX Runtime appends to the name of a product that it joined with a sum."""
GEMM_USUAL = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Attributes of a Gemm that has an 8-bit kernel."""


class FastLayer(NamedTuple):
    """A layer that has an 8-bit kernel."""

    name: str
    op: str
    position: int
    """The place of its node in the prepared graph."""
    weight: Floats
    bias: Floats | None
    axis: int
    """Of the weight: its output channels."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """A simplified model and what of it can be computed in 8 bits."""

    model: ModelProto
    layers: tuple[FastLayer, ...]
    others: Mapping[str, str]
    """Layer -> why it has no 8-bit kernel."""


def prepare_model(path: Path, wanted: Collection[str]) -> PreparedModel:
    """Simplify the model in a file; *wanted* are the names of the layers that may change."""
    model = load_flat(path)
    for layer in find_layers(model):
        model.graph.node[layer.position].name = layer.name
    simple = _simplified(path, raised(model, LEAST))
    constants = {each.name: each for each in simple.graph.initializer}
    layers, others = [], dict.fromkeys(wanted, "ONNX Runtime simplified it away")
    for found in find_layers(simple):
        node = simple.graph.node[found.position]
        name = node.name.removesuffix(FUSED)
        if name not in others:
            continue
        why = _why_not(found, node, constants)
        if why:
            others[name] = why
        else:
            del others[name]
            layers.append(_layer(name, found, node, constants))
    return PreparedModel(simple, tuple(layers), others)


def _simplified(path: Path, model: ModelProto) -> ModelProto:
    """*model* after ONNX Runtime's basic optimisations, which leave nothing that only this processor has."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4  # what goes wrong is raised
    try:
        with TemporaryDirectory() as folder:
            saved = Path(folder, "simple.onnx")
            options.optimized_model_filepath = str(saved)
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            simple = onnx.load(str(saved))
    except Exception as error:  # the C++ side raises a dozen unrelated kinds, and protobuf has enough at 2 GiB
        raise TuneError(f"{path}: ONNX Runtime cannot simplify it: {first_line(error)}") from error
    _drop_unused_domains(simple)
    del simple.graph.value_info[:]
    return simple


def _drop_unused_domains(model: ModelProto) -> None:
    """ONNX Runtime names every domain that it knows."""
    used = {"", "ai.onnx", *(node.domain for node in model.graph.node)}
    kept = [helper.make_opsetid(each.domain, each.version) for each in model.opset_import if each.domain in used]
    del model.opset_import[:]
    model.opset_import.extend(kept)


def _why_not(layer: WeightedLayer, node: NodeProto, constants: Mapping[str, onnx.TensorProto]) -> str:
    """Why a layer has no 8-bit kernel; nothing, if it has one."""
    if layer.op == "ConvTranspose":
        return "ONNX Runtime has no 8-bit ConvTranspose"
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    if layer.op == "Gemm" and any(attributes.get(name, usual) != usual for name, usual in GEMM_USUAL.items()):
        return "a Gemm with alpha, beta or transA has no 8-bit kernel"
    if layer.op == "MatMul" and layer.weight.ndim != 2:
        return "only a matrix has an 8-bit kernel"
    bias = _bias_name(node)
    if bias and bias not in constants:
        return "its bias is no constant"
    if bias and int(np.prod(constants[bias].dims)) != layer.weight.shape[_axis(layer, node)]:
        return "its bias is not one number for each channel"
    return ""


def _layer(name: str, found: WeightedLayer, node: NodeProto, constants: Mapping[str, onnx.TensorProto]) -> FastLayer:
    bias = _bias_name(node)
    values = numpy_helper.to_array(constants[bias]).reshape(-1) if bias else None
    return FastLayer(name, found.op, found.position, found.weight, values, _axis(found, node))


def _axis(layer: WeightedLayer, node: NodeProto) -> int:
    transposed = any(each.name == "transB" and each.i for each in node.attribute)
    return 0 if layer.op == "Conv" or transposed else 1


def _bias_name(node: NodeProto) -> str:
    return node.input[2] if node.op_type != "MatMul" and len(node.input) > 2 else ""
