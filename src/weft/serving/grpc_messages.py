"""Messages of gRPC on the wire: measured before they are parsed, their raw tensors left where they lie.

protobuf builds an object for every field, empty ones among them, and keeps Python's lock while it does: 60 MB of empty
inputs took 10 s and 45 times their size. So a message of more than ``QUICK_BYTES`` is walked first. The walk builds
nothing, ends after ``MAX_FIELDS`` fields, and leaves raw contents out of what is parsed: they are views of the message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from weft.base.errors import BadRequest, TooLarge
from weft.serving import proto
from weft.serving.wire import LARGE_BYTES, MAX_ID_CHARS

QUICK_BYTES = 64 * 1024
"""Messages up to this are parsed as they are: the worst of them takes 3 ms and 3 MB (Neoverse-N1)."""
SMALL_BYTES = 1 << 20
"""The largest message of a call that is not for a model to compute."""
MAX_FIELDS = 8192
"""Most fields of a message, and of all its inputs and outputs together; elements of tensors do not count."""
MAX_SHAPE_BYTES = 1024
"""Most bytes of one shape on the wire: a dimension takes 10 at most, and no tensor has more than 64."""
MAX_NAME_BYTES = 4 * MAX_ID_CHARS
"""Most bytes of an id, and of the name of a model and its version."""

_VARINT, _I64, _LENGTH, _I32 = 0, 1, 2, 5
_FIXED_BYTES = {_I64: 8, _I32: 4}

_Request = proto.CLASSES["ModelInferRequest"]


def _number(message: Any, name: str) -> int:
    """Return the number of a field of a message class."""
    return int(message.DESCRIPTOR.fields_by_name[name].number)


_RAW = _number(_Request, "raw_input_contents")
_NAMES = {_number(_Request, name): name for name in ("model_name", "model_version", "id")}
_TENSORS = {
    _number(_Request, "inputs"): _number(_Request.InferInputTensor, "shape"),
    _number(_Request, "outputs"): None,
}
"""Fields that hold tensors -> the number of their shape, where they have one."""


class InferMessage(NamedTuple):
    """A ``ModelInferRequest``, parsed only as far as that is quick."""

    data: bytes
    model_name: str
    model_version: str
    id: str
    head: Any
    """The parsed message without its raw contents; None if parsing takes long and must be done by a helper process."""
    raws: Sequence[bytes | memoryview]
    """The raw contents; views of ``data`` if the message is large."""


class _Field(NamedTuple):
    """A field in the bytes of a message: its key begins at *start*, its value at *value*, the next field at *end*.

    kind: the wire type. *value* is after the length for strings, bytes and messages.
    """

    number: int
    kind: int
    start: int
    value: int
    end: int


def read_infer(data: bytes, max_head_bytes: int) -> InferMessage:
    """Read a ``ModelInferRequest``; BadRequest if it cannot be parsed, TooLarge if it has too many fields.

    max_head_bytes: limit on all its bytes except raw contents.
    """
    if len(data) <= QUICK_BYTES:
        message = parse(_Request, data)
        raws = list(message.raw_input_contents)
        return InferMessage(data, message.model_name, message.model_version, message.id, message, raws)
    names, head, views = _split(data)
    if len(head) > max_head_bytes:
        raise TooLarge(
            f"{len(head)} bytes of typed contents exceed the limit of {max_head_bytes} bytes; send raw contents"
        )
    message = parse(_Request, head) if len(head) <= LARGE_BYTES else None
    if message is not None and len(data) > LARGE_BYTES and _has_strings(message):
        message = None  # each string becomes an object
    name, version, request_id = (names.get(key, "") for key in ("model_name", "model_version", "id"))
    return InferMessage(data, name, version, request_id, message, views)


def parse_infer(data: bytes) -> tuple[Any, Sequence[bytes | memoryview]]:
    """Parse a ``ModelInferRequest`` in a helper process; return the message without raw contents, and those."""
    _, head, raws = _split(data)
    return parse(_Request, head), raws


def parse(kind: Any, data: bytes) -> Any:
    """Parse a message of the class *kind*; BadRequest if that is not possible."""
    try:
        return kind.FromString(data)
    except DecodeError:
        name = kind.DESCRIPTOR.name
        raise BadRequest(f"the message is no {name}: its {len(data)} bytes cannot be parsed") from None


def parse_small(kind: Any, data: bytes, limit_bytes: int = SMALL_BYTES) -> Any:
    """Parse a message of the class *kind*, without tensors; TooLarge if it has too many bytes or fields."""
    if len(data) > limit_bytes:
        raise TooLarge(f"message has {len(data)} bytes, more than the limit of {limit_bytes} bytes")
    if len(data) > QUICK_BYTES:
        for _ in _count_fields(_fields(data, 0, len(data)), kind.DESCRIPTOR, 0):
            continue
    return parse(kind, data)


def _split(data: bytes) -> tuple[dict[str, str], bytes, list[memoryview]]:
    """Split a ``ModelInferRequest`` without parsing it.

    Returns the model's name and version and the request's id; the bytes of all fields other than raw contents, which
    are a message again; and the raw contents. TooLarge if it has too many fields.
    """
    view, names = memoryview(data), dict[str, str]()
    raws, kept, kept_from, nested_fields = list[memoryview](), list[memoryview](), 0, 0
    for field in _count_fields(_fields(data, 0, len(data)), _Request.DESCRIPTOR, 0):
        if field.kind != _LENGTH:
            continue
        if field.number == _RAW:
            raws.append(view[field.value : field.end])
            kept.append(view[kept_from : field.start])
            kept_from = field.end
        elif field.number in _TENSORS:
            nested_fields = _measure_tensor(data, field, nested_fields)
        elif field.number in _NAMES:  # the last one counts, as for any parser
            names[_NAMES[field.number]] = _name(data, field)
    return names, b"".join([*kept, view[kept_from:]]) if raws else data, raws


def _measure_tensor(data: bytes, tensor: _Field, counted: int) -> int:
    """Count the fields of an input or an output, and return them plus *counted*, those of the tensors before it."""
    shape = _TENSORS[tensor.number]
    fields = _fields(data, tensor.value, tensor.end)
    for field in _count_fields(fields, _Request.DESCRIPTOR.fields_by_number[tensor.number].message_type, counted):
        counted += 1
        if field.number == shape and field.end - field.value > MAX_SHAPE_BYTES:
            raise BadRequest(f"a shape of {field.end - field.value} bytes has more dimensions than any tensor")
    return counted


def _name(data: bytes, field: _Field) -> str:
    """Decode an id or a name; BadRequest if it is too long."""
    if field.end - field.value > MAX_NAME_BYTES:
        raise BadRequest(
            f"{_NAMES[field.number]} has {field.end - field.value} bytes; at most {MAX_NAME_BYTES} are read"
        )
    return data[field.value : field.end].decode(errors="replace")  # parsing refuses what is no UTF-8


def _count_fields(fields: Iterator[_Field], descriptor: Any, before: int) -> Iterator[_Field]:
    """Yield the fields of a message; TooLarge as soon as these, plus *before*, are more than ``MAX_FIELDS``.

    descriptor: of the message, for the names in the error.
    """
    for field in fields:
        before += 1
        if before > MAX_FIELDS:
            known = descriptor.fields_by_number.get(field.number)
            name = known.name if known else f"field {field.number}"
            raise TooLarge(f"the message has more than {MAX_FIELDS} fields, {name} of {descriptor.name} among them")
        yield field


def _fields(data: bytes, at: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message in ``data[at:end]``; BadRequest if it is cut off or has groups, as in proto2."""
    while at < end:
        start = at
        key, at = _varint(data, at, end)
        kind = key & 7  # the lowest three bits are the wire type, the others the number of the field
        value = at
        if kind == _LENGTH:
            size, value = _varint(data, at, end)
            at = value + size
        elif kind == _VARINT:
            _, at = _varint(data, at, end)
        elif kind in _FIXED_BYTES:
            at += _FIXED_BYTES[kind]
        else:
            raise _broken(start)
        if at > end:
            raise _broken(start)
        yield _Field(key >> 3, kind, start, value, at)


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Decode the variable-length number at *at*; return it, and the position after it."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    raise _broken(at)


def _broken(at: int) -> BadRequest:
    """Return the error for a message that cannot be parsed at the byte *at*."""
    return BadRequest(f"the message cannot be parsed: its field at byte {at} is broken off or of no known kind")


def _has_strings(message: Any) -> bool:
    """Tell whether an input has the datatype BYTES; the bound is more inputs than any model has."""
    return any(tensor.datatype == "BYTES" for tensor in islice(message.inputs, 1024))
