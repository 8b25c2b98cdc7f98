"""Requests on threads of their own, and waiting for what must come."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.serving import live
from tests.support.inference import Refused


def until(condition: Callable[[], Any], what: str = "the condition holds") -> Any:
    """Wait for a condition that must come true, and return its value; only a hang reaches the time limit."""
    end_s = time.monotonic() + live.PATIENCE_S
    while not (result := condition()):
        assert time.monotonic() < end_s, f"waited in vain: {what}"
        time.sleep(0.01)
    return result


class Clients:
    """Threads that ask again and again until the block ends; a result is checked, a refusal must be a defined one."""

    def __init__(self, count: int, ask: Callable[[int], Any]) -> None:
        self.statuses: Counter[int] = Counter()
        self.problems: list[BaseException] = []
        self._ask, self._stopped = ask, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(count)]

    def _run(self, seed: int) -> None:
        try:
            while not self._stopped.is_set():
                try:
                    self._ask(seed)
                    self.statuses[200] += 1
                except Refused as refused:
                    if refused.status not in (404, 503):
                        raise
                    self.statuses[refused.status] += 1
        except BaseException as problem:
            self.problems.append(problem)

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def served(self, more: int) -> None:
        """Wait for so many more results."""
        wanted = self.statuses[200] + more
        until(lambda: self.statuses[200] >= wanted or self.problems, "clients are served")
        assert self.problems == []


class Background:
    """A call on a thread of its own; ``result`` waits for it, and raises what it raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._outcome: Any = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome = self._call()
        except BaseException as error:
            self._outcome = error

    def result(self) -> Any:
        self._thread.join()
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome
