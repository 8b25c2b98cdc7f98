"""A pool of child processes that simulate in parallel with this process.

Calls are queued first and their results requested later. The first free process, a child or this process, takes a call
from the queue. So nothing waits for a child that starts slowly, and no result is lost if a child dies.
Functions are deterministic, so a plan does not depend on which process computed what.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from subprocess import DEVNULL
from threading import Condition, Thread
from types import TracebackType
from typing import Any, Generic, TypeVar

from weft.base.child_processes import ChildProcess, answer_calls

Result = TypeVar("Result")

MOST = 3
"""Largest number of children; more would be idle, as a plan has no more independent simulations at a time."""


class PendingResult(Generic[Result]):
    """The result of a queued call, computed by this process or by a child."""

    def __init__(self, helpers: Helpers, function: Callable[..., Result], arguments: tuple[Any, ...]) -> None:
        self._helpers, self.function, self.arguments = helpers, function, arguments
        self.outcome: list[Result] = []
        """The result, as the only element; empty until it is known."""

    def result(self) -> Result:
        """Return the result; compute it now unless a child has begun with it."""
        self._helpers.finish(self)
        return self.outcome[0]


class Helpers:
    """A pool of child processes, possibly empty, that share a queue of calls with this process."""

    def __init__(self, processes: int = 0, module: str = __name__) -> None:
        """Start the children.

        processes: their number, this process not included. module: imported by each child while it starts.
        """
        self._module = module
        self._waiting: deque[PendingResult[Any]] = deque()
        self._closed = False
        # guards _waiting, _closed and the outcomes of pending results, which the feeding threads change, too
        self._changed = Condition()
        self._children: list[tuple[ChildProcess, Thread]] = []
        with suppress(OSError):  # if the system refuses another process, this one computes alone
            for _ in range(min(MOST, processes)):
                self._start()

    def begin(self, function: Callable[..., Result], *arguments: Any) -> PendingResult[Result]:
        """Queue a call of a module-level function for the next free process."""
        pending = PendingResult(self, function, arguments)
        with self._changed:
            self._waiting.append(pending)
            self._changed.notify_all()
        return pending

    def finish(self, pending: PendingResult[Any]) -> None:
        """Compute queued calls in this process until *pending* has its result.

        *pending* is computed first if no child has taken it; otherwise the newest queued call, as children take the
        oldest.
        """
        while True:
            with self._changed:
                self._changed.wait_for(lambda: pending.outcome or self._waiting)
                if pending.outcome:
                    return
                call = pending if pending in self._waiting else self._waiting[-1]
                self._waiting.remove(call)
            call.outcome.append(call.function(*call.arguments))

    @property
    def process_ids(self) -> list[int]:
        return [child.pid for child, _ in self._children]

    def close(self) -> None:
        """Kill the children, even during a computation."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for child, thread in self._children:
            child.close()
            thread.join()

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        """Start a child, and a thread that passes calls to it."""
        child = ChildProcess(answer_calls, stderr=DEVNULL)
        thread = Thread(target=self._feed, args=(child,), daemon=True)
        self._children.append((child, thread))
        thread.start()

    def _feed(self, child: ChildProcess) -> None:
        """Pass queued calls to a child, in a thread of its own, until the child dies or the pool is closed."""
        pending: PendingResult[Any] | None = None
        try:
            child.call(_preload, self._module)  # while a child imports, it takes no call from the queue
            while (pending := self._next()) is not None:
                outcome = child.call(pending.function, *pending.arguments)
                with self._changed:
                    pending.outcome.append(outcome)
                    self._changed.notify_all()
        except Exception:
            # The child died, or the function raised. A retry in this process is safe: functions have no side effects,
            # and a function that raises raises again where the result is requested.
            with self._changed:
                self._waiting.extend([] if pending is None or pending.outcome else [pending])
                self._changed.notify_all()

    def _next(self) -> PendingResult[Any] | None:
        """Wait for the next queued call; None when the pool is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popleft()


def _preload(module: str) -> None:
    """Import a module in a child, with all that it imports."""
    import_module(module)
