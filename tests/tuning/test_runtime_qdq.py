"""Models in pairs of QuantizeLinear and DequantizeLinear: what they compute, and that there are kernels for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import ModelProto, numpy_helper

from tests.models.onnx_graphs import node, tensor
from tests.tuning.onnx_nets import NETS, chain, draw, model_of, residual, samples, save
from weft_tune.quantised.opened import open_for_tuning
from weft_tune.runtime_target.bench import RuntimeBench
from weft_tune.runtime_target.choice import OPTIONS
from weft_tune.runtime_target.prepared import TensorRange, clipping_loss, prepare_model
from weft_tune.runtime_target.qdq import QdqOptions, eight_bit_places

COUNT = 24


def products_overflow() -> bool:
    """Whether ONNX Runtime adds pairs of products in 16 bits, as on x86-64 without VNNI: 255 * 127 twice overflows."""
    constants = {
        "step": np.float32(1), "zero": np.uint8(0), "right": np.full((4, 16), 127, np.int8), "none": np.int8(0),
        "wide": np.float32(4 * 255 * 127 / 200),
    }  # fmt: skip
    names = ["x", "step", "zero", "right", "step", "none", "wide", "zero"]
    left = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.UINT8, (1, 4))
    product = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.UINT8, (1, 16))
    model = model_of([node("QLinearMatMul", names, ["y"])], [left], [product], constants)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return bool((session.run(None, {"x": np.full((1, 4), 255, np.uint8)})[0] != 200).any())


BITS = 7 if products_overflow() else 8
"""Bits of weights with which this machine computes without overflow."""
USUAL = OPTIONS[0]._replace(weight_bits=BITS)


def bench_of(model: ModelProto, folder: Path, count: int = COUNT) -> RuntimeBench:
    opened = open_for_tuning(save(model, folder))
    return RuntimeBench(opened, [layer.name for layer in opened.layers], samples(model, count), "closeness")


def operators(model: ModelProto, folder: Path) -> list[str]:
    """What ONNX Runtime makes of a model before it looks at the processor."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.log_severity_level = 4
    ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return [each.op_type for each in onnx.load(str(folder / "optimised.onnx")).graph.node]


def stored(model: ModelProto, name: str) -> np.ndarray:
    return numpy_helper.to_array(next(each for each in model.graph.initializer if each.name == name))


@pytest.mark.parametrize("net", NETS)
def test_every_way_computes_nearly_the_same(net: str, tmp_path: Path) -> None:
    bench = bench_of(NETS[net](), tmp_path)
    ways = [way._replace(weight_bits=BITS) for way in (*OPTIONS, QdqOptions(clipped=True))]
    ways.append(QdqOptions(weight_bits=7))
    scores = [bench.score(bench.eight_bits(frozenset(bench.layers), way)) for way in ways]
    assert bench.score(bench.original) == 1 and all(0.9 < score < 1 for score in scores), scores
    assert 0.998 < bench.score(bench.halves()) < 1


def test_chosen_layers_are_8_bit_kernels_and_the_others_are_not(tmp_path: Path) -> None:
    bench = bench_of(chain(), tmp_path)
    everything = bench.eight_bits(frozenset(bench.layers), OPTIONS[0]).written
    assert everything is not None
    made = operators(everything.model, tmp_path)
    assert made.count("QLinearConv") == 2 and made.count("QGemm") == 1
    assert not {"Conv", "Gemm", "Relu"} & set(made)  # what a Relu does comes for nothing
    part = bench.eight_bits(frozenset(["conv2"]), OPTIONS[0]).written
    assert part is not None
    made = operators(part.model, tmp_path)
    assert made.count("QLinearConv") == 1 and "Gemm" in made and "QGemm" not in made


def test_operators_between_layers_stay_in_8_bits_if_they_shall(tmp_path: Path) -> None:
    bench = bench_of(residual(), tmp_path)
    for joined in (True, False):
        written = bench.eight_bits(frozenset(bench.layers), QdqOptions(joined=joined)).written
        assert written is not None
        assert ("QLinearAdd" in operators(written.model, tmp_path)) is joined


def test_weights_have_a_step_for_each_channel_and_biases_those_of_both(tmp_path: Path) -> None:
    bench = bench_of(chain(), tmp_path)
    written = bench.eight_bits(frozenset(bench.layers), OPTIONS[0]).written
    assert written is not None
    weights = {each.name: each.weight for each in bench.prepared.layers}
    for name, axis in (("conv1", 0), ("fc", 0)):
        codes, steps = stored(written.model, f"{name}.weight/codes"), stored(written.model, f"{name}.weight/scale")
        assert codes.dtype == np.int8 and steps.shape == (weights[name].shape[axis],)
        assert (np.abs(codes).reshape(len(steps), -1).max(axis=1) == 127).all()
        back = codes * steps.reshape(-1, *[1] * (codes.ndim - 1))
        assert np.abs(back - weights[name]).max() <= steps.max() / 2 * 1.001
    narrow = bench.eight_bits(frozenset(bench.layers), QdqOptions(weight_bits=7)).written
    assert narrow is not None and np.abs(stored(narrow.model, "conv1.weight/codes")).max() == 63
    assert stored(written.model, "conv1.bias/codes").dtype == np.int32
    assert not {each.name for each in written.model.graph.initializer} & {"conv1.weight", "fc.weight"}


def test_a_bias_that_is_large_beside_its_weights_does_not_overflow(tmp_path: Path) -> None:
    model = chain()
    weights = {each.name: each for each in model.graph.initializer}
    small = numpy_helper.to_array(weights["conv1.weight"]).copy()
    small[0] *= 1e-12
    weights["conv1.weight"].CopyFrom(numpy_helper.from_array(small, "conv1.weight"))
    weights["conv1.bias"].CopyFrom(numpy_helper.from_array(np.full(4, 2.0, np.float32), "conv1.bias"))
    bench = bench_of(model, tmp_path)
    assert bench.score(bench.eight_bits(frozenset(bench.layers), USUAL)) > 0.97


def test_an_output_that_is_made_in_8_bits_keeps_its_name(tmp_path: Path) -> None:
    weights = {"conv.weight": draw(1, 3, 1, 3, 3)}
    model = model_of(
        [node("Conv", ["x", "conv.weight"], ["y"])], [tensor("x", "n", 1, 6, 6)], [tensor("y", "n", 3, 4, 4)], weights
    )
    bench = bench_of(model, tmp_path)
    variant = bench.eight_bits(frozenset(["conv"]), USUAL)
    assert [each.name for each in variant.session.get_outputs()] == ["y"] and 0.97 < bench.score(variant) < 1
    assert variant.written is not None and "QLinearConv" in operators(variant.written.model, tmp_path)


def test_normalisations_are_folded_first_and_layers_keep_their_names(tmp_path: Path) -> None:
    weights = {"stem.weight": draw(1, 4, 1, 3, 3)} | {
        f"bn.{name}": np.abs(draw(number, 4)) + 0.5 for number, name in enumerate(("scale", "shift", "mean", "var"))
    }
    nodes = [
        node("Conv", ["x", "stem.weight"], ["a"]),
        node("BatchNormalization", ["a", *(name for name in weights if name.startswith("bn"))], ["y"]),
    ]
    model = model_of(nodes, [tensor("x", "n", 1, 6, 6)], [tensor("y", "n", 4, 4, 4)], weights)
    prepared = prepare_model(save(model, tmp_path), ["stem"])
    assert [each.op_type for each in prepared.model.graph.node] == ["Conv"]
    assert [each.name for each in prepared.layers] == ["stem"] and prepared.layers[0].bias is not None
    assert {each.domain for each in prepared.model.opset_import} <= {"", "ai.onnx"}


def test_layers_without_a_kernel_are_told_with_the_reason(tmp_path: Path) -> None:
    model = residual()
    gemm = next(each for each in model.graph.node if each.op_type == "Gemm")
    gemm.attribute.append(onnx.helper.make_attribute("alpha", 0.5))
    prepared = prepare_model(save(model, tmp_path), ["stem", "left", "up", "fc"])
    assert [each.name for each in prepared.layers] == ["stem", "left"]
    assert prepared.others == {
        "up": "ONNX Runtime has no 8-bit ConvTranspose",
        "fc": "a Gemm with alpha, beta or transA has no 8-bit kernel",
    }


def test_values_that_are_only_handed_on_keep_the_steps_they_were_made_in(tmp_path: Path) -> None:
    weights = {"a.weight": draw(1, 2, 1, 3, 3), "b.weight": draw(2, 2, 2, 3, 3)}
    nodes = [
        node("Conv", ["x", "a.weight"], ["c"]),
        node("Relu", ["c"], ["r"]),
        node("MaxPool", ["r"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Conv", ["p", "b.weight"], ["y"]),
    ]
    model = model_of(nodes, [tensor("x", "n", 1, 12, 12)], [tensor("y", "n", 2, 3, 3)], weights)
    prepared = prepare_model(save(model, tmp_path), ["a", "b"])
    places = eight_bit_places(prepared.model.graph, prepared.layers, joined=True)
    assert dict(places.produced) == {"r": "a", "y": "b"}  # what the Relu makes, not what enters it
    assert dict(places.read) == {"x": "a", "p": "b"} and places.steps["p"] == "r" and places.ranged == {"x", "r", "y"}


def test_every_layer_has_its_time_in_every_variant(tmp_path: Path) -> None:
    bench = bench_of(residual(), tmp_path)
    variants = [bench.original, bench.eight_bits(frozenset(bench.layers), OPTIONS[0])]
    for times in bench.layer_times(variants):
        assert set(times) == set(bench.layers) and all(seconds >= 0 for seconds in times.values())


def test_zero_is_met_exactly_and_ranges_can_be_clipped() -> None:
    seen = TensorRange(0.5, 4.0, 0.5)
    assert seen.bounds(False) == (0, 4) and seen.bounds(True) == (0, 2)
    rare = np.append(np.linspace(0, 1, 1_000_000, dtype=np.float32), np.float32(8))
    assert clipping_loss(rare, 0, 4) < clipping_loss(rare, 0, 8) and clipping_loss(rare, 0, 0) == 0
