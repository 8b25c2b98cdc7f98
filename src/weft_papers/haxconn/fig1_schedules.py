"""Fig. 1 and 6: schedules on Xavier, and how much its units slow each other down.

Fig. 1 runs VGG-19 and ResNet101 one after the other, one per unit, and under the best schedule. Fig. 6 has the
slow-down of GoogLeNet on the GPU by a network on the DLA, and the slow-down under the best schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel, ReferenceLine
from weft_map.pages.numbers import report_of
from weft_map.pages.picture import draw_mapping
from weft_map.schedule import Outcome, Schedule
from weft_map.simulator import simulate
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick, beside
from weft_papers.haxconn.lab import COLOURS, NETWORKS, OURS, XAVIER, CaseNetwork, Laboratory, SocCase, models, total_ms
from weft_papers.layerweaver.lab import mean
from weft_papers.pictures import make_folder

FIGURE_1 = "Fig. 1"
PAIR = models(XAVIER, "vgg19", "resnet101")
GPU, DLA = 0, 1
"""Indices of Xavier's units."""


def outcomes(lab: Laboratory, tick: Tick | None = None) -> dict[str, Outcome]:
    """Simulate the three cases of Fig. 1; Case 3 twice, with one switch per network and with any number.

    Returns case name -> outcome.
    """
    problem = PAIR.problem
    once = PAIR._replace(max_switches=1)  # the paper's schedules switch units once per network
    optima = lab.find([PAIR, once], tick)
    steps = problem.tables.steps.tolist()
    first_s = float(problem.tables.time[0, : steps[0], GPU].sum())
    # The second argument: earliest start in seconds of every step; ResNet101 waits for the end of VGG-19.
    serial = Schedule(tuple((GPU,) * count for count in steps), ((0.0,) * steps[0], (first_s,) * steps[1]))
    one_per_unit = Schedule(((GPU,) * steps[0], (DLA,) * steps[1]))
    cases = {
        "Case 1: both on the GPU": simulate(problem, serial),
        "Case 2: VGG-19 on the GPU, ResNet101 on the DLA": simulate(problem, one_per_unit),
        "Case 3: one switch per network at most, proved optimal": optima[once].outcome,
        "Case 3: any number of switches, proved optimal": optima[PAIR].outcome,
    }
    return {name: replace(outcome, schedule=replace(outcome.schedule, made_by=name)) for name, outcome in cases.items()}


def figure_1(paper: Paper, out: Path, lab: Laboratory, tick: Tick | None = None) -> Exhibit:
    """Reproduce Fig. 1: VGG-19 and ResNet101 serially, one per unit, and optimally scheduled."""
    cases = outcomes(lab, tick)
    serial, apart, once, free = (1e3 * outcome.makespan_s for outcome in cases.values())
    slow = report_of(list(cases.values())[1]).tasks[1].slow_down
    case_1, case_2 = paper["fig1_case1"].value, paper["fig1_case2"].value
    rows = (
        Row(FIGURE_1, "Case 1, serial", case_1, serial, " ms", beside(serial, case_1, "the sum of Table 5")),
        Row(
            FIGURE_1, "Case 2, one per unit", case_2, apart, " ms",
            beside(apart, case_2, f"printed is what ResNet101 takes on the DLA alone; ours is slowed {slow:.3f} times"),
        ),
        Row(
            FIGURE_1, "Case 3, one switch per network", None, once, " ms",
            f"not printed, 'considerably' better; {100 * (apart / once - 1):.0f} % over Case 2, proved optimal",
        ),
        Row(
            FIGURE_1, "Case 3, any number of switches", None, free, " ms",
            f"not in the paper; {100 * (apart / free - 1):.0f} % over Case 2, proved optimal",
        ),
    )  # fmt: skip
    return Exhibit(rows, (_table_1(cases),), (_picture_1(out, cases),))


def _table_1(cases: dict[str, Outcome]) -> Table:
    """Table of the cases of Fig. 1: makespans, ends, loads of the units, loss to contention."""
    body = []
    for name, outcome in cases.items():
        report = report_of(outcome)
        busy = [f"{100 * unit.busy_share:.0f}" for unit in report.units]
        ends = [f"{1e3 * end:.3f}" for end in outcome.finish_s]
        body.append(
            (
                name,
                f"{1e3 * report.makespan_s:.3f}",
                *ends,
                *busy,
                f"{max(0.0, 1e3 * report.contention_s):.3f}",
                str(report.moves),
            )
        )
    header = (
        "case",
        "ms",
        "VGG-19 ends ms",
        "ResNet101 ends ms",
        "GPU busy %",
        "DLA busy %",
        "lost to contention ms",
        "moves",
    )
    return Table(f"{FIGURE_1}: {PAIR.name}, derived profiles", header, tuple(body))


def _picture_1(out: Path, cases: dict[str, Outcome]) -> Figure:
    """Draw the schedules of the cases of Fig. 1 over time."""
    title = f"{FIGURE_1}: VGG-19 and ResNet101 on Xavier"
    path = out / "fig1-cases.png"
    make_folder(out)
    for suffix in (".png", ".svg"):
        draw_mapping(list(cases.values()), path.with_suffix(suffix), title=title)
    return Figure(title, path)


FIGURE = "Fig. 6"
NAIVE = "GoogLeNet on the GPU, the other on the DLA"
PARTNERS = tuple(model for model in NETWORKS if model not in ("googlenet", "densenet121"))
"""DenseNet has no time on Xavier's DLA."""


@dataclass(frozen=True)
class Meeting:
    """GoogLeNet on Xavier at the same time as a partner network, under two schedules."""

    partner: str
    scaled: bool
    """Whether the partner's memory demands are scaled by the fitted factor."""
    naive: Outcome
    """The outcome with GoogLeNet on the GPU and the partner on the DLA."""
    best: Outcome
    """The outcome of the schedule that ends first."""

    def slow_down(self, outcome: Outcome) -> float:
        """The factor by which contention slows GoogLeNet down."""
        return report_of(outcome).tasks[0].slow_down

    @property
    def saved_percent(self) -> float:
        """The share of the loss to contention that the best schedule saves, in percent."""
        before, after = self.slow_down(self.naive) - 1, self.slow_down(self.best) - 1
        return 100 * (1 - after / before) if before > 0 else 0.0


def case(partner: str, demand: float) -> SocCase:
    """GoogLeNet with its measured profile beside *partner*, repeated until about the end of the partner.

    demand: factor on the partner's memory demands.
    """
    partner_ms, googlenet_ms = total_ms(partner, XAVIER, "dla"), total_ms("googlenet", XAVIER, "gpu", "measured")
    assert partner_ms is not None and googlenet_ms is not None
    googlenet = CaseNetwork("googlenet", max(1, round(partner_ms / googlenet_ms)), origin="measured")
    return SocCase(XAVIER, (googlenet, CaseNetwork(partner, demand=demand)))


def meet(lab: Laboratory, partners: Sequence[str] = PARTNERS, tick: Tick | None = None) -> list[Meeting]:
    """Schedule GoogLeNet with every partner, whose derived demands are taken as shipped and as fitted."""
    cases = {
        (partner, scaled): case(partner, lab.fitted.demand if scaled else 1.0)
        for scaled in (False, True)
        for partner in partners
    }
    optima = lab.find(cases.values(), tick)
    return [
        Meeting(partner, scaled, _simulate_naive(soc_case), optima[soc_case].outcome)
        for (partner, scaled), soc_case in cases.items()
    ]


def _simulate_naive(soc_case: SocCase) -> Outcome:
    """Simulate the first network on the GPU and the second on the DLA."""
    problem = soc_case.problem
    first, second = problem.tables.steps.tolist()
    return simulate(problem, Schedule(((GPU,) * first, (DLA,) * second), made_by=NAIVE))


def figure_6(paper: Paper, out: Path, meetings: Sequence[Meeting], fitted: float) -> Exhibit:
    """Reproduce Fig. 6: GoogLeNet's slow-down by networks on the DLA; *fitted*: the factor on scaled demands."""
    rows = []
    for scaled in (False, True):
        pairs = [pair for pair in meetings if pair.scaled == scaled]
        demands = f"others' demands times {fitted:g}" if scaled else "demands as shipped"
        naive, best = ([pair.slow_down(getattr(pair, side)) for pair in pairs] for side in ("naive", "best"))
        worst = max(pairs, key=lambda pair: pair.slow_down(pair.naive))
        why = (
            f"not printed, drawn only; most beside {NETWORKS[worst.partner]}, {mean(naive):.2f} in the mean; "
            f"{mean(best):.2f} in the mean under the schedule that ends first"
        )
        rows.append(Row(FIGURE, f"GoogLeNet's slow-down, one network per unit, {demands}", None, max(naive), "x", why))
        largest = max(pairs, key=lambda pair: pair.saved_percent)
        why = (
            f"beside {NETWORKS[largest.partner]}; {mean(pair.saved_percent for pair in pairs):.0f} % in the mean; the "
            "schedule aims at the end of both, not at this, so it may be negative"
        )
        quantity = f"contention of GoogLeNet saved at most, {demands}"
        rows.append(Row(FIGURE, quantity, paper["contention_less"].value, largest.saved_percent, "%", why))
    return Exhibit(tuple(rows), (_table(meetings, fitted),), (_picture(out, meetings, fitted),))


def _table(meetings: Sequence[Meeting], fitted: float) -> Table:
    """Table of all partners of GoogLeNet: slow-downs and makespans of both schedules."""
    body = []
    for pair in meetings:
        runs = pair.naive.problem.tasks[0].repeats
        values = [
            pair.slow_down(pair.naive),
            pair.slow_down(pair.best),
            1e3 * pair.naive.makespan_s,
            1e3 * pair.best.makespan_s,
        ]
        scale = f"{fitted:g}" if pair.scaled else "1"
        body.append(
            (
                NETWORKS[pair.partner],
                scale,
                str(runs),
                *(f"{value:.3f}" for value in values),
                f"{pair.saved_percent:.0f}",
            )
        )
    header = (
        "on the DLA", "its demand x", "GoogLeNets", "slow-down", "best schedule's", "both end ms", "best schedule's ms",
        "contention saved %",
    )  # fmt: skip
    return Table(
        f"{FIGURE}: GoogLeNet (measured) on Xavier's GPU beside a network (derived) on the DLA", header, tuple(body)
    )


def _picture(out: Path, meetings: Sequence[Meeting], fitted: float) -> Figure:
    """Draw GoogLeNet's slow-down beside every partner under both schedules."""
    proved = f"{OURS}, proved"
    y = Axis(label="slow-down of GoogLeNet", low=0.95, high=1.05 * max(pair.slow_down(pair.naive) for pair in meetings))
    panels = []
    for scaled, heading in ((False, "demands as derived"), (True, f"demands of the others times {fitted:g} (fitted)")):
        pairs = [pair for pair in meetings if pair.scaled == scaled]
        series = {
            NAIVE: [pair.slow_down(pair.naive) for pair in pairs],
            proved: [pair.slow_down(pair.best) for pair in pairs],
        }
        colours = {NAIVE: COLOURS["per-unit"], proved: COLOURS[OURS]}
        bars = Bars([NETWORKS[pair.partner] for pair in pairs], series, colours)
        panels.append(Panel([bars, ReferenceLine(1, dash="-")], heading, Axis(slant=25), y))
    title = f"{FIGURE}: slow-down of GoogLeNet by contention on Xavier"
    return pictures.picture(out, "fig6-slowdown", title, panels, size=(12, 4.4), columns=2, share_y=True)
