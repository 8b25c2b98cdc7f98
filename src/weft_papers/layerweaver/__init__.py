"""Layerweaver (HPCA'21): every table and figure of sections II-C and IV, ours beside the published numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.version import __version__
from weft.devices.costs import cost_model
from weft_papers.base import Exhibit, Paper, Progress, Reproduction, Step, Table, published, run_steps
from weft_papers.layerweaver import fig14_pairs, fig17_timelines, fig19_scaling, ours, sensitivity, table1_alone
from weft_papers.layerweaver.lab import MODELS, PAIRS, Scene, aimt_options, scenes

PAPER = "layerweaver"
LEAST_QUERIES = 8  # below, filling and draining the pipeline dominates the throughput


def reproduce(
    out: Path, *, seq_len: int = 16, queries: int = 60, cost: str = "pipelined", progress: Progress | None = None
) -> Reproduction:
    """Reproduce all parts and draw the pictures into the folder *out*.

    queries: queries per model in the runs behind Fig. 14 to 18; the sweeps over many settings use half as many.
    """
    cost_model(cost)
    if seq_len < 1 or queries < LEAST_QUERIES:
        raise InputError(f"seq_len = {seq_len} must be at least 1 and queries = {queries} at least {LEAST_QUERIES}")
    paper, settings = published(PAPER), scenes(seq_len, cost)
    steps = _steps(paper, out, settings, queries)
    return run_steps(PAPER, steps, lambda: _settings(settings, queries), progress)


def _steps(paper: Paper, out: Path, settings: tuple[Scene, Scene], queries: int) -> list[Step]:
    """List the parts of the reproduction in the paper's order; *settings*: its two scenes, (a) and (b)."""
    (a, b), fewer_queries = settings, max(LEAST_QUERIES, queries // 2)
    seq_len, cost = a.seq_len, a.cost

    def run_pairs() -> tuple[fig14_pairs.PairPanel, ...]:  # reports are cached, so Fig. 14 to 16 share the runs
        return fig14_pairs.panel("a", a, queries), fig14_pairs.panel("b", b, queries)

    return [
        ("Table I", lambda tick: table1_alone.table_one(paper)),
        ("Fig. 3", lambda tick: table1_alone.figure_3(paper, out, seq_len, cost)),
        ("Fig. 4", lambda tick: table1_alone.figure_4(out, seq_len, cost)),
        ("layer latencies", lambda tick: table1_alone.layer_latencies(paper, seq_len, cost)),
        ("scheduler speed", lambda tick: _speed(paper)),
        ("Fig. 14", lambda tick: fig14_pairs.figure_14(paper, out, run_pairs())),
        ("AI-MT sweep", lambda tick: fig14_pairs.sweep_picture(paper, out, run_pairs())),
        ("Fig. 15", lambda tick: fig14_pairs.figure_15(paper, out, run_pairs())),
        ("Fig. 16", lambda tick: fig14_pairs.figure_16(paper, out, run_pairs())),
        ("Fig. 17", lambda tick: fig17_timelines.figure_17(out, a, queries)),
        ("Fig. 18", lambda tick: fig17_timelines.figure_18(out, b, queries)),
        ("Fig. 19", lambda tick: fig19_scaling.figure_19(out, settings, fewer_queries)),
        ("Fig. 20", lambda tick: fig19_scaling.figure_20(paper, out, seq_len, cost, fewer_queries)),
        ("sequence length", lambda tick: sensitivity.sequence_length(paper, out, settings, fewer_queries)),
        ("weight loading", lambda tick: sensitivity.weight_loading(paper, out, settings, fewer_queries)),
        ("cost models", lambda tick: sensitivity.cost_models(paper, out, settings, fewer_queries)),
        ("weight buffer", lambda tick: sensitivity.weight_buffer(out, settings, fewer_queries)),
        ("NCF tables", lambda tick: sensitivity.table_chunks(out, settings, fewer_queries)),
        ("weft and the bound", lambda tick: ours.near_the_bound(out, settings, queries)),
        ("small buffer", lambda tick: ours.small_buffer(settings, fewer_queries)),
    ]


def _speed(paper: Paper) -> Exhibit:
    """Row that refers to `make bench`: scheduler speed is a property of the machine, so it is not measured here."""
    printed = paper["scheduler_speed"]
    row = ("two models", f"{printed.value:g} {printed.unit} (one core of an i7-7700K)", "run `make bench`")
    return Exhibit(tables=(Table("III-E: scheduler speed", ("what", "paper", "ours"), (row,)),))


def _settings(settings: tuple[Scene, ...], queries: int) -> dict[str, Any]:
    """Describe the assumptions of the runs, for the JSON report."""
    return {
        "weft": __version__,
        "seq_len": settings[0].seq_len,
        "cost": settings[0].cost,
        "queries": queries,
        "models": MODELS,
        "pairs": len(PAIRS),
        "scenarios": [
            {
                "device": scene.npu.name,
                "batch": scene.batch,
                "aimt": dict(aimt_options(scene)),
                "activation_buffer": "as large as the models need (section III-E)",
            }
            for scene in settings
        ],
    }


__all__ = ["PAPER", "reproduce"]
