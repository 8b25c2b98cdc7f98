"""Strings on their way through ONNX Runtime, which takes and gives ``str`` and nothing that is not UTF-8.

A tensor of the protocol holds bytes, whatever they are. Bytes that are not UTF-8 travel as characters that nobody has a
meaning for, the last ones of Unicode (private use), one for each, and are bytes again at the other end. Such characters
themselves travel byte by byte too. A model that moves strings gives them back unchanged; one that compares them finds
them equal where they are.
"""

from __future__ import annotations

import numpy as np

from weft.runtime.tensors import Array

_FIRST, _LAST = 0x10FF80, 0x10FFFF
"""What stands for the bytes from 0x80 to 0xff."""
_LEAD = b"\xf4\x8f"
"""How those begin in UTF-8, and others before them."""

_STANDING_IN = {0xDC80 + at: _FIRST + at for at in range(128)}
_STOOD_FOR = {stand_in: escaped for escaped, stand_in in _STANDING_IN.items()}
_BYTE_BY_BYTE = {
    code: "".join(chr(_FIRST + byte - 0x80) for byte in chr(code).encode()) for code in range(_FIRST, _LAST + 1)
}


def to_text(values: Array) -> Array:
    """A tensor of bytes as ONNX Runtime takes it."""
    items = [_decoded(each) if isinstance(each, bytes) else str(each) for each in values.ravel().tolist()]
    return _tensor(items, values)


def to_bytes(values: Array) -> Array:
    """A tensor of ONNX Runtime's as the protocol gives it."""
    return _tensor([_encoded(str(each)) for each in values.ravel().tolist()], values)


def _tensor(items: list[str] | list[bytes], values: Array) -> Array:
    found = np.empty(len(items), np.object_)
    found[:] = items
    return found.reshape(values.shape)


def _decoded(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
    else:
        if not _looks_escaped(data):
            return text
    return text.translate(_BYTE_BY_BYTE).translate(_STANDING_IN)


def _encoded(text: str) -> bytes:
    data = text.encode()
    return text.translate(_STOOD_FOR).encode("utf-8", "surrogateescape") if _looks_escaped(data) else data


def _looks_escaped(data: bytes) -> bool:
    return _LEAD in data and (_LEAD + b"\xbe" in data or _LEAD + b"\xbf" in data)
