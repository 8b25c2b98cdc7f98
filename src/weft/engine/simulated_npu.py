"""An executor in which time jumps: the decoupled NPU, issue by issue."""

from __future__ import annotations

from weft.devices.decoupled import DeviceClocks, LayerTimes, issue
from weft.engine.engine import Completion
from weft.engine.policies.base import Candidate, LaneState, Running, Setting, Start


class SimulatedNpu:
    """Knows the times of what it was given at once."""

    def __init__(self, setting: Setting) -> None:
        self._buffer = setting.buffer
        self._state = DeviceClocks()
        self._ended: list[Completion] = []
        self.log: list[tuple[Candidate, LayerTimes]] = []
        """What was issued, in order."""

    def now(self) -> int:
        return self._state.channel_free

    def ready(self) -> DeviceClocks:
        return self._state

    def completions(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def held(self) -> tuple[LaneState, ...]:
        """Its channel and its array take what comes in order."""
        return ()

    def idle_until(self, tick: int) -> None:
        if tick > self._state.channel_free:
            kept = tuple(entry for entry in self._state.resident if entry.done > tick)
            self._state = self._state._replace(channel_free=tick, resident=kept)

    def submit(self, start: Start, batch: object = None) -> None:
        head = start.candidate
        self._state, times = issue(self._state, head.fetch, head.compute, self._buffer, start.not_before)
        self._ended.append(Completion(head, times))
        self.log.append((head, times))

    def abortable(self) -> tuple[Running, ...]:
        return ()

    def stop(self, stream: int, query: int) -> None:
        raise AssertionError("an NPU computes what it has begun")

    def joined(self, stream: int, query: int, other: int) -> None:
        """It computes in order, whatever goes on from what."""

    def rooms(self) -> tuple[int, ...]:
        """It has no lanes."""
        return ()

    def rests(self) -> list[tuple[Candidate, int]]:
        """The last layer, and the ticks until the array is through with all that was issued."""
        return [(self.log[-1][0], max(0, self._state.array_free - self.now()))] if self.log else []
