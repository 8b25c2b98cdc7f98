"""Table 7 and Fig. 7: the cost of the solver, and the latency while it still improves the schedule.

In Table 7 the paper measures how much the solver slows the networks down, which needs the chip. This module measures
how long our solver keeps one core busy until the proof, for the same pairs. The memory traffic of that core meanwhile
is not measured.

In Fig. 7 the set of networks changes every ten seconds, and each better schedule of the solver replaces the one in use,
at first a naive one. The networks are those of experiments 2, 5 and 1. The time axis is the search time on one core of
this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Curve, Panel, ReferenceLine
from weft_map.solver import NAIVE, Improvement, Options, Solution, solve
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table
from weft_papers.haxconn.lab import (
    COLOURS,
    LABELS,
    NAMES,
    NETWORKS,
    OURS,
    TIME_LIMIT_S,
    XAVIER,
    CaseNetwork,
    Experiment,
    LeastMakespan,
    SocCase,
    experiments,
    search_case,
)

FIGURE = "Table 7"
PARTNERS = (*NETWORKS, "mobilenet-v2", "vgg16")
ESTIMATED_GROUPS = 16  # groups of an estimated profile; the time of the search grows fast with them


@dataclass(frozen=True)
class SearchCost:
    """The best schedule of AlexNet with another network, and the processor time of its search."""

    partner: str
    optimum: LeastMakespan


def case(partner: str) -> SocCase:
    """AlexNet with *partner* on Xavier, since AlexNet has no time on Orin."""
    derived = partner in NETWORKS
    other = CaseNetwork(partner) if derived else CaseNetwork(partner, origin="estimated", max_groups=ESTIMATED_GROUPS)
    return SocCase(XAVIER, (CaseNetwork("alexnet"), other))


def measure(partners: Sequence[str] = PARTNERS) -> list[SearchCost]:
    """Search AlexNet with every partner, one after the other in this process."""
    # An uncounted search loads the compiled code, so that the first counted one need not.
    search_case(case(partners[0]))
    return [SearchCost(partner, search_case(case(partner))) for partner in partners]


def table_7(paper: Paper, out: Path, costs: Sequence[SearchCost]) -> Exhibit:
    """Reproduce Table 7 as far as it can be without the chip: the processor time of our solver."""
    phase_s, slowest = paper["phase_s"].value, max(costs, key=lambda cost: cost.optimum.cpu_s)
    share = 100 * slowest.optimum.cpu_s / phase_s
    proved = sum(cost.optimum.certificate.proved for cost in costs)
    rows = (
        Row(
            FIGURE, "one core busy until the proof, slowest pair", None, slowest.optimum.cpu_s, " s",
            f"AlexNet + {NAMES[slowest.partner]}; {proved} of {len(costs)} proved; on this machine; the paper's Z3: "
            "under three seconds on a core of Orin in almost all experiments, about ten in rare ones",
        ),
        Row(
            FIGURE, f"the same as a share of a phase of {phase_s:g} s", None, share, "%",
            f"of one core, no slow-down of networks: that cannot be measured without the chip; the paper measures "
            f"{min(_printed_values(paper)):g} to {max(_printed_values(paper)):g} % for Z3",
        ),
    )  # fmt: skip
    return Exhibit(rows, (_table(paper, costs, phase_s),), (_picture(out, costs),))


def _printed_values(paper: Paper) -> list[float]:
    return [paper[f"t7_{partner}"].value for partner in PARTNERS]


def _table(paper: Paper, costs: Sequence[SearchCost], phase_s: float) -> Table:
    """Table of the search for AlexNet with every partner, beside the printed overhead."""
    body = tuple(
        (
            NAMES[cost.partner], str(len(cost.optimum.outcome.problem.tasks[1].groups)),
            f"{paper[f't7_{cost.partner}'].value:g}", f"{1e3 * cost.optimum.cpu_s:.0f}",
            f"{100 * cost.optimum.cpu_s / phase_s:.2f}", str(cost.optimum.certificate.states),
            "yes" if cost.optimum.certificate.proved else "no",
        )
        for cost in costs
    )  # fmt: skip
    header = (
        "AlexNet beside", "groups", "paper: networks slowed by Z3 %", "ours: core busy ms", f"share of {phase_s:g} s %",
        "states", "proved",
    )  # fmt: skip
    return Table(f"{FIGURE}: the paper's overhead, and how long our solver takes a core of this machine", header, body)


def _picture(out: Path, costs: Sequence[SearchCost]) -> Figure:
    busy = {"core busy until the proof": [1e3 * cost.optimum.cpu_s for cost in costs]}
    bars = Bars([NAMES[cost.partner] for cost in costs], busy, dict.fromkeys(busy, COLOURS[OURS]))
    panel = Panel([bars], x=Axis(slant=25), y=Axis(label="ms of one core"))
    title = f"{FIGURE}: our solver, AlexNet beside each network on Xavier"
    return pictures.picture(out, "table7-solver", title, [panel], size=(9, 3.6))


FIGURE_7 = "Fig. 7"
ORDER = (2, 5, 1)
"""The numbers of the experiments in Table 6 that Fig. 7 runs, in order."""
FIRST_MS, LAST_MS = 1.0, 10_000.0
"""Ends of the logarithmic time axis: milliseconds after a change."""


@dataclass(frozen=True)
class Phase:
    """Ten seconds with the same networks, and the search for their schedule during that time."""

    row: Experiment
    solution: Solution

    @property
    def start_ms(self) -> float:
        """Makespan in milliseconds of the best naive schedule, with which a phase starts."""
        return 1e3 * min(self.solution.baselines[name].makespan_s for name in NAIVE)

    @property
    def oracle_ms(self) -> float:
        """The makespan of the best schedule, as if it were known from the start (the paper's oracle)."""
        return 1e3 * self.solution.certificate.value

    @property
    def steps(self) -> list[Improvement]:
        """The schedules that are better than the naive ones, in the order in which the solver found them."""
        # The tolerance: an equal makespan that differs by rounding is no improvement.
        return [step for step in self.solution.improvements if 1e3 * step.value < self.start_ms * (1 - 1e-9)]

    def at(self, ms: float) -> float:
        """Latency per frame in milliseconds, *ms* milliseconds after the change of networks."""
        return min([self.start_ms, *(1e3 * step.value for step in self.steps if 1e3 * step.seconds <= ms)])

    @property
    def found_ms(self) -> float:
        """When the optimal schedule was found, in milliseconds after the change."""
        return 1e3 * self.steps[-1].seconds if self.steps else 0.0


def updates_ms(paper: Paper) -> list[float]:
    """The times at which the paper replaces schedules, in milliseconds after a change."""
    updates = [paper[f"update_{number}"] for number in range(1, 6)]
    return [update.value * (1e3 if update.unit == "s" else 1) for update in updates]


def run(paper: Paper, order: Sequence[int] = ORDER) -> list[Phase]:
    """Search the experiments with the numbers *order*, one after the other in this process.

    The first is run once before without being counted, because it loads compiled code.
    """
    rows = {row.number: row for row in experiments(paper)}
    options = Options(time_limit_s=TIME_LIMIT_S)
    solve(rows[order[0]].case.problem, options)
    return [Phase(rows[number], solve(rows[number].case.problem, options)) for number in order]


def figure_7(paper: Paper, out: Path, phases: Sequence[Phase]) -> Exhibit:
    """Reproduce Fig. 7: latency per frame after the networks change, while the solver improves the schedule."""
    times = updates_ms(paper)
    rows = [row for phase in phases for row in _rows(paper, phase, times)]
    return Exhibit(tuple(rows), (_changing_table(phases, times),), (_changing_picture(out, phases, times),))


def _rows(paper: Paper, phase: Phase, times: Sequence[float]) -> list[Row]:
    """Rows with the time until the optimum of a phase, and by how much the latency is still above it in the middle.

    times: of the paper's five updates, in ms after the change; the middle is the third.
    """
    certificate, printed = phase.solution.certificate, paper[f"converged_{phase.row.number}"].value
    proof_s = certificate.first_proof_s if certificate.first_proof_s is not None else certificate.seconds
    first, middle_ms = phase.steps[0] if phase.steps else None, times[2]
    begin = f"the first better one after {1e3 * first.seconds:.0f} ms; " if first else ""
    excess_percent = 100 * (phase.at(middle_ms) / phase.oracle_ms - 1)
    why = (
        f"{begin}proved after {1e3 * proof_s:.0f} ms; on a core of this machine, theirs Z3 on a core of Orin; which of "
        "the pairs the printed times belong to follows the order of the experiments"
    )
    quantity = f"optimal schedule found, {phase.row.name}"
    return [
        Row(FIGURE_7, quantity, printed, phase.found_ms / 1e3, " s", why),
        Row(
            FIGURE_7, f"above the optimum after {middle_ms:g} ms, {phase.row.name}", None, excess_percent, "%",
            f"from {phase.start_ms:.2f} ms by {LABELS[_best_naive(phase)]} to {phase.oracle_ms:.2f}; after "
            f"{times[0]:g} ms {100 * (phase.at(times[0]) / phase.oracle_ms - 1):.1f} %",
        ),
    ]  # fmt: skip


def _best_naive(phase: Phase) -> str:
    """The name of the naive schedule that the phase starts with."""
    return min(NAIVE, key=lambda name: phase.solution.baselines[name].makespan_s)


def _changing_table(phases: Sequence[Phase], times: Sequence[float]) -> Table:
    """Table of the latency per frame of every phase at the paper's update times."""
    body = []
    for phase in phases:
        values = [f"{phase.at(ms):.3f}" for ms in times]
        body.append(
            (phase.row.name, f"{phase.start_ms:.3f}", *values, f"{phase.oracle_ms:.3f}", f"{phase.found_ms:.0f}")
        )
    header = ("networks", "naive ms", *(f"after {ms:g} ms" for ms in times), "oracle ms", "found after ms")
    return Table(f"{FIGURE_7}: latency per frame after a change, demands as shipped", header, tuple(body))


def _changing_picture(out: Path, phases: Sequence[Phase], times: Sequence[float]) -> Figure:
    title = f"{FIGURE_7}: schedules replaced while the networks run"
    panels = [_panel(phase, times) for phase in phases]
    return pictures.picture(out, "fig7-changes", title, panels, size=(13, 4.4), columns=len(phases))


def _panel(phase: Phase, times: Sequence[float]) -> Panel:
    """Latency per frame over the time since a change: our steps, the optimum, and the paper's update times."""
    points = [
        (FIRST_MS, phase.start_ms),
        *((max(FIRST_MS, 1e3 * step.seconds), 1e3 * step.value) for step in phase.steps),
    ]
    times_ms, values_ms = zip(*points, (LAST_MS, points[-1][1]), strict=True)
    return Panel(
        [
            Curve(times_ms, values_ms, f"{OURS}, running", COLOURS[OURS], steps=True),
            ReferenceLine(phase.oracle_ms, colour="#e69f00", width=1.2, label="oracle, proved optimal"),
            Curve(times, [phase.at(ms) for ms in times], "the paper's updates", COLOURS["haxconn"], "*", "", size=13),
        ],
        phase.row.name,
        Axis(label="after the change (ms)", scale="log", low=FIRST_MS, high=LAST_MS),
        Axis(label="latency per frame (ms)", low=0.94 * phase.oracle_ms, high=1.04 * phase.start_ms),
    )
