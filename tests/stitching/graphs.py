"""Stitched graphs in tests: lower a family, run it in onnxruntime, and compare with the models one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime

from tests.stitching.nets import run
from weft_stitch.graph import Graph
from weft_stitch.net import Net
from weft_stitch.onnx_writer import to_onnx

CLOSE = 1e-5


class Runner:
    """A graph loaded into onnxruntime once."""

    def __init__(self, graph: Graph) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        model = to_onnx(graph).SerializeToString()
        self.graph = graph
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def __call__(self, pictures: Sequence[np.ndarray]) -> list[np.ndarray]:
        feeds = {tensor.name: given for tensor, given in zip(self.graph.inputs, pictures, strict=True)}
        return list(self.session.run([tensor.name for tensor in self.graph.outputs], feeds))


def execute(graph: Graph, pictures: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of *graph* in onnxruntime."""
    return Runner(graph)(pictures)


def separately(nets: Sequence[Net], pictures: Sequence[np.ndarray]) -> list[np.ndarray]:
    """What the models answer one by one, in plain numpy; a model without rows answers none."""
    return [answer for net, given in zip(nets, pictures, strict=True) for answer in run(net, given)]


def assert_close(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], close: float = CLOSE) -> None:
    assert len(found) == len(wanted)
    for got, want in zip(found, wanted, strict=True):
        assert got.shape == want.shape
        if want.size:
            assert np.abs(got - want).max() <= close * max(1.0, np.abs(want).max())
