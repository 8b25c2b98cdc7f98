"""Rules for output shapes of sliding windows, and of images with channels in blocks."""

from __future__ import annotations

from weft.models.onnx_graph import Attributes
from weft.models.operators.rules.shapes import Inputs, Shape, ShapeRule, Sizes, shape_of, values_of


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
