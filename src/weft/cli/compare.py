"""``weft compare``: several policies on the same models, side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import common
from weft.cli.common import file_option, how, make_workload, read_profiles, split_names, what
from weft.cli.host import AnyDevice, LaneCount, named_npu, workload_device
from weft.cli.printing import add_row, console, number, plain_table, progress_bar, say, told, write_result
from weft.cli.unused import PROFILES_ONLY, refuse_parameters_of_others, refuse_unused
from weft.errors import InputError

if TYPE_CHECKING:
    from weft.costs.layer_costs import Profile
    from weft.policies import Option
    from weft.reports.report import Report
    from weft.simulation import Run


_STREAMS = "a workload's streams name their models, batches and rates; change them in the file"
_SATURATED = "models profile batch seq_len tables queries cost mix max_lag spill pieces shape sweep"
_NOT_REQUESTS = dict.fromkeys(_SATURATED.split(), _STREAMS)
_ONLY_REQUESTS = dict.fromkeys(("lanes", "late"), "it is for the requests of a --workload on --device host")


def command(
    context: typer.Context,
    device: AnyDevice = None,
    workload: Annotated[
        str | None, what("--workload", "-w", help="host: the requests to serve, from a TOML file.")
    ] = None,
    lanes: LaneCount = None,
    late: Annotated[str, how("--late", help="host: weave, keep, demote or drop late requests.")] = "weave",
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
    from weft.policies import POLICIES, check_policy
    from weft.simulation import simulate
    from weft.simulation.sweep import sweep_aimt

    if profile and not models:
        refuse_unused(context, "profiles without --models", PROFILES_ONLY)
    if workload:
        refuse_unused(context, "--workload", _NOT_REQUESTS)
        _compare_requests(workload, device, lanes, policies, late, json_file, html)
        return
    refuse_unused(context, "models that never run dry", _ONLY_REQUESTS)
    refuse_parameters_of_others(context, split_names(models))
    npu = named_npu(device)
    profiles = read_profiles(npu, models, profile, batch=batch, cost=cost, seq_len=seq_len, tables=tables, shapes=shape)
    saturated = make_workload(queries, mix, max_lag)
    woven = [
        name for name, kind in POLICIES.items() if not (kind.traits.for_deadlines or kind.traits.pointless_saturated)
    ]
    names = woven if policies == "all" else split_names(policies, "--policies")
    for name in names:
        check_policy(name)
    if sweep and "aimt" not in names:
        raise InputError(f"--sweep does not apply to --policies {policies}: it is for aimt; add that, or leave it out")
    options: dict[str, dict[str, Option]] = {}
    with progress_bar("simulating", 2 * len(names) + sweep) as advance:
        if sweep:
            advance("sweeping aimt")
            options["aimt"] = dict(sweep_aimt([profiles], npu).options)

        def run(name: str, pieces: int | None) -> Run:
            done = simulate(profiles, npu, name, saturated, options=options.get(name), spill=spill, pieces=pieces)
            advance()
            return done

        runs = [run(name, pieces) for name in names]
        smallest = max(each.report.pieces for each in runs)
        alike = [run(name, smallest).report for name in names if smallest > 1 and pieces is None]
    reports = [each.report for each in runs]
    title = f"{' + '.join(p.model for p in profiles)} on {npu.name}, batch {_batches(profiles)}"
    print_comparison(reports, title, alike)
    if policies == "all":
        say(f"left out, as all is there from the start: {_left_out()}", style="dim")
    if "aimt" in options:
        tuned = ", ".join(f"{key} {value:g}" for key, value in options["aimt"].items())
        say(f"aimt with {tuned}", style="dim")
    raw = {"runs": reports, "in_pieces": alike}
    write_result(json_file, {"format": 1} | {key: [each.as_dict() for each in raw[key]] for key in raw})
    if html:
        from weft.reports.comparison_page import write_comparison_page

        write_comparison_page(html, [(each.report, each.trace) for each in runs], title=title, in_pieces=alike)
        told("page", html)


def _compare_requests(
    path: str,
    device: str | None,
    lanes: int | None,
    policies: str,
    late: str,
    json_file: str | None,
    html: str | None,
) -> None:
    """Compare policies that serve requests, on this machine."""
    from weft.cli.requests import compare_on_host
    from weft.devices import Host
    from weft.engine.lateness import check_late
    from weft.policies import POLICIES, check_policy
    from weft.workloads.requests import read_workload

    known = [name for name, kind in POLICIES.items() if kind.traits.serves_requests]
    names = known if policies == "all" else split_names(policies, "--policies")
    for name in names:
        check_policy(name)
    check_late(late)
    requests = read_workload(path)
    found = workload_device(requests, device, lanes)
    if not isinstance(found, Host):
        raise InputError(f"requests are compared on --device host, not on {found.name}; weft sustain does it there")
    compare_on_host(path, found, names, late=late, json_file=json_file, html=html, workload=requests)


def _left_out() -> str:
    """Policies without deadlines that saturated streams say nothing of, and why."""
    from weft.policies import POLICIES

    found: dict[str, list[str]] = {}
    for name, kind in POLICIES.items():
        if kind.traits.pointless_saturated and not kind.traits.for_deadlines:
            found.setdefault(kind.traits.pointless_saturated, []).append(name)
    return "; ".join(f"{', '.join(names)} ({why})" for why, names in found.items())


def _batches(profiles: list[Profile]) -> str:
    return " and ".join(map(str, dict.fromkeys(profile.batch for profile in profiles)))


def print_comparison(reports: list[Report], title: str, in_pieces: list[Report]) -> None:
    """The runs side by side; *in_pieces*: the same with the pieces that one of them chose, if one did."""
    columns = ["policy", "STP", "of bound", "ANTT", "worst", "PE", "DRAM", "queries"]
    if in_pieces:
        columns.insert(2, f"in 1/{in_pieces[0].pieces}")
    table = plain_table(title, columns)
    best = max(report.stp for report in reports)
    for index, report in enumerate(reports):
        style = "bold" if report.stp == best else ""
        add_row(
            table,
            report.policy,
            number(report.stp),
            *([number(in_pieces[index].stp)] if in_pieces else []),
            f"{report.fraction_of_bound:.1%}",
            number(report.antt, 2),
            number(report.max_slowdown, 2),
            f"{report.pe_utilisation:.1%}",
            f"{report.dram_utilisation:.1%}",
            "/".join(str(stream.queries) for stream in report.streams),
            style=style,
        )
    console.print(table)
    console.print(f"[dim]no schedule can exceed STP {reports[0].bound_stp:.3f}; 1.0 is one model at a time[/dim]")
    if in_pieces:
        part = in_pieces[0].pieces
        console.print(
            f"[dim]in 1/{part}: STP with every layer in pieces of at most 1/{part} of the weight buffer[/dim]"
        )
    for remark in dict.fromkeys(f"{report.policy}: {report.remark}" for report in reports if report.remark):
        say(remark, style="yellow")
