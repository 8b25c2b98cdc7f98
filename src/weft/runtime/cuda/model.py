"""A model on a device: picks the rung (captured batch size) of each batch, manages memory, and returns answers.

*Live* values are those that a later segment or an answer needs. Batches of other shapes than the captured ones run
uncaptured.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.devices.host import Gates
from weft.models.element_types import numpy_dtype
from weft.runtime.backend import BatchPart, DeviceLane, Ended, OutputTarget, StartedStep, Step, StepOutput, Written
from weft.runtime.cuda.device import AlreadyReached, Device, Mark, Movable, Tensor, as_array
from weft.runtime.cuda.gates import NEVER_STOPPED
from weft.runtime.cuda.lane import CudaLane, Launched
from weft.runtime.cuda.region_writes import RegionWrites, plan_writes
from weft.runtime.cuda.rung import DeviceValues, Rung
from weft.runtime.cuda.segments import DeviceSegment, DeviceWeights, UncapturedTensors
from weft.runtime.exits import join, keep
from weft.runtime.facets import ModelResidency, ModelShares, SegmentTiming
from weft.runtime.onnxruntime_cpu.model import Blueprint, BlueprintModel, CpuModel, live_after
from weft.runtime.tensors import Array


def ladder(max_batch: int) -> list[int]:
    """The batch sizes that are captured: powers of two, and *max_batch*; other batches are padded to the next size."""
    sizes = [1]
    while 2 * sizes[-1] < max_batch:
        sizes.append(2 * sizes[-1])
    return sizes if max_batch == 1 else [*sizes, max_batch]


class UncapturedValues(NamedTuple):
    """Values of a batch of other shapes than those that were captured."""

    values: UncapturedTensors
    rows: int


class DeviceModel(BlueprintModel):
    """A model on a device; its steps are started by one thread at a time."""

    borrows = True

    def __init__(
        self,
        device: Device,
        blueprint: Blueprint,
        segments: Sequence[DeviceSegment],
        weights: DeviceWeights,
        rungs: Sequence[Rung],
    ) -> None:
        """rungs: its captured batch sizes, ascending."""
        super().__init__(blueprint)
        self._device, self._device_segments, self._weights, self._rungs = device, list(segments), weights, list(rungs)
        # Held while memory is evicted, brought back or freed, so that none of these happens half-way through another.
        self._memory_lock, self._in_memory = threading.Lock(), True
        self._live_names = live_after(blueprint)  # for each segment, the names of the values that are needed after it
        if rungs and all(rung.gated for rung in rungs):
            self.timing = self._timing_with_gates(rungs[0].gate_costs())

    def _timing_with_gates(self, gates: Gates) -> SegmentTiming:
        """Measured times of segments with gates; the blueprint has those without, for devices that have none."""
        gate_s = gates.gate_us / 1e6
        times_s = {rows: tuple(time_s + gate_s for time_s in times) for rows, times in self.timing.times_s.items()}
        return replace(self.timing, times_s=times_s, gated=True, gates=gates)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Start a step on a lane of the device; *here* has no effect."""
        assert isinstance(lane, CudaLane)
        return lane.start(self, step, ended)

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run all segments from exit to exit, and wait; returns the outputs, and the answers at exits."""
        values: Any = inputs
        rows, first, answers = len(next(iter(inputs.values()))), 0, dict[str, Array]()
        for end in sorted({*(segment + 1 for segment in self._exit_at), len(self.segments)}):
            outputs, _ = self.launch(Step(first, [BatchPart(values)], rows, end - first)).wait()
            values, first = outputs[0].values, end
            answers |= outputs[0].answers
        return answers

    def uncaptured(self) -> dict[int, str]:
        """Index of each segment that could not be captured at some batch size -> the reason."""
        return {segment: why for rung in self._rungs for segment, why in rung.uncaptured.items()}

    def close(self) -> None:
        """Free the model's memory; no step of it may be running."""
        with self._memory_lock:
            memories = self._memories()
            self._rungs, self._device_segments, self._weights = [], [], DeviceWeights(self._device)
            gc.collect()  # sessions and graphs that use the memory must be gone before it
            for memory in memories:
                memory.close()

    # Eviction

    def evict_and_time(self) -> None:
        """Evict the model, and measure how long it takes to bring it back; sets ``residency``."""
        with self._device.lane_context():
            self.evict()
            began_s = time.perf_counter()
            self.restore()
            self._device.finish()
            return_s = time.perf_counter() - began_s
            self.evict()
        moving_bytes = sum(memory.byte_size for memory in self._memories())
        staying_bytes = max(0, self.residency.memory_bytes - moving_bytes)
        self.residency = ModelResidency(staying_bytes, moving_bytes, return_s)

    def evict(self) -> None:
        """Evict the weights and the memory of the rungs; no step of the model may be running."""
        with self._memory_lock:
            self._evict_memories()

    def _evict_memories(self) -> None:
        self._in_memory = False
        for memory in self._memories():
            memory.evict()

    def restore(self) -> None:
        """Bring all memory back before work that starts later; if that fails, all memory is evicted again."""
        with self._memory_lock:
            try:
                for memory in self._memories():
                    memory.restore()
            except BaseException:
                self._evict_memories()
                raise
            self._in_memory = True

    def _memories(self) -> list[Movable]:
        return [*self._weights.memories, *(rung.memory for rung in self._rungs)]

    # Steps

    def launch(self, step: Step, slot: int = NEVER_STOPPED) -> Launched:
        """Start a step and return at once; a step of shapes that were not captured is awaited.

        slot: of the stop table, for a gated model. ``MemoryError`` if the model is evicted.
        """
        if not self._in_memory:
            raise MemoryError("the model is not in the device's memory")
        # Batches that cannot be joined at this cut are computed one after another.
        is_joined = step.segment == 0 or self.batching.mergeable
        groups = [list(step.parts)] if is_joined else [[part] for part in step.parts]
        end = step.segment + step.segments
        has_answers = end == len(self.segments) or end - 1 in self._exit_at
        targets = step.targets if len(groups) == 1 else ()  # their rows are those of the whole batch
        if self.timing.gated and len(groups) == 1 and not self._is_uncaptured(step.segment, groups[0]):
            try:
                onward = not has_answers and not slot
                return self._launch_gated(step.segment, end, groups[0], targets, slot, onward=onward)
            except BaseException:
                self._await_launches()  # if an end is not noted, later launches are refused for ever
                raise
        if self.timing.gated:
            self._await_launches()
        outputs: list[StepOutput] = []
        computed = 0
        # What takes no graph with gates may take longest, as shapes that were not captured do.
        while computed < step.segments and not (slot and self._device.stopped(slot)):
            groups = [[BatchPart(output.values)] for output in outputs] if computed else groups
            outputs = [self._advance(step.segment + computed, group, targets) for group in groups]
            computed += 1
        if computed < step.segments:
            return Launched(outputs, *self._marks(outputs), onward=False, note_end=lambda: (outputs, computed))
        # After answers, the end is awaited: at an exit they decide which samples continue.
        return Launched(outputs, *self._marks(outputs), onward=not has_answers and not slot)

    def _marks(self, outputs: Sequence[StepOutput]) -> tuple[Mark, Mark]:
        """Marks after the work of a step that was started, and after the copies of its answers."""
        computed, has_copies = self._device.mark(), any(output.answers or output.written for output in outputs)
        return computed, self._device.mark(answers=True) if has_copies else computed

    def _await_launches(self) -> None:
        """Wait for all launches with gates: behind them, the host starts segments that no gate can refuse."""
        self._device.finish()
        for rung in self._rungs:
            rung.note_ends()

    def _is_uncaptured(self, segment: int, parts: list[BatchPart]) -> bool:
        """Whether parts of a batch have shapes that were not captured."""
        if segment == 0:
            return self._rung_for(parts) is None
        return any(isinstance(part.values, UncapturedValues) for part in parts)

    def _advance(self, segment: int, parts: list[BatchPart], targets: Sequence[OutputTarget] = ()) -> StepOutput:
        """Start a segment on *parts*, which are computed as one batch; *targets*: for the outputs of the last one."""
        if self._is_uncaptured(segment, parts):
            return self._run_uncaptured(segment, parts)
        values = self._gather(segment, parts) if segment else self._enter_inputs(parts)
        return self._compute_segment(segment, values, targets)

    def _rung_for(self, parts: list[BatchPart]) -> Rung | None:
        """The rung (captured batch size) for a new batch; None where its shapes or its size were not captured."""
        # skipped: the axis of rows, if there is one.
        captured, skipped = self.timing.warm_shapes or {}, 1 if self.batching.batchable else 0
        for part in parts:
            if any(array.shape[skipped:] != captured[name][skipped:] for name, array in part.values.items()):
                return None
        return self._rung(sum(map(self._rows_in, parts)))

    def _rows_in(self, part: BatchPart) -> int:
        """The number of rows of a part of a new batch."""
        if part.rows is not None:
            return len(part.rows)
        return next(iter(part.values.values())).shape[0] if self.batching.batchable else 1

    def _rung(self, rows: int) -> Rung | None:
        """The smallest rung for a batch of *rows*; None if there is none."""
        return next((rung for rung in self._rungs if rung.rows >= rows), None)

    def _enter_inputs(self, parts: list[BatchPart]) -> DeviceValues:
        """Copy the inputs of a new batch to the memory of its rung."""
        values = self._upload_inputs(parts)
        for name, tensor in list(values.tensors.items()):
            self._copy_to_rung(values, name, tensor)
        return values

    def _upload_inputs(self, parts: list[BatchPart]) -> DeviceValues:
        """Copy the inputs of a new batch to the device, beside the memory of its rung."""
        rung = self._rung_for(parts)
        assert rung is not None
        values = DeviceValues(rung, sum(map(self._rows_in, parts)), {})
        for spec in self.inputs:
            arrays = [part.values[spec.name] for part in parts]
            picked = [a if p.rows is None else as_array(a)[list(p.rows)] for a, p in zip(arrays, parts, strict=True)]
            values.tensors[spec.name] = self._device.copy_in(picked)
        return values

    def _copy_to_rung(
        self, values: DeviceValues, name: str, tensor: Tensor, consumed: Sequence[DeviceValues] = ()
    ) -> None:
        """Copy a tensor to the memory where the rung's segments read *name*, as a value of the batch *values*.

        consumed: batches whose values may be overwritten.
        """
        rung = values.rung
        rung.copy_before_overwrite(name, consumed)
        target, source = rung.tensors[name], rung.rows_of(tensor, values.rows)
        self._device.copy(rung.rows_of(target, values.rows), source)
        values.tensors[name] = target
        rung.set_owner(name, values)

    def _gather(self, segment: int, parts: list[BatchPart]) -> DeviceValues:
        """The values of the samples that continue, as one batch; copies the segment's inputs to the rung's memory."""
        read_names = self._device_segments[segment].spec.inputs
        if len(parts) == 1 and parts[0].rows is None:
            values: DeviceValues = parts[0].values
            for name in read_names:  # values were copied elsewhere if another batch has used the rung since
                if values.tensors[name] is not values.rung.tensors[name]:
                    self._copy_to_rung(values, name, values.tensors[name])
            return values
        return self._join(read_names, parts)

    def _join(self, read_names: Sequence[str], parts: list[BatchPart]) -> DeviceValues:
        """Join the samples of *parts* that continue into one batch; *read_names*: tensors that the segment reads."""
        values = self._concatenate(parts)
        for name in read_names:
            self._copy_to_rung(values, name, values.tensors[name], [part.values for part in parts])
        return values

    def _concatenate(self, parts: list[BatchPart]) -> DeviceValues:
        """The samples of *parts* that continue as one batch, in new tensors."""
        pairs: list[tuple[DeviceValues, BatchPart]] = [(part.values, part) for part in parts]
        rows = sum(batch.rows if part.rows is None else len(part.rows) for batch, part in pairs)
        rung = self._rung(rows)
        assert rung is not None, "batches are joined up to the largest that is captured"
        values = DeviceValues(rung, rows, {})
        for name in parts[0].values.tensors:
            sources = [(batch.tensors[name], part.rows, batch.rows) for batch, part in pairs]
            values.tensors[name] = self._device.concatenate_rows(sources)
        return values

    def _compute_segment(self, segment: int, values: DeviceValues, targets: Sequence[OutputTarget] = ()) -> StepOutput:
        """Start a segment on values in the memory of their rung; returns the values that later segments need.

        targets: of the batch, for the outputs of the last segment.
        """
        rung = values.rung
        output_names = self._device_segments[segment].spec.outputs
        for name in output_names:
            rung.copy_before_overwrite(name, (values,))
        rung.run(segment)
        outputs = {name: rung.tensors[name] for name in output_names}
        live = {name: outputs[name] if name in outputs else values.tensors[name] for name in self._live_names[segment]}
        if segment == len(self.segments) - 1:
            output, writes = self._final_output(values, live, targets)
            if writes is not None:
                self._device.write_out(writes.pieces)
            return output
        next_values = values.onward(live)
        for name, tensor in live.items():
            if tensor is rung.tensors[name]:
                rung.set_owner(name, next_values)
        exit_name = self._exit_at.get(segment)
        return StepOutput(
            next_values, {} if exit_name is None else {exit_name: self._answer(rung, live[exit_name], values.rows)}
        )

    def _final_output(
        self, values: DeviceValues, outputs: Mapping[str, Tensor], targets: Sequence[OutputTarget]
    ) -> tuple[StepOutput, RegionWrites | None]:
        """The output of the last segment, and what of it is still to be written into clients' regions (*targets*).

        Starts the copies of all other answers to the host. Where an output is written for some requests of the batch
        only, the host gets all of its rows: batches of which some clients use regions are rare.
        """
        if not targets:
            return StepOutput({}, self._answers(values, outputs)), None
        rung, rows = values.rung, values.rows
        tensors = {spec.name: rung.rows_of(outputs[spec.name], rows) for spec in self.outputs}
        writes = plan_writes(self._device, targets, tensors, rows)
        answers = {name: self._device.copy_out(tensors[name]) for name in tensors if name not in writes.complete}
        only_written = {name: (tuple(tensors[name].shape), numpy_dtype(rung.types[name])) for name in writes.complete}
        return StepOutput({}, answers, Written(writes.requests, only_written)), writes

    def _answers(self, values: DeviceValues, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Start the copies of the outputs that clients receive after the last segment."""
        return {spec.name: self._answer(values.rung, outputs[spec.name], values.rows) for spec in self.outputs}

    def _answer(self, rung: Rung, tensor: Tensor, rows: int) -> Array:
        """Start the copy of a tensor's first *rows* rows to the host, without the rung's padding."""
        return self._device.copy_out(rung.rows_of(tensor, rows))

    # Several segments at once

    def _launch_gated(
        self,
        first: int,
        end: int,
        parts: list[BatchPart],
        targets: Sequence[OutputTarget],
        slot: int,
        *,
        onward: bool,
    ) -> Launched:
        """Launch the segments from *first* to before *end* on *parts*, which are computed as one batch.

        targets: as in ``Step``. onward: as in ``Launched``.
        """
        taken: list[DeviceValues] = [part.values for part in parts] if first else []
        if not first:
            values = self._upload_inputs(parts)
        elif len(parts) == 1 and parts[0].rows is None:
            values = taken[0]
        else:
            values = self._concatenate(parts)
        rung = values.rung
        with rung.lock:
            launch = rung.launch(
                (first, end), slot, values, taken, lambda count: self._gated_values(values, first + count)
            )
            next_values = self._gated_values(values, end)
            rung.own(next_values)
            output, writes = self._gated_output(next_values, end, targets)
            outputs = [output]

        def note_end() -> tuple[Sequence[StepOutput], int | None]:
            with rung.lock:
                count = rung.note_end(launch)
            if count == end - first:
                if writes is not None:  # only now: had a gate ended the launch, these would be rows of other clients
                    self._device.write_out(writes.pieces, ended=True).wait()
                return outputs, None
            return [StepOutput(launch.left, {})] if launch.left is not None else (), count

        return Launched(outputs, *self._marks(outputs), onward=onward, note_end=note_end)

    def _gated_values(self, values: DeviceValues, end: int) -> DeviceValues:
        """The values of a batch in the memory of its rung after all segments before *end*."""
        return values.onward({name: values.rung.tensors[name] for name in self._live_names[end - 1]})

    def _gated_output(
        self, values: DeviceValues, end: int, targets: Sequence[OutputTarget]
    ) -> tuple[StepOutput, RegionWrites | None]:
        """The output of a launch that computes all segments before *end*, and what of it is written at its end.

        Starts the copies of its answers to the host.
        """
        if end == len(self.segments):
            return self._final_output(values, values.tensors, targets)
        exit_name = self._exit_at.get(end - 1)
        if exit_name is None:
            return StepOutput(values, {}), None
        answer = self._answer(values.rung, values.tensors[exit_name], values.rows)
        return StepOutput(values, {exit_name: answer}), None

    # Other shapes

    def _run_uncaptured(self, segment: int, parts: list[BatchPart]) -> StepOutput:
        """Run a segment for shapes that were not captured, and wait for it."""
        values = dict(self._uncaptured_values(segment, parts))
        runner = self._device_segments[segment]
        self._device.run_uncaptured(lambda: values.update(runner.run_uncaptured(values)))
        self._device.finish()
        rows = sum(p.values.rows if isinstance(p.values, UncapturedValues) else self._rows_in(p) for p in parts)
        if segment == len(self.segments) - 1:
            return StepOutput({}, {spec.name: runner.to_array(values[spec.name]) for spec in self.outputs})
        exit_name = self._exit_at.get(segment)
        next_values = UncapturedValues({name: values[name] for name in self._live_names[segment]}, rows)
        return StepOutput(next_values, {} if exit_name is None else {exit_name: runner.to_array(values[exit_name])})

    def _uncaptured_values(self, segment: int, parts: list[BatchPart]) -> Mapping[str, Any]:
        """The values of all rows that continue, in the form that ``run_uncaptured`` takes.

        Between segments, those of one whole batch stay on the device; otherwise parts are joined on the host.
        """
        if segment and len(parts) == 1 and parts[0].rows is None:
            unchanged: Mapping[str, Any] = parts[0].values.values
            return unchanged
        arrays = [self._as_arrays(part.values) for part in parts]
        selected = [a if p.rows is None else keep(a, p.rows, rowless={}) for a, p in zip(arrays, parts, strict=True)]
        return self._device_segments[segment].from_arrays(join(selected, rowless={}))

    def _as_arrays(self, values: Any) -> dict[str, Any]:
        """Values of any kind as arrays on the host."""
        if isinstance(values, UncapturedValues):  # any segment can convert them: all are of one kind
            return {name: self._device_segments[0].to_array(value) for name, value in values.values.items()}
        if isinstance(values, DeviceValues):
            arrays = {name: self._answer(values.rung, tensor, values.rows) for name, tensor in values.tensors.items()}
            self._device.finish()  # ``_answer`` has only started the copies into the arrays
            return arrays
        return {name: as_array(array) for name, array in values.items()}


class ModelOnHost:
    """A model that cannot run on the device: ONNX Runtime computes it on the cores, on the device's lane."""

    def __init__(self, inner: CpuModel, reason: str) -> None:
        self._inner = inner
        self.shares: ModelShares | None = None
        self.remarks = (*inner.remarks, f"runs on the CPU: {reason}")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Compute a step before this returns; its end is reported after the ends of earlier steps."""
        assert isinstance(lane, CudaLane)
        return lane.start(self, step, ended)

    def launch(self, step: Step, slot: int = NEVER_STOPPED) -> Launched:
        """Compute a step on the calling thread."""
        outputs = self._inner.compute(step)
        answering = {spec.segment for spec in self._inner.blueprint.exits} | {len(self._inner.segments) - 1}
        return Launched(outputs, AlreadyReached(), AlreadyReached(), onward=step.segment not in answering)
