"""``weft simulate``: one policy, several models, one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from weft.base.errors import InputError
from weft.cli import common
from weft.cli.common import (
    complete_policies,
    how,
    make_workload,
    parse_options,
    read_profiles,
    split_names,
    what,
)
from weft.cli.host import AnyDevice, LaneCount, named_npu
from weft.cli.printing import console, number, print_table, progress_bar, say, write_result
from weft.cli.unused import PROFILES_ONLY, is_given, refuse_parameters_of_others, refuse_unused

if TYPE_CHECKING:
    from weft.simulation.report import Report


class Ways(NamedTuple):
    """What each way of using the command makes of an option: nothing to say where it takes it, else the way out."""

    models: str = ""
    """Saturated streams of models, perhaps with profiles beside them."""
    profiles: str = ""
    """Saturated streams of profiles alone."""
    workload: str = ""
    bench: str = ""


WRITTEN = Ways("--models", "profiles without --models", "--workload", "--bench")
"""What a user calls each way."""

_ONE = "it brings its own streams; give one of them"
_STREAM = "its streams name their models; change them in the file"
_SEGMENTS = "the file has the times that the server measured, of its own models and batches"
_LATE = "only requests with deadlines can be late; give them in a --workload file"
_ENDS = "requests come for as long as duration_s in the file says"
_SENT = "it takes the requests that were sent; run weft bench again for others"
_RATES = "each stream has its rate in the file, or a share of total_rate by ratio"
_FITS = "what does not fit is refused there; lower max_batch in the file"
_DRAWN = "a server's lanes have no such timeline; /weft/trace of the running server shows what they did"

_LANES = "it is for --device host, which serves the requests of a --workload"

_EXPORT = Ways(bench=_DRAWN)
OPTIONS = {
    "device": Ways(bench=_SEGMENTS),
    "lanes": Ways(models=_LANES, profiles=_LANES, bench=_SEGMENTS),
    "policy": Ways(),
    "workload": Ways(bench=_ONE),
    "bench": Ways(),
    "late": Ways(models=_LATE, profiles=_LATE, bench="the run was sent with deadlines of its own kind"),
    "models": Ways(workload=_STREAM, bench=_SEGMENTS),
    "profile": Ways(workload="a stream has its own: profiles = [...] in the file", bench=_SEGMENTS),
    "batch": Ways(
        profiles=PROFILES_ONLY["batch"], workload="each stream has its max_batch in the file", bench=_SEGMENTS
    ),
    "seq_len": Ways(
        profiles=PROFILES_ONLY["seq_len"], workload="each stream has its seq_len in the file", bench=_SEGMENTS
    ),
    "tables": Ways(profiles=PROFILES_ONLY["tables"], workload="tables are streamed there", bench=_SEGMENTS),
    "queries": Ways(workload=_ENDS, bench=_SENT),
    "cost": Ways(profiles=PROFILES_ONLY["cost"], bench=_SEGMENTS),
    "mix": Ways(workload=_RATES, bench=_SENT),
    "max_lag": Ways(workload=_RATES, bench=_SENT),
    "spill": Ways(workload=_FITS, bench=_SEGMENTS),
    "pieces": Ways(workload="a workload's layers stay whole", bench=_SEGMENTS),
    "shape": Ways(profiles=PROFILES_ONLY["shape"], workload="each stream has its shapes in the file", bench=_SEGMENTS),
    "option": Ways(),
    "json_file": Ways(),
    "trace": _EXPORT,
    "html": _EXPORT,
    "perfetto": _EXPORT,
    "figure": _EXPORT,
}
"""Every option of the command, and what each way makes of it."""


def command(
    context: typer.Context,
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
            help="Who goes next; see docs/policies.md.",
        ),
    ] = None,
    workload: Annotated[str | None, what("--workload", "-w", help="The same as WORKLOAD.")] = None,
    bench: Annotated[
        str | None, what("--bench", help="Predict a run of weft bench on a weft server from its JSON, and compare.")
    ] = None,
    late: Annotated[str, how("--late", help="--workload: weave, keep, demote or drop late requests.")] = "weave",
    models: common.Models = "",
    profile: common.ProfileFiles = None,
    batch: common.Batch = 1,
    seq_len: common.SeqLen = 16,
    tables: common.Tables = "stream",
    queries: common.Queries = 100,
    cost: common.Cost = "pipelined",
    mix: common.Mix = None,
    max_lag: common.MaxLag = 0.25,
    spill: common.Spill = False,
    pieces: common.Pieces = None,
    shape: common.Shapes = None,
    option: common.PolicyOptions = None,
    json_file: common.JsonFile = None,
    trace: common.TraceFile = None,
    html: common.HtmlFile = None,
    perfetto: common.PerfettoFile = None,
    figure: common.FigureFile = None,
) -> None:
    """Weave models on a simulated NPU, or serve the arriving requests of a workload file there or on this machine."""
    from weft.cli.requests import predict_bench, simulate_workload
    from weft.cli.timeline import write_exports
    from weft.simulation import simulate

    if file is not None and workload is not None:
        raise InputError(f"{file} and --workload {workload} are both workloads; give one of them")
    if file is not None and bench:
        raise InputError(f"{file} does not apply to --bench: {_ONE}")
    workload = workload or file
    way = "bench" if bench else "workload" if workload else "profiles" if profile and not models else "models"
    refuse_unused(
        context, getattr(WRITTEN, way), {name: out for name, ways in OPTIONS.items() if (out := getattr(ways, way))}
    )
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
            late=late,
            cost=cost if is_given(context, "cost") else None,
            option=option,
            json_file=json_file,
            exports=exports,
        )
        return
    refuse_parameters_of_others(context, split_names(models))
    npu = named_npu(device)
    profiles = read_profiles(npu, models, profile, batch=batch, cost=cost, seq_len=seq_len, tables=tables, shapes=shape)
    saturated = make_workload(queries, mix, max_lag)
    with progress_bar("simulating"):
        run = simulate(
            profiles, npu, policy or "weft", saturated, options=parse_options(option), spill=spill, pieces=pieces
        )
    print_report(run.report)
    write_result(json_file, run.report.as_dict())
    write_exports(run.trace, run.report.as_dict(), **exports)


def print_report(report: Report) -> None:
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
