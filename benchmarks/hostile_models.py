"""Small models whose cost depends on the input values, or that are expensive to open, as attackers would use them."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

ENDLESS = 10**12
"""Turns of a loop that nobody would wait for."""


def write_loop(path: Path, *, endless: bool = False) -> Path:
    """turns, x [4] -> y: a loop that turns as often as a request says; *endless*: x -> y, for ever."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("Add", ["last", "last"], ["twice"]),
            helper.make_node("Sub", ["twice", "last"], ["next"]),
        ],
        "body",
        [
            _integer_tensor("turn", []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            _floats("last", [4]),
        ],
        [helper.make_tensor_value_info("still", TensorProto.BOOL, []), _floats("next", [4])],
    )
    taken = [] if endless else [_integer_tensor("turns", [1])]
    fixed = [numpy_helper.from_array(np.array([ENDLESS]), "turns")] if endless else []
    node = helper.make_node("Loop", ["turns", "", "x"], ["y"], body=body)
    return _save(path, [node], [*taken, _floats("x", [4])], [_floats("y", [4])], fixed)


def write_expand(path: Path) -> Path:
    """x [1], shape [2] -> y: one number, made as large as a request says, and its mean."""
    nodes = [
        helper.make_node("Expand", ["x", "shape"], ["large"]),
        helper.make_node("ReduceMean", ["large"], ["y"], keepdims=0),
    ]
    return _save(path, nodes, [_floats("x", [1]), _integer_tensor("shape", [2])], [_floats("y", [])], [])


def write_shapes(path: Path) -> Path:
    """x [n, 3, h, w] -> y: a convolution that takes images of any size, and what is in them on average."""
    weight = np.random.default_rng(0).normal(size=(8, 3, 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["seen"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["seen"], ["positive"]),
        helper.make_node("ReduceMean", ["positive"], ["y"], axes=[2, 3], keepdims=0),
    ]
    fixed = [numpy_helper.from_array(weight, "w")]
    return _save(path, nodes, [_floats("x", ["n", 3, "h", "w"])], [_floats("y", ["n", 8])], fixed)


def write_slow_load(path: Path, products: int, size: int = 4096) -> Path:
    """x [4] -> y: constants that are multiplied when the file is opened, so often."""
    value = numpy_helper.from_array(np.array([1 / size], np.float32))
    nodes = [helper.make_node("ConstantOfShape", ["shape"], ["p0"], value=value)]
    nodes += [helper.make_node("MatMul", [f"p{n}", "p0"], [f"p{n + 1}"]) for n in range(products)]
    nodes += [
        helper.make_node("ReduceMean", [f"p{products}"], ["mean"], keepdims=0),
        helper.make_node("Add", ["x", "mean"], ["y"]),
    ]
    fixed = [numpy_helper.from_array(np.array([size, size]), "shape")]
    return _save(path, nodes, [_floats("x", [4])], [_floats("y", [4])], fixed)


def products_for(seconds: float, size: int = 4096) -> int:
    """How many products of matrices take so long on this machine, about."""
    a = np.full((size // 4, size // 4), 1e-3, np.float32)
    began_s = time.process_time()
    for _ in range(3):
        a @ a
    one_s = (time.process_time() - began_s) / 3 * 4**3
    return max(1, math.ceil(seconds / max(one_s, 1e-3)))


def _floats(name: str, shape: list[Any]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _integer_tensor(name: str, shape: list[Any]) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)


def _save(path: Path, nodes: list[Any], taken: list[Any], made: list[Any], fixed: list[Any]) -> Path:
    graph = helper.make_graph(nodes, path.stem, taken, made, fixed)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))
    return path
