"""A backend on the processor whose lanes take steps ahead: a step begins with what the one before it will make."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from weft.runtime.backend import BatchPart, Ended, Step, StepEnd, StepOutput
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import CpuLane


class Promised:
    """Values that a step will make, if it can."""

    def __init__(self) -> None:
        self.values: Any = None
        self.error: Exception | None = None

    def kept(self) -> Any:
        if self.error:
            raise self.error
        assert self.values is not None, "a step began before what it goes on from had ended"
        return self.values


class AheadRun:
    """A step that a lane was given, and the model as its lane sees it."""

    def __init__(self, model: Any, step: Step, ended: Ended, now: Callable[[], int]) -> None:
        self._model, self._ended, self._now = model, ended, now
        last, exits = len(model.segments) - 1, {each.segment for each in model.exits}
        self.onward: Sequence[StepOutput] | None = None
        if step.segment != last and step.segment not in exits:
            made = 1 if step.segment == 0 or model.mergeable else len(step.parts)
            self.onward = [StepOutput(Promised(), {}) for _ in range(made)]
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
            parts = tuple(map(_kept, step.parts))
            made: Sequence[StepOutput] = self._model.compute(step._replace(parts=parts), options)
        except Exception as error:
            raise self._fail(error) from None
        for promise, each in zip(self.onward or (), made, strict=self.onward is not None):
            promise.values.values = each.values
        return made

    def end(self, end: StepEnd) -> None:
        if not self._stopped:
            self._ended(end)

    def _fail(self, error: Exception) -> Exception:
        for promise in self.onward or ():
            promise.values.error = error
        return error


def _kept(part: BatchPart) -> BatchPart:
    return part._replace(values=part.values.kept()) if isinstance(part.values, Promised) else part


class AheadLane(CpuLane):
    """A thread that computes steps in the order in which they came."""

    def __init__(self, index: int, now: Callable[[], int], ahead: int) -> None:
        super().__init__(index, now)
        self.ahead = ahead

    def start(self, model: Any, step: Step, ended: Ended, *, here: bool = False) -> Any:
        assert not here
        run = AheadRun(model, step, ended, self._now)
        super().start(run, step, run.end)
        return run


class AheadBackend(CpuBackend):
    """Lanes that take so many steps ahead."""

    def __init__(self, now: Callable[[], int], ahead: int) -> None:
        super().__init__(now)
        self._ahead = ahead

    def lane(self, index: int, *, pin: bool = False) -> AheadLane:
        return AheadLane(index, self.now, self._ahead)
