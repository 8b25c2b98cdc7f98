"""ONNX graphs as everybody asks about them: who reads and makes a value, what an output needs, constants, files."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from weft.base.errors import ModelError
from weft.models import onnx_graph
from weft.models.element_types import ElementType, dtype_bits, element_type, numpy_dtype, type_name
from weft.models.onnx_import.infer import fold


def branching() -> onnx.NodeProto:
    """An If whose first branch reads ``outer`` and whose second makes all that it reads."""
    (one, other) = (helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("a", "b"))
    reads = helper.make_graph([helper.make_node("Relu", ["outer"], ["a"])], "then", [], [one])
    own = helper.make_graph([helper.make_node("Constant", [], ["b"], value_float=1.0)], "else", [], [other])
    return helper.make_node("If", ["flag"], ["y"], then_branch=reads, else_branch=own)


def test_a_node_reads_what_its_branches_take_from_outside():
    assert onnx_graph.names_read(branching()) == {"flag", "outer"}


def test_pruning_keeps_what_only_a_branch_reads_and_takes_out_the_rest():
    nodes = [helper.make_node("Abs", ["x"], ["outer"]), helper.make_node("Neg", ["x"], ["unread", ""]), branching()]
    (y,) = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    graph = helper.make_graph(nodes, "g", [], [y])
    onnx_graph.prune(graph)
    assert [node.op_type for node in graph.node] == ["Abs", "If"]


def test_a_value_that_two_nodes_make_is_refused_by_name():
    nodes = [helper.make_node("Abs", ["x"], ["y"]), helper.make_node("Neg", ["x"], ["y"])]
    with pytest.raises(ModelError, match="two nodes produce 'y'"):
        onnx_graph.producers(nodes)


def test_constants_are_initializers_and_constant_nodes_by_the_name_of_what_they_make():
    stored, held = (onnx_graph.to_tensor(np.arange(3), name) for name in ("w", "inside"))
    graph = helper.make_graph([helper.make_node("Constant", [], ["c"], value=held)], "g", [], [], [stored])
    assert {name: tensor.name for name, tensor in onnx_graph.constants(graph).items()} == {"w": "w", "c": "c"}
    assert held.name == "inside"


def test_an_attribute_of_another_type_is_refused_and_an_absent_one_has_its_default():
    attributes = onnx_graph.Attributes(helper.make_node("Clip", ["x"], ["y"], min=2.5, mode="edge"))
    assert (attributes.number("min"), attributes.number("max"), attributes.number("max", 7.0)) == (2.5, None, 7.0)
    assert (attributes.text("mode"), attributes.integers("axes", [1])) == ("edge", (1,))
    with pytest.raises(ModelError, match="'min' has the wrong type"):
        attributes.integer("min", 0)


def test_nodes_are_evaluated_in_the_opset_of_their_model():
    node = helper.make_node("Div", ["a", "b"], ["c"])
    (value,) = onnx_graph.evaluate({"": 13}, [node], {"a": np.array([-5, 7]), "b": np.array([2, 2])}, ["c"])
    assert value.tolist() == [-2, 3]  # integers are divided towards zero


def test_a_sum_along_an_axis_from_before_opset_7_stays_unknown_where_the_evaluator_would_be_wrong():
    node = helper.make_node("Add", ["a", "b"], ["c"], broadcast=1, axis=0)
    values = [np.array([[1, 2], [3, 4]], np.float32), np.array([1, 2], np.float32)]
    assert fold(node, "Add", values, 6) is None


def test_tensors_that_are_moved_outside_are_read_again_from_their_file(tmp_path):
    tensor = onnx_graph.to_tensor(np.arange(6, dtype=np.float32).reshape(2, 3), "w")
    (tmp_path / "data.bin").write_bytes(b"12345678" + onnx_graph.move_outside(tensor, "data.bin", 8))
    assert not tensor.raw_data
    assert onnx_graph.stored_array(tensor, tmp_path).tolist() == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ModelError, match="tensor w cannot be read"):
        onnx_graph.stored_array(tensor, tmp_path / "elsewhere")


def test_element_types_are_those_of_onnx():
    known = dict(TensorProto.DataType.items())
    assert {kind.name: int(kind) for kind in ElementType if kind.name in known} == known
    for kind in ElementType:
        if kind.name in known and kind not in (ElementType.UNDEFINED, ElementType.STRING):
            assert element_type(numpy_dtype(kind)) == kind
            assert type_name(kind) == kind.name.lower()
    assert (dtype_bits(ElementType.INT4), dtype_bits(ElementType.DOUBLE), type_name(99)) == (4, 64, "99")
