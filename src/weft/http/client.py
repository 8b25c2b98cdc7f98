"""A small HTTP/1.1 client on asyncio: whole prebuilt requests out, status and body in.

A ``Pool`` keeps connections alive and opens more where all are busy, up to a limit; one request is under
way on a connection at a time. What a request means is elsewhere: whoever sends one is a ``Taker`` and
hears what became of it.
"""

from __future__ import annotations

import asyncio
import re
import ssl
import sys
from collections import deque
from errno import ECONNREFUSED
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

from weft.base.errors import InputError, reason_of
from weft.http.answers import Answer, AnswerParser, NotHttp

CONNECT_TIMEOUT_S = 10.0
CALL_TIMEOUT_S = 30.0


class ServerAddress(NamedTuple):
    """Where a server is."""

    url: str
    host: str
    port: int
    prefix: str
    """What every path begins with: empty, or ``/some/folder``."""
    authority: str
    context: ssl.SSLContext | None


class Taker(Protocol):
    """Sends requests, and hears of each by its number exactly once: answered or broken."""

    @property
    def keep_bytes(self) -> int:
        """How much of a good answer's body it wants to see."""
        ...

    def request(self, number: int) -> bytes: ...

    def sent(self, number: int, now_s: float) -> None: ...

    def answered(self, number: int, answer: Answer, now_s: float) -> None: ...

    def broken(self, number: int, why: str, now_s: float) -> None: ...


def parse_url(url: str, context: ssl.SSLContext | None = None) -> ServerAddress:
    """The server that *url* names; https takes the system's certificates where there is no *context*."""
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise InputError(f"--url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InputError(f"--url {url!r} is not of the form http://127.0.0.1:8000")
    if parts.username is not None or not url.isprintable() or " " in url:
        raise InputError(f"--url {url!r} may hold no user name and no blanks; a key goes into --api-key")
    secure = parts.scheme == "https"
    return ServerAddress(
        url.rstrip("/"),
        parts.hostname,
        port or (443 if secure else 80),
        parts.path.rstrip("/"),
        parts.netloc,
        (context or ssl.create_default_context()) if secure else None,
    )


def request_bytes(
    target: ServerAddress,
    method: str,
    path: str,
    *,
    key: str | None = None,
    head: str = "",
    body: bytes | memoryview = b"",
) -> bytes:
    """A whole request; *head*: further header lines, each with its line end."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("--api-key holds characters that no HTTP header can carry")
    lines = f"{method} {target.prefix}/{path} HTTP/1.1\r\nHost: {target.authority}\r\n{head}"
    if key is not None:
        lines += f"Authorization: Bearer {key}\r\n"
    if method != "GET":
        lines += f"Content-Length: {len(body)}\r\n"
    return lines.encode() + b"\r\n" + body


class Connection(asyncio.Protocol):
    """One connection of a pool, and the request under way on it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = AnswerParser()
        self._time = pool.loop.time
        self._fault: str | None = None
        self.transport: asyncio.Transport
        self.taker: Taker | None = None
        self.number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, taker: Taker, number: int) -> None:
        self.taker, self.number = taker, number
        self._parser.keep_bytes = taker.keep_bytes
        taker.sent(number, self._time())
        self.transport.write(taker.request(number))

    def data_received(self, data: bytes) -> None:
        taker = self.taker
        if taker is None:  # nobody asked
            self.transport.abort()
            return
        try:
            answer = self._parser.feed(data)
        except NotHttp as problem:
            self._fault = f"the answer is not HTTP: {problem}"
            self.transport.abort()
            return
        if answer is None:
            return
        now_s, number, self.taker = self._time(), self.number, None
        # An answer that comes before the whole request is out leaves the rest of it on the line.
        if answer.reusable and not self.transport.get_write_buffer_size():
            self._pool.free(self)
        else:
            self.transport.abort()
        taker.answered(number, answer, now_s)

    def connection_lost(self, error: Exception | None) -> None:
        taker, self.taker = self.taker, None
        self._pool.gone(self)
        if taker is None:
            return
        answer = self._parser.end() if error is None and self._fault is None else None
        if answer is not None:
            taker.answered(self.number, answer, self._time())
        else:
            why = self._fault or f"the connection was lost: {error or 'closed by the server'}"
            taker.broken(self.number, why, self._time())


def unreachable(url: str, error: OSError, server: str) -> str:
    """The error message for a refused connection to *url*; *server*: the command that starts what should listen."""
    numbers = set(re.findall(r"\[Errno ([0-9]+)\]", str(error)))  # a host of several addresses has one of each
    if numbers == {str(ECONNREFUSED)}:
        return f"nothing listens at {url.removeprefix('http://')}; start `{server}` first"
    return f"{url}: cannot connect: {' '.join(reason_of(error).split()) or 'no answer in time'}"


class Pool:
    """Connections to one server; a request takes the one used last, or a new one, or waits in line."""

    def __init__(self, target: ServerAddress, limit: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.target = target
        self.limit = limit
        self.opened = 0
        """Connections ever made."""
        self.held_back = 0
        """Requests that found every connection busy and the limit reached."""
        self._idle: list[Connection] = []
        self._live: set[Connection] = set()
        self._waiting: deque[tuple[Taker, int]] = deque()
        self._opening = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Requests under way, or waiting for a connection."""
        return len(self._live) - len(self._idle) + len(self._waiting)

    async def open(self, count: int) -> None:
        """Have *count* connections at the least; raises OSError where the server cannot be reached."""
        while len(self._live) < min(count, self.limit):
            self.free(await self._connect())

    def send(self, taker: Taker, number: int) -> None:
        """Send a request now, or as soon as there is a connection."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.transport.is_closing():
                connection.send(taker, number)
                return
        self._waiting.append((taker, number))
        if len(self._live) + self._opening >= self.limit:
            self.held_back += 1
        self._grow()

    def free(self, connection: Connection) -> None:
        """A connection has nothing to do."""
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def gone(self, connection: Connection) -> None:
        """A connection has ended."""
        self._live.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._grow()

    def abandon(self, taker: Taker) -> None:
        """Nobody waits for what a taker has under way; it hears no more of it, and the server that it left."""
        self._waiting = deque(each for each in self._waiting if each[0] is not taker)
        for connection in [each for each in self._live if each.taker is taker]:
            connection.taker = None
            connection.transport.abort()

    def lose(self) -> None:
        """The server is not there any more: requests under way are broken."""
        for connection in list(self._live):
            connection.transport.abort()

    async def close(self) -> None:
        """End every connection at once; requests under way hear no more."""
        self._closed = True
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._live:
            connection.taker = None
            connection.transport.abort()
        until_s = self.loop.time() + 1
        while self._live and self.loop.time() < until_s:
            await asyncio.sleep(0)

    def _grow(self) -> None:
        while self._opening < len(self._waiting) and len(self._live) + self._opening < self.limit and not self._closed:
            self._opening += 1
            task = self.loop.create_task(self._open())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        """Open one connection for those that wait; where none can be opened, and none is left, tell the first."""
        try:
            connection = await self._connect()
        except OSError as error:
            self._opening -= 1
            if self._live or not self._waiting:
                return
            taker, number = self._waiting.popleft()
            taker.broken(number, f"cannot connect: {reason_of(error)}", self.loop.time())
            self._grow()
        else:
            self._opening -= 1
            self.free(connection)

    async def _connect(self) -> Connection:
        target = self.target
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await self.loop.create_connection(
                lambda: Connection(self), target.host, target.port, ssl=target.context
            )
        self.opened += 1
        self._live.add(connection)
        return connection


class _Call:
    """One request for whose whole answer somebody waits."""

    keep_bytes = sys.maxsize

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def request(self, number: int) -> bytes:
        return self._request

    def sent(self, number: int, now_s: float) -> None:
        """A request left; nobody asks when."""

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        if not self.future.done():
            self.future.set_result(answer)

    def broken(self, number: int, why: str, now_s: float) -> None:
        if not self.future.done():
            self.future.set_exception(OSError(why))


async def call(pool: Pool, request: bytes) -> Answer:
    """Send one request and wait for its answer; OSError where there is none, or none in time."""
    errand = _Call(request)
    pool.send(errand, 0)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await errand.future
