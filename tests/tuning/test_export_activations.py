"""Inputs in a number format inside an ONNX graph: what onnxruntime computes is what ``rounded`` says."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from weft.base.errors import TuneError
from weft_tune.export import tensors
from weft_tune.export.emitter import Emitter, onnx_type
from weft_tune.numbers.arrays import code_table, rounded
from weft_tune.numbers.format import (
    BIN,
    EXP,
    FIXED,
    FLOAT,
    FLOAT16,
    FLOAT32,
    Format,
    TwosComplement,
)

FORMS = [
    *(FIXED(bits, bias) for bits in (2, 3, 4, 5, 8, 9, 16, 17, 25, 32) for bias in (-5, 0, 3, 90)),
    *(EXP(bits, bias) for bits in (2, 3, 5, 9) for bias in (None, -3, 0, 1, 64, 140)),
    *(FLOAT(bits, bias) for bits in (3, 4, 6, 8, 9, 12, 15, 17, 24, 31) for bias in (None, 0, 5, 16)),
    *(Format(0, e, f, bias) for e, f in ((0, 4), (0, 12), (3, 0), (4, 3)) for bias in (0, 7)),
    *(Format(1, 5, 2, bias) for bias in (0, 15, 16, 40)),
    *(TwosComplement(bits, length) for bits in (1, 2, 4, 8, 16, 24) for length in (-3, 0, 12)),
    BIN(0),
    BIN(4),
    BIN(-140),
    FLOAT16,
]


def session_of(form, write, opset=21):
    graph = helper.make_graph([], "one", [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])], [])
    emitter = Emitter(graph)
    output = write(emitter, "x", form)
    graph.node.extend(emitter.take())
    graph.initializer.extend(emitter.constants)
    graph.output.append(helper.make_tensor_value_info(output, TensorProto.FLOAT, ["n"]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def probes(form):
    """Values of the format, the places half way between, their neighbours, and any others."""
    rng = np.random.default_rng(5)
    reach = min(form.largest, 1e37)
    found = [rng.standard_normal(1000) * scale for scale in (1e-3, 1.0, 30.0, reach)]
    found.append(np.array([0.0, -0.0, 1e38, -1e38, 1e-40, -1e-40, np.finfo(np.float32).max]))
    with np.errstate(over="ignore"):
        if form.bits <= 9:
            table = np.unique(code_table(form))
            near = np.concatenate([table, (table[1:] + table[:-1]) / 2]).astype(np.float32)
            found += [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        values = np.concatenate(found).astype(np.float32)
    return values[np.isfinite(values)]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("write", [tensors.simulate, tensors.quantise])
def test_a_graph_rounds_exactly_as_the_arrays_do(form, write):
    values = probes(form)
    (got,) = session_of(form, write).run(None, {"x": values})
    assert np.array_equal(got, rounded(values, form))


def test_every_fraction_of_a_binade_is_rounded_right():
    """The way to the power of two below a value relies on 2^23 + 1; scaled by powers of two, one binade is all."""
    values = (np.arange(1 << 23, 1 << 24, dtype=np.int32).astype(np.float32)) * np.float32(2.0**-20)
    (got,) = session_of(FLOAT(8), tensors.simulate).run(None, {"x": values})
    assert np.array_equal(got, rounded(values, FLOAT(8)))


def test_half_way_between_powers_of_two_the_even_code_wins():
    form = EXP(4, 3)  # 2^(E-3): E = 3 is 1, E = 4 is 2
    (got,) = session_of(form, tensors.simulate).run(None, {"x": np.array([0.75, 1.5, 3.0, -3.0], np.float32)})
    assert got.tolist() == [0.5, 2.0, 2.0, -2.0]


def test_simulation_needs_no_more_than_opset_13():
    for form in (EXP(4), FLOAT(6), FIXED(20), TwosComplement(5, 2)):
        values = probes(form)
        (got,) = session_of(form, tensors.simulate, opset=13).run(None, {"x": values})
        assert np.array_equal(got, rounded(values, form))


def test_float32_needs_no_node():
    emitter = Emitter(onnx.GraphProto())
    assert tensors.simulate(emitter, "x", FLOAT32) == "x"
    assert emitter.take() == []


def test_a_format_out_of_all_reach_is_refused():
    with pytest.raises(TuneError, match="FIXED 4 950 reaches too far"):
        tensors.simulate(Emitter(onnx.GraphProto()), "x", FIXED(4, 950))


@pytest.mark.parametrize(
    ("form", "element", "scale"),
    [
        (FIXED(3, 2), "INT4", 2.0**-3),
        (FIXED(4, 0), "INT4", 2.0**-2),
        (FIXED(5, -3), "INT8", 1.0),
        (FIXED(9, 0), "INT16", 2.0**-7),
        (Format(0, 0, 8, 1), "UINT8", 2.0**-8),
        (TwosComplement(8, 5), "INT8", 2.0**-5),
        (FLOAT(8), "FLOAT8E4M3FNUZ", 2.0),
        (Format(1, 5, 2, 16), "FLOAT8E5M2FNUZ", 1.0),
    ],
    ids=str,
)
def test_which_onnx_type_a_format_is(form, element, scale):
    found = onnx_type(form)
    assert TensorProto.DataType.Name(found.element) == element
    assert found.scale == scale


@pytest.mark.parametrize("form", [FIXED(17), EXP(4), FLOAT(6), FLOAT16, BIN(), FIXED(4, 500)], ids=str)
def test_which_formats_onnx_has_no_scaled_type_for(form):
    assert onnx_type(form) is None
