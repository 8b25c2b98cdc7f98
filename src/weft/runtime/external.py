"""External data: tensors that lie in files beside a model. Finds them, checks that the files are whole, reads them.

They are taken from the model's own folder alone. ONNX Runtime would map the files, and SIGBUS ends a process that reads
a mapped file which was truncated; so weft reads them itself. Weights of the main graph are handed to the session as
arrays. A session takes no other tensors that way: those in branches of ``If``, ``Loop`` and ``Scan``, in attributes, in
local functions, and of types smaller than a byte are embedded in the model before ONNX Runtime sees it.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from google.protobuf.message import Message
from onnx import ModelProto, TensorProto, helper

from weft.base.errors import ModelError
from weft.base.files import kind_of
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
LARGEST_MODEL_BYTES = (1 << 31) - 1
"""Protocol buffers take no longer message."""


class ExternalTensor(NamedTuple):
    """A tensor whose data lies in a file."""

    tensor: TensorProto
    """All but its data."""
    replaceable: bool
    """Whether it is a weight of the main graph, which a session can be given."""
    file: Path
    offset: int
    size: int

    @property
    def is_given(self) -> bool:
        """Whether a session is given it as an array; ONNX Runtime takes no empty ones."""
        return bool(self.replaceable and self.tensor.data_type in _NUMPY and self.size)


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


def read_weights(tensors: Iterable[ExternalTensor]) -> dict[str, Array]:
    """Read the weights that a session can be given, by name."""
    return {external.tensor.name: _read(external) for external in tensors if external.is_given}


def embed_tensors(path: Path, tensors: Iterable[ExternalTensor]) -> bytes | None:
    """Read the *tensors* that no session can be given, and return the model with them inside; None if there are none.

    ``ModelError`` if one cannot be read, or the model becomes longer than ``LARGEST_MODEL_BYTES``.
    """
    if all(external.is_given for external in tensors):
        return None
    model = ModelProto.FromString(path.read_bytes())
    size = model.ByteSize()
    weights = ((tensor, True) for tensor in model.graph.initializer)
    others = ((tensor, False) for part in _parts_with_tensors(model) for tensor in _tensors_inside(part))
    for tensor, replaceable in chain(weights, others):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        external = _placed(path, tensor, replaceable)
        if external.is_given:
            continue
        size += external.size
        if size > LARGEST_MODEL_BYTES:
            raise ModelError(
                f"tensors of its branches, attributes and functions that lie in files make it longer than the "
                f"{LARGEST_MODEL_BYTES} bytes a model can have; make {tensor.name!r} a weight of the main graph"
            )
        tensor.raw_data, tensor.data_location = _read_bytes(external), TensorProto.DEFAULT
        del tensor.external_data[:]
    embedded: bytes = model.SerializeToString()
    return embedded


def _parts_with_tensors(model: ModelProto) -> Iterator[Message]:
    """The parts of a model that can hold tensors, but for the weights of its main graph."""
    yield from model.graph.node
    yield from model.graph.sparse_initializer
    yield from model.functions


def _tensors_inside(message: Message) -> Iterator[TensorProto]:
    """Every tensor of a message, however deep its graphs are nested."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in [value] if isinstance(value, Message) else value:
            if isinstance(inner, TensorProto):
                yield inner
            else:
                yield from _tensors_inside(inner)


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
    """Locate a tensor's data; ``ModelError`` unless it lies in full in a regular file of the model's folder."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location, named = entries.get("location", ""), f"weights {tensor.name!r}"
    offset, length = _whole_number(tensor, entries, "offset") or 0, _whole_number(tensor, entries, "length")
    file = _inside(model, location)
    try:
        state = file.stat()
    except OSError as error:
        raise ModelError(f"{location}, which holds {named}, cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(state.st_mode):
        raise ModelError(f"{location}, which holds {named}, is {kind_of(state.st_mode)}, not a file")
    size = _data_bytes(tensor, state.st_size - offset) if length is None else length
    if size < 0 or offset + size > state.st_size:
        raise ModelError(
            f"{location} has {state.st_size} bytes, but {named} end at {offset + size}; is it complete? copy it again"
        )
    return ExternalTensor(tensor, replaceable, file, offset, size)


def _whole_number(tensor: TensorProto, entries: Mapping[str, str], key: str) -> int | None:
    """The offset or the length of external data; None where it is left out."""
    if key not in entries:
        return None
    try:
        number = int(entries[key])
    except ValueError as error:
        raise ModelError(
            f"external data of tensor {tensor.name!r}: {key} {entries[key][:40]!r} is not a number"
        ) from error
    if number < 0:
        raise ModelError(f"external data of tensor {tensor.name!r}: {key} {number} is negative")
    return number


def _inside(model: Path, location: str) -> Path:
    """A file of the model's own folder, or of that which the model is a link into."""
    file = model.parent / location
    folders = [Path(os.path.realpath(each)) for each in (model.parent, Path(os.path.realpath(model)).parent)]
    unsafe = not location or "\0" in location or os.path.isabs(location) or ".." in Path(location).parts
    if unsafe or not any(Path(os.path.realpath(file)).is_relative_to(folder) for folder in folders):
        raise ModelError(f"weights lie in {location!r}, outside of the model's folder; put them beside the model")
    return file


_PLAIN: tuple[int, ...] = (
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
)  # fmt: skip
_BITS: dict[int, int] = {
    **{kind: 8 * np.dtype(helper.tensor_dtype_to_np_dtype(kind)).itemsize for kind in _PLAIN},
    TensorProto.BFLOAT16: 16, TensorProto.INT4: 4, TensorProto.UINT4: 4,
    TensorProto.FLOAT8E4M3FN: 8, TensorProto.FLOAT8E4M3FNUZ: 8,
    TensorProto.FLOAT8E5M2: 8, TensorProto.FLOAT8E5M2FNUZ: 8,
}  # fmt: skip
_NUMPY: dict[int, np.dtype[Any]] = {
    kind: dtype
    for kind, bits in _BITS.items()
    if (dtype := np.dtype(helper.tensor_dtype_to_np_dtype(kind))).itemsize * 8 == bits
}
"""Types that a session takes as arrays; before version 1.19, onnx has wider types in the place of those numpy lacks."""


def _data_bytes(tensor: TensorProto, rest: int) -> int:
    """How long a tensor's data is where its length is left out: by its type and shape, else the *rest* of the file."""
    bits = _BITS.get(tensor.data_type)
    return rest if bits is None else -(-math.prod(tensor.dims) * bits // 8)


def _read(external: ExternalTensor) -> Array:
    data = _read_bytes(external)
    try:
        return np.frombuffer(data, _NUMPY[external.tensor.data_type]).reshape(tuple(external.tensor.dims))
    except ValueError as error:  # its length is not that of its shape
        raise _unreadable(external, error) from error


def _read_bytes(external: ExternalTensor) -> bytes:
    try:
        with open(external.file, "rb") as file:
            file.seek(external.offset)
            data = file.read(external.size)
    except OSError as error:
        raise _unreadable(external, error) from error
    if len(data) < external.size:
        raise _unreadable(external, f"it was truncated while it was read: {len(data)} of {external.size} bytes")
    return data


def _unreadable(external: ExternalTensor, why: object) -> ModelError:
    return ModelError(f"{external.file.name}, which holds weights {external.tensor.name!r}: {why}")
