"""What a server holds in memory together with the worker processes that it has started."""

from __future__ import annotations

import math
import os
import re
import time
from pathlib import Path

PROCESSES = Path("/proc")
AGE_S = 5.0
"""How old a number may be that is shown on the dashboard, which asks every second."""


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
