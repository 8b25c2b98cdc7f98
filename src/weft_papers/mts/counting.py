"""Counts, the same on any machine: MACs, weights and peak memory of every form over the number of tasks.

Every number is counted on the graph that would be run. MACs and weights must equal their closed forms exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.reports.exhibits import Axis
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick, beside
from weft_papers.mts import closed, recorded
from weft_papers.mts.lab import APART, FORMS, TASKS, TITLES, EvaluatedModels, counted, grouped_cost, memory_bytes
from weft_papers.mts.recorded import HALF, BenchRecord, MeasuredWay
from weft_stitch.cost import Counts

FIGURE = "counted"
ALL = ("separate", *FORMS)
LABELS = {form: form for form in ALL} | {"grouped": "grouped (NetFuse)", "mts": "mts (paper, no grouping)"}
FORM_OF = {
    **dict.fromkeys(("eager", "sequential", "streams", "compile", "vmap"), "separate"),
    **dict.fromkeys(("grouped-eager", "grouped"), "grouped"),
    **{way: way for way in ("mts", "split", "batch")},
}
"""Recorded way to run models -> the form in which it stores the weights."""
GROUPS = 3
"""The number of groups into which the paper divides its 32 tasks."""
CHECKED = (
    EvaluatedModels("resnet18", 8, sharing=0.7),
    EvaluatedModels("vgg16", 8, sharing=0.8),
    EvaluatedModels("resnet50", 4, sharing=0.6, pruning=0.8, resolution=64),
    EvaluatedModels("vgg16", 4, widths=(1.0, 1.5, 1.0, 1.5), resolution=64),
    EvaluatedModels("resnet18", 4, batches=(1, 2, 3, 1), resolution=64),
)
"""Further models whose counts are checked: other nets, sharings, widths and batches than those drawn."""


@dataclass(frozen=True)
class FormStudy:
    """The counts of one net in every form, over the number of tasks (models)."""

    net: str
    counts: Mapping[tuple[str, int], Counts]
    """The counts by form and number of tasks."""
    setting: EvaluatedModels

    @property
    def title(self) -> str:
        return TITLES.get(self.net, self.net)

    @property
    def tasks(self) -> list[int]:
        return sorted({tasks for _, tasks in self.counts})

    def macs(self, form: str, tasks: int) -> float:
        """MACs, relative to those of the models run one by one."""
        return self.counts[form, tasks].macs / self.counts["separate", tasks].macs

    def weights(self, form: str, tasks: int) -> float:
        """Bytes of the weights, relative to those of the models run one by one."""
        return self.counts[form, tasks].weight_bytes / self.counts["separate", tasks].weight_bytes

    def memory(self, form: str, tasks: int) -> int:
        return memory_bytes(self.counts[form, tasks])

    def memory_mb(self, form: str, tasks: int) -> float:
        return self.memory(form, tasks) / recorded.MB


def study(setting: EvaluatedModels, tasks: Sequence[int] = TASKS, tick: Tick | None = None) -> FormStudy:
    """Count MACs and bytes of one net in every form at every number of tasks."""
    by_form = {}
    for number in tasks:
        for form in ALL:
            by_form[form, number] = counted(setting._replace(tasks=number), form)
            if tick:
                tick(len(by_form), len(tasks) * len(ALL))
    return FormStudy(setting.net, by_form, setting)


def agreement(settings: Iterable[EvaluatedModels]) -> tuple[int, int]:
    """The number of graphs whose MACs and weights equal the closed forms, and the number of all graphs."""
    equal = []
    for setting in settings:
        for form in ALL:
            if setting.batches and form == "grouped":
                continue  # NetFuse has no groups of unequal batches
            counts, formula = counted(setting, form), closed.work(setting, form)
            equal.append((counts.macs, counts.weight_bytes) == (formula.macs, formula.weight_bytes))
    return sum(equal), len(equal)


def counts(
    paper: Paper,
    out: Path,
    studies: Sequence[FormStudy],
    record: BenchRecord,
    checked: Sequence[EvaluatedModels] = CHECKED,
) -> Exhibit:
    """Report the counted graphs: agreement with the closed forms and the record, memory, and grouping."""
    drawn = [study.setting._replace(tasks=tasks) for study in studies for tasks in study.tasks]
    equal, graphs = agreement([*drawn, *checked])
    rows = [
        Row(
            FIGURE, "graphs whose MACs and weights equal the closed forms", None, 100 * equal / graphs, "%",
            f"{equal} of {graphs} lowered graphs, exactly: {', '.join(ALL)}; unequal widths and batches too",
        ),
        *_recorded_rows(record),
        *_memory_rows(paper, studies[0]),
        *_group_rows(paper, studies[0]),
    ]  # fmt: skip
    return Exhibit(tuple(rows), tuple(_table(study) for study in studies), (_picture(out, studies),))


def _recorded_rows(record: BenchRecord) -> list[Row]:
    """Row with the share of recorded weights, as they were on the GPU, that equal the closed forms."""
    rows = [row for row in record.rows if row.net in TITLES and row.way in FORM_OF]
    if not rows:
        return []
    equal = sum(row.weight_bytes == expected_bytes(row, FORM_OF[row.way]) for row in rows)
    fused = [row for row in record.rows if row.net in TITLES and row.way == "fused"]
    padding = max((row.weight_bytes / expected_bytes(row, "fused") for row in fused), default=1.0)
    return [
        Row(
            FIGURE, "recorded weights that equal the closed forms", None, 100 * equal / len(rows), "%",
            f"{equal} of {len(rows)} rows, to the byte; fused is padded for wide loads, by "
            f"{100 * (padding - 1):.1f} % at most",
        )
    ]  # fmt: skip


def expected_bytes(row: MeasuredWay, form: str) -> int:
    """Bytes of the weights that a recorded row should have in a form; ``batch`` has those of one net."""
    setting = row.setting if form != "batch" else EvaluatedModels(row.net, 1, row.pruning)
    weights = closed.work(setting, "separate" if form == "batch" else form).weights
    return weights * (2 if row.dtype == HALF else 4)


def _memory_rows(paper: Paper, study: FormStudy) -> list[Row]:
    """Rows with the memory of NetFuse over the paper's form, by number of tasks."""
    rows = []
    for tasks in study.tasks:
        printed = paper[f"netfuse_memory_resnet18_{tasks}"].value
        mts_bytes = study.memory("mts", tasks)
        if tasks == max(TASKS):
            mts_bytes = grouped_cost(study.setting._replace(tasks=tasks), "mts", GROUPS).peak_bytes
        ours = study.memory("grouped", tasks) / mts_bytes
        fused_ratio = study.memory("grouped", tasks) / study.memory("fused", tasks)
        why = (
            "weights and live activations, without the streams of NetFuse and without workspaces, both of which Nsight "
            f"counts; activations are {study.counts['mts', tasks].activation_bytes / 1e6:.1f} MB of mts and "
            f"{study.counts['grouped', tasks].activation_bytes / 1e6:.1f} of grouped; fused: {fused_ratio:.2f}x"
        )
        note = f", in {GROUPS} groups" if tasks == max(TASKS) else ""
        rows.append(
            Row(f"{FIGURE}, Fig. 6b", f"memory of NetFuse over MTS{note}, {tasks} ResNet18", printed, ours, "x",
                beside(ours, printed, why))
        )  # fmt: skip
    return rows


def _group_rows(paper: Paper, study: FormStudy) -> list[Row]:
    """Rows with the memory and MACs that three groups save over one stitched matrix of all tasks."""
    most_tasks = study.setting._replace(tasks=max(study.tasks))
    macs, peak_bytes = grouped_cost(most_tasks, "mts", GROUPS)
    whole, alone = study.counts["mts", most_tasks.tasks], study.counts["separate", most_tasks.tasks]
    memory_ratio, printed = memory_bytes(whole) / peak_bytes, paper["grouping_memory"].value
    apart = memory_bytes(study.counts[APART, most_tasks.tasks]) / grouped_cost(most_tasks, APART, GROUPS).peak_bytes
    why = (
        f"as equal groups as can be, a thousand classes in the matrix (eq. 8); with classifiers apart {apart:.2f}x; "
        "the paper does not say how many classes"
    )
    return [
        Row(
            f"{FIGURE}, Fig. 6b", f"memory of MTS-no-Grouping over MTS in {GROUPS} groups, {most_tasks.tasks} ResNet18",
            printed, memory_ratio, "x", beside(memory_ratio, printed, why),
        ),
        Row(
            f"{FIGURE}, Fig. 6a", f"MACs of MTS-no-Grouping over MTS in {GROUPS} groups", None, whole.macs / macs, "x",
            f"{whole.macs / alone.macs:.1f} and {macs / alone.macs:.1f} times those of the models one by one; the "
            f"paper saves {paper['grouping_latency'].value:g}x latency by it, so MACs were not all of its time",
        ),
    ]  # fmt: skip


def _table(study: FormStudy) -> Table:
    """Table of the counts of one net: a line per number of tasks and form."""
    body = [
        (
            str(tasks), form, f"{study.counts[form, tasks].macs / 1e6:.1f}", f"{study.macs(form, tasks):.2f}",
            f"{study.counts[form, tasks].weight_bytes / 1e6:.2f}", f"{study.weights(form, tasks):.3f}",
            f"{study.counts[form, tasks].activation_bytes / 1e6:.2f}", f"{study.memory(form, tasks) / 1e6:.2f}",
            str(study.counts[form, tasks].launches),
        )
        for tasks in study.tasks
        for form in ALL
    ]  # fmt: skip
    header = ("tasks", "form", "MMACs", "MACs x", "weights MB", "weights x", "activations MB", "memory MB", "launches")
    setting = study.setting
    title = f"counted: {study.title}, pruned {setting.pruning:g}, sharing {setting.sharing:g}, float32"
    return Table(title, header, tuple(body))


def _picture(out: Path, studies: Sequence[FormStudy]) -> Figure:
    """Draw MACs, weights and memory of every form over the number of tasks, a row of panels per net."""
    shown = []
    for study in studies:
        for label, value_of in (
            ("MACs over separate models", study.macs),
            ("weights over separate models", study.weights),
            ("weights + activations (MB)", study.memory_mb),
        ):
            series = {form: {tasks: value_of(form, tasks) for tasks in study.tasks} for form in ALL}
            panel = recorded.over_tasks(study.title, label, study.tasks, series, LABELS)
            shown.append(replace(panel, y=Axis(label=label, low=0)) if value_of == study.weights else panel)
    title = "Counted on the graphs: what every form multiplies, stores and keeps alive (sharing .9, float32)"
    size = (12, 3.3 * len(studies) + 0.6)
    return pictures.picture(out, "counted", title, shown, size=size, columns=3, legend_columns=7)
