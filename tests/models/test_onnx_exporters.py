"""Exporters' idioms at every operator set they used: each tensor has the shape that ONNX Runtime really produces."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.models.exporter_graphs import IDIOMS, Sketch, attention
from tests.models.runtime_shapes import agree
from weft.models.onnx_import import import_onnx
from weft.models.onnx_import.infer import FOLDED as RULES
from weft.models.packaged import PACKAGED, packaged_models


@pytest.mark.parametrize(
    ("idiom", "opset"),
    [pytest.param(each, opset, id=f"{each.name}-{opset}") for each in IDIOMS for opset in each.opsets],
)
def test_every_tensor_has_the_shape_that_onnx_runtime_produces(idiom, opset):
    assert agree(*idiom.build(opset)) == []


@pytest.mark.parametrize("opset", range(9, 18))
def test_attention_is_counted_alike_at_every_opset(opset):
    model = import_onnx(attention(opset).model, shapes={"x": (2, 10, 32)})
    assert model.macs == 3 * 20 * 32 * 32 + 2 * 2 * 10 * 10 * 32


@pytest.mark.parametrize("name", PACKAGED)
def test_packaged_models_have_the_shapes_that_onnx_runtime_produces(name):
    model, known = onnx.load(packaged_models()[name]), PACKAGED[name]
    assert agree(model, known.shapes, known.values) == []


def test_a_packaged_model_has_them_within_its_branches_too():
    model, known = onnx.load(packaged_models()["silero-vad"]), PACKAGED["silero-vad"]
    opened = _opened(model, "then_branch")
    assert len(opened.graph.node) > 100
    assert agree(opened, known.shapes, known.values) == []


def _opened(model: onnx.ModelProto, branch: str) -> onnx.ModelProto:
    """The model with one branch of every If of its graph put in its place: no output can show what is within."""
    nodes = []
    for node in model.graph.node:
        graph = next((each.g for each in node.attribute if each.name == branch), None)
        inner = [] if graph is None else zip((each.name for each in graph.output), node.output, strict=True)
        nodes += [node] if graph is None else graph.node
        nodes += [onnx.helper.make_node("Identity", [source], [name]) for source, name in inner]
    opened = onnx.ModelProto()
    opened.CopyFrom(model)
    del opened.graph.node[:]
    opened.graph.node.extend(nodes)
    return opened


I, F, B = np.int64, np.float32, np.bool_  # noqa: E741
N = [[3, -7, 2], [5, 0, -1]]

FOLDED: list[tuple[str, list[tuple[object, type]], dict[str, object], range]] = [
    *((op, [([1.5, -2.5, 0.25], F)], {}, range(9, 24)) for op in ("Abs", "Neg", "Floor", "Ceil", "Sign", "Identity")),
    *((op, [([1.5, 4.0, 0.25], F)], {}, range(9, 24)) for op in ("Sqrt", "Exp", "Log", "Reciprocal")),
    ("Round", [([1.5, 2.5, -0.5], F)], {}, range(11, 24)),
    ("Not", [([True, False], B)], {}, range(9, 24)),
    ("BitwiseNot", [(N, np.int32)], {}, range(18, 24)),
    *((op, [(N, I), ([2, 3, -2], I)], {}, range(9, 24)) for op in ("Add", "Sub", "Mul", "Div")),
    *(
        (op, [(N, np.int32), ([2, 3, 2], np.int32)], {}, range(18, 24))
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ),
    ("Pow", [([2.0, 3.0], F), ([3.0], F)], {}, range(9, 24)),
    ("Pow", [([2, 3], I), ([3.0], F)], {}, range(12, 24)),
    *((op, [([True, False], B), ([True, True], B)], {}, range(9, 24)) for op in ("And", "Or", "Xor")),
    *((op, [(N, I), ([3, 0, -1], I)], {}, range(9, 24)) for op in ("Equal", "Greater", "Less")),
    *((op, [(N, I), ([3, 0, -1], I)], {}, range(16, 24)) for op in ("GreaterOrEqual", "LessOrEqual")),
    *((op, [([1.0, 5.0], F), ([2.0], F), ([3.0, 0.0], F)], {}, range(9, 24)) for op in ("Sum", "Mean", "Min", "Max")),
    ("Mod", [(N, I), ([2, 3, -2], I)], {}, range(10, 24)),
    ("Mod", [([5.5, -5.5], F), ([2.0, 2.0], F)], {"fmod": 1}, range(10, 24)),
    ("BitShift", [([8, 4], np.uint32), ([1, 2], np.uint32)], {"direction": "RIGHT"}, range(11, 24)),
    ("Clip", [([1.0, 5.0], F)], {"min": 2.0, "max": 4.0}, range(9, 11)),
    ("Clip", [(N, I), (-1, I), (3, I)], {}, range(12, 24)),
    ("Cast", [([1.7, -1.7], F)], {"to": 7}, range(9, 24)),
    ("CastLike", [([1.7, -1.7], F), ([1], I)], {}, range(15, 24)),
    ("Where", [([True, False], B), ([1, 2], I), ([3, 4], I)], {}, range(9, 24)),
    ("CumSum", [(N, I), (1, np.int32)], {"reverse": 1, "exclusive": 1}, range(11, 24)),
    *((op, [(N, np.int32)], {"axes": [1], "keepdims": 0}, range(9, 13)) for op in ("ReduceSum", "ReduceProd")),
    *(
        (op, [(N, np.int32)], {"axes": [1], "keepdims": 1}, range(13, 18))
        for op in ("ReduceProd", "ReduceMax", "ReduceMin")
    ),
    *(
        (op, [(N, np.int32), ([0], I)], {}, range(18, 24))
        for op in ("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin")
    ),
    ("ReduceMean", [([[1.0, 2.0]], F)], {"axes": [1]}, range(9, 18)),
    ("ReduceSum", [(N, I)], {"noop_with_empty_axes": 1}, range(13, 24)),
    *(
        (op, [([[1.0, 3.0, 3.0], [2.0, 0.0, 0.0]], F)], {"axis": 1, "select_last_index": 1}, range(12, 24))
        for op in ("ArgMax", "ArgMin")
    ),
    ("ArgMax", [([[1.0, 3.0, 3.0]], F)], {"axis": 1, "keepdims": 0}, range(9, 24)),
    ("Reshape", [(N, I), ([0, -1, 1], I)], {}, range(9, 24)),
    ("Flatten", [([[[1.0], [2.0]]], F)], {"axis": 2}, range(9, 24)),
    ("Squeeze", [([[[1], [2]]], I)], {"axes": [0]}, range(9, 13)),
    ("Squeeze", [([[[1], [2]]], I)], {}, range(9, 24)),
    ("Squeeze", [([[[1], [2]]], I), ([-1], I)], {}, range(13, 24)),
    ("Unsqueeze", [(5, I)], {"axes": [0]}, range(9, 13)),
    ("Unsqueeze", [(N, I), ([-1, 0], I)], {}, range(13, 24)),
    ("Transpose", [(N, I)], {}, range(9, 24)),
    ("Transpose", [(N, I)], {"perm": [1, 0]}, range(9, 24)),
    ("Concat", [(N, I), (N, I)], {"axis": -1}, range(11, 24)),
    ("Slice", [(N, I)], {"starts": [1, -2], "ends": [2, 1000], "axes": [0, 1]}, range(9, 10)),
    ("Slice", [(N, I), ([1], I), ([-1000], I), ([1], I), ([-1], I)], {}, range(10, 24)),
    ("Slice", [(N, I), ([-1], I), ([0], I), ([1], I), ([-1], I)], {}, range(10, 24)),
    ("Split", [([1, 2, 3, 4, 5], I)], {"split": [2, 3], "axis": 0}, range(9, 13)),
    ("Split", [([1, 2, 3, 4], I)], {"axis": 0}, range(9, 18)),
    ("Split", [([1, 2, 3, 4, 5], I)], {"axis": 0, "num_outputs": 2}, range(18, 24)),
    ("Gather", [(N, I), ([[-1, 0]], I)], {"axis": 1}, range(11, 24)),
    ("GatherElements", [(N, I), ([[0, 2], [1, -1]], I)], {"axis": 1}, range(11, 24)),
    ("GatherND", [(N, I), ([[0, 2], [1, 0]], I)], {}, range(11, 24)),
    ("ScatterND", [(N, I), ([[1]], I), ([[7, 8, 9]], I)], {}, range(11, 24)),
    ("ScatterElements", [(N, I), ([[2, 0]], I), ([[7, 8]], I)], {"axis": 1}, range(11, 24)),
    ("Scatter", [(N, I), ([[2, 0]], I), ([[7, 8]], I)], {"axis": 1}, range(9, 11)),
    ("Compress", [(N, I), ([False, True, True], B)], {"axis": 1}, range(9, 24)),
    ("Compress", [(N, I), ([False, True, True], B)], {}, range(9, 24)),
    ("NonZero", [(N, I)], {}, range(9, 24)),
    ("ConstantOfShape", [([2, 3], I)], {}, range(9, 24)),
    ("Range", [(2, I), (11, I), (3, I)], {}, range(11, 24)),
    ("Range", [(2.0, F), (1.0, F), (-0.25, F)], {}, range(11, 24)),
    ("Expand", [([[1], [2]], I), ([3, 1, 2], I)], {}, range(9, 24)),
    ("Tile", [(N, I), ([2, 1], I)], {}, range(9, 24)),
    ("Pad", [([1.0, 2.0], F)], {"pads": [1, 2], "value": 3.0}, range(9, 11)),
    ("Pad", [([1, 2, 3], I), ([1, 2], I), (9, I)], {}, range(11, 24)),
    ("Pad", [([1, 2, 3], I), ([1, 2], I)], {"mode": "edge"}, range(11, 24)),
    ("OneHot", [([1, -1], I), ([3], I), ([4, 5], I)], {"axis": 0}, range(11, 24)),
    ("Trilu", [(N, I), (1, I)], {"upper": 0}, range(14, 24)),
    ("TopK", [([3.0, 9.0, 4.0], F)], {"k": 2}, range(9, 10)),
    ("TopK", [([3, 9, 4, 9], I), ([2], I)], {"largest": 0}, range(11, 24)),
]
"""Operator, its inputs, its attributes, and the operator sets that write it so."""

OUTPUTS = {"Split": 2, "TopK": 2}


def told_apart(op: str, opsets: range) -> list[int]:
    """Of the operator sets that have the same version of an operator the last, and the first of all."""
    return sorted({opsets[0], *{onnx.defs.get_schema(op, opset).since_version: opset for opset in opsets}.values()})


@pytest.mark.parametrize(
    ("op", "inputs", "attributes", "opset"),
    [
        pytest.param(op, inputs, attributes, opset, id=f"{op}-{place}-{opset}")
        for place, (op, inputs, attributes, opsets) in enumerate(FOLDED)
        for opset in told_apart(op, opsets)
    ],
)
def test_folded_values_are_those_of_onnx_runtime(op, inputs, attributes, opset):
    sketch = Sketch(opset)
    names = [sketch.initial(value, kind) for value, kind in inputs]
    outputs = sketch.ops(op, *names, outputs=OUTPUTS.get(op, 1), **attributes)
    assert agree(*sketch.case({}, *outputs), known=outputs) == []


def test_every_rule_is_tried():
    assert {op for op, *_ in FOLDED} == set(RULES)
