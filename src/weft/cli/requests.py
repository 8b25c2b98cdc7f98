"""How a run of requests is shown: one policy's streams, and the loads several policies sustain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.cli.common import parse_options
from weft.cli.host import workload_device
from weft.cli.printing import add_row, console, counted, number, plain_table, progress_bar, say, told, write_result
from weft.errors import InputError

if TYPE_CHECKING:
    from weft.devices import Host
    from weft.policies import Option
    from weft.reports.requests import RequestReport
    from weft.simulation.prediction import Figures
    from weft.simulation.requests import Device
    from weft.workloads.requests import Workload


def simulate_workload(
    path: str,
    policy: str,
    *,
    device: str | None,
    lanes: int | None,
    late: str,
    cost: str | None,
    option: list[str] | None,
    json_file: str | None,
    exports: dict[str, str | None],
) -> None:
    """Run one workload file under one policy; print, and write what was asked for. *cost*: None for the usual one."""
    from weft.cli.timeline import write_exports
    from weft.costs import DEFAULT_COST
    from weft.engine.lateness import check_late
    from weft.policies import check_policy
    from weft.simulation.requests import prepare, request_trace, simulate_requests
    from weft.workloads.requests import read_workload

    workload = read_workload(path)
    check_policy(policy)
    check_late(late)
    target = workload_device(workload, device, lanes)
    if cost is not None:
        _check_cost(workload, target)
    record = any(exports.values())
    with progress_bar("simulating"):
        case = prepare(workload, target, cost or DEFAULT_COST)
        run = simulate_requests(case, policy, late=late, options=parse_options(option), record=record)
    print_requests(run.report)
    print_exits(workload)
    write_result(json_file, run.report.as_dict())
    if record:
        write_exports(request_trace(case, run), None, **exports)


def _check_cost(workload: Workload, device: Device) -> None:
    """Refuse a cost model where nothing is priced by one."""
    from weft.devices import Npu

    if not isinstance(device, Npu):
        its = "a tiled NPU has a cost model of its own" if device.kind == "tiled" else "this machine is measured"
        raise InputError(f"--cost does not apply to {device.name}: {its}; leave it out")
    if all(stream.profiles for stream in workload.stream):
        raise InputError("--cost does not apply to profiles: every stream of the workload has them; leave it out")


def print_requests(report: RequestReport) -> None:
    columns = (
        "model",
        "per s",
        "arrived",
        "missed" if report.load is not None else "violated",
        "dropped",
        "batch",
        "mean ms",
        "p50 ms",
        "p90 ms",
        "p99 ms",
        "p99.9 ms",
        "due ms",
    )
    table = plain_table(f"{report.policy} on {report.device}, late requests: {report.late}", columns)
    for stream in report.streams:
        times = (stream.mean_latency_s, stream.p50_s, stream.p90_s, stream.p99_s, stream.p999_s)
        add_row(
            table,
            stream.model,
            number(stream.offered_per_s, 0 if stream.offered_per_s >= 100 else 1),
            str(stream.arrived),
            f"{stream.violation_rate:.2%}",
            str(stream.dropped + stream.refused),
            number(stream.mean_batch, 1),
            *(number(time, 2, scale=1e3) for time in times),
            number(stream.deadline_s, 1, scale=1e3),
        )
    console.print(table)
    console.print(
        f"\nSTP [bold]{report.stp:.3f}[/bold] of {report.offered_stp:.3f} offered, {report.goodput_stp:.3f} in time   "
        f"{_busy(report)}   {report.decisions} decisions",
        highlight=False,
    )


def _busy(report: RequestReport) -> str:
    """A host is busy by its lanes; a device that computes one layer at a time, weights and all, as a whole."""
    if report.load is not None:
        return f"load {report.load:.1%} of the lanes' time"
    if not report.dram_utilisation:
        return f"device {report.pe_utilisation:.1%} busy"
    return f"PE array {report.pe_utilisation:.1%} busy   DRAM channel {report.dram_utilisation:.1%} busy"


def compare_on_host(
    path: str,
    host: Host,
    policies: Sequence[str],
    *,
    late: str,
    json_file: str | None,
    html: str | None,
    workload: Workload,
) -> None:
    """The requests of a workload under several policies on this machine, side by side."""
    from weft.simulation.requests import prepare, simulate_requests

    with progress_bar("simulating", len(policies)) as advance:
        case = prepare(workload, host)
        reports = []
        for policy in policies:
            reports.append(simulate_requests(case, policy, late=late).report)
            advance()
    columns = ("policy", "missed", *(f"{stream.model} missed" for stream in workload.stream))
    columns = (*columns, *(f"{stream.model} p99 ms" for stream in workload.stream), "load")
    lanes = counted(host.lanes, "lane")
    title = f"{Path(path).name} on {host.name}, {lanes}, late requests: {late}"
    table = plain_table(title, columns)
    best = min(report.worst_violation_rate for report in reports)
    copies = _copies(reports)
    for report in reports:
        if report.policy not in copies:
            continue
        add_row(
            table,
            report.policy,
            f"{report.violation_rate:.2%}",
            *(f"{stream.violation_rate:.2%}" for stream in report.streams),
            *(number(stream.p99_s, 1, scale=1e3) for stream in report.streams),
            f"{report.load or 0.0:.1%}",
            style="bold" if report.worst_violation_rate == best else "",
        )
    console.print(table)
    for policy, others in copies.items():
        if others:
            say(f"the same as {policy} here: {', '.join(others)}", style="dim")
    write_result(json_file, {"format": 1, "runs": [report.as_dict() for report in reports]})
    if html:
        from weft.reports.comparison_page import write_request_comparison_page

        write_request_comparison_page(html, reports, title=title)
        told("page", html)


def _copies(reports: Sequence[RequestReport]) -> dict[str, list[str]]:
    """Policy -> those after it whose runs are the same to the last request."""
    firsts: dict[str, RequestReport] = {}
    found: dict[str, list[str]] = {}
    for report in reports:
        same = next((name for name, first in firsts.items() if replace(report, policy=name) == first), None)
        if same is None:
            firsts[report.policy], found[report.policy] = report, []
        else:
            found[same].append(report.policy)
    return found


def print_exits(workload: Workload) -> None:
    """Where the samples of each stream with exits leave, and what that is worth where a record tells."""
    for index, stream in enumerate(workload.stream):
        if not stream.leaves:
            continue
        record = workload.record(index)
        shares = stream.exit_rates if record is None else record.rates(stream.exit_threshold)
        line = (
            f"{stream.model}: " + " / ".join(f"{share:.1%}" for share in shares) + " leave by its exits, the end last"
        )
        if record is not None:
            line += f"; {record.accuracy(stream.exit_threshold):.2%} answered correctly"
            line += f" at a threshold of {stream.exit_threshold:g}"
        if stream.exit_floor is not None:
            line += f", while it is calm: it may sink to {stream.exit_floor:g}"
        say(line)


def predict_bench(path: str, policy: str | None, options: dict[str, Option], json_file: str | None) -> None:
    """Simulate a real server's run and print both."""
    from weft.simulation.prediction import predict

    with progress_bar("simulating"):
        prediction = predict(path, policy, options)
    overheads = ", ".join(f"{each.model} {each.overhead_s * 1e3:.2f} ms" for each in prediction.streams)
    columns = ("model", "", "requests", "answered", "mean ms", "p50 ms", "p99 ms", "missed")
    table = plain_table(f"measured and simulated on {counted(prediction.lanes, 'lane')}", columns, left=2)
    measured = f"measured under {_named(prediction.measured_policy, prediction.measured_options)}"
    simulated = f"simulated under {_named(prediction.policy, prediction.policy_options)}"
    for stream in prediction.streams:
        add_row(table, stream.model, measured, str(stream.requests), *_figures(stream.measured))
        add_row(table, "", simulated, "", *_figures(stream.predicted))
    console.print(table)
    say(
        f"simulated with {prediction.hand_over_s * 1e3:.2f} ms more per segment for hand-overs, and per request "
        f"for all but its segments: {overheads}",
        style="dim",
    )
    write_result(json_file, prediction.as_dict())


def _named(policy: str, options: Mapping[str, Option]) -> str:
    """A policy and what was set of it, as a user would write it."""
    return " ".join([policy, *(f"{key}={value}" for key, value in options.items())])


def _figures(figures: Figures) -> tuple[str, ...]:
    times = (figures.mean_s, figures.p50_s, figures.p99_s)
    missed = "-" if figures.missed_share is None else f"{figures.missed_share:.2%}"
    return str(figures.answered), *(number(time, 2, scale=1e3) for time in times), missed
