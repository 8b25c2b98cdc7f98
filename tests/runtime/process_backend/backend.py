"""The server's side of a backend in another process.

One thread writes and one reads, so that ``start`` returns at once and ends come as they are heard of. A process that
dies ends all that it ran, with an error; its models stay dead, and the next one that is opened has a new process.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from tests.runtime import clocks
from tests.runtime.process_backend import worker
from tests.runtime.process_backend.messages import TOLD, Begin, Call, Free, Halt, Over, Reply, Sent, restored
from weft.base.errors import Failed
from weft.runtime.backend import (
    BatchPart,
    DeviceLane,
    Ended,
    LoadedModel,
    LoadOptions,
    Progress,
    StartedStep,
    Step,
    StepEnd,
    StepOutput,
)
from weft.runtime.defaults import BackendDefaults, LaneDefaults, ModelDefaults, StepDefaults
from weft.runtime.onnxruntime_cpu.backend import CpuBackend

PATIENCE_S = 10.0
"""How long a process may take to end before it is killed."""

AHEAD_NS = 10**15
"""By so much the clock of the device differs from that of the host."""


class Link:
    """A process and the two threads that talk to it."""

    def __init__(self, now: Callable[[], int], origin: int) -> None:
        self.now = now
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._runs: dict[int, Running] = {}
        self._gone = ""
        context = multiprocessing.get_context("forkserver")  # which imports everything once, for all processes
        context.set_forkserver_preload([worker.__name__])
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=worker.main, args=(theirs, origin), name="models", daemon=True)
        self.process.start()
        theirs.close()
        self._out: SimpleQueue[Any] = SimpleQueue()
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._write, self._read)]
        """The reader sees the process to its end."""
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        return not self._gone

    def call(self, method: str, *arguments: Any) -> Any:
        """Have something done there, and wait for its result."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._gone:
                key = next(self._numbers)
                self._calls[key] = future
                self._out.put(Call(key, method, arguments))
        if self._gone and not future.done():
            raise Failed(self._gone)
        return future.result()

    def begin(self, running: Running, message: Callable[[int], Begin]) -> None:
        with self._lock:
            if not self._gone:
                running.number = next(self._numbers)
                self._runs[running.number] = running
                self._out.put(message(running.number))
                return
        running.over(self._lost())

    def tell(self, message: Halt | Free) -> None:
        self._out.put(message)

    def close(self) -> None:
        """End the process, once it has done what it was told."""
        self._out.put(None)
        writer, reader = self._threads
        reader.join(PATIENCE_S)
        if reader.is_alive():
            self.process.kill()
        reader.join()
        writer.join()
        self._connection.close()

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the reader hears of it, too
            while (message := self._out.get()) is not None:
                self._connection.send(message)
            self._connection.send(None)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._hear(self._connection.recv())
        self.process.join()
        with self._lock:
            code = self.process.exitcode
            self._gone = f"the process that ran the model has ended (exit code {code}); load the model again"
            calls, self._calls = self._calls, {}
            runs, self._runs = self._runs, {}
        self._out.put(None)
        for future in calls.values():
            future.set_exception(Failed(self._gone))
        for running in runs.values():
            running.over(self._lost())

    def _hear(self, message: Reply | Over) -> None:
        with self._lock:
            waiting: Any = (self._calls if isinstance(message, Reply) else self._runs).pop(message[0])
        if isinstance(message, Over):
            made = [StepOutput(Held(self, number) if number else None, answers) for number, answers in message.made]
            error = restored(message.problem) if message.problem else None
            waiting.over(StepEnd(message.began, message.ended, made, error))
        elif message.problem:
            waiting.set_exception(restored(message.problem))
        else:
            waiting.set_result(message.result)

    def _lost(self) -> StepEnd:
        return StepEnd(self.now(), self.now(), error=Failed(self._gone))


class Held:
    """Values in the memory of the process; they are freed with this."""

    __slots__ = ("link", "number")

    def __init__(self, link: Link, number: int) -> None:
        self.link, self.number = link, number

    def __del__(self) -> None:
        self.link.tell(Free(self.number))


class Running(StepDefaults):
    """A step that was started."""

    def __init__(self, link: Link, lane: ProcessLane, ended: Ended) -> None:
        self.number = 0
        self._link, self._lane, self._end_in_background = link, lane, ended
        self.done = threading.Event()

    def stop(self) -> None:
        if self.number:
            self._link.tell(Halt(self.number, self._lane.index))

    def over(self, end: StepEnd) -> None:
        self.done.set()
        self._end_in_background(end)


class ProcessLane(LaneDefaults):
    """A lane of the process, by its number."""

    def __init__(self, index: int, pin: bool) -> None:
        self.index, self.pin = index, pin
        self.running: Running | None = None

    def close(self, patience_s: float | None = None) -> bool:
        return self.running is None or self.running.done.wait(patience_s)


class ProcessModel(ModelDefaults):
    """A model in the process."""

    def __init__(self, link: Link, number: int, told: dict[str, Any]) -> None:
        self._link, self._number = link, number
        for name in TOLD:
            setattr(self, name, told[name])

    def prepare(self, rows: int) -> None:
        self._link.call("prepare", self._number, rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        assert isinstance(lane, ProcessLane) and not here
        running = lane.running = Running(self._link, lane, ended)
        parts = tuple(map(_sent, step.parts))
        self._link.begin(
            running,
            lambda number: Begin(number, lane.index, lane.pin, self._number, step.segment, parts, step.rows),
        )
        return running

    def close(self) -> None:
        with contextlib.suppress(Failed):  # it went with its process
            self._link.call("close", self._number)


def _sent(part: BatchPart) -> Sent:
    if isinstance(part.values, Held):
        return Sent(None, part.values.number, part.rows)
    return Sent(part.values, 0, part.rows)


class ProcessBackend(BackendDefaults):
    """Models on ONNX Runtime in a process of their own, on a clock of their own."""

    name, platform = CpuBackend.name, CpuBackend.platform

    def __init__(self) -> None:
        self._link: Link | None = None
        self._lock = threading.Lock()

    def now(self) -> int:
        return time.monotonic_ns() + AHEAD_NS

    @property
    def link(self) -> Link:
        """The process, started where there is none that lives."""
        with self._lock:
            if self._link and not self._link.alive:
                self._link.close()
                self._link = None
            self._link = self._link or Link(self.now, -AHEAD_NS)
            return self._link

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        link = self.link
        number, told = link.call("open", path, options, cache, learn, clocks.said())
        model: Any = ProcessModel(link, number, told)
        return model

    def lane(self, index: int, *, pin: bool = False) -> ProcessLane:
        return ProcessLane(index, pin)

    def held(self) -> tuple[int, int, int]:
        """What the process has in memory: models, values between segments, and the bytes of those."""
        models, values, size = self.link.call("held")
        return models, values, size

    @property
    def pid(self) -> int:
        pid = self.link.process.pid
        assert pid is not None and pid != os.getpid()
        return pid

    def close(self) -> None:
        with self._lock:
            link, self._link = self._link, None
        if link:
            link.close()
