"""What clients over HTTP may cost, each of them and all together."""

from __future__ import annotations

from dataclasses import dataclass, fields

from weft.base.errors import InputError


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """What one client, and all of them together, may cost."""

    header_bytes: int = 16 * 1024
    """Request line and headers; also what may stand between two chunks or after the last one."""
    body_bytes: int = 64 * 2**20
    connections: int = 1024
    reserve: int = 16
    """Connections beyond those, for health and metrics only."""
    idle_s: float = 75.0
    """Keep-alive without a request."""
    read_s: float = 30.0
    """From the first byte of a request to the end of its head; also the window over which ``bytes_per_s`` is asked."""
    bytes_per_s: float = 1024.0
    """How fast a body must come, and an answer be taken, at least."""
    pipeline: int = 16
    """Requests of one connection handled in a row before the other connections have their turn."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise InputError(f"HTTP limit {field.name} is {value!r}; it must be above zero")
