"""A picture of a search for number formats: the score of every trial, and how small the network became.

In the manner of Figure III.4 of the chapter: iterations from left to right, the four phases side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from weft.reports.page import PALETTE
from weft.reports.pictures import GROUND, INK, LIMIT, MUTED, RULE, picture_path, save
from weft_tune.evaluation import Subset
from weft_tune.numbers.configuration import describe_change
from weft_tune.result import PHASES, Trial, Tuning, kept_places

FEASIBLE, INFEASIBLE, CHOSEN = PALETTE[0], "#a3adb8", PALETTE[5]
MARGINS = {"left": 0.065, "right": 0.985, "top": 0.915, "bottom": 0.115, "hspace": 0.07}
MOST_NAMED = 40
"""Limit of the chosen steps that are named; more names would overlap."""
NAME_WIDTH = 0.011
"""Width of a name as a share of the picture's; steps that follow more closely are not named."""
DENSE = 1500
"""Number of points from which they are an image inside an SVG file, which would be slow to open otherwise."""


class PhaseSpan(NamedTuple):
    """A phase and its iterations, the first and the last included."""

    phase: int
    subset: Subset
    first: int
    last: int


def draw_search(tuning: Tuning, *paths: Path | str) -> Figure:
    """Draw the search as PNG or SVG files, by their suffixes."""
    files = [picture_path(path) for path in paths]
    with matplotlib.rc_context({"svg.hashsalt": "weft", "font.size": 9, "axes.edgecolor": RULE, "text.color": INK}):
        figure = _make_figure(tuning)
        for path in files:
            save(figure, path)
    return figure


def _make_figure(tuning: Tuning) -> Figure:
    figure = Figure(figsize=(12.0, 6.4), facecolor="white")
    FigureCanvasAgg(figure)  # draws without a display
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(1.35, 1), gridspec_kw=MARGINS)
    spans = phase_spans(tuning.trials)
    for axes in (upper, lower):
        _shade(axes, spans)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED, labelcolor=INK)
    _name_phases(upper, spans)
    _draw_scores(upper, tuning, spans)
    _draw_objective(lower, tuning)
    last = max((trial.iteration for trial in tuning.trials), default=1)
    lower.set(xlim=(0.5, last + 0.5), xlabel="iteration (configurations that were evaluated)")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12))
    figure.suptitle(_title(tuning), x=0.01, y=0.985, ha="left", weight="bold", size=12)
    handles, labels = upper.get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(labels), frameon=False)
    return figure


def phase_spans(trials: Sequence[Trial]) -> list[PhaseSpan]:
    """The iterations of each phase; a phase that scored nothing new has none."""
    spans: dict[int, PhaseSpan] = {}
    for trial in trials:
        if trial.step != "base":
            old = spans.get(trial.phase, PhaseSpan(trial.phase, trial.subset, trial.iteration, trial.iteration))
            spans[trial.phase] = old._replace(
                first=min(old.first, trial.iteration), last=max(old.last, trial.iteration)
            )
    return [spans[phase] for phase in sorted(spans)]


def _kept_trials(tuning: Tuning) -> list[Trial]:
    return [tuning.trials[place] for place in kept_places(tuning)]


def _shade(axes: Axes, spans: Sequence[PhaseSpan]) -> None:
    """Shade every second phase."""
    for number, span in enumerate(spans):
        if number % 2 == 0:
            axes.axvspan(span.first - 0.5, span.last + 0.5, color=GROUND, linewidth=0, zorder=0)


def _name_phases(axes: Axes, spans: Sequence[PhaseSpan]) -> None:
    """Name the phases above the picture, with as many words as fit."""
    iterations = sum(span.last - span.first + 1 for span in spans)
    for span in spans:
        share = (span.last - span.first + 1) / max(1, iterations)
        words = [f"{span.phase}", f"  {PHASES[span.phase]}", f", {span.subset} set"]
        # shares of the width at which one more word fits
        text = "".join(words[: 1 + (share > 0.07) + (share > 0.13)])
        axes.text(
            (span.first + span.last) / 2, 1.01, text, ha="center", va="bottom", size=8, color=MUTED,
            transform=axes.get_xaxis_transform(),
        )  # fmt: skip


def _draw_scores(axes: Axes, tuning: Tuning, spans: Sequence[PhaseSpan]) -> None:
    """Draw the score of every trial, clipped to the range of the axis; the marker tells its outcome."""
    scored = [trial for trial in tuning.trials if math.isfinite(trial.score) and trial.step != "base"]
    kept = {trial.iteration for trial in _kept_trials(tuning)}
    floor, ceiling = _score_range(tuning)
    # markers get smaller with their number
    size = max(2.0, min(7.0, 220 / math.sqrt(max(1, len(scored)) + 1)))
    outcomes = (
        ("below the threshold", "x", INFEASIBLE, [t for t in scored if not t.feasible and t.exact]),
        ("stopped early: not above", "v", INFEASIBLE, [t for t in scored if not t.feasible and not t.exact]),
        ("keeps the score", "o", FEASIBLE, [t for t in scored if t.feasible and t.iteration not in kept]),
        ("chosen", "D", CHOSEN, [t for t in scored if t.iteration in kept]),
    )
    for name, marker, colour, trials in outcomes:
        if trials:
            axes.plot(
                [t.iteration for t in trials], [min(max(t.score, floor), ceiling) for t in trials], marker,
                color=colour, markersize=size, markeredgewidth=0.8 if marker == "x" else 0, label=name, clip_on=False,
                rasterized=len(scored) > DENSE, alpha=0.9, zorder=4 if marker == "D" else 3,
            )  # fmt: skip
    _draw_thresholds(axes, tuning, spans)
    axes.set(ylim=(floor - 0.04 * (ceiling - floor), ceiling), ylabel="score")
    lowest = min((t.score for t in scored), default=floor)
    if lowest < floor:
        axes.text(
            0.995, 0.03, f"on the lower edge: further down, to {lowest:.3g}", ha="right", va="bottom", size=8,
            color=MUTED, transform=axes.transAxes,
        )  # fmt: skip


def _draw_thresholds(axes: Axes, tuning: Tuning, spans: Sequence[PhaseSpan]) -> None:
    """Draw threshold and base over the iterations of each phase, for the subset that it scores."""
    for number, span in enumerate(spans):
        ends = [span.first - 0.5, span.last + 0.5]
        names = ("threshold", "base") if number == 0 else (None, None)
        axes.plot(ends, [tuning.thresholds[span.subset]] * 2, color=LIMIT, linewidth=1.2, label=names[0], zorder=2)
        axes.plot(
            ends, [tuning.base[span.subset]] * 2, color=MUTED, linewidth=1, linestyle=":", label=names[1], zorder=2
        )  # fmt: skip


def _score_range(tuning: Tuning) -> tuple[float, float]:
    """The range of the score axis: from three margins (base less threshold) below the threshold to above all scores."""
    low, high = min(tuning.thresholds.values()), max(tuning.base.values())
    feasible_scores = [trial.score for trial in tuning.trials if trial.feasible]
    high = max([high, *feasible_scores])
    margin = max(high - low, 1e-3 * max(abs(high), 1e-9))
    lowest = min([trial.score for trial in tuning.trials if math.isfinite(trial.score)], default=low)
    return max(low - 3 * margin, lowest - 0.2 * margin), high + 0.15 * margin


def _draw_objective(axes: Axes, tuning: Tuning) -> None:
    """Draw the objective of the kept points as a line, and of all feasible trials as dots, as shares of the base's."""
    if not tuning.base_objective > 0:
        scale, unit = 1.0, "objective"
    else:
        scale, unit = 1 / tuning.base_objective, "objective, share of the start"
    feasible = [trial for trial in tuning.trials if trial.feasible and trial.step != "base"]
    axes.plot(
        [t.iteration for t in feasible], [t.objective * scale for t in feasible], "o", color=FEASIBLE, markersize=2.5,
        alpha=0.5, rasterized=len(feasible) > DENSE,
    )  # fmt: skip
    chosen = _kept_trials(tuning)
    if chosen:
        # A kept point may be an earlier trial; the line does not go back.
        times = [*accumulate((t.iteration for t in chosen), max), tuning.iterations + 0.5]
        values = [t.objective * scale for t in chosen]
        axes.step(times, [*values, values[-1]], where="post", color=CHOSEN, linewidth=1.6)
    if tuning.base_objective > 0 and min([t.objective for t in chosen], default=1.0) > 0:
        axes.set_yscale("log", base=2)
        axes.yaxis.set_major_locator(LogLocator(base=2))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g} %"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(unit)
    axes.margins(y=0.12)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    _name_moves(axes, tuning, chosen, scale)


def _name_moves(axes: Axes, tuning: Tuning, chosen: Sequence[Trial], scale: float) -> None:
    """Write the change of every chosen step, where there is room to read it."""
    if not 0 < len(chosen) <= MOST_NAMED:
        return
    configuration, next_iteration = tuning.base_configuration, 0.0
    for trial in chosen:
        text = describe_change(configuration, trial.configuration)
        configuration = trial.configuration
        if text and trial.iteration >= next_iteration:
            next_iteration = trial.iteration + NAME_WIDTH * tuning.iterations
            axes.annotate(
                text, (trial.iteration, trial.objective * scale), xytext=(2, 4), textcoords="offset points",
                rotation=60, size=6.5, color=MUTED, ha="left", va="bottom", annotation_clip=False,
            )  # fmt: skip


def _title(tuning: Tuning) -> str:
    return (
        f"{tuning.network.name}: weights {tuning.weight_reduction:.1f} times smaller, score {tuning.score:.4g} "
        f"(base {tuning.base['full']:.4g}), {tuning.iterations} iterations"
    )
