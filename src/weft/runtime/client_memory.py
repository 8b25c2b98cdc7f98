"""Lent memory: inputs and outputs in memory that a client shares, which the device itself reads and writes.

The server passes on where such a tensor is: in which *region*, a piece of memory that the client registered. A worker
opens a region with the first step that needs it, and closes it when the server does.
"""

from __future__ import annotations

import os
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np

from weft.runtime.tensors import Array

HANDLE_BYTES = 64
"""Length of a handle of CUDA's shared memory (``cudaIpcMemHandle_t``)."""
LENT_FROM_BYTES = 128 * 1024
"""Tensors in files from this size on are lent to a device. The driver may copy shorter ones on a core through mapped
memory, which ends the process with SIGBUS if the client has truncated the region."""


def read_fully(file: int, buffer: memoryview, offset: int) -> bool:
    """Fill *buffer* from an open file (a descriptor), beginning at *offset*; False if the file is shorter.

    Read by system calls, not mapped: a client that truncates a mapped file would end this process by SIGBUS.
    """
    filled = 0
    while filled < len(buffer):
        count = os.preadv(file, [buffer[filled:]], offset + filled)
        if not count:
            return False
        filled += count
    return True


class LendingTerms(NamedTuple):
    """What a worker needs to open a client's region of memory."""

    number: int
    """Its number, unique in the server's process."""
    kind: str
    """``file``: passed as an open file; ``cuda``: memory of a GPU, by a handle of its driver."""
    start: int
    """Its offset in the file, or in the memory."""
    byte_size: int
    handle: str = ""
    """The handle in hexadecimal digits."""
    device: int = 0
    """The GPU that has it."""


class Lender(Protocol):
    """A region of a client's memory that can be lent."""

    @property
    def terms(self) -> LendingTerms: ...

    @property
    def file(self) -> int | None:
        """The descriptor of a region that is a file; None for other regions."""
        ...

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill *buffer* with the bytes at *offset*; ``RequestError`` where that is impossible."""
        ...


class LentTensor:
    """A tensor in a client's region; its data is not in this process until ``read``."""

    __slots__ = ("dtype", "lender", "offset", "shape")

    def __init__(self, lender: Lender, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        """lender: its region. offset: in bytes."""
        self.lender, self.offset, self.shape, self.dtype = lender, offset, shape, dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Array:
        """Copy the tensor into an array; ``RequestError`` where that is impossible."""
        array: Array = np.empty(self.shape, self.dtype)
        self.lender.read_into(array.reshape(-1).view(np.uint8).data, self.offset)
        return array


class LentPart(NamedTuple):
    """A part of a client's region into which an output is to be written."""

    lender: Lender
    offset: int
    byte_size: int
    """Most bytes of the output."""


class Borrowed(Protocol):
    """A client's region, opened in a worker."""

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> Any:
        """The tensor at *offset* (bytes) of the region, in the form that the engine's models take."""
        ...

    def target(self, offset: int, byte_size: int) -> Any:
        """A part of the region, in the form that the engine's models write outputs to; BadRequest if there is none."""
        ...

    def write(self, data: bytes, offset: int) -> None:
        """Write bytes into the region; only if it is memory of a device."""
        ...

    def close(self) -> None:
        """Release the region."""
        ...


Input = Array | LentTensor
"""An input of a request."""
