"""Packed answers: for whom, with what, and whether it pays."""

from __future__ import annotations

import gzip
import zlib

import numpy as np
import pytest

from weft.http import bodies
from weft.http.bodies import packed, wanted_encoding
from weft.http.messages import HttpResponse


@pytest.mark.parametrize(
    ("accepted", "wanted"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("gzip, deflate, br", "gzip"),
        ("deflate;q=0.9, gzip;q=0.5", "deflate"),
        ("GZIP; Q=0.3", "gzip"),
        ("*", "gzip"),
        ("gzip;q=0, *", "deflate"),
        ("gzip;q=0", ""),
        ("identity", ""),
        ("identity, gzip;q=0.5", ""),
        ("br", ""),
        ("", ""),
        ("gzip;q=many", ""),
    ],
)
def test_a_client_says_what_it_takes(accepted: str, wanted: str) -> None:
    assert wanted_encoding(accepted) == wanted


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_an_answer_in_parts_is_packed_into_one(encoding: str) -> None:
    whole = HttpResponse(200, [b"{" * 2000, b"\0" * 200_000], "application/octet-stream", (("A", "b"),))
    found = packed(whole, encoding)
    unpack = gzip.decompress if encoding == "gzip" else zlib.decompress
    assert isinstance(found.body, bytes) and unpack(found.body) == b"{" * 2000 + b"\0" * 200_000
    assert found.headers == (("A", "b"), ("Content-Encoding", encoding), ("Vary", "Accept-Encoding"))
    assert found[:1] + found[2:3] == (200, "application/octet-stream")


@pytest.mark.parametrize("size", [1500, 500_000])
def test_noise_stays_as_it_is(size: int) -> None:
    noise = HttpResponse(200, np.random.default_rng(0).bytes(size))
    assert packed(noise, "gzip") is noise


def test_a_large_answer_is_judged_by_a_sample_of_its_largest_part() -> None:
    noise = np.random.default_rng(0).bytes(bodies.SAMPLE_BYTES)
    assert packed(HttpResponse(200, [b"{" * 2000, noise, noise]), "gzip").body == [b"{" * 2000, noise, noise]
