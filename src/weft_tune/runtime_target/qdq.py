"""Variants of a model: chosen layers as 8-bit integers, in pairs of QuantizeLinear and DequantizeLinear; or float16.

Weights are int8, symmetric, with a step (scale) for each output channel. The input and output of a layer have one step
for the whole tensor, from its range. Biases are int32; their step is the product of the steps of input and weight. ONNX
Runtime turns such pairs around a layer into an 8-bit kernel.

``eight_bit_places`` chooses the tensors that become integers, so that ONNX Runtime has kernels for the chosen layers. A
convolution has a kernel only if its output is 8 bits wide, too; a matrix product may produce float32. If a tensor is
produced in 8 bits, all its readers read these 8 bits. Between layers, sums, products, concatenations and poolings may
stay in 8 bits if all their operands are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.models.element_types import ElementType
from weft.models.onnx_graph import OnnxGraph, OnnxModel, OnnxNode, copied, make_node, replace_nodes
from weft_tune.export.emitter import Emitter
from weft_tune.runtime_target.prepared import FastLayer, PreparedModel, TensorRange

_LARGEST_BIAS = 2**31 - 1
"""The largest 32-bit integer: biases are counted in 32 bits."""
LARGEST_HALF = 65504.0
"""The largest float16."""
CLIPS = ("Relu", "Clip")
"""Operators that the conversion to 8-bit integers does for free, if no other node reads their input."""
JOINED = (
    "Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", *CLIPS,
)  # fmt: skip
"""Operators between layers that have 8-bit kernels."""
SAME_VALUES = ("MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice")
"""Operators whose outputs have the values of their inputs, in steps of the same size."""


class EightBitPlaces(NamedTuple):
    """The tensors that become 8 bits wide."""

    produced: Mapping[str, str]
    """Tensor that is produced in 8 bits -> the layer that produces it; empty where it is no layer."""
    read: Mapping[str, str]
    """Other tensor that chosen layers read in 8 bits -> the first of them."""
    steps: Mapping[str, str]
    """Tensor of either kind -> the one whose range gives the size of its steps."""

    @property
    def ranged(self) -> set[str]:
        """Tensors whose ranges must be measured."""
        return {self.steps[name] for name in (*self.produced, *self.read)}


def eight_bit_places(graph: OnnxGraph, layers: Collection[FastLayer], joined: bool) -> EightBitPlaces:
    """Choose the tensors in 8 bits for these *layers*; joined: operators between layers stay in 8 bits if they can."""
    chosen = {layer.position: layer for layer in layers}
    sole_readers = _SoleReaders(graph)
    produced: dict[str, str] = {}
    steps_of: dict[str, str] = {}  # a tensor in 8 bits -> the tensor that gave it its steps
    for position, node in enumerate(graph.node):  # in the order of computation: operands come before their readers
        if position in chosen and node.op_type == "Conv":
            produced[sole_readers.after_clip(node.output[0])] = chosen[position].name
        elif joined and node.op_type in JOINED and node.output[0] not in produced and _reads_8_bits(node, steps_of):
            produced[sole_readers.after_clip(node.output[0])] = ""
        elif node.op_type in SAME_VALUES and node.input[0] in steps_of:
            steps_of[node.output[0]] = steps_of[node.input[0]]
        steps_of |= {name: name for name in node.output if name in produced}
    read: dict[str, str] = {}
    for layer in chosen.values():
        data = graph.node[layer.position].input[0]
        if data not in produced:
            read.setdefault(data, layer.name)
    return EightBitPlaces(produced, read, {name: steps_of.get(name, name) for name in (*produced, *read)})


def _reads_8_bits(node: OnnxNode, steps_of: Mapping[str, str]) -> bool:
    """Whether all operands of a node are 8 bits wide; the bounds of a Clip do not count as operands."""
    return all(name in steps_of for name in (node.input[:1] if node.op_type == "Clip" else node.input))


class _SoleReaders:
    """Looks up the reader of a tensor that only one node reads."""

    def __init__(self, graph: OnnxGraph) -> None:
        count = Counter(name for node in graph.node for name in node.input)
        count.update(output.name for output in graph.output)
        self._reader = {name: node for node in graph.node for name in node.input if count[name] == 1}

    def after_clip(self, name: str) -> str:
        """The tensor to convert instead of *name*: the output of the Relu or Clip that alone reads it, else *name*."""
        reader = self._reader.get(name)
        return reader.output[0] if reader is not None and reader.op_type in CLIPS else name


class QdqOptions(NamedTuple):
    """Options of converting layers to 8-bit integers; their text is for the report."""

    activations: Literal["uint8", "int8"] = "uint8"
    """Type of the inputs and outputs of layers; weights are int8 always."""
    joined: bool = True
    """Whether operators between layers stay in 8 bits where they can."""
    weight_bits: int = 8
    """7 for processors that add 8-bit products in 16 bits, which overflow with 8."""
    clipped: bool = False
    """Whether the largest values are clipped in favour of smaller steps."""

    def __str__(self) -> str:
        words = ["int8", f"inputs {self.activations}"]
        if not self.joined:
            words.append("layers alone")
        if self.weight_bits < 8:
            words.append(f"{self.weight_bits}-bit weights")
        if self.clipped:
            words.append("clipped")
        return ", ".join(words)


class WrittenVariant(NamedTuple):
    """The graph of a variant of a model."""

    model: OnnxModel
    owners: Mapping[str, str]
    """Output of a node -> its layer, for the nodes that are a layer or convert numbers for one."""


class _Steps(NamedTuple):
    """The meaning of a tensor's codes: value = scale * (code - zero)."""

    scale: float
    zero: int


def write_qdq(
    prepared: PreparedModel, ranges: Mapping[str, TensorRange], chosen: Collection[str], options: QdqOptions
) -> WrittenVariant:
    """Write the model with the layers called *chosen* in 8 bits."""
    model = copied(prepared.model)
    writer = _QdqWriter(model, [layer for layer in prepared.layers if layer.name in chosen], ranges, options)
    writer.write()
    # Layers that stay in float32 have no converters: only their own output is theirs.
    owners = writer.owners | {
        prepared.model.graph.node[layer.position].output[0]: layer.name
        for layer in prepared.layers
        if layer.name not in chosen
    }
    return WrittenVariant(model, owners)


class _QdqWriter:
    """Writes one variant into a graph."""

    def __init__(
        self, model: OnnxModel, layers: list[FastLayer], ranges: Mapping[str, TensorRange], options: QdqOptions
    ) -> None:
        self._graph, self._layers, self._ranges, self._options = model.graph, layers, ranges, options
        self._places = eight_bit_places(model.graph, layers, options.joined)
        self._emitter = Emitter(model.graph)
        self._kind = np.dtype(options.activations)
        self._read: dict[str, str] = {}
        """Tensor that layers read in 8 bits -> the output of its pair of nodes."""
        self.owners: dict[str, str] = {}

    def write(self) -> None:
        """Rewrite the graph's nodes, with quantise and dequantise pairs around the chosen layers."""
        layers = {layer.position: layer for layer in self._layers}
        nodes: list[OnnxNode] = []
        for position, node in enumerate(self._graph.node):
            if position in layers:
                nodes += self._quantise_operands(node, layers[position])
            nodes.append(node)
            nodes += [converter for name in list(node.output) for converter in self._quantise_output(node, name)]
            if position in layers:
                self.owners[node.output[0]] = layers[position].name
        replace_nodes(self._graph, nodes, self._emitter.constants)

    def _quantise_operands(self, node: OnnxNode, layer: FastLayer) -> list[OnnxNode]:
        """Make a layer read its input, weight and bias in integers; return the nodes to be written before it."""
        data, nodes = node.input[0], list[OnnxNode]()
        if data in self._places.read:
            if data not in self._read:  # layers share the pair of a tensor
                nodes += self._pair(data, self._emitter.name(f"{data}/8-bit"), layer.name)
                self._read[data] = nodes[-1].output[0]
            node.input[0] = self._read[data]
        scales = self._scales(layer, data)
        shape = [-1 if axis == layer.axis else 1 for axis in range(layer.weight.ndim)]  # one scale per output channel
        codes = np.rint(layer.weight / scales.reshape(shape)).astype(np.int8)
        zeros = self._emitter.constant(np.zeros(len(scales)), np.int8)
        nodes.append(self._constant(layer, "weight", codes, scales, layer.axis, zeros))
        node.input[1] = nodes[-1].output[0]
        if layer.bias is not None:
            steps = scales * np.float32(self._steps(data).scale)
            nodes.append(self._constant(layer, "bias", np.rint(layer.bias / steps).astype(np.int32), steps, axis=0))
            node.input[2] = nodes[-1].output[0]
        return nodes

    def _quantise_output(self, node: OnnxNode, name: str) -> list[OnnxNode]:
        """The pair behind output *name* of *node* if that is produced in 8 bits; the pair's output takes the name."""
        if name not in self._places.produced:
            return []
        float_output = self._emitter.name(f"{name}/float")
        node.output[list(node.output).index(name)] = float_output
        return self._pair(float_output, name, self._places.produced[name], of=name)

    def _pair(self, source: str, out: str, owner: str, of: str | None = None) -> list[OnnxNode]:
        """QuantizeLinear and DequantizeLinear from *source* to *out*, for layer *owner* (empty: for none).

        of: the tensor whose range gives the steps; *source* if None.
        """
        steps = self._steps(of or source)
        settings = [self._emitter.number(steps.scale), self._emitter.constant(steps.zero, self._kind)]
        codes = self._emitter.name(f"{of or source}/codes")
        if owner:
            self.owners |= {codes: owner, out: owner}
        return [
            make_node("QuantizeLinear", [source, *settings], [codes], codes),
            make_node("DequantizeLinear", [codes, *settings], [out], f"{codes}/DequantizeLinear"),
        ]

    def _constant(
        self, layer: FastLayer, role: str, codes: npt.NDArray[np.signedinteger], scales: npt.NDArray[np.float32],
        axis: int, *zeros: str,
    ) -> OnnxNode:  # fmt: skip
        """The DequantizeLinear of a weight or a bias, whose *codes* are stored; *zeros*: name of the zero points."""
        stored = self._emitter.store(codes, f"{layer.name}.{role}/codes")
        steps = self._emitter.store(scales, f"{layer.name}.{role}/scale")
        out = self._emitter.name(f"{layer.name}.{role}/values")
        self.owners[out] = layer.name
        return make_node("DequantizeLinear", [stored, steps, *zeros], [out], out, axis=axis)

    def _scales(self, layer: FastLayer, data: str) -> npt.NDArray[np.float32]:
        """The weight's step for each channel, large enough that the bias fits into 32 bits."""
        other_axes = tuple(axis for axis in range(layer.weight.ndim) if axis != layer.axis)
        scales = np.abs(layer.weight).max(axis=other_axes, initial=0.0) / (2 ** (self._options.weight_bits - 1) - 1)
        if layer.bias is not None:
            # Half of the 32-bit range, because the sum of products is added to the bias.
            scales = np.maximum(scales, np.abs(layer.bias) / (self._steps(data).scale * _LARGEST_BIAS / 2))
        return np.where(scales > 0, scales, 1.0).astype(np.float32)

    def _steps(self, name: str) -> _Steps:
        """The scale and the zero point of tensor *name*, from its measured range."""
        places, kind = self._places, np.iinfo(self._kind)
        low, high = self._ranges[places.steps[name]].bounds(self._options.clipped)
        scale = float(np.float32((high - low) / (kind.max - kind.min))) or 1.0
        return _Steps(scale, int(np.clip(kind.min - round(low / scale), kind.min, kind.max)))


def write_halves(prepared: PreparedModel) -> WrittenVariant:
    """Write the model with all its layers in float16."""
    model = copied(prepared.model)
    emitter, owners = Emitter(model.graph), dict[str, str]()
    layers = {layer.position: layer for layer in prepared.layers}
    nodes: list[OnnxNode] = []
    for position, node in enumerate(model.graph.node):
        if position not in layers:
            nodes.append(node)
            continue
        layer = layers[position]
        converted = _halve(node, layer, emitter)
        owners |= {written.output[0]: layer.name for written in converted}
        nodes += converted
    replace_nodes(model.graph, nodes, emitter.constants)
    return WrittenVariant(model, owners)


def _halve(node: OnnxNode, layer: FastLayer, emitter: Emitter) -> list[OnnxNode]:
    """Put the node of a layer between casts to and from float16, its weight and bias too; return the three nodes."""
    half_input, half_output = emitter.name(f"{layer.name}/half"), emitter.name(f"{layer.name}/half/out")
    before = make_node("Cast", [node.input[0]], [half_input], half_input, to=ElementType.FLOAT16)
    after = make_node("Cast", [half_output], [node.output[0]], f"{half_output}/Cast", to=ElementType.FLOAT)
    node.input[0], node.output[0] = half_input, half_output
    for operand, values in ((1, layer.weight), (2, layer.bias)):
        if values is not None:
            half = np.clip(values, -LARGEST_HALF, LARGEST_HALF).astype(np.float16)
            node.input[operand] = emitter.store(half, f"{layer.name}/half/{operand}")
    return [before, node, after]
