"""Attributes that a file leaves out mean their defaults: shapes are inferred as if they were written."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, NodeProto, defs
from onnx.helper import make_function, make_opsetid

from tests.models.onnx_graphs import BOOL, graph, node, proto, read, scalar, tensor, weight
from weft.models.layer import Gemm
from weft.models.onnx_import.infer import Inference, with_defaults, write_defaults
from weft.models.onnx_import.tensors import Tensor, computed, dtype_bits

STEP, WINDOW = scalar("step", np.int64(160)), weight("window", 320)
HALF = {"constants": [STEP, WINDOW, scalar("real", np.int64(0)), weight("mel", 161, 64)]}
"""A window of 320 samples has 161 frequencies; without the mirrored ones is the default."""


def stft(**attributes: int) -> NodeProto:
    return node("STFT", ["x", "step", "window"], ["s"], **attributes)


def spectrogram(first: NodeProto) -> list[NodeProto]:
    """Waveform x -> mel spectrogram y."""
    return [first, node("Gather", ["s", "real"], ["r"], axis=3), node("MatMul", ["r", "mel"], ["y"])]


@pytest.mark.parametrize("attributes", [{}, {"onesided": 1}])
def test_an_audio_model_is_read_whether_its_transform_says_one_sided_or_leaves_it_out(attributes):
    model = read(spectrogram(stft(**attributes)), [tensor("x", 1, 8000)], ["y"], **HALF)
    assert model.layers[-1].gemm == Gemm(49, 161, 64)


def test_defaults_hold_in_branches_and_functions_too():
    inside = graph(spectrogram(stft()), [], ["y"])
    branches = [node("If", ["c"], ["y"], then_branch=inside, else_branch=inside)]
    inputs = [tensor("x", 1, 8000), tensor("c", dtype=BOOL)]
    assert read(branches, inputs, ["y"], **HALF).layers[-1].gemm == Gemm(49, 161, 64)
    function = make_function("own", "Stft", ["x", "step", "window"], ["s"], [stft()], [make_opsetid("", 17)])
    calls = spectrogram(node("Stft", ["x", "step", "window"], ["s"], domain="own"))
    called = read(calls, [tensor("x", 1, 8000)], ["y"], functions=[function], **HALF)
    assert called.layers[-1].gemm == Gemm(49, 161, 64)


def test_defaults_are_written_at_every_depth_and_only_where_asked():
    inside = graph([stft()], [], ["s"])
    function = make_function("own", "Stft", ["x", "step"], ["s"], [stft()], [make_opsetid("", 17)])
    nodes = [stft(), node("If", ["c"], ["y"], then_branch=inside, else_branch=inside)]
    model = proto(nodes, [tensor("x", 1, 8000), tensor("c", dtype=BOOL)], ["y"], functions=[function])
    plain = stft()
    assert with_defaults(plain, 17).attribute[0].name == "onesided" and not plain.attribute
    write_defaults(model)
    outer, branch = model.graph.node
    transforms = [outer, *(each.g.node[0] for each in branch.attribute), model.functions[0].node[0]]
    assert [each.attribute[0].i for each in transforms] == [1, 1, 1, 1]


def test_a_default_is_that_of_the_files_version():
    softmax = node("Softmax", ["x"], ["y"])
    assert [with_defaults(softmax, version).attribute[0].i for version in (12, 13, 0)] == [1, -1, -1]


# Every operator that onnx has a test of


def cases() -> Iterator[tuple[str, ModelProto, list[Any]]]:
    """The models of onnx's own tests with a single node of a known operator, and their inputs, all of them tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its authors divide by zero on purpose
        from onnx.backend.test.case.node import collect_testcases

        for case in collect_testcases(None):
            model, values = case.model, list(case.data_sets[0][0])
            first, *others = model.graph.node
            dense = all(isinstance(value, np.ndarray) for value in values)
            if dense and not others and defs.has(first.op_type, first.domain):
                yield case.name, model, values


def known(value: Any, declared: onnx.TypeProto) -> Tensor:
    """An input as a file may have it: a constant where it is small and integer, for it may say sizes."""
    if value.dtype.kind in "iu" and value.ndim < 2:
        return computed(value)
    dtype = declared.tensor_type.elem_type
    return Tensor(value.shape, dtype, dtype_bits(dtype))


def shapes(model: ModelProto, only: NodeProto, inputs: dict[str, Tensor]) -> Any:
    opsets = {each.domain: each.version for each in model.opset_import}
    tensors = [inputs.get(name) for name in only.input]
    return [(each.shape, each.dtype, each.exact) for each in Inference(opsets, 10).outputs(only, tensors, {}).tensors]


def spelled(only: NodeProto, version: int) -> tuple[NodeProto, NodeProto]:
    """A node with every attribute left out that has its default, and with all of them written."""
    schema = defs.get_schema(only.op_type, version, only.domain)
    usual = {name: attribute.default_value for name, attribute in schema.attributes.items()}
    brief, full = NodeProto(), NodeProto()
    brief.CopyFrom(only)
    del brief.attribute[:]
    brief.attribute.extend(each for each in only.attribute if each != usual.get(each.name))
    full.CopyFrom(brief)
    present = {each.name for each in brief.attribute}
    full.attribute.extend(each for name, each in usual.items() if each.name and name not in present)
    return brief, full


@pytest.mark.long
def test_every_operator_has_the_same_shapes_with_its_defaults_left_out_and_written_out():
    operators, different = set(), {}
    for name, model, values in cases():
        (only,) = model.graph.node
        version = next(each.version for each in model.opset_import if each.domain == only.domain)
        brief, full = spelled(only, version)
        inputs = {each.name: known(value, each.type) for each, value in zip(model.graph.input, values, strict=True)}
        operators.add(only.op_type)
        if (left_out := shapes(model, brief, inputs)) != (written := shapes(model, full, inputs)):
            different[name] = left_out, written
    assert len(operators) > 150 and not different
