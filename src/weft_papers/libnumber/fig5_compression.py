"""Figure III.5: sizes of the four networks under every method at both margins of accuracy.

The configurations are recorded; sizes are computed from them now. If a method's own formats miss the margin, the
smallest of its repaired ones are used instead, and the table says so. Accuracies are of validation and of test images.

Table III.4 has the configurations themselves, beside those that the chapter prints for the same networks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, beside
from weft_papers.layerweaver.lab import geomean, mean
from weft_papers.libnumber.lab import (
    BOTH,
    COLOURS,
    INT8,
    LABELS,
    MARGINS,
    OURS,
    RELAXED,
    REPAIRED,
    RISTRETTO,
    STRIPES,
    TITLES,
    by_mean_size,
    formats_text,
    parse_printed,
    percent,
    plain_sizes,
    printed_configurations,
    sizes,
)
from weft_papers.libnumber.recorded import NetRecord, ScoredRun, SearchRecord

FIGURE = "Fig. III.5"
METHODS = (OURS, BOTH, RELAXED, RISTRETTO, STRIPES)
EIGHT_BITS = 8  # bits of ONNX Runtime's int8, the method that sizes are compared with


def weight_reduction(net: NetRecord, run: ScoredRun) -> float:
    """Size of the weights in float32 over their size in the run's formats."""
    return plain_sizes(net.network).weights / sizes(net.network, run.configuration).weights


def storage_reduction(net: NetRecord, run: ScoredRun) -> float:
    """Size of weights and inputs in float32 over their size in the run's formats."""
    return plain_sizes(net.network).both / net.bits(run)


Value = Callable[[NetRecord, ScoredRun], float]
"""A quantity of a network under a run's formats."""


def figure_5(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    """Draw Fig. III.5: size of every network under every method, at both margins of accuracy."""
    rows = [row for margin in MARGINS for row in _rows(paper, record, margin)]
    tables = [_table(record, margin) for margin in MARGINS if record.tuned(margin)]
    pictures_made = (_picture(paper, out, record),) if rows else ()
    return Exhibit(tuple(rows), tuple(tables), pictures_made)


def over_nets(record: SearchRecord, method: str, margin: float, value: Value) -> list[float]:
    """A quantity for every network that a method keeps within the margin."""
    pairs = [(record.nets[net], record.nets[net].passing(method, margin)) for net in record.tuned(margin)]
    return [value(net, run) for net, run in pairs if run]


def _rows(paper: Paper, record: SearchRecord, margin: float) -> list[Row]:
    """Rows at one margin: our reductions, accuracy lost on test images, and storage against each other method."""
    if not record.tuned(margin):
        return []
    weights, storage = (over_nets(record, OURS, margin, value) for value in (weight_reduction, storage_reduction))
    rows = [
        *_reduction_rows(paper, record, margin, "parameters", weights),
        *_reduction_rows(paper, record, margin, "storage", storage),
        _loss_row(record, margin),
    ]
    rows += _against(paper, record, margin, RISTRETTO, plain=True)
    for method in (RISTRETTO, RELAXED, STRIPES):
        rows += _against(paper, record, margin, method)
    if margin == MARGINS[0] and (relaxed := over_nets(record, RELAXED, margin, weight_reduction)):
        printed, value = paper["relaxed_parameters"].value, by_mean_size(relaxed)
        reductions = ", ".join(f"{value:.2f}" for value in relaxed)
        why = f"its best variant: {reductions}; the chapter's is over eleven networks"
        quantity = f"parameters smaller by {LABELS[RELAXED]} at {percent(margin)}, by the mean size"
        rows.append(Row(FIGURE, quantity, printed, value, "x", beside(value, printed, why)))
    return rows


def _reduction_rows(paper: Paper, record: SearchRecord, margin: float, size: str, values: Sequence[float]) -> list[Row]:
    """Rows with a reduction, averaged by mean size and as geometric mean; *size*: "parameters" or "storage"."""
    printed, mean_reduction = paper[f"{size}_{100 * margin:g}"].value, by_mean_size(values)
    why = f"{_listed_nets(record, margin, values)}; mean {mean(values):.2f}; the chapter's is over eleven networks"
    return [
        Row(FIGURE, f"{size} smaller at {percent(margin)}, by the mean size", printed, mean_reduction, "x",
            beside(mean_reduction, printed, why)),
        Row(FIGURE, f"{size} smaller at {percent(margin)}, geomean", None, geomean(values), "x",
            "of our networks; the chapter does not say which mean it prints, the mean size fits Table III.4 best"),
    ]  # fmt: skip


def _listed_nets(record: SearchRecord, margin: float, values: Sequence[float]) -> str:
    """Text with one value for each network that was tuned at the margin."""
    nets = record.tuned(margin)
    return ", ".join(f"{TITLES[net]} {value:.2f}" for net, value in zip(nets, values, strict=True))


def _loss_row(record: SearchRecord, margin: float) -> Row:
    """Row with the largest relative loss of accuracy on test images, which no search saw."""
    nets = [record.nets[net] for net in record.tuned(margin)]
    runs = [(net, net.find(OURS, margin)) for net in nets]
    loss_percents = [100 * (1 - run.test / net.test) for net, run in runs if run]
    text = ", ".join(f"{TITLES[net.name]} {100 * net.test:.2f} to {100 * run.test:.2f} %" for net, run in runs if run)
    return Row(
        FIGURE, f"accuracy lost on the untouched test images at {percent(margin)}, most", None, max(loss_percents), "%",
        f"relative, tuned on validation images: {text}; the chapter tunes and reports on the same images",
    )  # fmt: skip


def _against(paper: Paper, record: SearchRecord, margin: float, method: str, *, plain: bool = False) -> list[Row]:
    """Row with our storage below that of another method, as mean; none if no network has both.

    plain: the method as it was published; otherwise the best of its variants.
    """
    nets = [record.nets[net] for net in record.tuned(margin)]
    pairs = [(net, net.passing(method, margin, plain=plain)) for net in nets]
    # Net -> percent by which our storage is below that of the other method.
    below = {net.name: 100 * (1 - net.bits(ours) / net.bits(run)) for net, run in pairs
             if run and (ours := net.find(OURS, margin))}  # fmt: skip
    if not below:
        return []
    failing = [net for net, _ in pairs if (answer := net.find(method, margin)) and not answer.feasible]
    failed = f"; its own answer fails for {', '.join(TITLES[net.name] for net in failing)}" if failing else ""
    values_text = ", ".join(f"{TITLES[net]} {value:.1f}" for net, value in below.items())
    key = {RISTRETTO: "storage_below_ristretto", STRIPES: "storage_below_stripes"}.get(method)
    printed = paper[key].value if key and margin == MARGINS[0] else None
    value = mean(below.values())
    why = f"{values_text}{failed}"
    variant = " as published, repaired where it fails" if plain else ", its best variant"
    name = LABELS[method] + (variant if method != STRIPES else "")
    quantity = f"storage below that of {name} at {percent(margin)}, mean"
    return [Row(FIGURE, quantity, printed, value, "%", beside(value, printed, why) if printed else why)]


def _table(record: SearchRecord, margin: float) -> Table:
    """Table at one margin: sizes and accuracies of every network under every recorded run of every method."""
    body = []
    for name in record.tuned(margin):
        net = record.nets[name]
        for method in METHODS:
            runs = [run for kind in (method, method + REPAIRED) for run in net.options(kind, margin)]
            body += [_cells(net, run) for run in runs]
        if int8 := net.int8.get(INT8):
            float_bits = plain_sizes(net.network).weights // net.network.weights
            body.append((TITLES[name], LABELS[INT8], "8 / 8", f"{float_bits / EIGHT_BITS:.2f}",
                         f"{float_bits / EIGHT_BITS:.2f}", f"{100 * int8.validation:.2f}", f"{100 * int8.test:.2f}",
                         "", ""))  # fmt: skip
    header = ("network", "method", "formats", "weights x", "storage x", "validation %", "test %", "keeps", "scored")
    return Table(f"{FIGURE}: all methods at {percent(margin)} (recorded)", header, tuple(body))


def _cells(net: NetRecord, run: ScoredRun) -> tuple[str, ...]:
    """The cells of one run of a network."""
    method = run.method.removesuffix(REPAIRED)
    parts = [LABELS[method], "repaired" if run.method != method else "", str(run.option or "")]
    return (
        TITLES[net.name], ", ".join(word for word in parts if word), formats_text(net.network, run.configuration),
        f"{weight_reduction(net, run):.2f}", f"{storage_reduction(net, run):.2f}", f"{100 * run.validation:.2f}",
        f"{100 * run.test:.2f}", "yes" if run.feasible else "no", str(run.iterations),
    )  # fmt: skip


def _picture(paper: Paper, out: Path, record: SearchRecord) -> Figure:
    """Draw sizes in percent of float32, a panel for weights and one for storage at each margin."""
    panels, colours = [], {LABELS[method]: COLOURS[method] for method in METHODS}
    for margin in (margin for margin in MARGINS if record.tuned(margin)):
        labels = [*(TITLES[net] for net in record.tuned(margin)), "mean"]
        for value, key, quantity in (
            (weight_reduction, "parameters", "weights"),
            (storage_reduction, "storage", "weights and inputs"),
        ):
            series = {LABELS[method]: [*_size_percents(record, method, margin, value)] for method in METHODS}
            printed = paper[f"{key}_{100 * margin:g}"].value
            marks = [Bars(labels, series, colours), ReferenceLine(100 / printed, f"printed: 1/{printed:g}")]
            heading = f"{quantity}, {percent(margin)} of the accuracy may go"
            panels.append(Panel(marks, heading, y=Axis(label="% of float32")))
    title = f"{FIGURE}: size over float32 (lower is better); the line is the chapter's mean over eleven networks"
    size = (11.5, 1.8 * len(panels))
    return pictures.picture(out, "fig3-5-sizes", title, panels, size=size, columns=2, share_y="col")


def _size_percents(record: SearchRecord, method: str, margin: float, value: Value) -> list[float]:
    """Size of each network in percent of float32, 0 if the method misses the margin; then the mean of the others."""
    runs = [(record.nets[net], record.nets[net].passing(method, margin)) for net in record.tuned(margin)]
    percents = [100 / value(net, run) if run else 0.0 for net, run in runs]
    passing = [size for size in percents if size]
    return [*percents, mean(passing) if passing else 0.0]


TABLE_4 = "Table III.4"
THEIRS = {OURS: "libnumber", RISTRETTO: "Ristretto"}
"""Our method -> the framework of Table III.4 that it is compared with."""


def table_4(record: SearchRecord) -> Exhibit:
    """Reproduce Table III.4: the tuned formats of every network beside the printed ones."""
    nets = [record.nets[net] for net in record.tuned(MARGINS[0])]
    return Exhibit(tuple(row for net in nets for row in _rows_4(net)), (_table_4(nets),) if nets else ())


def mean_bits(net: NetRecord, method: str, margin: float) -> float | None:
    """The mean bits of a weight under the method's smallest configuration, or None if it misses the margin."""
    run = net.passing(method, margin)
    return sizes(net.network, run.configuration).weights / net.network.weights if run else None


def printed_bits(net: NetRecord, framework: str) -> float:
    """The mean bits of a weight in the chapter's formats, with layers as large as ours."""
    targets = net.network.targets
    printed = parse_printed(printed_configurations()[TITLES[net.name]][framework], len(targets))
    total_bits = sum(target.weights * bits for target, bits in zip(targets, printed.weight_bits, strict=True))
    return total_bits / net.network.weights


def _rows_4(net: NetRecord) -> list[Row]:
    """Rows with the mean bits of a weight by our formats and by the printed ones."""
    margin = MARGINS[0]
    rows = []
    for method, framework in THEIRS.items():
        ours, run = mean_bits(net, method, margin), net.passing(method, margin)
        if ours is None or run is None:
            continue
        text = printed_configurations()[TITLES[net.name]][framework]
        best = ", its best variant," if method == RISTRETTO else ""
        rows.append(
            Row(
                TABLE_4, f"bits of a weight, {TITLES[net.name]}, {LABELS[method]}, {percent(margin)}",
                printed_bits(net, framework), ours, " bits",
                f"ours{best} {formats_text(net.network, run.configuration)}, the chapter {text}; other weights, "
                "trained here, and a threshold on images that are not reported on",
            )
        )  # fmt: skip
    return rows


def _table_4(nets: list[NetRecord]) -> Table:
    """Table of our formats beside the printed ones, by network and method."""
    body = []
    for net in nets:
        for method, framework in THEIRS.items():
            printed = printed_configurations()[TITLES[net.name]][framework]
            runs = [net.passing(method, margin) for margin in MARGINS]
            texts = [formats_text(net.network, run.configuration) if run else "fails" for run in runs]
            body.append((TITLES[net.name], LABELS[method], printed, *texts))
    header = ("network", "method", "printed", *(f"ours at {percent(margin)}" for margin in MARGINS))
    title = f"{TABLE_4}: FIXED (I), EXP (E) and two's complement (T) with their bits; formats of inputs / of weights"
    return Table(title, header, tuple(body))
