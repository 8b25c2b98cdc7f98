"""Pictures of the reproductions: their colours, and writing each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from weft.base.errors import InputError, reason_of
from weft.reports.exhibits import Panel, draw
from weft.reports.pictures import save
from weft_papers.base import Figure

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
"""Policy -> its colour in every picture; Okabe and Ito's colours, which colour-blind readers can tell apart."""
PE, DRAM = "#0072b2", "#e69f00"
MODELS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8f8f8f", "#b8a400")
MARKS = "osD^vPX*"
"""Colours and marks of the curves of models, in order."""


def picture(out: Path, name: str, title: str, panels: Sequence[Panel], **layout: Any) -> Figure:
    """Write *panels* as ``name``.png and .svg under *out*; *layout* as ``weft.reports.exhibits.draw`` takes it."""
    make_folder(out)
    with matplotlib.rc_context({"svg.hashsalt": "weft"}):  # a fixed salt makes the SVG the same in every run
        figure = draw(title, panels, **layout)
        save(figure, out / f"{name}.png", dpi=130)
        figure.set_layout_engine("none")  # saving the PNG computed the layout; again would be slower than drawing
        save(figure, out / f"{name}.svg")
    return Figure(title, out / f"{name}.png")


def make_folder(out: Path) -> None:
    """Create the folder and its parents. Raises InputError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise InputError(f"{out}: cannot write: {reason_of(problem)}") from problem
