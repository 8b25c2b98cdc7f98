"""Fig. 6: how much GoogLeNet on Xavier's GPU is slowed by networks on the DLA, and how much under the best schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_map.pages.numbers import report_of
from weft_map.schedule import Outcome, Schedule
from weft_map.simulator import simulate
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick
from weft_papers.haxconn.lab import COLOURS, NETWORKS, OURS, XAVIER, CaseNetwork, Laboratory, SocCase, total_ms
from weft_papers.layerweaver.lab import mean

FIGURE = "Fig. 6"
GPU, DLA = 0, 1
NAIVE = "GoogLeNet on the GPU, the other on the DLA"
PARTNERS = tuple(model for model in NETWORKS if model not in ("googlenet", "densenet121"))
"""DenseNet has no time on Xavier's DLA."""


@dataclass(frozen=True)
class Meeting:
    """GoogLeNet with another network, whose demands are as shipped or scaled."""

    partner: str
    scaled: bool
    naive: Outcome
    best: Outcome

    def slow_down(self, outcome: Outcome) -> float:
        """How much contention slows GoogLeNet down."""
        return report_of(outcome).tasks[0].slow_down

    @property
    def less(self) -> float:
        """The share of the loss to contention that the best schedule saves, in percent."""
        before, after = self.slow_down(self.naive) - 1, self.slow_down(self.best) - 1
        return 100 * (1 - after / before) if before > 0 else 0.0


def case(partner: str, demand: float) -> SocCase:
    """GoogLeNet as measured, repeated for as long as the other network runs."""
    other, own = total_ms(partner, XAVIER, "dla"), total_ms("googlenet", XAVIER, "gpu", "measured")
    assert other is not None and own is not None
    googlenet = CaseNetwork("googlenet", max(1, round(other / own)), origin="measured")
    return SocCase(XAVIER, (googlenet, CaseNetwork(partner, demand=demand)))


def meet(lab: Laboratory, partners: Sequence[str] = PARTNERS, tick: Tick | None = None) -> list[Meeting]:
    """The other's demands are derived, so they are taken as shipped and as fitted; GoogLeNet's are measured."""
    cases = {
        (partner, scaled): case(partner, lab.fitted.demand if scaled else 1.0)
        for scaled in (False, True)
        for partner in partners
    }
    optima = lab.find(cases.values(), tick)
    return [Meeting(partner, scaled, _naive(one), optima[one].outcome) for (partner, scaled), one in cases.items()]


def _naive(one: SocCase) -> Outcome:
    problem = one.problem
    first, second = problem.tables.steps.tolist()
    return simulate(problem, Schedule(((GPU,) * first, (DLA,) * second), made_by=NAIVE))


def figure_6(paper: Paper, out: Path, meetings: Sequence[Meeting], fitted: float) -> Exhibit:
    rows = []
    for scaled in (False, True):
        here = [one for one in meetings if one.scaled == scaled]
        what = f"others' demands times {fitted:g}" if scaled else "demands as shipped"
        naive, best = ([one.slow_down(getattr(one, side)) for one in here] for side in ("naive", "best"))
        worst = max(here, key=lambda one: one.slow_down(one.naive))
        why = (
            f"not printed, drawn only; most beside {NETWORKS[worst.partner]}, {mean(naive):.2f} in the mean; "
            f"{mean(best):.2f} in the mean under the schedule that ends first"
        )
        rows.append(Row(FIGURE, f"GoogLeNet's slow-down, one network per unit, {what}", None, max(naive), "x", why))
        most = max(here, key=lambda one: one.less)
        why = (
            f"beside {NETWORKS[most.partner]}; {mean(one.less for one in here):.0f} % in the mean; the schedule aims "
            "at the end of both, not at this, so it may be negative"
        )
        quantity = f"contention of GoogLeNet saved at most, {what}"
        rows.append(Row(FIGURE, quantity, paper["contention_less"].value, most.less, "%", why))
    return Exhibit(tuple(rows), (_table(meetings, fitted),), (_picture(out, meetings, fitted),))


def _table(meetings: Sequence[Meeting], fitted: float) -> Table:
    body = []
    for one in meetings:
        runs = one.naive.problem.tasks[0].repeats
        values = [
            one.slow_down(one.naive),
            one.slow_down(one.best),
            1e3 * one.naive.makespan_s,
            1e3 * one.best.makespan_s,
        ]
        scale = f"{fitted:g}" if one.scaled else "1"
        body.append((NETWORKS[one.partner], scale, str(runs), *(f"{value:.3f}" for value in values), f"{one.less:.0f}"))
    header = (
        "on the DLA", "its demand x", "GoogLeNets", "slow-down", "best schedule's", "both end ms", "best schedule's ms",
        "contention saved %",
    )  # fmt: skip
    return Table(
        f"{FIGURE}: GoogLeNet (measured) on Xavier's GPU beside a network (derived) on the DLA", header, tuple(body)
    )


def _picture(out: Path, meetings: Sequence[Meeting], fitted: float) -> Figure:
    proved = f"{OURS}, proved"
    y = Axis(label="slow-down of GoogLeNet", low=0.95, high=1.05 * max(one.slow_down(one.naive) for one in meetings))
    panels = []
    for scaled, what in ((False, "demands as derived"), (True, f"demands of the others times {fitted:g} (fitted)")):
        here = [one for one in meetings if one.scaled == scaled]
        series = {
            NAIVE: [one.slow_down(one.naive) for one in here],
            proved: [one.slow_down(one.best) for one in here],
        }
        colours = {NAIVE: COLOURS["per-unit"], proved: COLOURS[OURS]}
        bars = Bars([NETWORKS[one.partner] for one in here], series, colours)
        panels.append(Panel([bars, ReferenceLine(1, dash="-")], what, Axis(slant=25), y))
    title = f"{FIGURE}: slow-down of GoogLeNet by contention on Xavier"
    return pictures.picture(out, "fig6-slowdown", title, panels, size=(12, 4.4), columns=2, share_y=True)
