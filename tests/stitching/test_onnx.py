"""ONNX in, ONNX out: a model that is read and written again gives what it gave, or is refused in clear words."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.stitching import files as stitch_files
from tests.stitching.files import assert_close, assert_reads_as_itself, inputs_of, kinds, model, node, numbers, run
from weft.base.errors import ModelError, StitchError
from weft.models.packaged import packaged_models
from weft_stitch.cost import Modelled, count
from weft_stitch.graph import Builder
from weft_stitch.graph_steps import plain_graph
from weft_stitch.onnx_writer import to_onnx, write_onnx
from weft_stitch.reading.onnx_reader import read_net

W = numbers(8, 4, 3, 3)
B = numbers(8, seed=1)
CHANNELS = numbers(4, seed=2)
INT = np.int64


def ints(*values: int) -> np.ndarray:
    return np.array(values, INT)


def positive(*shape: int) -> np.ndarray:
    return np.abs(numbers(*shape, seed=3)) + np.float32(0.5)


BATCH_NORM = {"s": positive(4), "b": CHANNELS, "m": numbers(4, seed=4), "v": positive(4)}
MIXED = {"w": W, "b": B, "fc": numbers(240, 3), "fb": numbers(3)}

# What goes in, what it is as kinds of operations, and the constants it reads.
CASES = {
    "conv": ([node("Conv", ["x", "w"], ["y"])], ["conv"], {"w": W}),
    "conv with bias": ([node("Conv", ["x", "w", "b"], ["y"], pads=[1, 0, 2, 1])], ["conv", "affine"], {"w": W, "b": B}),
    "conv strided": ([node("Conv", ["x", "w"], ["y"], strides=[2, 1], dilations=[1, 2])], ["conv"], {"w": W}),
    "conv in groups": ([node("Conv", ["x", "w"], ["y"], group=2)], ["conv"], {"w": numbers(6, 2, 3, 1)}),
    "depthwise": ([node("Conv", ["x", "w"], ["y"], group=4)], ["conv"], {"w": numbers(8, 1, 3, 3)}),
    "same upper": ([node("Conv", ["x", "w"], ["y"], auto_pad="SAME_UPPER", strides=[2, 2])], ["conv"], {"w": W}),
    "same lower": ([node("Conv", ["x", "w"], ["y"], auto_pad="SAME_LOWER", strides=[2, 2])], ["conv"], {"w": W}),
    "valid": ([node("Conv", ["x", "w"], ["y"], auto_pad="VALID")], ["conv"], {"w": W}),
    "batch norm": (
        [node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y"], epsilon=1e-3)],
        ["affine"],
        BATCH_NORM,
    ),
    "add per channel": ([node("Add", ["x", "c"], ["y"])], ["affine"], {"c": CHANNELS.reshape(4, 1, 1)}),
    "add to a constant": ([node("Add", ["c", "x"], ["y"])], ["affine"], {"c": np.float32(3)}),
    "mul per channel": ([node("Mul", ["x", "c"], ["y"])], ["affine"], {"c": CHANNELS.reshape(1, 4, 1, 1)}),
    "mul spelled out": ([node("Mul", ["x", "c"], ["y"])], ["affine"], {"c": np.full((1, 4, 6, 5), 2, np.float32)}),
    "sub": ([node("Sub", ["x", "c"], ["y"])], ["affine"], {"c": CHANNELS.reshape(4, 1, 1)}),
    "sub from": ([node("Sub", ["c", "x"], ["y"])], ["affine"], {"c": np.float32(1)}),
    "div": ([node("Div", ["x", "c"], ["y"])], ["affine"], {"c": positive(4).reshape(4, 1, 1)}),
    "add two": ([node("Relu", ["x"], ["r"]), node("Add", ["x", "r"], ["y"])], ["unary", "add"], {}),
    "add itself": ([node("Add", ["x", "x"], ["y"])], ["add"], {}),
    "sub two": (
        [node("Relu", ["x"], ["r"]), node("Sub", ["x", "r"], ["y"])],
        ["unary", "affine", "add"],
        {},
    ),
    "sum of three": (
        [node("Relu", ["x"], ["r"]), node("Sum", ["x", "r", "r"], ["y"])],
        ["unary", "add", "add"],
        {},
    ),
    "square": ([node("Pow", ["x", "c"], ["y"])], ["mul"], {"c": np.float32(2)}),
    "silu spelled out": ([node("Sigmoid", ["x"], ["s"]), node("Mul", ["x", "s"], ["y"])], ["unary", "mul"], {}),
    "hard swish spelled out": (
        [
            node("Add", ["x", "three"], ["a"]),
            node("Clip", ["a", "zero", "six"], ["c"]),
            node("Mul", ["x", "c"], ["m"]),
            node("Div", ["m", "six"], ["y"]),
        ],
        ["affine", "unary", "mul", "affine"],
        {"three": np.float32(3), "six": np.float32(6), "zero": np.float32(0)},
    ),
    "prelu": (
        [node("PRelu", ["x", "c"], ["y"])],
        ["unary", "unary", "affine", "unary", "add"],
        {"c": CHANNELS.reshape(4, 1, 1)},
    ),
    "prelu of one slope": ([node("PRelu", ["x", "c"], ["y"])], ["unary"], {"c": np.float32([[[0.2]]])}),
    "clip": ([node("Clip", ["x", "a", "b"], ["y"])], ["unary"], {"a": np.float32(-0.5), "b": np.float32(0.5)}),
    "clip above": ([node("Clip", ["x", "", "b"], ["y"])], ["unary"], {"b": np.float32(0.5)}),
    "clip nothing": ([node("Clip", ["x"], ["c"]), node("Abs", ["c"], ["y"])], ["unary"], {}),
    "relu as a clip": ([node("Max", ["x", "a"], ["y"])], ["unary"], {"a": np.float32(0)}),
    "least": ([node("Min", ["x", "a"], ["y"])], ["unary"], {"a": np.float32(0.25)}),
    "concat": ([node("Relu", ["x"], ["r"]), node("Concat", ["r", "x"], ["y"], axis=-3)], ["unary", "concat"], {}),
    "max pool": (
        [node("MaxPool", ["x"], ["y"], kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 1, 1])],
        ["max_pool"],
        {},
    ),
    "max pool rounded up": (
        [node("MaxPool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)],
        ["max_pool"],
        {},
    ),
    "max pool dilated": ([node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2], dilations=[2, 2])], ["max_pool"], {}),
    "average pool": ([node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1])], ["avg_pool"], {}),
    "average pool that counts": (
        [node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1)],
        ["avg_pool"],
        {},
    ),
    "average pool rounded up": (
        [node("AveragePool", ["x"], ["y"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1)],
        ["avg_pool"],
        {},
    ),
    "global average": ([node("GlobalAveragePool", ["x"], ["y"])], ["global_pool"], {}),
    "global max": ([node("GlobalMaxPool", ["x"], ["y"])], ["max_pool"], {}),
    "mean": ([node("ReduceMean", ["x"], ["y"], axes=[-1, 2], keepdims=0)], ["global_pool"], {}),
    "mean over one dimension of positions": (
        [node("Reshape", ["x", "s"], ["r"]), node("ReduceMean", ["r"], ["y"], axes=[2])],
        ["global_pool"],
        {"s": ints(0, 4, 30)},
    ),
    "greatest": ([node("ReduceMax", ["x"], ["y"], axes=[2, 3])], ["max_pool"], {}),
    "flatten at the end": ([node("Flatten", ["x"], ["y"])], [], {}),
    "flatten and gemm": (
        [node("Flatten", ["x"], ["f"]), node("Gemm", ["f", "w", "b"], ["y"], alpha=0.5, beta=2.0)],
        ["conv", "affine"],
        {"w": numbers(120, 3), "b": numbers(3)},
    ),
    "gemm transposed": (
        [node("Reshape", ["x", "s"], ["f"]), node("Gemm", ["f", "w", "b"], ["y"], transB=1)],
        ["conv", "affine"],
        {"w": numbers(3, 120), "b": np.float32(0.5), "s": ints(2, -1)},
    ),
    "matmul and add": (
        [node("Flatten", ["x"], ["f"]), node("MatMul", ["f", "w"], ["m"]), node("Add", ["m", "b"], ["y"])],
        ["conv", "affine"],
        {"w": numbers(120, 3), "b": numbers(3)},
    ),
    "two layers": (
        [
            node("GlobalAveragePool", ["x"], ["g"]),
            node("Squeeze", ["g", "axes"], ["q"]),
            node("Gemm", ["q", "w"], ["h"]),
            node("Relu", ["h"], ["r"]),
            node("Gemm", ["r", "v"], ["o"]),
            node("Unsqueeze", ["o", "axes"], ["y"]),
        ],
        ["global_pool", "conv", "unary", "conv"],
        {"w": numbers(4, 6), "v": numbers(6, 2), "axes": ints(2, 3)},
    ),
    "squeeze and excite": (
        [
            node("GlobalAveragePool", ["x"], ["g"]),
            node("Conv", ["g", "w"], ["c"]),
            node("HardSigmoid", ["c"], ["h"], alpha=0.1),
            node("Mul", ["h", "x"], ["y"]),
        ],
        ["global_pool", "conv", "unary", "mul"],
        {"w": numbers(4, 4, 1, 1)},
    ),
    "one channel over all": (
        [node("Conv", ["x", "w"], ["c"]), node("Mul", ["x", "c"], ["y"])],
        ["conv", "mul"],
        {"w": numbers(1, 4, 1, 1)},
    ),
    "flattened pictures side by side": (
        [
            node("Flatten", ["x"], ["f"]),
            node("Relu", ["f"], ["r"]),
            node("Concat", ["f", "r"], ["c"], axis=1),
            node("Gemm", ["c", "fc", "fb"], ["y"]),
        ],
        ["unary", "concat", "conv", "affine"],
        {"fc": MIXED["fc"], "fb": MIXED["fb"]},
    ),
    "shape arithmetic": (
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["n"]),
            node("Unsqueeze", ["n", "first"], ["u"]),
            node("Concat", ["u", "rest"], ["t"], axis=0),
            node("Reshape", ["x", "t"], ["f"]),
            node("MatMul", ["f", "w"], ["y"]),
        ],
        ["conv"],
        {"zero": INT(0), "first": ints(0), "rest": ints(-1), "w": numbers(120, 3)},
    ),
    "computed weight": (
        [node("Transpose", ["w"], ["t"], perm=[1, 0, 2, 3]), node("Conv", ["x", "t"], ["y"])],
        ["conv"],
        {"w": numbers(4, 8, 1, 1)},
    ),
    "transposed vector": (
        [
            node("GlobalAveragePool", ["x"], ["g"]),
            node("Transpose", ["g"], ["t"], perm=[0, 2, 3, 1]),
            node("Flatten", ["t"], ["y"]),
        ],
        ["global_pool"],
        {},
    ),
    "pad and conv": (
        [node("Pad", ["x", "p"], ["q"]), node("Conv", ["q", "w"], ["y"], pads=[1, 0, 0, 0])],
        ["conv"],
        {"p": ints(0, 0, 1, 2, 0, 0, 0, 1), "w": W},
    ),
    "pad and pool": (
        [node("Pad", ["x", "p"], ["q"]), node("MaxPool", ["q"], ["y"], kernel_shape=[3, 3])],
        ["conv", "max_pool"],
        {"p": ints(0, 0, 1, 2, 0, 0, 0, 1)},
    ),
    "pad at the end": ([node("Pad", ["x", "p"], ["y"])], ["conv"], {"p": ints(0, 0, 1, 0, 0, 0, 0, 1)}),
    "identities": (
        [
            node("Identity", ["x"], ["i"]),
            node("Dropout", ["i"], ["d", "mask"]),
            node("Cast", ["d"], ["c"], to=TensorProto.FLOAT),
            node("Relu", ["c"], ["y"]),
        ],
        ["unary"],
        {},
    ),
    "bias and batch norm": (
        [node("Add", ["x", "c"], ["a"]), node("BatchNormalization", ["a", "s", "b", "m", "v"], ["y"])],
        ["affine"],
        {**BATCH_NORM, "c": CHANNELS.reshape(4, 1, 1)},
    ),
    "not in order": ([node("Relu", ["a"], ["y"]), node("Abs", ["x"], ["a"])], ["unary", "unary"], {}),
    "dead ends": (
        [node("Einsum", ["x", "x"], ["z"], equation="abcd,abcd->abcd"), node("Abs", ["x"], ["y"])],
        ["unary"],
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_operator_comes_out_as_it_went_in(case):
    nodes, expected, constants = CASES[case]
    proto = model(nodes, constants)
    net = assert_reads_as_itself(proto)
    assert kinds(net) == expected
    assert net.batch == 2


UNARIES = {
    "Relu": {},
    "Sigmoid": {},
    "Tanh": {},
    "HardSigmoid": {"beta": 0.4},
    "HardSwish": {},
    "LeakyRelu": {"alpha": 0.3},
    "Elu": {"alpha": 0.7},
    "Softplus": {},
    "Exp": {},
    "Neg": {},
    "Abs": {},
    "Gelu": {"approximate": "tanh"},
}


@pytest.mark.parametrize("function", UNARIES)
@pytest.mark.parametrize("flat", [False, True])
def test_functions_of_one_value_keep_their_settings(function, flat):
    before = [node("Flatten", ["x"], ["h"])] if flat else [node("Identity", ["x"], ["h"])]
    net = assert_reads_as_itself(model([*before, node(function, ["h"], ["y"], **UNARIES[function])], opset=20))
    assert [op.function for op in net.ops] == [function]


def test_old_and_new_spellings_are_read_alike():
    old = model([node("Clip", ["x"], ["c"], min=0.0, max=6.0), node("ReduceMean", ["c"], ["y"], axes=[2, 3])], opset=9)
    new = model(
        [node("Clip", ["x", "a", "b"], ["c"]), node("ReduceMean", ["c", "axes"], ["y"])],
        {"a": np.float32(0), "b": np.float32(6), "axes": ints(2, 3)},
        opset=18,
    )
    assert_reads_as_itself(old)
    assert_reads_as_itself(new)
    assert read_net(old).ops[0].settings == read_net(new).ops[0].settings == {"min": 0.0, "max": 6.0}


def test_constants_may_be_nodes():
    held = helper.make_tensor("held", TensorProto.FLOAT, [4, 1, 1], CHANNELS)
    nodes = [
        node("Constant", [], ["c"], value=held),
        node("Constant", [], ["two"], value_float=2.0),
        node("Constant", [], ["s"], value_ints=[2, -1]),
        node("Mul", ["x", "c"], ["m"]),
        node("Mul", ["m", "two"], ["n"]),
        node("Reshape", ["n", "s"], ["y"]),
    ]
    assert kinds(assert_reads_as_itself(model(nodes))) == ["affine"]


def test_half_and_double_weights_are_read_as_float32():
    for kind, dtype in ((np.float16, TensorProto.FLOAT16), (np.float64, TensorProto.DOUBLE)):
        proto = model([node("Conv", ["x", "w"], ["y"])], {"w": W.astype(kind)}, dtype=dtype)
        (conv,) = read_net(proto).ops
        assert conv.weight is not None and conv.weight.dtype == np.float32
        np.testing.assert_array_equal(conv.weight, W.astype(kind).astype(np.float32))


def test_weights_in_a_file_of_their_own_are_found(tmp_path):
    proto = model([node("Conv", ["x", "w"], ["y"])], {"w": W})
    path = tmp_path / "m.onnx"
    onnx.save_model(proto, str(path), save_as_external_data=True, location="m.data", size_threshold=0)
    np.testing.assert_array_equal(read_net(path).ops[0].weight, W)
    (tmp_path / "m.data").unlink()
    with pytest.raises(ModelError, match=r"m\.onnx: .* tensor w cannot be read"):
        read_net(path)


def test_functions_of_the_file_are_inlined():
    proto = model([node("Twice", ["x"], ["y"], domain="local")])
    body = [node("Relu", ["a"], ["r"]), node("Add", ["r", "r"], ["b"])]
    proto.functions.append(helper.make_function("local", "Twice", ["a"], ["b"], body, [helper.make_opsetid("", 17)]))
    proto.opset_import.append(helper.make_opsetid("local", 1))
    assert kinds(assert_reads_as_itself(proto)) == ["unary", "add"]


def test_several_inputs_and_outputs_keep_their_names_and_shapes():
    nodes = [
        node("Mul", ["x", "gate"], ["m"]),
        node("Flatten", ["m"], ["flat"]),
        node("GlobalAveragePool", ["m"], ["mean"]),
    ]
    shapes = {"x": (2, 4, 6, 5), "gate": (2, 4, 1, 1)}
    net = assert_reads_as_itself(model(nodes, inputs=shapes, outputs=("mean", "flat", "m")))
    assert [(port.name, port.shape) for port in net.outputs] == [
        ("mean", (4, 1, 1)),
        ("flat", (120,)),
        ("m", (4, 6, 5)),
    ]
    assert len({port.value for port in net.outputs}) == 3


def test_vectors_are_pictures_of_one_position():
    net = assert_reads_as_itself(model([node("Gemm", ["x", "w"], ["y"])], {"w": numbers(7, 3)}, inputs={"x": (3, 7)}))
    assert (net.values["x"].channels, net.inputs[0].shape, net.outputs[0].shape) == (7, (7,), (3,))


# Rows


def test_an_open_batch_is_one_or_what_is_asked_for():
    proto = model([node("Relu", ["x"], ["y"])], inputs={"x": ("N", 4, 6, 5)})
    assert (read_net(proto).batch, read_net(proto, batch=5).batch) == (1, 5)
    fixed = model([node("Relu", ["x"], ["y"])])
    assert read_net(fixed, batch=2).batch == 2
    with pytest.raises(ModelError, match="x is fixed to 2 rows, not 3; export it with an open batch"):
        read_net(fixed, batch=3)


def test_an_open_size_is_asked_for_and_taken():
    proto = model([node("Relu", ["x"], ["y"])], inputs={"x": (1, 3, "height", 8)})
    with pytest.raises(ModelError, match=r"size 2 of its input x is open \(height\); pass --shape x=1x3x224x8"):
        read_net(proto)
    assert read_net(proto, shapes={"x": (1, 3, 4, 8)}).values["x"].height == 4
    with pytest.raises(ModelError, match="shape 1x3x4x9 does not fit input 'x'"):
        read_net(proto, shapes={"x": (1, 3, 4, 9)})
    with pytest.raises(ModelError, match="unknown input 'z'; the inputs are: x"):
        read_net(proto, shapes={"z": (1,)})


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_graph_with_open_rows_runs_any_number_of_them(rows):
    proto = model(
        [
            node("Conv", ["x", "w", "b"], ["c"]),
            node("Sigmoid", ["c"], ["s"]),
            node("Mul", ["c", "s"], ["m"]),
            node("Flatten", ["m"], ["f"]),
            node("Gemm", ["f", "fc"], ["y"]),
        ],
        {"w": W, "b": B, "fc": numbers(96, 3)},
        inputs={"x": ("N", 4, 6, 5)},
    )
    net = read_net(proto)
    written = to_onnx(plain_graph(net, dynamic=True))
    onnx.checker.check_model(written, full_check=True)
    inputs = {"x": numbers(rows, 4, 6, 5)}
    if rows:
        assert_close(run(written, inputs), run(proto, inputs))
    else:
        assert run(written, inputs)[0].shape == (0, 3)


# Writing


def test_scales_are_folded_into_the_convolution_only_where_nobody_else_reads_it():
    constants = {"w": W[:4], "c": CHANNELS.reshape(4, 1, 1), "k": positive(4).reshape(4, 1, 1)}
    affines = [node("Conv", ["x", "w"], ["a"]), node("Mul", ["a", "k"], ["b"]), node("Add", ["b", "c"], ["d"])]
    alone = assert_reads_as_itself(model([*affines, node("Relu", ["d"], ["y"])], constants))
    assert [step.op for step in plain_graph(alone).steps] == ["Conv", "Relu", "Identity"]
    read_twice = assert_reads_as_itself(model([*affines, node("Add", ["d", "a"], ["y"])], constants))
    assert [step.op for step in plain_graph(read_twice).steps] == ["Conv", "Mul", "Add", "Add", "Identity"]
    given_out = assert_reads_as_itself(model(affines, constants, outputs=("d", "a")))
    assert "Mul" in [step.op for step in plain_graph(given_out).steps]


def test_a_window_over_the_whole_picture_is_a_product_of_matrices():
    net = assert_reads_as_itself(model([node("Conv", ["x", "w", "b"], ["y"])], {"w": numbers(8, 4, 6, 5), "b": B}))
    assert [step.op for step in plain_graph(net).steps] == ["Flatten", "Gemm", "Reshape", "Identity"]


def test_names_of_ports_are_kept_even_where_the_graph_would_take_them():
    nodes = [node("Relu", ["abs_1"], ["h"]), node("Abs", ["h"], ["relu_1"])]
    proto = model(nodes, inputs={"abs_1": (1, 2, 3, 3)}, outputs=("relu_1",))
    net = assert_reads_as_itself(proto)
    assert [tensor.name for tensor in plain_graph(net).outputs] == ["relu_1"]


def test_metadata_and_versions_are_written(tmp_path):
    graph = plain_graph(read_net(model([node("Conv", ["x", "w"], ["y"])], {"w": W})))
    write_onnx(graph, tmp_path / "m.onnx", {"weft.stitched": "{}"})
    proto = onnx.load(str(tmp_path / "m.onnx"))
    onnx.checker.check_model(proto, full_check=True)
    assert {each.key: each.value for each in proto.metadata_props} == {"weft.stitched": "{}"}
    assert [each.version for each in proto.opset_import] == [20]


def test_more_weights_than_a_file_holds_go_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.models.onnx_graph.MOST_BYTES_IN_FILE", 100)
    weight = numbers(16, 4, 3, 3)
    graph = plain_graph(read_net(model([node("Conv", ["x", "w"], ["y"])], {"w": weight})))
    for _ in range(2):  # written over, not behind, what is there
        write_onnx(graph, tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx.data").stat().st_size < 2 * weight.nbytes
    onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
    np.testing.assert_array_equal(read_net(tmp_path / "m.onnx").ops[0].weight, weight)


def test_weights_beside_a_file_that_is_linked_to_stand_beside_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.models.onnx_graph.MOST_BYTES_IN_FILE", 100)
    (tmp_path / "far").mkdir()
    (tmp_path / "link.onnx").symlink_to("far/m.onnx")
    graph = plain_graph(read_net(model([node("Conv", ["x", "w"], ["y"])], {"w": W})))
    for _ in range(2):
        write_onnx(graph, tmp_path / "link.onnx")
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["far", "link.onnx", "m.onnx", "m.onnx.data"]
    assert (tmp_path / "far/m.onnx.data").stat().st_size < 2 * W.nbytes
    np.testing.assert_array_equal(read_net(tmp_path / "far/m.onnx").ops[0].weight, W)


def test_an_interrupt_leaves_a_file_and_the_weights_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.models.onnx_graph.MOST_BYTES_IN_FILE", 100)
    graphs = [plain_graph(read_net(model([node("Conv", ["x", "w"], ["y"])], {"w": each}))) for each in (W, W + 1)]
    write_onnx(graphs[0], tmp_path / "m.onnx")
    save = onnx.save_model

    def interrupted(*given, **settings):
        save(*given, **settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(onnx, "save_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_onnx(graphs[1], tmp_path / "m.onnx")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    np.testing.assert_array_equal(read_net(tmp_path / "m.onnx").ops[0].weight, W)


def test_weights_that_need_a_file_of_their_own_do_not_go_to_a_device(monkeypatch):
    monkeypatch.setattr("weft.models.onnx_graph.MOST_BYTES_IN_FILE", 100)
    graph = plain_graph(read_net(model([node("Conv", ["x", "w"], ["y"])], {"w": W})))
    with pytest.raises(StitchError, match=r"^/dev/null: cannot write: more than one file is needed; name a file$"):
        write_onnx(graph, "/dev/null")


def test_what_only_torch_runs_is_not_written():
    builder = Builder("g")
    x = builder.input("x", (1, 2, 3, 3))
    builder.layer = "conv1"
    builder.output(builder.add("FusedConv", x, shape=(1, 2, 3, 3)), "y")
    with pytest.raises(StitchError, match="conv1 cannot be written to ONNX: it is in the form 'fused'"):
        to_onnx(builder.finish())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    graph = plain_graph(read_net(model([node("Relu", ["x"], ["y"])])))
    with pytest.raises(StitchError, match=r"gone/m\.onnx: cannot write: No such file"):
        write_onnx(graph, tmp_path / "gone" / "m.onnx")


# Refusals

REFUSED = {
    "unknown": (
        [node("Softmax", ["x"], ["y"], name="soft")],
        {},
        "soft is the operator Softmax: it is not understood; islands = True runs it",
    ),
    "foreign domain": (
        [node("FusedMatMul", ["x", "x"], ["y"], domain="com.microsoft")],
        {},
        "operator com.microsoft.FusedMatMul",
    ),
    "moves channels": ([node("Transpose", ["x"], ["y"], perm=[0, 2, 3, 1])], {}, "it moves dimensions"),
    "two values divided": (
        [node("Relu", ["x"], ["r"]), node("Div", ["x", "r"], ["y"])],
        {},
        "r is computed from the model's inputs",
    ),
    "table over positions": ([node("Add", ["x", "c"], ["y"])], {"c": numbers(1, 4, 6, 5)}, "does not go by channels"),
    "grows": ([node("Mul", ["x", "c"], ["y"])], {"c": numbers(3, 1, 1, 1, 1)}, "does not spread"),
    "adds a dimension": ([node("Mul", ["x", "c"], ["y"])], {"c": numbers(1, 1, 1, 1, 1)}, "does not spread"),
    "a term per row": (
        [node("Flatten", ["x"], ["f"]), node("Gemm", ["f", "w", "b"], ["y"])],
        {"w": numbers(120, 2), "b": numbers(2, 1)},
        "is not one number per output",
    ),
    "joins rows": ([node("Concat", ["x", "x"], ["y"], axis=0)], {}, "axis 1"),
    "concat of pictures of other sizes": (
        [
            node("GlobalAveragePool", ["x"], ["g"]),
            node("Flatten", ["x"], ["f"]),
            node("Flatten", ["g"], ["h"]),
            node("Concat", ["f", "h"], ["y"], axis=1),
        ],
        {},
        "it joins rows of 120, 4",
    ),
    "pads with ones": (
        [node("Pad", ["x", "p", "one"], ["y"])],
        {"p": ints(0, 0, 1, 1, 0, 0, 1, 1), "one": np.float32(1)},
        "something else than zeros",
    ),
    "row-less": ([node("Reshape", ["x", "s"], ["y"])], {"s": ints(-1)}, "which are not rows"),
    "rounds up and counts": (
        [
            node(
                "AveragePool",
                ["x"],
                ["y"],
                kernel_shape=[3, 3],
                strides=[2, 2],
                pads=[1, 1, 0, 0],
                ceil_mode=1,
                count_include_pad=1,
            )
        ],
        {},
        "runtimes disagree",
    ),
    "integer weight": (
        [node("Conv", ["x", "w"], ["y"])],
        {"w": np.ones((2, 4, 1, 1), np.int32)},
        "w holds int32 numbers",
    ),
    "computed weight": ([node("Conv", ["x", "x"], ["y"])], {}, "x is computed from the model's inputs"),
    "indices of the largest": (
        [node("MaxPool", ["x"], ["y", "i"], kernel_shape=[2, 2]), node("Cast", ["i"], ["z"], to=1)],
        {},
        "indices of the largest",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_by_name(case):
    nodes, constants, words = REFUSED[case]
    outputs = ("y", "z") if case == "indices of the largest" else ("y",)
    with pytest.raises(StitchError) as caught:
        read_net(model(nodes, constants, outputs=outputs, name="mine"))
    message = str(caught.value)
    assert words in message
    assert message.startswith("mine: ")
    assert "islands = True" in message
    assert "\n" not in message


def test_one_dimensional_convolutions_are_refused():
    proto = model([node("Conv", ["x", "w"], ["y"])], {"w": numbers(2, 4, 3)}, inputs={"x": (1, 4, 9)})
    with pytest.raises(StitchError, match=r"1d convolution; those over pictures \(2d\)"):
        read_net(proto)


def test_training_mode_is_refused():
    norm = node("BatchNormalization", ["x", "s", "b", "m", "v"], ["y", "mm", "vv"], training_mode=1)
    with pytest.raises(StitchError, match="training mode; export the model for inference"):
        read_net(model([norm], BATCH_NORM))


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_numbers_that_are_none_are_refused_by_the_name_of_their_tensor(number):
    weight = W.copy()
    weight[3, 1, 0, 0] = number
    with pytest.raises(ModelError, match="tensor w holds numbers that are not finite"):
        read_net(model([node("Conv", ["x", "w"], ["y"])], {"w": weight}))


def test_inputs_that_are_not_floats_are_refused():
    with pytest.raises(ModelError, match="its input x is of type uint8; float inputs can be stitched"):
        read_net(model([node("Cast", ["x"], ["y"], to=1)], dtype=TensorProto.UINT8))


def test_files_that_are_no_models_are_refused(tmp_path):
    path = tmp_path / "a.onnx"
    for content, words in ((b"", "no graph"), (b"\x00\x01nonsense", "not an ONNX file")):
        path.write_bytes(content)
        with pytest.raises(ModelError, match=f"a.onnx: .*{words}"):
            read_net(path)
    with pytest.raises(ModelError, match=r"b\.onnx: cannot be read: No such file"):
        read_net(tmp_path / "b.onnx")


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Relu", ["z"], ["y"])], "y reads z, which nothing writes"),
        ([node("Relu", ["b"], ["y"]), node("Relu", ["y"], ["b"])], "made from its own output"),
        ([node("Relu", ["x"], ["y"]), node("Abs", ["x"], ["y"])], "y is written twice"),
        ([node("Relu", ["x"], ["b"])], "an output reads y, which nothing writes"),
        ([node("Conv", ["x"], ["y"])], "its input 2 is missing"),
    ],
)
def test_broken_wires_are_named(nodes, words):
    with pytest.raises(ModelError, match=words):
        read_net(model(nodes))


# Islands

ISLANDS = {
    "softmax": ([node("Softmax", ["x"], ["s"], axis=1), node("Conv", ["s", "w"], ["y"])], {"w": W}, 1),
    "resize": (
        [node("Resize", ["x", "", "f"], ["r"], mode="nearest"), node("Conv", ["r", "w"], ["y"])],
        {"w": W, "f": np.float32([1, 1, 2, 2])},
        1,
    ),
    "split": (
        [
            node("Split", ["x", "parts"], ["a", "b"], axis=1),
            node("Relu", ["b"], ["r"]),
            node("Concat", ["r", "a"], ["y"], axis=1),
        ],
        {"parts": ints(1, 3)},
        2,
    ),
    "shuffle": (
        [
            node("Reshape", ["x", "five"], ["a"]),
            node("Transpose", ["a"], ["b"], perm=[0, 2, 1, 3, 4]),
            node("Reshape", ["b", "four"], ["c"]),
            node("Conv", ["c", "w"], ["y"]),
        ],
        {"five": ints(2, 2, 2, 6, 5), "four": ints(2, 4, 6, 5), "w": W},
        1,
    ),
    "attention": (
        [
            node("Reshape", ["x", "s"], ["t"]),
            node("Transpose", ["t"], ["q"], perm=[0, 2, 1]),
            node("MatMul", ["q", "t"], ["a"]),
            node("Softmax", ["a"], ["p"], axis=-1),
            node("MatMul", ["p", "q"], ["o"]),
            node("Transpose", ["o"], ["u"], perm=[0, 2, 1]),
            node("Reshape", ["u", "back"], ["r"]),
            node("Add", ["x", "r"], ["y"]),
        ],
        {"s": ints(2, 4, 30), "back": ints(2, 4, 6, 5)},
        1,
    ),
    "three dimensions out": (
        [node("Reshape", ["x", "s"], ["t"]), node("Softmax", ["t"], ["y"], axis=-1)],
        {"s": ints(2, 4, 30)},
        1,
    ),
    "five dimensions out": (
        [node("Reshape", ["x", "s"], ["t"]), node("Transpose", ["t"], ["y"], perm=[0, 2, 1, 4, 3])],
        {"s": ints(2, 2, 2, 6, 5)},
        1,
    ),
    "padded before": (
        [node("Pad", ["x", "p"], ["q"]), node("Softmax", ["q"], ["y"], axis=1)],
        {"p": ints(0, 0, 1, 1, 0, 0, 0, 0)},
        1,
    ),
    "vectors": (
        [node("Flatten", ["x"], ["f"]), node("Gemm", ["f", "w"], ["g"]), node("Softmax", ["g"], ["y"], axis=1)],
        {"w": numbers(120, 3)},
        1,
    ),
    "a table over positions": ([node("Add", ["x", "c"], ["y"])], {"c": numbers(1, 4, 6, 5)}, 1),
    "transposed convolution": (
        [node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])],
        {"w": numbers(4, 3, 2, 2)},
        1,
    ),
}


@pytest.mark.parametrize("case", ISLANDS)
def test_islands_run_what_is_not_understood(case):
    nodes, constants, count = ISLANDS[case]
    net = assert_reads_as_itself(model(nodes, constants), islands=True)
    assert kinds(net).count("island") == count
    assert len({op.name for op in net.ops}) == len(net.ops)


@pytest.mark.parametrize("case", ["shuffle", "attention", "vectors"])
def test_islands_run_other_numbers_of_rows(case):
    nodes, constants, _ = ISLANDS[case]
    net = read_net(model(nodes, constants), islands=True)
    written = to_onnx(plain_graph(net, dynamic=True))
    pictures = numbers(6, 4, 6, 5)
    wanted = [run(model(nodes, constants), {"x": pictures[start : start + 2]})[0] for start in (0, 2, 4)]
    assert_close(run(written, {"x": pictures}), [np.concatenate(wanted)])


def _heads(*, first: bool, allowzero: int = 0):
    """Attention with two heads over 30 positions; *first*: whether the rows stay outermost."""
    order = [0, 2, 1, 3] if first else [1, 2, 0, 3]
    nodes = [
        node("Reshape", ["x", "s"], ["t"], allowzero=allowzero),
        node("Transpose", ["t"], ["q"], perm=[0, 2, 1] if first else [2, 0, 1]),
        node("Reshape", ["q", "heads"], ["h"], name="heads", allowzero=allowzero),
        node("Transpose", ["h"], ["k"], perm=order),
        node("Reshape", ["k", "joint"], ["j"], allowzero=allowzero),
        node("Transpose", ["j"], ["l"], perm=[0, 2, 1]),
        node("MatMul", ["j", "l"], ["a"]),
        node("Softmax", ["a"], ["p"], axis=-1),
        node("MatMul", ["p", "j"], ["o"]),
        node("Reshape", ["o", "back"], ["y"], allowzero=allowzero),
    ]
    heads = ints(2, 30, 2, 2) if first else ints(30, 2, 2, 2)
    return nodes, {"s": ints(2, 4, 30), "heads": heads, "joint": ints(4, 30, 2), "back": ints(2, 4, 6, 5)}


@pytest.mark.parametrize("allowzero", [0, 1])
def test_islands_merge_rows_with_heads_for_any_number_of_rows(allowzero):
    nodes, constants = _heads(first=True, allowzero=allowzero)
    net = assert_reads_as_itself(model(nodes, constants), islands=True)
    written = to_onnx(plain_graph(net, dynamic=True))
    pictures = numbers(6, 4, 6, 5)
    wanted = [run(model(nodes, constants), {"x": pictures[start : start + 2]})[0] for start in (0, 2, 4)]
    assert_close(run(written, {"x": pictures}), [np.concatenate(wanted)])


def test_products_inside_islands_are_counted():
    nodes, constants = _heads(first=True)
    net = read_net(model(nodes, constants), islands=True)
    graph = plain_graph(net)
    assert count(graph).macs == 2 * 2 * (30 * 30 * 2) * 2  # rows, heads, both products
    assert Modelled().seconds([graph])[0] > 0
    loose = plain_graph(net, dynamic=True)
    assert count(loose).activation_bytes >= 4 * 2 * 30 * 30


def test_an_island_that_moves_the_rows_is_tied_to_their_number_and_says_so():
    nodes, constants = _heads(first=False)
    net = assert_reads_as_itself(model(nodes, constants), islands=True)
    with pytest.raises(StitchError, match=r"heads \(Reshape\) works only for the number of rows .*2.*dynamic = True"):
        plain_graph(net, dynamic=True)


def test_islands_of_an_old_file_are_brought_to_the_new_operators():
    nodes = [node("Softmax", ["x"], ["s"]), node("Squeeze", ["s"], ["q"], axes=[3]), node("Abs", ["q"], ["y"])]
    proto = model(nodes, inputs={"x": (2, 3, 4, 1)}, opset=9)  # the softmax of opset 9 is over all of a row
    net = assert_reads_as_itself(proto, islands=True)
    assert "island" in kinds(net)


def test_islands_with_the_same_settings_have_the_same_signature():
    def signature(axis: int, channels: int) -> str:
        proto = model([node("Softmax", ["x"], ["y"], axis=axis)], inputs={"x": (1, channels, 2, 2)})
        return read_net(proto, islands=True).ops[0].payload.signature

    assert signature(1, 3) == signature(1, 5) != signature(2, 3)


def test_what_cannot_even_be_an_island_is_refused():
    with pytest.raises(StitchError, match=r"FusedMatMul.*it cannot be kept as an island"):
        read_net(model([node("FusedMatMul", ["x", "x"], ["y"], domain="com.microsoft")]), islands=True)
    branch = helper.make_graph([node("Relu", ["x"], ["b"])], "b", [], [helper.make_tensor_value_info("b", 1, None)])
    choice = node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    with pytest.raises(StitchError, match="operator If"):
        read_net(
            model([node("ReduceMax", ["x"], ["m"], keepdims=0), node("Cast", ["m"], ["c"], to=9), choice]), islands=True
        )


# Nets at random

BINARY = ("Add", "Mul", "Concat")
STEPS = st.sampled_from(
    ["conv", "depthwise", "norm", "Relu", "Sigmoid", "HardSwish", "pool", "mean pool", "Clip", "gate", *BINARY]
)


class _Random:
    """Grows a model from the choices it is given; every value it may read is a picture of known size."""

    def __init__(self, draw) -> None:
        self.draw = draw
        self.nodes, self.constants = [], {}
        self.open = {"x": (3, 7, 6)}

    def weight(self, *shape: int) -> str:
        name = f"w{len(self.constants)}"
        self.constants[name] = numbers(*shape, seed=len(self.constants)) * np.float32(0.3)
        return name

    def add(self, op: str, inputs: list[str], size: tuple[int, int, int], **attributes) -> None:
        name = f"v{len(self.nodes)}"
        self.nodes.append(node(op, inputs, [name], **attributes))
        self.open[name] = size

    def step(self, kind: str) -> None:
        name = self.draw(st.sampled_from(sorted(self.open)))
        channels, tall, wide = self.open[name]
        like = [each for each, size in self.open.items() if size == (channels, tall, wide)]
        if kind == "conv":
            self._conv(name)
        elif kind == "depthwise":
            weight = self.weight(channels, 1, 3, 3)
            self.add("Conv", [name, weight], (channels, tall, wide), group=channels, pads=[1, 1, 1, 1])
        elif kind == "norm":
            tables = [self.weight(channels) for _ in range(3)]
            variance = self.weight(channels)
            self.constants[variance] = np.abs(self.constants[variance]) + np.float32(0.1)
            self.add("BatchNormalization", [name, *tables, variance], (channels, tall, wide))
        elif kind in ("pool", "mean pool"):
            if min(tall, wide) >= 2:
                op = "MaxPool" if kind == "pool" else "AveragePool"
                self.add(op, [name], (channels, tall // 2, wide // 2), kernel_shape=[2, 2], strides=[2, 2])
        elif kind == "Clip":
            self.add("Clip", [name, self.weight()], (channels, tall, wide))
        elif kind == "gate":
            gate = f"v{len(self.nodes)}"
            self.add("GlobalAveragePool", [name], (channels, 1, 1))
            self.add("Mul", [gate, name], (channels, tall, wide))
        elif kind == "Concat":
            self.add(kind, [name, like[0]], (2 * channels, tall, wide), axis=1)
        elif kind in BINARY:
            self.add(kind, [name, self.draw(st.sampled_from(like))], (channels, tall, wide))
        else:
            self.add(kind, [name], (channels, tall, wide))

    def _conv(self, name: str) -> None:
        channels, tall, wide = self.open[name]
        outs, kernel = self.draw(st.integers(1, 5)), self.draw(st.sampled_from([1, 3]))
        inputs = [name, self.weight(outs, channels, kernel, kernel)]
        if self.draw(st.booleans()):
            inputs.append(self.weight(outs))
        self.add("Conv", inputs, (outs, tall, wide), pads=[kernel // 2] * 4)

    def model(self, heads: int) -> onnx.ModelProto:
        outputs = []
        for name in sorted(self.open)[-heads:]:
            channels, tall, wide = self.open[name]
            flat, out = f"{name}.flat", f"{name}.out"
            self.nodes += [
                node("Flatten", [name], [flat]),
                node("Gemm", [flat, self.weight(channels * tall * wide, 2)], [out]),
            ]
            outputs.append(out)
        return model(self.nodes, self.constants, inputs={"x": (2, 3, 7, 6)}, outputs=outputs)


@settings(max_examples=30)
@given(data=st.data(), steps=st.lists(STEPS, min_size=1, max_size=12), heads=st.integers(1, 2))
def test_random_nets_come_out_as_they_went_in(data, steps, heads):
    random = _Random(data.draw)
    for kind in steps:
        random.step(kind)
    assert_reads_as_itself(random.model(heads), dynamic=data.draw(st.booleans()))


# Real files

PICTURES = {
    "pp-ocr-det": {"x": (1, 3, 32, 64)},
    "pp-ocr-cls": {"x": (2, 3, 48, 96)},
    "pp-ocr-rec": {"x": (1, 3, 48, 32)},
    "mtcnn-pnet": {"input": (1, 3, 16, 16)},
    "mtcnn-rnet": {"input": (2, 3, 24, 24)},
    "mtcnn-onet": {"input": (2, 3, 48, 48)},
    "light-squeezenet": None,
    "light-shufflenet": None,
}


@pytest.mark.parametrize("name", PICTURES)
def test_real_files_run_with_islands_and_are_refused_without(name):
    path = packaged_models().get(name)
    if path is None:
        pytest.skip(f"not installed (requirements-models.txt): {name}")
    shapes = PICTURES[name]
    with pytest.raises(StitchError, match=f"{path.name}: .* is the operator .*islands = True"):
        read_net(path, shapes=shapes)
    net = read_net(path, islands=True, shapes=shapes)
    inputs = inputs_of(net)
    assert_close(run(to_onnx(plain_graph(net)), inputs), run(onnx.load(str(path)), inputs))


@pytest.mark.parametrize("name", ["silero-vad", "magika"])
def test_real_files_that_are_no_picture_models_are_refused(name):
    path = packaged_models().get(name)
    if path is None:
        pytest.skip(f"not installed (requirements-models.txt): {name}")
    with pytest.raises(ModelError, match="float inputs can be stitched"):
        read_net(path)


def test_densenet_is_read_whole():
    path = packaged_models().get("light-densenet121")
    if path is None:
        pytest.skip("not installed: onnx's light-densenet121")
    net = read_net(path)
    assert kinds(net).count("concat") == 58
    assert net.outputs[0].shape == (1000, 1, 1)


def test_the_helpers_notice_a_difference():
    with pytest.raises(AssertionError):
        stitch_files.assert_close([numbers(2)], [numbers(2) + np.float32(0.01)])
