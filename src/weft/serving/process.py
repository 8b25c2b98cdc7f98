"""The server's process: started as a child of scripts and benchmarks, ended with its parent, and ended in time.

A thread inside ONNX Runtime that requests Python's lock while the interpreter shuts down crashes the process, and a
thread may hang in an operator, a load or a disk that does not respond. Therefore the process ends by ``os._exit`` if
such threads are left, and after the grace period: logs are flushed, and no other cleanup is done. The next process
removes folders that are left (``runtime.own_folder``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
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
    """Wait until standard input is closed, then send SIGTERM to this process."""
    while os.read(0, 1):  # not sys.stdin: the interpreter takes its lock at shutdown, and would hang
        pass
    os.kill(os.getpid(), signal.SIGTERM)


class ServerProcess:
    """``weft serve`` in a child process, on loopback.

    The server is ready when the block begins, and ends with the block, or with this process.
    """

    def __init__(self, *arguments: str, python: str = sys.executable) -> None:
        """Start a server.

        arguments: as on the command line; by default the system chooses the ports, and models are cut and measured
        before the server is ready. python: the interpreter of the environment whose weft is started.
        """
        ports = [
            f"{port}=0" for port in ("--http-port", "--grpc-port") if not any(a.startswith(port) for a in arguments)
        ]
        learn_option = [] if any(a.startswith("--learn") for a in arguments) else ["--learn-first"]
        weft = str(Path(python).parent / "weft")
        self._arguments: Sequence[str] = [weft, "serve", *arguments, *ports, *learn_option]
        self.url = ""
        self.output: deque[str] = deque(maxlen=LINES_KEPT)
        """The last lines that the server printed."""
        self._settled = threading.Event()
        """Set when the server is ready, or has failed."""
        self._not_ready = ""
        """What the server printed about not being ready: ``not ready: REASON``; else empty."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> ServerProcess:
        """Start the process and wait until the server is ready; InputError if it cannot be."""
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
        if self._not_ready:
            self.stop()
            raise InputError(f"the server is {self._not_ready}")
        if not self.url:
            self.stop()
            raise InputError(f"the server did not start: {' '.join([*self.output][-3:]) or 'it said nothing'}")
        return self

    def _read(self) -> None:
        """Read the output until the server ends: a full pipe would block it."""
        assert self._process.stdout
        for line in self._process.stdout:
            self.output.append(line.rstrip())
            word, _, text = line.strip().partition("  ")  # fields of a line are separated by two blanks
            if word == "ready" and text.startswith("http") and not self.url:
                self.url = text.strip()
                self._settled.set()
            if word == "not ready" and not self._not_ready:
                self._not_ready = f"not ready: {text.partition('  ')[2].strip()}"
                self._settled.set()
        self._settled.set()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> int:
        """Ask the server to stop, wait, and return its exit code; it is killed after ``STOP_S``."""
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


# A timely end

GRACE_S = 1.5
"""Grace period after ``drain_s`` in which the process must end by itself."""
AT_ONCE_S = 0.8
"""Grace period after a second signal."""
_FLUSHING_S = 0.1
"""Timeout for flushing logs at the end: a pipe that is not read, or a full disk, must not block the end."""


class ExitTimer:
    """Kills the process if it has not ended by itself in time."""

    def __init__(self, code: Callable[[], int]) -> None:
        """code: returns the exit code of the process."""
        self._code = code
        self._timer: threading.Timer | None = None

    def within(self, seconds: float) -> None:
        """Set the timer, in seconds from now; replaces an earlier one."""
        self.disarm()
        self._timer = threading.Timer(seconds, lambda: leave(self._code()))
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        """Cancel the timer."""
        if self._timer:
            self._timer.cancel()


def leave_if_stuck(code: int, last_words: str = "") -> None:
    """End the process at once if threads are left that would crash the interpreter's shutdown; else return.

    code: the exit code. last_words: printed to standard error before.
    """
    if any(thread.daemon and _runs_models(thread) for thread in threading.enumerate()):
        leave(code, last_words)


def leave(code: int, last_words: str = "") -> None:
    """End the process by ``os._exit``, after flushing logs and output within ``_FLUSHING_S``."""
    if last_words:
        sys.stderr.write(f"{last_words}\n")
    flushing = threading.Thread(target=_flush, name="last words", daemon=True)
    with contextlib.suppress(RuntimeError):
        flushing.start()
        flushing.join(_FLUSHING_S)
    os._exit(code)


def _runs_models(thread: threading.Thread) -> bool:
    """Tell by its name whether a thread loads or runs models."""
    return thread.name.startswith(("lane-", "loader of ", "learner", "end of ", "unwanted"))


def _flush() -> None:
    """Flush the log, standard output and standard error; errors are ignored."""
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
