"""A picture of stitched models: how long each way to run them takes, and what it stores."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from weft.reports.page import PALETTE
from weft.reports.timeline import INK
from weft_stitch.summary import Way


def ways_figure(title: str, ways: Sequence[tuple[str, Way]]) -> Figure:
    """Time and weights of each way, by the name it is called; the first is what the others are compared with."""
    timed = all(way.measured_s is not None for _, way in ways)
    figure = Figure(figsize=(11.0, 1.6 + 0.42 * len(ways)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [name for name, _ in ways][::-1]
    times = [1e3 * ((way.measured_s if timed else None) or way.predicted_s) for _, way in ways][::-1]
    sizes = [way.weight_bytes / 1e6 for _, way in ways][::-1]
    for axes, values, what in (
        (left, times, f"{'measured' if timed else 'predicted'} ms"),
        (right, sizes, "weights MB"),
    ):
        bars = axes.barh(names, values, color=PALETTE[0])
        axes.bar_label(bars, fmt="%.3g", padding=2)
        axes.set_xlabel(what)
        axes.margins(x=0.12)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", color=INK)
    return figure
