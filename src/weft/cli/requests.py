"""How a run of requests is shown: one policy's streams, and the loads several policies sustain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from weft.base.errors import InputError
from weft.cli.common import parse_options
from weft.cli.host import workload_device
from weft.cli.printing import (
    add_row,
    console,
    counted,
    number,
    plain_table,
    print_table,
    progress_bar,
    say,
    write_result,
)

if TYPE_CHECKING:
    from weft.engine.policies import Option
    from weft.simulation.prediction import Figures
    from weft.simulation.request_report import RequestReport
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
    from weft.devices.costs import DEFAULT_COST
    from weft.engine.lateness import check_late
    from weft.engine.policies import check_policy
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
    from weft.simulation.run_tables import busy, requests_table

    table = requests_table(report)
    print_table(table._replace(notes=table.notes[1:]))
    console.print(
        f"\nSTP [bold]{report.stp:.3f}[/bold] of {report.offered_stp:.3f} offered, {report.goodput_stp:.3f} in time   "
        f"{busy(report, '   ')}   {report.decisions} decisions",
        highlight=False,
    )


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
