"""Rules for output shapes that many operators share, and of single ones that move or select values."""

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
"""A shape with open sizes."""
ShapeRule = Callable[[Inputs, Attributes], Sizes | None]


def broadcast(first: Sequence[int], second: Sequence[int]) -> Shape:
    """The common shape of two batches, aligned at the right; a size that disagrees is the first's."""
    pairs = list(zip_longest(reversed(first), reversed(second), fillvalue=1))
    return tuple(b if a == 1 else a for a, b in reversed(pairs))


def operand(shape: Shape, attributes: Attributes, side: str) -> Shape:
    """The shape of a factor in its product: transposed by ``transA``, its first axis moved in by ``transBatchA``."""
    if attributes.integer(f"transBatch{side}", 0) and len(shape) > 2:
        shape = (*shape[1:-1], shape[0], shape[-1])
    turned = attributes.integer(f"trans{side}", 0) and len(shape) > 1
    return (*shape[:-2], shape[-1], shape[-2]) if turned else shape


def shape_of(inputs: Inputs, place: int) -> Shape | None:
    tensor = inputs[place] if place < len(inputs) else None
    return None if tensor is None else tensor.shape


def values_of(inputs: Inputs, place: int) -> Shape | None:
    """The values of a small input."""
    tensor = inputs[place] if place < len(inputs) else None
    return None if tensor is None or tensor.value is None else tuple(int(value) for value in tensor.value.reshape(-1))


def like(place: int) -> ShapeRule:
    return lambda inputs, attributes: shape_of(inputs, place)


def fixed(*shape: int) -> ShapeRule:
    return lambda inputs, attributes: shape


def common(*places: int) -> ShapeRule:
    """The shape that several inputs broadcast to."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        result: Shape = ()
        for place in places:
            result = broadcast(result, shape_of(inputs, place) or ())
        return result

    return rule


def product(place: int) -> ShapeRule:
    """The product of the first input and another, either transposed where an attribute says so."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        left, right = (operand(shape_of(inputs, at) or (), attributes, side) for at, side in ((0, "A"), (place, "B")))
        if not left or not right:
            return None
        rows = left[-2:-1] if len(left) > 1 else ()
        columns = right[-1:] if len(right) > 1 else ()
        return (*broadcast(left[:-2], right[:-2]), *rows, *columns)

    return rule


def columns(name: str) -> ShapeRule:
    """The first input with as many columns as an attribute says."""
    return lambda inputs, attributes: (*(shape_of(inputs, 0) or ())[:-1], attributes.integer(name, 1))


def columns_of(place: int, axis: int) -> ShapeRule:
    """The first input with as many columns as another input is long along *axis*."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        left, other = shape_of(inputs, 0), shape_of(inputs, place)
        return (*left[:-1], other[axis]) if left and other else None

    return rule


def stated_columns(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """A product with a packed matrix whose shape is the third input."""
    left, sizes = shape_of(inputs, 0), values_of(inputs, 2)
    return (*left[:-1], sizes[-1]) if left and sizes else None


def ordered_product(inputs: Inputs, attributes: Attributes) -> Shape | None:
    left, right = shape_of(inputs, 0), shape_of(inputs, 2)
    if not left or right is None or len(right) != 2:
        return None
    return (*left[:-1], right[1] if right[0] == left[-1] else right[0])


def looked_up(inputs: Inputs, attributes: Attributes) -> Shape | None:
    table, indices = shape_of(inputs, 0), shape_of(inputs, 1)
    return None if not table or indices is None else (*indices, *table[1:])


def gathered_blocks(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """A gather from a quantised table; values of 4 bits lie two to a byte where the table is of bytes."""
    table, indices = inputs[0], shape_of(inputs, 1)
    if table is None or indices is None:
        return None
    sizes, axis = list(table.shape), attributes.integer("gather_axis", 0)
    if table.bits == 8 and table.dtype == ElementType.UINT8:
        sizes[-1] = sizes[-1] * 8 // max(1, attributes.integer("bits", 4))
    return (*sizes[:axis], *indices, *sizes[axis + 1 :])


def halved(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = shape_of(inputs, 0)
    return (*shape[:-1], shape[-1] // 2) if shape else None


def reduced(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = shape_of(inputs, 0) or ()
    axes = {axis % max(1, len(shape)) for axis in attributes.integers("axes", range(len(shape)))}
    keep = attributes.integer("keepdims", 1)
    return tuple(1 if at in axes else size for at, size in enumerate(shape) if keep or at not in axes)


def compressed(inputs: Inputs, attributes: Attributes) -> Shape | None:
    sizes, kept = list(shape_of(inputs, 0) or ()), values_of(inputs, 1)
    if kept is None or not attributes.has("axis"):
        return None if kept is None else (sum(map(bool, kept)),)
    sizes[attributes.integer("axis", 0)] = sum(map(bool, kept))
    return tuple(sizes)


def nonzero_places(inputs: Inputs, attributes: Attributes) -> Sizes | None:
    """The coordinates of values that are not 0; open, or empty for an empty tensor."""
    shape = shape_of(inputs, 0) or ()
    return (max(1, len(shape)), None if math.prod(shape) else 0)


def reshaped(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """The oldest Reshape, whose target is an attribute."""
    source, target = shape_of(inputs, 0) or (), attributes.integers("shape", ())
    sizes = [source[at] if size == 0 and at < len(source) else size for at, size in enumerate(target)]
    known = math.prod(size for size in sizes if size > 0)
    rest = math.prod(source) // max(1, known)
    return tuple(rest if size < 0 else size for size in sizes) if target else None


def joined(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """Quantised tensors joined: after the scale and zero point of the result come tensor, scale, zero point each."""
    shapes = [tensor.shape for tensor in inputs[2::3] if tensor is not None]
    axis = attributes.integer("axis", 0)
    if not shapes or not -len(shapes[0]) <= axis < len(shapes[0]):
        return None
    sizes = list(shapes[0])
    sizes[axis] = sum(shape[axis] for shape in shapes)
    return tuple(sizes)


def unfolded(inputs: Inputs, attributes: Attributes) -> Shape | None:
    sizes, axis = list(shape_of(inputs, 0) or ()), attributes.integer("dim", -1)
    size, step = attributes.integer("size", 1), attributes.integer("step", 1)
    if not -len(sizes) <= axis < len(sizes) or step < 1:
        return None
    sizes[axis] = (sizes[axis] - size) // step + 1
    return (*sizes, size)


def expanded(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape, axis = list(shape_of(inputs, 0) or ()), values_of(inputs, 1)
    if not axis:
        return None
    at = axis[0] if axis[0] >= 0 else len(shape) + 1 + axis[0]
    return (*shape[:at], 1, *shape[at:])


def cropped(inputs: Inputs, attributes: Attributes) -> Shape | None:
    data, regions, size = shape_of(inputs, 0), shape_of(inputs, 1), values_of(inputs, 3)
    return (regions[0], data[1], *size) if data and regions and size and len(data) > 1 else None


def pairs(inputs: Inputs, attributes: Attributes) -> Shape | None:
    left, right = shape_of(inputs, 0), shape_of(inputs, 1)
    return (left[0], right[0]) if left and right else None


def spectrum(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = shape_of(inputs, 0)
    if not shape or attributes.integer("signal_ndim", 1) != 1 or not attributes.integer("onesided", 1):
        return None
    return (*shape[:-1], shape[-1] // 2 + 1, 2)


def signal(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = shape_of(inputs, 0)
    if not shape or len(shape) < 2 or attributes.integer("signal_ndim", 1) != 1:
        return None
    return (*shape[:-2], 2 * (shape[-2] - 1)) if attributes.integer("onesided", 1) else shape[:-1]


def words(inputs: Inputs, attributes: Attributes) -> Shape | None:
    data, weight = shape_of(inputs, 0), shape_of(inputs, 1)
    return (*data[:-1], weight[0]) if data and weight else None


# Sliding windows, and images with channels in blocks


def windowed(weight: int | None, last: bool | None = None) -> ShapeRule:
    """The shape of a convolution or pool. *last*: whether channels are the last axis; None: an attribute says so."""

    def rule(inputs: Inputs, attributes: Attributes) -> Shape | None:
        shape, kernel = shape_of(inputs, 0) or (), shape_of(inputs, weight) if weight is not None else None
        channels_last = attributes.integer("channels_last", 0) if last is None else last
        window = attributes.integers("kernel_shape", kernel[2:] if kernel else ())
        spatial = shape[1:-1] if channels_last else shape[2:]
        if len(shape) < 3 or len(window) != len(spatial):
            return None
        sizes = tuple(_slid(attributes, at, spatial, window) for at in range(len(window)))
        channels = kernel[0] if kernel else shape[-1 if channels_last else 1]
        return (shape[0], *sizes, channels) if channels_last else (shape[0], channels, *sizes)

    return rule


def _slid(attributes: Attributes, at: int, spatial: Shape, window: Shape) -> int:
    """Number of positions of a window along one axis."""
    stride = max(1, attributes.integers("strides", (1,) * len(window))[at])
    mode = attributes.text("auto_pad")
    if mode.startswith("SAME"):
        return -(-spatial[at] // stride)
    pads = attributes.integers("pads", (0,) * 2 * len(window)) if mode != "VALID" else (0,) * 2 * len(window)
    reach = attributes.integers("dilations", (1,) * len(window))[at] * (window[at] - 1) + 1
    room = spatial[at] + pads[at] + pads[at + len(window)] - reach
    return max(0, (-(-room // stride) if attributes.integer("ceil_mode", 0) else room // stride) + 1)


def blocked(inputs: Inputs, attributes: Attributes) -> Sizes | None:
    """Channels in blocks of 8 or 16, depending on the processor that saved the file: open unless 16 divides them."""
    shape = shape_of(inputs, 0) or ()
    if len(shape) < 3:
        return None
    count, *others, channels = shape if attributes.integer("channels_last", 0) else (shape[0], *shape[2:], shape[1])
    return (count, None if channels % 16 else channels, *others)


def unblocked(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape, channels = shape_of(inputs, 0) or (), attributes.integer("channels", 0)
    if len(shape) < 3 or channels < 1:
        return None
    last = attributes.integer("channels_last", 0)
    return (shape[0], *shape[2:], channels) if last else (shape[0], channels, *shape[2:])


def spread(inputs: Inputs, attributes: Attributes) -> Shape | None:
    """A transposed convolution whose padding is an input."""
    shape, kernel = shape_of(inputs, 0) or (), shape_of(inputs, 1) or ()
    rank = len(shape) - 2
    pads = values_of(inputs, 2) or ((0,) * 2 * rank if shape_of(inputs, 2) is None else None)
    if rank < 1 or len(kernel) != len(shape) or pads is None:
        return None
    ones = (1,) * rank
    strides, reach = attributes.integers("strides", ones), attributes.integers("dilations", ones)
    extra = attributes.integers("output_padding", (0,) * rank)
    sizes = (
        strides[at] * (shape[2 + at] - 1)
        + extra[at]
        + reach[at] * (kernel[2 + at] - 1)
        + 1
        - pads[at]
        - pads[at + rank]
        for at in range(rank)
    )
    return (shape[0], kernel[1] * attributes.integer("group", 1), *sizes)


def pooled_away(inputs: Inputs, attributes: Attributes) -> Shape | None:
    shape = shape_of(inputs, 0) or ()
    ones = (1,) * (len(shape) - 2)
    return (shape[0], *ones, shape[-1]) if attributes.integer("channels_last", 0) else (*shape[:2], *ones)
