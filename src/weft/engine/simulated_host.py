"""An executor in which time jumps: a host whose lanes each compute one segment at a time.

The twin of ``runtime.lanes``. A lane is given a segment when it is free, so unlike on an NPU no segment
of a query is issued before the last one has ended.
"""

from __future__ import annotations

from weft.devices.decoupled import Issue, NpuState
from weft.engine.engine import Completion
from weft.policies.base import Candidate, Running, Setting, Start


class SimulatedHost:
    """Lanes that take as long as they are said to."""

    def __init__(self, setting: Setting, abortable: frozenset[int] = frozenset(), abort_ticks: int = 0) -> None:
        """abortable: programs whose layers may be stopped half-way; abort_ticks: how long that takes."""
        self._lanes = setting.lanes
        self._abortable, self._abort_ticks = abortable, abort_ticks
        self._now = 0
        self._running: list[Completion] = []
        self.log: list[tuple[Candidate, Issue]] = []
        """What was issued and not aborted, in order of its end."""

    def now(self) -> int:
        return self._now

    def ready(self) -> NpuState | None:
        return NpuState(self._now, self._now, self._now) if len(self._running) < self._lanes else None

    def completions(self) -> list[Completion]:
        ended = [running for running in self._running if running.times.compute_end <= self._now]
        self._running = [running for running in self._running if running.times.compute_end > self._now]
        self.log += [(done.candidate, done.times) for done in ended if not done.aborted]
        return ended

    def idle_until(self, tick: int) -> None:
        ends = [running.times.compute_end for running in self._running]
        self._now = max(self._now, min([tick, *ends] if tick > self._now else ends, default=self._now))

    def submit(self, start: Start) -> None:
        begin = max(self._now, start.not_before)
        end = begin + start.candidate.compute
        self._running.append(Completion(start.candidate, Issue(begin, begin, begin, end)))

    def abortable(self) -> tuple[Running, ...]:
        found = tuple(
            Running(layer.candidate, layer.times.compute_end - self._now, self._stoppable(layer))
            for layer in self._running
        )
        return found if any(layer.stoppable for layer in found) else ()

    def _stoppable(self, layer: Completion) -> bool:
        return layer.candidate.program in self._abortable and not layer.aborted

    def stop(self, stream: int, query: int) -> None:
        for place, layer in enumerate(self._running):
            if (layer.candidate.stream, layer.candidate.query) == (stream, query) and not layer.aborted:
                times = layer.times._replace(compute_end=self._now + self._abort_ticks)
                self._running[place] = Completion(layer.candidate, times, aborted=True)

    def rests(self) -> list[tuple[Candidate, int]]:
        return [
            (layer.candidate, 0 if layer.aborted else layer.times.compute_end - self._now) for layer in self._running
        ]
