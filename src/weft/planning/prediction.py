"""Prediction of a plan for other loads and requests, and its comparison with a measured run of its workload."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from weft.base.errors import PlanError
from weft.devices import Host, read_host
from weft.load import LoadResult, StreamLoad
from weft.planning.plan import HOST_FILE, Plan, Prediction, StreamPrediction
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.requests import Workload

SAME_RATE = 0.001
"""Largest relative difference of two rates that may be due to rounding in a file."""
SAME_EXITS = 0.1
"""Largest difference without a remark between the planned and the measured share of requests at an exit."""
_REPORTED_SETTINGS = ("device", "lanes", "threads", "policy", "policy_options", "late")
"""Settings that a server reports in its profile."""


def planned_host(folder: str | Path) -> Host:
    """Return the measured machine for which a plan was made."""
    file = Path(folder) / HOST_FILE
    if not file.is_file():
        raise PlanError(f"{folder}: the plan has no {HOST_FILE}, so that nothing else can be predicted; plan again")
    return read_host(file)


def predict(plan: Plan, host: Host, workload: Workload) -> Prediction:
    """Simulate a server of the plan under these requests; arrivals are drawn with the workload's seed."""
    late = "drop" if plan.deadlines == "strict" else plan.settings.late
    report = simulate_requests(
        prepare(_set_batches(plan, workload), host),
        plan.settings.policy,
        late=late,
        options=plan.settings.policy_options,
        seed=workload.seed,
    ).report
    return Prediction(
        streams=stream_predictions(workload, report),
        load=round(report.load or 0.0, 4),
        memory_bytes=plan.predicted.memory_bytes,
    )


def stream_predictions(workload: Workload, report: RequestReport) -> tuple[StreamPrediction, ...]:
    """Return the figures of each stream in a simulated run."""
    return tuple(
        StreamPrediction(
            model=stream.served_name,
            rate=rate,
            deadline_ms=stream.deadline_ms,
            p50_ms=_rounded_ms(figures.p50_s),
            p99_ms=_rounded_ms(figures.p99_s),
            p99_max_of=figures.p99_max_of,
            missed=round(figures.violation_rate, 6),
            exit_rates=workload.exit_rates(index),
        )
        for index, (stream, rate, figures) in enumerate(
            zip(workload.stream, workload.rates, report.streams, strict=True)
        )
    )


def _set_batches(plan: Plan, workload: Workload) -> Workload:
    """Return the workload with the plan's batch limits."""
    limits = {model.name: (model.max_batch, model.batch_timeout_ms) for model in plan.models}
    if plan.options:  # the chosen one has the names in requests, also of models in stitched files
        limits |= {name: (model.max_batch, model.batch_timeout_ms) for name, model in plan.options[0].models.items()}
    streams = []
    for stream in workload.stream:
        if stream.served_name not in limits:
            raise PlanError(f"{stream.served_name} is not in the plan, which has {', '.join(limits)}")
        max_batch, timeout_ms = limits[stream.served_name]
        streams.append(stream.model_copy(update={"max_batch": max_batch, "batch_timeout_ms": timeout_ms}))
    return workload.model_copy(update={"stream": tuple(streams)})


def _rounded_ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 4)


@dataclass(frozen=True, slots=True)
class MeasuredFigures:
    """Latencies and misses of a stream, predicted or measured; None: no value."""

    p50_ms: float | None
    p99_ms: float | None
    missed: float | None
    """Share of the deadlines that are missed."""
    p99_max_of: int | None = None
    """The number of requests, if it is below 100, so that p99 is their largest latency; else None."""


@dataclass(frozen=True, slots=True)
class StreamComparison:
    """One stream, predicted and measured."""

    model: str
    predicted: MeasuredFigures
    measured: MeasuredFigures

    @property
    def p50_off(self) -> float | None:
        """Relative error: measured / predicted - 1."""
        return _relative(self.measured.p50_ms, self.predicted.p50_ms)

    @property
    def p99_off(self) -> float | None:
        """Relative error: measured / predicted - 1."""
        return _relative(self.measured.p99_ms, self.predicted.p99_ms)

    @property
    def missed_off(self) -> float | None:
        """Difference: measured - predicted."""
        if self.measured.missed is None or self.predicted.missed is None:
            return None
        return self.measured.missed - self.predicted.missed

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "p50_off": self.p50_off, "p99_off": self.p99_off, "missed_off": self.missed_off}


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A plan's prediction and a measured run of its workload."""

    streams: tuple[StreamComparison, ...]
    remarks: tuple[str, ...] = ()
    """Differences between plan and run that make them hard to compare, as sentences."""

    @property
    def worst_p99_off(self) -> float | None:
        return max((stream.p99_off for stream in self.streams if stream.p99_off is not None), key=abs, default=None)

    @property
    def worst_missed_off(self) -> float | None:
        errors = (stream.missed_off for stream in self.streams if stream.missed_off is not None)
        return max(errors, key=abs, default=None)

    def verdict(self) -> str:
        """Return the largest differences in one sentence."""
        p99, missed, parts = self.worst_p99_off, self.worst_missed_off, []
        if p99 is not None:
            parts.append(f"p99 {abs(p99) * 100:.0f} % {'above' if p99 > 0 else 'below'} the prediction")
        if missed is not None:
            parts.append(f"missed deadlines {abs(missed) * 100:.1f} points {'above' if missed > 0 else 'below'} it")
        return f"furthest apart: {', '.join(parts)}" if parts else "nothing was measured that could be compared"

    def as_dict(self) -> dict[str, Any]:
        return {
            "streams": [stream.as_dict() for stream in self.streams],
            "worst_p99_off": self.worst_p99_off,
            "worst_missed_off": self.worst_missed_off,
            "remarks": list(self.remarks),
        }


def compare(plan: Plan, result: LoadResult) -> PlanComparison:
    """Compare a plan's prediction with a run of its workload, stream by stream."""
    pairs = list(_pairs(plan, result))
    rows = tuple(
        StreamComparison(load.stream.served_name, _predicted_figures(predicted), _measured_figures(load))
        for predicted, load in pairs
    )
    return PlanComparison(rows, tuple(_remarks(plan, result, pairs)))


def _pairs(plan: Plan, result: LoadResult) -> Iterator[tuple[StreamPrediction, StreamLoad]]:
    """Yield measured streams with their predictions; several streams of one model are paired in order."""
    unpaired = list(plan.predicted.streams)
    for load in result.streams:
        prediction = next((stream for stream in unpaired if stream.model == load.stream.served_name), None)
        if prediction is not None:
            unpaired.remove(prediction)
            yield prediction, load


def _remarks(plan: Plan, result: LoadResult, pairs: list[tuple[StreamPrediction, StreamLoad]]) -> Iterator[str]:
    """Yield the differences between a plan and a run: streams, deadlines, rates, use of exits and settings.

    pairs: the prediction and the measurement of each stream.
    """
    if len(pairs) < max(len(result.streams), len(plan.predicted.streams)):
        yield "not all streams that were sent were predicted, or the other way round"
    if result.deadlines != plan.deadlines:
        yield f"the run had {result.deadlines} deadlines, the prediction assumed {plan.deadlines} ones"
    rates = dict(zip(result.streams, result.workload.rates, strict=True))
    for predicted, load in pairs:
        rate = rates[load]
        if rate and predicted.rate and abs(rate - predicted.rate) > SAME_RATE * predicted.rate:
            yield f"{predicted.model} was sent {rate:g} requests/s, the prediction assumed {predicted.rate:g}"
    for predicted, load in pairs:
        yield from _exit_remarks(predicted, load)
    yield from _setting_remarks(plan, result.profile)


def _exit_remarks(predicted: StreamPrediction, load: StreamLoad) -> Iterator[str]:
    """Yield a remark if the use of exits differs from the prediction; none if the threshold falls with the load."""
    shares, planned = load.figures.exit_shares, predicted.exit_rates
    if not shares or not planned or load.stream.exit_floor is not None or len(shares) != len(planned):
        return
    if max(abs(share - rate) for share, rate in zip(shares, planned, strict=True)) > SAME_EXITS:
        measured_text, planned_text = (" / ".join(f"{share:.0%}" for share in group) for group in (shares, planned))
        yield (
            f"{measured_text} of {predicted.model} left by its exits, the prediction assumed {planned_text}; send "
            "samples that leave as planned"
        )


def _setting_remarks(plan: Plan, profile: Any) -> Iterator[str]:
    """Yield a remark for each setting in the server's profile that differs from the plan's."""
    if not isinstance(profile, dict):
        yield "the server does not tell its settings; is it the one of the plan?"
        return
    planned = plan.settings.model_dump()
    for key in _REPORTED_SETTINGS:
        if key in planned and profile.get(key) != planned[key]:
            yield f"the server has {key} = {profile.get(key)}, the plan has {planned[key]}"


def _predicted_figures(stream: StreamPrediction) -> MeasuredFigures:
    missed = None if stream.deadline_ms is None else stream.missed
    return MeasuredFigures(stream.p50_ms, stream.p99_ms, missed, stream.p99_max_of)


def _measured_figures(load: StreamLoad) -> MeasuredFigures:
    figures = load.figures
    missed = None if figures.met_share is None else 1 - figures.met_share
    return MeasuredFigures(_ms(figures.p50_s), _ms(figures.p99_s), missed, figures.p99_max_of)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e3


def _relative(measured: float | None, predicted: float | None) -> float | None:
    return measured / predicted - 1 if measured is not None and predicted else None
