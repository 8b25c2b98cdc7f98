"""Which tensors of a graph become 8-bit integers, so that ONNX Runtime finds its kernels for the chosen layers.

A convolution has one only if what it makes is 8 bits wide, too; a matrix product may make float32. What is made in 8
bits is read so by everybody. Between layers, sums, products, joins and poolings may stay in 8 bits, if all that they
read is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import NamedTuple

from onnx import GraphProto, NodeProto

from weft_tune.runtime_target.prepared import FastLayer

CLIPS = ("Relu", "Clip")
"""What is done on the way to an 8-bit integer, at no cost, if nobody else reads what enters it."""
JOINED = (
    "Add", "Mul", "Concat", "AveragePool", "GlobalAveragePool", "LeakyRelu", "Sigmoid", *CLIPS,
)  # fmt: skip
"""Operators between layers that have 8-bit kernels."""
SAME_VALUES = ("MaxPool", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice")
"""Operators that hand on values as they are, in steps of the same size."""


class EightBitPlaces(NamedTuple):
    """Tensors by how they become 8 bits wide."""

    made: Mapping[str, str]
    """Tensor that is made in 8 bits -> the layer that makes it; nothing where it is no layer."""
    read: Mapping[str, str]
    """Other tensor that chosen layers read in 8 bits -> the first of them."""
    steps: Mapping[str, str]
    """Tensor of either kind -> the one whose range gives the size of its steps."""

    @property
    def seen(self) -> set[str]:
        """Tensors whose ranges must be known."""
        return {self.steps[name] for name in (*self.made, *self.read)}


def eight_bit_places(graph: GraphProto, layers: Collection[FastLayer], joined: bool) -> EightBitPlaces:
    """The tensors for the chosen *layers*; *joined*: operators between them stay in 8 bits."""
    chosen = {layer.position: layer for layer in layers}
    alone = _SoleReaders(graph)
    made: dict[str, str] = {}
    source: dict[str, str] = {}  # a tensor in 8 bits -> the tensor that gave it its steps
    for position, node in enumerate(graph.node):
        if position in chosen and node.op_type == "Conv":
            made[alone.end(node.output[0])] = chosen[position].name
        elif joined and node.op_type in JOINED and node.output[0] not in made and _all_in(node, source):
            made[alone.end(node.output[0])] = ""
        elif node.op_type in SAME_VALUES and node.input[0] in source:
            source[node.output[0]] = source[node.input[0]]
        source |= {name: name for name in node.output if name in made}
    read: dict[str, str] = {}
    for layer in chosen.values():
        entering = graph.node[layer.position].input[0]
        if entering not in made:
            read.setdefault(entering, layer.name)
    return EightBitPlaces(made, read, {name: source.get(name, name) for name in (*made, *read)})


def _all_in(node: NodeProto, source: Mapping[str, str]) -> bool:
    """Whether all that a node computes with is 8 bits wide; the bounds of a Clip are settings."""
    return all(name in source for name in (node.input[:1] if node.op_type == "Clip" else node.input))


class _SoleReaders:
    """Who reads a tensor that only one node reads."""

    def __init__(self, graph: GraphProto) -> None:
        count = Counter(name for node in graph.node for name in node.input)
        count.update(each.name for each in graph.output)
        self._reader = {name: node for node in graph.node for name in node.input if count[name] == 1}

    def end(self, name: str) -> str:
        """The tensor that becomes 8 bits wide: *name*, or what a clip makes of it."""
        reader = self._reader.get(name)
        return reader.output[0] if reader is not None and reader.op_type in CLIPS else name
