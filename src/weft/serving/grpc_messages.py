"""Parsing of gRPC messages within limits: fields are counted before parsing, and raw tensors are not copied.

protobuf creates an object for every field, even an empty one, and holds the GIL meanwhile: 60 MB of empty inputs took
10 s and 45 times their size in memory. Therefore a message of more than ``QUICK_BYTES`` is scanned first. The scan
creates no objects of protobuf and ends after ``MAX_FIELDS`` fields. Raw contents are not parsed: they are views of the
message.
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
"""Messages up to this size are parsed without a scan: the worst case takes 3 ms and 3 MB (Neoverse-N1)."""
SMALL_BYTES = 1 << 20
"""Limit on messages of calls other than inference."""
MAX_FIELDS = 8192
"""Limit on the fields of a message, and of all its inputs and outputs together; elements of tensors do not count."""
MAX_SHAPE_BYTES = 1024
"""Limit on the encoded bytes of a shape: a dimension takes at most 10, and no tensor has more than 64 dimensions."""
MAX_NAME_BYTES = 4 * MAX_ID_CHARS
"""Limit on the bytes of an id, a model's name and its version."""

_VARINT, _I64, _LENGTH, _I32 = 0, 1, 2, 5
"""Wire types of protobuf; 3 and 4, groups, are no longer in use."""
_FIXED_BYTES = {_I64: 8, _I32: 4}

_Request = proto.CLASSES["ModelInferRequest"]


def _field_number(message: Any, name: str) -> int:
    """Return the number of the field *name* of a message class."""
    return int(message.DESCRIPTOR.fields_by_name[name].number)


_RAW_CONTENTS = _field_number(_Request, "raw_input_contents")
_NAME_FIELDS = {_field_number(_Request, name): name for name in ("model_name", "model_version", "id")}
_TENSOR_FIELDS = {
    _field_number(_Request, "inputs"): _field_number(_Request.InferInputTensor, "shape"),
    _field_number(_Request, "outputs"): None,
}
"""Number of a field with tensors -> the number of the shape in such a tensor; None: it has no shape."""


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
    """The position of a field in the bytes of a message."""

    number: int
    wire_type: int
    start: int
    """Of its key."""
    value_start: int
    """Of its value; of strings, bytes and messages after their length."""
    end: int


def read_infer(data: bytes, max_head_bytes: int) -> InferMessage:
    """Read a ``ModelInferRequest``; BadRequest if it cannot be parsed, TooLarge if it has too many fields.

    max_head_bytes: limit on all its bytes except raw contents.
    """
    if len(data) <= QUICK_BYTES:
        message = parse(_Request, data)
        raws = list(message.raw_input_contents)
        return InferMessage(data, message.model_name, message.model_version, message.id, message, raws)
    names, head, views = _split_request(data)
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
    _, head, raws = _split_request(data)
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
        for _ in _limit_fields(_scan_fields(data, 0, len(data)), kind.DESCRIPTOR, 0):
            continue  # the iteration only enforces the limit
    return parse(kind, data)


def _split_request(data: bytes) -> tuple[dict[str, str], bytes, list[memoryview]]:
    """Split a ``ModelInferRequest`` without parsing it.

    Returns the model's name and version and the request's id; the bytes of all fields other than raw contents, which
    are a message again; and the raw contents. TooLarge if it has too many fields.
    """
    view, names = memoryview(data), dict[str, str]()
    raws, head_parts, head_start, nested_fields = list[memoryview](), list[memoryview](), 0, 0
    for field in _limit_fields(_scan_fields(data, 0, len(data)), _Request.DESCRIPTOR, 0):
        if field.wire_type != _LENGTH:
            continue
        if field.number == _RAW_CONTENTS:
            raws.append(view[field.value_start : field.end])
            head_parts.append(view[head_start : field.start])
            head_start = field.end
        elif field.number in _TENSOR_FIELDS:
            nested_fields = _measure_tensor(data, field, nested_fields)
        elif field.number in _NAME_FIELDS:  # the last one counts, as for any parser
            names[_NAME_FIELDS[field.number]] = _decode_name(data, field)
    return names, b"".join([*head_parts, view[head_start:]]) if raws else data, raws


def _measure_tensor(data: bytes, tensor: _Field, fields_so_far: int) -> int:
    """Count the fields of an input or output, and return *fields_so_far* (those of earlier tensors) plus these."""
    shape = _TENSOR_FIELDS[tensor.number]
    fields = _scan_fields(data, tensor.value_start, tensor.end)
    for field in _limit_fields(fields, _Request.DESCRIPTOR.fields_by_number[tensor.number].message_type, fields_so_far):
        fields_so_far += 1
        if field.number == shape and field.end - field.value_start > MAX_SHAPE_BYTES:
            raise BadRequest(f"a shape of {field.end - field.value_start} bytes has more dimensions than any tensor")
    return fields_so_far


def _decode_name(data: bytes, field: _Field) -> str:
    """Decode an id or a name; BadRequest if it is too long."""
    if field.end - field.value_start > MAX_NAME_BYTES:
        raise BadRequest(
            f"{_NAME_FIELDS[field.number]} has {field.end - field.value_start} bytes; at most {MAX_NAME_BYTES} are read"
        )
    return data[field.value_start : field.end].decode(errors="replace")  # parsing refuses invalid UTF-8


def _limit_fields(fields: Iterator[_Field], descriptor: Any, count: int) -> Iterator[_Field]:
    """Yield the fields of a message; TooLarge as soon as these, plus *count* earlier ones, exceed ``MAX_FIELDS``.

    descriptor: of the message, for the names in the error.
    """
    for field in fields:
        count += 1
        if count > MAX_FIELDS:
            known = descriptor.fields_by_number.get(field.number)
            name = known.name if known else f"field {field.number}"
            raise TooLarge(f"the message has more than {MAX_FIELDS} fields, {name} of {descriptor.name} among them")
        yield field


def _scan_fields(data: bytes, position: int, end: int) -> Iterator[_Field]:
    """Yield the fields of the message in ``data[position:end]``; BadRequest if it is cut off or has groups (proto2)."""
    while position < end:
        start = position
        key, position = _varint(data, position, end)
        wire_type = key & 7  # the lowest three bits are the wire type, the others the number of the field
        value_start = position
        if wire_type == _LENGTH:
            size, value_start = _varint(data, position, end)
            position = value_start + size
        elif wire_type == _VARINT:
            _, position = _varint(data, position, end)
        elif wire_type in _FIXED_BYTES:
            position += _FIXED_BYTES[wire_type]
        else:
            raise _malformed(start)
        if position > end:
            raise _malformed(start)
        yield _Field(key >> 3, wire_type, start, value_start, position)


def _varint(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Decode the variable-length number at *position*; return it, and the position after it."""
    value = shift = 0
    while position < end and shift < 70:  # at most ten bytes, with seven bits each
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise _malformed(position)


def _malformed(position: int) -> BadRequest:
    """Return the error for a message that cannot be parsed at the byte *position*."""
    return BadRequest(f"the message cannot be parsed: its field at byte {position} is broken off or of no known kind")


def _has_strings(message: Any) -> bool:
    """Tell whether one of the first 1024 inputs, which is more than any model has, has the datatype BYTES."""
    return any(tensor.datatype == "BYTES" for tensor in islice(message.inputs, 1024))
