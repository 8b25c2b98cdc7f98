"""An urgent model and one with endless work: the urgent one's p99 over that on an idle GPU, and the other's rate."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.gpu.lab import ALONE, BESIDE, OURS, URGENT, URGENT_LOADS, RuleResults, urgent
from weft_papers.gpu.sources import COLOURS, MEASURED, LoadResults, Records, Rows, drawn, sources

FIGURE = "urgent beside heavy"
TAIL, LEFT = 1.15, 0.97
"""The goals: p99 over that on an idle GPU; the other's rate over that under the best rival with this p99."""
WITHIN = 15.0
"""Percent by which the simulated p99 may be off."""
SHOWN = ("priority", "priority-streams", "orion 100 us", "orion 400 us", "split 0 swapped", "reef", OURS)


def urgent_beside(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    loads = [f"{u} beside {h}/{load:g}" for load in URGENT_LOADS[1:2] for u, h in BESIDE]

    def simulate(load: str) -> RuleResults:
        models, part = load.split("/")
        first, other = models.split(" beside ")
        return urgent(first, other, float(part), seconds)

    every = sources("urgent", loads, simulate, records, tick)
    rows = [row for source in every for row in _rows(source)] + _errors(records.measured)
    return Exhibit(tuple(rows), tuple(_table(source) for source in every), (_picture(out, drawn(every)),))


SEGMENT = "What is lost is the segment of the other that runs when a request comes: it is not taken back"
TWO = "What is lost are up to two segments of the other, the one that runs and the one behind it"


def _tail(results: RuleResults, rule: str) -> float:
    return float(results[rule]["p99"]) / float(results[ALONE]["p99"])


def _left(load: str, results: RuleResults) -> float:
    """Return the other's rate over that under the best rival that keeps the p99.

    Where none does, the divisor is what the urgent one leaves.
    """
    kept = [
        float(results[rule]["beside"])
        for rule in results
        if rule in URGENT and rule != OURS and _tail(results, rule) <= TAIL
    ]
    return float(results[OURS]["beside"]) / max(kept, default=1 - float(load.split("/")[1]))


def _rows(source: LoadResults) -> list[Row]:
    tails = {load: _tail(results, OURS) for load, results in source.results.items()}
    left = {load: _left(load, results) for load, results in source.results.items()}
    slowest, poorest = max(tails, key=tails.__getitem__), min(left, key=left.__getitem__)
    rival = min(
        _tail(source.results[slowest], rule) for rule in source.results[slowest] if rule in URGENT and rule != OURS
    )
    lost = TWO if source.name == MEASURED else SEGMENT
    return [
        Row(f"{FIGURE}, {source.name}", "p99 over that on an idle GPU, at most", TAIL, tails[slowest], "x",
            f"{slowest}; the best rival {rival:.2f}. {lost}"),
        Row(f"{FIGURE}, {source.name}", "rate of the other, over the best that keeps that p99, at least", LEFT,
            left[poorest], "x", f"{poorest}; where no rival keeps it, over 1 minus the urgent one's load, which few "
            "requests miss or pass by chance"),
    ]  # fmt: skip


def _errors(record: Rows) -> list[Row]:
    """How far the p99 that is simulated of the same models is from the measured one."""
    off = {
        f"{name}, {rule}": abs(float(record[f"simulated {name}"][rule]["p99"]) / float(results["p99"]) - 1)
        for name, row in record.items()
        if f"simulated {name}" in record and name.startswith("urgent/")
        for rule, results in row.items()
        if rule in record[f"simulated {name}"]
    }
    if not off:
        return []
    ours = [error for name, error in off.items() if name.endswith(OURS)]
    worst = max(off, key=off.__getitem__)
    why = f"mean over {len(off)} loads and rules; {OURS} alone {100 * mean(ours):.0f} %, worst {worst}"
    return [Row(f"{FIGURE}, {MEASURED}", "simulated p99, off by", WITHIN, 100 * mean(off.values()), "%", why)]


def _table(source: LoadResults) -> Table:
    body = []
    for load, results in source.results.items():
        cells = [
            f"{_tail(results, rule):.2f}, {results[rule]['beside']:.2f}" if rule in results else "" for rule in SHOWN
        ]
        body.append((load, f"{results[ALONE]['p99']:.2f}", *cells))
    title = f"{FIGURE}, {source.name}: p99 over that alone (which is in lengths of the model), speed of the other"
    return Table(title, ("urgent beside other/load", ALONE, *SHOWN), tuple(body))


def _picture(out: Path, results: list[LoadResults]) -> Figure:
    shown = ("priority", "orion 100 us", "orion 400 us", OURS)
    colours = {rule: COLOURS[rule.split()[0]] for rule in shown} | {"orion 400 us": "#f0b488"}
    panels = []
    for source in results:
        labels = [load.replace(" beside ", "\nbeside ").replace("/", "\nload ") for load in source.results]
        had = [rule for rule in shown if all(rule in results for results in source.results.values())]
        series = {rule: [_tail(results, rule) for results in source.results.values()] for rule in had}
        heading = f"{source.title}; dashed: what was aimed at; bars at the edge go on"
        y = Axis(label="p99 over an idle GPU", low=0, high=3)
        panels.append(Panel([Bars(labels, series, colours), ReferenceLine(TAIL)], heading, Axis(size=7), y))
    title = "An urgent model beside one that never stops"
    return pictures.picture(out, "urgent-beside-heavy", title, panels, size=(11, 4.0 * len(results) + 1.0))
