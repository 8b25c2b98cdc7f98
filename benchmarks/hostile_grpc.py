"""gRPC messages that cost a parser most for their size, by the fields that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterator

MODEL = b"wide"
MESSAGE_BYTES = 60 << 20
NAME, ID, PARAMETERS, INPUTS, OUTPUTS, RAW = 1, 3, 4, 5, 6, 7
"""Fields of a ``ModelInferRequest``."""
TENSOR_NAME, SHAPE, TENSOR_PARAMETERS, CONTENTS = 1, 3, 4, 5
"""Fields of one of its inputs."""
BOOLS, INTS, FLOATS, STRINGS = 1, 2, 6, 8
"""Fields of typed contents."""


def field(number: int, value: bytes = b"") -> bytes:
    """A field that says how long it is."""
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


def _input(*fields: bytes) -> bytes:
    return field(INPUTS, b"".join(fields))


def _typed(piece: bytes, size: int) -> bytes:
    """An input with typed contents of that piece again and again."""
    return _input(field(TENSOR_NAME, b"x"), field(2, b"FP32"), field(CONTENTS, _filled(piece, size)))


def _filled(piece: bytes, size: int) -> bytes:
    return piece * (size // len(piece))


KINDS: dict[str, Callable[[int], bytes]] = {
    "empty raw contents": lambda size: _filled(field(RAW), size),
    "empty inputs": lambda size: _filled(field(INPUTS), size),
    "empty outputs": lambda size: _filled(field(OUTPUTS), size),
    "empty parameters": lambda size: _filled(field(PARAMETERS), size),
    "parameters": lambda size: b"".join(field(PARAMETERS, field(1, b"%d" % n)) for n in range(size // 14)),
    "unknown fields": lambda size: _filled(field(99), size),
    "inputs with a name": lambda size: _filled(_input(field(TENSOR_NAME, b"x")), size),
    "an input of many names": lambda size: _input(_filled(field(TENSOR_NAME), size)),
    "an input of many parameters": lambda size: _input(_filled(field(TENSOR_PARAMETERS), size)),
    "an input of many contents": lambda size: _input(_filled(field(CONTENTS), size)),
    "a shape one by one": lambda size: _input(_filled(b"\x18\x01", size)),
    "a shape": lambda size: _input(field(SHAPE, b"\x01" * size)),
    "strings": lambda size: _typed(field(STRINGS), size),
    "bools one by one": lambda size: _typed(b"\x08\x01", size),
    "integers one by one": lambda size: _typed(b"\x10\x01", size),
    "floats": lambda size: _typed(field(FLOATS, bytes(size // 4 * 4)), size + 8),
    "an id": lambda size: field(ID, b"a" * size),
    "raw contents of no shape": lambda size: _input(field(TENSOR_NAME, b"x")) + field(RAW, bytes(size)),
    "zero bytes": bytes,
}


def messages(size: int = MESSAGE_BYTES) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Kinds of messages for ever, each made when it is sent, as together they would fill the memory."""
    while True:
        for name, fill in KINDS.items():
            yield name, lambda fill=fill: field(NAME, MODEL) + fill(size)  # type: ignore[misc]
