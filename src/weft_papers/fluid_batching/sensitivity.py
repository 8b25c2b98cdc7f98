"""Sensitivity: assumptions that the paper does not print, each varied on its own at the rows of Table II.

Varied are the bandwidth, the time of a scheduler decision, and the readings of the text on the NPU and the exit heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

from weft.reports.exhibits import Axis, Curve, Drawable, Panel, ReferenceLine, Shade, Texts
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick
from weft_papers.fluid_batching.lab import (
    COLOURS,
    DECISION_US,
    FLUID,
    LAZY,
    LAZY_SAME,
    OURS,
    PLAIN,
    SPOTS,
    BatchScheduler,
    Bench,
    Change,
    Outcomes,
    RunMeans,
    RunPoint,
    Spot,
)
from weft_papers.fluid_batching.table1_designs import MISPRINTED, PRINTED
from weft_papers.fluid_batching.table2_comparison import table_point
from weft_papers.layerweaver.lab import geomean

BANDWIDTHS = (80, 90, 95, 100, 105, 110, 120)
"""Percent of the calibrated one."""
DECISIONS_US = (0, 10, 25, 50)
"""Time that one decision of the policy takes."""
TOLERATED, TOLERATED_POINTS = 0.1, 3.0
"""Tolerances on the printed mean latency (relative) and violations (percentage points): half widths of the bands."""
WIDEST = 2.2
"""End of the x axis in the picture of the readings, in multiples of the printed value."""
QUANTITIES = (("mean_ms", "mean", "mean latency (ms)"), ("late", "late", "violations (%)"))
"""Field of RunMeans, its name in the keys of the published numbers, and the label."""


@dataclass(frozen=True)
class RowStudy:
    """The rows of Table II with one assumed number set to several values."""

    paper: Paper
    spots: Sequence[Spot]
    schedulers: Sequence[BatchScheduler]
    values: Sequence[int]
    samples: int
    """The number of samples of each seed."""
    vary: Callable[[RunPoint, int], RunPoint]
    """Sets the number of a point to a value."""
    outcomes: Outcomes

    def point(self, spot: Spot, scheduler: BatchScheduler, value: int) -> RunPoint:
        return self.vary(table_point(self.paper, spot, scheduler, self.samples), value)

    def at(self, spot: Spot, scheduler: BatchScheduler, value: int) -> RunMeans:
        return self.outcomes[self.point(spot, scheduler, value)]

    def over(self, one: BatchScheduler, other: BatchScheduler, quantity: str, spot: Spot, value: int) -> float:
        """A quantity (a field of RunMeans) under scheduler *one* divided by that under *other*."""
        divisor = getattr(self.at(spot, other, value), quantity)
        return float(getattr(self.at(spot, one, value), quantity) / max(1e-9, divisor))

    def measure(self, bench: Bench, tick: Tick | None) -> RowStudy:
        """Run all points; return the study with their outcomes."""
        points = [self.point(*combination) for combination in self._combinations()]
        return replace(self, outcomes=bench.measure(points, tick))

    def table(self, title: str, value_name: str) -> Table:
        """Table with a line per row of Table II, scheduler and value."""
        body = []
        for spot, scheduler, value in self._combinations():
            means = self.at(spot, scheduler, value)
            numbers = f"{means.mean_ms:.1f}", f"{means.late:.2f}", f"{means.p99_ms:.1f}"
            body.append((spot.name, scheduler.name, f"{value}", *numbers))
        header = ("network, board", "scheduler", value_name, "mean ms", "late %", "p99 ms")
        return Table(title, header, tuple(body))

    def _combinations(self) -> list[tuple[Spot, BatchScheduler, int]]:
        return list(product(self.spots, self.schedulers, self.values))


def bandwidth(
    paper: Paper,
    out: Path,
    bench: Bench,
    samples: int,
    tick: Tick | None = None,
    percents: Sequence[int] = BANDWIDTHS,
    spots: Sequence[Spot] = SPOTS,
) -> Exhibit:
    """Rerun Table II with other memory bandwidths, the only fitted number; *percents*: of the calibrated bandwidth."""
    plan = RowStudy(paper, spots, (PLAIN, FLUID, OURS), percents, samples, _at_bandwidth, {})
    study = plan.measure(bench, tick)
    title = "Bandwidth: Table II over the value fitted to each board (dashed: printed, with its tolerance)"
    picture = _picture(out, study, "sensitivity-bandwidth", title, "bandwidth (% of the calibrated)")
    rows = tuple(_bandwidth_row(study, spot) for spot in spots)
    return Exhibit(rows, (study.table("Bandwidth: the rows of Table II", "% of the calibrated"),), (picture,))


def _at_bandwidth(point: RunPoint, percent: int) -> RunPoint:
    """The point with the bandwidth of its device scaled to *percent* percent."""
    return replace(point, changes=(("bandwidth_gb_s", point.device.bandwidth_gb_s * percent / 100),))


def _bandwidth_row(study: RowStudy, spot: Spot) -> Row:
    """Row on Fluid Batching's violations at the lowest and the highest bandwidth tried."""
    low, high = study.values[0], study.values[-1]
    at_low, at_high = study.at(spot, FLUID, low), study.at(spot, FLUID, high)
    ratios = [study.over(OURS, FLUID, "late", spot, value) for value in study.values]
    calibrated_gb_s = study.point(spot, FLUID, 100).device.bandwidth_gb_s
    why = (
        f"not printed; mean {at_low.mean_ms:.0f} ms; with {high} % {at_high.late:.2f} % and {at_high.mean_ms:.0f} ms; "
        f"{calibrated_gb_s:g} GB/s is 100 %; violations of top-up over Fluid Batching's from {min(ratios):.2f} to "
        f"{max(ratios):.2f}"
    )
    quantity = f"violations of Fluid Batching with {low} % of the bandwidth, {spot.name}"
    return Row("bandwidth", quantity, None, at_low.late, "%", why)


def decisions(
    paper: Paper,
    out: Path,
    bench: Bench,
    samples: int,
    tick: Tick | None = None,
    costs_us: Sequence[int] = DECISIONS_US,
    spots: Sequence[Spot] = SPOTS,
) -> Exhibit:
    """Rerun Table II over the time of one scheduler decision: LazyBatching decides at every layer."""
    study = RowStudy(paper, spots, (LAZY, LAZY_SAME, FLUID), costs_us, samples, _at_cost, {}).measure(bench, tick)
    title = "Cost of a decision: Table II over the time of one scheduler decision (dashed: printed)"
    picture = _picture(out, study, "sensitivity-decisions", title, "microseconds for a decision")
    rows = tuple(_decision_row(study, lazy, cost_us) for lazy in (LAZY, LAZY_SAME) for cost_us in costs_us)
    return Exhibit(rows, (study.table("Cost of a decision: the rows of Table II", "us"),), (picture,))


def _at_cost(point: RunPoint, cost_us: int) -> RunPoint:
    """The point with *cost_us* microseconds for each scheduler decision."""
    return replace(point, changes=(("decision_us", float(cost_us)),))


def _decision_row(study: RowStudy, lazy: BatchScheduler, cost_us: int) -> Row:
    """Row with LazyBatching's mean latency over Fluid Batching's; *lazy*: LAZY (on its own NPU) or LAZY_SAME."""
    means, lates = (
        [study.over(lazy, FLUID, quantity, spot, cost_us) for spot in study.spots] for quantity in ("mean_ms", "late")
    )
    where = "each on its own NPU" if lazy is LAZY else "both on the fluid NPU"
    why = (
        f"the paper prints no cost, we use {DECISION_US:g} us; rows from {min(means):.2f} to {max(means):.2f}, "
        f"violations from {min(lates):.2f} to {max(lates):.2f} times"
    )
    quantity = f"mean latency of LazyBatching over Fluid Batching at {cost_us} us, {where}, geomean"
    return Row("decisions", quantity, None, geomean(means), "x", why)


def _picture(out: Path, study: RowStudy, name: str, title: str, label: str) -> Figure:
    """Draw mean latency and violations over the varied number, a column of panels for each row of Table II."""
    panels = []
    for field, printed, quantity in QUANTITIES:
        for spot in study.spots:
            curves = [
                Curve(
                    study.values, [getattr(study.at(spot, scheduler, value), field) for value in study.values],
                    scheduler.name, COLOURS[scheduler], "o", width=1.7,
                )
                for scheduler in study.schedulers
            ]  # fmt: skip
            marks = [*curves, *_printed_marks(study, spot, printed)]
            panels.append(Panel(marks, spot.name, Axis(label=label), Axis(label=quantity, low=0)))
    columns = len(study.spots)
    size = (3.2 * columns + 0.3, 6.2)
    return pictures.picture(out, name, title, panels, size=size, columns=columns, share_x=True)


def _printed_marks(study: RowStudy, spot: Spot, field: str) -> list[Drawable]:
    """Lines at the printed values of *field*, "mean" or "late", and a band of tolerance around Fluid Batching's."""
    marks: list[Drawable] = []
    for scheduler, key in ((FLUID, "fluid"), (LAZY, "lazy")):
        if scheduler in study.schedulers:
            value = study.paper[f"{key}_{field}_{spot.key}"].value
            marks.append(ReferenceLine(value, colour=COLOURS[scheduler]))
            if scheduler is FLUID:
                marks.append(_tolerance(value, field, upright=False))
    return marks


def _tolerance(printed: float, field: str, *, upright: bool) -> Shade:
    """The band of values around a printed one that count as equal; *upright*: the values are on the x axis."""
    margin = TOLERATED * printed if field == "mean" else TOLERATED_POINTS
    return Shade(max(0.0, printed - margin), printed + margin, COLOURS[FLUID], upright)


# Readings of the text


class Reading(NamedTuple):
    """A way to read the text where the paper is not explicit."""

    name: str
    changes: tuple[Change, ...] = ()
    head: str = "fc"
    as_printed: bool = False
    """Whether to run the design that Table I misprints for Inception-v3 on ZCU104."""

    def of(self, point: RunPoint) -> RunPoint | None:
        """The point under this reading; None if the reading does not affect it."""
        if self.as_printed:
            return replace(point, preset=PRINTED) if point.spot == MISPRINTED else None
        return replace(point, changes=self.changes, head=self.head)


READINGS = (
    Reading("as used"),
    Reading("heads with a convolution", head="conv"),
    Reading("P: a sample cut by a pass is fetched twice", (("p_reading", "refetch"),)),
    Reading("P: only whole samples share a pass", (("p_reading", "groups"),)),
    Reading("P: one input for all PEs", (("p_reading", "broadcast"),)),
    Reading("fill and drain within the traffic", (("edges", "within"),)),
    Reading("no fill, no drain", (("edges", "none"),)),
    Reading("layers without weights through memory", (("elementwise", "ddr"),)),
    Reading("design as printed", as_printed=True),
)


def readings(
    paper: Paper,
    out: Path,
    bench: Bench,
    samples: int,
    tick: Tick | None = None,
    shown: Sequence[Reading] = READINGS,
    spots: Sequence[Spot] = SPOTS,
) -> Exhibit:
    """Rerun Fluid Batching's rows of Table II under each way to read the text, with the calibrated bandwidth."""
    points = {
        (reading, spot): point
        for reading in shown
        for spot in spots
        if (point := reading.of(table_point(paper, spot, FLUID, samples)))
    }
    outcomes = bench.measure(points.values(), tick)
    means = {key: outcomes[point] for key, point in points.items()}
    rows = tuple(_reading_row(paper, reading, means) for reading in shown)
    body = tuple(
        (
            reading.name,
            spot.name,
            f"{result.mean_ms:.1f}",
            f"{result.late:.2f}",
            f"{result.p99_ms:.1f}",
            _printed_values(paper, spot),
        )
        for (reading, spot), result in means.items()
    )
    header = ("reading", "network, board", "mean ms", "late %", "p99 ms", "paper: mean ms / late %")
    table = Table("Readings: Fluid Batching at the rows of Table II", header, body)
    return Exhibit(rows, (table,), (_readings_picture(paper, out, shown, spots, means),))


def _printed_values(paper: Paper, spot: Spot) -> str:
    mean, late = (paper[f"fluid_{field}_{spot.key}"].value for field in ("mean", "late"))
    return f"{mean:g} / {late:g}"


Readings = dict[tuple[Reading, Spot], RunMeans]


def _reading_row(paper: Paper, reading: Reading, means: Readings) -> Row:
    """Row with Fluid Batching's mean latency over the printed one, and how many rows are within the tolerance."""
    by_spot = {spot: result for (key_reading, spot), result in means.items() if key_reading is reading}
    ratios = {spot: result.mean_ms / paper[f"fluid_mean_{spot.key}"].value for spot, result in by_spot.items()}
    differences = {spot: result.late - paper[f"fluid_late_{spot.key}"].value for spot, result in by_spot.items()}
    within = sum(abs(ratios[spot] - 1) <= TOLERATED and abs(differences[spot]) <= TOLERATED_POINTS for spot in by_spot)
    why = f"{within} of {len(by_spot)} within 10 % and 3 points; " + ", ".join(
        f"{spot.name} {result.mean_ms:.0f} ms {result.late:.1f} %" for spot, result in by_spot.items()
    )
    return Row(
        "readings", f"Fluid Batching's mean over the printed, {reading.name}", None, geomean(ratios.values()), "x", why
    )


def _readings_picture(
    paper: Paper, out: Path, shown: Sequence[Reading], spots: Sequence[Spot], means: Readings
) -> Figure:
    """Draw mean latency and violations of each reading as dots; values beyond the picture's end as labelled arrows."""
    panels = []
    y = Axis(names=[reading.name for reading in shown], low=len(shown) - 0.5, high=-0.5)
    for field, key, quantity in QUANTITIES:
        for spot in spots:
            printed = paper[f"fluid_{key}_{spot.key}"].value
            limit = WIDEST * printed
            values = {
                index: getattr(means[reading, spot], field)
                for index, reading in enumerate(shown)
                if (reading, spot) in means
            }
            beyond = {index: value for index, value in values.items() if value > limit}
            within = {index: value for index, value in values.items() if value <= limit}
            marks = [
                ReferenceLine(printed, colour=COLOURS[FLUID], upright=True),
                _tolerance(printed, key, upright=True),
                Curve([*within.values()], [*within], None, COLOURS[FLUID], "o", "", size=6),
                Curve([limit] * len(beyond), [*beyond], None, COLOURS[FLUID], ">", "", size=6),
                Texts(
                    [0.97 * limit] * len(beyond), [*beyond], [f"{value:.0f}" for value in beyond.values()],
                    align="right", offset=(0, -3),
                ),
            ]  # fmt: skip
            panels.append(Panel(marks, spot.name, Axis(label=quantity, low=0, high=1.08 * limit), y))
    title = "Readings: Fluid Batching at the rows of Table II (dashed: printed, with its tolerance)"
    layout = {"size": (13, 6.4), "columns": len(spots), "share_y": True}
    return pictures.picture(out, "sensitivity-readings", title, panels, **layout)
