"""A lane is a thread; ONNX Runtime computes without Python's global lock, so lanes run beside each other."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import NamedTuple, Protocol

import onnxruntime as ort

from weft.runtime.backend import Ended, Step, StepEnd, StepOutput
from weft.runtime.onnxruntime_cpu.run_errors import explain
from weft.runtime.onnxruntime_cpu.scratch import IDLE_S, Scratch
from weft.runtime.urgency import give_way


class Computing(Protocol):
    """A model as a lane sees it."""

    def compute(self, step: Step, options: ort.RunOptions | None = None) -> Sequence[StepOutput]:
        """Run a step, on the calling thread."""
        ...


_Task = tuple[Computing, Step, Ended, ort.RunOptions]


def own_core(index: int, *, pin: bool) -> int | None:
    """The core that a lane is kept on; None where it may run on any."""
    cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
    return cores[index % len(cores)] if cores else None


class CpuRun(NamedTuple):
    """A step that a lane was given."""

    lane: CpuLane
    number: int

    @property
    def onward(self) -> None:
        """Nothing can go on before it has ended."""

    @property
    def error(self) -> None:
        """Only its end tells."""

    def stop(self) -> None:
        self.lane.stop(self.number)


class CpuLane:
    """A thread that computes one step at a time, and gives scratch memory back when there is nothing to do."""

    ahead, apart = 0, False

    def __init__(
        self, index: int, now: Callable[[], int], core: int | None = None, scratch: Scratch | None = None
    ) -> None:
        self._now, self._scratch = now, scratch or Scratch(now)
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._options, self._stopped = ort.RunOptions(), False
        self._steps = 0
        self.thread = threading.Thread(target=self._serve, args=(core,), name=f"lane-{index}", daemon=True)
        self.thread.start()

    @property
    def able(self) -> bool:
        return True

    def start(self, model: Computing, step: Step, ended: Ended, *, here: bool = False) -> CpuRun:
        """Compute a step, *here* or on the lane's own thread; what comes back can be told to stop."""
        if self._stopped:
            self._options, self._stopped = ort.RunOptions(), False
        self._steps += 1
        if here:
            end = self._computed(model, step, self._options)
            self._scratch.ran(end.ended - end.began)
            ended(end)
        else:
            self._tasks.put((model, step, ended, self._options))
        return CpuRun(self, self._steps)

    def stop(self, step: int) -> None:
        """Stop the step of this number between two of its nodes, if it is the last one."""
        if step == self._steps:
            self._stopped = True
            self._options.terminate = True

    def give_way(self) -> None:
        give_way(self.thread)

    def close(self, patience_s: float | None = None) -> bool:
        self._tasks.put(None)
        self.thread.join(patience_s)
        return not self.thread.is_alive()

    def _serve(self, core: int | None) -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        while (task := self._next()) is not None:
            model, step, ended, options = task
            end = self._computed(model, step, options)
            self._scratch.ran(end.ended - end.began)
            del task, model, step  # whoever hears of the end may free them
            ended(end)
            del end, ended  # a lane that waits holds no values

    def _next(self) -> _Task | None:
        """The next task; while there is none, scratch memory that is not needed is given back."""
        if self._scratch.is_due(idle=False):
            self._scratch.shrink()
        while True:
            try:
                return self._tasks.get(timeout=IDLE_S if self._scratch.is_large else None)
            except Empty:
                if self._scratch.is_due(idle=True):
                    self._scratch.shrink()

    def _computed(self, model: Computing, step: Step, options: ort.RunOptions) -> StepEnd:
        began = self._now()
        try:
            made = model.compute(step, options)
        except Exception as error:  # whatever a model does, its own requests hear of it and the lane goes on
            return StepEnd(began, self._now(), error=explain(error))
        return StepEnd(began, self._now(), made)
