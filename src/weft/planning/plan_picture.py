"""A picture of the options of a plan: how long requests take beside when they are due, and how much more they carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from weft.reports.page import PALETTE
from weft.reports.timeline import INK, LIMIT


def options_figure(
    title: str,
    labels: Sequence[str],
    p99_ms: Mapping[str, Sequence[float | None]],
    deadlines_ms: Mapping[str, float | None],
    largest_loads: Sequence[float | None],
) -> Figure:
    """Options from top to bottom; *p99_ms* and *deadlines_ms* are by stream."""
    figure = Figure(figsize=(11.0, 1.8 + 0.45 * len(labels) * max(1, len(p99_ms) / 2)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(labels))
    for index, (model, times_ms) in enumerate(p99_ms.items()):
        _draw_stream(left, index, len(p99_ms), model, times_ms, deadlines_ms.get(model))
    left.set(xlabel="p99, ms (dotted: due)", xlim=(0, None))
    left.set_yticks(places, labels)
    left.invert_yaxis()
    left.legend(frameon=False, loc="lower center", ncols=3, bbox_to_anchor=(0.5, 1.0))
    bars = right.barh(places, [each or 0.0 for each in largest_loads], color=PALETTE[0])
    right.bar_label(bars, ["not looked for" if each is None else f"{each:.2f}" for each in largest_loads], padding=2)
    right.margins(x=0.1)
    right.axvline(1.0, color=LIMIT, linewidth=1.2)
    right.set_xlabel("largest load that keeps its deadlines, times the asked one")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", color=INK)
    return figure


def _draw_stream(
    axes: Axes, index: int, streams: int, model: str, times_ms: Sequence[float | None], deadline_ms: float | None
) -> None:
    colour, height = PALETTE[index % len(PALETTE)], 0.8 / streams
    places = np.arange(len(times_ms)) + (index - (streams - 1) / 2) * height
    axes.barh(places, [each or 0.0 for each in times_ms], height, color=colour, label=model)
    if deadline_ms is not None:
        axes.axvline(deadline_ms, color=colour, linewidth=1, linestyle=":")
