"""Simulated runs as tables: one policy's streams, and several policies side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weft.reports.tables import ResultTable, TableRow, largest_notes, mark_largest, number
from weft.simulation.report import Report
from weft.simulation.request_report import RequestReport


def report_table(report: Report) -> ResultTable:
    """Return a table of the streams of a run."""
    rows = [
        (
            stream.model,
            str(stream.queries),
            number(stream.standalone_s, scale=1e3),
            number(stream.mean_latency_s, scale=1e3),
            number(stream.slowdown, 2),
            number(stream.max_latency_s, scale=1e3),
        )
        for stream in report.streams
    ]
    columns = ("model", "queries", "alone ms", "latency ms", "slowdown", "worst ms")
    title = f"{report.policy} on {report.device}"
    return ResultTable(title, columns, tuple(map(TableRow, rows)), notes=_remarks(report))


def _remarks(report: Report) -> tuple[str, ...]:
    """Return the notes below the table of a run."""
    lines = [
        f"STP {report.stp:.3f} = {report.fraction_of_bound:.1%} of the bound {report.bound_stp:.3f}; "
        f"ANTT {number(report.antt, 2)}, worst slowdown {number(report.max_slowdown, 2)}; "
        f"PE array {report.pe_utilisation:.1%} busy, DRAM channel {report.dram_utilisation:.1%} busy"
    ]
    if report.remark:
        lines.append(report.remark)
    lines += [f"{stream.model} starved: no query completed" for stream in report.streams if not stream.queries]
    return tuple(lines)


def requests_table(report: RequestReport) -> ResultTable:
    """Return a table of the streams of a run of requests."""
    missed = "missed" if report.load is not None else "violated"
    columns = ("model", "per s", "arrived", missed, "dropped", "batch")
    times = ("mean ms", "p50 ms", "p90 ms", "p99 ms", "p99.9 ms", "due ms")
    rows = [
        (
            stream.model,
            number(stream.offered_per_s, 0 if stream.offered_per_s >= 100 else 1),
            str(stream.arrived),
            f"{stream.violation_rate:.2%}",
            str(stream.dropped + stream.refused),
            number(stream.mean_batch, 1),
            *(number(time, 2, scale=1e3) for time in (stream.mean_latency_s, stream.p50_s, stream.p90_s)),
            *(mark_largest(number(time, 2, scale=1e3), stream.p99_max_of) for time in (stream.p99_s, stream.p999_s)),
            number(stream.deadline_s, 1, scale=1e3),
        )
        for stream in report.streams
    ]
    title = f"{report.policy} on {report.device}, late requests: {report.late}"
    note = f"STP {report.stp:.3f} of {report.offered_stp:.3f} offered, {report.goodput_stp:.3f} in time; {busy(report)}"
    largest_remarks = largest_notes((stream.model, stream.p99_max_of) for stream in report.streams)
    return ResultTable(title, (*columns, *times), tuple(map(TableRow, rows)), notes=(note, *largest_remarks))


def busy(report: RequestReport, between: str = ", ") -> str:
    """Return in words how busy the device was: the lanes of a host, a tiled NPU as a whole, or array and channel.

    between: separates the two shares of an NPU.
    """
    if report.load is not None:
        return f"load {report.load:.1%} of the lanes' time"
    if not report.dram_utilisation:
        return f"device {report.pe_utilisation:.1%} busy"
    return f"PE array {report.pe_utilisation:.1%} busy{between}DRAM channel {report.dram_utilisation:.1%} busy"


def comparison_table(title: str, reports: Sequence[Report], in_pieces: Sequence[Report] = ()) -> ResultTable:
    """Return a table of policies side by side.

    in_pieces: the same policies with layers in the pieces that one of them chose; empty if none chose any.
    """
    best = max(report.stp for report in reports)
    stp_in_pieces = [[number(report.stp)] for report in in_pieces] or [[]] * len(reports)
    rows = [
        (
            report.policy,
            number(report.stp),
            *stp_in_pieces[place],
            f"{report.fraction_of_bound:.1%}",
            number(report.antt, 2),
            number(report.max_slowdown, 2),
            f"{report.pe_utilisation:.1%}",
            f"{report.dram_utilisation:.1%}",
            "/".join(str(stream.queries) for stream in report.streams),
        )
        for place, report in enumerate(reports)
    ]
    piece_column = [f"in 1/{in_pieces[0].pieces}"] if in_pieces else []
    columns = ("policy", "STP", *piece_column, "of bound", "ANTT", "worst", "PE", "DRAM", "queries")
    table_rows = tuple(TableRow(cells, report.stp == best) for cells, report in zip(rows, reports, strict=True))
    notes = [f"no schedule can exceed STP {reports[0].bound_stp:.3f}; 1.0 is one model at a time"]
    if in_pieces:
        size = f"1/{in_pieces[0].pieces}"
        notes.append(f"in {size}: STP with every layer in pieces of at most {size} of the weight buffer")
    return ResultTable(title, columns, table_rows, notes=tuple(notes))


def request_comparison_table(title: str, reports: Sequence[RequestReport]) -> ResultTable:
    """Return a table of policies that serve the same requests; policies with equal runs are named in a note below."""
    models = [stream.model for stream in reports[0].streams]
    columns = (
        "policy",
        "missed",
        *(f"{model} missed" for model in models),
        *(f"{model} p99 ms" for model in models),
        "load",
    )
    best = min(report.worst_violation_rate for report in reports)
    copies = copies_of(reports)
    rows = tuple(
        TableRow(
            (
                report.policy,
                f"{report.violation_rate:.2%}",
                *(f"{stream.violation_rate:.2%}" for stream in report.streams),
                *(mark_largest(number(stream.p99_s, 1, scale=1e3), stream.p99_max_of) for stream in report.streams),
                f"{report.load or 0.0:.1%}",
            ),
            report.worst_violation_rate == best,
        )
        for report in reports
        if report.policy in copies
    )
    notes = [f"the same as {policy} here: {', '.join(others)}" for policy, others in copies.items() if others]
    notes += largest_notes((stream.model, stream.p99_max_of) for stream in reports[0].streams)
    return ResultTable(title, columns, rows, notes=tuple(notes))


def copies_of(reports: Sequence[RequestReport]) -> Mapping[str, list[str]]:
    """Return each policy with a run of its own -> the later policies with exactly the same report."""
    policies: dict[RequestReport, list[str]] = {}
    for report in reports:
        policies.setdefault(replace(report, policy=""), []).append(report.policy)
    return {first: others for first, *others in policies.values()}
