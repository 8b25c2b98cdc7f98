"""How the pictures of this paper look: something over the number of tasks, a line for each way to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from weft_papers import pictures
from weft_papers.base import Figure, Published
from weft_papers.mts.lab import COLOURS, LABELS, MARKS
from weft_papers.mts.recorded import IN_GROUPS, CountSweep

MB = 1e6
THIN = {"eager": ":", "grouped-eager": ":", "batch": pictures.DASH, "mts": pictures.DASH}
"""Lines that are references."""


def over_tasks(axes: Axes, tasks: Sequence[int], what: str) -> None:
    """Both axes by factors; *what* is up the side."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tasks, [str(each) for each in tasks])
    axes.minorticks_off()
    axes.set_xlabel("tasks", fontsize=9)
    axes.set_ylabel(what, fontsize=9)


def plain_numbers(axes: Axes) -> None:
    """The logarithmic side says 0.5, 1, 2, 5 ... and no powers of ten."""
    low, high = axes.get_ylim()
    steps = [digit * 10.0**power for power in range(-4, 7) for digit in (1, 2, 5)]
    shown = [step for step in steps if low <= step <= high]
    axes.set_yticks(shown, [f"{step:g}" for step in shown])
    axes.minorticks_off()


def lines(
    axes: Axes, series: Mapping[str, Mapping[int, float]], labels: Mapping[str, str] = MappingProxyType(LABELS)
) -> None:
    """One line for each way, or form: tasks -> value."""
    for way, points in series.items():
        axes.plot(
            list(points), list(points.values()), marker=MARKS[way], markersize=4.5, linewidth=1.5, color=COLOURS[way],
            linestyle=THIN.get(way, "-"), label=labels[way], zorder=3 if way in ("fused", IN_GROUPS) else 2,
        )  # fmt: skip


def of_ways(sweep: CountSweep, ways: Sequence[str], value: Callable[[str, int], float]) -> dict[str, dict[int, float]]:
    """A value of each way, where it was measured."""
    found = {way: {tasks: value(way, tasks) for tasks in sweep.tasks if sweep.has(way, tasks)} for way in ways}
    return {way: points for way, points in found.items() if points}


def latency(axes: Axes, sweep: CountSweep, heading: str) -> None:
    lines(axes, of_ways(sweep, sweep.ways(), sweep.ms))
    over_tasks(axes, sweep.tasks, "latency (ms)")
    plain_numbers(axes)
    pictures.heading(axes, heading)


def memory(axes: Axes, sweep: CountSweep, heading: str) -> None:
    ways = [way for way in sweep.ways() if way not in ("eager", "grouped-eager", "batch")]
    lines(axes, of_ways(sweep, ways, lambda way, tasks: sweep.bytes(way, tasks) / MB))
    over_tasks(axes, sweep.tasks, "peak memory (MB)")
    plain_numbers(axes)
    pictures.heading(axes, heading)


def printed(axes: Axes, paper: Mapping[str, Published], keys: Mapping[int, str], label: str) -> None:
    """Ratios that the paper prints, by tasks."""
    axes.plot(
        list(keys), [paper[key].value for key in keys.values()], linestyle="none", marker="_", markersize=16,
        markeredgewidth=2, color=pictures.INK, label=label, zorder=4,
    )  # fmt: skip


def save(figure: Canvas, axes: Sequence[Axes], out: Path, name: str, title: str, columns: int = 5) -> Figure:
    """Write the picture, with one legend for all panels."""
    shown: dict[str, Artist] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        shown |= dict(zip(labels, handles, strict=True))
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=columns, frameon=False, fontsize=8.5,
        labelcolor=pictures.INK,
    )  # fmt: skip
    return pictures.save(figure, out, name, title)
