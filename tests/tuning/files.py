"""A small classifier of points in space, as an ONNX file and as arrays, with samples that it gets right."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from tests.models.onnx_graphs import node, tensor

INPUTS, HIDDEN, CLASSES = 8, 16, 4


class Points(NamedTuple):
    """A network of two layers and labelled samples."""

    weights: dict[str, NDArray[np.float32]]
    x: NDArray[np.float32]
    label: NDArray[np.int64]


@cache
def points(count: int = 400, seed: int = 0) -> Points:
    """Random features, and the outputs that fit the classes best; samples lie around a centre for each class."""
    rng = np.random.default_rng(7)
    centres = rng.standard_normal((CLASSES, INPUTS)) * 1.5
    first = rng.standard_normal((INPUTS, HIDDEN)) / np.sqrt(INPUTS)
    known = rng.integers(0, CLASSES, 2000)
    hidden = np.maximum((centres[known] + rng.standard_normal((2000, INPUTS)) * 0.6) @ first, 0)
    second = np.linalg.lstsq(hidden, np.eye(CLASSES)[known], rcond=None)[0]
    drawn = np.random.default_rng([seed, 1])
    label = drawn.integers(0, CLASSES, count)
    x = centres[label] + drawn.standard_normal((count, INPUTS)) * 0.6
    weights = {"fc1": first.astype(np.float32), "fc2": second.astype(np.float32)}
    return Points(weights, x.astype(np.float32), label)


def save_model(path: Path, net: Points) -> Path:
    nodes = [
        node("MatMul", ["x", "fc1.weight"], ["a"], name="fc1"),
        node("Relu", ["a"], ["b"]),
        node("MatMul", ["b", "fc2.weight"], ["y"], name="fc2"),
    ]
    constants = [numpy_helper.from_array(value, f"{name}.weight") for name, value in net.weights.items()]
    body = helper.make_graph(nodes, "points", [tensor("x", "n", INPUTS)], [tensor("y", "n", CLASSES)], constants)
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def save_data(path: Path, net: Points) -> Path:
    np.savez(path, x=net.x, label=net.label)
    return path
