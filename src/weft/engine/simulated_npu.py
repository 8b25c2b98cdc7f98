"""The simulated NPU: an executor whose clock jumps, with a memory channel and a PE array."""

from __future__ import annotations

from weft.devices.decoupled import DeviceClocks, LayerTimes, issue
from weft.engine.engine import Completion
from weft.engine.for_requests import RequestExecutor
from weft.engine.policies.base import Candidate, Setting, Start


class SimulatedNpu(RequestExecutor):
    """Computes layers in the order of issue, so the times of a layer are known when it is submitted; has no lanes."""

    def __init__(self, setting: Setting) -> None:
        self._buffer = setting.buffer
        self._state = DeviceClocks()
        self._ended: list[Completion] = []
        self.log: list[tuple[Candidate, LayerTimes]] = []
        """The issued layers with their times, in order."""

    def now(self) -> int:
        return self._state.channel_free

    def ready(self) -> DeviceClocks:
        return self._state

    def completions(self) -> list[Completion]:
        ended, self._ended = self._ended, []
        return ended

    def idle_until(self, tick: int) -> None:
        """Let the channel wait until *tick*, and drop the weights that are freed by then."""
        if tick > self._state.channel_free:
            resident = tuple(entry for entry in self._state.resident if entry.done > tick)
            self._state = self._state._replace(channel_free=tick, resident=resident)

    def submit(self, start: Start, batch: object = None) -> None:
        """Issue a layer behind the earlier ones, which gives its times at once."""
        head = start.candidate
        self._state, times = issue(self._state, head.fetch, head.compute, self._buffer, start.not_before)
        self._ended.append(Completion(head, times))
        self.log.append((head, times))

    def stop(self, stream: int, query: int) -> None:
        raise AssertionError("an NPU computes what it has begun")  # ``abortable`` is empty, so no caller may ask for it

    def rests(self) -> list[tuple[Candidate, int]]:
        """Return the last issued layer, with the ticks until the array has computed all issued layers."""
        if not self.log:
            return []
        last_layer, _ = self.log[-1]
        return [(last_layer, max(0, self._state.array_free - self.now()))]
