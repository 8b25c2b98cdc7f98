"""The executor whose time passes: lanes, each a thread that computes one segment of one batch at a time.

All scheduling state lives on the thread that drives the engine; a lane only runs what it was given and
reports back. ONNX Runtime computes without Python's global lock, so lanes run beside each other and
beside the engine. The twin in which time jumps is ``engine.simulated_host``.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

import onnxruntime as ort

from weft.devices.decoupled import Issue, NpuState
from weft.engine.engine import Completion
from weft.policies.base import Candidate, Running, Start

log = logging.getLogger("weft.engine")

ABORT_FROM_TICKS = 10_000_000
"""Segments of 10 ms and more may be stopped for something urgent; shorter ones are over before it pays."""

INLINE_TICKS = 200_000
"""Steady segments of less than 0.2 ms run on the engine's own thread: handing them to another costs as much."""


class Work(Protocol):
    """One batch as a lane sees it."""

    def steady(self, segment: int) -> bool:
        """Whether a segment takes as long as it did before, whatever its inputs hold."""
        ...

    def compute(self, segment: int, options: ort.RunOptions) -> None:
        """Run a segment on the values the one before it left; called on the lane's thread."""
        ...


def runs_here(candidate: Candidate, work: Work) -> bool:
    """Whether a segment is computed on the engine's own thread; nothing can be stopped there, so it must be sure."""
    return candidate.compute < INLINE_TICKS and work.steady(candidate.layer)


@dataclass(eq=False)
class _Task:
    candidate: Candidate
    work: Work
    submitted: int
    options: ort.RunOptions
    """How it is told to stop."""
    aborted: bool = False


@dataclass(eq=False)
class Lane:
    """One thread and what it did last."""

    index: int
    tasks: SimpleQueue[_Task | None] = field(default_factory=SimpleQueue)
    task: _Task | None = None
    thread: threading.Thread | None = None
    options: ort.RunOptions = field(default_factory=ort.RunOptions)
    """Of all its runs, until one of them is told to stop."""
    busy_ticks: int = 0


class Lanes:
    """Runs segments on threads; ``wake`` is called from them whenever one has ended."""

    def __init__(
        self, count: int, work_of: Callable[[Candidate], Work], wake: Callable[[], None], *, pin: bool = False
    ) -> None:
        self._work_of, self._wake = work_of, wake
        self.lanes = [Lane(index) for index in range(count)]
        self._idle = list(reversed(self.lanes))
        self._ended: deque[tuple[Lane, Completion]] = deque()
        cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
        for lane in self.lanes:
            core = cores[lane.index % len(cores)] if cores else None
            lane.thread = threading.Thread(
                target=self._serve, args=(lane, core), name=f"lane-{lane.index}", daemon=True
            )
            lane.thread.start()
        self.watch: Callable[[int, Completion], None] | None = None
        """Told of every segment that ended, with the number of its lane."""

    def now(self) -> int:
        return time.monotonic_ns()

    def ready(self) -> NpuState | None:
        if not self._idle:
            return None
        now = time.monotonic_ns()
        return NpuState(now, now, now)

    def completions(self) -> list[Completion]:
        ended: list[Completion] = []
        while self._ended:
            lane, completion = self._ended.popleft()
            if lane.task and lane.task.aborted:
                lane.options = ort.RunOptions()
            lane.task = None
            lane.busy_ticks += completion.times.compute_end - completion.times.compute_start
            self._idle.append(lane)
            ended.append(completion)
            self._show(lane.index, completion)
        return ended

    def _show(self, lane: int, completion: Completion) -> None:
        """Whoever watches must not be able to lose a completion."""
        try:
            if self.watch:
                self.watch(lane, completion)
        except Exception:
            log.exception("a segment could not be accounted for")

    def idle_until(self, tick: int) -> None:
        """The thread that drives the engine waits elsewhere: for requests and for ``wake``."""

    def submit(self, start: Start) -> None:
        candidate = start.candidate
        work = self._work_of(candidate)
        lane = self._idle.pop()
        task = lane.task = _Task(candidate, work, time.monotonic_ns(), lane.options)
        if runs_here(candidate, work):
            self._ended.append((lane, _computed(task)))
        else:
            lane.tasks.put(task)

    def abortable(self) -> tuple[Running, ...]:
        found = tuple(
            Running(lane.task.candidate, self._rest(lane.task), _abortable(lane.task))
            for lane in self.lanes
            if lane.task
        )
        return found if any(layer.stoppable for layer in found) else ()

    def stop(self, stream: int, query: int) -> None:
        """Stop what runs of a query, between two of its nodes."""
        for lane in self.lanes:
            task = lane.task
            if task and (task.candidate.stream, task.candidate.query) == (stream, query):
                task.aborted = True
                task.options.terminate = True

    def rests(self) -> list[tuple[Candidate, int]]:
        """What runs, and how many ticks each is expected to run on."""
        return [(lane.task.candidate, self._rest(lane.task)) for lane in self.lanes if lane.task]

    def _rest(self, task: _Task) -> int:
        return 0 if task.aborted else max(0, task.submitted + task.candidate.compute - time.monotonic_ns())

    def close(self, patience_s: float | None = None) -> bool:
        """Let every lane finish what it runs, and end its thread; False if one has not ended in time."""
        end_s = None if patience_s is None else time.monotonic_ns() / 1e9 + patience_s
        for lane in self.lanes:
            lane.tasks.put(None)
        threads = [lane.thread for lane in self.lanes if lane.thread]
        for thread in threads:
            thread.join(None if end_s is None else max(0.0, end_s - time.monotonic_ns() / 1e9))
        return not any(thread.is_alive() for thread in threads)

    def _serve(self, lane: Lane, core: int | None) -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        while (task := lane.tasks.get()) is not None:
            self._ended.append((lane, _computed(task)))
            del task
            self._wake()


def _abortable(task: _Task) -> bool:
    return task.candidate.compute >= ABORT_FROM_TICKS and not task.aborted


def _computed(task: _Task) -> Completion:
    error: Exception | None = None
    began = time.monotonic_ns()
    try:
        task.work.compute(task.candidate.layer, task.options)
    except Exception as problem:  # whatever a model does, its own requests hear of it and the lane goes on
        error = problem
    times = Issue(began, began, began, time.monotonic_ns())
    stopped = task.aborted and error is not None
    return Completion(task.candidate, times, stopped, None if stopped else error)
