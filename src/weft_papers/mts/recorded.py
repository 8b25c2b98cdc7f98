"""What was measured on a GPU, and kept: rows of the benchmark of stitching, one for each way to run some models.

The file is what ``benchmarks/stitch_gpu.py`` writes. Every way but the eager ones runs in one CUDA graph; ``batch`` is
as many pictures through ONE net, the physical reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.jsonfile import read_json
from weft_papers.mts.lab import APART, LABELS, SHARED, TASKS, EvaluatedModels
from weft_stitch.planning.grouping import GroupCost, Grouping, group, interpolated

SHIPPED = "h200.json"
IN_GROUPS = "mts in groups"
WAYS = tuple(way for way in LABELS if way not in ("separate", IN_GROUPS, APART, "half"))
HALF, SINGLE = "float16", "float32"
UNKNOWN = GroupCost(1e9, 0, 0)
"""The cost of a group without a measurement: a number too large to be chosen."""


@dataclass(frozen=True, slots=True)
class MeasuredWay:
    """One way to run some models."""

    net: str
    pruning: float
    dtype: str
    tasks: int
    sharing: float
    way: str
    ms: float
    """The median of the times."""
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
    batches: tuple[int, ...] | None = None
    classes: Any = None

    @property
    def mixed(self) -> str:
        """What the tasks differ in."""
        return "widths" if self.widths else "batches" if self.batches else ""

    @property
    def cost(self) -> GroupCost:
        return GroupCost(self.ms / 1e3, self.weight_bytes, max(0, self.peak_bytes - self.weight_bytes))

    @property
    def setting(self) -> EvaluatedModels:
        return EvaluatedModels(self.net, self.tasks, self.pruning, self.sharing, self.widths, self.batches)


@dataclass(frozen=True, eq=False)
class CountSweep:
    """The ways to run models of one kind, over how many there are."""

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
        return [way for way in LABELS if any(self.has(way, tasks) for tasks in self.tasks)]

    def has(self, way: str, tasks: int) -> bool:
        """Groups of the paper's form need some of its sizes measured, and one model's latency."""
        if way == IN_GROUPS:
            return any(measured == "mts" for measured, _ in self.rows) and ("sequential", tasks) in self.rows
        return (way, tasks) in self.rows

    def cost(self, way: str, tasks: int) -> GroupCost:
        """The cost of a way that was measured; that of the paper's in groups is what its groups take."""
        return self.grouping(tasks).cost if way == IN_GROUPS else self.rows[way, tasks].cost

    def ms(self, way: str, tasks: int) -> float:
        return 1e3 * self.cost(way, tasks).seconds

    def bytes(self, way: str, tasks: int) -> float:
        return self.cost(way, tasks).bytes

    def over(self, way: str, other: str, tasks: int) -> float:
        """How many times longer *way* takes than *other*."""
        return self.ms(way, tasks) / self.ms(other, tasks)

    def fastest(self, ways: tuple[str, ...], tasks: int) -> str:
        return min((way for way in ways if self.has(way, tasks)), key=lambda way: self.ms(way, tasks))

    def grouping(self, tasks: int) -> Grouping:
        """The paper's Algorithm 1 for equal models on measured latencies of ``mts``, those between interpolated.

        Where no model was measured alone, it takes its share of all of them run one after another. No group is larger
        than the largest that was measured.
        """
        if tasks not in self._groupings:
            samples = {size: row.cost for (way, size), row in self.rows.items() if way == "mts"}
            if 1 not in samples and ("sequential", tasks) in self.rows:
                whole = self.rows["sequential", tasks].cost
                samples[1] = GroupCost(whole.seconds / tasks, whole.weight_bytes / tasks, whole.activation_bytes)
            most = max(samples)
            self._groupings[tasks] = group(
                [self.net] * tasks,
                lambda models: interpolated(samples, len(models)) if len(models) <= most else UNKNOWN,
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
        wanted = (net, dtype, sharing, mixed)
        mine = [row for row in self.rows if (row.net, row.dtype, row.sharing, row.mixed) == wanted]
        return CountSweep(net, dtype, {(row.way, row.tasks): row for row in mine})


def read(path: Path | None = None) -> BenchRecord:
    """A file of the benchmark, without ways that failed; the one recorded on an H200 where none is named."""
    with resources.as_file(resources.files("weft_papers") / "data" / "mts" / SHIPPED) as shipped:
        raw = read_json(path or shipped, InputError)
    rows = [_measured(row) for row in raw["rows"] if row["ms"] is not None and row["peak_bytes"] is not None]
    return BenchRecord(raw["machine"], raw["versions"], raw["settings"], tuple(rows))


def _measured(raw: Mapping[str, Any]) -> MeasuredWay:
    if raw["way"] not in WAYS:
        raise InputError(f"a way to run models is {raw['way']!r}; it may be {', '.join(WAYS)}")
    known = {column.name for column in fields(MeasuredWay)}
    values: dict[str, Any] = {key: value for key, value in raw.items() if key in known}
    for key in ("widths", "batches"):
        values[key] = tuple(values[key]) if values.get(key) else None
    return MeasuredWay(**values)
