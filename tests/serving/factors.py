"""A model whose answers tell which file it was loaded from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from tests.serving import live
from tests.support.inference import infer


def multiplying_model(path: Path, factor: float) -> Path:
    """y = factor * x, so that an answer tells which file it comes from; put in its place in one step."""
    graph = helper.make_graph(
        [helper.make_node("Mul", ["x", "factor"], ["y"])],
        "times",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "w"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "w"])],
        [numpy_helper.from_array(np.array(factor, np.float32), "factor")],
    )
    live.save(graph, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)
    path.with_suffix(".toml").write_text("shapes = { x = [1, 4] }\n")
    return path


def served_factor(server: live.Live, seed: int) -> float:
    """Ask, and tell from the answer which file was met."""
    x = np.random.default_rng(seed).integers(1, 100, (1 + seed % 3, 4)).astype(np.float32)
    y = infer(server, "times", {"x": x})["y"]
    factor = float(y.flat[0] / x.flat[0])
    assert (y == x * np.float32(factor)).all()
    return factor
