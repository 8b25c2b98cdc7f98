"""How the pictures of the papers look: colours, axes, reference lines, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D

from weft.base.errors import InputError
from weft.base.files import replacing
from weft_papers.base import Figure

INK, MUTED, RULE = "#1f2933", "#66727f", "#d5dae0"
POLICIES = {
    "fifo": "#b9c0c8",
    "round-robin": "#8f8f8f",
    "aimt": "#e69f00",
    "layerweaver": "#0072b2",
    "weft": "#009e73",
    "baseline": "#8f8f8f",
    "layerweaver+": "#d55e00",
    "layerweaver+ precise": "#cc79a7",
    "weft+": "#009e73",
}
"""Okabe and Ito's colours, safe for colour-blind readers; the same for a policy in every picture."""
PE, DRAM = "#0072b2", "#e69f00"
MODELS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f8f8f", "#b8a400")
MARKS = "osD^vPX*"
DASH = (0, (4, 2))


def canvas(width: float, height: float, rows: int = 1, columns: int = 1, **grid: Any) -> tuple[Canvas, list[Axes]]:
    """An empty picture and its axes, row by row."""
    figure = Canvas(figsize=(width, height), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False, **grid)
    for one in axes.flat:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(RULE)
        one.tick_params(colors=INK, length=3, labelsize=8.5)
        one.grid(axis="y", color=RULE, linewidth=0.6)
        one.set_axisbelow(True)
    return figure, list(axes.flat)


def save(figure: Canvas, out: Path, name: str, title: str) -> Figure:
    """Write ``name``.png and .svg under *out* with *title* above the picture.

    Where nobody has drawn a legend, that of the first panel stands below, if there are things to tell apart.
    """
    first = figure.axes[0]
    if not figure.legends and not first.get_legend() and len(first.get_legend_handles_labels()[0]) > 1:
        legend(figure, first)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK)
    path = out / f"{name}.png"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{out}: cannot write: {problem.strerror or problem}") from problem
    with matplotlib.rc_context({"svg.hashsalt": "weft"}):
        with replacing(path) as beside:
            figure.savefig(beside, dpi=130)
        figure.set_layout_engine("none")  # it is laid out now, which takes longer than drawing it
        with replacing(path.with_suffix(".svg")) as beside:
            figure.savefig(beside, metadata={"Date": None})
    return Figure(title, path)


def heading(axes: Axes, text: str, **settings: Any) -> None:
    """What a panel shows, above it; *settings*: its labels, limits and scales, as ``Axes.set`` takes them."""
    axes.set_title(text, loc="left", fontsize=9.5, color=INK)
    axes.set(**settings)


def paper_line(axes: Axes, value: float, text: str, colour: str = INK, *, lift: float = 0.0) -> None:
    """A number the paper prints: dashed across, its label in the right margin (*lift* points up)."""
    axes.axhline(value, color=colour, linewidth=1, linestyle=DASH, zorder=1.5)
    axes.annotate(
        text,
        (1.0, value),
        xycoords=axes.get_yaxis_transform(),
        xytext=(4, lift),
        textcoords="offset points",
        va="center",
        fontsize=8,
        color=colour,
        annotation_clip=False,
    )


def grouped_bars(axes: Axes, labels: list[str], series: dict[str, list[float]], colours: dict[str, str]) -> None:
    """One group of bars per label, one bar per series; the last group stands apart when it is a mean."""
    places = np.arange(len(labels), dtype=float)
    if labels[-1] in ("geomean", "mean"):
        places[-1] += 0.5
        axes.axvline(places[-1] - 0.75, color=RULE, linewidth=1)
    width = 0.84 / len(series)
    for index, (name, values) in enumerate(series.items()):
        offset = (index - (len(series) - 1) / 2) * width
        axes.bar(places + offset, values, width * 0.94, label=name, color=colours[name], zorder=2)
    axes.set_xticks(places, labels)
    axes.set_xlim(places[0] - 0.6, places[-1] + 0.6)
    axes.tick_params(axis="x", length=0, labelsize=8 if len(labels) > 10 else 8.5)


def legend(figure: Canvas, axes: Axes, extra: list[Line2D] | None = None) -> None:
    """One legend for the whole picture, below it."""
    handles, _ = axes.get_legend_handles_labels()
    shown = [*handles, *(extra or [])]
    figure.legend(
        handles=shown, loc="outside lower center", ncols=min(8, len(shown)), frameon=False, fontsize=9, labelcolor=INK
    )
