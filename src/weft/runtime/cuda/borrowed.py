"""Regions of clients as a GPU sees them: files whose pages are registered with its driver, and memory of the GPU.

This process never accesses a mapped file, because it would be killed by SIGBUS if the client truncated it. The driver
keeps the pages for as long as the region is borrowed, and the GPU copies from them and to them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from math import prod
from typing import Any

import numpy as np
import torch

from weft.base.errors import BadRequest, reason_of
from weft.runtime.client_memory import HANDLE_BYTES, LENT_FROM_BYTES, LendingTerms
from weft.runtime.cuda.captured import driver
from weft.runtime.cuda.device import BorrowedFile, BorrowedPart, BorrowedTensor
from weft.runtime.tensors import Array

_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS of cuda.h


class RegisteredFile(BorrowedFile):
    """A client's region in a file, whose pages are registered with the driver."""

    def __init__(self, terms: LendingTerms, file: int, inward: Any) -> None:
        """Register the file; on failure, close it and raise BadRequest. *inward*: the stream that copies from it."""
        super().__init__(terms, file)
        self._inward = inward
        self._skipped = terms.start % mmap.ALLOCATIONGRANULARITY  # bytes before the region: mappings begin at a page
        size = self._skipped + terms.byte_size
        try:
            if os.fstat(file).st_size < terms.start + terms.byte_size:
                raise BadRequest("the region was cut off since it was registered; register it anew")
            self._bytes = np.frombuffer(mmap.mmap(file, size, offset=terms.start - self._skipped), np.uint8)
            failed = int(torch.cuda.cudart().cudaHostRegister(self._bytes.ctypes.data, size, 0))
            if failed:
                raise BadRequest(f"the region cannot be registered with the GPU's driver (error {failed})")
        except (OSError, ValueError) as error:
            super().close()
            raise BadRequest(f"the region cannot be mapped: {reason_of(error)}") from error
        except BadRequest:
            super().close()
            raise

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> BorrowedTensor:
        size = _check_region(offset, shape, dtype, self.byte_size)
        begin = self._skipped + offset
        source = torch.from_numpy(self._bytes[begin : begin + size])
        return BorrowedTensor(shape, np.dtype(dtype), source, lambda: self.read(offset, shape, dtype))

    def target(self, offset: int, byte_size: int) -> BorrowedPart:
        _check_region(offset, (byte_size,), np.uint8, self.byte_size)
        begin = self._skipped + offset
        return BorrowedPart(byte_size, torch.from_numpy(self._bytes[begin : begin + byte_size]), LENT_FROM_BYTES)

    def close(self) -> None:
        self._inward.synchronize()  # copies from the region may be under way
        torch.cuda.cudart().cudaHostUnregister(self._bytes.ctypes.data)
        super().close()


class IpcMemory:
    """Memory of the GPU that belongs to another process, opened by its handle."""

    def __init__(self, terms: LendingTerms, device: torch.device, inward: Any) -> None:
        """Open the memory that *terms* describe; *inward*: the stream that copies from it."""
        self.byte_size, self._address, self._inward = terms.byte_size, ctypes.c_uint64(0), inward
        torch.empty(1, device=device)  # gives this thread a context, which the driver needs
        handle = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*bytes.fromhex(terms.handle)))
        failed = driver().cuIpcOpenMemHandle_v2(ctypes.byref(self._address), handle, _LAZY_PEER_ACCESS)
        if failed:
            raise BadRequest(
                f"the handle of CUDA shared memory cannot be opened (error {failed}); it must come from another "
                "process on this machine that still has the memory"
            )
        self._check_size()
        with torch.inference_mode():
            self._bytes = torch.as_tensor(Exposed(self._address.value, self.byte_size), device=device)

    def _check_size(self) -> None:
        """Raise ``BadRequest`` if the region is declared larger than its memory."""
        begin, size = ctypes.c_uint64(0), ctypes.c_size_t(0)
        failed = driver().cuMemGetAddressRange_v2(ctypes.byref(begin), ctypes.byref(size), self._address)
        if not failed and self._address.value + self.byte_size > begin.value + size.value:
            driver().cuIpcCloseMemHandle(self._address)
            raise BadRequest(f"the region has {self.byte_size} bytes, and its memory on the GPU {size.value}")

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: Any) -> BorrowedTensor:
        size = _check_region(offset, shape, dtype, self.byte_size)
        source = self._bytes[offset : offset + size]

        def array() -> Array:
            host_array: Array = source.cpu().numpy().view(dtype).reshape(shape)
            return host_array

        return BorrowedTensor(shape, np.dtype(dtype), source, array)

    def target(self, offset: int, byte_size: int) -> BorrowedPart:
        _check_region(offset, (byte_size,), np.uint8, self.byte_size)
        return BorrowedPart(byte_size, self._bytes[offset : offset + byte_size])

    def write(self, data: bytes, offset: int) -> None:
        """Write bytes at *offset*, and wait until they are written."""
        _check_region(offset, (len(data),), np.uint8, self.byte_size)
        with torch.cuda.device(self._bytes.device), torch.inference_mode():
            self._bytes[offset : offset + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        self._inward.synchronize()  # copies from the region may be under way
        with torch.cuda.device(self._bytes.device):
            del self._bytes
            driver().cuIpcCloseMemHandle(self._address)


class _Handle(ctypes.Structure):
    """The driver's ``CUipcMemHandle``."""

    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class Exposed:
    """Memory at an address, in the form that torch takes without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def _check_region(offset: int, shape: tuple[int, ...], dtype: Any, byte_size: int) -> int:
    """The byte count of a tensor; ``BadRequest`` if it is not inside a region of *byte_size* bytes."""
    size = int(prod(shape) * np.dtype(dtype).itemsize)
    if not 0 <= offset <= byte_size - size:
        raise BadRequest(f"{size} bytes at {offset} lie beyond the region of {byte_size} bytes")
    return size
