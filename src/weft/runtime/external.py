"""Weights that lie in files beside a model: which they are, that they are whole, and reading them.

They are taken from the model's own folder alone. ONNX Runtime would map them, and a process dies when a mapped file is
cut short; so they are read and handed to it. What it maps all the same (tensors inside control flow, types that numpy
does not have) has at least the right size when it is opened; where files may change at any time, isolate the model.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from onnx import TensorProto, helper

from weft.errors import ModelError
from weft.runtime.tensors import Array
from weft.runtime.wire_format import Bytes, Glance, fields

_PIECE_BYTES = 1 << 20
"""Model files are read in pieces of this size: what a thread reads at once stays in its memory when it is done."""
_MODEL, _MAIN, _GRAPH, _FUNCTION, _NODE, _ATTRIBUTE, _SPARSE, _TENSOR = range(8)
_INSIDE = {
    (_MODEL, 7): _MAIN,
    (_MODEL, 25): _FUNCTION,
    (_MAIN, 1): _NODE,
    (_MAIN, 5): _TENSOR,
    (_MAIN, 15): _SPARSE,
    (_GRAPH, 1): _NODE,
    (_GRAPH, 5): _TENSOR,
    (_GRAPH, 15): _SPARSE,
    (_FUNCTION, 7): _NODE,
    (_NODE, 5): _ATTRIBUTE,
    (_ATTRIBUTE, 5): _TENSOR,
    (_ATTRIBUTE, 6): _GRAPH,
    (_ATTRIBUTE, 10): _TENSOR,
    (_ATTRIBUTE, 11): _GRAPH,
    (_ATTRIBUTE, 22): _SPARSE,
    (_ATTRIBUTE, 23): _SPARSE,
    (_SPARSE, 1): _TENSOR,
    (_SPARSE, 2): _TENSOR,
}
"""Message and field number -> the message inside, on the way to tensors."""
_EXTERNAL_DATA = 13
"""The field of a tensor that names a file."""
_WORD = b"location"
"""Stands in every such field."""


class ExternalTensor(NamedTuple):
    """A tensor whose data lies in a file."""

    tensor: TensorProto
    """All but its data."""
    replaceable: bool
    """Whether it is a weight of the main graph, which a session can be given."""
    file: Path
    offset: int
    size: int


def external_tensors(model: Path) -> list[ExternalTensor]:
    """The tensors of a model that lie elsewhere; none where it cannot be read as a model.

    ``ModelError`` if one lies outside the model's folder, or its file is missing or too short.
    """
    with open(model, "rb") as file:
        if not _has_word(file):
            return []
        size = os.fstat(file.fileno()).st_size
        try:
            found = list(_tensors(Glance(file), 0, size, _MODEL, _MODEL))
        except Exception:  # whatever protocol buffers raise: it is no model, and ONNX Runtime will say so
            return []
    return [_placed(model, tensor, replaceable) for tensor, replaceable in found]


def _has_word(file: BinaryIO) -> bool:
    """Whether there may be such tensors at all, which is soon seen."""
    end = b""
    while piece := file.read(_PIECE_BYTES):
        if _WORD in end + piece[: len(_WORD)] or _WORD in piece:
            return True
        end = piece[1 - len(_WORD) :]
    return False


def external_files(model: Path) -> tuple[Path, ...]:
    """The files beside a model that hold weights of it."""
    return tuple(dict.fromkeys(each.file for each in external_tensors(model)))


def read_weights(tensors: list[ExternalTensor]) -> dict[str, Array]:
    """The weights that a session can be given, by name."""
    return {
        each.tensor.name: _read(each)
        for each in tensors
        if each.replaceable and each.tensor.data_type in _NUMPY and each.size
    }


def _tensors(data: Bytes, start: int, end: int, message: int, inside: int) -> Iterator[tuple[TensorProto, bool]]:
    """Tensors with data elsewhere; all other data is stepped over, so that a large file is soon looked through."""
    found = list(fields(data, start, end))
    if message == _TENSOR and any(number == _EXTERNAL_DATA for number, _, _ in found):
        tensor = TensorProto.FromString(data[start:end])
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor, inside == _MAIN
    for number, first, last in found:
        inner = _INSIDE.get((message, number))
        if inner is not None:
            yield from _tensors(data, first, last, inner, message)


def _placed(model: Path, tensor: TensorProto, replaceable: bool) -> ExternalTensor:
    said = {entry.key: entry.value for entry in tensor.external_data}
    location, named = said.get("location", ""), f"weights {tensor.name!r}"
    file = _inside(model, location)
    try:
        offset, length = int(said.get("offset", 0)), int(said["length"]) if "length" in said else None
        size = math.prod(tensor.dims) * _item_bytes(tensor) if length is None else length
        there = file.stat().st_size
    except ValueError as error:
        raise ModelError(f"{named} lie at a place that is no number: {error}") from error
    except OSError as error:
        raise ModelError(f"{location}, which holds {named}, cannot be read: {error.strerror or error}") from error
    if not file.is_file():
        raise ModelError(f"{location}, which holds {named}, is not a file")
    if min(offset, size) < 0 or offset + size > there:
        raise ModelError(
            f"{location} has {there} bytes, but {named} end at {offset + size}; is it complete? copy it again"
        )
    return ExternalTensor(tensor, replaceable, file, offset, size)


def _inside(model: Path, location: str) -> Path:
    """A file of the model's own folder, or of that which the model is a link into."""
    file = model.parent / location
    folders = [Path(os.path.realpath(each)) for each in (model.parent, Path(os.path.realpath(model)).parent)]
    unsafe = not location or "\0" in location or os.path.isabs(location) or ".." in Path(location).parts
    if unsafe or not any(Path(os.path.realpath(file)).is_relative_to(folder) for folder in folders):
        raise ModelError(f"weights lie in {location!r}, outside of the model's folder; put them beside the model")
    return file


_NUMPY: dict[int, np.dtype[Any]] = {
    kind: np.dtype(helper.tensor_dtype_to_np_dtype(kind))
    for kind in (
        TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL,
        TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
        TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    )
}  # fmt: skip
"""Types that can be handed over as arrays; the others stay with ONNX Runtime."""


def _item_bytes(tensor: TensorProto) -> int:
    return _NUMPY[tensor.data_type].itemsize if tensor.data_type in _NUMPY else 0


def _read(each: ExternalTensor) -> Array:
    try:
        with open(each.file, "rb") as file:
            file.seek(each.offset)
            data = file.read(each.size)
        return np.frombuffer(data, _NUMPY[each.tensor.data_type]).reshape(tuple(each.tensor.dims))
    except (OSError, ValueError) as error:  # it was cut short meanwhile, or its length is not that of its shape
        raise ModelError(f"{each.file.name}, which holds weights {each.tensor.name!r}: {error}") from error
