"""What in a graph depends on the values of its inputs, and not only on their shapes.

The time of a node is known from earlier runs where it follows from the shapes of the inputs: requests of the same
shapes cost the same. It is not where a number in a request says how often a loop turns or how large a tensor becomes;
such a node is *unsteady*, and so are all that take what it makes. Weights and shapes of ordinary tensors are no values.

Numbers too small to be normal are left aside: some processors take a hundred times as long for them. That is a
bound, and what segments are expected to take follows what they took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

KNOWN_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft", "com.microsoft.nchwc"})
"""The domains of operators whose manners are known; any other counts as unsteady."""

_CONTROL = frozenset({"If", "Loop"})

_DECIDED_BY_ALL = frozenset(
    {
        "BeamSearch", "BlackmanWindow", "Compress", "ConstantOfShape", "DynamicTimeWarping", "GreedySearch",
        "HammingWindow", "HannWindow", "ImageDecoder", "MelWeightMatrix", "NonMaxSuppression", "NonZero", "Range",
        "RemovePadding", "RestorePadding", "Sampling", "StringNormalizer", "StringSplit", "Tokenizer", "Unique",
        "WhisperBeamSearch",
    }
)  # fmt: skip
"""Operators that make more or less, or take longer, by what any of their inputs holds."""

_DECIDED_BY: Mapping[str, tuple[int, ...]] = {
    "AffineGrid": (1,), "CenterCropPad": (1,), "Col2Im": (1, 2), "ConvTransposeWithDynamicPads": (2,),
    "CropAndResize": (3,), "DFT": (1, 2), "Expand": (1,), "ExpandDims": (1,), "MaxRoiPool": (1,), "MaxUnpool": (2,),
    "OneHot": (1,),
    "Pad": (1, 3), "Reshape": (1,), "Resize": (1, 2, 3), "RoiAlign": (1,), "SequenceAt": (1,), "SequenceErase": (1,),
    "SequenceInsert": (2,), "Slice": (1, 2, 3, 4), "Split": (1,), "SplitToSequence": (1,), "Squeeze": (1,),
    "STFT": (1, 3), "Tile": (1, 2), "TopK": (1,), "Unsqueeze": (1,), "Upsample": (1,),
    **dict.fromkeys(
        (
            "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
            "ReduceProd", "ReduceSum", "ReduceSumSquare",
        ),
        (1,),
    ),
}  # fmt: skip
"""Operator -> the inputs whose values do: a size, a count, an axis."""


class Fact(NamedTuple):
    """What of a tensor depends on the values of the graph's inputs."""

    valued: bool = False
    """Whether its values depend on them."""
    loose: bool = False
    """Whether its shape depends on them."""


FIXED = Fact()
Facts = dict[str, Fact]
"""What is known of each tensor, by name; what is not there is a weight, and fixed."""


def inputs_of(graph: GraphProto) -> Facts:
    """What a request brings; a text has a length that its shape does not tell."""
    weights = {each.name for each in graph.initializer}
    return {
        each.name: Fact(valued=True, loose=each.type.tensor_type.elem_type == TensorProto.STRING)
        for each in graph.input
        if each.name not in weights
    }


def unsteady(model: ModelProto) -> list[bool]:
    """Whether the cost of each node of the graph, or the shapes it meets, depend on values."""
    return Follower(model.functions).through(model.graph.node, inputs_of(model.graph))


def bodies(node: NodeProto) -> list[GraphProto]:
    """The graphs inside a node."""
    kinds = (AttributeProto.GRAPH, AttributeProto.GRAPHS)
    return [body for each in node.attribute if each.type in kinds for body in (*each.graphs, each.g) if body.node]


class Follower:
    """Follows values through nodes, into local functions and the bodies of control flow."""

    def __init__(self, functions: Iterable[FunctionProto] = ()) -> None:
        self._functions = {(each.domain, each.name): each for each in functions}

    def through(self, nodes: Iterable[NodeProto], facts: Facts) -> list[bool]:
        """Whether each of the *nodes*, which are in order, is unsteady; what they make is added to *facts*."""
        return [self._passes(node, facts) for node in nodes]

    def _passes(self, node: NodeProto, facts: Facts) -> bool:
        taken = [facts.get(name, FIXED) for name in node.input]
        made = self._made(node, taken, facts)
        facts.update((name, made) for name in node.output if name)
        return made.loose or any(each.loose for each in taken)

    def _made(self, node: NodeProto, taken: Sequence[Fact], facts: Facts) -> Fact:
        function = self._functions.get((node.domain, node.op_type))
        if function is not None:
            return self._called(function, taken)
        if node.domain not in KNOWN_DOMAINS or node.op_type in _CONTROL:
            return Fact(valued=True, loose=True)
        if node.op_type in ("Shape", "Size"):
            return Fact(valued=taken[0].loose)
        loose = any(each.loose for each in taken) or any(each.valued for each in _deciding(node.op_type, taken))
        loose = loose or any(self._unsteady_inside(body, loose, facts) for body in bodies(node))
        return Fact(valued=loose or any(each.valued for each in taken) or bool(bodies(node)), loose=loose)

    def _called(self, function: FunctionProto, taken: Sequence[Fact]) -> Fact:
        inner = dict(zip(function.input, taken, strict=False))
        loose = any(self.through(function.node, inner))
        made = [inner.get(name, FIXED) for name in function.output]
        return Fact(valued=loose or any(each.valued for each in made), loose=loose)

    def _unsteady_inside(self, body: GraphProto, loose: bool, facts: Facts) -> bool:
        given = dict.fromkeys((each.name for each in body.input), Fact(valued=True, loose=loose))
        return any(self.through(body.node, {**facts, **given}))


def _deciding(operator: str, taken: Sequence[Fact]) -> Sequence[Fact]:
    if operator in _DECIDED_BY_ALL:
        return taken
    return [taken[place] for place in _DECIDED_BY.get(operator, ()) if place < len(taken)]
