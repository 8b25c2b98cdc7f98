"""A ``Net`` under construction: ``NetDraft``. A tensor of the source is a ``Picture``, a view of a value of the net.

Both readers translate operators by the methods of a draft, which know what a net can express: a flattened picture
keeps its layout until an operation reads it, padding waits for the convolution that takes it, and constants must be
per channel. Anything else raises ``Foreign``, and the reader decides what to do. A net's values are [rows, channels,
height, width]; a ``Value`` is such a size without rows.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from weft.base.errors import ModelError
from weft_stitch.net import ROUNDING, Array, Net, Op, Port, Value, Window, finite, infer

Pads = tuple[int, int, int, int]
"""Top, left, bottom, right."""


def same_pads(
    kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int], size: Value, *, upper: bool
) -> Pads:
    """The padding with which the output has the size of the input divided by the stride, rounded up (SAME in ONNX).

    *size*: of the input. An odd zero is added at the end if *upper*, else at the beginning.
    """
    begins, ends = [], []
    for taps, stride, dilation, extent in zip(kernel, strides, dilations, (size.height, size.width), strict=True):
        # the windows begin in steps of the stride, and the last one reaches as far as its taps
        total = max(0, (-(-extent // stride) - 1) * stride + dilation * (taps - 1) + 1 - extent)
        smaller_half = total // 2
        begins.append(smaller_half if upper else total - smaller_half)
        ends.append(total - smaller_half if upper else smaller_half)
    return begins[0], begins[1], ends[0], ends[1]


def add_pads(first: Pads, second: Pads) -> Pads:
    """The sum of two paddings."""
    return first[0] + second[0], first[1] + second[1], first[2] + second[2], first[3] + second[3]


def round_up_window(window: Window, size: Value) -> Window:
    """*window* with more padding at the end, so that rounding sizes down gives the result of rounding up.

    *size*: of the input. A last window that would begin in the padding at the end is left out, as in onnxruntime and
    torch.
    """
    ends = []
    for axis, extent in enumerate((size.height, size.width)):
        begin, end, stride = window.pads[axis], window.pads[axis + 2], window.strides[axis]
        span = window.dilations[axis] * (window.kernel[axis] - 1) + 1
        count = -(-(extent + begin + end - span) // stride) + 1
        if (count - 1) * stride >= extent + begin:  # the last window would begin in the padding
            count -= 1
        ends.append(max(end, (count - 1) * stride + span - extent - begin))
    return replace(window, pads=(window.pads[0], window.pads[1], ends[0], ends[1]))


Shape = tuple[int, ...]

_MOST_NUMBERS = 2**48
"""Limit on the numbers in a picture: no machine holds more, so a file that asks for more is damaged."""


class Foreign(Exception):
    """An operator, or a use of it, that a net cannot express; the text says why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A tensor of the source model: a value of the net, seen in the source's shape."""

    value: str
    view: Shape
    """The source's shape, without rows."""
    pads: Pads = (0, 0, 0, 0)
    """Padding with zeros that is not applied yet."""


def view_size(view: Shape) -> Value:
    """Channels, height and width of a tensor with the shape *view*, of any rank."""
    return Value(*view) if len(view) <= 3 else Value(view[0], math.prod(view[1:]), 1)


_LISTED = 4
"""Number of operators that an island's name lists; its digest covers all."""


def island_name(operators: Sequence[str], spelled: Sequence[str]) -> str:
    """A name that is equal for islands of equal operators. *spelled*: the operators with their attributes."""
    listed = "+".join(operators[:_LISTED]) + ("..." if len(operators) > _LISTED else "")
    return f"{listed} {hashlib.sha256(' '.join(spelled).encode()).hexdigest()[:8]}"


class NetDraft:
    """A net under construction. Its methods add operations and return their picture. *name*: what they are called."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.values: dict[str, Value] = {}
        self._inputs: list[Port] = []

    def input(self, name: str, shape: Shape) -> Picture:
        """Add an input whose rows have *shape*."""
        if not 1 <= len(shape) <= 3:
            sizes = " x ".join(map(str, shape)) or "nothing"
            raise ModelError(f"its input {name} has rows of {sizes}; rows of vectors or pictures can be stitched")
        _require_possible(shape)
        value = self._unique(name)
        self.values[value] = Value(*shape)
        self._inputs.append(Port(name, value, shape))
        return Picture(value, shape)

    def size(self, picture: Picture) -> Value:
        """The size of the value behind *picture*."""
        return self.values[picture.value]

    def convolve(
        self, name: str, x: Picture, weight: Array, bias: Array | None, window: Window, groups: int
    ) -> Picture:
        """Add a convolution, which takes the padding of *x* along. *weight*: [out, in / groups, height, width]."""
        size = self._picture_size(x)
        if weight.ndim != 4:
            raise Foreign(f"it is a {weight.ndim - 2}d convolution; those over pictures (2d) are understood")
        if groups < 1 or weight.shape[1] * groups != size.channels or weight.shape[0] % groups or not weight.size:
            shape = " x ".join(map(str, weight.shape))
            raise ModelError(f"its weight of {shape} in {groups} groups does not fit {size.channels} channels")
        window = replace(window, kernel=weight.shape[2:], pads=add_pads(window.pads, x.pads))
        convolved = self._add(name, "conv", [x.value], weight=weight, window=window, groups=groups)
        return convolved if bias is None else self.affine(f"{name}.bias", convolved, None, bias)

    def linear(self, name: str, x: Picture, weight: Array, bias: Array | None) -> Picture:
        """Add a fully connected layer, as a convolution whose window covers the whole picture. *weight*: [out, in]."""
        x = self.apply_pads(x)
        size = self.size(x)
        if len(x.view) != 1:
            raise Foreign(f"it multiplies rows of {_text(x.view)}; rows of plain vectors are understood")
        if weight.ndim != 2 or weight.shape[1] != x.view[0] or not weight.size:
            raise ModelError(f"its weight of {_text(weight.shape)} does not fit {x.view[0]} inputs")
        kernel = np.ascontiguousarray(weight).reshape(weight.shape[0], size.channels, size.height, size.width)
        window = Window((size.height, size.width))
        product = self._add(name, "conv", [x.value], weight=kernel, window=window)
        product = replace(product, view=(weight.shape[0],))
        return product if bias is None else self.affine(f"{name}.bias", product, None, bias)

    def affine(self, name: str, x: Picture, scale: Array | None, shift: Array | None) -> Picture:
        """Multiply by *scale* and add *shift*, each one number per channel of the net's value."""
        x = self.apply_pads(x)
        channels = self.size(x).channels
        for table in (scale, shift):
            if table is not None and table.shape != (channels,):
                raise ModelError(f"it has {table.size} factors or terms for {channels} channels")
            if table is not None and not finite(table):
                raise ModelError("its factors or terms are not all finite")
        return self._add(name, "affine", [x.value], view=x.view, scale=scale, shift=shift)

    def batch_norm(
        self, name: str, x: Picture, scale: Array, bias: Array, mean: Array, variance: Array, epsilon: float
    ) -> Picture:
        """Add a normalisation with stored statistics, as a factor and a term per channel."""
        channels = self.size(x).channels
        if any(table.shape != (channels,) for table in (scale, bias, mean, variance)) or x.view[0] != channels:
            raise Foreign(f"its tables are not one number for each of the {channels} channels of its input")
        variance_plus_epsilon = variance.astype(np.float64) + epsilon
        if not (variance_plus_epsilon > 0).all():
            raise ModelError("its variance is negative")
        factor = scale / np.sqrt(variance_plus_epsilon)
        with np.errstate(over="ignore"):  # ``affine`` refuses numbers that are not finite
            scale_and_shift = factor.astype(np.float32), (bias - mean * factor).astype(np.float32)
        return self.affine(name, x, *scale_and_shift)

    def per_channel(self, x: Picture, constant: Array) -> Array:
        """*constant* as one number per channel; ``Foreign`` if its broadcast over *x* differs within a channel."""
        size, view = self.size(x), x.view
        channels = size.channels
        shape = (1,) * (len(view) + 1 - constant.ndim) + constant.shape  # aligned at the last dimension, with rows
        if len(shape) > len(view) + 1 or any(
            extent not in (1, full) for extent, full in zip(shape, (1, *view), strict=True)
        ):
            raise Foreign(f"its constant of {_text(constant.shape)} does not spread over rows of {_text(view)}")
        if constant.size == 1:
            return np.full(channels, constant.reshape(()), constant.dtype)
        table = constant.reshape(shape)
        if view[0] == channels:
            table = _first_if_equal(table, tuple(range(2, len(shape))))  # along height and width
        elif len(view) == 1 and table.size == view[0]:  # a flattened picture: channels x positions
            table = _first_if_equal(table.reshape(channels, -1), (1,))
        else:
            raise Foreign(f"its constant of {_text(constant.shape)} does not go by channels")
        return np.broadcast_to(table.reshape(-1), (channels,)).copy()

    def unary(self, name: str, x: Picture, function: str, **settings: float) -> Picture:
        """Add an elementwise function (see ``Op.function``)."""
        x = self.apply_pads(x)
        return self._add(name, "unary", [x.value], view=x.view, function=function, settings=settings)

    def rounding(self, name: str, x: Picture, payload: Any) -> Picture:
        """Round *x* to a number format, element by element, by the steps in *payload*."""
        x = self.apply_pads(x)
        return self._add(name, "unary", [x.value], view=x.view, function=ROUNDING, payload=payload)

    def combine(self, name: str, kind: str, left: Picture, right: Picture) -> Picture:
        """Add ("add") or multiply ("mul") two tensors; one may be broadcast over positions, or over channels."""
        left, right = self.apply_pads(left), self.apply_pads(right)
        left_size, right_size = self.size(left), self.size(right)
        if left.view == right.view and left_size == right_size:
            return self._add(name, kind, [left.value, right.value], view=left.view)
        smaller, larger = sorted((left_size, right_size), key=lambda size: size.height * size.width)
        both_keep_shape = self._keeps_shape(left) and self._keeps_shape(right)
        positions_fit = (smaller.height, smaller.width) in ((1, 1), (larger.height, larger.width))
        channels = left_size.channels, right_size.channels
        channels_fit = channels[0] == channels[1] or 1 in channels
        if not (both_keep_shape and positions_fit and channels_fit):
            raise Foreign(f"it joins rows of {_text(left.view)} and of {_text(right.view)}")
        return self._add(name, kind, [left.value, right.value])

    def add_scaled(self, name: str, left: Picture | Array, right: Picture | Array, factor: float = 1.0) -> Picture:
        """Add *factor* times *right* to *left*; one of the two may be a constant per channel."""
        if not isinstance(right, Picture):
            assert isinstance(left, Picture)
            return self.affine(name, left, None, self.per_channel(left, right * np.float32(factor)))
        scale = None if factor == 1 else np.full(self.size(right).channels, factor, np.float32)
        if not isinstance(left, Picture):
            return self.affine(name, right, scale, self.per_channel(right, left))
        if scale is not None:
            right = self.affine(f"{name}.{'minus' if factor == -1 else 'alpha'}", right, scale, None)
        return self.combine(name, "add", left, right)

    def multiply(self, name: str, left: Picture | Array, right: Picture | Array) -> Picture:
        """Multiply two tensors, one of which may be a constant per channel."""
        if not isinstance(left, Picture):
            left, right = right, left
        assert isinstance(left, Picture)
        if isinstance(right, Picture):
            return self.combine(name, "mul", left, right)
        return self.affine(name, left, self.per_channel(left, right), None)

    def prelu(self, name: str, x: Picture, slope: Array) -> Picture:
        """Add a PReLU: the positive part of *x*, plus *slope* (per channel) times its negative part."""
        x = self.apply_pads(x)
        if (slope == slope[0]).all():
            return self.unary(name, x, "LeakyRelu", alpha=float(slope[0]))
        negative = self.unary(f"{name}.negative", self.unary(f"{name}.minus", x, "Neg"), "Relu")
        scaled = self.affine(f"{name}.slope", negative, -slope, None)
        return self.combine(name, "add", self.unary(f"{name}.positive", x, "Relu"), scaled)

    def concat(self, name: str, parts: Sequence[Picture]) -> Picture:
        """Concatenate along the channels, or along flat vectors."""
        parts = [self.apply_pads(picture) for picture in parts]
        sizes = [self.size(picture) for picture in parts]
        extents = {(size.height, size.width) for size in sizes}
        if len(extents) > 1 or not (
            all(map(self._keeps_shape, parts)) or all(len(picture.view) == 1 for picture in parts)
        ):
            raise Foreign(f"it joins rows of {', '.join(_text(picture.view) for picture in parts)}")
        if len(parts) == 1:
            return parts[0]
        joined = self._add(name, "concat", [picture.value for picture in parts])
        return replace(joined, view=(sum(picture.view[0] for picture in parts), *parts[0].view[1:]))

    def pool(
        self, name: str, x: Picture, kind: str, window: Window, *, ceil: bool = False, count_pads: bool = False
    ) -> Picture:
        """Add a pool (*kind*: "max_pool" or "avg_pool").

        *ceil*: round the output's size up. *count_pads*: padding counts in averages.
        """
        x = self.apply_pads(x)
        if not self._keeps_shape(x):
            raise Foreign(f"it pools rows of {_text(x.view)}; pictures are understood")
        size = self.size(x)
        settings = {}
        if kind == "avg_pool":
            settings["count_include_pad"] = float(count_pads and any(window.pads))
        if ceil:
            padded_window = round_up_window(window, size)
            if padded_window != window and settings.get("count_include_pad"):
                raise Foreign("it rounds sizes up and counts padding, which runtimes disagree about")
            window = padded_window
        if kind == "max_pool" and window == Window((1, 1)):  # it changes nothing
            return x
        return self._add(name, kind, [x.value], window=window, settings=settings)

    def global_pool(self, name: str, x: Picture, *, keep: bool) -> Picture:
        """The mean over all positions of each channel; *keep*: keep dimensions of size 1."""
        x = self.apply_pads(x)
        self._require_channels(x)
        view = (self.size(x).channels, *(1,) * (len(x.view) - 1)) if keep else (self.size(x).channels,)
        return self._add(name, "global_pool", [x.value], view=view)

    def global_max(self, name: str, x: Picture, *, keep: bool) -> Picture:
        """The largest number of each channel; *keep*: keep dimensions of size 1."""
        x = self.apply_pads(x)
        self._require_channels(x)
        size = self.size(x)
        view = (size.channels, *(1,) * (len(x.view) - 1)) if keep else (size.channels,)
        return self._add(name, "max_pool", [x.value], view=view, window=Window((size.height, size.width)))

    def reshape(self, x: Picture, view: Sequence[int]) -> Picture:
        """*x* with the shape *view*; no operation is added."""
        x = self.apply_pads(x)
        if math.prod(view) != math.prod(x.view):
            raise ModelError(f"rows of {_text(x.view)} cannot take the shape {_text(view)}")
        return replace(x, view=tuple(view))

    def pad(self, x: Picture, pads: Pads) -> Picture:
        """*x* with additional padding, which is applied later (see ``apply_pads``)."""
        if not self._keeps_shape(x) or min(pads) < 0:
            raise Foreign(f"it pads rows of {_text(x.view)} by {_text(pads)}")
        return replace(x, pads=add_pads(x.pads, pads))

    def island(self, name: str, inputs: Sequence[Picture], payload: Any, view: Shape) -> Picture:
        """Add operators that a net cannot express. *payload*: what runs them, and knows their output's size.

        *view*: the source's shape of the output.
        """
        return self._add(name, "island", [picture.value for picture in inputs], view=view, payload=payload)

    def apply_pads(self, x: Picture) -> Picture:
        """Apply the padding of *x*, by a depthwise convolution with ones."""
        if not any(x.pads):
            return x
        channels = self.size(x).channels
        ones = np.ones((channels, 1, 1, 1), np.float32)
        return self._add(
            f"{x.value}.padded", "conv", [x.value], weight=ones, window=Window(pads=x.pads), groups=channels
        )

    def finish(self, name: str, outputs: Mapping[str, Picture], batch: int) -> Net:
        """The net with *outputs* (name of a port -> picture), without operations that no output needs."""
        ports: list[Port] = []
        for port, picture in outputs.items():
            picture = self.apply_pads(picture)
            if picture.value in {written.value for written in ports}:  # outputs are told apart by their values: copy it
                ones = np.ones(self.size(picture).channels, np.float32)
                picture = self._add(f"{picture.value}.again", "affine", [picture.value], view=picture.view, scale=ones)
            ports.append(Port(port, picture.value, picture.view))
        ops = needed_ops(self.ops, [port.value for port in ports])
        ops = merge_affines(ops, [port.value for port in ports])
        values = {port.value: self.values[port.value] for port in self._inputs}
        values |= {op.output: self.values[op.output] for op in ops}
        return Net(name, tuple(self._inputs), tuple(ops), tuple(ports), values, batch)

    def _add(self, name: str, kind: str, inputs: Sequence[str], *, view: Shape | None = None, **fields: Any) -> Picture:
        """Add an operation; *view*: the source's shape of its output, by default [channels, height, width]."""
        unique = self._unique(name)
        op = Op(unique, kind, tuple(inputs), unique, **fields)
        size = infer(op, tuple(self.values[value] for value in inputs))
        _require_possible((size.channels, size.height, size.width))
        self.ops.append(op)
        self.values[unique] = size
        return Picture(unique, (size.channels, size.height, size.width) if view is None else view)

    def _unique(self, name: str) -> str:
        """*name*, with a number if a value has that name already."""
        unique, number = name, 1
        while unique in self.values:
            number += 1
            unique = f"{name}.{number}"
        return unique

    def _keeps_shape(self, x: Picture) -> bool:
        """Whether *x* has the shape [channels, height, width] of its value."""
        size = self.size(x)
        return x.view == (size.channels, size.height, size.width)

    def _picture_size(self, x: Picture) -> Value:
        """The size of the input of a convolution; ``Foreign`` if it was reshaped."""
        if not self._keeps_shape(x):
            raise Foreign(f"it convolves rows of {_text(x.view)}; pictures are understood")
        return self.size(x)

    def _require_channels(self, x: Picture) -> None:
        """Raise ``Foreign`` unless the first dimension of *x* is the channels, and there are others to reduce."""
        if len(x.view) < 2 or x.view[0] != self.size(x).channels:
            raise Foreign(f"it reduces rows of {_text(x.view)}, whose first dimension is not the channels")


def _first_if_equal(table: Array, axes: tuple[int, ...]) -> Array:
    """*table* with its first entry alone along each of *axes*; ``Foreign`` if the entries there differ."""
    for axis in axes:
        first = table.take([0], axis=axis)
        if table.shape[axis] != 1 and not (table == first).all():
            raise Foreign(f"its constant of {_text(table.shape)} does not go by channels")
        table = first
    return table


def _require_possible(shape: Shape) -> None:
    """Raise ``ModelError`` for an empty picture or one that no machine could hold."""
    if min(shape) < 1 or math.prod(shape) > _MOST_NUMBERS:
        raise ModelError(f"it would write pictures of {_text(shape)}")


def _text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "one number"


def needed_ops(ops: Iterable[Op], outputs: Iterable[str]) -> list[Op]:
    """The operations that *outputs* depend on, in order."""
    needed_values, needed = set(outputs), []
    for op in reversed(list(ops)):
        if op.output in needed_values:
            needed_values.update(op.inputs)
            needed.append(op)
    return needed[::-1]


def merge_affines(ops: Sequence[Op], outputs: Sequence[str]) -> list[Op]:
    """Merge an affine into the affine before it, if it is the only reader.

    So a bias and the batch normalisation after it are one affine, and models with and without the bias align.
    """
    readers = Counter(value for op in ops for value in op.inputs)
    readers.update(outputs)
    merged: dict[str, Op] = {}
    for op in ops:
        before = merged.get(op.inputs[0])
        if op.kind == "affine" and before is not None and before.kind == "affine" and readers[before.output] == 1:
            del merged[before.output]
            op = replace(op, inputs=before.inputs, scale=_joint_scale(before, op), shift=_joint_shift(before, op))
        merged[op.output] = op
    return list(merged.values())


def _joint_scale(before: Op, after: Op) -> Array | None:
    """The scale of two affines, one after the other; None if neither has one."""
    if before.scale is None or after.scale is None:
        return after.scale if before.scale is None else before.scale
    return (before.scale.astype(np.float64) * after.scale).astype(np.float32)


def _joint_shift(before: Op, after: Op) -> Array | None:
    """The shift of two affines, one after the other; None if neither has one."""
    if before.shift is None:
        return after.shift
    shift = before.shift.astype(np.float64)
    shift = shift if after.scale is None else shift * after.scale
    return (shift if after.shift is None else shift + after.shift).astype(np.float32)
