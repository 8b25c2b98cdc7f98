"""A small HTTP/1.1 server: one event loop, one protocol object per connection, no coroutine per request.

- ``HttpServer`` listens, keeps the connections and sweeps them for timeouts; ``ClientLimits`` bounds their cost.
- ``HttpExchange`` (``http_messages``) is one request and the way to answer it, now or later.

llhttp (through ``httptools``) does the parsing. It cannot stop between two requests, so a connection feeds it slices
that never reach past the end of a request: to the end of a known body, or else to the next empty line. Thus at most one
request per connection exists, what a client pipelines waits as bytes, and soon in the kernel.
All of it runs in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from email.utils import formatdate
from typing import TYPE_CHECKING, NamedTuple, cast

import httptools

from weft.errors import InputError
from weft.serving.http_messages import (
    NO_BODY,
    HttpExchange,
    HttpResponse,
    RequestTarget,
    error_response,
    header_lines,
    opening,
    parse_target,
)

if TYPE_CHECKING:
    import ssl as tls

logger = logging.getLogger("weft.http")

_LINGER_S = 2.0  # a refused client may still be sending; closing at once would reset the answer away from it
_WAITING_BYTES = 64 * 1024  # pipelined bytes kept here; the rest stays in the kernel
_JOINED_BYTES = 64 * 1024  # up to here one copy is cheaper than a second system call
_EMPTY_LINE = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_GIVEN_ONCE = frozenset({"authorization", "content-length", "content-type", "expect", "host", "transfer-encoding"})
_SPENT_PARSER = httptools.HttpRequestParser(object())


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client, and all of them together, may cost."""

    header_bytes: int = 16 * 1024
    """Request line and headers; also what may stand between two chunks or after the last one."""
    body_bytes: int = 64 * 2**20
    connections: int = 1024
    idle_s: float = 75.0
    """Keep-alive without a request."""
    read_s: float = 30.0
    """From the first byte of a request to its last; also how long a client may leave an answer unread."""
    pipeline: int = 16
    """Requests of one connection handled in a row before the other connections have their turn."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise InputError(f"HTTP limit {field.name} is {value!r}; it must be above zero")


Handler = Callable[[HttpExchange], None]
AccessLog = Callable[[HttpExchange, HttpResponse, int], None]


class _Refusal(NamedTuple):
    status: int
    error: str


_NO_TARGET = RequestTarget("", "", "")


def _peer_name(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return str(name or "")
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


class _Connection(asyncio.Protocol):
    """One client: feeds the parser, hands over one request at a time, writes the answers.

    ``_rest[_at:]`` is what was received and not parsed. While it is not empty, something is due that calls
    ``_advance``: the answer to the open exchange, the client reading on, or a scheduled turn.
    """

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._exchange: HttpExchange | None = None
        self._rest, self._at = b"", 0
        self._tail = b""
        self._framing_bytes = 0
        self._began_s: float | None = None
        self._idle_since_s = self._moved_s = time.monotonic()
        self._linger_until_s: float | None = None
        self._unsent_bytes = 0
        self._closing = self._write_paused = self._throttled = self._turning = False
        self._refusal: _Refusal | None = None
        self._clear()

    def _clear(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._method, self._target = "", _NO_TARGET
        self._parts: list[bytes] = []
        self._chunks: bytearray | None = None
        self._left_bytes = 0
        self._in_body = self._complete = self._expects = self._old = False
        self._keep_alive = True

    # What the transport tells us.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._peer = _peer_name(self._transport)
        error = self._server.admit(self)
        if error is not None:
            self._refuse(_Refusal(503, error), (("Retry-After", "1"),))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._transport = None
        self._parser = _SPENT_PARSER  # the parser holds our methods; without it no cycle keeps us in memory
        self._server.forget(self)

    def eof_received(self) -> None:
        self._lose()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        self._turn_later()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            return
        if self._rest:
            self._rest = self._rest[self._at :] + data
            self._at = 0
            self._throttle()
            return
        self._rest, self._at = data, 0
        self._advance()

    # What the parser tells us. None of these raises: llhttp would lose its place.

    def on_message_begin(self) -> None:
        if self._complete:
            self._refusal = _Refusal(400, "malformed HTTP: a request begins before the last one ended")
        self._began_s = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # trailers are dropped: nobody checked them
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1").strip(" \t")
        if key not in self._headers:
            self._headers[key] = text
        elif key in _GIVEN_ONCE:
            self._refusal = self._refusal or _Refusal(400, f"header {key} is given more than once; send it once")
        else:
            self._headers[key] += ", " + text

    def on_headers_complete(self) -> None:
        self._in_body = True
        parser = self._parser
        version = parser.get_http_version()
        self._old = version == "1.0"
        self._keep_alive = parser.should_keep_alive()
        self._method = parser.get_method().decode("latin-1")
        self._refusal = self._refusal or self._judge_request(version) or self._judge_body(parser.should_upgrade())

    def on_body(self, piece: bytes) -> None:
        if self._chunks is None:
            self._left_bytes -= len(piece)
            self._parts.append(piece)
            return
        self._framing_bytes = 0
        if len(self._chunks) + len(piece) > self._limits.body_bytes:
            self._refusal = self._refusal or self._too_large("body is longer than")
        elif self._refusal is None:
            self._chunks += piece

    def on_message_complete(self) -> None:
        self._complete = True

    # Judging a request by its head.

    def _judge_request(self, version: str) -> _Refusal | None:
        if version not in ("1.0", "1.1"):
            return _Refusal(505, f"HTTP version {version} is not served; use 1.1")
        if not self._old and "host" not in self._headers:
            return _Refusal(400, "header host is missing; HTTP/1.1 asks for it")
        target = parse_target(self._url)
        if target is None:
            return _Refusal(400, "request target is not valid; send a path in percent-encoded UTF-8 without controls")
        self._target = target
        return None

    def _judge_body(self, upgrade: bool) -> _Refusal | None:
        headers = self._headers
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if coding is not None:
            if length is not None or self._old:
                return _Refusal(400, "transfer-encoding cannot go with content-length, nor with HTTP/1.0; send one")
            if coding.lower() != "chunked":
                return _Refusal(501, f"transfer-encoding {coding!r} is not served; use chunked")
            self._chunks = bytearray()
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                return _Refusal(400, f"content-length {length!r} is not a number of bytes")
            self._left_bytes = int(length)
            if self._left_bytes > self._limits.body_bytes:
                return self._too_large(f"body has {length} bytes, more than")
        has_body = coding is not None or self._left_bytes > 0
        if upgrade and has_body:  # llhttp takes the body of an upgrade for the new protocol
            return _Refusal(400, "a request with a body cannot upgrade the connection; send it without upgrade")
        return self._judge_expectation(headers.get("expect"), has_body)

    def _judge_expectation(self, expect: str | None, has_body: bool) -> _Refusal | None:
        if expect is None or self._old:
            return None
        if expect.lower() != "100-continue":
            return _Refusal(417, f"expectation {expect!r} cannot be met; use 100-continue")
        self._expects = has_body
        return None

    def _too_large(self, what: str) -> _Refusal:
        return _Refusal(413, f"{what} the limit of {self._limits.body_bytes} bytes; send a smaller one")

    # Parsing on.

    def _advance(self) -> None:
        """Parse and hand over, until nothing is left, a request waits for its answer, or others are due."""
        self._turning = True  # an answer given from inside the handler must not come back here
        for _ in range(2 * self._limits.pipeline):
            if self._at >= len(self._rest):
                self._rest, self._at = b"", 0
                break
            if self._exchange is not None or self._write_paused or self._closing:
                break
            self._step()
        self._turning = False
        if self._rest or self._throttled:
            self._turn_later()
            self._throttle()

    def _turn_later(self) -> None:
        if self._rest and self._exchange is None and not (self._turning or self._write_paused or self._closing):
            self._turning = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _throttle(self) -> None:
        """Read while little is waiting, which is also how a client is seen to leave while its request is open."""
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        full = len(self._rest) - self._at > _WAITING_BYTES
        if full and not self._throttled:
            transport.pause_reading()
        elif self._throttled and not full:
            transport.resume_reading()
        self._throttled = full

    def _slice_end(self) -> int:
        """Where to stop feeding: never past the end of the request that is being parsed."""
        data, at = self._rest, self._at
        if self._left_bytes > 0:
            return min(len(data), at + self._left_bytes)
        if self._tail:
            cut = (self._tail + data[at : at + 3]).find(_EMPTY_LINE)
            if cut >= 0:
                return at + cut + len(_EMPTY_LINE) - len(self._tail)
        cut = data.find(_EMPTY_LINE, at)
        return len(data) if cut < 0 else cut + len(_EMPTY_LINE)

    def _step(self) -> None:
        at, end = self._at, self._slice_end()
        data = self._rest if end - at == len(self._rest) else memoryview(self._rest)[at:end]
        self._at = end
        if self._left_bytes <= 0:
            self._framing_bytes += end - at
        if self._in_body or self._framing_bytes <= self._limits.header_bytes:
            self._feed(data)
        if self._refusal is None and self._framing_bytes > self._limits.header_bytes:
            limit = self._limits.header_bytes
            self._refusal = _Refusal(431, f"headers are longer than the limit of {limit} bytes; send fewer")
        if self._refusal is not None:
            self._refuse(self._refusal)
        elif self._complete:
            self._hand_over()
        else:
            self._await_more(data)

    def _await_more(self, fed: bytes | memoryview) -> None:
        self._tail = (self._tail + bytes(fed[-3:]))[-3:]
        if self._expects and self._transport is not None and self._at >= len(self._rest):
            self._expects = False
            self._transport.write(_CONTINUE)

    def _feed(self, data: bytes | memoryview) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # it goes on as HTTP/1.1, which every upgrade allows
        except httptools.HttpParserCallbackError as error:
            logger.exception("parsing a request of %s failed", self._peer)
            self._refusal = self._refusal or _Refusal(500, f"the request could not be parsed: {error}")
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or _Refusal(400, f"malformed HTTP: {error}")

    def _hand_over(self) -> None:
        if self._chunks is not None:
            body = bytes(self._chunks)
        else:
            body = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        exchange = HttpExchange(self._answer, self._method, self._target, self._headers, body, self._peer)
        self._exchange = exchange
        self._parts, self._chunks = [], None
        self._began_s = None
        self._server.in_flight += 1
        try:
            self._server.handler(exchange)
        except Exception as error:
            logger.exception("handler failed on %s %s", exchange.method, exchange.path)
            exchange.respond(error_response(500, f"internal error: {type(error).__name__}; see the server's log"))

    # Answering.

    def _answer(self, exchange: HttpExchange, response: HttpResponse) -> None:
        keep = self._keep_alive and not self._server.draining
        sent_bytes = self._write(exchange.method, response, keep)
        exchange.end()
        self._exchange = None
        self._server.in_flight -= 1
        self._server.record(exchange, response, sent_bytes)
        if not keep:
            self._finish()
            return
        self._clear()
        self._tail, self._framing_bytes = b"", 0
        self._idle_since_s = time.monotonic()
        self._turn_later()

    def _write(self, method: str, response: HttpResponse, keep: bool) -> int:
        """Send an answer; gives the bytes of its body that were sent."""
        body = response.body
        body_bytes = len(body) if isinstance(body, bytes) else sum(map(len, body))
        length = b"" if response.status in NO_BODY else b"Content-Length: %d\r\n" % body_bytes
        connection = (
            b"" if keep and not self._old else b"Connection: keep-alive\r\n" if keep else b"Connection: close\r\n"
        )
        extra = header_lines(response.headers) if response.headers else b""
        begin = opening(response.status, response.content_type)
        head = b"%b%b%b%b%b\r\n" % (begin, self._server.signature, length, connection, extra)
        if method == "HEAD" or response.status in NO_BODY:
            body, body_bytes = b"", 0
        transport = self._transport
        if transport is None:
            return 0
        pieces = [head, body] if isinstance(body, bytes) else [head, *body]
        if body_bytes <= _JOINED_BYTES:
            transport.write(b"".join(pieces))
        else:
            transport.writelines(pieces)
        return body_bytes

    def _refuse(self, refusal: _Refusal, headers: tuple[tuple[str, str], ...] = ()) -> None:
        """Answer what never became a request, and end the connection."""
        response = error_response(refusal.status, refusal.error, headers)
        target = self._target if self._target.path else RequestTarget(self._url.decode("latin-1"), "", "")
        exchange = HttpExchange(None, self._method, target, self._headers, b"", self._peer)
        sent_bytes = self._write(self._method, response, keep=False)
        self._server.record(exchange, response, sent_bytes)
        self._linger()

    # Ending.

    def _finish(self) -> None:
        if self._at < len(self._rest) or self._throttled:
            self._linger()
        elif self._transport is not None:
            self._closing = True
            self._transport.close()

    def _linger(self) -> None:
        """Say that this was the last answer, and read on into the void until the client closes."""
        self._closing = True
        self._rest, self._at = b"", 0
        self._parts, self._chunks, self._began_s = [], None, None
        self._linger_until_s = time.monotonic() + _LINGER_S
        transport = self._transport
        if transport is None:
            return
        self._throttle()
        try:
            if transport.can_write_eof():
                transport.write_eof()
        except OSError:
            transport.abort()

    def _lose(self) -> None:
        """The client left: nothing more is answered, and whoever computes for it is told."""
        self._closing = True
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        gone = exchange.end()
        self._server.in_flight -= 1
        if gone is not None:
            try:
                gone()
            except Exception:
                logger.exception("gone callback failed on %s %s", exchange.method, exchange.path)

    def abort(self) -> None:
        self._lose()
        if self._transport is not None:
            self._transport.abort()

    @property
    def unread(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() > 0

    def close_if_idle(self) -> None:
        busy = self._exchange is not None or self._began_s is not None or self._rest
        if self._transport is not None and not busy:
            self._closing = True
            self._transport.close()

    def sweep(self, now_s: float) -> None:
        """End what takes too long: an answer nobody reads, half a request, a connection without requests."""
        transport, limits = self._transport, self._limits
        if transport is None:
            return
        unsent_bytes = transport.get_write_buffer_size()
        if unsent_bytes != self._unsent_bytes:
            self._unsent_bytes, self._moved_s = unsent_bytes, now_s
        elif unsent_bytes:
            if now_s - self._moved_s > limits.read_s:
                self.abort()
        elif self._linger_until_s is not None:
            if now_s > self._linger_until_s:
                transport.abort()
        elif self._began_s is not None:
            if now_s - self._began_s > limits.read_s:
                self._refuse(_Refusal(408, f"the request did not end within {limits.read_s:g} s; send it faster"))
        elif now_s - self._idle_since_s > limits.idle_s:
            self.close_if_idle()


class HttpServer:
    """Listens, and calls ``handler`` for each request in the thread of the event loop.

    ``log`` is called for every answer, also for those to requests that were refused before the handler saw them
    (method and path are then empty where they are not known).
    """

    def __init__(self, handler: Handler, limits: ClientLimits = ClientLimits(), log: AccessLog | None = None) -> None:  # noqa: B008
        self.handler = handler
        self.limits = limits
        self.in_flight = 0
        """Requests that the handler has seen and not answered."""
        self.draining = False
        self.signature = b"Server: weft\r\n"
        self._log = log
        self._listeners: list[asyncio.Server] = []
        self._connections: set[_Connection] = set()
        self._refused: set[_Connection] = set()
        self._empty = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Open connections, without those that were refused."""
        return len(self._connections)

    @property
    def unread(self) -> int:
        """Connections whose clients have not taken all that was written for them."""
        return sum(1 for connection in self._connections if connection.unread)

    async def start(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Listen, and give the port (the system chooses it when ``port`` is 0); may be called for several addresses."""
        listener = await asyncio.get_running_loop().create_server(
            lambda: _Connection(self),
            host,
            port,
            ssl=ssl,
            backlog=min(self.limits.connections, 1024),
            ssl_handshake_timeout=self.limits.read_s if ssl else None,
            ssl_shutdown_timeout=_LINGER_S if ssl else None,
        )
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()
        return int(listener.sockets[0].getsockname()[1])

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting, close what is idle, let the rest be answered; True when no connection is left in time."""
        self.draining = True
        self._stop_listening()
        for connection in [*self._connections]:
            connection.close_if_idle()
        if self._connections:
            try:
                await asyncio.wait_for(self._empty.wait(), timeout_s)
            except TimeoutError:
                return False
        return True

    def close(self) -> None:
        """Stop at once: open requests are told that their client is gone."""
        self.draining = True
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in [*self._connections, *self._refused]:
            connection.abort()

    def _stop_listening(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def _sweep(self) -> None:
        period_s = min(1.0, self.limits.idle_s, self.limits.read_s)
        self._sweeper = asyncio.get_running_loop().call_later(period_s, self._sweep)
        self.signature = f"Server: weft\r\nDate: {formatdate(usegmt=True)}\r\n".encode()
        now_s = time.monotonic()
        for connection in [*self._connections, *self._refused]:
            connection.sweep(now_s)

    # For the connections.

    def admit(self, connection: _Connection) -> str | None:
        """Count a new connection; a text says why it is refused."""
        limit = self.limits.connections
        if len(self._connections) < limit and not self.draining:
            self._connections.add(connection)
            return None
        self._refused.add(connection)
        if len(self._refused) > limit:
            connection.abort()
            return None
        return "the server is going down" if self.draining else f"all {limit} connections are taken; try again later"

    def forget(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        self._refused.discard(connection)
        if self.draining and not self._connections:
            self._empty.set()

    def record(self, exchange: HttpExchange, response: HttpResponse, body_bytes: int) -> None:
        if self._log is None:
            return
        try:
            self._log(exchange, response, body_bytes)
        except Exception:
            logger.exception("access log failed on %s %s", exchange.method, exchange.path)
