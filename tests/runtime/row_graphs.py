"""Random graphs of steps that keep the rows of a batch apart and steps that mix them.

Every step makes a tensor of samples by 6 of one or two such tensors, ``a`` and ``b``; names that end in a dot are its
own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto, helper, numpy_helper

from tests.runtime.special_models import drawn, graph, ints
from weft.runtime.rows import METADATA_KEY

KEEPING = (
    "y = Relu(a)",
    "y = Add(a, b)",
    "c. = Greater(a, b) y = Where(c., b, a)",
    "m. = MatMul(a, w) y = Tanh(m.)",
    "y = Softmax<axis = 1>(a)",
    "m. = ReduceMax<keepdims = 1>(a, one) y = Sub(a, m.)",
    "t. = Transpose(a) s. = CumSum(t., zero0) y = Transpose(s.)",
    "p. = Reshape(a, threes) q. = Softmax<axis = 1>(p.) y = Reshape(q., sixes)",
    "p. = Reshape(a, two_threes) q. = Transpose<perm = [0,2,1]>(p.) y = Reshape(q., sixes)",
    "p. = Reshape(a, two_threes) q. = Transpose<perm = [1,0,2]>(p.) r. = Relu(q.) s. = Transpose<perm = [1,0,2]>(r.) "
    "y = Reshape(s., sixes)",
    "r. = Slice(a, last, first, zero, back) s. = Tanh(r.) y = Slice(s., last, first, zero, back)",
    "j. = Concat<axis = 0>(a, b) k., l. = Split<axis = 0, num_outputs = 2>(j.) y = Sub(k., l.)",
    "y = LayerNormalization(a, g)",
    "v., i. = TopK(a, three) y = Concat<axis = 1>(v., v.)",
    "i. = ArgMax<axis = 1, keepdims = 1>(a) f. = Cast<to = 1>(i.) y = Add(a, f.)",
    'y = Einsum<equation = "ni,ij->nj">(a, w)',
    "u. = Unsqueeze(a, one) v. = Unsqueeze(b, two) o. = MatMul(v., u.) y = ReduceSum<keepdims = 0>(o., one)",
    "i. = ArgMax<axis = 1, keepdims = 0>(a) e. = Gather(w, i.) y = Add(e., a)",
    "i. = ArgMax<axis = 1, keepdims = 1>(b) e. = GatherElements<axis = 1>(a, i.) y = Sub(a, e.)",
    "s. = Shape(a) e. = Expand(g, s.) y = Mul(a, e.)",
    "q. = QuantizeLinear(a, scale, point) y = DequantizeLinear(q., scale, point)",
    "t. = Tile(a, twice) y = Slice(t., zero, six, one)",
)
"""Steps that keep rows apart."""

MIXING = (
    "y = Softmax<axis = 0>(a)",
    "m. = ReduceMax<keepdims = 1>(a, zero) y = Sub(a, m.)",
    "m. = ReduceMean<keepdims = 1>(a) y = Sub(b, m.)",
    "y = CumSum(a, zero0)",
    "q., s., z. = DynamicQuantizeLinear(a) y = DequantizeLinear(q., s., z.)",
    "t. = Transpose(b) p. = MatMul(a, t.) y = MatMul(p., b)",
    "r. = Slice(a, last, first, zero, back) y = Add(b, r.)",
    "p. = Reshape(a, threes_first) q. = Softmax<axis = 0>(p.) s. = Shape(a) y = Reshape(q., s.)",
    "m. = ReduceMax<keepdims = 0>(a, one) v., i. = TopK(m., one) y = Sub(a, v.)",
    'g. = Einsum<equation = "ni,nj->ij">(a, b) y = MatMul(a, g.)',
    "t. = Transpose(a) u. = Unsqueeze(t., zero) i. = MeanVarianceNormalization<axes = [1, 2]>(u.) "
    "s. = Squeeze(i., zero) y = Transpose(s.)",
    "r. = ReduceMax<keepdims = 0>(a, one) k. = ArgMax<axis = 0, keepdims = 1>(r.) l. = Gather(a, k.) y = Sub(b, l.)",
)
"""Steps that mix them."""


def random_model(steps: list[str], seed: int) -> ModelProto:
    """The steps one after another, each from tensors that were made before, chosen by the seed."""
    rng = np.random.default_rng(seed)
    made, lines = ["x"], []
    for number, step in enumerate(steps):
        one, other = (made[int(rng.integers(max(0, len(made) - 3), len(made)))] for _ in "ab")
        words = step.replace("(", "( ").replace(")", " )").replace(",", " , ").split(" ")
        renamed = {"a": made[-1] if number else one, "b": other, "y": f"t{number}"}
        lines.append(" ".join(renamed.get(word, word.replace(".", f"_{number}")) for word in words))
        made.append(f"t{number}")
    body = " ".join(lines)
    return graph(
        f"(float[n,6] x) => (float[n,6] y) {{ {body} y = Identity({made[-1]}) }}",
        w=drawn(6, 6), g=drawn(6, seed=1), zero=ints(0), one=ints(1), two=ints(2), three=ints(3), six=ints(6),
        zero0=np.array(0, np.int64), last=ints(-1), first=ints(-(2**40)), back=ints(-1), threes=ints(-1, 3),
        sixes=ints(-1, 6), two_threes=ints(-1, 2, 3), threes_first=ints(3, -1), scale=np.float32(0.1),
        point=np.uint8(128), twice=ints(1, 2),
    )  # fmt: skip


def quantised_model(path: Path, *, says: str | None = None) -> Path:
    """The largest of eight sums of 8-bit products; the scale is that of the largest value of all that come together."""
    rng = np.random.default_rng(0)
    weights = numpy_helper.from_array(rng.integers(-127, 128, (32, 8)).astype(np.int8), "w")
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
        helper.make_node("MatMulInteger", ["q", "w", "zero"], ["sums"]),
        helper.make_node("ArgMax", ["sums"], ["y"], axis=1, keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "quantised",
        [helper.make_tensor_value_info("x", 1, ["n", 32])],
        [helper.make_tensor_value_info("y", 7, ["n"])],
        [weights],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    if says is not None:
        helper.set_model_props(made, {METADATA_KEY: says})
    path.write_bytes(made.SerializeToString())
    return path
