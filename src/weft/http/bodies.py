"""Bodies of requests and answers that need care: long, slow and compressed ones.

An event loop reads on from a client that sends fast, uvloop 8 MiB at a time, while every other client waits. A long
body is therefore received straight into its memory, one piece in each turn of the loop (``LongBody``).

Bytes that a client still sends after its last answer was written are thrown away, so that it gets to reading the
answer: closing at once would reset the connection and lose it (``LingeringClose``).

A transfer may take any time if enough bytes pass in every window (``TransferProgress``).

A small compressed request may unpack to a large body, so it is unpacked in steps within a limit (``Unpacker``). Many
client libraries accept compressed answers without their users' knowledge. Short answers are therefore sent as they are,
others are compressed in threads, and of long ones a sample is compressed first: numbers that look like noise are sent
as they are, too.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import zlib
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

from weft.base.errors import BadRequest, TooLarge
from weft.http.messages import HttpResponse

ROOM_PIECE_BYTES = 64 * 1024
"""Bytes of a long body received in one turn of the loop; more would delay the other connections."""
PAUSE_S = 0.001
"""Time between two turns of lingering closes; shorter ones cost more turns, longer ones more buffered bytes."""
PIECE_BYTES = 1 << 20
"""Most bytes thrown away in a turn of the loop, so that a fast sender does not hold it up."""
MOST_SILENT = 16
"""Most clients without further bytes that are checked in a turn; a check is one system call."""
_DISCARD_BUFFER = bytearray(PIECE_BYTES)
_DISCARD_FLAG: int = getattr(socket, "MSG_TRUNC", 0)
"""Lets Linux discard bytes without copying them; other systems copy them into ``_DISCARD_BUFFER``."""

LEAST_BYTES = 4096
"""Shorter answers fit a few packets, and are sent as they are."""
SAMPLE_BYTES = 16 * 1024
"""Bytes of a long answer that are compressed first, to see whether it is worth it (about 1 ms of a thread)."""
WORTH = 0.9
"""Largest ratio of compressed to original size at which an answer is compressed."""
LEVEL = 1
"""Compression level of zlib: the fastest one, as the answer's latency matters more than its size."""
STEP_BYTES = 4 << 20
"""Most bytes unpacked in one step, after which the byte budget is asked for more."""
SLICE_BYTES = 1 << 20
"""Bytes passed to zlib at a time; zlib copies the part that it has not used in every step."""
ENCODINGS = {"gzip": 31, "deflate": 15}
"""Content encoding -> window bits by which zlib is set to it."""


# Long bodies


class Receiver(asyncio.Protocol, ABC):
    """The connection on which ``LongBody`` receives a body."""

    @abstractmethod
    def count_received(self, count: int) -> None:
        """Count received bytes of the body."""

    @abstractmethod
    def take_room(self) -> None:
        """Take over the transport again, with the complete body in memory."""


class LongBody(asyncio.BufferedProtocol):
    """The protocol of a transport in place of its connection, from the first piece of a long body to the last."""

    def __init__(self, connection: Receiver, transport: asyncio.Transport, room: memoryview, filled_bytes: int) -> None:
        """Become the protocol of *transport*; *room*: memory for the whole body, of which *filled_bytes* are here."""
        self._connection, self._transport = connection, transport
        self._room, self._filled_bytes = room, filled_bytes
        transport.set_protocol(self)
        self._pause()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room[self._filled_bytes : self._filled_bytes + ROOM_PIECE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Count received bytes; after the last one, give the transport back to the connection."""
        self._filled_bytes += nbytes
        self._connection.count_received(nbytes)
        if self._filled_bytes < len(self._room):
            self._pause()
        else:
            self._transport.set_protocol(self._connection)
            self._connection.take_room()

    def _pause(self) -> None:
        """Stop reading until the next turn of the loop."""
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._resume)

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()


# Bytes after the last answer


class LingeringClose:
    """Transports whose last answer is written and whose clients still send; one of them is read in each turn."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, None] = {}
        self._turn_scheduled = False

    def wait(self, transport: asyncio.Transport) -> None:
        """Stop reading from a transport until it is its turn; its received bytes are discarded then."""
        if transport.is_closing():
            return
        transport.pause_reading()
        self._waiting[transport] = None
        if not self._turn_scheduled:
            self._schedule_turn()

    def _schedule_turn(self) -> None:
        self._turn_scheduled = bool(self._waiting)
        if self._turn_scheduled:
            asyncio.get_running_loop().call_later(PAUSE_S, self._turn)

    def _turn(self) -> None:
        """Discard bytes of the first transport that has some; check at most ``MOST_SILENT`` transports."""
        try:
            for transport in [*self._waiting][:MOST_SILENT]:
                del self._waiting[transport]
                if not transport.is_closing() and self._discard(transport):
                    break
        finally:
            self._schedule_turn()

    def _discard(self, transport: asyncio.Transport) -> bool:
        """Discard received bytes of a transport; return whether there was something to read, which takes time."""
        if transport.get_extra_info("sslcontext") is not None:
            # TLS needs every byte: the transport reads them, and its protocol calls ``wait`` again
            transport.resume_reading()
            return True
        try:
            count = discard_received(transport.get_extra_info("socket"))
        except BlockingIOError:
            transport.resume_reading()  # silent for now: the loop reports further bytes, and the end
        except OSError:
            transport.abort()
        else:
            # close, not abort: the client may still have to read its answer
            self.wait(transport) if count else transport.close()
            return True
        return False


def discard_received(endpoint: socket.socket) -> int:
    """Discard received bytes of a transport's socket; return their number, 0 if the client has ended its side.

    BlockingIOError if nothing was received.
    """
    # asyncio hides the methods of the socket; a second object for the same descriptor has them
    duplicate = socket.socket(endpoint.family, endpoint.type, endpoint.proto, endpoint.fileno())
    try:
        duplicate.setblocking(False)
        return duplicate.recv_into(_DISCARD_BUFFER, PIECE_BYTES, _DISCARD_FLAG)
    finally:
        duplicate.detach()  # without closing the descriptor, which belongs to the transport


# Slow transfers


class TransferProgress:
    """The progress of one transfer, measured over successive windows of time."""

    __slots__ = ("_begin_bytes", "_begin_s", "_least_bytes", "_window_s")

    def __init__(self, window_s: float, bytes_per_s: float, now_s: float, start: int) -> None:
        """bytes_per_s: lowest rate, averaged over *window_s* seconds. start: total bytes that passed before *now_s*."""
        self._window_s, self._least_bytes = window_s, window_s * bytes_per_s
        self._begin_s, self._begin_bytes = now_s, start

    def stalled(self, now_s: float, passed: int) -> bool:
        """Tell whether too few bytes passed in the window that ended; False within a window. passed: total bytes."""
        if now_s - self._begin_s <= self._window_s:
            return False
        if passed - self._begin_bytes < self._least_bytes:
            return True
        self._begin_s, self._begin_bytes = now_s, passed
        return False


def kernel_unsent_bytes(endpoint: Any) -> int:
    """Return the bytes in the kernel's buffer of a socket that its peer has not acknowledged; 0 if unknown."""
    try:
        import fcntl
        import termios

        packed_count = fcntl.ioctl(endpoint.fileno(), termios.TIOCOUTQ, struct.pack("i", 0))
    except (ImportError, AttributeError, OSError, ValueError):
        return 0
    return max(0, int(struct.unpack("i", packed_count)[0]))


# Compressed bodies


class Unpacker:
    """Decompression of one body in steps, within a limit."""

    def __init__(self, body: bytes | memoryview, encoding: str, most_bytes: int) -> None:
        """encoding: one of ``ENCODINGS``. most_bytes: limit on the decompressed body."""
        self._decompressor = zlib.decompressobj(ENCODINGS[encoding])
        self._body, self._position, self._encoding = memoryview(body), 0, encoding
        self._rest = b""
        """Bytes passed to zlib and not used yet."""
        self._most_bytes, self._unpacked_bytes = most_bytes, 0

    def step(self) -> bytes:
        """Decompress the next piece; empty at the end. BadRequest for a damaged body, TooLarge beyond the limit."""
        while not self._decompressor.eof:
            data = self._rest or self._next_slice()
            try:
                piece = self._decompressor.decompress(data, STEP_BYTES)
            except zlib.error as error:
                raise BadRequest(f"the body is not {self._encoding}: {error}") from error
            self._rest = self._decompressor.unconsumed_tail
            if piece:
                self._unpacked_bytes += len(piece)
                if self._unpacked_bytes > self._most_bytes:
                    raise TooLarge(f"the unpacked body exceeds the limit of {self._most_bytes} bytes")
                return piece
            if not data and not self._decompressor.eof:
                raise BadRequest(f"the {self._encoding} body ends too early")
        return b""

    def _next_slice(self) -> memoryview:
        """Return the next bytes of the body to pass to zlib; empty at the end."""
        start, self._position = self._position, self._position + SLICE_BYTES
        return self._body[start : self._position]


def body_bytes(response: HttpResponse) -> int:
    """Return the length of an answer's body."""
    return len(response.body) if isinstance(response.body, bytes) else sum(map(len, response.body))


@lru_cache(maxsize=256)
def wanted_encoding(accepted: str) -> str:
    """Return the supported encoding that a header ``Accept-Encoding`` prefers; empty for an uncompressed answer."""
    weights: dict[str, float] = {}
    for entry in accepted.lower().split(","):
        name, _, parameter = entry.strip().partition(";")
        weights[name.strip()] = _weight(parameter)
    default_weight = weights.get("*", 0.0)
    best = max(ENCODINGS, key=lambda name: weights.get(name, default_weight))
    weight = weights.get(best, default_weight)
    return best if weight > 0 and weight >= weights.get("identity", 0.0) else ""


def _weight(text: str) -> float:
    """Parse the weight of an encoding, such as ``q=0.5``; 1 without a weight, 0 if it is malformed."""
    key, _, value = text.strip().partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def packed(response: HttpResponse, encoding: str) -> HttpResponse:
    """Compress an answer, or return it unchanged if that saves too little; on any thread."""
    parts = [response.body] if isinstance(response.body, bytes) else response.body
    # the largest part has a tensor, or is the whole body
    original_bytes, sample = body_bytes(response), max(parts, key=len)[:SAMPLE_BYTES]
    if original_bytes > SAMPLE_BYTES and len(zlib.compress(sample, LEVEL)) > WORTH * len(sample):
        return response
    compressor = zlib.compressobj(LEVEL, zlib.DEFLATED, ENCODINGS[encoding])
    body = b"".join([*map(compressor.compress, parts), compressor.flush()])
    if len(body) > WORTH * original_bytes:
        return response
    headers = (("Content-Encoding", encoding), ("Vary", "Accept-Encoding"))
    return response._replace(body=body, headers=(*response.headers, *headers))
