"""``weft simulate``: one policy, several models, one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from weft.cli.common import (
    Batch,
    Cost,
    JsonFile,
    MaxLag,
    Mix,
    Models,
    ProfileFiles,
    Queries,
    SeqLen,
    Shapes,
    Spill,
    Tables,
    add_row,
    console,
    make_workload,
    number,
    parse_options,
    plain_table,
    read_profiles,
)

if TYPE_CHECKING:
    from weft.reports.report import Report

DEFAULT_DEVICE = "tpuv3-like"

Options = Annotated[list[str] | None, typer.Option("--option", "-o", help="An option of the policy, NAME=VALUE.")]


def command(
    device: Annotated[
        str | None, typer.Option("--device", "-d", help="A preset or a TOML file; tpuv3-like, or the workload's own.")
    ] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", "-p", help="See docs/policies.md; weft, or weft+ for a workload.")
    ] = None,
    workload: Annotated[
        str | None,
        typer.Option("--workload", "-w", help="Arriving requests from a TOML file, instead of --models."),
    ] = None,
    bench: Annotated[
        str | None,
        typer.Option("--bench", help="Predict a run of weft bench on a weft server from its JSON, and compare."),
    ] = None,
    late: Annotated[str, typer.Option("--late", help="--workload: keep, demote or drop late requests.")] = "demote",
    models: Models = "",
    profile: ProfileFiles = None,
    batch: Batch = 1,
    seq_len: SeqLen = 16,
    tables: Tables = "stream",
    queries: Queries = 100,
    cost: Cost = "pipelined",
    mix: Mix = None,
    max_lag: MaxLag = 0.25,
    spill: Spill = False,
    shape: Shapes = None,
    option: Options = None,
    json_file: JsonFile = None,
    trace: Annotated[str | None, typer.Option("--trace", help="Write the trace as JSON.")] = None,
    html: Annotated[str | None, typer.Option("--html", help="Write an interactive timeline page.")] = None,
    perfetto: Annotated[str | None, typer.Option("--perfetto", help="Write a trace for ui.perfetto.dev.")] = None,
    figure: Annotated[str | None, typer.Option("--figure", help="Draw the timeline as .png or .svg.")] = None,
) -> None:
    """Weave models on a simulated NPU: saturated streams, or the arriving requests of a workload file."""
    from weft.cli.requests import predict_bench, simulate_workload
    from weft.cli.timeline import write_exports
    from weft.devices import load_npu
    from weft.jsonfile import write_json
    from weft.simulation import simulate

    if bench:
        predict_bench(bench, policy, json_file)
        return
    if workload:
        exports = {"trace_file": trace, "html": html, "perfetto": perfetto, "figure": figure}
        simulate_workload(
            workload,
            policy or "weft+",
            device=device,
            late=late,
            cost=cost,
            option=option,
            json_file=json_file,
            exports=exports,
        )
        return
    npu = load_npu(device or DEFAULT_DEVICE)
    profiles = read_profiles(npu, models, profile, batch=batch, cost=cost, seq_len=seq_len, tables=tables, shapes=shape)
    saturated = make_workload(queries, mix, max_lag)
    run = simulate(profiles, npu, policy or "weft", saturated, options=parse_options(option), spill=spill)
    print_report(run.report)
    if json_file:
        write_json(json_file, run.report.as_dict())
    write_exports(run.trace, run.report.as_dict(), trace_file=trace, html=html, perfetto=perfetto, figure=figure)


def print_report(report: Report) -> None:
    table = plain_table(
        f"{report.policy} on {report.device}", ("model", "queries", "alone ms", "latency ms", "slowdown", "worst ms")
    )
    for stream in report.streams:
        add_row(
            table,
            stream.model,
            str(stream.queries),
            number(stream.standalone_s, scale=1e3),
            number(stream.mean_latency_s, scale=1e3),
            number(stream.slowdown, 2),
            number(stream.max_latency_s, scale=1e3),
        )
    console.print(table)
    console.print(
        f"\nSTP [bold]{report.stp:.3f}[/bold] = {report.fraction_of_bound:.1%} of the bound {report.bound_stp:.3f}   "
        f"ANTT {number(report.antt, 2)}   worst slowdown {number(report.max_slowdown, 2)}\n"
        f"PE array {report.pe_utilisation:.1%} busy   DRAM channel {report.dram_utilisation:.1%} busy   "
        f"{report.makespan_s * 1e3:.2f} ms simulated",
        highlight=False,
    )
    if report.max_lag is not None:
        console.print(f"largest lag behind the mix: {report.max_lag:.3f} rounds", highlight=False)
    if report.remark:
        console.print(f"[yellow]{report.remark}[/yellow]", highlight=False)
    for stream in report.streams:
        if stream.queries == 0:
            console.print(f"[yellow]{escape(stream.model)} starved: no query completed[/yellow]", highlight=False)
