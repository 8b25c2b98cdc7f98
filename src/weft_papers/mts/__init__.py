"""MTS (Wang et al., SECON 2022): Fig. 2 and 6 to 9 run again, weight-shared models stitched into one graph.

The paper prints ratios; its bars are only drawn. Our numbers come from three sources, and every row names its source:
*counted* on the graphs or in closed form, *recorded* on an H200 beside today's methods (``recorded``), *measured now*
on this machine's CPU. ``closed.limits`` has what follows from the paper's formulas about its form but is not said.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.version import __version__
from weft_papers.base import Exhibit, Paper, Progress, Reproduction, Step, Tick, published, run_steps
from weft_papers.mts import (
    closed,
    counting,
    cpu,
    encoders,
    fig2_opportunity,
    fig6_latency,
    fig8_settings,
    recorded,
    zipping,
)
from weft_papers.mts.lab import PRUNED, SHARED, EvaluatedModels

PAPER = "mts"
NUMBERS = "mts/published"
COST, SEQ_LEN, QUERIES = "pipelined", 16, 60
QUERIES_PER_ROUND = 5  # turns the option --queries into timed rounds on the CPU: 60 are 12


def reproduce(
    out: Path,
    *,
    seq_len: int = SEQ_LEN,
    queries: int = QUERIES,
    cost: str = COST,
    progress: Progress | None = None,
    measured: Path | None = None,
) -> Reproduction:
    """Reproduce all parts and draw the pictures into the folder *out*.

    queries: five are one timed round on the CPU. measured: a result file of ``benchmarks/stitch_gpu.py`` to read
    instead of the one recorded on an H200. Raises InputError for other options.
    """
    if (cost, seq_len) != (COST, SEQ_LEN):
        raise InputError(f"{PAPER}: its networks see no tokens and are run, not modelled; leave seq_len and cost out")
    if queries < QUERIES_PER_ROUND:
        raise InputError(f"queries = {queries} must be at least {QUERIES_PER_ROUND}")
    record, rounds = recorded.read(measured), queries // QUERIES_PER_ROUND
    steps = _steps(published(NUMBERS), out, record, rounds)
    return run_steps(PAPER, steps, lambda: _settings(record, rounds), progress, "graphs")


def _steps(paper: Paper, out: Path, record: recorded.BenchRecord, rounds: int) -> list[Step]:
    """List the parts of the reproduction, in order; *rounds*: timed rounds on the CPU."""

    def count_graphs(tick: Tick) -> Exhibit:
        studies = [counting.study(EvaluatedModels(net, 1), tick=tick) for net in ("resnet18", "vgg16")]
        return counting.counts(paper, out, studies, record)

    return [
        ("Fig. 2", lambda tick: fig2_opportunity.figure_2(out, record)),
        ("Fig. 6", lambda tick: fig6_latency.figure_6(paper, out, record)),
        ("Fig. 7", lambda tick: fig6_latency.figure_7(paper, out, record)),
        ("Fig. 8", lambda tick: fig8_settings.figure_8(out, record)),
        ("Fig. 9", lambda tick: fig8_settings.figure_9(paper, out, record)),
        ("IV-C", lambda tick: closed.limits(out)),
        ("III", lambda tick: zipping.zipping(out, zipping.cards())),
        ("counted", count_graphs),
        ("CPU", lambda tick: cpu.on_cpu(out, cpu.time_task_counts(rounds, tick=tick))),
        ("encoders", lambda tick: encoders.encoders(out, encoders.read())),
    ]


def _settings(record: recorded.BenchRecord, rounds: int) -> dict[str, Any]:
    """Describe the models and the machines of the runs, for the JSON report."""
    return {
        "weft": __version__,
        "pruning": PRUNED,
        "sharing": SHARED,
        "models": "generated: the paper's architectures, weights at random, a normalisation for each task",
        "gpu": dict(record.machine),
        "gpu_versions": dict(record.versions),
        "gpu_settings": dict(record.settings),
        "cpu_rounds": rounds,
    }


__all__ = ["PAPER", "reproduce"]
