"""Fig. 9: violations as the deadline is varied; the timeouts of adaptive batching move with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from weft.reports.exhibits import Axis, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick
from weft_papers.fluid_batching.fig7_traffic import LISTED, curves
from weft_papers.fluid_batching.hardware import SPOTS, Spot
from weft_papers.fluid_batching.lab import (
    DRAWN,
    FLUID,
    OURS,
    SERIAL,
    BatchScheduler,
    Bench,
    Outcomes,
    RunMeans,
    RunPoint,
)

FIGURE = "Fig. 9"
FEW = 1.0
"""Percent of violations that count as none in a run of this length."""


@dataclass(frozen=True)
class DeadlinePanel:
    """One network on one board at one rate."""

    letter: str
    spot: Spot
    deadlines_ms: Sequence[float]
    usual_ms: float
    """The deadline of the rows: one of the above, stringent for the load."""
    schedulers: Sequence[BatchScheduler] = DRAWN
    rate: float = 0.0
    samples: int = 0
    """How many samples each seed draws."""
    outcomes: Outcomes = field(default_factory=dict)

    def point(self, scheduler: BatchScheduler, deadline_ms: float) -> RunPoint:
        return RunPoint(self.spot, scheduler, self.rate, deadline_ms, self.samples)

    def at(self, scheduler: BatchScheduler, deadline_ms: float) -> RunMeans:
        return self.outcomes[self.point(scheduler, deadline_ms)]

    def shortest(self, scheduler: BatchScheduler) -> float | None:
        """The shortest deadline tried that hardly anybody misses."""
        kept = [deadline for deadline in self.deadlines_ms if self.at(scheduler, deadline).late <= FEW]
        return min(kept, default=None)


PANELS = (
    DeadlinePanel("a", SPOTS[0], (75.0, 100.0, 150.0, 200.0, 250.0, 300.0, 400.0, 500.0, 600.0), 200.0),
    DeadlinePanel("b", SPOTS[3], (40.0, 60.0, 80.0, 100.0, 150.0, 200.0, 250.0, 300.0, 400.0), 100.0),
)


def panel(paper: Paper, bench: Bench, samples: int, plan: DeadlinePanel, tick: Tick | None = None) -> DeadlinePanel:
    rate = paper[f"deadline_rate_{plan.spot.board}"].value
    whole = replace(plan, rate=rate, samples=samples)
    points = [whole.point(scheduler, deadline) for scheduler in plan.schedulers for deadline in plan.deadlines_ms]
    return replace(whole, outcomes=bench.measure(points, tick))


def figure_9(out: Path, panels: Sequence[DeadlinePanel]) -> Exhibit:
    rows = tuple(row for one in panels for row in _rows(one))
    return Exhibit(rows, tuple(_table(one) for one in panels), (_picture(out, panels),))


def _rows(deadlines: DeadlinePanel) -> list[Row]:
    rows = [_late_row(deadlines, scheduler) for scheduler in LISTED if scheduler in deadlines.schedulers]
    for scheduler in (FLUID, OURS):
        fewer = [
            d for d in deadlines.deadlines_ms if deadlines.at(scheduler, d).late <= deadlines.at(SERIAL, d).late + 0.1
        ]
        rows.append(
            Row(
                f"{FIGURE}{deadlines.letter}", f"SLOs of {len(deadlines.deadlines_ms)} at which {scheduler.name} "
                "violates no more than SERIAL", len(deadlines.deadlines_ms) if scheduler is FLUID else None,
                len(fewer), "", 'the text says "similar or fewer violations"; counted within 0.1 points',
            )
        )  # fmt: skip
    return rows


def _late_row(deadlines: DeadlinePanel, scheduler: BatchScheduler) -> Row:
    shortest, longest = deadlines.shortest(scheduler), deadlines.deadlines_ms[-1]
    kept = f"at most 1 % from {shortest:g} ms" if shortest else f"more than 1 % even at {longest:g} ms"
    claim = "the text says none but at excessively short deadlines; " if scheduler is FLUID else "drawn, not printed; "
    quantity = f"violations of {scheduler.name} at {deadlines.usual_ms:g} ms, {deadlines.spot.name}"
    late = deadlines.at(scheduler, deadlines.usual_ms).late
    return Row(f"{FIGURE}{deadlines.letter}", quantity, None, late, "%", f"{claim}{deadlines.rate:g}/s; {kept}")


def _table(deadlines: DeadlinePanel) -> Table:
    body = tuple(
        (scheduler.name, *(f"{deadlines.at(scheduler, deadline).late:.2f}" for deadline in deadlines.deadlines_ms))
        for scheduler in deadlines.schedulers
    )
    header = ("scheduler", *(f"{deadline:g} ms" for deadline in deadlines.deadlines_ms))
    return Table(
        f"{FIGURE}{deadlines.letter}: violations (%), {deadlines.spot.name}, {deadlines.rate:g}/s", header, body
    )


def _picture(out: Path, deadline_panels: Sequence[DeadlinePanel]) -> Figure:
    x, y = Axis(label="SLO (ms)"), Axis(label="violations (%)", low=0, high=100)
    panels = []
    for one in deadline_panels:
        values = {s: [one.at(s, deadline).late for deadline in one.deadlines_ms] for s in one.schedulers}
        panels.append(Panel(curves(values, one.deadlines_ms), f"({one.letter}) {one.spot.name}, {one.rate:g}/s", x, y))
    title = f"{FIGURE}: violations over the deadline"
    return pictures.picture(out, "fig9-deadlines", title, panels, size=(12.5, 5.0), columns=len(deadline_panels))
