"""``simulate_requests``: a workload of arriving requests with deadlines, on a simulated NPU.

The compiled loop (``kernels.online``) and the plain engine over ``Requests`` give the same answers; the
compiled one keeps its memory however long the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from weft.bound import alone_ticks
from weft.devices import Npu, check_activations, load_npu
from weft.engine.arrivals import Answer, Arrivals
from weft.engine.engine import Engine
from weft.engine.requests import LATE, QUEUE_PLACES, Requests, Terms
from weft.engine.simulated_npu import SimulatedNpu
from weft.errors import InputError, WorkloadError, unknown_name
from weft.kernels import online as k
from weft.models.sources import load_model
from weft.policies import Option, Policy, Setting, make_request_policy
from weft.policies.base import UNBOUNDED_ROUNDS
from weft.policies.edf import EarliestDeadline
from weft.policies.in_order import Fifo
from weft.policies.layerweaver import Layerweaver
from weft.policies.layerweaver_plus import LayerweaverPlus
from weft.policies.prema import Prema
from weft.policies.weft_plus import WeftPlus
from weft.profiles import Profile, estimate, read_profile
from weft.program import MAX_TICKS, Clock, Program, lower
from weft.reports.requests import RequestReport, stream_report
from weft.trace import Trace
from weft.version import __version__
from weft.workloads.online import Stream, Workload

Ints = npt.NDArray[np.int64]

BLOCK = 4096
MOST_RECORDED = 1 << 20
"""Issues and answers kept where a run is recorded; it goes on uncounted beyond."""

ONLINE: dict[type[Policy], int] = {
    Fifo: k.FIFO,
    EarliestDeadline: k.EDF,
    Prema: k.PREMA,
    Layerweaver: k.LAYERWEAVER,
    LayerweaverPlus: k.LAYERWEAVER_PLUS,
    WeftPlus: k.WEFT_PLUS,
}
"""Policies with a compiled loop for requests."""


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """What a run counted."""

    clocks: Ints
    counts: Ints
    histogram: Ints
    answers: tuple[Answer, ...]
    """Every request's fate, where asked for."""
    issues: Ints
    """Stream, query, layer, program and four times of every issue, where asked for."""

    @property
    def order(self) -> tuple[tuple[int, int, int], ...]:
        """Stream, query and layer of every issue."""
        return tuple((s, q, layer) for s, q, layer in self.issues[:, :3].tolist())


@dataclass(frozen=True, slots=True, eq=False)
class RequestRun:
    """A run and the latencies behind its report."""

    report: RequestReport
    tally: Tally
    tick_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A workload lowered to a device: everything a run needs but its policy and its seed."""

    workload: Workload
    npu: Npu
    clock: Clock
    setting: Setting
    terms: tuple[Terms, ...]
    alone_s: tuple[float, ...]
    """Standalone time of one request of each stream."""


def prepare(workload: Workload, npu: Npu | None = None, cost: str = "pipelined") -> Case:
    """Price every stream at every batch size on the device and lower all to its clock."""
    npu = npu or load_npu(workload.device)
    clock = Clock.of(npu)
    _ticks(clock, workload.duration_s, "duration_s")
    programs: list[Program] = []
    terms, alone, peaks = [], [], []
    for stream in workload.stream:
        profiles = _profiles(stream, npu, cost, workload.folder)
        peaks.append((stream.model, profiles[-1].peak_activation_bytes))
        lowered = [lower(profile, npu) for profile in profiles]
        terms.append(_terms(stream, len(programs), clock))
        alone.append(alone_ticks(lowered[0], clock.buffer) * clock.tick_s)
        programs += lowered
    check_activations(npu, peaks)
    setting = Setting(tuple(programs), clock.buffer, UNBOUNDED_ROUNDS)
    return Case(workload, npu, clock, setting, tuple(terms), tuple(alone))


def simulate_requests(
    case: Case,
    policy: str,
    *,
    late: str = "demote",
    options: Mapping[str, Option] | None = None,
    seed: int | None = None,
    record: bool = False,
    compiled: bool = True,
) -> RequestRun:
    """Serve a workload under a policy.

    late: what becomes of requests that can no longer be on time: keep, demote or drop.
    record: keep every answer and every issue (small runs only).
    """
    if late not in LATE:
        raise InputError(unknown_name("rule for late requests", late, LATE))
    chooser = make_request_policy(policy, case.setting, options)
    if late == "drop":
        _check_closed(case, chooser)
    if compiled and type(chooser) in ONLINE:
        tally = _compiled(case, chooser, late, seed, record)
    else:
        tally = _plain(case, chooser, late, seed)
    return RequestRun(_report(case, policy, late, tally), tally, case.clock.tick_s)


def _check_closed(case: Case, policy: Policy) -> None:
    """Refuse a closed stream whose requests would all be dropped as they arrive: its clients would never rest."""
    rests = estimates(case, policy)
    for stream, term in zip(case.workload.stream, case.terms, strict=True):
        if term.think >= 0 and term.deadline < rests[term.programs][0] * policy.foresight // 100:
            raise WorkloadError(
                f"{stream.model}: deadline_ms = {stream.deadline_ms:g} is shorter than the model takes alone, so every "
                "request of its clients would be dropped at once; allow more time, or keep or demote late requests"
            )


def request_trace(case: Case, run: RequestRun) -> Trace:
    """The spans of a recorded run; a query is a batch of its stream."""
    stream, query, layer, program, *_ = run.tally.issues.T
    sizes = np.array([size for p in case.setting.programs for size in p.weight_bytes], np.int64)
    first = np.cumsum([0, *map(len, case.setting.programs)], dtype=np.int64)
    fetch_start, fetch_end, compute_start, compute_end = (run.tally.issues[:, 4:] * run.tick_s).T.copy()
    return Trace(
        streams=tuple(spec.model for spec in case.workload.stream),
        layers=tuple(case.setting.programs[term.programs].names for term in case.terms),
        stream=stream,
        query=query,
        layer=layer,
        fetch_start_s=fetch_start,
        fetch_end_s=fetch_end,
        compute_start_s=compute_start,
        compute_end_s=compute_end,
        weight_bytes=sizes[first[program] + layer],
        settings={
            "weft": __version__,
            "device": case.npu.name,
            "weight_buffer_bytes": case.npu.weight_buffer_bytes,
            "bandwidth_bytes_per_s": case.npu.bandwidth_bytes_per_s,
            "policy": run.report.policy,
            "late": run.report.late,
            "workload": case.workload.model_dump(mode="json", exclude={"folder"}),
        },
    )


def estimates(case: Case, policy: Policy) -> list[Sequence[int]]:
    """Remaining time from every layer of every program, as the policy estimates it."""
    if not getattr(policy, "precise", False):
        return [program.remaining for program in case.setting.programs]
    return [_precise(program, case.setting.buffer) for program in case.setting.programs]


@lru_cache(maxsize=4096)
def _precise(program: Program, buffer: int) -> tuple[int, ...]:
    out = np.empty(len(program), np.int64)
    k.remaining_alone(np.array(program.fetch, np.int64), np.array(program.compute, np.int64), buffer, out)
    return tuple(out.tolist())


def _profiles(stream: Stream, npu: Npu, cost: str, folder: str) -> list[Profile]:
    if stream.profiles:
        found = [read_profile(Path(folder) / path) for path in stream.profiles[: stream.max_batch]]
        if len({len(profile.layers) for profile in found}) > 1:
            raise WorkloadError(f"{stream.model}: its profiles have different numbers of layers")
        return found
    name = stream.model
    if name.endswith(".onnx") and not Path(name).is_absolute():
        name = str(Path(folder) / name)
    shapes = tuple(stream.shapes.items())
    return [_estimated(name, stream.seq_len, shapes, npu, batch, cost) for batch in range(1, stream.max_batch + 1)]


@lru_cache(maxsize=1024)
def _estimated(
    name: str, seq_len: int, shapes: tuple[tuple[str, tuple[int, ...]], ...], npu: Npu, batch: int, cost: str
) -> Profile:
    model = load_model(name, shapes=dict(shapes), parameters={"seq_len": seq_len})
    return estimate(model, npu, batch=batch, cost=cost)


def _terms(stream: Stream, programs: int, clock: Clock) -> Terms:
    closed = stream.arrival == "closed"
    return Terms(
        programs=programs,
        deadline=_ticks(clock, stream.deadline_ms / 1e3, "deadline_ms"),
        max_batch=stream.max_batch,
        timeout=_ticks(clock, stream.batch_timeout_ms / 1e3, "batch_timeout_ms"),
        priority=stream.priority,
        think=_ticks(clock, stream.think_ms / 1e3, "think_ms") if closed else -1,
        clients=stream.clients if closed else 0,
    )


def _ticks(clock: Clock, seconds: float, key: str) -> int:
    """A time of the workload on the device's clock; refused where the clock cannot hold it."""
    if seconds / clock.tick_s > MAX_TICKS:
        raise WorkloadError(f"{key}: {seconds:g} s are more than the device's clock can count")
    return clock.ticks(seconds)


def _blocks(case: Case, index: int, seed: int | None) -> Iterator[Ints]:
    """Arrivals of one stream in ticks."""
    if case.workload.stream[index].arrival == "closed":
        return
    for block in case.workload.arrivals(index, seed):
        yield np.rint(block / case.clock.tick_s).astype(np.int64)


def _plain(case: Case, policy: Policy, late: str, seed: int | None) -> Tally:
    executor = SimulatedNpu(case.setting)
    feed = Arrivals(
        case.terms,
        [(int(t) for block in _blocks(case, i, seed) for t in block) for i in range(len(case.terms))],
        end=case.clock.ticks(case.workload.duration_s),
        strict=late == "drop",
    )
    source = Requests(case.setting, feed, estimates(case, policy), demote=late == "demote", foresight=policy.foresight)
    for term in case.terms:
        source.open(term)
    steps = Engine(source, policy, executor).run()
    return _tallied(case, feed, source.deepest, executor, steps)


def _tallied(case: Case, feed: Arrivals, deepest: list[int], executor: SimulatedNpu, steps: int) -> Tally:
    """Count a plain run as the compiled loop does."""
    warm = case.clock.ticks(case.workload.warmup_s)
    counts = np.zeros((len(case.terms), 10), np.int64)
    histogram = np.zeros((len(case.terms), k.BINS), np.int64)
    for stream, arrival, end in feed.answers:
        if arrival < warm:
            continue
        row = counts[stream]
        row[k.ARRIVED] += 1
        if end < 0:
            row[k.VIOLATED] += 1
            row[k.DROPPED if end == -1 else k.REFUSED] += 1
            continue
        latency = end - arrival
        row[k.COMPLETED] += 1
        row[k.LATENCY_SUM] += latency
        row[k.LATENCY_MAX] = max(row[k.LATENCY_MAX], latency)
        row[k.VIOLATED] += latency > case.terms[stream].deadline
        histogram[stream, k.bin_of(latency)] += 1
    counts[:, k.BATCHES], counts[:, k.DEEPEST] = feed.batches(warm), deepest
    clocks = np.zeros(9, np.int64)
    clocks[k.ARRAY] = executor.ready().array_free
    clocks[k.FETCHED] = sum(head.fetch for head, _ in executor.log)
    clocks[k.COMPUTED] = sum(head.compute for head, _ in executor.log)
    clocks[k.STEPS] = steps
    issues = [(head.stream, head.query, head.layer, head.program, *times) for head, times in executor.log]
    return Tally(clocks, counts, histogram, tuple(feed.answers), np.array(issues, np.int64).reshape(-1, 8))


def _compiled(case: Case, policy: Policy, late: str, seed: int | None, record: bool) -> Tally:
    models, terms, rules = _static(case, policy, late)
    state = _fresh_state(case)
    recorded = MOST_RECORDED if record else 0
    log = k.Log(np.empty((recorded, 8), np.int64), np.empty((recorded, 3), np.int64))
    streams = len(case.terms)
    sources = [_blocks(case, index, seed) for index in range(streams)]
    arrivals = np.empty((streams, 2 * BLOCK), np.int64)
    known = np.zeros((streams, 2), np.int64)
    more = np.ones(streams, np.bool_)
    while True:
        for index, source in enumerate(sources):
            _refill(arrivals[index], known[index], more, index, source)
        if k.serve(models, terms, rules, state, log, arrivals, known, more):
            break
        if state.clocks[k.ISSUES] + 1 >= len(state.before):  # more small layers on chip than there are places
            room = np.empty_like(state.before)
            state = state._replace(before=np.concatenate([state.before, room]), peak=np.concatenate([state.peak, room]))
    answers = tuple(Answer(*row) for row in log.answers[: state.clocks[k.ANSWERED]].tolist())
    return Tally(state.clocks, state.counts, state.histogram, answers, log.issues[: state.clocks[k.LOGGED]])


def _refill(arrivals: Ints, known: Ints, more: npt.NDArray[np.bool_], index: int, source: Iterator[Ints]) -> None:
    """Top up a stream's known arrivals to more than none."""
    while more[index] and known[k.HEAD] == known[k.LENGTH]:
        block = next(source, None)
        if block is None:
            more[index] = False
            return
        arrivals[: len(block)] = block
        known[k.HEAD], known[k.LENGTH] = 0, len(block)


def _static(case: Case, policy: Policy, late: str) -> tuple[k.Models, k.Terms, k.Rules]:
    programs = case.setting.programs

    def joined(columns: Sequence[Sequence[int]]) -> Ints:
        return np.concatenate([np.array(column, np.int64) for column in columns])

    def each(name: str) -> Ints:
        return np.array([getattr(term, name) for term in case.terms], np.int64)

    models = k.Models(
        joined([program.fetch for program in programs]),
        joined([program.compute for program in programs]),
        joined(estimates(case, policy)),
        np.cumsum([0, *map(len, programs)], dtype=np.int64),
        np.array([program.compute_bound for program in programs]),
    )
    terms = k.Terms(
        each("programs"), each("deadline"), each("max_batch"), each("timeout"), each("priority"), each("think")
    )
    rules = k.Rules(
        policy=ONLINE[type(policy)],
        late=LATE.index(late),
        foresight=policy.foresight,
        stretch=getattr(policy, "stretch", 100),
        failsafe=int(getattr(policy, "failsafe", True)),
        buffer=case.setting.buffer,
        largest=int(models.fetch.max()),
        warm=case.clock.ticks(case.workload.warmup_s),
        end=case.clock.ticks(case.workload.duration_s),
    )
    return models, terms, rules


def _fresh_state(case: Case) -> k.State:
    streams = len(case.terms)
    clients = max(1, *(term.clients for term in case.terms), 1)
    batch = max(term.max_batch for term in case.terms)
    before, peak = np.empty(1 << 17, np.int64), np.empty(1 << 17, np.int64)
    before[0], peak[0] = 0, k.NEVER

    def zeros(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    state = k.State(
        zeros(9), before, peak,
        np.empty((streams, QUEUE_PLACES), np.int64), zeros(streams, 2),
        np.empty((streams, QUEUE_PLACES), np.int64), zeros(streams, 2),
        zeros(streams, clients), zeros(streams, 2),
        zeros(streams, k.JOBS, 8), zeros(streams, k.JOBS, batch),
        zeros(streams, 10), zeros(streams, k.BINS),
    )  # fmt: skip
    state.returning_at[:, k.LENGTH] = [term.clients for term in case.terms]
    return state


def _report(case: Case, policy: str, late: str, tally: Tally) -> RequestReport:
    tick_s, workload = case.clock.tick_s, case.workload
    makespan = float(tally.clocks[k.ARRAY]) * tick_s
    span = max(makespan, workload.duration_s) - workload.warmup_s
    offered_span = workload.duration_s - workload.warmup_s
    streams = tuple(
        stream_report(
            stream.model,
            tally.counts[index].tolist(),
            tally.histogram[index],
            deadline_s=stream.deadline_ms / 1e3,
            tick_s=tick_s,
            span_s=offered_span,
        )
        for index, stream in enumerate(workload.stream)
    )
    arrived = sum(stream.arrived for stream in streams)

    def worth(counts: Sequence[int], seconds: float) -> float:
        return sum(count * alone for count, alone in zip(counts, case.alone_s, strict=True)) / seconds

    on_time = [s.completed - (s.violated - s.dropped - s.refused) for s in streams]
    return RequestReport(
        device=case.npu.name,
        policy=policy,
        late=late,
        stp=worth([s.completed for s in streams], span),
        goodput_stp=worth(on_time, span),
        offered_stp=worth([s.arrived for s in streams], offered_span),
        violation_rate=sum(s.violated for s in streams) / arrived if arrived else 0.0,
        worst_violation_rate=max(s.violation_rate for s in streams),
        pe_utilisation=float(tally.clocks[k.COMPUTED]) * tick_s / makespan if makespan else 0.0,
        dram_utilisation=float(tally.clocks[k.FETCHED]) * tick_s / makespan if makespan else 0.0,
        makespan_s=makespan,
        decisions=int(tally.clocks[k.STEPS]),
        streams=streams,
    )
