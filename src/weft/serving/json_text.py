"""JSON as the server reads and writes it: with ``NaN`` and ``Infinity``, bounded in size, without duplicate keys.

Standard JSON has no ``NaN``, ``Infinity`` and ``-Infinity``, but Triton and Python's own module read and write them.
orjson refuses them, and writes null instead. JSON without these literals is left to orjson alone, so it costs no more.

A parser needs 20 to 40 times the size of small objects and lists in memory, so their number is bounded before parsing.
Of two values with the same key this parser keeps the last, others keep the first: a proxy on the way may have checked
another request than the one that is computed, so duplicate keys are refused.
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
"""JSON with such literals is parsed by Python's slower parser; beyond this size a helper does it (``json_helpers``)."""

_LITERALS = (b"NaN", b"Infinity")  # the second one also finds -Infinity
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def has_literals(body: bytes | memoryview, end: int | None = None) -> bool:
    """Tell whether JSON may contain ``NaN`` or ``Infinity``; *end*: length of the JSON in *body*, None for all."""
    text = bytes(body[:end]) if isinstance(body, memoryview) else body
    return any(text.find(literal, 0, end) >= 0 for literal in _LITERALS)


def loads(data: bytes | memoryview) -> Any:
    """Parse JSON, also with ``NaN`` and ``Infinity``; raises orjson's JSONDecodeError if it is invalid."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        text = bytes(data)
        if not has_literals(text):
            raise
        try:
            return _loads_with_literals(text)
        except (ValueError, TypeError, RecursionError):
            raise error from None


def _loads_with_literals(text: bytes) -> Any:
    """Parse JSON with Python's parser as orjson would, but with ``NaN`` and ``Infinity``.

    ValueError, TypeError or RecursionError if it is invalid.
    """
    value = json.loads(text.decode(), parse_int=_parse_whole, parse_float=_parse_float)
    if _SURROGATE_ESCAPE.search(text):
        orjson.dumps(value)  # raises for half of a surrogate pair, which Python's parser accepts
    return value


def _parse_whole(text: str) -> int | float:
    """Parse a whole number; as in orjson, a number beyond 64 bits becomes a float."""
    value = int(text) if len(text) <= 20 else None
    return value if value is not None and -(2**63) <= value < 2**64 else _parse_float(text)


def _parse_float(text: str) -> float:
    """Parse a float; ValueError if it is too large, which Python's parser would make infinite."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is too large")
    return value


def spell_out(tensors: list[dict[str, Any]]) -> bool:
    """Replace the data of tensors with non-finite elements by JSON text; return whether a tensor had such elements."""
    changed = False
    for tensor in tensors:
        data = tensor.get("data")
        if isinstance(data, np.ndarray) and data.dtype.kind == "f" and not np.isfinite(data).all():
            tensor["data"] = orjson.Fragment(_write_array(data))
            changed = True
    return changed


def _write_array(flat: Array) -> bytes:
    """Write a flat array as JSON: the nulls that orjson writes for non-finite elements are replaced by literals."""
    first, *pieces = orjson.dumps(flat, option=orjson.OPT_SERIALIZE_NUMPY).split(b"null")
    literals = map(_literal, flat[~np.isfinite(flat)].tolist())
    return first + b"".join([literal + piece for literal, piece in zip(literals, pieces, strict=True)])


def _literal(value: float) -> bytes:
    """Return the literal for a number that is not finite."""
    return b"NaN" if math.isnan(value) else b"Infinity" if value > 0 else b"-Infinity"


class Structure(NamedTuple):
    """The number of parts of a JSON text, by kind; ``commas`` stands for the elements of lists and objects."""

    objects: int
    lists: int
    keys: int
    strings: int
    """Including keys."""
    commas: int


LIMITS = Structure(objects=1 << 16, lists=1 << 20, keys=1 << 18, strings=1 << 20, commas=1 << 24)
"""Limits on what is parsed. A request has few tensors and parameters, which are objects; lists are rows of nested data.
A parser then needs at most about 1 GB: up to 60 bytes for a number, 72 for a short string, 240 for a small object.
Strings remain objects in the server: four million of them blocked its event loop for 0.3 s, a million for 0.05 s."""
UNCOUNTED_BYTES = 2 * LIMITS.objects
"""JSON up to this size cannot exceed a limit, since an empty object takes two bytes; it is not counted."""

_SHOWN_CHARS = 64
"""Characters of a client's text that an error message repeats; bounds the message."""
_NOT_COUNTED = bytes(set(range(256)) - set(b'{[:",'))
"""All bytes except those that ``_count_parts`` counts."""


def check_parts(text: bytes) -> None:
    """Refuse JSON with more parts than ``LIMITS``, which would need many times its size in memory.

    A quick count, which is never too low, clears most JSON; only above a limit are the parts counted exactly.
    """
    if len(text) <= UNCOUNTED_BYTES or not _exceeded_limits(_count_parts(text)):
        return
    if exceeded := _exceeded_limits(exact_structure(text)):
        raise TooLarge(f"the JSON has {', '.join(exceeded)}; send tensors in binary")


def _exceeded_limits(parts: Structure) -> list[str]:
    """Describe the counts that exceed ``LIMITS``; empty if none does."""
    kinds = zip(Structure._fields, parts, LIMITS, strict=True)
    return [f"{count} {kind}, more than the limit of {limit}" for kind, count, limit in kinds if count > limit]


def check_keys(text: bytes, keys: int) -> None:
    """Refuse JSON with a duplicate key in an object; *keys*: the number of keys after parsing.

    Every key has a colon, so an equal number of colons, which is quickly counted, proves that no key was dropped.
    """
    if text.count(b":") == keys or exact_structure(text).keys == keys:
        return
    key = _find_repeated_key(text)  # there may be none: the caller does not count keys in unknown objects
    if key is not None:
        raise BadRequest(f"the key {key[:_SHOWN_CHARS]!r} is given twice in one JSON object; send it once")


def own_keys(parsed: dict[str, Any]) -> int:
    """Count the keys of a parsed object and those of its member ``parameters``."""
    parameters = parsed.get("parameters")
    return len(parsed) + (len(parameters) if type(parameters) is dict else 0)


def exact_structure(text: bytes) -> Structure:
    """Count the parts of valid JSON, ignoring the contents of strings; meaningless for other text."""
    if b"\\" in text:  # without escaped backslashes, a backslash before a quotation mark escapes that mark
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    text = text.translate(None, _NOT_COUNTED)
    strings = text.count(b'"') // 2
    # beyond the limit the text is refused anyway, and splitting it would take much memory
    if strings <= LIMITS.strings:
        text = b"".join(text.split(b'"')[::2])  # every second piece is outside of strings
    return _count_parts(text)._replace(strings=strings)


def _count_parts(text: bytes) -> Structure:
    """Return an upper bound on the parts of JSON, quickly: characters within strings are counted, too."""
    return Structure(text.count(b"{"), text.count(b"["), text.count(b":"), text.count(b'"') // 2, text.count(b","))


def _find_repeated_key(text: bytes) -> str | None:
    """Return a duplicate key, None if there is none; the JSON is known to be valid and within the limits."""

    def check_object(pairs: list[tuple[str, Any]]) -> None:
        """Raise _Repeated if a key occurs twice; the parser calls this for every object."""
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Repeated(key)
            seen.add(key)

    try:
        json.loads(text, object_pairs_hook=check_object, parse_int=_ignore_number, parse_float=_ignore_number)
    except _Repeated as repeated:
        return repeated.key
    except RecursionError:
        raise BadRequest("the JSON is nested too deeply") from None
    return None


class _Repeated(Exception):
    """Ends the search for a duplicate key at the first one."""

    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _ignore_number(_: str) -> None:
    """Ignore a number where only keys matter: converting very long ones is slow, or refused by Python."""
