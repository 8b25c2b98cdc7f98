"""Models that are hard on whoever runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.serving import live

HOURS = 300_000
"""Boxes for which ``stubborn`` takes very long."""


def stubborn(path: Path) -> Path:
    """One operator that compares every box with every other, and does not look up until it is done."""
    number = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("NonMaxSuppression", ["boxes", "scores", "most"], ["y"])],
        "stubborn",
        [number("boxes", TensorProto.FLOAT, [1, "n", 4]), number("scores", TensorProto.FLOAT, [1, 1, "n"])],
        [number("y", TensorProto.INT64, ["m", 3])],
        [numpy_helper.from_array(np.array([2**31 - 1], np.int64), "most")],
    )
    return live.save(graph, path)


def boxes(count: int) -> dict[str, np.ndarray]:
    """So many, none of which lies on another; what they take grows with their square."""
    left = np.arange(count, dtype=np.float32)
    sides = [left, np.zeros_like(left), left + 0.5, np.ones_like(left)]
    return {"boxes": np.stack(sides, axis=1)[None], "scores": np.ones((1, 1, count), np.float32)}


def swelling(path: Path) -> Path:
    """As much memory as a request asks for."""
    graph = helper.make_graph(
        [
            helper.make_node("Expand", ["x", "shape"], ["large"]),
            helper.make_node("ReduceMean", ["large"], ["y"], keepdims=0),
        ],
        "swelling",
        [
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [1]),
            helper.make_tensor_value_info("shape", TensorProto.INT64, [1]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )
    return live.save(graph, path)


def table(path: Path, rows: int = 1 << 16) -> Path:
    """Rows of a large table, which lies in a file of its own."""
    values = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64)
    graph = helper.make_graph(
        [helper.make_node("Gather", ["table", "row"], ["y"])],
        "table",
        [helper.make_tensor_value_info("row", TensorProto.INT64, ["n", "m"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "m", 64])],
        [numpy_helper.from_array(values, "table")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, str(path), save_as_external_data=True, location=f"{path.stem}.data", size_threshold=1024)
    return path
