"""Tables and pictures of simulated runs: of their streams, of policies side by side, and of sustainable loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from weft.reports.exhibits import Axis, Bars, Curve, Drawable, Panel, ReferenceLine, draw
from weft.reports.page import PALETTE
from weft.reports.pictures import LIMIT, MUTED
from weft.reports.tables import ResultTable
from weft.simulation.comparison import Comparison, RequestComparison
from weft.simulation.loads import SustainedLoads
from weft.simulation.report import Report
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import RequestRun
from weft.simulation.run_tables import report_table, requests_table
from weft.simulation.saturated import Run

if TYPE_CHECKING:
    from weft.reports.pictures import Figure

MARKERS = "osD^vP*X"


Result = Run | RequestRun | Report | RequestReport | Comparison | RequestComparison | SustainedLoads


def tables(result: Result) -> tuple[ResultTable, ...]:
    """Return a table with the streams of a run, or with the policies of a comparison."""
    report = result.report if isinstance(result, Run | RequestRun) else result
    if isinstance(report, Report):
        return (report_table(report),)
    if isinstance(report, RequestReport):
        return (requests_table(report),)
    table, remarks = report.table(), report.remarks if isinstance(report, Comparison) else ()
    return (table._replace(notes=(*table.notes, *remarks)),)


def figure(result: Result) -> Figure:
    """Draw what is compared; the slowdowns or latencies of a report's streams; of a saturated run, the timeline."""
    match result:
        case Run():
            from weft.reports.timeline import timeline_figure  # imports matplotlib, which tables do not need

            return timeline_figure(result.trace)
        case Report():
            return _slowdowns(result)
        case RequestReport() | RequestRun():
            return _latencies(result.report if isinstance(result, RequestRun) else result)
        case Comparison():
            return comparison_figure(result.title, result.reports)
        case RequestComparison():
            return request_comparison_figure(result.title, result.reports)
        case SustainedLoads():
            return loads_figure(result.labels, result.policies, [answer.stp for answer in result.answers])


def _slowdowns(report: Report) -> Figure:
    """Draw the slowdown of each stream: mean latency over the latency alone."""
    models = [stream.model for stream in report.streams]
    label = "slowdown (mean latency over alone)"
    values = {label: [stream.slowdown or 0.0 for stream in report.streams]}
    bars = Bars(models, values, dict(zip(models, _colours(len(models)), strict=True)), values="%.2f")
    alone = ReferenceLine(1, colour=MUTED, dash=":", label="alone")
    title = f"{report.policy} on {report.device}: STP {report.stp:.3f}"
    return draw(title, [Panel([bars, alone], y=Axis(label=label), legend=True)], size=_size(len(models)))


def _latencies(report: RequestReport) -> Figure:
    """Draw the share of each stream's requests that were answered within a time, with the deadlines."""
    marks: list[Drawable] = []
    for colour, stream in zip(_colours(len(report.streams)), report.streams, strict=True):
        shares = np.arange(1, len(stream.cdf_s) + 1) * (stream.completed / max(1, stream.arrived))
        latencies_ms = [1e3 * latency_s for latency_s in stream.cdf_s]
        marks.append(Curve(latencies_ms, shares, stream.model, colour, steps=True))
        marks.append(ReferenceLine(1e3 * stream.deadline_s, colour=colour, dash=":", upright=True))
    x = Axis(label="latency, ms (dotted: due)", scale="log")
    panel = Panel(marks, x=x, y=Axis(label="% of the requests", low=0, high=103), legend=True)
    return draw(f"{report.policy} on {report.device}: {report.violation_rate:.2%} late", [panel], size=_size(6))


def comparison_figure(title: str, reports: Sequence[Report]) -> Figure:
    """Draw the throughput of each policy, the best in a colour of its own, and the bound that no policy can exceed."""
    best, bound = max(report.stp for report in reports), reports[0].bound_stp
    colours = {report.policy: PALETTE[0] if report.stp == best else PALETTE[4] for report in reports}
    bars = Bars([*colours], {"STP": [report.stp for report in reports]}, colours, values="%.2f")
    limit = ReferenceLine(bound, colour=LIMIT, dash="-", width=1.2, label=f"bound {bound:.2f}")
    alone = ReferenceLine(1, colour=MUTED, dash=":", label="one model at a time")
    panel = Panel([bars, limit, alone], y=Axis(label="STP", low=0, high=1.15 * bound))
    return draw(title, [panel], size=_size(len(reports)))


def request_comparison_figure(title: str, reports: Sequence[RequestReport]) -> Figure:
    """Draw the share of deadlines that each stream missed under each policy."""
    models = [stream.model for stream in reports[0].streams]
    missed = {
        model: [100 * report.streams[place].violation_rate for report in reports] for place, model in enumerate(models)
    }
    bars = Bars([report.policy for report in reports], missed, dict(zip(models, _colours(len(models)), strict=True)))
    panel = Panel([bars], y=Axis(label="deadlines missed, %"))
    return draw(title, [panel], size=_size(len(reports) * len(models) / 2), legend_columns=3)


def loads_figure(ratios: Sequence[str], policies: Sequence[str], stps: Sequence[float]) -> Figure:
    """Draw the STP at the largest sustained load; *stps*: for all policies at the first ratio, then at the next."""
    values, colours = np.array(stps).reshape(len(ratios), len(policies)), _colours(len(policies))
    x, y = Axis(label="ratio of request rates", names=ratios), Axis(label="sustainable STP", low=0)
    marks: list[Drawable] = []
    if len(ratios) == 1:
        by_policy = dict(zip(policies, colours, strict=True))
        marks, x = [Bars(policies, {"STP": values[0]}, by_policy, values="%.2f")], Axis()
    else:
        marks = [
            Curve(range(len(ratios)), values[:, place], policy, colours[place], MARKERS[place % 8])
            for place, policy in enumerate(policies)
        ]
    size = (max(6.0, 1.2 + 0.62 * len(ratios) * (1 if len(ratios) > 1 else 8)), 4.2)
    return draw("largest load that keeps its deadlines", [Panel(marks, x=x, y=y)], size=size, legend_columns=3)


def _size(bars: float) -> tuple[float, float]:
    """Return the width and height, in inches, of a picture with room for this number of bars."""
    return min(14.0, max(6.0, 1.2 + 0.95 * bars)), 4.2


def _colours(count: int) -> list[str]:
    return [PALETTE[place % len(PALETTE)] for place in range(count)]
