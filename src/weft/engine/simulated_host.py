"""An executor in which time jumps: a host whose lanes each compute one segment at a time.

The twin of ``runtime.lanes``. A lane is given a segment when it is free, so unlike on an NPU no segment
of a query is issued before the last one has ended. Lanes that take segments ahead (``Setting.ahead``) tell the source
of an end when they come to a segment, and the next one of its batch waits behind it. Lanes that run together may slow
each other down: a segment is an amount of work, done at a speed that changes whenever another lane begins or ends one
(``devices.lanes``). Lanes may be shares of one device, which the policy chooses from (``devices.shares``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple, Protocol

from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine.engine import Completion
from weft.engine.lane_queues import BatchKey, at_home, awaited, has_room, known, lane_for
from weft.engine.policies.base import (
    IDLE_LANE,
    NO_DEADLINE,
    Candidate,
    LaneState,
    Running,
    Setting,
    Start,
)

AT_ONCE = 1e-6
"""Ticks of work that count as none."""
NOT_YET = NO_DEADLINE
"""When something begins, and ends, that waits for others."""


class DrawnWork(NamedTuple):
    """What a segment really takes."""

    before: int
    """Ticks until its lane begins with it."""
    ticks: float
    """What it takes on a lane alone."""


class Together(Protocol):
    """Lanes that run at the same time."""

    def speeds(self, kinds: Sequence[int], lanes: Sequence[int]) -> list[float]:
        """How fast each of those that run goes, by the kinds of what they run."""
        ...


@dataclass(frozen=True, slots=True)
class Crowd:
    """Lanes that run together: how fast, and what they are given."""

    lanes: Together
    kinds: Sequence[int]
    """Program -> kind of work."""
    work_of: Callable[[Candidate], DrawnWork]


@dataclass(eq=False, slots=True)
class _Segment:
    candidate: Candidate
    before: int
    """Ticks until its lane begins with it."""
    ticks: int
    """What it takes, as far as that is known when it begins."""
    rest: float = 0.0
    """Work that is left."""
    begin: int = NOT_YET
    end: int = NOT_YET
    speed: float = 1.0
    aborted: bool = False
    stoppable: bool = False
    told: bool = False
    """The source knows of its end already."""
    lane: int = -1
    after: Sequence[_Segment] = ()
    """What runs on other lanes and has to end before it begins."""
    joined: BatchKey | None = None
    """The batch that its own became a part of."""
    body: object = None
    """Whose memory it is computed in, where lanes are shares of one device."""

    @property
    def batch(self) -> BatchKey:
        return self.joined or (self.candidate.stream, self.candidate.query)

    @property
    def compute(self) -> int:
        return self.candidate.compute

    def begin_at(self, now: int) -> None:
        self.begin = now + self.before
        self.end = self.begin + self.ticks


@dataclass(eq=False, slots=True)
class _Lane:
    index: int
    tasks: list[_Segment] = field(default_factory=list)
    """What it computes, and what waits behind that."""


class SimulatedHost:
    """Lanes that take as long as they are said to."""

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
        """abortable: programs whose layers may be stopped half-way, if they are expected to take *abort_from* ticks.

        abort_ticks: how long that takes. step_ticks: how long the engine takes to start something; what ends meanwhile
        is seen after that. crowd: where layers do not take what is expected of them.
        """
        self._lanes, self._ahead, self._programs = setting.lanes, setting.ahead, setting.programs
        self._shares = setting.shares
        if self._shares:
            self._lanes = len(self._shares.lanes)
        self._abortable, self._abort_ticks, self._abort_from = abortable, abort_ticks, abort_from
        self._step_ticks, self._crowd = step_ticks, crowd
        self._speeds: dict[tuple[tuple[int, ...], tuple[int, ...]], list[float]] = {}
        """What was worked out of the crowd."""
        self._now = 0
        self._settled = 0
        """Up to when the work that is done was taken off."""
        self._running: list[_Segment] = []
        """What the lanes hold."""
        self._unseen: list[Completion] = []
        """What ended while the engine was busy."""
        self._stepped = False
        """The engine was busy, and has not looked since."""
        self._queues = [_Lane(index) for index in range(self._lanes if self._ahead or self._shares else 0)]
        """The same by lanes, where they take segments ahead, or are chosen."""
        self.log: list[tuple[Candidate, LayerTimes]] = []
        """What was issued and not aborted, in order of its end."""
        self.lanes_used: list[int] = []
        """The lane of each of those; -1 where lanes have no numbers."""

    def now(self) -> int:
        return self._now

    def ready(self) -> DeviceClocks | None:
        if self._queues:
            free = any(not lane.tasks or has_room(lane, self._ahead) for lane in self._queues)
        else:
            free = len(self._running) < self._lanes
        return DeviceClocks.at(self._now) if free else None

    def held(self) -> tuple[LaneState, ...]:
        if not self._shares:
            return ()
        return tuple([self._held(lane) if lane.tasks else IDLE_LANE for lane in self._queues])

    def _held(self, lane: _Lane) -> LaneState:
        holds = tuple([each.candidate for each in lane.tasks])
        return LaneState(holds, self._lane_rest(lane), has_room(lane, self._ahead))

    def _roomy(self) -> list[_Lane]:
        return [lane for lane in self._queues if has_room(lane, self._ahead)]

    def rooms(self) -> list[int]:
        return [lane.index for lane in self._roomy()]

    def completions(self) -> list[Completion]:
        unseen, self._unseen = self._unseen, []
        return unseen + self._ended()

    def _ended(self) -> list[Completion]:
        over = [each for each in self._running if each.end <= self._now]
        if over:
            self._settle()
            self._running = [each for each in self._running if each.end > self._now]
            for lane in self._queues:
                if lane.tasks:
                    lane.tasks = [each for each in lane.tasks if each.end > self._now]
            self._begin_waiting()
            self._regulate()
            done = [each for each in over if not each.aborted]
            self.log += [(each.candidate, _times(each)) for each in done]
            self.lanes_used += [each.lane for each in done]
        ended = [
            Completion(each.candidate, _times(each), each.aborted, lane=each.lane) for each in over if not each.told
        ]
        return ended + self._known() if self._ahead else ended

    def _begin_waiting(self) -> None:
        """Let lanes begin what they have come to, if all it goes on from has ended."""
        for lane in self._queues:
            if lane.tasks:
                head = lane.tasks[0]
                if head.begin == NOT_YET and all([each.end <= self._now for each in head.after]):
                    head.begin_at(self._now)

    def _known(self) -> list[Completion]:
        """What lanes have come to, or soon will, and batches can go on from: its end is known beforehand."""
        found = []
        for lane in self._queues:
            if not lane.tasks:
                continue
            begin = self._now
            for each in known(lane, self._ahead):
                if each.after and any([other.end > self._now for other in each.after]):
                    break
                if self._goes_on(each):
                    each.told = True
                    times = LayerTimes(begin, begin, begin, begin + each.compute)
                    found.append(Completion(each.candidate, times, lane=lane.index))
                begin += 0 if each.aborted else self._rest(each)
        return found

    def _goes_on(self, segment: _Segment) -> bool:
        """Whether its batch goes on from a segment that runs: no answer decides on that, and nobody takes it back."""
        program, after = self._programs[segment.candidate.program], segment.candidate.layer + 1
        decides = after == len(program) or after in program.exits
        return not (segment.told or segment.aborted or segment.stoppable or decides)

    def idle_until(self, tick: int) -> None:
        """Let time pass until then, or to the next end where that has passed; none where the engine has to look first
        at what has come and ended while it was busy."""
        if not self._stepped:
            self._pass(tick)
        self._stepped = False

    def _pass(self, tick: int) -> None:
        began = self._now
        while True:
            ends = [each.end for each in self._running]
            until = max(self._now, min([tick, *ends] if tick > began else ends, default=self._now))
            begins = [each.begin for each in self._running if self._crowd and self._now < each.begin <= until]
            self._now = min([until, *begins])
            if not begins:
                return
            self._settle()
            self._regulate()

    def submit(self, start: Start, batch: object = None) -> None:
        started_at = self._now + self._step_ticks
        while self._now < started_at:
            self._pass(started_at)
            self._unseen += self._ended()
        self._stepped = self._step_ticks > 0
        segment = self._drawn(start.candidate)
        self._settle()
        self._running.append(segment)
        if self._queues:
            self._queue(segment, start.lane)
        else:
            segment.begin_at(max(self._now, start.not_before))
        self._regulate()

    def _drawn(self, candidate: Candidate) -> _Segment:
        if self._crowd is None:
            return _Segment(candidate, 0, candidate.compute)
        work = self._crowd.work_of(candidate)
        return _Segment(candidate, work.before, max(1, ceil(work.ticks)), work.ticks)

    def _queue(self, segment: _Segment, chosen: int) -> None:
        """Give a segment to the lane that is to take it."""
        segment.stoppable = self._stoppable(segment)
        if chosen >= 0:
            lane = self._queues[chosen]
        else:
            lane = lane_for(segment.batch, at_home(segment.candidate, self._roomy()), self._lane_rest)
        segment.lane = lane.index
        if self._shares:
            segment.body = self._shares.body(segment.candidate.stream, segment.candidate.program)
        segment.after = awaited(segment, lane, self._queues, shares=self._shares is not None)
        if lane.tasks and not segment.after:
            segment.before = 0  # it is there when its lane comes to it
        lane.tasks.append(segment)
        self._begin_waiting()

    def abortable(self) -> tuple[Running, ...]:
        """What runs; where lanes take more than that, the last of each, which is free when that has ended."""
        last = [(lane.tasks[-1], self._lane_rest(lane)) for lane in self._queues if lane.tasks]
        running = last if self._queues else [(each, self._rest(each)) for each in self._running]
        found = tuple(Running(each.candidate, rest, self._stoppable(each)) for each, rest in running)
        return found if any(layer.stoppable for layer in found) else ()

    def _lane_rest(self, lane: _Lane) -> int:
        """When a lane is free."""
        return sum([0 if each.aborted else self._rest(each) for each in lane.tasks])

    def _rest(self, layer: _Segment) -> int:
        """How many ticks it runs on, as far as one knows who expects what it usually takes."""
        if layer.begin == NOT_YET:
            return layer.candidate.compute
        if self._crowd is None or layer.aborted:
            return layer.end - self._now
        return max(0, layer.begin + layer.candidate.compute - self._now)

    def _stoppable(self, layer: _Segment) -> bool:
        candidate = layer.candidate
        return candidate.program in self._abortable and candidate.compute >= self._abort_from and not layer.aborted

    def stop(self, stream: int, query: int) -> None:
        """Stop what runs of a query, and what waits; what the source knows to have ended goes on."""
        for running in self._running:
            if running.batch == (stream, query) and not running.aborted and not running.told:
                self._settle()
                running.end, running.aborted = min(running.end, self._now + self._abort_ticks), True
                running.begin = min(running.begin, running.end)
                self._regulate()

    def joined(self, stream: int, query: int, other: int) -> None:
        """A batch became part of another, which goes on from what runs of it."""
        for running in self._running:
            if running.batch == (stream, other):
                running.joined = (stream, query)

    def rests(self) -> list[tuple[Candidate, int]]:
        """What the lanes hold, and how many ticks each is expected to take from now on, those before it not counted."""
        return [(each.candidate, 0 if each.aborted else self._rest(each)) for each in self._running]

    def _settle(self) -> None:
        """Take off the work that was done since the speeds last changed."""
        for each in self._running if self._crowd else ():
            each.rest -= each.speed * max(0, self._now - max(self._settled, each.begin))
        self._settled = self._now

    def _regulate(self) -> None:
        """Let everybody who runs go as fast as the others allow from now on."""
        if self._crowd is None:
            return
        active = [each for each in self._running if each.begin <= self._now]
        kinds = tuple([self._crowd.kinds[each.candidate.program] for each in active])
        lanes = tuple([each.lane for each in active])
        if (kinds, lanes) not in self._speeds:
            self._speeds[kinds, lanes] = self._crowd.lanes.speeds(kinds, lanes)
        for each, speed in zip(active, self._speeds[kinds, lanes], strict=True):
            each.speed = speed
            if not each.aborted:
                each.end = self._now + ceil(max(0.0, each.rest - AT_ONCE) / speed)


def _times(segment: _Segment) -> LayerTimes:
    return LayerTimes(segment.begin, segment.begin, segment.begin, segment.end)
