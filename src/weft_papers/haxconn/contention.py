"""The value of the contention model: the best schedule of a planner without one, simulated with contention.

The problems are the experiments of Table 6, the pairs of Table 8, and random ones whose groups have memory demands
like those of GoogLeNet in Table 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from weft.reports.exhibits import Axis, Curve, Panel
from weft_map.baselines import BASELINES, without_contention
from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.search import ends_s
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table, Tick
from weft_papers.haxconn.lab import (
    AS_SHIPPED,
    NETWORKS,
    SNAPDRAGON,
    XAVIER,
    Laboratory,
    LeastMakespan,
    chip,
    experiments,
    find_best,
)
from weft_papers.haxconn.table8_pairs import pair, places
from weft_papers.layerweaver.lab import mean

FIGURE, BLIND = "contention", "contention-blind"
SEEDS = tuple(range(1, 11))
GROUPS = 12  # per model; more make the proof of optimality slow, fewer leave little to schedule
SHADES = ("#9ecae1", "#0072b2", "#d55e00")
"""Colours of the curves: demands as shipped, demands as fitted (``Laboratory.fitted``), random problems."""


class BlindPlan(NamedTuple):
    """The best schedule of a planner that ignores contention."""

    expected_s: float
    """The schedule's makespan as that planner expects it, without contention."""
    judged_s: float
    """The schedule's makespan as simulated, with contention."""
    best_s: float
    """The makespan of the best schedule with contention."""


@dataclass(frozen=True)
class ContentionStudy:
    """A set of problems, each scheduled with and without knowledge of contention."""

    name: str
    blind_plans: Sequence[BlindPlan]
    """The blind planner's schedule of each problem."""

    @property
    def losses(self) -> list[float]:
        """Percent by which the blind schedule takes longer than the best one, for each problem."""
        return [100 * (result.judged_s / result.best_s - 1) for result in self.blind_plans]

    @property
    def errors(self) -> list[float]:
        """Percent by which the blind planner's estimate lies below the simulated makespan, for each problem."""
        return [100 * (1 - result.expected_s / result.judged_s) for result in self.blind_plans]


def plan_blindly(optimum: LeastMakespan) -> BlindPlan:
    """Compare the solver's optimum with the blind planner's schedule of the same problem."""
    problem = optimum.outcome.problem
    uncontended = Problem(without_contention(problem.soc), problem.tasks)
    expected_s = min(max(ends_s(uncontended, schedule)) for schedule in BASELINES[BLIND](problem, "latency"))
    return BlindPlan(expected_s, optimum.baselines[BLIND], optimum.best_s)


def random_problem(seed: int, groups: int = GROUPS) -> Problem:
    """Draw a problem of two models of *groups* layer groups on Xavier.

    Uniformly drawn for each group: 0.1 to 0.6 ms on the GPU, 1.2 to 2.2 times that on the DLA; a demand of 30 to 105
    GB/s on the GPU, 0.3 to 0.7 times that on the DLA; 0.01 to 0.1 ms to move its output.
    """
    rng = np.random.default_rng(seed)
    tasks = []
    for name in ("a", "b"):
        gpu_s, demand_gb_s = 1e-3 * rng.uniform(0.1, 0.6, groups), rng.uniform(30, 105, groups)
        dla_s, dla_demand_shares = gpu_s * rng.uniform(1.2, 2.2, groups), rng.uniform(0.3, 0.7, groups)
        moves_s = 1e-3 * rng.uniform(0.01, 0.1, (2, groups))
        layer_groups = [
            Group(
                f"{name}{index}",
                {
                    "gpu": UnitCost(gpu_s[index], demand_gb_s[index], out_s=moves_s[0, index]),
                    "dla": UnitCost(
                        dla_s[index], demand_gb_s[index] * dla_demand_shares[index], out_s=moves_s[1, index]
                    ),
                },
            )
            for index in range(groups)
        ]
        tasks.append(Task(name, tuple(layer_groups)))
    return Problem(chip(XAVIER), tuple(tasks))


def random_study(seeds: Sequence[int] = SEEDS, groups: int = GROUPS) -> ContentionStudy:
    """Study one random problem for each seed."""
    blind_plans = [plan_blindly(find_best(random_problem(seed, groups))) for seed in seeds]
    return ContentionStudy(f"{len(seeds)} random pairs of {groups} groups on Xavier", blind_plans)


def studies(
    paper: Paper,
    lab: Laboratory,
    tick: Tick | None = None,
    networks: Sequence[str] = tuple(NETWORKS),
    seeds: Sequence[int] = SEEDS,
) -> list[ContentionStudy]:
    """Study the cases of Tables 6 and 8, with demands as shipped and as fitted, and random problems."""
    table_6_cases = [row.case for row in experiments(paper) if row.case.soc != SNAPDRAGON]
    table_8_cases = [pair(*cell) for cell in places(networks, diagonal=False)]
    results = []
    for change in (AS_SHIPPED, lab.fitted):
        for cases, name in ((table_6_cases, "experiments of Table 6"), (table_8_cases, "pairs of Table 8")):
            suffix = "" if change == AS_SHIPPED else f", demands times {change.demand:g}"
            optima = lab.find([case.under(change) for case in cases], tick)
            blind_plans = [plan_blindly(optimum) for optimum in optima.values()]
            results.append(ContentionStudy(f"{len(cases)} {name}{suffix}", blind_plans))
    return [*results, random_study(seeds)]


def report_losses(out: Path, results: Sequence[ContentionStudy]) -> Exhibit:
    """Report the losses of planners that ignore contention: rows, a table and a picture of all studies."""
    rows = [row for study in results for row in _rows(study)]
    header = ("problems", "longer than ours %: mean", "most", "own estimate too low %: mean", "most")
    body = tuple(
        (
            study.name, f"{mean(study.losses):.2f}", f"{max(study.losses):.1f}", f"{mean(study.errors):.1f}",
            f"{max(study.errors):.1f}",
        )
        for study in results
    )  # fmt: skip
    table = Table("contention: the best schedule of one who knows none", header, body)
    return Exhibit(tuple(rows), (table,), (_picture(out, results),))


def _rows(study: ContentionStudy) -> list[Row]:
    """Rows with the mean loss of the blind schedules, and the mean error of the blind planner's estimates."""
    worse = sum(loss > 1 for loss in study.losses)
    return [
        Row(
            FIGURE, f"contention-blind optimum longer than ours, {study.name}, mean", None, mean(study.losses), "%",
            f"{max(study.losses):.1f} % at most; by more than 1 % in {worse} of {len(study.blind_plans)}; judged in "
            "the same simulator, with the better of its own starts and first come, first served",
        ),
        Row(
            FIGURE, f"its own estimate too low, {study.name}, mean", None, mean(study.errors), "%",
            f"{max(study.errors):.1f} % at most; the paper says of H2H and Herald 'wrong by up to 75 %'",
        ),
    ]  # fmt: skip


def _picture(out: Path, results: Sequence[ContentionStudy]) -> Figure:
    """Draw losses and errors as cumulative distributions over the problems of each study."""
    panels = []
    for field, label in (("losses", "longer than the optimum (%)"), ("errors", "own estimate too low (%)")):
        curves = []
        for study in results:
            values, (colour, dash) = sorted(getattr(study, field)), _style(study)
            shares = 100 * np.arange(1, len(values) + 1) / len(values)
            curves.append(Curve(values, shares, study.name, colour, dash=dash, steps=True))
        panels.append(Panel(curves, x=Axis(label=label), y=Axis(label="share of the problems (%)", low=0, high=102)))
    title = "A scheduler that knows no contention, judged with it"
    layout = {"size": (12, 4.6), "columns": 2, "legend_columns": 3}
    return pictures.picture(out, "contention-value", title, panels, **layout)


def _style(study: ContentionStudy) -> tuple[str, str]:
    """Colour and dash of a study's curve: colour by the demands or random problems, dash by the table."""
    if "random" in study.name:
        return SHADES[2], "-"
    return SHADES[1 if "demands times" in study.name else 0], "-" if "Table 8" in study.name else "--"
