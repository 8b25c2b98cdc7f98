"""The loop: ask the policy, check its answer, hand it to the executor. The only mutable scheduling state.

The loop, the policies, the fairness rule and the checks are the same for every executor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from weft.devices.decoupled import NpuState
from weft.errors import InvalidStart
from weft.policies.base import Candidate, Policy, Setting, View
from weft.policies.fairness import may_go


class Task(NamedTuple):
    """One layer of one query of one stream."""

    stream: int
    query: int
    layer: int


class Executor(Protocol):
    """Does what it is told, in simulated or in real time."""

    def wait(self) -> NpuState:
        """Let time pass until another layer can be issued; return the device's clocks then."""
        ...

    def submit(self, task: Task, not_before: int) -> None:
        """Issue a layer and return at once."""
        ...


DONE = 1 << 62
"""Progress of a stream that has issued all the queries it was given: never behind, never to go."""


class Engine:
    """Runs saturated streams: their next query is always there."""

    def __init__(self, setting: Setting, policy: Policy, executor: Executor) -> None:
        streams = len(setting.programs)
        self._setting, self._policy, self._executor = setting, policy, executor
        self._query = [0] * streams
        self._layer = [0] * streams
        self._last_issued = [-1] * streams
        self._progress = [0] * streams
        self._band = policy.band
        self._gains = self._band.gains(setting.programs) if self._band else None

    def run(self, work: int, quota: Sequence[int] | None = None) -> None:
        """Issue layers until *work* ticks of work (``Program.work``) are issued.

        quota: with a band, the queries each stream may issue in all.
        """
        issued = step = 0
        while issued < work:
            view = self._view()
            start = self._policy.decide(view)
            if start.candidate not in view.candidates:
                raise InvalidStart(f"{type(self._policy).__name__} chose {start.candidate}, which is not on offer")
            task = Task(start.candidate.stream, start.candidate.query, start.candidate.layer)
            self._executor.submit(task, start.not_before)
            issued += self._setting.programs[task.stream].work[task.layer]
            self._advance(task, step, quota)
            step += 1

    def _view(self) -> View:
        heads = tuple(self._head(stream) for stream in range(len(self._query)))
        device = self._executor.wait()
        if not self._band or not self._gains:
            return View(device, heads, heads)
        gains = [self._gains[head.stream][head.layer] for head in heads]
        allowed = may_go(self._progress, gains, self._band.max_lag_units)
        candidates = tuple(head for head in heads if allowed[head.stream])
        return View(device, heads, candidates, tuple(self._progress))

    def _head(self, stream: int) -> Candidate:
        program, layer = self._setting.programs[stream], self._layer[stream]
        return Candidate(
            stream, self._query[stream], layer, program.fetch[layer], program.compute[layer], self._last_issued[stream]
        )

    def _advance(self, task: Task, step: int, quota: Sequence[int] | None) -> None:
        stream = task.stream
        self._last_issued[stream] = step
        if self._gains:
            self._progress[stream] += self._gains[stream][task.layer]
        self._layer[stream] = (task.layer + 1) % len(self._setting.programs[stream])
        if self._layer[stream] == 0:
            self._query[stream] += 1
            if quota and self._query[stream] >= quota[stream]:
                self._progress[stream] = DONE
