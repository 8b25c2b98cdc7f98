"""Fig. 7 and 8: processing rate, latency and utilisation over the arrival rate; and what load each scheduler bears.

The paper does not say what its utilisation is. At a load that is borne, all schedulers do the same work in the same
time, so it can only be what the NPU reaches while it computes: that is drawn, and the other readings are in the rows.
Beyond what a scheduler bears its queue grows for as long as the run lasts, and so do its latencies.
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
from weft_papers.fluid_batching.hardware import SPOTS, Spot, macs_per_sample
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
    BatchScheduler,
    Bench,
    Outcomes,
    RunMeans,
    RunPoint,
    question,
)
from weft_papers.layerweaver.lab import mean

OVERLOAD = 2.0
"""Times the highest rate drawn: the queue is never empty."""
LISTED = (SERIAL, FC_ADAPTIVE[0], R_ADAPTIVE[0], LAZY, PLAIN, FLUID, OURS)
"""The schedulers with rows of their own; longer timeouts sustain the same, and are in the detailed tables."""
LIMITED = (SERIAL, R_ADAPTIVE[0], LAZY, PLAIN, FLUID, OURS)
HIGHEST_MS = 20_000.0
"""The highest latency that is drawn."""


@dataclass(frozen=True)
class TrafficSweep:
    """What one figure shows over the rate of arrivals."""

    figure: str
    spot: Spot
    rates: Sequence[float]
    low: tuple[float, float]
    """Rates over which the text gives a mean gain of utilisation over SERIAL."""
    schedulers: Sequence[BatchScheduler] = DRAWN
    limited: Sequence[BatchScheduler] = LIMITED
    """The schedulers whose largest load with at most 1 % violations is searched for."""
    deadline_ms: float = 0.0
    samples: int = 0
    """How many samples each seed draws."""
    outcomes: Outcomes = field(default_factory=dict)
    limits: dict[BatchScheduler, Sustained] = field(default_factory=dict)

    def point(self, scheduler: BatchScheduler, rate: float) -> RunPoint:
        return RunPoint(self.spot, scheduler, rate, self.deadline_ms, self.samples)

    def at(self, scheduler: BatchScheduler, rate: float) -> RunMeans:
        return self.outcomes[self.point(scheduler, rate)]

    def borne(self, scheduler: BatchScheduler) -> RunMeans:
        """What comes of more than anybody bears."""
        return self.outcomes[self.point(scheduler, OVERLOAD * self.rates[-1])]


FIGURES = (
    TrafficSweep("Fig. 7", SPOTS[0], tuple(range(5, 26, 2)), (5, 18)),
    TrafficSweep("Fig. 8", SPOTS[3], tuple(range(20, 61, 5)), (25, 35)),
)


def sweep(paper: Paper, bench: Bench, samples: int, plan: TrafficSweep, tick: Tick | None = None) -> TrafficSweep:
    """Run a figure's points."""
    deadline_ms = paper[f"slo_{plan.spot.board}"].value
    whole = replace(plan, deadline_ms=deadline_ms, samples=samples)
    points = [whole.point(scheduler, rate) for scheduler in plan.schedulers for rate in plan.rates]
    extra = [whole.point(scheduler, OVERLOAD * plan.rates[-1]) for scheduler in plan.schedulers]
    found = bench.measure([*points, *extra, _fast(whole)], tick)
    borne = [whole.point(scheduler, plan.rates[0]) for scheduler in plan.limited]
    tasks = [(question(point), point.device) for point in borne]
    limits = dict(zip(plan.limited, bench.each(_limit, tasks, tick), strict=True))
    return replace(whole, outcomes=found, limits=limits)


def _limit(task: tuple[Question, TiledNpu]) -> Sustained:
    return sustain(*task)


def _fast(found: TrafficSweep) -> RunPoint:
    """Fluid Batching at the highest rate with the bandwidth at which Fig. 10 comes out."""
    zc706, board = load_platform("zc706"), load_platform(found.spot.board)
    share = zc706.calibrated_gb_s("figure-10") / zc706.calibrated_gb_s("board")
    fast = round(share * board.calibrated_gb_s("board"), 1)
    highest = found.rates[-1]
    return RunPoint(found.spot, FLUID, highest, found.deadline_ms, found.samples, changes=(("bandwidth_gb_s", fast),))


def figure(paper: Paper, out: Path, found: TrafficSweep) -> Exhibit:
    rows = [
        *_sustained_rows(paper, found),
        *_limit_rows(found),
        *_utilisation_rows(paper, found),
        *_latency_rows(found),
    ]
    return Exhibit(tuple(rows), (_table(found), _overload_table(found)), (_drawn(out, found),))


# rows


def _sustained_rows(paper: Paper, found: TrafficSweep) -> list[Row]:
    rows = []
    for scheduler in (one for one in LISTED if one in found.schedulers):
        rate = found.borne(scheduler).rate
        theirs = paper[f"sustained_{found.spot.board}"].value if scheduler is FLUID else None
        why = f"answers per second with {OVERLOAD * found.rates[-1]:g} arriving, more than anybody bears"
        if scheduler is FLUID:
            last = found.rates[-1]
            why += (
                f"; the text says above {theirs:g}; {found.at(FLUID, last).rate:.1f} of {last:g} at the end of the "
                "figure; nobody is on time then, so nothing is preempted, and all that counts is the NPU"
            )
        rows.append(Row(found.figure, f"sustained by {scheduler.name}, {found.spot.name}", theirs, rate, "/s", why))
    return rows


def _limit_rows(found: TrafficSweep) -> list[Row]:
    return [
        Row(
            found.figure, f"largest rate of {scheduler.name} with at most 1 % late, {found.spot.name}", None,
            limit.rate, "/s",
            f"not printed; {found.deadline_ms:g} ms; more at {limit.unsustained_rate:.1f}/s; single seeds agree below "
            f"{limit.lowest_rate:.1f} and above {limit.highest_rate:.1f}",
        )
        for scheduler, limit in found.limits.items()
    ]  # fmt: skip


def _utilisation_rows(paper: Paper, found: TrafficSweep) -> list[Row]:
    low = [rate for rate in found.rates if found.low[0] <= rate <= found.low[1]]
    gains = [found.at(FLUID, rate).efficiency - found.at(SERIAL, rate).efficiency for rate in low]
    ratios = [found.at(FLUID, rate).efficiency / found.at(SERIAL, rate).efficiency for rate in low]
    plain = [found.at(PLAIN, rate).efficiency - found.at(SERIAL, rate).efficiency for rate in low]
    highest = found.rates[-1]
    full, fast = found.at(FLUID, highest), found.outcomes[_fast(found)]
    device = found.point(FLUID, highest).device
    most = 100 * highest * macs_per_sample(found.spot.model) / device.macs_per_s
    return [
        Row(
            found.figure, f"gain of utilisation over SERIAL, {low[0]:g} to {low[-1]:g}/s, {found.spot.name}",
            paper[f"utilisation_gain_{found.spot.board}"].value, 100 * (mean(ratios) - 1), "%",
            f"of the peak reached while computing, relative; {mean(gains):.1f} points, {mean(plain):.1f} without "
            "preemption; the paper says neither what its utilisation is nor whether the gain is relative",
        ),
        Row(
            found.figure, f"utilisation of Fluid Batching at {highest:g}/s, {found.spot.name}",
            paper["utilisation_high"].value, full.efficiency, "%",
            f"of the peak while computing, bound by {device.bandwidth_gb_s:g} GB/s; {fast.efficiency:.1f} % at "
            f"{dict(_fast(found).changes)['bandwidth_gb_s']:g} GB/s; busy {full.busy:.1f} % of the time; over all the "
            f"time {full.used:.1f} %, and {most:.1f} % would serve all that arrives, so the text's cannot be this",
        ),
    ]  # fmt: skip


def _latency_rows(found: TrafficSweep) -> list[Row]:
    low = [rate for rate in found.rates if found.low[0] <= rate <= found.low[1]]
    rows = []
    for scheduler in (FLUID, PLAIN, OURS):
        ratios = [found.at(scheduler, rate).mean_ms / found.at(SERIAL, rate).mean_ms for rate in low]
        late = max(found.at(scheduler, rate).late for rate in low)
        rows.append(
            Row(
                found.figure, f"mean latency of {scheduler.name} over SERIAL's, {low[0]:g} to {low[-1]:g}/s", None,
                mean(ratios), "x",
                ("the text says similar; " if scheduler is FLUID else "not in the paper; ")
                + f"from {min(ratios):.2f} to {max(ratios):.2f}; at most {late:.2f} % late there",
            )
        )  # fmt: skip
    return rows


# tables and the picture


def _table(found: TrafficSweep) -> Table:
    body = []
    for scheduler in found.schedulers:
        for rate in found.rates:
            one = found.at(scheduler, rate)
            body.append(
                (
                    scheduler.name, f"{rate:g}", f"{one.rate:.2f}", f"{one.mean_ms:.1f}", f"{one.p99_ms:.1f}",
                    f"{one.late:.2f}", f"{one.busy:.1f}", f"{one.efficiency:.1f}", f"{one.used:.1f}", "not printed",
                )
            )  # fmt: skip
    header = (
        "scheduler", "samples/s", "answers/s", "mean ms", "p99 ms", "late %", "busy %", "of peak while busy %",
        "of peak %", "paper",
    )  # fmt: skip
    return Table(f"{found.figure}: {found.spot.name}, {found.deadline_ms:g} ms", header, tuple(body))


def _overload_table(found: TrafficSweep) -> Table:
    body = []
    for scheduler in found.schedulers:
        limit, borne = found.limits.get(scheduler), found.borne(scheduler)
        searched = f"{limit.rate:.1f}" if limit else "not searched"
        body.append((scheduler.name, f"{borne.rate:.2f}", searched, f"{borne.efficiency:.1f}", scheduler.hardware))
    header = ("scheduler", "sustained answers/s", "largest rate with 1 % late", "of peak while busy %", "hardware")
    return Table(f"{found.figure}: what each scheduler bears, {found.spot.name}", header, tuple(body))


def _drawn(out: Path, found: TrafficSweep) -> Figure:
    panels = []
    for quantity, heading in (
        ("rate", "(a) answers per second"),
        ("mean_ms", "(b) mean latency (ms)"),
        ("efficiency", "(c) utilisation while computing (%)"),
        ("p99_ms", "(d) p99 (ms)"),
    ):
        values = {s: [getattr(found.at(s, rate), quantity) for rate in found.rates] for s in found.schedulers}
        marks: list[Drawable] = [*curves(values, found.rates)]
        if quantity == "rate":
            marks.append(Curve(found.rates, found.rates, None, INK, dash=":", width=0.8))
        y = Axis()
        if quantity.endswith("_ms"):
            marks.append(ReferenceLine(found.deadline_ms, "SLO"))
            y = Axis(scale="log", high=HIGHEST_MS)
        panels.append(Panel(marks, heading, Axis(label="arrivals per second"), y))
    title = f"{found.figure}: {found.spot.name}, 4 exits, SLO {found.deadline_ms:g} ms, {found.samples} samples a run"
    name = found.figure.lower().replace(". ", "") + "-traffic"
    return pictures.picture(out, name, title, panels, size=(12.5, 8.2), columns=2)


def curves(values: dict[BatchScheduler, list[float]], places: Sequence[float]) -> list[Curve]:
    """A line per scheduler; the three timeouts of one kind of hardware by their dashes."""
    fluid = (PLAIN, FLUID, OURS, BALANCED)
    return [
        Curve(
            places, heights, scheduler.name, COLOURS[scheduler],
            dash=DASHES.get(scheduler.name.rpartition("AdaptB-")[2], "-"), width=2.2 if scheduler in fluid else 1.4,
            order=4 if scheduler in fluid else 3,
        )
        for scheduler, heights in values.items()
    ]  # fmt: skip
