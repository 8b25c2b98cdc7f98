"""Where the paper's form stops paying, from its own formulas (IV-C): over the sharing ratio and the number of tasks.

The paper concludes O(T^2) weights and O(T^3) FLOPs. What follows and is not said: T separate models are smaller as soon
as T > (a / (1 - a))^2, groups of a / (1 - a) tasks are smallest, and even those store 4 a (1 - a) of each model.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from weft.reports.exhibits import DASHED, INK, Area, Axis, Curve, Panel, ReferenceLine, Texts
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
    return Exhibit(tuple(rows), (_table(),), (_picture(out),))


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


def _picture(out: Path) -> Figure:
    tasks = np.geomspace(1, 64, 100)
    x = panels.tasks_axis((1, 2, 4, 8, 16, 32, 64))
    macs = [
        Curve(tasks, [closed.mts_macs(sharing, count) for count in tasks], f"sharing {sharing:g}", COLOUR_OF[sharing])
        for sharing in SHARINGS
    ]
    weights = [curve for sharing in SHARINGS for curve in _weights(tasks, sharing)]
    shown = [
        Panel(
            macs, "the paper's form multiplies (a + T (1 - a))$^2$; split and fused 1", x,
            Axis(label="MACs over separate models", scale="log"),
        ),
        Panel(
            [*weights, ReferenceLine(1, dash="-")], "solid: the paper's form; dashed: every weight once; ring: even", x,
            Axis(label="weights over separate models", scale="log"),
        ),
        _frontier(),
    ]  # fmt: skip
    title = f"{FIGURE}: where the paper's form stops paying, over the sharing ratio a"
    return pictures.picture(out, "limits", title, shown, size=(13, 4.2), columns=3)


def _weights(tasks: np.ndarray, sharing: float) -> list[Curve]:
    colour, even = COLOUR_OF[sharing], closed.break_even(sharing)
    curves = [
        Curve(tasks, [closed.mts_weights(sharing, count) for count in tasks], None, colour),
        Curve(tasks, [closed.unique_weights(sharing, count) for count in tasks], None, colour, dash=DASHED, width=1.2),
    ]
    ring = Curve([even], [1], None, colour, "o", size=7, hollow=True)
    return [*curves, ring] if even <= tasks[-1] else curves


def _frontier() -> Panel:
    """Tasks over sharing: where the stitched matrix is smaller than the models, and the group it is smallest for."""
    sharing = np.linspace(0.5, 0.95, 200)
    even = np.array([closed.break_even(ratio) for ratio in sharing])
    crosses = [Curve([ratio] * len(TASKS), TASKS, None, INK, "+", "", size=7) for ratio in SHARINGS]
    marks = [
        Curve(sharing, even, None, COLOURS["mts in groups"]),
        Curve(sharing, [closed.best_group(ratio) for ratio in sharing], None, COLOURS["fused"], dash=DASHED),
        Area(sharing, even, 400, COLOURS["mts"]),
        Texts([0.52], [50], ["larger than separate models"], align="left"),
        Texts([0.95], [1.25], ["dashed: smallest group"], align="right"),
    ]
    y = Axis(label="tasks in one matrix", scale="log2", low=1, high=128, ticks=(1, 2, 4, 8, 16, 32, 64))
    title = "weights; crosses: what the paper runs (before grouping)"
    return Panel([*marks, *crosses], title, Axis(label="sharing ratio a"), y)
