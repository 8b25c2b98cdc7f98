"""Child processes that simulate beside this one.

What will be needed is begun, and asked for later. Whoever comes to it first computes it, a child or this process. So
nothing waits for a child that is slow to start, and one that dies costs nothing but its help. A function gives the same
wherever it is computed, and so does a plan.
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

Found = TypeVar("Found")

MOST = 3
"""More have nothing to do: so few runs do not depend on each other."""


class PendingResult(Generic[Found]):
    """Something that is computed, here or elsewhere, before it is used."""

    def __init__(self, helpers: Helpers, function: Callable[..., Found], given: tuple[Any, ...]) -> None:
        self._helpers, self.function, self.given = helpers, function, given
        self.found: list[Found] = []
        """What it came to; empty until that is known."""

    def result(self) -> Found:
        """What it came to; computed now if nobody has begun with it."""
        self._helpers.finish(self)
        return self.found[0]


class Helpers:
    """Computes what is begun, with some processes or alone."""

    def __init__(self, processes: int = 0, module: str = __name__) -> None:
        """processes: besides this one. module: what each of them imports while it starts."""
        self._module = module
        self._waiting: deque[PendingResult[Any]] = deque()
        self._closed = False
        self._changed = Condition()
        self._children: list[tuple[ChildProcess, Thread]] = []
        with suppress(OSError):  # the system refuses another process: this one computes alone then
            for _ in range(min(MOST, processes)):
                self._start()

    def begin(self, function: Callable[..., Found], *given: Any) -> PendingResult[Found]:
        """Have a function of a module computed, as soon as somebody comes to it."""
        promise = PendingResult(self, function, given)
        with self._changed:
            self._waiting.append(promise)
            self._changed.notify_all()
        return promise

    def finish(self, promise: PendingResult[Any]) -> None:
        """Compute until a promise is known: itself, or what was begun last while somebody else is at it."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: promise.found or self._waiting)
                if promise.found:
                    return
                mine = promise if promise in self._waiting else self._waiting[-1]
                self._waiting.remove(mine)
            mine.found.append(mine.function(*mine.given))

    @property
    def process_ids(self) -> list[int]:
        return [child.pid for child, _ in self._children]

    def close(self) -> None:
        """Kill the children, whatever they compute."""
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
        child = ChildProcess(answer_calls, stderr=DEVNULL)
        thread = Thread(target=self._feed, args=(child,), daemon=True)
        self._children.append((child, thread))
        thread.start()

    def _feed(self, child: ChildProcess) -> None:
        """Hand a child one promise after another, in a thread of its own, until it dies or all is closed."""
        promise: PendingResult[Any] | None = None
        try:
            child.call(_preload, self._module)  # a child that still imports takes no promise from those who can begin
            while (promise := self._next()) is not None:
                found = child.call(promise.function, *promise.given)
                with self._changed:
                    promise.found.append(found)
                    self._changed.notify_all()
        except Exception:  # it died, or the function raises: then it does so here, too, for who asks
            with self._changed:
                self._waiting.extend([] if promise is None or promise.found else [promise])
                self._changed.notify_all()

    def _next(self) -> PendingResult[Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popleft()


def _preload(module: str) -> None:
    """Import a module in a child, with all that it imports."""
    import_module(module)
