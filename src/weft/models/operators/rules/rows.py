"""Row rules: which rows of a batch the outputs of a node depend on, given those that its inputs depend on.

Rows are followed as *owners* (``Owners``): the sample that each element of a tensor belongs to. A rule maps the
owners of a node's inputs to the owners of its outputs and raises ``Mixed`` where an element would depend on two
samples. There are six kinds: element by element; elements moved by indices that belong to no sample (the operator
itself is run on the owners); all elements along certain axes combined; products and convolutions, which sum over one
axis of each side; rows kept apart along one axis; and values picked by indices that samples bring.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.models.onnx_graph import Array, Attributes, OnnxNode, copied, make_node

Owners = npt.NDArray[np.int32]
"""The sample of each element of a tensor: whole numbers in an array of its rank, of size 1 along axes on which they do
not change. 0 means no sample, and samples count from 1. None in place of an array: the tensor belongs to no sample."""
Shape = tuple[int, ...]


class Mixed(Exception):
    """An element would belong to several samples; the text may say why."""


def joined(*parts: Owners | None) -> Owners | None:
    """Owners of elements that are computed from one element of each part, the shapes broadcast."""
    owners: Owners | None = None
    for part in parts:
        if owners is not None and part is not None:
            try:
                clash = (owners != part) & (owners != 0) & (part != 0)
            except ValueError as error:
                raise Mixed from error
            if np.any(clash):
                raise Mixed
            owners = np.maximum(owners, part)
        elif part is not None:
            owners = part
    return owners


def collapsed(owners: Owners, axes: Iterable[int]) -> Owners:
    """Owners of elements that are computed from all elements along these *axes*, which stay, of size 1."""
    places = tuple(axes)
    if any(not -owners.ndim <= axis < owners.ndim for axis in places):
        raise Mixed
    places = tuple({axis % owners.ndim for axis in places})
    largest: Any = owners.max(axis=places, keepdims=True, initial=0)
    if np.any((owners != 0) & (owners != largest)):
        raise Mixed
    return np.asarray(largest, np.int32)


def shrunk(owners: Owners) -> Owners | None:
    """The same owners, of size 1 along axes on which nothing changes; None if no element belongs to a sample."""
    if not owners.any():
        return None
    for axis in range(owners.ndim):
        first = owners.take([0], axis)
        if np.array_equal(np.broadcast_to(first, owners.shape), owners):
            owners = first
    return owners


def along(axis: int, rank: int, owners: Owners) -> Owners:
    """Reshape a vector of *owners* so that it lies along one axis of a tensor."""
    return owners.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def numbered(first: int, rows: int, rank: int) -> Owners:
    """Owners of *rows* consecutive samples, one row each, along the first axis."""
    return along(0, rank, np.arange(first, first + rows, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class RowCase:
    """A node of a graph whose rows are followed, with everything its rule may read."""

    node: OnnxNode
    version: int
    """The opset of the standard."""
    owners: Sequence[Owners | None]
    shapes: Sequence[Shape | None]
    output_shapes: Sequence[Shape | None]
    value: Callable[[int], Array]
    """Returns the values of an input, by its position, that belongs to no sample."""
    compute: Callable[[OnnxNode, Mapping[int, Array]], Sequence[Array]]
    """Runs a node on these inputs."""

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.node)

    def given(self, place: int) -> bool:
        return place < len(self.node.input) and bool(self.node.input[place])

    def owner(self, place: int) -> Owners | None:
        return self.owners[place] if place < len(self.owners) else None

    def shape(self, place: int) -> Shape:
        shape = self.shapes[place] if place < len(self.shapes) else None
        if shape is None:
            raise Mixed
        return shape

    def rank(self, place: int = 0) -> int:
        return len(self.shape(place))

    def numbers(self, place: int) -> tuple[int, ...] | None:
        """The whole numbers of an input; None where it is left out."""
        return tuple(map(int, np.ravel(self.value(place)).tolist())) if self.given(place) else None

    def only(self, places: Iterable[int]) -> None:
        """Raise ``Mixed`` if any other input belongs to samples."""
        if any(owners is not None and place not in places for place, owners in enumerate(self.owners)):
            raise Mixed


OutputOwners = Owners | None | Sequence[Owners | None]
"""The owners of all outputs alike, or a list with those of each."""
Follow = Callable[[RowCase], OutputOwners]


class RowRule(NamedTuple):
    """How an operator treats rows."""

    follow: Follow
    reads: tuple[int, ...] = ()
    """Inputs whose values *follow* reads."""
    by_numbers: bool = False
    """Whether those values move elements, which may be correct for some batch sizes only."""


# Element by element


def _broadcast(case: RowCase, *parts: Owners | None) -> OutputOwners:
    """Owners of an output that is broadcast from *parts*; axes that parts lack stand before theirs."""
    owners, shape = joined(*parts), case.output_shapes[0]
    if owners is None or shape is None or len(shape) < owners.ndim:
        return owners
    return owners.reshape((1,) * (len(shape) - owners.ndim) + owners.shape)


def _elementwise(case: RowCase) -> OutputOwners:
    return _broadcast(case, *case.owners)


def _of(*places: int) -> Follow:
    """Element by element of these inputs; the others are parameters of no sample."""

    def rule(case: RowCase) -> OutputOwners:
        case.only(places)
        return _broadcast(case, *(case.owner(place) for place in places))

    return rule


def _batch_norm(case: RowCase) -> OutputOwners:
    if case.attributes.integer("training_mode", 0) or len([*filter(None, case.node.output)]) > 1:
        raise Mixed
    return _of(0)(case)


def _dropout(case: RowCase) -> OutputOwners:
    case.only([0])
    if case.given(2) and np.any(case.value(2)):
        raise Mixed
    return case.owner(0)


def _one_hot(case: RowCase) -> OutputOwners:
    case.only([0])
    owners, axis = case.owner(0), case.attributes.integer("axis", -1)
    return None if owners is None else np.expand_dims(owners, axis)


# Moving elements


def _follow_moves(*places: int) -> Follow:
    """Run the operator on the owners themselves; no places: all inputs hold elements that are moved."""

    def rule(case: RowCase) -> OutputOwners:
        moving = places or range(len(case.owners))
        case.only(moving)
        feed = {place: _spread(case, place) for place in moving if case.given(place)}
        outputs = case.compute(_plain(case.node), feed)
        return [shrunk(np.asarray(output).astype(np.int32)) for output in outputs]

    return rule


def _spread(case: RowCase, place: int) -> Array:
    owners = case.owner(place)
    return np.broadcast_to(np.int32(0) if owners is None else owners, case.shape(place)).astype(np.float32)


def _plain(node: OnnxNode) -> OnnxNode:
    """The node without the value that it fills gaps with, which belongs to no sample."""
    plain = copied(node)
    if node.op_type == "Pad":
        kept = [attribute for attribute in node.attribute if attribute.name != "value"]
        del plain.attribute[:]
        plain.attribute.extend(kept)
        if len(plain.input) > 2:
            plain.input[2] = ""
    return plain


def _follow_reshape(case: RowCase) -> OutputOwners:
    """The same elements in their order, in another shape."""
    owners, output_shape = case.owner(0), case.output_shapes[0]
    case.only([0])
    if owners is None or output_shape is None:
        raise Mixed
    return shrunk(np.broadcast_to(owners, case.shape(0)).reshape(output_shape))


def _follow_gather(case: RowCase) -> OutputOwners:
    """Values are picked along an axis: by indices that belong to no sample, or within a sample by its own."""
    if case.owner(1) is None:
        return _follow_moves(0)(case)
    axis = case.attributes.integer("axis", 0) % max(1, case.rank())
    before, after = case.rank(1), case.rank() - axis - 1
    data, chosen = case.owner(0), case.owner(1)
    chosen = None if chosen is None else chosen.reshape(*chosen.shape, *(1,) * after)
    if data is not None:
        data = collapsed(data, [axis])
        data = data.reshape(*data.shape[:axis], *(1,) * before, *data.shape[axis + 1 :])
    return _broadcast(case, data, chosen)


def _follow_gather_elements(case: RowCase) -> OutputOwners:
    if case.owner(1) is None:
        return _follow_moves(0)(case)
    data, axis = case.owner(0), case.attributes.integer("axis", 0)
    others = [np.delete(case.shape(place), axis).tolist() for place in (0, 1)]
    if data is not None and others[0] != others[1]:
        raise Mixed
    return joined(None if data is None else collapsed(data, [axis]), case.owner(1))


def _follow_gather_nd(case: RowCase) -> OutputOwners:
    chosen = case.owner(1)
    if chosen is None:
        return _follow_moves(0)(case)
    case.only([1])
    output_shape = case.output_shapes[0]
    if output_shape is None:
        raise Mixed
    chosen = collapsed(chosen, [-1])[..., 0]
    return chosen.reshape(*chosen.shape, *(1,) * (len(output_shape) - chosen.ndim))


def _follow_scatter(case: RowCase) -> OutputOwners:
    """Values are written to positions that belong to no sample, each position once."""
    if case.attributes.text("reduction") not in ("", "none"):
        raise Mixed
    return _follow_moves(0, 2)(case)


def _follow_quantised_concat(case: RowCase) -> OutputOwners:
    """A Concat whose parts each come with a scale and a zero point."""
    places = range(2, len(case.owners), 3)
    case.only(places)
    parts = [case.node.input[place] for place in places]
    node = make_node("Concat", parts, case.node.output, axis=case.attributes.integer("axis", 0))
    outputs = case.compute(node, {number: _spread(case, place) for number, place in enumerate(places)})
    return [shrunk(np.asarray(output).astype(np.int32)) for output in outputs]


# All along axes


def _lines(axes: Callable[[RowCase], Iterable[int]], *places: int) -> Follow:
    """All elements along these axes are combined; the output may lack the axes."""

    def rule(case: RowCase) -> OutputOwners:
        taken = places or (0,)
        case.only(taken)
        owners = joined(*(case.owner(place) for place in taken))
        if owners is None:
            return None
        over = [axis % owners.ndim for axis in axes(case)] if owners.ndim else []
        owners_left = collapsed(owners, over)
        return [_squeeze_to(owners_left, over, shape) for shape in case.output_shapes]

    return rule


def _squeeze_to(owners: Owners, over: Sequence[int], shape: Shape | None) -> Owners:
    if shape is None or len(shape) == owners.ndim:
        return owners
    return np.squeeze(owners, tuple(over))


def _reduced_axes(case: RowCase) -> Iterable[int]:
    axes = case.attributes.integers("axes", ()) or case.numbers(1)
    if axes:
        return axes
    return () if case.attributes.integer("noop_with_empty_axes", 0) else range(case.rank())


def _axis(default: int) -> Callable[[RowCase], Iterable[int]]:
    return lambda case: [case.attributes.integer("axis", default)]


def _from_axis(default: int) -> Callable[[RowCase], Iterable[int]]:
    """All axes from one to the last."""
    return lambda case: range(case.attributes.integer("axis", default) % max(1, case.rank()), case.rank())


def _from(first: int) -> Callable[[RowCase], Iterable[int]]:
    return lambda case: range(first, case.rank())


def _softmax(case: RowCase) -> Iterable[int]:
    version = case.attributes.integer("opset", case.version)
    return (_from_axis(1) if version < 13 else _axis(-1))(case)


def _contracted_axes(case: RowCase) -> Iterable[int]:
    return case.numbers(1) or ()


def _mean_variance(case: RowCase) -> Iterable[int]:
    return case.attributes.integers("axes", (0, 2, 3))


def _last_two(case: RowCase) -> Iterable[int]:
    return (-2, -1)


def _transformed_axes(case: RowCase) -> Iterable[int]:
    """The axis of a Fourier transform, and that of the two parts of complex numbers."""
    given = case.numbers(2) if case.version >= 20 else None
    return (*(given or (case.attributes.integer("axis", 1 if case.version < 20 else -2),)), -1)


def _resized_axes(case: RowCase) -> Iterable[int]:
    """The axes along which the size changes, or the scale is not 1."""
    text, axes = case.attributes.text, case.attributes.integers("axes", range(case.rank()))
    if text("coordinate_transformation_mode") == "tf_crop_and_resize" or case.output_shapes[0] is None:
        return range(case.rank())
    if text("keep_aspect_ratio_policy") not in ("", "stretch"):
        return axes
    place = 1 if case.node.op_type == "Upsample" or case.version < 11 else 2
    scales = [attribute.floats for attribute in case.node.attribute if attribute.name == "scales"] or [[]]
    given = np.ravel(case.value(place)).tolist() if case.given(place) else scales[0]
    scaled = [axis for axis, scale in zip(axes, given, strict=False) if scale != 1]
    return {*scaled, *(axis for axis, size in enumerate(case.shape(0)) if size != case.output_shapes[0][axis])}


# Products and convolutions


def _product(left: int = 0, right: int = 1, added: int = -1) -> Follow:
    """The rule of a product of matrices: the summed axis must belong to no sample."""

    def rule(case: RowCase) -> OutputOwners:
        case.only([left, right, added])
        attributes = case.attributes
        if attributes.integer("transBatchA", 0) or attributes.integer("transBatchB", 0):
            raise Mixed
        rows = _side(case, left, bool(attributes.integer("transA", 0)), -1)
        columns = _side(case, right, bool(attributes.integer("transB", 0)), -2)
        gone = [axis for axis, place in ((-2, left), (-1, right)) if case.rank(place) == 1]
        owners = joined(rows, columns)
        owners = owners if owners is None else np.squeeze(owners, tuple(gone))
        return _broadcast(case, owners, case.owner(added) if added >= 0 else None)

    return rule


def _side(case: RowCase, place: int, flipped: bool, summed: int) -> Owners | None:
    """The owners of one or several matrices after the summed axis is gone."""
    owners = case.owner(place)
    if owners is None:
        return None
    if owners.ndim == 1:
        return collapsed(owners, [0]).reshape(1, 1)
    if flipped:
        owners = np.swapaxes(owners, -1, -2)
    return collapsed(owners, [summed])


def _einsum(case: RowCase) -> OutputOwners:
    """Letters that the result lacks are summed over; ellipses, and letters twice in a term, are not followed."""
    inputs, arrow, result = case.attributes.text("equation").replace(" ", "").partition("->")
    terms = inputs.split(",")
    if "." in inputs or any(len(set(term)) < len(term) for term in terms):
        raise Mixed
    if not arrow:
        result = "".join(sorted(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1))
    return joined(*(_term(case.owner(place), term, result) for place, term in enumerate(terms)))


def _term(owners: Owners | None, term: str, result: str) -> Owners | None:
    if owners is None:
        return None
    left = collapsed(owners, [axis for axis, letter in enumerate(term) if letter not in result])
    kept = [term.index(letter) for letter in result if letter in term]
    gone = [axis for axis in range(owners.ndim) if axis not in kept]
    ordered = left.transpose(*kept, *gone).reshape([left.shape[axis] for axis in kept])
    return ordered[tuple(slice(None) if letter in term else np.newaxis for letter in result)]


def _convolution(case: RowCase) -> OutputOwners:
    """Positions and channels are summed over; groups keep samples apart that are beside each other as channels."""
    fused = case.node.op_type == "FusedConv"
    case.only([0, 3] if fused else [0])
    owners, groups = case.owner(0), case.attributes.integer("group", 1)
    output_shape = case.output_shapes[0]
    if owners is None or output_shape is None:
        raise Mixed
    owners = collapsed(owners, range(1 if case.attributes.integer("channels_last", 0) else 2, owners.ndim))
    if owners.shape[1] > 1:
        by_group = collapsed(owners.reshape(owners.shape[0], groups, -1), [2])[..., 0]
        owners = np.repeat(by_group, output_shape[1] // groups, axis=1).reshape(
            owners.shape[0], -1, *(1,) * (owners.ndim - 2)
        )
    return joined(owners, case.owner(3) if fused else None)


# Rows along one axis


def _rows(taken: Mapping[int, int] | None = None, output_axes: Sequence[int] = ()) -> Follow:
    """Rows along one axis of each input and output are kept apart; by default the first axis.

    taken: input -> axis; all other inputs must belong to no sample.
    """

    def rule(case: RowCase) -> OutputOwners:
        if taken is not None:
            case.only(taken)
        owners = joined(*(_in_a_row(case, place, taken) for place in range(len(case.owners))))
        if owners is None:
            raise Mixed
        return [
            _place_along(owners, shape, output_axes[index] if index < len(output_axes) else 0)
            for index, shape in enumerate(case.output_shapes)
        ]

    return rule


def _place_along(owners: Owners, shape: Shape | None, axis: int) -> Owners:
    if shape is None or len(owners) not in (1, *shape[axis : axis + 1]):
        raise Mixed
    return along(axis, len(shape), owners)


def _in_a_row(case: RowCase, place: int, axes: Mapping[int, int] | None) -> Owners | None:
    owners, axis = case.owner(place), 0 if axes is None else axes.get(place, 0)
    if owners is None:
        return None
    if owners.ndim <= axis:
        raise Mixed
    return collapsed(owners, [other for other in range(owners.ndim) if other != axis]).ravel()


def _recurrent(case: RowCase) -> OutputOwners:
    if case.attributes.integer("layout", 0):
        raise Mixed
    output_axes = [axis for axis, name in zip((2, 1, 1), case.node.output, strict=False) if name]
    return _rows({0: 1, 4: 0, 5: 1, 6: 1}, output_axes)(case)


def _attention(case: RowCase) -> OutputOwners:
    """The standard's mask may lack the axis of the samples."""
    mask = case.owner(3)
    if not case.node.domain and mask is not None and mask.ndim < 4:
        raise Mixed
    return _rows()(case)


def _tables(case: RowCase) -> OutputOwners:
    """Operators of classical learning take rows of features; a single row may lack its axis."""
    if case.rank() < 2:
        raise Mixed
    return _rows({0: 0})(case)


def _follow_reverse(case: RowCase) -> OutputOwners:
    if case.owner(1) is None:
        return _follow_moves(0)(case)
    case.only([0, 1])
    batch, time = case.attributes.integer("batch_axis", 1), case.attributes.integer("time_axis", 0)
    owners, lengths = case.owner(0), case.owner(1)
    assert lengths is not None
    return joined(None if owners is None else collapsed(owners, [time]), along(batch, case.rank(), lengths.ravel()))


def _constant(case: RowCase) -> OutputOwners:
    """The output depends on shapes only."""
    return None


def _refuse_mixing(case: RowCase) -> OutputOwners:
    raise Mixed("looks at all rows at once")


# The rules that entries name


def elementwise_of(*places: int) -> RowRule:
    """Element by element of these inputs; the others are parameters."""
    return RowRule(_of(*places))


def moved(*places: int, by: tuple[int, ...] = ()) -> RowRule:
    """Elements of these inputs (none named: of all) are moved, by the values of the inputs *by*."""
    return RowRule(_follow_moves(*places), by, bool(by))


def along_axis(default: int, *places: int) -> RowRule:
    """Elements along the attribute ``axis`` are combined."""
    return RowRule(_lines(_axis(default), *places))


def from_axis(first: int) -> RowRule:
    """Elements along all axes from *first* on are combined."""
    return RowRule(_lines(_from(first)))


def matrices(left: int = 0, right: int = 1, added: int = -1) -> RowRule:
    """A product of matrices; the arguments are the inputs that are multiplied and added."""
    return RowRule(_product(left, right, added))


def kept_apart(*places: int) -> RowRule:
    """Rows along the first axis of these inputs (none given: of all) and of all outputs are kept apart.

    Other inputs are parameters.
    """
    return RowRule(_rows(dict.fromkeys(places, 0) if places else None))


elementwise = RowRule(_elementwise)
batch_norm = RowRule(_batch_norm)
dropout = RowRule(_dropout, reads=(2,))
one_hot = RowRule(_one_hot)
reshaped = RowRule(_follow_reshape)
joined_quantised = RowRule(_follow_quantised_concat)
triangle = RowRule(_follow_moves(0), reads=(1,))
gathered = RowRule(_follow_gather, (1,), by_numbers=True)
gathered_elements = RowRule(_follow_gather_elements, (1,), by_numbers=True)
gathered_slices = RowRule(_follow_gather_nd, (1,), by_numbers=True)
scattered = RowRule(_follow_scatter, (1,), by_numbers=True)
reversed_sequence = RowRule(_follow_reverse, reads=(1,))
reduced = RowRule(_lines(_reduced_axes), reads=(1,))
cumulated = RowRule(_lines(_contracted_axes), reads=(1,))
softmax = RowRule(_lines(_softmax))
layer_norm = RowRule(_lines(_from_axis(-1)))
mean_variance = RowRule(_lines(_mean_variance))
last_two_axes = RowRule(_lines(_last_two))
fourier = RowRule(_lines(_transformed_axes), reads=(2,))
resized = RowRule(_lines(_resized_axes), (1, 2, 3), by_numbers=True)
upsampled = RowRule(_lines(_resized_axes), reads=(1,))
einsum = RowRule(_einsum)
convolution = RowRule(_convolution)
recurrent = RowRule(_recurrent)
attention = RowRule(_attention)
features = RowRule(_tables)
constant = RowRule(_constant)
whole = RowRule(_refuse_mixing)


def owners_after(rule: RowRule | None, case: RowCase) -> list[Owners | None]:
    """The owners of each output of a node; ``Mixed`` if an element has several, or there is no rule."""
    if rule is None:
        raise Mixed("is not known to keep rows apart")
    followed: Any = rule.follow(case)
    outputs = list(followed) if isinstance(followed, list) else [followed] * len(case.output_shapes)
    for owners, shape in zip(outputs, case.output_shapes, strict=True):
        if owners is not None and (shape is None or not _fits(owners.shape, shape)):
            raise Mixed("is not known to keep rows apart")
    return outputs


def _fits(owners: Shape, shape: Shape) -> bool:
    return len(owners) == len(shape) and all(size in (1, wanted) for size, wanted in zip(owners, shape, strict=True))
