"""Priority of threads: on Linux each thread has its own, which threads that it starts inherit."""

from __future__ import annotations

import contextlib
import os
import threading

GENTLE = 10
"""Nice value of a thread without hurry: it gets about a tenth of a core that another thread wants. Not higher, since
the thread may hold Python's global lock."""


def give_way(thread: threading.Thread | None = None) -> None:
    """Lower the priority of a thread, or of the calling one, for good: without privileges it cannot be raised again."""
    number = (thread or threading.current_thread()).native_id
    with contextlib.suppress(OSError, AttributeError):  # the thread has ended, or this system has no thread priorities
        if number is not None:
            os.setpriority(os.PRIO_PROCESS, number, GENTLE)
