"""``weft simulate``: one policy, several models, one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.common import (
    Batch,
    Cost,
    DeviceName,
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
    console,
    make_workload,
    number,
    parse_options,
    plain_table,
    read_profiles,
)

if TYPE_CHECKING:
    from weft.reports.report import Report

Options = Annotated[list[str] | None, typer.Option("--option", "-o", help="An option of the policy, NAME=VALUE.")]


def command(
    device: DeviceName = "tpuv3-like",
    policy: Annotated[str, typer.Option("--policy", "-p", help="fifo, fair, layerweaver, weft, ...")] = "weft",
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
    """Weave saturated streams of models on a simulated NPU and report what came of it."""
    from weft.cli.timeline import write_exports
    from weft.devices import load_npu
    from weft.jsonfile import write_json
    from weft.simulation import simulate

    npu = load_npu(device)
    profiles = read_profiles(npu, models, profile, batch=batch, cost=cost, seq_len=seq_len, tables=tables, shapes=shape)
    workload = make_workload(queries, mix, max_lag)
    run = simulate(profiles, npu, policy, workload, options=parse_options(option), spill=spill)
    print_report(run.report)
    if json_file:
        write_json(json_file, run.report.as_dict())
    write_exports(run.trace, run.report.as_dict(), trace_file=trace, html=html, perfetto=perfetto, figure=figure)


def print_report(report: Report) -> None:
    table = plain_table(
        f"{report.policy} on {report.device}", ("model", "queries", "alone ms", "latency ms", "slowdown", "worst ms")
    )
    for stream in report.streams:
        table.add_row(
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
            console.print(f"[yellow]{stream.model} starved: no query completed[/yellow]", highlight=False)
