"""OpenTelemetry spans of requests, where asked for; without it, nothing is imported.

- ``Telemetry`` says nothing; ``OpenTelemetry`` sends a span per request to a collector, with the status ERROR and the
  reason where the request has no result. A request may come with the
  span that it is a part of (``traceparent``, as the W3C has it); one that passes through a gate is a ``Hop`` there.
- ``make_telemetry`` chooses between them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.base.errors import InputError, RequestError
from weft.base.version import __version__

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

    from weft.serving.tickets import ClientTicket

TRACES_PATH = "/v1/traces"
"""Where a collector takes spans."""


MOST_NAME_CHARS = 200
"""A client may ask for a model of any name, and a span holds no more of it."""

PARENT = "traceparent"
"""The header that names the span which a request is a part of."""


class Hop:
    """A request that passes through a gate."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        """What its server is told that it is a part of; empty: of nothing."""

    def end(self, told: Mapping[str, str | int]) -> None:
        """It was answered, or nobody waits for it any more."""


class Telemetry:
    """Says nothing to nobody."""

    enabled = False
    """Whether ``ended`` does anything: nobody need prepare its arguments otherwise."""

    def ended(
        self, model: str, lasted_ns: int, ticket: ClientTicket | None, error: RequestError | None, parent: str = ""
    ) -> None:
        """Send the span of a request that ends now.

        model: as the client named it, empty where that is not known. ticket: None where it was never queued.
        error: why it has no result. parent: the span that it is a part of.
        """

    def passes(self, model: str, parent: str) -> Hop:
        """A request for a model came to a gate."""
        return Hop(parent)

    def close(self) -> None:
        """Send what is left."""


class OpenTelemetry(Telemetry):
    """A span per request; a thread of its own sends them, so that nobody waits for the collector.

    Without an *endpoint*, the variables ``OTEL_EXPORTER_OTLP_*`` of the environment say where spans go;
    ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` say who sends them, ``OTEL_TRACES_SAMPLER`` how many.
    """

    enabled = True

    def __init__(self, endpoint: str | None = None, exporter: SpanExporter | None = None) -> None:
        try:
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = exporter or _exporter(endpoint)
        except ImportError as error:
            raise InputError(f"otlp needs {error.name}, which is not installed; pip install 'weft[otel]'") from error
        here = Resource.create({"service.name": "weft", "service.version": __version__})
        resource = here.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("weft", __version__)
        self._kind = SpanKind.SERVER
        self._failure = partial(Status, StatusCode.ERROR)
        self._propagator, self._within = TraceContextTextMapPropagator(), set_span_in_context

    def ended(
        self, model: str, lasted_ns: int, ticket: ClientTicket | None, error: RequestError | None, parent: str = ""
    ) -> None:
        end_ns = time.time_ns()
        name = f"infer {model[:MOST_NAME_CHARS]}".rstrip()
        span = self._tracer.start_span(name, self._context(parent), self._kind, start_time=end_ns - lasted_ns)
        if span.is_recording():
            if model:
                span.set_attribute("weft.model", model[:MOST_NAME_CHARS])
            if ticket:
                span.set_attributes(_attributes(ticket))
            if error:
                span.set_attributes({"weft.reason": error.reason, "weft.code": error.code})
                span.set_status(self._failure(str(error)))
        span.end(end_ns)

    def passes(self, model: str, parent: str) -> Hop:
        span = self._tracer.start_span(f"gate {model}", self._context(parent), self._kind)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._within(span))
        return _SpanHop(carrier.get(PARENT, parent), span)

    def _context(self, parent: str) -> Any:
        """What a span is a part of; nothing where that cannot be read."""
        return self._propagator.extract({PARENT: parent}) if parent else None

    def close(self) -> None:
        """Send what is left; waits for the collector, half a minute at most."""
        self._provider.shutdown()


class _SpanHop(Hop):
    """One that a collector hears of."""

    def __init__(self, parent: str, span: Span) -> None:
        super().__init__(parent)
        self._span = span

    def end(self, told: Mapping[str, str | int]) -> None:
        if self._span.is_recording():
            self._span.set_attributes(told)
            self._span.end()


def make_telemetry(otlp: bool | str | None) -> Telemetry:
    """What the setting ``otlp`` asks for: an endpoint, True for the one the environment names, or nothing."""
    if not otlp:
        return Telemetry()
    return OpenTelemetry(otlp if isinstance(otlp, str) else None)


def _exporter(endpoint: str | None) -> SpanExporter:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint is None:
        return OTLPSpanExporter()
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(TRACES_PATH) else base + TRACES_PATH)


def _attributes(ticket: ClientTicket) -> dict[str, str | int | bool]:
    """What a span says of a request that was queued: how it was computed, if it was, and whether it was in time."""
    attributes: dict[str, str | int | bool] = {
        "weft.rows": ticket.rows,
        "weft.priority": ticket.priority,
        "weft.best_effort": ticket.best_effort,
    }
    if ticket.began:
        attributes["weft.batch"] = ticket.batch_size
        attributes["weft.queue_us"] = (ticket.began - ticket.arrival) // 1000
        attributes["weft.compute_us"] = ticket.compute_ns // 1000
    if ticket.met is not None:
        attributes["weft.deadline_met"] = ticket.met
    return attributes
