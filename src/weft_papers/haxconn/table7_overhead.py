"""Table 7: the cost of the solver. The paper measures how much it slows networks down; that needs the chip.

What can be said without it: how long our solver keeps one core busy until the proof, for the same pairs. After that it
is idle; nothing is said here about the memory traffic of the core meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.reports.exhibits import Axis, Bars, Panel
from weft_papers import pictures
from weft_papers.base import Exhibit, Figure, Paper, Row, Table
from weft_papers.haxconn.lab import (
    COLOURS,
    NAMES,
    NETWORKS,
    OURS,
    XAVIER,
    CaseNetwork,
    LeastMakespan,
    SocCase,
    searched,
)

FIGURE = "Table 7"
PARTNERS = (*NETWORKS, "mobilenet-v2", "vgg16")
ESTIMATED_GROUPS = 16  # groups of an estimated profile; the time of the search grows fast with them


@dataclass(frozen=True)
class SearchCost:
    """The search for AlexNet with another network."""

    partner: str
    optimum: LeastMakespan


def case(partner: str) -> SocCase:
    """The case on Xavier, since AlexNet has no time on Orin."""
    derived = partner in NETWORKS
    other = CaseNetwork(partner) if derived else CaseNetwork(partner, origin="estimated", max_groups=ESTIMATED_GROUPS)
    return SocCase(XAVIER, (CaseNetwork("alexnet"), other))


def measure(partners: Sequence[str] = PARTNERS) -> list[SearchCost]:
    """One after the other in this process, after one that is not counted."""
    searched(case(partners[0]))
    return [SearchCost(partner, searched(case(partner))) for partner in partners]


def table_7(paper: Paper, out: Path, costs: Sequence[SearchCost]) -> Exhibit:
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
            f"{min(_printed(paper)):g} to {max(_printed(paper)):g} % for Z3",
        ),
    )  # fmt: skip
    return Exhibit(rows, (_table(paper, costs, phase_s),), (_picture(out, costs),))


def _printed(paper: Paper) -> list[float]:
    return [paper[f"t7_{partner}"].value for partner in PARTNERS]


def _table(paper: Paper, costs: Sequence[SearchCost], phase_s: float) -> Table:
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
