"""This machine as a device: lanes that are threads, and models as its server cuts and runs them, measured.

``weft.planning.survey`` measures; the file it writes (JSON, docs/formats.md) is read here. Nothing here runs anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from weft.base.errors import DeviceError, unknown_name
from weft.base.jsonfile import first_problem, printable, read_json, write_json
from weft.base.registry import ANY_NAME, Entry, registered
from weft.devices.conditions import Conditions
from weft.devices.lanes import Lanes
from weft.devices.shares import Contention, GpuLikeness, Shares, ladder

HOST = "host"
"""The name that means this machine."""

Time = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Factor = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1024)]


def device_entry(name: str) -> Entry | None:
    """The registration of the kind of a device's name, as ``cuda:0``, which is the part before the colon; or None."""
    return registered("devices").get(name.partition(":")[0])


def is_device(name: str) -> bool:
    """Whether a name is that of a device in this machine, such as a GPU, of a kind that weft or a tool registers."""
    entry = device_entry(name)
    return entry is not None and re.fullmatch(entry.about.get("names", ANY_NAME), name.partition(":")[2]) is not None


def example_devices(kinds: Container[str] | None = None) -> str:
    """A name of each registered kind of device, or of those *kinds* only, for messages: ``cuda:0``."""
    devices = registered("devices").values()
    return " or ".join(entry.about["example"] for entry in devices if kinds is None or entry.name in kinds)


def is_measured(name: str) -> bool:
    """Whether a device is this machine, or a part of it, and has to be measured."""
    return name == HOST or is_device(name)


class HostModel(BaseModel, extra="forbid", frozen=True):
    """One model, as the server runs it here."""

    segments: Annotated[tuple[str, ...], Field(min_length=1)]
    max_batch: Annotated[int, Field(ge=1, le=256)] = 1
    times_s: Annotated[dict[int, tuple[Time, ...]], Field(min_length=1)]
    """Batch size -> mean time of each segment on a lane that works without pause, the others idle."""
    spread: tuple[tuple[Factor, ...], ...] = ()
    """Successive runs, in order: the time of each segment over its mean; empty: always the mean."""
    overhead_s: tuple[Time, ...] = ()
    """Latency of single requests besides their segments and hand-overs: transfer, parsing and answering."""
    loses: dict[str, Share] = {}
    """Other model -> share of its speed that it loses while one lane runs that."""
    like: dict[int, GpuLikeness] = {}
    """Batch size -> its likeness, where it may run on shares of a GPU."""
    exits: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """After how many segments requests may leave, the end not among them; those that were measured went to the end."""

    @model_validator(mode="after")
    def _consistent(self) -> HostModel:
        count = len(self.segments)
        if 1 not in self.times_s:
            raise ValueError("times_s has no batch 1")
        for batch, times in self.times_s.items():
            if len(times) != count:
                raise ValueError(f"times_s has {len(times)} times for {count} segments at batch {batch}")
        if any(len(run) != count for run in self.spread):
            raise ValueError(f"every run in spread has a factor for each of the {count} segments")
        if any(a >= b for a, b in pairwise((0, *self.exits, count))):
            raise ValueError(f"exits = {list(self.exits)} do not lie in order within {count} segments")
        return self

    def total_s(self, batch: int) -> float:
        """The time of all segments."""
        return sum(self.times_at(batch))

    @property
    def tail(self) -> float:
        """The 99th percentile of whole runs over their mean."""
        if not self.spread:
            return 1.0
        totals = np.array(self.spread) @ np.array(self.times_s[1])
        return float(np.quantile(totals, 0.99, method="inverted_cdf") / totals.mean())

    def like_at(self, batch: int) -> GpuLikeness:
        """Its likeness at a batch size."""
        return like_at(self.like, batch)

    def times_at(self, batch: int) -> tuple[float, ...]:
        """The time of each segment at a batch size, interpolated between the measured ones."""
        return times_at(self.times_s, len(self.segments), batch)


def like_at(like: Mapping[int, GpuLikeness], batch: int) -> GpuLikeness:
    """The likeness of a model at a batch size: of the next larger size that was measured, or of the largest."""
    return like[min((size for size in like if size >= batch), default=max(like))]


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lane_cores(cores: int, threads: int) -> int:
    """Number of lanes, with *threads* threads each, that run at full speed at the same time.

    At least two: a lane and the server's own work are in every measured time.
    """
    return max(2, cores // threads)


class GpuCuts(BaseModel, extra="forbid", frozen=True):
    """How a GPU can be shared."""

    sms: Annotated[int, Field(ge=1, le=4096)]
    cuts: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=8)] = ()
    """The multiprocessors of the two sides of each cut."""
    streams: Annotated[int, Field(ge=1, le=16)] = 4
    """Models that may run at the same time on the whole of it."""
    contention: Contention = Contention()

    @model_validator(mode="after")
    def _consistent(self) -> GpuCuts:
        if any(sum(sides) != self.sms for sides in self.cuts):
            raise ValueError(f"cuts = {[list(sides) for sides in self.cuts]} do not add up to {self.sms} each")
        return self

    @property
    def parts(self) -> tuple[int, ...]:
        """The multiprocessors of each side of each cut, in the order of their lanes."""
        return tuple(side for sides in self.cuts for side in sides)

    def part_of(self, lane: int) -> int:
        """The part that a lane is, from 1; 0 for those that are streams of the whole."""
        return max(0, lane - self.streams)

    def lane_of(self, part: int) -> int:
        """The lane that is a part, or the first of the whole."""
        return part and part + self.streams

    def shares(self, kinds: Sequence[GpuLikeness], bodies: Sequence[int] = (), tags: Sequence[int] = ()) -> Shares:
        """Its lanes, for these kinds of work. bodies: the body of each kind; tags: equal for kinds of equal speed."""
        return Shares(self.sms, ladder(self.sms, self.cuts, self.streams), kinds, self.contention, bodies, tags)


class Host(BaseModel, extra="forbid", frozen=True):
    """This machine under ``weft serve``. The field names are the keys of the file."""

    format: Literal[1] = 1
    kind: Literal["host"] = "host"
    name: Annotated[str, Field(min_length=1), AfterValidator(printable)] = HOST
    source: Annotated[str, AfterValidator(printable)] = ""
    """Processor, versions and time of the measurement."""
    conditions: Conditions | None = None
    """Conditions of the measurement; None: they were not recorded."""
    cores: Count
    lanes: Count
    threads: Count = 1
    """How many threads each lane has."""
    isolation: Annotated[str, AfterValidator(printable)] = "threads"
    """Where models ran: in threads of the server, or in worker processes."""
    ahead: Annotated[int, Field(ge=0, le=16)] = 0
    """Segments that each lane queues besides the one that it computes."""
    memory_bytes: Annotated[int, Field(ge=0, le=2**62)] | None = None
    """Memory of the server and its workers while all models were loaded; None: not known."""
    hand_over_s: tuple[Time, ...] = ()
    """Times on a lane from the end of a segment to the start of the next, as measured in order; a segment that was
    queued ahead begins at once."""
    step_s: Time = 0.0
    """Time of the event loop for each segment that it starts; it sees no ends and no arrivals meanwhile."""
    abort_from_s: Time = 0.01
    """Segments of at least this expected duration may be stopped for an urgent request."""
    abort_s: Time = 0.001
    """Time that stopping one takes."""
    gpu: GpuCuts | None = None
    """How it can be shared, if it is a GPU whose models were measured on shares."""
    models: Annotated[dict[str, HostModel], Field(min_length=1)]

    def __repr__(self) -> str:
        return f"Host({self.name}, {self.lanes} lanes: {', '.join(self.models)})"

    @model_validator(mode="after")
    def _consistent(self) -> Host:
        for name, model in self.models.items():
            for other in model.loses:
                if other not in self.models:
                    raise ValueError(f"{name} loses speed to {other!r}, which is not among the models")
            if self.gpu and not model.like:
                raise ValueError(f"{name} does not say what it is like, and gpu says that models share it")
        return self

    def __hash__(self) -> int:
        """Cheap: hosts are keys of caches."""
        return hash((self.name, self.source, self.lanes, tuple(self.models)))

    def together(self) -> Lanes:
        """Its lanes; the kinds of work are its models, in order."""
        names = tuple(f"lane {number}" for number in range(self.lanes))
        cores = lane_cores(self.cores, self.threads)
        if self.lanes == 1:
            return Lanes(names, cores)
        rows = [tuple(model.loses.get(other, 0.0) for other in self.models) for model in self.models.values()]
        return Lanes(names, cores, tuple(rows))

    def model(self, name: str) -> HostModel:
        if name not in self.models:
            known = unknown_name("model", name, self.models)
            raise DeviceError(f"{self.name} was not measured with it: {known}; weft profile MODELS --device host")
        return self.models[name]


def read_host(path: str | Path) -> Host:
    """Read a measurement from a file."""
    return parse_host(read_json(path, DeviceError), str(path))


def is_calibration(raw: Any) -> bool:
    """Whether a JSON file holds what ``weft map calibrate`` measures: contention of the cores for the memory."""
    return isinstance(raw, dict) and "achieved_gb_s" in raw


def parse_host(raw: Any, where: str) -> Host:
    if is_calibration(raw):
        raise DeviceError(
            f"{where}: a calibration of the memory, which knows no models; weft map --soc {where} takes it, and "
            "weft profile MODELS --device host -o FILE measures what serves requests"
        )
    if not isinstance(raw, dict) or raw.get("kind") != HOST:
        raise DeviceError(f'{where}: not a measured host (kind = "host"); weft profile MODELS --device host -o FILE')
    try:
        return Host.model_validate(raw)
    except ValidationError as error:
        raise DeviceError(
            f"{where}: {first_problem(error, Host, HostModel, GpuCuts, GpuLikeness, Conditions)}"
        ) from error


def write_host(host: Host, path: str | Path) -> None:
    write_json(path, host.model_dump(mode="json"))


def times_at(times_s: Mapping[int, tuple[float, ...]], segments: int, batch: int) -> tuple[float, ...]:
    """Seconds of each segment, interpolated between the measured batch sizes; zeros where nothing was measured."""
    if not times_s:
        return (0.0,) * segments
    sizes = sorted(times_s)
    if batch > sizes[-1]:  # beyond the largest, time is in proportion to the batch
        return tuple(time_s * batch / sizes[-1] for time_s in times_s[sizes[-1]])
    columns = zip(*(times_s[size] for size in sizes), strict=True)
    return tuple(float(np.interp(batch, sizes, column)) for column in columns)
