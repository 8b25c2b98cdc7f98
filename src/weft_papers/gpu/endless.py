"""Models with endless work on one GPU: several of them side by side, and one beside an urgent model.

Side by side, the results are the total work done and the smallest share of a model. Beside an urgent model, they are
its p99 over that on an idle GPU and the speed of the other model.
"""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean, mean

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Row, Table, Tick
from weft_papers.gpu.lab import (
    ALONE,
    BESIDE,
    COLOURS,
    FIRST,
    MEASURED,
    OURS,
    TOGETHER,
    URGENT,
    URGENT_LOADS,
    LoadResults,
    Records,
    Rows,
    RuleResults,
    saturated,
    sources,
    sources_to_draw,
    urgent,
)

FIGURE = "side by side"
FAIR = 0.6
"""A rival is fair if it gives every model at least this fraction of its fair share."""
KEPT, OVER_STREAMS, OVER_ONE, LEAST = 0.98, 1.08, 1.22, 0.8
"""The goals, printed beside the results: our work over that of the best fair rival, of free streams, and of one model
at a time; and the smallest share of a model over its fair share."""


def side_by_side(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    """Compare the work done by models that all have endless work, under every rule; *seconds*: simulated per run."""
    loads = ["+".join(models) for models in TOGETHER]
    all_sources = sources("saturated", loads, lambda load: saturated(load.split("+"), seconds), records, tick)
    rows = [row for source in all_sources for row in _rows(source)]
    return Exhibit(
        tuple(rows), tuple(_table(source) for source in all_sources), (_picture(out, sources_to_draw(all_sources)),)
    )


def best_rival(results: RuleResults) -> str:
    """The rule with the most work among the fair ones; among all if none is fair."""
    rivals = [rule for rule in results if rule != OURS]
    fair = [rule for rule in rivals if results[rule]["least of fair"] >= FAIR]
    return max(fair or rivals, key=lambda rule: float(results[rule]["sum"]))


def _sum(results: RuleResults, rule: str) -> float:
    return float(results[rule]["sum"])


def _rows(source: LoadResults) -> list[Row]:
    """Rows with our work over the rivals', and the smallest share that a model gets; goals in the paper's place."""
    loads = source.results
    over_best = {load: _sum(results, OURS) / _sum(results, best_rival(results)) for load, results in loads.items()}
    shares = {load: float(results[OURS]["least of fair"]) for load, results in loads.items()}
    worst, poorest = min(over_best, key=over_best.__getitem__), min(shares, key=shares.__getitem__)
    filling = [results for load, results in loads.items() if load in ["+".join(pair) for pair in TOGETHER[:FIRST]]]
    rows = [
        Row(f"{FIGURE}, {source.name}", "work done over the best fair rival's, at least", KEPT, over_best[worst], "x",
            f"{worst}; {best_rival(loads[worst])} does most of the rivals there. A fixed cut is chosen for each pair "
            f"afterwards; {OURS} chooses by what was measured of each model alone"),
        Row(f"{FIGURE}, {source.name}", "least share of any model, over the fair one", LEAST, shares[poorest], "x",
            f"{poorest}; a model that falls below .9 of the fair share counts for more until it has that"),
    ]  # fmt: skip
    if filling:
        over_streams = geometric_mean(_sum(results, OURS) / _sum(results, "streams") for results in filling)
        # One model at a time has a sum of speeds of 1 by definition; a measurement may have its own value.
        over_one = geometric_mean(
            _sum(results, OURS) / (_sum(results, "fifo") if "fifo" in results else 1.0) for results in filling
        )
        why = f"geomean of {len(filling)} pairs in which one fills the GPU"
        rows += [
            Row(f"{FIGURE}, {source.name}", "work done over free streams'", OVER_STREAMS, over_streams, "x",
                f"{why}: on streams the one with longer kernels starves the other"),
            Row(f"{FIGURE}, {source.name}", "work done over one at a time", OVER_ONE, over_one, "x",
                f"{why}: memory and multiprocessors are used at the same time"),
        ]  # fmt: skip
    return rows


def _table(source: LoadResults) -> Table:
    """Table of the sums of speeds on free streams, under the best rival and under our rule."""
    body = []
    for load, results in source.results.items():
        rival = best_rival(results)
        cells = [results["streams"], results[rival], results[OURS]]
        shown = [f"{cell['sum']:.2f} ({cell['least of fair']:.2f})" for cell in cells]
        body.append((load.replace("+", ", "), shown[0], f"{rival}: {shown[1]}", shown[2]))
    header = ("models", "streams", "best rival", OURS)
    return Table(f"{FIGURE}, {source.name}: sum of speeds, alone being 1 (least over fair)", header, tuple(body))


def _picture(out: Path, shown: list[LoadResults]) -> Figure:
    """Draw the sum of speeds on free streams, under the best rival and under our rule, for every set of models."""
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


URGENT_BESIDE = "urgent beside heavy"
TAIL, LEFT = 1.15, 0.97
"""The goals: p99 over that on an idle GPU; the other model's speed over that under the best rival with this p99."""
WITHIN = 15.0
"""The goal for the error of the simulated p99, in percent."""
SHOWN = ("priority", "priority-streams", "orion 100 us", "orion 400 us", "split 0 swapped", "reef", OURS)


def urgent_beside(out: Path, seconds: float, records: Records, tick: Tick) -> Exhibit:
    """Compare the p99 of an urgent model and the speed of the endless one beside it under every rule."""
    loads = [f"{urgent_model} beside {heavy}/{load:g}" for load in URGENT_LOADS[1:2] for urgent_model, heavy in BESIDE]

    def simulate(load: str) -> RuleResults:
        models, fraction = load.split("/")
        first, other = models.split(" beside ")
        return urgent(first, other, float(fraction), seconds)

    all_sources = sources("urgent", loads, simulate, records, tick)
    rows = [row for source in all_sources for row in _urgent_rows(source)] + _errors(records.measured)
    tables = tuple(_urgent_table(source) for source in all_sources)
    return Exhibit(tuple(rows), tables, (_urgent_picture(out, sources_to_draw(all_sources)),))


# What delays an urgent request: on the simulated GPU, and on a real one, where a second segment may be queued.
SEGMENT = "What is lost is the segment of the other that runs when a request comes: it is not taken back"
TWO = "What is lost are up to two segments of the other, the one that runs and the one behind it"


def _tail(results: RuleResults, rule: str) -> float:
    """The urgent model's p99 under *rule* over its p99 on an idle GPU."""
    return float(results[rule]["p99"]) / float(results[ALONE]["p99"])


def _relative_rate(load: str, results: RuleResults) -> float:
    """The endless model's speed under our rule over that under the best rival that keeps the p99 within TAIL.

    If no rival keeps it: over the share of the GPU that the urgent model's load leaves. *load*: "pair/load".
    """
    rival_rates = [
        float(results[rule]["beside"])
        for rule in results
        if rule in URGENT and rule != OURS and _tail(results, rule) <= TAIL
    ]
    return float(results[OURS]["beside"]) / max(rival_rates, default=1 - float(load.split("/")[1]))


def _urgent_rows(source: LoadResults) -> list[Row]:
    """Rows with our largest p99 and the smallest speed of the other model under our rule, beside the goals."""
    tails = {load: _tail(results, OURS) for load, results in source.results.items()}
    speeds = {load: _relative_rate(load, results) for load, results in source.results.items()}
    slowest, poorest = max(tails, key=tails.__getitem__), min(speeds, key=speeds.__getitem__)
    best_tail = min(
        _tail(source.results[slowest], rule) for rule in source.results[slowest] if rule in URGENT and rule != OURS
    )
    lost = TWO if source.name == MEASURED else SEGMENT
    return [
        Row(f"{URGENT_BESIDE}, {source.name}", "p99 over that on an idle GPU, at most", TAIL, tails[slowest], "x",
            f"{slowest}; the best rival {best_tail:.2f}. {lost}"),
        Row(f"{URGENT_BESIDE}, {source.name}", "rate of the other, over the best that keeps that p99, at least", LEFT,
            speeds[poorest], "x", f"{poorest}; where no rival keeps it, over 1 minus the urgent one's load, which few "
            "requests miss or pass by chance"),
    ]  # fmt: skip


def _errors(measured: Rows) -> list[Row]:
    """Row with the mean relative error of the simulated p99 of measured loads; none if nothing was measured.

    A simulation of the measured row X is recorded as "simulated X".
    """
    errors = {
        f"{name}, {rule}": abs(float(measured[f"simulated {name}"][rule]["p99"]) / float(results["p99"]) - 1)
        for name, row in measured.items()
        if f"simulated {name}" in measured and name.startswith("urgent/")
        for rule, results in row.items()
        if rule in measured[f"simulated {name}"]
    }
    if not errors:
        return []
    ours = [error for name, error in errors.items() if name.endswith(OURS)]
    worst = max(errors, key=errors.__getitem__)
    why = f"mean over {len(errors)} loads and rules; {OURS} alone {100 * mean(ours):.0f} %, worst {worst}"
    return [Row(f"{URGENT_BESIDE}, {MEASURED}", "simulated p99, off by", WITHIN, 100 * mean(errors.values()), "%", why)]


def _urgent_table(source: LoadResults) -> Table:
    """Table of all loads: the urgent model's p99 over that alone, and the other model's speed, under each rule."""
    body = []
    for load, results in source.results.items():
        cells = [
            f"{_tail(results, rule):.2f}, {results[rule]['beside']:.2f}" if rule in results else "" for rule in SHOWN
        ]
        body.append((load, f"{results[ALONE]['p99']:.2f}", *cells))
    alone = "p99 over that alone (that alone: over the model's duration)"
    title = f"{URGENT_BESIDE}, {source.name}: {alone}, speed of the other"
    return Table(title, ("urgent beside other/load", ALONE, *SHOWN), tuple(body))


def _urgent_picture(out: Path, results: list[LoadResults]) -> Figure:
    """Draw the urgent model's p99 over that on an idle GPU, for every pair and under four rules."""
    shown = ("priority", "orion 100 us", "orion 400 us", OURS)
    colours = {rule: COLOURS[rule.split()[0]] for rule in shown} | {"orion 400 us": "#f0b488"}
    panels = []
    for source in results:
        labels = [load.replace(" beside ", "\nbeside ").replace("/", "\nload ") for load in source.results]
        available = [rule for rule in shown if all(rule in results for results in source.results.values())]
        series = {rule: [_tail(results, rule) for results in source.results.values()] for rule in available}
        heading = f"{source.title}; dashed: the goal; bars at the upper edge are cut off"
        y = Axis(label="p99 over an idle GPU", low=0, high=3)
        panels.append(Panel([Bars(labels, series, colours), ReferenceLine(TAIL)], heading, Axis(size=7), y))
    title = "An urgent model beside one that never stops"
    return pictures.picture(out, "urgent-beside-heavy", title, panels, size=(11, 4.0 * len(results) + 1.0))
