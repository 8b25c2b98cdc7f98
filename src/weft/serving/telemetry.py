"""OpenTelemetry spans of requests; the packages are imported only if spans are sent.

- ``Telemetry`` does nothing; ``OpenTelemetry`` sends a span per request to a collector, with the status ERROR and the
  reason if the request has no result. A request may name its parent span (``traceparent``, W3C Trace Context). In a
  gate (the router of a cluster), a request is a ``Hop``.
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
"""The path of a collector for spans."""

MOST_NAME_CHARS = 200
"""Characters of a model's name that a span holds: clients may send names of any length."""

PARENT = "traceparent"
"""The header with the parent span of a request."""


class Hop:
    """The span of a request in a gate (router), between its client and a server; this class sends none."""

    def __init__(self, parent: str) -> None:
        self.parent = parent
        """The parent span that is passed on to the server; empty if there is none."""

    def end(self, attributes: Mapping[str, str | int]) -> None:
        """End the span with these attributes, after the answer or a disconnect."""


class Telemetry:
    """Sends no spans."""

    enabled = False
    """Whether ``ended`` does anything; callers skip preparing its arguments otherwise."""

    def ended(
        self, model: str, lasted_ns: int, ticket: ClientTicket | None, error: RequestError | None, parent: str = ""
    ) -> None:
        """Send the span of a request that ends now.

        model: as the client named it, empty if unknown. ticket: None if it was never queued.
        error: why it has no result. parent: the parent span.
        """

    def begin_hop(self, model: str, parent: str) -> Hop:
        """Begin the span of a request for *model* in a gate; *parent*: the client's span, empty if there is none."""
        return Hop(parent)

    def close(self) -> None:
        """Send the remaining spans."""


class OpenTelemetry(Telemetry):
    """A span per request, sent on a thread of its own, so that requests do not wait for the collector.

    Without an *endpoint*, the variables ``OTEL_EXPORTER_OTLP_*`` of the environment say where spans go;
    ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` name the sender, ``OTEL_TRACES_SAMPLER`` the sampling.
    """

    enabled = True

    def __init__(self, endpoint: str | None = None, exporter: SpanExporter | None = None) -> None:
        """exporter: sends the spans, by default to *endpoint*. InputError if a package is missing."""
        try:
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = exporter or _exporter(endpoint)
        except ImportError as error:
            raise InputError(f"otlp needs {error.name}, which is not installed; pip install 'weft[otel]'") from error
        defaults = Resource.create({"service.name": "weft", "service.version": __version__})
        resource = defaults.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("weft", __version__)
        self._span_kind = SpanKind.SERVER
        self._error_status = partial(Status, StatusCode.ERROR)
        self._propagator, self._set_span_in_context = TraceContextTextMapPropagator(), set_span_in_context

    def ended(
        self, model: str, lasted_ns: int, ticket: ClientTicket | None, error: RequestError | None, parent: str = ""
    ) -> None:
        """Send the span of a request that ends now and lasted *lasted_ns*; see ``Telemetry.ended``."""
        end_ns = time.time_ns()
        name = f"infer {model[:MOST_NAME_CHARS]}".rstrip()
        span = self._tracer.start_span(name, self._context(parent), self._span_kind, start_time=end_ns - lasted_ns)
        if span.is_recording():
            if model:
                span.set_attribute("weft.model", model[:MOST_NAME_CHARS])
            if ticket:
                span.set_attributes(_attributes(ticket))
            if error:
                span.set_attributes({"weft.reason": error.reason, "weft.code": error.code})
                span.set_status(self._error_status(str(error)))
        span.end(end_ns)

    def begin_hop(self, model: str, parent: str) -> Hop:
        """Begin the span of a request in a gate; the server's span will be its child."""
        span = self._tracer.start_span(f"gate {model}", self._context(parent), self._span_kind)
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._set_span_in_context(span))
        return _SpanHop(carrier.get(PARENT, parent), span)

    def _context(self, parent: str) -> Any:
        """Parse the header of the parent span; None if it is empty."""
        return self._propagator.extract({PARENT: parent}) if parent else None

    def close(self) -> None:
        """Send the remaining spans; blocks until the collector has them, at most half a minute."""
        self._provider.shutdown()


class _SpanHop(Hop):
    """A hop whose span is sent."""

    def __init__(self, parent: str, span: Span) -> None:
        super().__init__(parent)
        self._span = span

    def end(self, attributes: Mapping[str, str | int]) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            self._span.end()


def make_telemetry(otlp: bool | str | None) -> Telemetry:
    """Create the telemetry for the setting ``otlp``: an endpoint, True for that of the environment, or nothing."""
    if not otlp:
        return Telemetry()
    return OpenTelemetry(otlp if isinstance(otlp, str) else None)


def _exporter(endpoint: str | None) -> SpanExporter:
    """Create the exporter of spans to a collector over HTTP; *endpoint* None: the one that the environment names."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if endpoint is None:
        return OTLPSpanExporter()
    base = endpoint.rstrip("/")
    return OTLPSpanExporter(base if base.endswith(TRACES_PATH) else base + TRACES_PATH)


def _attributes(ticket: ClientTicket) -> dict[str, str | int | bool]:
    """Return a span's attributes for a request that was queued: batch, times, and whether the deadline was met."""
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
