"""What a gate and a server behind it tell each other beside the protocol, in headers.

A request says how long others have had it, so that its deadlines count from when its client sent it, whatever clocks
say. An answer to such a request says what stands before the next one, so that whoever divides requests knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from weft.errors import BadRequest

AGE = "weft-age-us"
ESTIMATE = "Weft-Estimate"

_OLDEST_US = 10**12
_TOLD = re.compile(rb"\r\nweft-estimate: ?(\d{1,15}) (\d{1,15}) (\d{1,6})(?:\r|\Z)", re.IGNORECASE)


class ServerEstimate(NamedTuple):
    """What a server expects for another request; times are nanoseconds."""

    ahead: int
    """Until a lane is free for it."""
    own: int
    """What it takes itself."""
    lanes: int
    """How many such requests are computed at a time."""

    def header(self) -> tuple[str, str]:
        return ESTIMATE, f"{self.ahead // 1000} {self.own // 1000} {self.lanes}"


def age_of(headers: Mapping[str, str]) -> int | None:
    """How long others have had a request, in nanoseconds; None where it comes from its client."""
    text = headers.get(AGE)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 16 and int(text) < _OLDEST_US):
        raise BadRequest(f"{AGE} = {text[:40]!r} must be a whole number of microseconds")
    return int(text) * 1000


def estimate_in(head: bytes) -> ServerEstimate | None:
    """What the head of an answer says; None where it says nothing."""
    found = _TOLD.search(head)
    if found is None:
        return None
    ahead, own, lanes = (int(each) for each in found.groups())
    return ServerEstimate(ahead * 1000, own * 1000, max(1, lanes))
