"""What is a weight, and what disappears into the multiplication before it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto

from tests.models.onnx_graphs import (
    F16,
    F32,
    I8,
    I32,
    I64,
    ints,
    node,
    only,
    proto,
    read,
    scalar,
    tensor,
    weight,
)
from weft.models.layer import Gemm
from weft.models.onnx_import import import_onnx

# Constants


def test_a_weight_behind_relabelling_is_still_a_weight():
    model = read(
        [
            node("Cast", ["w"], ["w32"], to=F32),
            node("Reshape", ["w32", "shape"], ["square"]),
            node("Transpose", ["square"], ["turned"], perm=[1, 0]),
            node("Identity", ["turned"], ["same"]),
            node("MatMul", ["x", "same"], ["y"]),
        ],
        [tensor("x", 3, 8)],
        ["y"],
        [weight("w", 32, dtype=F16), ints("shape", 4, 8)],
    )
    layer = only(model)
    assert (layer.gemm, layer.weights, layer.parameters, layer.weight_bits) == (Gemm(3, 8, 4), 32, 32, 16)


def test_a_tensor_used_twice_is_stored_once():
    model = read(
        [
            node("Gather", ["t", "i"], ["h"]),
            node("Transpose", ["t"], ["tt"], perm=[1, 0]),
            node("MatMul", ["h", "tt"], ["y"]),
        ],
        [tensor("i", 1, 3, dtype=I64)],
        ["y"],
        [weight("t", 50, 8)],
    )
    assert [layer.parameters for layer in model.layers] == [400, 0]
    assert model.layers[1].weights == 400


def external(name: str, file: str, *dims: int, dtype: int = F32) -> TensorProto:
    made = weight(name, *dims, dtype=dtype)
    made.data_location = TensorProto.EXTERNAL
    made.external_data.add(key="location", value=file)
    return made


def test_weights_in_a_missing_file_are_not_needed(tmp_path):
    model = proto([node("MatMul", ["x", "w"], ["y"])], [tensor("x", 2, 4)], ["y"], [external("w", "gone.bin", 4, 3)])
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    imported = import_onnx(tmp_path / "net.onnx")
    assert (imported.name, only(imported).weights) == ("net", 12)


def test_small_shape_constants_are_read_from_external_files(tmp_path):
    (tmp_path / "shape.bin").write_bytes(np.array([3, 8], dtype=np.int64).tobytes())
    model = proto(
        [node("Reshape", ["x", "s"], ["h"]), node("MatMul", ["h", "w"], ["y"])],
        [tensor("x", 24)],
        ["y"],
        [external("s", "shape.bin", 2, dtype=I64), weight("w", 8, 5)],
    )
    (tmp_path / "net.onnx").write_bytes(model.SerializeToString())
    assert only(import_onnx(str(tmp_path / "net.onnx"))).gemm == Gemm(3, 8, 5)


def test_quantise_and_dequantise_cost_nothing_and_do_not_stop_fusion():
    model = read(
        [
            node("QuantizeLinear", ["x", "s", "z"], ["xq"]),
            node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
            node("DequantizeLinear", ["w", "s", "wz"], ["wd"]),
            node("DequantizeLinear", ["b", "s"], ["bd"]),
            node("Conv", ["xd", "wd", "bd"], ["h"], name="c"),
            node("QuantizeLinear", ["h", "s", "z"], ["hq"]),
            node("DequantizeLinear", ["hq", "s", "z"], ["hd"]),
            node("Relu", ["hd"], ["r"]),
            node("QuantizeLinear", ["r", "s", "z"], ["rq"]),
            node("DequantizeLinear", ["rq", "s", "z"], ["y"]),
        ],
        [tensor("x", 1, 3, 4, 4)],
        ["y"],
        [
            weight("w", 5, 3, 1, 1, dtype=I8),
            weight("b", 5, dtype=I32),
            scalar("s", np.float32(0.1)),
            scalar("z", np.uint8(0)),
            scalar("wz", np.int8(0)),
        ],
    )
    layer = only(model)
    assert (layer.name, layer.op) == ("c", "Conv+Relu")
    assert (layer.weights, layer.parameters) == (15, 20)
    assert (layer.weight_bits, layer.activation_bits) == (8, 8)


def test_four_bit_weights():
    model = read(
        [node("DequantizeLinear", ["w", "s"], ["wd"], axis=0), node("MatMul", ["x", "wd"], ["y"])],
        [tensor("x", 2, 4)],
        ["y"],
        [weight("w", 4, 6, dtype=TensorProto.INT4), weight("s", 4)],
        opset=21,
    )
    layer = only(model)
    assert (layer.weights, layer.weight_bits, layer.weight_bytes, layer.parameters) == (24, 4, 12, 24)


def test_dynamic_quantisation_folds_its_scales_into_the_product():
    model = read(
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "s", "z"]),
            node("MatMulInteger", ["q", "w", "z"], ["i"], name="fc"),
            node("Cast", ["i"], ["f"], to=F32),
            node("Mul", ["s", "ws"], ["scale"]),
            node("Mul", ["f", "scale"], ["h"]),
            node("Add", ["h", "b"], ["y"]),
        ],
        [tensor("x", 2, 8)],
        ["y"],
        [weight("w", 8, 3, dtype=I8), weight("ws", 1), weight("b", 3)],
    )
    assert [layer.op for layer in model.layers] == [
        "DynamicQuantizeLinear",
        "Mul",
        "MatMulInteger+Cast+Mul+Add",
    ]
    assert model.layers[-1].parameters == 27


# Fusion


CONV = (node("Conv", ["x", "w"], ["h"], name="c"),)
CONV_WEIGHTS = (weight("w", 4, 3, 1, 1), weight("b", 4, 1, 1), *(weight(name, 4) for name in "stuv"))
X = (tensor("x", 1, 3, 2, 2),)


def ops(nodes, outputs=("y",)) -> list[str]:
    return [layer.op for layer in read([*CONV, *nodes], X, list(outputs), CONV_WEIGHTS).layers]


def test_a_convolution_absorbs_norm_bias_and_activation():
    nodes = [
        node("BatchNormalization", ["h", "s", "t", "u", "v"], ["n"]),
        node("Add", ["n", "b"], ["a"]),
        node("Relu", ["a"], ["y"]),
    ]
    layer = only(read([*CONV, *nodes], X, ["y"], CONV_WEIGHTS))
    assert (layer.name, layer.op) == ("c", "Conv+BatchNormalization+Add+Relu")
    assert layer.parameters == 12 + 4 * 4 + 4
    assert (layer.weights, layer.input_elements, layer.output_elements) == (12, 12, 16)


@pytest.mark.parametrize("op", ["Clip", "LeakyRelu", "Sigmoid", "HardSwish", "HardSigmoid", "Tanh", "Elu", "Mish"])
def test_activations_fold(op):
    assert len(read([*CONV, node(op, ["h"], ["y"])], X, ["y"], CONV_WEIGHTS, opset=18).layers) == 1


def test_spelled_out_activations_fold_as_a_whole():
    swish = [node("Sigmoid", ["h"], ["g"]), node("Mul", ["h", "g"], ["y"])]
    assert ops(swish) == ["Conv+Sigmoid+Mul"]
    gelu = [
        node("Div", ["h", "s1"], ["d"]),
        node("Erf", ["d"], ["e"]),
        node("Add", ["e", "s1"], ["a"]),
        node("Mul", ["h", "a"], ["m"]),
        node("Mul", ["m", "s1"], ["y"]),
    ]
    layer = only(read([*CONV, *gelu], X, ["y"], [*CONV_WEIGHTS, scalar("s1", np.float32(1))]))
    assert (layer.op, layer.parameters) == ("Conv+Div+Erf+Add+Mul+Mul", 12)


def test_an_intermediate_that_is_seen_elsewhere_stays():
    relu = [node("Relu", ["h"], ["y"])]
    assert ops(relu) == ["Conv+Relu"]
    assert ops(relu, outputs=("y", "h")) == ["Conv", "Relu"]
    assert ops([*relu, node("Softmax", ["h"], ["z"])], outputs=("y", "z")) == ["Conv", "Relu", "Softmax"]
    half = [node("Sigmoid", ["h"], ["g"]), node("Mul", ["h", "g"], ["y"])]
    assert ops(half, outputs=("y", "g")) == ["Conv", "Sigmoid", "Mul"]


def test_a_residual_addition_is_not_a_bias():
    nodes = [*CONV, node("Add", ["h", "skip"], ["a"]), node("Relu", ["a"], ["y"])]
    model = read(nodes, [*X, tensor("skip", 1, 4, 2, 2)], ["y"], CONV_WEIGHTS)
    assert [layer.op for layer in model.layers] == ["Conv", "Add", "Relu"]


def test_a_product_of_activations_absorbs_nothing():
    nodes = [node("MatMul", ["a", "b"], ["h"]), node("Relu", ["h"], ["y"])]
    model = read(nodes, [tensor("a", 2, 3), tensor("b", 3, 2)], ["y"])
    assert [layer.op for layer in model.layers] == ["MatMul", "Relu"]
