"""Fig. 7 to 9: throughput, latency and utilisation over the arrival rate, and violations over the deadline.

The paper does not define its utilisation. At a load that every scheduler sustains, all do the same work in the same
time, so its utilisation can only be the fraction of the peak that the NPU reaches while it computes. That is drawn;
the rows have the other readings. Beyond the load that a scheduler sustains, its queue and its latencies grow for as
long as the run lasts. In Fig. 9 the timeouts of adaptive batching vary with the deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.devices import TiledNpu, load_platform
from weft.reports.exhibits import INK, Axis, Curve, Drawable, Panel, ReferenceLine
from weft.simulation.sustain import Question, Sustained, sustain
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick
from weft_papers.fluid_batching.lab import (
    BALANCED,
    COLOURS,
    DASHES,
    DRAWN,
    FC_ADAPTIVE,
    FLUID,
    LAZY,
    OURS,
    PLAIN,
    R_ADAPTIVE,
    SERIAL,
    SPOTS,
    BatchScheduler,
    Bench,
    Outcomes,
    RunMeans,
    RunPoint,
    Spot,
    macs_per_sample,
    question,
)
from weft_papers.layerweaver.lab import mean

OVERLOAD = 2.0
"""The arrival rate of the overload runs, in multiples of the highest rate drawn: the queue is never empty."""
LISTED = (SERIAL, FC_ADAPTIVE[0], R_ADAPTIVE[0], LAZY, PLAIN, FLUID, OURS)
"""The schedulers with rows of their own; longer timeouts sustain the same, and are in the detailed tables."""
LIMITED = (SERIAL, R_ADAPTIVE[0], LAZY, PLAIN, FLUID, OURS)
"""The schedulers for which the largest load with at most 1 % violations is searched."""
HIGHEST_MS = 20_000.0
"""The highest latency that is drawn."""


@dataclass(frozen=True)
class TrafficSweep:
    """One figure over the arrival rate: its points and, once run, their outcomes."""

    figure: str
    spot: Spot
    rates: Sequence[float]
    low: tuple[float, float]
    """Lowest and highest arrival rate of the range for which the text states a gain of utilisation over SERIAL."""
    schedulers: Sequence[BatchScheduler] = DRAWN
    limited: Sequence[BatchScheduler] = LIMITED
    """The schedulers for which the largest load with at most 1 % violations is searched."""
    deadline_ms: float = 0.0
    samples: int = 0
    """The number of samples of each seed."""
    outcomes: Outcomes = field(default_factory=dict)
    limits: dict[BatchScheduler, Sustained] = field(default_factory=dict)
    """Scheduler -> the largest load with at most 1 % violations."""

    def point(self, scheduler: BatchScheduler, rate: float) -> RunPoint:
        return RunPoint(self.spot, scheduler, rate, self.deadline_ms, self.samples)

    def at(self, scheduler: BatchScheduler, rate: float) -> RunMeans:
        return self.outcomes[self.point(scheduler, rate)]

    def under_overload(self, scheduler: BatchScheduler) -> RunMeans:
        """The outcome under overload: OVERLOAD times the highest rate of the figure."""
        return self.outcomes[self.point(scheduler, OVERLOAD * self.rates[-1])]


FIGURES = (
    TrafficSweep("Fig. 7", SPOTS[0], tuple(range(5, 26, 2)), (5, 18)),
    TrafficSweep("Fig. 8", SPOTS[3], tuple(range(20, 61, 5)), (25, 35)),
)


def sweep(paper: Paper, bench: Bench, samples: int, plan: TrafficSweep, tick: Tick | None = None) -> TrafficSweep:
    """Run the points of a figure and search its limits; return *plan* with the outcomes filled in."""
    deadline_ms = paper[f"slo_{plan.spot.board}"].value
    complete = replace(plan, deadline_ms=deadline_ms, samples=samples)
    points = [complete.point(scheduler, rate) for scheduler in plan.schedulers for rate in plan.rates]
    overload = [complete.point(scheduler, OVERLOAD * plan.rates[-1]) for scheduler in plan.schedulers]
    outcomes = bench.measure([*points, *overload, _fast_point(complete)], tick)
    first_points = [complete.point(scheduler, plan.rates[0]) for scheduler in plan.limited]
    tasks = [(question(point), point.device) for point in first_points]
    limits = dict(zip(plan.limited, bench.run_all(_sustain_task, tasks, tick), strict=True))
    return replace(complete, outcomes=outcomes, limits=limits)


def _sustain_task(task: tuple[Question, TiledNpu]) -> Sustained:
    """``sustain`` with one argument, for a process pool."""
    return sustain(*task)


def _fast_point(traffic: TrafficSweep) -> RunPoint:
    """Fluid Batching at the figure's highest rate, with the higher bandwidth that gives Fig. 10.

    That bandwidth is calibrated on ZC706; another board gets the same share of its peak.
    """
    zc706, board = load_platform("zc706"), load_platform(traffic.spot.board)
    share = zc706.calibrated_gb_s("figure-10") / zc706.calibrated_gb_s("board")
    fast_gb_s = round(share * board.calibrated_gb_s("board"), 1)
    highest = traffic.rates[-1]
    return RunPoint(
        traffic.spot, FLUID, highest, traffic.deadline_ms, traffic.samples, changes=(("bandwidth_gb_s", fast_gb_s),)
    )


def figure(paper: Paper, out: Path, traffic: TrafficSweep) -> Exhibit:
    """Draw Fig. 7 or 8 from a sweep that was run, with its rows and tables."""
    rows = [
        *_sustained_rows(paper, traffic),
        *_limit_rows(traffic),
        *_utilisation_rows(paper, traffic),
        *_latency_rows(traffic),
    ]
    return Exhibit(tuple(rows), (_table(traffic), _overload_table(traffic)), (_picture(out, traffic),))


# rows


def _sustained_rows(paper: Paper, traffic: TrafficSweep) -> list[Row]:
    """Rows with the throughput of each scheduler of LISTED under overload; the paper prints Fluid Batching's."""
    rows = []
    for scheduler in [scheduler for scheduler in LISTED if scheduler in traffic.schedulers]:
        rate = traffic.under_overload(scheduler).rate
        printed = paper[f"sustained_{traffic.spot.board}"].value if scheduler is FLUID else None
        why = f"answers per second with {OVERLOAD * traffic.rates[-1]:g} arriving, more than any policy sustains"
        if scheduler is FLUID:
            last = traffic.rates[-1]
            why += (
                f"; the text says above {printed:g}; {traffic.at(FLUID, last).rate:.1f} of {last:g} at the end of the "
                "figure; no request is on time then, so nothing is preempted, and all that counts is the NPU"
            )
        quantity = f"sustained by {scheduler.name}, {traffic.spot.name}"
        rows.append(Row(traffic.figure, quantity, printed, rate, "/s", why))
    return rows


def _limit_rows(traffic: TrafficSweep) -> list[Row]:
    """Rows with the largest arrival rate at which at most 1 % of the samples are late."""
    return [
        Row(
            traffic.figure, f"largest rate of {scheduler.name} with at most 1 % late, {traffic.spot.name}", None,
            limit.rate, "/s",
            f"not printed; {traffic.deadline_ms:g} ms; more at {limit.unsustained_rate:.1f}/s; single seeds agree "
            f"below {limit.lowest_rate:.1f} and above {limit.highest_rate:.1f}",
        )
        for scheduler, limit in traffic.limits.items()
    ]  # fmt: skip


def _utilisation_rows(paper: Paper, traffic: TrafficSweep) -> list[Row]:
    """Rows on utilisation: the gain over SERIAL at low rates, and the value at the highest rate."""
    rates = [rate for rate in traffic.rates if traffic.low[0] <= rate <= traffic.low[1]]
    gains = [traffic.at(FLUID, rate).efficiency - traffic.at(SERIAL, rate).efficiency for rate in rates]
    ratios = [traffic.at(FLUID, rate).efficiency / traffic.at(SERIAL, rate).efficiency for rate in rates]
    without = [traffic.at(PLAIN, rate).efficiency - traffic.at(SERIAL, rate).efficiency for rate in rates]
    highest = traffic.rates[-1]
    full, fast = traffic.at(FLUID, highest), traffic.outcomes[_fast_point(traffic)]
    device = traffic.point(FLUID, highest).device
    needed = 100 * highest * macs_per_sample(traffic.spot.model) / device.macs_per_s
    return [
        Row(
            traffic.figure, f"gain of utilisation over SERIAL, {rates[0]:g} to {rates[-1]:g}/s, {traffic.spot.name}",
            paper[f"utilisation_gain_{traffic.spot.board}"].value, 100 * (mean(ratios) - 1), "%",
            f"of the peak reached while computing, relative; {mean(gains):.1f} points, {mean(without):.1f} without "
            "preemption; the paper says neither what its utilisation is nor whether the gain is relative",
        ),
        Row(
            traffic.figure, f"utilisation of Fluid Batching at {highest:g}/s, {traffic.spot.name}",
            paper["utilisation_high"].value, full.efficiency, "%",
            f"of the peak while computing, bound by {device.bandwidth_gb_s:g} GB/s; {fast.efficiency:.1f} % at "
            f"{dict(_fast_point(traffic).changes)['bandwidth_gb_s']:g} GB/s; busy {full.busy:.1f} % of the time; over "
            f"all the time {full.used:.1f} %, and {needed:.1f} % would serve all that arrives, so the text's cannot be "
            "this",
        ),
    ]  # fmt: skip


def _latency_rows(traffic: TrafficSweep) -> list[Row]:
    """Rows with the mean latency of three schedulers over SERIAL's at low rates."""
    rates = [rate for rate in traffic.rates if traffic.low[0] <= rate <= traffic.low[1]]
    rows = []
    for scheduler in (FLUID, PLAIN, OURS):
        ratios = [traffic.at(scheduler, rate).mean_ms / traffic.at(SERIAL, rate).mean_ms for rate in rates]
        late = max(traffic.at(scheduler, rate).late for rate in rates)
        rows.append(
            Row(
                traffic.figure, f"mean latency of {scheduler.name} over SERIAL's, {rates[0]:g} to {rates[-1]:g}/s",
                None, mean(ratios), "x",
                ("the text says similar; " if scheduler is FLUID else "not in the paper; ")
                + f"from {min(ratios):.2f} to {max(ratios):.2f}; at most {late:.2f} % late there",
            )
        )  # fmt: skip
    return rows


# tables and the picture


def _table(traffic: TrafficSweep) -> Table:
    """Table of all outcomes of a sweep: a line per scheduler and arrival rate."""
    body = []
    for scheduler in traffic.schedulers:
        for rate in traffic.rates:
            means = traffic.at(scheduler, rate)
            body.append(
                (
                    scheduler.name, f"{rate:g}", f"{means.rate:.2f}", f"{means.mean_ms:.1f}", f"{means.p99_ms:.1f}",
                    f"{means.late:.2f}", f"{means.busy:.1f}", f"{means.efficiency:.1f}", f"{means.used:.1f}",
                    "not printed",
                )
            )  # fmt: skip
    header = (
        "scheduler", "samples/s", "answers/s", "mean ms", "p99 ms", "late %", "busy %", "of peak while busy %",
        "of peak %", "paper",
    )  # fmt: skip
    return Table(f"{traffic.figure}: {traffic.spot.name}, {traffic.deadline_ms:g} ms", header, tuple(body))


def _overload_table(traffic: TrafficSweep) -> Table:
    """Table of each scheduler's throughput under overload, and of its largest rate with 1 % late."""
    body = []
    for scheduler in traffic.schedulers:
        limit, under_overload = traffic.limits.get(scheduler), traffic.under_overload(scheduler)
        limit_text = f"{limit.rate:.1f}" if limit else "not searched"
        body.append(
            (
                scheduler.name,
                f"{under_overload.rate:.2f}",
                limit_text,
                f"{under_overload.efficiency:.1f}",
                scheduler.hardware,
            )
        )
    header = ("scheduler", "sustained answers/s", "largest rate with 1 % late", "of peak while busy %", "hardware")
    return Table(f"{traffic.figure}: what each scheduler sustains, {traffic.spot.name}", header, tuple(body))


def _picture(out: Path, traffic: TrafficSweep) -> Figure:
    """Draw throughput, latencies and utilisation over the arrival rate, a curve per scheduler."""
    panels = []
    for quantity, heading in (
        ("rate", "(a) answers per second"),
        ("mean_ms", "(b) mean latency (ms)"),
        ("efficiency", "(c) utilisation while computing (%)"),
        ("p99_ms", "(d) p99 (ms)"),
    ):
        values = {s: [getattr(traffic.at(s, rate), quantity) for rate in traffic.rates] for s in traffic.schedulers}
        marks: list[Drawable] = [*curves(values, traffic.rates)]
        if quantity == "rate":
            marks.append(Curve(traffic.rates, traffic.rates, None, INK, dash=":", width=0.8))
        y = Axis()
        if quantity.endswith("_ms"):
            marks.append(ReferenceLine(traffic.deadline_ms, "SLO"))
            y = Axis(scale="log", high=HIGHEST_MS)
        panels.append(Panel(marks, heading, Axis(label="arrivals per second"), y))
    setting = f"4 exits, SLO {traffic.deadline_ms:g} ms, {traffic.samples} samples a run"
    title = f"{traffic.figure}: {traffic.spot.name}, {setting}"
    name = traffic.figure.lower().replace(". ", "") + "-traffic"
    return pictures.picture(out, name, title, panels, size=(12.5, 8.2), columns=2)


def curves(values: dict[BatchScheduler, list[float]], places: Sequence[float]) -> list[Curve]:
    """One curve per scheduler over the x values *places*; the dashes show its timeout (S, M, L)."""
    fluid = (PLAIN, FLUID, OURS, BALANCED)
    return [
        Curve(
            places, heights, scheduler.name, COLOURS[scheduler],
            dash=DASHES.get(scheduler.name.rpartition("AdaptB-")[2], "-"), width=2.2 if scheduler in fluid else 1.4,
            order=4 if scheduler in fluid else 3,
        )
        for scheduler, heights in values.items()
    ]  # fmt: skip


FIGURE_9 = "Fig. 9"
FEW = 1.0
"""Percent of violations below which a deadline counts as met."""


@dataclass(frozen=True)
class DeadlinePanel:
    """A panel of Fig. 9: violations over the deadline, for one network on one board at one arrival rate."""

    letter: str
    spot: Spot
    deadlines_ms: Sequence[float]
    usual_ms: float
    """The deadline of the rows: one of *deadlines_ms*, stringent for the load."""
    schedulers: Sequence[BatchScheduler] = DRAWN
    rate: float = 0.0
    samples: int = 0
    """The number of samples of each seed."""
    outcomes: Outcomes = field(default_factory=dict)

    def point(self, scheduler: BatchScheduler, deadline_ms: float) -> RunPoint:
        return RunPoint(self.spot, scheduler, self.rate, deadline_ms, self.samples)

    def at(self, scheduler: BatchScheduler, deadline_ms: float) -> RunMeans:
        return self.outcomes[self.point(scheduler, deadline_ms)]

    def shortest(self, scheduler: BatchScheduler) -> float | None:
        """The shortest deadline tried with at most FEW percent violations, or None if every one has more."""
        met = [deadline for deadline in self.deadlines_ms if self.at(scheduler, deadline).late <= FEW]
        return min(met, default=None)


PANELS = (
    DeadlinePanel("a", SPOTS[0], (75.0, 100.0, 150.0, 200.0, 250.0, 300.0, 400.0, 500.0, 600.0), 200.0),
    DeadlinePanel("b", SPOTS[3], (40.0, 60.0, 80.0, 100.0, 150.0, 200.0, 250.0, 300.0, 400.0), 100.0),
)


def panel(paper: Paper, bench: Bench, samples: int, plan: DeadlinePanel, tick: Tick | None = None) -> DeadlinePanel:
    """Run the points of a panel of Fig. 9; return *plan* with the outcomes filled in."""
    rate = paper[f"deadline_rate_{plan.spot.board}"].value
    complete = replace(plan, rate=rate, samples=samples)
    points = [complete.point(scheduler, deadline) for scheduler in plan.schedulers for deadline in plan.deadlines_ms]
    return replace(complete, outcomes=bench.measure(points, tick))


def figure_9(out: Path, panels: Sequence[DeadlinePanel]) -> Exhibit:
    """Draw Fig. 9 from panels that were run, with rows and tables."""
    rows = tuple(row for panel in panels for row in _rows(panel))
    return Exhibit(rows, tuple(_table_9(panel) for panel in panels), (_picture_9(out, panels),))


def _rows(deadlines: DeadlinePanel) -> list[Row]:
    """Rows of a panel of Fig. 9: violations per scheduler, and the number of deadlines with no more than SERIAL's."""
    rows = [_late_row(deadlines, scheduler) for scheduler in LISTED if scheduler in deadlines.schedulers]
    for scheduler in (FLUID, OURS):
        no_worse = [
            ms
            for ms in deadlines.deadlines_ms
            if deadlines.at(scheduler, ms).late <= deadlines.at(SERIAL, ms).late + 0.1
        ]
        rows.append(
            Row(
                f"{FIGURE_9}{deadlines.letter}", f"SLOs of {len(deadlines.deadlines_ms)} at which {scheduler.name} "
                "violates no more than SERIAL", len(deadlines.deadlines_ms) if scheduler is FLUID else None,
                len(no_worse), "", 'the text says "similar or fewer violations"; counted within 0.1 points',
            )
        )  # fmt: skip
    return rows


def _late_row(deadlines: DeadlinePanel, scheduler: BatchScheduler) -> Row:
    """Row with a scheduler's violations at the panel's usual deadline."""
    shortest, longest = deadlines.shortest(scheduler), deadlines.deadlines_ms[-1]
    met_text = f"at most 1 % from {shortest:g} ms" if shortest else f"more than 1 % even at {longest:g} ms"
    claim = "the text says none but at excessively short deadlines; " if scheduler is FLUID else "drawn, not printed; "
    quantity = f"violations of {scheduler.name} at {deadlines.usual_ms:g} ms, {deadlines.spot.name}"
    late = deadlines.at(scheduler, deadlines.usual_ms).late
    return Row(f"{FIGURE_9}{deadlines.letter}", quantity, None, late, "%", f"{claim}{deadlines.rate:g}/s; {met_text}")


def _table_9(deadlines: DeadlinePanel) -> Table:
    """Table of the violations of every scheduler at every deadline."""
    body = tuple(
        (scheduler.name, *(f"{deadlines.at(scheduler, deadline).late:.2f}" for deadline in deadlines.deadlines_ms))
        for scheduler in deadlines.schedulers
    )
    header = ("scheduler", *(f"{deadline:g} ms" for deadline in deadlines.deadlines_ms))
    return Table(
        f"{FIGURE_9}{deadlines.letter}: violations (%), {deadlines.spot.name}, {deadlines.rate:g}/s", header, body
    )


def _picture_9(out: Path, deadline_panels: Sequence[DeadlinePanel]) -> Figure:
    """Draw violations over the deadline, a panel per network and a curve per scheduler."""
    x, y = Axis(label="SLO (ms)"), Axis(label="violations (%)", low=0, high=100)
    panels = []
    for panel in deadline_panels:
        values = {
            scheduler: [panel.at(scheduler, deadline).late for deadline in panel.deadlines_ms]
            for scheduler in panel.schedulers
        }
        heading = f"({panel.letter}) {panel.spot.name}, {panel.rate:g}/s"
        panels.append(Panel(curves(values, panel.deadlines_ms), heading, x, y))
    title = f"{FIGURE_9}: violations over the deadline"
    return pictures.picture(out, "fig9-deadlines", title, panels, size=(12.5, 5.0), columns=len(deadline_panels))
