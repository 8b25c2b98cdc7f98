"""JSON with ``NaN``, ``Infinity`` and ``-Infinity``, which Triton and Python's own module read and write.

JSON itself has none of them: orjson refuses them, and writes null in their place. It does all the work where there are
none, so that nobody pays for them who does not use them.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import orjson

from weft.runtime.tensors import Array

QUICK_BYTES = 64 * 1024
"""JSON with such literals is read more slowly; beyond this it is large (``json_helpers``)."""

_LITERALS = (b"NaN", b"Infinity")
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def among(body: bytes | memoryview, end: int | None = None) -> bool:
    """Whether the JSON may hold such a literal; *end* is where it ends."""
    text = bytes(body[:end]) if isinstance(body, memoryview) else body
    return any(text.find(literal, 0, end) >= 0 for literal in _LITERALS)


def loads(data: bytes | memoryview) -> Any:
    """What JSON says; JSONDecodeError, as orjson words it, where it cannot be read."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        text = bytes(data)
        if not among(text):
            raise
        try:
            return _loads(text)
        except (ValueError, TypeError, RecursionError):
            raise error from None


def _loads(text: bytes) -> Any:
    """What orjson would say if it knew the literals; ValueError, TypeError or RecursionError where it would say no."""
    found = json.loads(text.decode(), parse_int=_whole, parse_float=_number)
    if _HALF_A_PAIR.search(text):
        orjson.dumps(found)  # half of a surrogate pair is no text
    return found


def _whole(text: str) -> int | float:
    value = int(text) if len(text) <= 20 else None
    return value if value is not None and -(2**63) <= value < 2**64 else _number(text)


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def spell_out(tensors: list[dict[str, Any]]) -> bool:
    """Write the data of those tensors out that are not finite throughout; whether there were any."""
    found = False
    for tensor in tensors:
        data = tensor.get("data")
        if isinstance(data, np.ndarray) and data.dtype.kind == "f" and not np.isfinite(data).all():
            tensor["data"] = orjson.Fragment(_spelled_out(data))
            found = True
    return found


def _spelled_out(flat: Array) -> bytes:
    """The elements of a flat array: orjson's null stands where a literal goes, in their order."""
    first, *rest = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY).split(b"null")
    odd = map(_literal, flat[~np.isfinite(flat)].tolist())
    return first + b"".join([literal + piece for literal, piece in zip(odd, rest, strict=True)])


def _literal(value: float) -> bytes:
    return b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"
