"""Row rules: the rows of a batch on which a node's outputs depend, given the rows on which its inputs depend.

Rows are followed as *owners* (``Owners``): for each element of a tensor the sample on which it depends. A rule maps the
owners of a node's inputs to the owners of its outputs and raises ``Mixed`` if an element would depend on two
samples. There are six kinds of rules: element by element; elements moved by indices that depend on no sample (the
operator itself is run on the owners); all elements along certain axes combined; products and convolutions, which sum
over one axis of each factor; rows kept apart along one axis; and values selected by indices that depend on samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.models.onnx_graph import Array, Attributes, OnnxNode, copied, make_node

Owners = npt.NDArray[np.int32]
"""The sample on which each element of a tensor depends: integers in an array of the tensor's rank, of size 1 along axes
on which they do not change. 0 means no sample, samples count from 1. None instead of an array: the whole tensor depends
on no sample, as constants do."""
Shape = tuple[int, ...]


class Mixed(Exception):
    """An element would depend on several samples; the message may say why."""


def joined(*operands: Owners | None) -> Owners | None:
    """Owners of elements that are computed from one element of each operand, with broadcasting.

    Raises ``Mixed`` if the owners differ.
    """
    owners: Owners | None = None
    for operand in operands:
        if owners is not None and operand is not None:
            try:
                clash = (owners != operand) & (owners != 0) & (operand != 0)
            except ValueError as error:  # they do not broadcast
                raise Mixed from error
            if np.any(clash):
                raise Mixed
            owners = np.maximum(owners, operand)
        elif operand is not None:
            owners = operand
    return owners


def collapsed(owners: Owners, axes: Iterable[int]) -> Owners:
    """Owners of elements that are computed from all elements along *axes*; these axes get size 1.

    Raises ``Mixed`` if the elements have different owners.
    """
    axes = tuple(axes)
    if any(not -owners.ndim <= axis < owners.ndim for axis in axes):
        raise Mixed
    axes = tuple({axis % owners.ndim for axis in axes})
    largest: Any = owners.max(axis=axes, keepdims=True, initial=0)
    if np.any((owners != 0) & (owners != largest)):
        raise Mixed
    return np.asarray(largest, np.int32)


def shrunk(owners: Owners) -> Owners | None:
    """The same owners with size 1 along axes on which they do not change; None if no element depends on a sample."""
    if not owners.any():
        return None
    for axis in range(owners.ndim):
        first = owners.take([0], axis)
        if np.array_equal(np.broadcast_to(first, owners.shape), owners):
            owners = first
    return owners


def along(axis: int, rank: int, owners: Owners) -> Owners:
    """Reshape a vector of *owners* to lie along one axis of a tensor of this rank."""
    return owners.reshape([-1 if other == axis % rank else 1 for other in range(rank)])


def numbered(first: int, rows: int, rank: int) -> Owners:
    """Owners of a tensor with one sample per row along the first axis: *rows* samples, numbered from *first*."""
    return along(0, rank, np.arange(first, first + rows, dtype=np.int32))


@dataclass(frozen=True, slots=True)
class RowCase:
    """The input of a row rule: a node, the owners and shapes of its inputs, and the shapes of its outputs."""

    node: OnnxNode
    version: int
    """The imported opset of the standard's operators."""
    owners: Sequence[Owners | None]
    shapes: Sequence[Shape | None]
    output_shapes: Sequence[Shape | None]
    value: Callable[[int], Array]
    """Returns the values of the input with the given index, which must depend on no sample."""
    compute: Callable[[OnnxNode, Mapping[int, Array]], Sequence[Array]]
    """Runs a node on inputs by index, and returns its outputs."""

    @property
    def attributes(self) -> Attributes:
        return Attributes(self.node)

    def given(self, index: int) -> bool:
        """Whether the node has the input with index *index*."""
        return index < len(self.node.input) and bool(self.node.input[index])

    def owner(self, index: int) -> Owners | None:
        """The owners of the input with index *index*."""
        return self.owners[index] if index < len(self.owners) else None

    def shape(self, index: int) -> Shape:
        """The shape of the input with index *index*; raises ``Mixed`` if it is unknown."""
        shape = self.shapes[index] if index < len(self.shapes) else None
        if shape is None:
            raise Mixed
        return shape

    def rank(self, index: int = 0) -> int:
        return len(self.shape(index))

    def numbers(self, index: int) -> tuple[int, ...] | None:
        """The integers in the input with index *index*; None if the node does not have it."""
        return tuple(map(int, np.ravel(self.value(index)).tolist())) if self.given(index) else None

    def require_rows_only_in(self, inputs: Iterable[int]) -> None:
        """Raise ``Mixed`` if any input other than those with the indices *inputs* depends on samples."""
        if any(owners is not None and number not in inputs for number, owners in enumerate(self.owners)):
            raise Mixed


OutputOwners = Owners | None | Sequence[Owners | None]
"""The owners of each output in a list, or owners that hold for all outputs."""
Follow = Callable[[RowCase], OutputOwners]
"""Computes the owners of a node's outputs, or raises ``Mixed``."""


class RowRule(NamedTuple):
    """A row rule: the function *follow* computes the owners of outputs from the owners of inputs."""

    follow: Follow
    reads: tuple[int, ...] = ()
    """Indices of the inputs whose values *follow* reads."""
    by_numbers: bool = False
    """Whether the values in *reads* decide where elements move; the result may then hold for some batch sizes only."""


# Element by element


def _broadcast(case: RowCase, *operands: Owners | None) -> OutputOwners:
    """Owners of an output that is computed element by element from *operands*, with the rank of the first output."""
    owners, shape = joined(*operands), case.output_shapes[0]
    if owners is None or shape is None or len(shape) < owners.ndim:
        return owners
    return owners.reshape((1,) * (len(shape) - owners.ndim) + owners.shape)


def _elementwise(case: RowCase) -> OutputOwners:
    return _broadcast(case, *case.owners)


def _elementwise_of(*inputs: int) -> Follow:
    """The rule of an output that is computed element by element from these inputs; the others are parameters."""

    def rule(case: RowCase) -> OutputOwners:
        case.require_rows_only_in(inputs)
        return _broadcast(case, *(case.owner(number) for number in inputs))

    return rule


def _batch_norm(case: RowCase) -> OutputOwners:
    """Element by element of input 0; the training mode is refused, since the mean of a batch mixes its samples."""
    if case.attributes.integer("training_mode", 0) or len([*filter(None, case.node.output)]) > 1:
        raise Mixed
    return _elementwise_of(0)(case)


def _dropout(case: RowCase) -> OutputOwners:
    """The owners of input 0; the training mode (input 2) is refused, since its random mask depends on the batch."""
    case.require_rows_only_in([0])
    if case.given(2) and np.any(case.value(2)):
        raise Mixed
    return case.owner(0)


def _one_hot(case: RowCase) -> OutputOwners:
    """The owners of the indices, with the additional axis of the categories."""
    case.require_rows_only_in([0])
    owners, axis = case.owner(0), case.attributes.integer("axis", -1)
    return None if owners is None else np.expand_dims(owners, axis)


# Moving elements


def _follow_moves(*inputs: int) -> Follow:
    """The rule of an operator that moves elements of the inputs with these indices (none given: all inputs).

    The rule runs the operator on the owners instead of the values: every owner moves as its element does.
    """

    def rule(case: RowCase) -> OutputOwners:
        moved_inputs = inputs or range(len(case.owners))
        case.require_rows_only_in(moved_inputs)
        feed = {index: _broadcast_owners(case, index) for index in moved_inputs if case.given(index)}
        outputs = case.compute(_without_fill(case.node), feed)
        return [shrunk(np.asarray(output).astype(np.int32)) for output in outputs]

    return rule


def _broadcast_owners(case: RowCase, index: int) -> Array:
    """The owners of an input in its full shape, as floats, which every operator that moves elements accepts."""
    owners = case.owner(index)
    return np.broadcast_to(np.int32(0) if owners is None else owners, case.shape(index)).astype(np.float32)


def _without_fill(node: OnnxNode) -> OnnxNode:
    """The node without the fill value of a Pad, so that padding, which depends on no sample, gets the owner 0."""
    plain = copied(node)
    if node.op_type == "Pad":
        other_attributes = [attribute for attribute in node.attribute if attribute.name != "value"]
        del plain.attribute[:]
        plain.attribute.extend(other_attributes)
        if len(plain.input) > 2:
            plain.input[2] = ""
    return plain


def _follow_reshape(case: RowCase) -> OutputOwners:
    """Elements keep their order and get another shape."""
    owners, output_shape = case.owner(0), case.output_shapes[0]
    case.require_rows_only_in([0])
    if owners is None or output_shape is None:
        raise Mixed
    return shrunk(np.broadcast_to(owners, case.shape(0)).reshape(output_shape))


def _follow_gather(case: RowCase) -> OutputOwners:
    """Values are selected along an axis, by constant indices, or by a sample's indices from values of this sample."""
    if case.owner(1) is None:
        return _follow_moves(0)(case)
    # The output's axes are those of the data before *axis*, then those of the indices, then those of the data after it.
    axis = case.attributes.integer("axis", 0) % max(1, case.rank())
    index_rank, axes_after = case.rank(1), case.rank() - axis - 1
    data, indices = case.owner(0), case.owner(1)
    indices = None if indices is None else indices.reshape(*indices.shape, *(1,) * axes_after)
    if data is not None:
        data = collapsed(data, [axis])
        data = data.reshape(*data.shape[:axis], *(1,) * index_rank, *data.shape[axis + 1 :])
    return _broadcast(case, data, indices)


def _follow_gather_elements(case: RowCase) -> OutputOwners:
    """As ``_follow_gather``; index and data must have equal sizes on all other axes."""
    if case.owner(1) is None:
        return _follow_moves(0)(case)
    data, axis = case.owner(0), case.attributes.integer("axis", 0)
    data_sizes, index_sizes = (np.delete(case.shape(index), axis).tolist() for index in (0, 1))
    if data is not None and data_sizes != index_sizes:
        raise Mixed
    return joined(None if data is None else collapsed(data, [axis]), case.owner(1))


def _follow_gather_nd(case: RowCase) -> OutputOwners:
    """Slices are selected by constant coordinates, or by a sample's coordinates from a constant table."""
    coordinates = case.owner(1)
    if coordinates is None:
        return _follow_moves(0)(case)
    case.require_rows_only_in([1])
    output_shape = case.output_shapes[0]
    if output_shape is None:
        raise Mixed
    owners = collapsed(coordinates, [-1])[..., 0]
    return owners.reshape(*owners.shape, *(1,) * (len(output_shape) - owners.ndim))


def _follow_scatter(case: RowCase) -> OutputOwners:
    """Values are written to constant positions; a reduction, which would combine values, is refused."""
    if case.attributes.text("reduction") not in ("", "none"):
        raise Mixed
    return _follow_moves(0, 2)(case)


def _follow_quantised_concat(case: RowCase) -> OutputOwners:
    """QLinearConcat: inputs from index 2 are triples of tensor, scale and zero point; only the tensors are moved."""
    tensors = range(2, len(case.owners), 3)
    case.require_rows_only_in(tensors)
    names = [case.node.input[number] for number in tensors]
    node = make_node("Concat", names, case.node.output, axis=case.attributes.integer("axis", 0))
    outputs = case.compute(node, {index: _broadcast_owners(case, number) for index, number in enumerate(tensors)})
    return [shrunk(np.asarray(output).astype(np.int32)) for output in outputs]


# All along axes


def _reduction_rule(axes: Callable[[RowCase], Iterable[int]], *inputs: int) -> Follow:
    """Make the row rule of an operator that combines all elements along some axes, as a sum or a softmax does.

    A row rule maps the owners of the inputs' elements to the owners of the outputs' elements. Combined elements
    must depend on the same sample. *axes*: returns the axes for a node. *inputs*: the indices of the inputs that are
    combined (default: the first); no other input may depend on samples.
    """

    def rule(case: RowCase) -> OutputOwners:
        combined_inputs = inputs or (0,)
        case.require_rows_only_in(combined_inputs)
        owners = joined(*(case.owner(number) for number in combined_inputs))
        if owners is None:
            return None
        combined_axes = [axis % owners.ndim for axis in axes(case)] if owners.ndim else []
        output_owners = collapsed(owners, combined_axes)
        return [_squeeze_to(output_owners, combined_axes, shape) for shape in case.output_shapes]

    return rule


def _squeeze_to(owners: Owners, axes: Sequence[int], shape: Shape | None) -> Owners:
    """Remove the combined *axes* if an output of this shape does not have them (``keepdims`` is 0)."""
    if shape is None or len(shape) == owners.ndim:
        return owners
    return np.squeeze(owners, tuple(axes))


def _reduced_axes(case: RowCase) -> Iterable[int]:
    """The axes of a reduction: an attribute or input 1; by default all, or none with ``noop_with_empty_axes``."""
    axes = case.attributes.integers("axes", ()) or case.numbers(1)
    if axes:
        return axes
    return () if case.attributes.integer("noop_with_empty_axes", 0) else range(case.rank())


def _axis(default: int) -> Callable[[RowCase], Iterable[int]]:
    """The axis in the attribute ``axis``."""
    return lambda case: [case.attributes.integer("axis", default)]


def _from_axis(default: int) -> Callable[[RowCase], Iterable[int]]:
    """All axes from the attribute ``axis`` to the last."""
    return lambda case: range(case.attributes.integer("axis", default) % max(1, case.rank()), case.rank())


def _axes_from(first: int) -> Callable[[RowCase], Iterable[int]]:
    return lambda case: range(first, case.rank())


def _softmax_axes(case: RowCase) -> Iterable[int]:
    """The axes of a softmax: before opset 13 all from ``axis`` on, then only ``axis``."""
    version = case.attributes.integer("opset", case.version)
    return (_from_axis(1) if version < 13 else _axis(-1))(case)


def _cumulated_axes(case: RowCase) -> Iterable[int]:
    """The axis of a CumSum, which is input 1."""
    return case.numbers(1) or ()


def _mean_variance_axes(case: RowCase) -> Iterable[int]:
    return case.attributes.integers("axes", (0, 2, 3))


def _last_two(case: RowCase) -> Iterable[int]:
    return (-2, -1)


def _transformed_axes(case: RowCase) -> Iterable[int]:
    """The axis of a Fourier transform, and the last axis with the two parts of complex numbers."""
    axis_input = case.numbers(2) if case.version >= 20 else None
    return (*(axis_input or (case.attributes.integer("axis", 1 if case.version < 20 else -2),)), -1)


def _resized_axes(case: RowCase) -> Iterable[int]:
    """The axes of a Resize or Upsample along which the size changes or the scale is not 1."""
    text, axes = case.attributes.text, case.attributes.integers("axes", range(case.rank()))
    if text("coordinate_transformation_mode") == "tf_crop_and_resize" or case.output_shapes[0] is None:
        return range(case.rank())
    if text("keep_aspect_ratio_policy") not in ("", "stretch"):
        return axes
    # scales are an input whose index depends on the opset, or in the oldest opsets an attribute
    scales_input = 1 if case.node.op_type == "Upsample" or case.version < 11 else 2
    attributes = [attribute.floats for attribute in case.node.attribute if attribute.name == "scales"] or [[]]
    scales = np.ravel(case.value(scales_input)).tolist() if case.given(scales_input) else attributes[0]
    scaled = [axis for axis, scale in zip(axes, scales, strict=False) if scale != 1]
    return {*scaled, *(axis for axis, size in enumerate(case.shape(0)) if size != case.output_shapes[0][axis])}


# Products and convolutions


def _product(left: int = 0, right: int = 1, added: int = -1) -> Follow:
    """The rule of a matrix product of the inputs *left* and *right*, with the input *added* unless it is -1.

    All elements along the summed axis of a factor must have the same owner.
    """

    def rule(case: RowCase) -> OutputOwners:
        case.require_rows_only_in([left, right, added])
        attributes = case.attributes
        if attributes.integer("transBatchA", 0) or attributes.integer("transBatchB", 0):
            raise Mixed
        rows = _sum_out(case, left, bool(attributes.integer("transA", 0)), -1)
        columns = _sum_out(case, right, bool(attributes.integer("transB", 0)), -2)
        # a factor that is a vector has no rows (axis -2) or no columns (axis -1) in the result
        vector_axes = [axis for axis, index in ((-2, left), (-1, right)) if case.rank(index) == 1]
        owners = joined(rows, columns)
        owners = owners if owners is None else np.squeeze(owners, tuple(vector_axes))
        return _broadcast(case, owners, case.owner(added) if added >= 0 else None)

    return rule


def _sum_out(case: RowCase, index: int, flipped: bool, summed: int) -> Owners | None:
    """The owners of the matrix in input *index*, with size 1 along the axis *summed* over which the product sums.

    flipped: whether the product transposes the matrix first. A vector gets the shape (1, 1).
    """
    owners = case.owner(index)
    if owners is None:
        return None
    if owners.ndim == 1:
        return collapsed(owners, [0]).reshape(1, 1)
    if flipped:
        owners = np.swapaxes(owners, -1, -2)
    return collapsed(owners, [summed])


def _einsum(case: RowCase) -> OutputOwners:
    """Einsum combines elements along the letters that the result lacks; ellipses and repeated letters are refused."""
    inputs, arrow, result = case.attributes.text("equation").replace(" ", "").partition("->")
    terms = inputs.split(",")
    if "." in inputs or any(len(set(term)) < len(term) for term in terms):
        raise Mixed
    if not arrow:
        result = "".join(sorted(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1))
    return joined(*(_arrange_term(case.owner(index), term, result) for index, term in enumerate(terms)))


def _arrange_term(owners: Owners | None, term: str, result: str) -> Owners | None:
    """The owners of an operand of an einsum, with its axes in the order of *result* and its other axes summed over."""
    if owners is None:
        return None
    summed = collapsed(owners, [axis for axis, letter in enumerate(term) if letter not in result])
    result_axes = [term.index(letter) for letter in result if letter in term]
    summed_axes = [axis for axis in range(owners.ndim) if axis not in result_axes]
    ordered = summed.transpose(*result_axes, *summed_axes).reshape([summed.shape[axis] for axis in result_axes])
    return ordered[tuple(slice(None) if letter in term else np.newaxis for letter in result)]


def _convolution(case: RowCase) -> OutputOwners:
    """A convolution combines all positions and the channels of each group; groups are kept apart.

    So samples may also lie side by side as groups of channels (axis 1 of a standard convolution).
    """
    fused = case.node.op_type == "FusedConv"  # its input 3 is added to the result
    case.require_rows_only_in([0, 3] if fused else [0])
    owners, groups = case.owner(0), case.attributes.integer("group", 1)
    output_shape = case.output_shapes[0]
    if owners is None or output_shape is None:
        raise Mixed
    owners = collapsed(owners, range(1 if case.attributes.integer("channels_last", 0) else 2, owners.ndim))
    if owners.shape[1] > 1:  # samples side by side
        by_group = collapsed(owners.reshape(owners.shape[0], groups, -1), [2])[..., 0]
        owners = np.repeat(by_group, output_shape[1] // groups, axis=1).reshape(
            owners.shape[0], -1, *(1,) * (owners.ndim - 2)
        )
    return joined(owners, case.owner(3) if fused else None)


# Rows along one axis


def _keep_rows_apart(input_axes: Mapping[int, int] | None = None, output_axes: Sequence[int] = ()) -> Follow:
    """The rule of an operator that keeps rows apart along one axis of each input and output.

    input_axes: input -> axis, while all other inputs depend on no sample; None: the first axis of every input.
    output_axes: the axis of each output, by default the first.
    """

    def rule(case: RowCase) -> OutputOwners:
        if input_axes is not None:
            case.require_rows_only_in(input_axes)
        owners = joined(*(_row_owners(case, index, input_axes) for index in range(len(case.owners))))
        if owners is None:
            raise Mixed
        return [
            _place_along(owners, shape, output_axes[index] if index < len(output_axes) else 0)
            for index, shape in enumerate(case.output_shapes)
        ]

    return rule


def _place_along(owners: Owners, shape: Shape | None, axis: int) -> Owners:
    """Reshape a vector with an owner per row for an output of this shape with rows along *axis*.

    Raises ``Mixed`` if the number of rows differs.
    """
    if shape is None or len(owners) not in (1, *shape[axis : axis + 1]):
        raise Mixed
    return along(axis, len(shape), owners)


def _row_owners(case: RowCase, index: int, axes: Mapping[int, int] | None) -> Owners | None:
    """The owner of each row of an input along its axis in *axes*; raises ``Mixed`` if a row has several owners."""
    owners, axis = case.owner(index), 0 if axes is None else axes.get(index, 0)
    if owners is None:
        return None
    if owners.ndim <= axis:
        raise Mixed
    return collapsed(owners, [other for other in range(owners.ndim) if other != axis]).ravel()


def _recurrent(case: RowCase) -> OutputOwners:
    """Recurrent layers keep samples apart along the batch axis; the layout with the batch first is refused."""
    if case.attributes.integer("layout", 0):
        raise Mixed
    # Batch axes: of the outputs Y, Y_h, Y_c; of the inputs X, sequence_lens, initial_h, initial_c.
    output_axes = [axis for axis, name in zip((2, 1, 1), case.node.output, strict=False) if name]
    return _keep_rows_apart({0: 1, 4: 0, 5: 1, 6: 1}, output_axes)(case)


def _attention(case: RowCase) -> OutputOwners:
    """Attention keeps samples apart; a mask of the standard's operator may lack the batch axis, and is refused then."""
    mask = case.owner(3)
    if not case.node.domain and mask is not None and mask.ndim < 4:
        raise Mixed
    return _keep_rows_apart()(case)


def _feature_rows(case: RowCase) -> OutputOwners:
    """Operators on a matrix (rows, features), as in ai.onnx.ml, keep rows apart; a vector (a single row) is refused."""
    if case.rank() < 2:
        raise Mixed
    return _keep_rows_apart({0: 0})(case)


def _follow_reverse(case: RowCase) -> OutputOwners:
    """ReverseSequence reverses each sequence up to its length; lengths are constant or depend on the samples."""
    if case.owner(1) is None:
        return _follow_moves(0)(case)
    case.require_rows_only_in([0, 1])
    batch, time = case.attributes.integer("batch_axis", 1), case.attributes.integer("time_axis", 0)
    owners, lengths = case.owner(0), case.owner(1)
    assert lengths is not None
    return joined(None if owners is None else collapsed(owners, [time]), along(batch, case.rank(), lengths.ravel()))


def _constant(case: RowCase) -> OutputOwners:
    """The output depends on shapes only."""
    return None


def _refuse_mixing(case: RowCase) -> OutputOwners:
    """The rule of an operator that combines all rows."""
    raise Mixed("looks at all rows at once")


# The rules that entries name


def elementwise_of(*inputs: int) -> RowRule:
    """Rule: outputs are computed element by element from these inputs; the other inputs are parameters."""
    return RowRule(_elementwise_of(*inputs))


def moved(*inputs: int, positions_in: tuple[int, ...] = ()) -> RowRule:
    """Rule: elements of these inputs (none given: all) are moved; *positions_in*: inputs whose values say where to."""
    return RowRule(_follow_moves(*inputs), positions_in, bool(positions_in))


def along_axis(default: int, *inputs: int) -> RowRule:
    """Rule: elements along the attribute ``axis`` are combined; *inputs*: their indices (default: the first)."""
    return RowRule(_reduction_rule(_axis(default), *inputs))


def from_axis(first: int) -> RowRule:
    """Rule: elements along all axes from *first* on are combined."""
    return RowRule(_reduction_rule(_axes_from(first)))


def matrices(left: int = 0, right: int = 1, added: int = -1) -> RowRule:
    """Rule of a matrix product; the arguments are the indices of the inputs that are multiplied and added."""
    return RowRule(_product(left, right, added))


def kept_apart(*inputs: int) -> RowRule:
    """Rule: rows along the first axis of these inputs (none given: all inputs) and of all outputs are kept apart.

    The other inputs are parameters.
    """
    return RowRule(_keep_rows_apart(dict.fromkeys(inputs, 0) if inputs else None))


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
reduced = RowRule(_reduction_rule(_reduced_axes), reads=(1,))
cumulated = RowRule(_reduction_rule(_cumulated_axes), reads=(1,))
softmax = RowRule(_reduction_rule(_softmax_axes))
layer_norm = RowRule(_reduction_rule(_from_axis(-1)))
mean_variance = RowRule(_reduction_rule(_mean_variance_axes))
last_two_axes = RowRule(_reduction_rule(_last_two))
fourier = RowRule(_reduction_rule(_transformed_axes), reads=(2,))
resized = RowRule(_reduction_rule(_resized_axes), (1, 2, 3), by_numbers=True)
upsampled = RowRule(_reduction_rule(_resized_axes), reads=(1,))
einsum = RowRule(_einsum)
convolution = RowRule(_convolution)
recurrent = RowRule(_recurrent)
attention = RowRule(_attention)
features = RowRule(_feature_rows)
constant = RowRule(_constant)
mixes_rows = RowRule(_refuse_mixing)


def owners_after(rule: RowRule | None, case: RowCase) -> list[Owners | None]:
    """The owners of each output of a node; raises ``Mixed`` if an element has several owners or there is no rule."""
    if rule is None:
        raise Mixed("is not known to keep rows apart")
    result: Any = rule.follow(case)
    outputs = list(result) if isinstance(result, list) else [result] * len(case.output_shapes)
    for owners, shape in zip(outputs, case.output_shapes, strict=True):
        if owners is not None and (shape is None or not _fits(owners.shape, shape)):
            raise Mixed("is not known to keep rows apart")
    return outputs


def _fits(owners: Shape, shape: Shape) -> bool:
    """Whether an array of owners of one shape broadcasts to a tensor of the other shape, without a change of rank."""
    return len(owners) == len(shape) and all(
        owners_size in (1, size) for owners_size, size in zip(owners, shape, strict=True)
    )
