"""Places for connections: so many and no more, and whoever has been idle longest leaves for somebody new."""

from __future__ import annotations

from typing import Any, Protocol


class Occupant(Protocol):
    """A connection that has a place."""

    @property
    def owed(self) -> bool:
        """Whether it asked for something that it has not got to its last byte."""

    def leave(self) -> None:
        """End it now: its place was given away."""


class Places:
    """At most so many connections."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken: set[Any] = set()
        self.idle: dict[Any, None] = {}
        """Those without a request whose head has come, the one that has been so longest first."""

    def seat(self, occupant: Occupant) -> bool:
        """Give it a place, that of somebody idle if need be; whether there was one."""
        if len(self.taken) >= self.limit and not self.make_room():
            return False
        self.taken.add(occupant)
        self.idle[occupant] = None
        return True

    def make_room(self) -> bool:
        """Let go of whoever has been idle longest; False if nobody is idle."""
        for occupant in self.idle:
            if not occupant.owed:
                self.forget(occupant)
                occupant.leave()
                return True
        return False

    def forget(self, occupant: Occupant) -> None:
        self.taken.discard(occupant)
        self.idle.pop(occupant, None)
