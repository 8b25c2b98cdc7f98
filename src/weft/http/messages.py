"""What travels over HTTP: a request and the way to answer it, an answer, and both as bytes.

``http`` moves them. ``HttpExchange.respond`` must be called in the thread of the event loop.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

NO_BODY = frozenset({204, 304})
"""Statuses of answers without a body."""
_OURS = frozenset({"connection", "content-length", "content-type", "date", "server", "transfer-encoding"})
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ABSOLUTE = re.compile(r"https?://([^/?#@]+)(?=[/?#]|$)", re.IGNORECASE)


class Passage(Protocol):
    """What lets a request in that was judged by its head, until it is answered or its client has left."""

    @property
    def body_bytes(self) -> int:
        """Most bytes that its body may have."""

    def end(self) -> None:
        """The request is over; called once."""


class HttpResponse(NamedTuple):
    """An answer; ``Content-Length``, ``Server``, ``Date`` and ``Connection`` are added when it is sent."""

    status: int
    body: bytes | list[bytes] = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class RequestTarget(NamedTuple):
    """What a request is for."""

    path: str
    """Decoded and free of control characters."""
    raw_path: str
    """As sent, so that ``%2F`` can be told from ``/``."""
    query: str
    authority: str = ""
    """Host and port of a target in absolute form, which the header ``Host`` does not outweigh (RFC 9112, 3.2.2)."""


@dataclass(eq=False, slots=True)
class HttpExchange:
    """One request and the way to answer it.

    Header names are in lower case; a header given several times is joined by commas.
    Set ``gone`` before the handler returns: it is called once, if the client leaves before ``respond``.
    """

    _answer: Callable[[HttpExchange, HttpResponse], None] | None
    method: str
    target: RequestTarget
    headers: dict[str, str]
    body: bytes | memoryview
    """A view where it is long."""
    peer: str
    received_ns: int = field(default_factory=time.monotonic_ns)
    gone: Callable[[], None] | None = None
    passage: Passage | None = None
    """What the gate found out about it, where there is a gate."""
    held_bytes: int = 0
    """What the server holds for its body, of what it may hold for all."""

    @property
    def path(self) -> str:
        return self.target.path

    @property
    def open(self) -> bool:
        """Whether an answer is still wanted."""
        return self._answer is not None

    def respond(self, response: HttpResponse) -> None:
        """Answer, once; an answer too many, or to a client who left, is dropped.

        Raises ValueError for a header or status that cannot be sent; the exchange then stays open.
        """
        if self._answer is not None:
            self._answer(self, response)

    def end(self) -> Callable[[], None] | None:
        """Want no answer any more; returns whom to tell that the client left."""
        gone, self._answer, self.gone = self.gone, None, None
        return gone


def error_response(status: int, error: str, headers: tuple[tuple[str, str], ...] = ()) -> HttpResponse:
    """An answer whose body is ``{"error": ...}``."""
    return HttpResponse(status, json.dumps({"error": error}).encode(), headers=headers)


@lru_cache(maxsize=256)
def header_name(raw: bytes) -> str:
    """A header's name as it is known: in lower case."""
    return raw.decode("latin-1").lower()


@lru_cache(maxsize=256)
def parse_target(url: bytes) -> RequestTarget | None:
    """Path and query of a request target, or None when it is not one we serve."""
    raw, authority = url.decode("latin-1"), ""
    if not raw.startswith("/"):
        if raw == "*":
            return RequestTarget(raw, raw, "")
        absolute = _ABSOLUTE.match(raw)
        if absolute is None:
            return None
        authority, raw = absolute[1], raw[absolute.end() :]
        raw = raw if raw.startswith("/") else "/" + raw
    if "#" in raw or not (authority + raw).isascii() or not (authority + raw).isprintable():
        return None
    raw_path, _, query = raw.partition("?")
    if "%" not in raw_path:
        return RequestTarget(raw_path, raw_path, query, authority)
    try:
        path = unquote_to_bytes(raw_path).decode()
    except UnicodeDecodeError:
        return None
    if _BAD_ESCAPE.search(raw_path) or _CONTROL.search(path):
        return None
    return RequestTarget(path, raw_path, query, authority)


@lru_cache(maxsize=512)
def opening(status: int, content_type: str) -> bytes:
    """The status line and the content type."""
    if not 200 <= status <= 599:
        raise ValueError(f"response status is {status}; a final answer has 200 to 599")
    if not _VALUE.fullmatch(content_type):
        raise ValueError(f"content type {content_type!r} cannot be sent; remove control characters")
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"
    line = f"HTTP/1.1 {status} {phrase}\r\n"
    return (line if status in NO_BODY else f"{line}Content-Type: {content_type}\r\n").encode("latin-1")


@lru_cache(maxsize=256)
def header_lines(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Further headers of an answer; ValueError for one that cannot be sent."""
    lines = []
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or name.lower() in _OURS:
            raise ValueError(
                f"response header {name!r} cannot be set; use a token that the server does not write itself"
            )
        if not _VALUE.fullmatch(value):
            raise ValueError(f"response header {name} has the value {value!r}; remove line ends and control characters")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1")
