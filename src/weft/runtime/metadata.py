"""What a model file is, seen without loading it: its metadata, its suffix, and its kind as tools register them.

Metadata is read through the wire format of protocol buffers, stepping over the weights, so that nothing here imports
onnx. A kind of model is known by the suffix of its files (``suffix``) or by a key in the metadata of an ONNX file
(``metadata``); every other file is taken for an ordinary ONNX file. ``devices`` are the kinds of devices that run it:
a model that ``cpu`` runs goes there when a GPU cannot run it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol, overload

from weft.base.registry import Entry, registered

STITCHED_KEY = "weft.stitched"
"""Metadata key of a stitched file: JSON, its models and their tensors."""
STITCHED_VERSION = 1
"""Version of that JSON."""
FAMILY_KEY = "weft.family"
"""Metadata key: JSON, how the models of a stitched file share its weights."""
BODY_KEY = "weft.body"
"""Metadata key of models with one shared backbone: JSON, the steps that they are."""
EXITS_KEY = "weft.exits"
"""Metadata key: the outputs that are exits, shallow to deep, with commas between them."""
PROGRAM_SUFFIX = ".pt2"
"""Suffix of the files that ``torch.export.save`` writes."""
ONNX = "onnx"
"""The kind of ordinary ONNX files."""
ONNX_SUFFIX = ".onnx"
CPU = "cpu"
"""The cores, as ``devices`` names them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_METADATA_FIELD = 14
"""Field of an ONNX model that holds its metadata, entries of two fields: ``_KEY`` and ``_VALUE``."""
_KEY, _VALUE = 1, 2
_MOST_BYTES = 1 << 24
"""Longest entry that is read; no tool writes keys or values near 16 MiB, so a longer entry is damage."""


def servable(name: str) -> bool:
    """Whether a model may have this name on a server, where the name is a part of a URL and of paths."""
    return _NAME.fullmatch(name) is not None and ".." not in name


# Kinds of models


def kind_of(path: Path, device: str) -> Entry:
    """The kind of a model file, of the kinds that *device* (``cpu``, ``cuda``) runs; OSError if it cannot be read.

    Files other than ONNX have the kind with their suffix. An ONNX file has the kind whose key is in its metadata, else
    plain ONNX; so has a file whose suffix no kind has.
    """
    kinds = registered("model_kinds")  # ``details``: the table of a kind in its ``tool.toml``
    runnable = [kind for kind in kinds.values() if device in kind.details.get("devices", ())]
    by_suffix = [kind for kind in runnable if kind.details.get("suffix") == path.suffix]
    if path.suffix != ONNX_SUFFIX and by_suffix:
        return by_suffix[0]
    keys = metadata_keys(path) if path.is_file() else frozenset()
    return next((kind for kind in runnable if kind.details.get("metadata") in keys), kinds[ONNX])


def kind_without_cpu(path: Path) -> Entry | None:
    """The kind of a file, by its suffix, if its ``devices`` leave out the cores; None for files that the cores run."""
    kinds = (kind for kind in registered("model_kinds").values() if kind.details.get("suffix") == path.suffix)
    return next((kind for kind in kinds if CPU not in kind.details.get("devices", (CPU,))), None)


def suffixes() -> tuple[str, ...]:
    """The suffixes of model files, that of ONNX first."""
    return tuple(kind.details["suffix"] for kind in registered("model_kinds").values() if "suffix" in kind.details)


# Metadata of ONNX files


def metadata_value(data: Glance, key: str) -> str:
    """The value of a key in the metadata of an ONNX file, empty if there is none; IndexError: it is no ONNX file."""
    for entry in _entries(data):
        if _text(data, entry, _KEY) == key:
            return _text(data, entry, _VALUE)
    return ""


def metadata_keys(path: Path) -> frozenset[str]:
    """The keys in the metadata of a file, read without its weights; empty if it is no ONNX file."""
    with open(path, "rb") as file:
        data = Glance(file)
        try:
            return frozenset(_text(data, entry, _KEY) for entry in _entries(data))
        except IndexError:  # not a model, or truncated: loading it raises the error that users see
            return frozenset()


def _entries(data: Glance) -> Iterator[dict[int, tuple[int, int]]]:
    """Yield each metadata entry: its field (``_KEY``, ``_VALUE``) -> its first byte, and the byte behind its last."""
    for number, start, end in fields(data, 0, len(data)):
        if number == _METADATA_FIELD and end - start <= _MOST_BYTES:
            yield {part: (first, last) for part, first, last in fields(data, start, end)}


def _text(data: Glance, entry: dict[int, tuple[int, int]], part: int) -> str:
    """The text of a *part* of a metadata entry, ``_KEY`` or ``_VALUE``; empty if the entry lacks it."""
    first, last = entry.get(part, (0, 0))
    return data[first:last].decode("utf-8", "replace")


# The wire format of protocol buffers


class Bytes(Protocol):
    """Any sequence of bytes that has indices and slices."""

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...


class Glance:
    """An open file as bytes: indexing or slicing it reads only these bytes from the file.

    Not a mapped file: reading one that was truncated meanwhile would end the process by SIGBUS; here it is an
    IndexError.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __len__(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> bytes: ...
    def __getitem__(self, index: int | slice, /) -> int | bytes:
        first, last = (index, index + 1) if isinstance(index, int) else (index.start, index.stop)
        self._file.seek(first)
        data = self._file.read(last - first)
        return data[0] if isinstance(index, int) else data


def fields(data: Bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield the fields with a length (texts, messages) of the protobuf message in the bytes *start* to *end*.

    Each is its field number, its first byte and the byte behind its last; numbers are stepped over. IndexError where
    the format is broken.
    """
    while start < end:
        tag, start = _varint(data, start)
        wire_type = tag & 7
        if wire_type == 0:  # a number of variable length
            _, start = _varint(data, start)
        elif wire_type == 2:
            length, start = _varint(data, start)
            if start + length > end:
                raise IndexError("a field ends behind its message")
            yield tag >> 3, start, start + length
            start += length
        elif wire_type in (1, 5):  # a number of 64 or 32 bits
            start += 8 if wire_type == 1 else 4
        else:
            raise IndexError(f"no such kind of field: {wire_type}")


def _varint(data: Bytes, start: int) -> tuple[int, int]:
    """Decode a number of variable length that begins at *start*; returns it and the index of the byte behind it."""
    value = shift = 0
    while (byte := data[start]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        start += 1
        if shift > 63:
            raise IndexError("a number is too long")
    return value | byte << shift, start + 1
