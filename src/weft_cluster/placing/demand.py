"""Resources that models need, from a workload and profiles: per request (``Need``), and with their rates (``Demand``).

The device of a kind of machine is an NPU (its channel and its array are the two resources), a tiled NPU, or a profile
of ``weft profile``. Profiled times count as time that overlaps with nothing, unless the kind has peaks by which they
are divided into computing and memory. Requests are priced one by one; batches only make them cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np

from weft.base.errors import ModelError, PlacingError, WorkloadError
from weft.devices import Host, Npu, load_device
from weft.devices.costs.program import Clock, Program
from weft.models import Model
from weft.models.sources import load_model
from weft.simulation.requests import Device, prepare
from weft.simulation.requests.case import remaining_alone_s
from weft.workloads.requests import Stream, Workload
from weft_cluster.placing.machines import MachineKind, Machines, StatedNeed


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that one request of a model takes on a machine of one kind."""

    compute_s: float
    memory_s: float
    """Time of the memory channel; the kind's overlap says which share of it is hidden behind computing."""
    other_s: float = 0.0
    """Kernel launches and the host: time that overlaps with nothing."""
    weight_bytes: int = 0
    activation_bytes: int = 0
    segment_s: float = 0.0
    """The longest piece that cannot be interrupted; a request of another model may wait this long."""
    alone_s: float = 0.0
    """From arrival to answer on an idle machine."""

    def __post_init__(self) -> None:
        times = (self.compute_s, self.memory_s, self.other_s, self.segment_s, self.alone_s)
        if not all(math.isfinite(time) and time >= 0 for time in times) or self.busy_s == 0:
            raise PlacingError(f"{self} has times that are none, or no busy time at all; check its profile")

    @property
    def busy_s(self) -> float:
        """Its total time without overlap."""
        return self.compute_s + self.memory_s + self.other_s

    @property
    def resident_bytes(self) -> int:
        """Memory that the model occupies on a machine as long as it is placed there."""
        return self.weight_bytes + self.activation_bytes

    def at_speed(self, speed: float) -> Need:
        """The need on a machine that is *speed* times as fast."""
        times = ("compute_s", "memory_s", "other_s", "segment_s", "alone_s")
        return replace(self, **{key: getattr(self, key) / speed for key in times})


@dataclass(frozen=True, slots=True, eq=False)
class Demand:
    """A model: its request rate, its deadline, its need per kind of machine, and the rules for its machines."""

    model: str
    rate: float
    """Requests per second."""
    deadline_s: float
    """Longest time from arrival to answer; infinite if no request is ever late."""
    needs: Mapping[str, Need]
    """Kind of machine -> need of one request; other kinds cannot run the model."""
    replicas: int = 1
    """Least number of machines that have the model."""
    apart: Literal["machine", "zone"] = "machine"
    """Whether the replicas must be on different machines or even in different zones."""
    machine: str | None = None
    """The only machine that may have it."""
    zone: str | None = None
    """The only zone that may have it."""
    cv: float = 1.0
    """Standard deviation of the gaps between requests over their mean; 1: independent arrivals."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and self.rate > 0):
            raise PlacingError(f"{self.model}: rate = {self.rate:g} must be above 0; leave out models without requests")
        if not self.deadline_s > 0:
            raise PlacingError(f"{self.model}: deadline_s = {self.deadline_s:g} must be above 0")
        if not self.needs:
            raise PlacingError(f"{self.model}: no kind of machine can run it; give one of them a profile of it")

    def scaled(self, factor: float) -> Demand:
        """Return the same model with *factor* times the rate."""
        return replace(self, rate=self.rate * factor)


# Cap on segments per request. More: simulations take longer in proportion. Fewer: segments are longer than on the real
# machine, and urgent requests wait longer for them.
MOST_SEGMENTS = 32
LONGEST_S = 600.0
"""Cap on the slack of a simulated request: files allow deadlines whose nanoseconds do not fit into 64 bits, and no
simulation runs that long."""
AHEAD = 2
"""Weight buffer of a simulated machine, in multiples of its longest fetch: one segment computes, one is fetched."""

CLOCK = Clock.nanoseconds()


class Pieces(NamedTuple):
    """A request in weft's simulator: equal segments that use a compute array and a memory channel, in ticks.

    A machine with partial overlap is simulated as one whose channel and array overlap fully: the time that it does not
    hide is added to both, as in ``PlacingProblem.model_loads``, so the simulated machine is full exactly when the real
    one is. The simulated deadline is the time alone in the simulation plus the slack on the real machine.
    """

    segments: int
    array: int
    """Array time of each segment."""
    channel: int
    """Channel time of each segment, before its array time."""

    @property
    def alone(self) -> int:
        """Time of all segments on an idle machine."""
        return self.channel + (self.segments - 1) * max(self.channel, self.array) + self.array

    def due(self, slack_s: float) -> int:
        """The simulated deadline of a request with *slack_s* on the real machine; at least one tick."""
        return max(1, self.alone + CLOCK.ticks(min(slack_s, LONGEST_S)))

    def program(self, model: str) -> Program:
        """The program of a request for the simulator: equal layers."""
        names = tuple(f"{number}" for number in range(self.segments))
        channel = (self.channel,) * self.segments
        return Program(model, names, channel, (self.array,) * self.segments, channel)


def pieces_of(need: Need, overlap: float) -> Pieces:
    """Divide a request into at most MOST_SEGMENTS equal segments, for a machine with this *overlap*."""
    unhidden = 1 - overlap
    # Rounding must not add a segment: 1e-9.
    count = int(min(MOST_SEGMENTS, max(1, np.ceil(need.alone_s / need.segment_s - 1e-9)))) if need.segment_s else 1
    array = max(1, CLOCK.ticks((need.compute_s + unhidden * need.memory_s + need.other_s) / count))
    channel = max(1, CLOCK.ticks((need.memory_s + unhidden * need.compute_s + need.other_s) / count))
    return Pieces(count, array, channel)


def buffer_of(programs: Iterable[Program]) -> int:
    """The weight buffer, in ticks, of a machine with these programs; it limits the work queued ahead."""
    return AHEAD * max((program.largest_fetch for program in programs), default=1)


MIB = 2**20  # files give weights and activations in MiB


def demands_of(
    workload: Workload, machines: Machines, measured: Mapping[str, Device] = MappingProxyType({})
) -> tuple[Demand, ...]:
    """Compute the demand of each model of a workload: rate, deadline, and need on each kind that can run it.

    measured: kind -> its device, if that is in no file. Streams of the same model are merged.
    """
    by_model: dict[str, Demand] = {}
    devices = {name: measured.get(name) or _device(kind, machines.folder) for name, kind in machines.kinds.items()}
    for index in range(len(workload.stream)):
        demand = _make_demand(workload, index, machines, devices)
        before = by_model.get(demand.model)
        by_model[demand.model] = demand if before is None else _merge_demands(before, demand)
    for model in machines.models:
        if model not in by_model:
            known = ", ".join(list(by_model)[:5])
            raise PlacingError(f"models.{model}: no stream of the workload asks for it; they ask for {known}")
    return tuple(by_model.values())


def _merge_demands(first: Demand, second: Demand) -> Demand:
    """Merge two streams of the same model: the sum of the rates, the tighter deadline, the burstier arrivals."""
    due, cv = min(first.deadline_s, second.deadline_s), max(first.cv, second.cv)
    return replace(first, rate=first.rate + second.rate, deadline_s=due, cv=cv)


def _make_demand(workload: Workload, index: int, machines: Machines, devices: dict[str, Device | None]) -> Demand:
    """The demand of one stream of a workload. PlacingError if no kind has a profile or a stated need of its model."""
    stream, rate = workload.stream[index], _mean_rate(workload, index)
    name = stream.served_name
    rule = machines.rule(name)
    needs = {}
    # The need of one request: the workload with this stream only, unbatched.
    single = workload.model_copy(
        update={
            "stream": (stream.model_copy(update={"max_batch": 1, "rate": rate}),),
            "total_rate": None,
            "ratio": None,
        }
    )
    for kind, machine_kind in machines.kinds.items():
        device = devices[kind]
        if kind in rule.on:
            needs[kind] = stated(rule.on[kind]).at_speed(machine_kind.speed)
        elif isinstance(device, Host) and name not in device.models:
            continue
        elif device is not None:
            needs[kind] = _request_need(single, device, machine_kind).at_speed(machine_kind.speed)
    if not needs:
        kinds = ", ".join(machines.kinds)
        raise PlacingError(
            f"{name}: nothing says what it takes on {kinds}; give a kind a device with a profile of it, or say it "
            f"under [models.{name}.on.{next(iter(machines.kinds))}]"
        )
    return Demand(
        name,
        rate,
        stream.deadline_s,
        needs,
        replicas=rule.replicas,
        apart=rule.apart,
        machine=rule.machine,
        zone=rule.zone,
        cv=stream.cv if stream.arrival == "gamma" else 1.0,
    )


def _mean_rate(workload: Workload, index: int) -> float:
    """Requests per second of a stream; for a recorded trace the mean. WorkloadError for closed clients."""
    stream, rate = workload.stream[index], workload.rates[index]
    if rate is not None:
        return rate
    if stream.arrival == "closed":
        raise WorkloadError(
            f"{stream.model}: closed clients follow the server's pace; say how often they ask: rate = 10"
        )
    return sum(len(block) for block in workload.arrivals(index)) / workload.duration_s


def stated(need: StatedNeed) -> Need:
    """Return the need that a rule states for a request."""
    busy_ms = need.compute_ms + need.memory_ms + need.other_ms
    alone_ms = busy_ms if need.alone_ms is None else need.alone_ms
    return Need(
        need.compute_ms / 1e3,
        need.memory_ms / 1e3,
        need.other_ms / 1e3,
        weight_bytes=int(need.weights_mib * MIB),
        activation_bytes=int(need.activations_mib * MIB),
        segment_s=(alone_ms if need.segment_ms is None else need.segment_ms) / 1e3,
        alone_s=alone_ms / 1e3,
    )


@cache
def _load_cached(name: str) -> Device:
    return load_device(name)


def _device(kind: MachineKind, folder: str) -> Device | None:
    """Load the device of a kind; file names are relative to the machines file."""
    if kind.device is None:
        return None
    if kind.device.endswith((".json", ".toml")):
        return load_device(str(Path(folder) / kind.device))
    return _load_cached(kind.device)


def _request_need(single: Workload, device: Device, kind: MachineKind) -> Need:
    """The need of one request on a device of *kind*, by its profile; *single*: a workload with one stream."""
    case = prepare(single, device)
    program, tick_s = case.setting.programs[0], case.clock.tick_s
    work = [ticks * tick_s for ticks in program.work]
    if isinstance(device, Npu):
        return Need(
            program.total_compute * tick_s,
            program.total_fetch * tick_s,
            weight_bytes=sum(program.weight_bytes),
            segment_s=max(work),
            alone_s=remaining_alone_s(case, program),
        )
    lanes = device.lanes if isinstance(device, Host) else 1
    model = _load_layers(single)
    compute, memory, other = _divide_time(_mean_time_s(program, work) / lanes, model, kind)
    return Need(
        compute,
        memory,
        other,
        weight_bytes=_weight_bytes(single, device, model),
        activation_bytes=0 if model is None else max((layer.output_bytes for layer in model.layers), default=0),
        segment_s=max(work),
        alone_s=sum(work) + _overhead_s(single.stream[0], device),
    )


def _overhead_s(stream: Stream, device: Device) -> float:
    """Return the mean time of a request outside its segments, as measured; 0 if it was not."""
    overheads: Sequence[float] = device.model(stream.served_name).overhead_s if isinstance(device, Host) else ()
    return sum(overheads) / len(overheads) if overheads else 0.0


def _mean_time_s(program: Program, work: Sequence[float]) -> float:
    """The mean time of a request, given that some leave at early exits; *work*: seconds of each layer."""
    if not program.exit_rates:
        return sum(work)
    times = [0.0, *accumulate(work)]
    return sum(
        share * times[layers] for share, layers in zip(program.exit_rates, (*program.exits, len(program)), strict=True)
    )


def _load_layers(single: Workload) -> Model | None:
    """Load the model of *single*, a workload with one stream, with its layers; None if its file cannot be read."""
    stream = single.stream[0]
    in_folder = stream.model.endswith(".onnx") and not Path(stream.model).is_absolute()
    try:
        return load_model(
            str(Path(single.folder) / stream.model) if in_folder else stream.model,
            shapes=stream.shapes,
            parameters={"seq_len": stream.seq_len},
        )
    except ModelError:
        return None


def _divide_time(busy_s: float, model: Model | None, kind: MachineKind) -> tuple[float, float, float]:
    """Divide a measured time into (computing, memory, other), in proportion to the model's times at the kind's peaks.

    Without peaks or layers all of it is other.
    """
    if model is None or kind.peak_tflops is None or kind.bandwidth_gb_s is None:
        return 0.0, 0.0, busy_s
    moved_bytes = sum(layer.weight_bytes + layer.input_bytes + layer.output_bytes for layer in model.layers)
    compute, memory = 2 * model.macs / (kind.peak_tflops * 1e12), moved_bytes / (kind.bandwidth_gb_s * 1e9)
    total = compute + memory
    return (busy_s * compute / total, busy_s * memory / total, 0.0) if total else (0.0, 0.0, busy_s)


def _weight_bytes(single: Workload, device: Device, model: Model | None) -> int:
    """Bytes of a model's weights; without its file, an equal part of the bytes measured for all models.

    single: a workload with one stream, that of the model.
    """
    if model is not None:
        return sum(-(-layer.parameters * layer.weight_bits // 8) for layer in model.layers)
    if isinstance(device, Host) and device.memory_bytes:
        return device.memory_bytes // len(device.models)
    return 0
