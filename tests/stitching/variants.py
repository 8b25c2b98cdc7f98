"""Files of encoders with a few other weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]

LINES = "words"
"""The table of words, which has no node of its own."""


def changed_file(source: Path, target: Path, seed: int, **changes: Change) -> Path:
    """A file with other weights, of steps by their names (two lines below stand for a dot)."""
    proto = onnx.load(source)
    read = {each.name: each.input[1] for each in proto.graph.node if each.op_type == "MatMul"}
    read[LINES] = next(each.input[0] for each in proto.graph.node if each.op_type == "Gather")
    held = {each.name: each for each in proto.graph.initializer}
    for step, change in changes.items():
        stored = held[read[step.replace("__", ".")]]
        array = change(numpy_helper.to_array(stored).copy(), np.random.default_rng(seed))
        stored.CopyFrom(numpy_helper.from_array(array.astype(np.float32), stored.name))
    onnx.save(proto, target)
    return target


def other_columns(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    weight[:, [1, 5]] = rng.standard_normal((len(weight), 2))
    return weight


def scaled_columns(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return weight * rng.uniform(0.5, 2, weight.shape[1])


def scaled_rows(weight: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return scaled_columns(weight.T, rng).T


def other_lines(table: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Three more, and a tuned one."""
    table[7] += 1
    return np.concatenate([table, rng.standard_normal((3, table.shape[1]))])
