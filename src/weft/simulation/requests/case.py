"""A workload lowered to a device: programs at every batch size, deadlines and arrivals in ticks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import ShapeNeeded, WorkloadError
from weft.devices import GpuLikeness, Host, HostModel, Lanes, Npu, TiledNpu, check_activations, load_device
from weft.devices.costs.layer_costs import Profile, estimate, read_profile
from weft.devices.costs.program import MAX_TICKS, Clock, Program, lower, one_at_a_time
from weft.devices.costs.tiled import layer_times_s
from weft.devices.host import Gates
from weft.engine.policies import Policy, Setting
from weft.engine.policies.base import NO_BUFFER, UNBOUNDED_ROUNDS
from weft.engine.policies.bound import alone_ticks
from weft.engine.steering import Steered, Steering
from weft.engine.tickets import Terms
from weft.kernels.request_loop import remaining_alone
from weft.models.layer import Model
from weft.models.sources import load_model
from weft.models.stitched_files import file_and_task
from weft.runtime.stitched import tasks_in
from weft.workloads.requests import Stream, Workload

Ints = npt.NDArray[np.int64]
Device = Npu | TiledNpu | Host

MOST_STREAMS = 64
"""Most streams on one device."""


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A workload on a device, ready to run: all that a run needs except its policy and its seed."""

    workload: Workload
    device: Device
    clock: Clock
    setting: Setting
    """The setting for policies that are asked at every layer."""
    at_exits: Setting
    """The setting for policies that are asked only at exits (``Traits.by_layer``); differs on a tiled NPU only."""
    terms: tuple[Terms, ...]
    alone_s: tuple[float, ...]
    """Standalone time of a request of each stream."""
    on_shares: Setting | None = None
    """The setting for policies that choose shares of the device; None if the device has no shares."""

    def setting_of(self, policy: type[Policy]) -> Setting:
        """Return the setting for a policy; WorkloadError if the policy needs shares and the device has none."""
        if policy.traits.shares:
            if self.on_shares is None:
                raise WorkloadError(
                    f"{policy.__name__} chooses shares of a GPU, and {self.device.name} has none; h200 is one that has"
                )
            return self.on_shares
        return self.setting if policy.traits.by_layer else self.at_exits

    def arrivals(self, index: int, seed: int | None) -> Iterator[Ints]:
        """Yield blocks of arrivals of a stream, in ticks; none for a closed stream. seed: None: the workload's own."""
        if self.workload.stream[index].arrival == "closed":
            return
        for block in self.workload.arrivals(index, seed):
            yield np.rint(block / self.clock.tick_s).astype(np.int64)

    def leaves(self, index: int, setting: Setting, seed: int | None) -> Iterator[Ints] | None:
        """Return blocks with the number of layers after which each request leaves; None for a model without exits."""
        program = setting.programs[self.terms[index].programs]
        if not program.exits:
            return None
        layers_of_exit = np.array([*program.exits, len(program)], np.int64)
        return (layers_of_exit[block] for block in self.workload.exits_taken(index, seed))

    def steered(self, index: int) -> Steered | None:
        """Return the exit threshold of a stream if it depends on the load, else None."""
        stream = self.workload.stream[index]
        if stream.exit_floor is None:
            return None
        return Steered(Steering(stream.exit_threshold, stream.exit_floor))

    def confidences(self, index: int, setting: Setting, seed: int | None) -> Iterator[dict[int, float]] | None:
        """Return, for successive requests, the number of layers of each exit -> the confidence of the answer there.

        None if the stream's threshold does not depend on the load.
        """
        record = self.workload.record(index) if self.workload.stream[index].exit_floor is not None else None
        if record is None:
            return None
        layers, confidence = setting.programs[self.terms[index].programs].exits, record.confidence.tolist()
        rows = (int(row) for block in self.workload.record_rows(index, seed) for row in block)
        return (dict(zip(layers, confidence[row], strict=False)) for row in rows)

    @property
    def is_steered(self) -> bool:
        """Whether the exit threshold of a stream depends on the load."""
        return any(stream.exit_floor is not None for stream in self.workload.stream)


def prepared(workload: Workload, device: Device) -> Case:
    """Prepare a workload like ``prepare``, from a cache that workloads share if only rates or lengths differ."""
    return replace(_prepare_cached(workload.scaled(1.0).model_copy(update=_NO_RATES), device), workload=workload)


_NO_RATES: Mapping[str, Any] = {"total_rate": None, "ratio": None, "seed": 0, "duration_s": 1.0, "warmup_s": 0.0}
"""Values of the fields in which workloads of the same cached case may differ."""


@lru_cache(maxsize=256)
def _prepare_cached(workload: Workload, device: Device) -> Case:
    return prepare(workload, device)


def prepare(workload: Workload, device: Device | None = None, cost: str = "pipelined") -> Case:
    """Estimate the costs of every stream at every batch size on the device, and lower them to the device's clock.

    device: None: that of the workload. cost: the cost model of an NPU.
    """
    if (streams := len(workload.stream)) > MOST_STREAMS:
        raise WorkloadError(f"{streams} streams, and one device has at most {MOST_STREAMS}; weft place divides them")
    device = device or load_device(workload.device)
    if isinstance(device, Host):
        return _prepare_host(workload, device)
    return _prepare_tiled(workload, device) if isinstance(device, TiledNpu) else _prepare_npu(workload, device, cost)


def _prepare_host(workload: Workload, host: Host) -> Case:
    """Prepare models as measured on a host; policies expect the time of a segment while all other lanes are busy."""
    clock, lanes = Clock.nanoseconds(), host.together()
    _ticks(clock, workload.duration_s, "duration_s")  # raises WorkloadError for a duration that the clock cannot hold
    programs: list[Program] = []
    terms, alone = [], []
    kinds: list[GpuLikeness] = []
    for index, stream in enumerate(workload.stream):
        if stream.profiles:
            raise WorkloadError(f"{stream.model}: profiles describe a device of kind 'npu', and {host.name} is a host")
        name = stream.served_name
        model = host.model(name)
        rates = _exit_rates(workload, index, model)
        terms.append(_host_terms(stream, model, len(programs), clock))
        slowdown = slowdown_beside_others(lanes, list(host.models).index(name))
        batches = range(1, terms[-1].max_batch + 1)
        programs += [_segments(name, model, batch, slowdown, clock, rates, host.gates) for batch in batches]
        kinds += [model.like_at(batch) for batch in batches if host.gpu]
        alone.append(model.total_s(1))
    apart = host.ahead > 0  # lanes that take segments ahead are devices of their own
    setting = Setting(tuple(programs), NO_BUFFER, UNBOUNDED_ROUNDS, lanes=host.lanes, ahead=host.ahead, apart=apart)
    on_shares = replace(setting, lanes=1, apart=False, shares=host.gpu.shares(kinds)) if host.gpu else None
    return Case(
        workload, host, clock, setting, at_exits=setting, terms=tuple(terms), alone_s=tuple(alone), on_shares=on_shares
    )


def slowdown_beside_others(lanes: Lanes, kind: int) -> float:
    """Return the factor by which work of a kind slows down while all other lanes run one kind, averaged over kinds."""
    kinds = range(len(lanes.losses)) if len(lanes) > 1 else ()
    speeds = [lanes.speeds([kind, *[other] * (len(lanes) - 1)])[0] for other in kinds]  # of the first lane
    return len(speeds) / sum(speeds) if speeds else 1.0


def _exit_rates(workload: Workload, index: int, model: HostModel) -> tuple[float, ...]:
    """Return the share of a stream's requests that leaves by each exit; empty if the stream states none.

    Without rates all requests go to the end. WorkloadError if the model was measured without exits.
    """
    stream = workload.stream[index]
    if not stream.leaves:
        return ()
    if not model.exits:
        raise WorkloadError(f"{stream.model}: was measured without exits; leave out exit_rates and exit_record")
    return workload.exit_rates(index, len(model.exits))


def _segments(
    name: str,
    model: HostModel,
    batch: int,
    slowdown: float,
    clock: Clock,
    rates: tuple[float, ...],
    gates: Gates | None,
) -> Program:
    """Return the program of a measured model at a batch size.

    slowdown: factor on the measured times. rates: shares of the requests that leave by each exit; empty: all end.
    """
    no_fetches, gate_s = (0,) * len(model.segments), gates.gate_us / 1e6 if gates else 0.0
    ticks = tuple(max(1, clock.ticks(time_s * slowdown + gate_s)) for time_s in model.times_at(batch))
    program = Program(name, model.segments, no_fetches, ticks, no_fetches, model.exits if rates else (), rates)
    return program.with_gates(gates) if gates else program


def _host_terms(stream: Stream, model: HostModel, programs: int, clock: Clock) -> Terms:
    """Return a stream's terms with the server's defaults: batches up to the size that pays, without waiting for them.

    A closed client's pause also includes the measured overhead of a request.
    """
    given_fields = stream.model_fields_set
    terms = _terms(stream, programs, clock)
    max_batch = min(stream.max_batch, model.max_batch) if "max_batch" in given_fields else model.max_batch
    think = terms.think if terms.think < 0 else terms.think + clock.ticks(mean(model.overhead_s))
    timeout = terms.timeout if "batch_timeout_ms" in given_fields else 0
    return terms._replace(max_batch=max_batch, timeout=timeout, think=think)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _prepare_npu(workload: Workload, npu: Npu, cost: str) -> Case:
    """Prepare models on an NPU, whose layers are programs of fetches and computes; models with exits are refused.

    cost: the name of a cost model.
    """
    clock = Clock.of(npu)
    _ticks(clock, workload.duration_s, "duration_s")  # raises WorkloadError for a duration that the clock cannot hold
    programs: list[Program] = []
    terms, alone, peaks = [], [], []
    for stream in workload.stream:
        if stream.leaves:
            raise WorkloadError(
                f"{stream.model}: exits need a device that computes one layer at a time (kind = 'tiled'); {npu.name} "
                "fetches ahead and would have to know who leaves"
            )
        with _add_shape_advice(workload, stream):
            profiles = _profiles(stream, npu, cost, workload.folder)
        peaks.append((stream.model, profiles[-1].peak_activation_bytes))  # at the largest batch
        lowered = [lower(profile, npu) for profile in profiles]
        terms.append(_terms(stream, len(programs), clock))
        alone.append(alone_ticks(lowered[0], clock.buffer) * clock.tick_s)
        programs += lowered
    check_activations(npu, peaks)
    setting = Setting(tuple(programs), clock.buffer, UNBOUNDED_ROUNDS)
    return Case(workload, npu, clock, setting, at_exits=setting, terms=tuple(terms), alone_s=tuple(alone))


def _prepare_tiled(workload: Workload, device: TiledNpu) -> Case:
    """Prepare models on a tiled NPU, with whole layers, and with all layers between two exits as one."""
    clock = Clock.nanoseconds()
    _ticks(clock, workload.duration_s, "duration_s")  # raises WorkloadError for a duration that the clock cannot hold
    layered: list[Program] = []
    at_exits: list[Program] = []
    terms = []
    for index, stream in enumerate(workload.stream):
        if stream.profiles:
            raise WorkloadError(f"{stream.model}: profiles describe a device of kind 'npu', and {device.name} is tiled")
        terms.append(_terms(stream, len(layered), clock))
        with _add_shape_advice(workload, stream):
            model = _load_stream_model(stream, workload.folder)
        rates = workload.exit_rates(index, len(model.exits))
        for batch in range(1, stream.max_batch + 1):
            times_s = layer_times_s(model, device, batch)
            for programs, by_layer in ((layered, True), (at_exits, False)):
                program = one_at_a_time(
                    model, times_s, clock, exit_rates=rates, decision_s=device.decision_us / 1e6, by_layer=by_layer
                )
                programs.append(program)
    alone = tuple(at_exits[term.programs].total_work * clock.tick_s for term in terms)
    layer_setting, exit_setting = (
        Setting(tuple(programs), NO_BUFFER, UNBOUNDED_ROUNDS) for programs in (layered, at_exits)
    )
    return Case(workload, device, clock, layer_setting, exit_setting, tuple(terms), alone)


def estimates(policy: Policy) -> list[Sequence[int]]:
    """Return the remaining ticks from every layer of every program, as the policy estimates them."""
    return estimated(policy.setting, precise=policy.loop_options.precise)


def estimated(setting: Setting, *, precise: bool) -> list[Sequence[int]]:
    """Return the remaining ticks from every layer of every program; *precise*: replayed on an empty device."""
    if not precise:
        return [program.remaining for program in setting.programs]
    return [_replayed_remaining(program, setting.buffer) for program in setting.programs]


@lru_cache(maxsize=4096)
def _replayed_remaining(program: Program, buffer: int) -> tuple[int, ...]:
    out = np.empty(len(program), np.int64)
    remaining_alone(np.array(program.fetch, np.int64), np.array(program.compute, np.int64), buffer, out)
    return tuple(out.tolist())


def remaining_alone_s(case: Case, program: Program) -> float:
    """Return the seconds from the first layer of a program to its end on an otherwise idle device."""
    return _replayed_remaining(program, case.setting.buffer)[0] * case.clock.tick_s


@contextmanager
def _add_shape_advice(workload: Workload, stream: Stream) -> Iterator[None]:
    """Raise ``ShapeNeeded`` errors of the block with advice for the workload file or the command-line option."""
    try:
        yield
    except ShapeNeeded as error:
        raise workload.advised(stream, error) from error


def _profiles(stream: Stream, npu: Npu, cost: str, folder: str) -> list[Profile]:
    """Return the profiles of a stream at batch 1, 2, ...: from its files, or estimated for the NPU.

    cost: the name of a cost model. folder: of the workload, where relative paths start.
    """
    if stream.profiles:
        profiles = [read_profile(Path(folder) / path) for path in stream.profiles[: stream.max_batch]]
        if len({len(profile.layers) for profile in profiles}) > 1:
            raise WorkloadError(f"{stream.model}: its profiles have different numbers of layers")
        return profiles
    name, shapes = _resolve_name(stream, folder), tuple(stream.shapes.items())
    return [
        _estimate_cached(name, stream.seq_len, shapes, npu, batch, cost) for batch in range(1, stream.max_batch + 1)
    ]


@lru_cache(maxsize=1024)
def _estimate_cached(
    name: str, seq_len: int, shapes: tuple[tuple[str, tuple[int, ...]], ...], npu: Npu, batch: int, cost: str
) -> Profile:
    model = load_model(name, shapes=dict(shapes), parameters={"seq_len": seq_len})
    return estimate(model, npu, batch=batch, cost=cost)


def _load_stream_model(stream: Stream, folder: str) -> Model:
    return load_model(
        _resolve_name(stream, folder),
        shapes=stream.shapes,
        parameters={"seq_len": stream.seq_len},
        exits=stream.exits,
        exit_head=stream.exit_head,
    )


def _resolve_name(stream: Stream, folder: str) -> str:
    """Return the model name for ``load_model``; the path of a file is relative to *folder*, that of the workload."""
    file, _ = file_and_task(stream.model)
    in_folder = file.endswith(".onnx") and not Path(file).is_absolute()
    name = str(Path(folder) / stream.model) if in_folder else stream.model
    if name.endswith(".onnx") and Path(name).is_file() and (tasks := tasks_in(Path(name))):
        example, tasks_text = f"{stream.model}/{tasks[0].name}", ", ".join(task.name for task in tasks)
        raise WorkloadError(f"{stream.model} holds {tasks_text}; say which of them a stream asks for, as {example}")
    return name


def _terms(stream: Stream, programs: int, clock: Clock) -> Terms:
    """Return a stream in ticks; *programs*: the index of its program at batch 1."""
    closed = stream.arrival == "closed"
    return Terms(
        programs=programs,
        deadline=_ticks(clock, stream.deadline_s, "deadline_ms"),
        max_batch=stream.max_batch,
        timeout=_ticks(clock, stream.batch_timeout_ms / 1e3, "batch_timeout_ms"),
        priority=stream.priority,
        think=_ticks(clock, stream.think_ms / 1e3, "think_ms") if closed else -1,
        clients=stream.clients if closed else 0,
    )


def _ticks(clock: Clock, seconds: float, key: str) -> int:
    """Return a time of the workload in ticks; WorkloadError if the clock cannot hold it. key: for the message."""
    if seconds / clock.tick_s > MAX_TICKS:
        raise WorkloadError(f"{key}: {seconds:g} s are more than the device's clock can count")
    return clock.ticks(seconds)
