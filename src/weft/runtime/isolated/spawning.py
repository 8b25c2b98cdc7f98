"""Starting worker processes, which are forked from a template process, and describing how they ended."""

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
    """How a process ended, in words; *code*: its exit code, or the negated number of a signal."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"{name}, from outside or for want of memory" if -code == signal.SIGKILL else name


class Child(Protocol):
    """A child process, with the methods of ``subprocess.Popen``."""

    pid: int

    def kill(self) -> None:
        """Kill the process, if it has not exited."""
        ...

    def wait(self) -> int:
        """Wait for the process; returns its exit code, or the negated number of the signal that ended it."""
        ...


class ForkedChild:
    """A process that the template forked and this process inherited as its subreaper."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        # Held from the end of the process until its status is collected: after that the kernel may reuse its number,
        # and kill must not hit another process.
        self._lock = threading.Lock()
        self._ended = False

    def kill(self) -> None:
        with self._lock:
            if not self._ended:
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        """Wait for the process and collect its status; may be called only once. 1 if the status is unknown."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._lock:
                self._ended = True
                _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # another waitpid has collected its status
            self._ended = True
            return 1
        return os.waitstatus_to_exitcode(status)


class Template:
    """The process that workers are forked from, started on first use and again if it has died.

    All of its methods are called on one thread that lives as long as the server: the kernel ends the template with the
    thread that started it.
    """

    def __init__(self, engine: str = CPU) -> None:
        """engine: what the workers run models with, ``cpu`` or the name of a device."""
        self.engine = engine
        self._process: subprocess.Popen[bytes] | None = None
        self._line: Line | None = None

    def fork(self, file: int, confinement: Confinement, scratch: str) -> Child:
        """Fork a worker; with one retry, because the template may have died since the last fork.

        file: descriptor of the worker's end of its connection. scratch: its temporary folder. ``WorkerDied`` if the
        retry fails, too.
        """
        try:
            return self._fork(file, confinement, scratch)
        except (OSError, EOFError):  # the template has died; it has no state, so that a new one can replace it
            self.close()
        try:
            return self._fork(file, confinement, scratch)
        except (OSError, EOFError) as error:
            raise WorkerDied(f"it could not be started: {reason_of(error)}") from error

    def _fork(self, file: int, confinement: Confinement, scratch: str) -> Child:
        """Ask the template for a worker; OSError or EOFError if it has died."""
        line = self._line or self._start()
        line.send([asdict(confinement), scratch], files=[file], wait=True)
        (pid,) = line.receive().head
        return ForkedChild(pid)

    def _start(self) -> Line:
        """Start the template process; returns the connection to it."""
        inherit_orphans()
        self._line, template_end = packets.pair()
        with template_end:
            command = [
                sys.executable,
                "-P",  # no modules from the current folder, nor (-s) from a home: models may write to these
                "-s",
                "-m",
                worker.__name__,
                str(template_end.fileno()),
                self.engine,
            ]
            self._process = subprocess.Popen(
                command,
                env=bare_environment(engine_kind(self.engine).variables),
                pass_fds=[template_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        return self._line

    def close(self) -> None:
        """Kill the template; workers go on."""
        if self._line:
            self._line.close()
        if self._process:
            self._process.kill()
            self._process.wait()
        self._line = self._process = None
