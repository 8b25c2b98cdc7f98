"""A model whose steps run in worker processes: the server's ``LoadedModel``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

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


class _FailedStep(StepDefaults):
    """A step that failed when it was started."""


@dataclass(frozen=True, kw_only=True)
class WorkerResidency(ModelResidency):
    """Device memory of a model in a worker, and whether the model is evicted now; *number*: the model's number."""

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
        """kept: the model as the group has it. closed: called when the model is closed."""
        description, residency = kept.description, kept.description.residency
        self.group, self._kept, self._on_close = group, kept, closed
        self.number, self.breaker = kept.file.number, breaker
        self.inputs, self.outputs, self.segments = description.inputs, description.outputs, description.segments
        # No segment runs on the event loop, but the times of those that are steady in the worker can be relied on.
        unsteady = (False,) * len(description.segments)
        self.timing = replace(description.timing, steady=unsteady, foreseen=description.timing.steady)
        self.batching, self.borrows = description.batching, description.borrows
        self.exits, self.shares, self.tasks = description.exits, description.shares, description.tasks
        memory_bytes = residency.memory_bytes * (2 if group.limits.spare else 1)  # the spare has it, too
        self.residency = WorkerResidency(
            memory_bytes, residency.moving_bytes, residency.return_s, group=group, number=self.number
        )
        self.remarks = (*description.remarks, f"runs in a worker process ({group.name})")
        self.gated = self.timing.gated
        self.longest_s = max(chain.from_iterable(self.timing.times_s.values()), default=0.0)
        self._last_segment = len(description.segments) - 1
        exits = description.exits.specs if description.exits else ()
        self._exit_outputs = {spec.segment: spec.output for spec in exits}
        self._output_types = {spec.name: DATATYPES[spec.datatype] for spec in description.outputs}

    def prepare(self, rows: int) -> None:
        """Prepare for batches of *rows* rows, in the worker and in its spare."""
        self.group.prepare(self._kept, rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Send a step to the present worker; the step fails if its values were in a worker that has died."""
        assert isinstance(lane, IsolatingLane) and not here
        try:
            if step.segment == 0 and self.breaker.state == "open":
                self.breaker.refuse()
            worker = self.group.worker_for(self.number)
            for part in step.parts if step.segment else ():
                if isinstance(part.values, HeldValues) and part.values.worker is not worker:
                    raise part.values.worker.death_error()
        except RequestError as error:
            now = self.group.now()
            ended(StepEnd(now, now, error=error))
            return _FailedStep()
        if step.targets and step.segment + step.segments <= self._last_segment:  # its outputs are not computed yet
            step = step._replace(targets=())
        return worker.begin(lane, self, step, ended)

    def onward(self, step: Step) -> int:
        """How many outputs the next step can be queued with before *step* has ended; 0 at exits and at the end."""
        last = step.segment + step.segments - 1  # the steps may be made for other devices, which have gates
        if self.gated or last == self._last_segment or last in self._exit_outputs:
            return 0
        return 1 if step.segment == 0 or self.batching.mergeable else len(step.parts)

    def check(self, step: Step, computed: int | None, outputs: Sequence[StepOutput]) -> None:
        """Raise ``Garbled`` if a worker reports *outputs* that a step cannot have; *computed*: as in ``StepEnd``.

        Otherwise, at exits and at the end, count a success for the circuit breaker.
        """
        if computed == 0:
            if outputs:
                raise Garbled("a result of no segment")
            return
        segment, rows = step.segment + (step.segments if computed is None else computed) - 1, step.rows
        is_last, is_exit = segment == self._last_segment, segment in self._exit_outputs
        # Name of each answer that is due -> its type, which the description does not have for exits.
        expected = self._output_types if is_last else {self._exit_outputs[segment]: None} if is_exit else {}
        for _, answers, _ in outputs:
            if answers.keys() != expected.keys():
                raise Garbled(f"answers {sorted(answers)} where {sorted(expected)} were due")
            for name, answer in answers.items():
                if (self.batching.batchable and not answer.ndim) or (is_last and answer.dtype != expected[name]):
                    raise Garbled(f"{name!r} is {answer.dtype} of shape {answer.shape}")
                if is_exit and (answer.ndim != 2 or len(answer) != rows or answer.dtype.kind != "f"):
                    raise Garbled(f"exit {name!r} is {answer.dtype} of shape {answer.shape} for {rows} rows")
        if not outputs:
            raise Garbled("a step without a result")
        if is_last or is_exit:  # earlier segments prove nothing: a later one may be the one that kills the worker
            self.breaker.succeeded()

    def failed(self) -> None:
        """Count a step that failed without a death of its worker."""
        self.breaker.failed_without_death()

    def close(self) -> None:
        """Close the model in its workers, which end with their last model."""
        self._on_close(self)
