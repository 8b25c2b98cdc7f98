"""Small ONNX models with weights, and running them, for the tests of stitching's readers and writers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from weft_stitch.graph_steps import plain_graph
from weft_stitch.net import Net
from weft_stitch.onnx_writer import to_onnx
from weft_stitch.reading.onnx_reader import read_net

node = helper.make_node


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32)


def model(
    nodes: Sequence[onnx.NodeProto],
    constants: Mapping[str, object] = {},
    *,
    inputs: Mapping[str, Sequence[int | str]] | None = None,
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    dtype: int = TensorProto.FLOAT,
    name: str = "net",
) -> onnx.ModelProto:
    """A model whose input is x of two 4-channel 6x5 pictures unless *inputs* says otherwise."""
    shapes = inputs or {"x": (2, 4, 6, 5)}
    graph = helper.make_graph(
        list(nodes),
        name,
        [helper.make_tensor_value_info(each, dtype, list(shape)) for each, shape in shapes.items()],
        [helper.make_tensor_value_info(each, dtype, None) for each in outputs],
        [numpy_helper.from_array(np.asarray(array), each) for each, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8 if opset < 20 else 10)


def run(proto: onnx.ModelProto, inputs: Mapping[str, np.ndarray], *, as_it_is: bool = False) -> list[np.ndarray]:
    """*as_it_is*: without onnxruntime's rewriting, which (1.31) takes zeros before a max pool for its padding."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if as_it_is:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(inputs))


def inputs_of(net: Net, *, seed: int = 7) -> dict[str, np.ndarray]:
    return {port.name: numbers(net.batch, *port.shape, seed=seed) for port in net.inputs}


def assert_close(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray], tolerance: float = 1e-5) -> None:
    assert [each.shape for each in got] == [each.shape for each in wanted]
    for mine, theirs in zip(got, wanted, strict=True):
        largest = max(1.0, float(np.abs(theirs).max()))
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * largest)


def assert_reads_as_itself(proto: onnx.ModelProto, *, dynamic: bool = False, **options: object) -> Net:
    """Read, write and run *proto*: what comes out is what it gives itself."""
    net = read_net(proto, **options)
    written = to_onnx(plain_graph(net, dynamic=dynamic))
    onnx.checker.check_model(written, full_check=True)
    inputs = inputs_of(net)
    assert_close(run(written, inputs), run(proto, inputs, as_it_is=True))
    return net


def kinds(net: Net) -> list[str]:
    return [op.kind for op in net.ops]
