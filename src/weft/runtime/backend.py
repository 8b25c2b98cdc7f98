"""The backend protocol: the one interface between the server and what runs models. Other packages implement it, too.

A ``Backend`` opens models: it cuts a file into segments and measures them. A ``DeviceLane`` runs one segment at a time
of any of them, in parallel with the other lanes. ``LoadedModel.start`` gives a lane a ``Step`` and returns at once; the
``StepEnd`` is passed to a callback, on a thread of the backend.

The values of a batch between two segments belong to the backend, in its own form and its own memory. Others only hand
such ``Values`` on: rows leave and batches are joined where the next step says so, and the answers for clients come back
as arrays with the end of a step. Times are those of the backend's clock, in nanoseconds.

The server reads only what is declared here; ``weft.runtime.defaults`` has base classes with the usual answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from weft.base.errors import ModelError, unknown_name
from weft.runtime.breaker import Breaker
from weft.runtime.client_memory import Lender
from weft.runtime.engines import ONNXRUNTIME, Engine
from weft.runtime.exits import KINDS, Kind
from weft.runtime.facets import Batching, ModelExits, ModelResidency, ModelShares, ModelTasks, SegmentTiming
from weft.runtime.isolated.limits import WorkerCounts
from weft.runtime.tensors import Array, TensorSpec

Values = Any
"""Some samples: before the first segment their inputs by name, as arrays or lent tensors; later values in a form of the
backend. They are freed with the last reference."""

Progress = Callable[[str], None]  # called with messages

RUN_OPTIONS = frozenset({"learn_s", "engine", "compile_s", "compile_first", "packages", "rests", "isolation"})
"""Options of opening and running a model, which change nothing of what is prepared and cached of it."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is cut, measured and batched when it is opened."""

    grain_s: float = 0.005
    """Wanted length of a segment at batch 1."""
    max_pieces: int = 64
    """Most segments of a model."""
    threads: int = 1
    """Threads that compute one segment."""
    max_batch: int | None = None
    """Largest batch; None: up to 8, as far as batching pays."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of inputs with free dimensions, at batch 1, to warm up and measure with."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Input -> the number that fills it in these runs, for inputs such as a sampling rate."""
    exits: tuple[str, ...] = ()
    """Outputs at which samples may leave, shallow to deep, the end last; empty: the exits that the file names.
    A single output is the end: no sample leaves early."""
    confidence: Kind = "logits"
    """What the exits return."""
    precision: str = "fp32"
    """What a device computes with: "fp32", as the file says, or "fp16" or "bf16", to which it is converted."""
    independent_rows: bool = False
    """Batch the model although an operator mixes rows; a file may state this in its metadata, too."""
    learn_s: float | None = None
    """Time limit for the runs with generated inputs that cut, measure and warm up the model; None: no limit."""
    engine: Engine = ONNXRUNTIME
    """What runs an ONNX file on a device; "auto": the faster engine."""
    compile_s: float = 600.0
    """Time limit of the compiler."""
    compile_first: bool = False
    """Whether to compile only for one row and the largest batch, if there is no compiled code yet, so that the model
    runs compiled soon; its ``timing.learned`` is then False."""
    packages: str | None = None
    """The folder with its compiled code, for the worker that runs it."""
    shares: bool = False
    """Whether the model is also captured and measured on parts of a device that can be cut."""
    rests: bool = False
    """Whether the model may be evicted from a device's memory when others need space."""
    isolation: str | None = None
    """Name of the group of workers that run the model; None: the process that opens it."""

    def model_options(self) -> dict[str, Any]:
        """The options that a prepared model depends on, by name."""
        return {name: value for name, value in asdict(self).items() if name not in RUN_OPTIONS}

    def __post_init__(self) -> None:
        if not self.grain_s > 0:
            raise ModelError(f"the grain must be more than 0 s, got {self.grain_s}")
        for name in ("max_pieces", "threads"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_batch is not None and self.max_batch < 1:
            raise ModelError(f"max_batch must be at least 1, got {self.max_batch}")
        if self.learn_s is not None and not self.learn_s > 0:
            raise ModelError(f"learn_s must be more than 0 s, got {self.learn_s}")
        if self.confidence not in KINDS:
            raise ModelError(unknown_name("kind of confidence", self.confidence, KINDS))
        check_once(self.exits)


def check_once(exits: Sequence[str]) -> None:
    """Raise ``ModelError`` if an exit is named twice."""
    for name in exits:
        if exits.count(name) > 1:
            raise ModelError(f"exit {name!r} is named twice; name each exit once, shallow to deep")


class BatchPart(NamedTuple):
    """Some samples of a batch, whose values are stored together."""

    values: Values
    rows: Sequence[int] | None = None
    """Indices of the rows that go on; None: all rows."""


class OutputTarget(NamedTuple):
    """Where the outputs of one request of a batch are to be written."""

    parts: Mapping[str, Any]
    """Output -> a part of a client's region: a ``LentPart``, in a worker what ``Borrowed.target`` returns."""
    rows: tuple[int, int] | None = None
    """The first of its rows in the batch, and the one behind the last; None: the request is the whole batch."""


class Step(NamedTuple):
    """One segment of one batch, or several in a row where the device has gates (``SegmentTiming.gated``).

    The rows of all parts, in their order, are computed as one batch in the first segment, and in every segment if the
    model is ``Batching.mergeable``; otherwise each part is computed by itself.
    """

    segment: int
    parts: Sequence[BatchPart]
    rows: int
    """Number of rows that go on, in all parts."""
    segments: int = 1
    """How many segments it covers, up to the next exit at most."""
    targets: Sequence[OutputTarget] = ()
    """Requests whose outputs the device may write into their clients' regions, after the last segment."""


class Written(NamedTuple):
    """What a step has written into regions of clients."""

    requests: tuple[int, ...]
    """Indices of the ``Step.targets`` that have all their outputs."""
    outputs: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]
    """Shape and type of outputs whose rows are all written, so that they are not among the answers."""


class StepOutput(NamedTuple):
    """Result of a segment for a batch, or for a part that was computed by itself."""

    values: Values
    """Values that the next segment begins with."""
    answers: dict[str, Array]
    """Answers for clients: the output of the exit that the segment ends with, or all outputs after the last segment."""
    written: Written | None = None
    """None if the device wrote nothing: ``Step.targets`` are an offer, which a backend need not accept."""


class StepEnd(NamedTuple):
    """The end of a step, and when it ran, in nanoseconds of the backend's clock."""

    began: int
    ended: int
    outputs: Sequence[StepOutput] = ()
    error: Exception | None = None
    """Why there are no outputs: ``UnfitInputs`` where the inputs are at fault, or the step was stopped."""
    computed: int | None = None
    """How many of its segments were computed, if a gate ended it early; *outputs* are those of the last of them, and
    empty if there is none. None: it was computed to its end."""


Ended = Callable[[StepEnd], None]
"""Callback for the end of a step."""


class StartedStep(Protocol):
    """A step that was started."""

    @property
    def onward(self) -> Sequence[StepOutput] | None:
        """Outputs of this step with which the next step of its batch can be started before this one has ended.

        None where its end must be awaited: its answers decide which samples go on, it is the last segment, or the
        backend does not support it.
        """
        ...

    @property
    def error(self) -> Exception | None:
        """Why the step could not be started, where that is known at once; its ``StepEnd`` has the error, too."""
        ...

    def stop(self) -> None:
        """End the step soon, with an error; no effect on a step that has ended.

        A step of a gated model ends at the next gate instead, without an error (``StepEnd.computed``).
        """
        ...


class DeviceLane(Protocol):
    """Runs one step of a backend at a time, in the order in which they were started.

    ``ended`` is called once for every step, when it has really ended. If a step fails, steps that were started with
    its ``onward`` outputs fail as well, with the same error.
    """

    @property
    def ahead(self) -> int:
        """How many steps the lane accepts while one runs; 0: it queues none."""
        ...

    @property
    def apart(self) -> bool:
        """Whether other lanes cannot read the lane's memory, so that a batch stays on the lane where it began."""
        ...

    @property
    def able(self) -> bool:
        """Whether the lane can compute now; while it cannot, other lanes get its steps."""
        ...

    def give_way(self) -> None:
        """Lower the priority of the running step, which takes too long; only for lanes that queue no steps.

        The lane gets no further steps, and is closed when the running step has ended.
        """
        ...

    def close(self, patience_s: float | None = None) -> bool:
        """Accept no more steps and wait up to *patience_s* (None: for ever) for the running one; False on a timeout."""
        ...


class LoadedModel(Protocol):
    """A model in a device's memory, cut and measured; its segments may run on several lanes at once.

    What only some models have is a facet (``weft.runtime.facets``), and None where that feature is off. The server
    reads ``timing`` and ``residency`` once, after loading: they must not be replaced later.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    segments: tuple[str, ...]  # their names, in order
    timing: SegmentTiming
    batching: Batching
    remarks: tuple[str, ...]
    borrows: bool
    """Whether inputs may be ``LentTensor``s of any length, which are read from the memory that the client shares, and
    steps may have ``targets`` there."""

    exits: ModelExits | None
    """Its early exits; None: all samples go to the end."""
    shares: ModelShares | None
    """How it runs on parts of a GPU; None: it has the whole device."""
    tasks: ModelTasks | None
    """The models that were stitched into it; None: it is one model."""

    @property
    def residency(self) -> ModelResidency | None:
        """Memory of the device that the model holds; None: its memory is not counted."""
        ...

    @property
    def breaker(self) -> Breaker | None:
        """The circuit breaker of a model that runs in a worker process; None: it runs in the server's process."""
        ...

    def prepare(self, rows: int) -> None:
        """Warm up for batches of *rows* rows before the first such batch arrives; may take long."""
        ...

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Run a segment on a lane of the same backend; *ended* is called once, and nothing is raised.

        here: run it on the calling thread, so that it has ended when this returns; only if the backend is ``inline``.
        """
        ...

    def close(self) -> None:
        """Free the model's memory; called when none of its steps run any more."""
        ...


class Backend(Protocol):
    """Runs models on one device, or on several of one kind."""

    name: str
    platform: str
    """The ``platform`` of model metadata, as Triton names them."""
    inline: bool
    """Whether it can run a step on the calling thread."""
    memory_bytes: int | None
    """Memory that all models may hold together; None where only the user knows."""
    device: str | None
    """The names of its devices, with commas between them; each device has one lane. None: the cores of the CPU."""
    labels: tuple[str, ...]
    """Its devices by the names of metrics, in the order of their lanes."""
    isolates: bool
    """Whether models can run in worker processes (``LoadOptions.isolation``)."""
    grain_s: float | None
    """The usual length of a segment on its devices; None: the default of a model's settings."""
    region_devices: frozenset[int]
    """The numbers of its devices whose memory clients may share (CUDA shared memory)."""
    default_engine: Engine
    """The engine of models whose settings name none."""

    @property
    def scratch_bytes(self) -> int:
        """Bytes that earlier runs left allocated; they are freed when they are not needed for a while."""
        ...

    @property
    def used_bytes(self) -> Mapping[str, int]:
        """Label of a device -> bytes in use in its memory; the value may be as old as the previous call."""
        ...

    @property
    def returns(self) -> Mapping[str, int]:
        """Returns of evicted models: label of a device -> how often a model was brought back to its memory."""
        ...

    def counts(self) -> WorkerCounts:
        """Deaths and restarts of worker processes."""
        ...

    def now(self) -> int:
        """The time of a monotonic clock, in nanoseconds."""
        ...

    def open(
        self,
        path: Path,
        options: LoadOptions,
        cache: Path | None = None,
        say: Progress | None = None,
        *,
        learn: bool = True,
    ) -> LoadedModel:
        """Load, cut and measure a model; called on any thread, for several models at once. ``ModelError`` if it fails.

        cache: the folder that keeps the result, so that the next start does not cut and measure again.
        say: called with messages about the progress.
        learn: False: open the file as fast as possible. A model in the cache is complete; any other file is opened
        whole and never run, and its ``timing.learned`` is False. Stitched files and models with exits are cut and
        measured all the same, as their answers depend on it.
        """
        ...

    def lane(self, index: int, *, pin: bool = False) -> DeviceLane:
        """Open lane number *index*; *pin*: bind it to a part of the device that no other lane uses, such as a core."""
        ...

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        """Write *data* at *offset* of a client's region of device memory, and wait for the end; called on any thread.

        ``BadRequest`` where that is impossible.
        """
        ...

    def close(self) -> None:
        """Free all resources, after models and lanes were closed; models that are still being opened are abandoned."""
        ...
