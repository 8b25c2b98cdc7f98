"""What a gate and a server behind it tell each other beside the protocol, in headers.

A request says how long others have had it, so that its deadlines count from when its client sent it, whatever clocks
say, and what its client's key gives it. An answer to such a request says what stands before the next one, so that
whoever divides requests knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from weft.base.errors import BadRequest

AGE = "weft-age-us"
RANK = "weft-priority"
ESTIMATE = "Weft-Estimate"

_OLDEST_US = 10**12
_RANKED = re.compile(r"([0-3]) ([1-3])")
_TOLD = re.compile(rb"\r\nweft-estimate: ?(\d{1,15}) (\d{1,15}) (\d{1,6})(?:\r|\Z)", re.IGNORECASE)


class ClientRank(NamedTuple):
    """What a client's key gives its requests (``keys``)."""

    priority: int = 0
    """Of those that state none; 0: that of their model."""
    top: int = 1
    """The highest that they get."""

    def within(self, other: ClientRank) -> ClientRank:
        """What is left of it where another key counts as well: nobody is raised above either."""
        return ClientRank(self.priority or other.priority, max(self.top, other.top))

    def header(self) -> str:
        return f"{RANK}: {self.priority} {self.top}\r\n"


ANYONE = ClientRank()


def rank_of(headers: Mapping[str, str]) -> ClientRank:
    """What the keys that others saw gave a request; all, where it comes from its client."""
    text = headers.get(RANK)
    if text is None:
        return ANYONE
    found = _RANKED.fullmatch(text)
    if found is None:
        raise BadRequest(f"{RANK} = {text[:40]!r} must be a priority from 0 to 3 and the highest one, from 1 to 3")
    return ClientRank(int(found[1]), int(found[2]))


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
