"""What a server holds in memory together with the worker processes that it has started."""

from __future__ import annotations

import os
import re
from pathlib import Path

PROCESSES = Path("/proc")


def held_bytes(pid: int, processes: Path = PROCESSES) -> int | None:
    """Physical memory of a process and of all that it has started; None where the system does not tell.

    Pages that several of them have are counted once, where the system says how many share them.
    """
    found = [_process_bytes(processes / str(each)) for each in with_offspring(pid, processes)]
    return sum(found) or None


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
    fields = read_text(folder / "statm").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") if len(fields) > 1 else 0


def read_text(file: Path) -> str:
    """What a file of the system says; nothing where it is not there, or its process has ended."""
    try:
        return file.read_text("utf-8", "replace")
    except OSError:
        return ""
