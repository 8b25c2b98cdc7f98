"""What files are known by: where a stitched ONNX file names its models, and how programs of torch end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from weft.runtime.wire_format import Glance, fields

STITCHED_KEY = "weft.stitched"
"""The key in a file's metadata; its value is JSON."""
STITCHED_VERSION = 1
"""Of what stands there."""
FAMILY_KEY = "weft.family"
"""Where it says how its models share the weights that are in it; JSON."""
BODY_KEY = "weft.body"
"""Where it says which steps its models are, of those with one body; JSON."""
EXITS_KEY = "weft.exits"
"""Where a file may name its exits, shallow to deep, with commas between them."""
PROGRAM_SUFFIX = ".pt2"
"""Of what ``torch.export.save`` writes."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


_METADATA_FIELD = 14
"""The field of an ONNX model that holds its metadata: entries with a key (1) and a value (2)."""
_MOST_BYTES = 1 << 24
"""More than any tool writes into a key or a value."""


def metadata_value(data: Glance, key: str) -> str:
    """The value of a key in the metadata of an ONNX file; empty where there is none. IndexError: it is no ONNX file."""
    for entry in _entries(data):
        if _text(data, entry, 1) == key:
            return _text(data, entry, 2)
    return ""


def metadata_keys(path: Path) -> frozenset[str]:
    """The keys in the metadata of an ONNX file, whose weights are stepped over; none where it is no ONNX file."""
    with open(path, "rb") as file:
        data = Glance(file)
        try:
            return frozenset(_text(data, entry, 1) for entry in _entries(data))
        except IndexError:  # not a model, or not written to its end, which loading it will tell
            return frozenset()


def _entries(data: Glance) -> Iterator[dict[int, tuple[int, int]]]:
    """Where the key and the value of each entry lie."""
    for number, start, end in fields(data, 0, len(data)):
        if number == _METADATA_FIELD and end - start <= _MOST_BYTES:
            yield {part: (first, last) for part, first, last in fields(data, start, end)}


def _text(data: Glance, entry: dict[int, tuple[int, int]], part: int) -> str:
    first, last = entry.get(part, (0, 0))
    return data[first:last].decode("utf-8", "replace")


def servable(name: str) -> bool:
    """Whether a model of that name can be asked for at a server: it is part of an address."""
    return _NAME.fullmatch(name) is not None and ".." not in name
