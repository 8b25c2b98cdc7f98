"""The executor whose time passes: lanes of a backend, each of which computes one segment of one batch at a time.

All scheduling state lives on the thread that drives the engine; a backend only runs what it was given and tells when it
has ended. The twin in which time jumps is ``engine.simulated_host``.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import get_ident
from typing import Protocol

from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine.engine import Completion
from weft.policies.base import Candidate, Running, Start
from weft.runtime.backend import Backend, DeviceLane, Ended, StartedStep, StepEnd, StepOutput

log = logging.getLogger("weft.engine")

ABORT_FROM_TICKS = 10_000_000
"""Segments of 10 ms and more may be stopped for something urgent; shorter ones are over before it pays."""

INLINE_TICKS = 200_000
"""Steady segments of less than 0.2 ms run on the engine's own thread, where the backend can do that: handing them to
another costs as much."""


class LaneWork(Protocol):
    """One batch as a lane sees it."""

    def steady(self, segment: int) -> bool:
        """Whether a segment takes as long as it did before, whatever its inputs hold."""
        ...

    def start(self, segment: int, lane: DeviceLane, ended: Ended, *, here: bool) -> StartedStep:
        """Run a segment on the values the one before it left (``LoadedModel.start``)."""
        ...

    def take(self, segment: int, made: Sequence[StepOutput]) -> None:
        """It has ended; called on whatever thread told of it."""
        ...


@dataclass(eq=False)
class _LaneTask:
    candidate: Candidate
    work: LaneWork
    submitted: int
    run: StartedStep | None = None
    """How it is told to stop."""
    aborted: bool = False


@dataclass(eq=False)
class Lane:
    """One lane of the device, and what it does."""

    index: int
    device: DeviceLane
    task: _LaneTask | None = None
    busy_ticks: int = 0
    leaving: bool = False
    """It takes nothing more."""


class LaneExecutor:
    """Runs segments on a backend; ``wake`` is called, on any thread, when one has ended."""

    def __init__(
        self,
        backend: Backend,
        count: int,
        work_of: Callable[[Candidate], LaneWork],
        wake: Callable[[], None],
        *,
        pin: bool = False,
    ) -> None:
        self.backend, self.now = backend, backend.now
        self._work_of, self._wake = work_of, wake
        self._thread = get_ident()
        self._starting = False
        """Whether the engine is told of an end without being woken."""
        self.lanes = [Lane(index, backend.lane(index, pin=pin)) for index in range(count)]
        self._idle, self._pin = list(reversed(self.lanes)), pin
        self._ended: deque[tuple[Lane, Completion]] = deque()
        self.watch: Callable[[int, Completion], None] | None = None
        """Told of every segment that ended, with the number of its lane."""

    def resize(self, count: int) -> None:
        """Have so many lanes from now on; one too many that computes ends when that has ended."""
        for lane in self.lanes[:count]:
            lane.leaving = False
        for lane in self.lanes[count:]:
            lane.leaving = True
            if lane.task is None:
                self._idle.remove(lane)
                self._dismiss(lane)
        taken = {lane.index for lane in self.lanes}
        free = (index for index in range(count + len(taken)) if index not in taken)
        for index in islice(free, max(0, count - len(self.lanes))):
            lane = Lane(index, self.backend.lane(index, pin=self._pin))
            self.lanes.append(lane)
            self._idle.append(lane)

    def _dismiss(self, lane: Lane) -> None:
        """Let a lane with nothing to do end; nobody waits for that."""
        self.lanes.remove(lane)
        lane.device.close(0.0)

    def ready(self) -> DeviceClocks | None:
        return DeviceClocks.at(self.now()) if self._idle else None

    def completions(self) -> list[Completion]:
        ended: list[Completion] = []
        while self._ended:
            lane, completion = self._ended.popleft()
            lane.task = None
            lane.busy_ticks += completion.times.compute_end - completion.times.compute_start
            if lane.leaving:
                self._dismiss(lane)
            else:
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

    def runs_here(self, candidate: Candidate, work: LaneWork) -> bool:
        """Whether a segment is computed on the engine's own thread; it cannot be stopped there, so it must be sure."""
        return self.backend.inline and candidate.compute < INLINE_TICKS and work.steady(candidate.layer)

    def submit(self, start: Start) -> None:
        candidate = start.candidate
        work = self._work_of(candidate)
        lane = self._idle.pop()
        task = lane.task = _LaneTask(candidate, work, self.now())
        here = self.runs_here(candidate, work)
        self._starting = True
        try:
            task.run = work.start(candidate.layer, lane.device, partial(self._end, lane, task), here=here)
        finally:
            self._starting = False

    def _end(self, lane: Lane, task: _LaneTask, end: StepEnd) -> None:
        """A segment has ended; called on any thread, and on our own while it starts."""
        error = end.error
        if error is None:
            try:
                task.work.take(task.candidate.layer, end.made)
            except Exception as problem:  # its own requests hear of it and the lane goes on
                error = problem
        times = LayerTimes(end.began, end.began, end.began, end.ended)
        stopped = task.aborted and error is not None
        self._ended.append((lane, Completion(task.candidate, times, stopped, None if stopped else error)))
        if not self._starting or get_ident() != self._thread:
            self._wake()

    def abortable(self) -> tuple[Running, ...]:
        found = tuple(
            Running(lane.task.candidate, self._rest(lane.task), _abortable(lane.task))
            for lane in self.lanes
            if lane.task
        )
        return found if any(layer.stoppable for layer in found) else ()

    def stop(self, stream: int, query: int) -> None:
        """Stop what runs of a query."""
        for lane in self.lanes:
            task = lane.task
            if task and (task.candidate.stream, task.candidate.query) == (stream, query):
                task.aborted = True
                if task.run:
                    task.run.stop()

    def rests(self) -> list[tuple[Candidate, int]]:
        """What runs, and how many ticks each is expected to run on."""
        return [(lane.task.candidate, self._rest(lane.task)) for lane in self.lanes if lane.task]

    def _rest(self, task: _LaneTask) -> int:
        return 0 if task.aborted else max(0, task.submitted + task.candidate.compute - self.now())

    def close(self, patience_s: float | None = None) -> bool:
        """Let every lane finish what it runs, and end it; False if one has not ended in time."""
        end_s = None if patience_s is None else time.monotonic() + patience_s
        left = [lane.device.close(None if end_s is None else max(0.0, end_s - time.monotonic())) for lane in self.lanes]
        return all(left)


def _abortable(task: _LaneTask) -> bool:
    return task.candidate.compute >= ABORT_FROM_TICKS and not task.aborted
