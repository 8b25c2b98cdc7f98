"""Models that are hard on whoever runs them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.serving import live

WINDOW = 200_001
"""Values that ``stubborn`` looks at for each of its outputs."""


def stubborn(path: Path) -> Path:
    """One operator that takes as long as its input makes it, and does not look up: a maximum over long windows."""
    graph = helper.make_graph(
        [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[WINDOW])],
        "stubborn",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, "v"])],
    )
    return live.save(graph, path)


def long_input(windows: int) -> dict[str, np.ndarray]:
    """So many windows; a million of them take minutes."""
    return {"x": np.zeros((1, 1, WINDOW - 1 + windows), np.float32)}


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
