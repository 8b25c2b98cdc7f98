"""Layerweaver+ (Oh, dissertation, chapter V): Fig. V.5 to V.7 reproduced, and their assumptions varied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.version import __version__
from weft_papers.base import Paper, Progress, Reproduction, Step, published, run_steps
from weft_papers.layerweaver_plus import fig5_throughput, fig6_tails, sensitivity
from weft_papers.layerweaver_plus.lab import (
    DEVICE,
    LIMIT,
    PAIRS,
    RATIOS,
    SCHEDULERS,
    SEEDS,
    TOLERANCE,
    StreamPair,
)

PAPER = "layerweaver-plus"
COST = "pipelined"
QUERIES_PER_S = 15  # turns the option --queries into simulated seconds: 60 are 4 s
LEAST_QUERIES = 8  # below, a run has too few requests to tell 1 % of violations


def reproduce(
    out: Path, *, seq_len: int = 16, queries: int = 60, cost: str = COST, progress: Progress | None = None
) -> Reproduction:
    """Reproduce all parts and draw the pictures into the folder *out*.

    queries: the length of the runs; 15 make a simulated second. Raises InputError for other cost models or lengths.
    """
    if cost != COST:
        raise InputError(f"{PAPER}: the search for sustainable loads prices layers by {COST!r} only, not {cost!r}")
    if seq_len < 1 or queries < LEAST_QUERIES:
        raise InputError(f"seq_len = {seq_len} must be at least 1 and queries = {queries} at least {LEAST_QUERIES}")
    base = StreamPair(PAIRS[0], seq_len=seq_len, duration_s=queries / QUERIES_PER_S)
    steps = _steps(published(PAPER), out, base)
    return run_steps(PAPER, steps, lambda: _settings(base), progress, "searches")


def _steps(paper: Paper, out: Path, base: StreamPair) -> list[Step]:
    """List the parts of the reproduction, in order; *base* has the settings that all streams share."""
    return [
        ("Fig. V.5", lambda tick: fig5_throughput.figure_5(out, fig5_throughput.sweep(base, tick=tick))),
        ("Fig. V.6", lambda tick: fig6_tails.figure_6(paper, out, fig6_tails.panels(paper, base, tick))),
        ("Fig. V.7", lambda tick: fig5_throughput.figure_7(out, fig5_throughput.study(base, tick))),
        ("batching", lambda tick: sensitivity.batching(out, base, tick)),
        ("sequence length", lambda tick: sensitivity.sequence_length(out, base, tick)),
        ("stretch", lambda tick: sensitivity.stretch(out, base, tick)),
    ]


def _settings(base: StreamPair) -> dict[str, Any]:
    """Describe the assumptions of the runs, for the JSON report."""
    return {
        "weft": __version__,
        "device": DEVICE,
        "activation_buffer": "as large as the models need (Layerweaver, section III-E)",
        "seq_len": base.seq_len,
        "cost": COST,
        "duration_s": base.duration_s,
        "seeds": SEEDS,
        "violation_limit": LIMIT,
        "tolerance": TOLERANCE,
        "max_batch": base.max_batch,
        "batch_timeout_ms": base.timeout_ms,
        "deadline_ms": [base.vision_ms, base.language_ms],
        "pairs": len(PAIRS),
        "ratios": len(RATIOS),
        "schedulers": {
            scheduler.name: {"policy": scheduler.policy, "late": scheduler.late, **dict(scheduler.options)}
            for scheduler in SCHEDULERS
        },
    }


__all__ = ["PAPER", "reproduce"]
