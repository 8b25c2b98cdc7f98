"""A picture of sustainable loads: one line per policy over the ratios tried."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from weft.reports.page import PALETTE

MARKERS = "osD^vP*X"


def loads_figure(ratios: Sequence[str], policies: Sequence[str], stps: Sequence[float]) -> Figure:
    """STP at the largest sustained load; *stps* holds all policies of the first ratio, then of the next."""
    values = np.array(stps).reshape(len(ratios), len(policies))
    figure = Figure(
        figsize=(max(6.0, 1.2 + 0.62 * len(ratios) * (1 if len(ratios) > 1 else 8)), 4.2), layout="constrained"
    )
    axes = figure.subplots()
    if len(ratios) == 1:
        bars = axes.bar(policies, values[0], color=[PALETTE[i % len(PALETTE)] for i in range(len(policies))])
        axes.bar_label(bars, fmt="%.2f", padding=2)
    else:
        for index, policy in enumerate(policies):
            axes.plot(ratios, values[:, index], marker=MARKERS[index % 8], color=PALETTE[index % 8], label=policy)
        axes.set_xlabel("ratio of request rates")
        axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    axes.set_ylabel("sustainable STP")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title("largest load that keeps its deadlines", loc="left", fontweight="bold")
    return figure
