"""A lane of a worker: receives steps on its connection, runs them on the engine, and reports their ends.

An engine that queues a step has two in hand at a time. So there are as many buffers for tensors as steps may be under
way, used in turn. The values that a step leaves are kept under a number that the server chose when it sent the step, so
that the next step can refer to them before they exist.
"""

from __future__ import annotations

import os
import select
import threading
import time
from functools import partial
from typing import Any, NamedTuple, Protocol

from weft.runtime.backend import BatchPart, Ended, LoadedModel, Step, StepEnd
from weft.runtime.client_memory import Borrowed, LendingTerms
from weft.runtime.isolated import packets
from weft.runtime.isolated.engine import WorkerEngine
from weft.runtime.isolated.model_description import encode_error
from weft.runtime.isolated.packets import Line, Packet, TensorLayout
from weft.runtime.isolated.written_outputs import describe_written, open_targets
from weft.runtime.tensors import DATATYPES
from weft.runtime.urgency import give_way


class LaneHost(Protocol):
    """The members of a worker that its lanes use."""

    engine: WorkerEngine
    models: dict[int, LoadedModel]
    values: dict[int, Any]
    regions: dict[int, Borrowed]

    def free(self, numbers: list[int]) -> None:
        """Free the kept values of these numbers."""
        ...

    def kept(self, number: int) -> Any:
        """The kept values of this number; raises the error of the step that should have left them."""
        ...

    def borrow(self, terms: LendingTerms, file: int | None) -> None:
        """Open a region that steps have tensors in; takes over *file*."""
        ...


class StepMessage(NamedTuple):
    """The head of a packet that asks for a step; ``WorkerProcess._send`` and ``LaneLine.send`` make it."""

    kind: str  # "run"
    run: int  # number of the step
    model: int  # number of its model
    segment: int
    parts: list[Any]  # of the batch, as ``_batch_parts`` takes them
    rows: int  # of all parts together
    shared: bool  # whether tensors are in the shared memory of the slot, and not in the packet
    freed: list[int]  # numbers of kept values that the server does not need any more
    first_number: int  # the first of the numbers under which its values are kept, one for each part
    onward: bool  # whether the next step may refer to its values before this one has ended
    lent: list[Any]  # ``LendingTerms`` of the clients' regions that the worker has to open for it
    evicted: list[int] | None  # models to evict before it, to bring back its own; None: that is in memory
    segments: int  # how many segments it covers
    stop_slot: int  # of the stop table, if its model has gates; 0: it is never stopped
    targets: list[Any]  # for its outputs, as ``describe_targets`` describes them
    slot: int  # number of the lane's buffers that it uses
    file_count: int  # how many files the server sent with the packet


class _Job(NamedTuple):
    """A step that a lane runs: its number, the slot of its buffers, and the numbers under which its values are kept."""

    run: int  # number of the step
    slot: int
    first_number: int
    onward: bool  # as in ``StepMessage``
    number_count: int  # how many numbers, from ``first_number`` on, its values may have
    borrowed: frozenset[int] = frozenset()  # ids of arrays of this step in memory that a later step overwrites


class _EndAfterValues:
    """Reports the end of a step when its values are stored: the next step may then come on another lane at once.

    A device reports the end on a thread of its own, perhaps before the thread that started the step has stored them.
    """

    def __init__(self, report: Ended, *, stored: bool) -> None:
        self._report, self._stored = report, stored
        self._end: StepEnd | None = None
        self._lock = threading.Lock()  # guards ``_stored`` and ``_end``: the second of the two threads reports

    def report(self, end: StepEnd) -> None:
        """Report the end, if the values are stored; else ``values_stored`` does."""
        with self._lock:
            if not self._stored:
                self._end = end
                return
        self._report(end)

    def values_stored(self) -> None:
        """Report the end now, if it has come; else ``report`` does."""
        with self._lock:
            self._stored = True
        if self._end is not None:
            self._report(self._end)


class WorkerLane:
    """Serves the connection of one lane, on a thread of its own."""

    def __init__(self, worker: LaneHost, index: int, line: Line, core: int | None) -> None:
        """line: the connection. core: number of the core that its thread is pinned to; None: any."""
        self._worker, self._index, self._line, self._core = worker, index, line, core
        self._engine = worker.engine
        self._lane = worker.engine.lane(index)
        self._steps = 0  # steps started so far
        self._current = self._halted = 0  # numbers of the running step, and of the last step that was to be stopped
        self._inward: dict[int, packets.TensorMemory] = {}  # slot -> memory for inputs; ``_outward``: for answers
        self._outward: dict[int, packets.TensorMemory] = {}
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start a thread that serves the lane, after the present thread, if any, has ended its step."""
        self._thread = threading.Thread(
            target=self._serve, args=[self._thread], name=f"line-{self._index}", daemon=True
        )
        self._thread.start()

    def give_way(self, run: int) -> None:
        """Lower the priority of the thread that runs step *run*; no effect if that has ended.

        Later steps run on a new thread, since priority cannot rise; it inherits the priority of the calling thread.
        """
        if run == self._current and self._thread:
            give_way(self._thread)
            self.begin()

    def _serve(self, predecessor: threading.Thread | None) -> None:
        """Run steps until another thread takes over; begins when the thread *predecessor* has ended."""
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # 0: this thread
        if predecessor:
            predecessor.join()
        poller, this_thread = select.poll(), threading.current_thread()
        poller.register(self._line.file, select.POLLIN)

        def wait_for_step(timeout_s: float) -> bool:
            return bool(poller.poll(timeout_s * 1e3))

        try:
            while self._thread is this_thread:
                self._engine.rest(wait_for_step)  # frees idle memory until a step comes
                packet = self._line.receive()
                self._run(packet)
                del packet  # its memory is freed while the lane waits
        except (EOFError, OSError):  # the server is gone
            os._exit(0)

    def halt(self, run: int) -> None:
        """Stop the step of the number *run* between two nodes; if it has not arrived yet, it will not be started."""
        self._halted = run
        if run == self._current:
            self._lane.stop(self._steps)

    def _run(self, packet: Packet) -> None:
        """Run the step of a packet; its errors are reported as its end."""
        message = StepMessage(*packet.head)
        slot = message.slot
        if len(packet.files) != message.file_count:  # the kernel drops files that exceed the limit of the process
            raise OSError(f"{message.file_count} files were sent and {len(packet.files)} came: too many are open")
        if message.freed:
            self._worker.free(message.freed)
        self._current = message.run
        began = time.monotonic_ns()
        job = _Job(message.run, slot, message.first_number, message.onward, len(message.parts))
        try:
            if message.evicted is not None:
                self._move_models(message.evicted, message.model)
            if message.lent or message.file_count:
                self._take_files(slot, [LendingTerms(*terms) for terms in message.lent], packet.files)
            batch = self._batch_parts(message.parts, packet, slot if message.shared else None)
            if message.shared:
                job = job._replace(borrowed=_array_ids(batch))
            if self._halted == message.run:
                raise InterruptedError("stopped before it began")
            self._steps += 1
            end = _EndAfterValues(partial(self._report_end, job), stored=not message.onward)
            if message.stop_slot:
                self._lane.gate(message.stop_slot)
            model = self._worker.models[message.model]
            targets = open_targets(message.targets, self._worker.regions) if message.targets else ()
            step = Step(message.segment, batch, message.rows, message.segments, targets)
            started = model.start(step, self._lane, end.report, here=self._engine.here)
            if message.onward and started.onward is not None:
                for index, output in enumerate(started.onward):
                    self._keep(job, index, output.values)
            elif message.onward:
                self._store_error(job, started.error)
            end.values_stored()
        except Exception as error:
            self._fail(job, StepEnd(began, time.monotonic_ns(), error=error))
        finally:
            self._current = 0
            if message.shared:
                self._drop_large(slot)

    def _move_models(self, leaving: list[int], coming: int) -> None:
        """Evict the models numbered *leaving*, unless they were closed meanwhile, and bring back the model *coming*."""
        models = self._worker.models
        self._lane.move([models[other] for other in leaving if other in models], models[coming])

    def _take_files(self, slot: int, lent: list[LendingTerms], files: list[int]) -> None:
        """Take over the files of a packet: first new memory for tensors, if any, then regions that are lent."""
        lent_files = sum(terms.kind == "file" for terms in lent)
        if len(files) > lent_files:
            self._take_memory(slot, files.pop(0))
        for terms in lent:
            self._worker.borrow(terms, files.pop(0) if terms.kind == "file" else None)

    def _take_memory(self, slot: int, file: int) -> None:
        """Map new shared memory as the buffer of *slot* for inputs, instead of its old memory."""
        self._drop_memory(slot)
        self._inward[slot] = packets.map_memory(file)
        self._lane.register_buffer(self._inward[slot].bytes)

    def _drop_memory(self, slot: int) -> None:
        memory = self._inward.pop(slot, None)
        if memory is not None:
            self._lane.unregister_buffer(memory.bytes)

    def _drop_large(self, slot: int) -> None:
        """Free the buffer of *slot* if it is too large to be kept for another step."""
        if slot in self._inward and self._inward[slot].size > self._engine.kept_bytes:
            self._drop_memory(slot)

    def _batch_parts(self, parts: list[Any], packet: Packet, slot: int | None) -> list[BatchPart]:
        """The parts of a batch: arrays from the packet or the buffer of *slot*, or values that this worker keeps.

        *parts*: for each, the number of its kept values or 0, the rows that go on or None, and the descriptions of the
        tensors that were sent or None. *slot*: None: tensors are in the packet.
        """
        source = packet.tensors if slot is None else self._inward[slot].bytes
        batch = []
        for number, rows, tensors in parts:
            sent = None if tensors is None else self._restore(tensors, source, copied=slot is None)
            batch.append(BatchPart(self._worker.kept(number) if sent is None else sent, rows))
        return batch

    def _restore(self, tensors: list[Any], source: Any, *, copied: bool) -> dict[str, Any]:
        """Arrays from *source* and tensors in clients' regions, in the order of their descriptions *tensors*.

        copied: whether arrays get memory of their own.
        """
        regions = self._worker.regions
        # The offset of a lent tensor (3 in its description) is a list: the number of its region, and the offset there.
        sent = [tensor for tensor in tensors if not isinstance(tensor[3], list)] if regions else tensors
        restored = packets.restore(sent, source, copied=copied)
        if len(sent) == len(tensors):
            return restored
        lent = {
            name: regions[offset[0]].tensor(offset[1], tuple(shape), DATATYPES[kind])
            for name, kind, shape, offset, _ in tensors
            if isinstance(offset, list)
        }
        return {name: lent[name] if name in lent else restored[name] for name, *_ in tensors}

    def _keep(self, job: _Job, index: int, values: Any) -> None:
        """Keep the values of output *index* of a step, which may still run; arrays in reused memory are copied."""
        if values:
            self._worker.values[job.first_number + index] = _copy_borrowed(values, job.borrowed)

    def _store_error(self, job: _Job, error: Exception | None) -> None:
        """Store the error in place of a step's values, so that queued steps that need the values fail with it."""
        why = error or RuntimeError("the step before it left nothing")
        numbers = range(job.first_number, job.first_number + job.number_count)
        self._worker.values.update(dict.fromkeys(numbers, why))

    def _fail(self, job: _Job, end: StepEnd) -> None:
        """Report the end of a step that could not be started."""
        if job.onward:
            self._store_error(job, end.error)
        self._report_end(job, end)

    def _report_end(self, job: _Job, end: StepEnd) -> None:
        """Report the end of a step with its answers, and keep its values."""
        layout, outputs = TensorLayout(), []
        for index, output in enumerate(end.outputs):
            if output.values and not job.onward:
                self._keep(job, index, output.values)
            number = job.first_number + index if output.values else 0
            outputs.append((number, packets.describe(output.answers, layout), describe_written(output.written)))
        problem = encode_error(end.error) if end.error else None
        is_inline = layout.size <= packets.INLINE_BYTES
        # 0: tensors are in the packet; else in the shared memory of slot place - 1.
        place = 0 if is_inline else job.slot + 1
        # As ``receive_report`` unpacks it.
        head = ["over", job.run, end.began, end.ended, outputs, place, problem, end.computed]
        if is_inline:
            self._line.send(head, layout.padded_pieces(), wait=True)
            return
        files = self._write_shared(layout, job.slot)
        try:
            self._line.send(head, files=files, wait=True)
        finally:
            packets.close_all(files)  # the server has copies of them
            if self._outward[job.slot].size > self._engine.kept_bytes:
                del self._outward[job.slot]

    def _write_shared(self, layout: TensorLayout, slot: int) -> list[int]:
        """Write tensors to the shared memory of *slot*; return its file for the server if the memory is new."""
        files: list[int] = []
        memory = self._outward.get(slot)
        if memory is None or memory.size < layout.size:
            memory, file = packets.create_memory(layout.size, self._engine.kept_bytes)
            self._outward[slot] = memory
            files.append(file)
        memory.write(layout.pieces)
        return files


def _copy_borrowed(values: Any, borrowed: frozenset[int]) -> Any:
    """Copy the arrays whose ids are in *borrowed*: their memory is reused. Values on a device are not changed."""
    if not isinstance(values, dict):
        return values
    return {name: array.copy() if id(array) in borrowed else array for name, array in values.items()}


def _array_ids(parts: list[BatchPart]) -> frozenset[int]:
    """The ids of all arrays of a batch."""
    return frozenset(id(array) for part in parts if isinstance(part.values, dict) for array in part.values.values())
