"""Table 6: ten experiments, every baseline in our simulator, and the proved optimum beside HaX-CoNN's result.

Every experiment is run twice: with the derived profiles as shipped, and with their memory demands times one factor,
which is fitted to the column GPU & DSA only. So the column HaX-CoNN is predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine, Texts
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick, beside
from weft_papers.haxconn.lab import (
    COLOURS,
    HAXCONN,
    IMPROVED,
    LABELS,
    OURS,
    SNAPDRAGON,
    THEIRS,
    XAVIER,
    CaseNetwork,
    Experiment,
    Laboratory,
    LeastMakespan,
    SocCase,
    experiments,
)
from weft_papers.layerweaver.lab import mean

FIGURE = "Table 6"
MEASURED = SocCase(XAVIER, (CaseNetwork("googlenet", origin="measured"), CaseNetwork("resnet101", origin="measured")))
"""The pair whose profiles have measured times of every group."""


@dataclass(frozen=True)
class ExperimentComparison:
    """The results of all experiments of Table 6; all sequences but *chained* run parallel to *rows*."""

    paper: Paper
    fitted: float
    """The factor on the memory demands that is fitted to the column GPU & DSA."""
    rows: Sequence[Experiment]
    shipped: Sequence[LeastMakespan]
    """With the memory demands as shipped."""
    scaled: Sequence[LeastMakespan]
    """With the demands times *fitted*."""
    once: Sequence[LeastMakespan]
    """The least makespans with at most one switch of every network, as in the paper's schedules; demands as fitted."""
    chained: Sequence[LeastMakespan]
    """The experiments on streams, with one frame in flight: the second network waits for the first."""


def compare(
    paper: Paper,
    lab: Laboratory,
    tick: Tick | None = None,
    rows: Sequence[Experiment] | None = None,
) -> ExperimentComparison:
    """Search every experiment (*rows*: only these) under all assumptions that Table 6 is compared with."""
    rows = list(experiments(paper) if rows is None else rows)
    cases = [row.case for row in rows]
    scaled = [case.under(lab.fitted) for case in cases]
    once = [case._replace(max_switches=1) for case in scaled]
    chained = [_chain(row.case) for row in rows if row.streams]
    optima = lab.find([*cases, *scaled, *once, *chained], tick)
    return ExperimentComparison(
        paper, lab.fitted.demand, rows,
        *([optima[case] for case in group] for group in (cases, scaled, once, chained)),
    )  # fmt: skip


def _chain(case: SocCase) -> SocCase:
    """The case with its second network waiting for its first."""
    first, second = case.entries
    return case._replace(entries=(first, second._replace(after=first.model)))


def table_6(out: Path, comparison: ExperimentComparison, lab: Laboratory) -> Exhibit:
    """Reproduce Table 6: rows, tables and the picture of all experiments."""
    rows = [row for index in range(len(comparison.rows)) for row in _rows(comparison, index)]
    rows += [*_summary(comparison), _measured_row(lab), _chain_row(comparison)]
    tables = (
        _table(comparison, comparison.shipped, "demands as shipped"),
        _table(comparison, comparison.scaled, f"demands times {comparison.fitted:g}, fitted to the column GPU & DSA"),
        _readings(comparison),
        _certificates(comparison),
        _artifact(comparison),
    )
    return Exhibit(tuple(rows), tables, (_picture(out, comparison),))


# Rows


def _rows(comparison: ExperimentComparison, place: int) -> list[Row]:
    """Rows of the experiment at index *place*: the paper's baselines, our optimum, and its gain."""
    rows = [_baseline_row(comparison, place, name) for name in THEIRS]
    return [*rows, _optimum_row(comparison, place), _gain_row(comparison, place)]


def _baseline_row(comparison: ExperimentComparison, place: int, name: str) -> Row:
    """Row with baseline *name* in our simulator beside the printed number."""
    row, printed = comparison.rows[place], comparison.rows[place].printed(comparison.paper, name)
    ours, scaled = (row.as_printed(best.ms(name)) for best in (comparison.shipped[place], comparison.scaled[place]))
    reason = row.remark if name == "gpu-only" else _contention_text(comparison, place, name)
    if name in ("herald", "h2h"):
        reason += "; our own implementation, on other groups than theirs"
    if name != "gpu-only":
        reason += f"; with demands times {comparison.fitted:g} {scaled:.4g}{row.unit}"
    return Row(FIGURE, f"{LABELS[name]}, {row.name}", printed, ours, row.unit, beside(ours, printed, reason))


def _contention_text(comparison: ExperimentComparison, place: int, name: str) -> str:
    """Explain the difference of a baseline from the printed number by contention."""
    row = comparison.rows[place]
    if row.case.soc == SNAPDRAGON:
        fit = "the chip's ratio of DSP to GPU is fitted to this column; " if name == "per-unit" else ""
        return fit + "nothing contends in our model of this chip"
    less = comparison.shipped[place].ms(name) < row.window_ms(comparison.paper, name)
    return f"with derived profiles networks slow each other {'less' if less else 'more'} than on the chip"


def _optimum_row(comparison: ExperimentComparison, place: int) -> Row:
    """Row with our optimum beside HaX-CoNN's printed number."""
    row, claim, once = comparison.rows[place], comparison.shipped[place].certificate, comparison.once[place]
    printed, ours = row.printed(comparison.paper, HAXCONN), row.as_printed(1e3 * claim.value)
    scaled = row.as_printed(comparison.scaled[place].best_ms)
    verdict = "proved optimal" if claim.proved else f"gap {100 * claim.gap:.1f} %"
    reason = (
        f"{verdict}; with demands times {comparison.fitted:g} {scaled:.4g}{row.unit}, with one switch per network at "
        f"most {row.as_printed(once.best_ms):.4g}" + (f"; {row.note}" if row.note else "")
    )
    return Row(FIGURE, f"HaX-CoNN and ours, {row.name}", printed, ours, row.unit, beside(ours, printed, reason))


def _gain_row(comparison: ExperimentComparison, place: int) -> Row:
    """Row with our gain over the best of the paper's baselines beside the printed gain."""
    row = comparison.rows[place]
    key = "gain_fps" if row.streams else "gain_ms"
    printed, shipped, scaled = (
        comparison.paper[f"t6_{row.number}_{key}"].value,
        comparison.shipped[place],
        comparison.scaled[place],
    )
    best = min(THEIRS, key=lambda name: row.window_ms(comparison.paper, name))
    why = (
        f"over {LABELS[shipped.rival(THEIRS)]} (the paper: over {LABELS[best]}); with demands times "
        f"{comparison.fitted:g} {_percent(scaled.gain(THEIRS)):.1f} % over {LABELS[scaled.rival(THEIRS)]}; over all "
        f"seven baselines {_percent(shipped.gain()):.1f} and {_percent(scaled.gain()):.1f} %"
    )
    ours = _percent(shipped.gain(THEIRS))
    return Row(FIGURE, f"better than the paper's best baseline, {row.name}", printed, ours, "%", why)


def _percent(gain: float) -> float:
    """Percent by which a speed-up factor exceeds 1."""
    return 100 * (gain - 1)


def _summary(comparison: ExperimentComparison) -> list[Row]:
    """Rows over all experiments: the mean difference of every column from the printed one, and the improvements."""
    rows = []
    for name in ("gpu-only", "per-unit", "herald", "h2h", HAXCONN):
        shipped, scaled = (
            _mean_difference(comparison, optima, name) for optima in (comparison.shipped, comparison.scaled)
        )
        column = "ours against HaX-CoNN" if name == HAXCONN else LABELS[name]
        counted = f"all {len(comparison.rows)} experiments count alike"
        why = f"with demands times {comparison.fitted:g} {scaled:.1f} %; {counted}"
        rows.append(Row(FIGURE, f"{column}: mean distance from the printed number", None, shipped, "%", why))
    improved = [
        sum(best.gain(THEIRS) >= IMPROVED for best in group) for group in (comparison.shipped, comparison.scaled)
    ]
    printed = sum(comparison.paper[f"t6_{row.number}_gain_ms"].value > 0 for row in comparison.rows)
    why = (
        f"of {len(comparison.rows)}; the paper's column has {printed}; with demands times {comparison.fitted:g} "
        f"{improved[1]}; never worse than any baseline"
    )
    return [*rows, Row(FIGURE, "experiments improved", printed, improved[0], "", why)]


def _mean_difference(comparison: ExperimentComparison, optima: Sequence[LeastMakespan], name: str) -> float:
    """Mean relative difference of column *name* from the printed one, in percent."""
    return 100 * mean(
        abs(optimum.ms(name) / row.window_ms(comparison.paper, name) - 1)
        for row, optimum in zip(comparison.rows, optima, strict=True)
    )


def _measured_row(lab: Laboratory) -> Row:
    """Row with the gain over GPU only of the pair whose groups were measured."""
    optimum = lab.find([MEASURED])[MEASURED]
    alone_s, split_s = optimum.baselines["gpu-only"], optimum.baselines["per-unit"]
    why = (
        f"measured times of every group: {optimum.best_ms:.3f} ms against {1e3 * alone_s:.3f} on the GPU alone and "
        f"{1e3 * split_s:.3f} with one network per unit; the paper's experiment 4 finds no gain for this pair, which "
        "takes more contention than its constants and these demands give"
    )
    ours = 100 * (1 - optimum.best_s / alone_s)
    return Row(FIGURE, "GoogLeNet + ResNet101, measured profiles, shorter than GPU only", None, ours, "%", why)


def _chain_row(comparison: ExperimentComparison) -> Row:
    """Row with the largest gain over GPU only if streams are run one frame at a time."""
    gains = [optimum.baselines["gpu-only"] / optimum.best_s for optimum in comparison.chained]
    why = (
        "the largest gain if a stream is one frame at a time, DNN-2 after DNN-1: nothing runs beside anything, so the "
        "printed gains need frames in flight; ours runs the window of both at once"
    )
    return Row(FIGURE, "scenario 3 as a chain: better than GPU only", None, _percent(max(gains)), "%", why)


# Tables


def _table(comparison: ExperimentComparison, optima: Sequence[LeastMakespan], assumptions: str) -> Table:
    """Table of all columns of Table 6 for the results *optima* under *assumptions*, given in words."""
    body = []
    for row, optimum in zip(comparison.rows, optima, strict=True):
        cells = [
            f"{row.as_printed(optimum.ms(name)):.4g} ({row.printed(comparison.paper, name):g})"
            for name in (*THEIRS, HAXCONN)
        ]
        gain = comparison.paper[f"t6_{row.number}_{'gain_fps' if row.streams else 'gain_ms'}"].value
        others = [f"{row.as_printed(optimum.ms(name)):.4g}" for name in ("mensa", "heft", "contention-blind")]
        goal = "FPS" if row.streams else "ms"
        best = f"{_percent(optimum.gain(THEIRS)):.1f} ({gain:g})"
        body.append((str(row.number), row.case.name, goal, *cells, best, *others, f"{_percent(optimum.gain()):.1f}"))
    header = (
        "exp.", "networks", "goal", *(LABELS[name] for name in THEIRS), "ours (HaX-CoNN)", "better %", "Mensa", "HEFT",
        "contention-blind", "better than all %",
    )  # fmt: skip
    return Table(f"{FIGURE}: ours, in brackets as printed; {assumptions}", header, tuple(body))


def _readings(comparison: ExperimentComparison) -> Table:
    """Table of how each row of Table 6 is read, and of the sum that its GPU-only number is compared with."""
    body = []
    for row in comparison.rows:
        alone, printed = row.alone_ms(), row.window_ms(comparison.paper, "gpu-only")
        body.append(
            (str(row.number), f"{alone:.4g}", f"{printed:.4g}", f"{printed / alone:.2f}", row.reading, row.remark)
        )
    header = ("exp.", "stand-alone sum ms", "printed GPU only ms", "ratio", "reading", "printed GPU only")
    return Table(f"{FIGURE}: how its rows are read", header, tuple(body))


def _certificates(comparison: ExperimentComparison) -> Table:
    """Table of what the solver proved about each experiment."""
    body = []
    for row, optimum in zip(comparison.rows, comparison.shipped, strict=True):
        certificate = optimum.certificate
        body.append(
            (
                str(row.number), f"{1e3 * certificate.value:.4f}", f"{1e3 * certificate.bound:.4f}",
                f"{1e3 * certificate.any_idling_bound:.4f}", "yes" if certificate.proved else "no",
                "nothing" if not certificate.assumes else "dominance", str(certificate.states),
                f"{certificate.seconds:.2f}", f"{optimum.ms('contention-blind'):.4f}",
            )
        )  # fmt: skip
    header = (
        "exp.", "ours ms", "bound ms", "bound for any idling ms", "proved", "assumes", "states", "seconds",
        "contention-blind ms",
    )  # fmt: skip
    return Table(f"{FIGURE}: certificates, demands as shipped", header, tuple(body))


def _artifact(comparison: ExperimentComparison) -> Table:
    """Table of the experiments that the paper's artifact runs again, beside the paper and ours."""
    body = []
    for row, shipped, scaled in zip(comparison.rows, comparison.shipped, comparison.scaled, strict=True):
        if f"artifact_{row.number}_haxconn_ms" not in comparison.paper:
            continue
        for name in (*THEIRS, HAXCONN):
            body.append(
                (
                    str(row.number), "HaX-CoNN" if name == HAXCONN else LABELS[name],
                    f"{comparison.paper[f't6_{row.number}_{name}_ms'].value:g}",
                    f"{comparison.paper[f'artifact_{row.number}_{name}_ms'].value:g}",
                    f"{shipped.ms(name):.2f}", f"{scaled.ms(name):.2f}",
                )
            )  # fmt: skip
    header = (
        "exp.",
        "schedule",
        "paper ms",
        "artifact's re-run ms",
        "ours ms",
        f"ours, demands x {comparison.fitted:g}, ms",
    )
    return Table(f"{FIGURE}: the paper, its artifact run again, and ours", header, tuple(body))


# Picture


def _picture(out: Path, comparison: ExperimentComparison) -> Figure:
    """Draw latencies over GPU only in three panels: the paper, ours as shipped, ours as fitted."""
    proved = f"{OURS}, proved"
    colours = {LABELS[name]: COLOURS[name] for name in THEIRS}
    colours |= {"HaX-CoNN": COLOURS[HAXCONN], proved: COLOURS[OURS]}
    labels = [f"{row.number}: {row.case.name.replace(', ', chr(10))}".replace(" + ", " +\n") for row in comparison.rows]

    def panel(heading: str, series: dict[str, list[float]]) -> Panel:
        bars, best = Bars(labels, series, colours), list(series)[-1]
        value_texts = [f"{value:.2f}" for value in series[best]]
        texts = Texts(bars.places(best), series[best], value_texts, size=7.5, offset=(0, 2))
        y = Axis(label="over GPU only", low=0, high=1.95)
        return Panel([bars, ReferenceLine(1, dash="-", width=0.8), texts], heading, Axis(size=7.5), y)

    printed = {
        label: [
            row.window_ms(comparison.paper, name) / row.window_ms(comparison.paper, "gpu-only")
            for row in comparison.rows
        ]
        for label, name in ({LABELS[name]: name for name in THEIRS} | {"HaX-CoNN": HAXCONN}).items()
    }
    panels = [panel("the paper", printed)]
    for group, heading in (
        (comparison.shipped, "ours, demands as derived"),
        (comparison.scaled, f"ours, demands times {comparison.fitted:g} (fitted to the paper's GPU & DSA column)"),
    ):
        series = {
            LABELS[name]: [case.baselines[name] / case.baselines["gpu-only"] for case in group] for name in THEIRS
        }
        panels.append(panel(heading, {**series, proved: [case.best_s / case.baselines["gpu-only"] for case in group]}))
    title = f"{FIGURE}: latency over GPU only (lower is better)"
    return pictures.picture(out, "table6-experiments", title, panels, size=(12.5, 8.2))
