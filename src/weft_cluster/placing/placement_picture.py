"""A picture of a placement: how full every machine is, by computing, memory channel and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from weft.reports.page import PALETTE
from weft.reports.timeline import INK, LIMIT


def machines_figure(
    title: str, names: Sequence[str], used: Mapping[str, Sequence[float]], caps: Sequence[float]
) -> Figure:
    """Machines from top to bottom, a bar for each entry of *used*; *caps*: how busy each may be."""
    figure = Figure(figsize=(9.0, 1.4 + 0.42 * len(names)), layout="constrained")
    axes = figure.subplots()
    places, height = np.arange(len(names)), 0.8 / len(used)
    for index, (what, shares) in enumerate(used.items()):
        axes.barh(
            places + (index - (len(used) - 1) / 2) * height, shares, 0.9 * height, color=PALETTE[index], label=what
        )
    axes.vlines(caps, places - 0.42, places + 0.42, color=LIMIT, linewidth=1.4, label="how busy it may be")
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.set(xlabel="share used", xlim=(0, None))
    axes.legend(frameon=False, loc="lower center", ncols=4, bbox_to_anchor=(0.5, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left", weight="bold", color=INK)
    return figure
