"""Answers of HTTP/1.1, read as they come."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_HEAD_BYTES = 1 << 16
MAX_KEPT_BYTES = 1 << 16
"""How much of an error's text is kept; the rest is read and forgotten."""

_HEADERS = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection|inference-header-content-length)[ \t]*:[ \t]*([^\r\n]*)",
    re.IGNORECASE,
)
_STATUS_LINE = re.compile(rb"HTTP/1\.[0-9] [1-9][0-9][0-9](?: |\r|\Z)")


class Answer(NamedTuple):
    """A complete answer."""

    status: int
    body: bytes
    """Its beginning: of a 200 as much as was asked for."""
    reusable: bool
    """Whether the connection may carry another request."""
    json_bytes: int | None = None
    """After so many bytes of the body tensors follow in binary; None where it is not said, -1 where it is no number."""
    head: bytes = b""
    """Its status line and headers."""


class NotHttp(ValueError):
    """What came back is no HTTP/1 answer."""


class AnswerParser:
    """Takes the bytes of answers as they come, in pieces of any size; gives each with its last byte."""

    __slots__ = (
        "_buffer", "_json_bytes", "_kept", "_left", "_read", "_reusable", "_room", "_status", "_take", "keep_bytes",
    )  # fmt: skip

    def __init__(self, *, keep_bytes: int = 0) -> None:
        self.keep_bytes = keep_bytes
        """How much of a 200's body is kept."""
        self._reset()

    def _reset(self) -> None:
        self._buffer = b""
        self._kept: list[bytes] = []
        self._read = b""
        self._status = 0
        self._left = 0
        self._room = 0
        self._json_bytes: int | None = None
        self._reusable = True
        self._take = self._head

    def feed(self, data: bytes) -> Answer | None:
        """The answer, if this completes it; bytes beyond it make its connection unfit for another request."""
        return self._take(data)

    def end(self) -> Answer | None:
        """The connection has ended: complete only where the end of the body is that of the connection."""
        if self._take != self._rest:
            return None
        return self._done(b"")

    def _head(self, data: bytes) -> Answer | None:
        if self._buffer:
            data = self._buffer + data
        end = data.find(b"\r\n\r\n")
        if end < 0 or end > MAX_HEAD_BYTES:
            if len(data) > MAX_HEAD_BYTES:
                raise NotHttp(f"its head is longer than {MAX_HEAD_BYTES} bytes")
            self._buffer = data
            return None
        self._buffer = b""
        self._begin(data[:end])
        rest = data[end + 4 :]
        if 100 <= self._status < 200:  # an interim answer; the real one follows
            self._reset()
            return self._head(rest) if rest else None
        if self._take == self._length and self._left == 0:
            return self._done(rest)
        return self._take(rest) if rest else None

    def _begin(self, head: bytes) -> None:
        if not _STATUS_LINE.match(head):
            raise NotHttp(f"it begins with {head[:40]!r}")
        self._read, self._status = head, int(head[9:12])
        self._reusable = head[7:8] == b"1"
        self._room = MAX_KEPT_BYTES if self._status != 200 else self.keep_bytes
        lengths, self._take = set(), self._rest
        for name, value in _HEADERS.findall(head):
            key = name.lower()
            if key == b"content-length":
                lengths.add(value.strip())
            elif key == b"connection":
                self._reusable = b"close" not in value.lower()
            elif key == b"inference-header-content-length":
                self._json_bytes = _number(value.strip())
            elif value.strip().lower() == b"chunked":
                self._take = self._chunk_size
            else:
                raise NotHttp(f"its transfer encoding is {value[:40]!r}")
        if self._take == self._chunk_size:
            return
        if self._status in (204, 304):
            self._left, self._take = 0, self._length
        elif lengths:
            self._left, self._take = _length_of(lengths), self._length
        else:
            self._reusable = False

    def _length(self, data: bytes) -> Answer | None:
        if len(data) < self._left:
            self._left -= len(data)
            self._keep(data)
            return None
        if self._room:
            self._keep(data[: self._left])
        return self._done(data[self._left :])

    def _rest(self, data: bytes) -> Answer | None:
        self._keep(data)
        return None

    def _chunk_size(self, data: bytes) -> Answer | None:
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
                self._take = self._trailer
                return self._trailer(data)
            self._left, self._take = size + 2, self._chunk  # with the line end after it
            if len(data) < self._left:
                return self._chunk(data)
            self._keep(data[:size])
            data, self._take = data[size + 2 :], self._chunk_size

    def _chunk(self, data: bytes) -> Answer | None:
        """More of a chunk that came in pieces."""
        if len(data) < self._left:
            self._keep(data[: max(0, self._left - 2)])
            self._left -= len(data)
            return None
        self._keep(data[: max(0, self._left - 2)])
        self._take = self._chunk_size
        return self._chunk_size(data[self._left :])

    def _trailer(self, data: bytes) -> Answer | None:
        data = self._buffer + data
        if data.startswith(b"\r\n"):
            return self._done(data[2:])
        end = data.find(b"\r\n\r\n")
        if end >= 0:
            return self._done(data[end + 4 :])
        if len(data) > MAX_HEAD_BYTES:
            raise NotHttp("its trailer has no end")
        self._buffer = data
        return None

    def _keep(self, data: bytes) -> None:
        if self._room:
            self._kept.append(data[: self._room])
            self._room -= len(self._kept[-1])

    def _done(self, beyond: bytes) -> Answer:
        answer = Answer(self._status, b"".join(self._kept), self._reusable and not beyond, self._json_bytes, self._read)
        self._reset()
        return answer


def _length_of(values: set[bytes]) -> int:
    text = min(values)
    length = _number(text)
    if len(values) > 1 or length < 0:
        raise NotHttp(f"its content length is {b', '.join(sorted(values))[:40]!r}")
    return length


def _number(text: bytes) -> int:
    """-1 where it is none."""
    return int(text) if text.isdigit() and len(text) <= 18 else -1
