"""Graphs as exporters of the last eight years wrote them, by hand: each idiom at every operator set it was written at.

What the exporters write is known from their sources: torch.onnx (symbolic_opset9 to 17), torch's dynamo exporter
(torchlib), tf2onnx, Paddle2ONNX, keras2onnx and skl2onnx. Sizes that a query may change are symbols, as there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

F32, I64, I32, BOOL, STRING = (
    TensorProto.FLOAT, TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL, TensorProto.STRING
)  # fmt: skip
LARGEST = 2**63 - 1

rng = np.random.default_rng(11)


class Case(NamedTuple):
    """A model, and the shapes its inputs have in the test."""

    model: onnx.ModelProto
    shapes: dict[str, tuple[int, ...]]


class Idiom(NamedTuple):
    exporter: str
    build: Callable[[int], Case]
    opsets: range

    @property
    def name(self) -> str:
        return f"{self.exporter}-{self.build.__name__}"


IDIOMS: list[Idiom] = []


def idiom(exporter: str, first: int, last: int) -> Callable[[Callable[[int], Case]], Callable[[int], Case]]:
    def keep(build: Callable[[int], Case]) -> Callable[[int], Case]:
        IDIOMS.append(Idiom(exporter, build, range(first, last + 1)))
        return build

    return keep


@dataclass
class Sketch:
    """A graph in the making; operators take the form of its operator set."""

    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[TensorProto] = field(default_factory=list)
    names: int = 0

    def name(self) -> str:
        self.names += 1
        return f"t{self.names}"

    def op(self, kind: str, *inputs: str, domain: str = "", **attributes: object) -> str:
        return self.ops(kind, *inputs, outputs=1, domain=domain, **attributes)[0]

    def ops(self, kind: str, *inputs: str, outputs: int, domain: str = "", **attributes: object) -> list[str]:
        made = [self.name() for _ in range(outputs)]
        self.nodes.append(helper.make_node(kind, inputs, made, domain=domain, **attributes))
        return made

    def constant(self, value: object, dtype: type = np.int64) -> str:
        """A Constant node, as the torch exporters write it."""
        return self.op("Constant", value=numpy_helper.from_array(np.array(value, dtype=dtype)))

    def initial(self, value: object, dtype: type = np.int64) -> str:
        """An initializer, as the others write it."""
        name = self.name()
        self.constants.append(numpy_helper.from_array(np.array(value, dtype=dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.initial(rng.normal(size=shape) * 0.1, np.float32)

    def unsqueeze(self, x: str, *axes: int) -> str:
        if self.opset < 13:
            return self.op("Unsqueeze", x, axes=list(axes))
        return self.op("Unsqueeze", x, self.constant(axes))

    def squeeze(self, x: str, *axes: int) -> str:
        if self.opset < 13:
            return self.op("Squeeze", x, axes=list(axes))
        return self.op("Squeeze", x, self.constant(axes))

    def slice(self, x: str, start: int, end: int, axis: int = 0, step: int = 1) -> str:
        if self.opset < 10:
            return self.op("Slice", x, starts=[start], ends=[end], axes=[axis])
        parts = [self.constant([each]) for each in (start, end, axis, step)]
        return self.op("Slice", x, *parts[: 3 if step == 1 else 4])

    def reduce(self, kind: str, x: str, *axes: int, keepdims: int = 1) -> str:
        by_input = self.opset >= (13 if kind == "ReduceSum" else 18)
        if by_input:
            return self.op(kind, x, self.constant(axes), keepdims=keepdims)
        return self.op(kind, x, axes=list(axes), keepdims=keepdims)

    def split(self, x: str, sizes: Sequence[int], axis: int) -> list[str]:
        if self.opset < 13:
            return self.ops("Split", x, outputs=len(sizes), axis=axis, split=list(sizes))
        return self.ops("Split", x, self.constant(sizes), outputs=len(sizes), axis=axis)

    def clip(self, x: str, low: float, high: float) -> str:
        if self.opset < 11:
            return self.op("Clip", x, min=low, max=high)
        return self.op("Clip", x, self.constant(low, np.float32), self.constant(high, np.float32))

    def size(self, x: str, axis: int) -> str:
        """x.size(axis), as torch traces it."""
        return self.op("Gather", self.op("Shape", x), self.constant(axis), axis=0)

    def vector(self, *sizes: str | int) -> str:
        """Sizes put together, numbers and tensors alike, as torch's view takes them."""
        parts = [self.constant([each]) if isinstance(each, int) else self.unsqueeze(each, 0) for each in sizes]
        return self.op("Concat", *parts, axis=0)

    def view(self, x: str, *sizes: str | int) -> str:
        return self.op("Reshape", x, self.vector(*sizes))

    def cast(self, x: str, to: int) -> str:
        return self.op("Cast", x, to=to)

    def graph(self, name: str, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]):
        return helper.make_graph(self.nodes, name, inputs, outputs, self.constants)

    def case(self, shapes: dict[str, tuple[int, ...]], *outputs: str, fixed: bool = False, **kinds: int) -> Case:
        """The model, with every size of its inputs a symbol unless *fixed*, and what is known of it."""
        inputs = [
            helper.make_tensor_value_info(
                name, kinds.get(name, F32), shape if fixed else [f"{name}_{axis}" for axis in range(len(shape))]
            )
            for name, shape in shapes.items()
        ]
        outs = [helper.make_empty_tensor_value_info(name) for name in outputs]
        return Case(self.model(inputs, outs), shapes)

    def model(self, inputs, outputs, functions=(), domains=()) -> onnx.ModelProto:
        opsets = [helper.make_opsetid("", self.opset), *(helper.make_opsetid(*each) for each in domains)]
        return helper.make_model(
            self.graph("net", inputs, outputs), opset_imports=opsets, ir_version=9, functions=list(functions)
        )


def info(name: str, kind: int, shape: Sequence[int | str | None] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


# torch.onnx.export by tracing


@idiom("torch", 9, 17)
def attention(opset: int) -> Case:
    """Queries, keys and values split into heads by x.view(x.size(0), x.size(1), heads, -1)."""
    s, heads = Sketch(opset), {}
    for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
        mapped = s.op("MatMul", "x", s.weight(32, 32))
        viewed = s.view(mapped, s.size(mapped, 0), s.size(mapped, 1), 4, 8)
        heads[part] = s.op("Transpose", viewed, perm=perm)
    scores = s.op("Div", s.op("MatMul", heads["q"], heads["k"]), s.constant(8**0.5, np.float32))
    context = s.op("MatMul", s.op("Softmax", scores, axis=3), heads["v"])
    back = s.op("Transpose", context, perm=[0, 2, 1, 3])
    joined = s.view(back, s.size(back, 0), s.size(back, 1), 32)
    return s.case({"x": (2, 10, 32)}, joined)


@idiom("torch", 9, 17)
def flatten(opset: int) -> Case:
    s = Sketch(opset)
    pooled = s.op("MaxPool", s.op("Relu", "x"), kernel_shape=[2, 2], strides=[2, 2])
    flat = s.view(pooled, s.size(pooled, 0), -1)
    whole = s.op("Flatten", s.op("GlobalAveragePool", "x"), axis=1)
    both = s.op("Concat", flat, whole, axis=1)
    return s.case({"x": (3, 4, 6, 8)}, s.op("Gemm", both, s.weight(5, 52), s.weight(5), transB=1))


@idiom("torch", 9, 17)
def lstm_with_zero_state(opset: int) -> Case:
    """nn.LSTM without an initial state: zeros of a shape put together from the batch."""
    s, hidden = Sketch(opset), 6
    steps = s.op("Transpose", "x", perm=[1, 0, 2])
    shape = s.vector(2, s.size("x", 0), hidden)
    zeros = s.op("ConstantOfShape", shape, value=helper.make_tensor("v", F32, [1], [0.0]))
    cell = s.op("Expand", s.constant(np.zeros((2, 1, hidden)), np.float32), s.vector(2, s.size("x", 0), hidden))
    weights = [s.weight(2, 4 * hidden, 5), s.weight(2, 4 * hidden, hidden), s.weight(2, 8 * hidden)]
    y, h, c = s.ops("LSTM", steps, *weights, "", zeros, cell, outputs=3, hidden_size=hidden, direction="bidirectional")
    turned = s.op("Transpose", y, perm=[0, 2, 1, 3])
    joined = s.op("Reshape", turned, s.constant([0, 0, -1]))
    last = s.op("Gather", s.op("Transpose", joined, perm=[1, 0, 2]), s.constant(-1), axis=1)
    return s.case({"x": (3, 7, 5)}, s.op("Gemm", last, s.weight(4, 12), s.weight(4), transB=1), h, c)


@idiom("torch", 9, 17)
def gru_of_one_direction(opset: int) -> Case:
    s, hidden = Sketch(opset), 6
    shape = s.vector(1, s.size("x", 1), hidden)
    zeros = s.op("ConstantOfShape", shape, value=helper.make_tensor("v", F32, [1], [0.0]))
    weights = [s.weight(1, 3 * hidden, 5), s.weight(1, 3 * hidden, hidden), s.weight(1, 6 * hidden)]
    y, h = s.ops("GRU", "x", *weights, "", zeros, outputs=2, hidden_size=hidden, linear_before_reset=1)
    return s.case({"x": (7, 3, 5)}, s.squeeze(y, 1), h)


@idiom("torch", 9, 17)
def upsample_by_a_factor(opset: int) -> Case:
    """F.interpolate(scale_factor=2): the sizes are computed in floating point and floored."""
    s, sizes = Sketch(opset), []
    for axis in (2, 3):
        size = s.cast(s.size("x", axis), F32)
        grown = s.op("Floor", s.op("Mul", size, s.constant(2.0, np.float32)))
        sizes.append(grown)
    if opset < 11:
        scales = [s.op("Div", grown, s.cast(s.size("x", axis), F32)) for axis, grown in zip((2, 3), sizes, strict=True)]
        vector = s.op("Concat", s.constant([1, 1], np.float32), *(s.unsqueeze(each, 0) for each in scales), axis=0)
        return s.case({"x": (1, 3, 5, 7)}, s.op("Upsample" if opset < 10 else "Resize", "x", vector, mode="nearest"))
    wanted = s.op("Concat", *(s.unsqueeze(s.cast(each, I64), 0) for each in sizes), axis=0)
    full = s.op("Concat", s.slice(s.op("Shape", "x"), 0, 2), wanted, axis=0)
    empty = s.constant([], np.float32) if opset < 13 else ""
    return s.case({"x": (1, 3, 5, 7)}, s.op("Resize", "x", empty, empty, full, mode="nearest"))


@idiom("torch", 11, 17)
def upsample_to_another_size(opset: int) -> Case:
    """F.interpolate(x, size=y.shape[2:])."""
    s = Sketch(opset)
    wanted = s.vector(s.size("y", 2), s.size("y", 3))
    full = s.op("Concat", s.slice(s.op("Shape", "x"), 0, 2), wanted, axis=0)
    resized = s.op("Resize", "x", s.constant([], np.float32), s.constant([], np.float32), full, mode="linear")
    return s.case({"x": (1, 3, 5, 7), "y": (1, 3, 11, 13)}, s.op("Add", resized, "y"))


@idiom("torch", 11, 17)
def pad_from_numbers(opset: int) -> Case:
    """F.pad: the amounts are filled up with zeros, reversed in pairs and turned, all in the graph."""
    s = Sketch(opset)
    given = s.constant([1, 2, 3, 4])
    missing = s.op("Sub", s.constant(8), s.op("Gather", s.op("Shape", given), s.constant(0), axis=0))
    zeros = s.op("ConstantOfShape", s.unsqueeze(missing, 0), value=helper.make_tensor("v", I64, [1], [0]))
    pairs = s.op("Reshape", s.op("Concat", given, zeros, axis=0), s.constant([-1, 2]))
    turned = s.op("Transpose", s.slice(pairs, -1, -LARGEST, 0, -1), perm=[1, 0])
    amounts = s.cast(s.op("Reshape", turned, s.constant([-1])), I64)
    return s.case({"x": (1, 3, 5, 7)}, s.op("Pad", "x", amounts, s.constant(0.0, np.float32), mode="constant"))


@idiom("torch", 9, 10)
def pad_by_attribute(opset: int) -> Case:
    s = Sketch(opset)
    return s.case({"x": (1, 3, 5, 7)}, s.op("Pad", "x", mode="reflect", pads=[0, 0, 3, 1, 0, 0, 4, 2]))


@idiom("torch", 9, 17)
def positions_by_arange(opset: int) -> Case:
    """torch.arange(x.size(1)): Range since opset 11, before that the places of ones."""
    s = Sketch(opset)
    if opset < 11:
        ones = s.op("ConstantOfShape", s.vector(s.size("x", 1)), value=helper.make_tensor("v", I64, [1], [1]))
        places = s.squeeze(s.op("Transpose", s.op("NonZero", ones), perm=[1, 0]), 1)
    else:
        places = s.op("Range", s.constant(0), s.size("x", 1), s.constant(1))
    wanted = s.op("Shape", "x")
    known = s.op("ConstantOfShape", s.constant([2]), value=helper.make_tensor("v", I64, [1], [1]))
    keep = s.op("Mul", known, s.constant(-1))
    sizes = s.op("Where", s.op("Equal", wanted, keep), known, wanted)
    spread = s.op("Expand", s.unsqueeze(places, 0), sizes)
    added = s.op("Add", s.op("Gather", s.weight(50, 8), "x", axis=0), s.op("Gather", s.weight(64, 8), spread, axis=0))
    return s.case({"x": (2, 9)}, added, x=I64)


@idiom("torch", 9, 17)
def expand_as(opset: int) -> Case:
    """x.expand(-1, n, -1) keeps the sizes written as -1."""
    s = Sketch(opset)
    wanted = s.vector(-1, s.size("y", 0), -1)
    ones = s.op("ConstantOfShape", s.op("Shape", wanted), value=helper.make_tensor("v", I64, [1], [1]))
    open_sizes = s.op("Equal", wanted, s.op("Mul", ones, s.constant(-1)))
    return s.case({"x": (3, 1, 4), "y": (6,)}, s.op("Expand", "x", s.op("Where", open_sizes, ones, wanted)))


@idiom("torch", 9, 17)
def repeat(opset: int) -> Case:
    s = Sketch(opset)
    counts = s.vector(1, s.size("y", 0), 2)
    shape = s.op("ConstantOfShape", s.op("Shape", counts), value=helper.make_tensor("v", I64, [1], [1]))
    return s.case({"x": (3, 1, 4), "y": (5,)}, s.op("Tile", s.op("Expand", "x", shape), counts))


@idiom("torch", 9, 17)
def group_norm(opset: int) -> Case:
    s = Sketch(opset)
    grouped = s.op("Reshape", "x", s.constant([0, 4, -1]))
    ones, zeros = s.constant(np.ones(4), np.float32), s.constant(np.zeros(4), np.float32)
    normed = s.op("Reshape", s.op("InstanceNormalization", grouped, ones, zeros), s.op("Shape", "x"))
    return s.case({"x": (2, 8, 3, 5)}, s.op("Mul", normed, s.unsqueeze(s.weight(8), 1, 2)))


@idiom("torch", 9, 17)
def layer_norm_spelled_out(opset: int) -> Case:
    s = Sketch(opset)
    dev = s.op("Sub", "x", s.reduce("ReduceMean", "x", -1))
    var = s.reduce("ReduceMean", s.op("Pow", dev, s.constant(2.0, np.float32)), -1)
    std = s.op("Sqrt", s.op("Add", var, s.constant(1e-5, np.float32)))
    return s.case({"x": (2, 3, 8)}, s.op("Mul", s.op("Div", dev, std), s.weight(8)))


@idiom("torch", 9, 17)
def pixel_shuffle_and_chunks(opset: int) -> Case:
    s = Sketch(opset)
    first, second, third = s.split("x", [4, 4, 8], 1)
    wide = s.op("Reshape", third, s.constant([-1, 2, 2, 2, 6, 10]))
    shuffled = s.op("Reshape", s.op("Transpose", wide, perm=[0, 1, 4, 2, 5, 3]), s.constant([-1, 2, 12, 20]))
    gated = s.op("Mul", first, s.op("Sigmoid", second))
    mixed = s.view(gated, s.size(gated, 0), 2, 2, s.size(gated, 2), s.size(gated, 3))
    turned = s.op("Transpose", mixed, perm=[0, 2, 1, 3, 4])
    return s.case({"x": (2, 16, 6, 10)}, shuffled, s.view(turned, s.size("x", 0), -1, s.size("x", 2), s.size("x", 3)))


@idiom("torch", 9, 17)
def indexing(opset: int) -> Case:
    """x[:, -1], x[:, 1:-1], x[..., x.size(2) // 2 :]."""
    s = Sketch(opset)
    last = s.op("Gather", "x", s.constant(-1), axis=1)
    inner = s.slice("x", 1, -1, axis=1)
    tail = s.slice("x", 2, LARGEST, axis=2)
    if opset >= 10:
        half = s.op("Div", s.size("x", 2), s.constant(2))
        if opset >= 11:
            half = s.op("Mul", half, s.constant(1))
        starts, ends = s.unsqueeze(half, 0), s.constant([LARGEST])
        tail = s.op("Slice", "x", starts, ends, s.constant([2]), s.constant([1]))
    return s.case({"x": (2, 6, 9)}, last, inner, tail)


@idiom("torch", 9, 17)
def relative_positions(opset: int) -> Case:
    """Swin's windows: sizes divided, multiplied and put together again."""
    s = Sketch(opset)
    rows, columns = (s.op("Div", s.size("x", axis), s.constant(4)) for axis in (1, 2))
    windows = s.view("x", s.size("x", 0), rows, 4, columns, 4, s.size("x", 3))
    turned = s.op("Transpose", windows, perm=[0, 1, 3, 2, 4, 5])
    flat = s.view(turned, -1, 16, s.size("x", 3))
    count = s.op("Div", s.size(flat, 0), s.op("Mul", rows, columns))
    back = s.view(flat, count, rows, columns, 4, 4, -1)
    area = s.op("Mul", s.size("x", 1), s.size("x", 2))
    return s.case({"x": (2, 8, 12, 6)}, back, s.view("x", s.size("x", 0), area, s.cast(s.size("x", 3), I64)))


@idiom("torch", 10, 17)
def top_k_of_a_size(opset: int) -> Case:
    s = Sketch(opset)
    k = s.op("Min", s.cast(s.size("x", 1), F32), s.constant(5.0, np.float32)) if opset < 12 else None
    count = s.cast(k, I64) if k else s.op("Min", s.size("x", 1), s.constant(5))
    values, places = s.ops("TopK", "x", s.op("Reshape", count, s.constant([1])), outputs=2, axis=1)
    return s.case({"x": (2, 9)}, values, places, s.op("ArgMax", "x", axis=1, keepdims=0))


@idiom("torch", 11, 17)
def a_slice_assigned(opset: int) -> Case:
    """x[:, 0] = y: the places are put together by Range, Expand and Concat for ScatterND."""
    s = Sketch(opset)
    rows = s.op("Range", s.constant(0), s.size("x", 0), s.constant(1))
    first = s.op("Reshape", rows, s.constant([-1, 1]))
    shape = s.op("Shape", first)
    columns = s.op("Expand", s.constant([[0]]), shape)
    places = s.op("Concat", s.unsqueeze(first, 2), s.unsqueeze(columns, 2), axis=2)
    update = s.op("Expand", s.unsqueeze("y", 1), shape)
    return s.case({"x": (4, 6), "y": (4,)}, s.op("ScatterND", "x", places, update))


@idiom("torch", 11, 17)
def a_loop_of_known_length(opset: int) -> Case:
    """A scripted ``for _ in range(x.size(0))`` that collects a row each turn."""
    s, body = Sketch(opset), Sketch(opset, names=100)
    row = body.op("Gather", "x", "turn", axis=0)
    summed = body.op("Add", row, "total")
    kept = body.op("Identity", "goes_on")
    inputs = [info("turn", I64, []), info("goes_on", BOOL, []), info("total", F32)]
    outputs = [info(kept, BOOL, []), info(summed, F32), info(row, F32)]
    zeros = s.op("ConstantOfShape", s.vector(s.size("x", 1)), value=helper.make_tensor("v", F32, [1], [0.0]))
    total, rows = s.ops(
        "Loop", s.size("x", 0), s.constant(True, np.bool_), zeros, outputs=2, body=body.graph("body", inputs, outputs)
    )
    return s.case({"x": (5, 4)}, total, rows)


@idiom("torch", 11, 17)
def a_branch_on_a_shape(opset: int) -> Case:
    """A scripted squeeze(1): an If on whether the size is 1."""
    s, then, other = Sketch(opset), Sketch(opset, names=100), Sketch(opset, names=200)
    is_one = s.op("Equal", s.size("x", 1), s.constant(1))
    squeezed, same = then.squeeze("x", 1), other.op("Identity", "x")
    branches = {
        "then_branch": then.graph("then", [], [info(squeezed, F32)]),
        "else_branch": other.graph("else", [], [info(same, F32)]),
    }
    taken = s.op("If", is_one, **branches)
    return s.case({"x": (3, 1, 4)}, s.op("Relu", taken))


@idiom("torch", 12, 17)
def einsum(opset: int) -> Case:
    s = Sketch(opset)
    scores = s.op("Einsum", "x", "x", equation="bid,bjd->bij")
    return s.case({"x": (2, 5, 4)}, s.op("Softmax", scores, axis=-1), s.op("Einsum", "x", equation="bid->bdi"))


@idiom("torch", 9, 17)
def batch_norm_and_dropout_kept(opset: int) -> Case:
    s = Sketch(opset)
    convolved = s.op("Conv", "x", s.weight(4, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2])
    stats = [s.initial(np.ones(4), np.float32) for _ in range(4)]
    normed = s.op("BatchNormalization", convolved, *stats)
    dropped, mask = s.ops("Dropout", normed, outputs=2)
    padded = s.op("ConvTranspose", dropped, s.weight(4, 2, 2, 2), strides=[2, 2])
    return s.case({"x": (1, 3, 8, 8)}, s.clip(padded, 0.0, 6.0), mask)


@idiom("torch", 9, 17)
def masked_softmax(opset: int) -> Case:
    """A causal mask cut out of a larger one by the sizes of the scores."""
    s = Sketch(opset)
    mask = s.constant(np.tril(np.ones((1, 1, 16, 16))), np.float32 if opset < 11 else np.bool_)
    if opset < 10:
        cut = s.slice(s.slice(mask, 0, 6, axis=2), 0, 6, axis=3)
    else:
        cut = mask
        for axis in (2, 3):
            end = s.unsqueeze(s.size("x", axis), 0)
            cut = s.op("Slice", cut, s.constant([0]), end, s.constant([axis]), s.constant([1]))
    allowed = s.cast(cut, BOOL)
    return s.case({"x": (2, 3, 6, 6)}, s.op("Where", allowed, "x", s.constant(-1e4, np.float32)))


# torch.onnx.export(dynamo=True)


@idiom("dynamo", 18, 23)
def symbolic_sizes(opset: int) -> Case:
    """aten.sym_size as Shape of one axis, squeezed, joined by Concat, with allowzero."""
    s = Sketch(opset)
    batch = s.op("Squeeze", s.op("Shape", "x", start=0, end=1))
    rows = s.op("Squeeze", s.op("Shape", "x", start=1, end=2))
    minus = s.op("Constant", value_ints=[-1])
    parts = [s.op("Reshape", each, minus, allowzero=0) for each in (batch, rows)]
    target = s.op("Concat", *parts, s.op("Constant", value_ints=[4, 8]), axis=0)
    split = s.op("Reshape", "x", target, allowzero=1)
    joined = s.op("Concat", parts[0], s.op("Constant", value_ints=[-1]), axis=0)
    return s.case({"x": (2, 10, 32)}, split, s.op("Reshape", split, joined, allowzero=1))


@idiom("dynamo", 18, 23)
def split_into_equal_parts(opset: int) -> Case:
    s = Sketch(opset)
    parts = s.ops("Split", "x", outputs=3, axis=-1, num_outputs=3)
    mean = s.op("ReduceMean", parts[0], s.op("Constant", value_ints=[-2, -1]), keepdims=0, noop_with_empty_axes=0)
    total = s.op("ReduceSum", parts[1], keepdims=0)
    same = s.op("ReduceMax", parts[2], s.op("Constant", value=numpy_helper.from_array(np.zeros(0, np.int64))),
                noop_with_empty_axes=1)  # fmt: skip
    return s.case({"x": (2, 4, 8)}, mean, total, same)


@idiom("dynamo", 18, 23)
def normalised_block(opset: int) -> Case:
    s = Sketch(opset)
    normed = s.op("LayerNormalization", "x", s.weight(16), s.weight(16), axis=-1)
    wide = s.op("MatMul", normed, s.weight(16, 64))
    active = s.op("Gelu", wide, approximate="tanh") if opset >= 20 else s.op("Erf", wide)
    kept = s.op("CastLike", s.op("MatMul", active, s.weight(64, 16)), "x")
    scalar = s.op("Constant", value_float=0.5)
    scaled = s.op("Mul", kept, scalar)
    grouped = s.op("Transpose", s.op("Add", scaled, "x"), perm=[0, 2, 1])
    if opset >= 21:
        grouped = s.op("GroupNormalization", grouped, s.weight(16), s.weight(16), num_groups=4)
    return s.case({"x": (2, 5, 16)}, grouped)


@idiom("dynamo", 18, 23)
def causal_mask(opset: int) -> Case:
    s = Sketch(opset)
    size = s.op("Shape", "x", start=1, end=2)
    square = s.op("Concat", size, size, axis=0)
    full = s.op("Expand", s.op("Constant", value_float=-1e4), square)
    mask = s.op("Trilu", full, s.op("Constant", value_int=1), upper=1)
    steps = s.op("Range", s.constant(0), s.op("Squeeze", size), s.constant(1))
    later = s.op("Greater", s.op("Unsqueeze", steps, s.constant([0])), s.op("Unsqueeze", steps, s.constant([1])))
    return s.case({"x": (2, 7, 7)}, s.op("Where", later, s.op("Add", "x", mask), "x"))


@idiom("dynamo", 18, 23)
def local_functions(opset: int) -> Case:
    """The old torchlib: operators as functions of the file, called by their names."""
    s = Sketch(opset)
    ones = helper.make_node("Constant", [], ["minus"], value_ints=[-1])
    flat = helper.make_node("Reshape", ["a", "minus"], ["flat"])
    shape = helper.make_node("Shape", ["flat"], ["n"])
    target = helper.make_node("Concat", ["n", "minus"], ["target"], axis=0)
    out = helper.make_node("Reshape", ["flat", "target"], ["b"])
    opsets = [helper.make_opsetid("", opset)]
    function = helper.make_function(
        "pkg.torchlib", "aten_column", ["a"], ["b"], [ones, flat, shape, target, out], opsets
    )
    column = s.op("aten_column", "x", domain="pkg.torchlib")
    y = s.op("aten_column", s.op("Relu", column), domain="pkg.torchlib")
    model = s.model([info("x", F32, ["a", "b"])], [info(y, F32)], [function], [("pkg.torchlib", 1)])
    return Case(model, {"x": (3, 4)})


@idiom("dynamo", 23, 23)
def attention_in_one_operator(opset: int) -> Case:
    s = Sketch(opset)
    heads = [s.op("Transpose", s.op("Reshape", s.op("MatMul", "x", s.weight(32, 32)), s.constant([0, 0, 4, 8])),
                  perm=[0, 2, 1, 3]) for _ in "qkv"]  # fmt: skip
    context = s.op("Attention", *heads)
    packed = s.op("Attention", "x", "x", "x", q_num_heads=4, kv_num_heads=4)
    normed = s.op("RMSNormalization", packed, s.weight(32))
    return s.case({"x": (2, 6, 32)}, context, normed)


@idiom("dynamo", 18, 23)
def resize_and_fold(opset: int) -> Case:
    s = Sketch(opset)
    sizes = s.op("Concat", s.op("Shape", "x", start=2), axis=0)
    doubled = s.op("Mul", sizes, s.constant([2, 2]))
    resized = s.op("Resize", "x", "", "", doubled, axes=[2, 3], mode="linear", keep_aspect_ratio_policy="stretch")
    columns = s.op("Reshape", "x", s.constant([1, 12, 5 * 7]))
    folded = s.op("Col2Im", columns, s.constant([6, 8]), s.constant([2, 2]))
    cropped = s.op("CenterCropPad", resized, s.constant([6, 6]), axes=[2, 3])
    return s.case({"x": (1, 12, 5, 7)}, folded, cropped)


# tf2onnx


@idiom("tf2onnx", 7, 18)
def channels_last_convolution(opset: int) -> Case:
    s = Sketch(opset)
    first = s.op("Transpose", "x", perm=[0, 3, 1, 2])
    convolved = s.op("Conv", first, s.weight(8, 3, 3, 3), auto_pad="SAME_UPPER", strides=[2, 2], kernel_shape=[3, 3])
    back = s.op("Transpose", s.op("Add", convolved, s.weight(1, 8, 1, 1)), perm=[0, 2, 3, 1])
    pooled = s.reduce("ReduceMean", back, 1, 2, keepdims=0)
    return s.case({"x": (2, 11, 9, 3)}, s.op("MatMul", pooled, s.weight(8, 4)))


@idiom("tf2onnx", 7, 18)
def shape_slice_pack_reshape(opset: int) -> Case:
    """tf.reshape(x, [tf.shape(x)[0], -1, 4]): Shape, Cast, StridedSlice as Slice and Squeeze, Pack as Concat."""
    s = Sketch(opset)
    shape = s.cast(s.cast(s.op("Shape", "x"), I32), I64)
    batch = s.squeeze(s.slice(shape, 0, 1), 0)
    packed = s.op("Concat", s.unsqueeze(batch, 0), s.initial([-1]), s.initial([4]), axis=0)
    reshaped = s.op("Reshape", "x", packed)
    whole = s.reduce("ReduceProd", s.cast(shape, F32), 0, keepdims=1)
    return s.case({"x": (3, 6, 8)}, reshaped, s.op("Reshape", "x", s.cast(whole, I64)))


@idiom("tf2onnx", 7, 18)
def fill_and_tile(opset: int) -> Case:
    s = Sketch(opset)
    shape = s.op("Shape", "x")
    one = s.initial([1.5], np.float32)
    if opset < 8:
        filled = s.op("Tile", s.op("Reshape", one, s.initial([1, 1])), shape)
    elif opset < 9:
        filled = s.op("Expand", one, shape)
    else:
        filled = s.op("ConstantOfShape", shape, value=helper.make_tensor("v", F32, [1], [1.5]))
    tiled = s.op("Tile", "x", s.op("Concat", s.initial([1]), s.slice(shape, 0, 1), axis=0))
    return s.case({"x": (2, 5)}, s.op("Add", filled, "x"), tiled)


@idiom("tf2onnx", 7, 18)
def strided_slices(opset: int) -> Case:
    s = Sketch(opset)
    part = s.slice(s.slice("x", 1, 2**31 - 1, axis=1), 0, -1, axis=2)
    row = s.squeeze(s.slice("x", 0, 1, axis=1), 1)
    padded = (
        s.op("Pad", "x", pads=[0, 1, 2, 0, 3, 0]) if opset < 11 else s.op("Pad", "x", s.initial([0, 1, 2, 0, 3, 0]))
    )
    return s.case({"x": (2, 5, 6)}, part, row, padded)


@idiom("tf2onnx", 7, 18)
def nearest_upsampling(opset: int) -> Case:
    """tf.image.resize: the sizes come from a shape, the scales by a division."""
    s = Sketch(opset)
    first = s.op("Transpose", "x", perm=[0, 3, 1, 2])
    if opset < 9:
        grown = s.op("Upsample", first, scales=[1.0, 1.0, 2.0, 2.0], mode="nearest")
        return s.case({"x": (1, 4, 5, 3)}, s.op("Transpose", grown, perm=[0, 2, 3, 1]))
    sizes = s.slice(s.op("Shape", first), 2, 4)
    wanted = s.op("Mul", sizes, s.initial([2, 2]))
    if opset < 11:
        scale = s.op("Div", s.cast(wanted, F32), s.cast(sizes, F32))
        scales = s.op("Concat", s.initial([1, 1], np.float32), scale, axis=0)
        grown = s.op("Upsample" if opset < 10 else "Resize", first, scales, mode="nearest")
    else:
        full = s.op("Concat", s.slice(s.op("Shape", first), 0, 2), wanted, axis=0)
        empty = s.initial([], np.float32)
        grown = s.op(
            "Resize", first, empty, empty, full, mode="nearest", coordinate_transformation_mode="asymmetric",
            nearest_mode="floor",
        )  # fmt: skip
    return s.case({"x": (1, 4, 5, 3)}, s.op("Transpose", grown, perm=[0, 2, 3, 1]))


@idiom("tf2onnx", 8, 18)
def a_range_by_a_loop(opset: int) -> Case:
    """tf.range before opset 11: a Loop whose turns are computed from limit, start and step."""
    s, body = Sketch(opset), Sketch(opset, names=100)
    batch = s.squeeze(s.slice(s.op("Shape", "x"), 0, 1), 0)
    span = s.cast(s.op("Sub", batch, s.initial(0)), F32)
    turns = s.cast(s.op("Ceil", s.op("Div", span, s.initial(1.0, np.float32))), I64)
    grown, seen = body.op("Add", "state", "step"), body.op("Identity", "state")
    inner = body.op("Identity", "cond")
    s.constants.append(numpy_helper.from_array(np.array(1, np.int64), "step"))
    inputs = [info("i", I64, []), info("cond", BOOL, []), info("state", I64, [])]
    outputs = [info(inner, BOOL, []), info(grown, I64, []), info(seen, I64, [])]
    _, places = s.ops(
        "Loop", turns, s.initial(True, np.bool_), s.initial(0), outputs=2, body=body.graph("body", inputs, outputs)
    )
    return s.case({"x": (5, 3)}, s.op("Gather", "x", places, axis=0))


@idiom("tf2onnx", 9, 18)
def a_recurrent_cell_by_scan(opset: int) -> Case:
    s, body = Sketch(opset), Sketch(opset, names=100)
    mixed = body.op("Concat", "row", "state", axis=1)
    new = body.op("Tanh", body.op("MatMul", mixed, "w"))
    out = body.op("Identity", new)
    s.constants.append(numpy_helper.from_array(rng.normal(size=(7, 4)).astype(np.float32), "w"))
    turned = s.op("Transpose", "x", perm=[1, 0, 2])
    batch = s.op("Concat", s.slice(s.op("Shape", "x"), 0, 1), s.initial([4]), axis=0)
    zeros = s.op("ConstantOfShape", batch)
    scanned = body.graph("body", [info("state", F32), info("row", F32)], [info(new, F32), info(out, F32)])
    state, steps = s.ops("Scan", zeros, turned, outputs=2, body=scanned, num_scan_inputs=1)
    return s.case({"x": (2, 6, 3)}, state, s.op("Transpose", steps, perm=[1, 0, 2]))


@idiom("tf2onnx", 8, 8)
def a_scan_with_an_axis_of_samples(opset: int) -> Case:
    s, body = Sketch(opset), Sketch(opset, names=100)
    new = body.op("Add", "row", "state")
    out = body.op("Relu", new)
    scanned = body.graph(
        "body", [info("state", F32, [3]), info("row", F32, [3])], [info(new, F32, [3]), info(out, F32, [3])]
    )
    state, steps = s.ops("Scan", "", "h", "x", outputs=2, body=scanned, num_scan_inputs=1)
    return s.case({"h": (2, 3), "x": (2, 6, 3)}, state, steps, fixed=True)


@idiom("tf2onnx", 7, 18)
def lstm_of_keras(opset: int) -> Case:
    s, hidden = Sketch(opset), 4
    turned = s.op("Transpose", "x", perm=[1, 0, 2])
    weights = [s.weight(1, 4 * hidden, 3), s.weight(1, 4 * hidden, hidden), s.weight(1, 8 * hidden)]
    y, h = s.ops("LSTM", turned, *weights, outputs=2, hidden_size=hidden)
    return s.case({"x": (2, 6, 3)}, s.op("Transpose", s.squeeze(y, 1), perm=[1, 0, 2]), s.squeeze(h, 0))


@idiom("tf2onnx", 11, 18)
def gathered_by_index(opset: int) -> Case:
    s = Sketch(opset)
    rows = s.op("Range", s.initial(0), s.squeeze(s.slice(s.op("Shape", "x"), 0, 1), 0), s.initial(1))
    places = s.op("Concat", s.unsqueeze(rows, 1), s.unsqueeze(rows, 1), axis=1)
    hot = s.op("OneHot", rows, s.initial([6]), s.initial([0, 1], np.float32), axis=-1)
    summed = s.op("CumSum", rows, s.initial(0, np.int32))
    return s.case({"x": (4, 5)}, s.op("GatherND", "x", places), hot, summed)


# Paddle2ONNX


@idiom("paddle2onnx", 7, 16)
def flatten_contiguous_range(opset: int) -> Case:
    s = Sketch(opset)
    shape = s.op("Shape", "x")
    head, rest = s.slice(shape, 0, 1), s.initial([-1])
    flat = s.op("Reshape", "x", s.op("Concat", head, rest, axis=0))
    soft = s.op("Softmax", flat, axis=1)
    return s.case({"x": (2, 3, 4, 5)}, s.op("Reshape", soft, shape))


@idiom("paddle2onnx", 7, 16)
def hard_swish_by_hand(opset: int) -> Case:
    s = Sketch(opset)
    convolved = s.op("Conv", "x", s.weight(6, 1, 3, 3), group=6, pads=[1, 1, 1, 1])
    shifted = s.clip(s.op("Add", convolved, s.initial([3.0], np.float32)), 0.0, 6.0)
    swish = s.op("Div", s.op("Mul", convolved, shifted), s.initial([6.0], np.float32))
    pooled = s.op("AveragePool", swish, kernel_shape=[3, 3], strides=[2, 2], pads=[0, 0, 1, 1])
    gate = s.op("HardSigmoid", s.op("GlobalAveragePool", swish), alpha=0.2, beta=0.5)
    return s.case({"x": (1, 6, 8, 9)}, s.op("Mul", swish, gate), pooled)


@idiom("paddle2onnx", 11, 16)
def nearest_interp(opset: int) -> Case:
    s = Sketch(opset)
    head = s.slice(s.op("Shape", "x"), 0, 2)
    sizes = s.cast(s.slice(s.op("Shape", "y"), 2, 4), I64)
    full = s.op("Concat", head, sizes, axis=0)
    empty = s.initial([], np.float32)
    grown = s.op("Resize", "x", empty, empty, full, mode="nearest", coordinate_transformation_mode="asymmetric")
    return s.case({"x": (1, 3, 4, 5), "y": (1, 3, 8, 10)}, s.op("Concat", grown, "y", axis=1))


@idiom("paddle2onnx", 9, 16)
def expand_and_fill(opset: int) -> Case:
    """expand_v2: the target is compared with ones; fill_constant_batch_size_like: the batch from another tensor."""
    s = Sketch(opset)
    batch = s.cast(s.slice(s.op("Shape", "x"), 0, 1), I64)
    target = s.op("Concat", batch, s.initial([3]), s.initial([4]), axis=0)
    if opset >= 11:
        ones = s.op("ConstantOfShape", s.op("Shape", target), value=helper.make_tensor("v", I64, [1], [1]))
        target = s.op("Where", s.op("Equal", target, s.initial([-1])), ones, target)
    filled = s.op("ConstantOfShape", target, value=helper.make_tensor("v", F32, [1], [2.0]))
    return s.case({"x": (2, 1, 4)}, s.op("Expand", "x", target), filled)


@idiom("paddle2onnx", 7, 16)
def squeeze_after_pooling_and_lstm(opset: int) -> Case:
    s, hidden = Sketch(opset), 4
    sequence = s.op("Transpose", s.squeeze("x", 2), perm=[2, 0, 1])
    weights = [s.weight(2, 4 * hidden, 3), s.weight(2, 4 * hidden, hidden), s.weight(2, 8 * hidden)]
    y, _, _ = s.ops("LSTM", sequence, *weights, outputs=3, hidden_size=hidden, direction="bidirectional")
    turned = s.op("Transpose", y, perm=[0, 2, 1, 3])
    joined = s.op("Reshape", turned, s.initial([0, 0, -1]))
    back = s.op("Transpose", joined, perm=[1, 0, 2])
    logits = s.op("Add", s.op("MatMul", back, s.weight(8, 5)), s.weight(5))
    return s.case({"x": (2, 3, 1, 7)}, s.op("Softmax", logits, axis=2), s.op("ArgMax", logits, axis=2, keepdims=0))


@idiom("paddle2onnx", 7, 16)
def slices_with_their_axis_dropped(opset: int) -> Case:
    s = Sketch(opset)
    qkv = s.op("Transpose", s.op("Reshape", "x", s.initial([0, -1, 3, 2, 4])), perm=[2, 0, 3, 1, 4])
    q, k, v = (s.squeeze(s.slice(qkv, place, place + 1), 0) for place in range(3))
    scores = s.op("MatMul", s.op("Mul", q, s.initial([0.5], np.float32)), s.op("Transpose", k, perm=[0, 1, 3, 2]))
    context = s.op("Transpose", s.op("MatMul", s.op("Softmax", scores, axis=3), v), perm=[0, 2, 1, 3])
    return s.case({"x": (2, 6, 24)}, s.op("Reshape", context, s.initial([0, -1, 8])))


# keras2onnx


@idiom("keras2onnx", 7, 11)
def keras_lstm(opset: int) -> Case:
    s, hidden = Sketch(opset), 4
    turned = s.op("Transpose", "x", perm=[1, 0, 2])
    weights = [s.weight(2, 4 * hidden, 3), s.weight(2, 4 * hidden, hidden), s.weight(2, 8 * hidden)]
    y, h, c = s.ops("LSTM", turned, *weights, outputs=3, hidden_size=hidden, direction="bidirectional")
    forward, backward = s.split(h, [1, 1], 0)
    both = s.op("Concat", s.squeeze(forward, 0), s.squeeze(backward, 0), axis=1)
    steps = s.op("Reshape", s.op("Transpose", y, perm=[2, 0, 1, 3]), s.initial([-1, 6, 8]))
    return s.case({"x": (2, 6, 3)}, both, steps, s.op("Transpose", c, perm=[1, 0, 2]))


@idiom("keras2onnx", 7, 11)
def dense_over_time(opset: int) -> Case:
    """TimeDistributed(Dense): the steps are folded into the batch and out again."""
    s = Sketch(opset)
    flat = s.op("Reshape", "x", s.initial([-1, 3]))
    dense = s.op("Add", s.op("MatMul", flat, s.weight(3, 5)), s.weight(5))
    out = s.op("Reshape", s.op("Tanh", dense), s.initial([-1, 6, 5]))
    return s.case({"x": (2, 6, 3)}, s.op("Identity", out), s.op("Reshape", out, s.initial([-1, 30])))


@idiom("keras2onnx", 7, 11)
def embedding_and_pooling(opset: int) -> Case:
    s = Sketch(opset)
    looked_up = s.op("Gather", s.weight(20, 6), s.cast("x", I32), axis=0)
    first = s.op("Transpose", looked_up, perm=[0, 2, 1])
    convolved = s.op("Conv", first, s.weight(8, 6, 3), auto_pad="VALID", kernel_shape=[3])
    pooled = s.op("GlobalMaxPool", s.op("Relu", convolved))
    return s.case({"x": (2, 9)}, s.squeeze(pooled, 2), s.op("Flatten", pooled, axis=1), x=F32)


# skl2onnx


def sklearn(opset: int, nodes: Sketch, shapes: dict[str, tuple[int, ...]], *outputs: str, ml: int = 1) -> Case:
    inputs = [info(name, F32, [None, *shape[1:]]) for name, shape in shapes.items()]
    outs = [helper.make_empty_tensor_value_info(name) for name in outputs]
    return Case(nodes.model(inputs, outs, domains=[("ai.onnx.ml", ml)]), shapes)


def ml_version(opset: int) -> int:
    return 1 if opset < 12 else 2 if opset < 15 else 3


ML = "ai.onnx.ml"


@idiom("skl2onnx", 9, 20)
def scaled_logistic_regression(opset: int) -> Case:
    s = Sketch(opset)
    filled = s.op("Imputer", "x", domain=ML, imputed_value_floats=[0.0] * 4, replaced_value_float=float("nan"))
    scaled = s.op("Scaler", filled, domain=ML, offset=[0.5] * 4, scale=[2.0] * 4)
    label, scores = s.ops(
        "LinearClassifier", scaled, outputs=2, domain=ML, coefficients=[0.1] * 12, intercepts=[0.0] * 3,
        classlabels_ints=[0, 1, 2], multi_class=1, post_transform="SOFTMAX",
    )  # fmt: skip
    probabilities = s.op("Normalizer", scores, domain=ML, norm="L1")
    flat = s.op("Reshape", s.cast(label, I64), s.initial([-1]))
    zipped = s.op("ZipMap", probabilities, domain=ML, classlabels_int64s=[0, 1, 2])
    return sklearn(opset, s, {"x": (5, 4)}, flat, zipped, ml=ml_version(opset))


def stumps(regressor: bool) -> dict[str, object]:
    """One tree: a node and two leaves."""
    leaf = "target" if regressor else "class"
    return {
        "nodes_treeids": [0, 0, 0], "nodes_nodeids": [0, 1, 2], "nodes_featureids": [1, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"], "nodes_values": [0.5, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0], "nodes_falsenodeids": [2, 0, 0], f"{leaf}_treeids": [0, 0],
        f"{leaf}_nodeids": [1, 2], f"{leaf}_ids": [0, 0] if regressor else [0, 1], f"{leaf}_weights": [1.0, 2.0],
    }  # fmt: skip


@idiom("skl2onnx", 9, 20)
def random_forest(opset: int) -> Case:
    s = Sketch(opset)
    label, scores = s.ops(
        "TreeEnsembleClassifier", "x", outputs=2, domain=ML, classlabels_int64s=[0, 1], post_transform="NONE",
        **stumps(regressor=False),
    )  # fmt: skip
    value = s.op("TreeEnsembleRegressor", "x", domain=ML, n_targets=1, **stumps(regressor=True))
    best = s.op("ArgMax", scores, axis=1, keepdims=1)
    named = s.op("ArrayFeatureExtractor", s.initial([10, 20]), best, domain=ML)
    return sklearn(opset, s, {"x": (5, 3)}, label, value, s.op("Reshape", named, s.initial([-1])), ml=ml_version(opset))


@idiom("skl2onnx", 9, 20)
def columns_encoded_and_joined(opset: int) -> Case:
    s = Sketch(opset)
    first = s.op("ArrayFeatureExtractor", "x", s.initial([0, 2]), domain=ML)
    hot = s.op("OneHotEncoder", s.op("ArrayFeatureExtractor", "x", s.initial([1]), domain=ML), domain=ML,
               cats_int64s=[0, 1, 2], zeros=1)  # fmt: skip
    flat = s.op("Reshape", hot, s.initial([-1, 3]))
    joined = s.op("Concat", first, flat, axis=1)
    joined_again = s.op("FeatureVectorizer", first, flat, domain=ML, inputdimensions=[2, 3])
    return sklearn(opset, s, {"x": (5, 3)}, joined, joined_again, ml=ml_version(opset))


@idiom("skl2onnx", 9, 20)
def linear_models_and_clusters(opset: int) -> Case:
    s = Sketch(opset)
    line = s.op("LinearRegressor", "x", domain=ML, coefficients=[0.1] * 6, intercepts=[0.0, 1.0], targets=2)
    squares = (
        s.op("ReduceSumSquare", "x", axes=[1], keepdims=1)
        if opset < 18
        else s.op("ReduceSumSquare", "x", s.initial([1]), keepdims=1)
    )
    centres = s.op("Gemm", "x", s.weight(4, 3), squares, alpha=-2.0, transB=1)
    nearest = s.op("ArgMin", centres, axis=1, keepdims=0)
    return sklearn(opset, s, {"x": (5, 3)}, line, s.op("Sqrt", s.op("Abs", centres)), nearest, ml=ml_version(opset))


@idiom("skl2onnx", 9, 20)
def support_vectors(opset: int) -> Case:
    s = Sketch(opset)
    value = s.op(
        "SVMRegressor", "x", domain=ML, kernel_type="RBF", kernel_params=[0.5, 0.0, 3.0], n_supports=2,
        support_vectors=[0.1] * 6, coefficients=[1.0, -1.0], rho=[0.2], post_transform="NONE",
    )  # fmt: skip
    return sklearn(opset, s, {"x": (5, 3)}, s.op("Binarizer", value, domain=ML, threshold=0.5), ml=ml_version(opset))
