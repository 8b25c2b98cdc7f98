"""Exporters' idioms at every operator set they used: each tensor has the shape that ONNX Runtime really produces."""

from __future__ import annotations

import pytest
from exporter_graphs import IDIOMS
from runtime_shapes import feeds_for, inferred, produced


@pytest.mark.parametrize("case", [pytest.param((each, opset), id=f"{each.name}-{opset}") for each in IDIOMS for opset in each.opsets])
def test_every_tensor_has_the_shape_that_onnx_runtime_produces(case):
    idiom, opset = case
    model, shapes = idiom.build(opset)
    tensors, guesses = inferred(model, shapes)
    real = produced(model, feeds_for(model, shapes))
    assert {name: tensors[name].shape for name in real} == real
    assert guesses == []
