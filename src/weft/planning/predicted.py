"""What is predicted of a way to serve: at the asked load, and the largest load that keeps the deadlines."""

from __future__ import annotations

from weft.planning.asked import Asked
from weft.planning.plan import Prediction, StreamPrediction
from weft.planning.trials import LOWEST, USUAL, Trial, late_rule, run_workload
from weft.reports.requests import RequestReport
from weft.simulation.sustain import Question, sustain

SEEDS, TOLERANCE = 2, 0.02
FRESH_SEED = 1000
"""Added to the workload's seed for what is told: requests other than those that the choice was made by."""
STRIDE = 1.08
"""The choice knows the largest load nearly; so far apart are the loads that are tried first."""


def prediction(asked: Asked, report: RequestReport, memory_bytes: int, factor: float | None) -> Prediction:
    """A run at the asked load, and the largest load, as a plan tells them."""
    streams = tuple(
        StreamPrediction(
            model=stream.served_name,
            rate=rate,
            deadline_ms=stream.deadline_ms,
            p50_ms=_ms(found.p50_s),
            p99_ms=_ms(found.p99_s),
            missed=round(found.violation_rate, 6),
        )
        for stream, rate, found in zip(asked.workload.stream, asked.workload.rates, report.streams, strict=True)
    )
    return Prediction(
        streams=streams,
        load=round(report.load or 0.0, 4),
        sustainable_factor=None if factor is None else round(factor, 4),
        sustainable_per_s=None if factor is None else round(factor * asked.per_s, 3),
        memory_bytes=memory_bytes,
    )


def largest_load(trial: Trial) -> float:
    """The largest multiple of the asked load that the winner sustains, by requests it was not chosen by."""
    asked, arrangement = trial.asked, trial.arrangement
    if trial.level() < LOWEST:
        return 0.0
    workload = run_workload(asked, arrangement, trial.factor, USUAL)
    question = Question(
        workload.model_copy(update={"seed": asked.workload.seed + FRESH_SEED}),
        arrangement.settings.policy,
        late=late_rule(asked, arrangement),
        options=tuple(arrangement.settings.policy_options.items()),
        limit=asked.limit,
        seeds=SEEDS,
        tolerance=TOLERANCE,
        stride=STRIDE,
    )
    return trial.factor * sustain(question, arrangement.host).factor


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 4)
