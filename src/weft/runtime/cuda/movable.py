"""Memory of a GPU at addresses that stay: what was captured finds its weights there again when they have come back.

The driver reserves addresses once. It puts memory behind them and takes it away again within a fraction of a
millisecond, while other kernels run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from weft.runtime.cuda.borrowed import Exposed
from weft.runtime.cuda.captured import driver

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
"""As the driver numbers a kind of memory, of place and of access."""
_OUT_OF_MEMORY = 2


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("attributes", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class GpuMovable:
    """A range of addresses of a GPU, with memory behind it or without."""

    def __init__(
        self, device: torch.device, byte_size: int, streams: tuple[Any, Any], types: Mapping[int, Any], *, kept: bool
    ) -> None:
        """streams: on which contents come back, and on which is computed. types: of torch, by ONNX's numbers.

        kept: contents come back as they were.
        """
        self._device, self._types, self._kept = device, types, kept
        self._inward, self._compute = streams
        self._place = _Location(_ON_DEVICE, device.index)
        self._properties = _Properties(_PINNED, 0, self._place)
        piece = ctypes.c_size_t(0)
        _checked(driver().cuMemGetAllocationGranularity(ctypes.byref(piece), ctypes.byref(self._properties), 0))
        self.byte_size = max(1, -(-byte_size // piece.value)) * piece.value
        self._size, self._memory = ctypes.c_size_t(self.byte_size), ctypes.c_uint64(0)
        self._address, none = ctypes.c_uint64(0), ctypes.c_uint64(0)
        _checked(driver().cuMemAddressReserve(ctypes.byref(self._address), self._size, piece, none, none))
        self._there, self._copy = False, None
        try:
            self._take()
        except BaseException:
            self.close()
            raise
        self._bytes = torch.as_tensor(Exposed(self._address.value, self.byte_size), device=device)

    def tensor(self, offset: int, shape: Sequence[int], element_type: int) -> Any:
        kind = self._types[element_type]
        size = prod(shape) * kind.itemsize
        return self._bytes[offset : offset + size].view(kind).reshape(tuple(shape))

    def leave(self) -> None:
        if not self._there:
            return
        if self._kept and self._copy is None:
            copy = torch.empty(self.byte_size, dtype=torch.uint8, pin_memory=True)
            copy.copy_(self._bytes)
            self._copy = copy
        self._give()

    def come_back(self) -> None:
        if self._there:
            return
        self._take()
        if self._copy is not None:
            with torch.cuda.stream(self._inward):
                self._bytes.copy_(self._copy, non_blocking=True)
            self._compute.wait_stream(self._inward)

    def close(self) -> None:
        if self._there:
            torch.cuda.synchronize(self._device)
            self._give()
        if self._address.value:
            _checked(driver().cuMemAddressFree(self._address, self._size))
            self._address = ctypes.c_uint64(0)

    def _take(self) -> None:
        """Have memory behind the addresses."""
        access = _Access(self._place, _READ_AND_WRITE)
        nothing = ctypes.c_uint64(0)
        _checked(driver().cuMemCreate(ctypes.byref(self._memory), self._size, ctypes.byref(self._properties), nothing))
        try:
            _checked(driver().cuMemMap(self._address, self._size, ctypes.c_size_t(0), self._memory, nothing))
            _checked(driver().cuMemSetAccess(self._address, self._size, ctypes.byref(access), ctypes.c_size_t(1)))
        except BaseException:
            driver().cuMemRelease(self._memory)
            raise
        self._there = True

    def _give(self) -> None:
        _checked(driver().cuMemUnmap(self._address, self._size))
        _checked(driver().cuMemRelease(self._memory))
        self._there = False


def _checked(result: int) -> None:
    if result == _OUT_OF_MEMORY:
        raise MemoryError("the GPU is out of memory")
    if result:
        raise RuntimeError(f"the driver cannot move memory (error {result})")
