"""Limits of worker processes, and counters of their deaths and restarts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from weft.runtime.breaker import BreakerLimits


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of every worker of a server."""

    memory_bytes: int | None = None  # None: no limit
    open_files: int = 1024
    kill_s: float = 0.5
    """Grace period of a step that was asked to stop, in seconds; then its worker is killed."""
    spare: bool = True  # whether a second process with the same models is ready to take over
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    folders: tuple[str, ...] = ()
    """Folders that workers may read, with all subfolders, besides the folders of their models."""
    shared_cache: str | None = None
    """A folder in the cache that workers may read, and only the server writes to."""
    device_memory_bytes: int | None = None
    """Memory of a device that all models together may hold; models that do not fit are evicted in turns."""
    gates: bool = False
    """Whether models get gates where the device can have them, so that workers get a stop table."""


class WorkerCounts(NamedTuple):
    """How many workers died and were restarted."""

    deaths: int
    restarts: int  # workers that were started after one had died
