"""A prepared model: its segments, their times, and running them.

This module also converts strings. ONNX Runtime takes and returns ``str``, and only valid UTF-8. A tensor of the
protocol holds any bytes. Each byte that is not UTF-8 is mapped to one of the last 128 characters of Unicode (private
use), and back in outputs; such characters in an input are mapped byte by byte, too. So a model that moves strings
returns them unchanged, and a model that compares strings finds equal ones equal.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from weft.devices.shares import GpuLikeness
from weft.runtime.backend import DeviceLane, Ended, StartedStep, Step, StepOutput
from weft.runtime.defaults import ModelDefaults
from weft.runtime.exits import Counted, ExitSpec, Kind, join, keep
from weft.runtime.facets import Batching, ModelExits, ModelResidency, ModelTasks, SegmentTiming
from weft.runtime.onnxruntime_cpu.lane import CpuLane
from weft.runtime.onnxruntime_cpu.sessions import release_memory
from weft.runtime.own_folder import remove
from weft.runtime.samples import sample
from weft.runtime.stitched import TaskSpec, fills, mixed
from weft.runtime.tensors import DATATYPES, Array, TensorSpec, aligned


class SegmentSpec(BaseModel):
    """One segment: its inputs and outputs, and the file of its model (None where the model stays whole)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    file: str | None = None
    nodes: tuple[int, int] | None = None
    """If torch runs it: the indices of its first node and of the node behind its last."""
    rows: int = 0
    """If torch runs it as a round of stitched models: the rows of each task."""
    steady: bool = False
    """Whether its run time depends only on the shapes of the inputs."""


class Blueprint(BaseModel):
    """Description of a prepared model without its sessions; caches store it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    segments: tuple[SegmentSpec, ...]
    warm_shapes: dict[str, tuple[int, ...]] | None
    """The shapes of the inputs at batch 1; None if they are not known."""
    values: dict[str, float] = {}
    """Input -> number that it holds when the model is warmed up."""
    batchable: bool = False
    max_batch: int = 1
    any_shapes: bool = False
    """Whether samples of other shapes than the measured shapes may be batched, too."""
    times_s: dict[int, tuple[float, ...]] = {}
    """Rows of a batch -> seconds of each segment."""
    like: dict[int, GpuLikeness] = {}
    """Rows that a device captures the model for -> its likeness: how it runs on shares of the device."""
    memory_bytes: int = 0
    exits: tuple[ExitSpec, ...] = ()
    """Early exits from shallow to deep, the end last; empty if all samples go to the end."""
    confidence: Kind = "logits"
    """What its exits return."""
    mergeable: bool = False
    """Whether rows can leave a batch, and batches be joined, at every cut."""
    rowless: dict[str, Counted | None] = {}
    """Tensor that crosses a cut without a row per sample -> how it changes with the batch size; None: not at all."""
    tasks: tuple[TaskSpec, ...] = ()
    """The models that were stitched into it; empty for an ordinary model."""
    absent_rows: int = 0
    """Rows of zeros that are computed for a task if a batch has no sample of it: 0, or 1 if no rows would fail."""
    round_rows: int = 0
    """Most rows of each task that a device computes at once; 0 for an ordinary model."""
    remarks: tuple[str, ...] = ()


class BlueprintModel(ModelDefaults):
    """A loaded model as its blueprint describes it; a subclass runs its segments."""

    residency: ModelResidency

    def __init__(self, blueprint: Blueprint, *, learned: bool = True) -> None:
        self.blueprint, self.remarks = blueprint, blueprint.remarks
        self.inputs, self.outputs = blueprint.inputs, blueprint.outputs
        self.segments = tuple(segment.name for segment in blueprint.segments)
        steady = tuple(segment.steady for segment in blueprint.segments)
        self.timing = SegmentTiming(steady, blueprint.times_s, blueprint.warm_shapes, learned)
        self.batching = Batching(
            blueprint.batchable, blueprint.max_batch, any_shapes=blueprint.any_shapes, mergeable=blueprint.mergeable
        )
        self.exits = ModelExits(blueprint.exits, blueprint.confidence) if blueprint.exits else None
        self.tasks = ModelTasks(blueprint.tasks) if blueprint.tasks else None
        self.residency = ModelResidency(blueprint.memory_bytes)
        self._exit_at = {spec.segment: spec.output for spec in blueprint.exits}
        """Segment that ends with an exit -> the output that clients get for samples that leave there."""


class CpuModel(BlueprintModel):
    """A loaded model, run segment by segment; any number of threads may run it at once.

    The values between segments are numpy arrays in ONNX Runtime's memory; nothing is copied. Exceptions that ONNX
    Runtime raises during a run are not converted.
    """

    def __init__(
        self, blueprint: Blueprint, sessions: Sequence[Any], folder: Path | None = None, *, learned: bool = True
    ) -> None:
        """*folder* is removed when the model is closed."""
        super().__init__(blueprint, learned=learned)
        self.rowless, self._fills = blueprint.rowless, fills(blueprint.tasks)
        self._absent_zeros = _zeros_for_absent_tasks(blueprint, 1)
        self.sessions = tuple(sessions)
        self._session_steps = _session_steps(blueprint)
        self._text_inputs = frozenset(spec.name for spec in self.inputs if spec.datatype == "BYTES")
        self._warmed_rows: set[int] = set()  # batch sizes
        self._finalizer = weakref.finalize(self, remove, folder) if folder else None

    @property
    def has_free_lengths(self) -> bool:
        """Whether an input has a free dimension besides its rows."""
        return any(-1 in (spec.shape[1:] if self.batching.batchable else spec.shape) for spec in self.inputs)

    def gather(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Join the inputs of several samples to one batch; a sample of a stitched model has only its task's inputs."""
        if not self.tasks:
            return samples[0] if len(samples) == 1 else join(samples, self.rowless)
        zeros = (
            _zeros_for_absent_tasks(self.blueprint, self._longest(samples))
            if self.has_free_lengths
            else self._absent_zeros
        )
        return mixed(samples, zeros, self._fills)

    def _longest(self, samples: Sequence[dict[str, Any]]) -> int:
        """The largest size that a free dimension, other than the rows, has in the samples; 1 without any."""
        axes = {spec.name: [axis for axis, size in enumerate(spec.shape) if axis and size < 0] for spec in self.inputs}
        named_arrays = [item for sample in samples for item in sample.items()]
        sizes = [values.shape[axis] for name, values in named_arrays for axis in axes[name]]
        return int(max(sizes, default=1))

    def prepare(self, rows: int) -> None:
        """Warm up with generated samples: ONNX Runtime plans the memory for a new shape in its first run."""
        shapes = self.timing.warm_shapes
        if rows in self._warmed_rows or shapes is None:
            return
        feed = sample(self.inputs, shapes, seed=0, values=self.blueprint.values)
        # Rows of a stitched model's tasks in turn.
        by_task = [{name: feed[name] for name in task.inputs.values()} for task in self.blueprint.tasks] or [feed]
        self.run(self.gather([by_task[row % len(by_task)] for row in range(rows)]))
        self._warmed_rows.add(rows)

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Run a step on a lane of this backend."""
        assert isinstance(lane, CpuLane)
        return lane.start(self, step, ended, here=here)

    def compute(self, step: Step, options: Any = None) -> list[StepOutput]:
        """Run a step on the calling thread; *options*: run options of ONNX Runtime, by which it can be stopped."""
        segment, last = step.segment, len(self.segments) - 1
        results = [self.run_segment(segment, values, options) for values in self._gather_rows(step)]
        if segment == last:
            return [StepOutput({}, outputs) for outputs in results]
        exit_name = self._exit_at.get(segment)
        return [StepOutput(values, {} if exit_name is None else {exit_name: values[exit_name]}) for values in results]

    def _gather_rows(self, step: Step) -> list[dict[str, Any]]:
        """The values, by name, of the rows that go on, for each batch to compute: all parts joined, or each alone."""
        values = [
            part.values if part.rows is None else keep(part.values, part.rows, self.rowless) for part in step.parts
        ]
        return [self.gather(values)] if step.segment == 0 or self.batching.mergeable else values

    def run_segment(self, index: int, values: dict[str, Any], options: Any = None) -> dict[str, Any]:
        """Run a segment; return the values that later segments need, by name, or after the last the outputs."""
        step, session = self._session_steps[index], self.sessions[index]
        if index == 0:
            texts = self._text_inputs
            values = {name: to_text(value) if name in texts else aligned(value) for name, value in values.items()}
        outputs = session.run(step.outputs, {name: values[name] for name in step.inputs}, options)
        live = {name: values[name] for name in step.carried}
        live.update(zip(step.outputs, outputs, strict=True))
        return live if index < len(self._session_steps) - 1 else self._answer(live)

    def _answer(self, live: Mapping[str, Array]) -> dict[str, Array]:
        """The outputs, in the order of the graph, with texts as bytes."""
        return {
            spec.name: to_bytes(live[spec.name]) if spec.datatype == "BYTES" else live[spec.name]
            for spec in self.outputs
        }

    def run(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run all segments in order; returns the outputs."""
        values: dict[str, Any] = inputs
        for index in range(len(self.segments)):
            values = self.run_segment(index, values)
        return values

    def run_to_exits(self, inputs: dict[str, Array]) -> dict[str, Array]:
        """Run all segments; returns the output of each exit."""
        values: dict[str, Any] = inputs
        answers: dict[str, Array] = {}
        for index in range(len(self.segments)):
            values = self.run_segment(index, values)
            answers |= {exit_.output: values[exit_.output] for exit_ in self.blueprint.exits if exit_.segment == index}
        return answers

    def close(self) -> None:
        """Drop the sessions, free their memory and remove the folder; no segment may be running."""
        closed = [weakref.ref(session) for session in self.sessions]
        self.sessions = ()
        release_memory(closed)
        if self._finalizer:
            self._finalizer()


def _zeros_for_absent_tasks(blueprint: Blueprint, length: int) -> dict[str, Array]:
    """For each input of a stitched model, the zeros that stand for its task in batches without a sample of the task.

    *length*: the size of free dimensions. Empty for other models.
    """
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
    """The names of the values that a segment reads, that it returns, and that pass it unused."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    carried: tuple[str, ...]  # values from before the segment that are needed after it


def live_after(blueprint: Blueprint) -> tuple[tuple[str, ...], ...]:
    """The names of the values that are needed after each segment."""
    steps = _session_steps(blueprint)
    return tuple((*step.carried, *(name for name in step.outputs if name not in step.carried)) for step in steps)


def _session_steps(blueprint: Blueprint) -> tuple[_SessionStep, ...]:
    """The step of each segment; from the last to the first, as later segments decide which values are needed."""
    needed = {spec.name for spec in blueprint.outputs}
    steps = []
    for segment in reversed(blueprint.segments):
        carried = needed - set(segment.outputs)
        steps.append(_SessionStep(segment.inputs, segment.outputs, tuple(sorted(carried))))
        needed = carried | set(segment.inputs)
    return tuple(reversed(steps))


_FIRST, _LAST = 0x10FF80, 0x10FFFF
"""The first and the last of the characters that stand for the bytes from 0x80 to 0xff."""
_LEAD = b"\xf4\x8f"
"""The first two of the four bytes of these characters in UTF-8; other characters begin with them, too."""

_STAND_IN_OF = {0xDC80 + index: _FIRST + index for index in range(128)}
_ESCAPED_BY = {stand_in: escaped for escaped, stand_in in _STAND_IN_OF.items()}
"""Surrogate by which Python escapes a byte that is not UTF-8 <-> the character that stands for the byte."""
_BYTE_BY_BYTE = {
    code: "".join(chr(_FIRST + byte - 0x80) for byte in chr(code).encode()) for code in range(_FIRST, _LAST + 1)
}
"""Character that stands for a byte -> the characters for its own UTF-8 bytes, if an input has it as a character."""


def to_text(values: Array) -> Array:
    """A tensor of bytes as a tensor of str for ONNX Runtime."""
    items = [_decode(item) if isinstance(item, bytes) else str(item) for item in values.ravel().tolist()]
    return _object_array(items, values)


def to_bytes(values: Array) -> Array:
    """A tensor of str from ONNX Runtime as a tensor of bytes."""
    return _object_array([_encode(str(item)) for item in values.ravel().tolist()], values)


def _object_array(items: list[str] | list[bytes], values: Array) -> Array:
    """An array of objects in the shape of *values*."""
    tensor = np.empty(len(items), np.object_)
    tensor[:] = items
    return tensor.reshape(values.shape)


def _decode(data: bytes) -> str:
    """Bytes as valid text; bytes that are not UTF-8, and characters that stand for bytes, are replaced."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("utf-8", "surrogateescape")
    else:
        if not _may_be_escaped(data):
            return text
    # First the characters that the data itself has, then the bytes that Python has escaped.
    return text.translate(_BYTE_BY_BYTE).translate(_STAND_IN_OF)


def _encode(text: str) -> bytes:
    """The inverse of ``_decode``."""
    data = text.encode()
    return text.translate(_ESCAPED_BY).encode("utf-8", "surrogateescape") if _may_be_escaped(data) else data


def _may_be_escaped(data: bytes) -> bool:
    """Whether UTF-8 bytes contain a character from ``_FIRST`` to ``_LAST``; the first test is fast and decides most."""
    return _LEAD in data and (_LEAD + b"\xbe" in data or _LEAD + b"\xbf" in data)
