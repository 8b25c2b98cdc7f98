"""Fig. 9: tasks that differ, VGG16s of two widths and ResNet18s of batches 1 to 3. The paper: up to 2.5x over NetFuse.

NetFuse fills narrower nets up to the widest and runs unequal batches in groups one after another; stitched forms take
both as they are. What that costs in MACs is counted here; latencies are recorded.
"""

from __future__ import annotations

from pathlib import Path

from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.mts import closed, panels
from weft_papers.mts.against import listed, ours_rows, table, title
from weft_papers.mts.lab import TASKS, TITLES, EvaluatedModels
from weft_papers.mts.recorded import IN_GROUPS, BenchRecord, CountSweep

FIGURE = "Fig. 9"
WIDTHS = (1.0, 1.5)
"""Widths relative to those at a pruning of .9; the second corresponds to .85."""
BATCHES = (1, 2, 3)
CASES = {"widths": "vgg16", "batches": "resnet18"}
"""What differs between the models -> the network."""
PARTS = {"widths": "a", "batches": "b"}


def setting(mixed: str, tasks: int) -> EvaluatedModels:
    """Every second task wider; or batches of 1, 2, 3, 1 and so on. The paper does not say how many of each."""
    alike = EvaluatedModels(CASES[mixed], tasks)
    if mixed == "widths":
        return alike._replace(widths=tuple(WIDTHS[task % len(WIDTHS)] for task in range(tasks)))
    return alike._replace(batches=tuple(BATCHES[task % len(BATCHES)] for task in range(tasks)))


def figure_9(paper: Paper, out: Path, record: BenchRecord) -> Exhibit:
    sweeps = {mixed: sweep for mixed, net in CASES.items() if (sweep := record.sweep(net, mixed=mixed)).tasks}
    plain = {mixed: record.sweep(CASES[mixed]) for mixed in sweeps}
    rows = [*_best_row(paper, sweeps), _padding_row()]
    for mixed, sweep in sweeps.items():
        rows += [*_mixed_rows(mixed, sweep, plain[mixed]), *ours_rows(f"{FIGURE}{PARTS[mixed]}", sweep)]
    tables = [_counted_table(), *(table(FIGURE, sweep, f", mixed {mixed}") for mixed, sweep in sweeps.items())]
    return Exhibit(tuple(rows), tuple(tables), (_picture(out, sweeps),) if sweeps else ())


def _gains(sweep: CountSweep) -> dict[int, float]:
    """MTS over NetFuse; its groups are as mixed as the whole, for which alone latencies were measured."""
    return {tasks: sweep.over("grouped", IN_GROUPS, tasks) for tasks in sweep.where("grouped", IN_GROUPS)}


def _best_row(paper: Paper, sweeps: dict[str, CountSweep]) -> list[Row]:
    gains = {(mixed, tasks): gain for mixed, sweep in sweeps.items() for tasks, gain in _gains(sweep).items()}
    if not gains:
        return []
    (mixed, tasks), theirs = max(gains, key=gains.__getitem__), paper["mixed_best"].value
    ours = gains[mixed, tasks]
    whose = f"{tasks} {TITLES[CASES[mixed]]} of mixed {mixed}"
    why = f"{whose}, both in one CUDA graph, NetFuse batch size by batch size; the paper says not where"
    return [Row(FIGURE, "MTS over NetFuse, at most", theirs, ours, "x", beside(ours, theirs, why))]


def _mixed_rows(mixed: str, sweep: CountSweep, plain: CountSweep) -> list[Row]:
    gains = _gains(sweep)
    both = [tasks for tasks in gains if tasks in _gains(plain)]
    if not both:
        return []
    before = [_gains(plain)[tasks] for tasks in both]
    more = [gains[tasks] / gain for tasks, gain in zip(both, before, strict=True)]
    return [
        Row(
            f"{FIGURE}{PARTS[mixed]}", f"MTS over NetFuse, mixed {mixed} over equal ones, {both[0]} tasks", None,
            more[0], "x", f"recorded, {title(sweep)}: {listed([gains[tasks] for tasks in both], 2)} mixed and "
            f"{listed(before, 2)} equal at {'/'.join(map(str, both))} tasks; the paper: more notable when mixed",
        )
    ]  # fmt: skip


def _padding_row() -> Row:
    most = setting("widths", max(TASKS))
    alone, grouped, mts = (closed.work(most, form) for form in ("separate", "grouped", "mts"))
    return Row(
        f"{FIGURE}a", f"MACs of NetFuse over the models one by one, {most.tasks} VGG16 of two widths", None,
        grouped.macs / alone.macs, "x",
        f"counted: filled up to the widest, weights {grouped.weights / alone.weights:.2f}x; MTS without grouping "
        f"{mts.macs / alone.macs:.1f}x and {mts.weights / alone.weights:.2f}x; split and fused 1x",
    )  # fmt: skip


def _counted_table() -> Table:
    body = []
    for mixed, net in CASES.items():
        for tasks in TASKS:
            one = setting(mixed, tasks)
            alone = closed.work(one, "separate")
            for form in ("grouped", "mts", "half", "split"):
                mine = closed.work(one, form)
                body.append(
                    (mixed, TITLES[net], str(tasks), form, f"{mine.macs / alone.macs:.2f}",
                     f"{mine.weights / alone.weights:.3f}")
                )  # fmt: skip
    header = ("mixed", "net", "tasks", "form", "MACs x", "weights x")
    return Table(f"{FIGURE}: counted, over the models one by one", header, tuple(body))


def _picture(out: Path, sweeps: dict[str, CountSweep]) -> Figure:
    shown = []
    for mixed, sweep in sweeps.items():
        what = f"{title(sweep)}, mixed {mixed}"
        shown += [panels.latency(sweep, f"{PARTS[mixed]}: {what}"), panels.memory(sweep, what)]
    heading = f"{FIGURE}: tasks that differ, sharing .9, recorded on an H200 (the paper: a Jetson TX2)"
    size = (10, 3.9 * len(sweeps) + 0.8)
    return pictures.picture(out, "fig9-mixed", heading, shown, size=size, columns=2, legend_columns=5)
