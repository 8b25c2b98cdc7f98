"""Table 6: ten experiments, every baseline in our simulator, and the proved optimum beside HaX-CoNN's result.

Twice: with the derived profiles as they are shipped, and with their demands times the one number that was fitted to the
GPU & DSA column. The column HaX-CoNN is not fitted to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine, Texts
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick, beside
from weft_papers.haxconn.experiments import Experiment, experiments
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
    Laboratory,
    LeastMakespan,
    SocCase,
)
from weft_papers.layerweaver.lab import mean

FIGURE = "Table 6"
MEASURED = SocCase(XAVIER, (CaseNetwork("googlenet", origin="measured"), CaseNetwork("resnet101", origin="measured")))
"""The pair with times of every group."""


@dataclass(frozen=True)
class ExperimentComparison:
    """All experiments, with the demands as shipped and as fitted."""

    paper: Paper
    fitted: float
    rows: Sequence[Experiment]
    shipped: Sequence[LeastMakespan]
    scaled: Sequence[LeastMakespan]
    once: Sequence[LeastMakespan]
    """The least makespans with at most one switch of every network, as in the paper's schedules; demands as fitted."""
    chained: Sequence[LeastMakespan]
    """The streams as chains: one frame at a time."""


def compare(
    paper: Paper,
    lab: Laboratory,
    tick: Tick | None = None,
    rows: Sequence[Experiment] | None = None,
) -> ExperimentComparison:
    rows = list(experiments(paper) if rows is None else rows)
    cases = [row.case for row in rows]
    scaled = [case.under(lab.fitted) for case in cases]
    once = [case._replace(max_switches=1) for case in scaled]
    chained = [_chained(row.case) for row in rows if row.streams]
    found = lab.find([*cases, *scaled, *once, *chained], tick)
    return ExperimentComparison(
        paper, lab.fitted.demand, rows,
        *([found[case] for case in group] for group in (cases, scaled, once, chained)),
    )  # fmt: skip


def _chained(case: SocCase) -> SocCase:
    first, second = case.entries
    return case._replace(entries=(first, second._replace(after=first.model)))


def table_6(out: Path, found: ExperimentComparison, lab: Laboratory) -> Exhibit:
    rows = [row for place in range(len(found.rows)) for row in _rows(found, place)]
    rows += [*_summary(found), _measured_row(lab), _chain_row(found)]
    tables = (
        _table(found, found.shipped, "demands as shipped"),
        _table(found, found.scaled, f"demands times {found.fitted:g}, fitted to the column GPU & DSA"),
        _readings(found),
        _certificates(found),
        _artifact(found),
    )
    return Exhibit(tuple(rows), tables, (_drawn(out, found),))


# Rows


def _rows(found: ExperimentComparison, place: int) -> list[Row]:
    rows = [_baseline_row(found, place, name) for name in THEIRS]
    return [*rows, _optimum_row(found, place), _gain_row(found, place)]


def _baseline_row(found: ExperimentComparison, place: int, name: str) -> Row:
    row, printed = found.rows[place], found.rows[place].printed(found.paper, name)
    ours, scaled = (row.as_printed(one.ms(name)) for one in (found.shipped[place], found.scaled[place]))
    reason = row.remark if name == "gpu-only" else _contention(found, place, name)
    if name in ("herald", "h2h"):
        reason += "; our own implementation, on other groups than theirs"
    if name != "gpu-only":
        reason += f"; with demands times {found.fitted:g} {scaled:.4g}{row.unit}"
    return Row(FIGURE, f"{LABELS[name]}, {row.name}", printed, ours, row.unit, beside(ours, printed, reason))


def _contention(found: ExperimentComparison, place: int, name: str) -> str:
    row = found.rows[place]
    if row.case.soc == SNAPDRAGON:
        fit = "the chip's ratio of DSP to GPU is fitted to this column; " if name == "per-unit" else ""
        return fit + "nothing contends in our model of this chip"
    less = found.shipped[place].ms(name) < row.window_ms(found.paper, name)
    return f"with derived profiles networks slow each other {'less' if less else 'more'} than on the chip"


def _optimum_row(found: ExperimentComparison, place: int) -> Row:
    row, claim, once = found.rows[place], found.shipped[place].certificate, found.once[place]
    printed, ours = row.printed(found.paper, HAXCONN), row.as_printed(1e3 * claim.value)
    scaled = row.as_printed(found.scaled[place].best_ms)
    sure = "proved optimal" if claim.proved else f"gap {100 * claim.gap:.1f} %"
    reason = (
        f"{sure}; with demands times {found.fitted:g} {scaled:.4g}{row.unit}, with one switch per network at most "
        f"{row.as_printed(once.best_ms):.4g}" + (f"; {row.note}" if row.note else "")
    )
    return Row(FIGURE, f"HaX-CoNN and ours, {row.name}", printed, ours, row.unit, beside(ours, printed, reason))


def _gain_row(found: ExperimentComparison, place: int) -> Row:
    row = found.rows[place]
    key = "gain_fps" if row.streams else "gain_ms"
    printed, shipped, scaled = (
        found.paper[f"t6_{row.number}_{key}"].value,
        found.shipped[place],
        found.scaled[place],
    )
    best = min(THEIRS, key=lambda name: row.window_ms(found.paper, name))
    why = (
        f"over {LABELS[shipped.rival(THEIRS)]} (the paper: over {LABELS[best]}); with demands times "
        f"{found.fitted:g} {_percent(scaled.gain(THEIRS)):.1f} % over {LABELS[scaled.rival(THEIRS)]}; over all "
        f"seven baselines {_percent(shipped.gain()):.1f} and {_percent(scaled.gain()):.1f} %"
    )
    ours = _percent(shipped.gain(THEIRS))
    return Row(FIGURE, f"better than the paper's best baseline, {row.name}", printed, ours, "%", why)


def _percent(gain: float) -> float:
    return 100 * (gain - 1)


def _summary(found: ExperimentComparison) -> list[Row]:
    rows = []
    for name in ("gpu-only", "per-unit", "herald", "h2h", HAXCONN):
        shipped, scaled = (_apart(found, one, name) for one in (found.shipped, found.scaled))
        what = "ours against HaX-CoNN" if name == HAXCONN else LABELS[name]
        why = f"with demands times {found.fitted:g} {scaled:.1f} %; all {len(found.rows)} experiments count alike"
        rows.append(Row(FIGURE, f"{what}: mean distance from the printed number", None, shipped, "%", why))
    improved = [sum(one.gain(THEIRS) >= IMPROVED for one in group) for group in (found.shipped, found.scaled)]
    printed = sum(found.paper[f"t6_{row.number}_gain_ms"].value > 0 for row in found.rows)
    why = (
        f"of {len(found.rows)}; the paper's column has {printed}; with demands times {found.fitted:g} {improved[1]}; "
        "never worse than any baseline"
    )
    return [*rows, Row(FIGURE, "experiments improved", printed, improved[0], "", why)]


def _apart(found: ExperimentComparison, group: Sequence[LeastMakespan], name: str) -> float:
    return 100 * mean(
        abs(one.ms(name) / row.window_ms(found.paper, name) - 1) for row, one in zip(found.rows, group, strict=True)
    )


def _measured_row(lab: Laboratory) -> Row:
    one = lab.find([MEASURED])[MEASURED]
    alone, split = one.baselines["gpu-only"], one.baselines["per-unit"]
    why = (
        f"measured times of every group: {one.best_ms:.3f} ms against {1e3 * alone:.3f} on the GPU alone and "
        f"{1e3 * split:.3f} with one network per unit; the paper's experiment 4 finds no gain for this pair, which "
        "takes more contention than its constants and these demands give"
    )
    ours = 100 * (1 - one.best_s / alone)
    return Row(FIGURE, "GoogLeNet + ResNet101, measured profiles, under GPU only", None, ours, "%", why)


def _chain_row(found: ExperimentComparison) -> Row:
    gains = [one.baselines["gpu-only"] / one.best_s for one in found.chained]
    why = (
        "the largest gain if a stream is one frame at a time, DNN-2 after DNN-1: nothing runs beside anything, so the "
        "printed gains need frames in flight; ours runs the window of both at once"
    )
    return Row(FIGURE, "scenario 3 as a chain: better than GPU only", None, _percent(max(gains)), "%", why)


# Tables


def _table(found: ExperimentComparison, group: Sequence[LeastMakespan], what: str) -> Table:
    body = []
    for row, one in zip(found.rows, group, strict=True):
        cells = [
            f"{row.as_printed(one.ms(name)):.4g} ({row.printed(found.paper, name):g})" for name in (*THEIRS, HAXCONN)
        ]
        gain = found.paper[f"t6_{row.number}_{'gain_fps' if row.streams else 'gain_ms'}"].value
        others = [f"{row.as_printed(one.ms(name)):.4g}" for name in ("mensa", "heft", "contention-blind")]
        goal = "FPS" if row.streams else "ms"
        best = f"{_percent(one.gain(THEIRS)):.1f} ({gain:g})"
        body.append((str(row.number), row.case.name, goal, *cells, best, *others, f"{_percent(one.gain()):.1f}"))
    header = (
        "exp.", "networks", "goal", *(LABELS[name] for name in THEIRS), "ours (HaX-CoNN)", "better %", "Mensa", "HEFT",
        "contention-blind", "better than all %",
    )  # fmt: skip
    return Table(f"{FIGURE}: ours, in brackets as printed; {what}", header, tuple(body))


def _readings(found: ExperimentComparison) -> Table:
    body = []
    for row in found.rows:
        alone, printed = row.alone_ms(), row.window_ms(found.paper, "gpu-only")
        body.append(
            (str(row.number), f"{alone:.4g}", f"{printed:.4g}", f"{printed / alone:.2f}", row.reading, row.remark)
        )
    header = ("exp.", "stand-alone sum ms", "printed GPU only ms", "ratio", "reading", "printed GPU only")
    return Table(f"{FIGURE}: how its rows are read", header, tuple(body))


def _certificates(found: ExperimentComparison) -> Table:
    body = []
    for row, one in zip(found.rows, found.shipped, strict=True):
        claim = one.certificate
        body.append(
            (
                str(row.number), f"{1e3 * claim.value:.4f}", f"{1e3 * claim.bound:.4f}",
                f"{1e3 * claim.any_idling_bound:.4f}", "yes" if claim.proved else "no",
                "nothing" if not claim.assumes else "dominance", str(claim.states), f"{claim.seconds:.2f}",
                f"{one.ms('contention-blind'):.4f}",
            )
        )  # fmt: skip
    header = (
        "exp.", "ours ms", "bound ms", "bound for any idling ms", "proved", "assumes", "states", "seconds",
        "contention-blind ms",
    )  # fmt: skip
    return Table(f"{FIGURE}: certificates, demands as shipped", header, tuple(body))


def _artifact(found: ExperimentComparison) -> Table:
    body = []
    for row, shipped, scaled in zip(found.rows, found.shipped, found.scaled, strict=True):
        if f"artifact_{row.number}_haxconn_ms" not in found.paper:
            continue
        for name in (*THEIRS, HAXCONN):
            body.append(
                (
                    str(row.number), "HaX-CoNN" if name == HAXCONN else LABELS[name],
                    f"{found.paper[f't6_{row.number}_{name}_ms'].value:g}",
                    f"{found.paper[f'artifact_{row.number}_{name}_ms'].value:g}",
                    f"{shipped.ms(name):.2f}", f"{scaled.ms(name):.2f}",
                )
            )  # fmt: skip
    header = (
        "exp.",
        "schedule",
        "paper ms",
        "artifact's re-run ms",
        "ours ms",
        f"ours, demands x {found.fitted:g}, ms",
    )
    return Table(f"{FIGURE}: the paper, its artifact run again, and ours", header, tuple(body))


# Picture


def _drawn(out: Path, found: ExperimentComparison) -> Figure:
    proved = f"{OURS}, proved"
    colours = {LABELS[name]: COLOURS[name] for name in THEIRS}
    colours |= {"HaX-CoNN": COLOURS[HAXCONN], proved: COLOURS[OURS]}
    labels = [f"{row.number}: {row.case.name.replace(', ', chr(10))}".replace(" + ", " +\n") for row in found.rows]

    def panel(what: str, series: dict[str, list[float]]) -> Panel:
        bars, best = Bars(labels, series, colours), list(series)[-1]
        words = [f"{value:.2f}" for value in series[best]]
        texts = Texts(bars.places(best), series[best], words, size=7.5, offset=(0, 2))
        y = Axis(label="over GPU only", low=0, high=1.95)
        return Panel([bars, ReferenceLine(1, dash="-", width=0.8), texts], what, Axis(size=7.5), y)

    printed = {
        label: [row.window_ms(found.paper, name) / row.window_ms(found.paper, "gpu-only") for row in found.rows]
        for label, name in ({LABELS[name]: name for name in THEIRS} | {"HaX-CoNN": HAXCONN}).items()
    }
    panels = [panel("the paper", printed)]
    for group, what in (
        (found.shipped, "ours, demands as derived"),
        (found.scaled, f"ours, demands times {found.fitted:g} (fitted to the paper's GPU & DSA column)"),
    ):
        series = {LABELS[name]: [one.baselines[name] / one.baselines["gpu-only"] for one in group] for name in THEIRS}
        panels.append(panel(what, {**series, proved: [one.best_s / one.baselines["gpu-only"] for one in group]}))
    title = f"{FIGURE}: latency over GPU only (lower is better)"
    return pictures.picture(out, "table6-experiments", title, panels, size=(12.5, 8.2))
