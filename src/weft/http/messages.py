"""HTTP messages as values: a request with its reply function, an answer, and the headers of a gate (router).

``HttpExchange.respond`` must be called in the thread of the event loop.

A gate and a server behind it exchange three headers. A request carries its age, so that its deadlines count from the
moment its client sent it, although the machines' clocks differ, and the priorities that its client's key allows. The
answer to such a request carries an estimate for the next one, by which the gate divides requests among servers.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple, Protocol
from urllib.parse import unquote_to_bytes

from weft.base.errors import BadRequest

NO_BODY = frozenset({204, 304})
"""Statuses of answers without a body."""
_SERVER_HEADERS = frozenset({"connection", "content-length", "content-type", "date", "server", "transfer-encoding"})
"""Headers that the server writes itself."""
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\t\x20-\x7e\x80-\xff]*")
_BAD_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ABSOLUTE = re.compile(r"https?://([^/?#@]+)(?=[/?#]|$)", re.IGNORECASE)


class Passage(Protocol):
    """The admission of a request by the gate; it lasts until the answer, or until the client disconnects."""

    @property
    def body_bytes(self) -> int:
        """Most bytes that its body may have."""

    def end(self) -> None:
        """Release what the admission holds; called once."""


class HttpResponse(NamedTuple):
    """An answer; ``Content-Length``, ``Server``, ``Date`` and ``Connection`` are added when it is sent."""

    status: int
    body: bytes | list[bytes] = b""
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class RequestTarget(NamedTuple):
    """The target of a request: path and query."""

    path: str
    """Decoded, without control characters."""
    raw_path: str
    """As sent, so that ``%2F`` and ``/`` remain different."""
    query: str
    authority: str = ""
    """Host and port of a target in absolute form, which goes before the header ``Host`` (RFC 9112, 3.2.2)."""


@dataclass(eq=False, slots=True)
class HttpExchange:
    """A request with its reply function.

    Header names are in lower case; a repeated header is joined by commas. Set ``gone`` before the handler returns: it
    is called once, if the client disconnects before ``respond``.
    """

    _answer: Callable[[HttpExchange, HttpResponse], None] | None
    method: str
    target: RequestTarget
    headers: dict[str, str]
    body: bytes | memoryview
    """A view if it is long."""
    peer: str
    received_ns: int = field(default_factory=time.monotonic_ns)
    gone: Callable[[], None] | None = None
    passage: Passage | None = None
    """The admission of the server's gate, if it has one."""
    held_bytes: int = 0
    """Bytes of its body that count towards the byte budget."""

    @property
    def path(self) -> str:
        """Decoded path of the target."""
        return self.target.path

    @property
    def open(self) -> bool:
        """Whether the client still waits for an answer."""
        return self._answer is not None

    def respond(self, response: HttpResponse) -> None:
        """Answer, once; a second answer, or one to a client that disconnected, is dropped.

        Raises ValueError for a header or status that cannot be sent; the exchange then stays open.
        """
        if self._answer is not None:
            self._answer(self, response)

    def end(self) -> Callable[[], None] | None:
        """Close the exchange, so that later answers are dropped; return the callback ``gone``, if it was set."""
        gone, self._answer, self.gone = self.gone, None, None
        return gone


def error_response(status: int, error: str, headers: tuple[tuple[str, str], ...] = ()) -> HttpResponse:
    """Return an answer whose body is ``{"error": ...}``."""
    return HttpResponse(status, json.dumps({"error": error}).encode(), headers=headers)


@lru_cache(maxsize=256)
def header_name(raw: bytes) -> str:
    """Return the name of a header in lower case."""
    return raw.decode("latin-1").lower()


@lru_cache(maxsize=256)
def parse_target(url: bytes) -> RequestTarget | None:
    """Parse a request target; None if it is malformed, or of a form that the server does not serve."""
    raw, authority = url.decode("latin-1"), ""
    if not raw.startswith("/"):
        if raw == "*":  # of OPTIONS
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
    """Return the status line and the header Content-Type of an answer; ValueError if they cannot be sent."""
    if not 200 <= status <= 599:
        raise ValueError(f"response status is {status}; a final answer has 200 to 599")
    if not _VALUE.fullmatch(content_type):
        raise ValueError(f"content type {content_type!r} cannot be sent; remove control characters")
    phrase = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Unknown"
    line = f"HTTP/1.1 {status} {phrase}\r\n"
    return (line if status in NO_BODY else f"{line}Content-Type: {content_type}\r\n").encode("latin-1")


@lru_cache(maxsize=256)
def header_lines(headers: tuple[tuple[str, str], ...]) -> bytes:
    """Return the lines of the handler's own headers; ValueError for a header that cannot be sent."""
    lines = []
    for name, value in headers:
        if not _TOKEN.fullmatch(name) or name.lower() in _SERVER_HEADERS:
            raise ValueError(
                f"response header {name!r} cannot be set; use a token that the server does not write itself"
            )
        if not _VALUE.fullmatch(value):
            raise ValueError(f"response header {name} has the value {value!r}; remove line ends and control characters")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode("latin-1")


# Headers between a gate (router) and a server

AGE = "weft-age-us"
RANK = "weft-priority"
ESTIMATE = "Weft-Estimate"

_OLDEST_US = 10**12  # 11 days; a larger age is no age, and its nanoseconds would leave 63 bits
_RANK = re.compile(r"([0-3]) ([1-3])")
_ESTIMATE = re.compile(rb"\r\nweft-estimate: ?(\d{1,15}) (\d{1,15}) (\d{1,6})(?:\r|\Z)", re.IGNORECASE)


class ClientRank(NamedTuple):
    """The priorities that a client's key gives its requests (``weft.serving.access``)."""

    priority: int = 0
    """Priority of requests without one; 0: that of their model."""
    top: int = 1
    """Highest priority that the key allows; 1 is the highest of all."""

    def within(self, other: ClientRank) -> ClientRank:
        """Combine the ranks of two keys (client's and gate's): the highest priority is what both allow."""
        return ClientRank(self.priority or other.priority, max(self.top, other.top))

    def header(self) -> str:
        """Return the header line of a request."""
        return f"{RANK}: {self.priority} {self.top}\r\n"


ANYONE = ClientRank()


def rank_of(headers: Mapping[str, str]) -> ClientRank:
    """Return the priorities that a gate passed on with a request; ``ANYONE`` for a request directly from its client."""
    text = headers.get(RANK)
    if text is None:
        return ANYONE
    match = _RANK.fullmatch(text)
    if match is None:
        raise BadRequest(f"{RANK} = {text[:40]!r} must be a priority from 0 to 3 and the highest one, from 1 to 3")
    return ClientRank(int(match[1]), int(match[2]))


class ServerEstimate(NamedTuple):
    """A server's estimate for the next request of the same model."""

    wait_ns: int
    """Time until a lane is free for the request."""
    compute_ns: int
    """Computing time of the request."""
    lanes: int
    """Number of such requests that are computed at a time."""

    def header(self) -> tuple[str, str]:
        """Return the header of an answer, with the times in microseconds."""
        return ESTIMATE, f"{self.wait_ns // 1000} {self.compute_ns // 1000} {self.lanes}"


def age_of(headers: Mapping[str, str]) -> int | None:
    """Return the nanoseconds that a request has spent in gates; None for a request directly from its client."""
    text = headers.get(AGE)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) < _OLDEST_US):
        raise BadRequest(f"{AGE} = {text[:40]!r} must be a whole number of microseconds")
    return int(text) * 1000


def estimate_in(head: bytes) -> ServerEstimate | None:
    """Return the estimate in the head of an answer; None if it has none."""
    match = _ESTIMATE.search(head)
    if match is None:
        return None
    wait_us, compute_us, lanes = map(int, match.groups())
    return ServerEstimate(wait_us * 1000, compute_us * 1000, max(1, lanes))
