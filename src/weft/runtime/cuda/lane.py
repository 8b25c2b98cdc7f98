"""A lane of a device: starts steps in order, one step ahead; a thread waits for their ends and reports them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from weft.engine.lane_queues import DEVICE_AHEAD
from weft.runtime.backend import Ended, Step, StepEnd, StepOutput
from weft.runtime.cuda.device import Device, Mark
from weft.runtime.cuda.gates import NEVER_STOPPED

log = logging.getLogger("weft.device")


class Launched(NamedTuple):
    """A step that was started on the device."""

    outputs: Sequence[StepOutput]
    computed: Mark  # reached when the work of the step has ended
    answered: Mark  # reached when the arrays of answers are complete
    onward: bool  # whether the next step can be started with its outputs before it has ended
    note_end: Callable[[], tuple[Sequence[StepOutput], int | None]] | None = None
    """For a step with gates, called once when ``computed`` is reached: its outputs, and how many of its segments were
    computed if a gate ended it early (``StepEnd.computed``)."""

    def end(self) -> tuple[Sequence[StepOutput], int | None]:
        """The outputs of the step, which has ended, and how many segments were computed; waits for its answers."""
        outputs, computed = self.note_end() if self.note_end is not None else (self.outputs, None)
        if computed is None:  # else the copies of answers are not read
            self.answered.wait()
        return outputs, computed

    def wait(self) -> tuple[Sequence[StepOutput], int | None]:
        """Wait for the end of the step; as ``end``."""
        self.computed.wait()
        return self.end()


class Launching(Protocol):
    """A model, as a lane uses it."""

    def launch(self, step: Step, slot: int = NEVER_STOPPED) -> Launched:
        """Start a step, and return at once; *slot*: of the stop table, for a gated model."""
        ...


class Moving(Protocol):
    """A model that can be evicted from the device and brought back."""

    def evict(self) -> None: ...

    def restore(self) -> None: ...


class DeviceRun(NamedTuple):
    """A step that was handed to a lane."""

    onward: Sequence[StepOutput] | None
    error: Exception | None = None  # why the step was not started

    def stop(self) -> None:
        """Do nothing: the server stops steps at gates through the stop table, and kills a worker that hangs."""


class _Flight(NamedTuple):
    """A started step whose end has not been reported."""

    began: int  # when it was started, in ns of the lane's clock; work on the device may begin later
    launched: Launched | None
    error: Exception | None
    ended: Ended
    awaited_first: Mark | None
    """What the reporting thread awaits first: that an evicted model is back, or the work that a failed step started."""


class CudaLane:
    """A lane of a device: starts steps in order on the calling thread, reports their ends on its own thread."""

    ahead, apart, able = DEVICE_AHEAD, True, True

    def __init__(
        self,
        index: int,
        device: Device,
        now: Callable[[], int],
        lost: Callable[[Exception], None] = lambda _: None,
        *,
        share: int = 0,
    ) -> None:
        """now: the clock in ns. lost: called with an error that the device cannot recover from.

        share: number of the share of the device that it runs on; 0: the device is not shared.
        """
        self._device, self._now, self._lost, self._share = device, now, lost, share
        self.busy_ns = 0
        self._last_end = 0  # of the last step, on the lane's clock in ns
        self._slot = NEVER_STOPPED  # of the stop table, for the next step
        self._restored: Mark | None = None  # reached when the model of the next step is back in memory
        self._threads = threading.local()  # the device context that a thread has entered
        self._flights: SimpleQueue[_Flight | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._report_ends, name=f"device-lane-{index}", daemon=True)
        self.thread.start()

    def gate(self, slot: int) -> None:
        """Use a slot of the stop table for the next step."""
        self._slot = slot

    def start(self, model: Launching, step: Step, ended: Ended) -> DeviceRun:
        """Start a step; its end is reported on the lane's own thread."""
        began, launched, error = self._now(), None, None
        awaited_first, self._restored = self._restored, None
        slot, self._slot = self._slot, NEVER_STOPPED
        try:
            self._bind_thread()
            launched = model.launch(step, slot)
        except Exception as problem:  # fails this step only; the lane goes on
            error = problem
            awaited_first = self._device.mark()
        self._flights.put(_Flight(began, launched, error, ended, awaited_first))
        return DeviceRun(launched.outputs if launched and launched.onward else None, error)

    def _bind_thread(self) -> None:
        """Bind the calling thread to the lane once: entering and leaving its stream takes as long as a step."""
        if not hasattr(self._threads, "context"):  # it is never left
            self._threads.context = self._device.lane_context(self._share)
            self._threads.context.__enter__()

    def move(self, leaving: Sequence[Moving], coming: Moving) -> None:
        """Evict the models *leaving*, none of whose steps runs, and bring back *coming* before the next step."""
        self._bind_thread()
        for model in leaving:
            model.evict()
        coming.restore()
        self._restored = self._device.mark()

    def stop(self, step: int) -> None:
        """Do nothing: steps are stopped at gates, through the stop table."""

    def give_way(self) -> None:
        """Do nothing: the device schedules its streams itself."""

    def register_buffer(self, memory: Any) -> None:
        self._device.register_buffer(memory)

    def unregister_buffer(self, memory: Any) -> None:
        self._device.unregister_buffer(memory)

    def close(self, patience_s: float | None = None) -> bool:
        self._flights.put(None)
        self.thread.join(patience_s)
        return not self.thread.is_alive()

    def _report_ends(self) -> None:
        """Report the ends of steps in order until the lane is closed; runs on the lane's own thread."""
        while (flight := self._flights.get()) is not None:
            end = self._await_end(flight)
            try:
                flight.ended(end)
            except Exception:
                log.exception("the end of a step could not be reported")
            del flight, end  # an idle lane must not keep values alive

    def _await_end(self, flight: _Flight) -> StepEnd:
        """Wait for the end of a step; it counts as begun when the step before it had ended."""
        launched, began = flight.launched, max(flight.began, self._last_end)
        try:
            if flight.awaited_first is not None:
                flight.awaited_first.wait()
                began = max(began, self._now())
            if launched is None:
                return StepEnd(flight.began, max(flight.began, self._now()), error=flight.error)
            launched.computed.wait()
            self._last_end = ended = max(began, self._now())
            outputs, computed = launched.end()  # copies of answers do not count as time of the step
        except Exception as error:  # such as an illegal address: the device cannot run anything any more
            self._lost(error)
            return StepEnd(began, max(began, self._now()), error=error)
        self.busy_ns += ended - began
        return StepEnd(began, ended, outputs, computed=computed)
