"""Codes of any width, packed without gaps into bytes, and back.

The first code fills the low bits of the first byte, its own lowest bit first; the next one goes on where it ended. So
bit i of code k is bit (k n + i) mod 8 of byte (k n + i) // 8, n the bits of a code. The last byte is filled with zeros.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.base.errors import NumberError
from weft_tune.kernels.numbers import pack_bits, unpack_bits

MAX_BITS = 32

Bytes = npt.NDArray[np.uint8]
Codes = npt.NDArray[np.unsignedinteger]


def code_type(bits: int) -> np.dtype[np.unsignedinteger]:
    """The smallest unsigned type that holds codes of so many bits."""
    for kind in (np.uint8, np.uint16, np.uint32):
        if bits <= np.iinfo(kind).bits:
            return np.dtype(kind)
    return np.dtype(np.uint64)


def packed_bytes(count: int, bits: int) -> int:
    """How many bytes *count* codes take."""
    return (count * bits + 7) // 8


def pack(codes: npt.NDArray[np.integer], bits: int) -> Bytes:
    """The codes in order (C order, if the array has more dimensions than one), *bits* of each."""
    _check_bits(bits)
    flat = np.ascontiguousarray(codes).reshape(-1)
    if flat.dtype.kind not in "ui":
        raise NumberError(f"codes to pack are whole numbers, not {flat.dtype}; encode the values first")
    if flat.size and (int(flat.max()) >> bits or int(flat.min()) < 0):
        raise NumberError(f"codes of {bits} bits are 0 to {(1 << bits) - 1}, not {flat.min()} to {flat.max()}")
    packed = np.zeros(packed_bytes(flat.size, bits), np.uint8)
    pack_bits(flat.astype(np.uint32, copy=False), bits, packed)
    return packed


def unpack(data: bytes | bytearray | memoryview | Bytes, bits: int, count: int) -> Codes:
    """The first *count* codes of a packed stream, in the smallest unsigned type."""
    _check_bits(bits)
    stream = np.ascontiguousarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    if stream.dtype != np.uint8:
        raise NumberError(f"a packed stream is bytes, not {stream.dtype}; view it as uint8")
    if count < 0 or packed_bytes(count, bits) > stream.size:
        raise NumberError(f"{count} codes of {bits} bits do not lie in {stream.size} bytes; is the count right?")
    codes = np.empty(count, np.uint32)
    unpack_bits(stream.reshape(-1), bits, codes)
    return codes.astype(code_type(bits))


def _check_bits(bits: int) -> None:
    if not isinstance(bits, int) or not 1 <= bits <= MAX_BITS:
        raise NumberError(f"codes of {bits!r} bits cannot be packed; from 1 to {MAX_BITS} they can")
