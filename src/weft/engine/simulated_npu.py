"""An executor in which time jumps: the decoupled NPU, issue by issue."""

from __future__ import annotations

from weft.devices.decoupled import Issue, NpuState, issue
from weft.policies.base import Candidate, Setting, Start


class SimulatedNpu:
    """Answers at once with the times of what it was given."""

    def __init__(self, setting: Setting) -> None:
        self._buffer = setting.buffer
        self._state = NpuState()
        self.log: list[tuple[Candidate, Issue]] = []
        """What was issued, in order."""

    def wait(self) -> NpuState:
        return self._state

    def idle_until(self, tick: int) -> None:
        if tick > self._state.channel_free:
            kept = tuple(entry for entry in self._state.resident if entry.done > tick)
            self._state = self._state._replace(channel_free=tick, resident=kept)

    def submit(self, start: Start) -> Issue:
        head = start.candidate
        self._state, times = issue(self._state, head.fetch, head.compute, self._buffer, start.not_before)
        self.log.append((head, times))
        return times
