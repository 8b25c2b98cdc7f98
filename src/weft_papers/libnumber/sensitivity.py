"""Sensitivity to settings that the chapter leaves open: the margin, the small set, the first bias, and the bias rule.

The searches are recorded, with one setting varied at a time; sizes are computed now.
"""

from __future__ import annotations

from pathlib import Path

from weft.reports.exhibits import Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table
from weft_papers.libnumber.fig5_compression import storage_reduction
from weft_papers.libnumber.jobs import SERIAL_MARGIN
from weft_papers.libnumber.lab import BIAS_RULE, MARGINS, OURS, SMALL, START, TITLES, by_title, formats_text, percent
from weft_papers.libnumber.recorded import NetRecord, ScoredRun, SearchRecord

FIGURE = "sensitivity"
STUDIES = {SMALL: "share of the images in the small set", START: "bias at the start, from the chapter's",
           BIAS_RULE: "how biases are raised"}  # fmt: skip
"""Method of the recorded searches -> the setting that it varies, in words."""


def sensitivity(out: Path, record: SearchRecord) -> Exhibit:
    """Report our recorded search with one setting varied at a time: margin, small set, first bias, bias rule."""
    nets = [record.nets[name] for name in by_title(record.nets)]
    rows = [row for net in nets for row in (*_margin_rows(net), *_varied_rows(record, net))]
    body = tuple(cells for net in nets for cells in _cells(record, net))
    if not rows or not body:
        return Exhibit()
    header = ("network", "varied", "value", "margin", "formats", "storage x", "test %", "scored", "images")
    table = Table(f"{FIGURE}: our search with one thing changed (recorded)", header, body)
    return Exhibit(tuple(rows), (table,), (_picture(out, record, nets),))


def by_margin(net: NetRecord) -> list[ScoredRun]:
    """Our recorded searches of a network at every margin, the tightest first."""
    return sorted((run for run in net.runs if run.method == OURS), key=lambda run: run.margin)


def varied(record: SearchRecord, net: NetRecord, study: str, margin: float) -> dict[str, ScoredRun]:
    """Value of a study's setting -> the recorded search, with the default value among them; empty without a study."""
    default_run = net.find(OURS, margin)
    runs = {_value(run): run for run in net.options(study, margin)}
    default_values = {
        SMALL: f"{record.settings.get('small_share', 0.2):g}",
        START: "+0",
        BIAS_RULE: str(record.settings.get("bias", "chapter")),
    }
    if not runs or default_run is None:
        return {}
    all_runs = runs | {default_values[study]: default_run}
    return dict(sorted(all_runs.items(), key=lambda entry: entry[0] if study == BIAS_RULE else float(entry[0])))


def _value(run: ScoredRun) -> str:
    """The varied setting of a run as text."""
    if run.method == START:
        return f"{run.option:+d}" if isinstance(run.option, int) else str(run.option)
    return f"{run.option:g}" if isinstance(run.option, float) else str(run.option)


def _margin_rows(net: NetRecord) -> list[Row]:
    """Row with the storage reduction at the tightest margin; none if fewer than two margins were recorded."""
    runs = by_margin(net)
    if len(runs) < 2:
        return []
    tight, loose = runs[0], runs[-1]
    text = ", ".join(f"{percent(run.margin)}: {storage_reduction(net, run):.2f}" for run in runs)
    return [
        Row(FIGURE, f"storage smaller at {percent(tight.margin)}, {TITLES[net.name]}", None,
            storage_reduction(net, tight), "x", f"at {text}; {percent(loose.margin)} is the loosest"),
    ]  # fmt: skip


def _varied_rows(record: SearchRecord, net: NetRecord) -> list[Row]:
    """Rows with the least storage reduction over the values of each study."""
    rows = []
    for study, setting in STUDIES.items():
        for margin in MARGINS:
            if runs := varied(record, net, study, margin):
                reductions = {value: storage_reduction(net, run) for value, run in runs.items()}
                text = ", ".join(
                    f"{name}: {size:.2f} ({runs[name].samples} images)" for name, size in reductions.items()
                )
                rows.append(
                    Row(FIGURE, f"least storage gain over {setting}, {TITLES[net.name]}, {percent(margin)}", None,
                        min(reductions.values()), "x", f"at {text}")
                )  # fmt: skip
    return rows


def _cells(record: SearchRecord, net: NetRecord) -> list[tuple[str, ...]]:
    """The table cells of all recorded variations of a network."""
    variations = [("margin", percent(run.margin), run) for run in by_margin(net)]
    for study, setting in STUDIES.items():
        for margin in MARGINS:
            variations += [(setting, value, run) for value, run in varied(record, net, study, margin).items()]
    return [
        (
            TITLES[net.name], setting, value, percent(run.margin),
            formats_text(net.network, run.configuration, bias=True), f"{storage_reduction(net, run):.2f}",
            f"{100 * run.test:.2f}", str(run.iterations), str(run.samples),
        )
        for setting, value, run in variations
    ]  # fmt: skip


def _picture(out: Path, record: SearchRecord, nets: list[NetRecord]) -> Figure:
    """Draw the storage reduction over each setting that is varied, a curve per network."""
    y = Axis(label="storage smaller (x)")
    points = [({100 * run.margin: run for run in by_margin(net)}, net) for net in nets]
    panels = [Panel(_curves(points), "the margin", Axis(label="margin (%)"), y)]
    for study, setting in STUDIES.items():
        searches = [varied(record, net, study, SERIAL_MARGIN) for net in nets]
        names = sorted({value for runs in searches for value in runs}) if study == BIAS_RULE else None
        points = [
            ({float(names.index(value) if names else value): run for value, run in runs.items()}, net)
            for runs, net in zip(searches, nets, strict=True)
        ]
        panels.append(Panel(_curves(points), f"at {percent(SERIAL_MARGIN)}", Axis(label=setting, names=names), y))
    title = "Our search with one thing changed (recorded)"
    return pictures.picture(out, "sensitivity", title, panels, size=(13, 3.7), columns=4)


def _curves(points: list[tuple[dict[float, ScoredRun], NetRecord]]) -> list[Curve]:
    """Curves of the storage reduction, one per network; *points*: x value -> run."""
    return [
        Curve([*runs], [storage_reduction(net, run) for run in runs.values()], TITLES[net.name], colour, mark)
        for (runs, net), colour, mark in zip(points, pictures.MODELS, pictures.MARKS, strict=False)
    ]
