"""How urgent threads are: on Linux each has a priority of its own, which it passes on to those that it starts."""

from __future__ import annotations

import contextlib
import os
import threading

GENTLE = 10
"""How much a thread with no hurry gives way to others: a tenth of a core that somebody else wants. Not less, for it may
hold Python's lock."""


def give_way(thread: threading.Thread | None = None) -> None:
    """Lower the urgency of a thread, or of the calling one, for good: nobody may raise it again."""
    number = (thread or threading.current_thread()).native_id
    with contextlib.suppress(OSError, AttributeError):  # it has ended, or threads have no priorities here
        if number is not None:
            os.setpriority(os.PRIO_PROCESS, number, GENTLE)
