"""Processes that simulate beside this one.

What will be needed is begun, and asked for later. Whoever comes to it first computes it, one of them or we. So nobody
waits for a process that is slow to start, and one that dies costs nothing but its help. What is begun gives the same
wherever it is computed, and so does a plan.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from threading import Condition, Thread
from types import TracebackType
from typing import IO, Any, Generic, TypeVar, cast

Found = TypeVar("Found")

MOST = 3
"""More have nothing to do: so few runs do not depend on each other."""


class Promise(Generic[Found]):
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
        self._waiting: deque[Promise[Any]] = deque()
        self._closed = False
        self._changed = Condition()
        self._beside: list[tuple[subprocess.Popen[bytes], Thread]] = []
        with suppress(OSError):  # no room for another process: we are alone then
            for _ in range(min(MOST, processes)):
                self._start()

    def begin(self, function: Callable[..., Found], *given: Any) -> Promise[Found]:
        """Have a function of a module computed, as soon as somebody comes to it."""
        promise = Promise(self, function, given)
        with self._changed:
            self._waiting.append(promise)
            self._changed.notify_all()
        return promise

    def finish(self, promise: Promise[Any]) -> None:
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
        return [process.pid for process, _ in self._beside]

    def close(self) -> None:
        """End the processes, whatever they do."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for process, thread in self._beside:
            process.kill()
            process.wait()
            thread.join()
            for stream in (process.stdin, process.stdout):
                with suppress(OSError):  # what it did not read any more
                    cast(IO[bytes], stream).close()

    def __enter__(self) -> Helpers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        # in a group of its own, for Ctrl-C is ours to handle; not -m: nothing it pickles is of a module called __main__
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main({self._module!r})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        thread = Thread(target=self._converse, args=(process,), daemon=True)
        self._beside.append((process, thread))
        thread.start()

    def _converse(self, process: subprocess.Popen[bytes]) -> None:
        """Give a process, in a thread, one thing after another, until it ends or all is done."""
        jobs, answers = cast(IO[bytes], process.stdin), cast(IO[bytes], process.stdout)
        promise: Promise[Any] | None = None
        try:
            pickle.load(answers)  # it is ready
            while (promise := self._next()) is not None:
                _send(jobs, (promise.function, promise.given))
                found = pickle.load(answers)
                with self._changed:
                    promise.found.append(found)
                    self._changed.notify_all()
        except Exception:  # whatever is wrong with it, we can do without
            with self._changed:
                self._waiting.extend([] if promise is None or promise.found else [promise])
                self._changed.notify_all()

    def _next(self) -> Promise[Any] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return None if self._closed else self._waiting.popleft()


def _send(stream: IO[bytes], message: Any) -> None:
    pickle.dump(message, stream, protocol=pickle.HIGHEST_PROTOCOL)
    stream.flush()


def main(module: str) -> None:
    """A helping process: import a module, then compute what standard input asks for until it ends."""
    jobs, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not stand between answers
    import_module(module)
    _send(answers, "ready")
    with suppress(EOFError):
        while True:
            function, given = pickle.load(jobs)
            _send(answers, function(*given))
