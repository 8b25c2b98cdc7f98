"""What a tuned ONNX file says of itself: which layers have weights in few bits, and where it rounds.

``weft tune`` rounds what enters a layer by a handful of operators, element by element. They are read as one operation
of the net (``RoundingSteps``), which keeps channels apart and is written again as it was.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnx import NodeProto, helper

from weft.base.errors import StitchError
from weft.models.onnx_import.widths import FORMATS, ROUNDED, node_name, rounded_in, widths_in
from weft_stitch.graph import Builder
from weft_stitch.net import Array
from weft_stitch.reading.onnx_source import OnnxSource, SourceNode

FLOAT_BITS = 32


@dataclass(frozen=True, eq=False)
class RoundingSteps:
    """Operators that round a value; all that they read and write has its shape, or is one number."""

    nodes: tuple[NodeProto, ...]
    constants: Mapping[str, Array]
    source: str
    output: str
    signature: str
    """Equal for those that round alike."""

    def steps(self, builder: Builder, inputs: Sequence[str]) -> str:
        """Add the operators; the name of what they make of the one input."""
        shape, names = builder.shape(inputs[0]), {self.source: inputs[0]}
        names |= {name: builder.constant(array, "rounding") for name, array in self.constants.items()}
        for node in self.nodes:
            attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
            read = [names[each] for each in node.input]
            names[node.output[0]] = builder.add(node.op_type, *read, shape=shape, **attributes)
        builder.rounded[names[self.output]] = inputs[0]
        return names[self.output]


def narrow_nodes(source: OnnxSource) -> frozenset[str]:
    """The nodes of a tuned file whose weights are in fewer bits than floats have."""
    widths = widths_in(source.proto)
    narrow = {name for name, each in widths.items() if each.weight < FLOAT_BITS}
    return frozenset(node.name for node in source.nodes if node_name(node.proto) in narrow)


def roundings(source: OnnxSource) -> dict[str, RoundingSteps]:
    """Every rounded tensor of a file with what rounds it."""
    makers = {output: node for node in source.nodes for output in node.outputs if output}
    found = rounded_in(source.proto)
    notes = {entry.key for entry in source.proto.metadata_props}
    if FORMATS in notes and ROUNDED not in notes:
        raise StitchError("it was tuned by an older weft, and does not say where it rounds; tune it again")
    return {output: _steps(source, makers, of, output) for output, of in found.items() if output in makers}


def inner(found: Iterable[RoundingSteps]) -> frozenset[str]:
    """The tensors that only exist while something is rounded."""
    return frozenset(node.output[0] for each in found for node in each.nodes if node.output[0] != each.output)


def _steps(source: OnnxSource, makers: Mapping[str, SourceNode], of: str, output: str) -> RoundingSteps:
    wanted, kept = [output], dict[str, SourceNode]()
    while wanted:
        name = wanted.pop()
        if name == of or name in kept or name not in makers:
            continue
        kept[name] = makers[name]
        wanted += [each for each in makers[name].inputs if each]
    nodes = [node for node in source.nodes if any(node is each for each in kept.values())]
    if foreign := [node.op for node in nodes if "." in node.op]:
        raise StitchError(f"it rounds by {foreign[0]}, which ONNX Runtime does not know; tune it with --export qdq")
    read = dict.fromkeys(name for node in nodes for name in node.inputs if name)
    constants = {name: source.stored(name) for name in read if name in source.tensors}
    return RoundingSteps(tuple(node.proto for node in nodes), constants, of, output, _signature(nodes, constants))


def _signature(nodes: Sequence[SourceNode], constants: Mapping[str, Array]) -> str:
    digest = hashlib.sha256()
    for node in nodes:
        held = [constants[name].tobytes() for name in node.inputs if name in constants]
        told = [each.SerializeToString() for each in node.proto.attribute]
        digest.update(b"|".join([node.op.encode(), *held, *told]))
    return digest.hexdigest()[:16]
