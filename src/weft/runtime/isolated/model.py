"""A model in a worker, as the server runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weft.base.errors import RequestError
from weft.devices.measured import times_at
from weft.devices.shares import GpuLikeness
from weft.runtime.backend import DeviceLane, Ended, StartedStep, Step, StepEnd, StepOutput
from weft.runtime.breaker import Breaker
from weft.runtime.defaults import StepDefaults
from weft.runtime.isolated.group import KeptModel, WorkerGroup
from weft.runtime.isolated.lane import IsolatingLane
from weft.runtime.isolated.packets import Garbled
from weft.runtime.isolated.process import HeldValues
from weft.runtime.tensors import DATATYPES


class _Ended(StepDefaults):
    """A step that ended when it was started."""


class IsolatedModel:
    """A model in a group of workers; none of its steps runs in the server."""

    def __init__(
        self, group: WorkerGroup, kept: KeptModel, breaker: Breaker, closed: Callable[[IsolatedModel], None]
    ) -> None:
        told = kept.description
        self.group, self._kept, self._closed = group, kept, closed
        self.number, self.breaker, self.return_s = kept.file.number, breaker, told.return_s
        self.inputs, self.outputs, self.segments = told.inputs, told.outputs, told.segments
        self.steady, self.foreseen = (False,) * len(told.segments), told.steady
        self.warm_shapes: Mapping[str, tuple[int, ...]] | None = told.warm_shapes
        self.times_s: Mapping[int, tuple[float, ...]] = told.times_s
        self.like: Mapping[int, GpuLikeness] = told.like
        self.cuts = told.cuts
        self.batchable, self.max_batch, self.mergeable = told.batchable, told.max_batch, told.mergeable
        self.any_shapes, self.borrows, self.learned = told.any_shapes, told.borrows, told.learned
        self.any_lengths = told.any_lengths
        self.exits, self.confidence, self.tasks = told.exits, told.confidence, told.tasks
        self.memory_bytes = told.memory_bytes * (2 if group.limits.spare else 1)
        self.moving_bytes = told.moving_bytes
        self.remarks = (*told.remarks, f"runs in a worker process ({group.name})")
        self._last = len(told.segments) - 1
        self._told = {each.segment: each.output for each in told.exits}
        self._kinds = {spec.name: DATATYPES[spec.datatype] for spec in told.outputs}

    @property
    def away_s(self) -> float:
        """How long it takes to be there again, where it has left the device's memory."""
        worker = self.group.worker
        return 0.0 if worker is None or worker.residency.is_there(self.number) else self.return_s

    def times_at(self, batch: int) -> tuple[float, ...]:
        """Seconds of each segment at a batch size, straight between the measured ones."""
        return times_at(self.times_s, len(self.segments), batch)

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
        return 1 if segment == 0 or self.mergeable else len(step.parts)

    def check(self, segment: int, rows: int, made: Sequence[StepOutput]) -> None:
        """What a worker says a segment gave must be able to; ``Garbled`` if not."""
        last, exits = segment == self._last, segment in self._told
        wanted = self._kinds if last else {self._told[segment]: None} if exits else {}
        for _, answers in made:
            if answers.keys() != wanted.keys():
                raise Garbled(f"answers {sorted(answers)} where {sorted(wanted)} were due")
            for name, each in answers.items():
                if (self.batchable and not each.ndim) or (last and each.dtype != wanted[name]):
                    raise Garbled(f"{name!r} is {each.dtype} of shape {each.shape}")
                if exits and (each.ndim != 2 or len(each) != rows or each.dtype.kind != "f"):
                    raise Garbled(f"exit {name!r} is {each.dtype} of shape {each.shape} for {rows} rows")
        if not made:
            raise Garbled("a step without a result")
        if last or exits:  # what comes later may be what kills
            self.breaker.lived()

    def failed(self) -> None:
        """Its worker said what was wrong with a step."""
        self.breaker.answered()

    def close(self) -> None:
        """Give its memory back; the workers go with their last model."""
        self._closed(self)
