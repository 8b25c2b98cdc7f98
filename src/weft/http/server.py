"""A small HTTP/1.1 server: one event loop, one protocol object per connection, no coroutine per request.

- ``HttpServer`` listens, and sweeps its connections (``connections``) for timeouts; ``ClientLimits`` bounds their cost.
- A gate judges a request by its head, before a byte of its body is kept.
- ``HttpExchange`` (``messages``) is one request with its reply function, which may be called later.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate
from typing import TYPE_CHECKING

from weft.http import connections
from weft.http.connections import AccessLog, ConnectionTable, ServerConnection
from weft.http.connections import Gate as Gate
from weft.http.connections import Handler as Handler
from weft.http.limits import ByteBudget
from weft.http.limits import ClientLimits as ClientLimits

if TYPE_CHECKING:
    import ssl as tls

logger = logging.getLogger("weft.http")

IN_A_ROW = 64
"""Connections accepted before other events of the loop have their turn."""
PAUSE_S = 0.1
"""Pause of accepting when no file descriptor is left; the socket stays readable, and the loop would spin."""
SAY_EVERY_S = 10.0
"""Shortest time between two log lines about failed accepts."""

_NO_RESOURCES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class HttpServer(ConnectionTable):
    """Listens, and calls *handler* for each request in the thread of the event loop.

    log: called for every answer, also for refusals before the handler; method and path are empty if unknown.
    answers: counts the answers by status. gate: admits or refuses requests by their heads. budget: bodies count towards
    it until they are answered. vital: paths that are served even when all connections are taken.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ClientLimits = ClientLimits(),  # noqa: B008  # frozen
        log: AccessLog | None = None,
        answers: Counter[int] | None = None,
        *,
        gate: Gate | None = None,
        budget: ByteBudget | None = None,
        vital: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(handler, limits, log, answers, gate, budget, vital)
        self._listeners: list[Listener] = []
        self._setups: dict[asyncio.Task[None], None] = {}
        """Connections that are being set up, the oldest first: a TLS handshake takes time, and may never end."""
        self._setup_tasks: set[asyncio.Task[None]] = set()
        """All such tasks, also those not begun or just cancelled: asyncio keeps only weak references to tasks."""
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Open connections, without those that were refused and those of the reserve."""
        return len(self._connections)

    @property
    def unread(self) -> int:
        """Connections whose clients have not read all that was written for them."""
        return sum(1 for connection in self._all() if connection.unread)

    async def start(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Listen, and return the port, which the system chooses if *port* is 0; *ssl*: for TLS.

        May be called for several addresses. OSError if an address cannot be bound.
        """
        listener = Listener(lambda accepted: self._start_connection(accepted, ssl), self._free_descriptor)
        bound_port = await listener.start(host, port, min(self.limits.connections, 1024))
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()
        return bound_port

    def _start_connection(self, accepted: socket.socket, ssl: tls.SSLContext | None) -> None:
        """Set up an accepted connection in a task."""
        task = asyncio.get_running_loop().create_task(self._connect(accepted, ssl))
        self._setup_tasks.add(task)
        task.add_done_callback(self._setup_tasks.discard)

    async def _connect(self, accepted: socket.socket, ssl: tls.SSLContext | None) -> None:
        """Create the transport of an accepted connection, after the TLS handshake if there is one."""
        task = asyncio.current_task()
        assert task is not None
        if ssl is not None and len(self._setups) >= self.limits.connections:
            self._cancel_oldest_setup()
        self._setups[task] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: ServerConnection(self),
                accepted,
                ssl=ssl,
                ssl_handshake_timeout=self.limits.read_s if ssl else None,
                ssl_shutdown_timeout=connections.LINGER_S if ssl else None,
            )
        except OSError as error:
            logger.debug("a connection was not made: %s", error)
        finally:
            self._setups.pop(task, None)

    def _cancel_oldest_setup(self) -> None:
        """Cancel the setup of a connection (its TLS handshake) that began first: it is the most likely to hang."""
        oldest = next(iter(self._setups))
        del self._setups[oldest]
        oldest.cancel()

    def _free_descriptor(self) -> None:
        """Free a file descriptor: close a connection that is being set up, or else an idle one."""
        if self._setups:
            self._cancel_oldest_setup()
        elif not self.slots.evict_idle():
            self.reserve.evict_idle()

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting, close idle connections and wait for the others; return whether all closed within the time."""
        self.draining = True
        self._stop_listening()
        for connection in self._open():
            connection.close_if_idle()
        if self._all():
            try:
                await asyncio.wait_for(self._empty.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """Stop at once; open requests get the same callback as if their clients had disconnected."""
        self.draining = True
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._setups:
            task.cancel()
        for connection in self._all():
            connection.abort()

    def _stop_listening(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def _sweep(self) -> None:
        """Check the timeouts of all connections, at least once a second."""
        period_s = min(1.0, self.limits.idle_s, self.limits.read_s)
        self._sweeper = asyncio.get_running_loop().call_later(period_s, self._sweep)
        # the header Date has a resolution of seconds, so it is enough to format it in every sweep
        self.signature = f"Server: weft\r\nDate: {formatdate(usegmt=True)}\r\n".encode()
        now_s = time.monotonic()
        for connection in self._all():
            connection.sweep(now_s)


class Listener:
    """Listening sockets on every address of a host, which survive the limit of open files.

    asyncio's own listeners do not report that limit, or close the listening socket. on_accept: called with every
    accepted socket. free_descriptor: called to free a file descriptor when none is left for another connection.
    """

    def __init__(self, on_accept: Callable[[socket.socket], None], free_descriptor: Callable[[], None]) -> None:
        self._on_accept, self._free_descriptor = on_accept, free_descriptor
        self._sockets: list[socket.socket] = []
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._logged_s = -SAY_EVERY_S
        self.paused = 0
        """Pauses so far."""

    async def start(self, host: str, port: int, backlog: int) -> int:
        """Listen, and return the port of the first address; OSError if an address cannot be bound."""
        self._loop = loop = asyncio.get_running_loop()
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, protocol, _, address in dict.fromkeys(infos):
                listening = _listening_socket(family, protocol)
                if listening is not None:
                    self._sockets.append(listening)
                    listening.bind(address)
                    listening.listen(backlog)
            if not self._sockets:
                raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
        except BaseException:
            self.close()
            raise
        for listening in self._sockets:
            loop.add_reader(listening, self._accept, listening)
        return int(self._sockets[0].getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        for timer in self._paused.values():
            timer.cancel()
        self._paused.clear()
        while self._sockets:
            listening = self._sockets.pop()
            self._loop.remove_reader(listening)
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        """Accept waiting connections, at most ``IN_A_ROW``."""
        for _ in range(IN_A_ROW):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # the client disconnected before it was accepted
            except OSError as error:
                self._pause(listening, error)
                return
            connection.setblocking(False)
            with suppress(OSError):  # the client may have disconnected already
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._on_accept(connection)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """Stop accepting on a socket for ``PAUSE_S`` after an error."""
        self.paused += 1
        self._log(error)
        self._loop.remove_reader(listening)
        self._paused[listening] = self._loop.call_later(PAUSE_S, self._resume, listening)
        if error.errno in _NO_RESOURCES:
            self._free_descriptor()

    def _resume(self, listening: socket.socket) -> None:
        del self._paused[listening]
        self._loop.add_reader(listening, self._accept, listening)

    def _log(self, error: OSError) -> None:
        """Log why no connection can be accepted, at most every ``SAY_EVERY_S``."""
        now_s = time.monotonic()
        if now_s - self._logged_s < SAY_EVERY_S:
            return
        self._logged_s = now_s
        advice = "; raise the limit of open files (ulimit -n, LimitNOFILE) or lower max_connections"
        why = f"{error.strerror}{advice}" if error.errno in _NO_RESOURCES else str(error)
        logger.error("no connection can be accepted: %s; trying again every %g s", why, PAUSE_S)


def _listening_socket(family: int, protocol: int) -> socket.socket | None:
    """Make a socket to listen with; None if the system lacks the address family."""
    try:
        listening = socket.socket(family, socket.SOCK_STREAM, protocol)
    except OSError:
        return None
    if os.name == "posix":
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:  # IPv4 has a socket of its own: getaddrinfo lists both
        listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listening.setblocking(False)
    return listening
