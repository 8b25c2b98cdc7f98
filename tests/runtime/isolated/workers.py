"""Models in worker processes, and workers that die or send what they should not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.runtime.steps import Heard
from tests.support.concurrency import until
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.isolated.backend import IsolatingBackend
from weft.runtime.isolated.confinement import Confinement
from weft.runtime.isolated.group import WorkerGroup
from weft.runtime.isolated.model import IsolatedModel
from weft.runtime.isolated.process import WorkerProcess


def opened(
    one: IsolatingBackend, path: Path, group: str = "g", *, learn: bool = False, **options: Any
) -> IsolatedModel:
    model = one.open(path, LoadOptions(isolation=group, **options), path.parent / "cache", learn=learn)
    assert isinstance(model, IsolatedModel)
    return model


def running(model: IsolatedModel, lane: Any, inputs: dict[str, Any]) -> Heard:
    heard = Heard()
    model.start(Step(0, (BatchPart(inputs),), 1), lane, heard)
    return heard


def pid(group: WorkerGroup) -> int:
    assert group.worker is not None
    return group.worker.pid


def until_it_computes(process: int) -> None:
    """Wait until a process has spent some time on the processor."""

    def ticks() -> int:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11])

    before = ticks()
    until(lambda: ticks() > before + 5, "it computes")


def kill_worker(group: WorkerGroup) -> WorkerProcess:
    """Kill the worker; the one that took its place."""
    before = group.worker
    os.kill(pid(group), signal.SIGKILL)
    found: WorkerProcess = until(lambda: group.worker is not before and group.worker, "there is another one")
    return found


LIAR = """
import socket, sys
line = socket.socket(fileno=int(sys.argv[1]))
def say(where, head):
    where.send(len(head).to_bytes(4, "little") + head)
say(line, b'["hello", [], []]')
for where, head in zip(sys.argv[2::2], sys.argv[3::2]):
    _, (lane,), _, _ = socket.recv_fds(line, 1 << 17, 1)
    lane = socket.socket(fileno=lane)
    lane.recv(1 << 17)
    say({"line": line, "lane": lane}[where], head.encode())
line.recv(1 << 17)
"""


class NoModel:
    number = 1
    gated = True

    def check(self, *_: Any) -> None:
        """Takes anything."""

    def failed(self) -> None:
        """Bears everything."""


def liar(spawner: ThreadPoolExecutor, *says: str) -> tuple[WorkerProcess, list[Any]]:
    """A worker that answers the first step on every lane with these heads: where each is said, and what."""

    def started(line: int, *_: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", LIAR, str(line), *says], pass_fds=[line])

    deaths: list[Any] = []
    confinement = Confinement(os.getpid(), None, 64, (), ())
    worker = WorkerProcess(
        "liar", confinement, "/", now=lambda: 0, spawner=spawner, fork=started, carrier=spawner, watch=lambda _: None,
        died=lambda *death: deaths.append(death),
    )  # fmt: skip
    worker.await_ready()
    return worker, deaths
