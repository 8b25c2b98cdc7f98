"""The server's side of one worker: the process, its connections (lines), its steps and calls, and its death.

Steps are sent on the thread that starts them; the lanes' ``SocketReader`` reads their reports. Another thread reads
everything else and waits for the process to exit. A worker that sends malformed packets, or accepts no more work, is
killed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, Protocol

from weft.base.errors import WorkerDied, reason_of
from weft.engine.lane_queues import MOST_AHEAD
from weft.runtime.backend import Ended, Step, StepEnd, StepOutput
from weft.runtime.breaker import Breaker
from weft.runtime.client_memory import Lender, LentTensor
from weft.runtime.isolated import packets
from weft.runtime.isolated.confinement import Confinement
from weft.runtime.isolated.lane import IsolatingLane, LaneLine, StepReport
from weft.runtime.isolated.model_description import decode_error
from weft.runtime.isolated.packets import Garbled, Packet, TensorLayout
from weft.runtime.isolated.residency import Residency
from weft.runtime.isolated.spawning import Child, ended_by
from weft.runtime.isolated.stop_table import StopTable
from weft.runtime.isolated.written_outputs import describe_targets, restore_written

log = logging.getLogger("weft.workers")

PATIENCE_S = 2.0
"""Grace period in seconds of a worker that was asked to exit; then it is killed."""

SOON_S = 0.002
"""Delay in seconds before the retry of a step that is not suspected of the worker's death; the spare has taken over by
then."""

CARRIED_BYTES = 1 << 20
"""Tensors of more bytes are copied on the carrier thread; copying them would block the event loop for over 0.1 ms."""

MOST_LENT = packets.MOST_FILES - 2
"""Regions of clients (files) that one step can pass to a worker; a packet carries two more descriptors."""

MOST_BORROWED = 200
"""Most regions of clients that a worker has open; each takes two file descriptors, of which a worker has 1024."""

UNBOUNDED_BYTES = 1 << 62
"""The memory budget of a device for which no limit is set."""

RETURNING_S = 10.0
"""Seconds in which any model was brought back to a device's memory; a step that was stopped waits for that."""

PARTS_BITS = 20
"""Kept values have the number of their step, shifted left by these bits, plus the index of their part in the batch."""

LOOK_S = 0.01
"""Seconds between checks by a thread that waits for a step's end, as another thread may read the report."""


class WorkerModel(Protocol):
    """The members of a model that ``WorkerProcess`` uses."""

    number: int
    gated: bool
    """Whether its steps have gates, at which they are stopped through the stop table."""
    longest_s: float
    """Expected seconds of its longest segment."""

    @property
    def breaker(self) -> Breaker | None:
        """The circuit breaker that counts deaths of the model's worker; None: deaths are not counted."""
        ...

    def onward(self, step: Step) -> int:
        """How many outputs the next step can be queued with before *step* has ended; 0 if it must wait for the end."""
        ...

    def check(self, step: Step, computed: int | None, outputs: Sequence[StepOutput]) -> None:
        """Raise ``Garbled`` if a step cannot have these outputs; *computed*: as in ``StepEnd``."""
        ...

    def failed(self) -> None:
        """Count a step that ended with an error."""
        ...


class HeldValues:
    """Handle of values in the memory of a worker; they are freed when the handle is garbage."""

    __slots__ = ("model", "number", "worker")

    def __init__(self, worker: WorkerProcess, number: int, model: int) -> None:
        """number: under which the worker keeps them. model: the number of their model."""
        self.worker, self.number, self.model = worker, number, model
        worker.residency.begin(model)

    def __del__(self) -> None:
        self.worker.free(self.number)
        self.worker.residency.end(self.model)


_NO_STEP = Step(0, (), 0)  # takes the place of an ended step, whose values can be freed then


class WorkerRun:
    """A step that was sent to a worker; its ``StepEnd`` is passed to the callback *ended*."""

    __slots__ = (
        "_ended", "began", "evicted", "first_number", "is_movable", "lane", "model", "number", "onward", "over", "step",
        "stop_slot", "worker",
    )  # fmt: skip
    error: Exception | None = None  # known only at its end

    def __init__(
        self, worker: WorkerProcess, number: int, lane: IsolatingLane, model: WorkerModel, step: Step, ended: Ended
    ) -> None:
        """number: of the step, unique among those of the worker."""
        self.worker, self.number, self.lane, self.model, self.step = worker, number, lane, model, step
        self._ended: Ended | None = ended
        self.began = worker.now()  # when it was sent, in ns
        self.over = False
        """Whether its end was passed to the callback."""
        self.evicted: list[int] | None = None
        """Models that are evicted from the device before the step, to bring back its model; None if that was there."""
        self.is_movable = model.number in worker.residency.movable
        """Whether its model may be evicted from a device."""
        if self.is_movable:
            worker.residency.begin(model.number)
        self.stop_slot = worker.stops.take() if model.gated and worker.stops else 0
        """Its slot of the stop table; 0: it has none."""
        self.first_number = number << PARTS_BITS
        """The first of the numbers under which the worker keeps the values of the step, one for each part."""
        self.onward: list[StepOutput] | None = None  # see ``StartedStep``
        if lane.ahead:
            promised = range(self.first_number, self.first_number + model.onward(step))
            self.onward = [StepOutput(HeldValues(worker, number, model.number), {}) for number in promised] or None

    def stop(self) -> None:
        if not self.over:
            self.worker.halt(self)

    @property
    def waits(self) -> bool:
        """Whether it cannot end yet: an earlier step of its lane has not, or its model is being brought back."""
        is_returning = self.evicted is not None and self.worker.now() - self.began < RETURNING_S * 1e9
        return is_returning or self.worker.oldest_run(self.lane) is not self

    @property
    def uninterrupted_s(self) -> float:
        """Expected seconds of a segment that has to end first: a device cannot be interrupted within one."""
        return self.model.longest_s if self.lane.ahead else 0.0

    def give_way(self) -> None:
        """Lower the priority of the worker's thread that runs the step."""
        if not self.over:
            self.worker.notify(["give_way", self.number])

    def request_stop(self) -> None:
        """Ask the worker, or its device, to stop the step."""
        if not self.model.gated:
            self.worker.notify(["halt", self.number])
        elif (slot := self.stop_slot) and self.worker.stops:
            # If the step ends meanwhile, the next one with this slot is stopped for nothing, and started again.
            self.worker.stops.stop(slot)

    def kill(self, why: str) -> None:
        """Kill the worker because of this step."""
        self.worker.kill(why, self)

    def end(self, end: StepEnd) -> None:
        """Pass the end of the step to its callback; further calls do nothing."""
        callback, self._ended = self._ended, None
        if callback is None:
            return
        self.step, self.onward = _NO_STEP, None  # the callback may free its values
        if (slot := self.stop_slot) and self.worker.stops:
            self.stop_slot = 0
            self.worker.stops.release(slot)
        if self.is_movable:
            self.worker.residency.end(self.model.number)
        try:
            callback(end)
        except Exception:
            log.exception("the end of a step could not be reported")
        self.over = True

    def await_end(self, patience_s: float | None) -> bool:
        """Wait up to *patience_s* seconds for the end, reading reports meanwhile; False after a timeout."""
        return self.over or self.worker.listen_until(self, patience_s)

    def fail(self, error: Exception) -> None:
        """End the step with an error."""
        self.end(StepEnd(self.began, max(self.began, self.worker.now()), error=error))


class WorkerProcess:
    """A worker: a process that was started and, once ``ready``, takes models and steps."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        name: str,
        confinement: Confinement,
        scratch: str,
        device_memory_bytes: int | None = None,
        *,
        now: Callable[[], int],
        spawner: Executor,
        fork: Callable[[int, Confinement, str], Child],
        carrier: Executor,
        watch: Callable[[WorkerRun], None],
        died: Callable[[WorkerProcess, set[WorkerModel]], None],
        gates: bool = False,
    ) -> None:
        """Start the process, on the *spawner*'s one thread, by *fork*.

        name: of its group, for the log. scratch: its temporary folder. carrier: a thread pool that copies large
        tensors. watch: called with steps that were asked to stop. died: called with this and the models that are
        suspected of its death, on the thread that reads its packets. gates: whether it gets a stop table.
        """
        self.name, self.now, self.number = name, now, next(self._numbers)
        self.readable = frozenset(confinement.readable)
        self.opened: set[int] = set()
        """Numbers of the models that the worker has open."""
        self.death = ""
        """The cause of the worker's death; empty while it lives."""
        self.residency = Residency(UNBOUNDED_BYTES if device_memory_bytes is None else device_memory_bytes)
        self._carrier, self._watch, self._died = carrier, watch, died
        # Guards _runs, _calls and death: a step or call is either registered before the death, and failed by it, or
        # sees the death. Steps start on any thread, their ends are read on another.
        self._lock = threading.Lock()
        self._keys = itertools.count(1)  # numbers of steps and calls
        self._runs: dict[int, WorkerRun] = {}
        self._calls: dict[int, Future[Any]] = {}
        self._lanes: dict[int, LaneLine] = {}
        self._freed: deque[int] = deque()  # numbers of kept values that the worker has to be told to free
        self._lent: set[int] = set()  # numbers of the clients' regions that the worker has open
        self._hello: Future[None] = Future()  # done when the worker has reported that it is ready
        self._closing, self._why = False, ""  # why: the reason for which it is being killed
        self._blamed: WorkerRun | None = None  # the step that is that reason, if one is
        self._idle: threading.Event | None = None
        """Set when no step runs any more; the thread that drains the worker waits for it."""
        self._line, worker_end = packets.pair()
        self.stops: StopTable | None = None
        """Through it, steps are stopped at gates; a table of its own, as slots are used while their steps run."""
        try:
            self.stops = StopTable() if gates else None
            self.process = spawner.submit(fork, worker_end.fileno(), confinement, scratch).result()
            if self.stops is not None:
                self._send_stops(self.stops.file)
        except BaseException:  # there are too many processes or open files
            self._line.close()
            raise
        finally:
            worker_end.close()
            if self.stops is not None:
                os.close(self.stops.file)
        self._reader = threading.Thread(target=self._read_packets, name=f"worker-{self.number}", daemon=True)
        try:
            spawner.submit(self._reader.start).result()  # a thread inherits its starter's priority
        except RuntimeError:  # there are too many threads; without a reader its death would not be noticed
            self.process.kill()
            self.process.wait()
            self._line.close()
            raise

    def _send_stops(self, file: int) -> None:
        """Send the worker the file of its stop table, before anything else."""
        with contextlib.suppress(OSError):  # the worker has died, which the reader finds out
            self._line.send(["stops"], files=[file], wait=False)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def alive(self) -> bool:
        return not self.death

    def await_ready(self) -> None:
        """Wait until the worker accepts work; raises ``WorkerDied`` if it dies before."""
        self._hello.result()

    def await_idle(self, patience_s: float) -> None:
        """Wait up to *patience_s* seconds until no step runs. Only for a worker that gets no more steps."""
        self._idle = threading.Event()
        if self._runs:
            self._idle.wait(patience_s)

    # Steps

    def begin(self, lane: IsolatingLane, model: WorkerModel, step: Step, ended: Ended) -> WorkerRun:
        """Start a step; *ended* is called with its end, on another thread or before this returns."""
        run = WorkerRun(self, next(self._keys), lane, model, step, ended)
        lane.run = run
        with self._lock:
            if not self.death:
                self._runs[run.number] = run
        if self.death:  # it is never unset, so this run is not registered, or was failed
            run.fail(self.death_error())
            return run
        try:
            layout, parts = _describe_parts(step)
            targets = describe_targets(step.targets, layout.lenders)
            if layout.lenders and self._copy_surplus_tensors(step, layout.lenders):
                run.step, targets = step._replace(targets=()), []
                layout, parts = _describe_parts(step)
        except Exception as error:  # an array of no known type, a region that was cut off
            self._remove_run(run.number)
            run.fail(error)
            return run
        if layout.size > CARRIED_BYTES or lane.carried:  # steps of a lane are sent in order
            lane.carried.add(run.number)
            self._carrier.submit(self._send_on_carrier, run, parts, layout, targets)
        else:
            self._send(run, parts, layout, targets)
        return run

    def _send_on_carrier(self, run: WorkerRun, parts: list[Any], layout: TensorLayout, targets: list[Any]) -> None:
        """Send a step on the carrier thread, which copies its large tensors; as ``_send``."""
        try:
            self._send(run, parts, layout, targets)
        finally:
            run.lane.carried.discard(run.number)

    def _send(self, run: WorkerRun, parts: list[Any], layout: TensorLayout, targets: list[Any]) -> None:
        """Send a step, whose errors end it or kill the worker.

        parts, layout: as ``_describe_parts`` returns. targets: as ``describe_targets`` returns.
        """
        shared = layout.size > packets.INLINE_BYTES
        step, model = run.step, run.model.number
        lenders = self._unopened_regions(layout.lenders) if layout.lenders else ()
        terms = [tuple(lender.terms) for lender in lenders] if lenders else ()
        files = [lender.file for lender in lenders if lender.file is not None] if lenders else ()
        freed: Sequence[int] = ()
        try:
            if run.is_movable:
                run.evicted = self.residency.make_room_for(model, begins=step.segment == 0, lane=run.lane.index)
            freed = self._pop_freed() if self._freed else ()
            # As ``StepMessage`` names them.
            head = ["run", run.number, model, step.segment, parts, step.rows, shared, freed]
            head += (run.first_number, run.onward is not None, terms, run.evicted, step.segments, run.stop_slot)
            head.append(targets)
            self._lane_line(run.lane).send(head, layout, files)
            if lenders:
                self.lend(lenders)
        except ConnectionError:
            self.process.kill()  # the worker has died; _handle_death finds out why
        except BlockingIOError as error:
            if not self.death:
                self.kill(f"it takes no more work: {error}")
        except Exception as error:  # a step that was not sent will not end by itself
            if run.evicted is not None:
                self.residency.unsent(run.model.number, run.evicted)
            self._freed.extend(freed)
            if self._remove_run(run.number):
                run.fail(error)

    # Regions of clients

    def _unopened_regions(self, lenders: Sequence[Lender]) -> list[Lender]:
        """The regions that the worker has not opened yet, without duplicates."""
        unknown = (lender for lender in lenders if lender.terms.number not in self._lent)
        return list({lender.terms.number: lender for lender in unknown}.values())

    def _copy_surplus_tensors(self, step: Step, lenders: Sequence[Lender]) -> bool:
        """Replace a step's lent tensors by copies if it has more new files than a packet, or the worker, can take.

        Returns whether they were replaced.
        """
        new_files = sum(lender.file is not None for lender in self._unopened_regions(lenders))
        if new_files <= MOST_LENT and new_files + len(self._lent) <= MOST_BORROWED:
            return False
        for values in (part.values for part in step.parts if isinstance(part.values, dict)):
            for name, value in values.items():
                if isinstance(value, LentTensor) and value.lender.file is not None:
                    values[name] = value.read()
        return True

    def lend(self, lenders: Sequence[Lender]) -> None:
        """Record the regions of *lenders* as open in the worker; a region is closed there when its lender is freed."""
        for lender in lenders:
            if lender.terms.number in self._lent:
                continue
            self._lent.add(lender.terms.number)
            # Not at exit: the worker ends then, too.
            weakref.finalize(lender, _close_region_in, weakref.ref(self), lender.terms.number).atexit = False

    def take_back(self, number: int) -> None:
        """Tell the worker to close the region of this number."""
        self._lent.discard(number)
        self.notify(["take_back", number])

    def _lane_line(self, lane: IsolatingLane) -> LaneLine:
        """The connection to a lane, opened when it is first used."""
        connection = self._lanes.get(lane.index)
        if connection is None:
            line, worker_end = packets.pair()
            try:
                with worker_end:
                    self._line.send(["lane", lane.index, lane.core], files=[worker_end.fileno()], wait=False)
            except BaseException:
                line.close()
                raise
            slots = 1 + MOST_AHEAD if lane.ahead else 1  # steps that may be under way
            connection = self._lanes[lane.index] = LaneLine(line, lane.socket_reader, slots, lane.kept_bytes)
            lane.socket_reader.add(line, partial(self._read_report, connection))
            if self.death:  # _handle_death ran before this line was in _lanes
                lane.socket_reader.remove(line)
        return connection

    def _remove_run(self, number: int) -> WorkerRun | None:
        """Take a step off the register of running steps; None if it was removed before."""
        with self._lock:
            return self._runs.pop(number, None)

    def oldest_run(self, lane: IsolatingLane) -> WorkerRun | None:
        """The step of a lane that runs, or is the next to run."""
        with self._lock:
            return next((run for run in self._runs.values() if run.lane is lane), None)

    def halt(self, run: WorkerRun) -> None:
        """Ask a step to stop, and start its grace period."""
        run.request_stop()
        self._watch(run)

    def free(self, number: int) -> None:
        """Tell the worker to free the values of this number: with the next step, or at once if no step is running."""
        self._freed.append(number)
        if not self._runs:
            self._send_freed()

    def _pop_freed(self) -> Sequence[int]:
        """Remove and return the numbers of the values to free; other threads may append meanwhile."""
        numbers = []
        with contextlib.suppress(IndexError):  # the deque is empty
            while True:
                numbers.append(self._freed.popleft())
        return numbers

    def _send_freed(self) -> None:
        """Tell the worker to free the values whose handles are garbage (``free``)."""
        if self._freed:
            self.notify(["free", self._pop_freed()])

    def notify(self, head: list[Any]) -> None:
        """Send a message that needs no answer."""
        # Errors are ignored: the worker has died, or is so busy that the grace period of its steps will kill it.
        with contextlib.suppress(OSError):
            self._line.send(head, wait=False)

    def death_error(self, suspects: int = 0) -> WorkerDied:
        """The error of a step that was lost with this worker; *suspects*: steps that may have caused the death."""
        again_s = 0.0 if suspects else SOON_S  # suspects are retried at once
        death = self.death or "another one has taken its place"
        return WorkerDied(f"the worker that computed it died: {death}", suspects=suspects, again_s=again_s)

    # Calls

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the worker and wait for its result; raises what the method raised, or ``WorkerDied``."""
        future: Future[Any] = Future()
        with self._lock:
            key = next(self._keys)
            if not self.death:
                self._calls[key] = future
        if self.death:
            raise self.death_error()
        try:
            self._line.send(["call", key, method, arguments], wait=True)
        except ConnectionError:
            self.process.kill()  # the worker has died; _handle_death finds out why
        except OSError as error:
            self.kill(f"it takes no more calls: {reason_of(error)}")
        return future.result()

    # Its end

    def kill(self, why: str, blamed: WorkerRun | None = None) -> None:
        """Kill the worker; *why*: the text of the reason. *blamed*: the step that is the reason."""
        self._why, self._blamed = self._why or why, self._blamed or blamed
        self.process.kill()

    def close(self) -> None:
        """Ask the worker to exit, and kill it after ``PATIENCE_S``."""
        self._closing = True
        self.notify(["bye"])
        self._reader.join(PATIENCE_S)
        if self._reader.is_alive():
            self.process.kill()
            self._reader.join()

    def _read_packets(self) -> None:
        """Handle the worker's packets until it exits, and then its death; runs on a thread of its own."""
        try:
            while True:
                self._handle_packet(self._line.receive())
        except (EOFError, OSError):
            pass  # the worker has exited; reported below
        except Exception as error:  # a worker that sends malformed packets cannot be trusted
            self._why = self._why or f"it sent what cannot be read ({error})"
        self.process.kill()
        self._handle_death(self.process.wait())

    def _handle_death(self, code: int) -> None:
        """Fail all steps and calls of the dead worker, after notifying the group; *code*: the exit code."""
        for lane in list(self._lanes.values()):  # reports that the worker sent before its death still count
            while self._wait_for_report(lane, timeout_s=0.0):
                pass
        with self._lock:
            self.death = "it was closed" if self._closing else self._why or ended_by(code)
            runs, self._runs = list(self._runs.values()), {}
            calls, self._calls = list(self._calls.values()), {}
        # Each step that ran is a suspect, unless one of them is known to be the reason.
        blamed = [self._blamed] if self._blamed in runs and self._blamed else runs
        if self._closing:  # an expected death counts against no model
            blamed = []
        else:
            self._notify_death({run.model for run in blamed})
        for run in runs:
            run.fail(self.death_error(len(blamed) if run in blamed else 0))
        for future in [self._hello, *calls]:
            if not future.done():
                future.set_exception(self.death_error())
        if self._idle:
            self._idle.set()
        self._line.close()
        for lane in list(self._lanes.values()):
            lane.socket_reader.remove(lane.line)

    def _notify_death(self, models: set[WorkerModel]) -> None:
        """Notify the group; its errors are logged, because steps and calls that wait must be failed in any case."""
        try:
            self._died(self, models)
        except Exception:
            log.exception("the death of worker %d could not be reported", self.pid)

    # Its reports

    def _handle_packet(self, packet: Packet) -> None:
        """Handle a packet of the worker's first connection; ``Garbled`` if it is not a message that a worker sends."""
        packets.close_all(packet.files)
        kind, *arguments = packet.head
        if packet.files:
            raise Garbled(f"{len(packet.files)} files with {kind!r}")
        if kind == "reply":
            self._handle_reply(*arguments)
        elif kind == "hello":
            self._handle_hello(*arguments)
        else:
            raise Garbled(f"{kind!r} is no message of a worker")

    def listen_until(self, run: WorkerRun, patience_s: float | None) -> bool:
        """Read reports of a step's lane until the step has ended; False after a timeout."""
        end_s = None if patience_s is None else time.monotonic() + patience_s
        while not run.over:
            if end_s is not None and time.monotonic() > end_s:
                return False
            lane = self._lanes.get(run.lane.index)
            if lane is None or not self._wait_for_report(lane, LOOK_S):
                time.sleep(LOOK_S)  # its inputs are being copied, or the worker's death is being handled
        return True

    def _wait_for_report(self, lane: LaneLine, timeout_s: float) -> bool:
        """Wait up to *timeout_s* seconds for a report of a lane and handle it; False if there was none."""
        file, poll = lane.line.file, select.poll()
        if file < 0:  # it is closed
            return False
        poll.register(file, select.POLLIN)
        return bool(poll.poll(timeout_s * 1e3)) and self._read_report(lane)

    def _read_report(self, lane: LaneLine) -> bool:
        """Handle the next report of a lane, if there is one; False if the connection has ended."""
        with lane.reading:
            try:
                report = lane.receive_report()
                if report.weight > CARRIED_BYTES or lane.handed_over:  # reports of a lane are handled in order
                    lane.handed_over.add(report.number)
                    self._carrier.submit(self._finish_step_on_carrier, lane, report.lasting())
                else:
                    self._finish_step(report)
            except BlockingIOError:
                return True  # another thread has read it
            except (EOFError, OSError):
                self.process.kill()  # the worker has exited, or closed this connection
                return False
            except Exception as error:
                self._kill_untrusted(error)
                return False
            return True

    def _finish_step_on_carrier(self, lane: LaneLine, report: StepReport) -> None:
        """Handle a report on the carrier thread, which copies its large tensors; as ``_finish_step``."""
        try:
            self._finish_step(report)
        except Exception as error:
            self._kill_untrusted(error)
        finally:
            lane.handed_over.discard(report.number)

    def _kill_untrusted(self, error: Exception) -> None:
        """Kill the worker: after a malformed report it cannot be trusted."""
        self.kill(f"it sent what cannot be read ({error})")

    def _finish_step(self, report: StepReport) -> None:
        """Handle the report of an ended step; ``Garbled`` if it is malformed, and the step ends with the worker."""
        run = self._remove_run(report.number)
        if run is None:
            if self.death:
                return  # the step has already failed with the worker
            raise Garbled(f"step {report.number} does not run")
        try:
            end = self._read_end(run, report)
        except BaseException:
            with self._lock:
                self._runs[run.number] = run  # the step ends with the worker
            raise
        run.end(end)
        if not self._runs:
            if self._idle:
                self._idle.set()
            if self._freed:
                self._send_freed()

    def _read_end(self, run: WorkerRun, report: StepReport) -> StepEnd:
        """Check a report and make a ``StepEnd`` of it. Impossible times are clamped to the server's clock."""
        began, ended, now = report.began, report.ended, self.now()
        if not (type(began) is type(ended) is int and run.began <= began <= ended <= now):
            ended = min(max(run.began, int(ended)), now)
            began = min(max(run.began, int(began)), ended)
        if report.problem is not None:
            error = decode_error(report.problem)
            if run.evicted is not None:
                self.residency.failed(run.model.number, run.evicted)
            run.model.failed()
            return StepEnd(began, ended, error=error)
        computed, segments = report.computed, run.step.segments
        if computed is not None and not (run.model.gated and type(computed) is int and 0 <= computed < segments):
            raise Garbled(f"{computed!r} of {segments} segments were computed")
        # Values that the next step may refer to already have a handle; number 0: the worker keeps no values.
        promised = {output.values.number: output.values for output in run.onward} if run.onward else {}
        outputs: list[StepOutput] = []
        for number, described, written in report.outputs:
            values = (promised.get(number) or HeldValues(self, int(number), run.model.number)) if number else {}
            answers = packets.restore(described, report.source, copied=True)
            outputs.append(
                StepOutput(values, answers, restore_written(run.step, written, answers, len(report.outputs)))
            )
        run.model.check(run.step, computed, outputs)
        if run.evicted is not None:
            self.residency.confirm(run.model.number, run.evicted)
        return StepEnd(began, ended, outputs, computed=computed)

    def _handle_reply(self, key: int, result: Any, problem: Any) -> None:
        """Pass the reply of call *key* to the thread that waits for it; *problem*: its error as it is sent, or None."""
        with self._lock:
            future = self._calls.pop(key, None)
        if future is None:
            raise Garbled(f"there was no call {key!r}")
        if problem is None:
            future.set_result(result)
        else:
            future.set_exception(decode_error(problem))

    def _handle_hello(self, in_force: list[str], missing: list[str]) -> None:
        """Record that the worker is ready; *in_force*, *missing*: the restrictions that it has, and has not."""
        log.info("worker %d of %s has %s", self.pid, self.name, ", ".join(map(str, in_force)))
        if missing:
            log.warning("worker %d of %s could not have: %s", self.pid, self.name, ", ".join(map(str, missing)))
        self._hello.set_result(None)


def _close_region_in(worker: weakref.ref[WorkerProcess], number: int) -> None:
    """Tell a worker, if it still exists, to close a region whose lender is garbage."""
    process = worker()
    if process is not None:
        process.take_back(number)


def _describe_parts(step: Step) -> tuple[TensorLayout, list[Any]]:
    """Describe the parts of a batch for the worker: values that it holds by their number, others by their tensors.

    Returns the layout of the tensors, and the parts as (number or 0, rows or None, tensors or None).
    """
    layout, parts = TensorLayout(), []
    for values, rows in step.parts:
        held = isinstance(values, HeldValues)
        described = None if held else packets.describe(values, layout)
        parts.append((values.number if held else 0, None if rows is None else list(rows), described))
    return layout, parts
