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
Micros = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1024)]


def device_entry(name: str) -> Entry | None:
    """The registry entry for a device's kind, the part of *name* before the colon (``cuda:0``); None if unknown."""
    return registered("devices").get(name.partition(":")[0])


def is_device(name: str) -> bool:
    """Whether *name* names a device in this machine, such as a GPU, of a registered kind."""
    entry = device_entry(name)
    return entry is not None and re.fullmatch(entry.details.get("names", ANY_NAME), name.partition(":")[2]) is not None


def example_devices(kinds: Container[str] | None = None) -> str:
    """Example names of devices for messages, such as ``cuda:0``; *kinds*: only of these registered kinds."""
    devices = registered("devices").values()
    return " or ".join(entry.details["example"] for entry in devices if kinds is None or entry.name in kinds)


def is_measured(name: str) -> bool:
    """Whether *name* means this machine or a device in it, which has to be measured first."""
    return name == HOST or is_device(name)


class HostModel(BaseModel, extra="forbid", frozen=True):
    """Measurements of one model as this machine's server cuts and runs it."""

    segments: Annotated[tuple[str, ...], Field(min_length=1)]
    max_batch: Annotated[int, Field(ge=1, le=256)] = 1
    times_s: Annotated[dict[int, tuple[Time, ...]], Field(min_length=1)]
    """Batch size -> mean time of each segment on a lane that works without pause while the other lanes are idle."""
    spread: tuple[tuple[Factor, ...], ...] = ()
    """For each successive run, the time of each segment over its mean; empty: every run takes the mean."""
    overhead_s: tuple[Time, ...] = ()
    """Measured latencies of single requests minus segments and hand-overs: transfer, parsing and answering."""
    loses: dict[str, Share] = {}
    """Other model -> share of this model's speed that is lost while another lane runs the other model."""
    like: dict[int, GpuLikeness] = {}
    """Batch size -> this model's resource use (``GpuLikeness``), if it may run on shares of a GPU."""
    exits: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """Early exits: the number of segments before each, without the end. The measured requests ran to the end."""
    engine: str = ""
    """The engine that ran it, if several were timed."""
    engines_s: dict[str, dict[int, Time]] = {}
    """Engine -> batch size -> seconds of the whole model when it was loaded, for each engine that was timed."""

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
        """Seconds of all segments at a batch size."""
        return sum(self.times_at(batch))

    @property
    def tail(self) -> float:
        """The 99th percentile of whole runs over their mean."""
        if not self.spread:
            return 1.0
        totals = np.array(self.spread) @ np.array(self.times_s[1])
        return float(np.quantile(totals, 0.99, method="inverted_cdf") / totals.mean())

    def like_at(self, batch: int) -> GpuLikeness:
        """The model's likeness at a batch size."""
        return like_at(self.like, batch)

    def times_at(self, batch: int) -> tuple[float, ...]:
        """Seconds of each segment at a batch size, interpolated between the measured batch sizes."""
        return times_at(self.times_s, len(self.segments), batch)


def like_at(like: Mapping[int, GpuLikeness], batch: int) -> GpuLikeness:
    """The likeness of a model at the smallest measured batch size of at least *batch*, or at the largest."""
    return like[min((size for size in like if size >= batch), default=max(like))]


def usable_cores() -> int:
    """Number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lane_cores(cores: int, threads: int) -> int:
    """Number of lanes, with *threads* threads each, that run at full speed at the same time.

    cores: of the machine. At least two lanes: every measured time already contains the server's own work beside a lane.
    """
    return max(2, cores // threads)


class GpuCuts(BaseModel, extra="forbid", frozen=True):
    """How a GPU can be shared: *sms* multiprocessors, the cuts into two sides, and streams of the whole GPU."""

    sms: Annotated[int, Field(ge=1, le=4096)]
    cuts: Annotated[tuple[tuple[Count, Count], ...], Field(max_length=8)] = ()
    """The multiprocessors of the two sides of each cut."""
    streams: Annotated[int, Field(ge=1, le=16)] = 4
    """Number of models that may run at the same time on streams of the whole GPU."""
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
        """The number of the part (side of a cut) that a lane runs on, from 1; 0 for streams of the whole GPU."""
        # Lanes are ordered as in ladder(): streams of the whole, one of high priority, then the parts.
        return max(0, lane - self.streams)

    def lane_of(self, part: int) -> int:
        """The lane of a part, numbered from 1; the first lane of the whole GPU for part 0."""
        return part and part + self.streams

    def shares(self, kinds: Sequence[GpuLikeness], bodies: Sequence[int] = (), tags: Sequence[int] = ()) -> Shares:
        """The GPU's lanes for these kinds of work. bodies, tags: one per kind, as in ``Shares``."""
        return Shares(self.sms, ladder(self.sms, self.cuts, self.streams), kinds, self.contention, bodies, tags)


class Gates(BaseModel, extra="forbid", frozen=True):
    """The costs of gates, at which the device ends a batch that was revoked; the defaults are an H200's."""

    gate_us: Micros = 12.5
    """Added to every segment by the gate before it; 0 if the measured times contain it."""
    leave_us: Micros = 10.0
    """From the gate at which a batch stops until its lane is free; the segment before the gate ends first."""
    launch_us: Micros = 20.0
    """From the launch of a batch on a free lane to its first segment."""


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
    """Number of threads of each lane."""
    isolation: Annotated[str, AfterValidator(printable)] = "threads"
    """Where models ran: in threads of the server, or in worker processes."""
    ahead: Annotated[int, Field(ge=0, le=16)] = 0
    """Segments that each lane queues behind its running segment."""
    memory_bytes: Annotated[int, Field(ge=0, le=2**62)] | None = None
    """Memory of the server and its workers while all models were loaded; None: not known."""
    hand_over_s: tuple[Time, ...] = ()
    """Times on a lane from the end of a segment to the start of the next, in the order of measurement; a segment that
    was queued ahead begins at once."""
    step_s: Time = 0.0
    """Time that the event loop needs to start a segment; meanwhile it handles no ends and no arrivals."""
    abort_from_s: Time = 0.01
    """Segments of at least this expected duration may be stopped for an urgent request."""
    abort_s: Time = 0.001
    """Time to stop a running segment."""
    gates: Gates | None = None
    """Costs of the gates between segments; None: the device has none, and the server starts every segment."""
    gpu: GpuCuts | None = None
    """How the device can be shared, if it is a GPU whose models were measured on shares."""
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
                raise ValueError(f"{name} has no `like` (its behaviour on shares), and `gpu` says that models share it")
        return self

    def __hash__(self) -> int:
        """A hash of a few fields only, since hosts are keys of caches."""
        return hash((self.name, self.source, self.lanes, tuple(self.models)))

    def together(self) -> Lanes:
        """The lanes that run together and how they slow each other down; kind *i* of work is the i-th of ``models``."""
        names = tuple(f"lane {number}" for number in range(self.lanes))
        cores = lane_cores(self.cores, self.threads)
        if self.lanes == 1:
            return Lanes(names, cores)
        losses = [tuple(model.loses.get(other, 0.0) for other in self.models) for model in self.models.values()]
        return Lanes(names, cores, tuple(losses))

    def model(self, name: str) -> HostModel:
        if name not in self.models:
            known = unknown_name("model", name, self.models)
            raise DeviceError(f"{self.name} was not measured with it: {known}; weft profile MODELS --device host")
        return self.models[name]


def read_host(path: str | Path) -> Host:
    """Read a measurement from a file."""
    return parse_host(read_json(path, DeviceError), str(path))


def is_calibration(raw: Any) -> bool:
    """Whether the content of a JSON file is a result of ``weft map calibrate`` (memory contention of the cores)."""
    return isinstance(raw, dict) and "achieved_gb_s" in raw


def parse_host(raw: Any, where: str) -> Host:
    """Parse the JSON of a measurement; *where* names the file in the DeviceError for an invalid one."""
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
    """Seconds of each segment at a batch size, interpolated between the measured ones; zeros if *times_s* is empty.

    times_s: batch size -> seconds of each segment. segments: the number of segments.
    """
    if not times_s:
        return (0.0,) * segments
    sizes = sorted(times_s)
    if batch > sizes[-1]:  # beyond the largest, time is in proportion to the batch
        return tuple(time_s * batch / sizes[-1] for time_s in times_s[sizes[-1]])
    columns = zip(*(times_s[size] for size in sizes), strict=True)
    return tuple(float(np.interp(batch, sizes, column)) for column in columns)
