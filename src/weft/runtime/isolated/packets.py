"""Packets between a server and a worker: a head in JSON, and behind it the bytes of small tensors.

Nothing is unpickled. What comes from a worker is only ever numbers, texts and arrays of known types; reading a
malformed packet raises ``Garbled``.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import orjson

from weft.base.errors import reason_of
from weft.runtime.client_memory import Lender, LentTensor
from weft.runtime.tensors import DATATYPES, Array

INLINE_BYTES = 32 << 10
"""Tensors of a step with up to this many bytes travel in the packet; above, shared memory saves the copies."""

LARGEST_PACKET = 128 << 10
"""Bytes of a packet on the socket; longer packets travel in shared memory. Four must fit into the socket's buffer."""

LARGEST_HEAD = 16 << 20
"""Bytes of the longest head that is read; a worker that runs hostile models must not make the server allocate more."""

MOST_FILES = 18
"""Most file descriptors with a packet: of regions that are new to a worker, memory for tensors, and a long packet."""
DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}
_FILES_BYTES = socket.CMSG_SPACE(MOST_FILES * array.array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 0
_LENGTH_BYTES = 4
"""Bytes of the field at the start of a packet that holds the length of the head."""
_IN_FILE = (1 << 8 * _LENGTH_BYTES) - 1
"""Value of that field in a packet whose contents are in a file."""


ALIGNED = 64
"""Tensors begin at multiples of this many bytes, a cache line, so that kernels may use aligned loads."""

KEPT_BYTES = 16 << 20
"""Bytes up to which shared memory is kept for the next step; larger memory is unmapped after its step."""

LEAST_BYTES = 1 << 20
"""Bytes of the smallest shared memory; a smaller one would soon be replaced by a larger, which costs a mapping."""
LARGEST_BYTES = 1 << 40
"""Bytes of the largest shared memory that is accepted from the other side; a forged size must not exhaust addresses."""


class UnfitMemory(ValueError):
    """A file of the other side that cannot be shared memory: wrong size, or not sealed."""


def align(size: int) -> int:
    """Round *size* up to a multiple of ``ALIGNED``."""
    return (size + ALIGNED - 1) & -ALIGNED


class TensorMemory:
    """Shared memory: a mapped anonymous file, sealed so that neither side can truncate it under the other."""

    def __init__(self, file: int, size: int) -> None:
        self.size = size
        self.bytes: Any = np.frombuffer(mmap.mmap(file, size), np.uint8)

    def write(self, pieces: Iterable[tuple[int, Array]]) -> None:
        """Copy contiguous arrays to their offsets."""
        for offset, piece in pieces:
            self.bytes[offset : offset + piece.nbytes] = piece.reshape(-1).view(np.uint8)


def create_memory(needed_bytes: int, kept_bytes: int = KEPT_BYTES) -> tuple[TensorMemory, int]:
    """Create shared memory of at least *needed_bytes*; returns it with its file, which the caller sends and closes.

    Memory that will be kept for later steps (up to *kept_bytes*) is rounded up to a power of two, so that they fit.
    """
    rounded_bytes = max(LEAST_BYTES, 1 << (needed_bytes - 1).bit_length())
    size = rounded_bytes if needed_bytes <= kept_bytes else needed_bytes
    file = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return TensorMemory(file, size), file
    except BaseException:
        os.close(file)
        raise


def map_memory(file: int) -> TensorMemory:
    """Map memory of the other side and close its file; UnfitMemory if it could shrink: reads could end in SIGBUS."""
    try:
        size = os.fstat(file).st_size
        if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK or not 0 < size <= LARGEST_BYTES:
            raise UnfitMemory(f"a file of {size} bytes that may change its size")
        return TensorMemory(file, size)
    except OSError as error:
        raise UnfitMemory(reason_of(error)) from error
    finally:
        os.close(file)


class Garbled(Exception):
    """A malformed packet from the other side."""


class Packet(NamedTuple):
    """A received packet; *tensors* is valid until the next packet is received."""

    head: list[Any]  # the decoded JSON
    tensors: Any
    files: list[int]  # descriptors that came with it


class Line:
    """One end of a connection that preserves packet boundaries; any thread may send, only one at a time receive."""

    def __init__(self, end: socket.socket) -> None:
        """end: a socket of the type SOCK_SEQPACKET."""
        self._socket = end
        self._view = memoryview(bytearray(LARGEST_PACKET))  # of the received packet
        self._buffers = [self._view]

    @property
    def file(self) -> int:
        return self._socket.fileno()

    def send(self, head: Sequence[Any], pieces: Sequence[Any] = (), files: Sequence[int] = (), *, wait: bool) -> None:
        """Send a packet; OSError if the other side is gone, or without *wait* if its buffer is full.

        head: sent as JSON. pieces: bytes of tensors, in order. files: descriptors that the other side gets copies of.
        """
        text = orjson.dumps(head)
        packet = b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *pieces])
        if len(packet) <= LARGEST_PACKET:
            if files:
                self._send_files(packet, files, wait)
            else:
                self._socket.send(packet, 0 if wait else socket.MSG_DONTWAIT)
            return
        memory, file = create_memory(len(packet))
        try:
            memory.write([(0, np.frombuffer(packet, np.uint8))])
            reference = _IN_FILE.to_bytes(_LENGTH_BYTES, "little") + len(packet).to_bytes(8, "little")
            self._send_files(reference, [*files, file], wait)
        finally:
            os.close(file)

    def _send_files(self, packet: bytes, files: Sequence[int], wait: bool) -> None:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        self._socket.sendmsg([packet], ancillary, 0 if wait else socket.MSG_DONTWAIT)

    def receive(self, *, wait: bool = True) -> Packet:
        """The next packet; EOFError when the other side is gone, BlockingIOError without *wait* if there is none."""
        flags = 0 if wait else socket.MSG_DONTWAIT
        size, ancillary, _, _ = self._socket.recvmsg_into(self._buffers, _FILES_BYTES, flags)
        if not size:
            raise EOFError
        files = _descriptors(ancillary) if ancillary else []
        try:
            packet = self._view[:size]
            length = int.from_bytes(packet[:_LENGTH_BYTES], "little")
            if length > LARGEST_HEAD:  # ``_IN_FILE``, or malformed
                packet, length = _packet_in_file(packet, length, files)
            head = orjson.loads(packet[_LENGTH_BYTES : _LENGTH_BYTES + length])
            if not isinstance(head, list):
                raise ValueError("a packet without a list")
            return Packet(head, packet[_LENGTH_BYTES + length :], files)
        except (ValueError, TypeError, IndexError) as error:  # orjson's is a ValueError
            close_all(files)
            raise Garbled(str(error)) from error

    def close(self) -> None:
        self._socket.close()


def close_all(files: Iterable[int]) -> None:
    """Close files that came with a packet and are not needed."""
    for file in files:
        os.close(file)


def pair() -> tuple[Line, socket.socket]:
    """Create a connection: a line for this process, and the socket for the other, which the caller passes on."""
    own_end, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (own_end, other_end):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * LARGEST_PACKET)
    return Line(own_end), other_end


def _descriptors(ancillary: Sequence[tuple[int, int, bytes]]) -> list[int]:
    """The file descriptors in the ancillary data of a message."""
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)


def _packet_in_file(packet: memoryview, length: int, files: list[int]) -> tuple[memoryview, int]:
    """Read a packet whose contents are in the last of its *files*, and the length of its head.

    length: the first field of *packet*. ValueError if the head is too long.
    """
    if length == _IN_FILE:
        size = int.from_bytes(packet[_LENGTH_BYTES : _LENGTH_BYTES + 8], "little")
        packet = memoryview(map_memory(files.pop()).bytes)[:size]
        length = int.from_bytes(packet[:_LENGTH_BYTES], "little")
    if length > LARGEST_HEAD:
        raise ValueError(f"a head of {length} bytes")
    return packet, length


# Tensors


class TensorLayout:
    """The layout of the tensors of a packet: at which offset the bytes of each tensor are."""

    __slots__ = ("lenders", "pieces", "size")

    def __init__(self) -> None:
        self.pieces: list[tuple[int, Any]] = []
        """Offset and contiguous array of each tensor."""
        self.size = 0  # end of the last tensor, in bytes
        self.lenders: list[Lender] = []
        """The regions of lent tensors, whose bytes are not in the packet."""

    def add(self, piece: Any) -> int:
        """Add a contiguous array; returns its offset."""
        offset = align(self.size) if self.size else 0
        self.pieces.append((offset, piece))
        self.size = offset + piece.nbytes
        return offset

    def padded_pieces(self) -> list[Any]:
        """The pieces in order, with padding between them."""
        if len(self.pieces) == 1:
            return [self.pieces[0][1]]
        pieces, end = [], 0
        for offset, piece in self.pieces:
            if offset > end:
                pieces.append(bytes(offset - end))
            pieces.append(piece)
            end = offset + piece.nbytes
        return pieces


def describe(values: Mapping[str, Any], layout: TensorLayout) -> list[tuple[str, str, Sequence[int], Any, int]]:
    """Name, type, shape, offset and byte count of each tensor; its data is added to *layout*.

    The offset of a lent tensor is a pair: the number of its region, and the offset in the region.
    """
    descriptions: list[tuple[str, str, Sequence[int], Any, int]] = []
    for name, value in values.items():
        kind = DATATYPE_OF[value.dtype]
        if isinstance(value, LentTensor):
            layout.lenders.append(value.lender)
            descriptions.append((name, kind, value.shape, (value.lender.terms.number, value.offset), value.nbytes))
            continue
        piece = value if value.flags.c_contiguous else value.copy()
        if kind == "BYTES":
            piece = _encode_texts(value)
        descriptions.append((name, kind, value.shape, layout.add(piece), piece.nbytes))
    return descriptions


def restore(described: Any, source: Any, *, copied: bool) -> dict[str, Any]:
    """Restore tensors from their descriptions (``describe``) and the bytes of *source*; Garbled if they do not fit.

    copied: the arrays have memory of their own; otherwise they are views of *source*.
    """
    try:
        tensors, length = {}, len(source)
        for name, kind, shape, offset, size in described:
            if kind == "BYTES":
                tensors[name] = _restore_texts(shape, offset, size, source)
                continue
            tensor = np.ndarray(shape, DATATYPES[kind], source, offset)
            if size != tensor.nbytes or not 0 <= offset <= length - size:  # numpy does not refuse negative offsets
                raise ValueError(f"{kind} {shape} at {offset} of {length} bytes")
            tensors[name] = tensor.copy() if copied else tensor
        return tensors
    except (ValueError, TypeError, KeyError, OverflowError, MemoryError) as error:
        raise Garbled(f"no tensors: {error}") from error


def _restore_texts(shape: list[int], offset: int, size: int, source: Any) -> Array:
    """Restore a tensor of texts; ValueError if the description, which may be forged, does not fit *source*."""
    if not all(type(number) is int and number >= 0 for number in (offset, size, *shape)) or offset + size > len(source):
        raise ValueError(f"texts {shape} at {offset}, {size} bytes of {len(source)}")
    return np.array(_decode_texts(bytes(source[offset : offset + size]), prod(shape)), np.object_).reshape(shape)


def _encode_texts(values: Array) -> Array:
    """Encode strings as bytes: first all lengths (uint32), then all texts in UTF-8."""
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values.ravel().tolist()]
    lengths = np.array([len(text) for text in texts], np.uint32)
    return np.frombuffer(lengths.tobytes() + b"".join(texts), np.uint8)


def _decode_texts(data: bytes, count: int) -> list[bytes]:
    """The inverse of ``_encode_texts`` for *count* texts; ValueError if the lengths do not fit."""
    if len(data) < 4 * count:  # a length has 4 bytes
        raise ValueError(f"{count} texts in {len(data)} bytes")
    lengths = np.frombuffer(data, np.uint32, count).tolist() if count else []
    if 4 * count + sum(lengths) != len(data):
        raise ValueError(f"{count} texts of other lengths than {len(data)} bytes")
    texts, start = [], 4 * count
    for length in lengths:
        texts.append(data[start : start + length])
        start += length
    return texts
