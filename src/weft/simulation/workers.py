"""A process pool for searches.

It uses ``multiprocessing``, not ``weft.base.child_processes``, because spawning runs the user's script again: a policy
that the script registers in ``weft.POLICIES`` is then known in the processes, too.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


class QuietProcesses:
    """A pool of processes that end on Ctrl-C without a traceback; the caller reports the interrupt."""

    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _end_quietly)

    def results(self, function: Callable[[Task], Result], tasks: Sequence[Task]) -> Iterator[Result]:
        """Call a function for every task in the processes; return an iterator over the results in the tasks' order."""
        # the processes start here, and inherit the blocked signal until ``_end_quietly`` has run in them
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return self._pool.map(function, tasks)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def close(self) -> None:
        """Wait for the running tasks, and cancel those that have not begun."""
        self._pool.shutdown(cancel_futures=True)


def _end_quietly() -> None:
    """Let Ctrl-C end this process at once, without a KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
