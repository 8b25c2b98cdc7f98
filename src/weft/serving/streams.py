"""Requests of the same model and shapes share a stream: they can be batched, and cost the same.

Models that were stitched have one body, and requests for any of them share its streams.

What a stream's segments cost starts from what was measured when the model was loaded, and is learned from
what they take. A shape that was never seen starts from a cautious guess, on which nobody is refused.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from weft.base.errors import BadRequest
from weft.devices.costs.program import Program
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
from weft.serving.exit_rules import ExitRules, outputs_of
from weft.serving.gpu_sharing import UNMEASURED, GpuSharing
from weft.serving.statistics import Statistics
from weft.serving.wire import ModelSpec

STREAMS = 1024
"""Shapes of requests that are told apart at a time."""
UNKNOWN_NS = 1_000_000
"""What a segment nobody measured is taken to last until it was seen."""
UNNOTICED_NS = 20_000
"""Differences between expected and real segment times below this, or below a twentieth, teach nothing."""
LEARNING = 0.15
"""Weight of the last observation in a segment's expected time."""

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class ServedModel:
    """A loaded model in the scheduler's hands: what clients ask for, and its body, what lanes run.

    A model is its own body, unless it was stitched to others: then all of them have the same one, which is a model
    that nobody asks for.
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
        leaving: ExitRules | None = None,
        labels: Mapping[str, Labels] | None = None,
    ) -> None:
        self.name, self.version, self.loaded, self.leaving = name, version, loaded, leaving
        # read for every segment and every request: looked up once here
        self.timing, self.residency = loaded.timing, loaded.residency or ModelResidency()
        self.labels = labels or {}
        """Output -> the labels of its classes."""
        self.body = self
        self.task: TaskSpec | None = None
        self.batch_timeout_ns = round(batch_timeout_ms * 1e6)
        self.max_compute_ns = NO_DEADLINE if max_compute_s is None else round(max_compute_s * 1e9)
        """How long a request may be computed that has no strict deadline; of a body, for all of its models."""
        self.line = WaitingLine(queue_size)
        """Requests for it that no lane has begun."""
        self.statistics = Statistics()
        self.leases = 0
        """Requests and batches that need it, as a body; it is not closed before they have ended."""
        self.streams: dict[tuple[Shapes, bool], ServedStream] = {}
        warm = self.timing.warm_shapes
        self.warm_elements = sum(int(np.prod(shape)) for shape in warm.values()) if warm else 0

    def for_task(self, task: TaskSpec, *, queue_size: int = 256, leaving: ExitRules | None = None) -> ServedModel:
        """One of the models that have this body."""
        model = ServedModel(task.name, self.loaded, version=self.version, queue_size=queue_size, leaving=leaving)
        model.body, model.task = self, task
        model.labels = {name: self.labels[inner] for name, inner in task.outputs.items() if inner in self.labels}
        return model

    @cached_property
    def spec(self) -> ModelSpec:
        """What requests for it must look like: with names of its own, where it was stitched to others."""
        inputs, outputs = self.loaded.inputs, self.loaded.outputs
        if self.task:
            inputs, outputs = _renamed(inputs, self.task.inputs), _renamed(outputs, self.task.outputs)
        exits = self.leaving.names if self.leaving else ()
        return ModelSpec(self.name, self.version, inputs, outputs_of(outputs, exits[-1] if exits else None), exits[:-1])

    @property
    def memory_bytes(self) -> int:
        """What it holds; of a body that several models have, an equal part."""
        return self.residency.memory_bytes // (len(self.loaded.tasks.specs) if self.loaded.tasks else 1)

    def alike(self, rows: int, length: int | None) -> Shapes:
        """The shapes of all requests of so many rows of some length for the models of a stitched body."""
        shapes = self.timing.warm_shapes or {}
        if length is None:
            return tuple([(name, (rows, *shape[1:])) for name, shape in shapes.items()])
        free = {spec.name: spec.shape[1:] for spec in self.loaded.inputs}
        return tuple([(name, (rows, *[length if size < 0 else size for size in free[name]])) for name in shapes])

    @cached_property
    def _long(self) -> list[tuple[str, int]]:
        """The inputs of a task with their axes that are of any length."""
        names = self.task.inputs.values() if self.task and self.task.length else ()
        specs = [spec for spec in self.loaded.inputs if spec.name in names]
        return [(spec.name, at) for spec in specs for at, size in enumerate(spec.shape) if at and size < 0]

    def length(self, inputs: Mapping[str, Input]) -> int | None:
        """Of a request for a task, as the body calls its inputs; None where there are no lengths."""
        if not self._long:
            return None
        found = {inputs[name].shape[at] for name, at in self._long}
        if len(found) > 1 or 0 in found:
            raise BadRequest(f"{self.name}: its inputs must be of one length from 1 on, not {sorted(found)}")
        return int(found.pop())

    def stretched(self, inputs: Mapping[str, Input]) -> int | None:
        """The length of the requests that this one may be computed with: the next power of two, or its own.

        The usual one stands for all, where it makes no difference.
        """
        length = self.length(inputs)
        family = self.loaded.tasks
        if family and family.any_lengths and self.task is not None and self.task.length:
            return self.task.length
        if length is None or self.task is None or self.task.fill is None:
            return length
        return 1 << (length - 1).bit_length()

    def inward(self, inputs: dict[str, Input]) -> dict[str, Input]:
        """A request's inputs as the body calls them."""
        return {self.task.inputs[name]: each for name, each in inputs.items()} if self.task else inputs

    def outward(
        self, outputs: Mapping[str, Array], start: int, end: int, length: int | None = None
    ) -> dict[str, Array]:
        """The answer to a request for a task, from the rows of its body's outputs that are its own."""
        assert self.task is not None
        found = {name: outputs[inner][start:end] for name, inner in self.task.outputs.items()}
        if length is None or self.leaving:  # scores of classes, of any length
            return found
        free = {spec.name: [size < 0 for size in spec.shape] for spec in self.spec.outputs}
        return {
            name: each[tuple(slice(length if at and long else None) for at, long in enumerate(free[name]))]
            for name, each in found.items()
        }


@dataclass(eq=False)
class ServedStream:
    """Requests for one body that have the same shapes."""

    index: int
    model: ServedModel
    """The body."""
    shapes: Shapes
    alone: bool
    """Its requests do not share batches."""
    rows: int
    first_program: int
    batches: int
    """Most requests in a batch."""
    places: int
    """Programs that are its own, at least as many."""
    measured: bool
    """Whether its times were ever seen; a guess until then."""
    seen: int = 0
    """Batches computed."""
    on_lanes: int = 0
    """Segments that lanes were given, where those take some ahead."""
    sums: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """Requests in a batch -> of each segment: how many were computed, and their time."""


class ServedStreams:
    """Which streams there are, and what their segments are expected to take."""

    def __init__(
        self,
        source: Requests,
        programs: list[Program],
        remaining: list[tuple[int, ...]],
        sharing: GpuSharing | None = None,
    ) -> None:
        """programs, remaining: filled in here; what segments take, and what is left of a program from each on.

        sharing: is told of every program what it is like.
        """
        self._source, self.programs, self._sharing = source, programs, sharing
        self._remaining = remaining
        self._bodies: dict[ServedModel, int] = {}
        self._by_use: OrderedDict[int, ServedStream] = OrderedDict()
        """The streams by their numbers, the one used least recently first."""
        self._spare: list[ServedStream] = []

    def __len__(self) -> int:
        return len(self._by_use)

    def __getitem__(self, index: int) -> ServedStream:
        return self._by_use[index]

    def of(self, model: ServedModel, inputs: dict[str, Input], *, alone: bool = False) -> ServedStream:
        """The stream a request belongs to, opened if it is the first of its shapes."""
        shapes = tuple([(name, each.shape) for name, each in inputs.items()])
        if model.task:
            shapes = model.body.alike(_rows(model.name, shapes), model.stretched(inputs))
        model = model.body
        stream = model.streams.get((shapes, alone))
        if stream is None:
            self._close_old()
            stream = model.streams[shapes, alone] = self._open(model, shapes, alone)
            self._by_use[stream.index] = stream
        elif len(self._by_use) > STREAMS // 2:
            self._by_use.move_to_end(stream.index)
        return stream

    def expected_s(self, model: ServedModel) -> dict[str, list[float]]:
        """What segments of a model's most common shapes are expected to take now, by batch size."""
        stream = _commonest(model)
        if stream is None:
            return {}
        programs = self.programs[stream.first_program : stream.first_program + stream.batches]
        return {str(size * stream.rows): [t / 1e9 for t in p.compute] for size, p in enumerate(programs, 1)}

    def whole(self, model: ServedModel) -> int:
        """Ticks that a request of a model's most common shapes is expected to take; 0 before there was one."""
        stream = _commonest(model)
        return self.programs[stream.first_program].total_compute if stream else 0

    def mean_s(self, model: ServedModel) -> dict[str, list[float]]:
        """What they took on average, for the batch sizes that were computed."""
        stream = _commonest(model)
        return {
            str(size * stream.rows): [ns / count / 1e9 for count, ns in sums]
            for size, sums in (stream.sums.items() if stream else ())
            if stream and all(count for count, _ in sums)
        }

    def expected_ns(self, stream: int) -> int:
        """What a single request of a stream is expected to take."""
        return self._remaining[self[stream].first_program][0]

    # What segments take

    def _put(self, index: int, program: Program) -> None:
        """Keep the two lists alike: policies read both for every decision."""
        self.programs[index], self._remaining[index] = program, program.remaining

    def learn(self, stream: ServedStream, candidate: Candidate, took: int, between: int = 0) -> None:
        """A segment took so long; the first time a shape is seen replaces the guess.

        between: what passes from one segment to the next, where that is to be expected as well.
        """
        sums = stream.sums.get(candidate.size)
        if sums is None:
            sums = stream.sums[candidate.size] = [(0, 0)] * len(self.programs[candidate.program])
        count, total = sums[candidate.layer]
        sums[candidate.layer] = count + 1, total + took
        took += between
        if not stream.measured:
            for size in range(1, stream.batches + 1):
                self._expect(stream.first_program + size - 1, candidate.layer, took * size // candidate.size)
        elif abs(took - candidate.compute) > max(candidate.compute // 20, UNNOTICED_NS):
            seen = min(took, 3 * candidate.compute + UNNOTICED_NS)
            expected = round(candidate.compute + LEARNING * (seen - candidate.compute))
            self._expect(candidate.program, candidate.layer, expected)

    def expect_leaving(self, model: ServedModel) -> None:
        """Other shares of its samples leave at a model's exits than was thought."""
        assert model.leaving is not None
        for stream in model.streams.values():
            for index in range(stream.first_program, stream.first_program + stream.batches):
                self._put(index, replace(self.programs[index], exit_rates=model.leaving.shares.told))

    def doubt(self, stream: ServedStream) -> None:
        """A request was turned away on the word of our estimates, so nothing is learned from it: what was learned in
        a busy moment is forgotten bit by bit, or it would keep requests out for good."""
        for size in range(1, stream.batches + 1):
            index = stream.first_program + size - 1
            now, loaded = self.programs[index], _estimated(stream.model, stream.shapes, stream.rows, size)
            if stream.measured and now.total_compute > loaded.total_compute:
                compute = tuple((3 * a + min(a, b)) // 4 for a, b in zip(now.compute, loaded.compute, strict=True))
                self._put(index, replace(now, compute=compute))

    def _expect(self, index: int, layer: int, ticks: int) -> None:
        program = self.programs[index]
        compute = (*program.compute[:layer], max(1, ticks), *program.compute[layer + 1 :])
        self._put(index, replace(program, compute=compute))

    # Coming and going

    def _open(self, model: ServedModel, shapes: Shapes, alone: bool) -> ServedStream:
        batching, timing = model.loaded.batching, model.timing
        rows, batches = 1, 1
        if batching.batchable:
            rows = _rows(model.name, shapes)
            joins = not alone and (batching.any_shapes or _as_measured(timing, shapes))
            batches = max(1, batching.max_batch // max(1, rows)) if joins else 1
        programs = [_estimated(model, shapes, rows, size) for size in range(1, batches + 1)]
        measured = timing.warm_shapes is not None and _elements(shapes, rows) == model.warm_elements
        steered = model.leaving.steered if model.leaving else None
        fitting = [old for old in self._spare if old.places >= batches]
        if fitting:
            spare = min(fitting, key=lambda old: old.places)
            self._spare.remove(spare)
            first, places = spare.first_program, spare.places
            for index, program in enumerate(programs, first):
                self._put(index, program)
            stream = ServedStream(spare.index, model, shapes, alone, rows, first, batches, places, measured)
            self._source.open(_terms(stream), steered, stream=stream.index)
        else:
            stream = ServedStream(-1, model, shapes, alone, rows, len(self.programs), batches, batches, measured)
            self.programs += programs
            self._remaining += [program.remaining for program in programs]
            stream.index = self._source.open(_terms(stream), steered)
        if self._sharing:
            if model not in self._bodies:
                self._bodies[model] = self._sharing.number()
            self._sharing.put(stream.first_program, _likes(stream), self._bodies[model])
        return stream

    def _close_old(self) -> None:
        """Keep the number of shapes that are told apart bounded."""
        if len(self._by_use) < STREAMS:
            return
        for stream in list(self._by_use.values())[: max(1, STREAMS // 4)]:
            if self._source.queues[stream.index].idle and not stream.on_lanes:
                self._close(stream)

    def forget(self, model: ServedModel) -> None:
        """A model nobody needs leaves."""
        body = self._bodies.pop(model, None)
        if self._sharing and body is not None:
            self._sharing.forget(body)
        for stream in list(model.streams.values()):
            self._close(stream)

    def _close(self, stream: ServedStream) -> None:
        del self._by_use[stream.index], stream.model.streams[stream.shapes, stream.alone]
        self._spare.append(stream)


def _renamed(specs: Iterable[TensorSpec], names: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """The tensors of one task, as its model calls them."""
    found = {spec.name: spec for spec in specs}
    return tuple(found[inner]._replace(name=name) for name, inner in names.items())


def _as_measured(timing: SegmentTiming, shapes: Shapes) -> bool:
    """Whether the rows of a request have the shapes that the model was measured with."""
    warm = timing.warm_shapes or {}
    return all(shape[1:] == warm.get(name, shape)[1:] for name, shape in shapes)


def _commonest(model: ServedModel) -> ServedStream | None:
    return max(model.body.streams.values(), key=lambda each: each.seen, default=None)


def _terms(stream: ServedStream) -> Terms:
    return Terms(stream.first_program, NO_DEADLINE, stream.batches, stream.model.batch_timeout_ns, 1)


def _likes(stream: ServedStream) -> list[GpuLikeness]:
    """What a stream's programs are like, by the rows of their batches, as far as that was measured."""
    shares = stream.model.loaded.shares
    like = shares.like if shares and stream.measured else {}
    return [like.get(stream.rows * size, UNMEASURED) for size in range(1, stream.batches + 1)]


def _estimated(model: ServedModel, shapes: Shapes, rows: int, size: int) -> Program:
    """The segments at a batch size, from what was measured when the model was loaded.

    Of shapes that were not measured, larger ones are taken to be as quick as the measured ones, so that nobody is
    refused on a guess, and none to be so short that it would be computed on the event loop.
    """
    times = model.timing.times_at(max(1, rows * size))
    share = _elements(shapes, rows) / model.warm_elements if model.warm_elements else 0.0
    if not share:
        ticks = [UNKNOWN_NS] * len(times)
    elif share == 1:
        ticks = [max(1, round(time * 1e9)) for time in times]
    else:
        ticks = [max(INLINE_TICKS, round(time * 1e9 * min(share, 1.0))) for time in times]
    nothing = (0,) * len(ticks)
    program = Program(model.name, model.loaded.segments, nothing, tuple(ticks), nothing)
    leaving = model.leaving
    return replace(program, exits=leaving.layers, exit_rates=leaving.shares.told) if leaving else program


def _elements(shapes: Shapes, rows: int) -> float:
    """How many elements one row of the inputs has."""
    return sum(int(np.prod(shape)) for _, shape in shapes) / max(1, rows)


def _rows(model: str, shapes: Iterable[tuple[str, tuple[int, ...]]]) -> int:
    rows = {shape[0] for _, shape in shapes if shape}
    if len(rows) != 1:
        raise BadRequest(f"{model}: its inputs must have the same first dimension, not {sorted(rows)}")
    return int(rows.pop())
