"""A picture of models that come and go: latency per frame over the whole run, and closely what followed a change."""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

from weft.reports.page import PALETTE
from weft.reports.pictures import INK, LIMIT, MUTED, RULE, picture_path, save
from weft_map.dynamic import DynamicLog, Frame, PhaseLog

OURS, ORACLE, STAR = PALETTE[0], "#c98200", PALETTE[5]
MOST_PANELS = 4
"""Phases that are drawn closely, the first ones."""
FIRST_MS = 1.0
"""Start of the close view's logarithmic time axis; no frame is shorter."""


def draw_dynamic(log: DynamicLog, path: Path | str) -> Figure:
    """Draw *log* as a PNG or SVG file, by the suffix of *path*."""
    picture_path(path)
    with matplotlib.rc_context({"svg.hashsalt": "weft", "font.size": 9, "axes.edgecolor": RULE, "text.color": INK}):
        figure = _make_figure(log)
        save(figure, path)
    return figure


def _make_figure(log: DynamicLog) -> Figure:
    figure = Figure(figsize=(12.0, 6.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = min(len(log.phases), MOST_PANELS)
    grid = figure.add_gridspec(2, panels, height_ratios=(1, 1.15))
    whole = figure.add_subplot(grid[0, :])
    _draw_whole(whole, log)
    for number in range(panels):
        axes = figure.add_subplot(grid[1, number])
        _draw_close(axes, log, number)
        if number == 0:
            axes.set_ylabel("latency per frame (ms)")
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelcolor=INK)
    figure.suptitle(f"models that come and go on {log.soc}", x=0.01, ha="left", weight="bold", size=12)
    handles, labels = whole.get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper right", ncols=len(labels), frameon=False)
    return figure


def _draw_whole(axes: Axes, log: DynamicLog) -> None:
    frames = [[frame for frame in log.frames if frame.phase == number] for number in range(len(log.phases))]
    for number, (phase, its) in enumerate(zip(log.phases, frames, strict=True)):
        _draw_steps(axes, phase, its, labelled=number == 0)
        axes.text(
            (phase.start_s + phase.end_s) / 2, 1.01, _names(phase), ha="center", va="bottom", size=8, color=MUTED,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip
        if number:
            axes.axvline(phase.start_s, color=RULE, linewidth=1)
    used = [update for update in log.updates if update.used_s is not None]
    axes.scatter(
        [update.used_s or 0.0 for update in used], [1e3 * update.latency_s for update in used], marker="*", s=60,
        color=STAR, zorder=3, label="a better schedule",
    )  # fmt: skip
    for event in log.events:
        axes.axvline(event.at_s, color=LIMIT, linewidth=1, linestyle=":")
    highest_ms = max((1e3 * frame.latency_s for frame in log.frames), default=1.0)
    axes.set(xlim=(0, log.phases[-1].end_s), ylim=(0, 1.05 * highest_ms))
    axes.set(xlabel="time (s)", ylabel="latency per frame (ms)")


def _draw_steps(axes: Axes, phase: PhaseLog, frames: list[Frame], *, labelled: bool) -> None:
    times = [frame.start_s for frame in frames] + [phase.end_s]
    latencies = [1e3 * frame.latency_s for frame in frames]
    if latencies:
        label = "in use" if labelled else None
        axes.step(times, [*latencies, latencies[-1]], where="post", color=OURS, linewidth=1.6, label=label)
    if phase.oracle_latency_s is not None:
        label = "oracle" if labelled else None
        ends = [phase.start_s, phase.end_s]
        axes.plot(ends, [1e3 * phase.oracle_latency_s] * 2, color=ORACLE, linestyle="--", linewidth=1.2, label=label)


def _draw_close(axes: Axes, log: DynamicLog, number: int) -> None:
    """One phase: when schedules arrived and when frames took them up, from its beginning."""
    phase = log.phases[number]
    last_ms = max(2 * FIRST_MS, 1e3 * (phase.end_s - phase.start_s))
    frames = [frame for frame in log.frames if frame.phase == number]
    starts = [max(FIRST_MS, 1e3 * (frame.start_s - phase.start_s)) for frame in frames]
    latencies = [1e3 * frame.latency_s for frame in frames]
    if frames:
        axes.step([*starts, last_ms], [*latencies, latencies[-1]], where="post", color=OURS, linewidth=1.6)
    its = [update for update in log.updates if update.phase == number]
    arrivals = [max(FIRST_MS, 1e3 * update.found_s) for update in its]
    axes.scatter(arrivals, [1e3 * update.latency_s for update in its], marker="*", s=60, color=STAR, zorder=3)
    if phase.oracle_latency_s is not None:
        axes.axhline(1e3 * phase.oracle_latency_s, color=ORACLE, linestyle="--", linewidth=1.2)
    if phase.proved_s:
        axes.axvline(max(FIRST_MS, 1e3 * phase.proved_s), color=MUTED, linewidth=1, linestyle=":")
        axes.text(1e3 * phase.proved_s, 0.98, " proved", transform=axes.get_xaxis_transform(), va="top", color=MUTED)
    axes.set(xscale="log", xlim=(FIRST_MS, last_ms), xlabel="after the change (ms)")
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.margins(y=0.08)
    axes.set_title(_names(phase), loc="left", size=9)


def _names(phase: PhaseLog) -> str:
    text = " + ".join(phase.tasks)
    return text if len(text) <= 44 else text[:43] + "…"
