"""Fig. 8 and 9: other sharing ratios, and tasks that differ.

Fig. 8 has ratios of .9 to .6 on pruned ResNet18s; the paper prints no numbers, only the trend. Fig. 9 has VGG16s of
two widths and ResNet18s of batches 1 to 3, up to 2.5x over NetFuse in the paper. NetFuse pads narrower nets to the
widest and runs unequal batches in groups one after another; stitched forms need neither. MACs are counted here,
latencies are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from weft.reports.exhibits import Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.mts import closed, recorded
from weft_papers.mts.lab import LABELS, SHARINGS, TASKS, TITLES, EvaluatedModels
from weft_papers.mts.recorded import IN_GROUPS, BenchRecord, CountSweep, listed, ours_rows, shape, table, title

FIGURE = "Fig. 8"
NET = "resnet18"
DRAWN = ("sequential", "streams", "grouped", "mts", IN_GROUPS, "fused")

Sweeps = Mapping[float, CountSweep]
"""Sharing ratio -> the measurements at that ratio."""


def figure_8(out: Path, record: BenchRecord) -> Exhibit:
    """Reproduce Fig. 8: other sharing ratios, counted and recorded."""
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
    """Rows with counted MACs and weights of the paper's form at the smallest sharing ratio."""
    most_tasks = max(TASKS)
    macs, weights, unique_weights = zip(*(_ratios(sharing, most_tasks) for sharing in SHARINGS), strict=True)
    ratios = "/".join(f"{sharing:g}" for sharing in SHARINGS)
    return [
        Row(
            FIGURE, f"MACs of MTS-no-Grouping at sharing .6 over .9, {most_tasks} ResNet18", None,
            macs[-1] / macs[0], "x",
            f"counted: {listed(macs)} times those of the models one by one at {ratios}",
        ),
        Row(
            FIGURE, f"weights of MTS-no-Grouping at sharing .6, {most_tasks} ResNet18", None, weights[-1], "x",
            f"counted, over the models one by one: {listed(weights, 2)} at {ratios}; every "
            f"weight once: {listed(unique_weights, 2)}; a thousand classes are in the paper's matrix",
        ),
    ]  # fmt: skip


def _recorded_rows(sweeps: Sweeps) -> list[Row]:
    """Rows with recorded latencies at the smallest sharing ratio over the largest; none with fewer than two ratios."""
    if len(sweeps) < 2:
        return []
    low, high = min(sweeps), max(sweeps)
    rows = []
    for tasks in [count for count in TASKS if all(sweep.has("mts", count) for sweep in sweeps.values())]:
        times_ms = [sweep.ms(IN_GROUPS, tasks) for sweep in sweeps.values()]
        groups = ", ".join(shape(sweep.grouping(tasks).groups) for sweep in sweeps.values())
        verdict = "it does" if times_ms == sorted(times_ms) else "not always"
        fused_ms = [sweep.ms("fused", tasks) for sweep in sweeps.values() if sweep.has("fused", tasks)]
        rows.append(
            Row(
                FIGURE, f"latency of MTS at sharing {low:g} over {high:g}, {tasks} ResNet18", None,
                times_ms[-1] / times_ms[0], "x",
                f"recorded: {listed(times_ms, 3)} ms at {'/'.join(f'{ratio:g}' for ratio in sweeps)}, groups {groups}; "
                f"the paper: it falls with more sharing, here {verdict}; fused: {listed(fused_ms, 3)} ms",
            )
        )  # fmt: skip
    return rows


def _counted_table() -> Table:
    """Table of counted MACs and weights, by sharing ratio and number of tasks."""
    body = tuple(
        (f"{sharing:g}", str(tasks), *(f"{value:.3f}" for value in _ratios(sharing, tasks)),
         f"{closed.break_even(sharing):.3g}", f"{closed.best_group(sharing):.3g}")
        for sharing in SHARINGS
        for tasks in TASKS
    )  # fmt: skip
    header = ("sharing", "tasks", "MTS MACs x", "MTS weights x", "unique weights x", "even at T", "best group")
    return Table(f"{FIGURE}: counted, over the models one by one", header, body)


def _recorded_table(sweeps: Sweeps) -> Table:
    """Table of recorded latencies and memory, by sharing ratio, number of tasks and way."""
    body = [
        (
            f"{sharing:g}", str(tasks), LABELS[way], f"{sweep.ms(way, tasks):.3f}",
            f"{sweep.cost(way, tasks).weight_bytes / recorded.MB:.2f}", f"{sweep.bytes(way, tasks) / recorded.MB:.2f}",
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
    """Draw latency (above) and memory (below) over the sharing ratio, a column for each number of tasks."""
    counts = [tasks for tasks in TASKS if all(sweep.has("mts", tasks) for sweep in sweeps.values())]
    # The axis runs from much sharing to little.
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
    return sweep.bytes(way, tasks) / recorded.MB


def _curves(sweeps: Sweeps, tasks: int, value: Callable[[CountSweep, str, int], float]) -> list[Curve]:
    """A curve per way of a quantity over the sharing ratio, at one number of tasks."""
    return [
        recorded.curve(
            way,
            {sharing: value(sweep, way, tasks) for sharing, sweep in sweeps.items() if sweep.has(way, tasks)},
            LABELS[way],
        )
        for way in DRAWN
    ]


FIGURE_9 = "Fig. 9"
WIDTHS = (1.0, 1.5)
"""Widths relative to those at a pruning of .9; the second corresponds to .85."""
BATCHES = (1, 2, 3)
CASES = {"widths": "vgg16", "batches": "resnet18"}
"""What differs between the models -> the network."""
PARTS = {"widths": "a", "batches": "b"}
"""What differs between the models -> part of Fig. 9."""


def setting(mixed: str, tasks: int) -> EvaluatedModels:
    """Models of mixed "widths" (every second one wider) or "batches" (1, 2, 3, 1 and so on).

    The paper does not say how many models have each width or batch.
    """
    equal = EvaluatedModels(CASES[mixed], tasks)
    if mixed == "widths":
        return equal._replace(widths=tuple(WIDTHS[task % len(WIDTHS)] for task in range(tasks)))
    return equal._replace(batches=tuple(BATCHES[task % len(BATCHES)] for task in range(tasks)))


def figure_9(paper: Paper, out: Path, record: BenchRecord) -> Exhibit:
    """Reproduce Fig. 9: models of mixed widths or batches, counted and recorded."""
    sweeps = {mixed: sweep for mixed, net in CASES.items() if (sweep := record.sweep(net, mixed=mixed)).tasks}
    plain = {mixed: record.sweep(CASES[mixed]) for mixed in sweeps}
    rows = [*_best_row(paper, sweeps), _padding_row()]
    for mixed, sweep in sweeps.items():
        rows += [*_mixed_rows(mixed, sweep, plain[mixed]), *ours_rows(f"{FIGURE_9}{PARTS[mixed]}", sweep)]
    tables = [_counted_table_9(), *(table(FIGURE_9, sweep, f", mixed {mixed}") for mixed, sweep in sweeps.items())]
    return Exhibit(tuple(rows), tuple(tables), (_picture_9(out, sweeps),) if sweeps else ())


def _gains(sweep: CountSweep) -> dict[int, float]:
    """Speed-up of the paper's form over NetFuse, by number of tasks.

    The mix of tasks in a group is that of all tasks, because only such sets were measured.
    """
    return {tasks: sweep.over("grouped", IN_GROUPS, tasks) for tasks in sweep.where("grouped", IN_GROUPS)}


def _best_row(paper: Paper, sweeps: dict[str, CountSweep]) -> list[Row]:
    """Row with the largest speed-up over NetFuse; none without measurements."""
    gains = {(mixed, tasks): gain for mixed, sweep in sweeps.items() for tasks, gain in _gains(sweep).items()}
    if not gains:
        return []
    (mixed, tasks), printed = max(gains, key=gains.__getitem__), paper["mixed_best"].value
    ours = gains[mixed, tasks]
    models = f"{tasks} {TITLES[CASES[mixed]]} of mixed {mixed}"
    why = f"{models}, both in one CUDA graph, NetFuse one batch size after the other; the paper names no models"
    return [Row(FIGURE_9, "MTS over NetFuse, at most", printed, ours, "x", beside(ours, printed, why))]


def _mixed_rows(mixed: str, sweep: CountSweep, plain: CountSweep) -> list[Row]:
    """Row with the speed-up over NetFuse for mixed tasks over that for equal ones (*plain*)."""
    gains = _gains(sweep)
    common = [tasks for tasks in gains if tasks in _gains(plain)]
    if not common:
        return []
    equal_gains = [_gains(plain)[tasks] for tasks in common]
    ratios = [gains[tasks] / gain for tasks, gain in zip(common, equal_gains, strict=True)]
    return [
        Row(
            f"{FIGURE_9}{PARTS[mixed]}", f"MTS over NetFuse, mixed {mixed} over equal ones, {common[0]} tasks", None,
            ratios[0], "x", f"recorded, {title(sweep)}: {listed([gains[tasks] for tasks in common], 2)} mixed and "
            f"{listed(equal_gains, 2)} equal at {'/'.join(map(str, common))} tasks; the paper: more notable when mixed",
        )
    ]  # fmt: skip


def _padding_row() -> Row:
    """Row with the MACs that NetFuse adds by filling narrow nets up to the widest."""
    most = setting("widths", max(TASKS))
    alone, grouped, mts = (closed.work(most, form) for form in ("separate", "grouped", "mts"))
    return Row(
        f"{FIGURE_9}a", f"MACs of NetFuse over the models one by one, {most.tasks} VGG16 of two widths", None,
        grouped.macs / alone.macs, "x",
        f"counted: filled up to the widest, weights {grouped.weights / alone.weights:.2f}x; MTS without grouping "
        f"{mts.macs / alone.macs:.1f}x and {mts.weights / alone.weights:.2f}x; split and fused 1x",
    )  # fmt: skip


def _counted_table_9() -> Table:
    """Table of counted MACs and weights of mixed tasks over the models one by one."""
    body = []
    for mixed, net in CASES.items():
        for tasks in TASKS:
            mixed_models = setting(mixed, tasks)
            alone = closed.work(mixed_models, "separate")
            for form in ("grouped", "mts", "half", "split"):
                form_work = closed.work(mixed_models, form)
                body.append(
                    (mixed, TITLES[net], str(tasks), form, f"{form_work.macs / alone.macs:.2f}",
                     f"{form_work.weights / alone.weights:.3f}")
                )  # fmt: skip
    header = ("mixed", "net", "tasks", "form", "MACs x", "weights x")
    return Table(f"{FIGURE_9}: counted, over the models one by one", header, tuple(body))


def _picture_9(out: Path, sweeps: dict[str, CountSweep]) -> Figure:
    """Draw latency and memory of mixed tasks over their number."""
    shown = []
    for mixed, sweep in sweeps.items():
        heading_text = f"{title(sweep)}, mixed {mixed}"
        shown += [recorded.latency(sweep, f"{PARTS[mixed]}: {heading_text}"), recorded.memory(sweep, heading_text)]
    heading = f"{FIGURE_9}: tasks that differ, sharing .9, recorded on an H200 (the paper: a Jetson TX2)"
    size = (10, 3.9 * len(sweeps) + 0.8)
    return pictures.picture(out, "fig9-mixed", heading, shown, size=size, columns=2, legend_columns=5)
