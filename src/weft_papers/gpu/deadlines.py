"""Models with deadlines: five of our own, and the pairs of Orion (Strati et al., EuroSys 2024).

The five have deadlines of 2, 5 and 10 times their durations alone; the result is the share of missed deadlines, by
load. The pairs run at the loads of the paper, under Orion's rule on our segments and under ours.
"""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean

from weft.reports.exhibits import DASHED, Axis, Bars, Curve, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.gpu.lab import (
    ALONE,
    BARE,
    BESIDE_OF_ORION,
    COLOURS,
    FIRST_OF_ORION,
    FIVE,
    LOADS,
    ONE_FOR_ALL,
    ORION_RULES,
    OURS,
    WITHOUT,
    LoadResults,
    Records,
    RuleResults,
    deadlines,
    orion_pair,
    sources,
    sources_to_draw,
)

FIGURE = "five models"
HALF, NO_MORE = 0.5, 1.0
"""The goals: missed deadlines over the best rival's, as geometric mean, and at most."""
COUNTS = (0.02, 0.5)
"""A load counts if the best rival misses a share of the deadlines between these."""
SEEDS = (1,)  # fewer than recorded simulations have, to save time
SHOWN = (*ONE_FOR_ALL, *(f"{rule} {BARE}" for rule in WITHOUT))


def five_models(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    """Compare the deadlines that five models miss under every rule, over the load; *seconds*: simulated per run."""
    loads = [f"{load:g}" for load in LOADS]
    all_sources = sources("deadlines", loads, lambda load: deadlines(float(load), seconds, SEEDS), records, tick)
    rows = [row for source in all_sources for row in _rows(source)]
    return Exhibit(
        tuple(rows), tuple(_table(source) for source in all_sources), (_picture(out, sources_to_draw(all_sources)),)
    )


def _missed_share(results: RuleResults, rule: str) -> float:
    return float(results[rule]["missed"])


def _best_rival(results: RuleResults) -> str:
    """The rule other than ours that misses the fewest deadlines."""
    return min((rule for rule in results if rule != OURS), key=lambda rule: _missed_share(results, rule))


def _rows(source: LoadResults) -> list[Row]:
    """Rows with our missed deadlines over the best rival's; none if no load counts."""
    rivals = {load: _missed_share(results, _best_rival(results)) for load, results in source.results.items()}
    over = {load: _missed_share(source.results[load], OURS) / rival for load, rival in rivals.items() if rival}
    # A ratio of 0 would make the geometric mean 0, so the least is 0.001.
    counted = [max(1e-3, missed) for load, missed in over.items() if COUNTS[0] <= rivals[load] <= COUNTS[1]]
    if not counted:
        return []
    worst_load = max(over, key=over.__getitem__)
    return [
        Row(f"{FIGURE}, {source.name}", "missed deadlines over the best rival's, geomean", HALF,
            geometric_mean(counted), "x", f"loads where the rival misses 2 to 50 %: {len(counted)} of {len(rivals)}; "
            "the missed ones are mostly requests of one model that arrive together, due in twice its length"),
        Row(f"{FIGURE}, {source.name}", "the same, at most", NO_MORE, over[worst_load], "x",
            f"at a load of {worst_load}, where {_best_rival(source.results[worst_load])} misses "
            f"{100 * rivals[worst_load]:.1f} %"),
    ]  # fmt: skip


def _table(source: LoadResults) -> Table:
    """Table of missed deadlines: a line per load, a column per rule."""
    rules = list(next(iter(source.results.values())))
    body = [
        (
            load,
            *(f"{100 * _missed_share(results, rule):.1f} %" for rule in rules),
            f"{100 * results[OURS]['worst']:.1f} %",
        )
        for load, results in source.results.items()
    ]
    due = ", ".join(f"{model} {times}" for model, times in FIVE.items())
    title = f"{FIGURE}, {source.name}: missed deadlines by load of one at a time; due in durations alone: {due}"
    return Table(title, ("load", *rules, f"worst model, {OURS}"), tuple(body))


def _picture(out: Path, shown: list[LoadResults]) -> Figure:
    """Draw missed deadlines over the load, a panel per source and a curve per rule that the source has."""
    panels = []
    for source in shown:
        loads = [float(load) for load in source.results]
        curves = [
            Curve(
                loads, [100 * _missed_share(results, rule) for results in source.results.values()], rule,
                COLOURS[rule.split()[0]], mark, DASHED if BARE in rule else "-", width=2 if rule == OURS else 1,
            )
            for mark, rule in zip(pictures.MARKS, SHOWN, strict=False)
            if all(rule in results for results in source.results.values())
        ]  # fmt: skip
        x, y = Axis(label="load, of what one at a time can do"), Axis(label="missed deadlines, %", low=0)
        panels.append(Panel(curves, source.title, x, y, legend=True))
    title, size = "Five models with deadlines: how many are missed", (5.5 * len(shown) + 1.5, 4.2)
    return pictures.picture(out, "five-models", title, panels, size=size, columns=len(shown))


ORION = "Orion's pairs"
DONE = 0.99
"""Orion is compared at its best budget: the one with the lowest p99 among those that do at least this fraction of the
largest best-effort work of any budget. With a lower fraction, a budget that starves the best-effort model could win."""


def against_orion(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    """Compare our rule with Orion's on the paper's pairs of an urgent and a best-effort model."""
    pairs = [f"{first} beside {other}" for first in FIRST_OF_ORION for other in BESIDE_OF_ORION]

    def simulate(pair: str) -> RuleResults:
        first, other = pair.split(" beside ")
        return orion_pair(first, other, seconds)

    all_sources = sources("orion", pairs, simulate, records, tick)
    rows = [row for source in all_sources for row in _orion_rows(source)]
    tables = tuple(_orion_table(source) for source in all_sources)
    return Exhibit(tuple(rows), tables, (_orion_picture(out, sources_to_draw(all_sources)),))


def best_orion(results: RuleResults) -> str:
    """The name of Orion's rule with its best budget; see DONE."""
    most_work = max(float(results[rule]["beside"]) for rule in ORION_RULES)
    eligible = [rule for rule in ORION_RULES if results[rule]["beside"] >= DONE * most_work]
    return min(eligible, key=lambda rule: float(results[rule]["p99"]))


def _orion_rows(source: LoadResults) -> list[Row]:
    """Rows with our p99 and our best-effort work over those under Orion's rule, each for the worst pair."""
    loads = source.results
    tails = {pair: results[OURS]["p99"] / results[best_orion(results)]["p99"] for pair, results in loads.items()}
    done = {pair: results[OURS]["beside"] / results[best_orion(results)]["beside"] for pair, results in loads.items()}
    slowest, poorest = max(tails, key=tails.__getitem__), min(done, key=done.__getitem__)
    why = "Orion's rule on our segments of .25 ms, not on its own kernels; the best of three budgets for each pair"
    figure = f"{ORION}, {source.name}"
    return [
        Row(figure, "p99 of the urgent model over that under Orion's rule, at most", 1.0, tails[slowest], "x",
            f"{slowest}; {why}"),
        Row(figure, "best effort done over that under Orion's rule, at least", 1.0, done[poorest], "x",
            f"{poorest}; both complete all requests that can end within the run"),
    ]  # fmt: skip


def _orion_table(source: LoadResults) -> Table:
    """Table of all pairs: p99 of the urgent model and share of the best-effort work done, under every rule."""
    rules = (*ORION_RULES, "reef", OURS)
    body = [
        (
            pair,
            f"{results[ALONE]['p99']:.2f}",
            *(f"{results[rule]['p99']:.2f}, {results[rule]['beside']:.2f}" for rule in rules),
        )
        for pair, results in source.results.items()
    ]
    title = f"{ORION}, {source.name}: p99 of the urgent model over its duration alone, part of the best effort done"
    return Table(title, ("urgent beside best effort", ALONE, *rules), tuple(body))


def _orion_picture(out: Path, shown: list[LoadResults]) -> Figure:
    """Draw the urgent model's p99 alone, under Orion's rule and under ours, for every pair."""
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
        panels.append(Panel([bars], source.title, Axis(size=7), Axis(label="p99 of the urgent one over its duration")))
    title = "Orion's inference pairs at equal load fractions"
    return pictures.picture(out, "orions-pairs", title, panels, size=(11, 4.0 * len(shown) + 1.0))
