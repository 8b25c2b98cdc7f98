"""What a model file says of itself, read without running it: its inputs, its outputs and its exits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, ValueInfoProto, helper

from weft.base.errors import ModelError
from weft.base.shapes import Dimension
from weft.models.onnx_import.importer import dimensions_of
from weft.runtime.exits import METADATA_KEY
from weft.runtime.tensors import DATATYPES, TensorSpec

_NAMES = {kind: name for name, kind in DATATYPES.items() if name != "BYTES"}


def stated_inputs(path: str | Path) -> tuple[TensorSpec, ...]:
    """The inputs of an ONNX file that requests fill; -1 where a dimension is free."""
    graph = _loaded(path).graph
    constants = {each.name for each in graph.initializer}
    return tuple(_spec(path, each) for each in graph.input if each.name not in constants)


def stated_dimensions(path: str | Path) -> dict[str, tuple[Dimension, ...] | None]:
    """Input of an ONNX file that requests fill -> its sizes, and the names of its axes where they are free."""
    graph = _loaded(path).graph
    constants = {each.name for each in graph.initializer}
    return {each.name: dimensions_of(each.type) for each in graph.input if each.name not in constants}


def stated_outputs(path: str | Path) -> tuple[str, ...]:
    """The names of the outputs of an ONNX file."""
    return tuple(each.name for each in _loaded(path).graph.output)


def stated_exits(path: str | Path) -> tuple[str, ...]:
    """The outputs that an ONNX file names as exits, shallow to deep, the end last; none where it names none."""
    text = next((entry.value for entry in _loaded(path).metadata_props if entry.key == METADATA_KEY), "")
    return tuple(filter(None, map(str.strip, text.split(","))))


def stated_operators(path: str | Path) -> frozenset[str]:
    """The kinds of operators in an ONNX file, those within others not among them."""
    return frozenset(node.op_type for node in _loaded(path).graph.node)


def _loaded(path: str | Path) -> onnx.ModelProto:
    try:
        return onnx.load_model(str(path), load_external_data=False)
    except Exception as error:  # protobuf and the file system each raise their own kinds
        raise ModelError(f"{path}: cannot be read as an ONNX model; export or download it again") from error


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
