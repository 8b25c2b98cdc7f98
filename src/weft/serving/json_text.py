"""JSON as the server reads and writes it: ``NaN`` and ``Infinity``, a bound on its parts, and no key given twice.

JSON itself has no ``NaN``, ``Infinity`` and ``-Infinity``, which Triton and Python's own module read and write: orjson
refuses them, and writes null in their place. It does all the work where there are none, so that nobody pays for them
who does not use them.

A parser takes 20 to 40 times the bytes of small objects and lists in memory, so that their number is bounded before
anything is parsed. And it keeps the last of two values with one key, where another parser keeps the first: whoever sees
such a request on its way may have read another one than is computed, so it is refused.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NamedTuple

import numpy as np
import orjson

from weft.base.errors import BadRequest, TooLarge
from weft.runtime.tensors import Array

QUICK_BYTES = 64 * 1024
"""JSON with such literals is read more slowly; beyond this it is large (``json_helpers``)."""

_LITERALS = (b"NaN", b"Infinity")
_HALF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")


def has_literals(body: bytes | memoryview, end: int | None = None) -> bool:
    """Whether the JSON may hold such a literal; *end* is where it ends."""
    text = bytes(body[:end]) if isinstance(body, memoryview) else body
    return any(text.find(literal, 0, end) >= 0 for literal in _LITERALS)


def loads(data: bytes | memoryview) -> Any:
    """What JSON says; JSONDecodeError, as orjson words it, where it cannot be read."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        text = bytes(data)
        if not has_literals(text):
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


class Structure(NamedTuple):
    """How many parts JSON has, of each kind."""

    objects: int
    lists: int
    keys: int
    strings: int
    """Keys among them."""
    commas: int
    """One less than the elements of every list and object."""


LIMITS = Structure(objects=1 << 16, lists=1 << 20, keys=1 << 18, strings=1 << 20, commas=1 << 24)
"""What is read. A model has few tensors and parameters, which are objects; lists are rows of nested data. A reader then
takes at most about 1 GB beside the text: up to 60 bytes for a number, 72 for a short string, 240 for a small object.
Strings are objects in the server, too: four million of them held up its event loop for 0.3 s, a million for 0.05 s."""
UNCOUNTED_BYTES = 2 * LIMITS.objects
"""JSON up to this has no part too often: an empty object has two bytes."""

_SHOWN_CHARS = 64
_NOT_COUNTED = bytes(set(range(256)) - set(b'{[:",'))


def check_parts(text: bytes) -> None:
    """Refuse JSON of so many parts that reading it would take many times its size in memory."""
    if len(text) <= UNCOUNTED_BYTES or not _exceeded(_counted(text)):
        return
    if exceeded := _exceeded(exact_structure(text)):
        raise TooLarge(f"the JSON has {', '.join(exceeded)}; send tensors in binary")


def _exceeded(parts: Structure) -> list[str]:
    kinds = zip(Structure._fields, parts, LIMITS, strict=True)
    return [f"{count} {kind}, more than the limit of {most}" for kind, count, most in kinds if count > most]


def check_keys(text: bytes, keys: int) -> None:
    """Refuse JSON of which an object has a key twice; *keys*: how many there are where it was parsed.

    Every key has its colon. As many colons as keys, which is quickly seen, are proof that none was given twice.
    """
    if text.count(b":") == keys or exact_structure(text).keys == keys:
        return
    key = _repeated_key(text)  # there may still be none: objects that nobody knows were not counted by the caller
    if key is not None:
        raise BadRequest(f"the key {key[:_SHOWN_CHARS]!r} is given twice in one JSON object; send it once")


def own_keys(parsed: dict[str, Any]) -> int:
    """The keys of an object and of its parameters."""
    parameters = parsed.get("parameters")
    return len(parsed) + (len(parameters) if type(parameters) is dict else 0)


def exact_structure(text: bytes) -> Structure:
    """The parts of valid JSON, without what stands in strings; of other text, some numbers."""
    if b"\\" in text:  # only in strings; with pairs of them gone, one before a quotation mark belongs to it
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = text.translate(None, _NOT_COUNTED)
    strings = text.count(b'"') // 2
    if strings <= LIMITS.strings:  # more are too many, whatever they hold, and would be too many pieces here
        text = b"".join(text.split(b'"')[::2])
    return _counted(text)._replace(strings=strings)


def _counted(text: bytes) -> Structure:
    """Not less than the parts of JSON: what stands in strings is counted, too."""
    return Structure(text.count(b"{"), text.count(b"["), text.count(b":"), text.count(b'"') // 2, text.count(b","))


def _repeated_key(text: bytes) -> str | None:
    """A key that some object has twice; of JSON that was parsed before, and is within the limits."""

    def look(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Repeated(key)
            seen.add(key)

    try:
        json.loads(text, object_pairs_hook=look, parse_int=_nothing, parse_float=_nothing)
    except _Repeated as repeated:
        return repeated.key
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    return None


class _Repeated(Exception):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _nothing(_: str) -> None:
    """What a number is read as where only keys matter: digits without end would take long, or be refused."""
