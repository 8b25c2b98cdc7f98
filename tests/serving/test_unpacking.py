"""Compressed bodies, unpacked piece by piece."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import BadRequest, TooLarge
from weft.http.bodies import SLICE_BYTES, STEP_BYTES, Unpacker

PACKERS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


def unpacked(body: bytes, encoding: str, most_bytes: int = 1 << 30) -> bytes:
    unpacker = Unpacker(body, encoding, most_bytes)
    pieces = list(iter(unpacker.step, b""))
    assert all(len(piece) <= STEP_BYTES for piece in pieces) and unpacker.step() == b""
    return b"".join(pieces)


@pytest.mark.parametrize("encoding", PACKERS)
@settings(max_examples=25, deadline=None)
@given(data=st.lists(st.binary(max_size=60).map(lambda each: each * 7)).map(b"".join), size=st.integers(1, 40))
def test_a_body_is_what_was_packed_however_it_is_cut(encoding: str, data: bytes, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.http.bodies.SLICE_BYTES", size)
        assert unpacked(PACKERS[encoding](data), encoding) == data
        with pytest.raises(BadRequest, match="ends too early"):
            unpacked(PACKERS[encoding](data)[:-1], encoding)


def test_a_large_body_is_given_to_zlib_little_by_little() -> None:
    data = os.urandom(2 * STEP_BYTES)
    unpacker, found = Unpacker(gzip.compress(data, 1), "gzip", len(data)), b""
    while piece := unpacker.step():
        found += piece
        assert len(unpacker._rest) <= SLICE_BYTES
    assert found == data


def test_what_unpacks_to_too_much_is_refused_on_the_way() -> None:
    unpacker = Unpacker(gzip.compress(b"\0" * (3 * STEP_BYTES)), "gzip", STEP_BYTES)
    assert len(unpacker.step()) == STEP_BYTES
    with pytest.raises(TooLarge, match="exceeds the limit"):
        unpacker.step()


@pytest.mark.parametrize("encoding", PACKERS)
def test_what_is_not_packed_is_refused(encoding: str) -> None:
    with pytest.raises(BadRequest, match=f"not {encoding}"):
        unpacked(b"{}{}", encoding)
    with pytest.raises(BadRequest, match="ends too early"):
        unpacked(b"", encoding)
