"""Prediction of a measured run: a simulation of the server with the same arrivals, policy and segments.

The server measures its segments, and the load generator writes them beside the arrivals that it sent; here the same
engine, source and policy run on ``SimulatedHost``. If prediction and measurement differ, either segment times vary
around the means that are simulated, or something besides the segments takes time. Requests leave a model with exits
where they really left it; a request without an answer leaves at an exit drawn at random from those of the others.
Requests for stitched models wait in one queue, as they do in the server. Where models share a GPU, lanes are its
shares, and the bench file has the measured resource use of each model, but not the contention of pairs that the server
learned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from weft.base.errors import InputError
from weft.base.jsonfile import first_problem, read_json
from weft.devices.costs.program import Program
from weft.devices.host import Gates, GpuCuts, like_at
from weft.devices.shares import GpuLikeness, Shares
from weft.engine import Arrivals, SimulatedHost, request_engine
from weft.engine.lane_queues import DEVICE_AHEAD
from weft.engine.policies import Option, Setting, make_request_policy, policy_called
from weft.engine.policies.base import NO_BUFFER, NO_DEADLINE, UNBOUNDED_ROUNDS
from weft.engine.simulated_host import Crowd, DrawnWork
from weft.engine.tickets import Terms, Ticket, WaitingLine
from weft.load.payload import served_name
from weft.load.report import observed_quantiles
from weft.workloads.exits import check_rates

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

TICKS_PER_S = 1_000_000_000
"""A tick is a nanosecond, as in the server."""

Time = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class _Part(BaseModel):
    """A part of a result of the load generator (docs/formats.md); other fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _MeasuredModel(_Part):
    """One model as the server measured it."""

    segments: Annotated[list[str], Field(min_length=1)]
    times_s: dict[int, list[Time]]
    seen_s: dict[int, list[Time]] = {}
    max_batch: Annotated[int, Field(ge=1, le=65536)] = 1
    queue_size: Annotated[int, Field(ge=1)] = NO_DEADLINE
    batch_timeout_ms: Time = 0.0
    body: str = ""
    """The name of the body that stitched models have in common; empty for other models."""
    exits: list[int] = []
    """The number of segments before each early exit; the end is not included."""
    exit_rates: list[float] = []
    """Share of requests that the server expected to leave at each exit, the end last."""
    like: dict[int, GpuLikeness] = {}
    """Batch size -> resource use of the model, where models share a GPU."""
    gated: bool = False
    """Whether the device could end a batch between two segments."""
    gates: Gates | None = None
    """What its gates cost; None: it was not measured."""

    @model_validator(mode="after")
    def _consistent(self) -> _MeasuredModel:
        if any(a >= b for a, b in pairwise([0, *self.exits, len(self.segments)])):
            raise ValueError(f"exits = {self.exits} do not lie in order within {len(self.segments)} segments")
        if self.exit_rates:
            check_rates(self.exit_rates)
            if len(self.exit_rates) != len(self.ends):
                raise ValueError(f"{len(self.exit_rates)} exit_rates for {len(self.ends)} exits")
        return self

    @property
    def ends(self) -> list[int]:
        """The number of segments before each exit, the end included."""
        return [*self.exits, len(self.segments)]


class _Profile(_Part):
    policy: str
    policy_options: dict[str, Option] = {}
    late: Literal["weave", "keep", "demote"] = "weave"
    lanes: Annotated[int, Field(ge=1, le=1024)]
    total_queue: Annotated[int, Field(ge=1)] = NO_DEADLINE
    default_slo_ms: Time = 1000.0
    hand_over_s: Time = 0.0
    gpu: GpuCuts | None = None
    """How models share a GPU; None on other devices."""
    models: dict[str, _MeasuredModel]


class _Stream(_Part):
    model: str
    deadline_s: Time | None = None
    overhead_s: Time | None = None
    scheduled_s: list[Time]
    lag_s: list[Time]
    latency_s: list[Time | None]
    status: list[int]
    exit: list[Annotated[int, Field(ge=1)] | None] | None = None
    """The exit at which each request left, counted from 1; None for a request without an answer."""

    @model_validator(mode="after")
    def _consistent(self) -> _Stream:
        for key in ("lag_s", "latency_s", "status", "exit"):
            column = getattr(self, key)
            if column is not None and len(column) != len(self.scheduled_s):
                raise ValueError(f"{key} has {len(column)} values for {len(self.scheduled_s)} requests")
        return self


class _BenchFile(_Part):
    """The parts of a load generator's result that are needed here (docs/formats.md)."""

    format: Literal[1]
    deadlines: Literal["strict", "soft", "none"]
    transport_s: Time
    workload: dict[str, Any]
    streams: list[_Stream]
    profile: _Profile | None


@dataclass(frozen=True, slots=True)
class Figures:
    """Latencies of answered requests and the share of deadlines missed."""

    answered: int
    mean_s: float | None
    p50_s: float | None
    p99_s: float | None
    missed_share: float | None


@dataclass(frozen=True, slots=True)
class StreamPrediction:
    """One stream, measured and predicted."""

    model: str
    requests: int
    overhead_s: float
    """Added to every predicted latency: the time that a request takes alone besides its segments."""
    measured: Figures
    predicted: Figures


@dataclass(frozen=True, slots=True)
class Prediction:
    """A bench run beside its simulation."""

    policy: str
    """The policy of the simulation."""
    policy_options: dict[str, Option]
    measured_policy: str
    """The policy of the server, when it was measured."""
    measured_options: dict[str, Option]
    lanes: int
    hand_over_s: float
    """Added to every segment: the time between two segments of a request."""
    streams: tuple[StreamPrediction, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"format": 1, **asdict(self)}


def predict(path: str | Path, policy: str | None = None, options: Mapping[str, Option] | None = None) -> Prediction:
    """Simulate the server of a ``weft bench --json FILE --save-latencies`` run, under its own policy or another.

    options: of the policy; if it is the server's own policy, they override the options that the server had. InputError
    for a file that cannot be used.
    """
    bench = _read(path)
    profile = bench.profile
    if profile is None:
        raise InputError(f"{path}: was not measured on a weft server, so its segments are not known")
    for stream in bench.streams:
        model = profile.models.get(served_name(stream.model))
        if model is None:
            raise InputError(f"{path}: the server had no measured segments of {stream.model}")
        last_exit = max((exit_number or 1 for exit_number in stream.exit or ()), default=1)
        if last_exit > len(model.ends):
            raise InputError(
                f"{path}: a request of {stream.model} left at exit {last_exit}, the model has {len(model.ends)}"
            )
    name = policy or profile.policy
    all_options = {**(profile.policy_options if name == profile.policy else {}), **(options or {})}
    ends = _simulate_ends(bench, profile, name, all_options)
    streams = []
    for stream, end_s in zip(bench.streams, ends, strict=True):
        counted = np.array(stream.scheduled_s) >= float(bench.workload.get("warmup_s", 0.0))
        overhead_s = bench.transport_s if stream.overhead_s is None else stream.overhead_s
        predicted_s = end_s - np.array(stream.scheduled_s) + overhead_s
        streams.append(
            StreamPrediction(
                stream.model,
                int(counted.sum()),
                overhead_s,
                _figures(_measured_latencies(stream)[counted], stream.deadline_s),
                _figures(predicted_s[counted], stream.deadline_s),
            )
        )
    return Prediction(
        policy=name,
        policy_options=all_options,
        measured_policy=profile.policy,
        measured_options=profile.policy_options,
        lanes=profile.lanes,
        hand_over_s=profile.hand_over_s,
        streams=tuple(streams),
    )


def _read(path: str | Path) -> _BenchFile:
    """Read a result of ``weft bench``; InputError if it is none, or has no single requests."""
    raw = read_json(path, InputError)
    streams = raw.get("streams") if isinstance(raw, dict) else None
    if isinstance(streams, list) and any(isinstance(stream, dict) and "latency_s" not in stream for stream in streams):
        raise InputError(f"{path}: has no single requests; run weft bench with --save-latencies")
    try:
        return _BenchFile.model_validate(raw)
    except ValidationError as error:
        raise InputError(f"{path}: not a result of weft bench: {first_problem(error, _BenchFile, _Stream)}") from error


class _Clients(Arrivals):
    """Simulated clients; requests of streams whose models have the same body wait in one queue."""

    def __init__(
        self, queues: Sequence[int], terms: Sequence[Terms], times: Sequence[Iterator[int]], **how: Any
    ) -> None:
        """*queues*: for each stream, the number of the stream in whose queue its requests wait."""
        super().__init__(terms, times, **how)
        self._queues = queues
        self._senders: dict[Ticket, int] = {}

    def take(self, now: int) -> Iterator[Ticket]:
        for ticket in super().take(now):
            if (queue := self._queues[ticket.stream]) != ticket.stream:
                self._senders[ticket], ticket.stream = ticket.stream, queue
            yield ticket

    def _answer(self, ticket: Ticket, end: int, now: int) -> None:
        ticket.stream = self._senders.pop(ticket, ticket.stream)  # back to the stream that sent it
        super()._answer(ticket, end, now)


def _shared_queues(bench: _BenchFile, profile: _Profile) -> list[int]:
    """Return, for each stream, the number of the first stream whose model has the same body."""
    bodies = [profile.models[served_name(stream.model)].body for stream in bench.streams]
    return [bodies.index(body) if body else index for index, body in enumerate(bodies)]


def _simulate_ends(bench: _BenchFile, profile: _Profile, policy: str, options: dict[str, Option]) -> list[Floats]:
    """Simulate the run; return the end of each request of each stream in seconds, NaN without an answer.

    options: of the policy.
    """
    programs: list[Program] = []
    terms: list[Terms] = []
    times, leaves, lines = [], [], []
    for index, stream in enumerate(bench.streams):
        model = profile.models[served_name(stream.model)]
        terms.append(_terms(bench, profile, index, model, len(programs)))
        lines.append(WaitingLine(model.queue_size))
        sizes = range(1, model.max_batch + 1)
        programs += [_program(stream.model, model, batch, profile.hand_over_s) for batch in sizes]
        sent = _sent_ticks(stream)
        order = np.argsort(sent, kind="stable")
        times.append(iter(sent[order].tolist()))
        leaves.append(iter(_layers_until_exit(stream, model, seed=index)[order].tolist()) if model.exits else None)
    setting = Setting(tuple(programs), NO_BUFFER, UNBOUNDED_ROUNDS, lanes=profile.lanes)
    if policy_called(policy).traits.shares:
        setting = replace(setting, lanes=1, ahead=DEVICE_AHEAD, shares=_shares(bench, profile, policy))
    chosen_policy = make_request_policy(policy, setting, options)
    strict = bench.deadlines == "strict"
    feed = _Clients(_shared_queues(bench, profile), terms, times, end=0, strict=strict, leaves=leaves, lines=lines)
    rests = [program.remaining for program in programs]
    engine, source = request_engine(
        chosen_policy, feed, _executor(setting), rests, late=profile.late, places=profile.total_queue
    )
    for term in terms:
        source.open(term)
    engine.run()
    return _end_times(bench, feed)


def _shares(bench: _BenchFile, profile: _Profile, policy: str) -> Shares:
    """Return the shares of the server's GPU, for the programs of all streams; InputError if it had none."""
    models = [profile.models[served_name(stream.model)] for stream in bench.streams]
    if profile.gpu is None or not all(model.like for model in models):
        raise InputError(f"{policy} chooses shares of a GPU, and the server's models had none; name another --policy")
    names = [served_name(stream.model) for stream in bench.streams]
    kinds, bodies = [], []
    for name, model in zip(names, models, strict=True):
        kinds += [like_at(model.like, batch) for batch in range(1, model.max_batch + 1)]
        bodies += [names.index(name)] * model.max_batch
    return profile.gpu.shares(kinds, bodies)


def _executor(setting: Setting) -> SimulatedHost:
    """Return lanes whose segments take the measured times; lanes that are shares of a device slow each other down."""
    if setting.shares is None:
        return SimulatedHost(setting)
    kinds = range(len(setting.programs))
    return SimulatedHost(setting, crowd=Crowd(setting.shares, kinds, lambda segment: DrawnWork(0, segment.compute)))


def _layers_until_exit(stream: _Stream, model: _MeasuredModel, seed: int) -> Ints:
    """Return the number of segments after which each request of a stream leaves.

    A request without an answer leaves at an exit drawn from those of the stream's other requests; if there are none,
    from the rates that the server expected.
    """
    count = len(model.ends)
    exits = np.array([place or 0 for place in stream.exit or [0] * len(stream.scheduled_s)], np.int64)
    counts = np.bincount(exits, minlength=count + 1)[1:]
    rates = counts / counts.sum() if counts.any() else np.array(model.exit_rates or [*[0.0] * (count - 1), 1.0])
    unanswered = np.flatnonzero(exits == 0)
    exits[unanswered] = 1 + np.random.default_rng(seed).choice(count, size=len(unanswered), p=rates / rates.sum())
    return np.array(model.ends, np.int64)[exits - 1]


def _end_times(bench: _BenchFile, feed: Arrivals) -> list[Floats]:
    """Return the end of each request in seconds, in the order of the bench file; NaN without an answer.

    feed: the simulated clients, which have recorded the answers.
    """
    ends_by_arrival: list[dict[int, list[int]]] = [{} for _ in bench.streams]
    for answer in feed.answers:
        ends_by_arrival[answer.stream].setdefault(answer.arrival, []).append(answer.end)
    ends = []
    for stream, by_arrival in zip(bench.streams, ends_by_arrival, strict=True):
        # Requests that arrive at the same tick are interchangeable.
        ticks = [by_arrival[tick].pop() for tick in _sent_ticks(stream).tolist()]
        ends.append(np.array([tick / TICKS_PER_S if tick >= 0 else np.nan for tick in ticks]))
    return ends


def _sent_ticks(stream: _Stream) -> Ints:
    """Return the tick at which each request was sent."""
    sent_s: Floats = np.add(stream.scheduled_s, stream.lag_s)
    return np.rint(sent_s * TICKS_PER_S).astype(np.int64)


def _terms(bench: _BenchFile, profile: _Profile, index: int, model: _MeasuredModel, first_program: int) -> Terms:
    """Return the terms of stream number *index*. first_program: the number of its program at batch 1."""
    streams, deadline_s = bench.workload.get("stream"), bench.streams[index].deadline_s
    if deadline_s is None or bench.deadlines == "none":
        deadline_s = profile.default_slo_ms / 1e3
    priority = streams[index].get("priority", 1) if isinstance(streams, list | tuple) else 1
    return Terms(
        programs=first_program,
        deadline=round(deadline_s * TICKS_PER_S),
        max_batch=model.max_batch,
        timeout=round(model.batch_timeout_ms * 1e6),
        priority=priority,
    )


def _program(name: str, model: _MeasuredModel, batch: int, hand_over_s: float) -> Program:
    """Return the measured segments of a model at a batch size as a program.

    hand_over_s: added to every segment, unless the server started all of them at once.
    """
    times = model.seen_s.get(batch) or model.times_s.get(batch) or []
    if len(times) != len(model.segments):
        raise InputError(f"{name}: {len(times)} times for {len(model.segments)} segments at batch {batch}")
    nothing = (0,) * len(times)
    added_s = 0.0 if model.gated else hand_over_s
    ticks = tuple(max(1, round((time_s + added_s) * TICKS_PER_S)) for time_s in times)
    rates = tuple(model.exit_rates) if model.exits else ()
    program = Program(name, tuple(model.segments), nothing, ticks, nothing, tuple(model.exits), rates)
    return program.with_gates(model.gates or Gates()) if model.gated else program


def _measured_latencies(stream: _Stream) -> Floats:
    """Return the latency of each request in seconds, NaN without an answer."""
    latency_s = np.array(stream.latency_s, np.float64)  # None becomes NaN
    return np.where(np.array(stream.status) == 200, latency_s, np.nan)


def _figures(latency_s: Floats, deadline_s: float | None) -> Figures:
    """Return the figures of *latency_s*, seconds by request, NaN without an answer; *deadline_s*: None without one."""
    answered = latency_s[~np.isnan(latency_s)]
    missed = None
    if len(latency_s) and deadline_s is not None:
        missed = 1 - float((answered <= deadline_s).sum()) / len(latency_s)
    if not len(answered):
        return Figures(answered=0, mean_s=None, p50_s=None, p99_s=None, missed_share=missed)
    p50, p99 = observed_quantiles(answered, (0.5, 0.99))
    return Figures(len(answered), float(answered.mean()), p50, p99, missed)
