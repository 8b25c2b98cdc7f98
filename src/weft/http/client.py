"""A small HTTP/1.1 client on asyncio: whole prebuilt requests out, status and body in.

A ``Pool`` keeps connections alive and opens more if all are busy, up to a limit; each connection carries one request at
a time. A ``Taker`` owns requests: it builds their bytes and gets the answers, or the reason why there is none.
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

CONNECT_TIMEOUT_S = 10.0
"""Longest time to open a connection; a server that is only slow under load accepts within a few seconds."""
CALL_TIMEOUT_S = 30.0
"""Longest time for the answer to one ``call``: metadata, statistics, health."""

MAX_HEAD_BYTES = 1 << 16
"""Longest head of an answer, or of a chunk, that is read; servers send a few hundred bytes."""
MAX_KEPT_BYTES = 1 << 16
"""Bytes of an error's body that are kept; the rest is read and dropped."""

_HEADERS = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection|inference-header-content-length)[ \t]*:[ \t]*([^\r\n]*)",
    re.IGNORECASE,
)
_STATUS_LINE = re.compile(rb"HTTP/1\.[0-9] [1-9][0-9][0-9](?: |\r|\Z)")


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes
    """Beginning of the body; of an answer with status 200 at most ``keep_bytes``."""
    reusable: bool
    """Whether the connection may carry another request."""
    json_bytes: int | None = None
    """Length of the JSON part before binary tensors; None without the header, -1 if the header is no number."""
    head: bytes = b""
    """Status line and headers."""


class NotHttp(ValueError):
    """The server's bytes are not an HTTP/1 answer."""


class AnswerParser:
    """Parser of answers that arrive in pieces of any size: a state machine whose state is its next parsing method."""

    __slots__ = (
        "_buffer", "_head_bytes", "_json_bytes", "_kept_pieces", "_left_bytes", "_reusable", "_room_bytes", "_state",
        "_status", "keep_bytes",
    )  # fmt: skip

    def __init__(self, *, keep_bytes: int = 0) -> None:
        self.keep_bytes = keep_bytes
        """Bytes of the body that are kept of an answer with status 200."""
        self._reset()

    def _reset(self) -> None:
        """Start with the head of the next answer."""
        self._buffer = b""
        self._kept_pieces: list[bytes] = []
        self._head_bytes = b""
        self._status = 0
        self._left_bytes = 0  # of the body or the chunk, still to be received
        self._room_bytes = 0  # of the body, still to be kept
        self._json_bytes: int | None = None
        self._reusable = True
        self._state = self._parse_head

    def feed(self, data: bytes) -> Answer | None:
        """Parse a piece; return the answer if it is complete, else None. NotHttp for bytes that are no HTTP/1 answer.

        Bytes after the answer make the connection not reusable.
        """
        return self._state(data)

    def end(self) -> Answer | None:
        """Return the answer if its body ends with the connection; None if the connection ended too early."""
        if self._state != self._parse_unsized_body:
            return None
        return self._finish_answer(b"")

    def _parse_head(self, data: bytes) -> Answer | None:
        """Collect the head up to the empty line; skip interim answers (status 1xx)."""
        if self._buffer:
            data = self._buffer + data
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(data) > MAX_HEAD_BYTES:
                raise NotHttp(f"its head is longer than {MAX_HEAD_BYTES} bytes")
            self._buffer = data
            return None
        self._buffer = b""
        self._interpret_head(data[:end])
        rest = data[end + 4 :]
        if 100 <= self._status < 200:  # an interim answer; the real one follows
            self._reset()
            return self._parse_head(rest) if rest else None
        if self._state == self._parse_sized_body and self._left_bytes == 0:
            return self._finish_answer(rest)
        return self._state(rest) if rest else None

    def _interpret_head(self, head: bytes) -> None:
        """Read status and headers, and choose the method that parses the body."""
        if not _STATUS_LINE.match(head):
            raise NotHttp(f"it begins with {head[:40]!r}")
        self._head_bytes, self._status = head, int(head[9:12])
        self._reusable = head[7:8] == b"1"  # HTTP/1.1 keeps connections open unless a header says otherwise
        self._room_bytes = MAX_KEPT_BYTES if self._status != 200 else self.keep_bytes
        lengths, self._state = set(), self._parse_unsized_body
        for name, value in _HEADERS.findall(head):
            key = name.lower()
            if key == b"content-length":
                lengths.add(value.strip())
            elif key == b"connection":
                self._reusable = b"close" not in value.lower()
            elif key == b"inference-header-content-length":
                self._json_bytes = _parse_number(value.strip())
            elif value.strip().lower() == b"chunked":
                self._state = self._parse_chunk_size
            else:
                raise NotHttp(f"its transfer encoding is {value[:40]!r}")
        if self._state == self._parse_chunk_size:
            return
        if self._status in (204, 304):
            self._left_bytes, self._state = 0, self._parse_sized_body
        elif lengths:
            self._left_bytes, self._state = _parse_length(lengths), self._parse_sized_body
        else:
            self._reusable = False

    def _parse_sized_body(self, data: bytes) -> Answer | None:
        """Parse a body whose length is known."""
        if len(data) < self._left_bytes:
            self._left_bytes -= len(data)
            self._keep(data)
            return None
        if self._room_bytes:
            self._keep(data[: self._left_bytes])
        return self._finish_answer(data[self._left_bytes :])

    def _parse_unsized_body(self, data: bytes) -> Answer | None:
        """Parse a body that ends with the connection."""
        self._keep(data)
        return None

    def _parse_chunk_size(self, data: bytes) -> Answer | None:
        """Parse the sizes of chunks, and all chunks that have arrived completely."""
        data = self._buffer + data
        self._buffer = b""
        while True:
            end = data.find(b"\r\n")
            if end < 0:
                if len(data) > MAX_HEAD_BYTES:
                    raise NotHttp("a chunk's head has no end")
                self._buffer = data
                return None
            text = data[:end].partition(b";")[0].strip(b" \t")
            if not re.fullmatch(rb"[0-9A-Fa-f]{1,15}", text):
                raise NotHttp(f"a chunk's length is {text[:40]!r}")
            size = int(text, 16)
            data = data[end + 2 :]
            if size == 0:
                self._state = self._parse_trailer
                return self._parse_trailer(data)
            self._left_bytes, self._state = size + 2, self._parse_chunk  # with the line end after it
            if len(data) < self._left_bytes:
                return self._parse_chunk(data)
            self._keep(data[:size])
            data, self._state = data[size + 2 :], self._parse_chunk_size

    def _parse_chunk(self, data: bytes) -> Answer | None:
        """Parse the rest of a chunk that arrived in pieces; its last two bytes are the line end."""
        if len(data) < self._left_bytes:
            self._keep(data[: max(0, self._left_bytes - 2)])
            self._left_bytes -= len(data)
            return None
        self._keep(data[: max(0, self._left_bytes - 2)])
        self._state = self._parse_chunk_size
        return self._parse_chunk_size(data[self._left_bytes :])

    def _parse_trailer(self, data: bytes) -> Answer | None:
        """Skip the trailer after the last chunk."""
        data = self._buffer + data
        if data.startswith(b"\r\n"):
            return self._finish_answer(data[2:])
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            return self._finish_answer(data[end + 4 :])
        if len(data) > MAX_HEAD_BYTES:
            raise NotHttp("its trailer has no end")
        self._buffer = data
        return None

    def _keep(self, data: bytes) -> None:
        """Keep bytes of the body as far as there is room; the others are dropped."""
        if self._room_bytes:
            self._kept_pieces.append(data[: self._room_bytes])
            self._room_bytes -= len(self._kept_pieces[-1])

    def _finish_answer(self, beyond: bytes) -> Answer:
        """Return the complete answer, and start with the next one; *beyond*: the bytes received after it."""
        answer = Answer(
            self._status, b"".join(self._kept_pieces), self._reusable and not beyond, self._json_bytes, self._head_bytes
        )
        self._reset()
        return answer


def _parse_length(values: set[bytes]) -> int:
    """Parse the values of Content-Length; NotHttp if they differ or are no numbers."""
    text = min(values)
    length = _parse_number(text)
    if len(values) > 1 or length < 0:
        raise NotHttp(f"its content length is {b', '.join(sorted(values))[:40]!r}")
    return length


def _parse_number(text: bytes) -> int:
    """Parse a whole number of at most 18 digits; -1 for other text."""
    return int(text) if text.isdigit() and len(text) <= 18 else -1


class ServerAddress(NamedTuple):
    """The address of a server."""

    url: str
    host: str
    port: int
    prefix: str
    """Prefix of every path: empty, or ``/some/folder``."""
    authority: str
    context: ssl.SSLContext | None


class Taker(Protocol):
    """The owner of requests, which it identifies by numbers; ``answered`` or ``broken`` is called once for each."""

    @property
    def keep_bytes(self) -> int:
        """Bytes of the body that are kept of an answer with status 200."""
        ...

    def request(self, number: int) -> bytes:
        """Return a request as bytes."""
        ...

    def sent(self, number: int, now_s: float) -> None:
        """Note that a request is written to a connection; called before ``request``."""
        ...

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        """Take the answer to a request."""
        ...

    def broken(self, number: int, why: str, now_s: float) -> None:
        """Note that a request has no answer because its connection failed."""
        ...


def parse_url(url: str, context: ssl.SSLContext | None = None) -> ServerAddress:
    """Parse the URL of a server; InputError if it is malformed. *context*: for https, by default the system's."""
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # raises for a host name that cannot be resolved
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
    """Return a whole request as bytes.

    path: without a leading slash. key: API key, None for none. head: further header lines with their line ends.
    """
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("--api-key holds characters that no HTTP header can carry")
    lines = f"{method} {target.prefix}/{path} HTTP/1.1\r\nHost: {target.authority}\r\n{head}"
    if key is not None:
        lines += f"Authorization: Bearer {key}\r\n"
    if method != "GET":
        lines += f"Content-Length: {len(body)}\r\n"
    return lines.encode() + b"\r\n" + body


class Connection(asyncio.Protocol):
    """One connection of a pool, and the request on it."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = AnswerParser()
        self._time = pool.loop.time
        self._fault: str | None = None  # why the server's bytes are no answer
        self.transport: asyncio.Transport
        self.taker: Taker | None = None
        self.number = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def send(self, taker: Taker, number: int) -> None:
        """Send the request *number* of a taker; the connection must be idle."""
        self.taker, self.number = taker, number
        self._parser.keep_bytes = taker.keep_bytes
        taker.sent(number, self._time())
        self.transport.write(taker.request(number))

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; with a complete answer, free the connection and call the taker."""
        taker = self.taker
        if taker is None:  # bytes without a request
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
        # an answer that arrives before its request is sent to the end leaves the rest of it on the connection
        if answer.reusable and not self.transport.get_write_buffer_size():
            self._pool.free(self)
        else:
            self.transport.abort()
        taker.answered(number, answer, now_s)

    def connection_lost(self, error: Exception | None) -> None:
        """Report the open request as answered, if its answer ends with the connection, else as broken."""
        taker, self.taker = self.taker, None
        self._pool.forget(self)
        if taker is None:
            return
        answer = self._parser.end() if error is None and self._fault is None else None
        if answer is not None:
            taker.answered(self.number, answer, self._time())
        else:
            why = self._fault or f"the connection was lost: {error or 'closed by the server'}"
            taker.broken(self.number, why, self._time())


def unreachable(url: str, error: OSError, server: str) -> str:
    """Return the message for a failed connection to *url*; *server*: the command that starts the server."""
    # a host with several addresses has an error number for each, in the text only
    errnos = set(re.findall(r"\[Errno ([0-9]+)\]", str(error)))
    if errnos == {str(ECONNREFUSED)}:
        return f"nothing listens at {url.removeprefix('http://')}; start `{server}` first"
    return f"{url}: cannot connect: {' '.join(reason_of(error).split()) or 'no answer in time'}"


class Pool:
    """Connections to one server; a request takes the idle one used last, or a new one, or waits in a queue."""

    def __init__(self, target: ServerAddress, limit: int) -> None:
        """limit: largest number of connections."""
        self.loop = asyncio.get_running_loop()
        self.target = target
        self.limit = limit
        self.opened = 0
        """Connections opened so far."""
        self.held_back = 0
        """Requests that had to wait because all connections were busy and the limit was reached."""
        self._idle: list[Connection] = []
        self._live: set[Connection] = set()  # open connections, idle ones included
        self._waiting: deque[tuple[Taker, int]] = deque()
        self._opening = 0  # connections that are being opened
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def outstanding(self) -> int:
        """Requests sent without an answer so far, or waiting for a connection."""
        return len(self._live) - len(self._idle) + len(self._waiting)

    async def open(self, count: int) -> None:
        """Open connections until there are *count*, or the limit; OSError if the server cannot be reached."""
        while len(self._live) < min(count, self.limit):
            self.free(await self._connect())

    def send(self, taker: Taker, number: int) -> None:
        """Send the request *number* of a taker now, or as soon as a connection is idle."""
        idle = self._idle
        # the connection used last is the most likely one to be open, and its buffers are warm
        while idle:
            connection = idle.pop()
            if not connection.transport.is_closing():
                connection.send(taker, number)
                return
        self._waiting.append((taker, number))
        if len(self._live) + self._opening >= self.limit:
            self.held_back += 1
        self._open_more()

    def free(self, connection: Connection) -> None:
        """Give an idle connection the next waiting request, or keep it."""
        if self._waiting:
            connection.send(*self._waiting.popleft())
        else:
            self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """Forget a closed connection."""
        self._live.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
        self._open_more()

    def abandon(self, taker: Taker) -> None:
        """Cancel the requests of a taker without calling it; their connections are closed, which tells the server."""
        self._waiting = deque(entry for entry in self._waiting if entry[0] is not taker)
        for connection in [connection for connection in self._live if connection.taker is taker]:
            connection.taker = None
            connection.transport.abort()

    def abort_all(self) -> None:
        """Abort all connections, because the server has ended; their requests are reported as broken."""
        for connection in list(self._live):
            connection.transport.abort()

    async def close(self) -> None:
        """Close every connection at once; takers of open requests are not called."""
        self._closed = True
        self._waiting.clear()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._live:
            connection.taker = None
            connection.transport.abort()
        end_s = self.loop.time() + 1
        while self._live and self.loop.time() < end_s:  # transports report their end in later turns of the loop
            await asyncio.sleep(0)

    def _open_more(self) -> None:
        """Start to open a connection for every waiting request, up to the limit."""
        while self._opening < len(self._waiting) and len(self._live) + self._opening < self.limit and not self._closed:
            self._opening += 1
            task = self.loop.create_task(self._open())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _open(self) -> None:
        """Open a connection for waiting requests; if that fails and there is no other, the first request is broken."""
        try:
            connection = await self._connect()
        except OSError as error:
            self._opening -= 1
            if self._live or not self._waiting:
                return
            taker, number = self._waiting.popleft()
            taker.broken(number, f"cannot connect: {reason_of(error)}", self.loop.time())
            self._open_more()
        else:
            self._opening -= 1
            self.free(connection)

    async def _connect(self) -> Connection:
        """Open a connection; OSError if that fails or takes longer than ``CONNECT_TIMEOUT_S``."""
        target = self.target
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            _, connection = await self.loop.create_connection(
                lambda: Connection(self), target.host, target.port, ssl=target.context
            )
        self.opened += 1
        self._live.add(connection)
        return connection


class _Call:
    """The ``Taker`` of a single request, whose answer is a future."""

    keep_bytes = sys.maxsize

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def request(self, number: int) -> bytes:
        return self._request

    def sent(self, number: int, now_s: float) -> None:
        """Ignore the time of sending."""

    def answered(self, number: int, answer: Answer, now_s: float) -> None:
        if not self.future.done():
            self.future.set_result(answer)

    def broken(self, number: int, why: str, now_s: float) -> None:
        if not self.future.done():
            self.future.set_exception(OSError(why))


async def call(pool: Pool, request: bytes) -> Answer:
    """Send a request and wait for its answer; OSError if the connection fails or the answer does not come in time."""
    taker = _Call(request)
    pool.send(taker, 0)
    async with asyncio.timeout(CALL_TIMEOUT_S):
        return await taker.future
