"""Builders of small ONNX graphs for the importer's tests."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from weft.models.layer import Layer, Model
from weft.models.onnx_import import import_onnx

F32, F16, BOOL = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL
I64, I32, I8, U8 = TensorProto.INT64, TensorProto.INT32, TensorProto.INT8, TensorProto.UINT8
node = helper.make_node


def weight(name: str, *dims: int, dtype: int = F32) -> TensorProto:
    """An initializer with a shape and no data, as the zoo writes them."""
    return TensorProto(name=name, data_type=dtype, dims=dims)


def ints(name: str, *values: int) -> TensorProto:
    return numpy_helper.from_array(np.array(values, dtype=np.int64), name)


def scalar(name: str, value: object) -> TensorProto:
    return numpy_helper.from_array(np.array(value), name)


def tensor(name: str, *dims: int | str | None, dtype: int = F32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def unshaped(name: str, dtype: int = F32) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, None)


def graph(nodes, inputs, outputs, constants=(), values=()) -> onnx.GraphProto:
    outs = [unshaped(each) if isinstance(each, str) else each for each in outputs]
    return helper.make_graph(nodes, "net", list(inputs), outs, list(constants), value_info=list(values))


def proto(nodes, inputs, outputs, constants=(), *, values=(), opset=17, functions=()) -> onnx.ModelProto:
    domains = [("", opset), ("com.microsoft", 1), ("acme", 1)]
    opsets = [helper.make_opsetid(domain, version) for domain, version in domains]
    body = graph(nodes, inputs, outputs, constants, values)
    return helper.make_model(body, opset_imports=opsets, functions=list(functions))


def read(*args, shapes=None, **more) -> Model:
    return import_onnx(proto(*args, **more), shapes=shapes)


def only(model: Model) -> Layer:
    (layer,) = model.layers
    return layer
