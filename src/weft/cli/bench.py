"""``weft bench``: sends a workload to a real server, and prints latencies and met deadlines."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from weft.base.errors import WorkloadError
from weft.cli import common
from weft.cli.command import refuse_unused
from weft.cli.common import how, out, requested_workload, what
from weft.cli.printing import add_row, console, number, plain_table, progress_bar, say, write_result
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
            help="strict: the server drops late requests; soft: it answers them late; none: it gets no deadline.",
        ),
    ] = None,
    load: Annotated[
        float | None, how("--load", help="Multiply all rates, as 0.9; a plan's prediction is then made for that load.")
    ] = None,
    duration: Annotated[float | None, how("--duration", help="Seconds, instead of duration_s.")] = None,
    warmup: Annotated[
        float | None, how("--warmup", help="Seconds at the start that are not counted, instead of warmup_s.")
    ] = None,
    seed: Annotated[int | None, how("--seed", help="Seed, instead of the workload's own.")] = None,
    shape: common.Shapes = None,
    connections: Annotated[int, how("--connections", "-c", help="Largest number of connections at a time.")] = 512,
    grace: Annotated[float, how("--grace", help="Seconds to wait for the last answers.")] = 30.0,
    api_key: Annotated[
        str | None, how("--api-key", envvar="WEFT_API_KEY", help="The key to send as a bearer token.")
    ] = None,
    json_file: common.JsonFile = None,
    save_latencies: Annotated[
        bool, out("--save-latencies", help="Also write the latency and the result of every request into the JSON.")
    ] = False,
) -> None:
    """Send a workload's requests at their arrival times to a server of the Open Inference Protocol."""
    from weft.load import run_load

    plan = _plan(workload)
    if not json_file:
        refuse_unused(context, "a run without a file", {"save_latencies": "name the file with --json"})
    sent_workload = _workload(workload, streams, {"duration_s": duration, "warmup_s": warmup, "seed": seed}, shape)
    if load is not None:
        sent_workload = _at_load(sent_workload, load)
        plan = _predict_load(plan, workload, sent_workload)
    seconds = max(1, round(sent_workload.duration_s))
    with progress_bar("sending", seconds) as advance:

        def progress(elapsed_s: float, answers: int, outstanding: int) -> None:
            advance(f"{answers} answers, {outstanding} to come; seconds", min(round(elapsed_s), seconds))

        result = run_load(
            sent_workload,
            url,
            deadlines=deadlines or (plan.deadlines if plan else "strict"),
            connections=connections,
            api_key=api_key,
            grace_s=grace,
            alone=5,  # requests of each stream that are sent one by one before the run, for their overhead
            progress=progress,
        )
    print_load(result)
    comparison = _print_comparison(plan, result) if plan else {}
    write_result(json_file, {**result.as_dict(latencies=save_latencies), **comparison})


def _plan(path: str | None) -> Plan | None:
    """Read the plan to compare with, if *path* is a plan's folder."""
    from weft.planning.plan import is_plan, read_plan

    return read_plan(path) if path is not None and is_plan(path) else None


def _at_load(workload: Workload, load: float) -> Workload:
    """Return the workload with all rates multiplied by *load*; WorkloadError if that is not possible."""
    if not 0 < load < inf:
        raise WorkloadError(f"--load {load:g} must be more than 0: it multiplies all rates")
    if not any(workload.rates):
        raise WorkloadError("--load multiplies rates, and no stream has one: closed streams follow the server's pace")
    return workload.scaled(load)


def _predict_load(plan: Plan | None, folder: str | None, workload: Workload) -> Plan | None:
    """Return the plan with its prediction for another load; *folder*: that of the plan."""
    from weft.planning.prediction import planned_host, predict

    if plan is None or folder is None:
        return None
    return plan.model_copy(update={"predicted": predict(plan, planned_host(folder), workload)})


def _print_comparison(plan: Plan, result: LoadResult) -> dict[str, object]:
    """Print the predicted and measured figures next to each other; returns them for the JSON."""
    from weft.planning.prediction import compare

    comparison = compare(plan, result)
    headings = [text for figure in ("p50", "p99", "missed") for text in (f"{figure} predicted", "measured", "apart")]
    table = plain_table("predicted and measured, ms", ("stream", *headings))
    for stream in comparison.streams:
        predicted, measured = stream.predicted, stream.measured
        add_row(
            table,
            stream.model,
            *(number(value, 2) for value in (predicted.p50_ms, measured.p50_ms)),
            _signed_percent(stream.p50_off, " %"),
            mark_largest(number(predicted.p99_ms, 2), predicted.p99_max_of),
            mark_largest(number(measured.p99_ms, 2), measured.p99_max_of),
            _signed_percent(stream.p99_off, " %"),
            *(number(value, 2, scale=100, suffix=" %") for value in (predicted.missed, measured.missed)),
            _signed_percent(stream.missed_off, " points"),
        )
    console.print(table)
    for line in (comparison.verdict(), *(f"remark    {remark}" for remark in comparison.remarks)):
        say(line)
    return {"plan": comparison.as_dict()}


def _signed_percent(share: float | None, suffix: str) -> str:
    return "-" if share is None else f"{share * 100:+.1f}{suffix}"


def _workload(
    path: str | None, streams: list[str] | None, options: dict[str, float | int | None], shapes: list[str] | None
) -> Workload:
    """Return the workload of a file, a plan or ``--stream``; *options*: keys to change, None for no change."""
    from weft.planning.plan import is_plan, planned_workload

    if (path is None) == (not streams):
        raise WorkloadError("say what to send: a workload file, a plan, or --stream MODEL:rate=10")
    changes = {key: value for key, value in options.items() if value is not None}
    planned = planned_workload if path is not None and is_plan(path) else None
    return requested_workload(path, streams, shapes, read=planned, **changes)


def print_load(result: LoadResult) -> None:
    """Print the result of a run as tables."""
    name = result.server.get("name")
    title = f"{result.url} ({name}), deadlines {result.deadlines}" if name else result.url
    results_table = plain_table(
        title, ("stream", "scheduled", "200", "other", "offered/s", "answered/s", "deadline ms", "deadlines met")
    )
    latency_table = plain_table(
        "latency from the scheduled time, ms",
        ("stream", "mean", "p50", "p90", "p95", "p99", "p99.9", "max", "send lag p99", "max"),
    )
    for load in result.streams:
        figures = load.figures
        add_row(
            results_table,
            load.stream.model,
            str(figures.scheduled),
            str(figures.answered),
            _other_results(figures),
            f"{figures.offered_per_s:.1f}",
            f"{figures.answered_per_s:.1f}",
            "none" if load.stream.deadline_ms is None else f"{load.stream.deadline_ms:g}",
            number(figures.met_share, 2, scale=100, suffix=" %"),
        )
        middle_s = (figures.mean_s, figures.p50_s, figures.p90_s, figures.p95_s)
        cells = [number(value, 2, scale=1e3) for value in middle_s]
        tail = [number(value, 2, scale=1e3) for value in (figures.p99_s, figures.p999_s)]
        cells += [mark_largest(cell, figures.p99_max_of) for cell in tail]
        cells += [number(value, 2, scale=1e3) for value in (figures.max_s, figures.lag_p99_s, figures.lag_max_s)]
        add_row(latency_table, load.stream.model, *cells)
    console.print(results_table)
    console.print(latency_table)
    for note in largest_notes((load.stream.model, load.figures.p99_max_of) for load in result.streams):
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
    """Print the accuracy of answers and their shares by exit; nothing if neither is known."""
    loads = [load for load in result.streams if load.figures.accuracy is not None or load.figures.exit_shares]
    if not loads:
        return
    exits = max(len(load.figures.exit_shares or ()) for load in loads)
    table = plain_table("answers", ("stream", "right", *(f"exit {number}" for number in range(1, exits + 1))))
    for load in loads:
        shares = [number(share, 1, scale=100, suffix=" %") for share in load.figures.exit_shares or ()]
        right = number(load.figures.accuracy, 2, scale=100, suffix=" %")
        add_row(table, load.stream.model, right, *shares, *[""] * (exits - len(shares)))
    console.print(table)


def _other_results(figures: StreamFigures) -> str:
    """Return the numbers of requests without status 200, by status or kind, as a text."""
    kinds = [f"{status}: {count}" for status, count in figures.statuses.items() if status != 200]
    kinds += [f"{kind}: {count}" for kind, count in (("broken", figures.broken), ("lost", figures.lost)) if count]
    return ", ".join(kinds) or "-"
