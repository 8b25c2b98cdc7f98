"""Memory of a server and its worker processes, and tuning of the C library's allocator.

Freed memory is kept for the next requests after ordinary requests, and returned to the system after large ones. By
default the C library returns larger pieces, and the system clears every page when they are allocated again: a request
of 600 KB then takes twice as long. It also keeps what a thread has freed for that thread alone: messages of up to 64 MB
over gRPC, which has threads of its own, left 200 MB in four heaps, and 5 MB in one heap that is trimmed.
"""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
import time
from pathlib import Path

PROCESSES = Path("/proc")
AGE_S = 5.0
"""Age up to which a reading is reused: the dashboard polls every second, and a reading takes milliseconds."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of the GNU C library's ``mallopt``."""

KEPT_BYTES = 64 << 20
"""Free memory at the end of the heap that is kept (64 MiB): enough for ordinary requests in flight."""
LARGE_BYTES = 32 << 20
"""Allocations from this size on are mapped from the system and returned to it. The library reaches this threshold by
itself, later, since it raises it with every such piece that is freed."""
HEAPS = 1
"""Heaps that all threads share. The contention for their lock was not measurable: 229 us of processor time per small
request at 8 connections with one heap and with four (Neoverse-N1)."""
IDLE_BYTES = 16 << 20
"""Free memory that an idle server keeps (16 MiB)."""


def held_bytes(pid: int, *, workers: bool, processes: Path = PROCESSES) -> int | None:
    """Return the physical memory of a server and its worker processes; None if the system does not report it.

    Plans, their pages and the dashboard show this number. workers: whether there may be worker processes; to find them,
    all processes of the system must be read. Shared pages count once, if the system reports them (PSS). processes: the
    folder /proc.
    """
    if not workers:
        return resident_bytes(processes / str(pid)) or None
    return sum(_process_bytes(processes / str(child)) for child in with_offspring(pid, processes)) or None


class HeldMemory:
    """The memory of this server, cached for ``AGE_S`` seconds: with workers a reading takes milliseconds."""

    def __init__(self, *, workers: bool) -> None:
        self._workers = workers
        self._read_s = -math.inf
        self._bytes: int | None = None

    def now(self) -> int | None:
        """Return the memory in bytes, at most ``AGE_S`` old; None if the system does not report it."""
        if time.monotonic() - self._read_s > AGE_S:
            self._read_s, self._bytes = time.monotonic(), held_bytes(os.getpid(), workers=self._workers)
        return self._bytes


def with_offspring(pid: int, processes: Path) -> list[int]:
    """Return the ids of a process and all its descendants."""
    parents = {int(folder.name): _parent(folder) for folder in processes.glob("[0-9]*")}
    family = [pid]
    for ancestor in family:  # the list grows meanwhile: children are ancestors, too
        family += [child for child, parent in parents.items() if parent == ancestor]
    return family


def _parent(folder: Path) -> int:
    """Return the id of the parent of a process, given its folder below /proc; 0 if the process has ended."""
    fields = read_text(folder / "stat").rpartition(")")[2].split()  # the name in parentheses may hold any text
    return int(fields[1]) if len(fields) > 1 else 0  # state and parent follow the name


def _process_bytes(folder: Path) -> int:
    """Return the proportional memory of a process (PSS), else its resident memory; 0 if neither can be read."""
    if shared := re.search(r"^Pss:\s+(\d+) kB$", read_text(folder / "smaps_rollup"), re.MULTILINE):
        return int(shared[1]) << 10
    return resident_bytes(folder)


def resident_bytes(folder: Path) -> int:
    """Return the resident memory of a process, given its folder below /proc; 0 if it cannot be read."""
    fields = read_text(folder / "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0  # pages: size, resident, ...


def read_text(file: Path) -> str:
    """Read a file below /proc; empty if it does not exist, or its process has ended."""
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""


def keep_freed_memory() -> None:
    """Configure the C library to keep the memory that ordinary requests free; no effect except on GNU/Linux."""
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    for parameter, value in ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, LARGE_BYTES), (_ARENA_MAX, HEAPS)):
        library.mallopt(parameter, value)


def give_freed_memory_back() -> None:
    """Return free memory to the system except ``IDLE_BYTES``; no effect except on GNU/Linux."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(IDLE_BYTES)
