"""Tensors in memory that a client shares, of which a device takes a copy itself: nobody copies them before.

The server hands on where such a tensor lies. A worker is told of its region once, with the first step that needs it,
and forgets it when the server does.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from weft.runtime.tensors import Array

HANDLE_BYTES = 64
"""So long is a handle of CUDA's shared memory."""


def read_fully(file: int, buffer: memoryview, offset: int) -> bool:
    """Fill *buffer* from a file, by calls, which nothing that its owner does to it can harm; False if it is shorter."""
    at = 0
    while at < len(buffer):
        count = os.preadv(file, [buffer[at:]], offset + at)
        if not count:
            return False
        at += count
    return True


class LendingTerms(NamedTuple):
    """How a device gets at a region: what a worker is told of it."""

    number: int
    """By which it is named; no other region of this process has it."""
    kind: str
    """``file``: it comes as an open one; ``cuda``: memory of a GPU, by a handle of its driver's."""
    start: int
    """Where in the file, or in the memory, it begins."""
    byte_size: int
    handle: str = ""
    """In hexadecimal digits."""
    device: int = 0
    """Which GPU has it."""


class Lender(Protocol):
    """A region that can be lent."""

    @property
    def terms(self) -> LendingTerms: ...

    @property
    def file(self) -> int | None:
        """The descriptor, where it is a file."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* with what lies at *offset*; a RequestError where that cannot be."""
        ...


class LentTensor:
    """A tensor that lies in a region; all that can be said of it here is its type and its shape."""

    __slots__ = ("dtype", "lender", "offset", "shape")

    def __init__(self, lender: Lender, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.lender, self.offset, self.shape, self.dtype = lender, offset, shape, dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Array:
        """A copy."""
        array: Array = np.empty(self.shape, self.dtype)
        self.lender.read_into(array.reshape(-1).view(np.uint8).data, self.offset)
        return array


class Borrowed(Protocol):
    """A region of a client's, as a worker has it."""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """A tensor that lies there, as the engine's models take it."""
        ...

    def write(self, data: bytes, offset: int) -> None:
        """Put bytes there; only where it is memory of a device."""
        ...

    def close(self) -> None:
        """Nobody needs it any more."""
        ...


Input = Array | LentTensor
"""An input of a request."""
