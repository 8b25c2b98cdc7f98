"""Small weight-shared networks, and a plain numpy run of a net to compare everything with."""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from weft_stitch.making.generator import Generated, generate
from weft_stitch.net import Net, Op, Window

TINY = ("tinynet", "tiny-sigmoid", "tiny-vgg", "tiny-dense", "tiny-mobile")
"""Between them they have every kind of operation but islands."""


def tiny(architecture: str = "tinynet", tasks: int = 3, **settings) -> Generated:
    """Weight-shared models of a few thousand weights, with unequal class counts, in milliseconds."""
    settings = {"pruning": 0.4, "sharing": 0.7, "classes": [3 + task % 3 for task in range(tasks)], **settings}
    return generate(architecture, tasks, **settings)


def images(nets: tuple[Net, ...], seed: int = 1) -> list[np.ndarray]:
    """For each net a batch of pictures."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((net.batch, *net.inputs[0].shape), np.float32) for net in nets]


def run(net: Net, *pictures: np.ndarray) -> list[np.ndarray]:
    """What the net answers, in float64 and by the plainest means."""
    values = {port.value: _as_picture(given) for port, given in zip(net.inputs, pictures, strict=True)}
    for op in net.ops:
        values[op.output] = _RUN[op.kind](op, *(values[each] for each in op.inputs))
        size = net.values[op.output]
        assert values[op.output].shape[1:] == (size.channels, size.height, size.width), op.name
    return [values[port.value].reshape(-1, *port.shape) for port in net.outputs]


def macs(net: Net) -> int:
    """Multiplications for one picture."""
    sizes = [(op.weight, net.values[op.output]) for op in net.ops if op.kind == "conv"]
    return sum(weight.size * size.height * size.width for weight, size in sizes)


def _as_picture(given):
    return np.asarray(given, np.float64).reshape(*given.shape, *[1] * (4 - given.ndim))


def _windows(window: Window, value, filling):
    """[rows, channels, out height, out width, kernel height, kernel width]."""
    top, left, bottom, right = window.pads
    padded = np.pad(value, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=filling)
    (tall, wide), (down, across), (row, column) = window.kernel, window.dilations, window.strides
    found = sliding_window_view(padded, (down * (tall - 1) + 1, across * (wide - 1) + 1), axis=(2, 3))
    return found[:, :, ::row, ::column, ::down, ::across]


def _conv(op: Op, value):
    patches = _windows(op.window, value, 0.0)
    parts = np.split(patches, op.groups, axis=1)
    weights = np.split(op.weight.astype(np.float64), op.groups, axis=0)
    each = [np.tensordot(part, weight, ((1, 4, 5), (1, 2, 3))) for part, weight in zip(parts, weights, strict=True)]
    return np.moveaxis(np.concatenate(each, axis=-1), -1, 1)


def _affine(op: Op, value):
    value = value if op.scale is None else value * op.scale[:, None, None]
    return value if op.shift is None else value + op.shift[:, None, None]


def _avg_pool(op: Op, value):
    ones = _windows(op.window, np.ones_like(value), float(op.settings.get("count_include_pad", 0)))
    return _windows(op.window, value, 0.0).sum((4, 5)) / ones.sum((4, 5))


def _unary(op: Op, value):
    function = {
        "Relu": lambda x: np.maximum(x, 0),
        "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
        "Tanh": np.tanh,
        "Silu": lambda x: x / (1 + np.exp(-x)),
        "HardSigmoid": lambda x: np.clip(op.settings["alpha"] * x + op.settings["beta"], 0, 1),
        "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1),
        "LeakyRelu": lambda x: np.where(x < 0, op.settings["alpha"] * x, x),
        "Elu": lambda x: np.where(x < 0, op.settings["alpha"] * np.expm1(x), x),
        "Clip": lambda x: np.clip(x, op.settings.get("min", -math.inf), op.settings.get("max", math.inf)),
        "Softplus": lambda x: np.log1p(np.exp(x)),
        "Gelu": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
        "Exp": np.exp,
        "Neg": np.negative,
        "Abs": np.abs,
        "Sqrt": np.sqrt,
    }[op.function]
    return function(value)


_RUN = {
    "conv": _conv,
    "affine": _affine,
    "unary": _unary,
    "add": lambda _, left, right: left + right,
    "mul": lambda _, left, right: left * right,
    "concat": lambda _, *parts: np.concatenate(parts, axis=1),
    "max_pool": lambda op, value: _windows(op.window, value, -np.inf).max((4, 5)),
    "avg_pool": _avg_pool,
    "global_pool": lambda _, value: value.mean((2, 3), keepdims=True),
}
