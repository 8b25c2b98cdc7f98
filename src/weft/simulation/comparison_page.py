"""The page that compares policies: a table, bar charts of the main metrics, and the timeline of a selected policy.

``comparison.html`` next to this module is the template. This module makes the data of the template: the cells of the
table as text, the charts as numbers by policy and model, and a trace for each policy; ``timeline.js`` draws the trace
that the reader selects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from weft.reports.page import write_page
from weft.reports.trace import Trace
from weft.reports.trace_exports import trace_data
from weft.simulation.report import Report
from weft.simulation.request_report import RequestReport, RequestStream

MOST_SPANS = 20_000
"""Most layers shown per timeline; later layers are left out. Browsers do not open a page of ten policies with more."""

STP = "System throughput: what was computed, as its models' time alone, per unit of time; 1 is one model at a time"
ANTT = "Average normalised turnaround time: the mean of the streams' slowdowns"
SLOWDOWN = "A query's mean latency over its time when its model has the device to itself"
NONE = "\N{EN DASH}"
"""Shown for an unknown figure."""
COMPUTING = "Share of the time in which something is computed"
FETCHING = "Share of the time in which weights are fetched"
MISSED = "Share of the requests that were late, dropped or refused"
NOT_SLOWER = "99 of 100 requests took no longer"
LOAD = "Share of the lanes' time in which they compute"


def write_comparison_page(
    path: Path | str, runs: Sequence[tuple[Report, Trace]], *, title: str, in_pieces: Sequence[Report] = ()
) -> None:
    """Write the page that compares policies on the same saturated streams.

    in_pieces: the same runs again with every layer split into pieces, one per entry of *runs* in the same order; empty
    unless one of the policies chose to split layers.
    """
    reports = [report for report, _ in runs]
    best = max(range(len(reports)), key=lambda place: reports[place].stp)
    data = _page(title, reports, best, _saturated_table(reports, in_pieces), _saturated_charts(reports))
    remarks = dict.fromkeys(f"{report.policy}: {remark}" for report in reports for remark in _remarks(report))
    bound = f"No schedule can exceed STP {reports[0].bound_stp:.3f}; 1 is one model at a time."
    verdict = f"{reports[best].policy} has the highest STP"
    traces = [_trace(report, trace) for report, trace in runs]
    write_page(
        path,
        "comparison.html",
        data | {"verdict": verdict, "remarks": [bound, *remarks], "traces": traces},
        "weft.simulation",
    )


def write_request_comparison_page(path: Path | str, reports: Sequence[RequestReport], *, title: str) -> None:
    """Write the page that compares policies on the same requests; it has no timelines, since hosts have none."""
    best = min(range(len(reports)), key=lambda place: reports[place].worst_violation_rate)
    data = _page(title, reports, best, _request_table(reports), _request_charts(reports))
    verdict = f"{reports[best].policy} misses least of the stream that suffers most"
    write_page(path, "comparison.html", data | {"verdict": verdict, "remarks": [], "traces": []}, "weft.simulation")


def _page(
    title: str,
    reports: Sequence[Report] | Sequence[RequestReport],
    best: int,
    table: dict[str, Any],
    charts: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the data that both kinds of pages have; *best*: the index of the best report."""
    return {
        "title": title,
        "device": reports[0].device,
        "policies": [report.policy for report in reports],
        "models": list(dict.fromkeys(stream.model for stream in reports[0].streams)),
        "best": best,
        "table": table,
        "charts": charts,
    }


# Saturated streams


def _saturated_table(reports: Sequence[Report], in_pieces: Sequence[Report]) -> dict[str, Any]:
    """Return the table of the page; *in_pieces*: the same runs in pieces."""
    columns = [
        ("STP", STP, [_number(report.stp) for report in reports]),
        (
            "Of the bound",
            "Share of the STP that no schedule can exceed",
            [_percent(r.fraction_of_bound) for r in reports],
        ),
        ("ANTT", ANTT, [_number(report.antt, 2) for report in reports]),
        ("Worst slowdown", "The slowest query over its time alone", [_number(r.max_slowdown, 2) for r in reports]),
        ("PE array busy", COMPUTING, [_percent(report.pe_utilisation) for report in reports]),
        ("DRAM busy", FETCHING, [_percent(report.dram_utilisation) for report in reports]),
        ("Queries", "Completed, by stream", [" / ".join(str(s.queries) for s in report.streams) for report in reports]),
    ]
    if in_pieces:
        size = f"1/{in_pieces[0].pieces}"
        meaning = f"With every layer in pieces of at most {size} of the weight buffer"
        columns.insert(1, (f"STP in {size}", meaning, [_number(report.stp) for report in in_pieces]))
    return _table(reports, columns)


def _remarks(report: Report) -> list[str]:
    """Return the remarks below the table: the report's own, and the streams that completed no query."""
    starved = [f"no query of {stream.model} was completed" for stream in report.streams if not stream.queries]
    return [*([report.remark] if report.remark else []), *starved]


def _saturated_charts(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """Return the bar charts; -1 instead of a model stands for all models together."""
    return [
        _chart("STP", STP, "number", [[(-1, report.stp)] for report in reports], limit=reports[0].bound_stp),
        _chart("Slowdown by model", SLOWDOWN, "times", _by_model(reports, lambda stream: stream.slowdown)),
        _chart("PE array busy", "", "share", [[(-1, report.pe_utilisation)] for report in reports], limit=1.0),
        _chart("DRAM busy", "", "share", [[(-1, report.dram_utilisation)] for report in reports], limit=1.0),
    ]


def _trace(report: Report, trace: Trace) -> dict[str, Any]:
    """Return the first ``MOST_SPANS`` layers of a trace as data of the page, with the number of later layers."""
    columns = {
        column.name: getattr(trace, column.name)[:MOST_SPANS]
        for column in fields(trace)
        if column.name not in ("streams", "layers", "settings")
    }
    return trace_data(replace(trace, **columns), report.as_dict()) | {"left_out": max(0, len(trace) - MOST_SPANS)}


# Requests


def _request_table(reports: Sequence[RequestReport]) -> dict[str, Any]:
    """Return the table of the page."""
    streams = list(zip(*(report.streams for report in reports), strict=True))  # each under every policy
    return _table(
        reports,
        [
            ("Missed", MISSED, [_percent(report.violation_rate) for report in reports]),
            *((f"{runs[0].model} missed", MISSED, [_percent(run.violation_rate) for run in runs]) for runs in streams),
            *((f"{runs[0].model} p99", NOT_SLOWER, [_milliseconds(run) for run in runs]) for runs in streams),
            ("Load", LOAD, [_percent(report.load) for report in reports]),
        ],
    )


def _request_charts(reports: Sequence[RequestReport]) -> list[dict[str, Any]]:
    """Return the bar charts; -1 instead of a model stands for all models together."""
    load = [[(-1, report.load)] for report in reports]
    return [
        _chart("Missed by model", MISSED, "share", _by_model(reports, lambda stream: stream.violation_rate)),
        _chart(
            "p99 of the deadline, by model",
            "Latency that 99 of 100 requests do not exceed, as a share of their deadline",
            "share",
            _by_model(reports, lambda stream: None if stream.p99_s is None else stream.p99_s / stream.deadline_s),
            limit=1.0,
        ),
        _chart("Load", LOAD, "share", load, limit=1.0),
    ]


# Both kinds of pages


def _table(
    reports: Sequence[Report] | Sequence[RequestReport], columns: Sequence[tuple[str, str, list[str]]]
) -> dict[str, Any]:
    """Return a table of the page; a column has a title, an explanation, and a cell for each policy."""
    heads = [("Policy", "text", ""), *((title, "", meaning) for title, meaning, _ in columns)]
    rows = zip((report.policy for report in reports), *(cells for _, _, cells in columns), strict=True)
    return {"heads": heads, "rows": [list(row) for row in rows]}


def _by_model(
    reports: Sequence[Report] | Sequence[RequestReport], value: Callable[[Any], float | None]
) -> list[list[tuple[int, float | None]]]:
    """Return the bars of a chart by model: for each policy, pairs of a model's index and the *value* of a stream."""
    models = list(dict.fromkeys(stream.model for stream in reports[0].streams))
    places = [models.index(stream.model) for stream in reports[0].streams]
    return [list(zip(places, map(value, report.streams), strict=True)) for report in reports]


def _chart(
    title: str,
    meaning: str,
    show: str,
    bars: Sequence[Sequence[tuple[int, float | None]]],
    *,
    limit: float | None = None,
) -> dict[str, Any]:
    """Return the data of a bar chart.

    meaning: an explanation of the values. bars: for each policy, pairs of a model's index (-1: all models together) and
    a value. show: the format of values in the template. limit: a line across the bars.
    """
    return {"title": title, "meaning": meaning, "show": show, "bars": bars, "limit": limit}


def _number(value: float | None, digits: int = 3) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{100 * share:.1f} %"


def _milliseconds(stream: RequestStream) -> str:
    if stream.p99_s is None:
        return NONE
    note = f" (max of {stream.p99_max_of})" if stream.p99_max_of else ""
    return f"{stream.p99_s * 1e3:.1f} ms{note} of {stream.deadline_s * 1e3:g}"
