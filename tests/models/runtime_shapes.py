"""Every tensor of a graph: as the importer sees it, and as ONNX Runtime really produces it."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
from onnx import helper

from weft.models.onnx_import.importer import graph_inputs
from weft.models.onnx_import.infer import Inference
from weft.models.onnx_import.tensors import Tensor
from weft.models.onnx_import.walk import walk

Shapes = Mapping[str, tuple[int, ...]]


def inferred(model: onnx.ModelProto, shapes: Shapes | None = None) -> tuple[dict[str, Tensor], list[str]]:
    """Every tensor of the graph as the importer sees it, and the lines about shapes it does not know."""
    inlined = _inlined(model)
    opsets = {("" if each.domain == "ai.onnx" else each.domain): each.version for each in inlined.opset_import}
    inference = Inference(opsets, inlined.ir_version)
    scope = ChainMap(dict(graph_inputs(inlined.graph, shapes or {}, inference)))
    guesses = walk(inlined.graph, scope, inference).guesses
    return dict(scope), guesses


def produced(model: onnx.ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """What ONNX Runtime hands out, with every tensor of the graph made an output; sequences and maps are left out."""
    watched = onnx.ModelProto.FromString(_inlined(model).SerializeToString())
    named = {each.name for each in watched.graph.output}
    inner = [name for node in watched.graph.node for name in node.output if name and name not in named]
    watched.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in inner)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = ort.InferenceSession(watched.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_outputs()]
    values = session.run(names, dict(feeds))
    return {name: value for name, value in zip(names, values, strict=True) if isinstance(value, np.ndarray)}


def agree(
    model: onnx.ModelProto, shapes: Shapes, values: Mapping[str, float] | None = None, known: Iterable[str] = ()
) -> list[str]:
    """Compare every shape, and every value the importer follows, with ONNX Runtime's; the lines about guesses.

    values: input -> what to fill it with. known: tensors whose values must be followed.
    """
    tensors, guesses = inferred(model, shapes)
    assert [name for name in known if tensors[name].value is None] == []
    sizes = {each.name: tensors[each.name].shape for each in model.graph.input}
    real = produced(model, feeds_for(model, sizes, values))
    assert {name: tensors[name].shape for name in real} == {name: value.shape for name, value in real.items()}
    for name, value in real.items():
        if (ours := tensors[name].value) is not None:
            np.testing.assert_allclose(ours, value, rtol=1e-6, err_msg=name)
            assert ours.dtype == value.dtype, name
    return guesses


def _inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    return onnx.inliner.inline_local_functions(model) if model.functions else model


def feeds_for(model: onnx.ModelProto, shapes: Shapes, values: Mapping[str, float] | None) -> dict[str, Any]:
    """Random inputs of the right types: floats about 0, integers 0 or 1, so that they may be indices."""
    rng, feeds = np.random.default_rng(7), {}
    constants = {each.name for each in model.graph.initializer}
    for each in model.graph.input:
        if each.name in constants:
            continue
        kind = helper.tensor_dtype_to_np_dtype(each.type.tensor_type.elem_type)
        shape = shapes[each.name]
        fill = (values or {}).get(each.name)
        data = rng.normal(size=shape) if kind.kind == "f" else rng.integers(0, 2, size=shape)
        feeds[each.name] = np.asarray(data if fill is None else np.full(shape, fill)).astype(kind)
    return feeds
