"""Lanes as threads: ONNX Runtime computes without Python's global lock, so that lanes run in parallel.

This module also frees scratch memory. ONNX Runtime keeps the memory that its largest run needed; it is freed when it
was not needed for a while. The size of its arena is not known, so the memory of the process is read after runs that
took long enough to use much of it: growth since the arena was last shrunk counts as scratch memory.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

import onnxruntime as ort

from weft.runtime.backend import Ended, Step, StepEnd, StepOutput
from weft.runtime.defaults import LaneDefaults, StepDefaults
from weft.runtime.onnxruntime_cpu.sessions import explain, shrink_arena
from weft.runtime.urgency import give_way

KEPT_BYTES = 128 << 20
"""Scratch memory below this is kept: it is not worth allocating it anew."""
LONG_NS = 5_000_000
"""The process's memory is not read after shorter runs: they allocate little, and reading is a system call."""
IDLE_S = 1.0
"""Idle time of a lane before it shrinks the arena."""
_BUSY_NS = 10_000_000_000
"""Time without growth after which the arena is shrunk under steady work."""
_PATIENCE = 64
"""Largest multiple of these two times, which double while work needs the memory again soon after it was freed."""


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class ScratchMemory:
    """Estimates the scratch memory, as growth of the process since its arena was last shrunk; shared by all lanes.

    It has no lock: an update that another thread overwrites only makes the estimate old by one run.
    """

    def __init__(self, now: Callable[[], int], resident: Callable[[], int] = resident_bytes) -> None:
        self._now, self._resident = now, resident
        self._low_bytes = resident()  # least resident memory since the arena was last shrunk
        self._high_bytes = self._low_bytes  # largest resident memory since then
        self._grew, self._shrunk, self._wait = now(), now(), 1
        """When ``_high_bytes`` last rose and when the arena was last shrunk, in ns; and the present multiple of the
        waiting times ``IDLE_S`` and ``_BUSY_NS``."""

    @property
    def bytes(self) -> int:
        """Estimated scratch memory in bytes."""
        return max(0, self._high_bytes - self._low_bytes)

    @property
    def is_large(self) -> bool:
        """Whether it is worth freeing."""
        return self._high_bytes - self._low_bytes >= KEPT_BYTES

    def ran(self, took_ns: int) -> None:
        """Update the estimate after a run of *took_ns*."""
        if took_ns >= LONG_NS:
            resident = self._resident()
            if resident > self._high_bytes:
                self._high_bytes, self._grew = resident, self._now()
            self._low_bytes = min(self._low_bytes, resident)

    def is_due(self, *, idle: bool) -> bool:
        """Whether to shrink the arena now; *idle*: the calling lane has nothing to do."""
        if not self.is_large:
            return False
        unchanged_ns = self._now() - max(self._grew, self._shrunk)
        return unchanged_ns >= self._wait * (IDLE_S * 1e9 if idle else _BUSY_NS)

    def shrink(self) -> None:
        """Free memory that no run uses now; if it was soon needed again after the last time, wait longer next time."""
        shrink_arena()
        soon_needed = self._grew > self._shrunk and self._grew - self._shrunk < 2 * self._wait * _BUSY_NS
        self._wait = min(_PATIENCE, 2 * self._wait) if soon_needed else 1
        self._low_bytes = self._high_bytes = self._resident()
        self._grew = self._shrunk = self._now()


class Computing(Protocol):
    """The members of a model that a lane uses."""

    def compute(self, step: Step, options: ort.RunOptions | None = None) -> Sequence[StepOutput]:
        """Run a step on the calling thread."""
        ...


_Task = tuple[Computing, Step, Ended, ort.RunOptions]
"""A step to compute: its model, the step, the callback for its end, and the options by which it can be stopped."""


def own_core(index: int, *, pin: bool) -> int | None:
    """The core that lane number *index* is pinned to, of those that the process may use; None if it is not pinned."""
    cores = sorted(os.sched_getaffinity(0)) if pin and hasattr(os, "sched_getaffinity") else []
    return cores[index % len(cores)] if cores else None


@dataclass(slots=True)
class CpuRun(StepDefaults):
    """A step that was handed to a lane; *number*: how many the lane has had with it."""

    lane: CpuLane
    number: int

    def stop(self) -> None:
        self.lane.stop(self.number)


class CpuLane(LaneDefaults):
    """A thread that computes one step at a time, and frees scratch memory when it is idle."""

    def __init__(
        self, index: int, now: Callable[[], int], core: int | None = None, scratch: ScratchMemory | None = None
    ) -> None:
        """now: the clock in ns. core: pins the thread. scratch: shared by lanes; None: of this lane alone."""
        self._now, self._scratch = now, scratch or ScratchMemory(now)
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._options, self._stopped = ort.RunOptions(), False
        self._steps = 0
        self.thread = threading.Thread(target=self._serve, args=(core,), name=f"lane-{index}", daemon=True)
        self.thread.start()

    def start(self, model: Computing, step: Step, ended: Ended, *, here: bool = False) -> CpuRun:
        """Compute a step on the calling thread (*here*) or on the lane's own; the returned handle can stop it."""
        if self._stopped:  # ``terminate`` cannot be reset: later steps need options of their own
            self._options, self._stopped = ort.RunOptions(), False
        self._steps += 1
        if here:
            end = self._compute_step(model, step, self._options)
            self._scratch.ran(end.ended - end.began)
            ended(end)
        else:
            self._tasks.put((model, step, ended, self._options))
        return CpuRun(self, self._steps)

    def stop(self, step: int) -> None:
        """Stop the step of this number between two of its nodes; no effect if a later step was started."""
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
        """Compute tasks until the lane is closed; runs on the lane's thread, pinned to *core* if that is given."""
        if core is not None:
            os.sched_setaffinity(0, {core})
        while (task := self._next()) is not None:
            model, step, ended, options = task
            end = self._compute_step(model, step, options)
            self._scratch.ran(end.ended - end.began)
            del task, model, step  # the receiver of the end may free their values
            ended(end)
            del end, ended  # an idle lane must not keep values alive

    def _next(self) -> _Task | None:
        """Wait for the next task, or None at the end; meanwhile scratch memory is freed when it is due."""
        if self._scratch.is_due(idle=False):
            self._scratch.shrink()
        # After a timeout the lane waits again: it only had to check whether scratch memory is due.
        while True:
            try:
                return self._tasks.get(timeout=IDLE_S if self._scratch.is_large else None)
            except Empty:
                if self._scratch.is_due(idle=True):
                    self._scratch.shrink()

    def _compute_step(self, model: Computing, step: Step, options: ort.RunOptions) -> StepEnd:
        """Compute a step on the calling thread; an error becomes a part of the returned end."""
        began = self._now()
        try:
            outputs = model.compute(step, options)
        except Exception as error:  # any error fails the requests of this step only; the lane goes on
            return StepEnd(began, self._now(), error=explain(error))
        return StepEnd(began, self._now(), outputs)
