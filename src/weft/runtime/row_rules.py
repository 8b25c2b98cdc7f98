"""What operators do with the rows of a batch: from the owners of what a node takes to the owners of what it makes.

There are seven kinds. Most compute element by element. Some move elements, by numbers that are nobody's: they are run
on the owners themselves. Some take all along certain axes together; products and convolutions take one axis of each
side. Some are known to keep to the rows along one axis, some pick values by numbers that samples bring, and some look
at whole tensors, or draw lots. What is in no table is not known to keep rows apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import NodeProto, helper

from weft.models.onnx_import.attributes import Attributes
from weft.runtime.owners import (
    Mixed,
    Owners,
    Shape,
    along,
    collapsed,
    joined,
    shrunk,
)
from weft.runtime.tensors import Array


@dataclass(frozen=True, slots=True)
class Case:
    """A node in a run, with all that its rule may ask for."""

    node: NodeProto
    version: int
    """The version of the standard operators."""
    owners: Sequence[Owners | None]
    shapes: Sequence[Shape | None]
    made: Sequence[Shape | None]
    """The shapes of its outputs."""
    value: Callable[[int], Array]
    """What an input holds that is nobody's."""
    compute: Callable[[NodeProto, Mapping[int, Array]], Sequence[Array]]
    """What a node makes of these inputs."""

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.node)

    def given(self, place: int) -> bool:
        return place < len(self.node.input) and bool(self.node.input[place])

    def owner(self, place: int) -> Owners | None:
        return self.owners[place] if place < len(self.owners) else None

    def shape(self, place: int) -> Shape:
        found = self.shapes[place] if place < len(self.shapes) else None
        if found is None:
            raise Mixed
        return found

    def rank(self, place: int = 0) -> int:
        return len(self.shape(place))

    def numbers(self, place: int) -> tuple[int, ...] | None:
        """The whole numbers of an input; None where it is left out."""
        return tuple(map(int, np.ravel(self.value(place)).tolist())) if self.given(place) else None

    def only(self, places: Iterable[int]) -> None:
        """All other inputs must be nobody's."""
        if any(each is not None and place not in places for place, each in enumerate(self.owners)):
            raise Mixed


Made = Owners | None | Sequence[Owners | None]
"""Of all outputs the same, or of each."""
Rule = Callable[[Case], Made]


# Element by element


def _broadcast(case: Case, *parts: Owners | None) -> Made:
    """Whom the output belongs to; axes that parts lack stand before theirs."""
    found, shape = joined(*parts), case.made[0]
    if found is None or shape is None or len(shape) < found.ndim:
        return found
    return found.reshape((1,) * (len(shape) - found.ndim) + found.shape)


def _elementwise(case: Case) -> Made:
    return _broadcast(case, *case.owners)


def _of(*places: int) -> Rule:
    """Element by element of these inputs; the others are numbers for all."""

    def rule(case: Case) -> Made:
        case.only(places)
        return _broadcast(case, *(case.owner(place) for place in places))

    return rule


def _batch_norm(case: Case) -> Made:
    if case.attributes.integer("training_mode", 0) or len([*filter(None, case.node.output)]) > 1:
        raise Mixed
    return _of(0)(case)


def _dropout(case: Case) -> Made:
    case.only([0])
    if case.given(2) and np.any(case.value(2)):
        raise Mixed
    return case.owner(0)


def _one_hot(case: Case) -> Made:
    case.only([0])
    owners, axis = case.owner(0), case.attributes.integer("axis", -1)
    return None if owners is None else np.expand_dims(owners, axis)


# Moving elements


def _moved(*places: int) -> Rule:
    """Run on the owners themselves; no places: all inputs hold elements that are moved."""

    def rule(case: Case) -> Made:
        moving = places or range(len(case.owners))
        case.only(moving)
        feed = {place: _spread(case, place) for place in moving if case.given(place)}
        made = case.compute(_plain(case.node), feed)
        return [shrunk(np.asarray(each).astype(np.int32)) for each in made]

    return rule


def _spread(case: Case, place: int) -> Array:
    owners = case.owner(place)
    return np.broadcast_to(np.int32(0) if owners is None else owners, case.shape(place)).astype(np.float32)


def _plain(node: NodeProto) -> NodeProto:
    """The node without the value that it fills gaps with, which is nobody's."""
    plain = NodeProto()
    plain.CopyFrom(node)
    if node.op_type == "Pad":
        kept = [each for each in node.attribute if each.name != "value"]
        del plain.attribute[:]
        plain.attribute.extend(kept)
        if len(plain.input) > 2:
            plain.input[2] = ""
    return plain


def _reshaped(case: Case) -> Made:
    """To another shape; the same elements in their order."""
    owners, made = case.owner(0), case.made[0]
    case.only([0])
    if owners is None or made is None:
        raise Mixed
    return shrunk(np.broadcast_to(owners, case.shape(0)).reshape(made))


def _picked(case: Case) -> Made:
    """Values are picked along an axis: by numbers that are nobody's, or within samples, by their own."""
    if case.owner(1) is None:
        return _moved(0)(case)
    axis = case.attributes.integer("axis", 0) % max(1, case.rank())
    before, after = case.rank(1), case.rank() - axis - 1
    data, chosen = case.owner(0), case.owner(1)
    chosen = None if chosen is None else chosen.reshape(*chosen.shape, *(1,) * after)
    if data is not None:
        data = collapsed(data, [axis])
        data = data.reshape(*data.shape[:axis], *(1,) * before, *data.shape[axis + 1 :])
    return _broadcast(case, data, chosen)


def _picked_elements(case: Case) -> Made:
    if case.owner(1) is None:
        return _moved(0)(case)
    data, axis = case.owner(0), case.attributes.integer("axis", 0)
    others = [np.delete(case.shape(place), axis).tolist() for place in (0, 1)]
    if data is not None and others[0] != others[1]:
        raise Mixed
    return joined(None if data is None else collapsed(data, [axis]), case.owner(1))


def _picked_slices(case: Case) -> Made:
    chosen = case.owner(1)
    if chosen is None:
        return _moved(0)(case)
    case.only([1])
    made = case.made[0]
    if made is None:
        raise Mixed
    chosen = collapsed(chosen, [-1])[..., 0]
    return chosen.reshape(*chosen.shape, *(1,) * (len(made) - chosen.ndim))


def _scattered(case: Case) -> Made:
    """Values are put in places that are nobody's numbers, each place once."""
    if case.attributes.text("reduction") not in ("", "none"):
        raise Mixed
    return _moved(0, 2)(case)


def _joined_quantised(case: Case) -> Made:
    """A Concat whose parts each come with a scale and a zero point."""
    places = range(2, len(case.owners), 3)
    case.only(places)
    parts = [case.node.input[place] for place in places]
    node = helper.make_node("Concat", parts, case.node.output, axis=case.attributes.integer("axis", 0))
    made = case.compute(node, {number: _spread(case, place) for number, place in enumerate(places)})
    return [shrunk(np.asarray(each).astype(np.int32)) for each in made]


# All along axes


def _lines(axes: Callable[[Case], Iterable[int]], *places: int) -> Rule:
    """All elements along these axes are taken together; axes may be gone afterwards."""

    def rule(case: Case) -> Made:
        taken = places or (0,)
        case.only(taken)
        owners = joined(*(case.owner(place) for place in taken))
        if owners is None:
            return None
        over = [axis % owners.ndim for axis in axes(case)] if owners.ndim else []
        found = collapsed(owners, over)
        return [_fitted(found, over, shape) for shape in case.made]

    return rule


def _fitted(owners: Owners, over: Sequence[int], shape: Shape | None) -> Owners:
    if shape is None or len(shape) == owners.ndim:
        return owners
    return np.squeeze(owners, tuple(over))


def _reduced(case: Case) -> Iterable[int]:
    axes = case.attributes.integers("axes", ()) or case.numbers(1)
    if axes:
        return axes
    return () if case.attributes.integer("noop_with_empty_axes", 0) else range(case.rank())


def _axis(default: int) -> Callable[[Case], Iterable[int]]:
    return lambda case: [case.attributes.integer("axis", default)]


def _from_axis(default: int) -> Callable[[Case], Iterable[int]]:
    """All axes from one to the last."""
    return lambda case: range(case.attributes.integer("axis", default) % max(1, case.rank()), case.rank())


def _from(first: int) -> Callable[[Case], Iterable[int]]:
    return lambda case: range(first, case.rank())


def _softmax(case: Case) -> Iterable[int]:
    version = case.attributes.integer("opset", case.version)
    return (_from_axis(1) if version < 13 else _axis(-1))(case)


def _summed_up(case: Case) -> Iterable[int]:
    return case.numbers(1) or ()


def _mean_variance(case: Case) -> Iterable[int]:
    return case.attributes.integers("axes", (0, 2, 3))


def _last_two(case: Case) -> Iterable[int]:
    return (-2, -1)


def _transformed(case: Case) -> Iterable[int]:
    """A Fourier transform's axis, and that of the two parts of complex numbers."""
    given = case.numbers(2) if case.version >= 20 else None
    return (*(given or (case.attributes.integer("axis", 1 if case.version < 20 else -2),)), -1)


def _resized(case: Case) -> Iterable[int]:
    """Those along which the size changes, or the scale is not 1."""
    text, axes = case.attributes.text, case.attributes.integers("axes", range(case.rank()))
    if text("coordinate_transformation_mode") == "tf_crop_and_resize" or case.made[0] is None:
        return range(case.rank())
    if text("keep_aspect_ratio_policy") not in ("", "stretch"):
        return axes
    place = 1 if case.node.op_type == "Upsample" or case.version < 11 else 2
    scales = [each.floats for each in case.node.attribute if each.name == "scales"] or [[]]
    given = np.ravel(case.value(place)).tolist() if case.given(place) else scales[0]
    scaled = [axis for axis, scale in zip(axes, given, strict=False) if scale != 1]
    return {*scaled, *(axis for axis, size in enumerate(case.shape(0)) if size != case.made[0][axis])}


# Products and convolutions


def _product(left: int = 0, right: int = 1, added: int = -1) -> Rule:
    """The rule of a product of matrices: the axis that is summed over is that of no sample."""

    def rule(case: Case) -> Made:
        case.only([left, right, added])
        attributes = case.attributes
        if attributes.integer("transBatchA", 0) or attributes.integer("transBatchB", 0):
            raise Mixed
        rows = _side(case, left, bool(attributes.integer("transA", 0)), -1)
        columns = _side(case, right, bool(attributes.integer("transB", 0)), -2)
        gone = [axis for axis, place in ((-2, left), (-1, right)) if case.rank(place) == 1]
        found = joined(rows, columns)
        found = found if found is None else np.squeeze(found, tuple(gone))
        return _broadcast(case, found, case.owner(added) if added >= 0 else None)

    return rule


def _side(case: Case, place: int, flipped: bool, summed: int) -> Owners | None:
    """The owners of a matrix, or of several, once the axis is gone that is summed over."""
    owners = case.owner(place)
    if owners is None:
        return None
    if owners.ndim == 1:
        return collapsed(owners, [0]).reshape(1, 1)
    if flipped:
        owners = np.swapaxes(owners, -1, -2)
    return collapsed(owners, [summed])


def _einsum(case: Case) -> Made:
    taken, arrow, made = case.attributes.text("equation").replace(" ", "").partition("->")
    terms = taken.split(",")
    if "." in taken or any(len(set(term)) < len(term) for term in terms):
        raise Mixed
    if not arrow:
        made = "".join(sorted(letter for letter in set(taken) - {","} if taken.count(letter) == 1))
    return joined(*(_term(case.owner(place), term, made) for place, term in enumerate(terms)))


def _term(owners: Owners | None, term: str, made: str) -> Owners | None:
    if owners is None:
        return None
    left = collapsed(owners, [axis for axis, letter in enumerate(term) if letter not in made])
    kept = [term.index(letter) for letter in made if letter in term]
    gone = [axis for axis in range(owners.ndim) if axis not in kept]
    ordered = left.transpose(*kept, *gone).reshape([left.shape[axis] for axis in kept])
    return ordered[tuple(slice(None) if letter in term else np.newaxis for letter in made)]


def _convolution(case: Case) -> Made:
    """Positions and channels are summed over; samples beside each other as channels are kept apart by groups."""
    fused = case.node.op_type == "FusedConv"
    case.only([0, 3] if fused else [0])
    owners, groups = case.owner(0), case.attributes.integer("group", 1)
    made = case.made[0]
    if owners is None or made is None:
        raise Mixed
    owners = collapsed(owners, range(1 if case.attributes.integer("channels_last", 0) else 2, owners.ndim))
    if owners.shape[1] > 1:
        each = collapsed(owners.reshape(owners.shape[0], groups, -1), [2])[..., 0]
        owners = np.repeat(each, made[1] // groups, axis=1).reshape(owners.shape[0], -1, *(1,) * (owners.ndim - 2))
    return joined(owners, case.owner(3) if fused else None)


# Rows along one axis


def _rows(taken: Mapping[int, int] | None = None, made: Sequence[int] = ()) -> Rule:
    """Rows lie along one axis of each input, and of each output, and are kept apart; the first axis if nothing is said.

    taken: input -> axis; all others must be nobody's.
    """

    def rule(case: Case) -> Made:
        if taken is not None:
            case.only(taken)
        found = joined(*(_in_a_row(case, place, taken) for place in range(len(case.owners))))
        if found is None:
            raise Mixed
        return [_placed(found, shape, made[index] if index < len(made) else 0) for index, shape in enumerate(case.made)]

    return rule


def _placed(owners: Owners, shape: Shape | None, axis: int) -> Owners:
    if shape is None or len(owners) not in (1, *shape[axis : axis + 1]):
        raise Mixed
    return along(axis, len(shape), owners)


def _in_a_row(case: Case, place: int, axes: Mapping[int, int] | None) -> Owners | None:
    owners, axis = case.owner(place), 0 if axes is None else axes.get(place, 0)
    if owners is None:
        return None
    if owners.ndim <= axis:
        raise Mixed
    return collapsed(owners, [each for each in range(owners.ndim) if each != axis]).ravel()


def _recurrent(case: Case) -> Made:
    if case.attributes.integer("layout", 0):
        raise Mixed
    made = [axis for axis, name in zip((2, 1, 1), case.node.output, strict=False) if name]
    return _rows({0: 1, 4: 0, 5: 1, 6: 1}, made)(case)


def _attention(case: Case) -> Made:
    """The standard's mask may leave out the axis of the samples."""
    mask = case.owner(3)
    if not case.node.domain and mask is not None and mask.ndim < 4:
        raise Mixed
    return _rows()(case)


def _tables(case: Case) -> Made:
    """Those of classical learning take rows of features; a single row may leave out its axis."""
    if case.rank() < 2:
        raise Mixed
    return _rows({0: 0})(case)


def _reversed(case: Case) -> Made:
    if case.owner(1) is None:
        return _moved(0)(case)
    case.only([0, 1])
    batch, time = case.attributes.integer("batch_axis", 1), case.attributes.integer("time_axis", 0)
    owners, lengths = case.owner(0), case.owner(1)
    assert lengths is not None
    return joined(None if owners is None else collapsed(owners, [time]), along(batch, case.rank(), lengths.ravel()))


def _nobody(case: Case) -> Made:
    """It tells of shapes only."""
    return None


def _never(case: Case) -> Made:
    raise Mixed


def _names(rule: Rule, text: str) -> dict[str, Rule]:
    return dict.fromkeys(text.split(), rule)


RULES: Mapping[str, Rule] = {
    **_names(
        _elementwise,
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh BiasGelu BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor "
        "Cast Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp FastGelu Floor Gelu Greater GreaterOrEqual HardSigmoid "
        "HardSwish Identity IsInf IsNaN LabelEncoder LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not "
        "Or PRelu Pow QuickGelu Reciprocal RegexFullMatch Relu Round Selu Shrink Sigmoid Sign Sin Sinh Softplus "
        "Softsign Sqrt StringConcat Sub Sum Swish Tan Tanh ThresholdedRelu Where Xor",
    ),
    **_names(_of(0), "DequantizeLinear QLinearLeakyRelu QLinearSigmoid QuantizeLinear"),
    **_names(_of(0, 3), "QLinearAdd QLinearMul"),
    "BatchNormalization": _batch_norm,
    "Dropout": _dropout,
    "OneHot": _one_hot,
    **_names(_reshaped, "Flatten Reshape Squeeze Unsqueeze"),
    **_names(_moved(0), "Compress DepthToSpace Expand Pad Slice SpaceToDepth Split Tile Transpose Trilu"),
    "Concat": _moved(),
    "QLinearConcat": _joined_quantised,
    **_names(_scattered, "Scatter ScatterElements ScatterND"),
    "Gather": _picked,
    "GatherElements": _picked_elements,
    "GatherND": _picked_slices,
    "ReverseSequence": _reversed,
    **_names(
        _lines(_reduced),
        "ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare",
    ),
    **_names(_lines(_axis(0)), "ArgMax ArgMin"),
    **_names(_lines(_axis(-1)), "LpNormalization TopK"),
    **_names(_lines(_softmax), "Hardmax LogSoftmax QLinearSoftmax Softmax"),
    **_names(_lines(_from_axis(-1)), "LayerNormalization RMSNormalization SimplifiedLayerNormalization"),
    **_names(_lines(_axis(-1), 0, 1), "SkipLayerNormalization SkipSimplifiedLayerNormalization"),
    **_names(_lines(_summed_up), "CumProd CumSum"),
    **_names(_lines(_from(1)), "LRN QLinearAveragePool QLinearGlobalAveragePool"),
    **_names(
        _lines(_from(2)),
        "AveragePool GlobalAveragePool GlobalLpPool GlobalMaxPool InstanceNormalization LpPool MaxPool",
    ),
    "MeanVarianceNormalization": _lines(_mean_variance),
    **_names(_lines(_last_two), "Det Inverse"),
    "DFT": _lines(_transformed),
    **_names(_lines(_resized), "Resize Upsample"),
    **_names(_product(), "FusedMatMul MatMul MatMulInteger MatMulIntegerToFloat"),
    **_names(_product(added=2), "FusedGemm Gemm"),
    **_names(_product(0, 3), "QLinearMatMul"),
    **_names(_product(0, 3, 6), "QGemm"),
    "Einsum": _einsum,
    **_names(_convolution, "Conv ConvInteger ConvTranspose FusedConv QLinearConv"),
    **_names(_recurrent, "GRU LSTM RNN"),
    **_names(_attention, "Attention MultiHeadAttention"),
    **_names(_rows(), "EmbedLayerNormalization RotaryEmbedding"),
    **_names(_rows({0: 0}), "AffineGrid Col2Im NhwcMaxPool STFT"),
    **_names(_rows({0: 0, 1: 0}), "GridSample"),
    **_names(_rows({0: 0, 1: 0, 2: 0}), "TensorScatter"),
    **_names(
        _tables,
        "ArrayFeatureExtractor Imputer LinearClassifier LinearRegressor Normalizer OneHotEncoder Scaler "
        "TfIdfVectorizer TreeEnsembleClassifier TreeEnsembleRegressor",
    ),
    **_names(_nobody, "EyeLike Shape Size"),
}
"""Operator -> what it does with rows."""

ELEMENTWISE = frozenset(name for name, rule in RULES.items() if rule is _elementwise)

BLOCKED = _rows({0: 0, 3: 0})
"""The rule of operators on images in blocks of channels (``com.microsoft.nchwc``)."""

WHOLE = frozenset(
    {
        "DynamicQuantizeLSTM", "DynamicQuantizeLinear", "DynamicQuantizeMatMul", "NonMaxSuppression", "NonZero",
        "StringNormalizer", "StringSplit", "Unique",
    }
)  # fmt: skip
"""Operators that look at whole tensors: at their ranges, or at how much of them there is."""

LOTS = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
"""Operators that draw lots, so that it counts how many were drawn before."""

ASKED: Mapping[str, Sequence[int]] = {
    **dict.fromkeys(
        [
            "Compress", "Expand", "Gather", "GatherElements", "GatherND", "ReverseSequence", "Scatter",
            "ScatterElements", "ScatterND", "Split", "Tile", "Trilu", "Upsample",
            *(name for name in RULES if name.startswith(("Cum", "Reduce"))),
        ],
        (1,),
    ),
    "DFT": (2,),
    "Dropout": (2,),
    "Pad": (1, 3),
    "Resize": (1, 2, 3),
    "Slice": (1, 2, 3, 4),
}  # fmt: skip
"""Operator -> the inputs of which the rules want to know what they hold."""


def whom(case: Case) -> list[Owners | None]:
    """Whom each output of a node belongs to; ``Mixed`` where that cannot be told."""
    blocked = case.node.domain.endswith("nchwc")
    rule: Any = BLOCKED if blocked else RULES.get(case.node.op_type)
    if rule is None:
        what = "looks at all rows at once" if case.node.op_type in WHOLE else "is not known to keep rows apart"
        raise Mixed(what)
    made = rule(case)
    found = list(made) if isinstance(made, list) else [made] * len(case.made)
    for owners, shape in zip(found, case.made, strict=True):
        if owners is not None and (shape is None or not _fits(owners.shape, shape)):
            raise Mixed("is not known to keep rows apart")
    return found


def _fits(owners: Shape, shape: Shape) -> bool:
    return len(owners) == len(shape) and all(size in (1, wanted) for size, wanted in zip(owners, shape, strict=True))
