"""Measurements recorded on a GPU: rows of ``benchmarks/stitch_gpu.py``, one for each way to run some models.

Every way but the eager ones runs in one CUDA graph; ``batch`` is as many pictures through ONE net, the physical
reference. The module also has what Fig. 2 and 6 to 9 make of the rows: the comparison of our exact form with its
rivals, the table of rows, and panels of a quantity over the number of tasks, with a line for each way to run them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

from weft.base.errors import InputError
from weft.base.jsonfile import read_json
from weft.reports.exhibits import DASHED, Axis, Curve, Panel
from weft_papers.base import Row, Table
from weft_papers.mts.lab import APART, COLOURS, LABELS, MARKS, RIVALS, SHARED, TASKS, TITLES, EvaluatedModels
from weft_stitch.planning.grouping import GroupCost, Grouping, group, interpolate

SHIPPED = "h200.json"
IN_GROUPS = "mts in groups"  # the paper's form with its grouping; computed, not recorded
WAYS = tuple(way for way in LABELS if way not in ("separate", IN_GROUPS, APART, "half"))
HALF, SINGLE = "float16", "float32"
UNKNOWN = GroupCost(1e9, 0, 0)
"""The cost of a group size that was not measured: so large that no grouping contains it."""


@dataclass(frozen=True, slots=True)
class MeasuredWay:
    """A measurement of one way to run some models."""

    net: str
    pruning: float
    dtype: str
    tasks: int
    sharing: float
    way: str
    ms: float
    """The median of the times of one run of all models."""
    weight_bytes: int
    peak_bytes: int
    launches: int | None = None
    error: float | None = None
    """The error of the outputs, relative to the separate models'."""
    exact_error: float | None = None
    """The error of the outputs without TF32."""
    workspace_bytes: int | None = None
    """The part of the peak that is cuBLAS's."""
    widths: tuple[float, ...] | None = None
    """As in ``EvaluatedModels``; also *batches* and *classes*."""
    batches: tuple[int, ...] | None = None
    classes: Any = None

    @property
    def mixed(self) -> str:
        """The property in which the tasks differ, "widths" or "batches"; empty if they are alike."""
        return "widths" if self.widths else "batches" if self.batches else ""

    @property
    def cost(self) -> GroupCost:
        """Seconds, bytes of weights, and bytes of activations, which are the peak without the weights."""
        return GroupCost(self.ms / 1e3, self.weight_bytes, max(0, self.peak_bytes - self.weight_bytes))

    @property
    def setting(self) -> EvaluatedModels:
        return EvaluatedModels(self.net, self.tasks, self.pruning, self.sharing, self.widths, self.batches)


@dataclass(frozen=True, eq=False)
class CountSweep:
    """The measurements of one net at one data type, over the number of tasks and by way to run them."""

    net: str
    dtype: str
    rows: Mapping[tuple[str, int], MeasuredWay]
    """The measurements by way and number of tasks."""
    _groupings: dict[int, Grouping] = field(default_factory=dict)

    @cached_property
    def tasks(self) -> tuple[int, ...]:
        return tuple(sorted({tasks for _, tasks in self.rows}))

    def where(self, *ways: str) -> list[int]:
        """The paper's numbers of tasks at which all of *ways* were measured."""
        return [tasks for tasks in TASKS if all(self.has(way, tasks) for way in ways)]

    def ways(self) -> list[str]:
        """The ways that have a value at some number of tasks."""
        return [way for way in LABELS if any(self.has(way, tasks) for tasks in self.tasks)]

    def has(self, way: str, tasks: int) -> bool:
        """Whether a way has a value.

        The paper's form in groups is computed from measured sizes of ``mts`` and the time of the models one by one.
        """
        if way == IN_GROUPS:
            return any(measured == "mts" for measured, _ in self.rows) and ("sequential", tasks) in self.rows
        return (way, tasks) in self.rows

    def cost(self, way: str, tasks: int) -> GroupCost:
        """The measured cost of a way; for the paper's form in groups, the sum over its groups."""
        return self.grouping(tasks).cost if way == IN_GROUPS else self.rows[way, tasks].cost

    def ms(self, way: str, tasks: int) -> float:
        return 1e3 * self.cost(way, tasks).seconds

    def bytes(self, way: str, tasks: int) -> float:
        return self.cost(way, tasks).bytes

    def over(self, way: str, other: str, tasks: int) -> float:
        """The time of *way* over that of *other*."""
        return self.ms(way, tasks) / self.ms(other, tasks)

    def fastest(self, ways: tuple[str, ...], tasks: int) -> str:
        """The way of *ways* with the least time, among those that were measured."""
        return min((way for way in ways if self.has(way, tasks)), key=lambda way: self.ms(way, tasks))

    def grouping(self, tasks: int) -> Grouping:
        """Group equal models by the paper's Algorithm 1, on measured and interpolated latencies of ``mts``.

        If a single model was not measured, its time is that of all of them run one after another over their number. No
        group is larger than the largest that was measured.
        """
        if tasks not in self._groupings:
            samples = {size: row.cost for (way, size), row in self.rows.items() if way == "mts"}
            if 1 not in samples and ("sequential", tasks) in self.rows:
                total = self.rows["sequential", tasks].cost
                samples[1] = GroupCost(total.seconds / tasks, total.weight_bytes / tasks, total.activation_bytes)
            largest = max(samples)
            self._groupings[tasks] = group(
                [self.net] * tasks,
                lambda models: interpolate(samples, len(models)) if len(models) <= largest else UNKNOWN,
            )
        return self._groupings[tasks]


@dataclass(frozen=True, eq=False)
class BenchRecord:
    """All rows of one run of the benchmark."""

    machine: Mapping[str, Any]
    versions: Mapping[str, Any]
    settings: Mapping[str, Any]
    rows: tuple[MeasuredWay, ...]

    def sweep(self, net: str, dtype: str = SINGLE, sharing: float = SHARED, mixed: str = "") -> CountSweep:
        """The rows of one net; no rows if it was not measured."""
        key = (net, dtype, sharing, mixed)
        rows = [row for row in self.rows if (row.net, row.dtype, row.sharing, row.mixed) == key]
        return CountSweep(net, dtype, {(row.way, row.tasks): row for row in rows})


def read(path: Path | None = None) -> BenchRecord:
    """Read a result file of the benchmark, without ways that failed; None: the one recorded on an H200."""
    with resources.as_file(resources.files("weft_papers") / "data" / "mts" / SHIPPED) as shipped:
        raw = read_json(path or shipped, InputError)
    rows = [_parse_measurement(row) for row in raw["rows"] if row["ms"] is not None and row["peak_bytes"] is not None]
    return BenchRecord(raw["machine"], raw["versions"], raw["settings"], tuple(rows))


def _parse_measurement(raw: Mapping[str, Any]) -> MeasuredWay:
    """Parse a row of the file. Raises InputError for an unknown way."""
    if raw["way"] not in WAYS:
        raise InputError(f"a way to run models is {raw['way']!r}; it may be {', '.join(WAYS)}")
    known = {column.name for column in fields(MeasuredWay)}
    values: dict[str, Any] = {key: value for key, value in raw.items() if key in known}
    for key in ("widths", "batches"):
        values[key] = tuple(values[key]) if values.get(key) else None
    return MeasuredWay(**values)


MB = 1e6  # the paper's unit: decimal megabytes
DASHES = {"eager": ":", "grouped-eager": ":", "batch": DASHED, "mts": DASHED}
"""Way -> dash of its line; other ways have solid lines."""
UNSTORED = ("eager", "grouped-eager", "batch")
"""Ways without a measurement of memory."""
Series = Mapping[str, Mapping[int, float]]
"""Way -> tasks -> value."""


def curve(way: str, points: Mapping[float, float] | Mapping[int, float], label: str) -> Curve:
    """The curve of a way in its colour and mark; ours and the paper's are drawn above the others."""
    order = 3 if way in ("fused", IN_GROUPS) else 2
    return Curve([*points], [*points.values()], label, COLOURS[way], MARKS[way], DASHES.get(way, "-"), order=order)


def over_tasks(
    title: str, what: str, tasks: Sequence[int], series: Series, labels: Mapping[str, str] = MappingProxyType(LABELS)
) -> Panel:
    """A panel with a curve for each way or form over the number of tasks, both axes logarithmic.

    what: label of the y axis. series: way or form -> number of tasks -> value.
    """
    curves = [curve(way, values, labels[way]) for way, values in series.items()]
    return Panel(curves, title, tasks_axis(tasks), Axis(label=what, scale="log"))


def tasks_axis(tasks: Sequence[int]) -> Axis:
    return Axis(label="tasks", scale="log2", ticks=tasks)


def of_ways(sweep: CountSweep, ways: Sequence[str], value: Callable[[str, int], float]) -> dict[str, dict[int, float]]:
    """Way -> number of tasks -> value, for the ways and numbers that were measured."""
    curves = {way: {tasks: value(way, tasks) for tasks in sweep.tasks if sweep.has(way, tasks)} for way in ways}
    return {way: points for way, points in curves.items() if points}


def stored_ways(sweep: CountSweep) -> list[str]:
    """The ways whose memory was measured."""
    return [way for way in sweep.ways() if way not in UNSTORED]


def latency(sweep: CountSweep, title: str) -> Panel:
    """The panel of all ways' latencies."""
    return over_tasks(f"{title}: latency", "latency (ms)", sweep.tasks, of_ways(sweep, sweep.ways(), sweep.ms))


def memory(sweep: CountSweep, title: str) -> Panel:
    """The panel of the ways' peak memories."""
    series = of_ways(sweep, stored_ways(sweep), lambda way, tasks: sweep.bytes(way, tasks) / MB)
    return over_tasks(f"{title}: memory", "peak memory (MB)", sweep.tasks, series)


OURS = "fused"


def title(sweep: CountSweep) -> str:
    """The net and the data type, for headings."""
    return f"{TITLES.get(sweep.net, sweep.net)}, {sweep.dtype}"


def shape(groups: Sequence[Sequence[int]]) -> str:
    """The sizes of the groups as text, such as "8 + 8"."""
    return " + ".join(str(len(group)) for group in groups)


def listed(values: Sequence[float], digits: int = 1) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in values)


def ours_rows(figure: str, sweep: CountSweep) -> list[Row]:
    """Rows with our exact one-kernel form against the fastest rival and a plain batch, over all numbers of tasks."""
    tasks = sweep.where(OURS, "streams")
    if not tasks:
        return []
    best = {count: sweep.fastest(RIVALS, count) for count in tasks}
    gains = [sweep.over(best[count], OURS, count) for count in tasks]
    percents = [
        100 * sweep.cost(OURS, count).weight_bytes / sweep.cost(best[count], count).weight_bytes for count in tasks
    ]
    rivals = ", ".join(
        f"{LABELS[way]} at {_joined([count for count in tasks if best[count] == way])}"
        for way in dict.fromkeys(best.values())
    )
    rows = [
        Row(
            figure, f"ours (fused) over the fastest rival, {title(sweep)}, least", None, min(gains), "x",
            f"recorded at {_joined(tasks)} tasks: {listed(gains, 2)}; the fastest: {rivals}",
        ),
        Row(
            figure, f"weights of ours over that rival's, {title(sweep)}, most tasks", None, percents[-1], "%",
            f"recorded: {listed(percents)} %; every weight is stored once, no block of zeros",
        ),
    ]  # fmt: skip
    if all(sweep.has("batch", count) for count in tasks):
        ratios = [sweep.over(OURS, "batch", count) for count in tasks]
        rows.append(
            Row(figure, f"ours (fused) over a plain batch through one net, {title(sweep)}, most", None, max(ratios),
                "x", f"recorded: {listed(ratios, 2)}; the batch is the physical reference: it has one net's weights "
                "only")
        )  # fmt: skip
    return rows


def _joined(tasks: Sequence[int]) -> str:
    return "/".join(map(str, tasks))


def table(figure: str, sweep: CountSweep, note: str = "") -> Table:
    """Table of every recorded row, and of the paper's form in groups."""
    body = []
    for tasks in sweep.tasks:
        for way in sweep.ways():
            if sweep.has(way, tasks):
                body.append(_cells(sweep, way, tasks))
    header = ("tasks", "way", "ms", "over sequential", "weights MB", "peak MB", "launches", "error", "groups")
    return Table(f"{figure}: {title(sweep)}{note} (recorded)", header, tuple(body))


def _cells(sweep: CountSweep, way: str, tasks: int) -> tuple[str, ...]:
    """The cells of a way at a number of tasks."""
    cost = sweep.cost(way, tasks)
    base = "sequential" if sweep.has("sequential", tasks) else "eager"
    gain = f"{sweep.over(base, way, tasks):.2f}" if sweep.has(base, tasks) else ""
    row = sweep.rows.get((way, tasks))
    launches = "" if row is None or row.launches is None else str(row.launches)
    error = "" if row is None or row.error is None else f"{row.error:.1e}"
    groups = shape(sweep.grouping(tasks).groups) if way == IN_GROUPS else ""
    return (
        str(tasks), LABELS[way], f"{1e3 * cost.seconds:.3f}", gain, f"{cost.weight_bytes / 1e6:.1f}",
        f"{cost.bytes / 1e6:.1f}", launches, error, groups,
    )  # fmt: skip
