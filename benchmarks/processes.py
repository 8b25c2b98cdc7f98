"""The processes of a server as the system sees them: CPU time and memory used; and ending one of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from weft.serving.held_memory import held_bytes

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
SHORTEST_MARK = 16
"""Whoever finds processes by a mark may end them, so it must be one that nobody else has by chance."""
WORKER = b"weft worker"
"""What the system calls a worker."""
WORKED_NS = 1_000_000
"""Who has computed for longer since the last kill is at work."""


class Process(NamedTuple):
    """One line of the system's table; a number may be given again, but not with the same start."""

    pid: int
    parent: int
    ticks: int
    """Processor time so far, with that of children which have ended."""
    started: int
    ended: bool
    """It is gone, and only its parent has not asked yet."""


def processes() -> Iterator[Process]:
    """All there are."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        yield Process(
            int(folder.name), int(fields[1]), sum(map(int, fields[11:15])), int(fields[19]), fields[0] in "ZX"
        )


def family(pid: int, table: Iterable[Process] | None = None) -> list[Process]:
    """A process, its children and theirs."""
    known = {process.pid: process for process in (processes() if table is None else table)}
    found, grown = {pid} & known.keys(), True
    while grown:
        more = {process.pid for process in known.values() if process.parent in found} - found
        found, grown = found | more, bool(more)
    return [known[result] for result in sorted(found)]


def marked(mark: str) -> list[Process]:
    """The processes that were started with *mark*, NAME=VALUE, in their environment, whoever their parent is now."""
    name, _, value = mark.partition("=")
    if not name or len(value) < SHORTEST_MARK:
        raise ValueError(f"{mark!r} would be found in processes that are not ours")
    return [process for process in processes() if not process.ended and _has(process.pid, mark.encode())]


def _has(pid: int, variable: bytes) -> bool:
    try:
        return variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def cpu_s(pid: int) -> float:
    """Processor time so far of a process, its children and theirs."""
    return ticks_s(family(pid))


def ticks_s(members: Iterable[Process]) -> float:
    return sum(member.ticks for member in members) * TICK_S


def children(pid: int) -> list[Process]:
    """Those that a process started itself and that still run."""
    return [process for process in processes() if process.parent == pid and not process.ended]


def survivors(members: Iterable[Process]) -> list[Process]:
    """Those of *members* that still run."""
    running = {(process.pid, process.started) for process in processes() if not process.ended}
    return [member for member in members if (member.pid, member.started) in running]


def memory_bytes(pid: int) -> int:
    """What a process and its descendants hold; what they share is counted once."""
    return held_bytes(pid, workers=True) or 0


def free_port() -> int:
    """A port that the system chose a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class WorkerKiller:
    """Kills one worker at a time, by its number: one that works, since a spare would not be missed."""

    def __init__(self, server: int, seed: int = 0) -> None:
        self.kills: list[float] = []
        """When, on the system's clock."""
        self._server, self._rng = server, random.Random(seed)
        self._before_ns = {pid: worked_ns(pid) for pid in worker_pids(server)}

    def kill(self) -> None:
        """One of those that have worked since the last time, or any if none has."""
        now_ns = {pid: worked_ns(pid) for pid in worker_pids(self._server)}
        busy = at_work(self._before_ns, now_ns)
        self._before_ns = now_ns
        with contextlib.suppress(ProcessLookupError, IndexError):
            os.kill(self._rng.choice(busy), signal.SIGKILL)
            self.kills.append(time.time())


def at_work(before_ns: dict[int, int], now_ns: dict[int, int]) -> list[int]:
    """Who has computed in between; everybody where nobody has."""
    return [pid for pid, spent in now_ns.items() if spent - before_ns.get(pid, spent) > WORKED_NS] or list(now_ns)


def worker_pids(server: int) -> list[int]:
    """A server's workers, by how they are called."""
    return [child.pid for child in children(server) if _read(Path(f"/proc/{child.pid}/comm")).strip() == WORKER]


def worked_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    return sum(int((_read(file).split() or [b"0"])[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
