"""Five models with deadlines of 2, 5 and 10 times their lengths: how many are missed, by load."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from weft.reports.exhibits import DASHED, Axis, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.gpu.lab import BARE, FIVE, LOADS, ONE_FOR_ALL, OURS, WITHOUT, RuleResults, deadlines
from weft_papers.gpu.sources import COLOURS, LoadResults, Records, drawn, sources

FIGURE = "five models"
HALF, NO_MORE = 0.5, 1.0
COUNTS = (0.02, 0.5)
"""Loads count at which the best rival misses a part within."""
SEEDS = (1,)
SHOWN = (*ONE_FOR_ALL, *(f"{rule} {BARE}" for rule in WITHOUT))


def five_models(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    loads = [f"{load:g}" for load in LOADS]
    every = sources("deadlines", loads, lambda load: deadlines(float(load), seconds, SEEDS), records, tick)
    rows = [row for source in every for row in _rows(source)]
    return Exhibit(tuple(rows), tuple(_table(source) for source in every), (_picture(out, drawn(every)),))


def _missed(results: RuleResults, rule: str) -> float:
    return float(results[rule]["missed"])


def _best(results: RuleResults) -> str:
    return min((rule for rule in results if rule != OURS), key=lambda rule: _missed(results, rule))


def _rows(source: LoadResults) -> list[Row]:
    rivals = {load: _missed(results, _best(results)) for load, results in source.results.items()}
    over = {load: _missed(source.results[load], OURS) / rival for load, rival in rivals.items() if rival}
    counted = [max(1e-3, missed) for load, missed in over.items() if COUNTS[0] <= rivals[load] <= COUNTS[1]]
    if not counted:
        return []
    most = max(over, key=over.__getitem__)
    return [
        Row(f"{FIGURE}, {source.name}", "missed deadlines over the best rival's, geomean", HALF,
            geometric_mean(counted), "x", f"loads at which that misses 2 to 50 %: {len(counted)} of {len(rivals)}; "
            "what is left are mostly requests of one model that come together, due in twice its length"),
        Row(f"{FIGURE}, {source.name}", "the same, at most", NO_MORE, over[most], "x",
            f"at a load of {most}, where {_best(source.results[most])} misses {100 * rivals[most]:.1f} %"),
    ]  # fmt: skip


def _table(source: LoadResults) -> Table:
    rules = list(next(iter(source.results.values())))
    body = [
        (load, *(f"{100 * _missed(results, rule):.1f} %" for rule in rules), f"{100 * results[OURS]['worst']:.1f} %")
        for load, results in source.results.items()
    ]
    due = ", ".join(f"{model} {times}" for model, times in FIVE.items())
    title = f"{FIGURE}, {source.name}: missed deadlines by load of one at a time; due in lengths: {due}"
    return Table(title, ("load", *rules, f"worst model, {OURS}"), tuple(body))


def _picture(out: Path, shown: list[LoadResults]) -> Figure:
    panels = []
    for source in shown:
        loads = [float(load) for load in source.results]
        curves = [
            Curve(
                loads, [100 * _missed(results, rule) for results in source.results.values()], rule,
                COLOURS[rule.split()[0]], mark, DASHED if BARE in rule else "-", width=2 if rule == OURS else 1,
            )
            for mark, rule in zip(pictures.MARKS, SHOWN, strict=False)
            if all(rule in results for results in source.results.values())
        ]  # fmt: skip
        x, y = Axis(label="load, of what one at a time can do"), Axis(label="missed deadlines, %", low=0)
        panels.append(Panel(curves, source.title, x, y, legend=True))
    title, size = "Five models with deadlines: how many are missed", (5.5 * len(shown) + 1.5, 4.2)
    return pictures.picture(out, "five-models", title, panels, size=size, columns=len(shown))
