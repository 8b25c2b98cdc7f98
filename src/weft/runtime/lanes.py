"""The executor whose time passes: lanes of a backend, each of which computes one segment of one batch at a time.

All scheduling state lives on the thread that drives the engine; a backend only runs what it was given and tells when it
has ended. The twin in which time jumps is ``engine.simulated_host``.

A lane whose device takes steps ahead holds more than it computes. The source is told of the end of a segment when its
lane comes to it, so that the next one of its batch can be queued behind it; where the backend cannot go on from it
before it has ended, when it has. Those who watch hear of every segment when it has really ended.

A lane whose segment takes far longer than was expected does not count any more: another one is opened in its place, and
it ends with that segment.
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
from weft.engine.lane_queues import BatchKey, at_home, awaited, has_room, known, lane_for
from weft.engine.policies.base import IDLE_LANE, NO_DEADLINE, Candidate, LaneState, Running, Start
from weft.runtime.backend import Backend, DeviceLane, Ended, StartedStep, StepEnd, StepOutput

log = logging.getLogger("weft.engine")

ABORT_FROM_TICKS = 10_000_000
"""Segments of 10 ms and more may be stopped for something urgent; shorter ones are over before it pays."""

INLINE_TICKS = 200_000
"""Steady segments of less than 0.2 ms run on the engine's own thread, where the backend can do that: handing them to
another costs as much."""

OVERRUN_TIMES, OVERRUN_TICKS = 4, 20_000_000
"""A segment that has run for four times as long as expected and 20 ms more has overrun."""

UNSURE_TICKS = 10_000_000
"""So much is expected at most of a segment whose values may decide how long it takes: nobody can teach us more."""


class LaneWork(Protocol):
    """One batch as a lane sees it."""

    @property
    def body(self) -> object:
        """Whose memory it is computed in; asked for where lanes are shares of one device."""
        ...

    def steady(self, segment: int) -> bool:
        """Whether a segment takes as long as it did before, whatever its inputs hold."""
        ...

    def foreseen(self, segment: int) -> bool:
        """Whether a segment takes as long as is expected, whatever its inputs hold."""
        ...

    def start(self, segment: int, lane: DeviceLane, ended: Ended, *, here: bool) -> StartedStep:
        """Run a segment on the values the one before it left (``LoadedModel.start``)."""
        ...

    def take(self, segment: int, made: Sequence[StepOutput]) -> None:
        """It has ended, or the batch can go on from what it will make.

        Called on whatever thread told of it, and of a lane that takes steps ahead on the engine's.
        """
        ...


@dataclass(eq=False)
class LaneTask:
    """A segment that a lane was given and that has not ended."""

    candidate: Candidate
    work: LaneWork
    began: int | None = field(default=None, init=False)
    """When its lane came to it; None while it waits for others."""
    run: StartedStep | None = field(default=None, init=False)
    """How it is told to stop."""
    started: bool = field(default=False, init=False)
    aborted: bool = field(default=False, init=False)
    told: bool = field(default=False, init=False)
    """The source knows of its end already."""
    doomed: bool = field(default=False, init=False)
    """It goes on from one that failed."""
    ended: bool = field(default=False, init=False)
    after: Sequence[LaneTask] = field(default=(), init=False)
    """What runs on other lanes and has to end before it is started."""
    joined: BatchKey | None = field(default=None, init=False)
    """The batch that its own became a part of."""

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
        """When it will have run for far longer than was expected."""
        if self.began is None:
            return NO_DEADLINE
        sure = self.work.foreseen(self.candidate.layer)
        expected = self.compute if sure else min(self.compute, UNSURE_TICKS)
        return self.began + OVERRUN_TIMES * expected + OVERRUN_TICKS

    @property
    def body(self) -> object:
        return self.work.body

    @property
    def goes_on(self) -> Sequence[StepOutput] | None:
        """What its batch can go on with though it runs; nothing where the source knows, or may take it back."""
        if self.run is None:
            return None
        waited_for = self.told or self.aborted or self.doomed or self.stoppable
        return None if waited_for else self.run.onward


@dataclass(eq=False)
class Lane:
    """One lane of the device, and what it does."""

    index: int
    device: DeviceLane
    tasks: list[LaneTask] = field(default_factory=list)
    """What it computes, and what waits behind that."""
    busy_ticks: int = 0
    free_since: int = 0
    """When the last one that it computed ended."""
    leaving: bool = False
    """It takes nothing more."""
    replaced: bool = False
    """Another one has its place."""

    @property
    def task(self) -> LaneTask | None:
        """What it computes."""
        return self.tasks[0] if self.tasks else None


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
        shares: bool = False,
    ) -> None:
        """shares: lanes are shares of one device, and the policy says which takes what."""
        self.backend, self.now, self._shares = backend, backend.now, shares
        self._work_of, self._wake = work_of, wake
        self._thread = get_ident()
        self._starting = False
        """Whether the engine is told of an end without being woken."""
        self.lanes = [Lane(index, backend.lane(index, pin=pin)) for index in range(count)]
        self.ahead = max((lane.device.ahead for lane in self.lanes), default=0)
        """How many segments a lane takes besides the one that it computes."""
        self.apart = any(lane.device.apart for lane in self.lanes)
        """Whether batches stay on their lanes."""
        self.apart &= not shares
        self._idle, self._pin = list(reversed(self.lanes)), pin
        self.count = count
        """How many lanes there are to be; those that were replaced are there beside, until they end."""
        self.replacements, self._refused = 0, False
        """How many were replaced."""
        self._ended: deque[tuple[Lane, LaneTask, Completion | StepEnd]] = deque()
        self._under_way = self._since = self._past_ticks = 0
        """Steps that have begun and not ended, since when there are any, and how long there were before that."""
        self.watch: Callable[[int, Completion], None] | None = None
        """Told of every segment that ended, with the number of its lane."""

    @property
    def busy_ticks(self) -> int:
        """How long there was a step on some lane."""
        return self._past_ticks + (self.now() - self._since if self._under_way else 0)

    def resize(self, count: int) -> None:
        """Have so many lanes from now on; one too many that computes ends when that has ended."""
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
        """One lane more, with a number that no other has."""
        taken = {lane.index for lane in self.lanes}
        index = next(index for index in range(len(taken) + 1) if index not in taken)
        lane = Lane(index, self.backend.lane(index, pin=self._pin))
        self.lanes.append(lane)
        self._idle.append(lane)

    def replace_overrun(self) -> int:
        """Open lanes in place of those whose segments have overrun, at most as many at a time as there are to be.

        Returns when the next one will have. Lanes of a device, which take segments ahead, are as many as they are.
        """
        now, soonest = self.now(), NO_DEADLINE
        for lane in [] if self.ahead else [lane for lane in self.lanes if lane.tasks and not lane.leaving]:
            overrun_at = lane.tasks[0].overrun_at
            if overrun_at > now:
                soonest = min(soonest, overrun_at)
            elif sum(each.replaced for each in self.lanes) < self.count:
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
        """Let a lane with nothing to do end; nobody waits for that."""
        self.lanes.remove(lane)
        lane.device.close(0.0)

    def ready(self) -> DeviceClocks | None:
        return DeviceClocks.at(self.now()) if self.takes_more else None

    @property
    def takes_more(self) -> bool:
        """Whether a lane has room; while others are able to compute, one that is not does not count."""
        if not self.ahead or any([lane.device.able for lane in self._idle]):
            return bool(self._idle)
        roomy = self._roomy()
        if all(lane.device.able for lane in roomy):
            return bool(roomy)
        return any(lane.device.able for lane in roomy) or not any(lane.device.able for lane in self.lanes)

    def _roomy(self) -> list[Lane]:
        """The lanes that take something more."""
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
        while self._ended:
            lane, task, end = self._ended.popleft()
            if task.ended:  # a step that could not be started may have ended all the same
                continue
            completion = self._judged(lane, task, end) if isinstance(end, StepEnd) else end
            self._take_off(lane, task, completion.times)
            if not task.told:
                ended.append(completion)
            elif completion.error or completion.aborted:
                self._doom(task.batch)
            self._show(lane.index, completion)
            if self.ahead:
                self._start_waiting()
        return ended + self._known() if self.ahead else ended

    def _take_off(self, lane: Lane, task: LaneTask, times: LayerTimes) -> None:
        """A segment leaves its lane, and the lane comes to the next."""
        task.ended = True
        if task.started:
            self._under_way -= 1
            self._past_ticks += 0 if self._under_way else self.now() - self._since
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
        """A batch went on from a segment that failed: what it has on lanes fails as well, and is waited for."""
        for lane in self.lanes:
            for task in lane.tasks:
                task.doomed |= task.batch == batch

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
        if not self.backend.inline or self.ahead:
            return False
        return candidate.compute < INLINE_TICKS and work.steady(candidate.layer)

    def submit(self, start: Start) -> None:
        candidate = start.candidate
        task = LaneTask(candidate, self._work_of(candidate))
        if self.ahead:
            self._queue(task, start.lane)
            return
        lane = self._idle.pop()
        lane.tasks.append(task)
        self._start(lane, task)

    def _queue(self, task: LaneTask, chosen: int) -> None:
        """Give a segment to the lane that is to take it."""
        lane = self.lanes[chosen] if chosen >= 0 else self._suited(task)
        task.after = awaited(task, lane, self.lanes, shares=self._shares)
        if not lane.tasks:
            self._idle.remove(lane)
        lane.tasks.append(task)
        self._start_waiting()

    def _suited(self, task: LaneTask) -> Lane:
        """The lane for a segment where nobody has chosen one."""
        open_to = at_home(task.candidate, self._roomy())
        able = [lane for lane in open_to if lane.device.able]
        return lane_for(task.batch, able or open_to, self._lane_rest)

    def _start_waiting(self) -> None:
        """Start what nothing stands in the way of any more; steps of a lane are started in order."""
        for lane in self.lanes:
            for task in lane.tasks:
                if not task.started and not task.aborted:
                    if not all(each.ended for each in task.after):
                        break
                    self._start_queued(lane, task)

    def _start_queued(self, lane: Lane, task: LaneTask) -> None:
        """Start a segment; what has ended meanwhile must not be lost where that fails."""
        task.after = ()
        try:
            self._start(lane, task)
        except Exception as problem:
            now = self.now()
            self._end(lane, task, StepEnd(now, now, error=problem))

    def _start(self, lane: Lane, task: LaneTask) -> None:
        task.started = True
        self._since = self._since if self._under_way else self.now()
        self._under_way += 1
        if task is lane.tasks[0]:
            task.began = self.now()
        candidate, work = task.candidate, task.work
        here = self.runs_here(candidate, work)
        self._starting = True
        try:
            task.run = work.start(candidate.layer, lane.device, partial(self._end, lane, task), here=here)
        finally:
            self._starting = False

    def _end(self, lane: Lane, task: LaneTask, end: StepEnd) -> None:
        """A segment has ended; called on any thread, and on our own while it starts.

        Of a lane that takes steps ahead the source may know already; only our own thread can tell.
        """
        self._ended.append((lane, task, end if self.ahead else _completion(lane, task, end)))
        if not self._starting or get_ident() != self._thread:
            self._wake()

    def _judged(self, lane: Lane, task: LaneTask, end: StepEnd) -> Completion:
        """The end of a segment on a lane that takes steps ahead; one runs when the one before it has ended."""
        began, ended, made, error = end
        began = max(began, lane.free_since) if task is lane.tasks[0] else ended
        return _completion(lane, task, StepEnd(began, max(began, ended), made, error))

    def _known(self) -> list[Completion]:
        """What lanes have come to, or soon will, and batches can go on from: its end is known beforehand."""
        found = []
        for lane in [lane for lane in self.lanes if lane.tasks and not lane.tasks[-1].told]:
            begin = self.now()
            for task in known(lane, lane.device.ahead):
                made = task.goes_on
                if made is not None:
                    task.told, error = True, _take(task, made)
                    times = LayerTimes(begin, begin, begin, begin + task.compute)
                    found.append(Completion(task.candidate, times, error=error, work=task.work, lane=lane.index))
                begin += self._rest(task)
        return found

    def abortable(self) -> tuple[Running, ...]:
        """The last segment of every lane: where a lane takes more than one, nothing waits behind one that may be
        stopped, and the lane is free when its last one has ended."""
        for lane in self.lanes:
            if lane.tasks and not lane.replaced and _abortable(lane.tasks[-1]):
                break
        else:
            return ()
        last = [(lane, lane.tasks[-1]) for lane in self.lanes if lane.tasks and not lane.replaced]
        return tuple([Running(task.candidate, self._lane_rest(lane), _abortable(task)) for lane, task in last])

    def stop(self, stream: int, query: int) -> None:
        """Stop what runs of a query, and what waits; what the source knows to have ended goes on."""
        for lane in self.lanes:
            for task in lane.tasks:
                if task.batch == (stream, query) and not task.told:
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
        """A batch became part of another, which goes on from what runs of it."""
        for lane in self.lanes if self.ahead else ():
            for task in lane.tasks:
                if task.batch == (stream, other):
                    task.joined = (stream, query)

    def holds(self, index: int, batch: BatchKey) -> bool:
        """Whether something of a batch is on the lane of this number."""
        return any(task.batch == batch for lane in self.lanes if lane.index == index for task in lane.tasks)

    def rests(self) -> list[tuple[Candidate, int]]:
        """What the lanes hold, and how many ticks each is expected to take from now on, those before it not counted.

        What has overrun takes none: nobody waits for it, since its lane was replaced.
        """
        return [
            (task.candidate, 0 if lane.replaced else self._rest(task)) for lane in self.lanes for task in lane.tasks
        ]

    def _lane_rest(self, lane: Lane) -> int:
        """When a lane is free."""
        return sum([self._rest(task) for task in lane.tasks])

    def _rest(self, task: LaneTask) -> int:
        if task.aborted:
            return 0
        compute = task.candidate.compute
        return compute if task.began is None else max(0, task.began + compute - self.now())

    def close(self, patience_s: float | None = None) -> bool:
        """Let every lane finish what it runs, and end it; False if one has not ended in time."""
        end_s = None if patience_s is None else time.monotonic() + patience_s
        left = [lane.device.close(None if end_s is None else max(0.0, end_s - time.monotonic())) for lane in self.lanes]
        return all(left)


def _take(task: LaneTask, made: Sequence[StepOutput]) -> Exception | None:
    """Hand on what a segment makes; what is wrong with it, if anything: its own requests hear of it."""
    try:
        task.work.take(task.candidate.layer, made)
    except Exception as problem:
        return problem
    return None


def _completion(lane: Lane, task: LaneTask, end: StepEnd) -> Completion:
    began, ended, made, error = end
    if error is None and not task.told:
        error = _take(task, made)
    times = LayerTimes(began, began, began, ended)
    stopped = task.aborted and error is not None
    return Completion(task.candidate, times, stopped, None if stopped else error, task.work, lane.index)


def _abortable(task: LaneTask) -> bool:
    return task.stoppable and not task.aborted
