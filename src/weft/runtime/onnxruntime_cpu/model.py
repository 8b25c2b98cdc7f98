"""A model ready to be served: its segments, what they cost, and running them."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from weft.devices.measured import times_at
from weft.devices.shares import GpuLikeness
from weft.runtime.backend import DeviceLane, Ended, StartedStep, Step, StepOutput
from weft.runtime.defaults import ModelDefaults
from weft.runtime.exits import Counted, ExitSpec, Kind, join, keep
from weft.runtime.onnxruntime_cpu.lane import CpuLane
from weft.runtime.onnxruntime_cpu.samples import sample
from weft.runtime.onnxruntime_cpu.sessions import release_memory
from weft.runtime.onnxruntime_cpu.texts import to_bytes, to_text
from weft.runtime.own_folder import remove
from weft.runtime.stitched import TaskSpec, fills, mixed
from weft.runtime.tensors import DATATYPES, Array, TensorSpec, aligned


class SegmentSpec(BaseModel):
    """One segment: what it takes and makes, and the file of its model (none where the model stays whole)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    file: str | None = None
    nodes: tuple[int, int] | None = None
    """Of what torch runs: its first node, and the one behind its last."""
    rows: int = 0
    """Of a round that torch runs: the rows of each task."""
    steady: bool = False
    """Whether what it costs follows from the shapes of the inputs, whatever they hold."""


class Blueprint(BaseModel):
    """All that is known of a prepared model but its sessions; this is what a cache keeps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    segments: tuple[SegmentSpec, ...]
    warm_shapes: dict[str, tuple[int, ...]] | None
    """The shapes of the inputs at batch 1; None where they are not known."""
    values: dict[str, float] = {}
    """Inputs that hold a certain number when it is warmed up."""
    batchable: bool = False
    max_batch: int = 1
    any_shapes: bool = False
    """Whether samples of other shapes than the measured ones may be computed together, too."""
    times_s: dict[int, tuple[float, ...]] = {}
    like: dict[int, GpuLikeness] = {}
    """Rows that a device captures it with -> what it is like on shares of that, which it is captured on, too."""
    memory_bytes: int = 0
    exits: tuple[ExitSpec, ...] = ()
    """Where samples may leave, shallow to deep, the end last; none where all go to the end."""
    confidence: Kind = "logits"
    """What its exits give."""
    mergeable: bool = False
    """Whether batches can be shrunk and joined at every cut."""
    rowless: dict[str, Counted | None] = {}
    """What crosses a cut without a row per sample, and what becomes of it when a batch shrinks or grows."""
    tasks: tuple[TaskSpec, ...] = ()
    """The models that were stitched into it; none of an ordinary model."""
    absent_rows: int = 0
    """Rows of zeros that stand for each task that a batch has no sample of."""
    round_rows: int = 0
    """Rows of each task that a device computes at once at most; 0 of an ordinary model."""
    remarks: tuple[str, ...] = ()


class CpuModel(ModelDefaults):
    """A loaded model, run segment by segment; any number of threads may run it at once.

    Between segments live numpy arrays that lie in ONNX Runtime's memory; nothing is copied.
    What ONNX Runtime raises while it runs passes through.
    """

    def __init__(
        self, blueprint: Blueprint, sessions: Sequence[Any], folder: Path | None = None, *, learned: bool = True
    ) -> None:
        """*folder* is removed when the model is closed."""
        self.blueprint, self.learned = blueprint, learned
        self.inputs, self.outputs = blueprint.inputs, blueprint.outputs
        self.max_batch, self.batchable = blueprint.max_batch, blueprint.batchable
        self.any_shapes = blueprint.any_shapes
        self.segments = tuple(segment.name for segment in blueprint.segments)
        self.steady = tuple(segment.steady for segment in blueprint.segments)
        self.times_s: Mapping[int, tuple[float, ...]] = blueprint.times_s
        self.like: Mapping[int, GpuLikeness] = blueprint.like
        self.warm_shapes: Mapping[str, tuple[int, ...]] | None = blueprint.warm_shapes
        self.memory_bytes, self.remarks = blueprint.memory_bytes, blueprint.remarks
        self.exits, self.mergeable, self.rowless = blueprint.exits, blueprint.mergeable, blueprint.rowless
        self.confidence = blueprint.confidence
        self.tasks, self._fills = blueprint.tasks, fills(blueprint.tasks)
        self._absent = _absent(blueprint, 1)
        self.sessions = tuple(sessions)
        self._steps = _steps(blueprint)
        self._told = {each.segment: each.output for each in self.exits}
        self._texts = frozenset(spec.name for spec in self.inputs if spec.datatype == "BYTES")
        self._interpolated: dict[int, tuple[float, ...]] = dict(self.times_s)
        self._seen: set[int] = set()
        self._finalizer = weakref.finalize(self, remove, folder) if folder else None

    @property
    def free(self) -> bool:
        """Whether a dimension besides that of the batch is free."""
        return any(-1 in (spec.shape[1:] if self.batchable else spec.shape) for spec in self.inputs)

    def times_at(self, batch: int) -> tuple[float, ...]:
        """Seconds of each segment at a batch size, straight between the measured ones; zeros where nothing was."""
        known = self._interpolated.get(batch)
        if known is None:
            known = times_at(self.times_s, len(self.segments), batch)
            if batch <= self.max_batch:  # clients may send batches of any size, and these are not kept
                self._interpolated[batch] = known
        return known

    def gather(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The inputs of several samples as one batch; of a stitched model, each has those of its own task."""
        if not self.tasks:
            return join(samples, self.rowless)
        absent = _absent(self.blueprint, self._longest(samples)) if self.free else self._absent
        return mixed(samples, absent, self._fills)

    def _longest(self, samples: Sequence[dict[str, Any]]) -> int:
        """The largest of the sizes that are free."""
        free = {spec.name: [axis for axis, size in enumerate(spec.shape) if axis and size < 0] for spec in self.inputs}
        sizes = [each.shape[axis] for sample in samples for name, each in sample.items() for axis in free[name]]
        return int(max(sizes, default=1))

    def prepare(self, rows: int) -> None:
        """Run made-up samples once: memory for a new shape is laid out in its first run."""
        if rows in self._seen or self.warm_shapes is None:
            return
        drawn = sample(self.inputs, self.warm_shapes, 0, self.blueprint.values)
        kinds = [{name: drawn[name] for name in task.inputs.values()} for task in self.tasks] or [drawn]
        self.run(self.gather([kinds[row % len(kinds)] for row in range(rows)]))
        self._seen.add(rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Run a step on a lane of this backend."""
        assert isinstance(lane, CpuLane)
        return lane.start(self, step, ended, here=here)

    def compute(self, step: Step, options: Any = None) -> list[StepOutput]:
        """Run a step on the calling thread."""
        segment, last = step.segment, len(self.segments) - 1
        made = [self.run_segment(segment, values, options) for values in self._gathered(step)]
        if segment == last:
            return [StepOutput({}, outputs) for outputs in made]
        name = self._told.get(segment)
        return [StepOutput(values, {} if name is None else {name: values[name]}) for values in made]

    def _gathered(self, step: Step) -> list[dict[str, Any]]:
        """The values of all who go on: in one piece, or of batches that cannot be joined half-way each its own."""
        values = [
            part.values if part.rows is None else keep(part.values, part.rows, self.rowless) for part in step.parts
        ]
        return [self.gather(values)] if step.segment == 0 or self.mergeable else values

    def run_segment(self, index: int, values: dict[str, Any], options: Any = None) -> dict[str, Any]:
        """What is still needed after a segment, by name: from the model's inputs to its outputs."""
        step, session = self._steps[index], self.sessions[index]
        if index == 0:
            texts = self._texts
            values = {name: to_text(each) if name in texts else aligned(each) for name, each in values.items()}
        made = session.run(step.outputs, {name: values[name] for name in step.inputs}, options)
        live = {name: values[name] for name in step.carried}
        live.update(zip(step.outputs, made, strict=True))
        return live if index < len(self._steps) - 1 else self._answer(live)

    def _answer(self, live: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs, in the order of the graph."""
        return {
            spec.name: to_bytes(live[spec.name]) if spec.datatype == "BYTES" else live[spec.name]
            for spec in self.outputs
        }

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All segments, one after another."""
        values: dict[str, Any] = inputs
        for index in range(len(self.segments)):
            values = self.run_segment(index, values)
        return values

    def run_to_exits(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """All segments, and what each exit gives."""
        values: dict[str, Any] = inputs
        found: dict[str, Array] = {}
        for index in range(len(self.segments)):
            values = self.run_segment(index, values)
            found |= {each.output: values[each.output] for each in self.exits if each.segment == index}
        return found

    def close(self) -> None:
        """Drop the sessions and give their memory back; segments that are running end first."""
        closed = [weakref.ref(each) for each in self.sessions]
        self.sessions = ()
        release_memory(closed)
        if self._finalizer:
            self._finalizer()


def _absent(blueprint: Blueprint, length: int) -> dict[str, Array]:
    """What the inputs of tasks hold that a batch has no sample of; *length* stands for free sizes."""
    if not blueprint.tasks:
        return {}
    return {
        spec.name: np.zeros(
            (blueprint.absent_rows, *(length if size < 0 else size for size in spec.shape[1:])),
            DATATYPES[spec.datatype],
        )
        for spec in blueprint.inputs
    }


class _SessionStep(NamedTuple):
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    carried: tuple[str, ...]
    """What was there before and is needed after."""


def live_after(blueprint: Blueprint) -> tuple[tuple[str, ...], ...]:
    """What is still needed after each segment, by name."""
    steps = _steps(blueprint)
    return tuple((*step.carried, *(name for name in step.outputs if name not in step.carried)) for step in steps)


def _steps(blueprint: Blueprint) -> tuple[_SessionStep, ...]:
    needed = {spec.name for spec in blueprint.outputs}
    steps = []
    for segment in reversed(blueprint.segments):
        carried = needed - set(segment.outputs)
        steps.append(_SessionStep(segment.inputs, segment.outputs, tuple(sorted(carried))))
        needed = carried | set(segment.inputs)
    return tuple(reversed(steps))
