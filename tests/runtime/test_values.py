"""What in a graph depends on values, and not only on shapes: found by following them from the inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper, parser

from weft.runtime.values import unsteady


def model(text: str) -> ModelProto:
    """A graph in ONNX's own words, from ``x`` (float), ``n`` (int64) and ``c`` (bool) to ``y``."""
    head = '<ir_version: 9, opset_import: ["" : 18, "com.microsoft" : 1, "elsewhere" : 1, "own" : 1]>\n'
    return parser.parse_model(f"{head}g (float[a,b] x, int64[k] n, bool c) => (float y) {text}")


def verdicts(text: str) -> list[bool]:
    return unsteady(model(text))


@pytest.mark.parametrize(
    "text",
    [
        "{ y = Relu(x) }",
        "{ s = Shape(x)  z = Expand(x, s)  y = Relu(z) }",
        "<int64[2] s = {1, -1}> { z = Reshape(x, s)  y = Relu(z) }",
        "{ s = Constant<value_ints = [2, 2]>()  y = Tile(x, s) }",
        "{ s = Shape(x)  z = ConstantOfShape(s)  i = NonZero(z)  t = Shape(i)  y = Expand(x, t) }",
        "{ i = Gather(x, n)  y = Relu(i) }",
        "<int64[1] k = {3}> { y, i = TopK(x, k) }",
        "{ y = com.microsoft.Gelu(x) }",
        "{ y = Pad(x, , x) }",
    ],
)
def test_shapes_and_weights_are_no_values(text: str) -> None:
    assert not any(verdicts(text))


@pytest.mark.parametrize(
    "node",
    [
        "Expand(x, n)", "Tile(x, n)", "Reshape(x, n)", "ConstantOfShape(n)", "Range(n, n, n)", "NonZero(x)",
        "Slice(x, n, n)", "Resize(x, , , n)", "Resize(x, , n)", "Pad(x, n)", "TopK(x, n)", "OneHot(n, n, x)",
        "Unique(x)", "Compress(x, n)", "NonMaxSuppression(x, x)", "Split(x, n)", "HannWindow(n)", "RoiAlign(x, x, n)",
        "com.microsoft.BeamSearch(n)", "elsewhere.Anything(x)", "ReduceSum(x, n)", "CenterCropPad(x, n)",
        "MaxRoiPool(x, x)",
    ],
)  # fmt: skip
def test_a_node_that_a_value_decides_is_unsteady_and_so_is_what_follows(node: str) -> None:
    assert verdicts(f"{{ a = Relu(x)  z = {node}  y = Relu(z) }}") == [False, True, True]


def test_the_shape_of_what_a_value_decides_is_a_value() -> None:
    assert verdicts("{ z = NonZero(x)  s = Shape(z)  y = Expand(x, s) }") == [True, True, True]


def test_what_is_computed_beside_it_is_not_touched() -> None:
    assert verdicts("{ z = Expand(x, n)  a = Relu(x)  s = Shape(z)  y = Reshape(a, s) }") == [True, False, True, True]


def test_a_text_has_a_length_that_its_shape_does_not_tell() -> None:
    made = model("{ z = Identity(n)  y = Relu(x) }")
    made.graph.input[1].type.tensor_type.elem_type = TensorProto.STRING
    assert unsteady(made) == [True, False]


def test_local_functions_are_looked_into() -> None:
    made = model("{ a = own.grown(x, x)  b = own.grown(x, n)  y = Relu(b) }")
    made.functions.append(
        parser.parse_function(
            '<domain: "own", opset_import: ["" : 18]> grown (v, to) => (w) { s = Shape(to) w = Expand(v, s) }'
        )
    )
    assert unsteady(made) == [False, False, False]
    made.functions[0].CopyFrom(
        parser.parse_function('<domain: "own", opset_import: ["" : 18]> grown (v, to) => (w) { w = Expand(v, to) }')
    )
    assert unsteady(made) == [True, True, True]


def body(inner: str, name: str = "body") -> GraphProto:
    return parser.parse_graph(f"{name} (float[b] state, float[b] part) => (float[b] next, float[b] out) {inner}")


def with_body(node: NodeProto) -> ModelProto:
    made = model("{ y = Relu(x) }")
    made.graph.node.insert(0, node)
    made.graph.node[1].input[0] = node.output[0]
    return made


@pytest.mark.parametrize(
    ("inner", "expected"),
    [("{ next = Add(state, part)  out = Relu(next) }", False), ("{ next = Expand(state, n)  out = Relu(part) }", True)],
)
def test_a_scan_is_as_steady_as_its_body(inner: str, expected: bool) -> None:
    scan = helper.make_node("Scan", ["x", "x"], ["z", "w"], num_scan_inputs=1, body=body(inner))
    assert unsteady(with_body(scan)) == [expected, expected]


@pytest.mark.parametrize("operator", ["Loop", "If"])
def test_control_flow_is_unsteady_whatever_decides_it(operator: str) -> None:
    inside = body("{ next = Identity(state)  out = Identity(part) }")
    bodies: dict[str, Any] = {"body": inside} if operator == "Loop" else {"then_branch": inside, "else_branch": inside}
    assert unsteady(with_body(helper.make_node(operator, ["c"], ["z"], **bodies))) == [True, True]


def test_weights_among_the_inputs_are_weights() -> None:
    made = model("{ y = Expand(x, n) }")
    made.graph.initializer.append(numpy_helper.from_array(np.array([2, 2]), "n"))
    assert unsteady(made) == [False]
