"""What a server holds in memory together with its worker processes, and what it keeps of the memory that it has freed.

Freed memory is kept for the next requests after ordinary ones, given back after large ones. The C library gives larger
pieces back to the system, which clears every page of them when they are wanted again: a request of 600 KB then costs
twice as much. And it keeps what a thread has freed for that thread alone: messages of up to 64 MB over gRPC, whose
threads are its own, left 200 MB behind in four heaps, and 5 MB in one that is trimmed.
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
"""How old a number may be that is shown on the dashboard, which asks every second."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
"""Numbers of the GNU C library's ``mallopt``."""

KEPT_BYTES = 64 << 20
"""So much that is free at the end of the heap stays there."""
LARGE_BYTES = 32 << 20
"""Pieces from this size on come from the system and go back there; it is what the library comes to by itself, later."""
HEAPS = 1
"""Heaps that all threads share. Their lock costs nothing that was seen: 229 us of processor time per small request at 8
connections with one heap or four (Neoverse-N1)."""
IDLE_BYTES = 16 << 20
"""What stays at the end of the heap of a server that is idle."""


def held_bytes(pid: int, *, workers: bool, processes: Path = PROCESSES) -> int | None:
    """What a server holds: its physical memory, and that of its workers; None where the system does not tell.

    This is the number of plans, their pages and the dashboard. workers: whether it may have started others; then pages
    that several of them have are counted once, where the system says how many share them, which takes a look at every
    process there is.
    """
    if not workers:
        return resident_bytes(processes / str(pid)) or None
    found = [_process_bytes(processes / str(each)) for each in with_offspring(pid, processes)]
    return sum(found) or None


class HeldMemory:
    """What this server holds, read again when it was last read some time ago: with workers that takes milliseconds."""

    def __init__(self, *, workers: bool) -> None:
        self._workers = workers
        self._read_s = -math.inf
        self._bytes: int | None = None

    def now(self) -> int | None:
        if time.monotonic() - self._read_s > AGE_S:
            self._read_s, self._bytes = time.monotonic(), held_bytes(os.getpid(), workers=self._workers)
        return self._bytes


def with_offspring(pid: int, processes: Path) -> list[int]:
    """A process, its children and theirs, by their ids."""
    parents = {int(folder.name): _parent(folder) for folder in processes.glob("[0-9]*")}
    family = [pid]
    for each in family:
        family += [child for child, parent in parents.items() if parent == each]
    return family


def _parent(folder: Path) -> int:
    """Which process started one; 0 where it has ended meanwhile."""
    fields = read_text(folder / "stat").rpartition(")")[2].split()  # its name may hold anything
    return int(fields[1]) if len(fields) > 1 else 0


def _process_bytes(folder: Path) -> int:
    """Its part of the pages it has, else all of them; 0 where neither can be read."""
    if shared := re.search(r"^Pss:\s+(\d+) kB$", read_text(folder / "smaps_rollup"), re.MULTILINE):
        return int(shared[1]) << 10
    return resident_bytes(folder)


def resident_bytes(folder: Path) -> int:
    """All pages of a process, by its folder in the table of processes; 0 where that cannot be read."""
    fields = read_text(folder / "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def read_text(file: Path) -> str:
    """What a file of the system says; nothing where it is not there, or its process has ended."""
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""


def keep_freed_memory() -> None:
    """Have this process keep what ordinary requests free, where the C library can be told to."""
    if sys.platform != "linux" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    for what, value in ((_TRIM_THRESHOLD, KEPT_BYTES), (_MMAP_THRESHOLD, LARGE_BYTES), (_ARENA_MAX, HEAPS)):
        library.mallopt(what, value)


def give_freed_memory_back() -> None:
    """Give the system what is free in this process but for ``IDLE_BYTES``, where the C library can."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(IDLE_BYTES)
