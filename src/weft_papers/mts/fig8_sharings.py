"""Fig. 8: sharing ratios of .9 to .6 on pruned ResNet18s. The paper prints no number, only which way they go.

MACs and weights are in closed form, for every ratio and number of tasks; latencies are recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from weft.reports.exhibits import Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.mts import closed, panels
from weft_papers.mts.against import listed, shape
from weft_papers.mts.lab import LABELS, SHARINGS, TASKS, EvaluatedModels
from weft_papers.mts.recorded import IN_GROUPS, BenchRecord, CountSweep

FIGURE = "Fig. 8"
NET = "resnet18"
DRAWN = ("sequential", "streams", "grouped", "mts", IN_GROUPS, "fused")

Sweeps = Mapping[float, CountSweep]


def figure_8(out: Path, record: BenchRecord) -> Exhibit:
    sweeps = {sharing: sweep for sharing in SHARINGS if (sweep := record.sweep(NET, sharing=sharing)).where("mts")}
    rows = (*_counted_rows(), *_recorded_rows(sweeps))
    tables = (_counted_table(), *([_recorded_table(sweeps)] if sweeps else []))
    return Exhibit(rows, tables, (_picture(out, sweeps),) if len(sweeps) > 1 else ())


def _ratios(sharing: float, tasks: int) -> tuple[float, float, float]:
    """MACs and weights of the paper's form, and weights stored once, over the models one by one."""
    setting = EvaluatedModels(NET, tasks, sharing=sharing)
    alone, mts, once = (closed.work(setting, form) for form in ("separate", "mts", "split"))
    return mts.macs / alone.macs, mts.weights / alone.weights, once.weights / alone.weights


def _counted_rows() -> list[Row]:
    most = max(TASKS)
    counts = [_ratios(sharing, most) for sharing in SHARINGS]
    ratios = "/".join(f"{sharing:g}" for sharing in SHARINGS)
    return [
        Row(
            FIGURE, f"MACs of MTS-no-Grouping at sharing .6 over .9, {most} ResNet18", None,
            counts[-1][0] / counts[0][0], "x",
            f"counted: {listed([ratio[0] for ratio in counts])} times those of the models one by one at {ratios}",
        ),
        Row(
            FIGURE, f"weights of MTS-no-Grouping at sharing .6, {most} ResNet18", None, counts[-1][1], "x",
            f"counted, over the models one by one: {listed([ratio[1] for ratio in counts], 2)} at {ratios}; every "
            f"weight once: {listed([ratio[2] for ratio in counts], 2)}; a thousand classes are in the paper's matrix",
        ),
    ]  # fmt: skip


def _recorded_rows(sweeps: Sweeps) -> list[Row]:
    if len(sweeps) < 2:
        return []
    low, high = min(sweeps), max(sweeps)
    rows = []
    for tasks in [count for count in TASKS if all(sweep.has("mts", count) for sweep in sweeps.values())]:
        times = [sweep.ms(IN_GROUPS, tasks) for sweep in sweeps.values()]
        groups = ", ".join(shape(sweep.grouping(tasks).groups) for sweep in sweeps.values())
        falls = "it does" if times == sorted(times) else "not always"
        exact = [sweep.ms("fused", tasks) for sweep in sweeps.values() if sweep.has("fused", tasks)]
        rows.append(
            Row(
                FIGURE, f"latency of MTS at sharing {low:g} over {high:g}, {tasks} ResNet18", None,
                times[-1] / times[0], "x",
                f"recorded: {listed(times, 3)} ms at {'/'.join(f'{count:g}' for count in sweeps)}, groups {groups}; "
                f"the paper: it falls with more sharing, here {falls}; fused: {listed(exact, 3)} ms",
            )
        )  # fmt: skip
    return rows


def _counted_table() -> Table:
    body = tuple(
        (f"{sharing:g}", str(tasks), *(f"{value:.3f}" for value in _ratios(sharing, tasks)),
         f"{closed.break_even(sharing):.3g}", f"{closed.best_group(sharing):.3g}")
        for sharing in SHARINGS
        for tasks in TASKS
    )  # fmt: skip
    header = ("sharing", "tasks", "MTS MACs x", "MTS weights x", "unique weights x", "even at T", "best group")
    return Table(f"{FIGURE}: counted, over the models one by one", header, body)


def _recorded_table(sweeps: Sweeps) -> Table:
    body = [
        (
            f"{sharing:g}", str(tasks), LABELS[way], f"{sweep.ms(way, tasks):.3f}",
            f"{sweep.cost(way, tasks).weight_bytes / panels.MB:.2f}", f"{sweep.bytes(way, tasks) / panels.MB:.2f}",
            shape(sweep.grouping(tasks).groups) if way == IN_GROUPS else "",
        )
        for sharing, sweep in sweeps.items()
        for tasks in sweep.tasks
        for way in sweep.ways()
        if sweep.has(way, tasks)
    ]  # fmt: skip
    header = ("sharing", "tasks", "way", "ms", "weights MB", "peak MB", "groups")
    return Table(f"{FIGURE}: latency and memory over the sharing ratio (recorded)", header, tuple(body))


def _picture(out: Path, sweeps: Sweeps) -> Figure:
    """A column for each number of tasks, over the ratio: latency above, memory below."""
    counts = [tasks for tasks in TASKS if all(sweep.has("mts", tasks) for sweep in sweeps.values())]
    x = Axis(label="sharing ratio", low=max(SHARINGS) + 0.02, high=min(SHARINGS) - 0.02, ticks=SHARINGS)
    shown = [
        Panel(_curves(sweeps, tasks, value), f"{tasks} tasks", x, Axis(label=what, scale="log"))
        for what, value in (("latency (ms)", CountSweep.ms), ("peak memory (MB)", _megabytes))
        for tasks in counts
    ]
    title = f"{FIGURE}: pruned ResNet18s over the sharing ratio, recorded on an H200 (the paper: a Jetson TX2)"
    layout = {"size": (3.2 * len(counts), 6.4), "columns": len(counts), "legend_columns": 5}
    return pictures.picture(out, "fig8-sharing", title, shown, share_y="row", **layout)


def _megabytes(sweep: CountSweep, way: str, tasks: int) -> float:
    return sweep.bytes(way, tasks) / panels.MB


def _curves(sweeps: Sweeps, tasks: int, value: Callable[[CountSweep, str, int], float]) -> list[Curve]:
    return [
        panels.curve(
            way,
            {sharing: value(sweep, way, tasks) for sharing, sweep in sweeps.items() if sweep.has(way, tasks)},
            LABELS[way],
        )
        for way in DRAWN
    ]
