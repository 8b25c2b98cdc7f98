"""The metrics of the server, as ``/metrics`` prints them in the text format of Prometheus.

Names that begin with ``nv_`` are Triton's with the same meaning, so that dashboards for Triton work with this server,
too; the others are ours. ``FAMILIES`` lists all of them. All counters exist from the start, as zero.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from weft.runtime.breaker import Breaker
from weft.serving.access import REFUSALS as KEY_REFUSALS
from weft.serving.access import Caller
from weft.serving.exit_rules import ExitRules
from weft.serving.held_memory import held_bytes
from weft.serving.service import Service
from weft.serving.slots import ModelSlot
from weft.serving.statistics import CLIENT_ERRORS, LATENCY_BOUNDS_NS, Statistics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DROPS = (
    "queue_full", "expired", "unmeetable", "too_long", "cancelled", "memory", "draining", "load_failed", "unloaded",
    "breaker", "quarantined", "worker_starting",
)  # fmt: skip
"""Why a request that could have been computed was not."""
REFUSALS = ("not_found", "queue_full", "expired", "memory", "draining", "load_failed", "unloaded")
"""Why no model was found or usable for a request."""
TRITON_REASONS = {
    "REJECTED": frozenset(DROPS) - {"cancelled"},
    "CANCELED": frozenset({"cancelled"}),
    "BACKEND": frozenset({"internal", "worker_died"}),
}
"""Triton's reason for a failure -> ours; all others are its OTHER."""
BREAKER_STATES = {"closed": 0, "trying": 1, "open": 2}
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32)


class Sample(NamedTuple):
    """One line of a metric."""

    value: float
    labels: str = ""
    """The labels as they are written, without braces."""
    suffix: str = ""
    """What is added to the metric's name: ``_bucket``, ``_sum`` and ``_count`` of a histogram."""


class _ModelRow(NamedTuple):
    """One version of a model, read for one scrape."""

    labels: str
    seen: Statistics
    memory_bytes: int
    queued: int
    exit_rules: ExitRules | None = None
    threshold: float = 0.0
    breaker: Breaker | None = None
    engine: str = ""
    """The engine that runs the model; empty while it is not loaded."""


class _Scrape(NamedTuple):
    """The data of one scrape, read once for all metrics."""

    service: Service
    models: list[_ModelRow]


class MetricFamily(NamedTuple):
    """One metric."""

    name: str
    kind: str
    help: str
    samples: Callable[[_Scrape], Iterable[Sample]]


def text(service: Service) -> str:
    """Return every metric of the server in the text format."""
    scrape = _scrape(service)
    return "".join(line for family in FAMILIES for line in _lines(family, scrape))


def values(service: Service) -> dict[str, float]:
    """Return every metric as a number, by its name and labels as in the text."""
    scrape = _scrape(service)
    return {_sample_name(family, sample): sample.value for family in FAMILIES for sample in family.samples(scrape)}


def _scrape(service: Service) -> _Scrape:
    """Read the data of one scrape."""
    return _Scrape(service, [_model(service, slot) for slot in service.library.slots()])


def _model(service: Service, slot: ModelSlot) -> _ModelRow:
    """Read the figures of one model."""
    labels = f"{labelled('model', slot.entry.name)},{labelled('version', slot.entry.version)}"
    served = slot.served
    if served is None:
        return _ModelRow(labels, slot.statistics, 0, slot.waiters)
    queued, exit_rules = served.line.waiting, served.exit_rules
    threshold = service.dispatcher.exit_threshold(served) if exit_rules else 0.0
    breaker = served.loaded.breaker
    engine = served.loaded.timing.engine
    return _ModelRow(labels, slot.statistics, served.memory_bytes, queued, exit_rules, threshold, breaker, engine)


# The format


def _lines(family: MetricFamily, scrape: _Scrape) -> Iterator[str]:
    """Yield the lines of a metric: help, type and samples."""
    name = family.name
    yield f"# HELP {name} {family.help}\n# TYPE {name} {family.kind}\n"
    for sample in family.samples(scrape):
        yield f"{_sample_name(family, sample)} {_number(sample.value)}\n"


def _sample_name(family: MetricFamily, sample: Sample) -> str:
    """Return the name of a sample with its suffix and labels."""
    labels = f"{{{sample.labels}}}" if sample.labels else ""
    return f"{family.name}{sample.suffix}{labels}"


def labelled(key: str, value: str) -> str:
    """Write a label as ``key="value"``, with the escapes of the format."""
    escaped = value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return f'{key}="{escaped}"'


def _number(value: float) -> str:
    """Write a number as Prometheus reads it; whole numbers without a decimal point."""
    if isinstance(value, int):
        return str(int(value))
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() else repr(value)


# Kinds of samples


def _server(value: Callable[[Service], float | None]) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of the server: one sample; none while *value* returns None."""

    def samples(scrape: _Scrape) -> Iterator[Sample]:
        number = value(scrape.service)
        if number is not None:
            yield Sample(number)

    return samples


def _model_each(value: Callable[[_ModelRow], float | None]) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of models: one sample per model, except those for which *value* returns None."""
    return lambda scrape: (
        Sample(number, model.labels) for model in scrape.models if (number := value(model)) is not None
    )


def _model_by(label: str, values: Callable[[_ModelRow], Mapping[str, float]]) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of models with one more label: a sample per model and key of *values*."""
    return lambda scrape: (
        Sample(value, f"{model.labels},{labelled(label, key)}")
        for model in scrape.models
        for key, value in values(model).items()
    )


def _key_each(value: Callable[[Caller], float]) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of API keys: one sample per key, labelled with its name."""
    return lambda scrape: (
        Sample(value(caller), labelled("key", caller.name)) for caller in scrape.service.keys.callers.values()
    )


def _key_refusals(scrape: _Scrape) -> Iterator[Sample]:
    """Yield the number of refused requests per API key and reason."""
    for caller in scrape.service.keys.callers.values():
        for reason in KEY_REFUSALS:
            yield Sample(caller.refused[reason], f"{labelled('key', caller.name)},{labelled('reason', reason)}")


def _grpc_answers(scrape: _Scrape) -> Iterator[Sample]:
    """Yield the number of gRPC answers per method and status code."""
    answers = scrape.service.grpc_answers
    for method, code in sorted({("ModelInfer", "OK"), *answers}):
        yield Sample(answers[method, code], f"{labelled('method', method)},{labelled('code', code)}")


def _server_by(label: str, values: Callable[[Service], Mapping[str, float]]) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of the server with a label: one sample per key of *values*."""
    return lambda scrape: (Sample(value, labelled(label, key)) for key, value in values(scrape.service).items())


def _histogram(
    bounds: Sequence[float], counts: Callable[[Statistics], Sequence[int]], total: Callable[[Statistics], float]
) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a histogram per model.

    counts: the number of observations per bound, and at the end those above all bounds. total: the sum of observations.
    """
    limits = [labelled("le", _number(bound)) for bound in (*bounds, math.inf)]

    def samples(scrape: _Scrape) -> Iterator[Sample]:
        for model in scrape.models:
            cumulative = list(accumulate(counts(model.seen)))  # a bucket of Prometheus includes all smaller ones
            for limit, count in zip(limits, cumulative, strict=True):
                yield Sample(count, f"{model.labels},{limit}", "_bucket")
            yield Sample(total(model.seen), model.labels, "_sum")
            yield Sample(cumulative[-1], model.labels, "_count")

    return samples


# Values


def _triton_failures(model: _ModelRow) -> dict[str, float]:
    """Count the failures of a model by Triton's reasons, without those that clients caused."""
    failures = model.seen.failures
    counts = {name: sum(failures[reason] for reason in ours) for name, ours in TRITON_REASONS.items()}
    return {**counts, "OTHER": model.seen.faults - sum(counts.values())}


def _count_reasons(counts: Mapping[str, int], reasons: Sequence[str]) -> dict[str, float]:
    """Return the counts of these reasons, 0 for those without a count."""
    return {reason: counts.get(reason, 0) for reason in reasons}


def _answers(service: Service) -> Mapping[str, float]:
    """Return the number of HTTP answers by status: usual statuses, and any others that occurred."""
    statuses = (200, 400, 401, 403, 404, 405, 408, 413, 429, 431, 500, 501, 503, 504)
    counted = service.http_answers
    return {str(status): counted[status] for status in sorted({*statuses, *counted})}


def _count_refusals(service: Service) -> dict[str, float]:
    """Count refusals by reason: all listed reasons, and any others that occurred."""
    counts = service.refused.failures
    return _count_reasons(counts, [*REFUSALS, *sorted(counts.keys() - set(REFUSALS))])


def _batch_counts(seen: Statistics) -> list[int]:
    """Return the number of batches per bound of ``BATCH_BOUNDS``, and at the end the larger batches."""
    counts = [0] * (len(BATCH_BOUNDS) + 1)
    for rows, (count, _) in seen.batches.items():
        counts[sum(rows > bound for bound in BATCH_BOUNDS)] += count
    return counts


def _batch_rows(seen: Statistics) -> int:
    """Return the sum of the rows of all batches."""
    return sum(rows * count for rows, (count, _) in seen.batches.items())


def _exits(model: _ModelRow) -> dict[str, float]:
    """Return the number of rows that left at each exit, by the exit's number; empty for a model without exits."""
    count = len(model.exit_rules.names) if model.exit_rules else 0
    return {str(number): model.seen.exits[number] for number in range(1, count + 1)}


def _lanes(service: Service) -> dict[str, float]:
    """Return the seconds that each lane computed, by its number."""
    return {str(lane.index): lane.busy_ticks / 1e9 for lane in service.dispatcher.lanes.lanes}


NO_DEVICE = {"": 0.0}
"""The sample of device metrics without devices; an empty label counts as none."""


def _devices(service: Service) -> dict[str, float]:
    """Return the seconds that each device computed: those of its lane, or of all lanes if they share one GPU."""
    labels = service.library.backend.labels
    if service.dispatcher.sharing:
        return dict.fromkeys(labels, service.dispatcher.lanes.busy_ticks / 1e9)
    busy = _lanes(service)
    return {label: busy.get(str(index), 0.0) for index, label in enumerate(labels)} or NO_DEVICE


def _budget_bytes(service: Service) -> float:
    """Return the memory budget of loaded models; infinite without a limit."""
    budget = service.library.budget_bytes
    return math.inf if budget is None else budget


def _counter(name: str, help: str, samples: Callable[[_Scrape], Iterable[Sample]]) -> MetricFamily:
    return MetricFamily(name, "counter", help, samples)


def _gauge(name: str, help: str, samples: Callable[[_Scrape], Iterable[Sample]]) -> MetricFamily:
    return MetricFamily(name, "gauge", help, samples)


FAMILIES = (
    _counter("nv_inference_request_success", "Requests that got a result.", _model_each(lambda m: m.seen.success)),
    _counter(
        "nv_inference_request_failure",
        "Requests that got none though nothing was wrong with them, by Triton's reasons.",
        _model_by("reason", _triton_failures),
    ),
    _counter("nv_inference_count", "Rows computed.", _model_each(lambda m: m.seen.inferences)),
    _counter("nv_inference_exec_count", "Batches computed.", _model_each(lambda m: m.seen.executions)),
    _gauge("nv_inference_pending_request_count", "Requests that no lane has begun.", _model_each(lambda m: m.queued)),
    _counter(
        "nv_inference_request_duration_us",
        "Time from arrival until the answer is handed to the socket, summed over requests.",
        _model_each(lambda m: m.seen.total_ns // 1000),
    ),
    _counter(
        "nv_inference_queue_duration_us",
        "Time that requests waited for their first segment, summed.",
        _model_each(lambda m: m.seen.queue_ns // 1000),
    ),
    _counter(
        "nv_inference_compute_input_duration_us",
        "Time spent on inputs, summed over requests.",
        _model_each(lambda m: m.seen.input_ns // 1000),
    ),
    _counter(
        "nv_inference_compute_infer_duration_us",
        "Time that segments ran, summed over requests.",
        _model_each(lambda m: m.seen.infer_ns // 1000),
    ),
    _counter(
        "nv_inference_compute_output_duration_us",
        "Time spent on outputs, summed over requests.",
        _model_each(lambda m: m.seen.output_ns // 1000),
    ),
    *(
        _counter(f"nv_cache_{name}_per_model", "Always 0: there is no cache of answers.", _model_each(lambda _: 0))
        for name in ("num_hits", "num_misses", "hit_duration", "miss_duration")
    ),
    MetricFamily(
        "weft_request_seconds",
        "histogram",
        "Time from arrival until the answer is handed to the socket.",
        _histogram(
            [bound / 1e9 for bound in LATENCY_BOUNDS_NS], lambda seen: seen.latencies, lambda seen: seen.total_ns / 1e9
        ),
    ),
    MetricFamily(
        "weft_batch_rows",
        "histogram",
        "Rows of the batches computed.",
        _histogram(BATCH_BOUNDS, _batch_counts, _batch_rows),
    ),
    _counter("weft_deadline_met_total", "Requests that kept their deadline.", _model_each(lambda m: m.seen.met)),
    _counter(
        "weft_deadline_missed_total",
        "Requests that missed their deadline, answered or not.",
        _model_each(lambda m: m.seen.missed),
    ),
    _counter(
        "weft_drops_total",
        "Requests that were given up, by reason.",
        _model_by("reason", lambda m: _count_reasons(m.seen.failures, DROPS)),
    ),
    _counter(
        "weft_client_errors_total",
        "Requests that got none because of what they were, by reason.",
        _model_by("reason", lambda m: _count_reasons(m.seen.failures, CLIENT_ERRORS)),
    ),
    _counter(
        "weft_preemptions_total", "Batches left half-way for another one.", _model_each(lambda m: m.seen.preemptions)
    ),
    _counter("weft_aborts_total", "Segments stopped while they ran.", _model_each(lambda m: m.seen.aborts)),
    _counter("weft_segments_total", "Segments computed.", _model_each(lambda m: m.seen.segments)),
    _counter(
        "weft_segment_rows_total",
        "Rows of the segments computed, summed over segments.",
        _model_each(lambda m: m.seen.segment_rows),
    ),
    _counter("weft_merges_total", "Batches that joined another one half-way.", _model_each(lambda m: m.seen.merges)),
    _counter("weft_exits_total", "Rows that left at each exit, the end last.", _model_by("exit", _exits)),
    _gauge(
        "weft_exit_threshold",
        "How sure an early answer must be where a request does not say.",
        _model_each(lambda m: m.threshold if m.exit_rules else None),
    ),
    _gauge(
        "weft_exit_accuracy",
        "Share of right answers at that threshold, by the record of the model.",
        _model_each(lambda m: m.exit_rules.accuracy if m.exit_rules else None),
    ),
    _counter(
        "weft_segment_seconds_total",
        "Time that computed segments took.",
        _model_each(lambda m: m.seen.segment_ns / 1e9),
    ),
    _counter(
        "weft_share_seconds_total",
        "Time that segments ran on each share of a GPU, by its multiprocessors, where models share one.",
        _model_by("share", lambda m: {share: ns / 1e9 for share, ns in m.seen.shares.total_ns.items()} or NO_DEVICE),
    ),
    _gauge(
        "weft_segment_prediction_error_ratio",
        "Mean difference of predicted and real segment time, as a share of the real time.",
        _model_each(lambda m: m.seen.prediction_error),
    ),
    _gauge(
        "weft_model_memory_bytes",
        "Memory of a loaded model, or its part of a body that several have.",
        _model_each(lambda m: m.memory_bytes),
    ),
    _gauge(
        "weft_model_engine",
        "1 for the engine that runs a loaded model: onnxruntime, or compiled by torch's compiler.",
        _model_by("engine", lambda m: {m.engine: 1} if m.engine else NO_DEVICE),
    ),
    _gauge(
        "weft_queue_length",
        "Requests that wait for a lane, or for the model to be loaded.",
        _model_each(lambda m: m.queued),
    ),
    _counter(
        "weft_requests_refused_total", "Requests that met no model, by reason.", _server_by("reason", _count_refusals)
    ),
    _counter("weft_http_answers_total", "HTTP answers by status, whatever was asked.", _server_by("status", _answers)),
    _counter(
        "weft_grpc_answers_total",
        "gRPC answers by method and status code; NOT_RECEIVED where a message did not arrive.",
        _grpc_answers,
    ),
    _counter(
        "weft_key_requests_total", "Requests for work, by the name of their key.", _key_each(lambda key: key.requests)
    ),
    _counter("weft_key_refusals_total", "Requests beyond what their key may, by its name and reason.", _key_refusals),
    _gauge("weft_key_in_flight", "Requests of a key that are not answered.", _key_each(lambda key: key.in_flight)),
    _gauge(
        "weft_held_bytes",
        "Bytes of requests and unread answers that are held, small ones not counted.",
        _server(lambda s: s.budget.held_bytes),
    ),
    _gauge("weft_large_json", "Pieces of large JSON that are read or written.", _server(lambda s: s.json.busy)),
    _counter("weft_lane_busy_seconds_total", "Time that a lane computed.", _server_by("lane", _lanes)),
    _counter(
        "weft_lanes_replaced_total",
        "Lanes that another one was opened for, because a segment took far longer than was expected.",
        _server(lambda s: s.dispatcher.lanes.replacements),
    ),
    _gauge("weft_memory_used_bytes", "Memory of all loaded models.", _server(lambda s: s.library.used_bytes)),
    _gauge(
        "weft_scratch_bytes",
        "What runs have left in memory that is returned when it is not needed, as far as can be told.",
        _server(lambda s: s.library.backend.scratch_bytes),
    ),
    _gauge(
        "weft_device_memory_bytes",
        "Memory of each device that is in use.",
        _server_by("device", lambda s: s.library.backend.used_bytes or NO_DEVICE),
    ),
    _counter(
        "weft_device_returns_total",
        "Models that came back to a device's memory, since its worker was started.",
        _server_by("device", lambda s: s.library.backend.returns or NO_DEVICE),
    ),
    _counter(
        "weft_device_busy_seconds_total",
        "Time that each device computed.",
        _server_by("device", _devices),
    ),
    _gauge(
        "weft_memory_budget_bytes",
        "Memory that loaded models may have; infinite without a limit.",
        _server(_budget_bytes),
    ),
    _counter(
        "weft_evictions_total", "Models that left to make room for others.", _server(lambda s: s.library.evictions)
    ),
    _counter(
        "weft_worker_deaths_total",
        "Worker processes that died.",
        _server(lambda s: s.library.backend.counts().deaths),
    ),
    _counter(
        "weft_worker_restarts_total",
        "Worker processes that were started in the place of dead ones.",
        _server(lambda s: s.library.backend.counts().restarts),
    ),
    _gauge(
        "weft_worker_breaker",
        "0: requests are taken; 1: one is being tried; 2: none are, for the worker died too often.",
        _model_each(lambda m: BREAKER_STATES[m.breaker.state] if m.breaker else 0),
    ),
    _counter(
        "weft_quarantines_total",
        "Requests that killed their worker twice.",
        _server(lambda s: s.dispatcher.feed.retries.quarantines),
    ),
    _gauge("weft_in_flight", "Requests taken and not answered.", _server(lambda s: s.dispatcher.pending)),
    _gauge("weft_uptime_seconds", "Time since the start.", _server(lambda s: (s.now() - s.started_ns) / 1e9)),
    _gauge("weft_ready", "1 while requests are taken, else 0.", _server(lambda s: s.is_ready())),
    _gauge(
        "process_resident_memory_bytes",
        "Physical memory of the process.",
        _server(lambda _: held_bytes(os.getpid(), workers=False)),
    ),
    _counter(
        "process_cpu_seconds_total",
        "Processor time of the process, all its threads together.",
        _server(lambda _: time.process_time()),
    ),
)
