"""Small networks with exits, their weights drawn from a seed, and plain ONNX Runtime to compare them with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from tests.models.onnx_graphs import node, tensor
from weft.runtime.exits import confidence

SIDE, CLASSES = 6, 4
EXITS = ("exit1", "exit2", "logits")


def conv_net(
    path: Path,
    *,
    seed: int = 0,
    channels: int = 5,
    sharpness: float = 6.0,
    marked: bool = False,
    batch: int | str = "n",
) -> Path:
    """Three stages of a convolution, an exit after each; *marked*: the file names its exits."""
    rng = np.random.default_rng(seed)
    nodes, weights, last, width = [], [], "x", 1
    for stage, name in enumerate(EXITS):
        kernel = rng.normal(size=(channels, width, 3, 3)) / np.sqrt(9 * width)
        head = rng.normal(size=(channels, CLASSES)) * sharpness * (stage + 1)
        weights += [_weight(f"k{stage}", kernel), _weight(f"h{stage}", head)]
        nodes += [
            node("Conv", [last, f"k{stage}"], [f"c{stage}"], pads=[1, 1, 1, 1]),
            node("Relu", [f"c{stage}"], [f"a{stage}"]),
            node("GlobalAveragePool", [f"a{stage}"], [f"p{stage}"]),
            node("Flatten", [f"p{stage}"], [f"f{stage}"]),
            node("Gemm", [f"f{stage}", f"h{stage}"], [name]),
        ]
        last, width = f"a{stage}", channels
    inputs = [tensor("x", batch, 1, SIDE, SIDE)]
    outputs = [tensor(name, batch, CLASSES) for name in ("logits", "exit1", "exit2")]  # not in their order
    return _saved(path, nodes, inputs, outputs, weights, EXITS if marked else ())


def token_net(path: Path, *, seed: int = 0, tokens: int = 4, width: int = 6, stages: int = 3) -> Path:
    """Stages that reshape by the number of samples, which is computed once, as exporters of PyTorch models do."""
    rng = np.random.default_rng(seed)
    nodes = [node("Shape", ["x"], ["samples"], start=0, end=1)]
    weights = [numpy_helper.from_array(np.array([tokens * width]), "wide")]
    weights += [numpy_helper.from_array(np.array([tokens, width]), "narrow")]
    last, names = "x", [*(f"exit{stage + 1}" for stage in range(stages - 1)), "logits"]
    for stage, name in enumerate(names):
        weights += [
            _weight(f"w{stage}", rng.normal(size=(width, width)) / np.sqrt(width)),
            _weight(f"h{stage}", rng.normal(size=(tokens * width, CLASSES)) * 1.5),
        ]
        nodes += [
            node("MatMul", [last, f"w{stage}"], [f"m{stage}"]),
            node("Tanh", [f"m{stage}"], [f"t{stage}"]),
            node("Concat", ["samples", "wide"], [f"s{stage}"], axis=0),
            node("Reshape", [f"t{stage}", f"s{stage}"], [f"r{stage}"]),
            node("MatMul", [f"r{stage}", f"h{stage}"], [name]),
            node("Concat", ["samples", "narrow"], [f"u{stage}"], axis=0),
            node("Reshape", [f"r{stage}", f"u{stage}"], [f"v{stage}"]),
        ]
        last = f"v{stage}"
    outputs = [tensor(name, "n", CLASSES) for name in names]
    return _saved(path, nodes[:-2], [tensor("x", "n", tokens, width)], outputs, weights)


def _weight(name, values):
    return numpy_helper.from_array(np.asarray(values, np.float32), name)


def _saved(path, nodes, inputs, outputs, weights, exits=()):
    graph = helper.make_graph(nodes, "net", inputs, outputs, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    if exits:
        helper.set_model_props(model, {"weft.exits": ", ".join(exits)})
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)
    return path


class Alone:
    """Plain ONNX Runtime, a sample at a time."""

    def __init__(self, path: Path, exits=EXITS) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 4
        self._session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self._exits = exits

    def exits(self, sample: np.ndarray, kind="logits"):
        """Of each exit what it gives for one sample, and how sure it is."""
        found = self._session.run(list(self._exits), {"x": sample})
        return [(each[0], float(confidence(each, kind)[0])) for each in found]

    def taken(self, sample: np.ndarray, threshold: float):
        """The number of the exit a sample takes, what that gives, and how sure it is."""
        found = self.exits(sample)
        for number, (answer, sure) in enumerate(found, start=1):
            if sure >= threshold or number == len(found):
                return number, answer, sure
        raise AssertionError


def samples(count: int, shape=(1, SIDE, SIDE), seed: int = 1) -> np.ndarray:
    """Inputs of many strengths, so that some are easy."""
    rng = np.random.default_rng(seed)
    found = rng.normal(size=(count, *shape)) * rng.uniform(0.2, 3.0, size=(count, *[1] * len(shape)))
    return found.astype(np.float32)
