"""Connections of the HTTP server: one protocol object for each, and the table of all of them.

llhttp (through ``httptools``) does the parsing. It cannot stop between two requests, so a connection feeds it slices
that never reach past the end of a request: to the end of a known body, or else to the next empty line. Thus a
connection has at most one request; pipelined ones wait as bytes, first here, then in the kernel.
The reserve is a few more connections, for vital paths (health, metrics) only, when all others are taken.
All of it runs in the thread of the event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import cast

import httptools
import numpy as np

from weft.base.errors import OverBudget
from weft.http.bodies import LingeringClose, LongBody, Receiver, TransferProgress, body_bytes, kernel_unsent_bytes
from weft.http.limits import UNCOUNTED_BYTES, ByteBudget, ClientLimits, ConnectionSlots
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

logger = logging.getLogger("weft.http")

LINGER_S = 2.0  # a refused client may still be sending; closing at once would reset the connection and lose the answer
_WAITING_BYTES = 64 * 1024  # pipelined bytes kept here; the rest stays in the kernel
_JOINED_BYTES = 64 * 1024  # up to here one copy is cheaper than a second system call
_SKIPPED_BYTES = 64 * 1024  # the unwanted body of a refused request is read up to this size, to keep its connection
_GROWTH_BYTES = 1 << 20  # room for a chunked body is taken from the byte budget in steps of this
_SMALL_PIECE_BYTES = 4096  # shorter pieces of a body are joined: a bytes object for each would waste memory
_LONG_BODY_BYTES = 1 << 20  # longer bodies are received and sent in pieces, which delays other connections less
_PIECE_BYTES = 256 * 1024  # bytes of a long answer that are written in one turn of the loop
_EMPTY_LINE = b"\r\n\r\n"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SINGLE_HEADERS = frozenset({"authorization", "content-length", "content-type", "expect", "host", "transfer-encoding"})
_UNUSED_PARSER = httptools.HttpRequestParser(object())

Handler = Callable[[HttpExchange], None]
Gate = Callable[[str, RequestTarget, dict[str, str]], "HttpResponse | Passage"]
"""Judges a request by method, target and headers: returns the answer of a refusal, or a passage."""
AccessLog = Callable[[HttpExchange, HttpResponse, int], None]
"""Called with a request, its answer, and the number of bytes of the body."""

_NO_TARGET = RequestTarget("", "", "")


def _busy_response(error: str) -> HttpResponse:
    """Build an answer with status 503 that asks the client to retry after a second."""
    return error_response(503, error, (("Retry-After", "1"),))


def _peer_name(transport: asyncio.Transport) -> str:
    """Return address and port of the client, for the access log."""
    name = transport.get_extra_info("peername")
    if not isinstance(name, tuple):
        return str(name or "")
    return f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"


class ServerConnection(Receiver):
    """The connection of one client: feeds the parser, hands over one request at a time, writes the answers.

    ``_rest[_position:]`` are the bytes received and not parsed. While there are any, ``_advance`` will be called again:
    after the answer to the open exchange, when the client has read earlier answers, or in a scheduled turn of the loop.
    """

    def __init__(self, server: ConnectionTable) -> None:
        """server: the table that this connection belongs to, with the limits and the handler."""
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._peer = ""
        self._exchange: HttpExchange | None = None
        self._rest, self._position = b"", 0
        self._tail = b""  # last 3 bytes fed to the parser: an empty line may be split between two slices
        self._framing_bytes = 0  # bytes of the head, or between chunks, which header_bytes limits
        self._began_s: float | None = None  # when the first byte of the current request came
        self._idle_since_s = time.monotonic()
        self._linger_until_s: float | None = None  # end of the lingering close, if it has begun
        self._answer_progress: TransferProgress | None = None
        self._received_bytes = 0
        self._unsent_bytes = 0  # of answers, at the last sweep, those in the kernel included
        self._held_bytes = self._unread_bytes = 0  # taken from the byte budget for the body, and for unread answers
        self._passage: Passage | None = None
        self._slots = server.slots
        self._pieces: deque[memoryview] = deque()
        """Pieces of a long answer that are still to be written."""
        self._keep_open = True  # after the last answer
        self._advancing = False  # whether _advance runs or is scheduled
        self._closing = self._write_paused = self._throttled = False
        self._refusal: HttpResponse | None = None  # set by callbacks of the parser, sent after the slice
        self._clear()

    def _clear(self) -> None:
        """Reset what belongs to one request, before the next one."""
        self._url = b""
        self._headers: dict[str, str] = {}
        self._method, self._target = "", _NO_TARGET
        self._body_parts: list[bytes] = []
        self._chunked_body: bytearray | None = None
        self._room: memoryview | None = None  # memory for the whole of a long body
        self._filled_bytes = 0  # of the room
        self._left_bytes = 0  # of a body of known length, still to be received
        self._in_body = self._complete = self._awaits_continue = self._http_1_0 = False
        self._keep_alive = True
        self._declined: HttpResponse | None = None  # the gate's refusal, to be sent after a short body
        # limits: on the body, and on a body that does not count towards the byte budget
        self._body_bytes, self._uncounted_bytes = self._limits.body_bytes, self._server.uncounted_bytes
        self._body_progress: TransferProgress | None = None

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a slot for the new connection, or refuse it."""
        self._transport = cast(asyncio.Transport, transport)
        self._peer = _peer_name(self._transport)
        self._slots, error = self._server.admit(self)
        if error:
            self._refuse(_busy_response(error))

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything after the connection has ended."""
        self._drop_exchange()
        self._release_unread()
        self._pieces.clear()
        self._transport = None
        self._parser = _UNUSED_PARSER  # the parser holds our methods; without it no cycle keeps us in memory
        self._server.forget(self)

    def eof_received(self) -> bool:
        """Handle the end of the client's bytes: a long answer is still sent, except over TLS, which ends both ways."""
        self._drop_exchange()
        self._keep_open = False
        return bool(self._pieces) and self._transport is not None and not self._transport.get_extra_info("ssl_object")

    def pause_writing(self) -> None:
        """Stop parsing while the client does not read; its unread answers count towards the byte budget."""
        self._write_paused = True
        self._unread_bytes = self._unsent()
        self._server.budget.add(self._unread_bytes)

    def resume_writing(self) -> None:
        """Continue with a long answer, or with parsing, now that the client reads."""
        self._write_paused = False
        self._release_unread()
        if self._pieces:
            self._write_pieces()
        else:
            self._schedule_advance()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, or keep them behind those that wait."""
        if self._closing:
            if self._transport is not None:
                self._server.lingering.wait(self._transport)
            return
        self._received_bytes += len(data)
        if self._rest:
            self._rest = self._rest[self._position :] + data
            self._position = 0
            self._throttle()
            return
        self._rest, self._position = data, 0
        self._advance()

    # Callbacks of the parser. They must not raise: llhttp would lose its position.

    def on_message_begin(self) -> None:
        """Note when the request began; refuse bytes after a request that was not handed over yet."""
        if self._complete:
            self._refusal = error_response(400, "malformed HTTP: a request begins before the last one ended")
        self._began_s = time.monotonic()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header; refuse the repetition of headers that must be given once."""
        if self._in_body:
            return  # trailers are dropped: they come after the checks of the head
        key = header_name(name)
        text = value.decode("latin-1").strip(" \t")
        if key not in self._headers:
            self._headers[key] = text
        elif key in _SINGLE_HEADERS:
            self._refusal = self._refusal or error_response(400, f"header {key} is given more than once; send it once")
        else:
            self._headers[key] += ", " + text

    def on_headers_complete(self) -> None:
        """Judge the request by its head, before its body is received."""
        self._in_body = True
        parser = self._parser
        version = parser.get_http_version()
        self._http_1_0 = version == "1.0"
        self._keep_alive = parser.should_keep_alive()
        self._method = parser.get_method().decode("latin-1")
        self._slots.idle.pop(self, None)
        self._refusal = (
            self._refusal
            or self._judge_request(version)
            or self._judge_body(parser.should_upgrade())
            or self._judge_at_the_gate()
            or (self._judge_size() if self._left_bytes > self._uncounted_bytes else None)
        )
        if self._declined is not None:
            self._slots.idle[self] = None  # the answer is ready, so a new connection may take the slot

    def on_body(self, piece: bytes) -> None:
        """Keep a piece of the body: in preallocated memory if that is long, in a buffer if chunked, else in a list."""
        if self._chunked_body is None:
            self._left_bytes -= len(piece)
            if self._room is not None:
                start, self._filled_bytes = self._filled_bytes, self._filled_bytes + len(piece)
                self._room[start : self._filled_bytes] = piece
            elif not self._body_parts:
                self._body_parts.append(piece)
            elif self._declined is None:  # the body of a declined request is not needed
                self._keep_piece(piece)
            return
        self._framing_bytes = 0
        self._refusal = self._refusal or self._judge_growth(len(self._chunked_body) + len(piece))
        if self._refusal is None:
            self._chunked_body += piece

    def on_message_complete(self) -> None:
        self._complete = True

    def _keep_piece(self, piece: bytes) -> None:
        """Keep a piece of a short body; small pieces are joined to the one before."""
        parts = self._body_parts
        if len(piece) < _SMALL_PIECE_BYTES and len(parts[-1]) < _JOINED_BYTES:
            parts[-1] += piece
        else:
            parts.append(piece)

    # Judging a request by its head: each returns the refusal, or None.

    def _judge_request(self, version: str) -> HttpResponse | None:
        """Check the HTTP version, the header Host and the target, and keep the target."""
        if version not in ("1.0", "1.1"):
            return error_response(505, f"HTTP version {version} is not served; use 1.1")
        if not self._http_1_0 and "host" not in self._headers:
            return error_response(400, "header host is missing; HTTP/1.1 asks for it")
        target = parse_target(self._url)
        if target is None:
            return error_response(
                400, "request target is not valid; send a path in percent-encoded UTF-8 without controls"
            )
        self._target = target
        if target.authority:
            self._headers["host"] = target.authority  # overrides Host, so checks of host and origin must see it
        return None

    def _judge_body(self, upgrade: bool) -> HttpResponse | None:
        """Check the headers of the body, and keep its length; *upgrade*: whether another protocol is requested."""
        headers = self._headers
        length, coding = headers.get("content-length"), headers.get("transfer-encoding")
        if coding is not None:
            if length is not None or self._http_1_0:
                return error_response(
                    400, "transfer-encoding cannot go with content-length, nor with HTTP/1.0; send one"
                )
            if coding.lower() != "chunked":
                return error_response(501, f"transfer-encoding {coding!r} is not served; use chunked")
            self._chunked_body = bytearray()
        elif length is not None:
            if not (length.isascii() and length.isdigit()):
                return error_response(400, f"content-length {length!r} is not a number of bytes")
            self._left_bytes = int(length)
        has_body = coding is not None or self._left_bytes > 0
        if upgrade and has_body:  # llhttp takes the body of an upgrade for the new protocol
            return error_response(400, "a request with a body cannot upgrade the connection; send it without upgrade")
        return self._judge_expectation(headers["expect"], has_body) if "expect" in headers else None

    def _judge_expectation(self, expect: str, has_body: bool) -> HttpResponse | None:
        """Check the header Expect; HTTP/1.0 has none, so it is ignored there."""
        if self._http_1_0:
            return None
        if expect.lower() != "100-continue":
            return error_response(417, f"expectation {expect!r} cannot be met; use 100-continue")
        self._awaits_continue = has_body
        return None

    def _judge_at_the_gate(self) -> HttpResponse | None:
        """Ask the server's gate; a connection of the reserve may only request vital paths."""
        server = self._server
        if self._slots is server.reserve:
            self._keep_alive = False
            if self._target.raw_path not in server.vital or self._left_bytes or self._chunked_body is not None:
                return _busy_response(server.all_taken)
        if server.gate is None:
            return None
        try:
            verdict = server.gate(self._method, self._target, self._headers)
        except Exception as error:
            logger.exception("the gate failed on %s %s", self._method, self._target.path)
            return error_response(500, f"internal error: {type(error).__name__}; see the server's log")
        if isinstance(verdict, HttpResponse):
            return self._decline(verdict)
        self._passage = verdict
        if verdict.body_bytes < self._body_bytes:
            self._body_bytes = verdict.body_bytes
            self._uncounted_bytes = min(self._uncounted_bytes, verdict.body_bytes)
        return None

    def _decline(self, answer: HttpResponse) -> HttpResponse | None:
        """Return the gate's refusal, to be sent at once; None to send it after a short body.

        Reading a short body is cheaper than a new connection, which an answer before the body would require.
        """
        if self._chunked_body is not None or self._awaits_continue or self._left_bytes > _SKIPPED_BYTES:
            return answer
        self._declined = answer
        return None

    def _judge_size(self) -> HttpResponse | None:
        """Reserve bytes of the budget, and memory, for a body that is not small, or refuse it."""
        if self._left_bytes <= self._body_bytes:
            return self._take_budget(self._left_bytes) or self._make_room()
        return None if self._declined else self._too_large(f"body has {self._left_bytes} bytes, more than")

    def _judge_growth(self, size: int) -> HttpResponse | None:
        """Reserve bytes of the budget for a chunked body that grows to *size* bytes, or refuse it."""
        if size > self._body_bytes:
            return self._too_large("body is longer than")
        missing_bytes = size - UNCOUNTED_BYTES - self._held_bytes  # the first bytes of a body do not count
        if missing_bytes <= 0:
            return None
        most_bytes = self._body_bytes - self._held_bytes  # never more than the longest body that is accepted
        return self._take_budget(min(max(missing_bytes, _GROWTH_BYTES), most_bytes))

    def _take_budget(self, count: int) -> HttpResponse | None:
        """Take *count* bytes of the byte budget for the body, or refuse it."""
        try:
            self._server.budget.take(count, self._held_bytes)
        except OverBudget as error:
            return _busy_response(str(error))
        self._held_bytes += count
        return None

    def _make_room(self) -> HttpResponse | None:
        """Allocate memory for a long body; the system provides its pages only as they are written."""
        if self._left_bytes > _LONG_BODY_BYTES:
            try:
                self._room = np.empty(self._left_bytes, np.uint8).data
            except MemoryError:
                return _busy_response(f"there is no memory for a body of {self._left_bytes} bytes; try again later")
        return None

    def _too_large(self, what: str) -> HttpResponse:
        """Return the refusal of a body that is too large; *what*: how its message begins."""
        return error_response(413, f"{what} the limit of {self._body_bytes} bytes; send a smaller one")

    # Parsing

    def _advance(self) -> None:
        """Parse received bytes and hand over requests, until no byte is left or a request waits for its answer.

        It also stops if the client does not read its answers, and after ``pipeline`` requests, so that other
        connections get their turn.
        """
        self._advancing = True  # an answer given from inside the handler must not call this method again
        for _ in range(2 * self._limits.pipeline):  # a request has up to two slices: head and body
            if self._position >= len(self._rest):
                self._rest, self._position = b"", 0
                break
            if self._exchange is not None or self._write_paused or self._closing or self._pieces:
                break
            self._parse_slice()
        self._advancing = False
        if self._rest or self._throttled:
            self._schedule_advance()
            self._throttle()
        elif self._room is not None and self._transport is not None:
            LongBody(self, self._transport, self._room, self._filled_bytes)

    def count_received(self, count: int) -> None:
        """Count received bytes of a long body."""
        self._received_bytes += count

    def take_room(self) -> None:
        """Hand over a request whose long body is complete; the parser saw only its beginning, so it is replaced."""
        self._parser = httptools.HttpRequestParser(self)
        self._hand_over()

    def _schedule_advance(self) -> None:
        """Call ``_advance`` in the next turn of the loop, if there are bytes that can be parsed."""
        blocked = self._advancing or self._write_paused or self._closing or self._pieces
        if self._rest and self._exchange is None and not blocked:
            self._advancing = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _throttle(self) -> None:
        """Stop reading while many bytes wait to be parsed, and resume when few do.

        With few bytes it reads on even while a request is open: a disconnect is only noticed by reading.
        """
        transport = self._transport
        if transport is None or transport.is_closing():
            return
        full = len(self._rest) - self._position > _WAITING_BYTES
        if full and not self._throttled:
            transport.pause_reading()
        elif self._throttled and not full:
            transport.resume_reading()
        self._throttled = full

    def _slice_end(self) -> int:
        """Return where to stop feeding: never past the end of the request that is being parsed."""
        data, start = self._rest, self._position
        if self._left_bytes > 0:
            return min(len(data), start + self._left_bytes)
        if self._tail:  # the empty line may have begun in the bytes fed before
            empty_line = (self._tail + data[start : start + 3]).find(_EMPTY_LINE)
            if empty_line >= 0:
                return start + empty_line + len(_EMPTY_LINE) - len(self._tail)
        empty_line = data.find(_EMPTY_LINE, start)
        return len(data) if empty_line < 0 else empty_line + len(_EMPTY_LINE)

    def _parse_slice(self) -> None:
        """Feed the parser bytes, not beyond the end of the request, and hand the request over once it is complete."""
        start, end = self._position, self._slice_end()
        data = self._rest if end - start == len(self._rest) else memoryview(self._rest)[start:end]
        self._position = end
        if self._left_bytes <= 0:
            self._framing_bytes += end - start
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
        """Prepare for the next bytes of an incomplete request; send ``100 Continue`` to a client that waits for it."""
        if self._left_bytes <= 0:  # with a known length there is no empty line to look for
            self._tail = (self._tail + bytes(fed[-3:]))[-3:]
        if self._awaits_continue and self._transport is not None and self._position >= len(self._rest):
            self._awaits_continue = False
            self._transport.write(_CONTINUE)

    def _feed(self, data: bytes | memoryview) -> None:
        """Feed bytes to the parser; its errors become refusals."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            return  # continue with HTTP/1.1: a server may ignore a request to upgrade
        except httptools.HttpParserCallbackError as error:
            logger.exception("parsing a request of %s failed", self._peer)
            self._refusal = self._refusal or error_response(500, f"the request could not be parsed: {error}")
        except httptools.HttpParserError as error:
            self._refusal = self._refusal or error_response(400, f"malformed HTTP: {error}")

    def _hand_over(self) -> None:
        """Pass a complete request to the handler, or answer one that the gate has declined."""
        body = self._whole_body()
        exchange = HttpExchange(self._answer, self._method, self._target, self._headers, body, self._peer)
        exchange.passage, exchange.held_bytes = self._passage, self._held_bytes
        self._exchange = exchange
        self._body_parts, self._chunked_body, self._room = [], None, None
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
        """Return the body, without a copy if it is long."""
        if self._room is not None:
            return self._room.toreadonly()
        if self._chunked_body is not None:
            long = len(self._chunked_body) > _LONG_BODY_BYTES
            return memoryview(self._chunked_body).toreadonly() if long else bytes(self._chunked_body)
        return self._body_parts[0] if len(self._body_parts) == 1 else b"".join(self._body_parts)

    # Answers

    def _answer(self, exchange: HttpExchange, response: HttpResponse) -> None:
        """Write the answer to the open exchange, and release what the request held."""
        keep = self._keep_alive and not self._server.draining
        sent_bytes = self._write(exchange.method, response, keep)
        exchange.end()
        self._exchange = None
        self._server.in_flight -= 1
        self._release()
        self._server.record(exchange, response, sent_bytes)
        self._keep_open = keep
        self._clear()
        self._tail, self._framing_bytes = b"", 0
        if not self._pieces:
            self._after_answer()

    def _after_answer(self) -> None:
        """Continue with the next request, or close the connection, after an answer was written to its end."""
        if not self._keep_open or self._server.draining:
            self._finish()
            return
        self._idle_since_s = time.monotonic()
        self._slots.idle[self] = None
        self._schedule_advance()

    def _write(self, method: str, response: HttpResponse, keep: bool) -> int:
        """Write an answer, and return the number of bytes of its body; *keep*: whether the connection stays open."""
        body, count = response.body, body_bytes(response)
        length = b"" if response.status in NO_BODY else b"Content-Length: %d\r\n" % count
        connection = (
            b"" if keep and not self._http_1_0 else b"Connection: keep-alive\r\n" if keep else b"Connection: close\r\n"
        )
        extra = header_lines(response.headers) if response.headers else b""
        status_line = opening(response.status, response.content_type)
        head = b"%b%b%b%b%b\r\n" % (status_line, self._server.signature, length, connection, extra)
        if method == "HEAD" or response.status in NO_BODY:
            body, count = b"", 0
        transport = self._transport
        if transport is None:
            return 0
        pieces = [head, body] if isinstance(body, bytes) else [head, *body]
        if count <= _JOINED_BYTES:
            transport.write(b"".join(pieces))
        elif count <= _LONG_BODY_BYTES:
            transport.writelines(pieces)
        else:
            for piece in pieces:
                view = memoryview(piece)
                self._pieces.extend(view[start : start + _PIECE_BYTES] for start in range(0, len(view), _PIECE_BYTES))
            self._write_pieces()
        return count

    def _write_pieces(self) -> None:
        """Write the next piece of a long answer, one in each turn of the loop, until the transport asks to pause."""
        if not self._pieces or self._transport is None or self._write_paused:
            return
        self._transport.write(self._pieces.popleft())
        if self._pieces and not self._write_paused:
            asyncio.get_running_loop().call_soon(self._write_pieces)
        elif not self._pieces and self._exchange is None:
            self._after_answer()

    def _unsent(self) -> int:
        """Return the bytes written for the client that are not in the kernel yet."""
        written = self._transport.get_write_buffer_size() if self._transport is not None else 0
        return written + sum(map(len, self._pieces))

    def _refuse(self, response: HttpResponse) -> None:
        """Refuse bytes that are no complete request, and end the connection."""
        self._release()
        target = self._target if self._target.path else RequestTarget(self._url.decode("latin-1"), "", "")
        # None: it is not open, because its answer is written here
        exchange = HttpExchange(None, self._method, target, self._headers, b"", self._peer)
        sent_bytes = self._write(self._method, response, keep=False)
        self._server.record(exchange, response, sent_bytes)
        self._linger()

    # Ends

    def _finish(self) -> None:
        """Close the connection after its last answer; unread bytes of the client need a lingering close."""
        if self._position < len(self._rest) or self._throttled:
            self._linger()
        elif self._transport is not None:
            self._closing = True
            self._transport.close()

    def _linger(self) -> None:
        """End the server's side, and throw away further bytes until the client closes."""
        self._closing, self._throttled = True, False
        self._rest, self._position = b"", 0
        transport = self._transport
        if transport is not None and self._room is not None:
            transport.set_protocol(self)  # instead of LongBody
        self._body_parts, self._chunked_body, self._room, self._began_s = [], None, None, None
        self._linger_until_s = time.monotonic() + LINGER_S
        if transport is None:
            return
        self._slots.free(self)
        self._server.count_leaving(self)
        self._server.lingering.wait(transport)
        try:
            if transport.can_write_eof():
                transport.write_eof()
        except OSError:
            transport.abort()

    def _drop_exchange(self) -> None:
        """Drop the open exchange of a client that disconnected, and call its callback ``gone``."""
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
        """Release what a request that has ended held: bytes of the budget, and the gate's admission (passage)."""
        if self._held_bytes:
            self._server.budget.release(self._held_bytes)
            self._held_bytes = 0
        if self._passage is not None:
            passage, self._passage = self._passage, None
            passage.end()

    def _release_unread(self) -> None:
        """Return the bytes of unread answers to the budget: they were sent, or the connection has ended."""
        self._server.budget.release(self._unread_bytes)
        self._unread_bytes = 0

    def abort(self) -> None:
        """Close at once, without sending further bytes."""
        self._drop_exchange()
        if self._transport is not None:
            self._transport.abort()

    @property
    def unread(self) -> bool:
        """Whether the client has not read all that was written for it."""
        return self._unsent() > 0

    @property
    def owed(self) -> bool:
        """Whether a request of the client is not answered to its last byte."""
        return self._exchange is not None or (self._in_body and self._declined is None) or self.unread

    def leave(self) -> None:
        """Close an idle connection whose slot was freed already, or is not needed while draining."""
        self._closing, self._began_s = True, None
        self._linger_until_s = time.monotonic() + LINGER_S
        if self._transport is not None:
            self._server.count_leaving(self)
            self._transport.close()

    def close_if_idle(self) -> None:
        """Close the connection if it has no request and no byte of one."""
        if self._exchange is None and self._began_s is None and not (self._rest or self._pieces):
            self.leave()

    def sweep(self, now_s: float) -> None:
        """End the connection after a timeout: an unread answer, an incomplete request, or no request at all."""
        transport = self._transport
        if transport is None:
            return
        if self.unread:
            self._sweep_unread(transport, now_s)
            return
        self._answer_progress = None
        if self._linger_until_s is not None:
            if now_s > self._linger_until_s:
                transport.abort()
        elif self._began_s is not None:
            self._sweep_unfinished(now_s, self._began_s)
        elif now_s - self._idle_since_s > self._limits.idle_s:
            self.close_if_idle()

    def _sweep_unread(self, transport: asyncio.Transport, now_s: float) -> None:
        """Abort the connection if its client reads an answer too slowly; progress is the negative of unsent bytes."""
        unsent_bytes = self._unsent() + kernel_unsent_bytes(transport.get_extra_info("socket"))
        if self._answer_progress is None or unsent_bytes > self._unsent_bytes:
            self._answer_progress = self._start_progress(now_s, -unsent_bytes)
        elif self._answer_progress.stalled(now_s, -unsent_bytes):
            self.abort()
        self._unsent_bytes = unsent_bytes

    def _sweep_unfinished(self, now_s: float, began_s: float) -> None:
        """Refuse a request whose head takes too long, or whose body arrives too slowly; *began_s*: its first byte."""
        limits = self._limits
        if not self._in_body:
            if now_s - began_s > limits.read_s:
                self._refuse(error_response(408, f"the head did not end within {limits.read_s:g} s; send it faster"))
        elif self._body_progress is None:
            self._body_progress = self._start_progress(now_s, self._received_bytes)
        elif self._body_progress.stalled(now_s, self._received_bytes):
            least_rate = f"{limits.bytes_per_s:g} bytes per second over {limits.read_s:g} s"
            self._refuse(error_response(408, f"the body did not come at {least_rate}; send it faster"))

    def _start_progress(self, now_s: float, passed: int) -> TransferProgress:
        """Start to measure a transfer of which *passed* bytes have passed."""
        return TransferProgress(self._limits.read_s, self._limits.bytes_per_s, now_s, passed)


class ConnectionTable:
    """All connections of a server, and their shared limits, slots, byte budget, handler, gate and access log."""

    def __init__(
        self,
        handler: Handler,
        limits: ClientLimits,
        log: AccessLog | None,
        answers: Counter[int] | None,
        gate: Gate | None,
        budget: ByteBudget | None,
        vital: frozenset[str],
    ) -> None:
        """See ``HttpServer``."""
        self.handler, self.gate, self.vital = handler, gate, vital
        self.limits = limits
        self.budget = budget or ByteBudget(limits.connections * limits.body_bytes)
        self.uncounted_bytes = min(UNCOUNTED_BYTES, limits.body_bytes)
        """Bodies up to this do not count towards the byte budget."""
        self.slots, self.reserve = ConnectionSlots(limits.connections), ConnectionSlots(limits.reserve)
        self.all_taken = f"all {limits.connections} connections are taken; try again later"
        self.in_flight = 0
        """Requests that were handed to the handler and are not answered."""
        self.draining = False
        self.signature = b"Server: weft\r\n"
        """Header lines that every answer has."""
        self.lingering = LingeringClose()
        self._log, self._answers = log, Counter() if answers is None else answers
        self._connections: set[ServerConnection] = self.slots.taken
        self._leaving: dict[ServerConnection, None] = {}
        """Connections without a slot that are being closed, the oldest first."""
        self._empty = asyncio.Event()

    def _open(self) -> list[ServerConnection]:
        """Return the connections that hold a slot, those in the reserve included."""
        return [*self._connections, *self.reserve.taken]

    def _all(self) -> list[ServerConnection]:
        """Return all connections, including those that are being closed."""
        return [*dict.fromkeys([*self._open(), *self._leaving])]

    def admit(self, connection: ServerConnection) -> tuple[ConnectionSlots, str]:
        """Give a new connection a slot, in the reserve if all others are taken.

        Returns the slots it belongs to, and the reason for a refusal; empty if it was admitted, or aborted.
        """
        for slots in (self.slots, self.reserve):
            if not self.draining and slots.take(connection):
                return slots, ""
        if len(self._leaving) >= self.limits.connections:  # too many are being closed: this one gets no message
            connection.abort()
            return self.slots, ""
        return self.slots, "the server is going down" if self.draining else self.all_taken

    def count_leaving(self, connection: ServerConnection) -> None:
        """Count a connection as being closed, which holds no slot; if too many are, the oldest is aborted."""
        self._leaving[connection] = None
        if len(self._leaving) > self.limits.connections:
            oldest = next(iter(self._leaving))
            del self._leaving[oldest]
            oldest.abort()

    def forget(self, connection: ServerConnection) -> None:
        """Remove a closed connection."""
        self.slots.free(connection)
        self.reserve.free(connection)
        self._leaving.pop(connection, None)
        if self.draining and not self._all():
            self._empty.set()

    def record(self, exchange: HttpExchange, response: HttpResponse, sent_bytes: int) -> None:
        """Count an answer, and write it to the access log."""
        self._answers[response.status] += 1
        if self._log is None:
            return
        try:
            self._log(exchange, response, sent_bytes)
        except Exception:
            logger.exception("access log failed on %s %s", exchange.method, exchange.path)
