"""Fewer bits: what becomes of a file, and how far its results are off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

from tests.runtime.cuda.nets import chain, drawn, wanted
from weft.base.errors import ModelError
from weft.runtime.cuda.precision import BF16, converted, difference, is_half


def test_bfloat16_takes_the_place_of_float32_inside(tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    half = onnx.load(str(converted(path, BF16, tmp_path)))
    assert is_half(half) and all(each.data_type == TensorProto.BFLOAT16 for each in half.graph.initializer)
    (found,) = ReferenceEvaluator(half).run(None, drawn(3))
    assert found.dtype == np.float32
    far = difference({"y": wanted(path, drawn(3))}, {"y": found})
    assert 1e-5 < far < 0.1


def test_sizes_stay_in_float32(tmp_path: Path) -> None:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "scales"], ["y"])],
        "larger",
        [value("x", TensorProto.FLOAT, [1, 1, 2, 2])],
        [value("y", TensorProto.FLOAT, [1, 1, 4, 4])],
        [numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    onnx.save(model, tmp_path / "larger.onnx")
    half = onnx.load(str(converted(tmp_path / "larger.onnx", BF16, tmp_path)))
    assert half.graph.initializer[0].data_type == TensorProto.FLOAT
    assert [node.op_type for node in half.graph.node] == ["Cast", "Resize", "Cast"]


def test_an_old_file_says_what_it_lacks(tmp_path: Path) -> None:
    path = chain(tmp_path / "old.onnx")
    model = onnx.load(str(path))
    model.opset_import[0].version = 12
    onnx.save(model, path)
    with pytest.raises(ModelError, match="opset 12 has no bfloat16; export it with 13 or later, or use fp16"):
        converted(path, BF16, tmp_path)


@pytest.mark.parametrize(
    ("right", "found", "far"),
    [
        ([1.0, 4.0], [1.0, 3.0], 0.25),
        ([1.0, 4.0], [1.0, np.nan], np.inf),
        ([1.0, np.nan], [1.0, 4.0], np.inf),
        ([1.0, np.inf], [1.0, 65504.0], np.inf),
        ([1.0, np.inf], [1.0, -np.inf], np.inf),
        ([2.0, np.inf, np.nan], [1.0, np.inf, np.nan], 0.5),
        (np.nan, np.nan, 0.0),
        ([0, 5], [0, 4], 0.2),
        ([True], [False], np.inf),
    ],
)
def test_what_is_no_number_differs_from_all_numbers(right: Any, found: Any, far: float) -> None:
    assert difference({"y": np.array(right)}, {"y": np.array(found)}) == far
