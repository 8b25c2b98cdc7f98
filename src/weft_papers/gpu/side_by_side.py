"""Models with endless work: the total work done, and the least share of any model."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.gpu.lab import FIRST, OURS, TOGETHER, RuleResults, saturated
from weft_papers.gpu.sources import COLOURS, LoadResults, Records, drawn, sources

FIGURE = "side by side"
FAIR = 0.6
"""A rival counts if it gives every model at least this part of its fair share."""
KEPT, OVER_STREAMS, OVER_ONE, LEAST = 0.98, 1.08, 1.22, 0.8
"""The goals, printed beside the results: work over the best fair rival's, over free streams', over one model at a
time, and the least share of any model over its fair one."""


def side_by_side(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    loads = ["+".join(models) for models in TOGETHER]
    every = sources("saturated", loads, lambda load: saturated(load.split("+"), seconds), records, tick)
    rows = [row for source in every for row in _rows(source)]
    return Exhibit(tuple(rows), tuple(_table(models) for models in every), (_picture(out, drawn(every)),))


def best_rival(results: RuleResults) -> str:
    """The rule with the most work among the fair ones; among all if none is fair."""
    rivals = [rule for rule in results if rule != OURS]
    fair = [rule for rule in rivals if results[rule]["least of fair"] >= FAIR]
    return max(fair or rivals, key=lambda rule: float(results[rule]["sum"]))


def _sum(results: RuleResults, rule: str) -> float:
    return float(results[rule]["sum"])


def _rows(source: LoadResults) -> list[Row]:
    loads = source.results
    over_best = {load: _sum(results, OURS) / _sum(results, best_rival(results)) for load, results in loads.items()}
    least = {load: float(results[OURS]["least of fair"]) for load, results in loads.items()}
    worst, poorest = min(over_best, key=over_best.__getitem__), min(least, key=least.__getitem__)
    first = [results for load, results in loads.items() if load in ["+".join(pair) for pair in TOGETHER[:FIRST]]]
    rows = [
        Row(f"{FIGURE}, {source.name}", "work done over the best fair rival's, at least", KEPT, over_best[worst], "x",
            f"{worst}; {best_rival(loads[worst])} does most of the rivals there. A fixed cut is chosen for each pair "
            f"afterwards; {OURS} chooses by what was measured of each model alone"),
        Row(f"{FIGURE}, {source.name}", "least share of any model, over the fair one", LEAST, least[poorest], "x",
            f"{poorest}; whoever falls below .9 of the fair share counts for more until it has that"),
    ]  # fmt: skip
    if first:
        streams = geometric_mean(_sum(results, OURS) / _sum(results, "streams") for results in first)
        one = geometric_mean(
            _sum(results, OURS) / (_sum(results, "fifo") if "fifo" in results else 1.0) for results in first
        )
        why = f"geomean of {len(first)} pairs in which one fills the GPU"
        rows += [
            Row(f"{FIGURE}, {source.name}", "work done over free streams'", OVER_STREAMS, streams, "x",
                f"{why}: on streams the one with longer kernels starves the other"),
            Row(f"{FIGURE}, {source.name}", "work done over one at a time", OVER_ONE, one, "x",
                f"{why}: memory and multiprocessors are used at the same time"),
        ]  # fmt: skip
    return rows


def _table(source: LoadResults) -> Table:
    body = []
    for load, results in source.results.items():
        rival = best_rival(results)
        cells = [results["streams"], results[rival], results[OURS]]
        shown = [f"{cell['sum']:.2f} ({cell['least of fair']:.2f})" for cell in cells]
        body.append((load.replace("+", ", "), shown[0], f"{rival}: {shown[1]}", shown[2]))
    header = ("models", "streams", "best rival", OURS)
    return Table(f"{FIGURE}, {source.name}: sum of speeds, alone being 1 (least over fair)", header, tuple(body))


def _picture(out: Path, shown: list[LoadResults]) -> Figure:
    panels = []
    for source in shown:
        loads = source.results.values()
        series = {
            "streams": [_sum(load, "streams") for load in loads],
            "best rival": [_sum(load, best_rival(load)) for load in loads],
            OURS: [_sum(load, OURS) for load in loads],
        }
        bars = Bars([load.replace("+", "\n") for load in source.results], series, COLOURS)
        heading = f"{source.title}; dashed: one at a time"
        panels.append(Panel([bars, ReferenceLine(1)], heading, Axis(size=6.5), Axis(label="sum of speeds")))
    title = "Models that all have endless work: how much is done in all"
    return pictures.picture(out, "side-by-side", title, panels, size=(12, 4.2 * len(shown) + 1.0))
