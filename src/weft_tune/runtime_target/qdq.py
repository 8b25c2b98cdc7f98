"""A model whose chosen layers are 8-bit integers, in pairs of QuantizeLinear and DequantizeLinear.

Weights are int8, symmetric, with a step for each output channel; what enters and leaves a layer has one step for the
whole tensor, from its range; biases are int32 in steps of both together. ONNX Runtime makes 8-bit kernels of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from weft.models.onnx_import.walk import names_read
from weft_tune.export.emitter import Emitter
from weft_tune.runtime_target.places import eight_bit_places
from weft_tune.runtime_target.prepared import FastLayer, PreparedModel
from weft_tune.runtime_target.ranges import TensorRange

_LARGEST_BIAS = 2**31 - 1


class QdqWay(NamedTuple):
    """How values become 8-bit integers."""

    activations: Literal["uint8", "int8"] = "uint8"
    joined: bool = True
    """Whether operators between layers stay in 8 bits where they can."""
    weight_bits: int = 8
    """7, where a processor without instructions for it adds products in 16 bits."""
    clipped: bool = False
    """Whether the largest values are clipped for the sake of smaller steps."""

    def __str__(self) -> str:
        more = (
            ("", ", layers alone")[not self.joined], ("", f", {self.weight_bits}-bit weights")[self.weight_bits < 8],
            ("", ", clipped")[self.clipped],
        )  # fmt: skip
        return f"int8, inputs {self.activations}{''.join(more)}"


class WrittenVariant(NamedTuple):
    """A variant of a model."""

    model: ModelProto
    owners: Mapping[str, str]
    """What a node makes -> the layer that the node belongs to, of the nodes that are a layer or serve one."""


class _Steps(NamedTuple):
    """Of a tensor: value = scale * (code - zero)."""

    scale: float
    zero: int


def write_qdq(
    prepared: PreparedModel, ranges: Mapping[str, TensorRange], chosen: Collection[str], way: QdqWay
) -> WrittenVariant:
    """The model with the layers called *chosen* in 8 bits."""
    model = ModelProto()
    model.CopyFrom(prepared.model)
    writer = _QdqWriter(model, [layer for layer in prepared.layers if layer.name in chosen], ranges, way)
    writer.write()
    owners = writer.owners | {
        prepared.model.graph.node[layer.position].output[0]: layer.name
        for layer in prepared.layers
        if layer.name not in chosen
    }
    return WrittenVariant(model, owners)


class _QdqWriter:
    """Writes one variant into a graph."""

    def __init__(
        self, model: ModelProto, layers: list[FastLayer], ranges: Mapping[str, TensorRange], way: QdqWay
    ) -> None:
        self._graph, self._layers, self._ranges, self._way = model.graph, layers, ranges, way
        self._places = eight_bit_places(model.graph, layers, way.joined)
        self._emitter = Emitter(model.graph)
        self._kind = np.dtype(way.activations)
        self._read: dict[str, str] = {}
        self.owners: dict[str, str] = {}

    def write(self) -> None:
        layers = {layer.position: layer for layer in self._layers}
        nodes: list[NodeProto] = []
        for position, node in enumerate(self._graph.node):
            if position in layers:
                nodes += self._enter(node, layers[position])
            nodes.append(node)
            nodes += [each for name in list(node.output) for each in self._leave(node, name)]
            if position in layers:
                self.owners[node.output[0]] = layers[position].name
        replace_nodes(self._graph, nodes, self._emitter.constants)

    def _enter(self, node: NodeProto, layer: FastLayer) -> list[NodeProto]:
        """Rewire what a layer reads; the nodes to be written before it."""
        entering, nodes = node.input[0], list[NodeProto]()
        if entering in self._places.read:
            if entering not in self._read:
                nodes += self._pair(entering, self._emitter.name(f"{entering}/8-bit"), layer.name)
                self._read[entering] = nodes[-1].output[0]
            node.input[0] = self._read[entering]
        scales = self._scales(layer, entering)
        shape = [-1 if axis == layer.axis else 1 for axis in range(layer.weight.ndim)]
        codes = np.rint(layer.weight / scales.reshape(shape)).astype(np.int8)
        zeros = self._emitter.constant(np.zeros(len(scales)), np.int8)
        nodes.append(self._constant(layer, "weight", codes, scales, layer.axis, zeros))
        node.input[1] = nodes[-1].output[0]
        if layer.bias is not None:
            steps = scales * np.float32(self._steps(entering).scale)
            nodes.append(self._constant(layer, "bias", np.rint(layer.bias / steps).astype(np.int32), steps, 0))
            node.input[2] = nodes[-1].output[0]
        return nodes

    def _leave(self, node: NodeProto, name: str) -> list[NodeProto]:
        """The pair behind a tensor that is made in 8 bits, whose name goes to what comes out of the pair."""
        if name not in self._places.made:
            return []
        inside = self._emitter.name(f"{name}/float")
        node.output[list(node.output).index(name)] = inside
        return self._pair(inside, name, self._places.made[name], of=name)

    def _pair(self, source: str, out: str, owner: str, of: str | None = None) -> list[NodeProto]:
        """QuantizeLinear and DequantizeLinear between two tensors."""
        steps = self._steps(of or source)
        settings = [self._emitter.number(steps.scale), self._emitter.constant(steps.zero, self._kind)]
        codes = self._emitter.name(f"{of or source}/codes")
        if owner:
            self.owners |= {codes: owner, out: owner}
        return [
            helper.make_node("QuantizeLinear", [source, *settings], [codes], name=codes),
            helper.make_node("DequantizeLinear", [codes, *settings], [out], name=f"{codes}/DequantizeLinear"),
        ]

    def _constant(
        self, layer: FastLayer, role: str, codes: npt.NDArray[np.signedinteger], scales: npt.NDArray[np.float32],
        axis: int, *zeros: str,
    ) -> NodeProto:  # fmt: skip
        """DequantizeLinear of a weight or a bias."""
        stored = self._emitter.stored(numpy_helper.from_array(codes, ""), f"{layer.name}.{role}/codes")
        steps = self._emitter.stored(numpy_helper.from_array(scales, ""), f"{layer.name}.{role}/scale")
        out = self._emitter.name(f"{layer.name}.{role}/values")
        self.owners[out] = layer.name
        return helper.make_node("DequantizeLinear", [stored, steps, *zeros], [out], name=out, axis=axis)

    def _scales(self, layer: FastLayer, entering: str) -> npt.NDArray[np.float32]:
        """A step for each channel; large enough that its bias can be counted in 32 bits."""
        others = tuple(axis for axis in range(layer.weight.ndim) if axis != layer.axis)
        scales = np.abs(layer.weight).max(axis=others, initial=0.0) / (2 ** (self._way.weight_bits - 1) - 1)
        if layer.bias is not None:
            scales = np.maximum(scales, np.abs(layer.bias) / (self._steps(entering).scale * _LARGEST_BIAS / 2))
        return np.where(scales > 0, scales, 1.0).astype(np.float32)

    def _steps(self, name: str) -> _Steps:
        places, kind = self._places, np.iinfo(self._kind)
        low, high = self._ranges[places.steps[name]].bounds(self._way.clipped)
        scale = float(np.float32((high - low) / (kind.max - kind.min))) or 1.0
        return _Steps(scale, int(np.clip(kind.min - round(low / scale), kind.min, kind.max)))


def replace_nodes(graph: GraphProto, nodes: Iterable[NodeProto], constants: Iterable[TensorProto]) -> None:
    """Give a graph these nodes in this order and these constants beside its own, of which those stay that are read."""
    copies = [NodeProto.FromString(each.SerializeToString()) for each in nodes]
    used = {name for node in copies for name in names_read(node)} | {each.name for each in graph.output}
    kept = [
        TensorProto.FromString(each.SerializeToString())
        for each in (*graph.initializer, *constants)
        if each.name in used
    ]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(copies)
    graph.initializer.extend(kept)
