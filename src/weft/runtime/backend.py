"""What runs models: the one protocol between the server and a device.

A ``Backend`` opens models: it cuts a file into segments and measures them. A ``DeviceLane`` runs one segment at a time
of any of them, beside the other lanes. ``LoadedModel.start`` gives a lane a ``Step``, returns at once, and the
``StepEnd`` comes as an event, on whatever thread the backend has for it.

What a batch holds between two segments is the backend's affair, in its own form and its own memory. All that others do
with such ``Values`` is to hand them on: rows leave and batches are joined where the next step says so, and what clients
are told comes back as arrays with the end of a step. Times are those of the backend's clock, in nanoseconds.

The server reads nothing of a backend but what is declared here; ``weft.runtime.defaults`` has what most of them answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from weft.base.errors import ModelError, unknown_name
from weft.devices.host import GpuCuts
from weft.devices.shares import GpuLikeness
from weft.runtime.breaker import Breaker
from weft.runtime.exits import KINDS, ExitSpec, Kind
from weft.runtime.isolated.limits import WorkerCounts
from weft.runtime.lent import Lender
from weft.runtime.stitched import TaskSpec
from weft.runtime.tensors import Array, TensorSpec

Values = Any
"""Some samples: their inputs by name, as arrays or lent, before the first segment, and later what the backend made of
them. They are freed when nobody refers to them any more."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is to be cut, measured and batched when it is opened."""

    grain_s: float = 0.005
    """Wanted length of a segment at batch 1."""
    max_pieces: int = 64
    threads: int = 1
    """How many work on one segment."""
    max_batch: int | None = None
    """None: up to 8, as far as batching pays."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of inputs with free dimensions, at batch 1, to warm up and measure with."""
    values: Mapping[str, float] = field(default_factory=dict)
    """Inputs that must hold a certain number then, such as a sampling rate."""
    exits: tuple[str, ...] = ()
    """Outputs at which samples may leave, shallow to deep, the end last; where none are named, those the file names.
    One alone is the end: nobody leaves early."""
    confidence: Kind = "logits"
    """What the exits give."""
    precision: str = "fp32"
    """What a device computes with: "fp32", as the file says, or "fp16" or "bf16", to which it is converted."""
    independent_rows: bool = False
    """Batched although an operator looks across rows; so is a file that says so."""
    learn_s: float | None = None
    """How long it may be run with made-up inputs to cut, measure and warm it up; None: as long as it takes."""
    shares: bool = False
    """Whether it is also captured and measured on parts of a device, where that can be cut."""
    rests: bool = False
    """Whether it may leave a device's memory when others need that. Not a part of the model."""
    isolation: str | None = None
    """The workers that run it, by the name of their group; None: the process that opens it. Not a part of the model."""

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
    """Refuse exits of which one is named twice."""
    for name in exits:
        if exits.count(name) > 1:
            raise ModelError(f"exit {name!r} is named twice; name each exit once, shallow to deep")


class BatchPart(NamedTuple):
    """Some samples of a batch."""

    values: Values
    rows: Sequence[int] | None = None
    """Those that go on, if not all do."""


class Step(NamedTuple):
    """One segment of one batch.

    The parts are computed as one batch, their rows in this order, in the first segment and where batches are
    ``mergeable``; elsewhere each is computed by itself.
    """

    segment: int
    parts: Sequence[BatchPart]
    rows: int
    """How many rows go on, in all parts."""


class StepOutput(NamedTuple):
    """What became of a batch, or of a part that was computed by itself."""

    values: Values
    """What the next segment begins with."""
    answers: dict[str, Array]
    """What clients are told: what the exit gives that the segment ends with, and all outputs after the last."""


class StepEnd(NamedTuple):
    """The end of a step, and when it ran."""

    began: int
    ended: int
    made: Sequence[StepOutput] = ()
    error: Exception | None = None
    """Why there is nothing: ``UnfitInputs`` where the inputs are at fault, or that it was told to stop."""


Ended = Callable[[StepEnd], None]


class StartedStep(Protocol):
    """A step that was started."""

    @property
    def onward(self) -> Sequence[StepOutput] | None:
        """What the next step can be started with before this one has ended.

        None where its end must be waited for: its answers decide who goes on, it is the last segment, or the backend
        cannot.
        """
        ...

    @property
    def error(self) -> Exception | None:
        """Why it was not started, where that is known at once; its end tells it, too."""
        ...

    def stop(self) -> None:
        """Have it end soon, with an error; one that has ended stays as it is."""
        ...


class DeviceLane(Protocol):
    """Where a backend runs one step at a time, in the order in which they were started.

    ``ended`` is called once for every step, when it has really ended. Where a step fails, those that were started on
    what it was to make fail as well, with the same error.
    """

    @property
    def ahead(self) -> int:
        """How many steps it takes besides the one that it runs."""
        ...

    @property
    def apart(self) -> bool:
        """Whether what steps leave lies in memory that other lanes do not have: a batch stays where it began."""
        ...

    @property
    def able(self) -> bool:
        """Whether it can compute now; as long as it cannot, other lanes are given what it would be."""
        ...

    def give_way(self) -> None:
        """Let others go first with what runs, which takes too long; asked for where no steps are taken ahead.

        It is given nothing more, and closed when that has ended.
        """
        ...

    def close(self, patience_s: float | None = None) -> bool:
        """Finish what runs, and take nothing more; False if it has not ended in time."""
        ...


class LoadedModel(Protocol):
    """A model in a device's memory, cut and measured; its segments may run on several lanes at once."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    segments: tuple[str, ...]
    steady: tuple[bool, ...]
    """Whether each segment takes as long as it did before, whatever its inputs hold."""
    warm_shapes: Mapping[str, tuple[int, ...]] | None
    """The shapes of the inputs at batch 1, as it was measured; None where it was not."""
    times_s: Mapping[int, tuple[float, ...]]
    """Rows of a batch -> seconds of each segment, as measured."""
    like: Mapping[int, GpuLikeness]
    """Rows of a batch -> what it is like on shares of a device, where that was measured."""
    batchable: bool
    max_batch: int
    any_shapes: bool
    """Whether samples of other shapes than the measured ones may be computed together, too."""
    any_lengths: bool
    """Whether rows of tasks that take any length are computed together whatever theirs are, and none is filled up."""
    exits: tuple[ExitSpec, ...]
    """Where samples may leave, shallow to deep, the end last; none where all go to the end."""
    confidence: Kind
    """What its exits give."""
    mergeable: bool
    """Whether batches can be shrunk and joined at every cut."""
    tasks: tuple[TaskSpec, ...]
    """The models that were stitched into it; none of an ordinary model."""
    memory_bytes: int
    """How much of the device's memory it always holds."""
    moving_bytes: int
    """How much more it needs there while it is computed, and others may have otherwise."""
    remarks: tuple[str, ...]
    borrows: bool
    """Whether inputs of any length may be ``LentTensor``s, which it takes from where they lie."""
    learned: bool
    """Whether it was cut, measured and warmed up, as far as it can be; False: it is served whole, as it was opened."""

    @property
    def foreseen(self) -> Sequence[bool]:
        """Whether each segment takes as long as is expected: ``steady``, also where it never runs in the server."""
        ...

    @property
    def cuts(self) -> GpuCuts | None:
        """How its device can be cut into shares, where the options asked for ``shares`` and it can tell."""
        ...

    @property
    def breaker(self) -> Breaker | None:
        """The circuit breaker of a model whose process may die; None where nothing that runs it can."""
        ...

    @property
    def away_s(self) -> float:
        """How long it takes to be there again, where it has left the device's memory for others; 0: it is there."""
        ...

    @property
    def return_s(self) -> float:
        """How long it takes to come back to the device's memory, once it has left; 0: it never leaves."""
        ...

    def times_at(self, batch: int) -> tuple[float, ...]:
        """Seconds of each segment at a batch size, measured or not; zeros where nothing was."""
        ...

    def prepare(self, rows: int) -> None:
        """Have what batches of so many rows need there before the first of them comes; may take long."""
        ...

    def start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        """Run a segment on a lane of the same backend; *ended* is called once, and nothing is raised.

        here: on the calling thread, so that it has ended when this returns; only where the backend is ``inline``.
        """
        ...

    def close(self) -> None:
        """Give its memory back; nothing of it runs any more."""
        ...


class Backend(Protocol):
    """One device, or one way to run models on it."""

    name: str
    platform: str
    """What clients are told, as Triton names them."""
    inline: bool
    """Whether it can run a step on the calling thread."""
    memory_bytes: int | None
    """What models may hold together; None where only the user can tell."""
    device: str | None
    """The names of its devices, with commas between them, each of which has one lane; None: the cores."""
    labels: tuple[str, ...]
    """Its devices by the names of metrics, in the order of their lanes."""
    isolates: bool
    """Whether models can run in worker processes (``LoadOptions.isolation``)."""
    grain_s: float | None
    """The usual length of a segment there; None: the default of a model's settings."""
    region_devices: frozenset[int]
    """The numbers of its devices whose memory clients may share (CUDA shared memory)."""

    @property
    def scratch_bytes(self) -> int:
        """What runs have left in memory that is given back when it is not needed."""
        ...

    @property
    def used_bytes(self) -> Mapping[str, int]:
        """Label of a device -> what of its memory is in use, as it was when this was last asked."""
        ...

    @property
    def returns(self) -> Mapping[str, int]:
        """Label of a device -> how often a model came back to its memory."""
        ...

    def counts(self) -> WorkerCounts:
        """How often worker processes died, and were started again."""
        ...

    def now(self) -> int:
        """The time; its differences are nanoseconds."""
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
        """Load a file, cut and measure it; with *cache*, a folder, that is done once. ``ModelError`` if it cannot be.

        learn: False: have it ready as soon as can be. What is in the cache comes from there in full; any other file is
        opened whole and never run, and ``learned`` is False. Stitched files and models with exits are opened in full
        all the same, for their answers depend on it.
        Called on any thread, for several models at once.
        """
        ...

    def lane(self, index: int, *, pin: bool = False) -> DeviceLane:
        """Open a lane; *pin*: on a part of the device that is its own."""
        ...

    def write_region(self, lender: Lender, offset: int, data: memoryview) -> None:
        """Put bytes into a region of a client's that is memory of the device, and wait for it; from any thread.

        BadRequest where that cannot be.
        """
        ...

    def close(self) -> None:
        """Give back all it has; models and lanes are closed, and what is still being opened is given up."""
        ...
