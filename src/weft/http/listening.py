"""Sockets that accept connections, and go on doing so when the limit of open files was reached.

asyncio's own listeners say nothing of that limit, or close what they listen on.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

logger = logging.getLogger("weft.http")

IN_A_ROW = 64
"""Connections accepted before others have their turn."""
PAUSE_S = 0.1
"""How long nothing is accepted when there is no file left for it."""
SAY_EVERY_S = 10.0

_SHORT = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Listener:
    """Listens on every address of a host; ``accepted`` gets the sockets, ``short`` hears that files are short."""

    def __init__(self, accepted: Callable[[socket.socket], None], short: Callable[[], None]) -> None:
        self._accepted, self._short = accepted, short
        self._sockets: list[socket.socket] = []
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        self._said_s = -SAY_EVERY_S
        self.paused = 0
        """How often files were short."""

    async def start(self, host: str, port: int, backlog: int) -> int:
        """Listen; returns the port of the first address. OSError where that cannot be."""
        self._loop = loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, protocol, _, address in dict.fromkeys(found):
                made = _made(family, protocol)
                if made is not None:
                    self._sockets.append(made)
                    made.bind(address)
                    made.listen(backlog)
            if not self._sockets:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        except BaseException:
            self.close()
            raise
        for each in self._sockets:
            loop.add_reader(each, self._accept, each)
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        for timer in self._waiting.values():
            timer.cancel()
        self._waiting.clear()
        while self._sockets:
            each = self._sockets.pop()
            self._loop.remove_reader(each)
            each.close()

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(IN_A_ROW):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it left before it was accepted
            except OSError as error:
                self._pause(listening, error)
                return
            connection.setblocking(False)
            with suppress(OSError):  # it may have left already
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._accepted(connection)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Leave those who wait where they are for a moment: they are still readable, and the loop would spin."""
        self.paused += 1
        self._say(error)
        self._loop.remove_reader(listening)
        self._waiting[listening] = self._loop.call_later(PAUSE_S, self._resume, listening)
        if error.errno in _SHORT:
            self._short()

    def _resume(self, listening: socket.socket) -> None:
        del self._waiting[listening]
        self._loop.add_reader(listening, self._accept, listening)

    def _say(self, error: OSError) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s < SAY_EVERY_S:
            return
        self._said_s = now_s
        if error.errno in _SHORT:
            logger.error(
                "no connection can be accepted: %s; raise the limit of open files (ulimit -n, LimitNOFILE) or lower "
                "max_connections; trying again every %g s", error.strerror, PAUSE_S,
            )  # fmt: skip
        else:
            logger.error("no connection can be accepted: %s; trying again every %g s", error, PAUSE_S)


def _made(family: int, protocol: int) -> socket.socket | None:
    """A socket to listen with; None where the system has no such addresses."""
    try:
        made = socket.socket(family, socket.SOCK_STREAM, protocol)
    except OSError:
        return None
    if os.name == "posix":
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.setblocking(False)
    return made
