"""Table III.5 and Figure III.4: configurations that a search scores, and the steps of one search.

Table III.5 sets the number of scored configurations beside the size of the search space: 42 formats for the weights of
each layer and for all inputs. Its rows also have the saving by the small set of images, and the distance of the result
from the optimum. Figure III.4 has LeNet's two convolutions at 1 %, recorded with every trial.
"""

from __future__ import annotations

from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Published, Row, Table, beside
from weft_papers.layerweaver.lab import geomean, mean
from weft_papers.libnumber.lab import (
    BIAS_RULE,
    COLOURS,
    EXHAUSTIVE,
    FAITHFUL,
    LENET,
    MARGINS,
    NETS,
    OURS,
    RESTRICTED,
    TITLES,
    WHOLE,
    formats_text,
    percent,
    printed_configurations,
    sizes,
)
from weft_papers.libnumber.recorded import NetRecord, ScoredRun, SearchRecord
from weft_papers.pictures import make_folder
from weft_tune.pages.picture import draw_search
from weft_tune.result import Tuning

FIGURE = "Table III.5"
FORMATS = 42
"""Number formats of a search: two of FLOAT, 32 of FIXED, eight of EXP."""


def space(layers: int) -> int:
    """Number of configurations of a network with *layers* layers, biases not counted."""
    return int(FORMATS ** (layers + 1))


def table_5(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    """Reproduce Table III.5: configurations that a search scores, beside the size of the space."""
    rows = [*_space_rows(paper), *_iteration_rows(paper, record), *_saving_rows(paper, record)]
    rows += _optimum_rows(paper, record)
    tables = [_table(paper, record), *_cost_tables(record)]
    return Exhibit(tuple(rows), tuple(tables), (_picture(paper, out, record),) if record.tuned(MARGINS[0]) else ())


def networks(paper: Paper) -> list[str]:
    """The keys of the networks in Table III.5."""
    return [key.removeprefix("layers_") for key in paper if key.startswith("layers_")]


def _space_rows(paper: Paper) -> list[Row]:
    """Row with the share of printed search spaces that the formula gives."""
    errors = [
        abs(space(int(paper[f"layers_{name}"].value)) / _printed_space(paper[f"space_{name}"]) - 1)
        for name in networks(paper)
    ]
    return [
        Row(FIGURE, "printed search spaces that are 42^(layers + 1)", 100, 100 * mean(error < 0.01 for error in errors),
            "%", f"computed for {len(errors)} networks: a format for the weights of each layer and one for all inputs; "
            "biases are tuned too and not counted"),
    ]  # fmt: skip


def _printed_space(number: Published) -> float:
    """The size of a space that is printed as a factor and a unit such as "x 10^12"."""
    power = int(number.unit.split("^")[1].split()[0])
    return float(number.value * 10.0**power)


def _iteration_rows(paper: Paper, record: SearchRecord) -> list[Row]:
    """Rows with the number of configurations that our search scored for each network."""
    margin = MARGINS[0]
    rows = []
    for name in record.tuned(margin):
        run = record.nets[name].find(OURS, margin)
        printed = paper[f"iterations_{name}"].value
        assert run is not None
        tight, plain = record.nets[name].find(OURS, MARGINS[1]), record.nets[name].find(BIAS_RULE, margin, "chapter")
        notes = f"; {tight.iterations} at {percent(MARGINS[1])}" if tight else ""
        notes += f"; {plain.iterations} by the chapter's steps alone, to which ours adds some" if plain else ""
        why = (
            f"{run.samples} images in all, {run.samples / record.nets[name].images['full']:.1f} times the validation "
            f"images{notes}; the count depends on where the search begins and on ties"
        )
        quantity = f"configurations scored, {TITLES[name]}, {percent(margin)}"
        rows.append(Row(FIGURE, quantity, printed, run.iterations, "", beside(run.iterations, printed, why)))
    return rows


def _pairs(record: SearchRecord, method: str, margin: float) -> list[tuple[NetRecord, ScoredRun, ScoredRun]]:
    """The networks recorded with both our search and *method*: (network, our run, other run)."""
    pairs = []
    for name in record.tuned(margin):
        net = record.nets[name]
        ours, other = net.find(OURS, margin), net.find(method, margin)
        if ours and other:
            pairs.append((net, ours, other))
    return pairs


def _saving_rows(paper: Paper, record: SearchRecord) -> list[Row]:
    """Rows with the images that our search saves: by the small set, and by abandoning candidates that cannot win."""
    rows = [row for margin in MARGINS for row in _small_set_rows(paper, record, margin)]
    for margin in MARGINS:
        if pairs := _pairs(record, FAITHFUL, margin):
            ratios = [ours.samples / other.samples for _, ours, other in pairs]
            equal = sum(ours.configuration == other.configuration for _, ours, other in pairs)
            text = ", ".join(f"{TITLES[net.name]} {part:.2f}" for (net, _, _), part in zip(pairs, ratios, strict=True))
            rows.append(
                Row(FIGURE, f"images of the fast search over the faithful one's at {percent(margin)}, geomean",
                    None, geomean(ratios), "x", f"{text}; {equal} of {len(pairs)} end in the same configuration")
            )  # fmt: skip
    return rows


def _small_set_rows(paper: Paper, record: SearchRecord, margin: float) -> list[Row]:
    """Rows with the saving by the small set; the chapter does not say for which margin its numbers are."""
    pairs = _pairs(record, WHOLE, margin)
    if not pairs:
        return []
    gains = {net.name: other.samples / ours.samples for net, ours, other in pairs}
    text = ", ".join(f"{TITLES[name]} {gain:.2f}" for name, gain in gains.items())
    sizes_text = ", ".join(f"{net.bits(ours) / net.bits(other):.3f}" for net, ours, other in pairs)
    mean_gain, printed = mean(gains.values()), paper["small_set_mean"].value
    why = (
        f"images evaluated by a search on the full set only, over ours: {text}; hopeless candidates stop early in "
        f"both, which leaves less to save; sizes over the other's: {sizes_text}"
    )
    return [
        Row(FIGURE, f"saved by the small set at {percent(margin)}, mean", printed, mean_gain, "x",
            beside(mean_gain, printed, why)),
        Row(FIGURE, f"saved by the small set at {percent(margin)}, most", paper["small_set_most"].value,
            max(gains.values()), "x", "counted in images; the chapter's is of its running time"),
    ]  # fmt: skip


def _optimum_rows(paper: Paper, record: SearchRecord) -> list[Row]:
    """Rows with our result over the optimum of an enumerated space, in storage."""
    rows = []
    for name in (net for net in NETS if net in record.nets):
        net = record.nets[name]
        for margin in MARGINS:
            optimum, ours = net.find(EXHAUSTIVE, margin), net.find(RESTRICTED, margin)
            if not (optimum and optimum.feasible and ours):
                continue
            optimum_bits, bits = (sizes(net.network, run.configuration).both for run in (optimum, ours))
            printed = 0.0 if name == "lenet" else paper["cifar_optimum"].value
            rows.append(
                Row(
                    "III.3.C", f"larger than the optimum, {TITLES[name]}, {percent(margin)}", printed,
                    100 * (bits / optimum_bits - 1), "%",
                    f"{bits} and {optimum_bits} bits; {optimum.note} by their size, up to the first that passes "
                    f"({optimum.iterations} scored), against a search of {ours.iterations}; the search may go on to "
                    "biases that were not enumerated",
                )
            )  # fmt: skip
    return rows


def _table(paper: Paper, record: SearchRecord) -> Table:
    """Table of the space and the scored configurations of every network of the chapter."""
    titles = {title.lower().replace(" ", "-"): title for title in printed_configurations()}
    body = []
    for name in networks(paper):
        layers, printed = int(paper[f"layers_{name}"].value), int(paper[f"iterations_{name}"].value)
        net = record.nets.get(name)
        ours = [net.find(OURS, margin) if net else None for margin in MARGINS]
        cells = [str(run.iterations) if run else "" for run in ours]
        ratio = f"{ours[0].iterations / space(layers):.2e}" if ours[0] else ""
        body.append((titles[name], str(layers), f"{space(layers):.2e}", str(printed), *cells, ratio))
    header = ("network", "layers", "space", "printed", *(f"ours at {percent(margin)}" for margin in MARGINS), "ratio")
    return Table(f"{FIGURE}: configurations scored", header, tuple(body))


def _cost_tables(record: SearchRecord) -> list[Table]:
    """A table of what each recorded search cost; none if nothing was recorded."""
    body = [
        (
            TITLES[name], method, percent(margin), str(run.iterations), str(run.samples or ""), f"{run.seconds:.1f}",
            f"{net.bits(run)}", f"{100 * run.validation:.2f}", f"{100 * run.test:.2f}",
        )
        for name in NETS
        if (net := record.nets.get(name))
        for margin in MARGINS
        for method in (OURS, WHOLE, FAITHFUL, RESTRICTED, EXHAUSTIVE)
        if (run := net.find(method, margin))
    ]  # fmt: skip
    header = ("network", "search", "margin", "scored", "images", "seconds", "bits", "validation %", "test %")
    return [Table(f"{FIGURE}: what searches cost (recorded)", header, tuple(body))] if body else []


def _picture(paper: Paper, out: Path, record: SearchRecord) -> Figure:
    """Draw the number of scored configurations of the chapter and of our search, by network."""
    nets = record.tuned(MARGINS[0])
    series = {"the chapter": [paper[f"iterations_{net}"].value for net in nets]}
    for margin in MARGINS:
        runs = [record.nets[net].find(OURS, margin) for net in nets]
        series[f"weft tune, {percent(margin)}"] = [run.iterations if run else 0 for run in runs]
    colours = dict(zip(series, (COLOURS["the chapter"], COLOURS[OURS], "#56b4e9"), strict=True))
    panel = Panel([Bars([TITLES[net] for net in nets], series, colours)], y=Axis(label="configurations scored"))
    title = f"{FIGURE}: what a search takes (printed: at 7 %)"
    return pictures.picture(out, "table3-5-iterations", title, [panel], size=(7.5, 3.9))


FIGURE_4 = "Fig. III.4"


def figure_4(paper: Paper, out: Path, record: SearchRecord) -> Exhibit:
    """Draw Fig. III.4, the steps of LeNet's search; empty if they were not recorded."""
    net = record.nets.get(LENET)
    if net is None or net.path is None:
        return Exhibit()
    return Exhibit(tuple(_rows(paper, net.path)), (_table_4(net.path),), (_picture_4(out, net.path),))


def _rows(paper: Paper, search: Tuning) -> list[Row]:
    """Rows on LeNet's search: its threshold, the bits after the coarse search, and the trials of that."""
    coarse = [trial for trial in search.trials if trial.phase == 1 and trial.step == "coarse"]
    chosen_trials = [trial for trial in coarse if trial.chosen]
    bits = min((form.bits for trial in chosen_trials[-1:] for form in trial.configuration.values()), default=32)
    threshold = search.thresholds["full"]
    return [
        Row(FIGURE_4, "threshold of LeNet at 1 %", paper["lenet_threshold"].value, threshold, "",
            f"our LeNet scores {search.base['full']:.4f} in float32 on the validation images"),
        Row(FIGURE_4, "bits after the coarse search", paper["lenet_coarse_bits"].value, bits, " bits",
            "one format for all: from FLOAT 32 by halves to FIXED, then bisection"),
        Row(FIGURE_4, "configurations of the coarse search", paper["lenet_coarse_iterations"].value, len(coarse), "",
            "FLOAT 32 is the base and not counted; EXP is tried with fewer bits than FIXED needs, while it passes"),
    ]  # fmt: skip


def _table_4(search: Tuning) -> Table:
    """Table of the configurations that the search kept, in order."""
    body = tuple(
        (str(kept.phase), kept.step, formats_text(search.network, kept.configuration, bias=True), f"{kept.score:.4f}",
         f"{kept.objective:.0f}")
        for kept in search.path
    )  # fmt: skip
    header = ("phase", "step", "inputs / weights (bias)", "score", "bits")
    return Table(f"{FIGURE_4}: the configurations that the search kept, LeNet at 1 % (recorded)", header, body)


def _picture_4(out: Path, search: Tuning) -> Figure:
    path = out / "fig3-4-search.png"
    make_folder(out)
    for suffix in (".png", ".svg"):
        draw_search(search, path.with_suffix(suffix))
    return Figure(f"{FIGURE_4}: tuning the two convolutions of LeNet at 1 % (recorded)", path)
