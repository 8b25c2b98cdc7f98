"""An executor in which time jumps: the decoupled NPU, issue by issue."""

from __future__ import annotations

from weft.devices.decoupled import Issue, NpuState, issue
from weft.engine.engine import Task
from weft.policies.base import Setting


class SimulatedNpu:
    """Answers at once with the time at which the channel is free again."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._state = NpuState()
        self.log: list[tuple[Task, Issue]] = []
        """What was issued, in order."""

    def wait(self) -> NpuState:
        return self._state

    def submit(self, task: Task, not_before: int) -> None:
        program = self._setting.programs[task.stream]
        fetch, compute = program.fetch[task.layer], program.compute[task.layer]
        self._state, times = issue(self._state, fetch, compute, self._setting.buffer, not_before)
        self.log.append((task, times))
