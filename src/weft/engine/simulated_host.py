"""The simulated host: an executor whose clock jumps, with lanes that each compute one segment at a time.

The twin of ``runtime.lanes``. A lane takes a segment when it is free, so unlike on an NPU no segment of a query is
issued before the query's previous segment has ended. A lane that takes segments ahead (``Setting.ahead``) reports the
end of a segment already when the segment begins, and the next segment of that batch waits behind it. Busy lanes may
slow each other down: a segment is an amount of work, done at a speed that changes whenever another lane begins or ends
a segment (``devices.lanes``). Lanes may be shares of one device, from which the policy chooses (``devices.shares``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import ceil
from typing import NamedTuple, Protocol

from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine.engine import Completion
from weft.engine.lane_queues import BatchKey, allowed_lanes, choose_lane, has_room, preceding_tasks, tasks_to_report
from weft.engine.policies.base import IDLE_LANE, NO_DEADLINE, Candidate, LaneState, Running, Setting, Start

AT_ONCE = 1e-6
"""Remaining work, in ticks, that counts as none: rounding of speeds must not leave a segment that never ends."""
NOT_YET = NO_DEADLINE
"""Begin and end of a segment that still waits: later than every real tick, so comparisons need no special case."""


class DrawnWork(NamedTuple):
    """The actual duration of a segment, drawn at random or measured, in ticks."""

    before: int
    """Ticks until its lane begins it."""
    ticks: float
    """Ticks on a lane while all others are idle."""


class ContentionModel(Protocol):
    """A model of the contention between lanes."""

    def speeds(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """Return the speed of each busy lane over its speed alone; *kinds*: the kind of work on each of *lanes*."""
        ...


@dataclass(frozen=True, slots=True)
class Crowd:
    """Contention between lanes, and the actual durations of segments."""

    lanes: ContentionModel
    kinds: Sequence[int]
    """By program, the kind of work that the contention model knows it by."""
    work_of: Callable[[Candidate], DrawnWork]


@dataclass(eq=False, slots=True)
class _Segment:
    """A segment on a lane, running or waiting; times in ticks."""

    candidate: Candidate
    before: int
    """Ticks until its lane begins it."""
    ticks: int
    """Its duration, before contention."""
    rest: float = 0.0
    """Remaining work in ticks at full speed."""
    layers: int | None = None
    """The layers that it covers where the device has gates; of one that left at a gate, those that were computed."""
    ends: tuple[float, ...] = ()
    """Ticks of work at the end of each layer, where the device has gates."""
    begin: int = NOT_YET
    end: int = NOT_YET
    speed: float = 1.0
    aborted: bool = False
    stoppable: bool = False
    reported: bool = False
    """Whether its end was already reported to the source."""
    lane: int = -1
    after: Sequence[_Segment] = ()
    """Segments on other lanes that have to end before it begins."""
    joined: BatchKey | None = None
    """The batch into which its own batch was merged."""
    body: object = None
    """The body (backbone) whose memory it is computed in, where lanes are shares of one device."""

    @property
    def batch(self) -> BatchKey:
        return self.joined or (self.candidate.stream, self.candidate.query)

    @property
    def compute(self) -> int:
        return self.candidate.compute

    @property
    def incomplete(self) -> bool:
        """Whether it was stopped before its end; a batch that was stopped in its last layer is complete."""
        return self.aborted and (self.layers is None or self.layers < len(self.ends))

    @property
    def began(self) -> int | None:
        return None if self.begin == NOT_YET else self.begin

    def begin_at(self, now: int) -> None:
        self.begin = now + self.before
        self.end = self.begin + self.ticks


@dataclass(eq=False, slots=True)
class _Lane:
    """A lane that takes segments ahead, or that the policy chooses."""

    index: int
    tasks: list[_Segment] = field(default_factory=list)
    """The running segment, and the ones that wait behind it."""
    is_open: bool = True


class SimulatedHost:
    """Lanes whose segments take their expected time, or the time that *crowd* draws for them."""

    def __init__(
        self,
        setting: Setting,
        abortable: frozenset[int] = frozenset(),
        abort_ticks: int = 0,
        *,
        abort_from: int = 0,
        step_ticks: int = 0,
        crowd: Crowd | None = None,
    ) -> None:
        """abortable: programs whose layers may be stopped half-way if they are expected to take *abort_from* ticks.

        abort_ticks: the time that stopping takes. step_ticks: the time that the engine takes to start a segment;
        segments that end during it are reported afterwards. crowd: None: every segment takes its expected time.
        """
        self._lanes, self._ahead, self._programs = setting.lanes, setting.ahead, setting.programs
        self._shares = setting.shares
        if self._shares:
            self._lanes = len(self._shares.lanes)
        self._abortable, self._abort_ticks, self._abort_from = abortable, abort_ticks, abort_from
        self._step_ticks, self._crowd = step_ticks, crowd
        self._speeds: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
        """Cache of ``Crowd.lanes.speeds``, by kinds and lanes."""
        self._now = 0
        self._settled = 0
        """The tick up to which finished work was subtracted from ``_Segment.rest``."""
        self._running: list[_Segment] = []
        """The segments of all lanes."""
        self._unseen: list[Completion] = []
        """Completions from the time in which the engine was busy (``step_ticks``)."""
        self._stepped = False
        """Whether the engine was busy, and has not accounted for the completions of that time."""
        by_lanes = self._ahead or self._shares or any([program.gated for program in self._programs])
        self._queues = [_Lane(index) for index in range(self._lanes if by_lanes else 0)]
        """The same segments by lanes, where lanes take segments ahead, the policy chooses them, or the device has
        gates; else empty."""
        self.log: list[tuple[Candidate, LayerTimes]] = []
        """Segments that ended and were not aborted, and batches that left at a gate, in order of their ends."""
        self.lanes_used: list[int] = []
        """The lane of each segment in ``log``; -1 where lanes have no numbers."""

    def now(self) -> int:
        return self._now

    def ready(self) -> DeviceClocks | None:
        """Return the time as clocks if a lane takes another segment, else None."""
        if self._queues:
            free = any(has_room(lane, self._ahead) for lane in self._queues)
        else:
            free = len(self._running) < self._lanes
        return DeviceClocks.at(self._now) if free else None

    def held(self) -> tuple[LaneState, ...]:
        if not self._shares:
            return ()
        return tuple([self._lane_state(lane) if lane.tasks else IDLE_LANE for lane in self._queues])

    @property
    def queues(self) -> Sequence[_Lane]:
        return self._queues

    def _lane_state(self, lane: _Lane) -> LaneState:
        holds = tuple([segment.candidate for segment in lane.tasks])
        return LaneState(holds, self._lane_rest(lane), has_room(lane, self._ahead))

    def _lanes_with_room(self) -> list[_Lane]:
        return [lane for lane in self._queues if has_room(lane, self._ahead)]

    def rooms(self) -> list[int]:
        return [lane.index for lane in self._lanes_with_room()]

    def completions(self) -> list[Completion]:
        unseen, self._unseen = self._unseen, []
        return unseen + self._take_ended()

    def _take_ended(self) -> list[Completion]:
        """Remove the segments that have ended from the lanes; return the completions that the source does not know."""
        ended = [segment for segment in self._running if segment.end <= self._now]
        if ended:
            self._settle()
            self._running = [segment for segment in self._running if segment.end > self._now]
            for lane in self._queues:
                if lane.tasks:
                    lane.tasks = [segment for segment in lane.tasks if segment.end > self._now]
            self._begin_waiting()
            self._set_segment_speeds()
            computed = [segment for segment in ended if segment.layers or not segment.aborted]
            self.log += [(segment.candidate, _times(segment)) for segment in computed]
            self.lanes_used += [segment.lane for segment in computed]
        completions = [
            Completion(segment.candidate, _times(segment), segment.incomplete, lane=segment.lane, layers=segment.layers)
            for segment in ended
            if not segment.reported
        ]
        if ended and any([segment.end <= self._now for segment in self._running if segment.ends]):
            return completions + self._take_ended()  # what was revoked while it waited leaves when its lane reaches it
        return completions + self._ends_ahead() if self._ahead else completions

    def _begin_waiting(self) -> None:
        """Begin the first segment of every lane if the segments that it waits for have ended."""
        for lane in self._queues:
            if lane.tasks:
                head = lane.tasks[0]
                if head.begin == NOT_YET and all([earlier.end <= self._now for earlier in head.after]):
                    head.begin_at(self._now)

    def _ends_ahead(self) -> list[Completion]:
        """Report segments before they end, so that the next segments of their batches can wait behind them."""
        completions = []
        for lane in self._queues:
            if not lane.tasks:
                continue
            begin = self._now
            for segment in tasks_to_report(lane, self._ahead):
                if segment.after and any([earlier.end > self._now for earlier in segment.after]):
                    break
                if self._certainly_continues(segment):
                    segment.reported = True
                    times = LayerTimes(begin, begin, begin, begin + segment.compute)
                    completions.append(Completion(segment.candidate, times, lane=lane.index))
                begin += 0 if segment.aborted else self._rest(segment)
        return completions

    def _certainly_continues(self, segment: _Segment) -> bool:
        """Return whether the batch certainly goes on: no exit or end follows the segment, and it will not be stopped.

        False for a segment that was already reported.
        """
        program, after = self._programs[segment.candidate.program], segment.candidate.layer + 1
        may_end = after == len(program) or after in program.exits or segment.layers is not None
        return not (segment.reported or segment.aborted or segment.stoppable or may_end)

    def idle_until(self, tick: int) -> None:
        """Advance the clock to *tick* or to the next end of a segment, whichever is first.

        If *tick* has passed, to the next end. The clock stays if the engine was busy before: the engine first has to
        account for the arrivals and ends of that time.
        """
        if not self._stepped:
            self._advance_clock(tick)
        self._stepped = False

    def _advance_clock(self, tick: int) -> None:
        """Advance the clock as ``idle_until``, and set the speeds anew whenever a segment begins on the way."""
        called_at = self._now
        while True:
            ends = [segment.end for segment in self._running]
            until = max(self._now, min([tick, *ends] if tick > called_at else ends, default=self._now))
            begins = [segment.begin for segment in self._running if self._crowd and self._now < segment.begin <= until]
            self._now = min([until, *begins])
            if not begins:
                return
            self._settle()
            self._set_segment_speeds()

    def submit(self, start: Start, batch: object = None) -> None:
        """Start a segment, after the time that the engine takes for that (``step_ticks``)."""
        started_at = self._now + self._step_ticks
        while self._now < started_at:
            self._advance_clock(started_at)
            self._unseen += self._take_ended()
        self._stepped = self._step_ticks > 0
        segment = self._draw_segment(start)
        self._settle()
        self._running.append(segment)
        if self._queues:
            self._queue(segment, start.lane)
        else:
            segment.begin_at(max(self._now, start.not_before))
        self._set_segment_speeds()

    def _draw_segment(self, start: Start) -> _Segment:
        """Return a segment with its actual duration: drawn by ``Crowd.work_of``, else the expected one."""
        candidate, first = start.candidate, start.candidate.layer
        if start.layers is None:
            work = self._draw_work(candidate)
            return _Segment(candidate, work.before, ceil(work.ticks), work.ticks)
        program = self._programs[candidate.program]
        compute = program.compute
        works = [
            self._draw_work(candidate._replace(layer=layer, compute=compute[layer]))
            for layer in range(first, first + start.layers)
        ]
        ends = tuple(accumulate([work.ticks for work in works]))
        before = works[0].before + program.launch
        return _Segment(candidate, before, ceil(ends[-1]), ends[-1], layers=start.layers, ends=ends)

    def _draw_work(self, candidate: Candidate) -> DrawnWork:
        return self._crowd.work_of(candidate) if self._crowd else DrawnWork(0, candidate.compute)

    def _queue(self, segment: _Segment, chosen: int) -> None:
        """Put a segment on the chosen lane; -1: on the one that ``choose_lane`` finds."""
        segment.stoppable = self._stoppable(segment)
        if chosen >= 0:
            lane = self._queues[chosen]
        else:
            lanes = allowed_lanes(segment.candidate, self._lanes_with_room())
            lane = choose_lane(segment.batch, lanes, self._lane_rest)
        segment.lane = lane.index
        if self._shares:
            segment.body = self._shares.body(segment.candidate.stream, segment.candidate.program)
        segment.after = preceding_tasks(segment, lane, self._queues, shares=self._shares is not None)
        if lane.tasks and not segment.after:
            # it was sent while the one before it ran
            segment.before = 0 if segment.layers is None else self._programs[segment.candidate.program].launch
        lane.tasks.append(segment)
        self._begin_waiting()

    def abortable(self) -> tuple[Running, ...]:
        """Return the running segments if one of them could be stopped; otherwise an empty tuple.

        Where lanes take segments ahead, the last segment of each lane.
        """
        last = [(lane.tasks[-1], self._lane_rest(lane)) for lane in self._queues if lane.tasks]
        rests = last if self._queues else [(segment, self._rest(segment)) for segment in self._running]
        running = tuple(Running(segment.candidate, rest, self._stoppable(segment)) for segment, rest in rests)
        return running if any(layer.stoppable for layer in running) else ()

    def _lane_rest(self, lane: _Lane) -> int:
        """Return the expected ticks until a lane is idle."""
        return sum([0 if segment.aborted else self._rest(segment) for segment in lane.tasks])

    def _rest(self, layer: _Segment) -> int:
        """Return the expected ticks to the end of a segment.

        With a crowd, not the actual ones: a server would not know them either.
        """
        if layer.begin == NOT_YET:
            return layer.candidate.compute
        if self._crowd is None or layer.aborted:
            return layer.end - self._now
        return max(0, layer.begin + layer.candidate.compute - self._now)

    def _stoppable(self, layer: _Segment) -> bool:
        candidate = layer.candidate
        long_enough = candidate.compute >= self._abort_from and layer.layers is None
        return candidate.program in self._abortable and long_enough and not layer.aborted

    def stop(self, stream: int, query: int) -> None:
        """Stop the segments of a query, running or waiting, except those whose end was already reported."""
        for running in self._running:
            if running.batch == (stream, query) and not running.aborted and not running.reported:
                self._settle()
                if running.layers is not None:
                    self._leave(running)
                else:
                    running.end, running.aborted = min(running.end, self._now + self._abort_ticks), True
                    running.begin = min(running.begin, running.end)
                self._set_segment_speeds()

    def _leave(self, segment: _Segment) -> None:
        """Let a batch leave at its next gate; one that has not begun leaves when its lane reaches it."""
        layers, until = 0, 0.0
        if segment.begin <= self._now:
            done = segment.ends[-1] - segment.rest if self._crowd else self._now - segment.begin
            layers = 1 + sum([end < done - AT_ONCE for end in segment.ends[:-1]])
            until = max(0.0, segment.ends[layers - 1] - done)
        segment.aborted = True  # as on a real lane, which does not know either whether it is in its last layer
        if layers < len(segment.ends):
            segment.layers = layers
            segment.rest = until + self._programs[segment.candidate.program].leave
            segment.ticks = ceil(segment.rest)
            if segment.begin != NOT_YET:
                segment.end = max(self._now, segment.begin) + segment.ticks

    def joined(self, stream: int, query: int, other: int) -> None:
        """Let segments of batch *other* count as those of the batch that it was merged into."""
        for running in self._running:
            if running.batch == (stream, other):
                running.joined = (stream, query)

    def rests(self) -> list[tuple[Candidate, int]]:
        """Return the segments of all lanes, each with its own expected ticks from now on."""
        return [(segment.candidate, 0 if segment.aborted else self._rest(segment)) for segment in self._running]

    def _settle(self) -> None:
        """Subtract the work done since the last call from the remaining work of every segment."""
        for segment in self._running if self._crowd else ():
            segment.rest -= segment.speed * max(0, self._now - max(self._settled, segment.begin))
        self._settled = self._now

    def _set_segment_speeds(self) -> None:
        """Set the speeds and ends of the running segments from the contention between them."""
        if self._crowd is None:
            return
        active = [segment for segment in self._running if segment.begin <= self._now]
        kinds = tuple([self._crowd.kinds[segment.candidate.program] for segment in active])
        lanes = tuple([segment.lane for segment in active])
        if (kinds, lanes) not in self._speeds:
            self._speeds[kinds, lanes] = self._crowd.lanes.speeds(kinds, lanes)
        for segment, speed in zip(active, self._speeds[kinds, lanes], strict=True):
            segment.speed = speed
            if segment.ends or not segment.aborted:
                segment.end = self._now + ceil(max(0.0, segment.rest - AT_ONCE) / speed)


def _times(segment: _Segment) -> LayerTimes:
    return LayerTimes(segment.begin, segment.begin, segment.begin, segment.end)
