"""Sensitivity of the conclusions of Tables 6 and 8 to the numbers that had to be assumed, each varied on its own.

Varied are the scale of the derived memory demands, the constants cbp and tbwdc of the DLA's contention model (only
their difference is published), and the least speed of a unit under contention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weft.devices import Pccs
from weft.reports.exhibits import MUTED, Axis, Curve, Panel, ReferenceLine, Texts
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick
from weft_papers.haxconn.lab import (
    IMPROVED,
    NETWORKS,
    SNAPDRAGON,
    THEIRS,
    XAVIER,
    Change,
    Experiment,
    Laboratory,
    LeastMakespan,
    chip,
    experiments,
)
from weft_papers.haxconn.table8_pairs import Grid, grid
from weft_papers.layerweaver.lab import mean

FIGURE = "sensitivity"
ENOUGH = 35
"""The number of pairs of Table 8, out of 45, that the paper improves."""


class Knob(NamedTuple):
    """An assumption that is varied, and its values."""

    name: str
    vary: Callable[[Change, float], Change]
    """Sets the assumption to a value."""
    axis: str
    """Label of the axis of its values."""
    values: tuple[float, ...]
    usual: float
    """The value that the other parts of the reproduction use."""
    source: str
    """Where the usual value comes from, in words."""


def knobs(fitted: float) -> list[Knob]:
    """The assumptions that are varied; *fitted*: the factor on the demands that Table 6 gives."""
    model = chip(XAVIER).units[1].contention
    assert isinstance(model, Pccs)
    least = (model.cbp - model.tbwdc) / model.cbp  # the factor on cbp that makes tbwdc 0
    return [
        Knob(
            "scale of the demands", lambda base, value: base._replace(demand=value), "demands times",
            tuple(sorted({0.5, 1.0, 1.5, 2.0, fitted, 3.0})), 1.0,
            "derived GoogLeNet demands 24 GB/s in the mean, the measured one 81",
        ),
        Knob(
            "split of the DLA's cbp and tbwdc", lambda base, value: base._replace(split=value), "cbp of the DLA times",
            (round(least, 4), 1.0, 2.0), 1.0,
            f"only cbp - tbwdc = {model.cbp - model.tbwdc:g} GB/s is published for Xavier; cbp {model.cbp:g} is "
            f"assumed, {least * model.cbp:g} puts tbwdc at 0",
        ),
        Knob(
            "least speed of a unit", lambda base, value: base._replace(floor_pct=value), "floor (% of the speed alone)",
            (10.0, 40.0, 70.0), 10.0, "no source; 10 % is taken where a SoC's description gives none",
        ),
    ]  # fmt: skip


@dataclass(frozen=True)
class KnobStudy:
    """The results of Tables 6 and 8 for every value of a knob."""

    knob: Knob
    base: Change
    """The assumptions that do not vary."""
    rows: Sequence[Experiment]
    experiments: Sequence[Sequence[LeastMakespan]]
    """[value of the knob][row]: the result of an experiment of Table 6."""
    grids: Sequence[Grid]
    """Table 8 for each value of the knob."""

    def gains(self, place: int) -> list[float]:
        """Gains in percent over the best of the paper's baselines, for row *place*: one for each value of the knob."""
        # + 0.0 turns -0.0 into 0.0.
        return [round(100 * (optima[place].gain(THEIRS) - 1), 6) + 0.0 for optima in self.experiments]

    @property
    def improved(self) -> list[int]:
        """The number of improved experiments of Table 6: one for each value of the knob."""
        return [sum(optimum.gain(THEIRS) >= IMPROVED for optimum in optima) for optima in self.experiments]


def study(
    paper: Paper,
    lab: Laboratory,
    knob: Knob,
    base: Change,
    networks: Sequence[str] = tuple(NETWORKS),
    tick: Tick | None = None,
) -> KnobStudy:
    """Run Tables 6 and 8 for every value of a knob, on top of the assumptions *base*."""
    rows = [row for row in experiments(paper) if row.case.soc != SNAPDRAGON]
    changes = [base if value == knob.usual else knob.vary(base, value) for value in knob.values]
    cases = [[row.case.under(change) for row in rows] for change in changes]  # [value][row]
    optima = lab.find([case for row_cases in cases for case in row_cases], tick)
    grids = [grid(lab, change, networks, tick, diagonal=False) for change in changes]
    return KnobStudy(knob, base, rows, [[optima[case] for case in row_cases] for row_cases in cases], grids)


def sensitivity(out: Path, studies: Sequence[KnobStudy]) -> Exhibit:
    """Report the studies: rows, one table and one picture."""
    rows = [row for study in studies for row in _rows(study)]
    return Exhibit(tuple(rows), (_table(studies),), (_picture(out, studies),))


def _rows(study: KnobStudy) -> list[Row]:
    """Rows with the smallest number of improved pairs and experiments over the knob."""
    low, high = study.knob.values[0], study.knob.values[-1]
    pairs = [pairs_grid.improved for pairs_grid in study.grids]
    total = len(study.grids[0].pairs)
    enough_at = [
        f"{value:g}" for value, count in zip(study.knob.values, pairs, strict=True) if count >= ENOUGH * total / 45
    ]
    assumed = (
        f"; the other assumptions as fitted: demands times {study.base.demand:g}" if study.base.demand != 1 else ""
    )
    counts = f"from {low:g} to {high:g}: {', '.join(map(str, pairs))} of {total}"
    improved = ", ".join(map(str, study.improved))
    gains = [
        mean(study.gains(place)[index] for place in range(len(study.rows))) for index in range(len(study.knob.values))
    ]
    return [
        Row(
            FIGURE, f"pairs of Table 8 improved at least, over the {study.knob.name}", None, min(pairs), "",
            f"{counts}; {ENOUGH} of 45 and more at {', '.join(enough_at) or 'none'}; {study.knob.source}{assumed}",
        ),
        Row(
            FIGURE, f"experiments of Table 6 improved at least, over the {study.knob.name}", None, min(study.improved),
            "", f"{improved} of {len(study.rows)}; {', '.join(f'{gain:.1f}' for gain in gains)} % in the mean; never "
            f"worse than a baseline{assumed}",
        ),
    ]  # fmt: skip


def _table(studies: Sequence[KnobStudy]) -> Table:
    """Table of all studies: a line per knob and value."""
    body = []
    for study in studies:
        for index, value in enumerate(study.knob.values):
            gains = [f"{study.gains(place)[index]:.1f}" for place in range(len(study.rows))]
            cells = study.grids[index]
            body.append(
                (
                    study.knob.name, f"{value:g}", f"{study.base.demand:g}", *gains, str(cells.improved),
                    f"{cells.median_gain:.3f}", f"{min(optimum.gain() for optimum in cells.pairs):.3f}",
                )
            )  # fmt: skip
    numbers = [f"exp. {row.number} %" for row in studies[0].rows]
    header = ("varied", "value", "demands x", *numbers, "pairs improved", "median speed-up", "least over all baselines")
    return Table("sensitivity: better than the paper's best baseline, over what is assumed", header, tuple(body))


def _picture(out: Path, studies: Sequence[KnobStudy]) -> Figure:
    title = "Sensitivity: Table 6 above, Table 8 below (dashed: as shipped; dotted: the paper's 35)"
    panels = [*map(_gains_panel, studies), *map(_pairs_panel, studies)]
    return pictures.picture(out, "sensitivity", title, panels, size=(13, 7.2), columns=len(studies), legend_columns=4)


def _gains_panel(study: KnobStudy) -> Panel:
    """The upper panel of a knob: gain over the best baseline, a curve for each experiment of Table 6."""
    curves = [
        Curve(
            study.knob.values, study.gains(place), f"{row.number}: {row.case.name}", pictures.MODELS[place % 8],
            pictures.MARKS[place % 8],
        )
        for place, row in enumerate(study.rows)
    ]  # fmt: skip
    heading = study.knob.name + (f" (demands times {study.base.demand:g})" if study.base.demand != 1 else "")
    return Panel([*curves, _usual_line(study)], heading, y=Axis(label="better than the best baseline (%)"))


def _pairs_panel(study: KnobStudy) -> Panel:
    """The lower panel of a knob: improved pairs of Table 8."""
    total, improved = len(study.grids[0].pairs), [grid.improved for grid in study.grids]
    marks = [
        Curve(study.knob.values, improved, None, "#009e73", "o"),
        Texts(study.knob.values, improved, [str(count) for count in improved], offset=(0, 5)),
        ReferenceLine(ENOUGH * total / 45, dash=":", width=0.8),
        _usual_line(study),
    ]
    return Panel(
        marks, x=Axis(label=study.knob.axis), y=Axis(label="pairs of Table 8 improved", low=0, high=total * 1.1)
    )


def _usual_line(study: KnobStudy) -> ReferenceLine:
    """The vertical line at the usual value of the knob."""
    return ReferenceLine(study.knob.usual, colour=MUTED, width=0.8, upright=True)
