"""How a process ends in time, whatever its threads are in: a single operator, a load, a disk that does not answer.

Python waits for nothing but its own threads' lock; but a thread inside ONNX Runtime that asks for it while Python ends
brings the process down with an error. So where such threads are left, where the time is over that an end may take, and
where the process was the server's alone, it leaves by ``os._exit``: what was logged is flushed, and nothing else is
tidied up. Folders that stay behind are removed by the next process (``runtime.own_folder``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable

GRACE_S = 1.5
"""How long an end may take after the last request had its time."""
AT_ONCE_S = 0.8
"""How long it may take if somebody is in a hurry."""
_FLUSHING_S = 0.1


class LastResort:
    """Ends the process if it has not ended by itself when the time is over."""

    def __init__(self, code: Callable[[], int]) -> None:
        """code: what the process then ends with."""
        self._code = code
        self._timer: threading.Timer | None = None

    def within(self, seconds: float) -> None:
        """End it so many seconds from now, at the latest; the last call counts."""
        self.disarm()
        self._timer = threading.Timer(seconds, lambda: leave(self._code()))
        self._timer.daemon = True
        self._timer.start()

    def disarm(self) -> None:
        """It has ended by itself, or nearly."""
        if self._timer:
            self._timer.cancel()


def leave_if_stuck(code: int, last_words: str = "") -> None:
    """End the process here and now if threads are left that Python cannot end with."""
    if any(thread.daemon and _computes(thread) for thread in threading.enumerate()):
        leave(code, last_words)


def leave(code: int, last_words: str = "") -> None:
    """End the process without looking back; what was logged and printed is written first, if that is possible."""
    if last_words:
        sys.stderr.write(f"{last_words}\n")
    flushing = threading.Thread(target=_flush, name="last words", daemon=True)
    with contextlib.suppress(RuntimeError):
        flushing.start()
        flushing.join(_FLUSHING_S)
    os._exit(code)


def _computes(thread: threading.Thread) -> bool:
    """Whether a thread is one of those that models are loaded and run on."""
    return thread.name.startswith(("lane-", "loader of ", "learner", "end of ", "unwanted"))


def _flush() -> None:
    for handler in logging.getLogger().handlers:
        with contextlib.suppress(Exception):
            handler.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
