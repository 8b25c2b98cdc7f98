"""ONNX graphs as modules of torch: exporters' idioms, networks and random graphs, beside ONNX Runtime."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from tests.models.exporter_graphs import IDIOMS, attention
from tests.runtime.cuda.conversion_cases import idiom_graphs, random_graph, special_graphs
from tests.runtime.cuda.converted import drawn_for, in_torch, network_problems, problem, problems
from tests.runtime.cuda.converted_networks import FLOAT32_ONLY, NETWORKS
from tests.runtime.row_graphs import KEEPING, MIXING
from tests.runtime.special_models import graph
from weft.base.errors import ModelError
from weft.models import operators
from weft.models.operators import OPERATORS
from weft.runtime.cuda.precision import BF16, FP32
from weft.runtime.cuda.torch_attention import ATTENTION
from weft.runtime.cuda.torch_products import PRODUCTS
from weft.runtime.tensors import DATATYPES


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Operators: tests/models/test_operators.py has each by itself


def test_a_wrong_meaning_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(OPERATORS["Tanh"], torch=lambda t, x: t.torch.sigmoid(x))
    monkeypatch.setattr(operators, "OPERATORS", {**OPERATORS, "Tanh": wrong})
    feed = {"x": np.ones((2, 3), np.float32)}
    assert problem(graph("(float[n,3] x) => (float[n,3] y) { y = Relu(x) }"), feed) is None
    assert "differs" in str(problem(graph("(float[n,3] x) => (float[n,3] y) { y = Tanh(x) }"), feed))


def test_what_has_no_meaning_is_named() -> None:
    feed = {"x": np.ones((2, 3), np.float32)}
    text = "(float[n,3] x) => (float[a,b] y) { s = ReduceSum<keepdims = 0>(x) i = NonZero(x) y = Cast<to = 1>(i) }"
    with pytest.raises(ModelError, match="NonZero has no meaning in torch"):
        in_torch(graph(text), feed)
    text = "(float[n,3] x, int64[1] k) => (float[n,m] y) { y, i = TopK(x, k) }"
    with pytest.raises(ModelError, match=r"node_of_y \(TopK\): its input 'k' is computed from values"):
        in_torch(graph(text), {**feed, "k": np.array([2])})


@pytest.mark.parametrize("ir_version", [3, 4, 9])
def test_weights_that_a_file_lists_as_inputs_are_folded_and_no_inputs(ir_version: int) -> None:
    text = "(float[n,3] x, float[3] w) => (float[n,3] y) { v = Neg(w) y = Add(x, v) }"
    model, feed = graph(text, 8, ir_version, w=np.float32([1, 2, 3])), {"x": np.ones((2, 3), np.float32)}
    assert problem(model, feed) is None
    module, _ = in_torch(model, feed)
    assert [name for name, _ in module.inputs] == ["x"] and [step.operator for step in module.steps] == ["Add"]


# Graphs


@pytest.mark.parametrize("idiom", IDIOMS, ids=lambda idiom: idiom.name)
def test_exporters_idioms_are_converted(idiom: Any) -> None:
    assert problems(idiom_graphs(idiom)) == (2, [])


def test_special_models_are_converted_or_refused_by_name() -> None:
    count, wrong = problems(special_graphs())
    assert not wrong and count > 60


@settings(max_examples=40)
@given(steps=st.lists(st.sampled_from(KEEPING + MIXING), min_size=1, max_size=6), seed=st.integers(0, 2**16))
def test_random_graphs_are_converted(steps: list[str], seed: int) -> None:
    assert problems([random_graph(steps, seed)]) == (1, [])


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_converted(name: str) -> None:
    assert network_problems(*NETWORKS[name](), [FP32] if name in FLOAT32_ONLY else [FP32, BF16]) == []


def test_there_are_forty_networks_without_packages() -> None:
    assert sum("package" not in name for name in NETWORKS) >= 40


# Attention

MASKED = "m = Add(d, mask)"
SPELLED = (
    "(float[2,3,4,5] q, float[2,3,5,7] k, float[2,3,7,5] v, float[{mask}] mask) => (float[2,3,4,5] y) {{ {body} }}"
)


@pytest.mark.parametrize(
    ("body", "mask", "fused"),
    [
        (
            "s = MatMul(q, k) d = Mul(s, two) m = Add(d, mask) p = Softmax<axis = -1>(m) y = MatMul(p, v)",
            "2,1,1,7",
            True,
        ),
        ("s = MatMul(q, k) d = Div(s, two) m = Add(mask, d) p = Softmax<axis = 3>(m) y = MatMul(p, v)", "4,7", True),
        ("s = MatMul(q, k) p = Softmax<axis = -1>(s) y = MatMul(p, v)", "1", True),
        ("s = MatMul(q, k) p = Softmax<axis = 2>(s) y = MatMul(p, v)", "1", True),
        ("s = MatMul(q, k) d = Tanh(s) p = Softmax<axis = -1>(d) y = MatMul(p, v)", "1", False),
        ("s = MatMul(q, k) p = Softmax<axis = -1>(s) z = MatMul(p, v) r = ReduceMax(p) y = Add(z, r)", "1", False),
        ("s = MatMul(q, k) m = Mul(s, mask) p = Softmax<axis = -1>(m) y = MatMul(p, v)", "1", False),
    ],
)
@pytest.mark.parametrize("version", [11, 18])
def test_attention_becomes_one_step_only_where_it_is_that(body: str, mask: str, fused: bool, version: int) -> None:
    model = graph(SPELLED.format(mask=mask, body=body), version, two=np.float32(2))
    feed = drawn_for(model, {})
    assert problem(model, feed) is None
    module, _ = in_torch(model, feed)
    assert any(step.operator == ATTENTION for step in module.steps) == fused


@pytest.mark.parametrize("opset", (9, 13, 17))
def test_attention_of_exporters_becomes_one_step(opset: int) -> None:
    model = attention(opset).model
    module, _ = in_torch(model, drawn_for(model, {"x": (2, 10, 32)}))
    assert [step.operator for step in module.steps].count(ATTENTION) == 1
    (products,) = (step for step in module.steps if step.operator == PRODUCTS)
    assert len(products.outputs) == 3
    assert problem(model, drawn_for(model, {"x": (2, 10, 32)})) is None


# Products

SHIFTED = "{to}m = MatMul(x, w{to}) {to}s = Add({to}m, b{to})"
HEAD = SHIFTED + " {to}r = Reshape({to}s, heads) {to} = Transpose<perm = {by}>({to}r)"


def test_biases_of_products_are_merged_too() -> None:
    heads = f"{HEAD.format(to='q', by=[0, 2, 1, 3])} {HEAD.format(to='k', by=[0, 2, 3, 1])}"
    text = f"(float[2,3,4] x) => (float[2,2,3,3] y) {{ {heads} y = MatMul(q, k) }}"
    rng = np.random.default_rng(0)
    constants = {name: rng.standard_normal((4, 4)[: 2 if name[0] == "w" else 1]) for name in ("wq", "wk", "bq", "bk")}
    floats = {name: constant.astype(np.float32) for name, constant in constants.items()}
    model, feed = graph(text, **floats, heads=np.array([0, 0, 2, 2])), {"x": np.float32(rng.standard_normal((2, 3, 4)))}
    assert problem(model, feed) is None
    module, _ = in_torch(model, feed)
    assert [step.operator for step in module.steps].count("Add") == 0
    assert sorted(buffer.numel() for buffer in module.buffers()) == [8, 32]


@pytest.mark.parametrize(
    ("body", "merged"),
    [
        ("q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv) s = Add(q, k) y = Mul(s, v)", [3]),
        # not merged: products of other tensors, and a weight that is read twice
        ("q = MatMul(x, wq) h = Tanh(x) k = MatMul(h, wk) y = Add(q, k)", []),
        ("q = MatMul(x, wq) k = MatMul(x, wk) r = MatMul(k, wq) s = Add(q, k) y = Add(s, r)", []),
    ],
)
def test_products_of_one_tensor_are_merged(body: str, merged: list[int]) -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((4, 4)).astype(np.float32) for name in re.findall(r"w[qkv]", body)}
    model = graph(f"(float[n,3,4] x) => (float[n,3,4] y) {{ {body} }}", **weights)
    feed = {"x": rng.standard_normal((2, 3, 4)).astype(np.float32)}
    assert problem(model, feed) is None
    module, _ = in_torch(model, feed)
    assert [len(step.outputs) for step in module.steps if step.operator == PRODUCTS] == merged
    assert sum(buffer.numel() for buffer in module.buffers()) == 16 * len(weights)


def test_weights_in_16_bits_stay_finite_and_divisors_stay_above_zero() -> None:
    text = "(float[n,3] x) => (float[n,3] y) { m = Add(x, mask) a = Add(m, tiny) y = Identity(a) }"
    model = graph(text, mask=np.float32([-3e38, 0, 3e38]), tiny=np.float32([1e-12]))
    module, _ = in_torch(model, {"x": np.ones((1, 3), np.float32)}, torch.float16)
    assert sorted(buffer.flatten().tolist() for buffer in module.buffers()) == [[-65504.0, 0.0, 65504.0], [2.0**-24]]


def test_types_of_inputs_and_outputs_are_those_of_the_file() -> None:
    assert DATATYPES["FP32"] == np.float32
    model = graph("(float[n,3] x, int64[n,3] i) => (float[n,3] y, int64[n,3] j) { y = Tanh(x) j = Add(i, i) }")
    feed = {"x": np.ones((2, 3), np.float32), "i": np.ones((2, 3), np.int64)}
    _, outputs = in_torch(model, feed, torch.float16)
    assert [output.dtype for output in outputs] == [np.float32, np.int64]
