"""Translate operators of exported torch graphs to operations of a ``NetDraft``: ``HANDLERS``, by name without ``_``.

A *picture* is a tensor of the model as the draft knows it, without rows; its shape is ``Picture.view``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.base.errors import ModelError
from weft_stitch.net import Array, Window
from weft_stitch.reading.draft import Foreign, NetDraft, Picture, same_pads


@dataclass(frozen=True, eq=False)
class Arguments:
    """One call of an operator, with its arguments by the names of the schema; handlers call it *a*."""

    name: str
    draft: NetDraft
    by_name: Mapping[str, Any]
    """Name of an argument -> its value; tensors are pictures or arrays."""
    rows: int
    """The number of rows for which the model was exported."""

    def picture(self, name: str = "self") -> Picture:
        """The tensor *name*; ``Foreign`` if it is a constant."""
        value = self.by_name[name]
        if not isinstance(value, Picture):
            raise Foreign(f"its {name} is not computed from the model's inputs")
        return value

    def array(self, name: str) -> Array | None:
        """The constant tensor *name* in float32, or None; ``Foreign`` if it is computed."""
        value = self.by_name[name]
        if isinstance(value, Picture):
            raise Foreign(f"its {name} is computed from the model's inputs")
        return None if value is None else np.asarray(value, np.float32)

    def required(self, name: str) -> Array:
        """The constant tensor *name*; ``Foreign`` if it is missing."""
        value = self.array(name)
        if value is None:
            raise Foreign(f"it has no {name}")
        return value

    def operand(self, name: str) -> Picture | Array:
        """The tensor *name*: a picture, or a constant in float32."""
        value = self.by_name[name]
        return value if isinstance(value, Picture) else self.required(name)

    def number(self, name: str) -> float:
        """The argument *name* as a float."""
        return float(self.by_name[name])

    def pair(self, name: str) -> tuple[int, int]:
        """An argument of two numbers, or of one that stands for both."""
        value = self.by_name[name]
        numbers = (list(value) if isinstance(value, Sequence) else [value]) * 2
        return numbers[0], numbers[1]

    def axes(self, name: str, x: Picture) -> list[int]:
        """The dimensions of *x* that the argument *name* lists, counted from the front, in ascending order."""
        value = self.by_name[name]
        axes = list(value) if isinstance(value, Sequence) else [value]
        return sorted(axis % (len(x.view) + 1) for axis in axes)


Handler = Callable[[Arguments], Picture]
"""Translates a call: adds its operations to the draft and returns the picture of its output."""


def _conv2d(a: Arguments) -> Picture:
    """A 2d convolution; padding may be numbers, "same" or "valid"."""
    x, weight = a.picture("input"), a.required("weight")
    kernel, strides, dilations = (weight.shape[2], weight.shape[3]), a.pair("stride"), a.pair("dilation")
    pads = (0, 0, 0, 0)
    if a.by_name["padding"] == "same":
        pads = same_pads(kernel, strides, dilations, a.draft.size(x), upper=True)
    elif a.by_name["padding"] != "valid":
        pads = a.pair("padding") * 2
    window = Window(kernel, strides, pads, dilations)
    return a.draft.convolve(a.name, x, weight, a.array("bias"), window, a.by_name["groups"])


def _batch_norm(a: Arguments) -> Picture:
    """A batch normalisation with stored statistics; scale and bias are optional."""
    if a.by_name["training"]:
        raise ModelError("it is in training mode; call eval() on the model first")
    mean, variance = a.required("running_mean"), a.required("running_var")
    scale, bias = a.array("weight"), a.array("bias")
    scale = np.ones_like(mean) if scale is None else scale
    bias = np.zeros_like(mean) if bias is None else bias
    return a.draft.batch_norm(a.name, a.picture("input"), scale, bias, mean, variance, a.number("eps"))


def _linear(a: Arguments) -> Picture:
    return a.draft.linear(a.name, a.picture("input"), a.required("weight"), a.array("bias"))


def _unary(function: str, **settings: float) -> Handler:
    """A handler for an elementwise function with fixed settings."""
    return lambda a: a.draft.unary(a.name, a.picture(), function, **settings)


def _leaky_relu(a: Arguments) -> Picture:
    return a.draft.unary(a.name, a.picture(), "LeakyRelu", alpha=a.number("negative_slope"))


def _elu(a: Arguments) -> Picture:
    if (a.number("scale"), a.number("input_scale")) != (1, 1):
        raise Foreign("its scales are not 1")
    return a.draft.unary(a.name, a.picture(), "Elu", alpha=a.number("alpha"))


def _softplus(a: Arguments) -> Picture:
    if a.number("beta") != 1:
        raise Foreign("its beta is not 1")
    return a.draft.unary(a.name, a.picture(), "Softplus")


def _gelu(a: Arguments) -> Picture:
    return a.draft.unary(a.name, a.picture(), "Gelu", tanh=float(a.by_name["approximate"] == "tanh"))


def _prelu(a: Arguments) -> Picture:
    """A PReLU with one slope, or one per channel."""
    x, slope = a.picture(), a.required("weight")
    channels = a.draft.size(x).channels
    if slope.size not in (1, channels):
        raise Foreign("its slopes do not go by channels")
    return a.draft.prelu(a.name, x, np.broadcast_to(slope.reshape(-1), (channels,)).copy())


def _clip(low: str, high: str) -> Handler:
    """A handler for an operator whose bounds are the arguments *low* and *high*; an empty name is no bound."""

    def handler(a: Arguments) -> Picture:
        bounds = {"min": a.by_name.get(low), "max": a.by_name.get(high)}
        if any(isinstance(bound, Picture) for bound in bounds.values()):
            raise Foreign("its bounds are computed from the model's inputs")
        limits = {name: float(bound) for name, bound in bounds.items() if bound is not None}
        if limits == {"min": 0.0}:
            return a.draft.unary(a.name, a.picture(), "Relu")
        return a.draft.unary(a.name, a.picture(), "Clip", **limits)

    return handler


def _rsub(a: Arguments) -> Picture:
    """The argument ``other`` minus ``self``."""
    if a.number("alpha") != 1:
        raise Foreign("its alpha is not 1")
    return a.draft.add_scaled(a.name, a.operand("other"), a.operand("self"), -1.0)


def _div(a: Arguments) -> Picture:
    """A division by a constant per channel."""
    x, divisor = a.picture(), a.draft.per_channel(a.picture(), a.required("other"))
    if a.by_name.get("rounding_mode") or not divisor.all():
        raise Foreign("it rounds, or divides by zero")
    return a.draft.affine(a.name, x, (1 / divisor.astype(np.float64)).astype(np.float32), None)


def _pow(a: Arguments) -> Picture:
    if isinstance(a.by_name["exponent"], Picture) or a.number("exponent") != 2:
        raise Foreign("its exponent is not 2")
    return a.draft.combine(a.name, "mul", a.picture(), a.picture())


def _cat(a: Arguments) -> Picture:
    """A concatenation along the channels."""
    tensors = a.by_name["tensors"]
    if not all(isinstance(tensor, Picture) for tensor in tensors):
        raise Foreign("it joins constants")
    if a.axes("dim", tensors[0]) != [1]:
        raise Foreign("it does not join along the channels (dimension 1)")
    return a.draft.concat(a.name, tensors)


def _max_pool2d(a: Arguments) -> Picture:
    strides = a.pair("stride") if a.by_name["stride"] else a.pair("kernel_size")
    window = Window(a.pair("kernel_size"), strides, a.pair("padding") * 2, a.pair("dilation"))
    return a.draft.pool(a.name, a.picture(), "max_pool", window, ceil=a.by_name["ceil_mode"])


def _avg_pool2d(a: Arguments) -> Picture:
    """An average pool."""
    if a.by_name["divisor_override"] is not None:
        raise Foreign("it divides by a number of its own")
    strides = a.pair("stride") if a.by_name["stride"] else a.pair("kernel_size")
    window = Window(a.pair("kernel_size"), strides, a.pair("padding") * 2)
    count_pads, ceil = a.by_name["count_include_pad"], a.by_name["ceil_mode"]
    return a.draft.pool(a.name, a.picture(), "avg_pool", window, ceil=ceil, count_pads=count_pads)


def _adaptive_avg_pool2d(a: Arguments) -> Picture:
    """An average pool to a given output size, which must divide the input's."""
    x, (out_height, out_width) = a.picture(), a.pair("output_size")
    size = a.draft.size(x)
    if (out_height, out_width) == (size.height, size.width):
        return x
    if (out_height, out_width) == (1, 1):
        return a.draft.global_pool(a.name, x, keep=True)
    if size.height % out_height or size.width % out_width:
        raise Foreign(f"{size.height} x {size.width} positions do not divide into {out_height} x {out_width}")
    kernel = (size.height // out_height, size.width // out_width)
    return a.draft.pool(a.name, x, "avg_pool", Window(kernel, kernel))


def _mean(a: Arguments) -> Picture:
    """A mean over all positions of each channel."""
    x = a.picture()  # the shape ``x.view`` lacks the batch axis: axis 2 of the tensor is the first of positions
    if a.by_name.get("dim") is None or a.axes("dim", x) != list(range(2, len(x.view) + 1)):
        raise Foreign("it does not take the mean over all positions of each channel")
    return a.draft.global_pool(a.name, x, keep=a.by_name["keepdim"])


def _reshape(a: Arguments) -> Picture:
    """An operator that only changes the shape, to the result's shape that the exporter recorded."""
    shape = a.by_name["shape of result"]
    if len(shape) < 2 or shape[0] != a.rows:
        raise Foreign(f"it makes {list(shape)} of {a.rows} rows, which are not rows")
    return a.draft.reshape(a.picture(), shape[1:])


def _transpose(a: Arguments) -> Picture:
    """A transposition, understood only if it moves nothing but dimensions of size 1."""
    x = a.picture()
    full_shape, order = (a.rows, *x.view), [axis % (len(x.view) + 1) for axis in a.by_name["dims"]]
    moved = [index for index in order[1:] if full_shape[index] != 1]
    if order[0] != 0 or moved != sorted(moved):
        raise Foreign("it moves dimensions")
    return _reshape(a)


def _identity(a: Arguments) -> Picture:
    return a.picture("input") if "input" in a.by_name else a.picture()


def _dropout(a: Arguments) -> Picture:
    if a.by_name["train"]:
        raise ModelError("it is in training mode; call eval() on the model first")
    return a.picture("input")


def _pad(a: Arguments) -> Picture:
    """A padding with zeros along height and width."""
    x, pads = a.picture(), list(a.by_name["pad"])  # pairs, from the last dimension to the first
    if a.by_name.get("mode", "constant") != "constant" or a.by_name.get("value") or len(x.view) != 3:
        raise Foreign("it pads with something else than zeros")
    left, right, top, bottom, *other_pads = (*pads, 0, 0, 0, 0)[: max(4, len(pads))]
    if any(other_pads):
        raise Foreign("it pads rows or channels")
    return a.draft.pad(x, (top, left, bottom, right))


def _cast(a: Arguments) -> Picture:
    if "float" not in str(a.by_name.get("dtype") or "float"):
        raise Foreign("its result is not of a float type")
    return a.picture()


_PLAIN = ("Relu", "Sigmoid", "Tanh", "HardSwish", "Silu", "Exp", "Neg", "Abs", "Sqrt")
"""Functions without settings, which torch calls by the same name in lower case."""

HANDLERS: Mapping[str, Handler] = {
    "conv2d": _conv2d,
    "batch_norm": _batch_norm,
    "linear": _linear,
    **{function.lower(): _unary(function) for function in _PLAIN},
    "hardsigmoid": _unary("HardSigmoid", alpha=1 / 6, beta=0.5),
    "leaky_relu": _leaky_relu,
    "elu": _elu,
    "softplus": _softplus,
    "gelu": _gelu,
    "prelu": _prelu,
    "hardtanh": _clip("min_val", "max_val"),
    "relu6": _clip("min_val", "max_val"),
    "clamp": _clip("min", "max"),
    "clamp_min": _clip("min", ""),
    "clamp_max": _clip("", "max"),
    "add": lambda a: a.draft.add_scaled(a.name, a.operand("self"), a.operand("other"), a.number("alpha")),
    "sub": lambda a: a.draft.add_scaled(a.name, a.operand("self"), a.operand("other"), -a.number("alpha")),
    "rsub": _rsub,
    "mul": lambda a: a.draft.multiply(a.name, a.operand("self"), a.operand("other")),
    "div": _div,
    "pow": _pow,
    "cat": _cat,
    "max_pool2d": _max_pool2d,
    "avg_pool2d": _avg_pool2d,
    "adaptive_avg_pool2d": _adaptive_avg_pool2d,
    "mean": _mean,
    **dict.fromkeys(("flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze"), _reshape),
    "permute": _transpose,
    **dict.fromkeys(("contiguous", "clone", "detach", "alias"), _identity),
    **dict.fromkeys(("dropout", "feature_dropout"), _dropout),
    **dict.fromkeys(("pad", "constant_pad_nd"), _pad),
    **dict.fromkeys(("to", "_to_copy"), _cast),
}
"""Name of an operator -> its handler. To support one more, add a function and an entry."""

VIEWS = {
    "flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "permute", "contiguous", "detach", "alias",
    "dropout", "feature_dropout", "to",
}  # fmt: skip
"""Operators whose output shares memory with their input, so that both see later writes."""
