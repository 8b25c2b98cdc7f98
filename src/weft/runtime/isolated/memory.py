"""Memory that a server and a worker both see: anonymous files that are passed from one to the other.

A lane has such a memory for what goes to the worker and one for what comes back, and the next step may write over what
the last one left; one that takes steps ahead has as many of each as steps may be under way, in turn. Nothing lies in
``/dev/shm``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from weft.base.errors import reason_of
from weft.runtime.tensors import Array

ALIGNED = 64
"""Tensors begin at multiples of this."""

KEPT_BYTES = 16 << 20
"""A larger memory goes with the step it was made for."""

LEAST_BYTES = 1 << 20
LARGEST_BYTES = 1 << 40


class UnfitMemory(ValueError):
    """What the other side sent cannot be memory for tensors."""


def aligned(size: int) -> int:
    """The next place at which a tensor may begin."""
    return (size + ALIGNED - 1) & -ALIGNED


class TensorMemory:
    """A mapped file without a name, which neither side can make shorter under the other."""

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.bytes: Any = np.frombuffer(mmap.mmap(file, size), np.uint8)

    def write(self, pieces: Iterable[tuple[int, Array]]) -> None:
        """Put arrays, each in one piece, at their places."""
        for place, piece in pieces:
            self.bytes[place : place + piece.nbytes] = piece.reshape(-1).view(np.uint8)


def made(needed: int, kept_bytes: int = KEPT_BYTES) -> tuple[TensorMemory, int]:
    """New memory, and the file that the other side is to be given; whoever asked closes that."""
    size = max(LEAST_BYTES, 1 << (needed - 1).bit_length()) if needed <= kept_bytes else needed
    file = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return TensorMemory(file, size), file
    except BaseException:
        os.close(file)
        raise


def taken(file: int) -> TensorMemory:
    """Memory that the other side made; the file is closed. What could shrink is not mapped: that would be a SIGBUS."""
    try:
        size = os.fstat(file).st_size
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or not 0 < size <= LARGEST_BYTES:
            raise UnfitMemory(f"a file of {size} bytes that may change its size")
        return TensorMemory(file, size)
    except OSError as error:
        raise UnfitMemory(reason_of(error)) from error
    finally:
        os.close(file)
