"""``weft compare``: several policies on the same models, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import common
from weft.cli.command import PROFILES_ONLY, name_options_in_errors, refuse_parameters_of_others, refuse_unused
from weft.cli.common import compile_for_next_time, file_option, how, split_names, what, with_shapes
from weft.cli.host import AnyDevice, LaneCount, named_npu, workload_device
from weft.cli.printing import print_table, progress_bar, say, say_written, write_result
from weft.cli.saturated import SaturatedOptions
from weft.cli.settings import From, Typed, with_settings

if TYPE_CHECKING:
    from weft.simulation.comparison import Comparison

MOST_SEGMENTS = 300_000
"""Default limit of the segments that a comparison simulates, over all policies.

A segment takes 0.1 to 0.3 ms (all 24 policies on ``h200``, below and above its capacity), so that a comparison takes
about a minute.
"""

_STREAMS = "a workload's streams name their models, batches and rates; change them in the file"
_SATURATED = "models profile batch seq_len tables queries cost mix max_lag spill pieces sweep"
_NOT_REQUESTS = dict.fromkeys(_SATURATED.split(), _STREAMS)
_ONLY_REQUESTS = dict.fromkeys(("lanes", "late", "segments"), "it is for the requests of a --workload on --device host")


@with_settings
def command(
    context: typer.Context,
    *,
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
            help="host: approximate number of simulated segments over all policies, 0.1 to 0.3 ms each; "
            "a longer workload is cut short.",
        ),
    ] = MOST_SEGMENTS,
    policies: common.Policies = "all",
    typed: Annotated[Typed, From(SaturatedOptions)],
    shape: common.Shapes = None,
    sweep: Annotated[bool, how("--sweep", help="Find the best thresholds for aimt first.")] = False,
    json_file: common.JsonFile = None,
    html: Annotated[
        str | None, file_option("--html", help="Write a page: table, bars and timelines of all policies.")
    ] = None,
) -> None:
    """Run several policies on the same models and print their results side by side."""
    from weft.simulation.comparison import ALL, compare

    options = SaturatedOptions(**typed)
    if options.profile and not options.models:
        refuse_unused(context, "profiles without --models", PROFILES_ONLY)
    if workload:
        refuse_unused(context, "--workload", _NOT_REQUESTS)
        with name_options_in_errors(context):
            _compare_requests(workload, device, lanes, shape, policies, late, segments, json_file, html)
        return
    refuse_unused(context, "models that never run dry", _ONLY_REQUESTS)
    refuse_parameters_of_others(context, split_names(options.models))
    npu = named_npu(device)
    profiles = options.read_profiles(npu, shape)
    with name_options_in_errors(context), progress_bar("simulating") as advance:
        comparison = compare(
            profiles,
            policies=ALL if policies == ALL else split_names(policies, "--policies"),
            device=npu,
            workload=options.workload,
            spill=options.spill,
            pieces=options.pieces,
            sweep=sweep,
            on_progress=advance,
        )
    _print(comparison)
    write_result(json_file, comparison.as_dict())
    if html:
        from weft.simulation.comparison_page import write_comparison_page

        pairs = [(run.report, run.trace) for run in comparison.runs]
        write_comparison_page(html, pairs, title=comparison.title, in_pieces=comparison.in_pieces)
        say_written("page", html)


def _compare_requests(
    path: str,
    device: str | None,
    lanes: int | None,
    shapes: list[str] | None,
    policies: str,
    late: str,
    segments: int,
    json_file: str | None,
    html: str | None,
) -> None:
    """Compare policies on the requests of a workload, on this machine; parameters are the values of options."""
    from weft.engine.lateness import check_late
    from weft.simulation.comparison import ALL, check_host, compare_requests, request_names
    from weft.workloads.requests import read_workload

    requested = ALL if policies == ALL else split_names(policies, "--policies")
    request_names(requested)  # raises for unknown names before the machine is measured
    check_late(late)
    requests = with_shapes(read_workload(path), shapes)
    host = check_host(workload_device(requests, device, lanes, shapes=shapes))
    names = request_names(requested, host)
    with progress_bar("simulating", len(names)) as advance:
        comparison = compare_requests(
            requests,
            host,
            policies=names,
            late=late,
            name=Path(path).name,
            most_segments=segments,
            on_progress=advance,
        )
    print_table(comparison.table())
    if comparison.cut_to_s is not None:
        share = comparison.cut_to_s / requests.duration_s
        say(f"cut short at --segments {segments}; {segments / share:.0f} are all of the workload", style="dim")
    write_result(json_file, comparison.as_dict())
    if html:
        from weft.simulation.comparison_page import write_request_comparison_page

        write_request_comparison_page(html, comparison.reports, title=comparison.title)
        say_written("page", html)
    compile_for_next_time()


def _print(comparison: Comparison) -> None:
    """Print the table, and remarks on single policies."""
    print_table(comparison.table())
    for remark in comparison.remarks:
        say(remark, style="yellow")
    if comparison.left_out:
        say(f"left out, because saturated streams never wait for arrivals: {comparison.left_out}", style="dim")
    if comparison.swept:
        say(f"aimt with {', '.join(f'{key} {value:g}' for key, value in comparison.swept.items())}", style="dim")
