"""Compressed bodies, unpacked piece by piece: a small one may hold much."""

from __future__ import annotations

import zlib

from weft.errors import BadRequest, TooLarge

STEP_BYTES = 4 << 20
"""What is unpacked at a time."""

ENCODINGS = {"gzip": 31, "deflate": 15}
"""What a body may be packed with -> how zlib is told so."""


class Unpacker:
    """One body, as long as it stays within a limit."""

    def __init__(self, body: bytes, encoding: str, most_bytes: int) -> None:
        self._machine = zlib.decompressobj(ENCODINGS[encoding])
        self._rest, self._encoding = body, encoding
        self._most_bytes, self._unpacked_bytes = most_bytes, 0

    def step(self) -> bytes:
        """The next piece, empty after the last one; BadRequest if there is none, TooLarge if it is too much."""
        if self._machine.eof:
            return b""
        try:
            piece = self._machine.decompress(self._rest, STEP_BYTES)
        except zlib.error as error:
            raise BadRequest(f"the body is not {self._encoding}: {error}") from error
        self._rest = self._machine.unconsumed_tail
        self._unpacked_bytes += len(piece)
        if self._unpacked_bytes > self._most_bytes:
            raise TooLarge(f"the unpacked body exceeds the limit of {self._most_bytes} bytes")
        if not piece and not self._machine.eof:
            raise BadRequest(f"the {self._encoding} body ends too early")
        return piece
