"""libnumber (Oh et al., PACT 2018; chapter III of Oh's dissertation): number formats tuned layer by layer.

Figures II.5 and III.4 to III.6 and Tables III.4 and III.5, for the four networks that can be trained from data in
packages. Searches take minutes and need the full data, so their results are *recorded*
(``benchmarks/number_formats.py``). Sizes, speeds and throughputs are *computed* from the record now, and every
configuration is *scored again* on held-out images of the project. For the large networks only the printed formats are
used, without a claim about their accuracy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.version import __version__
from weft_papers.base import Exhibit, Paper, Progress, Reproduction, Step, Tick, published, run_steps
from weft_papers.libnumber import (
    checked,
    fig2_widths,
    fig5_compression,
    fig6_speeds,
    large,
    recorded,
    sensitivity,
    table5_search,
)
from weft_papers.libnumber.lab import PAPER

COST, SEQ_LEN, QUERIES = "pipelined", 16, 60
FEWEST_QUERIES = 5  # below, filling and draining the pipeline dominates the throughput of the woven pairs
TUNE_AGAIN = "python training/fetch.py --to DATA; python benchmarks/number_formats.py --data DATA --again"


def reproduce(
    out: Path,
    *,
    seq_len: int = SEQ_LEN,
    queries: int = QUERIES,
    cost: str = COST,
    progress: Progress | None = None,
    measured: Path | None = None,
) -> Reproduction:
    """Reproduce all parts, except the searches, and draw the pictures into the folder *out*.

    queries: of each model in the simulated runs. measured: a result file of ``benchmarks/number_formats.py`` to read
    instead of the recorded one. Raises InputError for other options.
    """
    if (cost, seq_len) != (COST, SEQ_LEN):
        raise InputError(f"{PAPER}: its networks see no tokens and their costs are fixed; leave seq_len and cost out")
    if queries < FEWEST_QUERIES:
        raise InputError(f"queries = {queries} must be at least {FEWEST_QUERIES}")
    record = recorded.read(measured)
    steps = _steps(published(PAPER), out, record, queries)
    return run_steps(PAPER, steps, lambda: _settings(record, queries), progress, "networks")


def _steps(paper: Paper, out: Path, record: recorded.SearchRecord, queries: int) -> list[Step]:
    """List the parts of the reproduction, in order."""

    def check_scores(tick: Tick) -> Exhibit:
        return checked.checks(out, checked.score_again(record, tick=tick))

    return [
        ("Fig. II.5", lambda tick: fig2_widths.figure_2_5(paper, out, record)),
        ("Table III.4", lambda tick: fig5_compression.table_4(record)),
        ("large networks", lambda tick: large.printed_sizes(paper, out, record)),
        ("Table III.5", lambda tick: table5_search.table_5(paper, out, record)),
        ("Fig. III.4", lambda tick: table5_search.figure_4(paper, out, record)),
        ("Fig. III.5", lambda tick: fig5_compression.figure_5(paper, out, record)),
        ("Fig. III.6", lambda tick: fig6_speeds.figure_6(paper, out, record)),
        ("weaving", lambda tick: fig6_speeds.weaving(out, record, queries)),
        ("sensitivity", lambda tick: sensitivity.sensitivity(out, record)),
        ("scored again", check_scores),
    ]


def _settings(record: recorded.SearchRecord, queries: int) -> dict[str, Any]:
    """Describe the searches and the runs, for the JSON report."""
    return {
        "weft": __version__,
        "recorded_on": dict(record.machine),
        "recorded_settings": dict(record.settings),
        "networks": {name: net.training for name, net in record.nets.items()},
        "images": {name: dict(net.images) for name, net in record.nets.items()},
        "tune_again": TUNE_AGAIN,
        "queries": queries,
    }


__all__ = ["PAPER", "reproduce"]
