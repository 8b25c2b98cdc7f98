"""Policies side by side on the same models, or for the same requests: ``compare`` and ``compare_requests``.

The command ``weft compare`` only parses and prints: the policies to compare, the runs and the best one are chosen here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.devices import Host, Npu, load_device, load_npu
from weft.devices.costs import DEFAULT_COST
from weft.devices.costs.layer_costs import Profile, estimate
from weft.engine.lateness import check_late
from weft.engine.policies import ON_SHARES, POLICIES, Option, check_policy
from weft.models.layer import Model
from weft.models.sources import load_model
from weft.reports.pictures import Shown
from weft.reports.tables import ResultTable
from weft.simulation.report import Report
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import Case, Device, prepare, simulate_requests
from weft.simulation.run_tables import comparison_table, request_comparison_table
from weft.simulation.saturated import Run, simulate
from weft.simulation.sweep import sweep_aimt
from weft.workloads import Saturated
from weft.workloads.requests import Workload, read_workload

DEFAULT_NPU = "tpuv3-like"
ALL = "all"
"""Instead of policy names: every policy that makes sense for the comparison."""

OnProgress = Callable[[str, int, int], None]
"""Callback: the current activity, the number of finished runs, and the number of all runs."""
AnyModel = str | os.PathLike[str] | Model | Profile


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Shown):
    """Saturated streams of the same models under several policies."""

    title: str
    runs: tuple[Run, ...]
    in_pieces: tuple[Report, ...] = ()
    """All policies with layers in equal pieces, the smallest that one of them chose; empty if none chose any."""
    swept: Mapping[str, Option] = field(default_factory=dict)
    """The thresholds of ``aimt`` that a sweep selected; empty without a sweep."""
    left_out: str = ""
    """The policies that ``ALL`` left out, and why; empty if policies were named."""

    def __repr__(self) -> str:
        return f"Comparison({self.title}: {self.best.report.policy} is best of {len(self.runs)})"

    @property
    def reports(self) -> tuple[Report, ...]:
        return tuple(run.report for run in self.runs)

    @property
    def best(self) -> Run:
        """The run with the highest throughput; the first among equals."""
        return max(self.runs, key=lambda run: run.report.stp)

    @property
    def remarks(self) -> tuple[str, ...]:
        """The remarks of single policies, each with the policy's name."""
        return tuple(dict.fromkeys(f"{report.policy}: {report.remark}" for report in self.reports if report.remark))

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file (docs/formats.md)."""
        raw = {"runs": self.reports, "in_pieces": self.in_pieces}
        return {"format": 1} | {key: [report.as_dict() for report in reports] for key, reports in raw.items()}

    def table(self) -> ResultTable:
        """Return the policies side by side, as ``weft compare`` prints them."""
        return comparison_table(self.title, self.reports, self.in_pieces)


@dataclass(frozen=True, eq=False, repr=False)
class RequestComparison(Shown):
    """The same requests under several policies, on a machine that was measured."""

    title: str
    reports: tuple[RequestReport, ...]
    cut_to_s: float | None = None
    """The simulated seconds, if the workload was cut short; None: all of it was simulated."""

    def __repr__(self) -> str:
        return f"RequestComparison({self.title}: {self.best.policy} is best of {len(self.reports)})"

    @property
    def best(self) -> RequestReport:
        """The run whose worst stream missed the smallest share of deadlines; the first among equals."""
        return min(self.reports, key=lambda report: report.worst_violation_rate)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON file (docs/formats.md)."""
        cut = {} if self.cut_to_s is None else {"cut_to_s": self.cut_to_s}
        return {"format": 1, **cut, "runs": [report.as_dict() for report in self.reports]}

    def table(self) -> ResultTable:
        """Return the policies side by side, as ``weft compare --workload`` prints them."""
        return request_comparison_table(self.title, self.reports)


def compare(
    models: Sequence[AnyModel],
    *,
    policies: str | Sequence[str] = ALL,
    device: str | Npu = DEFAULT_NPU,
    workload: Saturated | None = None,
    batch: int = 1,
    cost: str = DEFAULT_COST,
    spill: bool = False,
    pieces: int | None = None,
    sweep: bool = False,
    on_progress: OnProgress | None = None,
) -> Comparison:
    """Run several policies on the same models on a simulated NPU.

    models: names, .onnx files, models or profiles; *batch* and *cost* apply to all but profiles, which have costs.
    policies: names, or ``"all"``. workload: length and mix of the run. spill, pieces: as in ``simulate``; with None,
    every policy chooses its own pieces, and if any does, all run again in the smallest ones (``Comparison.in_pieces``).
    sweep: search for the best thresholds of ``aimt`` first. on_progress: called after each run.
    """
    names = _saturated_names(policies, sweep)
    npu = load_npu(device) if isinstance(device, str) else device
    profiles = [_profile(model, npu, batch, cost) for model in models]
    finished = count(1)
    options: dict[str, dict[str, Option]] = {}

    def advance(stage: str) -> None:
        """Report a finished run, out of as many as there may be: policies may run again, in pieces."""
        if on_progress:
            on_progress(stage, next(finished), 2 * len(names) + sweep)

    if sweep:
        advance("sweeping aimt")
        options["aimt"] = dict(sweep_aimt([profiles], npu).options)

    def run(name: str, pieces: int | None) -> Run:
        result = simulate(profiles, npu, name, workload, options=options.get(name), spill=spill, pieces=pieces)
        advance("simulating")
        return result

    runs = tuple(run(name, pieces) for name in names)
    most_pieces = max(run.report.pieces for run in runs)
    # all again in equal pieces, which show what the order of layers gains without the cutting
    in_pieces = tuple(run(name, most_pieces).report for name in names if most_pieces > 1 and pieces is None)
    batches = " and ".join(map(str, dict.fromkeys(profile.batch for profile in profiles)))
    title = f"{' + '.join(profile.model for profile in profiles)} on {npu.name}, batch {batches}"
    return Comparison(title, runs, in_pieces, options.get("aimt", {}), left_out() if policies == ALL else "")


def compare_requests(
    workload: Workload | str | Path,
    device: Host | str | Path,
    *,
    policies: str | Sequence[str] = ALL,
    late: str = "weave",
    name: str | None = None,
    most_segments: int | None = None,
    on_progress: OnProgress | None = None,
) -> RequestComparison:
    """Simulate the requests of a workload under several policies, on a machine that was measured.

    workload: a workload or its file. device: the result of ``weft.measure``, or the JSON file of such a machine
    (``weft profile --device host``). policies: the names of policies, or ``ALL``. late: the rule for requests that
    cannot be on time any more, a name in ``LATE``. name: of the workload in the title; None: the name of its file.
    most_segments: about the number of segments to simulate, over all policies; None: the whole workload. A longer
    workload is cut short at the same time for all policies, so that they see the same requests. on_progress: called
    before each policy.
    """
    check_late(late)
    requests = workload if isinstance(workload, Workload) else read_workload(workload)
    host = check_host(device if isinstance(device, Host) else load_device(str(device)))
    names = request_names(policies, host)
    case = prepare(requests, host)
    cut_to_s = None if most_segments is None else _affordable_s(case, most_segments / len(names))
    if cut_to_s is not None:
        case = prepare(_shorten(requests, cut_to_s), host)
    reports = []
    for done, policy in enumerate(names):
        if on_progress:
            on_progress(f"simulating {policy}", done, len(names))
        reports.append(simulate_requests(case, policy, late=late).report)
    workload_name = name or ("requests" if isinstance(workload, Workload) else Path(workload).name)
    length_text = f", {requests.duration_s:g} s of requests"
    simulated_text = length_text if cut_to_s is None else f", the first {cut_to_s:.3g} of {requests.duration_s:g} s"
    title = f"{workload_name} on {host.name}, {host_settings(case, late)}{simulated_text}"
    return RequestComparison(title, tuple(reports), cut_to_s)


def host_settings(case: Case, late: str) -> str:
    """Return in words the settings besides the policy that must be equal in a comparison on a host.

    late: the rule for late requests.
    """
    host = case.device
    assert isinstance(host, Host)
    threads = f" x {host.threads} threads" if host.threads > 1 else ""
    sizes = sorted({terms.max_batch for terms in case.terms})
    lanes = f"{host.lanes} lane{'s' * (host.lanes != 1)}{threads}"
    return f"{lanes}, {batching(sizes)}, late requests: {late}"


def batching(sizes: Sequence[int]) -> str:
    """Return in words how large batches are; *sizes*: the largest batch of each model, ascending."""
    if sizes[-1] == 1:
        return "no batches"
    return f"batches to {sizes[-1]}" if sizes[0] == sizes[-1] else f"batches to {sizes[0]}-{sizes[-1]}"


def _affordable_s(case: Case, most_segments: float) -> float | None:
    """Return the seconds of a workload that take *most_segments* segments under a policy; None: the whole workload.

    Batches are not taken into account: they have fewer segments, and take less time to simulate.
    """
    duration_s = case.workload.duration_s
    per_s = sum(
        _requests_per_s(case, index) * len(case.setting.programs[terms.programs])
        for index, terms in enumerate(case.terms)
    )
    return most_segments / per_s if per_s * duration_s > most_segments else None


def _requests_per_s(case: Case, index: int) -> float:
    """Return the mean number of requests of a stream per second."""
    stream, rate = case.workload.stream[index], case.workload.rates[index]
    if rate is not None:
        return rate
    if stream.arrival == "closed":  # a client's cycle: the requests of all clients one after another, then its pause
        return stream.clients / (stream.think_ms / 1e3 + stream.clients * case.alone_s[index])
    return sum(map(len, case.arrivals(index, seed=None))) / case.workload.duration_s


def _shorten(workload: Workload, duration_s: float) -> Workload:
    """Return the first seconds of a workload; the warm-up keeps its share of the duration."""
    warmup_s = workload.warmup_s * duration_s / workload.duration_s
    return workload.model_copy(update={"duration_s": duration_s, "warmup_s": warmup_s})


def left_out() -> str:
    """Return the policies without deadlines that a comparison on saturated streams leaves out, with the reasons."""
    names_by_reason: dict[str, list[str]] = {}
    for name, kind in POLICIES.items():
        if kind.traits.pointless_saturated and not kind.traits.for_deadlines:
            names_by_reason.setdefault(kind.traits.pointless_saturated, []).append(name)
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in names_by_reason.items())


def request_names(policies: str | Sequence[str], host: Host | None = None) -> list[str]:
    """Return the named policies, or for ``ALL`` those that serve requests; on a shareable GPU also those for shares."""
    serving = [name for name, kind in POLICIES.items() if kind.traits.serves_requests]
    return _check_policies(policies, [*serving, *(ON_SHARES if host and host.gpu else ())])


def check_host(device: Device) -> Host:
    """Return the device; InputError unless it is a measured machine."""
    if not isinstance(device, Host):
        raise InputError(f"requests are compared on device = host, not on {device.name}; weft sustain does it there")
    return device


def _saturated_names(policies: str | Sequence[str], sweep: bool) -> list[str]:
    """Return the named policies, or for ``ALL`` those that make sense for saturated streams."""
    sensible = [
        name for name, kind in POLICIES.items() if not (kind.traits.for_deadlines or kind.traits.pointless_saturated)
    ]
    names = _check_policies(policies, sensible)
    if sweep and "aimt" not in names:
        raise InputError(
            f"sweep = True does not apply to policies = {','.join(names)}: it is for aimt; add that, or leave it out"
        )
    return names


def _check_policies(policies: str | Sequence[str], everything: list[str]) -> list[str]:
    """Return the named policies, for ``ALL`` *everything*; InputError for unknown names."""
    if policies == ALL:
        return everything
    names = [policies] if isinstance(policies, str) else list(policies)
    if not names:
        raise InputError("policies names nothing; leave it out, or give names")
    for name in names:
        check_policy(name)
    return names


def _profile(model: AnyModel, npu: Npu, batch: int, cost: str) -> Profile:
    """Return a profile as it is, or the estimated costs of a model."""
    if isinstance(model, Profile):
        return model
    network = model if isinstance(model, Model) else load_model(os.fspath(model))
    return estimate(network, npu, batch=batch, cost=cost)
