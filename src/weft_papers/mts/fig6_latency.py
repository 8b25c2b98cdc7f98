"""Fig. 6 and 7: latency and memory of 4 to 32 models, on a phone's board and on an edge server's GPU.

Fig. 6 has pruned ResNet18s and VGG16s on a Jetson TX2, Fig. 7 unpruned ResNet50s on an RTX 2080 Ti. Ours are recorded
on an H200, Fig. 7 in single and half precision. The paper runs its methods eagerly; here each runs in one CUDA graph,
so that kernel launches slow none of them. The paper's Algorithm 1 groups the models, on measured latencies of its form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.reports.exhibits import INK, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, beside
from weft_papers.layerweaver.lab import geomean
from weft_papers.mts import closed, recorded
from weft_papers.mts.counting import GROUPS
from weft_papers.mts.lab import TASKS, EvaluatedModels
from weft_papers.mts.recorded import (
    HALF,
    IN_GROUPS,
    MB,
    SINGLE,
    BenchRecord,
    CountSweep,
    listed,
    ours_rows,
    shape,
    table,
    title,
)

FIGURE = "Fig. 6"
NET = "resnet18"


def figure_6(paper: Paper, out: Path, record: BenchRecord) -> Exhibit:
    """Reproduce Fig. 6 from the record: pruned ResNet18s and VGG16s; empty without measurements."""
    resnet, vgg = record.sweep(NET), record.sweep("vgg16")
    rows = [*_speed_rows(paper, resnet), *_memory_rows(paper, resnet), *_group_rows(paper, resnet)]
    rows += [*ours_rows(f"{FIGURE}a", resnet), *_vgg_rows(paper, vgg), *ours_rows(f"{FIGURE}c", vgg)]
    sweeps = [sweep for sweep in (resnet, vgg) if sweep.tasks]
    tables = tuple(table(FIGURE, sweep) for sweep in sweeps)
    return Exhibit(tuple(rows), tables, (_picture(paper, out, sweeps),)) if sweeps else Exhibit()


def _speed_rows(paper: Paper, sweep: CountSweep) -> list[Row]:
    """Rows with the speed of the paper's form over Sequential and over NetFuse."""
    rows = []
    gains = {
        tasks: sweep.over("grouped", IN_GROUPS, tasks) for tasks in sweep.where("sequential", "grouped", IN_GROUPS)
    }
    for tasks in gains:
        rows += [_sequential_row(paper, sweep, tasks), _one_stream_row(paper, sweep, tasks)]
    return [*rows, *_netfuse_rows(paper, gains)] if gains else []


def _netfuse_rows(paper: Paper, gains: Mapping[int, float]) -> list[Row]:
    """Rows with the mean and the largest speed-up over NetFuse; *gains*: by number of tasks."""
    ours, tasks = geomean(gains.values()), max(gains, key=gains.__getitem__)
    usual, best = paper[f"netfuse_{NET}"].value, paper["netfuse_best"].value
    why = (
        f"geometric mean of {listed(list(gains.values()), 2)} at {'/'.join(map(str, gains))}; the paper's NetFuse runs "
        "in several streams, ours in one, a kernel for each layer, in one CUDA graph"
    )
    return [
        Row(f"{FIGURE}a", "MTS over NetFuse, ResNet18", usual, ours, "x", beside(ours, usual, why)),
        Row(
            f"{FIGURE}a", "MTS over NetFuse, ResNet18, at most", best, gains[tasks], "x",
            beside(gains[tasks], best, f"at {tasks} tasks; the paper also says about {usual:g}x"),
        ),
    ]  # fmt: skip


def _sequential_row(paper: Paper, sweep: CountSweep, tasks: int) -> Row:
    """Row with the speed-up of the paper's form over the models one after another."""
    ours, printed = sweep.over("sequential", IN_GROUPS, tasks), paper[f"speedup_{NET}_{tasks}"].value
    eager = f"; against eager {sweep.over('eager', IN_GROUPS, tasks):.1f}x" if sweep.has("eager", tasks) else ""
    why = (
        f"H200 instead of TX2; both in one CUDA graph, {sweep.ms('sequential', tasks):.3g} and "
        f"{sweep.ms(IN_GROUPS, tasks):.3g} ms{eager}; small kernels one after another fill neither GPU, and a larger "
        "one less"
    )
    return Row(f"{FIGURE}a", f"MTS over Sequential, {tasks} ResNet18", printed, ours, "x", beside(ours, printed, why))


def _one_stream_row(paper: Paper, sweep: CountSweep, tasks: int) -> Row:
    """Row with the speed-up of the paper's form over NetFuse in one stream."""
    ours, printed = sweep.over("grouped", IN_GROUPS, tasks), paper[f"one_stream_{NET}_{tasks}"].value
    why = "the grouped convolution, one kernel for all groups in cuDNN of today; on a TX2 it was as slow as Sequential"
    quantity = f"MTS over NetFuse-no-Concurrency, {tasks} ResNet18"
    return Row(f"{FIGURE}a", quantity, printed, ours, "x", beside(ours, printed, why))


def _memory_rows(paper: Paper, sweep: CountSweep) -> list[Row]:
    """Rows with the peak memory of NetFuse and of Sequential over that of the paper's form."""
    rows = []
    for tasks in sweep.where("grouped", IN_GROUPS):
        ours = sweep.bytes("grouped", tasks) / sweep.bytes(IN_GROUPS, tasks)
        printed = paper[f"netfuse_memory_{NET}_{tasks}"].value
        workspace = (sweep.rows["grouped", tasks].workspace_bytes or 0) / MB
        why = (
            f"peaks of the allocator, {sweep.bytes('grouped', tasks) / MB:.0f} and "
            f"{sweep.bytes(IN_GROUPS, tasks) / MB:.0f} MB, of which cuBLAS keeps {workspace:.0f} in either; the "
            "paper's NetFuse runs in several streams"
        )
        if sweep.has("fused", tasks):
            why += f"; fused: {sweep.bytes('grouped', tasks) / sweep.bytes('fused', tasks):.2f}x"
        rows.append(_memory_row("NetFuse", tasks, printed, ours, why))
    most_tasks = max(sweep.where("sequential", IN_GROUPS), default=0)
    if (key := f"sequential_memory_{NET}_{most_tasks}") in paper:
        ours = sweep.bytes("sequential", most_tasks) / sweep.bytes(IN_GROUPS, most_tasks)
        why = "one after another in one CUDA graph, whose pool the models share"
        rows.append(_memory_row("Sequential", most_tasks, paper[key].value, ours, why))
    return rows


def _memory_row(rival: str, tasks: int, printed: float, ours: float, why: str) -> Row:
    """Row with the memory of *rival* over that of the paper's form."""
    quantity = f"memory of {rival} over MTS, {tasks} ResNet18"
    return Row(f"{FIGURE}b", quantity, printed, ours, "x", beside(ours, printed, why))


def _group_rows(paper: Paper, sweep: CountSweep) -> list[Row]:
    """Rows with the groups that Algorithm 1 makes of the largest number of tasks, and with their gain."""
    tasks = max(TASKS)
    if not sweep.has("mts", tasks):
        return []
    grouping = sweep.grouping(tasks)
    sizes = shape(grouping.groups)
    latency, memory = sweep.over("mts", IN_GROUPS, tasks), sweep.bytes("mts", tasks) / sweep.bytes(IN_GROUPS, tasks)
    their_latency, their_memory = paper["grouping_latency"].value, paper["grouping_memory"].value
    return [
        Row(
            f"{FIGURE}a", f"groups of {tasks} ResNet18", GROUPS, len(grouping.groups), "",
            f"{sizes} by dynamic programming over measured latencies, sizes between interpolated, one model included, "
            "which Algorithm 1 forgets; a larger GPU is full later",
        ),
        Row(
            f"{FIGURE}a", f"MTS-no-Grouping over MTS, {tasks} ResNet18", their_latency, latency, "x",
            beside(latency, their_latency, f"{sizes}; the paper's summary says "
                   f"{paper['grouping_latency_best'].value:g}x without a place"),
        ),
        Row(
            f"{FIGURE}b", f"memory of MTS-no-Grouping over MTS, {tasks} ResNet18", their_memory, memory, "x",
            beside(memory, their_memory, f"weights of all groups, activations of the largest; the paper's summary says "
                   f"{paper['grouping_memory_best'].value:g}x without a place"),
        ),
    ]  # fmt: skip


def _vgg_rows(paper: Paper, sweep: CountSweep) -> list[Row]:
    """Rows on VGG16: speed and memory of Sequential over the paper's form; none without measurements."""
    if not (tasks := sweep.where("sequential", IN_GROUPS)):
        return []
    speed = [sweep.over("sequential", IN_GROUPS, count) for count in tasks]
    memory = [sweep.bytes("sequential", count) / sweep.bytes(IN_GROUPS, count) for count in tasks]
    their_speed, their_memory = paper["speedup_vgg16"].value, paper["sequential_memory_vgg16"].value
    most, counts = max(tasks), "/".join(map(str, tasks))
    return [
        Row(
            f"{FIGURE}c", "MTS over Sequential, VGG16", their_speed, geomean(speed), "x",
            beside(geomean(speed), their_speed, f"the paper does not say at how many tasks; geometric mean of "
                   f"{listed(speed)} at {counts}; VGG16 fills a TX2, not an H200"),
        ),
        Row(
            f"{FIGURE}d", "memory of Sequential over MTS, VGG16", their_memory, geomean(memory), "x",
            beside(geomean(memory), their_memory, f"geometric mean of {listed(memory, 2)} at {counts}"),
        ),
        Row(
            f"{FIGURE}c", f"Sequential over MTS-no-Grouping, {most} VGG16", None, sweep.over("sequential", "mts", most),
            "x", "on the TX2 MTS-no-Grouping is slower than Sequential, below 1x; drawn only",
        ),
    ]  # fmt: skip


def _picture(paper: Paper, out: Path, sweeps: Sequence[CountSweep]) -> Figure:
    """Draw latency, memory and speed-up over the number of tasks, a row of panels per net."""
    shown = [
        panel
        for sweep in sweeps
        for panel in (recorded.latency(sweep, title(sweep)), recorded.memory(sweep, title(sweep)), _gains(paper, sweep))
    ]
    heading = f"{FIGURE}: pruned nets, sharing .9, batch 1, recorded on an H200 (the paper: a Jetson TX2)"
    size = (13, 3.9 * len(sweeps) + 0.8)
    return pictures.picture(out, "fig6-mobile", heading, shown, size=size, columns=3, legend_columns=5)


def _gains(paper: Paper, sweep: CountSweep) -> Panel:
    """Panel of speed-ups over Sequential in a CUDA graph, with the printed ones, which are over an eager Sequential."""
    series = recorded.of_ways(
        sweep, recorded.stored_ways(sweep), lambda way, tasks: sweep.over("sequential", way, tasks)
    )
    panel = recorded.over_tasks(f"{title(sweep)}: speed-up", "speed-up over sequential", sweep.tasks, series)
    keys = {tasks: f"speedup_{sweep.net}_{tasks}" for tasks in sweep.tasks}
    printed = {tasks: paper[key].value for tasks, key in keys.items() if key in paper}
    strokes = Curve([*printed], [*printed.values()], "MTS, as the paper prints it", INK, "_", "", size=16, order=4)
    return replace(panel, marks=[*panel.marks, strokes]) if printed else panel


FIGURE_7 = "Fig. 7"
EDGE_NET = "resnet50"


def figure_7(paper: Paper, out: Path, record: BenchRecord) -> Exhibit:
    """Reproduce Fig. 7 from the record: whole ResNet50s in single and half precision."""
    sweeps = [sweep for dtype in (SINGLE, HALF) if (sweep := record.sweep(EDGE_NET, dtype)).tasks]
    rows = [row for sweep in sweeps for row in (*_rows(paper, sweep), *ours_rows(FIGURE_7, sweep))]
    tables = tuple(table(FIGURE_7, sweep) for sweep in sweeps)
    return (
        Exhibit((*rows, _weights_row()), tables, (_picture_7(out, sweeps),)) if sweeps else Exhibit((_weights_row(),))
    )


def _rows(paper: Paper, sweep: CountSweep) -> list[Row]:
    """Rows of one precision of Fig. 7: speed over Sequential, speed and memory against NetFuse."""
    if not (tasks := sweep.where("sequential", "grouped", IN_GROUPS)):
        return []
    speed = {count: sweep.over("sequential", IN_GROUPS, count) for count in tasks}
    share = {count: 100 * sweep.bytes(IN_GROUPS, count) / sweep.bytes("grouped", count) for count in tasks}
    slower = [sweep.over(IN_GROUPS, "grouped", count) for count in tasks]
    best, largest = max(speed, key=speed.__getitem__), max(tasks)
    their_speed, their_share = paper[f"speedup_{EDGE_NET}"].value, paper[f"netfuse_memory_{EDGE_NET}"].value
    eager = f"; against eager {sweep.over('eager', IN_GROUPS, best):.1f}x" if sweep.has("eager", best) else ""
    counts = "/".join(map(str, tasks))
    return [
        Row(
            f"{FIGURE_7}a", f"MTS over Sequential, {title(sweep)}, at most", their_speed, speed[best], "x",
            beside(speed[best], their_speed, f"{listed(list(speed.values()))} at {counts}, both in one CUDA graph"
                   f"{eager}; the paper launches from Python, and does not say at how many tasks"),
        ),
        Row(
            f"{FIGURE_7}a", f"MTS slower than NetFuse, {title(sweep)}, {largest} tasks", None, slower[-1], "x",
            f"the paper says slightly slower; ours {listed(slower, 2)} at {counts}, grouped convolutions of cuDNN",
        ),
        Row(
            f"{FIGURE_7}b", f"memory of MTS over NetFuse's, {title(sweep)}, {largest} tasks", their_share,
            share[largest], "%",
            beside(share[largest], their_share, f"peak of the allocator, {listed(list(share.values()))} % at {counts}"),
        ),
    ]  # fmt: skip


def _weights_row() -> Row:
    """Row with the weights of the paper's form over NetFuse's, counted in closed form."""
    setting = EvaluatedModels(EDGE_NET, 32, pruning=0.0)
    separate = closed.work(setting, "separate").weights
    mts, exact = (100 * closed.work(setting, form).weights / separate for form in ("mts", "split"))
    grouped = closed.work(setting._replace(tasks=8), "mts").weights * 4  # four groups of 8
    return Row(
        f"{FIGURE_7}b", "weights of MTS over NetFuse's, 32 ResNet50, counted", None, mts, "%",
        f"closed form, with 1000 classes that no models share; in groups of 8 {100 * grouped / separate:.1f} %, "
        f"every weight once {exact:.1f} %; the paper's 37 % is memory, so nearly all of it weights",
    )  # fmt: skip


def _picture_7(out: Path, sweeps: Sequence[CountSweep]) -> Figure:
    shown = [draw(sweep, title(sweep)) for sweep in sweeps for draw in (recorded.latency, recorded.memory)]
    heading = f"{FIGURE_7}: whole ResNet50s, sharing .9, batch 1, recorded on an H200 (the paper: an RTX 2080 Ti)"
    size = (10, 3.9 * len(sweeps) + 0.8)
    return pictures.picture(out, "fig7-edge", heading, shown, size=size, columns=2, legend_columns=5)
