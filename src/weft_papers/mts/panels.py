"""Panels of this paper's pictures: a quantity over the number of tasks, with a line for each way to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from weft.reports.exhibits import DASHED, Axis, Curve, Panel
from weft_papers.mts.lab import COLOURS, LABELS, MARKS
from weft_papers.mts.recorded import IN_GROUPS, CountSweep

MB = 1e6  # the paper's unit: decimal megabytes
THIN = {"eager": ":", "grouped-eager": ":", "batch": DASHED, "mts": DASHED}
"""Lines that are references."""
UNSTORED = ("eager", "grouped-eager", "batch")
"""Ways without a measurement of memory."""
Series = Mapping[str, Mapping[int, float]]
"""Way -> tasks -> value."""


def curve(way: str, points: Mapping[float, float] | Mapping[int, float], label: str) -> Curve:
    order = 3 if way in ("fused", IN_GROUPS) else 2
    return Curve([*points], [*points.values()], label, COLOURS[way], MARKS[way], THIN.get(way, "-"), order=order)


def over_tasks(
    title: str, what: str, tasks: Sequence[int], series: Series, labels: Mapping[str, str] = MappingProxyType(LABELS)
) -> Panel:
    """A line for each way, or form, both axes by factors; *what* is up the side."""
    curves = [curve(way, points, labels[way]) for way, points in series.items()]
    return Panel(curves, title, tasks_axis(tasks), Axis(label=what, scale="log"))


def tasks_axis(tasks: Sequence[int]) -> Axis:
    return Axis(label="tasks", scale="log2", ticks=tasks)


def of_ways(sweep: CountSweep, ways: Sequence[str], value: Callable[[str, int], float]) -> dict[str, dict[int, float]]:
    """A value of each way, where it was measured."""
    curves = {way: {tasks: value(way, tasks) for tasks in sweep.tasks if sweep.has(way, tasks)} for way in ways}
    return {way: points for way, points in curves.items() if points}


def stored_ways(sweep: CountSweep) -> list[str]:
    return [way for way in sweep.ways() if way not in UNSTORED]


def latency(sweep: CountSweep, title: str) -> Panel:
    return over_tasks(f"{title}: latency", "latency (ms)", sweep.tasks, of_ways(sweep, sweep.ways(), sweep.ms))


def memory(sweep: CountSweep, title: str) -> Panel:
    series = of_ways(sweep, stored_ways(sweep), lambda way, tasks: sweep.bytes(way, tasks) / MB)
    return over_tasks(f"{title}: memory", "peak memory (MB)", sweep.tasks, series)
