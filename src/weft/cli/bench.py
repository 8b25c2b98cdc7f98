"""``weft bench``: send a workload to a real server and say how many deadlines it met."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import WorkloadError
from weft.cli import common
from weft.cli.common import how, out, what
from weft.cli.printing import (
    add_row,
    console,
    number,
    plain_table,
    progress_bar,
    say,
    write_result,
)
from weft.cli.streams import asked_workload
from weft.cli.unused import refuse_unused
from weft.reports.tables import largest_notes, mark_largest

if TYPE_CHECKING:
    from weft.load import LoadResult, StreamFigures
    from weft.planning.plan import Plan
    from weft.workloads.requests import Workload


def command(
    context: typer.Context,
    workload: Annotated[
        str | None, typer.Argument(help="A workload file (TOML), or a plan (weft plan) to compare with its prediction.")
    ] = None,
    url: Annotated[str, what("--url", "-u", help="The server's address.")] = "http://127.0.0.1:8000",
    streams: Annotated[
        list[str] | None,
        what(
            "--stream",
            "-s",
            help="MODEL:rate=10 instead of a file; more keys: deadline=250 (ms), shape=NAME=1x128, samples=x.npz; "
            "repeatable.",
        ),
    ] = None,
    deadlines: Annotated[
        str | None,
        how(
            "--deadlines",
            show_default="strict, or as planned",
            help="strict: the server gives up at the deadline; soft: it knows it; none: it does not.",
        ),
    ] = None,
    load: Annotated[
        float | None, how("--load", help="Multiply all rates, as 0.9; a plan's prediction is then made for that load.")
    ] = None,
    duration: Annotated[float | None, how("--duration", help="Seconds, instead of duration_s.")] = None,
    warmup: Annotated[float | None, how("--warmup", help="Seconds not counted, for warmup_s.")] = None,
    seed: Annotated[int | None, how("--seed", help="Instead of the workload's own.")] = None,
    shape: common.Shapes = None,
    connections: Annotated[int, how("--connections", "-c", help="Connections at a time, at most.")] = 512,
    grace: Annotated[float, how("--grace", help="Seconds to wait for the last answers.")] = 30.0,
    api_key: Annotated[str | None, how("--api-key", envvar="WEFT_API_KEY", help="Sent as a bearer token.")] = None,
    json_file: common.JsonFile = None,
    save_latencies: Annotated[
        bool, out("--save-latencies", help="Write every request's time and fate into the JSON, too.")
    ] = False,
) -> None:
    """Send requests to a server of the Open Inference Protocol at the times a workload draws."""
    from weft.load import run_load

    plan = _plan(workload)
    if not json_file:
        refuse_unused(context, "a run without a file", {"save_latencies": "name the file with --json"})
    asked = _workload(workload, streams, {"duration_s": duration, "warmup_s": warmup, "seed": seed}, shape)
    if load is not None:
        asked = _at_load(asked, load)
        plan = _foreseen(plan, workload, asked)
    with progress_bar("sending", max(1, round(asked.duration_s))) as advance:

        def progress(gone_s: float, answers: int, outstanding: int) -> None:
            done = min(round(gone_s), max(1, round(asked.duration_s)))
            advance(f"{answers} answers, {outstanding} to come; seconds", done)

        result = run_load(
            asked,
            url,
            deadlines=deadlines or (plan.deadlines if plan else "strict"),
            connections=connections,
            api_key=api_key,
            grace_s=grace,
            alone=5,
            progress=progress,
        )
    print_load(result)
    compared = _compared(plan, result) if plan else {}
    write_result(json_file, {**result.as_dict(latencies=save_latencies), **compared})


def _plan(path: str | None) -> Plan | None:
    """The plan that is to be measured, if a plan's folder is named."""
    from weft.planning.layout import is_plan
    from weft.planning.plan import read_plan

    return read_plan(path) if path is not None and is_plan(path) else None


def _at_load(workload: Workload, load: float) -> Workload:
    if not 0 < load < inf:
        raise WorkloadError(f"--load {load:g} must be more than 0: it multiplies all rates")
    if not any(workload.rates):
        raise WorkloadError("--load multiplies rates, and no stream has one: closed streams follow the server's pace")
    return workload.scaled(load)


def _foreseen(plan: Plan | None, folder: str | None, workload: Workload) -> Plan | None:
    """The plan with what it predicts of these requests."""
    from weft.planning.foreseen import foreseen, planned_host

    if plan is None or folder is None:
        return None
    return plan.model_copy(update={"predicted": foreseen(plan, planned_host(folder), workload)})


def _compared(plan: Plan, result: LoadResult) -> dict[str, object]:
    """Print what was predicted beside what was measured; the same for the JSON."""
    from weft.planning.beside import beside

    found = beside(plan, result)
    headings = [word for what in ("p50", "p99", "missed") for word in (f"{what} predicted", "measured", "apart")]
    table = plain_table("predicted and measured, ms", ("stream", *headings))
    for each in found.streams:
        foreseen, seen = each.predicted, each.measured
        add_row(
            table,
            each.model,
            *(number(value, 2) for value in (foreseen.p50_ms, seen.p50_ms)),
            _signed(each.p50_off, " %"),
            mark_largest(number(foreseen.p99_ms, 2), foreseen.p99_max_of),
            mark_largest(number(seen.p99_ms, 2), seen.p99_max_of),
            _signed(each.p99_off, " %"),
            *(number(value, 2, scale=100, suffix=" %") for value in (foreseen.missed, seen.missed)),
            _signed(each.missed_off, " points"),
        )
    console.print(table)
    for line in (found.verdict(), *(f"remark    {remark}" for remark in found.remarks)):
        say(line)
    return {"plan": found.as_dict()}


def _signed(share: float | None, suffix: str = "") -> str:
    return "-" if share is None else f"{share * 100:+.1f}{suffix}"


def _workload(
    path: str | None, streams: list[str] | None, given: dict[str, float | int | None], shapes: list[str] | None
) -> Workload:
    from weft.planning.layout import is_plan, planned_workload

    if (path is None) == (not streams):
        raise WorkloadError("say what to send: a workload file, a plan, or --stream MODEL:rate=10")
    changes = {key: value for key, value in given.items() if value is not None}
    planned = planned_workload if path is not None and is_plan(path) else None
    return asked_workload(path, streams, shapes, read=planned, **changes)


def print_load(result: LoadResult) -> None:
    """What a run came to, as tables."""
    name = result.server.get("name")
    title = f"{result.url} ({name}), deadlines {result.deadlines}" if name else result.url
    fates = plain_table(
        title, ("stream", "scheduled", "200", "other", "offered/s", "answered/s", "deadline ms", "deadlines met")
    )
    times = plain_table(
        "latency from the scheduled time, ms",
        ("stream", "mean", "p50", "p90", "p95", "p99", "p99.9", "max", "send lag p99", "max"),
    )
    for each in result.streams:
        found = each.figures
        add_row(
            fates,
            each.stream.model,
            str(found.scheduled),
            str(found.answered),
            _others(found),
            f"{found.offered_per_s:.1f}",
            f"{found.answered_per_s:.1f}",
            "none" if each.stream.deadline_ms is None else f"{each.stream.deadline_ms:g}",
            number(found.met_share, 2, scale=100, suffix=" %"),
        )
        spans = (found.mean_s, found.p50_s, found.p90_s, found.p95_s)
        cells = [number(value, 2, scale=1e3) for value in spans]
        cells += [mark_largest(number(value, 2, scale=1e3), found.p99_max_of) for value in (found.p99_s, found.p999_s)]
        cells += [number(value, 2, scale=1e3) for value in (found.max_s, found.lag_p99_s, found.lag_max_s)]
        add_row(times, each.stream.model, *cells)
    console.print(fates)
    console.print(times)
    for note in largest_notes((each.stream.model, each.figures.p99_max_of) for each in result.streams):
        say(note, style="dim")
    _print_answers(result)
    say(
        f"round trip {result.transport_s * 1e3:.2f} ms, {result.connections} connections, "
        f"generator {result.cpu_s / max(1, result.requests) * 1e6:.0f} us of processor time per request",
        style="dim",
    )
    for remark in result.remarks:
        say(f"remark    {remark}")


def _print_answers(result: LoadResult) -> None:
    """How many answers were right, and where they left the model; nothing where neither is known."""
    told = [each for each in result.streams if each.figures.accuracy is not None or each.figures.exit_shares]
    if not told:
        return
    exits = max(len(each.figures.exit_shares or ()) for each in told)
    table = plain_table("answers", ("stream", "right", *(f"exit {number}" for number in range(1, exits + 1))))
    for each in told:
        shares = [number(share, 1, scale=100, suffix=" %") for share in each.figures.exit_shares or ()]
        right = number(each.figures.accuracy, 2, scale=100, suffix=" %")
        add_row(table, each.stream.model, right, *shares, *[""] * (exits - len(shares)))
    console.print(table)


def _others(found: StreamFigures) -> str:
    """What is no 200, by its kind."""
    kinds = [f"{status}: {count}" for status, count in found.statuses.items() if status != 200]
    kinds += [f"{kind}: {count}" for kind, count in (("broken", found.broken), ("lost", found.lost)) if count]
    return ", ".join(kinds) or "-"
