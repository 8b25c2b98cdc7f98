"""Input shapes, broken files, and real networks with known totals."""

from __future__ import annotations

import sys
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from tests.models.onnx_graphs import (
    graph,
    ints,
    node,
    only,
    proto,
    read,
    scalar,
    tensor,
    unshaped,
    weight,
)
from weft.base.errors import ModelError
from weft.models.layer import Gemm, Model
from weft.models.onnx_import import import_onnx
from weft.models.packaged import PACKAGED, packaged_models

# Input shapes


def resized(**shapes: tuple[int, ...]) -> Model:
    inputs = [tensor("image", "batch", 3, "height", "width"), tensor("mask", "batch", "height")]
    return read([node("Relu", ["image"], ["y"]), node("Exp", ["mask"], ["z"])], inputs, ["y", "z"], shapes=shapes)


def test_shapes_settle_symbols_everywhere():
    assert resized(image=(2, 3, 5, 7)).inputs == (("image", (2, 3, 5, 7)), ("mask", (2, 5)))


BOTH = r"image \[batch, 3, height, width\]; mask \[batch, height\]"


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({}, r"input 'image' is \[batch, 3, height, width\] in the file; pass --shape image=1x3xAxB$"),
        ({"imgae": (1, 2)}, rf"unknown input 'imgae'; the inputs are: {BOTH}$"),
        ({"image": (1, 3, 5)}, rf"1x3x5 does not fit input 'image'; the inputs are: {BOTH}"),
        ({"image": (1, 4, 5, 7)}, "1x4x5x7 does not fit"),
        ({"image": (1, 3, -5, 7)}, "sizes must be at least 0, got 1x3x-5x7"),
        ({"image": (1, 3, 10**9, 10**9)}, "more than any machine holds"),
    ],
)
def test_shapes_that_do_not_fit_are_explained(shapes, message):
    with pytest.raises(ModelError, match=message):
        resized(**shapes)


def test_an_input_without_a_shape_must_be_given_one():
    def sized(shapes=None):
        return read([node("Relu", ["x"], ["y"])], [unshaped("x")], ["y"], shapes=shapes)

    with pytest.raises(ModelError, match="declares no shape; pass --shape x=AxBxC"):
        sized()
    assert only(sized({"x": (4, 5)})).input_elements == 20


def test_minus_one_is_an_open_size():
    model = read([node("Relu", ["x"], ["y"])], [tensor("x", -1, 5)], ["y"])
    assert model.inputs == (("x", (1, 5)),)


@pytest.mark.parametrize("dims", [(2**40, 2**40), (-3, 4)])
def test_constants_of_impossible_size_are_refused(dims):
    with pytest.raises(ModelError, match="constant 'w': a tensor cannot have the shape"):
        read([node("MatMul", ["x", "w"], ["y"])], [tensor("x", 1, 4)], ["y"], [weight("w", *dims)])


def test_work_beyond_sixty_four_bits_is_refused():
    big = 2**24
    nodes = [node("MatMul", ["x", "w"], ["y"])]
    with pytest.raises(ModelError, match="do not fit 64 bits"):
        read(nodes, [tensor("x", big, big)], ["y"], [weight("w", big, big)])


# Files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; export or download"),
        (b"not a model at all", "is not an ONNX model"),
        (b"<!DOCTYPE html><html>404</html>", "is not an ONNX model"),
        (helper.make_model(graph([], [], [])).SerializeToString(), "holds no graph with nodes"),
        (onnx.ModelProto(ir_version=8).SerializeToString(), "holds no graph with nodes"),
        (
            proto([node("Relu", ["x"], ["y"], name="QQQQ")], [tensor("x", 2)], ["y"])
            .SerializeToString()
            .replace(b"QQQQ", b"\xff\xfe\xff\xfe"),
            "names in it are not text",
        ),
    ],
)
def test_broken_files_are_named_in_one_line(tmp_path, content, message):
    path = tmp_path / "broken.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        import_onnx(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_paths_that_are_no_files_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"none\.onnx does not exist; check the path"):
        import_onnx(tmp_path / "none.onnx")
    with pytest.raises(ModelError, match=r"is a directory; name the \.onnx file in it"):
        import_onnx(tmp_path)


# Whole networks


def encoder(blocks: int, width: int, rows: int) -> onnx.ModelProto:
    """A transformer encoder as exporters write it: shape arithmetic, norms and GELU spelled out."""
    nodes, constants = (
        [],
        [scalar("two", np.float32(2)), ints("heads", 16, -1), ints("zero", 0), ints("upto", 2)],
    )
    constants += [scalar("root", np.float32(8)), ints("flat", -1)]
    x = "x"
    for b in range(blocks):
        name = f"b{b}_".__add__
        for part in "qkvo":
            constants += [weight(name(f"w{part}"), width, width), weight(name(f"bias{part}"), width)]
        constants += [weight(name("w1"), width, 4 * width), weight(name("w2"), 4 * width, width)]
        constants += [weight(name("scale"), width), weight(name("shift"), width)]
        nodes += [
            node("Shape", [x], [name("shape")]),
            node("Slice", [name("shape"), "zero", "upto"], [name("lead")]),
            node("Concat", [name("lead"), "heads"], [name("split")], axis=0),
            node("Concat", [name("lead"), "flat"], [name("join")], axis=0),
        ]
        for part, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3])):
            nodes += [
                node("MatMul", [x, name(f"w{part}")], [name(f"{part}m")]),
                node("Add", [name(f"{part}m"), name(f"bias{part}")], [name(f"{part}a")]),
                node("Reshape", [name(f"{part}a"), name("split")], [name(f"{part}r")]),
                node("Transpose", [name(f"{part}r")], [name(part)], perm=perm),
            ]
        nodes += [
            node("MatMul", [name("q"), name("k")], [name("raw")]),
            node("Div", [name("raw"), "root"], [name("scaled")]),
            node("Softmax", [name("scaled")], [name("p")]),
            node("MatMul", [name("p"), name("v")], [name("ctx")]),
            node("Transpose", [name("ctx")], [name("back")], perm=[0, 2, 1, 3]),
            node("Reshape", [name("back"), name("join")], [name("joined")]),
            node("MatMul", [name("joined"), name("wo")], [name("om")]),
            node("Add", [name("om"), name("biaso")], [name("o")]),
            node("Add", [name("o"), x], [name("res")]),
            node("ReduceMean", [name("res")], [name("mu")], axes=[-1]),
            node("Sub", [name("res"), name("mu")], [name("dev")]),
            node("Pow", [name("dev"), "two"], [name("sq")]),
            node("ReduceMean", [name("sq")], [name("var")], axes=[-1]),
            node("Sqrt", [name("var")], [name("std")]),
            node("Div", [name("dev"), name("std")], [name("unit")]),
            node("Mul", [name("unit"), name("scale")], [name("n1")]),
            node("Add", [name("n1"), name("shift")], [name("n2")]),
            node("MatMul", [name("n2"), name("w1")], [name("f1")]),
            node("Gelu", [name("f1")], [name("g")]),
            node("MatMul", [name("g"), name("w2")], [name("f2")]),
            node("Add", [name("f2"), name("n2")], [name("out")]),
        ]
        x = name("out")
    return proto(nodes, [tensor("x", "batch", rows, width)], [x], constants, opset=20)


def test_a_large_encoder_is_counted_exactly():
    blocks, width, rows = 24, 1024, 128
    model = import_onnx(encoder(blocks, width, rows), name="large")
    assert model.weights == blocks * 12 * width**2
    assert model.macs == blocks * (12 * rows * width**2 + 2 * rows**2 * width)
    scores = next(layer for layer in model.layers if layer.kind == "matmul")
    assert scores.gemm == Gemm(128, 64, 128, groups=16)
    assert "MatMul+Gelu" in {layer.op for layer in model.layers}


def calls_of_an_import(blocks: int) -> int:
    """How many functions are called, and return, to read an encoder of so many blocks."""
    model_proto, ticks = encoder(blocks, 64, 8), count()
    sys.setprofile(lambda *_: next(ticks))
    try:
        import_onnx(model_proto, name="some")
    finally:
        sys.setprofile(None)
    return next(ticks)


def test_twice_as_many_layers_take_twice_the_work():
    calls_of_an_import(1)  # what is prepared once
    few, many = calls_of_an_import(8), calls_of_an_import(16)
    assert 1.5 * few < many < 2.1 * few


EXPECTED = {
    "pp-ocr-det": (2302, 1.17),
    "pp-ocr-cls": (16.3, 0.134),
    "pp-ocr-rec": (702, 2.69),
    "mtcnn-pnet": (132, 0.0067),
    "mtcnn-rnet": (49, 0.100),
    "mtcnn-onet": (103, 0.389),
    # Both sampling rates together hold 0.55 M; the file runs one of them, and 16 kHz is the costlier.
    "silero-vad": (0.68, 0.310),
    "magika": (367, 0.78),
    "light-alexnet": (655, 60.97),
    "light-densenet121": (2834, 8.06),
    "light-inception-v1": (1430, 6.998),
    "light-inception-v2": (2019, 11.2),
    "light-resnet50": (4089, 25.61),  # this file strides in the 3x3 convolution, as v1.5 does
    "light-shufflenet": (125, 1.42),
    "light-squeezenet": (349, 1.235),
    "light-vgg19": (19632, 143.67),
    "light-zfnet512": (1482, 87.25),
}
"""Million MACs and million parameters, from a second counter or the literature."""


def test_every_packaged_model_has_an_expectation():
    assert EXPECTED.keys() == PACKAGED.keys()


@pytest.mark.parametrize("name", PACKAGED)
def test_real_models_agree_with_known_counts(name):
    found = packaged_models()
    assert name in found, f"install {PACKAGED[name].package} (without dependencies) to run the tests"
    model = import_onnx(found[name], shapes=PACKAGED[name].shapes, name=name)
    megamacs, parameters = EXPECTED[name]
    assert model.macs / 1e6 == pytest.approx(megamacs, rel=0.03)
    assert model.parameters / 1e6 == pytest.approx(parameters, rel=0.03)
    assert model.name == name
    assert (model.unknown_ops, model.guesses) == ((), ())
    assert len({layer.name for layer in model.layers}) == len(model.layers)
    assert Path(found[name]).suffix == ".onnx"
