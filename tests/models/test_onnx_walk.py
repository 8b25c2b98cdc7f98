"""The order and names of layers, and the bodies of control flow."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.models.onnx_graphs import (
    BOOL,
    I64,
    graph,
    node,
    only,
    read,
    scalar,
    tensor,
    unshaped,
    weight,
)
from weft.base.errors import ModelError
from weft.models.layer import Gemm, Model

# Order and names


def test_nodes_run_after_their_producers_else_in_file_order():
    nodes = [
        node("Relu", ["b"], ["y"], name="last"),
        node("Exp", ["x"], ["a"], name="first"),
        node("Sin", ["x"], ["c"], name="side"),
        node("Cos", ["a"], ["b"], name="middle"),
    ]
    model = read(nodes, [tensor("x", 4)], ["y", "c"])
    assert [layer.name for layer in model.layers] == ["first", "side", "middle", "last"]


def test_a_cycle_is_refused():
    nodes = [node("Add", ["x", "b"], ["a"], name="p"), node("Relu", ["a"], ["b"], name="q")]
    with pytest.raises(ModelError, match="net: the graph has a cycle through p"):
        read(nodes, [tensor("x", 4)], ["b"])


def test_a_name_that_nothing_produces_is_refused():
    with pytest.raises(ModelError, match="r reads 'ghost', which nothing produces"):
        read([node("Relu", ["ghost"], ["y"], name="r")], [tensor("x", 4)], ["y"])
    with pytest.raises(ModelError, match="the graph output reads 'ghost'"):
        read([node("Relu", ["x"], ["y"], name="r")], [tensor("x", 4)], ["ghost"])
    with pytest.raises(ModelError, match="two nodes produce 'y'"):
        read([node("Relu", ["x"], ["y"]), node("Exp", ["x"], ["y"])], [tensor("x", 4)], ["y"])


def test_a_node_without_its_inputs_is_named():
    with pytest.raises(ModelError, match="c \\(Conv\\): input 1 is missing"):
        read([node("Conv", ["x"], ["y"], name="c")], [tensor("x", 1, 1, 2, 2)], ["y"])


def test_names_are_unique_and_made_up_where_missing():
    nodes = [
        node("Relu", ["x"], ["a"], name="twin"),
        node("Exp", ["a"], ["b"], name="twin"),
        node("Sin", ["b"], ["y"]),
    ]
    model = read(nodes, [tensor("x", 4)], ["y"])
    assert [layer.name for layer in model.layers] == ["twin", "twin_2", "Sin_2"]


# Control flow


def branch(*widths: int) -> onnx.GraphProto:
    """A body that multiplies the outer ``x`` by weights of its own, one after another."""
    nodes, previous = [], "x"
    for place, _ in enumerate(widths[1:]):
        nodes.append(node("MatMul", [previous, f"w{place}"], [f"h{place}"], name=f"fc{place}"))
        previous = f"h{place}"
    pairs = enumerate(pairwise(widths))
    return graph(nodes, [], [previous], [weight(f"w{place}", a, b) for place, (a, b) in pairs])


def test_the_costlier_branch_is_assumed():
    nodes = [node("If", ["c"], ["y"], name="if", then_branch=branch(4, 2), else_branch=branch(4, 8, 2))]
    model = read(nodes, [tensor("x", 3, 4), tensor("c", dtype=BOOL)], ["y"])
    assert [layer.name for layer in model.layers] == ["if/else/fc0", "if/else/fc1"]
    assert model.macs == 3 * (4 * 8 + 8 * 2)


def test_a_condition_that_follows_from_shapes_is_decided():
    nodes = [
        node("Shape", ["x"], ["s"]),
        node("ReduceProd", ["s"], ["n"], keepdims=0),
        node("Equal", ["n", "twelve"], ["c"]),
        node("If", ["c"], ["y"], name="if", then_branch=branch(4, 2), else_branch=branch(4, 8, 2)),
    ]
    model = read(nodes, [tensor("x", 3, 4)], ["y"], [scalar("twelve", np.int64(12))])
    assert [layer.name for layer in model.layers] == ["if/then/fc0"]


def test_a_branch_that_cannot_work_at_these_sizes_is_not_taken():
    good, bad = branch(4, 2), branch(7, 100)
    inputs = [tensor("x", 3, 4), tensor("c", dtype=BOOL)]
    model = read([node("If", ["c"], ["y"], then_branch=bad, else_branch=good)], inputs, ["y"])
    assert only(model).gemm == Gemm(3, 4, 2)
    with pytest.raises(ModelError, match="inner sizes differ: 4 in 3x4, 7 in 7x100"):
        read([node("If", ["c"], ["y"], then_branch=bad, else_branch=bad)], inputs, ["y"])


def loop_body() -> onnx.GraphProto:
    nodes = [
        node("Identity", ["cond"], ["cond_out"]),
        node("MatMul", ["state", "w"], ["next"], name="step"),
        node("Relu", ["next"], ["each"], name="act"),
    ]
    inputs = [tensor("i", dtype=I64), tensor("cond", dtype=BOOL), unshaped("state")]
    return graph(nodes, inputs, [unshaped("cond_out", BOOL), "next", "each"])


def looped(*more, constants=(), inputs=()) -> Model:
    nodes = [node("Loop", ["trips", "go", "x"], ["last", "all"], name="loop", body=loop_body()), *more]
    inputs = [tensor("x", 1, 4), *inputs]
    return read(nodes, inputs, ["last", "all"], [weight("w", 4, 4), *constants])


def test_a_loop_counts_its_body_once_per_known_trip():
    model = looped(constants=[scalar("trips", np.int64(5)), scalar("go", True)])
    assert [layer.name for layer in model.layers] == ["loop/body/step", "loop/body/act"]
    step, act = model.layers
    assert (step.gemm, step.weights, step.parameters) == (Gemm(5, 4, 4), 16, 16)
    assert (step.output_elements, act.input_elements) == (20, 20)


@pytest.mark.parametrize(
    ("constants", "inputs"),
    [
        ([scalar("go", True)], [tensor("trips", dtype=I64)]),
        ([scalar("trips", np.int64(5))], [tensor("go", dtype=BOOL)]),
        ([scalar("trips", np.int64(2**63 - 1)), scalar("go", True)], []),
    ],
)
def test_a_loop_of_unknown_length_counts_once(constants, inputs):
    assert looped(constants=constants, inputs=inputs).layers[0].gemm == Gemm(1, 4, 4)


def test_a_scan_runs_once_per_element_of_its_sequence():
    body = graph(
        [
            node("MatMul", ["state", "w"], ["h"], name="step"),
            node("Add", ["h", "item"], ["next"], name="add"),
        ],
        [unshaped("state"), unshaped("item")],
        ["next", tensor("next2", 2, 4)],
    )
    body.node.append(node("Identity", ["next"], ["next2"]))
    model = read(
        [
            node("Scan", ["s0", "seq"], ["last", "all"], name="scan", body=body, num_scan_inputs=1),
            node("Relu", ["all"], ["y"], name="after"),
        ],
        [tensor("s0", 2, 4), tensor("seq", 7, 2, 4)],
        ["last", "y"],
        [weight("w", 4, 4)],
    )
    assert [layer.name for layer in model.layers] == ["scan/body/step", "scan/body/add", "after"]
    assert model.layers[0].gemm == Gemm(7 * 2, 4, 4)
    assert model.layers[2].input_elements == 7 * 2 * 4


def test_functions_of_the_file_are_inlined():
    body = [node("MatMul", ["a", "b"], ["m"]), node("Relu", ["m"], ["r"])]
    function = helper.make_function(
        "acme",
        "Dense",
        ["a", "b"],
        ["r"],
        body,
        [helper.make_opsetid("", 17), helper.make_opsetid("acme", 1)],
    )
    nodes = [node("Dense", ["x", "w"], ["y"], domain="acme")]
    layer = only(read(nodes, [tensor("x", 3, 4)], ["y"], [weight("w", 4, 2)], functions=[function]))
    assert (layer.op, layer.gemm) == ("MatMul+Relu", Gemm(3, 4, 2))


def test_functions_that_call_themselves_are_refused():
    function = helper.make_function(
        "acme", "F", ["a"], ["r"], [node("F", ["a"], ["r"], domain="acme")], [helper.make_opsetid("acme", 1)]
    )
    with pytest.raises(ModelError, match="functions cannot be inlined"):
        read([node("F", ["x"], ["y"], domain="acme")], [tensor("x", 3)], ["y"], functions=[function])


def test_guesses_within_a_body_name_the_way_to_it():
    body = graph([node("NonZero", ["x"], ["p"], name="find")], [], ["p"])
    other = graph([node("Identity", ["q"], ["r"])], [], ["r"])
    model = read(
        [node("If", ["c"], ["y"], name="either", then_branch=body, else_branch=other)],
        [tensor("c", dtype=BOOL), tensor("x", 4, 4), tensor("q", 1, 1, dtype=I64)],
        ["y"],
    )
    assert [guess.partition(" (")[0] for guess in model.guesses] == ["either/then/find"]


def test_a_loop_of_unknown_length_says_so():
    body = graph(
        [node("Identity", ["c"], ["d"]), node("Relu", ["s"], ["t"]), node("Identity", ["t"], ["u"])],
        [tensor("i", dtype=I64), tensor("c", dtype=BOOL), tensor("s", 4)],
        ["d", "t", "u"],
    )
    model = read(
        [node("Loop", ["n", "", "x"], ["y", "rows"], name="turns", body=body)],
        [tensor("n", dtype=I64), tensor("x", 4)],
        ["y", "rows"],
    )
    (guess,) = model.guesses
    assert guess.startswith("turns (Loop): the shape of 'rows' is not known, taken as 1x4: how often the loop runs")
