"""How a worker's process is started, and what is said of how it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import asdict
from typing import Protocol

from weft.base.child_processes import bare_environment
from weft.base.errors import WorkerDied, reason_of
from weft.runtime.device_kinds import engine_kind
from weft.runtime.isolated import packets, worker
from weft.runtime.isolated.confinement import Confinement, inherit_orphans
from weft.runtime.isolated.packets import Line
from weft.runtime.metadata import CPU


def ended_by(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, from outside or for want of memory" if -code == signal.SIGKILL else name


class Child(Protocol):
    """A process of ours; as ``subprocess`` has them."""

    pid: int

    def kill(self) -> None:
        """End it, if it has not ended."""
        ...

    def wait(self) -> int:
        """Its exit code, or the signal that ended it, below zero."""
        ...


class ForkedChild:
    """A process that another one forked, and we inherited."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._lock = threading.Lock()
        self._ended = False

    def kill(self) -> None:
        with self._lock:  # once it is waited for, its number may be another's
            if not self._ended:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Called once."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._ended = True
                _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # somebody else has waited for it, and knows
            self._ended = True
            return 1
        return os.waitstatus_to_exitcode(status)


class Template:
    """The process that workers are forked from; started when it is needed, and again should it have died.

    All of this happens on one thread, which lives as long as the server: its end would be the template's.
    """

    def __init__(self, engine: str = CPU) -> None:
        """engine: what the workers run models with."""
        self.engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None

    def fork(self, file: int, confinement: Confinement, scratch: str) -> Child:
        """A worker's process with one end of a line, in a folder of its own."""
        try:
            return self._forked(file, confinement, scratch)
        except (OSError, EOFError):  # it has died, and nothing is lost with it
            self.close()
        try:
            return self._forked(file, confinement, scratch)
        except (OSError, EOFError) as error:
            raise WorkerDied(f"it could not be started: {reason_of(error)}") from error

    def _forked(self, file: int, confinement: Confinement, scratch: str) -> Child:
        line = self._line or self._start()
        line.send([asdict(confinement), scratch], files=[file], wait=True)
        (pid,) = line.receive().head
        return ForkedChild(pid)

    def _start(self) -> Line:
        inherit_orphans()
        self._line, theirs = packets.pair()
        with theirs:
            command = [
                sys.executable,
                "-P",  # no modules from where it is started, nor from a home: models may write there
                "-s",
                "-m",
                worker.__name__,
                str(theirs.fileno()),
                self.engine,
            ]
            self._process = subprocess.Popen(
                command,
                env=bare_environment(engine_kind(self.engine).variables),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        return self._line

    def close(self) -> None:
        """End it; the workers go on."""
        if self._line:
            self._line.close()
        if self._process:
            self._process.kill()
            self._process.wait()
        self._line = self._process = None
