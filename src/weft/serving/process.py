"""A server in a process of its own, for scripts, notebooks and benchmarks: started, used, stopped by its id."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from weft.base.errors import InputError

STOP_S = 60.0
"""Grace period for answering accepted requests after SIGTERM; the process is killed after it."""

LINES_KEPT = 1000
"""Lines of output that are kept for error messages; bounds memory if the server logs much."""

END_WITH_STDIN = "WEFT_END_WITH_STDIN"
"""Environment variable that ``ServerProcess`` sets: ``weft serve`` stops when its standard input is closed."""


def end_with_stdin() -> None:
    """Send SIGTERM to this process when its standard input is closed, if ``END_WITH_STDIN`` is set.

    The system closes the pipe when the parent is killed, so no server outlives its parent. A parent-death signal
    (``PR_SET_PDEATHSIG``) would not do: it is sent when the *thread* ends that started the server.
    """
    if END_WITH_STDIN in os.environ:
        threading.Thread(target=_await_end_of_stdin, name="standard input", daemon=True).start()


def _await_end_of_stdin() -> None:
    while os.read(0, 1):  # not sys.stdin, whose lock Python asks for while it ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class ServerProcess:
    """``weft serve`` in a child process, on loopback: ready when the block begins, ended with the block or with us."""

    def __init__(self, *arguments: str, python: str = sys.executable) -> None:
        """*arguments* as on the command line; unless they say otherwise, the ports are chosen by the system, and models
        are cut and measured when it is ready. *python*: the interpreter of the environment whose weft is started."""
        ports = [
            f"{port}=0" for port in ("--http-port", "--grpc-port") if not any(a.startswith(port) for a in arguments)
        ]
        learn = [] if any(a.startswith("--learn") for a in arguments) else ["--learn-first"]
        weft = str(Path(python).parent / "weft")
        self._arguments: Sequence[str] = [weft, "serve", *arguments, *ports, *learn]
        self.url = ""
        self.output: deque[str] = deque(maxlen=LINES_KEPT)
        """The last lines that it printed."""
        self._settled = threading.Event()
        """Set when the server is ready, or has failed."""
        self._missing = ""
        """The reason that the server printed for not being ready."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        self._process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {END_WITH_STDIN: "1"},
        )
        self._reader = threading.Thread(target=self._read, name="server output", daemon=True)
        self._reader.start()
        try:
            self._settled.wait()
        except BaseException:
            self.stop()
            raise
        if self._missing:
            self.stop()
            raise InputError(f"the server is {self._missing}")
        if not self.url:
            self.stop()
            raise InputError(f"the server did not start: {' '.join([*self.output][-3:]) or 'it said nothing'}")
        return self

    def _read(self) -> None:
        """Read the output until the server ends: a full pipe would block it."""
        assert self._process.stdout
        for line in self._process.stdout:
            self.output.append(line.rstrip())
            word, _, url = line.strip().partition("  ")
            if word == "ready" and url.startswith("http") and not self.url:
                self.url = url.strip()
                self._settled.set()
            if word == "not ready" and not self._missing:
                self._missing = f"not ready: {url.partition('  ')[2].strip()}"
                self._settled.set()
        self._settled.set()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask it to finish, wait, and return its exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream
            stream.close()
        return self._process.returncode
