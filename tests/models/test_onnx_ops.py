"""How much work each operator is, in graphs small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.models.onnx_graphs import (
    F32,
    I8,
    I32,
    I64,
    U8,
    ints,
    node,
    only,
    read,
    scalar,
    tensor,
    weight,
)
from weft.base.errors import ModelError
from weft.models.layer import Gemm

# Convolutions


def test_a_convolution_counts_one_row_per_output_position():
    layer = only(
        read(
            [node("Conv", ["x", "w", "b"], ["y"], name="c", pads=[1, 1, 1, 1])],
            [tensor("x", 1, 3, 8, 6)],
            ["y"],
            [weight("w", 16, 3, 3, 3), weight("b", 16)],
        )
    )
    assert layer.gemm == Gemm(m=8 * 6, k=3 * 9, n=16, groups=1, kernel=9)
    assert (layer.name, layer.kind, layer.op) == ("c", "conv", "Conv")
    assert (layer.weights, layer.parameters) == (16 * 27, 16 * 27 + 16)
    assert (layer.input_elements, layer.output_elements) == (3 * 8 * 6, 16 * 8 * 6)
    assert (layer.weight_bits, layer.activation_bits, layer.reuses_weights) == (32, 32, True)


@pytest.mark.parametrize(
    ("x", "w", "attributes", "expected"),
    [
        ((1, 4, 10), (8, 4, 3), {}, Gemm(8, 12, 8, 1, 3)),
        ((2, 4, 4, 4, 4), (8, 4, 2, 2, 2), {"strides": [2, 2, 2]}, Gemm(16, 32, 8, 1, 8)),
        ((1, 8, 5, 5), (12, 2, 3, 3), {"group": 4}, Gemm(9, 18, 3, 4, 9)),
        ((1, 8, 5, 5), (8, 1, 3, 3), {"group": 8}, Gemm(9, 9, 1, 8, 9)),
        ((1, 3, 9, 9), (4, 3, 3, 3), {"dilations": [2, 2]}, Gemm(25, 27, 4, 1, 9)),
    ],
)
def test_convolutions_of_any_rank_group_and_stride(x, w, attributes, expected):
    layer = only(read([node("Conv", ["x", "w"], ["y"], **attributes)], [tensor("x", *x)], ["y"], [weight("w", *w)]))
    assert layer.gemm == expected
    assert layer.gemm.depthwise == (attributes.get("group") == 8)


def test_a_transposed_convolution_counts_input_positions():
    layer = only(
        read(
            [node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2])],
            [tensor("x", 1, 6, 5, 5)],
            ["y"],
            [weight("w", 6, 4, 2, 2)],
        )
    )
    assert layer.gemm == Gemm(m=25, k=6, n=4 * 4)
    assert (layer.weights, layer.output_elements) == (6 * 4 * 4, 4 * 10 * 10)


def test_quantised_convolutions_are_eight_bit():
    scales = [scalar(name, np.float32(1)) for name in ("xs", "ws", "ys")]
    zeros = [scalar("z", np.uint8(0)), scalar("wz", np.int8(0))]
    model = read(
        [node("QLinearConv", ["x", "xs", "z", "w", "ws", "wz", "ys", "z", "b"], ["y"])],
        [tensor("x", 1, 3, 4, 4, dtype=U8)],
        ["y"],
        [weight("w", 5, 3, 1, 1, dtype=I8), weight("b", 5, dtype=I32), *scales, *zeros],
    )
    layer = only(model)
    assert layer.gemm == Gemm(16, 3, 5)
    assert (layer.weights, layer.parameters, layer.weight_bits, layer.activation_bits) == (15, 20, 8, 8)
    integer = only(
        read(
            [node("ConvInteger", ["x", "w"], ["y"])],
            [tensor("x", 1, 3, 4, 4, dtype=U8)],
            ["y"],
            [weight("w", 5, 3, 1, 1, dtype=I8)],
        )
    )
    assert (integer.gemm, integer.weight_bits) == (layer.gemm, 8)


def test_a_weight_that_is_computed_from_the_query_is_not_a_weight():
    layer = only(read([node("Conv", ["x", "w"], ["y"])], [tensor("x", 1, 2, 3, 3), tensor("w", 4, 2, 1, 1)], ["y"]))
    assert (layer.weights, layer.reuses_weights, layer.input_elements) == (0, False, 18 + 8)


def test_channels_that_do_not_fit_are_refused():
    with pytest.raises(ModelError, match="c \\(Conv\\): input channels differ: 4 in 1x4x8x8, 3 in 16x3x3x3"):
        read(
            [node("Conv", ["x", "w"], ["y"], name="c")],
            [tensor("x", 1, "channels", 8, 8)],
            ["y"],
            [weight("w", 16, 3, 3, 3)],
            shapes={"x": (1, 4, 8, 8)},
        )


# Products


@pytest.mark.parametrize(
    ("op", "x", "w", "inputs", "attributes", "expected"),
    [
        ("Gemm", (5, 7), (7, 3), "xw", {}, Gemm(5, 7, 3)),
        ("Gemm", (5, 7), (3, 7), "xw", {"transB": 1}, Gemm(5, 7, 3)),
        ("Gemm", (7, 5), (3, 7), "xw", {"transA": 1, "transB": 1}, Gemm(5, 7, 3)),
        ("Gemm", (7, 5), (3, 7), "wx", {}, Gemm(5, 7, 3)),
        ("MatMul", (2, 4, 7), (7, 3), "xw", {}, Gemm(8, 7, 3)),
        ("MatMul", (7,), (7, 3), "xw", {}, Gemm(1, 7, 3)),
        ("MatMul", (2, 7, 5), (3, 7), "wx", {}, Gemm(10, 7, 3)),
        ("MatMul", (4, 6, 7), (4, 7, 3), "xw", {}, Gemm(6, 7, 3, groups=4)),
        ("MatMul", (2, 4, 6, 7), (4, 7, 3), "xw", {}, Gemm(12, 7, 3, groups=4)),
        ("Einsum", (2, 5, 7), (7, 3), "xw", {"equation": "bsd,de->bse"}, Gemm(10, 7, 3)),
        ("Einsum", (2, 5, 7), (3, 7), "wx", {"equation": "ed,bsd->bse"}, Gemm(10, 7, 3)),
        ("Einsum", (2, 5, 7), (7, 3), "xw", {"equation": "...d,de->...e"}, Gemm(10, 7, 3)),
        ("Einsum", (2, 5, 7), (2, 7, 3), "xw", {"equation": "hsd,hde->hse"}, Gemm(5, 7, 3, groups=2)),
    ],
)
def test_the_constant_operand_is_the_weight_on_either_side(op, x, w, inputs, attributes, expected):
    layer = only(read([node(op, list(inputs), ["y"], **attributes)], [tensor("x", *x)], ["y"], [weight("w", *w)]))
    assert (layer.kind, layer.gemm, layer.weights) == ("gemm", expected, np.prod(w))


@pytest.mark.parametrize(
    ("op", "attributes", "b"),
    [
        ("MatMul", {}, (2, 12, 64, 9)),
        ("Einsum", {"equation": "bhsd,bhde->bhse"}, (2, 12, 64, 9)),
        ("Einsum", {"equation": "bhsd,bhed->bhse"}, (2, 12, 9, 64)),
        ("FusedMatMul", {"transB": 1, "domain": "com.microsoft"}, (2, 12, 9, 64)),
    ],
)
def test_a_product_of_two_activations_has_a_group_per_sample_and_head(op, attributes, b):
    layer = only(read([node(op, ["a", "b"], ["y"], **attributes)], [tensor("a", 2, 12, 8, 64), tensor("b", *b)], ["y"]))
    assert (layer.kind, layer.gemm) == ("matmul", Gemm(8, 64, 9, groups=24))
    assert (layer.weights, layer.reuses_weights) == (0, False)
    assert layer.output_elements == 2 * 12 * 8 * 9


def test_quantised_products():
    scales = [scalar(name, np.float32(1)) for name in ("xs", "ws", "ys")]
    zeros = [scalar("z", np.uint8(0)), scalar("wz", np.int8(0))]
    w, x = weight("w", 7, 3, dtype=I8), tensor("x", 5, 7, dtype=U8)
    places = ["x", "xs", "z", "w", "ws", "wz"]
    plain = only(read([node("QLinearMatMul", [*places, "ys", "z"], ["y"])], [x], ["y"], [w, *scales, *zeros]))
    integer = only(read([node("MatMulInteger", ["x", "w"], ["y"])], [x], ["y"], [w]))
    bias = weight("b", 3, dtype=I32)
    gemm = only(
        read(
            [node("QGemm", [*places, "b", "ys", "z"], ["y"], domain="com.microsoft")],
            [x],
            ["y"],
            [w, bias, *scales, *zeros],
        )
    )
    for layer in (plain, integer, gemm):
        assert (layer.kind, layer.gemm, layer.weight_bits, layer.activation_bits) == (
            "gemm",
            Gemm(5, 7, 3),
            8,
            8,
        )
    assert (gemm.parameters, gemm.output_elements) == (24, 15)


def test_weights_packed_below_a_byte_count_in_full():
    layer = only(
        read(
            [
                node(
                    "MatMulNBits",
                    ["x", "w", "s"],
                    ["y"],
                    domain="com.microsoft",
                    K=64,
                    N=10,
                    bits=4,
                    block_size=32,
                )
            ],
            [tensor("x", 3, 64)],
            ["y"],
            [weight("w", 10, 2, 16, dtype=U8), weight("s", 20)],
        )
    )
    assert (layer.gemm, layer.weights, layer.weight_bits) == (Gemm(3, 64, 10), 640, 4)
    assert (layer.weight_bytes, layer.parameters, layer.output_elements) == (320, 640, 30)


def test_attention_is_a_projection_then_scores_then_context():
    model = read(
        [node("Attention", ["x", "w", "b"], ["y"], name="att", domain="com.microsoft", num_heads=4)],
        [tensor("x", 2, 10, 32)],
        ["y"],
        [weight("w", 32, 96), weight("b", 96)],
    )
    assert [layer.name for layer in model.layers] == ["att/qkv", "att/scores", "att/context"]
    assert [layer.gemm for layer in model.layers] == [
        Gemm(20, 32, 96),
        Gemm(10, 8, 10, groups=8),
        Gemm(10, 10, 8, groups=8),
    ]
    assert [layer.parameters for layer in model.layers] == [32 * 96 + 96, 0, 0]
    assert model.layers[-1].output_elements == 2 * 10 * 32


@pytest.mark.parametrize(
    ("op", "domain", "opset", "heads", "shape"),
    [
        ("MultiHeadAttention", "com.microsoft", 17, {"num_heads": 4}, (2, 10, 32)),
        ("GroupQueryAttention", "com.microsoft", 17, {"num_heads": 4, "kv_num_heads": 4}, (2, 10, 32)),
        ("Attention", "", 23, {"q_num_heads": 4, "kv_num_heads": 4}, (2, 10, 32)),
        ("Attention", "", 23, {}, (2, 4, 10, 8)),
    ],
)
def test_projected_attention_is_two_products_without_weights(op, domain, opset, heads, shape):
    inputs = [tensor(name, *shape) for name in "qkv"]
    model = read([node(op, list("qkv"), ["y"], domain=domain, **heads)], inputs, ["y"], opset=opset)
    assert [layer.gemm for layer in model.layers] == [Gemm(10, 8, 10, groups=8), Gemm(10, 10, 8, groups=8)]
    assert not any(layer.weights or layer.reuses_weights for layer in model.layers)


@pytest.mark.parametrize(("op", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_a_recurrent_layer_multiplies_input_and_state_at_every_step(op, gates):
    layer = only(
        read(
            [node(op, ["x", "w", "r", "b"], ["y"], hidden_size=6, direction="bidirectional")],
            [tensor("x", 9, 2, 5)],
            ["y"],
            [weight("w", 2, gates * 6, 5), weight("r", 2, gates * 6, 6), weight("b", 2, 2 * gates * 6)],
        )
    )
    assert (layer.kind, layer.gemm) == ("rnn", Gemm(m=9 * 2, k=5 + 6, n=gates * 6, groups=2))
    assert layer.weights == 2 * gates * 6 * 11 == layer.gemm.k * layer.gemm.n * 2
    assert layer.parameters == layer.weights + 2 * 2 * gates * 6


# Everything else


def test_a_table_indexed_by_the_query_is_an_embedding():
    layer = only(
        read([node("Gather", ["t", "i"], ["y"])], [tensor("i", 1, 7, dtype=I64)], ["y"], [weight("t", 100, 16)])
    )
    assert (layer.kind, layer.lookups, layer.parameters, layer.weights) == ("embedding", 7 * 16, 1600, 0)
    assert (layer.input_elements, layer.output_elements, layer.activation_bits) == (7, 112, 32)


@pytest.mark.parametrize("table", [weight("t", 100), weight("t", 10, 10, dtype=I64)])
def test_other_gathers_move_what_they_select(table):
    layer = only(read([node("Gather", ["t", "i"], ["y"])], [tensor("i", 3, dtype=I64)], ["y"], [table]))
    assert (layer.kind, layer.lookups, layer.input_elements) == ("movement", 0, layer.output_elements)


@pytest.mark.parametrize(
    ("op", "kind", "attributes"),
    [
        ("Relu", "elementwise", {}),
        ("Softmax", "elementwise", {}),
        ("ReduceMean", "elementwise", {"axes": [1]}),
        ("MaxPool", "pool", {"kernel_shape": [2, 2]}),
        ("GlobalAveragePool", "pool", {}),
        ("LRN", "norm", {"size": 3}),
        ("Transpose", "movement", {"perm": [0, 2, 3, 1]}),
        ("SpaceToDepth", "movement", {"blocksize": 2}),
    ],
)
def test_kinds(op, kind, attributes):
    layer = only(read([node(op, ["x"], ["y"], **attributes)], [tensor("x", 1, 4, 6, 6)], ["y"]))
    assert (layer.kind, layer.gemm, layer.input_elements) == (kind, None, 144)


def test_norms_count_their_parameters():
    norm = [node("LayerNormalization", ["x", "s", "b"], ["y"])]
    layer = only(read(norm, [tensor("x", 1, 5, 8)], ["y"], [weight("s", 8), weight("b", 8)]))
    assert (layer.kind, layer.parameters, layer.weights) == ("norm", 16, 0)


def test_relabelling_and_shape_arithmetic_are_no_layers():
    model = read(
        [
            node("Shape", ["x"], ["s"]),
            node("Gather", ["s", "zero"], ["batch"]),
            node("Unsqueeze", ["batch", "first"], ["b"]),
            node("Concat", ["b", "rest"], ["target"], axis=0),
            node("Reshape", ["x", "target"], ["flat"]),
            node("Identity", ["flat"], ["same"]),
            node("Cast", ["same"], ["cast"], to=F32),
            node("Transpose", ["cast"], ["moved"], perm=[1, 0]),
            node("Relu", ["moved"], ["y"]),
        ],
        [tensor("x", "batch", 2, 3)],
        ["y"],
        [scalar("zero", np.int64(0)), ints("first", 0), ints("rest", -1)],
    )
    layer = only(model)
    assert (layer.op, layer.output_elements) == ("Relu", 6)
    assert model.inputs == (("x", (1, 2, 3)),)


def test_a_model_of_relabelling_alone_has_no_layers():
    model = read([node("Identity", ["x"], ["y"])], [tensor("x", 2)], ["y"])
    assert (model.layers, model.macs, model.inputs) == ((), 0, (("x", (2,)),))


def test_unknown_operators_cost_their_traffic_and_are_listed():
    model = read(
        [
            node("Frobnicate", ["x"], ["h"], domain="acme", name="frob"),
            node("NoSuchOperator", ["h"], ["k"]),
            node("Frobnicate", ["k"], ["y"], domain="acme"),
        ],
        [tensor("x", 1, 5)],
        ["y"],
        values=[tensor("h", 1, 9)],
    )
    assert model.unknown_ops == ("acme:Frobnicate", "NoSuchOperator")
    first = model.layers[0]
    assert (first.name, first.kind, first.input_elements, first.output_elements) == ("frob", "unknown", 5, 9)


def test_declared_shapes_with_symbols_fill_what_cannot_be_inferred():
    model = read(
        [node("Frobnicate", ["x"], ["h"], domain="acme"), node("MatMul", ["h", "w"], ["y"])],
        [tensor("x", "batch", "seq")],
        ["y"],
        [weight("w", 16, 4)],
        values=[tensor("h", "batch", "seq", 16)],
        shapes={"x": (2, 11)},
    )
    assert model.layers[1].gemm == Gemm(22, 16, 4)


def test_a_size_that_depends_on_data_is_taken_as_one():
    model = read([node("NonZero", ["x"], ["y"]), node("Neg", ["y"], ["z"])], [tensor("x", 4, 5)], ["z"])
    assert [layer.output_elements for layer in model.layers] == [2, 2]


def test_an_unknown_shape_is_told_once_with_its_node_and_why():
    model = read(
        [node("NonZero", ["x"], ["places"], name="find"), node("Neg", ["places"], ["y"])], [tensor("x", 4, 5)], ["y"]
    )
    assert model.guesses == (
        "find (NonZero): the shape of 'places' is not known, taken as 2x1: "
        "it depends on values that are not known before a query",
    )


def test_an_operator_without_a_rule_names_itself():
    model = read([node("Frobnicate", ["x"], ["y"], domain="acme", name="frob")], [tensor("x", 2, 5)], ["y"])
    assert model.guesses == (
        "frob (acme:Frobnicate): the shape of 'y' is not known, taken as 2x5: weft has no rule for it",
    )


def test_what_onnx_could_not_infer_is_told_with_its_reason():
    model = read([node("Transpose", ["x"], ["y"], name="turn", perm=[0, 5])], [tensor("x", 2, 3)], ["y"])
    (guess,) = model.guesses
    assert guess.startswith("turn (Transpose): the shape of 'y' is not known, taken as 2x3: ")
    assert "perm" in guess


def test_what_follows_a_guessed_shape_is_a_guess_too():
    """Sizes of what NonZero found are no sizes to refuse a model for."""
    model = read(
        [
            node("NonZero", ["x"], ["places"]),
            node("Shape", ["places"], ["s"]),
            node("ConstantOfShape", ["s"], ["ones"]),
            node("MatMul", ["ones", "w"], ["y"]),
        ],
        [tensor("x", 4, 5)],
        ["y"],
        [weight("w", 7, 3)],
    )
    assert len(model.guesses) == 1


def test_arithmetic_that_no_runtime_can_do_is_refused_by_its_node():
    nodes = [node("Gather", ["s", "nine"], ["n"], name="pick"), node("Reshape", ["x", "n"], ["y"])]
    with pytest.raises(ModelError, match=r"pick \(Gather\) is malformed: index 9 is out of bounds"):
        read(nodes, [tensor("x", 2, 3)], ["y"], [ints("s", 2, 3), ints("nine", 9)])


def test_a_reshape_to_an_unknown_shape_keeps_its_elements():
    model = read(
        [node("Reshape", ["x", "s"], ["h"]), node("Relu", ["h"], ["y"])],
        [tensor("x", 4, 6), tensor("s", 3, dtype=I64)],
        ["y"],
    )
    assert only(model).output_elements == 24
