"""The metrics of the server, as ``/metrics`` prints them in the text format of Prometheus.

Names that begin with ``nv_`` are Triton's with the same meaning, so that dashboards for Triton work with this server,
too; the others are weft's. ``FAMILIES`` lists all of them. All counters exist from the start, as zero.
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
"""Reasons for giving up requests that could have been computed."""
REFUSALS = ("not_found", "queue_full", "expired", "memory", "draining", "load_failed", "unloaded")
"""Reasons for refusing requests for which no usable model was found."""
TRITON_REASONS = {
    "REJECTED": frozenset(DROPS) - {"cancelled"},
    "CANCELED": frozenset({"cancelled"}),
    "BACKEND": frozenset({"internal", "worker_died"}),
}
"""Triton's reason for a failure -> our reasons; all others are Triton's OTHER."""
BREAKER_STATES = {"closed": 0, "trying": 1, "open": 2}
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32)
"""Upper bounds of the histogram of batch sizes, in rows."""


class Sample(NamedTuple):
    """One line of a metric."""

    value: float
    labels: str = ""
    """The labels as they are written, without braces."""
    suffix: str = ""
    """Suffix of the metric's name: ``_bucket``, ``_sum`` or ``_count`` of a histogram."""


class _ModelRow(NamedTuple):
    """The figures of one version of a model, read for one scrape."""

    labels: str
    """As in ``Sample``."""
    statistics: Statistics
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
    """counter, gauge or histogram."""
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
    return _Scrape(service, [_read_model(service, slot) for slot in service.library.slots()])


def _read_model(service: Service, slot: ModelSlot) -> _ModelRow:
    """Read the figures of one model."""
    labels = f"{labelled('model', slot.entry.name)},{labelled('version', slot.entry.version)}"
    served = slot.served
    if served is None:
        return _ModelRow(labels, slot.statistics, memory_bytes=0, queued=slot.waiters)
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
    """Format a number for Prometheus; whole numbers without a decimal point."""
    if isinstance(value, int):
        return str(int(value))  # int(): a bool is written as 0 or 1
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value.is_integer() else repr(value)


# Kinds of samples


def _per_server(value: Callable[[Service], float | None]) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of the server: one sample; none while *value* returns None."""

    def samples(scrape: _Scrape) -> Iterator[Sample]:
        number = value(scrape.service)
        if number is not None:
            yield Sample(number)

    return samples


def _per_model(value: Callable[[_ModelRow], float | None]) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of models: one sample per model, except those for which *value* returns None."""
    return lambda scrape: (
        Sample(number, model.labels) for model in scrape.models if (number := value(model)) is not None
    )


def _per_model_and(
    label: str, values: Callable[[_ModelRow], Mapping[str, float]]
) -> Callable[[_Scrape], Iterator[Sample]]:
    """Make the samples of a metric of models with one more label: a sample per model and key of *values*."""
    return lambda scrape: (
        Sample(value, f"{model.labels},{labelled(label, key)}")
        for model in scrape.models
        for key, value in values(model).items()
    )


def _per_key(value: Callable[[Caller], float]) -> Callable[[_Scrape], Iterator[Sample]]:
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


def _per_server_and(
    label: str, values: Callable[[Service], Mapping[str, float]]
) -> Callable[[_Scrape], Iterator[Sample]]:
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
            cumulative = list(accumulate(counts(model.statistics)))  # a bucket of Prometheus includes all smaller ones
            for limit, count in zip(limits, cumulative, strict=True):
                yield Sample(count, f"{model.labels},{limit}", "_bucket")
            yield Sample(total(model.statistics), model.labels, "_sum")
            yield Sample(cumulative[-1], model.labels, "_count")

    return samples


# Values


def _triton_failures(model: _ModelRow) -> dict[str, float]:
    """Count the failures of a model by Triton's reasons, without those that clients caused."""
    failures = model.statistics.failures
    counts = {name: sum(failures[reason] for reason in reasons) for name, reasons in TRITON_REASONS.items()}
    return {**counts, "OTHER": model.statistics.faults - sum(counts.values())}


def _count_reasons(counts: Mapping[str, int], reasons: Sequence[str]) -> dict[str, float]:
    """Return the counts of these reasons, 0 for those without a count."""
    return {reason: counts.get(reason, 0) for reason in reasons}


def _count_answers(service: Service) -> Mapping[str, float]:
    """Return the number of HTTP answers by status: usual statuses, and any others that occurred."""
    statuses = (200, 400, 401, 403, 404, 405, 408, 413, 429, 431, 500, 501, 503, 504)
    counted = service.http_answers
    return {str(status): counted[status] for status in sorted({*statuses, *counted})}


def _count_refusals(service: Service) -> dict[str, float]:
    """Count refusals by reason: all listed reasons, and any others that occurred."""
    counts = service.refused.failures
    return _count_reasons(counts, [*REFUSALS, *sorted(counts.keys() - set(REFUSALS))])


def _batch_counts(statistics: Statistics) -> list[int]:
    """Return the number of batches per bound of ``BATCH_BOUNDS``, and at the end the larger batches."""
    counts = [0] * (len(BATCH_BOUNDS) + 1)
    for rows, (count, _) in statistics.batches.items():
        counts[sum(rows > bound for bound in BATCH_BOUNDS)] += count
    return counts


def _batch_rows(statistics: Statistics) -> int:
    """Return the sum of the rows of all batches."""
    return sum(rows * count for rows, (count, _) in statistics.batches.items())


def _count_exits(model: _ModelRow) -> dict[str, float]:
    """Return the number of rows that left at each exit, by the exit's number; empty for a model without exits."""
    count = len(model.exit_rules.names) if model.exit_rules else 0
    return {str(number): model.statistics.exits[number] for number in range(1, count + 1)}


def _lane_seconds(service: Service) -> dict[str, float]:
    """Return the seconds that each lane computed, by its number."""
    return {str(lane.index): lane.busy_ticks / 1e9 for lane in service.dispatcher.lanes.lanes}


NO_DEVICE = {"": 0.0}
"""Sample of a labelled metric without values; Prometheus treats an empty label as absent."""


def _device_seconds(service: Service) -> dict[str, float]:
    """Return the seconds that each device computed: those of its lane, or of all lanes if they share one GPU."""
    labels = service.library.backend.labels
    if service.dispatcher.sharing:
        return dict.fromkeys(labels, service.dispatcher.lanes.busy_ticks / 1e9)
    busy = _lane_seconds(service)
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
    _counter("nv_inference_request_success", "Requests that got a result.", _per_model(lambda m: m.statistics.success)),
    _counter(
        "nv_inference_request_failure",
        "Requests that got none though nothing was wrong with them, by Triton's reasons.",
        _per_model_and("reason", _triton_failures),
    ),
    _counter("nv_inference_count", "Rows computed.", _per_model(lambda m: m.statistics.inferences)),
    _counter("nv_inference_exec_count", "Batches computed.", _per_model(lambda m: m.statistics.executions)),
    _gauge("nv_inference_pending_request_count", "Requests that no lane has begun.", _per_model(lambda m: m.queued)),
    _counter(
        "nv_inference_request_duration_us",
        "Time from arrival until the answer is handed to the socket, summed over requests.",
        _per_model(lambda m: m.statistics.total_ns // 1000),
    ),
    _counter(
        "nv_inference_queue_duration_us",
        "Time that requests waited for their first segment, summed.",
        _per_model(lambda m: m.statistics.queue_ns // 1000),
    ),
    _counter(
        "nv_inference_compute_input_duration_us",
        "Time spent on inputs, summed over requests.",
        _per_model(lambda m: m.statistics.input_ns // 1000),
    ),
    _counter(
        "nv_inference_compute_infer_duration_us",
        "Time that segments ran, summed over requests.",
        _per_model(lambda m: m.statistics.infer_ns // 1000),
    ),
    _counter(
        "nv_inference_compute_output_duration_us",
        "Time spent on outputs, summed over requests.",
        _per_model(lambda m: m.statistics.output_ns // 1000),
    ),
    *(
        _counter(f"nv_cache_{name}_per_model", "Always 0: there is no cache of answers.", _per_model(lambda _: 0))
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
    _counter("weft_deadline_met_total", "Requests that kept their deadline.", _per_model(lambda m: m.statistics.met)),
    _counter(
        "weft_deadline_missed_total",
        "Requests that missed their deadline, answered or not.",
        _per_model(lambda m: m.statistics.missed),
    ),
    _counter(
        "weft_drops_total",
        "Requests that were given up, by reason.",
        _per_model_and("reason", lambda m: _count_reasons(m.statistics.failures, DROPS)),
    ),
    _counter(
        "weft_client_errors_total",
        "Requests that got none because of what they were, by reason.",
        _per_model_and("reason", lambda m: _count_reasons(m.statistics.failures, CLIENT_ERRORS)),
    ),
    _counter(
        "weft_preemptions_total",
        "Batches left half-way for another one.",
        _per_model(lambda m: m.statistics.preemptions),
    ),
    _counter("weft_aborts_total", "Segments stopped while they ran.", _per_model(lambda m: m.statistics.aborts)),
    _counter("weft_segments_total", "Segments computed.", _per_model(lambda m: m.statistics.segments)),
    _counter(
        "weft_segment_rows_total",
        "Rows of the segments computed, summed over segments.",
        _per_model(lambda m: m.statistics.segment_rows),
    ),
    _counter(
        "weft_merges_total", "Batches that joined another one half-way.", _per_model(lambda m: m.statistics.merges)
    ),
    _counter("weft_exits_total", "Rows that left at each exit, the end last.", _per_model_and("exit", _count_exits)),
    _gauge(
        "weft_exit_threshold",
        "How sure an early answer must be where a request does not say.",
        _per_model(lambda m: m.threshold if m.exit_rules else None),
    ),
    _gauge(
        "weft_exit_accuracy",
        "Share of right answers at that threshold, by the record of the model.",
        _per_model(lambda m: m.exit_rules.accuracy if m.exit_rules else None),
    ),
    _counter(
        "weft_segment_seconds_total",
        "Time that computed segments took.",
        _per_model(lambda m: m.statistics.segment_ns / 1e9),
    ),
    _counter(
        "weft_share_seconds_total",
        "Time that segments ran on each share of a GPU, by its multiprocessors, where models share one.",
        _per_model_and(
            "share", lambda m: {share: ns / 1e9 for share, ns in m.statistics.shares.total_ns.items()} or NO_DEVICE
        ),
    ),
    _gauge(
        "weft_segment_prediction_error_ratio",
        "Mean difference of predicted and real segment time, as a share of the real time.",
        _per_model(lambda m: m.statistics.prediction_error),
    ),
    _gauge(
        "weft_model_memory_bytes",
        "Memory of a loaded model, or its part of a body that several have.",
        _per_model(lambda m: m.memory_bytes),
    ),
    _gauge(
        "weft_model_engine",
        "1 for the engine that runs a loaded model: onnxruntime, torch step by step, or compiled by torch's compiler.",
        _per_model_and("engine", lambda m: {m.engine: 1} if m.engine else NO_DEVICE),
    ),
    _gauge(
        "weft_queue_length",
        "Requests that wait for a lane, or for the model to be loaded.",
        _per_model(lambda m: m.queued),
    ),
    _counter(
        "weft_requests_refused_total",
        "Requests that met no model, by reason.",
        _per_server_and("reason", _count_refusals),
    ),
    _counter(
        "weft_http_answers_total",
        "HTTP answers by status, whatever was asked.",
        _per_server_and("status", _count_answers),
    ),
    _counter(
        "weft_grpc_answers_total",
        "gRPC answers by method and status code; NOT_RECEIVED where a message did not arrive.",
        _grpc_answers,
    ),
    _counter(
        "weft_key_requests_total", "Requests for work, by the name of their key.", _per_key(lambda key: key.requests)
    ),
    _counter("weft_key_refusals_total", "Requests beyond what their key may, by its name and reason.", _key_refusals),
    _gauge("weft_key_in_flight", "Requests of a key that are not answered.", _per_key(lambda key: key.in_flight)),
    _gauge(
        "weft_held_bytes",
        "Bytes of requests and unread answers that are held, small ones not counted.",
        _per_server(lambda s: s.budget.held_bytes),
    ),
    _gauge("weft_large_json", "Pieces of large JSON that are read or written.", _per_server(lambda s: s.json.busy)),
    _counter("weft_lane_busy_seconds_total", "Time that a lane computed.", _per_server_and("lane", _lane_seconds)),
    _counter(
        "weft_lanes_replaced_total",
        "Lanes that another one was opened for, because a segment took far longer than was expected.",
        _per_server(lambda s: s.dispatcher.lanes.replacements),
    ),
    _gauge("weft_memory_used_bytes", "Memory of all loaded models.", _per_server(lambda s: s.library.used_bytes)),
    _gauge(
        "weft_scratch_bytes",
        "What runs have left in memory that is returned when it is not needed, as far as can be told.",
        _per_server(lambda s: s.library.backend.scratch_bytes),
    ),
    _gauge(
        "weft_device_memory_bytes",
        "Memory of each device that is in use.",
        _per_server_and("device", lambda s: s.library.backend.used_bytes or NO_DEVICE),
    ),
    _counter(
        "weft_device_returns_total",
        "Models that came back to a device's memory, since its worker was started.",
        _per_server_and("device", lambda s: s.library.backend.returns or NO_DEVICE),
    ),
    _counter(
        "weft_device_busy_seconds_total",
        "Time that each device computed.",
        _per_server_and("device", _device_seconds),
    ),
    _gauge(
        "weft_memory_budget_bytes",
        "Memory that loaded models may have; infinite without a limit.",
        _per_server(_budget_bytes),
    ),
    _counter(
        "weft_evictions_total", "Models that left to make room for others.", _per_server(lambda s: s.library.evictions)
    ),
    _counter(
        "weft_worker_deaths_total",
        "Worker processes that died.",
        _per_server(lambda s: s.library.backend.counts().deaths),
    ),
    _counter(
        "weft_worker_restarts_total",
        "Worker processes that were started in the place of dead ones.",
        _per_server(lambda s: s.library.backend.counts().restarts),
    ),
    _gauge(
        "weft_worker_breaker",
        "0: requests are taken; 1: one is being tried; 2: none are, for the worker died too often.",
        _per_model(lambda m: BREAKER_STATES[m.breaker.state] if m.breaker else 0),
    ),
    _counter(
        "weft_quarantines_total",
        "Requests that killed their worker twice.",
        _per_server(lambda s: s.dispatcher.feed.retries.quarantines),
    ),
    _gauge("weft_in_flight", "Requests taken and not answered.", _per_server(lambda s: s.dispatcher.pending)),
    _gauge("weft_uptime_seconds", "Time since the start.", _per_server(lambda s: (s.now() - s.started_ns) / 1e9)),
    _gauge("weft_ready", "1 while requests are taken, else 0.", _per_server(lambda s: s.is_ready())),
    _gauge(
        "process_resident_memory_bytes",
        "Physical memory of the process.",
        _per_server(lambda _: held_bytes(os.getpid(), workers=False)),
    ),
    _counter(
        "process_cpu_seconds_total",
        "Processor time of the process, all its threads together.",
        _per_server(lambda _: time.process_time()),
    ),
)
