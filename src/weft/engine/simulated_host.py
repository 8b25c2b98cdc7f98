"""An executor in which time jumps: a host whose lanes each compute one segment at a time.

The twin of ``runtime.lanes``. A lane is given a segment when it is free, so unlike on an NPU no segment
of a query is issued before the last one has ended. Lanes that run together may slow each other down: a segment is an
amount of work, done at a speed that changes whenever another lane begins or ends one (``devices.lanes``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.devices.lanes import Lanes
from weft.engine.engine import Completion
from weft.policies.base import Candidate, Running, Setting, Start

AT_ONCE = 1e-6
"""Ticks of work that count as none."""


class DrawnWork(NamedTuple):
    """What a segment really takes."""

    before: int
    """Ticks until its lane begins with it."""
    ticks: float
    """What it takes on a lane alone."""


@dataclass(frozen=True, slots=True)
class Crowd:
    """Lanes that run together: how fast, and what they are given."""

    lanes: Lanes
    kinds: Sequence[int]
    """Program -> kind of work."""
    work_of: Callable[[Candidate], DrawnWork]


@dataclass(eq=False, slots=True)
class _Segment:
    candidate: Candidate
    begin: int
    end: int
    rest: float = 0.0
    """Work that is left."""
    speed: float = 1.0
    aborted: bool = False


class SimulatedHost:
    """Lanes that take as long as they are said to."""

    def __init__(
        self,
        setting: Setting,
        abortable: frozenset[int] = frozenset(),
        abort_ticks: int = 0,
        *,
        abort_from: int = 0,
        crowd: Crowd | None = None,
    ) -> None:
        """abortable: programs whose layers may be stopped half-way, if they are expected to take *abort_from* ticks.

        abort_ticks: how long that takes. crowd: where layers do not take what is expected of them.
        """
        self._lanes = setting.lanes
        self._abortable, self._abort_ticks, self._abort_from = abortable, abort_ticks, abort_from
        self._crowd = crowd
        self._now = 0
        self._settled = 0
        """Up to when the work that is done was taken off."""
        self._running: list[_Segment] = []
        self.log: list[tuple[Candidate, LayerTimes]] = []
        """What was issued and not aborted, in order of its end."""

    def now(self) -> int:
        return self._now

    def ready(self) -> DeviceClocks | None:
        return DeviceClocks.at(self._now) if len(self._running) < self._lanes else None

    def completions(self) -> list[Completion]:
        ended = [_completion(each) for each in self._running if each.end <= self._now]
        if ended:
            self._settle()
            self._running = [each for each in self._running if each.end > self._now]
            self._regulate()
            self.log += [(done.candidate, done.times) for done in ended if not done.aborted]
        return ended

    def idle_until(self, tick: int) -> None:
        """Let time pass until then, or to the next end where that has passed."""
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

    def submit(self, start: Start) -> None:
        begin = max(self._now, start.not_before)
        if self._crowd is None:
            self._running.append(_Segment(start.candidate, begin, begin + start.candidate.compute))
            return
        work = self._crowd.work_of(start.candidate)
        self._settle()
        begin += work.before
        self._running.append(_Segment(start.candidate, begin, begin + max(1, ceil(work.ticks)), work.ticks))
        self._regulate()

    def abortable(self) -> tuple[Running, ...]:
        found = tuple(Running(each.candidate, self._rest(each), self._stoppable(each)) for each in self._running)
        return found if any(layer.stoppable for layer in found) else ()

    def _rest(self, layer: _Segment) -> int:
        """How many ticks it runs on, as far as one knows who expects what it usually takes."""
        if self._crowd is None or layer.aborted:
            return layer.end - self._now
        return max(0, layer.begin + layer.candidate.compute - self._now)

    def _stoppable(self, layer: _Segment) -> bool:
        candidate = layer.candidate
        return candidate.program in self._abortable and candidate.compute >= self._abort_from and not layer.aborted

    def stop(self, stream: int, query: int) -> None:
        for running in self._running:
            if (running.candidate.stream, running.candidate.query) == (stream, query) and not running.aborted:
                self._settle()
                running.end, running.aborted = min(running.end, self._now + self._abort_ticks), True
                self._regulate()

    def rests(self) -> list[tuple[Candidate, int]]:
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
        speeds = self._crowd.lanes.speeds([self._crowd.kinds[each.candidate.program] for each in active])
        for each, speed in zip(active, speeds, strict=True):
            each.speed = speed
            if not each.aborted:
                each.end = self._now + ceil(max(0.0, each.rest - AT_ONCE) / speed)


def _completion(segment: _Segment) -> Completion:
    times = LayerTimes(segment.begin, segment.begin, segment.begin, segment.end)
    return Completion(segment.candidate, times, segment.aborted)
