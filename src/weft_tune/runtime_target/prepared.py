"""A model as ONNX Runtime simplifies it before it looks for 8-bit kernels, and the ranges of its tensors.

Normalisations are folded into convolutions and constants are computed. Pairs of QuantizeLinear and DequantizeLinear
would prevent that, so the model is simplified before these pairs are written. Layers keep their own names.

The steps of 8-bit integers follow from the ranges of tensors on samples. A tensor has two ranges: that of all values,
and a narrower one that clips the largest values if the smaller steps lower the mean square error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnxruntime as ort

from weft.base.errors import TuneError
from weft.models.onnx_graph import Attributes, OnnxModel, OnnxNode, OnnxTensor, fill, initializers, load, to_array
from weft.runtime.onnxruntime_cpu.sessions import first_line
from weft.runtime.tensors import Array
from weft_tune.export.emitter import LEAST_OPSET, raise_opset
from weft_tune.quantised.opened import OpenedModel, tensors_by_batch
from weft_tune.weighted_layers import WeightedLayer, find_layers, load_flat

Floats = npt.NDArray[np.float32]

FUSED = "/MatMulAddFusion"
"""ONNX Runtime's suffix for the name of a matrix product that it fused with a sum."""
GEMM_DEFAULTS = {"alpha": 1.0, "beta": 1.0, "transA": 0}
"""Attributes that a Gemm must have for an 8-bit kernel."""


STEPS = 255
"""Steps between the smallest and the largest code of 8 bits."""
KEPT_VALUES = 1024
"""Cap on the values of a tensor that are kept from a batch to measure the effect of clipping."""
RANGE_SHARES = tuple(number / 20 for number in range(20, 1, -1))
"""Shares of the whole range that are tried as the narrower range."""


class FastLayer(NamedTuple):
    """A layer that has an 8-bit kernel."""

    name: str
    op: str
    position: int
    """The place of its node in the prepared graph."""
    weight: Floats
    bias: Floats | None
    axis: int
    """The axis of the weight's output channels."""


@dataclass(frozen=True, slots=True, eq=False)
class PreparedModel:
    """A simplified model, and its layers that can be computed in 8 bits."""

    model: OnnxModel
    layers: tuple[FastLayer, ...]
    others: Mapping[str, str]
    """Layer -> why it has no 8-bit kernel."""


def prepare_model(path: Path, wanted: Collection[str]) -> PreparedModel:
    """Simplify the model in a file; *wanted* are the names of the layers that may change."""
    model = load_flat(path)
    for layer in find_layers(model):
        model.graph.node[layer.position].name = layer.name
    simple = _simplify(path, raise_opset(model, LEAST_OPSET))
    constants = initializers(simple.graph)
    layers, others = [], dict.fromkeys(wanted, "ONNX Runtime simplified it away")
    for weighted in find_layers(simple):
        node = simple.graph.node[weighted.position]
        name = node.name.removesuffix(FUSED)
        if name not in others:
            continue
        obstacle = _obstacle(weighted, node, constants)
        if obstacle:
            others[name] = obstacle
            continue
        del others[name]
        bias = _bias_name(node)
        bias_values = to_array(constants[bias]).reshape(-1) if bias else None
        axis = _channel_axis(weighted, node)
        layers.append(FastLayer(name, weighted.op, weighted.position, weighted.weight, bias_values, axis))
    return PreparedModel(simple, tuple(layers), others)


def _simplify(path: Path, model: OnnxModel) -> OnnxModel:
    """Apply ONNX Runtime's basic optimisations, which are independent of the processor; *path* is for messages."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.log_severity_level = 4  # fatal only: errors are raised
    try:
        with TemporaryDirectory() as folder:
            file = Path(folder, "simple.onnx")
            options.optimized_model_filepath = str(file)
            ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
            simple = load(file, weights=True)
    except Exception as error:  # the C++ side raises a dozen unrelated kinds, and protobuf its own above 2 GiB
        raise TuneError(f"{path}: ONNX Runtime cannot simplify it: {first_line(error)}") from error
    # ONNX Runtime lists every domain that it knows
    used = {"", "ai.onnx", *(node.domain for node in simple.graph.node)}
    fill(simple.opset_import, [opset for opset in simple.opset_import if opset.domain in used])
    del simple.graph.value_info[:]
    return simple


def _obstacle(layer: WeightedLayer, node: OnnxNode, constants: Mapping[str, OnnxTensor]) -> str:
    """The reason why a layer has no 8-bit kernel; empty if it has one."""
    if layer.op == "ConvTranspose":
        return "ONNX Runtime has no 8-bit ConvTranspose"
    attributes = Attributes(node).values()
    if layer.op == "Gemm" and any(attributes.get(name, usual) != usual for name, usual in GEMM_DEFAULTS.items()):
        return "a Gemm with alpha, beta or transA has no 8-bit kernel"
    if layer.op == "MatMul" and layer.weight.ndim != 2:
        return "only a matrix has an 8-bit kernel"
    bias = _bias_name(node)
    if bias and bias not in constants:
        return "its bias is no constant"
    if bias and int(np.prod(constants[bias].dims)) != layer.weight.shape[_channel_axis(layer, node)]:
        return "its bias is not one number for each channel"
    return ""


def _channel_axis(layer: WeightedLayer, node: OnnxNode) -> int:
    """The axis of the weight's output channels."""
    return 0 if layer.op == "Conv" or Attributes(node).integer("transB", 0) else 1


def _bias_name(node: OnnxNode) -> str:
    """The name of a layer's bias; empty if it has none."""
    return node.input[2] if node.op_type != "MatMul" and len(node.input) > 2 else ""


class TensorRange(NamedTuple):
    """The smallest and the largest value of a tensor, and the part of that range that loses least in 8 bits."""

    low: float
    high: float
    part: float = 1.0

    def bounds(self, clipped: bool) -> tuple[float, float]:
        """The ends of the whole or of the clipped range; zero is always inside, because its code must be exact."""
        part = self.part if clipped else 1.0
        return min(part * self.low, 0.0), max(part * self.high, 0.0)


def measure_ranges(
    opened: OpenedModel, names: Collection[str], inputs: Mapping[str, Array], batch: int
) -> dict[str, TensorRange]:
    """Measure the ranges of the tensors called *names* on samples; *opened* has the prepared graph."""
    statistics = {name: _TensorStatistics() for name in names}
    for tensors in tensors_by_batch(opened, names, inputs, batch):
        for name, tensor in statistics.items():
            tensor.add(tensors[name])
    for name, tensor in statistics.items():
        if not (math.isfinite(tensor.low) and math.isfinite(tensor.high)):
            raise TuneError(f"{opened.path}: tensor {name!r} holds NaN or infinity; take the samples out that do it")
    return {name: TensorRange(tensor.low, tensor.high, tensor.best_part()) for name, tensor in statistics.items()}


class _TensorStatistics:
    """The range of one tensor so far, and some of its values."""

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self._values: list[npt.NDArray[np.float32]] = []

    def add(self, values: Array) -> None:
        """Add a batch: widen the range, and keep up to about ``KEPT_VALUES`` values at equal distances."""
        self.low = min(self.low, float(values.min(initial=0.0)))
        self.high = max(self.high, float(values.max(initial=0.0)))
        self._values.append(values.reshape(-1)[:: max(1, values.size // KEPT_VALUES)].astype(np.float32))

    def best_part(self) -> float:
        """The share of the range with the least error in 8 bits."""
        values = np.concatenate(self._values)
        # The first on a tie, so the whole range if clipping gains nothing.
        return min(RANGE_SHARES, key=lambda part: clipping_loss(values, part * self.low, part * self.high))


def clipping_loss(values: npt.NDArray[np.float32], low: float, high: float) -> float:
    """The mean square error of 8 bits between *low* and *high*."""
    scale = (high - low) / STEPS
    if scale <= 0:
        return 0.0
    zero = round(-low / scale)
    decoded = (np.clip(np.rint(values / scale) + zero, 0, STEPS) - zero) * scale
    return float(np.square(decoded - values).mean())
