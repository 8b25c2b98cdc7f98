"""Uniform int8 by ONNX Runtime's quantizer, on a network that weft ships."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import onnx
import pytest

from weft.base.errors import ModelError
from weft.models.classifiers import model_path, validation
from weft_tune.quantised.scoring import classes, quantise_int8

LENET = model_path("lenet")
WEIGHTS = 20 * 25 + 50 * 20 * 25 + 500 * 800 + 10 * 500


@pytest.fixture(scope="module")
def images():
    return validation("lenet").inputs()


@pytest.mark.parametrize("per_channel", [False, True])
def test_lenet_in_int8_names_nearly_the_same_digits(per_channel, images, tmp_path, capfd):
    handlers = list(logging.getLogger().handlers)
    found = quantise_int8(LENET, {"image": images[:100]}, tmp_path / "int8.onnx", per_channel=per_channel)
    assert found.weights == WEIGHTS and found.file_bytes < 0.3 * LENET.stat().st_size
    named = classes(found.path, {"image": images[100:400]})
    assert np.mean(named == classes(LENET, {"image": images[100:400]})) > 0.98
    assert capfd.readouterr() == ("", "") and logging.getLogger().handlers == handlers


def test_channels_have_scales_of_their_own(images, tmp_path):
    one, many = (
        quantise_int8(LENET, {"image": images[:10]}, tmp_path / f"{each}.onnx", per_channel=each)
        for each in (False, True)
    )
    assert one.scale_bytes < many.scale_bytes < 0.02 * WEIGHTS


def test_only_the_named_nodes_are_quantised(images, tmp_path):
    graph = onnx.load(str(LENET)).graph
    nodes = [node.name for node in graph.node if node.op_type == "Conv"]
    found = quantise_int8(LENET, {"image": images[:10]}, tmp_path / "int8.onnx", nodes=nodes)
    assert found.weights == 20 * 25 + 50 * 20 * 25


def test_what_cannot_be_quantised_is_named(images, tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"broken\.onnx: cannot be quantised"):
        quantise_int8(broken, {"image": images[:10]}, tmp_path / "int8.onnx")
    with pytest.raises(ModelError, match="the same number"):
        quantise_int8(LENET, {"image": images[:10], "mask": images[:9]}, tmp_path / "int8.onnx")


def test_what_stands_there_is_replaced_at_the_end(images, tmp_path, monkeypatch):
    def half(prepared, out, *rest, **settings):
        Path(out).write_bytes(b"half")
        raise KeyboardInterrupt

    out = tmp_path / "int8.onnx"
    out.write_bytes(b"before")
    monkeypatch.setattr("onnxruntime.quantization.quantize_static", half)
    with pytest.raises(KeyboardInterrupt):
        quantise_int8(LENET, {"image": images[:10]}, out)
    assert out.read_bytes() == b"before" and list(tmp_path.iterdir()) == [out]


def test_a_place_that_cannot_be_written_is_named(images, tmp_path):
    with pytest.raises(ModelError, match=r"gone/int8\.onnx: cannot write: No such file"):
        quantise_int8(LENET, {"image": images[:10]}, tmp_path / "gone" / "int8.onnx")
