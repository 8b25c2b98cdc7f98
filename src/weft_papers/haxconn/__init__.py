"""HaX-CoNN (Dagli and Belviranli, PPoPP 2024): Tables 2 and 5 to 8 and Fig. 1 and 5 to 7 run again, beside ours.

HaX-CoNN schedules layer groups of several networks on the GPU and the DLA of one chip, and accounts for memory
contention. The paper prints times of whole networks and results; times of single groups only for GoogLeNet. So the
profiles of the others are derived. Their memory demands are used twice: as derived, and scaled to fit one column of
Table 6. The last part varies the assumptions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.version import __version__
from weft_papers.base import Exhibit, Paper, Progress, Reproduction, Step, Tick, published, run_steps
from weft_papers.fluid_batching.lab import Bench
from weft_papers.haxconn import (
    contention,
    fig1_schedules,
    sensitivity,
    table2_profiles,
    table6_comparison,
    table7_overhead,
    table8_pairs,
)
from weft_papers.haxconn.lab import AS_SHIPPED, IMPROVED, TIME_LIMIT_S, Laboratory, experiments, fit_demand

PAPER = "haxconn"
COST, SEQ_LEN, QUERIES = "pipelined", 16, 60


def reproduce(
    out: Path,
    *,
    seq_len: int = SEQ_LEN,
    queries: int = QUERIES,
    cost: str = COST,
    progress: Progress | None = None,
    processes: int | None = None,
) -> Reproduction:
    """Reproduce all parts and draw the pictures into the folder *out*; *processes*: number of worker processes."""
    if (cost, seq_len, queries) != (COST, SEQ_LEN, QUERIES):
        raise InputError(
            f"{PAPER}: its networks see no tokens, run once and have profiles instead of a cost model; leave "
            "seq_len, queries and cost out"
        )
    paper = published(PAPER)
    with Bench(processes) as bench:
        lab = Laboratory(bench, fit_demand(paper))
        return run_steps(PAPER, _steps(paper, out, lab), lambda: _settings(paper, lab), progress, "searches")


def _steps(paper: Paper, out: Path, lab: Laboratory) -> list[Step]:
    """List the parts of the reproduction, in order. Nothing is searched yet; *lab* searches each case only once."""
    fitted = lab.fitted.demand

    def search_grids(tick: Tick) -> tuple[table8_pairs.Grid, table8_pairs.Grid]:
        return table8_pairs.grid(lab, tick=tick), table8_pairs.grid(lab, lab.fitted, tick=tick)

    def vary_assumptions(tick: Tick) -> Exhibit:
        knobs = sensitivity.knobs(fitted)
        # The first knob replaces the scale of the demands. The others vary the contention model, which has little
        # effect under the small demands as shipped; they start from the fitted ones.
        bases = [AS_SHIPPED, *[lab.fitted] * (len(knobs) - 1)]
        studies = [
            sensitivity.study(paper, lab, knob, base, tick=tick) for knob, base in zip(knobs, bases, strict=True)
        ]
        return sensitivity.sensitivity(out, studies)

    return [
        ("Table 2", lambda tick: table2_profiles.table_2(paper, out)),
        ("Table 5", lambda tick: table2_profiles.table_5(paper, out)),
        ("Fig. 1", lambda tick: fig1_schedules.figure_1(paper, out, lab, tick)),
        ("Table 6", lambda tick: table6_comparison.table_6(out, table6_comparison.compare(paper, lab, tick), lab)),
        ("Table 7", lambda tick: table7_overhead.table_7(paper, out, table7_overhead.measure())),
        ("Fig. 7", lambda tick: table7_overhead.figure_7(paper, out, table7_overhead.run(paper))),
        ("Fig. 6", lambda tick: fig1_schedules.figure_6(paper, out, fig1_schedules.meet(lab, tick=tick), fitted)),
        ("Table 8", lambda tick: table8_pairs.table_8(paper, out, *search_grids(tick))),
        ("Fig. 5", lambda tick: table8_pairs.figure_5(paper, out, *search_grids(tick))),
        ("contention", lambda tick: contention.report_losses(out, contention.studies(paper, lab, tick))),
        ("sensitivity", vary_assumptions),
    ]


def _settings(paper: Paper, lab: Laboratory) -> dict[str, Any]:
    """Describe the assumptions of the runs, for the JSON report."""
    return {
        "weft": __version__,
        "profiles": "derived, except GoogLeNet in Table 2 and Fig. 6 and the pair with measured groups",
        "fitted_demand": lab.fitted.demand,
        "fitted_to": "GPU & DSA of Table 6, experiments "
        + ", ".join(str(row.number) for row in experiments(paper) if row.fits),
        "time_limit_s": TIME_LIMIT_S,
        "improved_from": IMPROVED,
        "repeats": "Table 8: the slower network's time on the GPU over the faster one's, rounded",
        "readings": {str(row.number): row.reading for row in experiments(paper)},
        "random_seeds": list(contention.SEEDS),
    }


__all__ = ["PAPER", "reproduce"]
