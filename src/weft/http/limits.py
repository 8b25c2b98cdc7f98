"""Limits on the cost of HTTP clients: limits for every client, connection slots, and a byte budget for all of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Protocol

from weft.base.errors import InputError, OverBudget

UNCOUNTED_BYTES = 64 * 1024
"""Bodies up to this do not count towards the byte budget, so that small requests are accepted even if large ones
have used it up.

The connection limit bounds them: 1,024 connections hold 64 MiB of them at most.
"""


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits of one client, and of all clients together."""

    header_bytes: int = 16 * 1024
    """Request line and headers; also the bytes between two chunks, or after the last one."""
    body_bytes: int = 64 * 2**20
    connections: int = 1024
    reserve: int = 16
    """Connections beyond those, for health and metrics only."""
    idle_s: float = 75.0
    """Keep-alive without a request."""
    read_s: float = 30.0
    """From the first byte of a request to the end of its head; also the window of ``bytes_per_s``."""
    bytes_per_s: float = 1024.0
    """Lowest rate at which a client may send a body or read an answer."""
    pipeline: int = 16
    """Requests of one connection handled in a row before the other connections have their turn."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise InputError(f"HTTP limit {field.name} is {value!r}; it must be above zero")


class SlotHolder(Protocol):
    """A connection as ``ConnectionSlots`` sees it."""

    @property
    def owed(self) -> bool:
        """Whether the connection has a request whose answer is not sent to its last byte."""

    def leave(self) -> None:
        """Close the connection now: its slot was given to another one."""


class ConnectionSlots:
    """A limited number of connections; a new one may take the slot of an idle one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken: set[Any] = set()
        self.idle: dict[Any, None] = {}
        """Connections without a complete request head, as an ordered set: the one idle longest first."""

    def take(self, holder: SlotHolder) -> bool:
        """Give a connection a slot, if necessary that of an idle connection; False if there is neither."""
        if len(self.taken) >= self.limit and not self.evict_idle():
            return False
        self.taken.add(holder)
        self.idle[holder] = None
        return True

    def evict_idle(self) -> bool:
        """Close the connection that has been idle longest; False if none is idle."""
        for holder in self.idle:
            if not holder.owed:
                self.free(holder)
                holder.leave()
                return True
        return False

    def free(self, holder: SlotHolder) -> None:
        """Free the slot of a connection, if it holds one."""
        self.taken.discard(holder)
        self.idle.pop(holder, None)


class ByteBudget:
    """A limit on the bytes that all requests hold together.

    A request gets at most half of the bytes that are left, unless no other request holds any. Thus a large request
    always leaves room for smaller ones.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self.peak_bytes = 0
        """Maximum of ``held_bytes`` since this was last set to 0."""

    def take(self, count: int, own_bytes: int = 0) -> None:
        """Reserve *count* more bytes for a request that holds *own_bytes* already; OverBudget if they do not fit."""
        wanted_bytes, other_bytes = own_bytes + count, self.held_bytes - own_bytes
        free_bytes = self.limit_bytes - other_bytes
        if wanted_bytes > free_bytes or (other_bytes and 2 * wanted_bytes > free_bytes):
            raise OverBudget(
                f"no room for {wanted_bytes} bytes: {other_bytes} of {self.limit_bytes} are held for other requests; "
                "send it again later"
            )
        self.add(count)

    def add(self, count: int) -> None:
        """Reserve *count* bytes even beyond the limit, such as those of an answer that its client does not read."""
        self.held_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, count: int) -> None:
        """Release *count* bytes."""
        self.held_bytes -= count
