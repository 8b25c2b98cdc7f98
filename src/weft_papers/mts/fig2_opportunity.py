"""Fig. 2: how little of a GPU one net uses, and the gain by streams. The paper draws both and prints no number.

Ours are recorded: the share of the GPU's peak that ResNet50 reaches with one picture at a time and in a batch, and the
latency of dense layers one after another and in parallel streams, without the cost of launching them from Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.mts import closed, recorded
from weft_papers.mts.lab import EvaluatedModels
from weft_papers.mts.recorded import HALF, SINGLE, BenchRecord, CountSweep, title

FIGURE = "Fig. 2"
PEAK_FLOPS = {HALF: 989e12, SINGLE: 495e12}
"""The peak of an H200's dense tensor cores, float32 as TF32: half of what NVIDIA's sheet prints for sparse ones."""
FLOPS_PER_MAC = 2  # a product and a sum
NET_WAYS = ("sequential", "streams", "fused", "batch")
LAYER_WAYS = ("eager", "sequential", "streams", "fused")


def peak_percent(sweep: CountSweep, way: str, tasks: int) -> float:
    """Percent of the GPU's peak that a way uses, by the MACs of the models one by one."""
    row = sweep.rows[way, tasks]
    macs = tasks * closed.work(EvaluatedModels(row.net, 1, row.pruning), "separate").macs
    return 100 * FLOPS_PER_MAC * macs / (row.ms / 1e3) / PEAK_FLOPS[row.dtype]


def figure_2(out: Path, record: BenchRecord) -> Exhibit:
    """Reproduce Fig. 2 from the record: use of the GPU by ResNet50, and streams of dense layers."""
    sweeps = [sweep for dtype in (SINGLE, HALF) if (sweep := record.sweep("resnet50", dtype)).where("sequential")]
    layer = record.sweep("fc")
    rows = [row for sweep in sweeps for row in _use_rows(sweep)] + _layer_rows(layer)
    tables = [_use_table(sweeps)] if sweeps else []
    tables += [_layer_table(layer)] if layer.tasks else []
    drawn = (_picture(out, sweeps, layer),) if sweeps or layer.tasks else ()
    return Exhibit(tuple(rows), tuple(tables), drawn)


def _use_rows(sweep: CountSweep) -> list[Row]:
    """Row with the share of the peak that one ResNet50 at a time uses; none without measurements."""
    if not sweep.where("sequential", "batch"):
        return []
    tasks = max(sweep.where("sequential", "batch"))
    alone, batch = peak_percent(sweep, "sequential", tasks), peak_percent(sweep, "batch", tasks)
    return [
        Row(
            f"{FIGURE}a", f"peak used by one ResNet50 at a time, {sweep.dtype}", None, alone, "%",
            f"recorded; a batch of {tasks} through one net uses {batch:.1f} %; the paper draws an RTX 2080 Ti as "
            "little used, a faster GPU is less so still",
        )
    ]  # fmt: skip


def _layer_rows(sweep: CountSweep) -> list[Row]:
    """Row with the speed-up of streams over one layer after another; none without measurements."""
    if not sweep.where("sequential", "streams"):
        return []
    tasks = max(sweep.where("sequential", "streams"))
    eager = f"; eager {sweep.ms('eager', tasks):.3g} ms" if sweep.has("eager", tasks) else ""
    return [
        Row(
            f"{FIGURE}b", f"streams over one after another, {tasks} dense layers", None,
            sweep.over("sequential", "streams", tasks), "x",
            f"recorded, both in one CUDA graph: {1e3 * sweep.ms('sequential', tasks):.3g} and "
            f"{1e3 * sweep.ms('streams', tasks):.3g} us{eager}; the paper draws almost no gain, launched from the host",
        )
    ]  # fmt: skip


def _use_table(sweeps: Sequence[CountSweep]) -> Table:
    """Table of times and shares of the peak of ResNet50, by data type, number of tasks and way."""
    body = [
        (sweep.dtype, str(tasks), way, f"{sweep.ms(way, tasks):.3f}", f"{peak_percent(sweep, way, tasks):.2f}")
        for sweep in sweeps
        for tasks in sweep.tasks
        for way in NET_WAYS
        if sweep.has(way, tasks)
    ]
    header = ("dtype", "tasks", "way", "ms", "% of peak")
    return Table(f"{FIGURE}a: how much of the GPU ResNet50 uses (recorded)", header, tuple(body))


def _layer_table(sweep: CountSweep) -> Table:
    """Table of times and memory of one dense layer per task, by number of tasks and way."""
    body = [
        (str(tasks), way, f"{1e3 * sweep.ms(way, tasks):.2f}", f"{sweep.bytes(way, tasks) / recorded.MB:.2f}")
        for tasks in sweep.tasks
        for way in sweep.ways()
        if sweep.has(way, tasks)
    ]
    header = ("tasks", "way", "us", "peak MB")
    return Table(f"{FIGURE}b: one dense layer of 1024 for each task (recorded)", header, tuple(body))


def _picture(out: Path, sweeps: Sequence[CountSweep], layer: CountSweep) -> Figure:
    """Draw the share of the peak by ResNet50, and the latency of dense layers, over the number of tasks."""
    shown = [
        recorded.over_tasks(
            f"a: {title(sweep)}",
            "% of the peak",
            sweep.tasks,
            recorded.of_ways(sweep, NET_WAYS, partial(peak_percent, sweep)),
        )
        for sweep in sweeps
    ]
    if layer.tasks:
        series = recorded.of_ways(layer, LAYER_WAYS, lambda way, tasks: 1e3 * layer.ms(way, tasks))
        shown.append(recorded.over_tasks("b: one dense layer of 1024 each", "latency (us)", layer.tasks, series))
    heading, size = f"{FIGURE}: how much of an H200 the models use (recorded)", (max(9, 4.4 * len(shown)), 4)
    return pictures.picture(out, "fig2-use", heading, shown, size=size, columns=len(shown), legend_columns=5)
