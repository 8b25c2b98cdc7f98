"""Torch meanings of operators that slide a window over an image, and of resizing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.models.operators.rules.meanings import Numbers, TorchNode, TorchTensor, activated


class WindowPlan(NamedTuple):
    """A sliding window over the spatial axes of an image; each list has a number per axis."""

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    before: list[int]
    """Padding before the first element of an axis."""
    after: list[int]
    """Padding after the last element of an axis."""


def conv(t: TorchNode, x: TorchTensor, weight: TorchTensor, bias: TorchTensor = None) -> TorchTensor:
    window = _window(t, x, weight.shape[2:])
    x, padding = _pad(t, x, window, 0.0)
    function = getattr(t.nn, f"conv{len(window.kernel)}d")
    return function(x, weight, bias, window.strides, padding, window.dilations, t.get("group", 1))


def fused_conv(
    t: TorchNode, x: TorchTensor, weight: TorchTensor, bias: TorchTensor = None, added: TorchTensor = None
) -> TorchTensor:
    result = conv(t, x, weight, bias)
    return activated(t, result if added is None else result + added)


def conv_transpose(t: TorchNode, x: TorchTensor, weight: TorchTensor, bias: TorchTensor = None) -> TorchTensor:
    """ConvTranspose; with different padding at both ends, which torch lacks, the unpadded result is cropped."""
    t.refuse(t.get("auto_pad", "NOTSET") not in ("NOTSET", "") or t.get("output_shape"), "padding by output shape")
    window = _window(t, x, weight.shape[2:])
    function = getattr(t.nn, f"conv_transpose{len(window.kernel)}d")
    extra = list(t.get("output_padding") or [0] * len(window.kernel))
    symmetric = window.before == window.after
    padding = window.before if symmetric else [0] * len(window.kernel)
    result = function(x, weight, bias, window.strides, padding, extra, t.get("group", 1), window.dilations)
    for axis, (before, after) in enumerate(zip(window.before, window.after, strict=True), 2):
        if not symmetric:
            result = result.narrow(axis, before, result.shape[axis] - before - after)
    return result


def max_pool(t: TorchNode, x: TorchTensor) -> TorchTensor:
    t.refuse(t.outputs > 1, "a pool that also gives out where the largest values are")
    window = _window(t, x, t.get("kernel_shape"))
    x, padding = _pad(t, x, window, -math.inf, half=True)
    function = getattr(t.nn, f"max_pool{len(window.kernel)}d")
    return function(x, window.kernel, window.strides, padding, window.dilations, bool(t.get("ceil_mode", 0)))


def average_pool(t: TorchNode, x: TorchTensor) -> TorchTensor:
    """AveragePool. Padding that torch lacks is added before; the sums are divided by the share of real elements."""
    window, count_padding = _window(t, x, t.get("kernel_shape")), bool(t.get("count_include_pad", 0))
    t.refuse(
        any(size != 1 for size in window.dilations) or t.get("ceil_mode", 0),
        "an average pool with dilations or rounding up",
    )
    function = getattr(t.nn, f"avg_pool{len(window.kernel)}d")
    padded, padding = _pad(t, x, window, 0.0, half=True)
    if padded is x or count_padding:
        return function(padded, window.kernel, window.strides, padding, False, count_padding)
    ones, _ = _pad(t, t.torch.ones_like(x[:1, :1]), window, 0.0, half=True)
    shares = function(ones, window.kernel, window.strides)
    return function(padded, window.kernel, window.strides) / shares


def global_average(t: TorchNode, x: TorchTensor) -> TorchTensor:
    return x.mean(dim=tuple(range(2, x.dim())), keepdim=True)


def global_max(t: TorchNode, x: TorchTensor) -> TorchTensor:
    return x.amax(dim=tuple(range(2, x.dim())), keepdim=True)


def global_lp(t: TorchNode, x: TorchTensor) -> TorchTensor:
    return t.torch.linalg.vector_norm(x, ord=t.get("p", 2), dim=tuple(range(2, x.dim())), keepdim=True)


def _window(t: TorchNode, x: TorchTensor, kernel: Sequence[int]) -> WindowPlan:
    """The window of a convolution or pool, from the attributes that both have; ``auto_pad`` is resolved."""
    rank = len(kernel)
    strides, dilations = (list(t.get(name) or [1] * rank) for name in ("strides", "dilations"))
    pads, mode = list(t.get("pads") or [0] * 2 * rank), t.get("auto_pad", "NOTSET")
    before, after = pads[:rank], pads[rank:]
    if mode.startswith("SAME"):
        extents = [(size - 1) * gap + 1 for size, gap in zip(kernel, dilations, strict=True)]
        totals = [  # padding of both ends, with which there are as many windows as strides in the image, rounded up
            max(0, (-(-size // step) - 1) * step + extent - size)
            for size, step, extent in zip(x.shape[2:], strides, extents, strict=True)
        ]
        small, large = [total // 2 for total in totals], [total - total // 2 for total in totals]
        before, after = (small, large) if mode == "SAME_UPPER" else (large, small)
    elif mode == "VALID":
        before, after = [0] * rank, [0] * rank
    return WindowPlan(list(kernel), strides, dilations, before, after)


def _pad(
    t: TorchNode, x: TorchTensor, window: WindowPlan, fill: float, *, half: bool = False
) -> tuple[TorchTensor, list[int]]:
    """Return *x* and the padding to pass to torch's function; *x* is padded here if torch's function cannot do it.

    half: for pools, whose torch functions refuse padding of more than half a window.
    """
    limits = [size // 2 if half else size + pad for size, pad in zip(window.kernel, window.before, strict=True)]
    if window.before == window.after and all(pad <= limit for pad, limit in zip(window.before, limits, strict=True)):
        return x, window.before
    pairs = zip(reversed(window.before), reversed(window.after), strict=True)
    return t.nn.pad(x, [pad for pair in pairs for pad in pair], value=fill), [0] * len(window.kernel)


# Resizing


class Taps(NamedTuple):
    """Interpolation along one axis: each output element is a weighted sum of input elements.

    Both lists have the shape (summands, output elements): the input indices (*places*) and their weights (*shares*).
    """

    places: list[list[int]]
    shares: list[list[float]]


def resize(
    t: TorchNode,
    x: TorchTensor,
    region: Numbers | None = None,
    scales: Numbers | None = None,
    sizes: Numbers | None = None,
) -> TorchTensor:
    """Resize axis by axis, as a weighted sum of selected elements; the *region* of a crop is refused.

    scales, sizes: of each axis, one of them given.
    """
    t.refuse(
        t.get("antialias", 0)
        or t.get("keep_aspect_ratio_policy", "stretch") != "stretch"
        or t.get("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize",
        "resizing with antialiasing, a kept aspect ratio or a region",
    )
    align_corners = t.get("coordinate_transformation_mode") == "align_corners"
    for number, axis in enumerate(t.get("axes") or range(x.dim())):
        size = x.shape[axis]
        scale = scales[number] if scales else sizes[number] / size if sizes else 1.0
        length = math.floor(size * scale) if scales else sizes[number] if sizes else size
        t.refuse(align_corners and size * scale != length, "aligned corners of a size that is rounded")
        if (length, scale) != (size, 1.0):
            x = _resample(t, x, axis, _compute_taps(t, size, length, scale))
    return x


def upsample(t: TorchNode, x: TorchTensor, scales: Numbers | None = None) -> TorchTensor:
    """Upsample, as the Resize with the same results."""
    mode = {"mode": t.get("mode", "nearest"), "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    return resize(replace(t, attributes=mode), x, None, t.numbers("scales", scales))


def _resample(t: TorchNode, x: TorchTensor, axis: int, taps: Taps) -> TorchTensor:
    """*x* interpolated along one axis."""
    shape = [-1 if other == axis else 1 for other in range(x.dim())]
    total = None
    for places, shares in zip(taps.places, taps.shares, strict=True):
        part = x.index_select(axis, t.constant(places, x))
        if any(share != 1.0 for share in shares):
            part = part * t.constant(shares, x, x.dtype).reshape(shape)
        total = part if total is None else total + part
    return total


def _compute_taps(t: TorchNode, size: int, length: int, scale: float) -> Taps:
    """The interpolation of *length* output elements from *size* input elements, by the node's attributes.

    scale: *length* over *size*, before *length* is rounded.
    """
    mode = t.get("mode", "nearest")
    centres = [_position(t, index, size, length, scale) for index in range(length)]
    if mode == "nearest":
        return Taps([[min(max(_round_position(t, centre), 0), size - 1) for centre in centres]], [[1.0] * length])
    offsets, weight = ((0, 1), _linear) if mode == "linear" else ((-1, 0, 1, 2), _cubic)
    exclude_outside = bool(t.get("exclude_outside", 0))
    coefficient = t.get("cubic_coeff_a", -0.75)
    all_places: list[list[int]] = []
    all_shares: list[list[float]] = []
    for centre in centres:
        floor = math.floor(centre)
        places = [floor + offset for offset in offsets]
        shares = [weight(abs(centre - place), coefficient) for place in places]
        if exclude_outside and mode != "linear":
            shares = [share if 0 <= place < size else 0.0 for place, share in zip(places, shares, strict=True)]
            shares = [share / sum(shares) for share in shares]
        all_places.append([min(max(place, 0), size - 1) for place in places])
        all_shares.append(shares)
    summands = range(len(offsets))
    return Taps(
        [[places[number] for places in all_places] for number in summands],
        [[shares[number] for shares in all_shares] for number in summands],
    )


def _linear(distance: float, _: float) -> float:
    """The weight of an element at *distance* in linear interpolation."""
    return max(0.0, 1.0 - distance)


def _cubic(distance: float, a: float) -> float:
    """The weight of an element at *distance* in Keys' cubic convolution with the coefficient *a*."""
    if distance <= 1:
        return ((a + 2) * distance - (a + 3)) * distance**2 + 1
    return ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a if distance < 2 else 0.0


def _position(t: TorchNode, index: int, size: int, length: int, scale: float) -> float:
    """The position in the input (of *size* elements) of the output element *index* (of *length*)."""
    match t.get("coordinate_transformation_mode", "half_pixel"):
        case "asymmetric":
            return index / scale
        case "align_corners":
            return index * (size - 1) / (length - 1) if length > 1 else 0.0
        case "pytorch_half_pixel" if length == 1:
            return 0.0
        case "half_pixel_symmetric":
            offset = size / 2 * (1 - length / (size * scale))
            return offset + (index + 0.5) / scale - 0.5
        case _:
            return (index + 0.5) / scale - 0.5


def _round_position(t: TorchNode, position: float) -> int:
    """The nearest index; the attribute ``nearest_mode`` decides on ties."""
    match t.get("nearest_mode", "round_prefer_floor"):
        case "floor":
            return math.floor(position)
        case "ceil":
            return math.ceil(position)
        case "round_prefer_ceil":
            return math.floor(position + 0.5)
        case _:
            return math.ceil(position - 0.5)
