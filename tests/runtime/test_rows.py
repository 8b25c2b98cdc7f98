"""Operators that compute with all rows of a batch at once are found in the graph, whatever made-up samples show."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, helper, numpy_helper, parser

from weft.errors import ModelError
from weft.runtime.onnxruntime_cpu.node_times import made_shapes
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.runtime.rows import METADATA_KEY, NOWHERE, Spread, mixing, spreads

HEAD = '<ir_version: 9, opset_import: ["" : {version}, "com.microsoft" : 1]>\n'


def model(text: str, version: int = 18) -> ModelProto:
    """A graph in ONNX's own words, from ``x`` (samples by 3 by 4), ``i`` (samples) and ``c`` (bool) to ``y``."""
    head = HEAD.format(version=version)
    return parser.parse_model(f"{head}g (float[n,3,4] x, int64[n] i, bool c) => (float y) {text}")


def judged(text: str, version: int = 18, **known: tuple[set[int], int]) -> str | None:
    """What is said of a graph whose tensors have samples along these axes, of so many; ``x`` along the first of 3."""
    found = {name: Spread(frozenset(axes), rank) for name, (axes, rank) in known.items()}
    return mixing(model(text, version), {"x": Spread(frozenset({0}), 3)} | found)


@pytest.mark.parametrize(
    "node",
    [
        "DynamicQuantizeLinear(x)", "com.microsoft.DynamicQuantizeMatMul(x, w, w)", "ReduceMax(x)",
        "ReduceMax<axes = [0]>(x)", "ReduceMax<axes = [-3]>(x)", "ReduceSum(x, zero)", "ArgMax(x)",
        "Softmax<axis = 0>(x)", "Softmax<axis = -3>(x)", "TopK<axis = 0>(x, one)", "CumSum(x, zero)",
        "MeanVarianceNormalization(x)", "LpNormalization<axis = 0>(x)", "LayerNormalization<axis = 0>(x, w)",
        "BatchNormalization<training_mode = 1>(x, w, w, w, w)", 'Einsum<equation = "nab,ncb->abc">(x, x)', "NonZero(x)",
        "Unique(x)", "Compress(x, i)", "Compress<axis = 0>(x, i)", "Gather(x, i)", "GatherElements(x, i)",
        "RandomNormalLike(x)", "LSTM<hidden_size = 4>(x, w, w)",
    ],
)  # fmt: skip
def test_operators_that_look_across_rows_are_found(node: str) -> None:
    operator = re.split(r"[<(]", node)[0].removeprefix("com.microsoft.")
    found = judged(f"<float[4,4] w, int64[1] zero = {{0}}, int64[1] one = {{1}}> {{ y = {node} }}")
    assert str(found).startswith(f"{operator} ")


@pytest.mark.parametrize(
    "text",
    [
        "{ y = Relu(x) }",
        "{ y = ReduceMax<axes = [1, 2]>(x) }",
        "{ y = ReduceMax<noop_with_empty_axes = 1>(x) }",
        "{ y = Softmax(x) }",
        "{ y = ArgMax<axis = -1>(x) }",
        "{ y = LayerNormalization(x, w) }",
        "{ y = BatchNormalization(x, w, w, w, w) }",
        '{ y = Einsum<equation = "nab,ncb->nac">(x, x) }',
        "{ y = MatMul(x, w) }",
        "{ t = Gather(w, i)  y = Relu(t) }",
        "{ y = Gather(x, one) }",
        "{ s = Shape(x)  z = ConstantOfShape(s)  y = NonZero(z) }",
        "{ s = Shape(x)  y = ReduceProd(s) }",
        "{ y, m = DynamicQuantizeLinear(w) }",
        "{ y = Compress<axis = 1>(x, i) }",
        "{ y = GlobalAveragePool(x) }",
        "{ y = com.microsoft.MatMulIntegerToFloat(x, w, w, w) }",
    ],
)
def test_operators_that_keep_to_their_rows_are_not(text: str) -> None:
    assert judged(f"<float[4,4] w, int64[1] one = {{1}}> {text}") is None


def test_before_opset_13_a_softmax_takes_all_axes_from_its_own_on() -> None:
    assert judged("{ y = Softmax<axis = 0>(x) }", version=11)
    assert judged("{ y = Softmax(x) }", version=11) is None
    transposed = "{ t = Transpose<perm = [1, 0, 2]>(x)  y = Softmax(t) }"
    assert judged(transposed, version=11, t=({1}, 3))
    assert judged(transposed, version=13, t=({1}, 3)) is None


@pytest.mark.parametrize(("axis", "mixes"), [(0, False), (1, True), (2, False)])
def test_axes_count_where_the_samples_are(axis: int, mixes: bool) -> None:
    text = f"{{ t = Transpose<perm = [1, 0, 2]>(x)  y = ReduceMean<axes = [{axis}]>(t) }}"
    assert (judged(text, t=({1}, 3)) is not None) == mixes


def test_products_that_sum_over_samples_are_found() -> None:
    swapped = "{ t = Transpose<perm = [2, 1, 0]>(x)  y = MatMul(t, x) }"
    assert judged(swapped, t=({2}, 3))
    assert judged("{ t = Flatten(x)  y = MatMul(w, t) }".replace("{ ", "<float[4,4] w> { ", 1), t=({0}, 2))
    assert judged("{ t = Flatten(x)  y = Gemm<transA = 1>(t, t) }", t=({0}, 2))
    assert judged("{ y = com.microsoft.FusedMatMul<transB = 1>(x, x) }") is None


def loop(cond: str) -> ModelProto:
    """A loop over *x* with a trip count of 3, that goes on as *cond* says."""
    body = parser.parse_graph(
        f"body (int64 turn, bool before, float[n,3,4] last) => (bool after, float[n,3,4] next) "
        f"{{ next = Relu(last)  {cond} }}"
    )
    made = model("{ y = Relu(x) }")
    made.graph.initializer.append(numpy_helper.from_array(np.array(3), "three"))
    made.graph.node.insert(0, helper.make_node("Loop", ["three", "", "x"], ["z"], body=body))
    return made


def test_a_loop_that_values_end_is_found_and_one_of_so_many_turns_is_not() -> None:
    known = {"x": Spread(frozenset({0}), 3)}
    assert mixing(loop("after = Identity(before)"), known) is None
    ended = loop("s = ReduceMax<axes = [1, 2], keepdims = 0>(last)  after = Cast<to = 9>(s)")
    assert str(mixing(ended, known)).startswith("Loop ")


def test_what_is_inside_a_loop_is_looked_at() -> None:
    body = "q, s, p = DynamicQuantizeLinear(last)  after = Identity(before)"
    assert "DynamicQuantizeLinear" in str(mixing(loop(body), {}))


def test_samples_lie_along_the_axes_that_grow() -> None:
    alone = {"a": (1, 3), "b": (3, 1, 4), "c": (2,), "d": (1, 1)}
    assert spreads(alone, {"a": (2, 3), "b": (3, 2, 4), "c": (2,), "d": (2, 2)}) == {
        "a": Spread(frozenset({0}), 2), "b": Spread(frozenset({1}), 3), "c": NOWHERE._replace(rank=1),
        "d": Spread(frozenset({0, 1}), 2),
    }  # fmt: skip


def test_the_shapes_of_all_tensors_are_seen_in_a_run(tmp_path: Path) -> None:
    made = parser.parse_model(
        f"{HEAD.format(version=18)}g (float[n,3,4] x) => (float[m] y) <int64[1] flat = {{-1}}>"
        "{ t = Transpose<perm = [1, 0, 2]>(x)  y = Reshape(t, flat) }"
    )
    feeds = [{"x": np.zeros((rows, 3, 4), np.float32)} for rows in (1, 2)]
    assert made_shapes(made, tmp_path, 1, feeds) == [
        {"x": (1, 3, 4), "t": (3, 1, 4), "y": (12,)},
        {"x": (2, 3, 4), "t": (3, 2, 4), "y": (24,)},
    ]


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
