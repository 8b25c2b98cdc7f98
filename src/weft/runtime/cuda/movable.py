"""Memory of a GPU at constant addresses: captured graphs find their weights there again after an eviction.

The driver reserves addresses once. It maps memory behind them and unmaps it within a fraction of a millisecond, while
other kernels run.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch

from weft.runtime.cuda.borrowed import Exposed
from weft.runtime.cuda.captured import driver

_PINNED, _ON_DEVICE, _READ_AND_WRITE = 1, 1, 3
"""The driver's numbers for the kind of memory, its location and the access to it."""
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY of cuda.h


class _Location(ctypes.Structure):
    """The driver's ``CUmemLocation``."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The driver's ``CUmemAllocationProp``."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("attributes", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """The driver's ``CUmemAccessDesc``."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Range:
    """Reserved addresses of a GPU, with or without memory mapped to them."""

    def __init__(self, device: torch.device, byte_size: int) -> None:
        self._device, self._place = device, _Location(_ON_DEVICE, device.index)
        self._properties = _Properties(_PINNED, 0, self._place)
        granularity = ctypes.c_size_t(0)
        properties = ctypes.byref(self._properties)
        _check_result(driver().cuMemGetAllocationGranularity(ctypes.byref(granularity), properties, 0))
        self.byte_size = max(1, -(-byte_size // granularity.value)) * granularity.value  # rounded up
        self._size, self._memory, zero = ctypes.c_size_t(self.byte_size), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self.address, self.mapped = ctypes.c_uint64(0), False
        # The zeros: no wanted address, and no flags.
        _check_result(driver().cuMemAddressReserve(ctypes.byref(self.address), self._size, granularity, zero, zero))
        try:
            self.map_memory()
        except BaseException:
            self.close()
            raise

    def map_memory(self) -> None:
        """Allocate memory and map it to the addresses; ``MemoryError`` if there is too little."""
        access, zero = _Access(self._place, _READ_AND_WRITE), ctypes.c_uint64(0)
        _check_result(
            driver().cuMemCreate(ctypes.byref(self._memory), self._size, ctypes.byref(self._properties), zero)
        )
        try:
            _check_result(driver().cuMemMap(self.address, self._size, ctypes.c_size_t(0), self._memory, zero))
            self.mapped = True
            _check_result(driver().cuMemSetAccess(self.address, self._size, ctypes.byref(access), ctypes.c_size_t(1)))
        except BaseException:
            self.unmap_memory()
            raise

    def unmap_memory(self) -> None:
        """Unmap and free the memory."""
        was_mapped, self.mapped = self.mapped, False
        if was_mapped:
            _check_result(driver().cuMemUnmap(self.address, self._size))
        _check_result(driver().cuMemRelease(self._memory))

    def close(self) -> None:
        """Free memory and addresses; further calls do nothing."""
        if not self.address.value:
            return
        if self.mapped:
            torch.cuda.synchronize(self._device)
            self.unmap_memory()
        _check_result(driver().cuMemAddressFree(self.address, self._size))
        self.address = ctypes.c_uint64(0)


class GpuMovable:
    """Memory for tensors at constant addresses, which can be evicted; freed with the last tensor."""

    def __init__(
        self, device: torch.device, byte_size: int, inward: Any, types: Mapping[int, Any], *, kept: bool
    ) -> None:
        """Reserve addresses and map memory to them.

        inward: the stream on which contents are copied back. types: element types of ONNX -> of torch. kept: as for
        ``Device.movable``.
        """
        self._types, self._kept, self._copy, self._inward = types, kept, None, inward
        self._range = _Range(device, byte_size)
        self.byte_size = self._range.byte_size
        exposed = Exposed(self._range.address.value, self.byte_size)
        weakref.finalize(exposed, self._range.close).atexit = False  # at exit, the driver frees everything
        self._bytes = torch.as_tensor(exposed, device=device)

    def tensor(self, offset: int, shape: Sequence[int], element_type: int) -> Any:
        kind = self._types[element_type]
        size = prod(shape) * kind.itemsize
        return self._bytes[offset : offset + size].view(kind).reshape(tuple(shape))

    def evict(self) -> None:
        """Free the memory; contents that are kept are copied to the host the first time only, as they never change."""
        if not self._range.mapped:
            return
        if self._kept and self._copy is None:
            copy = torch.empty(self.byte_size, dtype=torch.uint8, pin_memory=True)
            copy.copy_(self._bytes)
            self._copy = copy
        self._inward.synchronize()  # ``restore`` may still be copying, if its step was stopped
        self._range.unmap_memory()

    def restore(self) -> None:
        """Map memory again and start to copy the contents back; later work of the calling thread waits for the copy."""
        if self._range.mapped:
            return
        self._range.map_memory()
        if self._copy is not None:
            with torch.cuda.stream(self._inward):
                self._bytes.copy_(self._copy, non_blocking=True)
            torch.cuda.current_stream().wait_stream(self._inward)

    def close(self) -> None:
        self._range.close()


def _check_result(result: int) -> None:
    """Raise an error for an error code of the driver."""
    if result == _OUT_OF_MEMORY:
        raise MemoryError("the GPU is out of memory")
    if result:
        raise RuntimeError(f"the driver cannot move memory (error {result})")
