"""Sees that steps which were told to stop do: an operator that does not look up is ended with its process."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import Protocol


class WatchedRun(Protocol):
    """A step that was told to stop."""

    over: bool

    def urge(self) -> None:
        """Tell it to stop, once more."""
        ...

    def kill(self, why: str) -> None:
        """End whatever computes it."""
        ...


class Watchman:
    """One thread, started with the first step that it is to watch."""

    def __init__(self, kill_s: float) -> None:
        self._kill_s = kill_s
        self._due: list[tuple[float, int, WatchedRun, bool]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, run: WatchedRun) -> None:
        """Have a step killed that has not ended in time."""
        with self._changed:
            if self._closed:
                return
            self._put(run, last=False)
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="watchman", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread:
            self._thread.join()

    def _put(self, run: WatchedRun, *, last: bool) -> None:
        """Look at it half-way, for the word may have come a moment too early, and at the end."""
        heapq.heappush(self._due, (time.monotonic() + self._kill_s / 2, next(self._numbers), run, last))

    def _serve(self) -> None:
        while (found := self._next()) is not None:
            run, last = found
            if run.over:
                continue
            if last:
                run.kill(f"a step was told to stop and had not {self._kill_s:g} s later")
            else:
                run.urge()
                with self._changed:
                    self._put(run, last=True)

    def _next(self) -> tuple[WatchedRun, bool] | None:
        """Wait for the next one to look at; None at the end."""
        with self._changed:
            while not self._closed:
                rest_s = self._due[0][0] - time.monotonic() if self._due else None
                if rest_s is not None and rest_s <= 0:
                    _, _, run, last = heapq.heappop(self._due)
                    return run, last
                self._changed.wait(rest_s)
            return None
