"""The real executor: lanes of a backend, each of which computes one segment of one batch at a time.

All scheduling state belongs to the thread that drives the engine; a backend only runs segments and reports their ends.
The simulated twin is ``engine.simulated_host``.

A lane whose device queues steps holds more segments than the one it computes. The end of a segment is then reported to
the source when the lane starts it, so that the next one of its batch can be queued behind it; if the backend cannot
continue from it before it has ended, after its end. ``watch`` is called for every segment after its real end.

A lane whose segment takes far longer than expected (a timeout) is replaced: another one is opened, and it closes after
that segment.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Protocol

from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine.engine import Completion
from weft.engine.lane_queues import BatchKey, allowed_lanes, choose_lane, has_room, preceding_tasks, tasks_to_report
from weft.engine.policies.base import IDLE_LANE, NO_DEADLINE, Candidate, LaneState, Running, Start
from weft.runtime.backend import Backend, DeviceLane, LoadedModel, StartedStep, Step, StepEnd, StepOutput
from weft.runtime.facets import SegmentTiming

log = logging.getLogger("weft.engine")

ABORT_FROM_TICKS = 10_000_000
"""Segments of 10 ms and more may be stopped for urgent work; shorter ones end before stopping them pays off."""

INLINE_TICKS = 200_000
"""Steady segments of less than 0.2 ms run on the engine's own thread if the backend is ``inline``: handing them to
another thread costs as much. They cannot be stopped there."""

OVERRUN_TIMES, OVERRUN_TICKS = 4, 20_000_000
"""A segment that has run for four times as long as expected and 20 ms more has overrun."""

UNSURE_TICKS = 10_000_000
"""Cap on the expected duration of segments whose time depends on the values of inputs: longer observations are not
used, so that one hostile request cannot raise the estimate."""


class LaneWork(Protocol):
    """One batch as a lane sees it."""

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model that computes the work."""
        ...

    @property
    def timing(self) -> SegmentTiming:
        """The measured times of its segments."""
        ...

    @property
    def body(self) -> object:
        """The body in whose memory it is computed; only used where lanes are shares of one device."""
        ...

    def step(self, segment: int) -> Step:
        """The step of a segment, on the outputs of the one before it."""
        ...

    def take(self, segment: int, outputs: Sequence[StepOutput]) -> None:
        """Take the outputs of a segment that has ended, or that the batch can continue from before it has.

        Called on the thread of the backend that reports the end; for a lane that queues steps, on the engine's.
        """
        ...


@dataclass(eq=False)
class LaneTask:
    """A segment on a lane, running or queued."""

    candidate: Candidate
    work: LaneWork
    here: bool = False
    """Whether it is computed on the engine's own thread."""
    began: int | None = field(default=None, init=False)
    """When its lane started it; None while it is queued."""
    run: StartedStep | None = field(default=None, init=False)
    """Handle to stop it; None before it is started."""
    started: bool = field(default=False, init=False)
    aborted: bool = field(default=False, init=False)
    reported: bool = field(default=False, init=False)
    """Whether its end was reported to the source before it ended."""
    doomed: bool = field(default=False, init=False)
    """Whether it continues from a segment that failed, and will fail as well."""
    ended: bool = field(default=False, init=False)
    after: Sequence[LaneTask] = field(default=(), init=False)
    """Segments on other lanes that must end before it is started."""
    joined: BatchKey | None = field(default=None, init=False)
    """The batch that its own was merged into."""

    @property
    def batch(self) -> BatchKey:
        return self.joined or (self.candidate.stream, self.candidate.query)

    @property
    def stoppable(self) -> bool:
        return self.candidate.compute >= ABORT_FROM_TICKS

    @property
    def compute(self) -> int:
        return self.candidate.compute

    @property
    def overrun_at(self) -> int:
        """When it will have run for far longer than expected."""
        if self.began is None:
            return NO_DEADLINE
        sure = self.work.timing.foreseen[self.candidate.layer]
        expected = self.compute if sure else min(self.compute, UNSURE_TICKS)
        return self.began + OVERRUN_TIMES * expected + OVERRUN_TICKS

    @property
    def body(self) -> object:
        return self.work.body

    @property
    def goes_on(self) -> Sequence[StepOutput] | None:
        """Outputs that its batch can continue with while it runs; None if it must be awaited.

        A segment that may be stopped is awaited: work that continued from it would be lost with it.
        """
        if self.run is None:
            return None
        waited_for = self.reported or self.aborted or self.doomed or self.stoppable
        return None if waited_for else self.run.onward


@dataclass(eq=False)
class Lane:
    """One lane of the device and its segments."""

    index: int
    device: DeviceLane
    tasks: list[LaneTask] = field(default_factory=list)
    """The running segment first, then those that are queued."""
    busy_ticks: int = 0
    free_since: int = 0
    """When its last segment ended."""
    leaving: bool = False
    """It accepts no more segments."""
    replaced: bool = False
    """Another lane has its place, because its segment overran."""

    @property
    def task(self) -> LaneTask | None:
        """The running segment."""
        return self.tasks[0] if self.tasks else None


class LaneExecutor:
    """Runs segments on a backend; ``wake`` is called, on any thread, when one has ended."""

    def __init__(
        self,
        backend: Backend,
        count: int,
        work_of: Callable[[Candidate, object], tuple[LaneWork, bool]],
        wake: Callable[[], None],
        *,
        pin: bool = False,
        shares: bool = False,
    ) -> None:
        """work_of: the work of a lane for a layer of a batch, and whether it is computed on the engine's own thread.

        shares: lanes are shares of one device, and the policy chooses the lane of each segment.
        """
        self.backend, self.now, self._shares = backend, backend.now, shares
        self._work_of, self._wake = work_of, wake
        self._thread = get_ident()
        self._starting = False
        """Set while a segment is started: an end on the engine's own thread needs no wake-up then."""
        self.lanes = [Lane(index, backend.lane(index, pin=pin)) for index in range(count)]
        self.ahead = max((lane.device.ahead for lane in self.lanes), default=0)
        """How many segments a lane queues besides the one that it computes."""
        self.apart = any(lane.device.apart for lane in self.lanes)
        """Whether batches stay on their lanes."""
        self.apart &= not shares
        self._idle, self._pin = list(reversed(self.lanes)), pin
        self.count = count
        """Wanted number of lanes; replaced ones are additional, until they end."""
        self.replacements, self._refused = 0, False
        """Lanes replaced so far, and whether the last attempt failed, which is logged once."""
        self._inline_ticks = INLINE_TICKS if backend.inline and not self.ahead else 0
        self.ended: deque[tuple[Lane, LaneTask, Completion | StepEnd]] = deque()
        """Ended segments that the engine has not handled yet; a deque, since lanes append from their threads."""
        self.under_way = self._since = self._past_ticks = 0
        """Number of running steps, since when there is at least one, and the length of all such periods before."""
        self.watch: Callable[[int, Completion], None] | None = None
        """Called for every segment that ended, with the number of its lane."""

    @property
    def busy_ticks(self) -> int:
        """How long at least one step was running."""
        return self._past_ticks + (self.now() - self._since if self.under_way else 0)

    def resize(self, count: int) -> None:
        """Change the number of lanes; surplus lanes that compute are closed after their segment."""
        self.count = count
        counting = [lane for lane in self.lanes if not lane.replaced]
        for lane in counting[:count]:
            lane.leaving = False
        for lane in counting[count:]:
            lane.leaving = True
            if not lane.tasks:
                self._idle.remove(lane)
                self._dismiss(lane)
        for _ in range(count - len(counting)):
            self._open()

    def _open(self) -> None:
        """Open another lane, with the smallest free number."""
        taken = {lane.index for lane in self.lanes}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        lane = Lane(index, self.backend.lane(index, pin=self._pin))
        self.lanes.append(lane)
        self._idle.append(lane)

    def replace_overrun(self) -> int:
        """Open lanes in place of those whose segments have overrun; returns when the next segment will have.

        At most ``count`` lanes are replaced at a time. Lanes of a device, which queue segments, are never replaced.
        """
        now, soonest = self.now(), NO_DEADLINE
        for lane in [] if self.ahead else [lane for lane in self.lanes if lane.tasks and not lane.leaving]:
            overrun_at = lane.tasks[0].overrun_at
            if overrun_at > now:
                soonest = min(soonest, overrun_at)
            elif sum(other.replaced for other in self.lanes) < self.count:
                self._replace(lane)
        return soonest

    def _replace(self, lane: Lane) -> None:
        try:
            self._open()
        except (RuntimeError, OSError) as error:  # there are too many threads
            if not self._refused:
                log.warning("no lane can be opened in place of lane %d: %s", lane.index, error)
            self._refused = True
            return
        self.replacements, self._refused = self.replacements + 1, False
        lane.leaving = lane.replaced = True
        lane.device.give_way()

    def _dismiss(self, lane: Lane) -> None:
        """Close an idle lane without waiting for its thread."""
        self.lanes.remove(lane)
        lane.device.close(0.0)

    def ready(self) -> DeviceClocks | None:
        if not self.takes_more:
            return None
        now = self.now()
        return DeviceClocks(now, now, now)

    @property
    def takes_more(self) -> bool:
        """Whether a lane has room; a lane that is unable to compute counts only if no other lane is able."""
        if not self.ahead or any([lane.device.able for lane in self._idle]):
            return bool(self._idle)
        roomy = self._roomy()
        if all(lane.device.able for lane in roomy):
            return bool(roomy)
        return any(lane.device.able for lane in roomy) or not any(lane.device.able for lane in self.lanes)

    def _roomy(self) -> list[Lane]:
        """The lanes that accept another segment."""
        return [lane for lane in self.lanes if not lane.leaving and has_room(lane, lane.device.ahead)]

    def held(self) -> tuple[LaneState, ...]:
        if not self._shares:
            return ()
        return tuple([self._state(lane) if lane.tasks else IDLE_LANE for lane in self.lanes])

    def _state(self, lane: Lane) -> LaneState:
        room = not lane.leaving and has_room(lane, lane.device.ahead)
        return LaneState(tuple([task.candidate for task in lane.tasks]), self._lane_rest(lane), room)

    def rooms(self) -> list[int]:
        return [lane.index for lane in self._roomy()]

    def completions(self) -> list[Completion]:
        ended: list[Completion] = []
        while self.ended:
            lane, task, end = self.ended.popleft()
            if task.ended:  # a step whose start failed may have reported its end, too
                continue
            completion = self._completion_on(lane, task, end) if isinstance(end, StepEnd) else end
            self._take_off(lane, task, completion.times)
            if not task.reported:
                ended.append(completion)
            elif completion.error or completion.aborted:
                self._doom(task.batch)
            self._show(lane.index, completion)
            if self.ahead:
                self._start_waiting()
        return ended + self._early_completions() if self.ahead else ended

    def _take_off(self, lane: Lane, task: LaneTask, times: LayerTimes) -> None:
        """Remove a segment from its lane, which goes on with the next one."""
        task.ended = True
        if task.started:
            self.under_way -= 1
            self._past_ticks += 0 if self.under_way else self.now() - self._since
        _, _, began, ended = times
        if task is lane.tasks[0] and ended > lane.free_since:
            lane.free_since = ended
        lane.tasks.remove(task)
        lane.busy_ticks += ended - began
        if lane.tasks:
            head = lane.tasks[0]
            if head.began is None and head.started:
                head.began = lane.free_since
        elif lane.leaving:
            self._dismiss(lane)
        else:
            self._idle.append(lane)

    def _doom(self, batch: BatchKey) -> None:
        """Mark the segments of a batch that continued from a failed one: they fail as well, and are awaited."""
        for lane in self.lanes:
            for task in lane.tasks:
                task.doomed |= task.batch == batch

    def _show(self, lane: int, completion: Completion) -> None:
        """Call ``watch``; an error in it must not lose a completion."""
        try:
            if self.watch:
                self.watch(lane, completion)
        except Exception:
            log.exception("a segment could not be accounted for")

    def idle_until(self, tick: int) -> None:
        """Do nothing: the thread that drives the engine waits elsewhere, for requests and for ``wake``."""

    def runs_here(self, candidate: Candidate, work: LaneWork) -> bool:
        """Whether a segment is computed on the engine's own thread, where it cannot be stopped."""
        return candidate.compute < self._inline_ticks and work.timing.steady[candidate.layer]

    def submit(self, start: Start, batch: object = None) -> None:
        task = LaneTask(start.candidate, *self._work_of(start.candidate, batch))
        if self.ahead:
            self._queue(task, start.lane)
            return
        lane = self._idle.pop()
        lane.tasks.append(task)
        self._start(lane, task)

    def _queue(self, task: LaneTask, chosen: int) -> None:
        """Queue a segment on the lane that the policy chose, or on a suitable one."""
        lane = self.lanes[chosen] if chosen >= 0 else self._choose_lane(task)
        task.after = preceding_tasks(task, lane, self.lanes, shares=self._shares)
        if not lane.tasks:
            self._idle.remove(lane)
        lane.tasks.append(task)
        self._start_waiting()

    def _choose_lane(self, task: LaneTask) -> Lane:
        """A lane with room for a segment for which the policy chose none; one that can compute now, if there is any."""
        open_to = allowed_lanes(task.candidate, self._roomy())
        able = [lane for lane in open_to if lane.device.able]
        return choose_lane(task.batch, able or open_to, self._lane_rest)

    def _start_waiting(self) -> None:
        """Start the segments that no longer wait for others; those of a lane are started in order."""
        for lane in self.lanes:
            for task in lane.tasks:
                if not task.started and not task.aborted:
                    if not all(earlier.ended for earlier in task.after):
                        break
                    self._start_queued(lane, task)

    def _start_queued(self, lane: Lane, task: LaneTask) -> None:
        """Start a segment; if that fails, it ends with the error, and ends of other segments are not lost."""
        task.after = ()
        try:
            self._start(lane, task)
        except Exception as problem:
            now = self.now()
            self._end(lane, task, StepEnd(now, now, error=problem))

    def _start(self, lane: Lane, task: LaneTask) -> None:
        task.started = True
        self._since = self._since if self.under_way else self.now()
        self.under_way += 1
        if task is lane.tasks[0]:
            task.began = self.now()
        work, ended = task.work, partial(self._end, lane, task)
        self._starting = True
        try:
            task.run = work.loaded.start(work.step(task.candidate.layer), lane.device, ended, here=task.here)
        finally:
            self._starting = False

    def _end(self, lane: Lane, task: LaneTask, end: StepEnd) -> None:
        """Record the end of a segment; called on any thread, and on the engine's own while the segment is started.

        On a lane that queues steps, the end may have been reported already; only the engine's thread knows.
        """
        self.ended.append((lane, task, end if self.ahead else _completion(lane, task, end)))
        if not self._starting or get_ident() != self._thread:
            self._wake()

    def _completion_on(self, lane: Lane, task: LaneTask, end: StepEnd) -> Completion:
        """The completion of a segment on a lane that queues steps; it began when the one before it ended."""
        began, ended, outputs, error = end
        began = max(began, lane.free_since) if task is lane.tasks[0] else ended
        return _completion(lane, task, StepEnd(began, max(began, ended), outputs, error))

    def _early_completions(self) -> list[Completion]:
        """Report segments that run, or soon will, and that batches can continue from: with expected times."""
        completions = []
        for lane in [lane for lane in self.lanes if lane.tasks and not lane.tasks[-1].reported]:
            begin = self.now()
            for task in tasks_to_report(lane, lane.device.ahead):
                outputs = task.goes_on
                if outputs is not None:
                    task.reported, error = True, _take(task, outputs)
                    times = LayerTimes(begin, begin, begin, begin + task.compute)
                    completions.append(Completion(task.candidate, times, error=error, work=task.work, lane=lane.index))
                begin += self._rest(task)
        return completions

    def abortable(self) -> tuple[Running, ...]:
        """Return the last segment of every lane, each with whether it may be stopped; none if none of them may.

        On a lane that queues segments nothing waits behind one that may be stopped, and the lane is free when its last
        one has ended.
        """
        for lane in self.lanes:
            if lane.tasks and not lane.replaced and _abortable(lane.tasks[-1]):
                break
        else:
            return ()
        last = [(lane, lane.tasks[-1]) for lane in self.lanes if lane.tasks and not lane.replaced]
        return tuple([Running(task.candidate, self._lane_rest(lane), _abortable(task)) for lane, task in last])

    def stop(self, stream: int, query: int) -> None:
        """Stop the segments of a query, running or queued, except those whose end was reported already."""
        for lane in self.lanes:
            for task in lane.tasks:
                if task.batch == (stream, query) and not task.reported:
                    self.halt(lane, task)

    def halt(self, lane: Lane, task: LaneTask) -> None:
        """Stop a segment."""
        waiting, task.aborted = not (task.started or task.aborted), True
        if task.run:
            task.run.stop()
        elif waiting:
            now = self.now()
            self._end(lane, task, StepEnd(now, now, error=InterruptedError("stopped")))

    def joined(self, stream: int, query: int, other: int) -> None:
        """Note that a batch was merged into another one, which continues from its running segments."""
        for lane in self.lanes if self.ahead else ():
            for task in lane.tasks:
                if task.batch == (stream, other):
                    task.joined = (stream, query)

    def holds(self, index: int, batch: BatchKey) -> bool:
        """Whether the lane of this number has a segment of a batch."""
        return any(task.batch == batch for lane in self.lanes if lane.index == index for task in lane.tasks)

    def rests(self) -> list[tuple[Candidate, int]]:
        """The segments of all lanes, each with its own expected remaining ticks.

        A segment that has overrun counts as 0: its lane was replaced, so that no other segment waits for it.
        """
        return [
            (task.candidate, 0 if lane.replaced else self._rest(task)) for lane in self.lanes for task in lane.tasks
        ]

    def _lane_rest(self, lane: Lane) -> int:
        """Expected ticks until a lane is free."""
        return sum([self._rest(task) for task in lane.tasks])

    def _rest(self, task: LaneTask) -> int:
        """Expected remaining ticks of a segment."""
        if task.aborted:
            return 0
        compute = task.candidate.compute
        return compute if task.began is None else max(0, task.began + compute - self.now())

    def close(self, patience_s: float | None = None) -> bool:
        """Wait for the running segments and close all lanes; False if one has not ended in time."""
        end_s = None if patience_s is None else time.monotonic() + patience_s
        ended = [
            lane.device.close(None if end_s is None else max(0.0, end_s - time.monotonic())) for lane in self.lanes
        ]
        return all(ended)


def _take(task: LaneTask, outputs: Sequence[StepOutput]) -> Exception | None:
    """Hand on the outputs of a segment; an unusable output is returned as an error, which fails its requests only."""
    try:
        task.work.take(task.candidate.layer, outputs)
    except Exception as problem:
        return problem
    return None


def _completion(lane: Lane, task: LaneTask, end: StepEnd) -> Completion:
    began, ended, outputs, error = end
    if error is None and not task.reported:
        error = _take(task, outputs)
    times = LayerTimes(began, began, began, ended)
    stopped = task.aborted and error is not None
    return Completion(task.candidate, times, stopped, None if stopped else error, task.work, lane.index)


def _abortable(task: LaneTask) -> bool:
    return task.stoppable and not task.aborted
