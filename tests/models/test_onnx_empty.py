"""What ONNX allows and takes no time: inputs with a size of 0, graphs that only relabel, graphs without a node."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import helper

from tests.models.exporter_graphs import BOOL, F32, I64, Sketch, info
from tests.models.onnx_graphs import node, proto, tensor, weight
from tests.models.runtime_shapes import agree
from weft.base.errors import ModelError, ProfileError
from weft.devices import load_npu
from weft.devices.costs.layer_costs import estimate
from weft.devices.costs.program import Clock, one_at_a_time
from weft.models.onnx_import import import_onnx
from weft_map.estimate import group_layers


def products(s: Sketch) -> list[str]:
    return [s.op("MatMul", "x", s.weight(4, 3)), s.op("Gemm", s.op("Relu", "x"), s.weight(3, 4), s.weight(3), transB=1)]


def joined(s: Sketch) -> list[str]:
    both = s.op("Concat", "x", s.weight(2, 4), axis=0)
    return [both, s.op("Softmax", both, axis=1), s.reduce("ReduceSum", "x", 0), s.op("Transpose", "x", perm=[1, 0])]


def viewed(s: Sketch) -> list[str]:
    flat = s.view("x", s.size("x", 0), 2, 2)
    zeros = s.op("ConstantOfShape", s.op("Shape", "x"), value=helper.make_tensor("v", I64, [1], [0]))
    return [flat, s.op("NonZero", "x"), s.unsqueeze("x", 0), s.op("Gather", "x", zeros, axis=1)]


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
@pytest.mark.parametrize("build", [products, joined, viewed])
def test_an_input_with_a_size_of_zero_has_the_shapes_that_onnx_runtime_produces(build, opset):
    sketch = Sketch(opset)
    model, shapes = sketch.case({"x": (0, 4)}, *build(sketch))
    assert agree(model, shapes) == []
    model.graph.input[0].CopyFrom(info("x", F32, [0, 4]))
    assert agree(model, {}) == []


def test_a_product_with_nothing_is_no_layer():
    model = import_onnx(proto([node("MatMul", ["x", "w"], ["y"])], [tensor("x", 0, 4)], ["y"], [weight("w", 4, 3)]))
    assert (model.layers, model.inputs) == ((), (("x", (0, 4)),))


def test_a_size_of_zero_in_the_file_is_a_size():
    nodes = [node("Relu", ["x"], ["y"])]
    with pytest.raises(ModelError, match=r"2x4 does not fit input 'x'; the inputs are: x \[0, 4\]"):
        import_onnx(proto(nodes, [tensor("x", 0, 4)], ["y"]), shapes={"x": (2, 4)})


@pytest.mark.parametrize("constants", [[], [weight("y", 2, 3)]])
def test_a_graph_without_a_node_is_a_model_without_layers(constants):
    output = "y" if constants else "x"
    model = import_onnx(proto([], [tensor("x", 2, 3)], [tensor(output, 2, 3)], constants))
    assert (model.layers, model.macs, model.parameters) == ((), 0, 0)


def test_a_loop_that_never_turns_hands_its_state_on():
    sketch, body = Sketch(17), Sketch(17, names=100)
    new, kept = body.op("MatMul", "state", sketch.weight(4, 6)), body.op("Identity", "goes_on")
    before = [info("turn", I64, []), info("goes_on", BOOL, []), info("state", F32)]
    graph = body.graph("body", before, [info(kept, BOOL, []), info(new, F32)])
    state = sketch.op("Loop", sketch.initial(0), sketch.initial(True, np.bool_), "x", body=graph)
    model, shapes = sketch.case({"x": (3, 4)}, state)
    assert agree(model, shapes) == []
    assert import_onnx(model, shapes=shapes).layers == ()


def test_a_scan_over_nothing_costs_nothing():
    sketch, body = Sketch(17), Sketch(17, names=100)
    new = body.op("MatMul", "state", "row")
    graph = body.graph(
        "body", [info("state", F32), info("row", F32)], [info(new, F32), info(body.op("Relu", new), F32)]
    )
    made = sketch.ops("Scan", sketch.weight(4, 4), "x", outputs=2, body=graph, num_scan_inputs=1)
    model = sketch.case({"x": (0, 4, 4)}, *made, fixed=True).model
    assert import_onnx(model).layers == ()


def test_pricing_a_model_in_which_nothing_takes_time_is_refused_in_one_line():
    model = import_onnx(proto([node("Identity", ["x"], ["y"])], [tensor("x", 2)], ["y"]), name="still")
    with pytest.raises(ModelError, match=r"^still: no layer has weights, so there is nothing to fetch"):
        estimate(model, load_npu("tpuv3-like"))


def test_a_model_in_which_nothing_takes_time_is_neither_placed_nor_scheduled():
    model = import_onnx(proto([node("Identity", ["x"], ["y"])], [tensor("x", 2)], ["y"]), name="still")
    with pytest.raises(ModelError, match=r"^still: nothing in it takes time, so there is nothing to place$"):
        group_layers(model)
    with pytest.raises(ProfileError, match=r"^still: nothing in it takes time, so there is nothing to schedule$"):
        one_at_a_time(model, (), Clock.of(load_npu("tpuv3-like")))
