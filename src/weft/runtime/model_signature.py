"""The signature of an ONNX file, read without running it: its inputs, outputs, exits and operators."""

from __future__ import annotations

from pathlib import Path

from weft.base.errors import ModelError
from weft.base.shapes import Dimension
from weft.models.element_types import ElementType, numpy_dtype
from weft.models.onnx_graph import OnnxModel, OnnxValue, dimensions, load, metadata, request_inputs
from weft.models.onnx_import.importer import dimensions_of
from weft.runtime.metadata import EXITS_KEY
from weft.runtime.tensors import DATATYPES, TensorSpec

_NAMES = {kind: name for name, kind in DATATYPES.items() if name != "BYTES"}
"""numpy's type -> the protocol's name."""


def read_inputs(path: str | Path) -> tuple[TensorSpec, ...]:
    """The inputs that requests fill; -1 where a dimension is free."""
    return tuple(_spec(path, value) for value in request_inputs(_load(path).graph))


def read_dimensions(path: str | Path) -> dict[str, tuple[Dimension, ...] | None]:
    """Input that requests fill -> its dimensions: sizes, or names where they are free; None if none are declared."""
    return {value.name: dimensions_of(value.type) for value in request_inputs(_load(path).graph)}


def read_outputs(path: str | Path) -> tuple[str, ...]:
    """The names of the outputs."""
    return tuple(value.name for value in _load(path).graph.output)


def read_exits(path: str | Path) -> tuple[str, ...]:
    """The outputs that the file's metadata names as exits, shallow to deep, the end last; empty if it names none."""
    return tuple(filter(None, map(str.strip, metadata(_load(path)).get(EXITS_KEY, "").split(","))))


def read_operators(path: str | Path) -> frozenset[str]:
    """The operator types of the main graph, without the bodies of control flow."""
    return frozenset(node.op_type for node in _load(path).graph.node)


def _load(path: str | Path) -> OnnxModel:
    try:
        return load(path)
    except Exception as error:  # protobuf and the file system each raise their own kinds
        raise ModelError(f"{path}: cannot be read as an ONNX model; export or download it again") from error


def _spec(path: str | Path, info: OnnxValue) -> TensorSpec:
    """Describe an input; ``ModelError`` if it declares no dimensions or has a type that cannot be served."""
    sizes = dimensions(info)
    if sizes is None:
        raise ModelError(f"{path}: input {info.name!r} states no dimensions; export it with them, free ones by a name")
    shape = tuple(size if isinstance(size, int) else -1 for size in sizes)
    return TensorSpec(info.name, _datatype(path, info.name, info.type.tensor_type.elem_type), shape)


def _datatype(path: str | Path, name: str, kind: int) -> str:
    """The data type, in the protocol's terms, of the ONNX element type *kind* of the input *name*."""
    if kind == ElementType.STRING:
        return "BYTES"
    datatype = _NAMES.get(numpy_dtype(kind))
    if datatype is None or kind == ElementType.BFLOAT16:
        raise ModelError(f"{path}: input {name!r} is of a type that cannot be served; export it as a plain tensor")
    return datatype
