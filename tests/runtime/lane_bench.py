"""Lanes with tasks that last until a test lets them go on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from tests.engine.hosts import PATIENCE_S
from weft.engine import Completion
from weft.engine.policies import Candidate, Start
from weft.runtime.backend import BatchPart, Ended, StartedStep, Step, StepOutput
from weft.runtime.lanes import INLINE_TICKS, LaneExecutor
from weft.runtime.onnxruntime_cpu.backend import CpuBackend

TICKS = INLINE_TICKS
"""Enough for a lane, too little to be stopped."""


class Work:
    """What a lane is given, computed by ``compute``."""

    body: object = None
    steady: Sequence[bool] = (False,) * 8

    @property
    def loaded(self) -> Any:
        """It is its own model, and knows how long it takes."""
        return self

    timing = loaded

    @property
    def foreseen(self) -> Sequence[bool]:
        return self.steady

    def step(self, segment: int) -> Step:
        return Step(segment, (BatchPart(None),), 1)

    def start(self, step: Step, lane: Any, ended: Ended, *, here: bool) -> StartedStep:
        return lane.start(self, step, ended, here=here)

    def take(self, segment: int, made: Sequence[StepOutput]) -> None:
        assert made == []


class Task(Work):
    """Work that lasts until it is told to go on, on the thread it says."""

    def __init__(self, error: Exception | None = None, *, steady: bool = True) -> None:
        self.error, self.steady = error, (steady,) * 8
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.segments: list[int] = []
        self.thread: threading.Thread | None = None
        self.options: Any = None

    def compute(self, step: Step, options: Any) -> list[StepOutput]:
        self.segments.append(step.segment)
        self.thread, self.options = threading.current_thread(), options
        self.begun.set()
        assert self.go_on.wait(PATIENCE_S)
        if self.error:
            raise self.error
        return []


class Bench:
    """Lanes, the work they are given by stream, and a count of their wakes."""

    def __init__(self, lanes: int = 1, **settings: Any) -> None:
        self.works: dict[int, Any] = {}
        self.woken: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.lanes = LaneExecutor(CpuBackend(), lanes, self._work_of, self._wake, **settings)

    def give(self, stream: int, work: Any = None, *, ticks: int = TICKS, layer: int = 0) -> Candidate:
        candidate = Candidate(stream, 0, layer, 0, ticks, -1, program=0)
        self.works.setdefault(stream, work or Task())
        self.lanes.submit(Start(candidate))
        return candidate

    def end(self, *streams: int) -> list[Completion]:
        """Let these go on, one after another, and wait for what is reported."""
        found = []
        for stream in streams:
            self.works[stream].go_on.set()
            found += self.reported()
        return found

    def reported(self) -> list[Completion]:
        assert self.woken.get(timeout=PATIENCE_S).startswith("lane-")
        return self.lanes.completions()

    def close(self) -> None:
        for work in self.works.values():
            if isinstance(work, Task):
                work.go_on.set()
        self.lanes.close()

    def _work_of(self, candidate: Candidate, batch: object) -> tuple[Any, bool]:
        work = self.works[candidate.stream]
        return work, self.lanes.runs_here(candidate, work)

    def _wake(self) -> None:
        self.woken.put(threading.current_thread().name)


def begun(bench: Bench, stream: int) -> Task:
    task = bench.works[stream]
    assert task.begun.wait(PATIENCE_S)
    return task
