"""Long bodies: received straight into the memory where they are kept, one piece in each turn of the event loop.

Left to itself a loop reads on from a client that sends fast, uvloop 8 MiB at a time, and everybody else waits.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod

PIECE_BYTES = 64 * 1024


class Receiver(asyncio.Protocol, ABC):
    """The connection that a body is for."""

    @abstractmethod
    def count_received(self, count: int) -> None:
        """So many bytes of it have come."""

    @abstractmethod
    def take_room(self) -> None:
        """It is whole."""


class LongBody(asyncio.BufferedProtocol):
    """Is what a transport tells in place of a connection, from the first piece of a body to the last."""

    def __init__(self, connection: Receiver, transport: asyncio.Transport, room: memoryview, filled_bytes: int) -> None:
        self._connection, self._transport = connection, transport
        self._room, self._filled_bytes = room, filled_bytes
        transport.set_protocol(self)
        self._pause()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._room[self._filled_bytes : self._filled_bytes + PIECE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled_bytes += nbytes
        self._connection.count_received(nbytes)
        if self._filled_bytes < len(self._room):
            self._pause()
        else:
            self._transport.set_protocol(self._connection)
            self._connection.take_room()

    def _pause(self) -> None:
        """Let others have their turn."""
        self._transport.pause_reading()
        asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
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
