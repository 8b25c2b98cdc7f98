"""``simulate_requests``: run a workload under a policy, and report the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.base.version import __version__
from weft.devices import Host, Npu
from weft.engine.lateness import check_late
from weft.engine.policies import Option, Setting, make_request_policy, policy_called
from weft.kernels import request_state as k
from weft.reports.pictures import Shown
from weft.reports.trace import Trace
from weft.simulation.request_report import RequestReport, stream_report
from weft.simulation.requests import compiled as fast
from weft.simulation.requests import plain
from weft.simulation.requests.case import Case, Device
from weft.simulation.requests.tally import Tally


@dataclass(frozen=True, slots=True, eq=False)
class RequestRun(Shown):
    """A run and the latencies behind its report."""

    report: RequestReport
    tally: Tally
    tick_s: float

    def __repr__(self) -> str:
        return f"RequestRun({self.report})"


def simulate_requests(
    case: Case,
    policy: str,
    *,
    late: str = "weave",
    options: Mapping[str, Option] | None = None,
    seed: int | None = None,
    record: bool = False,
    compiled: bool = True,
    most_missed: Sequence[float] | None = None,
) -> RequestRun:
    """Serve a workload under a policy.

    late: the rule for requests that can no longer be on time (``engine.lateness``). options: of the policy.
    seed: None: the workload's own. record: keep every answer and every issue (small runs only). compiled: use the
    compiled loop if that covers the run; the result is the same.
    most_missed: the number of deadlines that each stream may miss; the run ends as soon as a stream has missed more.
    """
    check_late(late)
    chooser = make_request_policy(policy, case.setting_of(policy_called(policy)), options)
    if compiled and fast.applies(case, chooser) and fast.is_quick(case):
        tally = fast.serve(case, chooser, late, seed, record, most_missed)
    else:
        tally = plain.serve(case, chooser, late, seed, most_missed)
        tally = tally if record or not compiled else tally.counted
    return RequestRun(_report(case, policy, late, tally), tally, case.clock.tick_s)


def serve_requests(
    case: Case,
    policy: str,
    executor: Callable[[Setting], plain.LoggedExecutor],
    *,
    late: str = "weave",
    options: Mapping[str, Option] | None = None,
    seed: int | None = None,
) -> RequestRun:
    """Serve a workload under a policy on an executor of the caller, in simulated or real time.

    executor: a function that creates the executor for a setting. The report is the same as of a simulation.
    """
    check_late(late)
    setting = case.setting_of(policy_called(policy))
    chooser = make_request_policy(policy, setting, options)
    tally = plain.serve(case, chooser, late, seed, executor=executor(setting))
    return RequestRun(_report(case, policy, late, tally), tally, case.clock.tick_s)


def request_trace(case: Case, run: RequestRun) -> Trace:
    """Return the trace of a recorded run; a query of the trace is a batch."""
    setting = case.setting_of(policy_called(run.report.policy))
    stream, query, layer, program, *_ = run.tally.issues.T
    times = run.tally.issues[:, 4:]  # start and end of fetch and compute, in ticks
    sizes = np.array([size for p in setting.programs for size in p.weight_bytes], np.int64)
    offsets = np.cumsum([0, *map(len, setting.programs)], dtype=np.int64)
    sizes = sizes[offsets[program] + layer]
    fetch_start, fetch_end, compute_start, compute_end = (times * run.tick_s).T.copy()
    models = tuple(spec.model for spec in case.workload.stream)
    names = tuple(setting.programs[term.programs].names for term in case.terms)
    settings = {
        "weft": __version__,
        "device": case.device.name,
        **_memory_settings(case.device),
        "policy": run.report.policy,
        "late": run.report.late,
        "workload": case.workload.model_dump(mode="json", exclude={"folder"}),
    }
    return Trace(
        models, names, stream, query, layer, fetch_start, fetch_end, compute_start, compute_end, sizes, settings
    )


def _memory_settings(device: Device) -> dict[str, float]:
    """Return the settings from which a trace's page draws the weight buffer; empty for a device without one."""
    if not isinstance(device, Npu):
        return {}
    return {"weight_buffer_bytes": device.weight_buffer_bytes, "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s}


def _report(case: Case, policy: str, late: str, tally: Tally) -> RequestReport:
    """Compute the report of a run; requests of the warm-up are not counted."""
    tick_s, workload = case.clock.tick_s, case.workload
    makespan = float(tally.clocks[k.ARRAY]) * tick_s
    span = max(makespan, workload.duration_s) - workload.warmup_s
    offered_span = workload.duration_s - workload.warmup_s
    streams = tuple(
        stream_report(
            stream.model,
            tally.counts[index].tolist(),
            tally.histogram[index],
            deadline_s=stream.deadline_s,
            tick_s=tick_s,
            span_s=offered_span,
        )
        for index, stream in enumerate(workload.stream)
    )
    arrived = sum(stream.arrived for stream in streams)

    def worth(counts: Sequence[int], seconds: float) -> float:
        """Return the summed standalone times of requests, counted by stream, per second."""
        return sum(count * alone for count, alone in zip(counts, case.alone_s, strict=True)) / seconds

    busy = float(tally.clocks[k.COMPUTED]) * tick_s / makespan if makespan else 0.0
    on_time = [s.completed - (s.violated - s.dropped - s.refused) for s in streams]
    return RequestReport(
        device=case.device.name,
        policy=policy,
        late=late,
        stp=worth([s.completed for s in streams], span),
        goodput_stp=worth(on_time, span),
        offered_stp=worth([s.arrived for s in streams], offered_span),
        violation_rate=sum(s.violated for s in streams) / arrived if arrived else 0.0,
        worst_violation_rate=max(s.violation_rate for s in streams),
        pe_utilisation=busy,
        dram_utilisation=float(tally.clocks[k.FETCHED]) * tick_s / makespan if makespan else 0.0,
        makespan_s=makespan,
        decisions=int(tally.clocks[k.STEPS]),
        streams=streams,
        load=busy / case.device.lanes if isinstance(case.device, Host) else None,
    )
