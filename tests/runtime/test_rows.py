"""Operators that compute with several rows of a batch are found in the graph, whatever made-up samples show.

Every class of operators has nodes that mix rows and nodes that keep them apart, and what is said of them is compared
with what ONNX Runtime does when single rows change.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

from tests.runtime.special_models import MOODS, Special, drawn, graph, ints, whole
from weft.errors import ModelError
from weft.runtime.onnxruntime_cpu.node_times import Tracer
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.onnxruntime_cpu.samples import specs
from weft.runtime.onnxruntime_cpu.sessions import open_session
from weft.runtime.owners import Mixed, Owners, collapsed, joined, numbered, shrunk
from weft.runtime.row_rules import LOTS, RULES, WHOLE
from weft.runtime.rows import METADATA_KEY, judged

ROWS = 3

WEIGHTS: dict[str, Any] = {
    "w": drawn(4, 4), "v": drawn(4, seed=1), "c3": drawn(3, seed=2), "k": drawn(6, 3, 2, seed=3), "k8": whole(6, 3, 2),
    "d": drawn(3, 2, 2), "zero": ints(0), "one": ints(1), "two": ints(2), "three": ints(3), "both": ints(1, 2),
    "flat": ints(-1, 4), "fours": ints(-1, 4, 3), "across": ints(3, -1, 4), "ones": np.ones(3, np.float32),
    "scalar0": np.array(0), "scalar1": np.array(1), "last": ints(-1), "far": ints(-(2**40)),
    "pads0": ints(1, 0, 0, 0, 0, 0), "pads2": ints(0, 0, 1, 0, 0, 1), "q": whole(4, 4), "s": np.float32(0.1),
    "z": np.uint8(9), "z8": np.int8(0), "onoff": np.array([0, 1], np.float32), "yes": np.array([True, False, True]),
    "half": np.float32(0.5), "on": np.array(True), "off": np.array(False), "up": np.array([1, 1, 2], np.float32),
    "up0": np.array([2, 1, 1], np.float32), "lw": drawn(1, 8, 4), "lr": drawn(1, 8, 2, seed=4), "gw": drawn(1, 6, 4),
    "gr": drawn(1, 6, 2, seed=4), "rw": drawn(1, 2, 4), "rr": drawn(1, 2, 2), "idx": ints(1, 0), "corner": ints(0)[None],
    "put": drawn(1, 3, 4), "lens": ints(2, 1, 2), "aw": drawn(4, 12), "ab": drawn(12), "twice": ints(2, 1, 1),
    "signal": ints(-1, 12, 1), "step": np.array(2), "long": np.array(4), "sizes0": ints(1, 2), "ends": ints(-1),
    "grown": ints(1, 3, 4), "boxes": ints(-1, 1, 3), "most": ints(2), "filled": drawn(1), "c4": drawn(3, 1), "nil": np.float32(0), "w3": drawn(3, 4, seed=5), "lens3": ints(2, 1, 2),
    "put3": drawn(3, 4, seed=6), "grown0": ints(-1, 2, 4), "zero0": np.array(0),
}  # fmt: skip


def model(text: str, version: int = 18) -> ModelProto:
    """From ``x`` (samples by 3 by 4), ``i`` (samples by 1, of 0 to 2) and ``b`` (samples, bool) to ``y``."""
    made = graph(f"(float[n,3,4] x, int64[n,1] i, bool[n] b) => (float y) {{ {text} }}", version, **WEIGHTS)
    made.graph.output[0].ClearField("type")
    read = {name for node in made.graph.node for name in node.input}
    for kept in (made.graph.input, made.graph.initializer):
        left = [each for each in kept if each.name in read]
        del kept[:]
        kept.extend(left)
    return made


def row(made: ModelProto, mood: str, seed: int) -> dict[str, np.ndarray]:
    session = open_session(made.SerializeToString(), 1, optimise=False)
    special = Special("", lambda: made, whole=(0, 3))
    return special.rows(specs(session.get_inputs()), 1, mood, np.random.default_rng(seed))


def batch(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    return {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}


def verdict(made: ModelProto, folder: Path) -> str | None:
    """What is said of the operators of a graph; where the rows of its output are is another matter."""
    rows = [row(made, "plain", seed) for seed in range(ROWS)]
    said = judged(made, [batch(rows[:2]), batch(rows)], Tracer(folder, 1)).mixing
    return None if said and said.startswith("output ") else said


def really_mixes(made: ModelProto) -> bool:
    """Whether some element of the output is seen to change with one row and with another, or its shape with any."""
    session = open_session(made.SerializeToString(), 1, optimise=False)
    rows = [row(made, "plain", seed) for seed in range(ROWS)]
    try:
        base = session.run(["y"], batch(rows))[0]
        changed = [list(_changes(made, session, rows, place, base)) for place in range(ROWS)]
    except Exception:  # it does not take what some neighbour sends
        return True
    if any(each is None for found in changed for each in found):
        return True
    by_row = [np.any([each for each in found if each is not None], axis=0).astype(int) for found in changed]
    return bool(np.any(sum(by_row) > 1))


def _changes(made: ModelProto, session: Any, rows: Any, place: int, base: np.ndarray) -> Iterator[np.ndarray | None]:
    for mood in MOODS:
        others = [*rows[:place], row(made, mood, 77), *rows[place + 1 :]]
        found = session.run(["y"], batch(others))[0]
        if found.shape != base.shape:
            yield None
            return
        nothing = (base != base) & (found != found)
        yield (base != found) & ~nothing


MIXES = (
    # whole tensors, and lots
    "y, s1, z1 = DynamicQuantizeLinear(x)", "f = Reshape(x, flat) y = com.microsoft.DynamicQuantizeMatMul(f, q, filled)",
    "y = NonZero(x)", "y = Unique(x)", "y = Compress(x, b)", "y = Compress<axis = 0>(x, b)",
    "p = ReduceMax<keepdims = 0>(x, two) c = Reshape(p, boxes) y = NonMaxSuppression(x, c, most)",
    "y = RandomNormalLike(x)", "y = RandomUniformLike(x)", "c = Sigmoid(x) y = Bernoulli(c)",
    "y = Dropout(x, half, on)",
    # all along the axis of the samples
    "y = ReduceMax(x)", "y = ReduceMax(x, zero)", "y = ReduceSum<keepdims = 0>(x, zero)", "y = ReduceL2(x)",
    "y = ArgMax(x)", "y = Softmax<axis = 0>(x)", "y = LogSoftmax<axis = -3>(x)", "y = Hardmax<axis = 0>(x)",
    "y, p = TopK<axis = 0>(x, one)", "y = CumSum(x, scalar0)", "y = LpNormalization<axis = 0>(x)",
    "u = Unsqueeze(x, last) y = MeanVarianceNormalization(u)",
    "y, m, e = BatchNormalization<training_mode = 1>(x, ones, c3, c3, ones)",
    "t = Transpose<perm = [2,1,0]>(x) y = InstanceNormalization(t, ones, c3)",
    "t = Transpose<perm = [2,1,0]>(x) y = AveragePool<kernel_shape = [2]>(t)",
    "t = Transpose<perm = [2,1,0]>(x) y = MaxPool<kernel_shape = [2]>(t)",
    "t = Transpose<perm = [2,1,0]>(x) y = GlobalAveragePool(t)",
    "t = Transpose<perm = [2,1,0]>(x) y = GlobalMaxPool(t)",
    # products and convolutions
    'y = Einsum<equation = "nab,ncb->abc">(x, x)', 'y = Einsum<equation = "nab,mab->nm">(x, x)',
    "t = Transpose<perm = [2,1,0]>(x) y = MatMul(t, x)", "f = Flatten(x) y = Gemm<transA = 1>(f, f)",
    "f = Flatten(x) y = Gemm<transB = 1>(f, f)", "f = Flatten(x) t = Transpose(f) y = com.microsoft.FusedMatMul(f, t)",
    "t = Transpose<perm = [2,1,0]>(x) y = Conv(t, k)", "t = Transpose<perm = [2,1,0]>(x) y = ConvTranspose(t, d)",
    # over time
    "y, h = RNN<hidden_size = 2>(x, rw, rr)", "y, h, c = LSTM<hidden_size = 2>(x, lw, lr)",
    "y, h = GRU<hidden_size = 2>(x, gw, gr)",
    # picking and putting
    "f = Flatten(i) c = Mod(f, two) y = Gather(x, c)", "c = Mod(i, two) y = GatherND(x, c)",
    "f = Flatten(x) c = Mod(i, two) y = GatherElements<axis = 0>(f, c)",
    "f = Flatten(x) u = Slice(f, zero, one, one) c = Mod(i, two) "
    "y = ScatterElements<axis = 0, reduction = \"add\">(f, c, u)",
    # elements that were moved to others
    "r = Slice(x, last, far, zero, last) y = Sub(x, r)", "p = Reshape(x, across) y = ReduceMax(p, zero)",
    "t = Transpose<perm = [1,0,2]>(x) p = Reshape(t, flat) c = Reshape(p, grown0) y = ReduceMax(c, one)",
)  # fmt: skip

KEEPS = (
    # element by element
    "y = Relu(x)", "y = Add(x, c4)", "y = Mul(x, x)", "y = Clip(x, nil, half)", "g = Greater(x, half) y = Where(g, x, w3)",
    "y = BatchNormalization(x, ones, c3, c3, ones)", "y = Dropout(x)", "y = Dropout(x, half, off)",
    "c = QuantizeLinear(x, s, z) y = DequantizeLinear(c, s, z)", "y = com.microsoft.FastGelu(x)",
    "y = com.microsoft.BiasGelu(x, v)", "f = Squeeze(i, one) y = OneHot(f, three, onoff)",
    "y = PRelu(x, half)", "y = Mean(x, x, half)", "y = Shape(x)", "y = Size(x)", "f = Flatten(x) y = EyeLike(f)",
    # moving
    "y = Transpose<perm = [2,0,1]>(x)", "y = Reshape(x, flat)", "y = Pad(x, pads0)", 'y = Pad<mode = "reflect">(x, pads2)',
    "y = Tile(x, twice)", "y = Slice(x, last, far, zero, last)", "y = Gather(x, idx)", "y = GatherND(x, corner)",
    "y = Concat<axis = 0>(x, x)", "y = ScatterND(x, corner, put)", "y = Trilu(x)", "y = Compress<axis = 1>(x, yes)",
    "y = ReverseSequence<batch_axis = 1, time_axis = 0>(x, lens3)", "y, u = Split<axis = 2, num_outputs = 2>(x)",
    "s1 = Shape(x) y = Expand(v, s1)", "p = Reshape(x, across) y = Relu(p)",
    # all along other axes
    "y = ReduceMax(x, both)", "y = ReduceMax<noop_with_empty_axes = 1>(x)", "y = Softmax(x)", "y = ArgMax<axis = -1>(x)",
    "y, p = TopK(x, one)", "y = CumSum(x, scalar1)", "y = LayerNormalization(x, v)", "y = LpNormalization(x)",
    "y = LayerNormalization<axis = 1>(x, put3)", "y = MeanVarianceNormalization<axes = [1,2]>(x)",
    "y = InstanceNormalization(x, ones, c3)", "y = AveragePool<kernel_shape = [2]>(x)", "y = GlobalMaxPool(x)",
    "u = Unsqueeze(x, last) y = LRN<size = 3>(u)", "c = Slice(x, zero, three, two) y = Det(c)", "y = Resize(x, , up)",
    "u = Unsqueeze(x, last) y = DFT<axis = 1>(u)", "y = LpPool<kernel_shape = [2]>(x)",
    "t = Transpose<perm = [1,0,2]>(x) y = ReduceMax(t, zero)", "t = Transpose<perm = [1,0,2]>(x) y = CumSum(t, scalar0)",
    "y = com.microsoft.SkipLayerNormalization(x, x, v, v)",
    # products and convolutions
    "y = MatMul(x, w)", "y = MatMul(x, v)", "t = Transpose<perm = [0,2,1]>(x) y = MatMul(x, t)",
    "t = Transpose<perm = [1,2,0]>(x) y = MatMul(w, t)", "f = Flatten<axis = 2>(x) y = Gemm(f, w, v)",
    "y = com.microsoft.FusedMatMul<transB = 1>(x, x)", 'y = Einsum<equation = "nab,ncb->nac">(x, x)',
    'y = Einsum<equation = "nab,bc">(x, w)', "y = Conv(x, k)", "y = ConvTranspose(x, d)",
    "c = QuantizeLinear(x, s, z) y = ConvInteger(c, k8)", "c = QuantizeLinear(x, s, z) y = MatMulInteger(c, q)",
    "c = QuantizeLinear(x, s, z) y = QLinearMatMul(c, s, z, q, s, z8, s, z)",
    "c = QuantizeLinear(x, s, z) y = QLinearConv(c, s, z, k8, s, z8, s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.MatMulIntegerToFloat(c, q, s, s)",
    # rows along one axis
    "t = Transpose<perm = [1,0,2]>(x) y, h = RNN<hidden_size = 2>(t, rw, rr)",
    "t = Transpose<perm = [1,0,2]>(x) o, y, c = LSTM<hidden_size = 2>(t, lw, lr)",
    "t = Transpose<perm = [1,0,2]>(x) , y = GRU<hidden_size = 2>(t, gw, gr)",
    "y = com.microsoft.Attention<num_heads = 2>(x, aw, ab)", "y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x)",
    "f = Reshape(x, signal) y = STFT(f, step, , long)",
    # picking within samples
    "y = Gather(w, i)", "y = GatherND(w, i)", "f = Flatten(x) y = GatherElements<axis = 1>(f, i)",
    "f = Squeeze(i, one) l = Add(f, one) y = ReverseSequence<batch_axis = 0, time_axis = 1>(x, l)",
    # quantised twice by the same numbers
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearAdd(c, s, z, c, s, z, s, z)",
    "c = QuantizeLinear(x, s, z) y = com.microsoft.QLinearConcat<axis = 1>(s, z, c, s, z, c, s, z)",
    # what is nobody's may be looked at as a whole
    "c, s1, z1 = DynamicQuantizeLinear(w) m = DequantizeLinear(c, s1, z1) y = MatMul(x, m)", "s1 = Shape(x) y = ReduceProd(s1)",
    "s1 = Shape(x) c = ConstantOfShape(s1) y = NonZero(c)",
)  # fmt: skip

CAUTIOUS = (
    "y = Resize(x, , up0)", "f = Flatten(x) u = Cast<to = 1>(i) y = ScatterElements<axis = 1>(f, i, u)",
    "c = SplitToSequence<axis = 0>(x) y = ConcatFromSequence<axis = 0>(c)", "c = SequenceConstruct(x, x) y = SequenceAt(c, zero0)",
    "t = Transpose<perm = [1,0,2]>(x) u = Transpose<perm = [0,2,1]>(x) y = com.microsoft.FusedMatMul<transBatchA = 1>(t, u)", "c = Optional(x) y = OptionalGetElement(c)",
    'y = Einsum<equation = "...b,bc->...c">(x, w)',
)  # fmt: skip
"""Of these it is not known, or not found out, that they keep rows apart."""


@pytest.mark.parametrize("text", MIXES)
def test_operators_that_look_across_rows_are_found(text: str, tmp_path: Path) -> None:
    made = model(text)
    assert really_mixes(made)
    assert verdict(made, tmp_path)


@pytest.mark.parametrize("text", KEEPS)
def test_operators_that_keep_to_their_rows_are_not(text: str, tmp_path: Path) -> None:
    made = model(text)
    assert verdict(made, tmp_path) is None
    assert not really_mixes(made)


@pytest.mark.parametrize("text", CAUTIOUS)
def test_what_is_not_known_counts_as_mixing(text: str, tmp_path: Path) -> None:
    assert verdict(model(text), tmp_path)


# Real files


def quantised(path: Path, *, says: str | None = None) -> Path:
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


def test_a_model_with_such_an_operator_is_not_batched_and_says_why(tmp_path: Path) -> None:
    found = prepare(quantised(tmp_path / "q.onnx"), LoadOptions())
    assert (found.max_batch, found.batchable) == (1, False)
    (remark,) = found.remarks
    assert remark.startswith("not batched: DynamicQuantizeLinear") and 'rows = "independent"' in remark
    with pytest.raises(ModelError, match=r"max_batch is 4, but the model cannot be batched: DynamicQuantizeLinear"):
        prepare(quantised(tmp_path / "q.onnx"), LoadOptions(max_batch=4))


def test_it_is_batched_if_its_file_or_its_settings_say_so(tmp_path: Path) -> None:
    said = prepare(quantised(tmp_path / "said.onnx", says="independent"), LoadOptions(max_batch=4))
    told = prepare(quantised(tmp_path / "told.onnx"), LoadOptions(max_batch=4, independent_rows=True))
    assert [(each.max_batch, each.batchable) for each in (said, told)] == [(4, True)] * 2


def test_a_file_that_says_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"weft\.rows = 'mixed'"):
        prepare(quantised(tmp_path / "q.onnx", says="mixed"), LoadOptions())
