"""Simulated runs as pictures: how streams fared, how long requests took, and policies side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weft.reports.page import PALETTE
from weft.reports.timeline import INK, LIMIT, MUTED
from weft.simulation.report import Report
from weft.simulation.request_report import RequestReport


def report_figure(report: Report) -> Figure:
    """How much longer the queries of each stream took than alone."""
    figure, axes = _drawing(len(report.streams), f"{report.policy} on {report.device}: STP {report.stp:.3f}")
    bars = axes.bar(
        [stream.model for stream in report.streams],
        [stream.slowdown or 0.0 for stream in report.streams],
        color=_colours(len(report.streams)),
    )
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle=":", label="alone")
    axes.set_ylabel("slowdown (mean latency over alone)")
    axes.margins(y=0.12)
    axes.legend(frameon=False)
    return figure


def requests_figure(report: RequestReport) -> Figure:
    """Which share of each stream's requests was answered by when, and when they were due."""
    figure, axes = _drawing(6, f"{report.policy} on {report.device}: {report.violation_rate:.2%} late")
    for colour, stream in zip(_colours(len(report.streams)), report.streams, strict=True):
        shares = np.arange(1, len(stream.cdf_s) + 1) * (stream.completed / max(1, stream.arrived))
        axes.plot(
            [1e3 * each for each in stream.cdf_s], shares, color=colour, label=stream.model, drawstyle="steps-post"
        )
        axes.axvline(1e3 * stream.deadline_s, color=colour, linewidth=1, linestyle=":")
    axes.set(xlabel="latency, ms (dotted: due)", ylabel="% of the requests", ylim=(0, 103), xscale="log")
    axes.legend(frameon=False)
    return figure


def comparison_figure(title: str, reports: Sequence[Report]) -> Figure:
    """The throughput of each policy, and what no policy can exceed."""
    figure, axes = _drawing(len(reports), title)
    best = max(report.stp for report in reports)
    colours = [PALETTE[0] if report.stp == best else PALETTE[4] for report in reports]
    bars = axes.bar([report.policy for report in reports], [report.stp for report in reports], color=colours)
    for label, report in zip(axes.bar_label(bars, fmt="%.2f", label_type="center"), reports, strict=True):
        label.set_color("white" if report.stp == best else INK)
    axes.axhline(reports[0].bound_stp, color=LIMIT, linewidth=1.2, label=f"bound {reports[0].bound_stp:.2f}")
    axes.axhline(1.0, color=MUTED, linewidth=1, linestyle=":", label="one model at a time")
    axes.set(ylabel="STP", ylim=(0, 1.15 * reports[0].bound_stp))
    axes.legend(frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return figure


def request_comparison_figure(title: str, reports: Sequence[RequestReport]) -> Figure:
    """The deadlines that each stream missed under each policy."""
    figure, axes = _drawing(len(reports) * len(reports[0].streams) / 2, title)
    places, streams = np.arange(len(reports)), len(reports[0].streams)
    for index, colour in enumerate(_colours(streams)):
        missed = [100 * report.streams[index].violation_rate for report in reports]
        label = reports[0].streams[index].model
        axes.bar(places + (index - (streams - 1) / 2) * 0.8 / streams, missed, 0.8 / streams, color=colour, label=label)
    axes.set_xticks(places, [report.policy for report in reports])
    axes.set_ylabel("deadlines missed, %")
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1))
    return figure


def _drawing(bars: float, title: str) -> tuple[Figure, Axes]:
    """An empty picture with room for so many bars."""
    figure = Figure(figsize=(min(14.0, max(6.0, 1.2 + 0.95 * bars)), 4.2), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontweight="bold", color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    return figure, axes


def _colours(count: int) -> list[str]:
    return [PALETTE[place % len(PALETTE)] for place in range(count)]
