"""A model in a worker, as the server runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from weft.base.errors import RequestError
from weft.runtime.backend import DeviceLane, Ended, StartedStep, Step, StepEnd, StepOutput
from weft.runtime.breaker import Breaker
from weft.runtime.defaults import StepDefaults
from weft.runtime.facets import ModelResidency
from weft.runtime.isolated.group import KeptModel, WorkerGroup
from weft.runtime.isolated.lane import IsolatingLane
from weft.runtime.isolated.packets import Garbled
from weft.runtime.isolated.process import HeldValues
from weft.runtime.tensors import DATATYPES


class _Ended(StepDefaults):
    """A step that ended when it was started."""


@dataclass(frozen=True, kw_only=True)
class WorkerResidency(ModelResidency):
    """What a model in a group of workers holds, and whether it is in the device's memory now."""

    group: WorkerGroup
    number: int

    @property
    def away_s(self) -> float:
        worker = self.group.worker
        return 0.0 if worker is None or worker.residency.is_there(self.number) else self.return_s


class IsolatedModel:
    """A model in a group of workers; none of its steps runs in the server."""

    def __init__(
        self, group: WorkerGroup, kept: KeptModel, breaker: Breaker, closed: Callable[[IsolatedModel], None]
    ) -> None:
        described, residency = kept.description, kept.description.residency
        self.group, self._kept, self._closed = group, kept, closed
        self.number, self.breaker = kept.file.number, breaker
        self.inputs, self.outputs, self.segments = described.inputs, described.outputs, described.segments
        # none of its segments runs on the event loop, but those that are steady in the worker can be foreseen
        unsteady = (False,) * len(described.segments)
        self.timing = replace(described.timing, steady=unsteady, foreseen=described.timing.steady)
        self.batching, self.borrows = described.batching, described.borrows
        self.exits, self.shares, self.tasks = described.exits, described.shares, described.tasks
        memory_bytes = residency.memory_bytes * (2 if group.limits.spare else 1)
        self.residency = WorkerResidency(
            memory_bytes, residency.moving_bytes, residency.return_s, group=group, number=self.number
        )
        self.remarks = (*described.remarks, f"runs in a worker process ({group.name})")
        self._last = len(described.segments) - 1
        self._told = {spec.segment: spec.output for spec in described.exits.specs} if described.exits else {}
        self._kinds = {spec.name: DATATYPES[spec.datatype] for spec in described.outputs}

    def prepare(self, rows: int) -> None:
        """Have what batches of so many rows need there, in the worker and in its spare."""
        self.group.prepare(self._kept, rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Run a step on the worker in charge; values that another one held are gone with it."""
        assert isinstance(lane, IsolatingLane) and not here
        try:
            if step.segment == 0 and self.breaker.state == "open":
                self.breaker.refuse()
            worker = self.group.charge(self.number)
            for part in step.parts if step.segment else ():
                if isinstance(part.values, HeldValues) and part.values.worker is not worker:
                    raise part.values.worker.lost()
        except RequestError as error:
            now = self.group.now()
            ended(StepEnd(now, now, error=error))
            return _Ended()
        return worker.begin(lane, self, step, ended)

    def onward(self, step: Step) -> int:
        """How many values the next step can be started with before this one has ended; none at exits and at the end."""
        segment = step.segment
        if segment == self._last or segment in self._told:
            return 0
        return 1 if segment == 0 or self.batching.mergeable else len(step.parts)

    def check(self, segment: int, rows: int, outputs: Sequence[StepOutput]) -> None:
        """What a worker says a segment gave must be able to; ``Garbled`` if not."""
        last, exits = segment == self._last, segment in self._told
        wanted = self._kinds if last else {self._told[segment]: None} if exits else {}
        for _, answers in outputs:
            if answers.keys() != wanted.keys():
                raise Garbled(f"answers {sorted(answers)} where {sorted(wanted)} were due")
            for name, answer in answers.items():
                if (self.batching.batchable and not answer.ndim) or (last and answer.dtype != wanted[name]):
                    raise Garbled(f"{name!r} is {answer.dtype} of shape {answer.shape}")
                if exits and (answer.ndim != 2 or len(answer) != rows or answer.dtype.kind != "f"):
                    raise Garbled(f"exit {name!r} is {answer.dtype} of shape {answer.shape} for {rows} rows")
        if not outputs:
            raise Garbled("a step without a result")
        if last or exits:  # what comes later may be what kills
            self.breaker.lived()

    def failed(self) -> None:
        """Its worker said what was wrong with a step."""
        self.breaker.answered()

    def close(self) -> None:
        """Give its memory back; the workers go with their last model."""
        self._closed(self)
