"""The process: models on ONNX Runtime, lanes, and the values between segments."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.clocks import said_times
from tests.runtime.process_backend.messages import TOLD, Begin, Call, Free, Halt, Over, Reply, Sent, described
from weft.runtime.backend import BatchPart, LoadedModel, LoadOptions, StartedStep, Step, StepEnd
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import CpuLane


def main(connection: Connection, origin: int) -> None:
    """Serve until the other side says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Worker(connection, origin).serve()


class Worker:
    """Runs models for the process at the other end."""

    def __init__(self, connection: Connection, origin: int) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._backend = CpuBackend(lambda: time.monotonic_ns() - origin)
        self._models: dict[int, LoadedModel] = {}
        self._lanes: dict[int, CpuLane] = {}
        self._runs: dict[int, tuple[int, StartedStep]] = {}
        """Lane -> the last step that was begun there."""
        self._values: dict[int, Any] = {}
        self._numbers = count(1)
        self._slow = ThreadPoolExecutor(8, "calls")

    def serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while (message := self._connection.recv()) is not None:
                self._hear(message)
        self._backend.close()  # stops what is being tried out
        self._slow.shutdown(cancel_futures=True)

    def _hear(self, message: Any) -> None:
        if isinstance(message, Begin):
            self._begin(message)
        elif isinstance(message, Halt):
            run, running = self._runs.get(message.lane, (0, None))
            if running and run == message.run:
                running.stop()
        elif isinstance(message, Free):
            del self._values[message.number]
        elif isinstance(message, Call):
            self._slow.submit(self._answer, message)

    def _say(self, message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # nobody listens any more
            self._connection.send(message)

    # Steps

    def _begin(self, begin: Begin) -> None:
        if begin.lane not in self._lanes:
            self._lanes[begin.lane] = self._backend.lane(begin.lane, pin=begin.pin)
        step = Step(begin.segment, tuple(map(self._part, begin.parts)), begin.rows)
        run = self._models[begin.model].start(step, self._lanes[begin.lane], lambda end: self._ended(begin.run, end))
        self._runs[begin.lane] = begin.run, run

    def _part(self, sent: Sent) -> BatchPart:
        return BatchPart(self._values[sent.number] if sent.arrays is None else sent.arrays, sent.rows)

    def _ended(self, run: int, end: StepEnd) -> None:
        made = tuple((self._kept(each.values), each.answers) for each in end.outputs)
        self._say(Over(run, end.began, end.ended, made, described(end.error) if end.error else None))

    def _kept(self, values: Any) -> int:
        """The number of values that stay here; 0 where there are none."""
        if not values:
            return 0
        number = next(self._numbers)
        self._values[number] = values
        return number

    # Calls

    def _answer(self, call: Call) -> None:
        methods: dict[str, Callable[..., Any]] = {
            "open": self._open,
            "prepare": lambda model, rows: self._models[model].prepare(rows),
            "close": lambda model: self._models.pop(model).close(),
            "held": self._held,
        }
        try:
            self._say(Reply(call.key, methods[call.method](*call.arguments)))
        except Exception as error:
            self._say(Reply(call.key, None, described(error)))

    def _open(
        self, path: Path, options: LoadOptions, cache: Path | None, learn: bool, segment_s: float | None
    ) -> tuple[int, dict[str, Any]]:
        with contextlib.nullcontext() if segment_s is None else said_times(segment_s):
            model = self._backend.open(path, options, cache, learn=learn)
        number = next(self._numbers)
        self._models[number] = model
        return number, {name: getattr(model, name) for name in TOLD}

    def _held(self) -> tuple[int, int, int]:
        """Models, values, and the bytes of those."""
        arrays = [each for values in list(self._values.values()) for each in values.values()]
        return len(self._models), len(self._values), sum(np.asarray(each).nbytes for each in arrays)
