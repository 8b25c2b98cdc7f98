"""Damaged files: whatever the bytes, the reader answers with a net or with an error of ours in one line."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.models.damage import changed, spliced
from tests.stitching.files import model, node, numbers
from weft.base.errors import ModelError, StitchError
from weft_stitch.graph_steps import plain_graph
from weft_stitch.onnx_writer import to_onnx
from weft_stitch.reading.onnx_reader import read_net


def small_file() -> bytes:
    """A little of everything the reader follows: windows, tables, shape arithmetic, branches, an island, two heads."""
    nodes = [
        node("Conv", ["x", "w", "b"], ["c"], name="conv", pads=[1, 1, 1, 1], strides=[2, 2], group=1),
        node("BatchNormalization", ["c", "s", "b", "b", "s"], ["n"]),
        node("Clip", ["n", "low", "high"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[1, 1], ceil_mode=1),
        node("Pad", ["p", "pads"], ["z"]),
        node("Conv", ["z", "dw"], ["d"], group=4),
        node("GlobalAveragePool", ["d"], ["g"]),
        node("HardSigmoid", ["g"], ["h"], alpha=0.2),
        node("Mul", ["d", "h"], ["m"]),
        node("Concat", ["m", "d"], ["k"], axis=1),
        node("Softmax", ["k"], ["o"], axis=1),
        node("Shape", ["o"], ["shape"]),
        node("Gather", ["shape", "zero"], ["rows"], axis=0),
        node("Concat", ["rows", "rest"], ["target"], axis=0),
        node("Reshape", ["o", "target"], ["flat"]),
        node("Gemm", ["flat", "fc", "fb"], ["y"], alpha=0.5, transB=1),
        node("ReduceMean", ["k"], ["mean"], axes=[2, 3], keepdims=0),
        node("Unsqueeze", ["mean", "last"], ["u"]),
        node("Transpose", ["u"], ["t"], perm=[0, 2, 1]),
    ]
    constants = {
        "w": numbers(4, 3, 3, 3),
        "b": numbers(4),
        "s": np.abs(numbers(4)),
        "low": np.float32(0),
        "high": np.float32(6),
        "pads": np.array([0, 0, 1, 0, 0, 0, 1, 0]),
        "dw": numbers(4, 1, 2, 2),
        "zero": np.array([0]),
        "rest": np.array([-1]),
        "last": np.array([2]),
        "fc": numbers(5, 24),
        "fb": numbers(5),
    }
    return model(nodes, constants, inputs={"x": ("n", 3, 5, 5)}, outputs=("y", "t"), name="small").SerializeToString()


VALID = small_file()
FUZZ = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(path, content: bytes) -> None:
    """Read it without islands and with, and write what was read."""
    path.write_bytes(content)
    for islands in (False, True):
        try:
            net = read_net(path, islands=islands)
            if sum(array.nbytes for array in weights(net)) < 10**7:
                to_onnx(plain_graph(net))
        except (ModelError, StitchError) as error:
            assert "\n" not in str(error)
            assert str(error).startswith(f"{path.name}: ")


def weights(net) -> list[np.ndarray]:
    return [each for op in net.ops for each in (op.weight, op.scale, op.shift) if each is not None]


def test_the_file_is_valid_before_it_is_damaged(tmp_path):
    path = tmp_path / "small.onnx"
    path.write_bytes(VALID)
    net = read_net(path, islands=True)
    assert [op.kind for op in net.ops].count("island") == 1
    with pytest.raises(StitchError, match="Softmax"):
        read_net(path)


@FUZZ
@given(content=changed(VALID))
def test_changed_bytes(tmp_path, content):
    read(tmp_path / "small.onnx", content)


@FUZZ
@given(content=spliced(VALID))
def test_spliced_bytes(tmp_path, content):
    read(tmp_path / "small.onnx", content)


def test_truncated_files(tmp_path):
    for end in range(0, len(VALID), 11):
        read(tmp_path / "small.onnx", VALID[:end])


NUMBERS = st.sampled_from([0, 1, 2, 3, 5, -1, -7, 2**31, 2**62, -(2**63), 2**63 - 1])
OPERATORS = [
    "Conv",
    "MatMul",
    "Gemm",
    "Concat",
    "Reshape",
    "Squeeze",
    "Unsqueeze",
    "Transpose",
    "ReduceMean",
    "Flatten",
    "Pow",
    "AveragePool",
    "GlobalMaxPool",
    "PRelu",
    "Sub",
    "Div",
    "Sum",
    "Expand",
    "ConstantOfShape",
    "Slice",
    "Resize",
    "Tile",
    "Split",
    "TopK",
    "Loop",
    "If",
    "Einsum",
    "LSTM",
    "Constant",
    "Cast",
    "Dropout",
    "Shape",
    "Pad",
    "Max",
    "NoSuchThing",
]


@settings(FUZZ, max_examples=40)
@given(data=st.data())
def test_changed_fields(tmp_path, data):
    """Files that parse but lie: random sizes, attributes, operators, versions and wires."""
    proto = onnx.ModelProto.FromString(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        change(proto, data)
    read(tmp_path / "small.onnx", proto.SerializeToString())


def change(proto: onnx.ModelProto, data) -> None:
    graph = proto.graph
    match data.draw(st.sampled_from(["dims", "numbers", "attribute", "op", "wire", "drop", "input", "opset", "type"])):
        case "dims":
            dims = data.draw(st.sampled_from([each for each in graph.initializer if each.dims])).dims
            dims[data.draw(st.integers(0, len(dims) - 1))] = data.draw(NUMBERS)
        case "numbers":
            whole = [each for each in graph.initializer if each.data_type == onnx.TensorProto.INT64]
            tensor = data.draw(st.sampled_from(whole))
            found = onnx.numpy_helper.to_array(tensor).copy()
            found[data.draw(st.integers(0, len(found) - 1))] = data.draw(NUMBERS)
            tensor.raw_data = found.tobytes()
        case "attribute":
            owner = data.draw(st.sampled_from([each for each in graph.node if each.attribute]))
            attribute = data.draw(st.sampled_from(owner.attribute))
            attribute.i = data.draw(NUMBERS)
            attribute.ints.append(data.draw(NUMBERS))
            if attribute.ints:
                attribute.ints[0] = data.draw(NUMBERS)
            attribute.f = data.draw(st.sampled_from([0.0, float("nan"), float("inf"), -1.0]))
            attribute.type = data.draw(st.sampled_from([attribute.type] * 3 + list(range(15))))
        case "op":
            data.draw(st.sampled_from(graph.node)).op_type = data.draw(st.sampled_from(OPERATORS))
        case "wire":
            owner = data.draw(st.sampled_from([each for each in graph.node if each.input]))
            names = [*(each.output[0] for each in graph.node), *(each.name for each in graph.initializer), "x", "", "q"]
            owner.input[data.draw(st.integers(0, len(owner.input) - 1))] = data.draw(st.sampled_from(names))
        case "drop":
            owner = data.draw(st.sampled_from(graph.node))
            del owner.input[-1:]
        case "input":
            dim = data.draw(st.sampled_from(graph.input[0].type.tensor_type.shape.dim))
            dim.dim_value = data.draw(NUMBERS)
        case "opset":
            proto.opset_import[0].version = data.draw(st.sampled_from([0, 1, 6, 9, 12, 13, 18, 21, 99, 2**31]))
        case "type":
            tensor = data.draw(st.sampled_from(graph.initializer))
            tensor.data_type = data.draw(st.integers(0, 24))
