"""Small models of every special kind, for batches of hostile neighbours: each says whether it may be batched.

They are graphs in ONNX's own words, with weights from a seeded generator. ``Special.rows`` draws inputs of a mood: what
a neighbour may send to hurt, within what the model takes at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

from weft.runtime.tensors import DATATYPES, TensorSpec

MOODS = ("plain", "huge", "nan", "infinite", "zero", "negative", "tiny")
"""How the rows of a neighbour may be; the first is harmless."""

_WORDS = ("", "a", "Straße", "\U0001f9f5" * 40, "x" * 500, "nan", "0")


@dataclass(frozen=True, slots=True)
class Special:
    """One model."""

    name: str
    build: Callable[[], ModelProto]
    batched: bool = True
    """Whether the backend may join its requests."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Of inputs with free dimensions besides the first."""
    whole: tuple[int, int] = (-100, 100)
    """What whole numbers it takes, the last excluded."""
    external: bool = False
    """Whether its weights lie in a file of their own."""

    def save(self, folder: Path) -> Path:
        path = folder / f"{self.name}.onnx"
        beside: dict[str, Any] = {"save_as_external_data": True, "location": f"{self.name}.bin", "size_threshold": 0}
        onnx.save(self.build(), str(path), **(beside if self.external else {}))
        return path

    def rows(
        self, inputs: Sequence[TensorSpec], count: int, mood: str, rng: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """So many samples."""
        shapes = {spec.name: (count, *self.shapes.get(spec.name, spec.shape)[1:]) for spec in inputs}
        return {spec.name: self._drawn(DATATYPES[spec.datatype], shapes[spec.name], mood, rng) for spec in inputs}

    def _drawn(self, kind: Any, shape: tuple[int, ...], mood: str, rng: np.random.Generator) -> np.ndarray:
        if kind == np.object_:
            words = _WORDS if mood != "plain" else ("a", "b", "nan", "weft")
            return np.array([str(each).encode() for each in rng.choice(words, shape).ravel()], object).reshape(shape)
        if kind == np.bool_:
            return rng.integers(0, 2, shape).astype(kind)
        if kind.kind in "iu":
            return self._whole(kind, shape, mood, rng)
        return _floats(kind, shape, mood, rng)

    def _whole(self, kind: Any, shape: tuple[int, ...], mood: str, rng: np.random.Generator) -> np.ndarray:
        bounds = np.iinfo(kind)
        low, high = max(self.whole[0], bounds.min), min(self.whole[1], bounds.max)
        if mood == "zero" and low <= 0:
            return np.zeros(shape, kind)
        edge = {"huge": high - 1, "negative": low}.get(mood)
        return rng.integers(low, high, shape).astype(kind) if edge is None else np.full(shape, edge, kind)


def _floats(kind: Any, shape: tuple[int, ...], mood: str, rng: np.random.Generator) -> np.ndarray:
    drawn = rng.standard_normal(shape)
    large = float(np.finfo(kind).max) / 4
    with np.errstate(all="ignore"):
        made = {
            "plain": drawn,
            "huge": drawn * large,
            "nan": np.where(drawn > 0, np.nan, drawn),
            "infinite": np.where(drawn > 0, np.inf, -np.inf),
            "zero": drawn * 0,
            "negative": -np.abs(drawn) * 1e4,
            "tiny": drawn * float(np.finfo(kind).tiny),
        }[mood]
        return np.clip(made, -large, large).astype(kind) if mood == "huge" else made.astype(kind)


# Builders

ML = '"ai.onnx.ml" : 3, "com.microsoft" : 1'


def graph(text: str, version: int = 18, ir_version: int = 9, **weights: Any) -> ModelProto:
    """A model in ONNX's own words; *weights* become initialisers."""
    made = parser.parse_model(f'<ir_version: {ir_version}, opset_import: ["" : {version}, {ML}]> g {text}')
    made.graph.initializer.extend(numpy_helper.from_array(np.asarray(each), name) for name, each in weights.items())
    return made


def drawn(*shape: int, seed: int = 0, kind: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def whole(*shape: int, low: int = -127, high: int = 128, kind: Any = np.int8) -> np.ndarray:
    return np.random.default_rng(3).integers(low, high, shape).astype(kind)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def perceptron(kind: str = "float", numpy_kind: Any = np.float32, version: int = 17) -> ModelProto:
    return graph(
        f"({kind}[n,16] x) => ({kind}[n,5] y) {{ h = MatMul(x, w) r = Relu(h) y = MatMul(r, v) }}",
        version,
        w=drawn(16, 24, kind=numpy_kind),
        v=drawn(24, 5, seed=1, kind=numpy_kind),
    )


def image_net(version: int) -> ModelProto:
    """A convolution, a pool and a classifier, as every version of the operators has them."""
    return graph(
        "(float[n,3,8,8] x) => (float[n,10] y) { c = Conv<pads = [1,1,1,1]>(x, w) "
        "b = BatchNormalization(c, s, z, z, s) "
        "r = Relu(b) p = MaxPool<kernel_shape = [2,2], strides = [2,2]>(r) f = Flatten(p) "
        "l = Gemm(f, v, o) y = Softmax(l) }",
        version,
        w=drawn(4, 3, 3, 3),
        s=np.ones(4, np.float32),
        z=np.zeros(4, np.float32),
        v=drawn(64, 10, seed=2),
        o=drawn(10, seed=3),
    )


def weights_as_inputs() -> ModelProto:
    """As files of IR version 3 have them."""
    made = perceptron(version=8)
    made.ir_version = 3
    del made.opset_import[1:]
    for each in made.graph.initializer:
        made.graph.input.append(helper.make_tensor_value_info(each.name, each.data_type, each.dims))
    return made


def attention_block() -> ModelProto:
    """Two heads over a free number of positions, whose sizes are computed, as exporters do it."""
    return graph(
        "(float[n,s,8] x) => (float[n,t,8] y) { shape = Shape(x) rows = Gather(shape, zero) long = Gather(shape, one) "
        "heads = Concat<axis = 0>(rows, long, two, four) back = Concat<axis = 0>(rows, long, eight) "
        "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) "
        "q2 = Reshape(q, heads) k2 = Reshape(k, heads) v2 = Reshape(v, heads) "
        "q3 = Transpose<perm = [0,2,1,3]>(q2) k3 = Transpose<perm = [0,2,3,1]>(k2) "
        "v3 = Transpose<perm = [0,2,1,3]>(v2) "
        "scores = MatMul(q3, k3) weights = Softmax<axis = -1>(scores) out = MatMul(weights, v3) "
        "o2 = Transpose<perm = [0,2,1,3]>(out) y = Reshape(o2, back) }",
        wq=drawn(8, 8), wk=drawn(8, 8, seed=1), wv=drawn(8, 8, seed=2),
        zero=ints(0), one=ints(1), two=ints(2), four=ints(4), eight=ints(8),
    )  # fmt: skip


def recurrent(operator: str, outputs: str, gates: int, answer: str) -> ModelProto:
    """Over time, which stands first: samples lie along the second axis."""
    return graph(
        f"(float[n,5,3] x) => (float[m,k,4] y) {{ t = Transpose<perm = [1,0,2]>(x) "
        f"{outputs} = {operator}<hidden_size = 4>(t, w, r) y = Transpose<perm = [1,0,2]>({answer}) }}",
        w=drawn(1, 4 * gates, 3), r=drawn(1, 4 * gates, 4, seed=1),
    )  # fmt: skip


def with_branches(condition: str) -> ModelProto:
    made = graph(
        f"(float[n,6] x) => (float[n,6] y) {{ {condition} }}",
        zero=ints(0),
        one=ints(1),
        two=ints(2),
        four=ints(4),
        flat=ints(-1),
    )
    bodies = {
        name: parser.parse_graph(f"{name} () => (float[n,6] {name}_y) {{ {name}_y = {operator}(x) }}")
        for name, operator in (("then_branch", "Relu"), ("else_branch", "Neg"))
    }
    made.graph.node.append(helper.make_node("If", ["c"], ["y"], **bodies))
    return made


def with_loop(turns: str, after: str = "after = Identity(before)") -> ModelProto:
    body = parser.parse_graph(
        "body (int64 turn, bool before, float[n,6] last) => (bool after, float[n,6] next, float[n,6] seen) "
        f"{{ h = MatMul(last, w) next = Tanh(h) seen = Identity(next) {after} }}"
    )
    made = graph(
        f"(float[n,6] x) => (float[n,6] y, float[n,3,6] z) {{ {turns} }}",
        w=drawn(6, 6), three=np.array(3, np.int64), flat=ints(-1),
    )  # fmt: skip
    made.graph.node.append(helper.make_node("Loop", ["turns", "", "x"], ["y", "all"], body=body))
    made.graph.node.append(helper.make_node("Transpose", ["all"], ["z"], perm=[1, 0, 2]))
    return made


def with_scan(axis: int) -> ModelProto:
    shape = "n,4" if axis == 1 else "5,4"
    state = "x0 = Gather<axis = 1>(x, zero) start = Mul(x0, nought)" if axis == 1 else "start = Identity(begin)"
    body = parser.parse_graph(
        f"body (float[{shape}] sum, float[{shape}] part) => (float[{shape}] next, float[{shape}] out) "
        "{ next = Add(sum, part) out = Tanh(next) }"
    )
    made = graph(
        f"(float[n,5,4] x) => (float[n,5,4] y) {{ {state} }}",
        zero=np.array(0, np.int64), nought=np.float32(0), begin=np.zeros((5, 4), np.float32),
    )  # fmt: skip
    scan: dict[str, Any] = {"scan_input_axes": [axis], "scan_output_axes": [axis]}
    made.graph.node.append(
        helper.make_node("Scan", ["start", "x"], ["last", "y"], num_scan_inputs=1, body=body, **scan)
    )
    return made


def bfloat() -> ModelProto:
    return graph(f"(float[n,9] x) => (float[n,9] y) {{ b = Cast<to = {TensorProto.BFLOAT16}>(x) y = Cast<to = 1>(b) }}")


def quantised(dynamic: bool) -> ModelProto:
    if dynamic:
        return graph(
            "(float[n,32] x) => (int64[n] y) { q, s, z = DynamicQuantizeLinear(x) p = MatMulInteger(q, w, z) "
            "y = ArgMax<axis = 1, keepdims = 0>(p) }",
            w=whole(32, 8),
        )
    return graph(
        "(float[n,32] x) => (float[n,8] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) "
        "v = DequantizeLinear(w, t, k) m = MatMul(d, v) o = QuantizeLinear(m, u, z) y = DequantizeLinear(o, u, z) }",
        w=whole(32, 8), s=np.float32(0.05), t=np.float32(0.02), u=np.float32(0.3), z=np.uint8(128), k=np.int8(0),
    )  # fmt: skip


def quantised_image() -> ModelProto:
    return graph(
        "(float[n,3,6,6] x) => (float[n,4,6,6] y) { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) "
        "v = DequantizeLinear(w, t, k) c = Conv<pads = [1,1,1,1]>(d, v) o = QuantizeLinear(c, u, z) "
        "e = DequantizeLinear(o, u, z) y = Relu(e) }",
        w=whole(4, 3, 3, 3), s=np.float32(0.05), t=np.float32(0.02), u=np.float32(0.1), z=np.uint8(128), k=np.int8(0),
    )  # fmt: skip


def rowwise_range() -> ModelProto:
    """8-bit numbers by a scale of each sample's own."""
    return graph(
        "(float[n,32] x) => (float[n,8] y) { a = Abs(x) m = ReduceMax<keepdims = 1>(a, one) s = Div(m, top) "
        "t = Add(s, eps) d = Div(x, t) r = Round(d) p = MatMul(r, w) y = Mul(p, t) }",
        one=ints(1), top=np.float32(127), eps=np.float32(1e-6), w=drawn(32, 8),
    )  # fmt: skip


def wide_rows() -> ModelProto:
    """A softmax of each row of four numbers; of longer rows, of all together."""
    return graph(
        "(float[n,s] x) => (float[n,t] y) { shape = Shape(x) rows = Gather(shape, zero) width = Gather(shape, one) "
        "fours = Div(four, width) known = Mul(fours, rows) count = Max(known, one) to = Concat<axis = 0>(count, rest) "
        "p = Reshape(x, to) q = Softmax<axis = 1>(p) y = Reshape(q, shape) }",
        zero=ints(0), one=ints(1), four=ints(4), rest=ints(-1),
    )  # fmt: skip


def large(megabytes: int) -> ModelProto:
    """A chain of square products with so many megabytes of weights."""
    width = 1024
    count = max(1, megabytes // 4)
    nodes = "".join(f" p{i} = MatMul({f'h{i - 1}' if i else 'x'}, w{i}) h{i} = Tanh(p{i})" for i in range(count))
    weights = {f"w{i}": drawn(width, width, seed=i) / 32 for i in range(count)}
    return graph(f"(float[n,{width}] x) => (float[n,{width}] y) {{ {nodes} y = Identity(h{count - 1}) }}", **weights)


def text(body: str, **weights: Any) -> Callable[[], ModelProto]:
    """One node or a few, from ``x`` of *n* by 6 to ``y`` of *n* by whatever."""
    return lambda: graph(f"(float[n,6] x) => (float[n,k] y) {{ {body} }}", **weights)


def image(body: str, **weights: Any) -> Callable[[], ModelProto]:
    return lambda: graph(f"(float[n,4,6,6] x) => (float[n,a,b,c] y) {{ {body} }}", **weights)


SPECIAL: tuple[Special, ...] = (
    Special("perceptron", perceptron),
    Special("fp16", lambda: perceptron("float16", np.float16)),
    Special("fp64", lambda: perceptron("double", np.float64)),
    Special("bf16", bfloat),
    Special("external-data", perceptron, external=True),
    Special("weights-as-inputs", weights_as_inputs),
    *(
        Special(f"opset-{version}", lambda version=version: image_net(version))  # type: ignore[misc]
        for version in (7, 8, 9, 10, 11, 12, 13, 15, 18, 21, 23, 24, 25, 26)
    ),
    Special("int8", lambda: graph("(int8[n,8] x) => (int32[n,3] y) { y = MatMulInteger(x, w) }", w=whole(8, 3))),
    Special("qdq", lambda: quantised(dynamic=False)),
    Special("qdq-image", quantised_image),
    Special("dynamic-quantised", lambda: quantised(dynamic=True), batched=False),
    Special("range-of-its-own", rowwise_range),
    Special("if-by-shape", lambda: with_branches(
        "s = Shape(x) w = Gather(s, one) g = Greater(w, four) c = Reshape(g, flat)")),
    Special("if-by-value", lambda: with_branches("m = ReduceMax<keepdims = 0>(x) c = Cast<to = 9>(m)"), batched=False),
    Special("if-by-rows", lambda: with_branches(
        "s = Shape(x) w = Gather(s, zero) g = Greater(w, two) c = Reshape(g, flat)"), batched=False),
    Special("loop", lambda: with_loop("turns = Identity(three)")),
    Special("loop-by-value", lambda: with_loop(
        "m = ReduceMax<keepdims = 0>(x) i = Cast<to = 7>(m) e = Sub(i, i) turns = Add(e, three)"),
        batched=False),
    Special("loop-until", lambda: with_loop(
        "turns = Identity(three)", "m = ReduceMax<keepdims = 0>(next) after = Cast<to = 9>(m)"), batched=False),
    Special("scan-time", lambda: with_scan(1)),
    Special("scan-samples", lambda: with_scan(0), batched=False),
    Special("lstm", lambda: recurrent("LSTM", "o, h", 4, "h")),
    Special("lstm-last-only", lambda: recurrent("LSTM", ", h", 4, "h")),
    Special("gru", lambda: recurrent("GRU", "o, h", 3, "h")),
    Special("rnn", lambda: recurrent("RNN", "o, h", 1, "h")),
    Special("attention", attention_block, shapes={"x": (1, 5, 8)}),
    Special("transposed", text("t = Transpose(x) s = Softmax<axis = 0>(t) y = Transpose(s)")),
    Special("transposed-across", text("t = Transpose(x) s = Softmax<axis = 1>(t) y = Transpose(s)"), batched=False),
    Special("text", lambda: graph(
        "(string[n,2] x) => (string[n,2] y) { y = StringConcat(x, x) }", 20)),
    Special("text-split", lambda: graph(
        "(string[n] x) => (string[n,k] y, int64[n] c) { y, c = StringSplit<delimiter = \"a\">(x) }", 20),
        batched=False),
    Special("labels", lambda: graph(
        "(string[n,3] x) => (float[n,3] y) { y = ai.onnx.ml.LabelEncoder<keys_strings = [\"a\", \"b\"], "
        "values_floats = [1.5, 2.5], default_float = -1.0>(x) }")),
    Special("regression", lambda: graph(
        "(float[n,4] x) => (float[n,1] y) { y = ai.onnx.ml.LinearRegressor<coefficients = [0.5, 1.5, -2.0, 0.25], "
        "intercepts = [0.125]>(x) }")),
    Special("empty-output", text("y = Slice(x, zero, zero, one)", zero=ints(0), one=ints(1))),
    Special("empty-input", lambda: graph(
        "(float[n,0] x) => (float[n,1] y) { y = ReduceSum<keepdims = 1>(x, one) }", one=ints(1))),
    Special("scalar-output", lambda: graph(
        "(float[n,6] x) => (float[n,6] y, float s) { y = Relu(x) s = ReduceMax<keepdims = 0>(x) }"), batched=False),
    Special("two-inputs", lambda: graph(
        "(float[n,3] a, int32[n,3] b) => (float[n,3] y) { c = Cast<to = 1>(b) y = Add(a, c) }")),
    Special("optional-outputs", image("y, i = MaxPool<kernel_shape = [2,2]>(x)")),
    Special("duplicate-outputs", lambda: graph(
        "(float[n,6] x) => (float[n,6] y, float[n,6] z) { y = Relu(x) z = Identity(y) }")),
    Special("outputs-as-inputs", lambda: graph(
        "(float[n,6] x) => (float[n,6] y, float[n,6] z) { y = Identity(x) z = Neg(x) }")),
    Special("normalised-in-training", lambda: graph(
        "(float[n,4,3] x) => (float[n,4,3] y) { y, m, v = BatchNormalization<training_mode = 1>(x, s, b, mean, var) }",
        s=np.ones(4, np.float32), b=drawn(4), mean=np.zeros(4, np.float32), var=np.ones(4, np.float32)), batched=False),
    Special("normalised-globally", text(
        "m = ReduceMean(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean(q) s = Sqrt(v) y = Div(d, s)"), batched=False),
    Special("normalised-by-layer", text("y = LayerNormalization(x, w, b)", w=drawn(6), b=drawn(6, seed=1))),
    Special("mean-variance", image("y = MeanVarianceNormalization(x)"), batched=False),
    Special("mean-variance-inside", image("y = MeanVarianceNormalization<axes = [2,3]>(x)")),
    Special("instance", image("y = InstanceNormalization(x, s, z)", s=drawn(4), z=drawn(4, seed=1))),
    Special("overflow", lambda: graph(
        "(int32[n,6] x) => (int32[n,6] y) { m = Mul(x, x) y = Add(m, x) }"), whole=(-(2**31), 2**31 - 1)),
    Special("small-numbers", lambda: graph(
        "(uint8[n,6] x) => (uint8[n,6] y) { y = Add(x, x) }"), whole=(0, 256)),
    Special("divided", lambda: graph(
        "(int64[n,6] x) => (int64[n,6] y) { d = Div(x, seven) m = Mod(x, seven) y = Sub(d, m) }", seven=ints(7))),
    Special("flags", lambda: graph(
        "(bool[n,6] x) => (bool[n,6] y) { s = Not(x) o = Or(s, x) y = Xor(o, x) }")),
    Special("not-a-number", text("l = Log(x) s = Sqrt(x) d = Div(l, s) y = Mul(d, x)")),
    Special("summed-over-samples", text("y = CumSum(x, zero)", zero=np.array(0)), batched=False),
    Special("summed-inside", text("y = CumSum(x, one)", one=np.array(1))),
    Special("embedding", lambda: graph(
        "(int64[n,5] x) => (float[n,5,3] y) { y = Gather(w, x) }", w=drawn(7, 3)), whole=(0, 7)),
    Special("rows-picked", lambda: graph(
        "(float[n,3] x, int64[n] i) => (float[n,3] y) { y = Gather(x, i) }"), whole=(0, 1), batched=False),
    Special("one-hot", lambda: graph(
        "(int64[n] x) => (float[n,7] y) { y = OneHot(x, depth, pair) }",
        depth=ints(7), pair=np.array([0, 1], np.float32)), whole=(0, 7)),
    Special("sorted", text("y, i = TopK(x, three)", three=ints(3))),
    Special("sorted-across", text("y, i = TopK<axis = 0>(x, one)", one=ints(1)), batched=False),
    Special("einsum", text('y = Einsum<equation = "ni,ij->nj">(x, w)', w=drawn(6, 6))),
    Special("einsum-across", text('g = Einsum<equation = "ni,nj->ij">(x, x) y = MatMul(x, g)'), batched=False),
    Special("similarity", text("t = Transpose(x) s = MatMul(x, t) y = MatMul(s, x)"), batched=False),
    Special("resized", image("y = Resize<mode = \"linear\">(x, , scales)",
            scales=np.array([1, 1, 2, 2], np.float32))),
    Special("padded", image('y = Pad<mode = "reflect">(x, pads)', pads=ints(0, 0, 1, 1, 0, 0, 1, 1))),
    Special("depth-to-space", image("y = DepthToSpace<blocksize = 2>(x)")),
    Special("sampled", lambda: graph(
        "(float[n,2,4,4] x, float[n,3,3,2] g) => (float[n,2,3,3] y) { y = GridSample(x, g) }")),
    Special("deconvolved", image("y = ConvTranspose<strides = [2,2]>(x, w)", w=drawn(4, 3, 2, 2))),
    Special("reversed", lambda: graph(
        "(float[n,5,3] x, int64[n] k) => (float[n,5,3] y) { "
        "y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, k) }"),
        whole=(1, 6)),
    Special("dropout-in-training", text("y = Dropout(x, half, yes)", half=np.float32(0.5), yes=np.array(True)),
            batched=False),
    Special("noise", text("r = RandomNormalLike(x) y = Add(x, r)"), batched=False),
    Special("rows-joined-and-split", text(
        "b = Concat<axis = 0>(x, x) c, d = Split<axis = 0, num_outputs = 2>(b) y = Add(c, d)")),
    Special("rows-turned-round", text(
        "r = Slice(x, last, first, zero, back) y = Slice(r, last, first, zero, back)",
        last=ints(-1), first=ints(-(2**40)), zero=ints(0), back=ints(-1))),
    Special("rows-against-each-other", text(
        "r = Slice(x, last, first, zero, back) y = Sub(x, r)",
        last=ints(-1), first=ints(-(2**40)), zero=ints(0), back=ints(-1)), batched=False),
    Special("wide-rows", wide_rows, shapes={"x": (1, 4)}),
    Special("large", lambda: large(4)),
)  # fmt: skip
