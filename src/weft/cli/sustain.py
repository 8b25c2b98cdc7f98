"""``weft sustain``: the largest load at which deadlines hold, for several policies and ratios."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli import common
from weft.cli.common import how, split_names, what
from weft.cli.host import SECONDS, AnyDevice, Cache, LaneCount, Seconds, workload_device
from weft.cli.printing import add_row, console, number, plain_table, progress_bar, told, write_result
from weft.errors import InputError, WorkloadError

if TYPE_CHECKING:
    from weft.simulation.requests import Device
    from weft.simulation.sustain import Question, Sustained
    from weft.workloads.requests import Workload

PAPER_RATIOS = "64:1,32:1,16:1,8:1,4:1,2:1,1:1,1:2,1:4,1:8,1:16,1:32,1:64"


def command(
    workload: Annotated[str, typer.Argument(help="A workload file (TOML).")],
    policies: common.Policies = "all",
    ratios: Annotated[
        str | None, what("--ratios", help="Shares of the total rate to try, as 4:1,1:1; 'paper' for 64:1...1:64.")
    ] = None,
    device: AnyDevice = None,
    lanes: LaneCount = None,
    seconds: Seconds = SECONDS,
    cache: Cache = None,
    late: Annotated[str, how("--late", help="weave, keep, demote or drop requests that are late.")] = "weave",
    limit: Annotated[float, how("--limit", help="Share of deadlines any stream may violate.")] = 0.01,
    seeds: Annotated[int, how("--seeds", help="Runs per load.")] = 2,
    tolerance: Annotated[float, how("--tolerance", help="How closely to search, relative.")] = 0.01,
    processes: Annotated[int, how("--processes", "-j", show_default="one per core", help="Searches at a time.")] = 0,
    figure: common.FigureFile = None,
    json_file: common.JsonFile = None,
) -> None:
    """Find the highest load at which at most 1 % of any stream's deadlines are missed."""
    from weft.engine.lateness import check_late
    from weft.policies import check_policy
    from weft.simulation.sustain import Question, sustain_all
    from weft.workloads.requests import read_workload

    if processes < 0:
        raise InputError(f"processes = {processes} must be at least 1")
    base = read_workload(workload)
    mixes = _mixes(ratios, base)
    named = [] if policies == "all" else split_names(policies, "--policies")
    for name in named:
        check_policy(name)
    check_late(late)
    found = _device(base, device, lanes, seconds, cache)
    names = named or _all_policies(found)
    questions = [
        Question(_with_ratio(base, mix), name, late=late, limit=limit, seeds=seeds, tolerance=tolerance)
        for mix in mixes
        for name in names
    ]
    at_a_time = processes or os.cpu_count() or 1
    with progress_bar("searching", len(questions)) as advance:
        answers = sustain_all(questions, found, processes=at_a_time, progress=lambda done, of: advance(None, done, of))
    _print(base, mixes, names, answers, found.name, limit)
    write_result(json_file, {"format": 1, "device": found.name, "answers": _as_dicts(questions, answers)})
    if figure:
        from weft.reports.loads import draw_loads

        draw_loads([_label(mix) for mix in mixes], names, [answer.stp for answer in answers], figure)
        told("figure", figure)


def _device(base: Workload, name: str | None, lanes: int | None, seconds: float, cache: str | None) -> Device:
    """The device that is asked for; a tiled NPU is refused, as nothing can be searched for on it."""
    from weft.devices import TiledNpu, load_npu

    found = workload_device(base, name, lanes, seconds, cache)
    return load_npu(name or base.device) if isinstance(found, TiledNpu) else found


def _all_policies(device: Device) -> list[str]:
    """The policies that know requests: on an NPU those with a compiled loop, for a search takes many runs."""
    from weft.devices import Host
    from weft.policies import POLICIES
    from weft.simulation.requests import ONLINE

    on_host = isinstance(device, Host)
    return [name for name, kind in POLICIES.items() if (kind.traits.serves_requests if on_host else kind in ONLINE)]


def _mixes(text: str | None, base: Workload) -> list[tuple[float, ...] | None]:
    if text is None:
        return [None]
    if base.total_rate is None:
        raise WorkloadError("--ratios divides the workload's total_rate, which it does not have")
    try:
        return [
            tuple(float(part) for part in mix.split(":"))
            for mix in (PAPER_RATIOS if text == "paper" else text).split(",")
        ]
    except ValueError:
        raise InputError(f"--ratios {text!r} is not of the form 4:1,1:1") from None


def _with_ratio(base: Workload, mix: tuple[float, ...] | None) -> Workload:
    from weft.workloads.requests import parse_workload

    return base if mix is None else parse_workload(base.model_dump(exclude_unset=True) | {"ratio": mix}, "--ratios")


def _label(mix: tuple[float, ...] | None) -> str:
    return ":".join(f"{part:g}" for part in mix) if mix else "as written"


def _as_dicts(questions: list[Question], answers: list[Sustained]) -> list[dict[str, object]]:
    return [
        {**answer.as_dict(), "rates": [rate * answer.factor if rate else None for rate in question.workload.rates]}
        for question, answer in zip(questions, answers, strict=True)
    ]


def _print(
    base: Workload,
    mixes: list[tuple[float, ...] | None],
    names: list[str],
    answers: list[Sustained],
    device: str,
    limit: float,
) -> None:
    models = " : ".join(stream.model for stream in base.stream)
    on_host = any(answer.load is not None for answer in answers)
    columns = ("missed", "p99 ms", "load") if on_host else ("STP", "over first")
    table = plain_table(
        f"{models} on {device}: largest load with at most {limit:.1%} of deadlines missed",
        ("ratio", "policy", "requests/s", *columns, "first miss at", ""),
        left=2,
    )
    table.columns[-1].justify = "left"
    for index, mix in enumerate(mixes):
        row = answers[index * len(names) : (index + 1) * len(names)]
        best = max(answer.stp for answer in row)
        for place, answer in enumerate(row):
            add_row(
                table,
                _label(mix) if place == 0 else "",
                answer.policy,
                _rate(answer.rate),
                *(_on_host(answer) if on_host else (f"{answer.stp:.3f}", f"{answer.stp / row[0].stp:.2f}")),
                _rate(answer.unsustained_rate),
                "seeds disagree" if answer.noise_limited else "",
                style="bold" if answer.stp == best else "",
            )
    console.print(table)
    if on_host:
        console.print("[dim]p99 of each stream in turn; load: share of the lanes' time in which they compute[/dim]")
    else:
        console.print("[dim]STP: standalone time's worth of requests per unit of time[/dim]")
    if any(answer.noise_limited for answer in answers):
        console.print("[dim]where seeds disagree, more --seeds or a longer duration_s sharpen the answer[/dim]")


def _rate(per_s: float) -> str:
    """Requests per second; hosts serve few."""
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.1f}"


def _on_host(answer: Sustained) -> tuple[str, str, str]:
    p99 = " / ".join(number(each, 1, scale=1e3) for each in answer.p99_s)
    return f"{answer.violation_rate:.2%}", p99, f"{answer.load or 0.0:.1%}"
