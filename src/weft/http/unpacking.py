"""Compressed bodies, unpacked piece by piece: a small one may hold much."""

from __future__ import annotations

import zlib

from weft.base.errors import BadRequest, TooLarge

STEP_BYTES = 4 << 20
"""What is unpacked at a time."""

SLICE_BYTES = 1 << 20
"""What zlib is given at a time."""

ENCODINGS = {"gzip": 31, "deflate": 15}
"""What a body may be packed with -> how zlib is told so."""


class Unpacker:
    """One body, as long as it stays within a limit."""

    def __init__(self, body: bytes | memoryview, encoding: str, most_bytes: int) -> None:
        self._machine = zlib.decompressobj(ENCODINGS[encoding])
        self._body, self._at, self._encoding = memoryview(body), 0, encoding
        self._rest = b""
        """What zlib was given and has not used yet."""
        self._most_bytes, self._unpacked_bytes = most_bytes, 0

    def step(self) -> bytes:
        """The next piece, empty after the last one; BadRequest if there is none, TooLarge if it is too much."""
        while not self._machine.eof:
            packed = self._rest or self._slice()
            try:
                piece = self._machine.decompress(packed, STEP_BYTES)
            except zlib.error as error:
                raise BadRequest(f"the body is not {self._encoding}: {error}") from error
            self._rest = self._machine.unconsumed_tail
            if piece:
                return self._counted(piece)
            if not packed and not self._machine.eof:
                raise BadRequest(f"the {self._encoding} body ends too early")
        return b""

    def _slice(self) -> memoryview:
        """A little of the body: what zlib does not use of it is copied in every step."""
        start, self._at = self._at, self._at + SLICE_BYTES
        return self._body[start : self._at]

    def _counted(self, piece: bytes) -> bytes:
        self._unpacked_bytes += len(piece)
        if self._unpacked_bytes > self._most_bytes:
            raise TooLarge(f"the unpacked body exceeds the limit of {self._most_bytes} bytes")
        return piece
