"""External data: tensors in files beside a model. Finds them, checks that the files are complete, and reads them.

Only files in the model's own folder are read. ONNX Runtime would map them, and a process that reads a mapped file which
was truncated ends by SIGBUS; so weft reads them itself. Weights of the main graph are passed to the session as arrays.
A session takes no other tensors that way: those in branches of ``If``, ``Loop`` and ``Scan``, in attributes, in local
functions, and of types smaller than a byte are embedded in the model before ONNX Runtime opens it.
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
from onnx import ModelProto, TensorProto, ValueInfoProto

from weft.base.errors import ModelError
from weft.base.files import kind_of
from weft.models.element_types import ElementType, dtype_bits, numpy_dtype
from weft.models.onnx_graph import OnnxValue
from weft.runtime.metadata import Bytes, Glance, fields
from weft.runtime.tensors import Array

_PIECE_BYTES = 1 << 20
"""Size of the pieces in which model files are read: a larger buffer would stay allocated to the thread afterwards."""
# Kinds of messages in an ONNX file; _MAIN is the main graph, _GRAPH one inside an attribute.
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
"""Message and field number -> the message inside: the paths to all tensors of a model."""
_EXTERNAL_DATA = 13
"""The field of a tensor that names a file."""
_GRAPH_FIELD, _WEIGHT_FIELD, _INPUT_FIELD, _NAME_FIELD = 7, 5, 11, 8
"""Field numbers of a model's graph, of a graph's weights and inputs, and of a tensor's name."""
_WORD = b"location"
"""A key that every external-data field contains."""
LARGEST_MODEL_BYTES = (1 << 31) - 1
"""Protocol buffers take no longer message."""


class ExternalTensor(NamedTuple):
    """A tensor whose data is in a file beside the model."""

    tensor: TensorProto  # all but its data
    replaceable: bool  # whether it is a weight of the main graph, which a session can be given
    file: Path
    offset: int
    size: int

    @property
    def is_given(self) -> bool:
        """Whether it is passed to a session as an array; ONNX Runtime accepts no empty arrays."""
        return bool(self.replaceable and self.tensor.data_type in _NUMPY and self.size)


def external_tensors(model: Path) -> list[ExternalTensor]:
    """The external tensors of a model; none if the file is no ONNX model.

    ``ModelError`` if the file of a tensor is outside the model's folder, missing or too short.
    """
    with open(model, "rb") as file:
        if not _has_word(file):
            return []
        size = os.fstat(file.fileno()).st_size
        try:
            tensors = list(_tensors(Glance(file), 0, size, message=_MODEL, parent=_MODEL))
        except Exception:  # protocol buffers raise several kinds: it is no model, and ONNX Runtime reports that
            return []
    return [_locate_data(model, tensor, replaceable) for tensor, replaceable in tensors]


def glanced_inputs(path: str | os.PathLike[str], *, requests: bool = False) -> list[OnnxValue]:
    """The inputs that a file declares, read without its weights; IndexError where it is no model.

    requests: only the inputs that a request fills, without the weights that old files list among the inputs.
    """
    inputs: list[OnnxValue] = []
    weights: set[str] = set()
    with open(path, "rb") as file:
        data = Glance(file)
        for number, first, last in fields(data, 0, len(data)):
            for inner, start, end in fields(data, first, last) if number == _GRAPH_FIELD else ():
                if inner == _INPUT_FIELD:
                    inputs.append(ValueInfoProto.FromString(data[start:end]))
                elif requests and inner == _WEIGHT_FIELD:
                    names = [data[low:high] for key, low, high in fields(data, start, end) if key == _NAME_FIELD]
                    weights |= {name.decode() for name in names}
    return [value for value in inputs if value.name not in weights]


def _has_word(file: BinaryIO) -> bool:
    """Whether the file contains ``_WORD``, and so may have external tensors; a fast search that saves most parsing."""
    previous_end = b""
    while piece := file.read(_PIECE_BYTES):
        if _WORD in previous_end + piece[: len(_WORD)] or _WORD in piece:
            return True
        # The word may begin in one piece and end in the next.
        previous_end = piece[1 - len(_WORD) :]
    return False


def external_files(model: Path) -> tuple[Path, ...]:
    """The files beside a model that hold its weights, without duplicates."""
    return tuple(dict.fromkeys(tensor.file for tensor in external_tensors(model)))


def read_weights(tensors: Iterable[ExternalTensor]) -> dict[str, Array]:
    """Read the weights that are passed to a session as arrays, by name."""
    return {external.tensor.name: _read(external) for external in tensors if external.is_given}


def embed_tensors(path: Path, tensors: Iterable[ExternalTensor]) -> bytes | None:
    """Return the model in *path* with those external *tensors* embedded that cannot be passed to a session.

    None if there is no such tensor. ``ModelError`` if a tensor cannot be read, or the model becomes longer than
    ``LARGEST_MODEL_BYTES``.
    """
    if all(external.is_given for external in tensors):
        return None
    model = ModelProto.FromString(path.read_bytes())
    size = model.ByteSize()
    # Each with whether it is a weight of the main graph.
    weights = ((tensor, True) for tensor in model.graph.initializer)
    others = ((tensor, False) for part in _parts_with_tensors(model) for tensor in _tensors_inside(part))
    for tensor, replaceable in chain(weights, others):
        if tensor.data_location != TensorProto.EXTERNAL:
            continue
        external = _locate_data(path, tensor, replaceable)
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
    """The parts of a model that can hold tensors, except the weights of its main graph."""
    yield from model.graph.node
    yield from model.graph.sparse_initializer
    yield from model.functions


def _tensors_inside(message: Message) -> Iterator[TensorProto]:
    """Yield every tensor of a message, and of the graphs nested in it."""
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for inner in [value] if isinstance(value, Message) else value:
            if isinstance(inner, TensorProto):
                yield inner
            else:
                yield from _tensors_inside(inner)


def _tensors(data: Bytes, start: int, end: int, message: int, parent: int) -> Iterator[tuple[TensorProto, bool]]:
    """Yield the external tensors in the message from byte *start* to *end*, and whether each is a main graph's weight.

    *message*, *parent*: the kind of that message, such as ``_MODEL``, and of the message that it is in. Other data is
    skipped, so that a large file takes little time and memory.
    """
    fields_inside = list(fields(data, start, end))
    if message == _TENSOR and any(number == _EXTERNAL_DATA for number, _, _ in fields_inside):
        tensor = TensorProto.FromString(data[start:end])
        if tensor.data_location == TensorProto.EXTERNAL:
            yield tensor, parent == _MAIN
    for number, first, last in fields_inside:
        inner = _INSIDE.get((message, number))
        if inner is not None:
            yield from _tensors(data, first, last, message=inner, parent=message)


def _locate_data(model: Path, tensor: TensorProto, replaceable: bool) -> ExternalTensor:
    """Locate an external tensor's data; ``ModelError`` unless all of it is in a regular file of the model's folder.

    *model*: the model's file. *replaceable*: whether the tensor is a weight of the main graph.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}  # ONNX: location, offset and length
    location, label = entries.get("location", ""), f"weights {tensor.name!r}"
    offset, length = _whole_number(tensor, entries, "offset") or 0, _whole_number(tensor, entries, "length")
    file = _resolve(model, location)
    try:
        state = file.stat()
    except OSError as error:
        raise ModelError(f"{location}, which holds {label}, cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(state.st_mode):
        raise ModelError(f"{location}, which holds {label}, is {kind_of(state.st_mode)}, not a file")
    size = _data_bytes(tensor, state.st_size - offset) if length is None else length
    if size < 0 or offset + size > state.st_size:
        raise ModelError(
            f"{location} has {state.st_size} bytes, but {label} end at {offset + size}; is it complete? copy it again"
        )
    return ExternalTensor(tensor, replaceable, file, offset, size)


def _whole_number(tensor: TensorProto, entries: Mapping[str, str], key: str) -> int | None:
    """The ``offset`` or ``length`` (*key*) of external data; None if it is left out, ModelError if it is invalid."""
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


def _resolve(model: Path, location: str) -> Path:
    """The path of the file *location* of a model's external data; ``ModelError`` if it is outside the model's folder.

    If the model is a symbolic link, the folder of its target is allowed, too. Without this check a model could make the
    server read any file, and return it as a constant output.
    """
    file = model.parent / location
    folders = [Path(os.path.realpath(path)) for path in (model.parent, Path(os.path.realpath(model)).parent)]
    unsafe = not location or "\0" in location or os.path.isabs(location) or ".." in Path(location).parts
    if unsafe or not any(Path(os.path.realpath(file)).is_relative_to(folder) for folder in folders):
        raise ModelError(f"weights lie in {location!r}, outside of the model's folder; put them beside the model")
    return file


_UNSIZED = {ElementType.UNDEFINED, ElementType.STRING, ElementType.COMPLEX64, ElementType.COMPLEX128}
_SIZED = frozenset(kind for kind in ElementType if kind <= ElementType.INT4) - _UNSIZED
"""Types whose data length follows from the shape; for types newer than INT4, data ends with the file."""
_NUMPY: dict[int, np.dtype[Any]] = {
    int(kind): dtype for kind in _SIZED if (dtype := numpy_dtype(kind)).itemsize * 8 == dtype_bits(kind)
}
"""Types that a session takes as arrays; before version 1.19, onnx maps types that numpy lacks to wider ones."""


def _data_bytes(tensor: TensorProto, rest: int) -> int:
    """Bytes of a tensor's data if the model does not state them: by type and shape, else *rest*, those of the file."""
    if tensor.data_type not in _SIZED:
        return rest
    return -(-math.prod(map(int, tensor.dims)) * dtype_bits(tensor.data_type) // 8)  # rounded up


def _read(external: ExternalTensor) -> Array:
    data = _read_bytes(external)
    try:
        return np.frombuffer(data, _NUMPY[external.tensor.data_type]).reshape(tuple(external.tensor.dims))
    except ValueError as error:  # the data is shorter or longer than the shape needs
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
