"""What clients go on sending once their last answer is written: thrown away, so that they come to read it.

Closing would reset the answer away from them. Left to itself a loop reads all that they can send, and everybody else
waits: uvloop takes 8 MiB of each at a time. So it is one client's turn at a time, with pauses, and nothing is copied.
"""

from __future__ import annotations

import asyncio
import socket

PAUSE_S = 0.001
"""From one turn to the next."""
PIECE_BYTES = 1 << 20
"""At most so much is thrown away in a turn."""
MOST_SILENT = 16
"""Clients that have sent nothing more cost next to nothing: so many are passed over in a turn."""
_VOID = bytearray(PIECE_BYTES)
_UNCOPIED: int = getattr(socket, "MSG_TRUNC", 0)
"""Tells Linux to throw away what it would copy; elsewhere it is copied into the void."""


class Lingering:
    """Transports of such clients, in turns."""

    def __init__(self) -> None:
        self._waiting: dict[asyncio.Transport, None] = {}
        self._turning = False

    def wait(self, transport: asyncio.Transport) -> None:
        """Take nothing more from its client until its turn comes."""
        if transport.is_closing():
            return
        transport.pause_reading()
        self._waiting[transport] = None
        if not self._turning:
            self._turn_later()

    def _turn_later(self) -> None:
        self._turning = bool(self._waiting)
        if self._turning:
            asyncio.get_running_loop().call_later(PAUSE_S, self._turn)

    def _turn(self) -> None:
        try:
            for transport in [*self._waiting][:MOST_SILENT]:
                del self._waiting[transport]
                if not transport.is_closing() and self._read_over(transport):
                    break
        finally:
            self._turn_later()

    def _read_over(self, transport: asyncio.Transport) -> bool:
        """Whether that took time."""
        if transport.get_extra_info("sslcontext") is not None:
            transport.resume_reading()  # under TLS bytes are not ours to take; what comes of them waits again
            return True
        try:
            more = thrown_away(transport.get_extra_info("socket"))
        except BlockingIOError:
            transport.resume_reading()  # so that the loop hears of more, and of the end
        except OSError:
            transport.abort()
        else:
            self.wait(transport) if more else transport.close()  # which may have to read its answer yet
            return True
        return False


def thrown_away(endpoint: socket.socket) -> int:
    """How many bytes a transport's socket had for nobody; 0 if its client says no more."""
    same = socket.socket(endpoint.family, endpoint.type, endpoint.proto, endpoint.fileno())
    try:
        same.setblocking(False)
        return same.recv_into(_VOID, PIECE_BYTES, _UNCOPIED)
    finally:
        same.detach()
