"""Stitched encoders on a GPU: rows of any models and lengths in one batch, computed by Triton kernels.

A *rung* is a batch with a fixed number of rows (tokens of any models), captured as a CUDA graph; a *ladder* has rungs
of 64, 128, ... rows. A *body* is the backbone on the device: shared weights, and *slots* for the models' own weights. A
file that differs from a loaded one only in some of its models, such as one with an added model, takes slots in the same
body, and nothing is captured again.

Kernels and what they read are in ``weft_stitch.running``.
"""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakSet

import numpy as np
import torch

from weft.base.errors import ModelError, NotLearned, UnfitInputs, WeftError
from weft.runtime.backend import BatchPart, LoadOptions, OutputTarget, StepOutput
from weft.runtime.cuda.model_files import (
    FP16,
    FP32,
    LARGEST_UNASKED,
    SHAPES,
    WRONG,
    Allowance,
    Blueprint,
    Device,
    DeviceModel,
    DeviceWeights,
    OutOfTime,
    SegmentSpec,
    Tensor,
    Unfit,
    as_array,
    difference,
    first_line,
    lacks_memory,
    named_exits,
    open_model,
    remark,
    whole_blueprint,
    with_tasks,
)
from weft.runtime.cuda.torch_files import torch_device_name
from weft.runtime.cuda.torch_types import as_torch
from weft.runtime.facets import ModelTasks
from weft.runtime.stitched import usual_shapes
from weft.runtime.tensors import DATATYPES, Array
from weft_stitch.running import body_serving

FORM = "with one body, by kernels of its own"
IN_PLACE = "in place, with nothing captured again"
"""Remarks about a file: that kernels serve it, and that it took slots in a body that was on the device."""
_TYPES = {FP32: torch.float32, FP16: torch.float16}


class DeviceBody:
    """The state on a device that several versions of a file share: weights, captured batches, times."""

    def __init__(self, device: Device, slotted: Any, ladder: Any) -> None:
        """*slotted*: the weights, a ``SlottedBody``. *ladder*: the captured batches, a ``BodyLadder``."""
        self.device, self.slotted, self.ladder, self.memory_bytes = device, slotted, ladder, 0
        self.lock = threading.Lock()
        """Protects the buffers of rungs while they are filled and run: a file may be tested while others serve."""
        self.rung_s: dict[int, float] = {}
        """Rows of a rung -> seconds of a run."""
        self.serves_file = False
        """Whether a file has been loaded into it already."""

    def rung(self, rows: int, allowance: Allowance) -> Any:
        """The captured batch of *rows* token rows; ``OutOfTime`` if the allowance is used up."""
        allowance.check()
        return self.ladder.rung(rows, self.device.capture, allowance.is_half_used)


BODIES: WeakSet[DeviceBody] = WeakSet()
"""All bodies on devices; a new version of a file takes slots in one that it fits."""
_OPENING = threading.Lock()
"""Protects BODIES and the choice of slots: two files that load at once must not create the same body twice."""


class _TaskPort(NamedTuple):
    """The model that an input of the graph belongs to, and the model's own name of the input."""

    task: int
    port: str


class EncoderModel(DeviceModel):
    """The models of one file, served from slots of a ``DeviceBody``."""

    def __init__(self, device: Device, blueprint: Blueprint, encoder: Any, body: DeviceBody, slots: Any) -> None:
        """*encoder*: a ``BodyEncoder``, whose weights are in *body*. *slots*: of the file's models there, in order."""
        super().__init__(device, blueprint, (), DeviceWeights(device), ())
        self.tasks = ModelTasks(blueprint.tasks, any_lengths=True)
        self._slots, self._encoder = slots, encoder._replace(weights=None)
        self._body: DeviceBody | None = body
        self.remarks += (IN_PLACE,) if body.serves_file else ()
        body.serves_file = True
        self._port_of = {
            name: _TaskPort(number, port)
            for number, task in enumerate(blueprint.tasks)
            for port, name in task.inputs.items()
        }

    def evict_and_time(self) -> None:
        """Do nothing: the weights stay on the device, because other versions of the file may use them."""

    def close(self) -> None:
        """Give the slots back; the body's memory is freed when no file uses it."""
        if self._body is not None:
            self._body.slotted.give_back(self._slots)
            self._body = None
            gc.collect()
            if self._device.kind == "cuda":
                torch.cuda.empty_cache()

    def _advance(self, segment: int, parts: list[BatchPart], targets: Sequence[OutputTarget] = ()) -> StepOutput:
        """Answer the rows of *parts*, a batch; *segment*: the only one; *targets* are ignored."""
        rows_by_task = self._rows_by_task(parts)
        results, first_row, answers = self._answer_rows([row for rows in rows_by_task for row in rows]), 0, {}
        for task, rows, classes in zip(self.blueprint.tasks, rows_by_task, self._encoder.classes, strict=True):
            (name,) = task.outputs.values()  # encoders have one output
            answers[name] = results[first_row : first_row + len(rows), :classes]
            first_row += len(rows)
        return StepOutput({}, answers)

    def _rows_by_task(self, parts: list[BatchPart]) -> list[list[Any]]:
        """The requests (``TokenRow``) of each task, in the order of the parts."""
        rows_by_task: list[list[Any]] = [[] for _ in self.blueprint.tasks]
        for part in parts:
            by_task: dict[int, dict[str, Array]] = {}
            for name, value in part.values.items():
                array, (task, port) = as_array(value), self._port_of[name]
                by_task.setdefault(task, {})[port] = array if part.rows is None else array[list(part.rows)]
            for task, inputs in by_task.items():
                rows_by_task[task] += self._read(task, inputs)
        return rows_by_task

    def _read(self, task: int, inputs: Mapping[str, Array]) -> list[Any]:
        """The requests (``TokenRow``) in the inputs of *task*; ``UnfitInputs`` if they exceed the model's tables."""
        assert self._body is not None
        try:
            rows: list[Any] = body_serving.read_requests(self._encoder, self._slots[task], inputs)
            for row in rows:
                self._body.ladder.check(row)
        except WeftError as error:
            raise UnfitInputs(str(error)) from error  # the caller adds the name of the model
        return rows

    def _answer_rows(self, rows: Sequence[Any]) -> Array:
        """The answers to requests, in their order: [requests, classes]."""
        if not rows or self._body is None:
            return np.empty((0, max(self._encoder.classes)), np.float32)
        with self._body.lock:
            return self._device.copy_out(self._run_batches(self._body, rows))

    def _run_batches(self, body: DeviceBody, rows: Sequence[Any]) -> Tensor:
        """The answers to requests on the device: [requests, classes]."""
        results: list[Tensor] = []
        for batch in body.ladder.split(rows):
            if results:  # the next batch may overwrite the buffer
                results[-1] = self._device.clone(results[-1])
            rung = body.rung(body.ladder.rung_rows(batch), Allowance())
            rung.numbers.copy_(as_torch(self._device.copy_in([rung.layout.lay_out(batch)])), non_blocking=True)
            rung.run()
            results.append(_device_tensor(rung.answers[: len(batch)]))
        sources = [(result, None, len(result)) for result in results]  # None: all rows
        return results[0] if len(results) == 1 else self._device.concatenate_rows(sources)


def _device_tensor(tensor: Any) -> Tensor:
    """A tensor in the type of the device's backend: torch on CUDA, numpy on the CPU."""
    return tensor if tensor.is_cuda else tensor.numpy()


class BodyFile:
    """A file of encoders with one body while it is being prepared."""

    def __init__(
        self, device: Device, path: Path, options: LoadOptions, folder: Path, allowance: Allowance, *,
        learn: bool = True,
    ) -> None:  # fmt: skip
        """*folder*: where tuned tile shapes are stored. *learn*: whether a new body may be created for the file."""
        self._device, self._path, self._options = device, path, options
        self._folder, self._allowance, self._learn = folder, allowance, learn

    def built(self) -> DeviceModel:
        """Load the file into a body that fits, or a new one, and compare its answers with ONNX Runtime's.

        Raises ``NotLearned`` if it needs a new body and may not create one, ``Unfit`` if kernels cannot serve it.
        """
        try:
            if not (self._learn or BODIES):  # no body to join: do not even read the file
                raise NotLearned(f"{self._path}: is cut and captured before it is served")
            encoder = self._encoder()
            digests = body_serving.digests(encoder)
            if not (self._learn or any(body.slotted.shared == digests.shared for body in list(BODIES))):
                raise NotLearned(f"{self._path}: no loaded body fits it")
            # for one run only; planning the reuse of memory (thrifty) would take minutes for tensors of open sizes
            session = open_model(self._path, max(4, self._options.threads), thrifty=False)
            exits = named_exits(self._options, session)
            blueprint = with_tasks(whole_blueprint(session, self._path, None), session, exits)
            return self._load_compared(blueprint, session, encoder, digests)
        except (OutOfTime, Unfit, ModelError):
            raise
        except Exception as error:  # torch and the kernels' compiler raise types of their own
            if lacks_memory(error):  # the caller may make room and try again
                raise
            raise Unfit(first_line(error)) from error

    def _load_compared(self, blueprint: Blueprint, session: Any, encoder: Any, digests: Any) -> DeviceModel:
        """Load the file's models, and compare each with the file: in plain torch first, and then on the device.

        *session*: the file in ONNX Runtime. *encoder*: its ``BodyEncoder``. *digests*: its ``BodyDigests``.
        """
        expected, inputs = dict[str, Array](), dict[str, Array]()
        types = {spec.name: DATATYPES[spec.datatype] for spec in blueprint.inputs}

        def run_onnx(feeds: Sequence[Mapping[str, Array]]) -> list[Array]:
            """Run the whole file in ONNX Runtime on an example for each model; keep inputs and outputs for later."""
            for task, feed in zip(blueprint.tasks, feeds, strict=True):
                inputs_of_task = {task.inputs[port]: array for port, array in feed.items()}
                inputs.update({name: array.astype(types[name]) for name, array in inputs_of_task.items()})
            names = [spec.name for spec in blueprint.outputs]
            expected.update(zip(names, self._allowance.run(session, names, inputs), strict=True))
            return [expected[name] for task in blueprint.tasks for name in task.outputs.values()]

        if self._learn:  # fail before a new body is tuned and captured, which takes minutes
            body_serving.check(encoder, run_onnx)
        with self._reserved_slots(encoder, digests) as (body, slots):
            if not self._learn:  # without slots in a loaded body, there is nothing to compare
                body_serving.check(encoder, run_onnx)
            if body.ladder.shapes:  # tuned tiles, for later starts
                (self._folder / SHAPES).write_text(json.dumps(body.ladder.shapes))
            model = EncoderModel(self._device, self._add_measurements(blueprint, body), encoder, body, slots)
            deviation = difference(expected, model.run(inputs))
            if self._options.precision == FP32 and not deviation <= WRONG:  # also if it is NaN
                raise Unfit(f"its answers on the device differ by up to {deviation:.1e} of the largest output")
            remarks = tuple(filter(None, (FORM, remark(self._options.precision, deviation))))
            model.remarks = remarks + model.remarks
            model.blueprint = model.blueprint.model_copy(update={"remarks": remarks})
            return model

    def reopened(self, blueprint: Blueprint) -> DeviceModel:
        """Load a file that an earlier run has prepared."""
        encoder = self._encoder()
        with self._reserved_slots(encoder, body_serving.digests(encoder)) as (body, slots):
            return EncoderModel(self._device, blueprint, encoder, body, slots)

    def clear(self, blueprint: Blueprint) -> None:
        """Do nothing: no prepared files become superfluous."""

    def _encoder(self) -> Any:
        """The file's encoders with their weights; ``Unfit`` for a precision that kernels do not have."""
        if self._options.precision not in _TYPES:
            raise Unfit(f"it is computed in {' and '.join(_TYPES)}, not in {self._options.precision}")
        return body_serving.read_file(self._path, cuda=self._device.kind == "cuda")

    @contextmanager
    def _reserved_slots(self, encoder: Any, digests: Any) -> Iterator[tuple[DeviceBody, Any]]:
        """Reserve slots on the device for the models (see ``_take_slots``); they are given back if the block raises."""
        body, slots = self._take_slots(encoder, digests)
        try:
            yield body, slots
        except BaseException:
            body.slotted.give_back(slots)
            raise

    def _take_slots(self, encoder: Any, digests: Any) -> tuple[DeviceBody, Any]:
        """Take slots in a loaded body with equal shared weights and enough free slots, or else in a new one.

        *encoder*: the file's ``BodyEncoder``. *digests*: its ``BodyDigests``. Raises ``NotLearned`` if there must be no
        new body.
        """
        required = self._room, _TYPES[self._options.precision], digests.shared
        with _OPENING:
            # with shares of a GPU, several lanes would run the buffers of one body at once
            for body in () if self._options.shares else list(BODIES):
                matches = (body.ladder.room, body.slotted.dtype, body.slotted.shared) == required
                fits = matches and body.device is self._device
                if fits and (slots := body.slotted.take(encoder, digests.models)) is not None:
                    return body, slots
            if not self._learn:
                raise NotLearned(f"{self._path}: no loaded body has room for it")
            return self._create_body(encoder, digests)

    @property
    def _room(self) -> int:
        """Most requests of a batch."""
        return self._options.max_batch or LARGEST_UNASKED

    def _create_body(self, encoder: Any, digests: Any) -> tuple[DeviceBody, Any]:
        """Create a body on the device, take slots in it for the models, and build all its rungs."""
        shapes_file, free_bytes = self._folder / SHAPES, self._device.memory()[0]
        shapes = json.loads(shapes_file.read_text()) if shapes_file.exists() else {}
        dtype = _TYPES[self._options.precision]
        slotted = body_serving.SlottedBody(encoder, digests.shared, torch_device_name(self._device), dtype)
        slots = slotted.take(encoder, digests.models)
        body = DeviceBody(self._device, slotted, body_serving.BodyLadder(slotted.weights, self._room, shapes))
        for rows in body.ladder.sizes:
            body.rung(rows, self._allowance)
        self._device.finish()
        if self._device.kind == "cuda":
            torch.cuda.empty_cache()  # so that buffers of discarded candidates do not count as the body's memory
        counted_bytes = slotted.weights.nbytes + body.ladder.nbytes
        taken_bytes = free_bytes - self._device.memory()[0]  # other processes may have freed memory meanwhile
        body.memory_bytes = max(counted_bytes, taken_bytes)
        BODIES.add(body)
        return body, slots

    def _time_rungs(self, body: DeviceBody) -> dict[int, float]:
        """Rows of a rung -> seconds of a run."""
        rung_s = {}
        for rows in body.ladder.sizes:
            with body.lock:
                rung_s[rows] = self._device.timed(body.rung(rows, self._allowance).run)
        return rung_s

    def _add_measurements(self, blueprint: Blueprint, body: DeviceBody) -> Blueprint:
        """Add batch sizes, memory and times to the blueprint.

        Times are for requests of the usual length, each for another model.
        """
        tasks, room = blueprint.tasks, body.ladder.room
        length = max(body.ladder.granule, *(task.length or 1 for task in tasks))
        body.rung_s = body.rung_s or self._time_rungs(body)
        inputs, outputs = (tuple(spec.name for spec in side) for side in (blueprint.inputs, blueprint.outputs))
        segment = SegmentSpec(name="body", inputs=inputs, outputs=outputs, nodes=(0, -1), steady=True)  # all steps
        changes = {
            "segments": (segment,), "warm_shapes": usual_shapes(tasks, blueprint.inputs), "batchable": True,
            "max_batch": room, "any_shapes": True, "memory_bytes": body.memory_bytes,
            "times_s": {rows: (_batch_s(body.rung_s, rows * length),) for rows in range(1, room + 1)},
        }  # fmt: skip
        return blueprint.model_copy(update=changes)


def _batch_s(rung_s: Mapping[int, float], rows: int) -> float:
    """Seconds of a batch of *rows* token rows: of as many largest rungs as it fills, and of one for the other rows.

    *rung_s*: rows of a rung -> its seconds.
    """
    largest = max(rung_s)
    full_rungs, other_rows = divmod(rows, largest)
    last_s = rung_s[min(size for size in rung_s if size >= other_rows)] if other_rows else 0.0
    return full_rungs * rung_s[largest] + last_s
