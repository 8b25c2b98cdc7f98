"""A picture of a design-space search: every design, and the Pareto fronts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weft.devices.costs.explore import Exploration
from weft.devices.costs.tiled import Floats
from weft.reports.page import PALETTE
from weft.reports.pictures import save

FRONT, CLOUD, BEST = PALETTE[0], "#c4c4c4", PALETTE[5]


def draw_designs(exploration: Exploration, path: str | Path) -> None:
    """Draw a search as a PNG or SVG file, by the suffix of *path*."""
    figure = Figure(figsize=(14.5, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _draw_map(figure, left, exploration)
    latency_ms, rate, front = exploration.latency_s * 1e3, exploration.throughput, exploration.latency_front
    _draw_front(middle, latency_ms, rate, front, exploration.best)
    middle.set(xlabel="latency of one sample alone, ms", ylabel=f"samples/s at batch {exploration.max_batch}")
    # most designs are many times worse and would press the front into a corner
    middle.set_xlim(0.95 * latency_ms[front].min(), 1.25 * latency_ms[front].max())
    middle.set_ylim(0.8 * rate[front].min(), 1.05 * rate[front].max())
    middle.set_title("alone or in batches, near the front")
    _draw_front(right, exploration.dsps, exploration.scores, exploration.size_front, exploration.best)
    right.set(xlabel="DSPs (T_P x T_C)", ylabel="score, GOP/s over the batch sizes", title="size")
    right.legend(loc="lower right")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_title(axes.get_title(), loc="left", fontweight="bold")
        axes.set_title("", loc="center")
    figure.suptitle(
        f"{', '.join(exploration.models)} on {exploration.platform.name}: {len(exploration)} designs", x=0.01, ha="left"
    )
    save(figure, path)


def _draw_map(figure: Figure, axes: Axes, exploration: Exploration) -> None:
    """Draw every design by its tile's T_P and T_C, coloured by its score over the best score."""
    share = exploration.scores / exploration.scores[exploration.best]
    order = np.argsort(share)
    t_p, t_c = exploration.tile.t_p, exploration.tile.t_c
    points = axes.scatter(t_p[order], t_c[order], c=share[order], s=7, cmap="viridis", vmin=0, vmax=1, rasterized=True)
    best = exploration.device()
    axes.plot(best.t_p, best.t_c, "*", color=BEST, markersize=15, markeredgecolor="white")
    axes.annotate(
        f"<{best.t_r}, {best.t_p}, {best.t_c}>", (best.t_p, best.t_c), xytext=(9, 6), textcoords="offset points"
    )
    axes.set(xscale="log", yscale="log", xlabel="T_P, width of a MAC tree", ylabel="T_C, PEs", title="every design")
    figure.colorbar(points, ax=axes, label="score, share of the best")


def _draw_front(axes: Axes, costs: Floats, values: Floats, front: Sequence[int], best: int) -> None:
    """Draw value over cost of every design; *front*, *best*: indices of the designs on the front, and of the best."""
    axes.scatter(costs, values, s=4, color=CLOUD, rasterized=True, label="designs")
    axes.plot(costs[front], values[front], drawstyle="steps-post", color=FRONT, marker=".", label="Pareto front")
    axes.plot(costs[best], values[best], "*", color=BEST, markersize=15, markeredgecolor="white", label="best score")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
