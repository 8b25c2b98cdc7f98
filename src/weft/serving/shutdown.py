"""Timely end of the process, even if threads hang in an operator, a load or a disk that does not respond.

A thread inside ONNX Runtime that requests Python's lock while the interpreter shuts down crashes the process. Therefore
the process ends by ``os._exit`` if such threads are left, and after the grace period: logs are flushed, and no other
cleanup is done. The next process removes folders that are left (``runtime.own_folder``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

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
    """End the process at once if threads are left that would crash the interpreter's shutdown."""
    if any(thread.daemon and _computes(thread) for thread in threading.enumerate()):
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


def _computes(thread: threading.Thread) -> bool:
    """Tell by its name whether a thread loads or runs models."""
    return thread.name.startswith(("lane-", "loader of ", "learner", "end of ", "unwanted"))


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
