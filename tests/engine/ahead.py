"""A backend on the processor whose lanes take steps ahead: a step begins with what the one before it will make.

Steps of several segments end at the next gate when they are stopped, on the clock of the test.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from weft.runtime.backend import BatchPart, Ended, Step, StepEnd, StepOutput
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import CpuLane


class Promised:
    """Values that a step makes on a lane, or will make, if it can."""

    def __init__(self, lane: AheadLane, values: Any = None) -> None:
        self.lane, self.values = lane, values
        self.error: Exception | None = None

    def kept(self) -> Any:
        if self.error:
            raise self.error
        assert self.values is not None, "a step began before what it goes on from had ended"
        return self.values


def goes_on(model: Any, segment: int) -> bool:
    """Whether neither the end nor an exit follows a segment."""
    exits = {spec.segment for spec in model.exits.specs} if model.exits else ()
    return segment != len(model.segments) - 1 and segment not in exits


class AheadRun:
    """A step that a lane was given, and the model as its lane sees it."""

    def __init__(self, lane: AheadLane, model: Any, step: Step, ended: Ended, now: Callable[[], int]) -> None:
        self._lane, self._model, self._ended, self._now = lane, model, ended, now
        self.onward: Sequence[StepOutput] | None = None
        if goes_on(model, step.segment):
            made = 1 if step.segment == 0 or model.batching.mergeable else len(step.parts)
            self.onward = [StepOutput(Promised(lane), {}) for _ in range(made)]
        self._lock = threading.Lock()
        self._begun = self._stopped = False

    def stop(self) -> None:
        """End at once if its turn has not come; who drives the test ends what runs."""
        with self._lock:
            self._stopped = not self._begun
        if self._stopped:
            self._ended(StepEnd(self._now(), self._now(), error=self._fail(InterruptedError("stopped"))))

    def compute(self, step: Step, options: Any) -> Sequence[StepOutput]:
        with self._lock:
            self._begun = not self._stopped
        if self._stopped:
            return ()
        try:
            parts = tuple(map(self._kept, step.parts))
            made: Sequence[StepOutput] = self._model.compute(step._replace(parts=parts), options)
        except Exception as error:
            raise self._fail(error) from None
        for promise, each in zip(self.onward or (), made, strict=self.onward is not None):
            promise.values.values = each.values
        return made if self.onward else [each._replace(values=Promised(self._lane, each.values)) for each in made]

    def _kept(self, part: BatchPart) -> BatchPart:
        if not isinstance(part.values, Promised):
            return part
        assert part.values.lane is self._lane or not self._lane.apart, "a batch went on where its values are not"
        return part._replace(values=part.values.kept())

    def end(self, end: StepEnd) -> None:
        if not self._stopped:
            self._ended(end)

    def _fail(self, error: Exception) -> Exception:
        for promise in self.onward or ():
            promise.values.error = error
        return error


class GatedRun:
    """A step of several segments, which ends at the next gate when it is stopped."""

    onward = None

    def __init__(self, lane: AheadLane, model: Any, step: Step, ended: Ended, now: Callable[[], int]) -> None:
        self._lane, self._model, self._step, self._ended, self._now = lane, model, step, ended, now
        self._gates = list(accumulate(model.segment_ticks(step)))
        self._began: int | None = None
        self._computed, self._stopped = step.segments, False

    @property
    def ends_at(self) -> int | None:
        return None if self._began is None else self._began + sum(self._gates[self._computed - 1 : self._computed])

    def stop(self) -> None:
        """Leave at the next gate; what has not begun leaves when its lane comes to it."""
        self._stopped = True
        done = None if self._began is None else self._now() - self._began
        self._computed = 0 if done is None else 1 + sum(gate < done for gate in self._gates[:-1])

    def compute(self, step: Step, options: Any) -> Sequence[StepOutput]:
        """Wait on the stage until it ends or leaves, then compute what there was time for."""
        if self._stopped and self._began is None:
            return ()
        self._began = self._now()
        self._model.wait(self._gates[-1])
        outputs, parts = (), tuple(map(_kept, step.parts))
        for segment in range(step.segment, step.segment + self._computed):
            outputs = self._model.compute(Step(segment, parts, step.rows))
            parts = tuple(BatchPart(output.values) for output in outputs)
        return [each._replace(values=Promised(self._lane, each.values)) for each in outputs]

    def end(self, end: StepEnd) -> None:
        left = self._computed < self._step.segments and not end.error
        self._ended(end._replace(computed=self._computed) if left else end)


def _kept(part: BatchPart) -> BatchPart:
    return part._replace(values=part.values.kept()) if isinstance(part.values, Promised) else part


class AheadLane(CpuLane):
    """A thread that computes steps in the order in which they came."""

    def __init__(self, index: int, now: Callable[[], int], ahead: int, apart: bool) -> None:
        super().__init__(index, now)
        self.ahead, self.apart = ahead, apart

    def start(self, model: Any, step: Step, ended: Ended, *, here: bool = False) -> Any:
        assert not here
        # a policy that is asked at every segment has each of them started by itself on a device with gates as well
        gated = model.timing.gated and (step.segments > 1 or not goes_on(model, step.segment))
        run: Any = (GatedRun if gated else AheadRun)(self, model, step, ended, self._now)
        super().start(run, step, run.end)
        return run


class AheadBackend(CpuBackend):
    """Lanes that take so many steps ahead; *apart*: with memory of their own."""

    def __init__(self, now: Callable[[], int], ahead: int, apart: bool) -> None:
        super().__init__(now)
        self._ahead, self._apart = ahead, apart

    def lane(self, index: int, *, pin: bool = False) -> AheadLane:
        return AheadLane(index, self.now, self._ahead, self._apart)
