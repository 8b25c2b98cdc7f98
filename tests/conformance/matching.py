"""What an answer lacks of what is expected of it, in words.

Objects may have more keys than are expected, lists have as many elements. ``"<any>"`` is anything, ``"<absent>"``
nothing at all, ``"<text>"``, ``"<integer>"`` and ``"<number>"`` any of that kind, a text after ``~`` is a regular
expression, and ``{"<has>": [...]}`` is a list that has these elements among others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

MISSING = object()
SHOWN_CHARS = 80

_KINDS: dict[str, Callable[[Any], bool]] = {
    "<any>": lambda found: True,
    "<text>": lambda found: isinstance(found, str),
    "<integer>": lambda found: isinstance(found, int) and not isinstance(found, bool),
    "<number>": lambda found: isinstance(found, int | float) and not isinstance(found, bool),
}


def differences(expected: Any, found: Any, where: str = "answer") -> list[str]:
    """Every difference, each with the place where it is."""
    if expected == "<absent>":
        return [] if found is MISSING else [f"{where} is there: {shown(found)}"]
    if found is MISSING:
        return [f"{where} is missing"]
    if isinstance(expected, str) and (expected in _KINDS or expected.startswith("~")):
        return [] if _fits(expected, found) else [f"{where}: {shown(found)} instead of {expected}"]
    if isinstance(expected, dict):
        return _of_object(expected, found, where)
    if isinstance(expected, list | tuple):
        return _of_list(expected, found, where)
    same = type(expected) is type(found) or {type(expected), type(found)} <= {int, float}
    if same and (expected == found or (expected != expected and found != found)):
        return []
    return [f"{where}: {shown(found)} instead of {shown(expected)}"]


def shown(value: Any) -> str:
    """A value on one short line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def _fits(expected: str, found: Any) -> bool:
    if expected in _KINDS:
        return _KINDS[expected](found)
    return isinstance(found, str) and re.search(expected[1:], found) is not None


def _of_object(expected: dict[str, Any], found: Any, where: str) -> list[str]:
    if "<has>" in expected:
        listed = found if isinstance(found, list) else []
        lacking = [each for each in expected["<has>"] if not any(not differences(each, one) for one in listed)]
        return [f"{where} lacks {shown(each)}" for each in lacking]
    if not isinstance(found, dict):
        return [f"{where}: {shown(found)} instead of an object"]
    return [
        said
        for key, value in expected.items()
        for said in differences(value, found.get(key, MISSING), f"{where}.{key}")
    ]


def _of_list(expected: list[Any] | tuple[Any, ...], found: Any, where: str) -> list[str]:
    if not isinstance(found, list | tuple):
        return [f"{where}: {shown(found)} instead of a list"]
    if len(expected) != len(found):
        return [f"{where} has {len(found)} elements instead of {len(expected)}: {shown(found)}"]
    return [
        said
        for place, (one, other) in enumerate(zip(expected, found, strict=True))
        for said in differences(one, other, f"{where}[{place}]")
    ]
