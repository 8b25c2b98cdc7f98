"""Fig. 1: VGG-19 and ResNet101 on Xavier, one after the other, one per unit, and as well as can be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from weft_map.pages.numbers import report_of
from weft_map.pages.picture import draw_mapping
from weft_map.schedule import Outcome, Schedule
from weft_map.simulator import simulate
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick, beside
from weft_papers.haxconn.lab import XAVIER, Laboratory, models
from weft_papers.pictures import make_folder

FIGURE = "Fig. 1"
PAIR = models(XAVIER, "vgg19", "resnet101")
GPU, DLA = 0, 1


def outcomes(lab: Laboratory, tick: Tick | None = None) -> dict[str, Outcome]:
    """The three cases, the last with one switch per network as in the paper and with any number."""
    problem = PAIR.problem
    once = PAIR._replace(max_switches=1)
    optima = lab.find([PAIR, once], tick)
    steps = problem.tables.steps.tolist()
    alone_s = float(problem.tables.time[0, : steps[0], GPU].sum())
    serial = Schedule(tuple((GPU,) * count for count in steps), ((0.0,) * steps[0], (alone_s,) * steps[1]))
    apart = Schedule(((GPU,) * steps[0], (DLA,) * steps[1]))
    named = {
        "Case 1: both on the GPU": simulate(problem, serial),
        "Case 2: VGG-19 on the GPU, ResNet101 on the DLA": simulate(problem, apart),
        "Case 3: one switch per network at most, proved optimal": optima[once].outcome,
        "Case 3: any number of switches, proved optimal": optima[PAIR].outcome,
    }
    return {name: replace(outcome, schedule=replace(outcome.schedule, made_by=name)) for name, outcome in named.items()}


def figure_1(paper: Paper, out: Path, lab: Laboratory, tick: Tick | None = None) -> Exhibit:
    cases = outcomes(lab, tick)
    serial, apart, once, free = (1e3 * outcome.makespan_s for outcome in cases.values())
    dla = report_of(list(cases.values())[1]).tasks[1].slow_down
    one, two = paper["fig1_case1"].value, paper["fig1_case2"].value
    rows = (
        Row(FIGURE, "Case 1, serial", one, serial, " ms", beside(serial, one, "the sum of Table 5")),
        Row(
            FIGURE, "Case 2, one per unit", two, apart, " ms",
            beside(apart, two, f"printed is what ResNet101 takes on the DLA alone; ours is slowed {dla:.3f} times"),
        ),
        Row(
            FIGURE, "Case 3, one switch per network", None, once, " ms",
            f"not printed, 'considerably' better; {100 * (apart / once - 1):.0f} % over Case 2, proved optimal",
        ),
        Row(
            FIGURE, "Case 3, any number of switches", None, free, " ms",
            f"not in the paper; {100 * (apart / free - 1):.0f} % over Case 2, proved optimal",
        ),
    )  # fmt: skip
    return Exhibit(rows, (_table(cases),), (_picture(out, cases),))


def _table(cases: dict[str, Outcome]) -> Table:
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
    return Table(f"{FIGURE}: {PAIR.name}, derived profiles", header, tuple(body))


def _picture(out: Path, cases: dict[str, Outcome]) -> Figure:
    title = f"{FIGURE}: VGG-19 and ResNet101 on Xavier"
    path = out / "fig1-cases.png"
    make_folder(out)
    for suffix in (".png", ".svg"):
        draw_mapping(list(cases.values()), path.with_suffix(suffix), title=title)
    return Figure(title, path)
