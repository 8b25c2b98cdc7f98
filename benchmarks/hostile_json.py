"""JSON bodies that cost a parser most for their size, by what they consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from chaos import post

BODY_BYTES = 60 << 20


class Body(NamedTuple):
    """JSON that is one piece repeated, between a beginning and an end."""

    name: str
    begin: bytes
    piece: bytes
    end: bytes = b""

    def filled(self, size: int) -> bytes:
        """So many bytes of it, about."""
        times = max(1, (size - len(self.begin) - len(self.end)) // len(self.piece))
        return self.begin + self.piece * times + self.end


KINDS: dict[str, tuple[Body, ...]] = {
    "json-parts": (
        Body("objects", b'{"inputs":[', b"{},", b"{}]}"),
        Body("objects with a key", b'{"inputs":[', b'{"a":1},', b"{}]}"),
        Body("objects that nobody knows", b'{"x":[', b'{"a":{"b":1}},', b'1],"inputs":[]}'),
        Body("lists", b'{"inputs":[', b"[],", b"[]]}"),
        Body("deep lists", b'{"inputs":[', b"[" * 900 + b"]" * 900 + b",", b"[]]}"),
        Body("lists without an end", b'{"inputs":', b"["),
        Body("objects without an end", b'{"a":', b'{"a":'),
        Body("a key again and again", b"{", b'"a":1,', b'"inputs":[]}'),
        Body("inputs again and again", b"{", b'"inputs":[],', b'"inputs":[]}'),
    ),
    "json-text": (
        Body("one string", b'{"id":"', b"a", b'"}'),
        Body("escapes", b'{"id":"', b"\\u00e9", b'"}'),
        Body("escaped quotation marks", b'{"id":"', b'\\"', b'"}'),
        Body("backslashes", b'{"id":"', b"\\\\", b'"}'),
        Body("what is structure elsewhere", b'{"id":"', b":{[,", b'"}'),
        Body("bytes that are no text", b'{"id":"', b"\xff", b'"}'),
        Body("strings", b'{"inputs":[', b'"ab",', b'""]}'),
        Body("empty strings", b'{"inputs":[', b'"",', b'""]}'),
        Body("spaces", b"{", b" ", b"}"),
        Body("zero bytes", b"{", b"\0", b"}"),
        Body("commas", b"{", b",", b"}"),
    ),
    "json-numbers": (
        Body("integers", b'{"inputs":[', b"257,", b"1]}"),
        Body("digits", b'{"inputs":[', b"1,", b"1]}"),
        Body("floats", b'{"inputs":[', b"1e9,", b"1]}"),
        Body("one number", b'{"inputs":', b"1", b"}"),
        Body("literals", b'{"inputs":[', b"NaN,", b"1]}"),
    ),
}
"""Attack -> the bodies that it sends in turn."""


def requests(kind: str, size: int = BODY_BYTES) -> Iterator[Callable[[], bytes]]:
    """The requests of an attack, for ever; each is made when it is sent, as together they would fill the memory."""
    while True:
        for body in KINDS[kind]:
            yield lambda body=body: post("/v2/models/wide/infer", body.filled(size))  # type: ignore[misc]
