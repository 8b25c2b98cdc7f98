"""Rules for output shapes: shared by many operators, and of single operators that move or select values.

A rule takes a node's inputs and attributes and returns a shape, or None if it does not know the shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest

from weft.models.element_types import ElementType
from weft.models.onnx_graph import Attributes
from weft.models.onnx_import.tensors import Tensor

Shape = tuple[int, ...]
Inputs = Sequence[Tensor | None]
Sizes = tuple[int | None, ...]
"""A shape in which None is an unknown size."""
ShapeRule = Callable[[Inputs, Attributes], Sizes | None]


def broadcast(first: Sequence[int], second: Sequence[int]) -> Shape:
    """The shape to which two shapes broadcast; where sizes contradict each other, the size of *first*."""
    pairs = list(zip_longest(reversed(first), reversed(second), fillvalue=1))
    return tuple(b if a == 1 else a for a, b in reversed(pairs))


def operand(shape: Shape, attributes: Attributes, side: str) -> Shape:
    """The shape of a factor after the transpositions of a product; *side*: "A" or "B".

    The attribute ``transA`` transposes it; ``transBatchA`` first moves its first axis to the last but one.
    """
    if attributes.integer(f"transBatch{side}", 0) and len(shape) > 2:
        shape = (*shape[1:-1], shape[0], shape[-1])
    transposed = attributes.integer(f"trans{side}", 0) and len(shape) > 1
    return (*shape[:-2], shape[-1], shape[-2]) if transposed else shape


def shape_of(inputs: Inputs, index: int) -> Shape | None:
    """The shape of the input with index *index*; None if it is left out."""
    tensor = inputs[index] if index < len(inputs) else None
    return None if tensor is None else tensor.shape


def values_of(inputs: Inputs, index: int) -> Shape | None:
    """The values of the input with index *index*, if they are known constants; otherwise None."""
    tensor = inputs[index] if index < len(inputs) else None
    return None if tensor is None or tensor.value is None else tuple(int(value) for value in tensor.value.reshape(-1))


def like(index: int) -> ShapeRule:
    """Rule: the shape of the input with index *index*."""
    return lambda inputs, attributes: shape_of(inputs, index)


def fixed(*shape: int) -> ShapeRule:
    return lambda inputs, attributes: shape


def common(*indices: int) -> ShapeRule:
    """Rule: the shape to which the inputs *indices* broadcast."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        result: Shape = ()
        for index in indices:
            result = broadcast(result, shape_of(inputs, index) or ())
        return result

    return rule


def product(index: int) -> ShapeRule:
    """Rule: the matrix product of the first input and the input *index*, with attributes that transpose them."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        left = operand(shape_of(inputs, 0) or (), attributes, "A")
        right = operand(shape_of(inputs, index) or (), attributes, "B")
        if not left or not right:
            return None
        rows = left[-2:-1] if len(left) > 1 else ()
        columns = right[-1:] if len(right) > 1 else ()
        return (*broadcast(left[:-2], right[:-2]), *rows, *columns)

    return rule


def columns(name: str) -> ShapeRule:
    """Rule: the first input, with the number of columns in the attribute *name*."""
    return lambda inputs, attributes: (*(shape_of(inputs, 0) or ())[:-1], attributes.integer(name, 1))


def columns_of(index: int, axis: int) -> ShapeRule:
    """Rule: the first input, with as many columns as the size of the input *index* along *axis*."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        left, other = shape_of(inputs, 0), shape_of(inputs, index)
        return (*left[:-1], other[axis]) if left and other else None

    return rule


def stated_columns(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of a product with a packed matrix whose sizes are the values of the third input."""
    left, sizes = shape_of(inputs, 0), values_of(inputs, 2)
    return (*left[:-1], sizes[-1]) if left and sizes else None


def ordered_product(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of QOrderedMatMul, whose right matrix may be stored transposed."""
    left, right = shape_of(inputs, 0), shape_of(inputs, 2)
    if not left or right is None or len(right) != 2:
        return None
    return (*left[:-1], right[1] if right[0] == left[-1] else right[0])


def looked_up(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the rows of the table in input 0 that the indices in input 1 select."""
    table, indices = shape_of(inputs, 0), shape_of(inputs, 1)
    return None if not table or indices is None else (*indices, *table[1:])


def gathered_blocks(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of a gather from a quantised table; in a table of bytes, each byte holds several values of few bits."""
    table, indices = inputs[0], shape_of(inputs, 1)
    if table is None or indices is None:
        return None
    sizes, axis = list(table.shape), attributes.integer("gather_axis", 0)
    if table.bits == 8 and table.dtype == ElementType.UINT8:
        sizes[-1] = sizes[-1] * 8 // max(1, attributes.integer("bits", 4))
    return (*sizes[:axis], *indices, *sizes[axis + 1 :])


def halved(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the first input with half of its columns."""
    shape = shape_of(inputs, 0)
    return (*shape[:-1], shape[-1] // 2) if shape else None


def reduced(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape after a reduction over the attribute ``axes``."""
    shape = shape_of(inputs, 0) or ()
    axes = {axis % max(1, len(shape)) for axis in attributes.integers("axes", range(len(shape)))}
    keep = attributes.integer("keepdims", 1)
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape) if keep or axis not in axes)


def compressed(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of a Compress: the elements whose condition (input 1) is true, along an axis or of the flat tensor."""
    sizes, conditions = list(shape_of(inputs, 0) or ()), values_of(inputs, 1)
    if conditions is None or not attributes.has("axis"):
        return None if conditions is None else (sum(map(bool, conditions)),)
    sizes[attributes.integer("axis", 0)] = sum(map(bool, conditions))
    return tuple(sizes)


def nonzero_places(inputs: Inputs, attributes: Attributes) -> Sizes | None:
    """Shape of NonZero: the number of axes, and an unknown number of values (0 for an empty tensor)."""
    shape = shape_of(inputs, 0) or ()
    return (max(1, len(shape)), None if math.prod(shape) else 0)


def reshaped(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of the oldest Reshape, whose target is the attribute ``shape``; 0 keeps a size, -1 takes the rest."""
    source, target = shape_of(inputs, 0) or (), attributes.integers("shape", ())
    sizes = [source[axis] if size == 0 and axis < len(source) else size for axis, size in enumerate(target)]
    known = math.prod(size for size in sizes if size > 0)
    rest = math.prod(source) // max(1, known)
    return tuple(rest if size < 0 else size for size in sizes) if target else None


def joined(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of QLinearConcat; from input 2 on, its inputs are triples of tensor, scale and zero point."""
    shapes = [tensor.shape for tensor in inputs[2::3] if tensor is not None]
    axis = attributes.integer("axis", 0)
    if not shapes or not -len(shapes[0]) <= axis < len(shapes[0]):
        return None
    sizes = list(shapes[0])
    sizes[axis] = sum(shape[axis] for shape in shapes)
    return tuple(sizes)


def unfolded(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of UnfoldTensor: windows of ``size`` elements along the attribute ``dim``, which become a last axis."""
    sizes, axis = list(shape_of(inputs, 0) or ()), attributes.integer("dim", -1)
    size, step = attributes.integer("size", 1), attributes.integer("step", 1)
    if not -len(sizes) <= axis < len(sizes) or step < 1:
        return None
    sizes[axis] = (sizes[axis] - size) // step + 1
    return (*sizes, size)


def expanded(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of ExpandDims: an axis of size 1 is inserted at the index in input 1."""
    shape, axis = list(shape_of(inputs, 0) or ()), values_of(inputs, 1)
    if not axis:
        return None
    index = axis[0] if axis[0] >= 0 else len(shape) + 1 + axis[0]
    return (*shape[:index], 1, *shape[index:])


def cropped(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of CropAndResize: regions, channels, and the size in input 3."""
    data, regions, size = shape_of(inputs, 0), shape_of(inputs, 1), values_of(inputs, 3)
    return (regions[0], data[1], *size) if data and regions and size and len(data) > 1 else None


def pairs(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of a value for each pair of rows of the two inputs."""
    left, right = shape_of(inputs, 0), shape_of(inputs, 1)
    return (left[0], right[0]) if left and right else None


def spectrum(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of Rfft: the one-sided spectrum, with real and imaginary part on a last axis."""
    shape = shape_of(inputs, 0)
    if not shape or attributes.integer("signal_ndim", 1) != 1 or not attributes.integer("onesided", 1):
        return None
    return (*shape[:-1], shape[-1] // 2 + 1, 2)


def signal(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of Irfft, the inverse of ``spectrum``."""
    shape = shape_of(inputs, 0)
    if not shape or len(shape) < 2 or attributes.integer("signal_ndim", 1) != 1:
        return None
    return (*shape[:-2], 2 * (shape[-2] - 1)) if attributes.integer("onesided", 1) else shape[:-1]


def word_convolution(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of WordConvEmbedding: a row per word, a column per filter."""
    data, weight = shape_of(inputs, 0), shape_of(inputs, 1)
    return (*data[:-1], weight[0]) if data and weight else None


# Sliding windows, and images with channels in blocks


def windowed(weight: int | None, last: bool | None = None) -> ShapeRule:
    """Rule of a convolution or pool; *weight*: index of the weight's input, None for a pool.

    last: whether channels are the last axis; None: the attribute ``channels_last`` decides.
    """

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        shape, kernel = shape_of(inputs, 0) or (), shape_of(inputs, weight) if weight is not None else None
        channels_last = attributes.integer("channels_last", 0) if last is None else last
        window = attributes.integers("kernel_shape", kernel[2:] if kernel else ())
        spatial = shape[1:-1] if channels_last else shape[2:]
        if len(shape) < 3 or len(window) != len(spatial):
            return None
        sizes = tuple(_count_windows(attributes, axis, spatial, window) for axis in range(len(window)))
        channels = kernel[0] if kernel else shape[-1 if channels_last else 1]
        return (shape[0], *sizes, channels) if channels_last else (shape[0], channels, *sizes)

    return rule


def _count_windows(attributes: Attributes, axis: int, spatial: Shape, window: Shape) -> int:
    """Number of positions of a window along the spatial axis *axis*."""
    stride = max(1, attributes.integers("strides", (1,) * len(window))[axis])
    mode = attributes.text("auto_pad")
    if mode.startswith("SAME"):
        return -(-spatial[axis] // stride)
    pads = attributes.integers("pads", (0,) * 2 * len(window)) if mode != "VALID" else (0,) * 2 * len(window)
    # elements from the first to the last of a window; and those by which it can move
    reach = attributes.integers("dilations", (1,) * len(window))[axis] * (window[axis] - 1) + 1
    room = spatial[axis] + pads[axis] + pads[axis + len(window)] - reach
    return max(0, (-(-room // stride) if attributes.integer("ceil_mode", 0) else room // stride) + 1)


def blocked(inputs: Inputs, attributes: Attributes) -> Sizes | None:
    """Shape of an image with its channels padded to blocks of 8 or 16, depending on the processor that saved the file.

    The number of channels is unknown unless 16 divides it.
    """
    shape = shape_of(inputs, 0) or ()
    if len(shape) < 3:
        return None
    count, *others, channels = shape if attributes.integer("channels_last", 0) else (shape[0], *shape[2:], shape[1])
    return (count, None if channels % 16 else channels, *others)


def unblocked(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of an image whose blocked channels become the number in the attribute ``channels``."""
    shape, channels = shape_of(inputs, 0) or (), attributes.integer("channels", 0)
    if len(shape) < 3 or channels < 1:
        return None
    last = attributes.integer("channels_last", 0)
    return (shape[0], *shape[2:], channels) if last else (shape[0], channels, *shape[2:])


def transposed_convolution(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of ConvTransposeWithDynamicPads, a transposed convolution whose padding is input 2."""
    shape, kernel = shape_of(inputs, 0) or (), shape_of(inputs, 1) or ()
    rank = len(shape) - 2
    # no padding if the input is left out; an unknown shape if its values are unknown
    pads = values_of(inputs, 2) or ((0,) * 2 * rank if shape_of(inputs, 2) is None else None)
    if rank < 1 or len(kernel) != len(shape) or pads is None:
        return None
    ones = (1,) * rank
    strides, dilations = attributes.integers("strides", ones), attributes.integers("dilations", ones)
    extra = attributes.integers("output_padding", (0,) * rank)
    sizes = (
        strides[axis] * (shape[2 + axis] - 1)
        + extra[axis]
        + dilations[axis] * (kernel[2 + axis] - 1)
        + 1
        - pads[axis]
        - pads[axis + rank]
        for axis in range(rank)
    )
    return (shape[0], kernel[1] * attributes.integer("group", 1), *sizes)


def pooled_away(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Shape of a global pool: size 1 on all spatial axes."""
    shape = shape_of(inputs, 0) or ()
    ones = (1,) * (len(shape) - 2)
    return (shape[0], *ones, shape[-1]) if attributes.integer("channels_last", 0) else (*shape[:2], *ones)
