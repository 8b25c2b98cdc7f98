"""Models that run at the same time on one GPU, with deadlines: goals and results.

No paper has these experiments, so rows have our goals in place of published numbers. Loads run on the simulated H200
(``lab``). Longer simulations and measurements on a real H200 are recorded; every table and row names its source.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.base.version import __version__
from weft_papers.base import Progress, Reproduction, Step, run_steps
from weft_papers.gpu import checks, deadlines, endless, lab, timeline
from weft_papers.gpu.lab import h200

NAME = "gpu"
COST, SEQ_LEN, QUERIES = "pipelined", 16, 60
SECONDS_PER_ROUND = 0.001
"""Simulated seconds of a run per unit of the option --queries; runs with few requests are multiples of it."""
LEAST_ROUNDS = 8
"""With 5 rounds, some of the models side by side complete no request and have no speed to compare with."""
LEAST_URGENT_S = 0.16
"""Shortest run of an urgent model, so that each has a p99: in 0.153 s no request of one of them arrives, in 0.156 s
each has one. Arrivals are seeded, so this is the same on every machine."""


def reproduce(
    out: Path,
    *,
    seq_len: int = SEQ_LEN,
    queries: int = QUERIES,
    cost: str = COST,
    progress: Progress | None = None,
    measured: Path | None = None,
) -> Reproduction:
    """Run all loads and draw the pictures and a page into *out*.

    queries: rounds of work; the simulated time of a run is proportional to it. measured: a result file of
    ``benchmarks/gpu_abreast.py`` to read instead of the shipped one. Raises InputError for other options or lengths.
    """
    if (cost, seq_len) != (COST, SEQ_LEN):
        raise InputError(f"{NAME}: its models are measured, not modelled; leave seq_len and cost out")
    if not LEAST_ROUNDS <= queries <= 100_000:
        raise InputError(f"queries = {queries} must be from {LEAST_ROUNDS} to 100000")
    seconds, records = queries * SECONDS_PER_ROUND, lab.read(measured)
    # Runs with few requests are longer: those of an urgent model, and those with deadlines.
    urgent_s = max(3 * seconds, LEAST_URGENT_S)
    steps: list[Step] = [
        ("pairs of models", lambda tick: checks.predicted(out)),
        ("side by side", lambda tick: endless.side_by_side(out, seconds, records, tick)),
        ("urgent beside heavy", lambda tick: endless.urgent_beside(out, urgent_s, records, tick)),
        ("five models", lambda tick: deadlines.five_models(out, 4 * seconds, records, tick)),
        ("Orion's pairs", lambda tick: deadlines.against_orion(out, urgent_s, records, tick)),
        ("decisions", lambda tick: checks.decisions()),
        ("shares over time", lambda tick: timeline.shares_over_time(out)),
    ]
    return run_steps(NAME, steps, lambda: _settings(seconds, records), progress, "loads")


def _settings(seconds: float, records: lab.Records) -> dict[str, Any]:
    """Describe the device and the runs, for the JSON report."""
    device = h200()
    return {
        "weft": __version__,
        "device": device.name,
        "source": device.source,
        "simulated_s": seconds,
        "measured": sorted(records.measured),
    }
