"""Prediction of a plan at another load, or for other requests, than it was made for."""

from __future__ import annotations

from pathlib import Path

from weft.base.errors import PlanError
from weft.devices import Host, read_host
from weft.planning.layout import HOST_FILE
from weft.planning.plan import Plan, Prediction, StreamPrediction
from weft.simulation.request_report import RequestReport
from weft.simulation.requests import prepare, simulate_requests
from weft.workloads.requests import Workload


def planned_host(folder: str | Path) -> Host:
    """Return the measured machine for which a plan was made."""
    file = Path(folder) / HOST_FILE
    if not file.is_file():
        raise PlanError(f"{folder}: the plan has no {HOST_FILE}, so that nothing else can be predicted; plan again")
    return read_host(file)


def predict(plan: Plan, host: Host, workload: Workload) -> Prediction:
    """Predict by simulation how a server of the plan answers these requests; the workload's seed draws arrivals."""
    late = "drop" if plan.deadlines == "strict" else plan.settings.late
    report = simulate_requests(
        prepare(_batched(plan, workload), host),
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
            p50_ms=_ms(figures.p50_s),
            p99_ms=_ms(figures.p99_s),
            p99_max_of=figures.p99_max_of,
            missed=round(figures.violation_rate, 6),
            exit_rates=workload.exit_rates(index),
        )
        for index, (stream, rate, figures) in enumerate(
            zip(workload.stream, workload.rates, report.streams, strict=True)
        )
    )


def _batched(plan: Plan, workload: Workload) -> Workload:
    """Return the workload with the plan's batch limits."""
    chosen = {model.name: (model.max_batch, model.batch_timeout_ms) for model in plan.models}
    if plan.options:
        chosen |= {name: (model.max_batch, model.batch_timeout_ms) for name, model in plan.options[0].models.items()}
    streams = []
    for stream in workload.stream:
        if stream.served_name not in chosen:
            raise PlanError(f"{stream.served_name} is not in the plan, which has {', '.join(chosen)}")
        most, timeout_ms = chosen[stream.served_name]
        streams.append(stream.model_copy(update={"max_batch": most, "batch_timeout_ms": timeout_ms}))
    return workload.model_copy(update={"stream": tuple(streams)})


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 4)
