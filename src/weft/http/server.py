"""A small HTTP/1.1 server: one event loop, one protocol object per connection, no coroutine per request.

- ``HttpServer`` keeps the connections and sweeps them for timeouts; ``ClientLimits`` bounds their cost.
- A gate judges a request by its head, before a byte of its body is kept.
- ``HttpExchange`` (``http_messages``) is one request and the way to answer it, now or later.

llhttp (through ``httptools``) does the parsing. It cannot stop between two requests, so a connection feeds it slices
that never reach past the end of a request: to the end of a known body, or else to the next empty line. Thus at most one
request per connection exists, what a client pipelines waits as bytes, and soon in the kernel.
All of it runs in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import Callable
from email.utils import formatdate
from typing import TYPE_CHECKING, cast

import httptools
import numpy as np

from weft.base.errors import OverBudget
from weft.http.budget import UNCOUNTED_BYTES, ByteBudget
from weft.http.limits import ClientLimits
from weft.http.lingering import Lingering
from weft.http.listening import Listener
from weft.http.long_bodies import LongBody, Receiver
from weft.http.messages import (
    NO_BODY,
    HttpExchange,
    HttpResponse,
    Passage,
    RequestTarget,
    error_response,
    header_lines,
    header_name,
    opening,
    parse_target,
)
from weft.http.places import Places
from weft.http.progress import Progress, kernel_unsent_bytes

if TYPE_CHECKING:
    import ssl as tls

__all__ = ["ClientLimits", "Gate", "Handler", "HttpServer"]

logger = logging.getLogger("weft.http")

_LINGER_S = 2.0  # a refused client may still be sending; closing at once would reset the answer away from it
_WAITING_BYTES = 64 * 1024  # pipelined bytes kept here; the rest stays in the kernel
_JOINED_BYTES = 64 * 1024  # up to here one copy is cheaper than a second system call
_SKIPPED_BYTES = 64 * 1024  # a body that nobody wants is read over up to here, to keep its connection
_GROWTH_BYTES = 1 << 20  # room for a chunked body is taken in steps of this
_CRUMB_BYTES = 4096
_POURED_BYTES = 1 << 20  # longer bodies are taken and given piece by piece: all at once would hold up everybody else
_PIECE_BYTES = 256 * 1024
_EMPTY_LINE = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_GIVEN_ONCE = frozenset({"authorization", "content-length", "content-type", "expect", "host", "transfer-encoding"})
_SPENT_PARSER = httptools.HttpRequestParser(object())

Handler = Callable[[HttpExchange], None]
Gate = Callable[[str, RequestTarget, dict[str, str]], "HttpResponse | Passage"]
"""Judges method, target and headers: an answer for those it does not let in, a passage for those it does."""
AccessLog = Callable[[HttpExchange, HttpResponse, int], None]

_NO_TARGET = RequestTarget("", "", "")


def _busy(error: str) -> HttpResponse:
    return error_response(503, error, (("Retry-After", "1"),))


def _peer_name(transport: asyncio.Transport) -> str:
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return str(name or "")
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


class _Connection(Receiver):
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
        self._idle_since_s = time.monotonic()
        self._linger_until_s: float | None = None
        self._taking: Progress | None = None
        self._received_bytes = self._unsent_bytes = 0
        self._held_bytes = self._unread_bytes = 0
        self._passage: Passage | None = None
        self._places = server.places
        self._pieces: deque[memoryview] = deque()
        """What is left to write of a long answer."""
        self._keeps = True
        self._closing = self._write_paused = self._throttled = self._turning = False
        self._refusal: HttpResponse | None = None
        self._clear()

    def _clear(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._method, self._target = "", _NO_TARGET
        self._parts: list[bytes] = []
        self._chunks: bytearray | None = None
        self._room: memoryview | None = None
        self._filled_bytes = 0
        self._left_bytes = 0
        self._in_body = self._complete = self._expects = self._old = False
        self._keep_alive = True
        self._declined: HttpResponse | None = None
        self._body_bytes, self._easy_bytes = self._limits.body_bytes, self._server.easy_bytes
        self._reading: Progress | None = None

    # What the transport tells us.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._peer = _peer_name(self._transport)
        self._places, error = self._server.admit(self)
        if error:
            self._refuse(_busy(error))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose()
        self._taken()
        self._pieces.clear()
        self._transport = None
        self._parser = _SPENT_PARSER  # the parser holds our methods; without it no cycle keeps us in memory
        self._server.forget(self)

    def eof_received(self) -> bool:
        """The client says no more; what is being written to it goes on, where TLS has not ended, too."""
        self._lose()
        self._keeps = False
        return bool(self._pieces) and self._transport is not None and not self._transport.get_extra_info("ssl_object")

    def pause_writing(self) -> None:
        self._write_paused = True
        self._unread_bytes = self._unsent()
        self._server.budget.add(self._unread_bytes)

    def resume_writing(self) -> None:
        self._write_paused = False
        self._taken()
        if self._pieces:
            self._pour()
        else:
            self._turn_later()

    def data_received(self, data: bytes) -> None:
        if self._closing:
            if self._transport is not None:
                self._server.lingering.wait(self._transport)
            return
        self._received_bytes += len(data)
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
            self._refusal = error_response(400, "malformed HTTP: a request begins before the last one ended")
        self._began_s = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_body:
            return  # trailers are dropped: nobody checked them
        key = header_name(name)
        text = value.decode("latin-1").strip(" \t")
        if key not in self._headers:
            self._headers[key] = text
        elif key in _GIVEN_ONCE:
            self._refusal = self._refusal or error_response(400, f"header {key} is given more than once; send it once")
        else:
            self._headers[key] += ", " + text

    def on_headers_complete(self) -> None:
        self._in_body = True
        parser = self._parser
        version = parser.get_http_version()
        self._old = version == "1.0"
        self._keep_alive = parser.should_keep_alive()
        self._method = parser.get_method().decode("latin-1")
        self._places.idle.pop(self, None)
        self._refusal = (
            self._refusal
            or self._judge_request(version)
            or self._judge_body(parser.should_upgrade())
            or self._judge_at_the_gate()
            or (self._judge_size() if self._left_bytes > self._easy_bytes else None)
        )
        if self._declined is not None:
            self._places.idle[self] = None  # it has its answer as good as now, and may leave for somebody new

    def on_body(self, piece: bytes) -> None:
        if self._chunks is None:
            self._left_bytes -= len(piece)
            if self._room is not None:
                start, self._filled_bytes = self._filled_bytes, self._filled_bytes + len(piece)
                self._room[start : self._filled_bytes] = piece
            elif not self._parts:
                self._parts.append(piece)
            elif self._declined is None:
                self._keep(piece)
            return
        self._framing_bytes = 0
        self._refusal = self._refusal or self._judge_growth(len(self._chunks) + len(piece))
        if self._refusal is None:
            self._chunks += piece

    def on_message_complete(self) -> None:
        self._complete = True

    def _keep(self, piece: bytes) -> None:
        """Crumbs are joined: as objects of their own they would hold many times their size."""
        parts = self._parts
        if len(piece) < _CRUMB_BYTES and len(parts[-1]) < _JOINED_BYTES:
            parts[-1] += piece
        else:
            parts.append(piece)

    # Judging a request by its head.

    def _judge_request(self, version: str) -> HttpResponse | None:
        if version not in ("1.0", "1.1"):
            return error_response(505, f"HTTP version {version} is not served; use 1.1")
        if not self._old and "host" not in self._headers:
            return error_response(400, "header host is missing; HTTP/1.1 asks for it")
        target = parse_target(self._url)
        if target is None:
            return error_response(
                400, "request target is not valid; send a path in percent-encoded UTF-8 without controls"
            )
        self._target = target
        if target.authority:
            self._headers["host"] = target.authority  # whoever judges the host or the origin must see the one asked for
        return None

    def _judge_body(self, upgrade: bool) -> HttpResponse | None:
        headers = self._headers
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if coding is not None:
            if length is not None or self._old:
                return error_response(
                    400, "transfer-encoding cannot go with content-length, nor with HTTP/1.0; send one"
                )
            if coding.lower() != "chunked":
                return error_response(501, f"transfer-encoding {coding!r} is not served; use chunked")
            self._chunks = bytearray()
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                return error_response(400, f"content-length {length!r} is not a number of bytes")
            self._left_bytes = int(length)
        has_body = coding is not None or self._left_bytes > 0
        if upgrade and has_body:  # llhttp takes the body of an upgrade for the new protocol
            return error_response(400, "a request with a body cannot upgrade the connection; send it without upgrade")
        return self._judge_expectation(headers.get("expect"), has_body)

    def _judge_expectation(self, expect: str | None, has_body: bool) -> HttpResponse | None:
        if expect is None or self._old:
            return None
        if expect.lower() != "100-continue":
            return error_response(417, f"expectation {expect!r} cannot be met; use 100-continue")
        self._expects = has_body
        return None

    def _judge_at_the_gate(self) -> HttpResponse | None:
        server = self._server
        if self._places is server.reserve:
            self._keep_alive = False
            if self._target.raw_path not in server.vital or self._left_bytes or self._chunks is not None:
                return _busy(server.all_taken)
        if server.gate is None:
            return None
        try:
            found = server.gate(self._method, self._target, self._headers)
        except Exception as error:
            logger.exception("the gate failed on %s %s", self._method, self._target.path)
            return error_response(500, f"internal error: {type(error).__name__}; see the server's log")
        if isinstance(found, HttpResponse):
            return self._decline(found)
        self._passage = found
        if found.body_bytes < self._body_bytes:
            self._body_bytes = found.body_bytes
            self._easy_bytes = min(self._easy_bytes, found.body_bytes)
        return None

    def _decline(self, answer: HttpResponse) -> HttpResponse | None:
        """Answer at once, or behind a body so short that reading over it is cheaper than another connection."""
        if self._chunks is not None or self._expects or self._left_bytes > _SKIPPED_BYTES:
            return answer
        self._declined = answer
        return None

    def _judge_size(self) -> HttpResponse | None:
        """Find room for a body that is not easily held."""
        if self._left_bytes <= self._body_bytes:
            return self._hold(self._left_bytes) or self._make_room()
        return None if self._declined else self._too_large(f"body has {self._left_bytes} bytes, more than")

    def _judge_growth(self, body_bytes: int) -> HttpResponse | None:
        """A chunked body will have so many bytes."""
        if body_bytes > self._body_bytes:
            return self._too_large("body is longer than")
        missing_bytes = body_bytes - UNCOUNTED_BYTES - self._held_bytes
        most_bytes = self._body_bytes - self._held_bytes
        return self._hold(min(max(missing_bytes, _GROWTH_BYTES), most_bytes)) if missing_bytes > 0 else None

    def _hold(self, count: int) -> HttpResponse | None:
        """Take room for bytes of the body."""
        try:
            self._server.budget.take(count, self._held_bytes)
        except OverBudget as error:
            return _busy(str(error))
        self._held_bytes += count
        return None

    def _make_room(self) -> HttpResponse | None:
        """Have a place for a long body; its pages are the system's until something is written to them."""
        if self._left_bytes > _POURED_BYTES:
            try:
                self._room = np.empty(self._left_bytes, np.uint8).data
            except MemoryError:
                return _busy(f"there is no memory for a body of {self._left_bytes} bytes; try again later")
        return None

    def _too_large(self, what: str) -> HttpResponse:
        return error_response(413, f"{what} the limit of {self._body_bytes} bytes; send a smaller one")

    # Parsing on.

    def _advance(self) -> None:
        """Parse and hand over, until nothing is left, a request waits for its answer, or others are due."""
        self._turning = True  # an answer given from inside the handler must not come back here
        for _ in range(2 * self._limits.pipeline):
            if self._at >= len(self._rest):
                self._rest, self._at = b"", 0
                break
            if self._exchange is not None or self._write_paused or self._closing or self._pieces:
                break
            self._step()
        self._turning = False
        if self._rest or self._throttled:
            self._turn_later()
            self._throttle()
        elif self._room is not None and self._transport is not None:
            LongBody(self, self._transport, self._room, self._filled_bytes)

    def count_received(self, count: int) -> None:
        self._received_bytes += count

    def take_room(self) -> None:
        """A long body is whole, of which the parser has seen the beginning."""
        self._parser = httptools.HttpRequestParser(self)
        self._hand_over()

    def _turn_later(self) -> None:
        waits = self._turning or self._write_paused or self._closing or self._pieces
        if self._rest and self._exchange is None and not waits:
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
            self._refusal = error_response(431, f"headers are longer than the limit of {limit} bytes; send fewer")
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
            self._refusal = self._refusal or error_response(500, f"the request could not be parsed: {error}")
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or error_response(400, f"malformed HTTP: {error}")

    def _hand_over(self) -> None:
        body = self._whole_body()
        exchange = HttpExchange(self._answer, self._method, self._target, self._headers, body, self._peer)
        exchange.passage, exchange.held_bytes = self._passage, self._held_bytes
        self._exchange = exchange
        self._parts, self._chunks, self._room = [], None, None
        self._began_s = None
        self._server.in_flight += 1
        if self._declined is not None:
            exchange.respond(self._declined)
            return
        try:
            self._server.handler(exchange)
        except Exception as error:
            logger.exception("handler failed on %s %s", exchange.method, exchange.path)
            exchange.respond(error_response(500, f"internal error: {type(error).__name__}; see the server's log"))

    def _whole_body(self) -> bytes | memoryview:
        """What came, without a copy where it is long."""
        if self._room is not None:
            return self._room.toreadonly()
        if self._chunks is not None:
            long = len(self._chunks) > _POURED_BYTES
            return memoryview(self._chunks).toreadonly() if long else bytes(self._chunks)
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    # Answering.

    def _answer(self, exchange: HttpExchange, response: HttpResponse) -> None:
        keep = self._keep_alive and not self._server.draining
        sent_bytes = self._write(exchange.method, response, keep)
        exchange.end()
        self._exchange = None
        self._server.in_flight -= 1
        self._release()
        self._server.record(exchange, response, sent_bytes)
        self._keeps = keep
        self._clear()
        self._tail, self._framing_bytes = b"", 0
        if not self._pieces:
            self._answered()

    def _answered(self) -> None:
        """An answer has been written."""
        if not self._keeps or self._server.draining:
            self._finish()
            return
        self._idle_since_s = time.monotonic()
        self._places.idle[self] = None
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
        elif body_bytes <= _POURED_BYTES:
            transport.writelines(pieces)
        else:
            views = [memoryview(each) for each in pieces]
            self._pieces.extend(v[at : at + _PIECE_BYTES] for v in views for at in range(0, len(v), _PIECE_BYTES))
            self._pour()
        return body_bytes

    def _pour(self) -> None:
        """Write on at a long answer, a piece at a time as others are due, until the client has enough for now."""
        if not self._pieces or self._transport is None or self._write_paused:
            return
        self._transport.write(self._pieces.popleft())
        if self._pieces and not self._write_paused:
            asyncio.get_running_loop().call_soon(self._pour)
        elif not self._pieces and self._exchange is None:
            self._answered()

    def _unsent(self) -> int:
        """Bytes that were written for the client, and that the system has not taken."""
        written = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return written + sum(map(len, self._pieces))

    def _refuse(self, response: HttpResponse) -> None:
        """Answer what never became a request, and end the connection."""
        self._release()
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
        self._closing, self._throttled = True, False
        self._rest, self._at = b"", 0
        transport = self._transport
        if transport is not None and self._room is not None:
            transport.set_protocol(self)
        self._parts, self._chunks, self._room, self._began_s = [], None, None, None
        self._linger_until_s = time.monotonic() + _LINGER_S
        if transport is None:
            return
        self._places.forget(self)
        self._server.let_go(self)
        self._server.lingering.wait(transport)
        try:
            if transport.can_write_eof():
                transport.write_eof()
        except OSError:
            transport.abort()

    def _lose(self) -> None:
        """The client left: nothing more is answered, and whoever computes for it is told."""
        self._closing = True
        self._release()
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

    def _release(self) -> None:
        """The request is over: nothing is held for it any more."""
        if self._held_bytes:
            self._server.budget.give(self._held_bytes)
            self._held_bytes = 0
        if self._passage is not None:
            passage, self._passage = self._passage, None
            passage.end()

    def _taken(self) -> None:
        """What was written has left, or nobody will take it."""
        self._server.budget.give(self._unread_bytes)
        self._unread_bytes = 0

    def abort(self) -> None:
        self._lose()
        if self._transport is not None:
            self._transport.abort()

    @property
    def unread(self) -> bool:
        return self._unsent() > 0

    @property
    def owed(self) -> bool:
        return self._exchange is not None or (self._in_body and self._declined is None) or self.unread

    def leave(self) -> None:
        self._closing, self._began_s = True, None
        self._linger_until_s = time.monotonic() + _LINGER_S
        if self._transport is not None:
            self._server.let_go(self)
            self._transport.close()

    def close_if_idle(self) -> None:
        if self._exchange is None and self._began_s is None and not (self._rest or self._pieces):
            self.leave()

    def sweep(self, now_s: float) -> None:
        """End what takes too long: an answer nobody reads, half a request, a connection without requests."""
        transport = self._transport
        if transport is None:
            return
        if self.unread:
            self._sweep_unread(transport, now_s)
            return
        self._taking = None
        if self._linger_until_s is not None:
            if now_s > self._linger_until_s:
                transport.abort()
        elif self._began_s is not None:
            self._sweep_unfinished(now_s, self._began_s)
        elif now_s - self._idle_since_s > self._limits.idle_s:
            self.close_if_idle()

    def _sweep_unread(self, transport: asyncio.Transport, now_s: float) -> None:
        unsent_bytes = self._unsent() + kernel_unsent_bytes(transport.get_extra_info("socket"))
        if self._taking is None or unsent_bytes > self._unsent_bytes:
            self._taking = self._watched(now_s, -unsent_bytes)
        elif self._taking.stalled(now_s, -unsent_bytes):
            self.abort()
        self._unsent_bytes = unsent_bytes

    def _sweep_unfinished(self, now_s: float, began_s: float) -> None:
        limits = self._limits
        if not self._in_body:
            if now_s - began_s > limits.read_s:
                self._refuse(error_response(408, f"the head did not end within {limits.read_s:g} s; send it faster"))
        elif self._reading is None:
            self._reading = self._watched(now_s, self._received_bytes)
        elif self._reading.stalled(now_s, self._received_bytes):
            least = f"{limits.bytes_per_s:g} bytes per second over {limits.read_s:g} s"
            self._refuse(error_response(408, f"the body did not come at {least}; send it faster"))

    def _watched(self, now_s: float, passed: int) -> Progress:
        return Progress(self._limits.read_s, self._limits.bytes_per_s, now_s, passed)


class HttpServer:
    """Listens, and calls ``handler`` for each request in the thread of the event loop.

    ``log`` is called for every answer, also for those to requests that were refused before the handler saw them
    (method and path are then empty where they are not known). ``gate`` judges requests by their heads. Their bodies
    count towards ``budget`` until they are answered. Paths in ``vital`` are also served beyond the last connection.
    """

    def __init__(
        self,
        handler: Handler,
        limits: ClientLimits = ClientLimits(),  # noqa: B008
        log: AccessLog | None = None,
        *,
        gate: Gate | None = None,
        budget: ByteBudget | None = None,
        vital: frozenset[str] = frozenset(),
    ) -> None:
        self.handler, self.gate, self.vital = handler, gate, vital
        self.limits = limits
        self.budget = budget or ByteBudget(limits.connections * limits.body_bytes)
        self.easy_bytes = min(UNCOUNTED_BYTES, limits.body_bytes)
        """Bodies up to this are taken without being counted."""
        self.places, self.reserve = Places(limits.connections), Places(limits.reserve)
        self.all_taken = f"all {limits.connections} connections are taken; try again later"
        self.in_flight = 0
        """Requests that the handler has seen and not answered."""
        self.draining = False
        self.signature = b"Server: weft\r\n"
        self.lingering = Lingering()
        self._log = log
        self._listeners: list[Listener] = []
        self._connections: set[_Connection] = self.places.taken
        self._leaving: dict[_Connection, None] = {}
        """Connections that have no place any more and are not closed, the oldest first."""
        self._greeting: dict[asyncio.Task[None], None] = {}
        """Connections that are being made, the oldest first: TLS takes its time, and some clients theirs."""
        self._accepted: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def connections(self) -> int:
        """Open connections, without those that were refused and those of the reserve."""
        return len(self._connections)

    @property
    def unread(self) -> int:
        """Connections whose clients have not taken all that was written for them."""
        return sum(1 for connection in self._all() if connection.unread)

    async def start(self, host: str, port: int, ssl: tls.SSLContext | None = None) -> int:
        """Listen, and give the port (the system chooses it when ``port`` is 0); may be called for several addresses."""
        listener = Listener(lambda accepted: self._greet(accepted, ssl), self._spare_a_file)
        found = await listener.start(host, port, min(self.limits.connections, 1024))
        self._listeners.append(listener)
        if self._sweeper is None:
            self._sweep()
        return found

    def _greet(self, accepted: socket.socket, ssl: tls.SSLContext | None) -> None:
        task = asyncio.get_running_loop().create_task(self._connect(accepted, ssl))
        self._accepted.add(task)
        task.add_done_callback(self._accepted.discard)

    async def _connect(self, accepted: socket.socket, ssl: tls.SSLContext | None) -> None:
        this = asyncio.current_task()
        assert this is not None
        if ssl is not None and len(self._greeting) >= self.limits.connections:
            self._drop_greeting()
        self._greeting[this] = None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: _Connection(self),
                accepted,
                ssl=ssl,
                ssl_handshake_timeout=self.limits.read_s if ssl else None,
                ssl_shutdown_timeout=_LINGER_S if ssl else None,
            )
        except OSError as error:
            logger.debug("a connection was not made: %s", error)
        finally:
            self._greeting.pop(this, None)

    def _drop_greeting(self) -> None:
        """End the connection that has been in the making longest."""
        oldest = next(iter(self._greeting))
        del self._greeting[oldest]
        oldest.cancel()

    def _spare_a_file(self) -> None:
        """Files are short: let go of a connection that nobody needs, one that is being made before all others."""
        if self._greeting:
            self._drop_greeting()
        elif not self.places.make_room():
            self.reserve.make_room()

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting, close what is idle, let the rest be answered; True when no connection is left in time."""
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
        """Stop at once: open requests are told that their client is gone."""
        self.draining = True
        self._stop_listening()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._greeting:
            task.cancel()
        for connection in self._all():
            connection.abort()

    def _open(self) -> list[_Connection]:
        return [*self._connections, *self.reserve.taken]

    def _all(self) -> list[_Connection]:
        """Also those that are being closed."""
        return [*dict.fromkeys([*self._open(), *self._leaving])]

    def _stop_listening(self) -> None:
        while self._listeners:
            self._listeners.pop().close()

    def _sweep(self) -> None:
        period_s = min(1.0, self.limits.idle_s, self.limits.read_s)
        self._sweeper = asyncio.get_running_loop().call_later(period_s, self._sweep)
        self.signature = f"Server: weft\r\nDate: {formatdate(usegmt=True)}\r\n".encode()
        now_s = time.monotonic()
        for connection in self._all():
            connection.sweep(now_s)

    # For the connections.

    def admit(self, connection: _Connection) -> tuple[Places, str]:
        """Give a new connection its place; a text says why it is refused."""
        for places in (self.places, self.reserve):
            if not self.draining and places.seat(connection):
                return places, ""
        if len(self._leaving) >= self.limits.connections:
            connection.abort()
            return self.places, ""
        return self.places, "the server is going down" if self.draining else self.all_taken

    def let_go(self, connection: _Connection) -> None:
        """It is being closed, and does not count any more; where many are, the first of them is closed at once."""
        self._leaving[connection] = None
        if len(self._leaving) > self.limits.connections:
            oldest = next(iter(self._leaving))
            del self._leaving[oldest]
            oldest.abort()

    def forget(self, connection: _Connection) -> None:
        self.places.forget(connection)
        self.reserve.forget(connection)
        self._leaving.pop(connection, None)
        if self.draining and not self._all():
            self._empty.set()

    def record(self, exchange: HttpExchange, response: HttpResponse, body_bytes: int) -> None:
        if self._log is None:
            return
        try:
            self._log(exchange, response, body_bytes)
        except Exception:
            logger.exception("access log failed on %s %s", exchange.method, exchange.path)
