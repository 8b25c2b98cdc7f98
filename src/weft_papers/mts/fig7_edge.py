"""Fig. 7: whole ResNet50s, 4 to 32 of them. The paper's RTX 2080 Ti; ours recorded on an H200, single and half."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, beside
from weft_papers.mts import closed, panels
from weft_papers.mts.against import listed, ours_rows, table, title
from weft_papers.mts.lab import EvaluatedModels
from weft_papers.mts.recorded import HALF, IN_GROUPS, SINGLE, BenchRecord, CountSweep

FIGURE = "Fig. 7"
NET = "resnet50"


def figure_7(paper: Paper, out: Path, record: BenchRecord) -> Exhibit:
    sweeps = [sweep for dtype in (SINGLE, HALF) if (sweep := record.sweep(NET, dtype)).tasks]
    rows = [row for sweep in sweeps for row in (*_rows(paper, sweep), *ours_rows(FIGURE, sweep))]
    tables = tuple(table(FIGURE, sweep) for sweep in sweeps)
    return Exhibit((*rows, _weights_row()), tables, (_picture(out, sweeps),)) if sweeps else Exhibit((_weights_row(),))


def _rows(paper: Paper, sweep: CountSweep) -> list[Row]:
    if not (tasks := sweep.where("sequential", "grouped", IN_GROUPS)):
        return []
    speed = {count: sweep.over("sequential", IN_GROUPS, count) for count in tasks}
    share = {count: 100 * sweep.bytes(IN_GROUPS, count) / sweep.bytes("grouped", count) for count in tasks}
    netfuse = [sweep.over(IN_GROUPS, "grouped", count) for count in tasks]
    best, most = max(speed, key=speed.__getitem__), max(tasks)
    their_speed, their_share = paper[f"speedup_{NET}"].value, paper[f"netfuse_memory_{NET}"].value
    eager = f"; against eager {sweep.over('eager', IN_GROUPS, best):.1f}x" if sweep.has("eager", best) else ""
    counts = "/".join(map(str, tasks))
    return [
        Row(
            f"{FIGURE}a", f"MTS over Sequential, {title(sweep)}, at most", their_speed, speed[best], "x",
            beside(speed[best], their_speed, f"{listed(list(speed.values()))} at {counts}, both in one CUDA graph"
                   f"{eager}; the paper launches from Python, and says not at how many tasks"),
        ),
        Row(
            f"{FIGURE}a", f"MTS slower than NetFuse, {title(sweep)}, {most} tasks", None, netfuse[-1], "x",
            f"the paper says slightly slower; ours {listed(netfuse, 2)} at {counts}, grouped convolutions of cuDNN",
        ),
        Row(
            f"{FIGURE}b", f"memory of MTS over NetFuse's, {title(sweep)}, {most} tasks", their_share, share[most], "%",
            beside(share[most], their_share, f"peak of the allocator, {listed(list(share.values()))} % at {counts}"),
        ),
    ]  # fmt: skip


def _weights_row() -> Row:
    """What weights alone let expect, in closed form."""
    setting = EvaluatedModels(NET, 32, pruning=0.0)
    separate = closed.work(setting, "separate").weights
    mts, exact = (100 * closed.work(setting, form).weights / separate for form in ("mts", "split"))
    group = closed.work(setting._replace(tasks=8), "mts").weights * 4
    return Row(
        f"{FIGURE}b", "weights of MTS over NetFuse's, 32 ResNet50, counted", None, mts, "%",
        f"closed form, 1000 classes that nobody shares included; in groups of 8 {100 * group / separate:.1f} %, every "
        f"weight once {exact:.1f} %; the paper's 37 % is memory, so nearly all of it weights",
    )  # fmt: skip


def _picture(out: Path, sweeps: Sequence[CountSweep]) -> Figure:
    shown = [draw(sweep, title(sweep)) for sweep in sweeps for draw in (panels.latency, panels.memory)]
    heading = f"{FIGURE}: whole ResNet50s, sharing .9, batch 1, recorded on an H200 (the paper: an RTX 2080 Ti)"
    size = (10, 3.9 * len(sweeps) + 0.8)
    return pictures.picture(out, "fig7-edge", heading, shown, size=size, columns=2, legend_columns=5)
