"""The stop table: shared memory through which the server ends the steps of a worker's device between two segments.

Every step of a gated model has a slot, a number that is 0 until the server stores 1. The device of the worker reads it
at every gate. So a step is stopped without a message, and while the worker does something else.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading

import numpy as np

from weft.base.errors import reason_of
from weft.runtime.isolated.packets import UnfitMemory
from weft.runtime.tensors import Array

SLOTS = 4096
"""Slots of a table, one for each step under way; slot 0 is never used."""
_BYTES = SLOTS * np.dtype(np.uint32).itemsize
_SEAL_FUTURE_WRITE = 0x10
"""Linux's F_SEAL_FUTURE_WRITE, which Python does not name: no further mapping can be written to."""


class StopTable:
    """The server's side of the table of one worker."""

    def __init__(self) -> None:
        self.file = os.memfd_create("weft stops", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The file for the worker, which can map it only for reading; the caller closes it when it was sent."""
        try:
            os.ftruncate(self.file, _BYTES)
            self._stops = np.frombuffer(mmap.mmap(self.file, _BYTES), np.uint32)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, seals)
        except BaseException:  # such as a kernel before 5.1, which cannot seal it
            os.close(self.file)
            raise
        self._free = list(range(SLOTS - 1, 0, -1))
        self._lock = threading.Lock()  # guards _free: steps start and end on several threads

    def take(self) -> int:
        """Reserve a slot for a step; 0 if none is free, and then it is never stopped."""
        with self._lock:
            slot = self._free.pop() if self._free else 0
        self._stops[slot] = 0
        return slot

    def stop(self, slot: int) -> None:
        """End the step of a slot at its next gate."""
        self._stops[slot] = 1

    def release(self, slot: int) -> None:
        """Free the slot of a step that has ended."""
        with self._lock:
            self._free.append(slot)


def map_stops(file: int) -> Array:
    """Map the table of the server for reading, and close its file; the array cannot be written to."""
    try:
        return np.frombuffer(mmap.mmap(file, _BYTES, mmap.MAP_SHARED, mmap.PROT_READ), np.uint32)
    except (OSError, ValueError) as error:
        raise UnfitMemory(f"no stop table: {reason_of(error)}") from error
    finally:
        os.close(file)
