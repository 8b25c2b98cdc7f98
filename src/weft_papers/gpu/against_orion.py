"""Orion's pairs (Strati et al., EuroSys 2024) at the loads of the paper: its rule on our segments, and ours."""

from __future__ import annotations

from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.gpu.lab import ALONE, BESIDE_OF_ORION, FIRST_OF_ORION, ORIONS, OURS, RuleResults, orions
from weft_papers.gpu.sources import COLOURS, LoadResults, Records, drawn, sources

FIGURE = "Orion's pairs"
DONE = 0.99
"""Orion is judged at its best budget: the lowest p99 among those with at least this part of the most best-effort work
of any budget. A lower part would let a budget win that starves the best-effort model."""


def against_orion(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    pairs = [f"{first} beside {other}" for first in FIRST_OF_ORION for other in BESIDE_OF_ORION]

    def simulate(pair: str) -> RuleResults:
        first, other = pair.split(" beside ")
        return orions(first, other, seconds)

    every = sources("orion", pairs, simulate, records, tick)
    rows = [row for source in every for row in _rows(source)]
    return Exhibit(tuple(rows), tuple(_table(source) for source in every), (_picture(out, drawn(every)),))


def best_orion(results: RuleResults) -> str:
    most = max(float(results[rule]["beside"]) for rule in ORIONS)
    able = [rule for rule in ORIONS if results[rule]["beside"] >= DONE * most]
    return min(able, key=lambda rule: float(results[rule]["p99"]))


def _rows(source: LoadResults) -> list[Row]:
    loads = source.results
    tails = {pair: results[OURS]["p99"] / results[best_orion(results)]["p99"] for pair, results in loads.items()}
    done = {pair: results[OURS]["beside"] / results[best_orion(results)]["beside"] for pair, results in loads.items()}
    slowest, poorest = max(tails, key=tails.__getitem__), min(done, key=done.__getitem__)
    why = "Orion's rule on our segments of .25 ms, not on its own kernels; the best of three budgets for each pair"
    figure = f"{FIGURE}, {source.name}"
    return [
        Row(figure, "p99 of the urgent model over that under Orion's rule, at most", 1.0, tails[slowest], "x",
            f"{slowest}; {why}"),
        Row(figure, "best effort done over that under Orion's rule, at least", 1.0, done[poorest], "x",
            f"{poorest}; both do all that comes, as far as it ends within the run"),
    ]  # fmt: skip


def _table(source: LoadResults) -> Table:
    rules = (*ORIONS, "reef", OURS)
    body = [
        (
            pair,
            f"{results[ALONE]['p99']:.2f}",
            *(f"{results[rule]['p99']:.2f}, {results[rule]['beside']:.2f}" for rule in rules),
        )
        for pair, results in source.results.items()
    ]
    title = f"{FIGURE}, {source.name}: p99 of the urgent model in its lengths, part of the best effort done"
    return Table(title, ("urgent beside best effort", ALONE, *rules), tuple(body))


def _picture(out: Path, shown: list[LoadResults]) -> Figure:
    best = "orion, best budget"
    panels = []
    for source in shown:
        loads = source.results.values()
        series = {
            ALONE: [float(load[ALONE]["p99"]) for load in loads],
            best: [float(load[best_orion(load)]["p99"]) for load in loads],
            OURS: [float(load[OURS]["p99"]) for load in loads],
        }
        labels = [pair.replace(" beside ", "\nbeside ") for pair in source.results]
        bars = Bars(labels, series, {**COLOURS, best: COLOURS["orion"]})
        panels.append(Panel([bars], source.title, Axis(size=7), Axis(label="p99 of the urgent one, in its lengths")))
    title = "Orion's inference pairs at equal load fractions"
    return pictures.picture(out, "orions-pairs", title, panels, size=(11, 4.0 * len(shown) + 1.0))
