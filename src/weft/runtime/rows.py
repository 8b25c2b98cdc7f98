"""Whether a graph has an operator that computes with all rows of a batch at once.

Two samples that were made up may come out together as they do alone, although one with larger values would have moved
the other's answer: by a scale that is taken from the largest value in a tensor, for instance. So operators are judged
by what they do, given along which axes of a tensor the samples of a batch lie: those that grow with it. What only
depends on how many rows there are, and not on what they hold, is left to the comparison of real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from weft.models.onnx_import.attributes import Attributes
from weft.runtime.values import FIXED, Fact, Facts, Follower, bodies, inputs_of

METADATA_KEY = "weft.rows"
INDEPENDENT = "independent"
"""What a file says there whose rows may be computed together all the same."""

Shape = tuple[int, ...]


class Spread(NamedTuple):
    """Where the samples of a batch lie in a tensor."""

    axes: frozenset[int]
    rank: int | None = None

    def has(self, axis: int) -> bool:
        """Whether they lie along *axis*, which may be counted from the end."""
        if axis < 0:
            axis = axis + self.rank if self.rank is not None else -1
        return axis in self.axes


NOWHERE = Spread(frozenset())
FIRST = Spread(frozenset({0}))
"""Taken where nothing tells."""


def spreads(alone: Mapping[str, Shape], together: Mapping[str, Shape]) -> dict[str, Spread]:
    """Tensor by tensor, the axes that are longer in a run of several samples than in that of one."""
    return {
        name: Spread(frozenset(axis for axis, size in enumerate(shape) if size != together[name][axis]), len(shape))
        for name, shape in alone.items()
        if len(together.get(name, ())) == len(shape)
    }


def mixing(model: ModelProto, known: Mapping[str, Spread]) -> str | None:
    """What stands against batches: an operator that looks across rows; None where there is none."""
    versions = {each.domain: each.version for each in model.opset_import}
    judge = _Judge(Follower(model.functions), known, versions.get("", versions.get("ai.onnx", 1)))
    return judge.first(model.graph, inputs_of(model.graph))


@dataclass(frozen=True, slots=True)
class _Case:
    """A node with all that its rule may ask for."""

    node: NodeProto
    version: int
    """The version of the standard operators."""
    facts: Sequence[Fact]
    spreads: Sequence[Spread]
    weights: Mapping[str, TensorProto]
    go_on: bool
    """Whether values decide, inside a loop, that it goes on."""

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.node)

    def spread(self, place: int) -> Spread:
        return self.spreads[place] if place < len(self.spreads) else NOWHERE

    def valued(self, place: int) -> bool:
        return place < len(self.facts) and self.facts[place].valued

    def over(self, axes: Iterable[int], of: int = 0) -> bool:
        """Whether samples lie along one of these axes of an input."""
        return any(self.spread(of).has(axis) for axis in axes)

    def given(self, place: int) -> tuple[int, ...] | None:
        """The whole numbers of an input that is a weight; None where it is none, or left out."""
        name = self.node.input[place] if place < len(self.node.input) else ""
        return tuple(numpy_helper.to_array(self.weights[name]).ravel().tolist()) if name in self.weights else None

    def has(self, attribute: str) -> bool:
        return any(each.name == attribute for each in self.node.attribute)


Rule = Callable[[_Case], bool]


@dataclass(frozen=True, slots=True)
class _Judge:
    follower: Follower
    known: Mapping[str, Spread]
    version: int

    def first(self, graph: GraphProto, facts: Facts) -> str | None:
        """The first operator of a graph, or of the bodies in it, that looks across rows."""
        weights = _weights(graph)
        for node in graph.node:
            self.follower.through([node], facts)
            rule = _RULES.get(node.op_type)
            if rule and rule(self._case(node, facts, weights)):
                return f"{node.op_type} {node.name!r} computes with all rows at once"
            for body in bodies(node):
                if (reason := self.first(body, _inside(body, facts))) is not None:
                    return reason
        return None

    def _case(self, node: NodeProto, facts: Facts, weights: Mapping[str, TensorProto]) -> _Case:
        taken = [facts.get(name, FIXED) for name in node.input]
        places = [
            self.known.get(name, FIRST) if fact.valued else NOWHERE
            for name, fact in zip(node.input, taken, strict=True)
        ]
        return _Case(node, self.version, taken, places, weights, self._goes_on(node, facts))

    def _goes_on(self, node: NodeProto, facts: Facts) -> bool:
        if node.op_type != "Loop":
            return False
        (body,) = bodies(node)
        inner = _inside(body, facts)
        inner.update((each.name, FIXED) for each in body.input[:2])
        self.follower.through(body.node, inner)
        return inner.get(str(body.output[0].name), FIXED).valued


def _inside(body: GraphProto, facts: Facts) -> Facts:
    return {**facts, **dict.fromkeys([each.name for each in body.input], Fact(valued=True))}


def _weights(graph: GraphProto) -> dict[str, TensorProto]:
    """The graph's initialisers and constants by name."""
    constants = {
        node.output[0]: each.t
        for node in graph.node
        if node.op_type == "Constant"
        for each in node.attribute
        if each.name == "value"
    }
    return constants | {each.name: each for each in graph.initializer}


# The rules


def _everything(case: _Case) -> bool:
    """It looks at whole tensors."""
    return any(spread.axes for spread in case.spreads)


def _always(case: _Case) -> bool:
    return True


def _reduced(case: _Case) -> bool:
    axes = case.attributes.integers("axes", ()) or case.given(1)
    if axes is None and case.valued(1):
        return _everything(case)
    if not axes:
        return not case.attributes.integer("noop_with_empty_axes", 0) and bool(case.spread(0).axes)
    return case.over(axes)


def _along(default: int) -> Rule:
    return lambda case: case.over([case.attributes.integer("axis", default)])


def _from(default: int) -> Rule:
    """All axes from one to the last are taken as one."""

    def rule(case: _Case) -> bool:
        axis, spread = case.attributes.integer("axis", default), case.spread(0)
        if axis < 0:
            axis += spread.rank if spread.rank is not None else 1 << 10
        return any(each >= axis for each in spread.axes)

    return rule


def _softmax(case: _Case) -> bool:
    return (_from(1) if case.version < 13 else _along(-1))(case)


def _summed_up(case: _Case) -> bool:
    axes = case.given(1)
    return _everything(case) if axes is None else case.over(axes)


def _mean_variance(case: _Case) -> bool:
    return case.over(case.attributes.integers("axes", (0, 2, 3)))


def _batch_statistics(case: _Case) -> bool:
    return case.attributes.integer("training_mode", 0) == 1 and bool(case.spread(0).axes)


def _product(left: int, right: int) -> Rule:
    """The rule of a product of matrices: the axis that is summed over."""

    def rule(case: _Case) -> bool:
        flip_left, flip_right = (case.attributes.integer(name, 0) for name in ("transA", "transB"))
        inner = -1 if flip_right or case.spread(right).rank == 1 else -2
        return case.over([-2 if flip_left else -1], left) or case.over([inner], right)

    return rule


def _einsum(case: _Case) -> bool:
    taken, arrow, made = case.attributes.text("equation").replace(" ", "").partition("->")
    if "." in taken:
        return False
    if not arrow:
        made = "".join(letter for letter in taken if taken.count(letter) == 1)
    summed = [[axis for axis, letter in enumerate(term) if letter not in made] for term in taken.split(",")]
    return any(case.over(axes, place) for place, axes in enumerate(summed))


def _convolution(case: _Case) -> bool:
    """Samples beside each other as channels are kept apart by groups."""
    return case.attributes.integer("group", 1) == 1 and any(axis > 0 for axis in case.spread(0).axes)


def _picked(case: _Case) -> bool:
    """Whether values are picked by numbers that a request brings, along an axis of samples."""
    return case.valued(1) and case.over([case.attributes.integer("axis", 0)])


def _compressed(case: _Case) -> bool:
    return _along(0)(case) if case.has("axis") else _everything(case)


def _recurrent(case: _Case) -> bool:
    return case.over([1 if case.attributes.integer("layout", 0) else 0])


def _scanned(case: _Case) -> bool:
    count = case.attributes.integer("num_scan_inputs", 1)
    axes = case.attributes.integers("scan_input_axes", (0,) * count)
    first = len(case.node.input) - count
    return any(case.over([axis], first + place) for place, axis in enumerate(axes))


def _decided(case: _Case) -> bool:
    """Control flow goes one way for all rows."""
    return case.valued(0) or (case.node.op_type == "Loop" and case.valued(1)) or case.go_on


def _dropped_out(case: _Case) -> bool:
    return case.given(2) not in (None, (0,), (False,))


_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(
        (
            "DynamicQuantizeLinear", "DynamicQuantizeLSTM", "DynamicQuantizeMatMul", "NonMaxSuppression", "NonZero",
            "Unique",
        ),
        _everything,
    ),
    **dict.fromkeys(
        ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"), _always
    ),
    **dict.fromkeys(
        (
            "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
            "ReduceProd", "ReduceSum", "ReduceSumInteger", "ReduceSumSquare",
        ),
        _reduced,
    ),
    **dict.fromkeys(("ArgMax", "ArgMin"), _along(0)),
    **dict.fromkeys(("LpNormalization", "TopK"), _along(-1)),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization"), _from(-1)),
    **dict.fromkeys(("CumProd", "CumSum"), _summed_up),
    "MeanVarianceNormalization": _mean_variance,
    "BatchNormalization": _batch_statistics,
    **dict.fromkeys(
        ("FusedGemm", "FusedMatMul", "Gemm", "MatMul", "MatMulInteger", "MatMulIntegerToFloat"), _product(0, 1)
    ),
    **dict.fromkeys(("QGemm", "QLinearMatMul"), _product(0, 3)),
    "Einsum": _einsum,
    **dict.fromkeys(("Conv", "ConvInteger", "ConvTranspose", "FusedConv", "QLinearConv"), _convolution),
    **dict.fromkeys(("Gather", "GatherElements", "Scatter", "ScatterElements"), _picked),
    "Compress": _compressed,
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
    "Scan": _scanned,
    **dict.fromkeys(("If", "Loop"), _decided),
    "Dropout": _dropped_out,
}  # fmt: skip
"""Operator -> whether it computes with several rows; one that is not here does not, by all that is known."""
