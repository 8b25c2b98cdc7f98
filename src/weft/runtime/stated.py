"""What a model file says of itself, read without running it: its inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto, helper

from weft.errors import ModelError
from weft.runtime.tensors import DATATYPES, TensorSpec

_NAMES = {kind: name for name, kind in DATATYPES.items() if name != "BYTES"}


def stated_inputs(path: str | Path) -> tuple[TensorSpec, ...]:
    """The inputs of an ONNX file that requests fill; -1 where a dimension is free."""
    try:
        graph = onnx.load_model(str(path), load_external_data=False).graph
    except Exception as error:  # protobuf and the file system each raise their own kinds
        raise ModelError(f"{path}: cannot be read as an ONNX model; export or download it again") from error
    constants = {each.name for each in graph.initializer}
    return tuple(_spec(path, each) for each in graph.input if each.name not in constants)


def _spec(path: str | Path, info: ValueInfoProto) -> TensorSpec:
    tensor = info.type.tensor_type
    if not tensor.HasField("shape"):
        raise ModelError(f"{path}: input {info.name!r} states no dimensions; export it with them, free ones by a name")
    shape = tuple(dim.dim_value if dim.WhichOneof("value") == "dim_value" else -1 for dim in tensor.shape.dim)
    return TensorSpec(info.name, _datatype(path, info.name, tensor.elem_type), shape)


def _datatype(path: str | Path, name: str, kind: int) -> str:
    if kind == TensorProto.STRING:
        return "BYTES"
    found = _NAMES.get(np.dtype(helper.tensor_dtype_to_np_dtype(kind)))
    if found is None or kind == TensorProto.BFLOAT16:
        raise ModelError(f"{path}: input {name!r} is of a type that cannot be served; export it as a plain tensor")
    return found
