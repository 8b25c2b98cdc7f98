"""Table II: LazyBatching and Fluid Batching at four loads, the same NPU without preemption, and our policy.

LazyBatching runs on R-batching hardware of its own search, as the paper's baselines do. A second variant runs on the
paper's NPU, so that only the scheduler differs from Fluid Batching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel, Strokes
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick, beside
from weft_papers.fluid_batching.lab import (
    BALANCED,
    COLOURS,
    DECISION_US,
    EXITS,
    FLUID,
    LAZY,
    LAZY_SAME,
    OURS,
    PLAIN,
    SEEDS,
    SERIAL,
    SPOTS,
    BatchScheduler,
    Bench,
    Outcomes,
    RunMeans,
    RunPoint,
    Spot,
    npu,
    tile,
)
from weft_papers.layerweaver.lab import geomean

FIGURE = "Table II"
SHOWN = (SERIAL, LAZY, LAZY_SAME, PLAIN, FLUID, OURS, BALANCED)
LISTED = (LAZY, FLUID, PLAIN, OURS, BALANCED)
"""The schedulers with rows of their own; the others are in the detailed table."""
BARS = SHOWN[1:]
PRINTED = {LAZY: "lazy", FLUID: "fluid"}
"""The schedulers whose numbers the paper prints -> their name in the keys of the published numbers."""


@dataclass(frozen=True)
class SchedulerComparison:
    """The outcomes of every row of Table II under every scheduler."""

    paper: Paper
    samples: int
    """The number of samples of each seed."""
    spots: Sequence[Spot]
    outcomes: Outcomes

    def point(self, spot: Spot, scheduler: BatchScheduler) -> RunPoint:
        return table_point(self.paper, spot, scheduler, self.samples)

    def at(self, spot: Spot, scheduler: BatchScheduler) -> RunMeans:
        return self.outcomes[self.point(spot, scheduler)]

    def over(self, one: BatchScheduler, other: BatchScheduler, field: str) -> list[float]:
        """A quantity (a field of RunMeans) under scheduler *one* divided by that under *other*, row by row."""
        return [getattr(self.at(spot, one), field) / getattr(self.at(spot, other), field) for spot in self.spots]

    def printed(self, spot: Spot, scheduler: BatchScheduler, field: str) -> float:
        """The printed "mean" (ms) or "late" (%) of a scheduler in PRINTED."""
        return self.paper[f"{PRINTED[scheduler]}_{field}_{spot.key}"].value


def table_point(paper: Paper, spot: Spot, scheduler: BatchScheduler, samples: int) -> RunPoint:
    """The run of a row of Table II: its printed arrival rate and deadline under *scheduler*."""
    return RunPoint(spot, scheduler, paper[f"rate_{spot.key}"].value, paper[f"slo_{spot.key}"].value, samples)


def compare(
    paper: Paper, bench: Bench, samples: int, tick: Tick | None = None, spots: Sequence[Spot] = SPOTS
) -> SchedulerComparison:
    """Run every row of Table II under every scheduler shown; *samples*: number for each seed."""
    points = [table_point(paper, spot, scheduler, samples) for spot in spots for scheduler in SHOWN]
    return SchedulerComparison(paper, samples, spots, bench.measure(points, tick))


def table_2(out: Path, comparison: SchedulerComparison) -> Exhibit:
    """Reproduce Table II, the abstract's claims on it, and the comparison with our policy."""
    rows = [row for spot in comparison.spots for scheduler in LISTED for row in _rows(comparison, spot, scheduler)]
    rows += [*_gain_rows(comparison), *_headlines(comparison), *_ours_rows(comparison), _calls_row(comparison)]
    return Exhibit(tuple(rows), (_table(comparison),), (_picture(out, comparison),))


def _rows(comparison: SchedulerComparison, spot: Spot, scheduler: BatchScheduler) -> list[Row]:
    """Rows with mean latency and violations; for schedulers that the paper does not print also with the p99."""
    outcome = comparison.at(spot, scheduler)
    values = {"mean": (outcome.mean_ms, " ms"), "late": (outcome.late, "%")}
    if scheduler not in PRINTED:
        values["p99"] = (outcome.p99_ms, " ms")
    names = {"mean": "mean latency", "late": "violations", "p99": "99th percentile"}
    rows = []
    for field, (ours, unit) in values.items():
        printed = comparison.printed(spot, scheduler, field) if scheduler in PRINTED else None
        why = _why(comparison, spot, scheduler, field, ours, printed)
        rows.append(Row(FIGURE, f"{names[field]} of {scheduler.name}, {spot.name}", printed, ours, unit, why))
    return rows


def _why(
    comparison: SchedulerComparison,
    spot: Spot,
    scheduler: BatchScheduler,
    field: str,
    ours: float,
    printed: float | None,
) -> str:
    """Explain a number of Table II: load, hardware, and the difference from the printed number if there is one."""
    device = npu(spot, scheduler.hardware)
    point, outcome = comparison.point(spot, scheduler), comparison.at(spot, scheduler)
    load = f"{point.rate:g}/s, {point.deadline_ms:g} ms"
    setting = f"{load}, on {tile(device)} at {device.bandwidth_gb_s:g} GB/s"
    if printed is None:
        what = "what the hardware alone gives" if scheduler is PLAIN else "our policy"
        return f"not in the paper: {what}; {setting}"
    if field == "mean":
        reason = f"{setting}; p99 {outcome.p99_ms:.0f} ms"
    else:
        reason = f"{setting}; {outcome.apart:.1f} points between seeds"
    if scheduler is LAZY:
        reason += f"; R-batching NPU of its own search, {DECISION_US:g} us for each decision"
    if field == "late":
        return f"{ours - printed:+.2f} points: {reason}"
    return beside(ours, printed, reason)


def _gain_rows(comparison: SchedulerComparison) -> list[Row]:
    """Rows with LazyBatching's latency and violations over Fluid Batching's, as geometric means over Table II."""
    printed = {
        field: [_printed_gain(comparison, spot, field) for spot in comparison.spots] for field in ("mean", "late")
    }
    rows = []
    for scheduler, hardware in ((LAZY, "each on its own NPU"), (LAZY_SAME, "both on the fluid NPU")):
        for field, key, name in (("mean_ms", "mean", "mean latency"), ("late", "late", "violations")):
            gains = comparison.over(scheduler, FLUID, field)
            rows.append(
                Row(
                    FIGURE, f"{name} of LazyBatching over Fluid Batching, {hardware}, geomean",
                    None, geomean(gains), "x",
                    f"{_values_text(gains)} at the {len(gains)} rows; the printed rows give {geomean(printed[key]):.2f}"
                    f": {_values_text(printed[key])}",
                )
            )  # fmt: skip
    return [*rows, _resnet_row(comparison)]


def _resnet_row(comparison: SchedulerComparison) -> Row:
    """Row with the gain over LazyBatching on ResNet-50, the one mean that the text prints."""
    ratios = [
        ratio
        for spot, ratio in zip(comparison.spots, comparison.over(LAZY, FLUID, "mean_ms"), strict=True)
        if spot.model == "resnet50"
    ]
    printed = comparison.paper["lazy_over_fluid_resnet50"].value
    why = beside(geomean(ratios), printed, f"{_values_text(ratios)} on the boards, each scheduler on its own NPU")
    quantity = "mean latency of LazyBatching over Fluid Batching, ResNet-50, geomean"
    return Row(FIGURE, quantity, printed, geomean(ratios), "x", why)


def _printed_gain(comparison: SchedulerComparison, spot: Spot, field: str) -> float:
    """LazyBatching's printed "mean" or "late" over Fluid Batching's."""
    return comparison.printed(spot, LAZY, field) / comparison.printed(spot, FLUID, field)


def _headlines(comparison: SchedulerComparison) -> list[Row]:
    """Rows with the abstract's two numbers, which do not follow from the table."""
    rows = []
    for key, field, printed_field, name in (
        ("latency_gain", "mean_ms", "mean", "mean latency"),
        ("violations_gain", "late", "late", "violations"),
    ):
        table_gain = geomean([_printed_gain(comparison, spot, printed_field) for spot in comparison.spots])
        ours = geomean(comparison.over(LAZY, FLUID, field))
        rows.append(
            Row(
                "abstract", f"{name}, improvement over the state of the art", comparison.paper[key].value, ours, "x",
                f"ours is the geomean over LazyBatching at Table II's rows; the paper's own rows give {table_gain:.2f}x"
                ", so its number does not follow from the table, and it does not say what it is an average of",
            )
        )  # fmt: skip
    return rows


def _ours_rows(comparison: SchedulerComparison) -> list[Row]:
    """Rows with the other policies on the fluid NPU over Fluid Batching, under the same arrivals."""
    rows = []
    for scheduler, field, quantity in (
        (OURS, "late", "violations"),
        (OURS, "mean_ms", "mean latency"),
        (OURS, "p99_ms", "99th percentile"),
        (BALANCED, "late", "violations"),
        (BALANCED, "mean_ms", "mean latency"),
        (BALANCED, "p99_ms", "99th percentile"),
        (PLAIN, "late", "violations"),
        (PLAIN, "mean_ms", "mean latency"),
    ):
        ratios = comparison.over(scheduler, FLUID, field)
        rows.append(
            Row(
                FIGURE, f"{quantity} of {scheduler.name} over Fluid Batching's, worst row", None, max(ratios), "x",
                f"not in the paper; {_values_text(ratios)} at the {len(ratios)} rows, seeds {SEEDS[0]} to {SEEDS[-1]}",
            )
        )  # fmt: skip
    return rows


def _calls_row(comparison: SchedulerComparison) -> Row:
    """Row with the scheduler calls of LazyBatching over those of Fluid Batching."""
    spot = comparison.spots[0]
    lazy, fluid = (comparison.at(spot, scheduler).calls for scheduler in (LAZY, FLUID))
    return Row(
        "III-B", f"scheduler calls of LazyBatching over Fluid Batching's, {spot.name}",
        comparison.paper["fewer_calls"].value, lazy / fluid, "x",
        f"counted per sample at Table II's load: {lazy:.1f} and {fluid:.2f}; each start and each exit is a call, and "
        f"each product of the network and its heads; 50 layers by {EXITS} exits would be {50 / EXITS:.2f}",
    )  # fmt: skip


def _values_text(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def _table(comparison: SchedulerComparison) -> Table:
    """Table of all outcomes: a line per row of Table II and scheduler."""
    body = []
    for spot in comparison.spots:
        for scheduler in SHOWN:
            point, outcome = comparison.point(spot, scheduler), comparison.at(spot, scheduler)
            printed = (
                f"{comparison.printed(spot, scheduler, 'mean'):g} / {comparison.printed(spot, scheduler, 'late'):g}"
                if scheduler in PRINTED
                else "not printed"
            )
            body.append(
                (
                    spot.name, f"{point.rate:g}", f"{point.deadline_ms:g}", scheduler.name, f"{outcome.mean_ms:.1f}",
                    f"{outcome.late:.2f}", f"{outcome.apart:.2f}", f"{outcome.p99_ms:.1f}", f"{outcome.busy:.1f}",
                    f"{outcome.efficiency:.1f}", f"{outcome.calls:.2f}", printed,
                )
            )  # fmt: skip
    header = (
        "network, board", "samples/s", "SLO ms", "scheduler", "mean ms", "late %", "points between seeds", "p99 ms",
        "busy %", "of peak while busy %", "calls per sample", "paper: mean ms / late %",
    )  # fmt: skip
    title = (
        f"{FIGURE}: {len(SEEDS)} x {comparison.samples} samples a row; where busy is 100 %, latencies grow with the run"
    )
    return Table(title, header, tuple(body))


def _picture(out: Path, comparison: SchedulerComparison) -> Figure:
    """Draw latencies and violations as bars per scheduler, with the printed values as strokes."""
    panels = []
    for field, printed, label in (
        ("mean_ms", "mean", "mean latency (ms)"),
        ("late", "late", "violations (%)"),
        ("p99_ms", "", "p99 (ms)"),
    ):
        series = {
            scheduler.name: [getattr(comparison.at(spot, scheduler), field) for spot in comparison.spots]
            for scheduler in BARS
        }
        labels = [_point_label(comparison, spot) for spot in comparison.spots]
        bars = Bars(labels, series, {scheduler.name: COLOURS[scheduler] for scheduler in BARS})
        strokes = [
            Strokes(
                bars.places(scheduler.name),
                [comparison.printed(spot, scheduler, printed) for spot in comparison.spots],
                bars.width,
            )
            for scheduler in PRINTED
            if printed
        ]
        panels.append(Panel([bars, *strokes], y=Axis(label=label)))
    title = f"{FIGURE}: bars ours, black lines as printed"
    return pictures.picture(out, "table2-comparison", title, panels, size=(12.5, 7.6), share_x=True)


def _point_label(comparison: SchedulerComparison, spot: Spot) -> str:
    point = comparison.point(spot, FLUID)
    return f"{spot.name}\n{point.rate:g}/s, {point.deadline_ms:g} ms"
