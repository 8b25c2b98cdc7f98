"""Processes that search side by side.

They are those of ``multiprocessing``, not of ``weft.base.child_processes``, because spawning runs the user's script
again: a policy that it registers in ``weft.POLICIES`` is then known in the processes, too.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

Task = TypeVar("Task")
Found = TypeVar("Found")


class QuietProcesses:
    """As many processes, which Ctrl-C ends without a word: the caller reports it."""

    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, get_context("spawn"), _end_quietly)

    def results(self, function: Callable[[Task], Found], tasks: Sequence[Task]) -> Iterator[Found]:
        """What a function gives for every task, in their order."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # they inherit it until they can end quietly
        try:
            return self._pool.map(function, tasks)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def close(self) -> None:
        """Wait for what runs, and begin nothing more."""
        self._pool.shutdown(cancel_futures=True)


def _end_quietly() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
