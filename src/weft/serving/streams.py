"""Served models and their streams: requests of the same model and shapes, which can be batched and cost the same.

Stitched models have one body, and requests for any of them share its streams.

The scheduler knows a stream by its programs, one per batch size, with the expected time of each segment in ticks
(nanoseconds). These start from the times that were measured when the model was loaded, and are learned from the actual
ones. A new shape starts from a low estimate, on which admission refuses no request.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from weft.base.errors import BadRequest
from weft.devices.costs.program import Program
from weft.devices.host import Gates
from weft.devices.shares import GpuLikeness
from weft.engine.policies.base import NO_DEADLINE, Candidate
from weft.engine.requests import Requests
from weft.engine.tickets import Terms, WaitingLine
from weft.runtime.backend import LoadedModel
from weft.runtime.client_memory import Input
from weft.runtime.facets import ModelResidency, SegmentTiming
from weft.runtime.lanes import INLINE_TICKS
from weft.runtime.stitched import TaskSpec
from weft.runtime.tensors import Array, TensorSpec
from weft.serving.classification import Labels
from weft.serving.exit_rules import ExitRules, requestable_outputs
from weft.serving.gpu_sharing import UNMEASURED, GpuSharing
from weft.serving.statistics import Statistics
from weft.serving.wire import ModelSpec

STREAMS = 1024
"""Streams that are open at a time; beyond, idle ones used least recently are evicted. Bounds what clients can cause."""
UNKNOWN_NS = 1_000_000
"""Assumed duration of a segment without any measurement (1 ms)."""
UNNOTICED_NS = 20_000
"""Differences between expected and actual segment times below this, or below 5 %, are noise and are not learned:
every change makes the policy compute again."""
LEARNING = 0.15
"""Weight of an observation in the moving average of a segment's time: larger follows noise, smaller adapts late."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]
"""(input, shape) of all inputs of a request."""


class ServedModel:
    """A loaded model as it is served: the model that clients request, and its body, which lanes run.

    A model is its own body, unless it is stitched with others: then all of them share one body, which is a ServedModel
    that clients cannot request.
    """

    def __init__(
        self,
        name: str,
        loaded: LoadedModel,
        *,
        version: str = "",
        queue_size: int = 256,
        batch_timeout_ms: float = 0.0,
        max_compute_s: float | None = None,
        exit_rules: ExitRules | None = None,
        labels: Mapping[str, Labels] | None = None,
    ) -> None:
        """queue_size: limit on waiting requests. batch_timeout_ms: how long the first request of a batch waits.

        max_compute_s: limit on the computing time of a request, None: no limit. exit_rules: None without early exits.
        """
        self.name, self.version, self.loaded, self.exit_rules = name, version, loaded, exit_rules
        # read for every segment and every request: looked up once here
        self.timing, self.residency = loaded.timing, loaded.residency or ModelResidency()
        self.labels = labels or {}
        """Output -> the labels of its classes."""
        self.body = self
        self.task: TaskSpec | None = None  # which of the models of a stitched body this is
        self.batch_timeout_ns = round(batch_timeout_ms * 1e6)
        self.max_compute_ns = NO_DEADLINE if max_compute_s is None else round(max_compute_s * 1e9)
        """Limit on the computing time of a request without a strict deadline; of a body, for all of its models."""
        self.line = WaitingLine(queue_size)
        """Requests for it that no lane has begun."""
        self.statistics = Statistics()
        self.leases = 0
        """Requests and batches that use it as a body; it is not closed before they have ended."""
        self.streams: dict[tuple[Shapes, bool], ServedStream] = {}  # of a body; key: shapes, and ``ServedStream.alone``
        warm = self.timing.warm_shapes
        # elements of all inputs at the shapes that the model was measured with; 0 if it was not measured
        self.warm_elements = sum(int(np.prod(shape)) for shape in warm.values()) if warm else 0

    def for_task(self, task: TaskSpec, *, queue_size: int = 256, exit_rules: ExitRules | None = None) -> ServedModel:
        """Create one of the models that share this body; *task*: its name, and its names for inputs and outputs."""
        model = ServedModel(task.name, self.loaded, version=self.version, queue_size=queue_size, exit_rules=exit_rules)
        model.body, model.task = self, task
        outputs = task.outputs.items()  # name for clients, name in the body
        model.labels = {name: self.labels[inner] for name, inner in outputs if inner in self.labels}
        return model

    @cached_property
    def spec(self) -> ModelSpec:
        """The inputs and outputs of requests, under the names of the task if the model is stitched."""
        inputs, outputs = self.loaded.inputs, self.loaded.outputs
        if self.task:
            inputs, outputs = _rename_tensors(inputs, self.task.inputs), _rename_tensors(outputs, self.task.outputs)
        exits = self.exit_rules.names if self.exit_rules else ()
        outputs = requestable_outputs(outputs, exits[-1] if exits else None)
        return ModelSpec(self.name, self.version, inputs, outputs, exits[:-1])

    @property
    def memory_bytes(self) -> int:
        """Memory of the model; an equal part of a body that several models share."""
        return self.residency.memory_bytes // (len(self.loaded.tasks.specs) if self.loaded.tasks else 1)

    def body_shapes(self, rows: int, length: int | None) -> Shapes:
        """Return the input shapes of a stitched body; *length*: of the free axes, None if all shapes are fixed."""
        shapes = self.timing.warm_shapes or {}
        if length is None:
            return tuple([(name, (rows, *shape[1:])) for name, shape in shapes.items()])
        row_shapes = {spec.name: spec.shape[1:] for spec in self.loaded.inputs}
        return tuple([(name, (rows, *[length if size < 0 else size for size in row_shapes[name]])) for name in shapes])

    @cached_property
    def _free_axes(self) -> list[tuple[str, int]]:
        """(input of the body, axis) of all free axes of the task's inputs, except the rows."""
        names = self.task.inputs.values() if self.task and self.task.length else ()
        specs = [spec for spec in self.loaded.inputs if spec.name in names]
        return [(spec.name, axis) for spec in specs for axis, size in enumerate(spec.shape) if axis and size < 0]

    def length(self, inputs: Mapping[str, Input]) -> int | None:
        """Return the length of the free axes (such as tokens) in a request; None without free axes.

        inputs: by their names in the body. BadRequest if their lengths differ or are 0.
        """
        if not self._free_axes:
            return None
        lengths = {inputs[name].shape[axis] for name, axis in self._free_axes}
        if len(lengths) > 1 or 0 in lengths:
            raise BadRequest(f"{self.name}: its inputs must be of one length from 1 on, not {sorted(lengths)}")
        return int(lengths.pop())

    def padded_length(self, inputs: Mapping[str, Input]) -> int | None:
        """Return the length that decides the stream of a request: its own, or the one to which it is padded.

        Padding is to the next power of two, if the task has a padding value (``fill``). If requests of all lengths can
        share a batch, the length is the same for all of them. None without free axes.
        """
        length = self.length(inputs)
        tasks = self.loaded.tasks
        if tasks and tasks.any_lengths and self.task is not None and self.task.length:
            return self.task.length
        if length is None or self.task is None or self.task.fill is None:
            return length
        return 1 << (length - 1).bit_length()

    def to_body_inputs(self, inputs: dict[str, Input]) -> dict[str, Input]:
        """Rename a request's inputs to the names they have in the body."""
        return {self.task.inputs[name]: value for name, value in inputs.items()} if self.task else inputs

    def from_body_outputs(
        self, outputs: Mapping[str, Array], start: int, end: int, length: int | None = None
    ) -> dict[str, Array]:
        """Return a task's outputs for one request, from the outputs of the body.

        start, end: the rows of the request. length: of the request, to cut off padding; None without free axes.
        """
        assert self.task is not None
        task_outputs = {name: outputs[inner][start:end] for name, inner in self.task.outputs.items()}
        if length is None or self.exit_rules:  # outputs of exits are scores of classes, without a free axis
            return task_outputs
        is_free = {spec.name: [size < 0 for size in spec.shape] for spec in self.spec.outputs}
        return {  # axis 0 has the rows
            name: value[tuple(slice(length if axis and free else None) for axis, free in enumerate(is_free[name]))]
            for name, value in task_outputs.items()
        }


@dataclass(eq=False)
class ServedStream:
    """Requests for one body that have the same shapes."""

    index: int
    """Its number among the engine's queues."""
    model: ServedModel
    """The body."""
    shapes: Shapes
    alone: bool
    """Whether each of its requests runs in a batch of its own (a retry)."""
    rows: int
    """Rows of each request: the first dimension of its inputs."""
    first_program: int
    """Position of the program for a batch of one request; larger batches follow."""
    max_batch: int
    """Most requests in a batch."""
    reserved_programs: int
    """Programs that the stream owns: at least ``max_batch``; more if it took over those of a closed stream."""
    measured: bool
    """Whether its times were ever observed; otherwise they are estimates."""
    computed_batches: int = 0
    segments_on_lanes: int = 0
    """Segments that were submitted to lanes that run ahead, and have not ended."""
    observed: dict[int, dict[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    """Requests in a batch -> the first segment of a step and the number of its segments -> how often they were
    computed, and the sum of their ticks."""


class ServedStreams:
    """The open streams, and the expected times of their segments."""

    def __init__(
        self,
        source: Requests,
        programs: list[Program],
        remaining: list[tuple[int, ...]],
        sharing: GpuSharing | None = None,
    ) -> None:
        """source: the engine's queues. programs, remaining: lists that are filled here and read by the policy.

        remaining: for each program, the expected ticks from the start of each segment to the end. sharing: gets the
        sensitivity of every program to shares of a GPU.
        """
        self._source, self.programs, self._sharing = source, programs, sharing
        self._remaining = remaining
        self._bodies: dict[ServedModel, int] = {}
        """Body -> its number in ``sharing``."""
        self._by_use: OrderedDict[int, ServedStream] = OrderedDict()
        """The streams by their numbers, the one used least recently first."""
        self._closed: list[ServedStream] = []
        """Closed streams, whose numbers and programs new streams take over."""

    def __len__(self) -> int:
        return len(self._by_use)

    def __getitem__(self, index: int) -> ServedStream:
        return self._by_use[index]

    def stream_for(self, model: ServedModel, inputs: dict[str, Input], *, alone: bool = False) -> ServedStream:
        """Return the stream of a request, which is opened by the first request of its shapes.

        alone: the stream for requests that run in a batch of their own. BadRequest if the shapes have no common rows.
        """
        shapes = tuple([(name, value.shape) for name, value in inputs.items()])
        if model.task:
            shapes = model.body.body_shapes(_common_rows(model.name, shapes), model.padded_length(inputs))
        model = model.body
        stream = model.streams.get((shapes, alone))
        if stream is None:
            self._close_old()
            stream = model.streams[shapes, alone] = self._open_stream(model, shapes, alone)
            self._by_use[stream.index] = stream
        elif len(self._by_use) > STREAMS // 2:  # before, no eviction is near, and the order does not matter
            self._by_use.move_to_end(stream.index)
        return stream

    def expected_s(self, model: ServedModel) -> dict[str, list[float]]:
        """Return the expected segment times for a model's most common shapes, by batch size in rows."""
        stream = _most_used_stream(model)
        if stream is None:
            return {}
        programs = self.programs[stream.first_program : stream.first_program + stream.max_batch]
        return {
            str(size * stream.rows): [ticks / 1e9 for ticks in program.compute]
            for size, program in enumerate(programs, start=1)
        }

    def typical_request_ns(self, model: ServedModel) -> int:
        """Return the expected time of a request of a model's most common shapes; 0 before the first request."""
        stream = _most_used_stream(model)
        return self.programs[stream.first_program].total_compute if stream else 0

    def mean_s(self, model: ServedModel) -> dict[str, list[float]]:
        """Return the mean segment times, by batch size in rows, for the sizes of which all segments were computed."""
        stream = _most_used_stream(model)
        if stream is None:
            return {}
        means_s = {
            str(size * stream.rows): _mean_s(self.programs[stream.first_program + size - 1], steps)
            for size, steps in stream.observed.items()
        }
        return {rows: segments_s for rows, segments_s in means_s.items() if segments_s}

    def expected_ns(self, stream: int) -> int:
        """Return the expected time of a single request of a stream."""
        return self._remaining[self[stream].first_program][0]

    # Segment times

    def _set_program(self, index: int, program: Program) -> None:
        """Replace the program *index* in both lists that the policy reads."""
        self.programs[index], self._remaining[index] = program, program.remaining

    def learn(
        self, stream: ServedStream, candidate: Candidate, ticks: int, gap_ticks: int = 0, *, layers: int | None = None
    ) -> None:
        """Learn the time of a segment from an observation; the first one of a shape replaces the estimate.

        candidate: the segment and its batch, as the policy saw it. ticks: its observed time. gap_ticks: the gap to the
        next segment, if the expected times include gaps. layers: the number of segments from this one on to which the
        time belongs, where the device has gates; it is divided among them as expected. None: one.
        """
        program, first = self.programs[candidate.program], candidate.layer
        compute = (candidate.compute,) if layers is None else program.compute[first : first + layers]
        expected, steps = sum(compute), stream.observed.setdefault(candidate.size, {})
        count, total = steps.get((first, len(compute)), (0, 0))
        steps[first, len(compute)] = count + 1, total + ticks
        ticks += gap_ticks
        if not stream.measured:
            for size in range(1, stream.max_batch + 1):  # assume that the time is proportional to the batch size
                scaled = [ticks * size * part // (expected * candidate.size) for part in compute]
                self._set_segment_ticks(stream.first_program + size - 1, first, scaled)
        elif abs(ticks - expected) > max(expected // 20, UNNOTICED_NS):
            bounded = min(ticks, 3 * expected + UNNOTICED_NS)  # an outlier must not dominate the average
            learned = round(expected + LEARNING * (bounded - expected))
            self._set_segment_ticks(candidate.program, first, [learned * part // expected for part in compute])

    def update_exit_rates(self, model: ServedModel) -> None:
        """Pass the observed exit rates of a model on to its programs."""
        assert model.exit_rules is not None
        for stream in model.streams.values():
            for index in range(stream.first_program, stream.first_program + stream.max_batch):
                self._set_program(index, replace(self.programs[index], exit_rates=model.exit_rules.shares.published))

    def relax_estimates(self, stream: ServedStream) -> None:
        """Lower the expected times of a stream towards those measured at load, after they made admission refuse.

        A refused request is not computed, so nothing can be learned from it: times that were learned in a busy moment
        would otherwise keep requests out for ever.
        """
        for size in range(1, stream.max_batch + 1):
            index = stream.first_program + size - 1
            learned, at_load = self.programs[index], _estimate_program(stream.model, stream.shapes, stream.rows, size)
            if stream.measured and learned.total_compute > at_load.total_compute:
                pairs = zip(learned.compute, at_load.compute, strict=True)
                # a quarter of the difference, so that one refusal does not undo what was learned
                compute = tuple((3 * ticks + min(ticks, ticks_at_load)) // 4 for ticks, ticks_at_load in pairs)
                self._set_program(index, replace(learned, compute=compute))

    def _set_segment_ticks(self, index: int, first: int, ticks: Sequence[int]) -> None:
        """Set the expected times of the segments of the program *index* from number *first* on."""
        program = self.programs[index]
        new_ticks = [max(1, expected) for expected in ticks]
        compute = (*program.compute[:first], *new_ticks, *program.compute[first + len(ticks) :])
        self._set_program(index, replace(program, compute=compute))

    # Opening and closing

    def _open_stream(self, model: ServedModel, shapes: Shapes, alone: bool) -> ServedStream:
        """Open a stream with a program per batch size, in the place of a closed stream if one has enough programs."""
        batching, timing = model.loaded.batching, model.timing
        rows, max_batch = 1, 1
        if batching.batchable:
            rows = _common_rows(model.name, shapes)
            can_join = not alone and (batching.any_shapes or _has_measured_shapes(timing, shapes))
            max_batch = max(1, batching.max_batch // max(1, rows)) if can_join else 1
        programs = [_estimate_program(model, shapes, rows, size) for size in range(1, max_batch + 1)]
        measured = timing.warm_shapes is not None and _elements(shapes, rows) == model.warm_elements
        steered = model.exit_rules.steered if model.exit_rules else None  # lets the engine lower the exit threshold
        reusable = [old for old in self._closed if old.reserved_programs >= max_batch]
        if reusable:
            closed = min(reusable, key=lambda old: old.reserved_programs)
            self._closed.remove(closed)
            first, reserved = closed.first_program, closed.reserved_programs
            for index, program in enumerate(programs, first):
                self._set_program(index, program)
            stream = ServedStream(closed.index, model, shapes, alone, rows, first, max_batch, reserved, measured)
            self._source.open(_terms(stream), steered, stream=stream.index)
        else:
            first, reserved = len(self.programs), max_batch
            stream = ServedStream(-1, model, shapes, alone, rows, first, max_batch, reserved, measured)
            self.programs += programs
            self._remaining += [program.remaining for program in programs]
            stream.index = self._source.open(_terms(stream), steered)  # a new number, in place of -1
        if self._sharing:
            if model not in self._bodies:
                self._bodies[model] = self._sharing.next_number()
            self._sharing.put(stream.first_program, _sensitivities(stream), self._bodies[model])
        return stream

    def _close_old(self) -> None:
        """Evict idle streams that were used least recently, if there are too many."""
        if len(self._by_use) < STREAMS:
            return
        for stream in list(self._by_use.values())[: max(1, STREAMS // 4)]:  # many at once, so that this is rare
            if self._source.queues[stream.index].idle and not stream.segments_on_lanes:
                self._close(stream)

    def forget(self, model: ServedModel) -> None:
        """Close the streams of a body that is being closed."""
        body = self._bodies.pop(model, None)
        if self._sharing and body is not None:
            self._sharing.forget(body)
        for stream in list(model.streams.values()):
            self._close(stream)

    def _close(self, stream: ServedStream) -> None:
        """Close a stream; its number and programs are kept for another one."""
        del self._by_use[stream.index], stream.model.streams[stream.shapes, stream.alone]
        self._closed.append(stream)


def _mean_s(program: Program, steps: Mapping[tuple[int, int], tuple[int, int]]) -> list[float]:
    """Return the mean time of each segment, from ``ServedStream.observed``; empty if one was not computed."""
    counts, sums = [0] * len(program), [0.0] * len(program)
    for (first, layers), (count, ticks) in steps.items():
        expected = program.compute[first : first + layers]
        for layer, part in enumerate(expected, first):  # only the time of the whole step is known
            counts[layer] += count
            sums[layer] += ticks * part / sum(expected)
    return [ns / count / 1e9 for ns, count in zip(sums, counts, strict=True)] if all(counts) else []


def _rename_tensors(specs: Iterable[TensorSpec], names: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """Return the tensors of one task under the task's names."""
    by_name = {spec.name: spec for spec in specs}
    return tuple(by_name[inner]._replace(name=name) for name, inner in names.items())


def _has_measured_shapes(timing: SegmentTiming, shapes: Shapes) -> bool:
    """Tell whether a request has the shapes that the model was measured with, except for the number of rows."""
    warm = timing.warm_shapes or {}
    return all(shape[1:] == warm.get(name, shape)[1:] for name, shape in shapes)


def _most_used_stream(model: ServedModel) -> ServedStream | None:
    """Return the stream of a model's body with the most batches; None before the first request."""
    return max(model.body.streams.values(), key=lambda stream: stream.computed_batches, default=None)


def _terms(stream: ServedStream) -> Terms:
    """Return the engine's terms of a stream; without deadline and priority, because requests have their own."""
    return Terms(
        programs=stream.first_program,
        deadline=NO_DEADLINE,
        max_batch=stream.max_batch,
        timeout=stream.model.batch_timeout_ns,
        priority=1,
    )


def _sensitivities(stream: ServedStream) -> list[GpuLikeness]:
    """Return the sensitivity to shares of a GPU of each of a stream's programs, as far as it was measured."""
    shares = stream.model.loaded.shares
    by_rows = shares.like if shares and stream.measured else {}
    return [by_rows.get(stream.rows * size, UNMEASURED) for size in range(1, stream.max_batch + 1)]


def _estimate_program(model: ServedModel, shapes: Shapes, rows: int, size: int) -> Program:
    """Estimate the segment times of a batch of *size* requests from the times measured when the model was loaded.

    rows: of one request. Shapes larger than the measured one are assumed to take the same time, so that admission
    refuses no request on a guess. Shapes that were not measured never count as short enough for the event loop.
    """
    times = model.timing.times_at(max(1, rows * size))
    size_ratio = _elements(shapes, rows) / model.warm_elements if model.warm_elements else 0.0
    if not size_ratio:
        ticks = [UNKNOWN_NS] * len(times)
    elif size_ratio == 1:
        ticks = [max(1, round(time * 1e9)) for time in times]
    else:
        ticks = [max(INLINE_TICKS, round(time * 1e9 * min(size_ratio, 1.0))) for time in times]
    zeros = (0,) * len(ticks)  # segments have no ticks for fetching weights, and no bytes of weights
    program = Program(model.name, model.loaded.segments, zeros, compute=tuple(ticks), weight_bytes=zeros)
    if model.timing.gated:
        program = program.with_gates(model.timing.gates or Gates())
    exit_rules = model.exit_rules
    return replace(program, exits=exit_rules.layers, exit_rates=exit_rules.shares.published) if exit_rules else program


def _elements(shapes: Shapes, rows: int) -> float:
    """Return the number of elements of one row of all inputs."""
    return sum(int(np.prod(shape)) for _, shape in shapes) / max(1, rows)


def _common_rows(model: str, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    """Return the first dimension that all inputs of a request have; BadRequest if they differ."""
    rows = {shape[0] for _, shape in shapes if shape}
    if len(rows) != 1:
        raise BadRequest(f"{model}: its inputs must have the same first dimension, not {sorted(rows)}")
    return int(rows.pop())
