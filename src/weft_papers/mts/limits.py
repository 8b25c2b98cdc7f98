"""Where the paper's form stops paying, from its own formulas (IV-C): over the sharing ratio and the number of tasks.

The paper concludes O(T^2) weights and O(T^3) FLOPs. What follows and is not said: T separate models are smaller as soon
as T > (a / (1 - a))^2, groups of a / (1 - a) tasks are smallest, and even those store 4 a (1 - a) of each model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.mts import closed, panels
from weft_papers.mts.lab import COLOURS, SHARINGS, TASKS

FIGURE = "IV-C"
COLOUR_OF = dict(zip(SHARINGS, ("#009e73", "#0072b2", "#e69f00", "#d55e00"), strict=True))


def limits(out: Path) -> Exhibit:
    rows = [
        Row(
            FIGURE, f"tasks from which MTS stores more than separate models, sharing {sharing:g}", None,
            closed.break_even(sharing), "",
            f"(a / (1 - a))^2; the smallest groups are of {closed.best_group(sharing):.3g} and store "
            f"{4 * sharing * (1 - sharing):.2f} of each model, every weight once {1 - sharing**2:.2f} in the limit",
        )
        for sharing in SHARINGS
    ]  # fmt: skip
    return Exhibit(tuple(rows), (_table(),), (_drawn(out),))


def _table() -> Table:
    body = tuple(
        (
            f"{sharing:g}", str(tasks), f"{closed.mts_macs(sharing, tasks):.2f}",
            f"{closed.half_macs(sharing, tasks):.2f}", f"{closed.mts_weights(sharing, tasks):.3f}",
            f"{closed.unique_weights(sharing, tasks):.3f}",
        )
        for sharing in SHARINGS
        for tasks in TASKS
    )  # fmt: skip
    header = ("sharing", "tasks", "MTS MACs x", "half MACs x", "MTS weights x", "unique weights x")
    return Table(f"{FIGURE}: one inner layer in closed form, over the models one by one", header, body)


def _drawn(out: Path) -> Figure:
    figure, axes = pictures.canvas(13, 4.2, 1, 3)
    tasks = np.geomspace(1, 64, 100)
    for sharing in SHARINGS:
        _curves(axes[0], axes[1], tasks, sharing)
    axes[1].axhline(1, color=pictures.INK, linewidth=1)
    _frontier(axes[2])
    for axis, what in ((axes[0], "MACs over separate models"), (axes[1], "weights over separate models")):
        panels.over_tasks(axis, (1, 2, 4, 8, 16, 32, 64), what)
        panels.plain_numbers(axis)
    pictures.heading(axes[0], "the paper's form multiplies (a + T (1 - a))$^2$; split and fused 1")
    pictures.heading(axes[1], "solid: the paper's form; dashed: every weight once; ring: even")
    title = f"{FIGURE}: where the paper's form stops paying, over the sharing ratio a"
    return panels.save(figure, axes[:1], out, "limits", title, 4)


def _curves(macs: Axes, weights: Axes, tasks: np.ndarray, sharing: float) -> None:
    colour, label = COLOUR_OF[sharing], f"sharing {sharing:g}"
    macs.plot(tasks, [closed.mts_macs(sharing, each) for each in tasks], color=colour, label=label)
    weights.plot(tasks, [closed.mts_weights(sharing, each) for each in tasks], color=colour)
    once = [closed.unique_weights(sharing, each) for each in tasks]
    weights.plot(tasks, once, color=colour, linestyle=pictures.DASH, linewidth=1.2)
    if (even := closed.break_even(sharing)) <= tasks[-1]:
        weights.plot(even, 1, marker="o", markersize=7, markerfacecolor="none", color=colour)


def _frontier(axes: Axes) -> None:
    """Tasks over sharing: where the stitched matrix is smaller than the models, and the group it is smallest for."""
    sharing = np.linspace(0.5, 0.95, 200)
    even = np.array([closed.break_even(each) for each in sharing])
    axes.plot(sharing, even, color=COLOURS["mts in groups"])
    axes.plot(sharing, [closed.best_group(each) for each in sharing], color=COLOURS["fused"], linestyle=pictures.DASH)
    axes.fill_between(sharing, even, 400, color=COLOURS["mts"], alpha=0.25, linewidth=0)
    for each in SHARINGS:
        axes.plot([each] * len(TASKS), TASKS, linestyle="none", marker="+", color=pictures.INK, markersize=7)
    axes.set_yscale("log", base=2)
    axes.set_ylim(1, 128)
    axes.set_yticks((1, 2, 4, 8, 16, 32, 64), ("1", "2", "4", "8", "16", "32", "64"))
    axes.set_xlabel("sharing ratio a", fontsize=9)
    axes.set_ylabel("tasks in one matrix", fontsize=9)
    axes.text(0.52, 50, "larger than separate models", fontsize=8.5, color=pictures.INK)
    axes.text(0.95, 1.25, "dashed: smallest group", fontsize=8.5, color=pictures.INK, ha="right")
    pictures.heading(axes, "weights; crosses: what the paper runs (before grouping)")
