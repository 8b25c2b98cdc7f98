"""The real executor: lanes of a backend, each of which computes one segment of one batch at a time. Ticks are ns.

All scheduling state belongs to the thread that drives the engine; a backend only runs segments and reports their ends.
The simulated twin is ``engine.simulated_host``.

A lane whose device queues steps, such as a GPU, holds more segments than the one it computes. The end of a segment is
then reported to the engine when the lane starts it, so that the next segment of its batch can be queued behind it. If
the backend cannot continue from a running segment, the real end is reported. ``watch`` always sees the real end.

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
        """The body (backbone) in whose memory it is computed; only used where lanes are shares of one device."""
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
    here: bool = False  # whether it is computed on the engine's own thread
    layers: int | None = None
    """The segments that it covers where the device has gates (``Start.layers``)."""
    began: int | None = field(default=None, init=False)
    """When its lane began to compute it; None while it is queued."""
    run: StartedStep | None = field(default=None, init=False)
    """Handle to stop it; None before it is given to the backend."""
    started: bool = field(default=False, init=False)
    aborted: bool = field(default=False, init=False)  # asked to stop
    reported: bool = field(default=False, init=False)
    """Whether its end was reported to the source before it ended."""
    doomed: bool = field(default=False, init=False)
    """Whether an earlier segment of its batch failed after it was reported as a success. This one will fail, too."""
    ended: bool = field(default=False, init=False)
    waits_for: Sequence[LaneTask] = field(default=(), init=False)
    """Segments on other lanes that must end before it is started."""
    joined: BatchKey | None = field(default=None, init=False)
    """The batch that its own batch was merged into; None if it was not."""

    @property
    def batch(self) -> BatchKey:
        """The batch that it belongs to now, which may have been merged into another."""
        return self.joined or (self.candidate.stream, self.candidate.query)

    @property
    def stoppable(self) -> bool:
        """Whether it is long enough to be stopped for urgent work, and does not leave at gates instead."""
        return self.candidate.compute >= ABORT_FROM_TICKS and self.layers is None

    @property
    def compute(self) -> int:
        """Its expected duration in ticks."""
        return self.candidate.compute

    @property
    def overrun_at(self) -> int:
        """The time from which the segment counts as overrun; ``NO_DEADLINE`` while it is queued."""
        if self.began is None:
            return NO_DEADLINE
        predictable = self.work.timing.foreseen[self.candidate.layer]
        expected = self.compute if predictable else min(self.compute, UNSURE_TICKS)
        return self.began + OVERRUN_TIMES * expected + OVERRUN_TICKS

    @property
    def body(self) -> object:
        """The backbone in whose memory it is computed (``LaneWork.body``)."""
        return self.work.body

    @property
    def early_outputs(self) -> Sequence[StepOutput] | None:
        """Outputs that the batch's next segment can be queued behind while this one still runs; None if it may not.

        It may not if this segment was not started or was reported already, or if it is doomed, or is stopped or may be:
        the next segment would be lost with it. Nor if it covers several, which may leave at a gate. The backend may
        have no such outputs (``StartedStep.onward``).
        """
        lost = self.reported or self.doomed or self.aborted or self.stoppable
        return None if self.run is None or lost or self.layers is not None else self.run.onward


@dataclass(eq=False)
class Lane:
    """One lane of the device and its segments."""

    index: int
    device: DeviceLane
    tasks: list[LaneTask] = field(default_factory=list)
    """The running segment first, then those that are queued."""
    busy_ticks: int = 0  # of all its segments
    free_since: int = 0  # when its last segment ended
    leaving: bool = False  # whether it accepts no more segments
    replaced: bool = False  # whether another lane has its place, because its segment overran

    @property
    def is_open(self) -> bool:
        """Whether it accepts segments and can compute them."""
        return not self.leaving and self.device.able

    @property
    def task(self) -> LaneTask | None:
        """The running segment."""
        return self.tasks[0] if self.tasks else None


class LaneExecutor:
    """Runs segments on a backend; ``wake`` is called, on any thread, when a segment has ended."""

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
        """count: wanted number of lanes. pin: each lane gets a part of the device of its own, such as a core.

        work_of: returns the work of a candidate's segment, given its batch, and whether it is computed on the engine's
        own thread. shares: lanes are shares of one device, and the policy chooses the lane of each segment.
        """
        self.backend, self.now, self._shares = backend, backend.now, shares
        self._work_of, self._wake = work_of, wake
        self._thread = get_ident()
        self._starting = False
        """Set while a segment is started: an end on the engine's own thread needs no wake-up then."""
        self.lanes = [Lane(index, backend.lane(index, pin=pin)) for index in range(count)]
        self.ahead = max((lane.device.ahead for lane in self.lanes), default=0)
        """How many segments a lane queues besides the one that it computes."""
        self.apart = any(lane.device.apart for lane in self.lanes) and not shares
        """Whether batches stay on their lanes."""
        self._idle, self._pin = list(reversed(self.lanes)), pin
        self.count = count
        """Wanted number of lanes; replaced ones are additional, until they end."""
        self.replacements, self._refused = 0, False
        """Lanes replaced so far, and whether the last attempt failed, which is logged once."""
        self._inline_ticks = INLINE_TICKS if backend.inline and not self.ahead else 0
        self.ended: deque[tuple[Lane, LaneTask, Completion | StepEnd]] = deque()
        """Ended segments that the engine has not handled yet; a deque, since lanes append from their threads."""
        self.under_way = self._since = self._past_ticks = 0
        """Number of running steps, when the present period with any began, and ticks of all earlier such periods."""
        self.watch: Callable[[int, Completion], None] | None = None
        """Called for every segment that ended, with the number of its lane."""

    @property
    def busy_ticks(self) -> int:
        """Ticks (nanoseconds) during which at least one step was running."""
        return self._past_ticks + (self.now() - self._since if self.under_way else 0)

    def resize(self, count: int) -> None:
        """Change the number of lanes; surplus lanes that are computing are closed after their segments."""
        self.count = count
        regular_lanes = [lane for lane in self.lanes if not lane.replaced]
        for lane in regular_lanes[:count]:
            lane.leaving = False
        for lane in regular_lanes[count:]:
            lane.leaving = True
            if not lane.tasks:
                self._idle.remove(lane)
                self._close_idle(lane)
        for _ in range(count - len(regular_lanes)):
            self._open()

    def _open(self) -> None:
        """Open another lane, with the smallest free number."""
        used_numbers = {lane.index for lane in self.lanes}
        index = next(index for index in range(len(used_numbers) + 1) if index not in used_numbers)
        lane = Lane(index, self.backend.lane(index, pin=self._pin))
        self.lanes.append(lane)
        self._idle.append(lane)

    def replace_overrun(self) -> int:
        """Replace lanes whose segments have overrun; return the earliest tick at which another segment overruns.

        At most ``count`` lanes are replaced at a time. Lanes that queue segments, as on a GPU, are never replaced.
        """
        now, next_overrun = self.now(), NO_DEADLINE
        for lane in [] if self.ahead else [lane for lane in self.lanes if lane.tasks and not lane.leaving]:
            overrun_at = lane.tasks[0].overrun_at
            if overrun_at > now:
                next_overrun = min(next_overrun, overrun_at)
            elif sum(other.replaced for other in self.lanes) < self.count:
                self._replace(lane)
        return next_overrun

    def _replace(self, lane: Lane) -> None:
        """Open a lane in place of *lane*, which closes after its segment; if that fails, log it once."""
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

    def _close_idle(self, lane: Lane) -> None:
        """Remove and close an idle lane without waiting for its thread."""
        self.lanes.remove(lane)
        lane.device.close(0.0)

    def ready(self) -> DeviceClocks | None:
        """The device's clocks, all of which show the present time, if a lane has room; else None."""
        if not self.takes_more:
            return None
        now = self.now()
        return DeviceClocks(now, now, now)

    @property
    def takes_more(self) -> bool:
        """Whether a lane has room; a lane that is unable to compute counts only if no other lane is able."""
        # Asked for every decision: the common cases come first, and lists are faster than generators.
        if not self.ahead or any([lane.device.able for lane in self._idle]):
            return bool(self._idle)
        with_room = self._lanes_with_room()
        if all(lane.device.able for lane in with_room):
            return bool(with_room)
        return any(lane.device.able for lane in with_room) or not any(lane.device.able for lane in self.lanes)

    def _lanes_with_room(self) -> list[Lane]:
        """The lanes that accept another segment."""
        return [lane for lane in self.lanes if not lane.leaving and has_room(lane, lane.device.ahead)]

    @property
    def queues(self) -> Sequence[Lane]:
        """The lanes with their segments."""
        return self.lanes

    def held(self) -> tuple[LaneState, ...]:
        """What each lane holds, for a policy that chooses lanes; empty unless lanes are shares of one device."""
        if not self._shares:
            return ()
        return tuple([self._lane_state(lane) if lane.tasks else IDLE_LANE for lane in self.lanes])

    def _lane_state(self, lane: Lane) -> LaneState:
        """The segments of a lane, the ticks until it is free, and whether it accepts another segment."""
        room = not lane.leaving and has_room(lane, lane.device.ahead)
        return LaneState(tuple([task.candidate for task in lane.tasks]), self._lane_remaining(lane), room)

    def rooms(self) -> list[int]:
        """The numbers of the lanes that have room for another segment."""
        return [lane.index for lane in self._lanes_with_room()]

    def completions(self) -> list[Completion]:
        """Free the lanes of ended segments; return their completions, unless they were reported before they ended.

        If lanes queue segments, these include running segments that their batches can continue from.
        """
        ended: list[Completion] = []
        while self.ended:
            lane, task, end = self.ended.popleft()
            if task.ended:  # a step whose start failed may have reported its end, too
                continue
            completion = self._queued_completion(lane, task, end) if isinstance(end, StepEnd) else end
            self._remove_task(lane, task, completion.times)
            if not task.reported:
                ended.append(completion)
            elif completion.error or completion.aborted:  # it was reported as a success
                self._doom(task.batch)
            self._call_watch(lane.index, completion)
            if self.ahead:
                self._start_waiting()
        return ended + self._early_completions() if self.ahead else ended

    def _remove_task(self, lane: Lane, task: LaneTask, times: LayerTimes) -> None:
        """Remove an ended segment from its lane, which goes on with the next segment; *times*: of the ended one."""
        task.ended = True
        if task.started:
            self.under_way -= 1
            self._past_ticks += 0 if self.under_way else self.now() - self._since
        _, _, began, ended = times  # of computing; the first two are those of a fetch
        if task is lane.tasks[0] and ended > lane.free_since:
            lane.free_since = ended
        lane.tasks.remove(task)
        lane.busy_ticks += ended - began
        if lane.tasks:
            next_task = lane.tasks[0]
            if next_task.began is None and next_task.started:
                next_task.began = lane.free_since
        elif lane.leaving:
            self._close_idle(lane)
        else:
            self._idle.append(lane)

    def _doom(self, batch: BatchKey) -> None:
        """Mark the segments of a batch that continue from a failed one: they will fail, so none is reported early."""
        for lane in self.lanes:
            for task in lane.tasks:
                task.doomed |= task.batch == batch

    def _call_watch(self, lane: int, completion: Completion) -> None:
        """Call ``watch``; its errors are logged, so that they lose no completion."""
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
        """Run a segment on an idle lane, or queue it if lanes queue segments; *batch*: passed on to ``work_of``."""
        task = LaneTask(start.candidate, *self._work_of(start.candidate, batch), start.layers)
        if self.ahead:
            self._queue(task, start.lane)
            return
        lane = self._idle.pop()
        lane.tasks.append(task)
        self._start(lane, task)

    def _queue(self, task: LaneTask, chosen: int) -> None:
        """Queue a segment on the lane numbered *chosen*; if that is negative, the policy chose none, and this does."""
        lane = self.lanes[chosen] if chosen >= 0 else self._choose_lane(task)
        task.waits_for = preceding_tasks(task, lane, self.lanes, shares=self._shares)
        if not lane.tasks:
            self._idle.remove(lane)
        lane.tasks.append(task)
        self._start_waiting()

    def _choose_lane(self, task: LaneTask) -> Lane:
        """Choose a lane with room for a segment; only among lanes that can compute now, if there is any."""
        if len(self.lanes) == 1:
            return self.lanes[0]
        allowed = allowed_lanes(task.candidate, self._lanes_with_room())
        able = [lane for lane in allowed if lane.device.able]
        return choose_lane(task.batch, able or allowed, self._lane_remaining)

    def _start_waiting(self) -> None:
        """Start the queued segments that wait for no other lane any more; each lane starts its segments in order."""
        for lane in self.lanes:
            for task in lane.tasks:
                if not task.started and not task.aborted:
                    if not all(earlier.ended for earlier in task.waits_for):
                        break
                    self._start_queued(lane, task)

    def _start_queued(self, lane: Lane, task: LaneTask) -> None:
        """Start a queued segment; an error in that becomes the segment's end, so that others are still started."""
        task.waits_for = ()  # so that ended segments are freed
        try:
            self._start(lane, task)
        except Exception as problem:
            now = self.now()
            self._end(lane, task, StepEnd(now, now, error=problem))

    def _start(self, lane: Lane, task: LaneTask) -> None:
        """Give a segment to the backend."""
        task.started = True
        self._since = self._since if self.under_way else self.now()
        self.under_way += 1
        if task is lane.tasks[0]:
            task.began = self.now()
        work, on_end = task.work, partial(self._end, lane, task)
        step = work.step(task.candidate.layer)
        if task.layers is not None:
            step = step._replace(segments=task.layers)
        self._starting = True
        try:
            task.run = work.loaded.start(step, lane.device, on_end, here=task.here)
        finally:
            self._starting = False

    def _end(self, lane: Lane, task: LaneTask, end: StepEnd) -> None:
        """Record the end of a segment; called on any thread, on the engine's own only while the segment is started.

        On a lane that queues steps, the end may have been reported already, which only the engine's thread knows: so
        the completion is made later, in ``completions``.
        """
        self.ended.append((lane, task, end if self.ahead else _completion(lane, task, end)))
        if not self._starting or get_ident() != self._thread:
            self._wake()

    def _queued_completion(self, lane: Lane, task: LaneTask, end: StepEnd) -> Completion:
        """The completion of a segment on a lane that queues steps; it began when the segment before it ended."""
        # A segment that was stopped while it was queued behind another took no time.
        began = max(end.began, lane.free_since) if task is lane.tasks[0] else end.ended
        return _completion(lane, task, end._replace(began=began, ended=max(began, end.ended)))

    def _early_completions(self) -> list[Completion]:
        """Completions, with expected times, of segments that have not ended but that batches can continue from."""
        completions = []
        for lane in [lane for lane in self.lanes if lane.tasks and not lane.tasks[-1].reported]:
            begins = self.now()
            for task in tasks_to_report(lane, lane.device.ahead):
                outputs = task.early_outputs
                if outputs is not None:
                    task.reported, error = True, _take(task, outputs)
                    times = LayerTimes(begins, begins, begins, begins + task.compute)
                    completions.append(Completion(task.candidate, times, error=error, work=task.work, lane=lane.index))
                begins += self._remaining(task)
        return completions

    def abortable(self) -> tuple[Running, ...]:
        """The last segment of every lane, with its remaining ticks and whether it may be stopped.

        Empty if no segment may be stopped. On a lane that queues segments, none is queued behind a segment that may be
        stopped, and the lane is free when its last segment has ended.
        """
        for lane in self.lanes:  # usually none: then no list is built
            if lane.tasks and not lane.replaced and _abortable(lane.tasks[-1]):
                break
        else:
            return ()
        last = [(lane, lane.tasks[-1]) for lane in self.lanes if lane.tasks and not lane.replaced]
        return tuple([Running(task.candidate, self._lane_remaining(lane), _abortable(task)) for lane, task in last])

    def stop(self, stream: int, query: int) -> None:
        """Stop the segments of batch *query* of a stream, running or queued, unless their end was reported already."""
        for lane in self.lanes:
            for task in lane.tasks:
                if task.batch == (stream, query) and not task.reported:
                    self.halt(lane, task)

    def halt(self, lane: Lane, task: LaneTask) -> None:
        """Stop a segment: the backend ends a started one; a queued one ends here, with ``InterruptedError``."""
        queued, task.aborted = not (task.started or task.aborted), True
        if task.run:
            task.run.stop()
        elif queued:
            now = self.now()
            self._end(lane, task, StepEnd(now, now, error=InterruptedError("stopped")))

    def joined(self, stream: int, query: int, other: int) -> None:
        """Record that batch *other* of a stream was merged into its batch *query*, which continues from both."""
        for lane in self.lanes if self.ahead else ():
            for task in lane.tasks:
                if task.batch == (stream, other):
                    task.joined = (stream, query)

    def holds(self, index: int, batch: BatchKey) -> bool:
        """Whether the lane of this number has a segment of a batch."""
        return any(task.batch == batch for lane in self.lanes if lane.index == index for task in lane.tasks)

    def rests(self) -> list[tuple[Candidate, int]]:
        """The rest of each segment on the lanes: the segment, and its expected remaining ticks.

        A segment that has overrun counts as 0: its lane was replaced, so that no other segment waits for it.
        """
        return [
            (task.candidate, 0 if lane.replaced else self._remaining(task))
            for lane in self.lanes
            for task in lane.tasks
        ]

    def _lane_remaining(self, lane: Lane) -> int:
        """Expected ticks until a lane is free."""
        return sum([self._remaining(task) for task in lane.tasks])

    def _remaining(self, task: LaneTask) -> int:
        """Expected remaining ticks of a segment."""
        if task.aborted:
            return 0
        compute = task.candidate.compute
        return compute if task.began is None else max(0, task.began + compute - self.now())

    def close(self, patience_s: float | None = None) -> bool:
        """Wait up to *patience_s* for the running segments and close all lanes; False if a segment has not ended."""
        end_s = None if patience_s is None else time.monotonic() + patience_s
        ended = [
            lane.device.close(None if end_s is None else max(0.0, end_s - time.monotonic())) for lane in self.lanes
        ]
        return all(ended)


def _take(task: LaneTask, outputs: Sequence[StepOutput], layers: int = 1) -> Exception | None:
    """Pass the outputs of a segment to its work; return the error if that fails, which fails this batch only.

    layers: how many segments were computed; the outputs are those of the last one.
    """
    try:
        task.work.take(task.candidate.layer + layers - 1, outputs)
    except Exception as problem:
        return problem
    return None


def _completion(lane: Lane, task: LaneTask, end: StepEnd) -> Completion:
    """Make the completion of an ended segment, whose outputs its work takes unless it has them already."""
    began, ended, outputs, error, computed = end
    started = task.layers or 1
    layers = started if computed is None else computed
    if error is None and layers and not task.reported:
        error = _take(task, outputs, layers)
    times = LayerTimes(began, began, began, ended)
    stopped = task.aborted if error else layers < started
    reached = None if task.layers is None else 0 if error else layers
    return Completion(
        task.candidate, times, stopped, None if stopped else error, work=task.work, lane=lane.index, layers=reached
    )


def _abortable(task: LaneTask) -> bool:
    return task.stoppable and not task.aborted
