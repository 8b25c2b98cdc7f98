"""Fluid Batching (Kouris, Venieris et al.): Tables I and II and Fig. 1b and 7 to 10 run again, beside ours.

Samples leave at early exits, so batches shrink and are refilled. The settings state what the paper leaves open, above
all the bandwidth, and the last parts vary it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from weft.base.errors import InputError
from weft.base.version import __version__
from weft.devices import load_platform
from weft_papers.base import Exhibit, Paper, Progress, Reproduction, Step, Tick, published, run_steps
from weft_papers.fluid_batching import fig7_traffic, fig10_strategies, sensitivity, table1_designs, table2_comparison
from weft_papers.fluid_batching.lab import DECISION_US, DRAWN, EXIT_RATES, MAX_BATCH, SEEDS, SPOTS, Bench, npu, tile

PAPER = "fluid-batching"
COST, SEQ_LEN = "pipelined", 16
LEAST_QUERIES = 8  # below, a point of a figure has too few samples for shares of 1 % late
ROW, POINT = 4000, 400
"""Samples of each seed per unit of the option --queries: in a row of Table II, in a point of a figure."""


class Lengths(NamedTuple):
    """Samples of each seed, in a run of a row of Table II and in a run of a point of a figure."""

    row: int
    point: int


def reproduce(
    out: Path,
    *,
    seq_len: int = SEQ_LEN,
    queries: int = 60,
    cost: str = COST,
    progress: Progress | None = None,
    processes: int | None = None,
) -> Reproduction:
    """Reproduce all parts and draw the pictures into the folder *out*.

    queries: the length of the runs; a unit is 4000 samples of each seed in Table II and 400 in the figures.
    processes: number of worker processes.
    """
    if cost != COST or seq_len != SEQ_LEN:
        raise InputError(
            f"{PAPER}: its networks see no tokens and its NPUs have a cost model of their own; leave both out"
        )
    if queries < LEAST_QUERIES:
        raise InputError(f"queries = {queries} must be at least {LEAST_QUERIES}")
    lengths = Lengths(ROW * queries, POINT * queries)
    with Bench(processes) as bench:
        steps = _steps(published(PAPER), out, bench, lengths)
        return run_steps(PAPER, steps, lambda: _settings(lengths), progress)


def _steps(paper: Paper, out: Path, bench: Bench, lengths: Lengths) -> list[Step]:
    """List the parts of the reproduction, in order; nothing runs yet. Their runs go through *bench*."""
    row, point = lengths

    def draw_traffic(plan: fig7_traffic.TrafficSweep, tick: Tick) -> Exhibit:
        return fig7_traffic.figure(paper, out, fig7_traffic.sweep(paper, bench, point, plan, tick))

    def run_deadline_panels(tick: Tick) -> list[fig7_traffic.DeadlinePanel]:
        return [fig7_traffic.panel(paper, bench, point, plan, tick) for plan in fig7_traffic.PANELS]

    return [
        ("Table I", lambda tick: table1_designs.table_1(paper, out)),
        ("Fig. 1b", lambda tick: fig10_strategies.figure_1b(out)),
        ("Fig. 10", lambda tick: fig10_strategies.figure_10(out, fig10_strategies.scenes())),
        ("Table II", lambda tick: table2_comparison.table_2(out, table2_comparison.compare(paper, bench, row, tick))),
        ("Fig. 7", lambda tick: draw_traffic(fig7_traffic.FIGURES[0], tick)),
        ("Fig. 8", lambda tick: draw_traffic(fig7_traffic.FIGURES[1], tick)),
        ("Fig. 9", lambda tick: fig7_traffic.figure_9(out, run_deadline_panels(tick))),
        # The rows of Table II again, with a fifth of their samples.
        ("bandwidth", lambda tick: sensitivity.bandwidth(paper, out, bench, 2 * point, tick)),
        ("decisions", lambda tick: sensitivity.decisions(paper, out, bench, 2 * point, tick)),
        ("readings", lambda tick: sensitivity.readings(paper, out, bench, 2 * point, tick)),
    ]


def _settings(lengths: Lengths) -> dict[str, Any]:
    """Describe the assumptions and the hardware of the runs, for the JSON report."""
    return {
        "weft": __version__,
        "bandwidth_gb_s": {board: load_platform(board).bandwidth_gb_s for board in ("zc706", "zcu104")},
        "max_batch": MAX_BATCH,
        "decision_us": DECISION_US,
        "exit_rates": EXIT_RATES,
        "exits": "at the block ends nearest to equal shares of the MACs; heads: pooling and one fully connected layer",
        "elementwise": "free",
        "seeds": list(SEEDS),
        "samples_per_seed": lengths._asdict(),
        "warmup_s": 0,
        "hardware": {spot.name: {name: tile(npu(spot, name)) for name in table1_designs.USED} for spot in SPOTS},
        "schedulers": {
            scheduler.name: {
                "policy": scheduler.policy,
                "late": scheduler.late,
                "hardware": scheduler.hardware,
                **dict(scheduler.options),
            }
            for scheduler in DRAWN
        },
    }


__all__ = ["PAPER", "reproduce"]
