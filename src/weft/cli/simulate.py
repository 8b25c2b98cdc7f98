"""``weft simulate``: one policy on saturated models, on the requests of a workload, or on a run of ``weft bench``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weft.base.errors import InputError
from weft.cli import common
from weft.cli.command import PROFILES_ONLY, refuse_parameters_of_others, refuse_unused
from weft.cli.common import (
    compile_for_next_time,
    complete_policies,
    how,
    parse_options,
    split_names,
    what,
    with_shapes,
)
from weft.cli.host import AnyDevice, LaneCount, named_npu, workload_device
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
from weft.cli.saturated import SaturatedOptions
from weft.cli.settings import From, Typed, with_settings
from weft.cli.timeline import write_exports

if TYPE_CHECKING:
    from weft.engine.policies import Option
    from weft.simulation.prediction import Figures
    from weft.simulation.report import Report
    from weft.simulation.request_report import RequestReport
    from weft.simulation.requests import Device
    from weft.workloads.requests import Workload


class CommandForms(NamedTuple):
    """For an option, the advice in each form of the command that does not take it; empty if the form takes it."""

    models: str = ""
    """Saturated streams of models, with or without profiles."""
    profiles: str = ""
    """Saturated streams of profiles alone."""
    workload: str = ""
    bench: str = ""


FORM_NAMES = CommandForms("--models", "profiles without --models", "--workload", "--bench")
"""The names of the forms in messages."""

# Advice for an option that a form of the command does not take, after "OPTION does not apply to FORM: ".
_OWN_STREAMS = "it brings its own streams; give one of them"
_MODELS_IN_FILE = "its streams name their models; change them in the file"
_MEASURED = "the file has the times that the server measured, of its own models and batches"
_LATE = "only requests with deadlines can be late; give them in a --workload file"
_DURATION_IN_FILE = "requests come for as long as duration_s in the file says"
_SENT_REQUESTS = "it takes the requests that were sent; run weft bench again for others"
_RATES_IN_FILE = "each stream has its rate in the file, or a share of total_rate by ratio"
_NO_SPILLING = "what does not fit is refused there; lower max_batch in the file"
_NO_TIMELINE = "a server's lanes have no such timeline; /weft/trace of the running server shows what they did"

_HOST_ONLY = "it is for --device host, which serves the requests of a --workload"

_EXPORT = CommandForms(bench=_NO_TIMELINE)
OPTIONS = {
    "device": CommandForms(bench=_MEASURED),
    "lanes": CommandForms(models=_HOST_ONLY, profiles=_HOST_ONLY, bench=_MEASURED),
    "policy": CommandForms(),
    "workload": CommandForms(bench=_OWN_STREAMS),
    "bench": CommandForms(),
    "late": CommandForms(models=_LATE, profiles=_LATE, bench="the run was sent with deadlines of its own kind"),
    "models": CommandForms(workload=_MODELS_IN_FILE, bench=_MEASURED),
    "profile": CommandForms(workload="a stream has its own: profiles = [...] in the file", bench=_MEASURED),
    "batch": CommandForms(
        profiles=PROFILES_ONLY["batch"], workload="each stream has its max_batch in the file", bench=_MEASURED
    ),
    "seq_len": CommandForms(
        profiles=PROFILES_ONLY["seq_len"], workload="each stream has its seq_len in the file", bench=_MEASURED
    ),
    "tables": CommandForms(profiles=PROFILES_ONLY["tables"], workload="tables are streamed there", bench=_MEASURED),
    "queries": CommandForms(workload=_DURATION_IN_FILE, bench=_SENT_REQUESTS),
    "cost": CommandForms(profiles=PROFILES_ONLY["cost"], bench=_MEASURED),
    "mix": CommandForms(workload=_RATES_IN_FILE, bench=_SENT_REQUESTS),
    "max_lag": CommandForms(workload=_RATES_IN_FILE, bench=_SENT_REQUESTS),
    "spill": CommandForms(workload=_NO_SPILLING, bench=_MEASURED),
    "pieces": CommandForms(workload="a workload's layers stay whole", bench=_MEASURED),
    "shape": CommandForms(profiles=PROFILES_ONLY["shape"], bench=_MEASURED),
    "option": CommandForms(),
    "json_file": CommandForms(),
    "trace": _EXPORT,
    "html": _EXPORT,
    "perfetto": _EXPORT,
    "figure": _EXPORT,
}
"""Option -> advice for the forms that do not take it."""


@with_settings
def command(
    context: typer.Context,
    *,
    file: Annotated[
        str | None, typer.Argument(metavar="[WORKLOAD]", help="A workload file (TOML), instead of --models.")
    ] = None,
    device: AnyDevice = None,
    lanes: LaneCount = None,
    policy: Annotated[
        str | None,
        how(
            "--policy",
            "-p",
            autocompletion=complete_policies,
            show_default="weft, or weft+ for a workload",
            help="Scheduling policy; see docs/policies.md.",
        ),
    ] = None,
    workload: Annotated[str | None, what("--workload", "-w", help="The same as WORKLOAD.")] = None,
    bench: Annotated[
        str | None, what("--bench", help="Predict a run of weft bench on a weft server from its JSON, and compare.")
    ] = None,
    late: Annotated[str, how("--late", help="With --workload: weave, keep, demote or drop late requests.")] = "weave",
    typed: Annotated[Typed, From(SaturatedOptions)],
    shape: common.Shapes = None,
    option: common.PolicyOptions = None,
    json_file: common.JsonFile = None,
    trace: common.TraceFile = None,
    html: common.HtmlFile = None,
    perfetto: common.PerfettoFile = None,
    figure: common.FigureFile = None,
) -> None:
    """Simulate woven models on an NPU, or a workload's requests on an NPU or this machine."""
    from weft.simulation import simulate

    if file is not None and workload is not None:
        raise InputError(f"{file} and --workload {workload} are both workloads; give one of them")
    if file is not None and bench:
        raise InputError(f"{file} does not apply to --bench: {_OWN_STREAMS}")
    workload = workload or file
    options = SaturatedOptions(**typed)
    only_profiles = options.profile and not options.models
    form = "bench" if bench else "workload" if workload else "profiles" if only_profiles else "models"
    instead = {name: advice for name, forms in OPTIONS.items() if (advice := getattr(forms, form))}
    refuse_unused(context, getattr(FORM_NAMES, form), instead)
    if bench:
        predict_bench(bench, policy, parse_options(option), json_file)
        return
    exports = {"trace_file": trace, "html": html, "perfetto": perfetto, "figure": figure}
    if workload:
        simulate_workload(
            workload,
            policy or "weft+",
            device=device,
            lanes=lanes,
            shapes=shape,
            late=late,
            cost=typed.get("cost"),
            option=option,
            json_file=json_file,
            exports=exports,
        )
        return
    refuse_parameters_of_others(context, split_names(options.models))
    npu = named_npu(device)
    profiles, saturated = options.read_profiles(npu, shape), options.workload
    with progress_bar("simulating"):
        run = simulate(
            profiles,
            npu,
            policy or "weft",
            saturated,
            options=parse_options(option),
            spill=options.spill,
            pieces=options.pieces,
        )
    print_report(run.report)
    write_result(json_file, run.report.as_dict())
    write_exports(run.trace, run.report.as_dict(), **exports)


def print_report(report: Report) -> None:
    """Print the report of a run of saturated streams."""
    from weft.simulation.run_tables import report_table

    print_table(report_table(report)._replace(notes=()))
    console.print(
        f"\nSTP [bold]{report.stp:.3f}[/bold] = {report.fraction_of_bound:.1%} of the bound {report.bound_stp:.3f}   "
        f"ANTT {number(report.antt, 2)}   worst slowdown {number(report.max_slowdown, 2)}\n"
        f"PE array {report.pe_utilisation:.1%} busy   DRAM channel {report.dram_utilisation:.1%} busy   "
        f"{report.makespan_s * 1e3:.2f} ms simulated",
        highlight=False,
    )
    if report.max_lag is not None:
        say(f"largest lag behind the mix: {report.max_lag:.3f} rounds")
    if report.remark:
        say(report.remark, style="yellow")
    for stream in report.streams:
        if stream.queries == 0:
            say(f"{stream.model} starved: no query completed", style="yellow")


# Requests


def simulate_workload(
    path: str,
    policy: str,
    *,
    device: str | None,
    lanes: int | None,
    shapes: list[str] | None,
    late: str,
    cost: str | None,
    option: list[str] | None,
    json_file: str | None,
    exports: dict[str, str | None],
) -> None:
    """Simulate a workload file under a policy, print the report and write files.

    cost: name of a cost model, None for the default. exports: keyword of ``write_exports`` -> path or None.
    """
    from weft.devices import Host
    from weft.devices.costs import DEFAULT_COST
    from weft.engine.lateness import check_late
    from weft.engine.policies import check_policy
    from weft.simulation.requests import prepare, request_trace, simulate_requests
    from weft.workloads.requests import read_workload

    workload = with_shapes(read_workload(path), shapes)
    check_policy(policy)
    check_late(late)
    target = workload_device(workload, device, lanes, shapes=shapes)
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
        write_exports(request_trace(case, run), report=None, **exports)
    if isinstance(target, Host):
        compile_for_next_time()


def _check_cost(workload: Workload, device: Device) -> None:
    """Raise InputError if ``--cost`` does not apply, since the device or profiles determine the costs."""
    from weft.devices import Npu

    if not isinstance(device, Npu):
        costs = "a tiled NPU has a cost model of its own" if device.kind == "tiled" else "this machine is measured"
        raise InputError(f"--cost does not apply to {device.name}: {costs}; leave it out")
    if all(stream.profiles for stream in workload.stream):
        raise InputError("--cost does not apply to profiles: every stream of the workload has them; leave it out")


def print_requests(report: RequestReport) -> None:
    """Print the report of a run of requests."""
    from weft.simulation.run_tables import busy, requests_table

    table = requests_table(report)
    print_table(table._replace(notes=table.notes[1:]))  # the first note is printed below, with more figures
    console.print(
        f"\nSTP [bold]{report.stp:.3f}[/bold] of {report.offered_stp:.3f} offered, {report.goodput_stp:.3f} in time   "
        f"{busy(report, '   ')}   {report.decisions} decisions",
        highlight=False,
    )


def print_exits(workload: Workload) -> None:
    """Print the shares of samples that take each exit, and the accuracy if the stream has an exit record."""
    for index, stream in enumerate(workload.stream):
        if not stream.leaves:
            continue
        record = workload.record(index)
        shares = stream.exit_rates if record is None else record.rates(stream.exit_threshold)
        line = f"{stream.model}: {' / '.join(f'{share:.1%}' for share in shares)} leave by its exits, the end last"
        if record is not None:
            line += f"; {record.accuracy(stream.exit_threshold):.2%} answered correctly"
            line += f" at a threshold of {stream.exit_threshold:g}"
        if stream.exit_floor is not None:
            line += f", while it is calm: it may sink to {stream.exit_floor:g}"
        say(line)


def predict_bench(path: str, policy: str | None, options: dict[str, Option], json_file: str | None) -> None:
    """Simulate a measured run of ``weft bench``, and print both next to each other."""
    from weft.simulation.prediction import predict

    with progress_bar("simulating"):
        prediction = predict(path, policy, options)
    overheads = ", ".join(f"{stream.model} {stream.overhead_s * 1e3:.2f} ms" for stream in prediction.streams)
    columns = ("model", "", "requests", "answered", "mean ms", "p50 ms", "p99 ms", "missed")
    table = plain_table(f"measured and simulated on {counted(prediction.lanes, 'lane')}", columns, left=2)
    measured = f"measured under {_policy_text(prediction.measured_policy, prediction.measured_options)}"
    simulated = f"simulated under {_policy_text(prediction.policy, prediction.policy_options)}"
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


def _policy_text(policy: str, options: Mapping[str, Option]) -> str:
    """Return a policy with its options, as a user writes it."""
    return " ".join([policy, *(f"{key}={value}" for key, value in options.items())])


def _figures(figures: Figures) -> tuple[str, ...]:
    times = (figures.mean_s, figures.p50_s, figures.p99_s)
    missed = "-" if figures.missed_share is None else f"{figures.missed_share:.2%}"
    return str(figures.answered), *(number(time, 2, scale=1e3) for time in times), missed
