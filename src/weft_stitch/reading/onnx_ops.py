"""What each ONNX operator is in the words of a ``NetDraft``: ``HANDLERS``, from operator to function."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from weft.base.errors import ModelError
from weft_stitch.net import Array, Value, Window
from weft_stitch.reading.draft import Foreign, Picture
from weft_stitch.reading.onnx_folding import float32
from weft_stitch.reading.onnx_operands import Handler, Operands
from weft_stitch.reading.onnx_shapes import SHAPE_HANDLERS
from weft_stitch.reading.padding import Pads, same_pads


def _conv(o: Operands) -> Picture:
    x, weight = o.picture(), o.weight(1)
    if weight.ndim != 4:
        raise Foreign(f"it is a {weight.ndim - 2}d convolution; those over pictures (2d) are understood")
    kernel = (weight.shape[2], weight.shape[3])
    window = _window(o, kernel, o.draft.size(x))
    bias = o.optional_weight(2)
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ModelError(f"it has {bias.size} biases for {weight.shape[0]} channels")
    return o.draft.convolve(o.name, x, weight, bias, window, o.node.integer("group", 1))


def _batch_norm(o: Operands) -> Picture:
    if o.node.integer("training_mode", 0) or (o.opset < 7 and not o.node.integer("is_test", 0)):
        raise Foreign("it is in training mode; export the model for inference")
    scale, bias, mean, variance = (o.weight(index) for index in (1, 2, 3, 4))
    return o.draft.batch_norm(o.name, o.picture(), scale, bias, mean, variance, o.node.number("epsilon", 1e-5))


def _gemm(o: Operands) -> Picture:
    if o.node.integer("transA", 0):
        raise Foreign("it transposes its rows (transA)")
    matrix = o.weight(1)
    if matrix.ndim != 2:
        raise ModelError(f"its weight has {matrix.ndim} dimensions, not 2")
    weight = matrix if o.node.integer("transB", 0) else matrix.T
    bias = o.optional_weight(2)
    weight = _times(weight, o.node.number("alpha", 1.0))
    if bias is not None:
        bias = _bias(_times(bias, o.node.number("beta", 1.0)), weight.shape[0])
    return o.draft.linear(o.name, o.picture(), weight, bias)


def _matmul(o: Operands) -> Picture:
    matrix = o.weight(1)
    if matrix.ndim != 2:
        raise Foreign(f"its second factor has {matrix.ndim} dimensions; two are understood")
    return o.draft.linear(o.name, o.picture(), matrix.T, None)


def _times(array: Array, factor: float) -> Array:
    if not math.isfinite(factor):
        raise ModelError(f"its factor is {factor}")
    return array if factor == 1 else array * np.float32(factor)


def _bias(bias: Array, outs: int) -> Array:
    if bias.size != 1 and (bias.size != outs or bias.shape[-1] != outs):
        raise Foreign(f"its term of {bias.shape} is not one number per output")
    return np.broadcast_to(bias.reshape(-1), (outs,)).copy()


def _sum_or_product(o: Operands, kind: str) -> Picture:
    if o.is_constant(0) or o.is_constant(1):
        value, constant = (1, 0) if o.is_constant(0) else (0, 1)
        x = o.picture(value)
        numbers = o.draft.per_channel(x, o.weight(constant))
        return o.draft.affine(o.name, x, *((None, numbers) if kind == "add" else (numbers, None)))
    return o.draft.combine(o.name, kind, o.picture(0), o.picture(1))


def _sub(o: Operands) -> Picture:
    if o.is_constant(1):
        return o.draft.affine(o.name, o.picture(0), None, -o.draft.per_channel(o.picture(0), o.weight(1)))
    if o.is_constant(0):
        x = o.picture(1)
        minus = -np.ones(o.draft.size(x).channels, np.float32)
        return o.draft.affine(o.name, x, minus, o.draft.per_channel(x, o.weight(0)))
    return o.draft.subtract(o.name, o.picture(0), o.picture(1))


def _div(o: Operands) -> Picture:
    divisor = o.draft.per_channel(o.picture(0), o.weight(1))
    if not divisor.all():
        raise ModelError(f"it divides by zero ({o.node.inputs[1]})")
    factor = (1 / divisor.astype(np.float64)).astype(np.float32)
    return o.draft.affine(o.name, o.picture(0), factor, None)


def _pow(o: Operands) -> Picture:
    exponent = o.weight(1)
    if exponent.size != 1 or float(exponent.reshape(())) not in (1.0, 2.0):
        raise Foreign("its exponent is not 2")
    x = o.picture()
    return x if float(exponent.reshape(())) == 1 else o.draft.combine(o.name, "mul", x, x)


def _sum(o: Operands) -> Picture:
    total = o.picture(0)
    for index in range(1, len(o.node.inputs)):
        total = o.draft.combine(o.name, "add", total, o.picture(index))
    return total


def _unary(function: str, **defaults: float) -> Handler:
    """An elementwise function whose attributes are numbers."""

    def handler(o: Operands) -> Picture:
        settings = {name: o.node.number(name, default) for name, default in defaults.items()}
        if not all(map(math.isfinite, settings.values())):
            raise ModelError(f"its settings are {settings}")
        return o.draft.unary(o.name, o.picture(), function, **settings)

    return handler


def _gelu(o: Operands) -> Picture:
    tanh = o.node.text("approximate", "none") == "tanh"
    return o.draft.unary(o.name, o.picture(), "Gelu", tanh=float(tanh))


def _swish(o: Operands) -> Picture:
    if o.node.number("alpha", 1.0) != 1:
        raise Foreign("its alpha is not 1")
    return o.draft.unary(o.name, o.picture(), "Silu")


def _prelu(o: Operands) -> Picture:
    return o.draft.prelu(o.name, o.picture(), o.draft.per_channel(o.picture(), o.weight(1)))


_LARGEST = float(np.finfo(np.float32).max)


def _clip(o: Operands) -> Picture:
    if o.opset < 11:
        bounds = {"min": o.node.number("min", -_LARGEST), "max": o.node.number("max", _LARGEST)}
    else:
        named = (("min", 1), ("max", 2))
        bounds = {name: _bound(o, index) for name, index in named if o.given(index)}
    return _clipped(o, bounds)


def _bounded(o: Operands, side: str) -> Picture:
    """The smaller (*side* is "max") or the larger of a value and a number."""
    if len(o.node.inputs) != 2:
        raise Foreign(f"it compares {len(o.node.inputs)} values; a value and a number are understood")
    return _clipped(o, {side: _bound(o, 1)})


def _bound(o: Operands, index: int) -> float:
    array = float32(o.array(index), o.node.inputs[index])
    if array.size != 1 or np.isnan(array).any():
        raise Foreign("its bound is not one number")
    return float(array.reshape(()))


def _clipped(o: Operands, bounds: dict[str, float]) -> Picture:
    kept = {name: bound for name, bound in bounds.items() if abs(bound) < _LARGEST}
    if kept == {"min": 0.0}:
        return o.draft.unary(o.name, o.picture(), "Relu")
    return o.draft.unary(o.name, o.picture(), "Clip", **kept) if kept else o.picture()


def _pool(kind: str) -> Handler:
    def handler(o: Operands) -> Picture:
        if any(o.node.outputs[1:]):
            raise Foreign("it also gives out where the largest numbers are")
        x = o.picture()
        kernel = o.node.integers("kernel_shape", ())
        if len(kernel) != 2:
            raise Foreign(f"its window has {len(kernel)} dimensions; 2 are understood")
        window = _window(o, o.node.pair("kernel_shape", 1), o.draft.size(x))
        if any(pad >= size for pad, size in zip(window.pads, window.kernel * 2, strict=True)):
            raise ModelError(f"its padding {list(window.pads)} is not smaller than its window {list(window.kernel)}")
        counted = bool(o.node.integer("count_include_pad", 0))
        return o.draft.pool(o.name, x, kind, window, ceil=bool(o.node.integer("ceil_mode", 0)), count_pads=counted)

    return handler


def _window(o: Operands, kernel: tuple[int, int], size: Value) -> Window:
    """The window by the attributes that convolutions and pools have in common."""
    strides, dilations = o.node.pair("strides", 1), o.node.pair("dilations", 1)
    pads = o.node.integers("pads", (0, 0, 0, 0))
    if len(pads) != 4 or min(pads) < 0:
        raise ModelError(f"its pads are {list(pads)}, not four numbers from 0 on")
    four: Pads = (pads[0], pads[1], pads[2], pads[3])
    auto = o.node.text("auto_pad", "NOTSET")
    if auto in ("SAME_UPPER", "SAME_LOWER"):
        four = same_pads(kernel, strides, dilations, size, upper=auto == "SAME_UPPER")
    elif auto == "VALID":
        four = (0, 0, 0, 0)
    elif auto not in ("NOTSET", ""):
        raise ModelError(f"its auto_pad is {auto!r}")
    return Window(kernel, strides, four, dilations)


_PLAIN = ("Relu", "Sigmoid", "Tanh", "HardSwish", "Softplus", "Exp", "Neg", "Abs", "Sqrt")
"""Functions without settings."""

HANDLERS: Mapping[str, Handler] = {
    **SHAPE_HANDLERS,
    "Conv": _conv,
    "BatchNormalization": _batch_norm,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "Add": lambda o: _sum_or_product(o, "add"),
    "Mul": lambda o: _sum_or_product(o, "mul"),
    "Sub": _sub,
    "Div": _div,
    "Pow": _pow,
    "Sum": _sum,
    **{function: _unary(function) for function in _PLAIN},
    "HardSigmoid": _unary("HardSigmoid", alpha=0.2, beta=0.5),
    "LeakyRelu": _unary("LeakyRelu", alpha=0.01),
    "Elu": _unary("Elu", alpha=1.0),
    "Gelu": _gelu,
    "Swish": _swish,
    "PRelu": _prelu,
    "Clip": _clip,
    "Min": lambda o: _bounded(o, "max"),
    "Max": lambda o: _bounded(o, "min"),
    "MaxPool": _pool("max_pool"),
    "AveragePool": _pool("avg_pool"),
    "GlobalAveragePool": lambda o: o.draft.global_pool(o.name, o.picture(), keep=True),
    "GlobalMaxPool": lambda o: o.draft.global_max(o.name, o.picture(), keep=True),
}
"""To add an operator, write its function and a line here."""
