"""The wire format of protocol buffers, as far as it takes to look into a large model without reading it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO, Protocol, overload


class Bytes(Protocol):
    """What can be looked into."""

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...


class Glance:
    """An open file, read only where one looks. Unlike a mapped one it may be cut short meanwhile: an IndexError."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def __len__(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    @overload
    def __getitem__(self, at: int, /) -> int: ...
    @overload
    def __getitem__(self, at: slice, /) -> bytes: ...
    def __getitem__(self, at: int | slice, /) -> int | bytes:
        first, last = (at, at + 1) if isinstance(at, int) else (at.start, at.stop)
        self._file.seek(first)
        found = self._file.read(last - first)
        return found[0] if isinstance(at, int) else found


def fields(data: Bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Number and place of every field with a length; what breaks the format is an IndexError."""
    while start < end:
        tag, start = _varint(data, start)
        kind = tag & 7
        if kind == 0:
            _, start = _varint(data, start)
        elif kind == 2:
            length, start = _varint(data, start)
            if start + length > end:
                raise IndexError("a field ends behind its message")
            yield tag >> 3, start, start + length
            start += length
        elif kind in (1, 5):
            start += 8 if kind == 1 else 4
        else:
            raise IndexError(f"no such kind of field: {kind}")


def _varint(data: Bytes, start: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := data[start]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift += 7
        start += 1
        if shift > 63:
            raise IndexError("a number is too long")
    return value | byte << shift, start + 1
