"""Answers packed with gzip or deflate for clients that take them so, where that pays.

Many libraries say for their users that they take them so. Hence short answers stay as they are, all others are packed
in threads, and of long ones a sample is tried first: numbers that look like noise stay as they are, too.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

from weft.http.messages import HttpResponse
from weft.http.unpacking import ENCODINGS

LEAST_BYTES = 4096
"""What is shorter fits a few packets, and is sent as it is."""
SAMPLE_BYTES = 16 * 1024
WORTH = 0.9
"""Packed it must be at most this part of what it was."""
LEVEL = 1
"""zlib's: a faster answer is wanted, not the shortest one."""


def body_bytes(response: HttpResponse) -> int:
    """How long the body of an answer is."""
    return len(response.body) if isinstance(response.body, bytes) else sum(map(len, response.body))


@lru_cache(maxsize=256)
def wanted_encoding(accepted: str) -> str:
    """What a client that sends this as ``Accept-Encoding`` would like; empty: the answer as it is."""
    weights: dict[str, float] = {}
    for part in accepted.lower().split(","):
        name, _, rest = part.strip().partition(";")
        weights[name.strip()] = _weight(rest)
    rest_weight = weights.get("*", 0.0)
    best = max(ENCODINGS, key=lambda name: weights.get(name, rest_weight))
    weight = weights.get(best, rest_weight)
    return best if weight > 0 and weight >= weights.get("identity", 0.0) else ""


def _weight(text: str) -> float:
    key, _, value = text.strip().partition("=")
    if key.strip() != "q":
        return 1.0
    try:
        return float(value)
    except ValueError:
        return 0.0


def packed(response: HttpResponse, encoding: str) -> HttpResponse:
    """The answer packed, or as it is where that does not pay; on any thread."""
    parts = [response.body] if isinstance(response.body, bytes) else response.body
    whole_bytes, sample = body_bytes(response), max(parts, key=len)[:SAMPLE_BYTES]
    if whole_bytes > SAMPLE_BYTES and len(zlib.compress(sample, LEVEL)) > WORTH * len(sample):
        return response
    machine = zlib.compressobj(LEVEL, zlib.DEFLATED, ENCODINGS[encoding])
    body = b"".join([*map(machine.compress, parts), machine.flush()])
    if len(body) > WORTH * whole_bytes:
        return response
    told = (("Content-Encoding", encoding), ("Vary", "Accept-Encoding"))
    return response._replace(body=body, headers=(*response.headers, *told))
