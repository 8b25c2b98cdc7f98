"""``weft compare``: several policies on the same models, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import common
from weft.cli.common import file_option, how, make_workload, read_profiles, split_names, what
from weft.cli.host import AnyDevice, LaneCount, named_npu, workload_device
from weft.cli.plans import told_in_options
from weft.cli.printing import print_table, progress_bar, say, told, write_result
from weft.cli.unused import PROFILES_ONLY, refuse_parameters_of_others, refuse_unused

if TYPE_CHECKING:
    from weft.simulation.comparison import Comparison

MOST_SEGMENTS = 300_000
"""Segments that a comparison simulates unless told otherwise, over all policies. One takes 0.1 to 0.3 ms (all 24
policies on ``h200``, in and beyond what it can carry), so that a comparison takes about a minute."""

_STREAMS = "a workload's streams name their models, batches and rates; change them in the file"
_SATURATED = "models profile batch seq_len tables queries cost mix max_lag spill pieces shape sweep"
_NOT_REQUESTS = dict.fromkeys(_SATURATED.split(), _STREAMS)
_ONLY_REQUESTS = dict.fromkeys(("lanes", "late", "segments"), "it is for the requests of a --workload on --device host")


def command(
    context: typer.Context,
    device: AnyDevice = None,
    workload: Annotated[
        str | None, what("--workload", "-w", help="host: the requests to serve, from a TOML file.")
    ] = None,
    lanes: LaneCount = None,
    late: Annotated[str, how("--late", help="host: weave, keep, demote or drop late requests.")] = "weave",
    segments: Annotated[
        int,
        how(
            "--segments",
            min=1,
            help="host: about how many are simulated, over all policies, 0.1 to 0.3 ms each; "
            "a longer workload is cut short.",
        ),
    ] = MOST_SEGMENTS,
    policies: common.Policies = "all",
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
    sweep: Annotated[bool, how("--sweep", help="Find the best thresholds for aimt first.")] = False,
    json_file: common.JsonFile = None,
    html: Annotated[
        str | None, file_option("--html", help="Write a page: table, bars and timelines of all policies.")
    ] = None,
) -> None:
    """Run several policies on the same models and show them side by side."""
    from weft.simulation.comparison import ALL, compare

    if profile and not models:
        refuse_unused(context, "profiles without --models", PROFILES_ONLY)
    if workload:
        refuse_unused(context, "--workload", _NOT_REQUESTS)
        with told_in_options(context):
            _compare_requests(workload, device, lanes, policies, late, segments, json_file, html)
        return
    refuse_unused(context, "models that never run dry", _ONLY_REQUESTS)
    refuse_parameters_of_others(context, split_names(models))
    npu = named_npu(device)
    profiles = read_profiles(npu, models, profile, batch=batch, cost=cost, seq_len=seq_len, tables=tables, shapes=shape)
    with told_in_options(context), progress_bar("simulating") as advance:
        made = compare(
            profiles,
            policies=ALL if policies == ALL else split_names(policies, "--policies"),
            device=npu,
            workload=make_workload(queries, mix, max_lag),
            spill=spill,
            pieces=pieces,
            sweep=sweep,
            on_progress=advance,
        )
    _print(made)
    write_result(json_file, made.as_dict())
    if html:
        from weft.simulation.comparison_page import write_comparison_page

        pairs = [(each.report, each.trace) for each in made.runs]
        write_comparison_page(html, pairs, title=made.title, in_pieces=made.in_pieces)
        told("page", html)


def _compare_requests(
    path: str,
    device: str | None,
    lanes: int | None,
    policies: str,
    late: str,
    segments: int,
    json_file: str | None,
    html: str | None,
) -> None:
    """Compare policies that serve requests, on this machine."""
    from weft.engine.lateness import check_late
    from weft.simulation.comparison import ALL, check_host, compare_requests, request_names
    from weft.workloads.requests import read_workload

    asked = ALL if policies == ALL else split_names(policies, "--policies")
    request_names(asked)
    check_late(late)
    requests = read_workload(path)
    host = check_host(workload_device(requests, device, lanes))
    names = request_names(asked, host)
    with progress_bar("simulating", len(names)) as advance:
        made = compare_requests(
            requests,
            host,
            policies=names,
            late=late,
            name=Path(path).name,
            most_segments=segments,
            on_progress=advance,
        )
    print_table(made.table())
    if made.cut_to_s is not None:
        share = made.cut_to_s / requests.duration_s
        say(f"cut short at --segments {segments}; {segments / share:.0f} are all of the workload", style="dim")
    write_result(json_file, made.as_dict())
    if html:
        from weft.simulation.comparison_page import write_request_comparison_page

        write_request_comparison_page(html, made.reports, title=made.title)
        told("page", html)


def _print(made: Comparison) -> None:
    """The table, and what is to be said of single policies."""
    print_table(made.table())
    for remark in made.remarks:
        say(remark, style="yellow")
    if made.left_out:
        say(f"left out, as all is there from the start: {made.left_out}", style="dim")
    if made.swept:
        say(f"aimt with {', '.join(f'{key} {value:g}' for key, value in made.swept.items())}", style="dim")
