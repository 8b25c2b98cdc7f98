"""Random small ONNX models of every class of operators, in families that share weights: ``random_family``.

A model grows step by step: each step picks an operator (``OPERATORS``) and a tensor that it can read. The steps of a
family's models are the same, but for a model that goes its own way from some step on; weights are the same, the same in
part, in another order, or each model's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Shape = tuple[int, ...]
Rng = np.random.Generator

MOST_NUMBERS = 4096
"""Of one tensor: models stay small."""


@dataclass(eq=False)
class Family:
    """Models that belong together."""

    models: list[onnx.ModelProto]
    operators: set[str]
    """Of all of them, by the names in ``OPERATORS``."""


@dataclass(eq=False)
class Sketch:
    """One model while it grows."""

    opset: int
    rows: int
    seed: int
    task: int
    dtype: type = np.float32
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    inputs: list[tuple[str, int, Shape]] = field(default_factory=list)
    live: dict[str, Shape] = field(default_factory=dict)
    """Float tensors that steps may read, with their shapes."""
    others: list[str] = field(default_factory=list)
    """Outputs that are no floats."""
    held: bool = False
    """Whether the next constants are nodes instead of stored tensors."""
    count: int = 0

    def name(self, hint: str) -> str:
        self.count += 1
        return f"{hint}{self.count}"

    def input(self, shape: Shape, kind: int | None = None) -> str:
        name = self.name("in")
        self.inputs.append((name, kind or helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype)), shape))
        if kind is None:
            self.live[name] = shape
        return name

    def weight(self, *shape: int, spread: float = 0.0, positive: bool = False) -> str:
        """A tensor of weights: equal in all models, equal in part, in another order, or this model's own."""
        self.count += 1
        common = np.random.default_rng([self.seed, self.count])
        own = np.random.default_rng([self.seed, self.count, self.task + 1])
        numbers = common.standard_normal(shape)
        how = common.choice(["same", "same", "part", "order", "own"])
        mine = own.standard_normal(shape)
        if how == "own" and self.task:
            numbers = mine
        elif how == "part" and len(shape):
            numbers[shape[0] // 2 :] = mine[shape[0] // 2 :]
        elif how == "order" and len(shape):
            numbers = numbers[own.permutation(shape[0])]
        numbers = numbers * (spread or np.prod(shape[1:], initial=1.0) ** -0.5)
        return self.constant((np.abs(numbers) + 0.5 if positive else numbers).astype(self.dtype))

    def constant(self, array: Any) -> str:
        array = np.asarray(array)
        for name, stored in self.constants.items():
            if stored.dtype == array.dtype and stored.shape == array.shape and (stored == array).all():
                return name
        name = self.name("c")
        if self.held:
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
        else:
            self.constants[name] = array
        return name

    def number(self, value: float) -> str:
        return self.constant(np.array(value, self.dtype))

    def integers(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        names = [self.name("t") for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=self.name(kind.lower()), **attributes))
        return names[0] if outputs == 1 else names

    def done(self, name: str, shape: Sequence[int]) -> bool:
        self.live[name] = tuple(int(size) for size in shape)
        return True

    def pick(self, rng: Rng, fits: Callable[[Shape], bool] = lambda shape: True) -> tuple[str, Shape] | None:
        """A tensor of rows that *fits*, rather one of the last."""
        found = [(name, shape) for name, shape in self.live.items() if len(shape) > 1 and fits(shape)]
        if not found:
            return None
        return found[-1] if rng.random() < 0.7 else found[rng.integers(len(found))]

    def axes(self, kind: str, x: str, axes: Sequence[int], since: int, **attributes: Any) -> str:
        """An operator whose axes have been an input since some operator set."""
        if self.opset >= since:
            return str(self.op(kind, x, self.integers(*axes), **attributes))
        return str(self.op(kind, x, axes=list(axes), **attributes))

    def finish(self, name: str, rng: Rng, dynamic: bool) -> onnx.ModelProto:
        read = {each for node in self.nodes for each in node.input}
        outputs = [each for each in self.live if each not in read and each not in {name for name, *_ in self.inputs}]
        if not outputs:
            outputs = [str(self.op("Identity", self.inputs[0][0]))]
        more = [each for each in self.live if each in read and rng.random() < 0.08]
        given = [*outputs, *(each for each in more if each not in {name for name, *_ in self.inputs})]
        rows: int | str = "rows" if dynamic else self.rows
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        graph = helper.make_graph(
            self.nodes,
            name,
            [helper.make_tensor_value_info(each, kind, [rows, *shape[1:]]) for each, kind, shape in self.inputs],
            [
                *(helper.make_tensor_value_info(each, kind, None) for each in given),
                *(helper.make_tensor_value_info(each, TensorProto.INT64, None) for each in self.others),
            ],
            [numpy_helper.from_array(array, each) for each, array in self.constants.items()],
        )
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8 if self.opset < 20 else 10)


Operator = Callable[[Sketch, Rng], bool]
"""Adds one operator, or says that it cannot."""


def one_of(rng: Rng, *choices: Any) -> Any:
    return choices[rng.integers(len(choices))]


def rank(*ranks: int) -> Callable[[Shape], bool]:
    return lambda shape: len(shape) in ranks


# -- with weights


def conv(s: Sketch, rng: Rng, dimensions: int) -> bool:
    x = s.pick(rng, rank(dimensions + 2))
    if x is None:
        return False
    channels, places = x[1][1], x[1][2:]
    groups = int(one_of(rng, 1, 1, 1, channels, *([2] if channels % 2 == 0 else [])))
    outs = groups * int(rng.integers(1, 4))
    kernel = [int(min(one_of(rng, 1, 2, 3), size)) for size in places]
    attributes: dict[str, Any] = {}
    if rng.random() < 0.6:
        attributes["kernel_shape"] = kernel
    if groups > 1:
        attributes["group"] = groups
    strides = [int(one_of(rng, 1, 1, 2)) for _ in places]
    if rng.random() < 0.5:
        attributes["strides"] = strides
    else:
        strides = [1] * dimensions
    dilations = [1] * dimensions
    if rng.random() < 0.2 and all(2 * (k - 1) + 1 <= size for k, size in zip(kernel, places, strict=True)):
        dilations = attributes["dilations"] = [2] * dimensions
    reach = [d * (k - 1) + 1 for d, k in zip(dilations, kernel, strict=True)]
    how = one_of(rng, "none", "pads", "VALID", *([] if dilations[0] > 1 else ["SAME_UPPER", "SAME_LOWER"]))
    pads = [0] * (2 * dimensions)
    if how == "pads":
        pads = attributes["pads"] = [int(rng.integers(0, 2)) for _ in range(2 * dimensions)]
    elif how != "none":
        attributes["auto_pad"] = how
    after = zip(places, strides, reach, pads[:dimensions], pads[dimensions:], strict=True)
    sizes = [-(-size // st) if how.startswith("SAME") else (size + a + b - r) // st + 1 for size, st, r, a, b in after]
    operands = [s.weight(outs, channels // groups, *kernel)]
    if rng.random() < 0.5:
        operands.append(s.weight(outs, spread=0.5))
    elif rng.random() < 0.2:
        operands.append("")
    return s.done(s.op("Conv", x[0], *operands, **attributes), (x[1][0], outs, *sizes))


def conv_transpose(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4, 5))
    if x is None or np.prod(x[1][2:]) > 64:
        return False
    channels, places = x[1][1], x[1][2:]
    groups = channels if rng.random() < 0.2 else 1
    stride = int(one_of(rng, 1, 2))
    weight = s.weight(channels, 2, *[2] * len(places))
    attributes = {"strides": [stride] * len(places), "group": groups}
    bias = [s.weight(2 * groups)] if rng.random() < 0.5 else []
    made = s.op("ConvTranspose", x[0], weight, *bias, **attributes)
    return s.done(made, (x[1][0], 2 * groups, *(stride * (size - 1) + 2 for size in places)))


def computed_weight(s: Sketch, rng: Rng) -> bool:
    """A convolution whose weight is made of the model's input."""
    x = s.pick(rng, rank(4))
    if x is None or x[1][0] != 1:
        return False
    factor = s.op("ReduceMean", x[0], keepdims=1)
    kernel = s.op("Mul", s.weight(2, x[1][1], 1, 1), factor)
    return s.done(s.op("Conv", x[0], kernel), (x[1][0], 2, *x[1][2:]))


def gemm(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(2))
    if x is None:
        return False
    turned, outs = bool(rng.integers(2)), int(rng.integers(1, 6))
    weight = s.weight(outs, x[1][1]) if turned else s.weight(x[1][1], outs)
    bias = [[], [""], [s.weight(outs)], [s.weight(1)], [s.weight(1, outs)]][rng.integers(5)]
    attributes = {"alpha": 0.5, "beta": 2.0} if rng.random() < 0.3 else {}
    made = s.op("Gemm", x[0], weight, *bias, transB=int(turned), **attributes)
    return s.done(made, (x[1][0], outs))


def gemm_turned(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(2))
    if x is None:
        return False
    made = s.op("Gemm", x[0], s.weight(x[1][0], 3), transA=1)
    return s.done(made, (x[1][1], 3))


def matmul(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, lambda shape: len(shape) >= 2)
    if x is None:
        return False
    outs = int(rng.integers(1, 6))
    left = rng.random() < 0.15
    made = s.op("MatMul", *((s.weight(outs, x[1][-2]), x[0]) if left else (x[0], s.weight(x[1][-1], outs))))
    shape = (*x[1][:-2], outs, x[1][-1]) if left else (*x[1][:-1], outs)
    return s.done(s.op("Add", made, s.weight(shape[-1])) if rng.random() < 0.5 else made, shape)


def einsum(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3))
    if x is None or s.opset < 12:
        return False
    made = s.op("Einsum", x[0], s.weight(x[1][2], 3), equation="bij,jk->bik")
    return s.done(made, (*x[1][:2], 3))


def attention(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3))
    if x is None:
        return False
    width = x[1][2]
    query, key, value = (s.op("MatMul", x[0], s.weight(width, width)) for _ in range(3))
    scores = s.op("Div", s.op("MatMul", query, s.op("Transpose", key, perm=[0, 2, 1])), s.number(width**0.5))
    made = s.op("MatMul", s.op("Softmax", scores, axis=2), value)
    return s.done(s.op("Add", made, x[0]), x[1])


def recurrent(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3))
    if x is None:
        return False
    kind, gates = one_of(rng, ("LSTM", 4), ("GRU", 3), ("RNN", 1))
    both, hidden = int(rng.integers(1, 3)), int(rng.integers(1, 4))
    turned = s.op("Transpose", x[0], perm=[1, 0, 2])
    operands = [s.weight(both, gates * hidden, x[1][2]), s.weight(both, gates * hidden, hidden)]
    if rng.random() < 0.4:
        operands += [s.weight(both, 2 * gates * hidden)]
    elif rng.random() < 0.5:
        operands += ["", "", s.weight(both, x[1][0], hidden)]
    direction = "bidirectional" if both == 2 else "forward"
    names = [s.name("t"), s.name("t")]
    last = rng.random() < 0.5
    shown = ["", names[1]] if last else names
    s.nodes.append(
        helper.make_node(kind, [turned, *operands], shown, name=s.name("rnn"), hidden_size=hidden, direction=direction)
    )
    whole, wanted = (names[1], [1, 0, 2]) if last else (names[0], [2, 0, 1, 3])
    made = s.op("Transpose", whole, perm=wanted)
    return s.done(made, (x[1][0], both, hidden) if last else (x[1][0], x[1][1], both, hidden))


# -- normalisations


def batch_norm(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, lambda shape: len(shape) >= 2)
    if x is None:
        return False
    channels = x[1][1]
    tables = [s.weight(channels) for _ in range(3)]
    return s.done(s.op("BatchNormalization", x[0], *tables, s.weight(channels, positive=True)), x[1])


def layer_norm(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None or s.opset < 17:
        return False
    bias = [s.weight(x[1][-1])] if rng.random() < 0.5 else []
    return s.done(s.op("LayerNormalization", x[0], s.weight(x[1][-1]), *bias, axis=-1), x[1])


def spelled_layer_norm(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    centred = s.op("Sub", x[0], s.axes("ReduceMean", x[0], [-1], 18))
    spread = s.axes("ReduceMean", s.op("Pow", centred, s.number(2)), [-1], 18)
    made = s.op("Div", centred, s.op("Sqrt", s.op("Add", spread, s.number(1e-3))))
    return s.done(s.op("Mul", made, s.weight(x[1][-1])), x[1])


def instance_norm(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4, 5))
    if x is None or np.prod(x[1][2:]) < 2:
        return False
    made = s.op("InstanceNormalization", x[0], s.weight(x[1][1]), s.weight(x[1][1]), epsilon=1e-2)
    return s.done(made, x[1])


def group_norm(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(4))
    if x is None or s.opset < 18 or x[1][1] % 2 or np.prod(x[1][1:]) < 4:
        return False
    width = x[1][1] if s.opset >= 21 else 2
    made = s.op("GroupNormalization", x[0], s.weight(width), s.weight(width), num_groups=2, epsilon=1e-2)
    return s.done(made, x[1])


def other_norm(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4))
    if x is None:
        return False
    if rng.random() < 0.5 and len(x[1]) == 4:
        return s.done(s.op("LRN", x[0], size=3), x[1])
    shifted = s.op("Add", s.op("Abs", x[0]), s.number(0.5))
    return s.done(s.op("LpNormalization", shifted, axis=1, p=2), x[1])


# -- elementwise

_UNARY = {
    "Relu": 0, "Sigmoid": 0, "Tanh": 0, "HardSigmoid": 0, "LeakyRelu": 0, "Elu": 0, "Softplus": 0, "Neg": 0, "Abs": 0,
    "Selu": 0, "Softsign": 0, "ThresholdedRelu": 0, "Erf": 0, "Sin": 0, "Identity": 0, "Dropout": 0, "HardSwish": 14,
    "Mish": 18, "Gelu": 20, "Celu": 12,
}  # fmt: skip


def unary(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    kind = str(rng.choice(list(_UNARY)))
    if x is None or s.opset < _UNARY[kind]:
        return False
    return s.done(s.op(kind, x[0]), x[1])


def spelled_activation(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    value, shape = x
    match one_of(rng, "silu", "gelu", "relu6", "hardswish", "prelu", "sqrt", "exp", "square", "max", "clip", "mish"):
        case "silu":
            made = s.op("Mul", value, s.op("Sigmoid", value))
        case "gelu":
            inner = s.op("Add", s.op("Erf", s.op("Div", value, s.number(2**0.5))), s.number(1))
            made = s.op("Mul", s.op("Mul", value, inner), s.number(0.5))
        case "relu6":
            made = s.op("Clip", value, s.number(0), s.number(6))
        case "hardswish":
            inner = s.op("Clip", s.op("Add", value, s.number(3)), s.number(0), s.number(6))
            made = s.op("Div", s.op("Mul", value, inner), s.number(6))
        case "prelu":
            slope = (shape[1], *[1] * (len(shape) - 2)) if rng.random() < 0.6 else (1,)
            made = s.op("PRelu", value, s.weight(*slope))
        case "sqrt":
            made = s.op("Sqrt", s.op("Add", s.op("Abs", value), s.number(1)))
        case "exp":
            made = s.op("Exp", s.op("Tanh", value))
        case "square":
            made = s.op("Pow", s.op("Tanh", value), s.number(2))
        case "max":
            made = s.op(one_of(rng, "Max", "Min"), value, s.number(0.3))
        case "clip":
            made = s.op("Clip", value, *one_of(rng, ("", s.number(1)), (s.number(-1), ""), (s.number(-1),), ()))
        case _:
            made = s.op("Mul", value, s.op("Tanh", s.op("Softplus", value)))
    return s.done(made, shape)


def with_constant(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    kind = str(one_of(rng, "Add", "Mul", "Sub", "Div"))
    spread = [(), (1,), (x[1][-1],), (1, x[1][1], *[1] * (len(x[1]) - 2)), (1, *x[1][1:]), x[1]][rng.integers(6)]
    other = s.weight(*spread, positive=kind == "Div")
    return s.done(s.op(kind, *((x[0], other) if rng.random() < 0.7 or kind == "Div" else (other, x[0]))), x[1])


def joined(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False

    def spreads(shape: Shape) -> bool:
        return len(shape) == len(x[1]) and all(a == b or 1 in (a, b) for a, b in zip(shape, x[1], strict=True))

    y = s.pick(rng, spreads)
    if y is None:
        return False
    kind = str(one_of(rng, "Add", "Add", "Mul", "Sub", "Sum", "Max", "Mean"))
    shape = np.broadcast_shapes(x[1], y[1])
    return np.prod(shape) <= MOST_NUMBERS and s.done(s.op(kind, x[0], y[0]), shape)


def squeeze_excite(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4, 5))
    if x is None:
        return False
    ones = [1] * (len(x[1]) - 2)
    gate = s.op("Sigmoid", s.op("Conv", s.op("GlobalAveragePool", x[0]), s.weight(x[1][1], x[1][1], *ones)))
    return s.done(s.op("Mul", x[0], gate), x[1])


def compared(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    where = s.op("Greater", x[0], s.number(0))
    return s.done(s.op("Where", where, x[0], s.number(0.1)), x[1])


# -- pools, sizes


def pool(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4, 5))
    if x is None:
        return False
    places = x[1][2:]
    kernel = [int(min(one_of(rng, 1, 2, 3), size)) for size in places]
    strides = [int(one_of(rng, 1, 2)) for _ in places]
    kind = str(one_of(rng, "MaxPool", "AveragePool"))
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    ceil, pads = bool(rng.random() < 0.2), [0] * len(places)
    if rng.random() < 0.3:
        pads = [k // 2 for k in kernel]
        attributes["pads"] = [*pads, *pads]
        if kind == "AveragePool" and rng.random() < 0.5:
            attributes["count_include_pad"] = 1
    if ceil:
        attributes["ceil_mode"] = 1
    if kind == "MaxPool" and rng.random() < 0.2:
        attributes["storage_order"] = 0
    sizes = []
    for size, k, st, p in zip(places, kernel, strides, pads, strict=True):
        span = size + 2 * p - k
        steps = -(-span // st) if ceil else span // st
        sizes.append(steps if ceil and steps * st >= size + p else steps + 1)
    return s.done(s.op(kind, x[0], **attributes), (*x[1][:2], *sizes))


def pool_with_places(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(4))
    if x is None or min(x[1][2:]) < 2:
        return False
    made, places = s.op("MaxPool", x[0], outputs=2, kernel_shape=[2, 2], strides=[1, 1])
    shape = (*x[1][:2], x[1][2] - 1, x[1][3] - 1)
    made = s.op("Add", made, s.op("Cast", places, to=helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype))))
    return s.done(made, shape)


def lp_pool(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(4))
    if x is None or min(x[1][2:]) < 2:
        return False
    return s.done(s.op("LpPool", x[0], kernel_shape=[2, 2], p=2), (*x[1][:2], x[1][2] - 1, x[1][3] - 1))


def global_pool(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4, 5))
    if x is None:
        return False
    kind = str(one_of(rng, "GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool"))
    return s.done(s.op(kind, x[0]), (*x[1][:2], *[1] * (len(x[1]) - 2)))


def resize(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4))
    if x is None or np.prod(x[1]) * 4 > MOST_NUMBERS:
        return False
    scales = [1.0, 1.0, *[2.0] * (len(x[1]) - 2)]
    shape = (*x[1][:2], *(2 * size for size in x[1][2:]))
    mode, turn = one_of(rng, ("nearest", "asymmetric"), ("linear", "half_pixel"))
    by_size = rng.random() < 0.4
    empty = "" if s.opset >= 13 else s.constant(np.zeros(0, np.float32))
    sized = (empty, empty, s.integers(*shape)) if by_size else (empty, s.constant(np.array(scales, np.float32)))
    attributes = {"mode": mode, "coordinate_transformation_mode": turn}
    if mode == "nearest":
        attributes["nearest_mode"] = "floor"
    return s.done(s.op("Resize", x[0], *sized, **attributes), shape)


# -- shapes


def flatten(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(3, 4, 5))
    if x is None:
        return False
    axis = int(one_of(rng, 1, 1, 2, 0, -1))
    shape = (int(np.prod(x[1][:axis])), int(np.prod(x[1][axis:])))
    return s.done(s.op("Flatten", x[0], axis=axis), shape)


def reshape(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    rows, inside = x[1][0], int(np.prod(x[1][1:]))
    halves = (2, inside // 2) if inside % 2 == 0 else (1, inside)
    views = [(inside,), halves, (*halves, 1), (1, *halves), (*x[1][1:], 1), (inside, 1, 1)]
    view = views[rng.integers(len(views))]
    target = [int(one_of(rng, rows, 0, -1)), *view]
    if rng.random() < 0.3:
        target = [rows, *view[:-1], -1]
    if len(view) > 4:
        return False
    return s.done(s.op("Reshape", x[0], s.integers(*target)), (rows, *view))


def computed_reshape(s: Sketch, rng: Rng) -> bool:
    """As exporters spell it: the rows out of the shape, then minus one."""
    x = s.pick(rng)
    if x is None:
        return False
    rows = s.op("Gather", s.op("Shape", x[0]), s.constant(np.array(0, np.int64)), axis=0)
    target = s.op("Concat", s.axes("Unsqueeze", rows, [0], 13), s.integers(-1), axis=0)
    return s.done(s.op("Reshape", x[0], target), (x[1][0], int(np.prod(x[1][1:]))))


def transpose(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(2, 3, 4))
    if x is None:
        return False
    order = [0, *(1 + rng.permutation(len(x[1]) - 1))] if rng.random() < 0.8 else list(rng.permutation(len(x[1])))
    return s.done(s.op("Transpose", x[0], perm=[int(each) for each in order]), [x[1][each] for each in order])


def squeeze(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, lambda shape: len(shape) > 2 and 1 in shape[1:])
    if x is None:
        return False
    axis = 1 + x[1][1:].index(1)
    return s.done(s.axes("Squeeze", x[0], [axis], 13), [size for at, size in enumerate(x[1]) if at != axis])


def unsqueeze(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(2, 3))
    if x is None:
        return False
    axis = int(rng.integers(1, len(x[1]) + 1))
    return s.done(s.axes("Unsqueeze", x[0], [axis], 13), (*x[1][:axis], 1, *x[1][axis:]))


def pad(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    begin = [0, *(int(rng.integers(0, 2)) for _ in x[1][1:])]
    end = [0, *(int(rng.integers(0, 2)) for _ in x[1][1:])]
    if rng.random() < 0.7 and len(begin) > 2:
        begin[1] = end[1] = 0
    pads = s.integers(*begin, *end)
    shape = [a + size + b for a, size, b in zip(begin, x[1], end, strict=True)]
    mode = str(one_of(rng, "constant", "constant", "edge", "reflect"))
    if mode == "reflect" and min(x[1][1:]) < 2:
        return False
    value = [[], [s.number(0)], [s.number(1)], [""]][rng.integers(4)] if mode == "constant" else []
    return s.done(s.op("Pad", x[0], pads, *value, mode=mode), shape)


def sliced(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, lambda shape: len(shape) >= 2 and shape[-1] > 1)
    if x is None:
        return False
    axis = int(rng.integers(1, len(x[1])))
    if x[1][axis] < 2:
        return False
    more = [[s.integers(axis)], [s.integers(axis), s.integers(1)]][rng.integers(2)]
    made = s.op("Slice", x[0], s.integers(1), s.integers(x[1][axis]), *more)
    return s.done(made, (*x[1][:axis], x[1][axis] - 1, *x[1][axis + 1 :]))


def gather(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    axis = int(rng.integers(1, len(x[1])))
    index = rng.integers(0, x[1][axis], size=one_of(rng, (), (2,)))
    made = s.op("Gather", x[0], s.constant(index.astype(np.int64)), axis=axis)
    return s.done(made, (*x[1][:axis], *index.shape, *x[1][axis + 1 :]))


def split(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, lambda shape: any(size > 1 and size % 2 == 0 for size in shape[1:]))
    if x is None:
        return False
    axis = next(at for at, size in enumerate(x[1]) if at and size % 2 == 0)
    half = x[1][axis] // 2
    if s.opset >= 18 and rng.random() < 0.5:
        parts = s.op("Split", x[0], outputs=2, axis=axis, num_outputs=2)
    elif s.opset >= 13:
        parts = s.op("Split", x[0], s.integers(half, half), outputs=2, axis=axis)
    else:
        parts = s.op("Split", x[0], outputs=2, axis=axis, split=[half, half])
    shape = (*x[1][:axis], half, *x[1][axis + 1 :])
    return s.done(parts[0], shape) and s.done(parts[1], shape)


def concat(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    axis = int(one_of(rng, 1, 1, 1, len(x[1]) - 1))
    y = s.pick(rng, lambda shape: shape[:axis] == x[1][:axis] and shape[axis + 1 :] == x[1][axis + 1 :])
    if y is None or len(y[1]) != len(x[1]):
        return False
    if rng.random() < 0.15:
        y = s.weight(*x[1]), x[1]
    shape = (*x[1][:axis], x[1][axis] + y[1][axis], *x[1][axis + 1 :])
    return s.done(s.op("Concat", x[0], y[0], axis=one_of(rng, axis, axis - len(shape))), shape)


def reduce(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    kind = str(one_of(rng, "ReduceMean", "ReduceMean", "ReduceMax", "ReduceSum", "ReduceMin", "ReduceL2"))
    axes = list(range(2, len(x[1]))) if rng.random() < 0.6 and len(x[1]) > 2 else [len(x[1]) - 1]
    keep = int(rng.integers(2))
    if len(x[1]) - len(axes) * (1 - keep) < 2:
        return False
    made = s.axes(kind, x[0], axes, 13 if kind == "ReduceSum" else 18, keepdims=keep)
    shape = [1 if at in axes else size for at, size in enumerate(x[1]) if keep or at not in axes]
    return s.done(made, shape)


def over_rows(s: Sketch, rng: Rng) -> bool:
    """What mixes the rows."""
    x = s.pick(rng)
    if x is None:
        return False
    if rng.random() < 0.5 and s.opset >= 13:
        return s.done(s.op("Softmax", x[0], axis=0), x[1])
    return s.done(s.op("Sub", x[0], s.axes("ReduceMean", x[0], [0], 18, keepdims=1)), x[1])


def expand(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, lambda shape: shape[-1] == 1)
    if x is None:
        return False
    shape = (*x[1][:-1], 3)
    if rng.random() < 0.5:
        return s.done(s.op("Tile", x[0], s.integers(*[1] * (len(shape) - 1), 3)), shape)
    return s.done(s.op("Expand", x[0], s.integers(*shape)), shape)


def shuffled(s: Sketch, rng: Rng) -> bool:
    """Channels in another order, as ShuffleNet has them, or pixels as channels."""
    x = s.pick(rng, lambda shape: len(shape) == 4 and shape[1] % 2 == 0)
    if x is None:
        return False
    rows, channels, high, wide = x[1]
    if rng.random() < 0.3 and high % 2 == 0 and wide % 2 == 0:
        return s.done(s.op("SpaceToDepth", x[0], blocksize=2), (rows, 4 * channels, high // 2, wide // 2))
    if rng.random() < 0.3 and channels % 4 == 0:
        return s.done(s.op("DepthToSpace", x[0], blocksize=2), (rows, channels // 4, 2 * high, 2 * wide))
    apart = s.op("Reshape", x[0], s.integers(rows, 2, channels // 2, high, wide))
    turned = s.op("Transpose", apart, perm=[0, 2, 1, 3, 4])
    return s.done(s.op("Reshape", turned, s.integers(rows, channels, high, wide)), x[1])


def softmax(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    kind = str(one_of(rng, "Softmax", "LogSoftmax"))
    return s.done(s.op(kind, x[0], axis=int(one_of(rng, 1, -1)) if s.opset >= 13 else 1), x[1])


def ranked(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    match one_of(rng, "topk", "argmax", "cumsum", "trilu", "scatter"):
        case "topk":
            made, _ = s.op("TopK", x[0], s.integers(1), outputs=2, axis=-1)
            return s.done(made, (*x[1][:-1], 1))
        case "argmax":
            made = s.op("ArgMax", x[0], axis=-1, keepdims=1)
            if rng.random() < 0.3:
                s.others.append(s.op("Identity", made))
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype))
            return s.done(s.op("Cast", made, to=kind), (*x[1][:-1], 1))
        case "cumsum":
            return s.done(s.op("CumSum", x[0], s.constant(np.array(1, np.int64))), x[1])
        case "trilu":
            return s.opset >= 14 and s.done(s.op("Trilu", x[0]), x[1])
        case _:
            index = np.zeros((*x[1][:-1], 1), np.int64)
            made = s.op("ScatterElements", x[0], s.constant(index), s.weight(*index.shape), axis=-1)
            return s.done(made, x[1])


# -- quantised, other types, control flow


def quantised(s: Sketch, rng: Rng) -> bool:
    """Quantised and back."""
    x = s.pick(rng)
    if x is None or s.dtype is not np.float32:
        return False
    zero = s.constant(np.array(*one_of(rng, (128, np.uint8), (0, np.int8))))
    scale = s.number(0.05)
    made = s.op("QuantizeLinear", x[0], scale, zero)
    return s.done(s.op("DequantizeLinear", made, scale, zero), x[1])


def quantised_weight(s: Sketch, rng: Rng) -> bool:
    """A convolution whose weight is stored in eight bits, for all or each of its channels."""
    x = s.pick(rng, rank(4))
    if x is None or s.dtype is not np.float32:
        return False
    outs = 3
    stored = s.constant(rng.integers(-127, 128, (outs, x[1][1], 1, 1)).astype(np.int8))
    if s.opset >= 13 and rng.random() < 0.5:
        weight = s.op("DequantizeLinear", stored, s.weight(outs, positive=True), axis=0)
    else:
        weight = s.op("DequantizeLinear", stored, s.number(0.01), s.constant(np.int8(0)))
    return s.done(s.op("Conv", x[0], weight), (x[1][0], outs, *x[1][2:]))


def integer_product(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(2, 4))
    if x is None or s.dtype is not np.float32:
        return False
    made, scale, zero = s.op("DynamicQuantizeLinear", x[0], outputs=3)
    wide = x[1][1]
    if len(x[1]) == 2:
        weight = s.constant(rng.integers(-9, 10, (wide, 3)).astype(np.int8))
        product = s.op("MatMulInteger", made, weight, zero)
    else:
        weight = s.constant(rng.integers(-9, 10, (3, wide, 1, 1)).astype(np.uint8))
        product = s.op("ConvInteger", made, weight, zero)
    floats = s.op("Cast", product, to=TensorProto.FLOAT)
    return s.done(s.op("Mul", floats, scale), (x[1][0], 3, *x[1][2:]))


def fully_quantised(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng, rank(4))
    if x is None or s.dtype is not np.float32:
        return False
    zero, scale = s.constant(np.uint8(128)), s.number(0.05)
    made = s.op("QuantizeLinear", x[0], scale, zero)
    weight = s.constant(rng.integers(0, 255, (2, x[1][1], 1, 1)).astype(np.uint8))
    bias = [s.constant(np.array([3, -4], np.int32))] if rng.random() < 0.5 else []
    product = s.op("QLinearConv", made, scale, zero, weight, s.number(0.01), zero, s.number(0.1), zero, *bias)
    return s.done(s.op("DequantizeLinear", product, s.number(0.1), zero), (x[1][0], 2, *x[1][2:]))


def cast(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    to = int(one_of(rng, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT32, TensorProto.FLOAT))
    made = s.op("Cast", x[0], to=to)
    return s.done(s.op("Cast", made, to=helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype))), x[1])


def embedding(s: Sketch, rng: Rng) -> bool:
    rows = s.input((s.rows, 3), TensorProto.INT64)
    return s.done(s.op("Gather", s.weight(5, 4), rows, axis=0), (s.rows, 3, 4))


def random_numbers(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    return s.done(s.op("Add", x[0], s.op("RandomNormalLike", x[0])), x[1])


def _branch(s: Sketch, name: str, body: Sequence[onnx.NodeProto], out: str, inputs: Sequence[Any] = ()) -> Any:
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype))
    return helper.make_graph(list(body), name, list(inputs), [helper.make_tensor_value_info(out, kind, None)])


def branch(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    known = rng.random() < 0.3
    total = s.op("ReduceMax", x[0], keepdims=0)
    condition = s.constant(np.array(True)) if known else s.op("Greater", total, s.number(0))
    ways = []
    for kind in ("Relu", "Neg"):
        out = s.name("b")
        ways.append(_branch(s, kind, [helper.make_node(kind, [x[0]], [out])], out))
    return s.done(s.op("If", condition, then_branch=ways[0], else_branch=ways[1]), x[1])


def loop(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None:
        return False
    turn, go, old, new, on = (s.name("b") for _ in range(5))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(s.dtype))
    body = helper.make_graph(
        [helper.make_node("Tanh", [old], [new]), helper.make_node("Identity", [go], [on])],
        "body",
        [
            helper.make_tensor_value_info(turn, TensorProto.INT64, []),
            helper.make_tensor_value_info(go, TensorProto.BOOL, []),
            helper.make_tensor_value_info(old, kind, None),
        ],
        [helper.make_tensor_value_info(on, TensorProto.BOOL, []), helper.make_tensor_value_info(new, kind, None)],
    )
    return s.done(s.op("Loop", s.constant(np.array(2, np.int64)), "", x[0], body=body), x[1])


def foreign(s: Sketch, rng: Rng) -> bool:
    x = s.pick(rng)
    if x is None or s.dtype is not np.float32:
        return False
    name = s.name("t")
    s.nodes.append(helper.make_node("FastGelu", [x[0]], [name], domain="com.microsoft", name=s.name("fast")))
    return s.done(name, x[1])


OPERATORS: dict[str, tuple[Operator, float]] = {
    "conv1d": (lambda s, rng: conv(s, rng, 1), 3),
    "conv2d": (lambda s, rng: conv(s, rng, 2), 6),
    "conv3d": (lambda s, rng: conv(s, rng, 3), 3),
    "conv transpose": (conv_transpose, 1),
    "conv of a computed weight": (computed_weight, 0.5),
    "gemm": (gemm, 3),
    "gemm of turned rows": (gemm_turned, 0.3),
    "matmul": (matmul, 2),
    "einsum": (einsum, 0.5),
    "attention": (attention, 1),
    "recurrent": (recurrent, 1),
    "batch norm": (batch_norm, 2),
    "layer norm": (layer_norm, 1),
    "layer norm in words": (spelled_layer_norm, 0.5),
    "instance norm": (instance_norm, 0.7),
    "group norm": (group_norm, 0.7),
    "other norm": (other_norm, 0.5),
    "unary": (unary, 4),
    "activation in words": (spelled_activation, 3),
    "with a constant": (with_constant, 2),
    "joined": (joined, 2),
    "squeeze and excite": (squeeze_excite, 1),
    "where": (compared, 0.5),
    "pool": (pool, 2),
    "pool with places": (pool_with_places, 0.4),
    "lp pool": (lp_pool, 0.3),
    "global pool": (global_pool, 1),
    "resize": (resize, 1),
    "flatten": (flatten, 2),
    "reshape": (reshape, 1.5),
    "reshape in words": (computed_reshape, 1),
    "transpose": (transpose, 1),
    "squeeze": (squeeze, 1),
    "unsqueeze": (unsqueeze, 1),
    "pad": (pad, 1),
    "slice": (sliced, 1),
    "gather": (gather, 0.7),
    "split": (split, 1),
    "concat": (concat, 1.5),
    "reduce": (reduce, 1),
    "over rows": (over_rows, 0.2),
    "expand": (expand, 0.5),
    "shuffle": (shuffled, 0.7),
    "softmax": (softmax, 1),
    "ranked": (ranked, 0.7),
    "quantised": (quantised, 1),
    "quantised weight": (quantised_weight, 1),
    "integer product": (integer_product, 0.7),
    "quantised throughout": (fully_quantised, 0.5),
    "cast": (cast, 0.5),
    "embedding": (embedding, 0.15),
    "random": (random_numbers, 0.1),
    "if": (branch, 0.2),
    "loop": (loop, 0.2),
    "foreign": (foreign, 0.2),
}
"""Every operator with how often it is tried."""

JUMPY = {"quantised", "integer product", "quantised throughout", "cast", "ranked", "where", "pool with places"}
"""Operators of which a last bit may change much of the answer."""


def random_family(seed: int, *, tasks: int | None = None, steps: int | None = None) -> Family:
    """Models that share some weights, the same ones for the same *seed*."""
    rng = np.random.default_rng([seed, 99])
    count = tasks or int(one_of(rng, 1, 2, 2, 3))
    length = steps or int(rng.integers(1, 9))
    opset = int(rng.integers(11, 22))
    dynamic, rows = bool(rng.random() < 0.4), int(one_of(rng, 1, 1, 2, 3))
    dtype = one_of(rng, *[np.float32] * 14, np.float64, np.float16)
    spread: list[Shape] = [(4,), (6,), (3, 4), (2, 8), (4, 5, 6), (3, 6, 6), (2, 4, 4), (8, 8, 8)]
    if rng.random() < 0.03:
        spread = [(2, 3, 4, 3)]
    shapes = [spread[rng.integers(len(spread))] for _ in range(int(one_of(rng, 1, 1, 1, 2)))]
    stem = bool(rng.random() < 0.85)
    straying = int(rng.integers(length)) if rng.random() < 0.25 else length
    models: list[onnx.ModelProto] = []
    used: set[str] = set()
    for task in range(count):
        stray = straying if task else length
        sketch = Sketch(opset, 1 if dynamic else rows, seed, task, dtype)
        for shape in shapes:
            sketch.input((sketch.rows, *shape))
        if stem:
            _stem(sketch, np.random.default_rng([seed, 97]))
        names = [_grow(sketch, [seed, step, 7 * task * (step >= stray)]) for step in range(length)]
        models.append(sketch.finish(f"net{task}", np.random.default_rng([seed, 98]), dynamic))
        used.update(names)
    return Family(models, used)


def _stem(sketch: Sketch, rng: Rng) -> None:
    """A convolution or a product, so that there is something to stitch."""
    any(operator(sketch, rng) for operator in (lambda s, rng: conv(s, rng, 2), gemm, lambda s, rng: conv(s, rng, 1)))


def _grow(sketch: Sketch, seed: list[int]) -> str:
    """Add one operator; its name is returned."""
    rng = np.random.default_rng(seed)
    names, weights = list(OPERATORS), np.array([weight for _, weight in OPERATORS.values()])
    while True:
        name = str(rng.choice(names, p=weights / weights.sum()))
        sketch.held = bool(rng.random() < 0.2)
        if OPERATORS[name][0](sketch, rng):
            return name
