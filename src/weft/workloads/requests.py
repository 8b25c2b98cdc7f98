"""Workload files: streams of requests with arrivals, deadlines and batch limits (TOML, docs/formats.md).

The field names are the keys of the file; unknown keys are refused. A search for the largest
sustainable load varies ``Workload.scaled``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal
from warnings import warn

import numpy as np
import numpy.typing as npt
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from weft.base.errors import ShapeNeeded, WorkloadError
from weft.base.jsonfile import first_problem
from weft.base.shapes import sizes_of
from weft.base.tomlfile import read_toml
from weft.workloads import arrivals
from weft.workloads import exits as stream_exits

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

MOST_REQUESTS = 10**9
"""Most requests of a workload; a file with more has a mistyped rate or duration."""
MOST_STREAMS = 100_000
"""Most streams of a workload; every stream has its own queue and generators, so that more would fill the memory."""


def served_name(model: str) -> str:
    """Return the name of a model at a server: for a file, its name without folder and suffix.

    A model in a stitched file has its own name: ``cats`` for ``pets.onnx/cats``.
    """
    if ".onnx/" in model:
        return PurePath(model).name
    return PurePath(model).stem if model.endswith(".onnx") else model


class Stream(BaseModel):
    """Requests for one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1)]
    """A zoo name, a packaged model or an .onnx file; what to call the stream, if it has profiles."""
    profiles: tuple[str, ...] = ()
    """Profile files for batch 1, 2, ... instead of a model, relative to the workload file."""
    arrival: Literal["poisson", "gamma", "uniform", "bursty", "closed", "trace"] = "poisson"
    rate: Positive | None = None
    """Requests per second on average; left out where the workload has a total rate."""
    deadline_ms: Positive | None = None
    """The time from arrival to the end of the last layer; None: requests to a real server that are never late."""
    max_batch: Annotated[int, Field(ge=1, le=256)] = 16
    batch_timeout_ms: NotNegative = 2.0
    """The longest time for which the first request of a batch waits for others."""
    priority: Literal[1, 3, 9] = 1
    """The weight of a request under prema."""
    seq_len: Annotated[int, Field(ge=1, le=65536)] = 16
    shapes: dict[str, Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(sizes_of)]] = {}
    """Input -> shape of one sample's request, or axis -> its size, where the model has free dimensions."""
    values: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = {}
    """Input -> number that requests to a real server hold there, such as a sampling rate."""
    clients: Annotated[int, Field(ge=1, le=65536)] = 1
    """closed: number of clients; each sends its next request after the answer to its last one."""
    think_ms: NotNegative = 0.0
    """closed: pause of a client between an answer and its next request."""
    cv: Annotated[float, Field(gt=0, le=100)] = 1.0
    """gamma: coefficient of variation of the gaps between requests."""
    burst_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 4.0
    """bursty: ratio of the rate within a burst to the mean rate."""
    burst_share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """bursty: share of the time that bursts take."""
    burst_ms: Positive = 50.0
    """bursty: mean length of a burst."""
    trace: str | None = None
    """trace: a CSV file, relative to the workload file."""
    trace_column: str | None = None
    speedup: Positive = 1.0
    """trace: the factor by which it is replayed faster."""
    exits: Annotated[int | tuple[str, ...] | None, BeforeValidator(stream_exits.number_or_names)] = None
    """The number of early exits to place in the model; or the outputs of an .onnx file that are exits, the end last."""
    exit_head: Literal["fc", "conv"] = "fc"
    """The layers of a placed exit: a fully connected layer, for ``conv`` with a convolution before it."""
    exit_rates: tuple[float, ...] = ()
    """Share of the samples that leave by each exit, the end last."""
    exit_record: Annotated[str, Field(min_length=1)] | None = None
    """An .npz file, relative to the workload file: confidences and correct answers of a real network."""
    exit_threshold: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.8
    """The confidence at which a sample of the record leaves. If it is set, requests to real servers carry it, too."""
    exit_floor: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    """The lowest value to which a server lowers the threshold of a record under load; None: it never does."""
    grain_ms: Positive | None = None
    """For ``weft plan``: the duration of a segment of the model; None: the duration in the model's settings."""
    samples: Annotated[str, Field(min_length=1)] | None = None
    """An .npz file, relative to the workload file: inputs of requests to a real server, and the right answers."""

    def __hash__(self) -> int:
        """Hash all fields but shapes and values, which are dicts; workloads are keys of caches."""
        return hash(tuple(value for key, value in self if key not in ("shapes", "values")))

    @model_validator(mode="after")
    def _consistent(self) -> Stream:
        """Raise ValueError for keys that contradict each other."""
        if self.profiles and len(self.profiles) < self.max_batch:
            raise ValueError(f"max_batch = {self.max_batch} needs as many profiles, there are {len(self.profiles)}")
        if self.arrival == "trace" and not self.trace:
            raise ValueError("arrival = 'trace' needs trace = 'times.csv'")
        if self.arrival == "bursty" and self.burst_factor * self.burst_share > 1:
            raise ValueError(
                f"burst_factor x burst_share = {self.burst_factor * self.burst_share:g} exceeds 1: "
                "bursts alone would bring more than the mean rate"
            )
        self._check_exits()
        return self

    def _check_exits(self) -> None:
        """Raise ValueError for keys of exits that contradict each other, or that lack a key."""
        if self.profiles and (self.exits is not None or self.leaves):
            raise ValueError("profiles say nothing of a model's exits; leave out profiles, or exits and their rates")
        if self.exit_rates and self.exit_record:
            raise ValueError("exit_rates and exit_record both say where samples leave; keep one of them")
        if self.exits is not None and not self.leaves:
            raise ValueError(
                f"exits = {self.exits!r} needs exit_rates (a share for each exit, the end last) "
                "or exit_record = 'file.npz'"
            )
        if self.exit_floor is not None:
            if self.exit_record is None:
                raise ValueError(f"exit_floor = {self.exit_floor:g} needs exit_record = 'file.npz'")
            if self.exit_floor > self.exit_threshold:
                raise ValueError(
                    f"exit_floor = {self.exit_floor:g} must be at most exit_threshold = {self.exit_threshold:g}"
                )
        if self.exit_rates:
            stream_exits.check_rates(self.exit_rates)
            if self.exits is not None and len(self.exit_rates) != self.early_exits + 1:
                raise ValueError(stream_exits.miscounted("exit_rates", len(self.exit_rates), self.early_exits))

    @property
    def served_name(self) -> str:
        """The name of the model at a server."""
        return served_name(self.model)

    @property
    def deadline_s(self) -> float:
        """The deadline in seconds, for simulations; WorkloadError if the stream has none."""
        if self.deadline_ms is None:
            raise WorkloadError(f"the stream of {self.model} has no deadline_ms; only weft bench does without")
        return self.deadline_ms / 1e3

    @property
    def leaves(self) -> bool:
        """Whether the stream states at which exits samples leave: by rates or by a record."""
        return bool(self.exit_rates or self.exit_record)

    def as_option(self, *more: str) -> str:
        """Return the stream as an option of the command line, for advice; *more*: the parts to add."""
        rate = [] if self.rate is None else [f"rate={self.rate:g}"]
        deadline = [] if self.deadline_ms is None else [f"deadline={self.deadline_ms:g}"]
        return f"-s {self.model}:{','.join([*rate, *deadline, *more])}"

    @property
    def early_exits(self) -> int:
        """Number of exits before the end, as the stream states them; 0 if it does not."""
        return self.exits if isinstance(self.exits, int) else max(0, len(self.exits or ()) - 1)


def _check_count(streams: tuple[Stream, ...]) -> tuple[Stream, ...]:
    # Not min_length: pydantic would count a list as too short where one of its streams has a problem.
    if not 1 <= len(streams) <= MOST_STREAMS:
        raise ValueError(f"a workload has 1 to {MOST_STREAMS} streams, this one {len(streams)}")
    return streams


class Workload(BaseModel):
    """Streams that share a device, the duration of the run, and its seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: str = "weaver-plus"
    stream: Annotated[tuple[Stream, ...], AfterValidator(_check_count)]
    total_rate: Positive | None = None
    """Requests per second of all streams together, divided by ``ratio``."""
    ratio: tuple[Positive, ...] | None = None
    """Shares of the total rate, one per stream: [64, 1]; equal where left out."""
    duration_s: Positive = 10.0
    warmup_s: NotNegative = 0.5
    """Requests that arrive earlier are served but not counted."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    folder: str = "."
    """Where relative paths start; set by the reader."""

    @model_validator(mode="after")
    def _consistent(self) -> Workload:
        """Raise ValueError for missing rates, keys that contradict each other, or too many requests."""
        if self.ratio and len(self.ratio) != len(self.stream):
            raise ValueError(f"ratio has {len(self.ratio)} parts for {len(self.stream)} streams")
        if self.ratio and self.total_rate is None:
            raise ValueError("ratio divides total_rate, which is missing")
        if self.warmup_s >= self.duration_s:
            raise ValueError(f"warmup_s = {self.warmup_s:g} leaves nothing of duration_s = {self.duration_s:g}")
        for index, (stream, rate) in enumerate(zip(self.stream, self.rates, strict=True)):
            if stream.arrival in ("poisson", "gamma", "uniform", "bursty") and rate is None:
                raise ValueError(f"stream {index} ({stream.model}) has no rate, and there is no total_rate")
        if sum(rate or 0 for rate in self.rates) * self.duration_s > MOST_REQUESTS:
            raise ValueError(f"more than {MOST_REQUESTS} requests; lower the rates or duration_s")
        return self

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Requests per second of each stream; None for closed streams and traces."""
        if self.total_rate is None:
            return tuple(stream.rate for stream in self.stream)
        parts = [
            None if stream.arrival in ("closed", "trace") else part
            for stream, part in zip(self.stream, self.ratio or (1.0,) * len(self.stream), strict=True)
        ]
        total_parts = sum(part for part in parts if part)
        return tuple(part and self.total_rate * part / total_parts for part in parts)

    def advice(self, stream: Stream, *, option: str, key: str) -> str:
        """Return how to complete a stream, for a message: by *key* in its file, or by *option* on the command line."""
        return f"{key} in its [[stream]]" if "folder" in self.model_fields_set else stream.as_option(option)

    def shape_advice(self, stream: Stream, name: str, sizes: str) -> str:
        """Return how to state the shape of an input, for a message; *name*, *sizes*: the input and an example."""
        return self.advice(stream, option=f"shape={name}={sizes}", key=f'shapes = {{ "{name}" = "{sizes}" }}')

    def advised(self, stream: Stream, error: ShapeNeeded) -> ShapeNeeded:
        """Return *error* with advice for the origin of the stream: a file or the command line."""
        return error.advising(f"say what is sent, as {self.shape_advice(stream, error.name, error.sizes)}")

    def scaled(self, factor: float) -> Workload:
        """Return this workload with the requests of every open stream *factor* times as fast."""
        streams = tuple(
            stream.model_copy(
                update={"rate": stream.rate * factor if stream.rate else None, "speedup": stream.speedup * factor}
            )
            for stream in self.stream
        )
        total = self.total_rate * factor if self.total_rate else None
        return self.model_copy(update={"stream": streams, "total_rate": total})

    def arrivals(self, index: int, seed: int | None = None) -> Iterator[Floats]:
        """Yield blocks of arrival times of an open stream, in seconds, up to ``duration_s``.

        index: of the stream. seed: None: the workload's own.
        """
        stream, rate = self.stream[index], self.rates[index]
        # A generator for each stream: adding a stream to a file does not change the arrivals of the others.
        rng = np.random.default_rng([self.seed if seed is None else seed, index])
        for block in self._process(stream, rate or 0.0, rng):
            inside = block[block < self.duration_s]
            yield inside
            if len(inside) < len(block):
                return

    def exits_taken(self, index: int, seed: int | None = None) -> Iterator[Ints]:
        """Yield endless blocks of the exits at which a stream's successive requests leave, from 0; the end is last."""
        return (block.exits for block in self._exit_blocks(index, seed))

    def fates(self, index: int, seed: int | None = None) -> Iterator[Ints]:
        """Return ``exits_taken`` under its name before 0.3, with a DeprecationWarning until 0.4."""
        warn("Workload.fates is exits_taken now; the old name ends with 0.4", DeprecationWarning, stacklevel=2)
        return self.exits_taken(index, seed)

    def record_rows(self, index: int, seed: int | None = None) -> Iterator[Ints]:
        """Yield the rows of the record from which ``exits_taken`` are drawn; -1 if they are drawn from rates."""
        return (block.rows for block in self._exit_blocks(index, seed))

    def record(self, index: int) -> stream_exits.ExitRecord | None:
        """Read the exit record of a stream; None if it has none. WorkloadError if it does not fit the exits."""
        stream = self.stream[index]
        if stream.exit_record is None:
            return None
        record = stream_exits.read_record(Path(self.folder) / stream.exit_record)
        if stream.exits is not None and record.exits != stream.early_exits + 1:
            problem = stream_exits.miscounted(f"exit_record = {stream.exit_record!r}", record.exits, stream.early_exits)
            raise WorkloadError(f"stream {index} ({stream.model}): {problem}")
        return record

    def exit_rates(self, index: int, early_exits: int | None = None) -> tuple[float, ...]:
        """Return the share of a stream's samples that leave at each exit, the end last; () without rates or a record.

        early_exits: the number of early exits of its model; WorkloadError if the shares do not fit. None: not checked.
        """
        stream, record = self.stream[index], self.record(index)
        rates = stream.exit_rates if record is None else record.rates(stream.exit_threshold)
        where = f"stream {index} ({stream.model})"
        if early_exits and not rates:
            raise WorkloadError(
                f"{where}: its model has {early_exits} early exits; "
                "say who leaves there with exit_rates or exit_record = 'file.npz'"
            )
        if rates and early_exits is not None and len(rates) != early_exits + 1:
            key = "exit_rates" if record is None else f"exit_record = {stream.exit_record!r}"
            raise WorkloadError(f"{where}: {stream_exits.miscounted(key, len(rates), early_exits)}")
        return rates

    def _exit_blocks(self, index: int, seed: int | None) -> Iterator[stream_exits.ExitBlock]:
        """Yield blocks of the exits and record rows of a stream's samples; WorkloadError without rates or a record."""
        stream, record = self.stream[index], self.record(index)
        if not stream.leaves:
            raise WorkloadError(
                f"stream {index} ({stream.model}): nothing says where its samples leave; "
                "add exit_rates or exit_record = 'file.npz'"
            )
        # A generator apart from that of arrivals, so that adding exits to a workload does not change its arrivals.
        rng = np.random.default_rng([self.seed if seed is None else seed, index, 1])
        if record is not None:
            return stream_exits.from_record(record, stream.exit_threshold, rng)
        return stream_exits.from_rates(stream.exit_rates, rng)

    def _process(self, stream: Stream, rate: float, rng: np.random.Generator) -> Iterator[Floats]:
        """Return the stream's arrival process: blocks of arrival times in seconds, endless except for a trace."""
        if stream.arrival == "trace":
            times = arrivals.read_times(Path(self.folder) / str(stream.trace), stream.trace_column)
            return arrivals.trace(times, stream.speedup)
        if stream.arrival == "gamma":
            return arrivals.gamma(rate, rng, cv=stream.cv)
        if stream.arrival == "uniform":
            return arrivals.uniform(rate, rng)
        if stream.arrival == "bursty":
            return arrivals.bursty(
                rate, rng, factor=stream.burst_factor, share=stream.burst_share, length_s=stream.burst_ms / 1e3
            )
        return arrivals.poisson(rate, rng)


def read_workload(path: str | Path) -> Workload:
    """Read a workload from a TOML file; WorkloadError if the file or a value in it cannot be used."""
    if str(path).endswith(".onnx"):
        stream = f'a file with [[stream]], model = "{path}", rate = 10 and deadline_ms = 100'
        raise WorkloadError(f"{path} is a model, and a workload (TOML) is wanted: {stream}")
    raw = read_toml(path, WorkloadError, "workload")
    if "folder" in raw:
        raise WorkloadError(f"{path}: unknown key 'folder'")
    return parse_workload(raw | {"folder": str(Path(path).parent)}, str(path))


def parse_workload(raw: dict[str, Any], where: str = "workload") -> Workload:
    """Return the workload in a mapping with the keys of a file; WorkloadError, whose message begins with *where*."""
    try:
        return Workload.model_validate(raw)
    except ValidationError as error:
        raise WorkloadError(f"{where}: {first_problem(error, Workload, Stream)}") from error
