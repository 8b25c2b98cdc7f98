"""Ends a server's workers, those that work: a spare that nobody needed would not be missed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from pathlib import Path

from processes import children

WORKER = b"weft worker"
"""What the system calls a worker."""
WORKED_NS = 1_000_000
"""Who has computed for longer since the last kill is at work."""


class WorkerKiller:
    """Kills one worker at a time, by its number."""

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
    return [each.pid for each in children(server) if _read(Path(f"/proc/{each.pid}/comm")).strip() == WORKER]


def worked_ns(pid: int) -> int:
    """Processor time of all threads of a process."""
    return sum(int((_read(file).split() or [b"0"])[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))


def _read(path: Path) -> bytes:
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""
