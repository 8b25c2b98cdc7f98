"""Spans of requests, served or not: what they say, when they were, and that they reach a collector over HTTP."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from tests.serving.live import PATIENCE_S, Gate, Live, mlp, running
from tests.support.concurrency import until
from weft.base.errors import InputError
from weft.base.version import __version__
from weft.serving import proto
from weft.serving.telemetry import OpenTelemetry, Telemetry, make_telemetry


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A span is sent once, however long the collector takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(round(PATIENCE_S)))
        yield


def infer(live: Live, rows: int = 1, **parameters: Any) -> dict[str, Any]:
    """Have rows computed; what the answer says about how it was served."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 64], "data": [0.5] * 64 * rows}
    body = json.dumps({"inputs": [tensor], "parameters": parameters}).encode()
    with urllib.request.urlopen(f"{live.url}/v2/models/net/infer", body) as answer:
        told = json.load(answer)["parameters"]
    assert isinstance(told, dict)
    return told


@contextmanager
def traced(folder: Path, exporter: SpanExporter) -> Iterator[Live]:
    """A server that sends its spans to an exporter."""
    with running(mlp(folder / "net.onnx"), grpc_port=None) as live:
        live.server.service.telemetry = OpenTelemetry(exporter=exporter)
        yield live


def spans_of(folder: Path, *requests: dict[str, Any]) -> tuple[list[ReadableSpan], list[dict[str, Any]]]:
    """The spans of these requests once the server has ended, and what their answers said."""
    kept = InMemorySpanExporter()
    with traced(folder, kept) as live:
        told = [infer(live, **request) for request in requests]
    return list(kept.get_finished_spans()), told


def test_a_request_is_one_span_that_says_what_its_answer_says(tmp_path: Path) -> None:
    (span,), (told,) = spans_of(tmp_path, {"rows": 3, "priority": 1, "weft_slo_ms": 1e9})
    assert span.name == "infer net"
    assert span.kind is SpanKind.SERVER
    assert span.attributes == {
        "weft.model": "net",
        "weft.rows": 3,
        "weft.batch": told["weft_batch"],
        "weft.priority": 9,
        "weft.queue_us": told["weft_queue_us"],
        "weft.compute_us": told["weft_compute_us"],
        "weft.best_effort": False,
        "weft.deadline_met": True,
    }


def test_a_call_over_grpc_is_a_part_of_what_its_metadata_names(tmp_path: Path) -> None:
    kept, tensor = InMemorySpanExporter(), triton.InferInput("x", [1, 64], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 64), np.float32))
    with running(mlp(tmp_path / "net.onnx")) as live:
        live.server.service.telemetry = OpenTelemetry(exporter=kept)
        with triton.InferenceServerClient(live.grpc_address) as client:
            client.infer("net", [tensor], headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
            client.infer("net", [tensor], headers={"traceparent": "nonsense"})
    within, alone = kept.get_finished_spans()
    assert within.parent and format(within.parent.span_id, "016x") == "b" * 16
    assert alone.parent is None


PARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def refused(live: Live, body: bytes, model: str = "net", **headers: str) -> int:
    """The status of a request over HTTP that has no result."""
    url = f"{live.url}/v2/models/{model}/infer"
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, body, {"traceparent": PARENT, **headers}))
    raised.value.close()
    return raised.value.code


def reasons(kept: InMemorySpanExporter) -> list[tuple[str, object, object]]:
    """Name, reason and code of every span, all of which must be errors that are parts of ``PARENT``."""
    spans = kept.get_finished_spans()
    assert {span.status.status_code for span in spans} == {StatusCode.ERROR}
    assert all(span.parent and format(span.parent.span_id, "016x") == "b" * 16 for span in spans)
    return [(span.name, *((span.attributes or {})[f"weft.{key}"] for key in ("reason", "code"))) for span in spans]


ROW = {"name": "x", "datatype": "FP32", "shape": [1, 64], "data": [0.5] * 64}


def test_a_request_over_http_without_a_result_has_a_span_that_says_why(tmp_path: Path) -> None:
    kept, row = InMemorySpanExporter(), json.dumps({"inputs": [ROW]}).encode()
    hopeless = json.dumps({"inputs": [ROW], "parameters": {"timeout": 1}}).encode()
    with traced(tmp_path, kept) as live:
        assert refused(live, b"{") == 400
        assert refused(live, row, "nobody") == 404
        assert refused(live, b"no gzip", **{"Content-Encoding": "gzip"}) == 400
        assert refused(live, hopeless) == 504
        live.server.service.draining = True
        assert refused(live, row) == 503
        live.server.service.draining = False
    bad, gone = ("infer net", "bad_request", "INVALID_ARGUMENT"), ("infer nobody", "not_found", "NOT_FOUND")
    *others, late, draining = reasons(kept)
    assert others == [bad, gone, bad]
    assert late[1] in ("unmeetable", "expired") and late[2] == "DEADLINE_EXCEEDED"
    assert draining == ("infer net", "draining", "UNAVAILABLE")
    assert "nobody" in str(kept.get_finished_spans()[1].status.description)


def test_a_request_that_fails_in_its_model_or_is_left_by_its_client_has_a_span(tmp_path: Path) -> None:
    kept = InMemorySpanExporter()
    request = f"POST /v2/models/net/infer HTTP/1.1\r\nHost: localhost\r\ntraceparent: {PARENT}\r\n"
    body = json.dumps({"inputs": [ROW]}).encode()
    with traced(tmp_path, kept) as live, pytest.MonkeyPatch.context() as patch:
        served = live.server.service.library.find("net").served
        assert served
        with Gate(live, "net", 1) as gate, socket.create_connection(("127.0.0.1", live.server.http_port)) as line:
            line.sendall(f"{request}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            gate.wait()
            line.close()
            until(lambda: served.statistics.failures, "the client is seen to leave")

        def fail(*_: object, **__: object) -> None:
            raise ArithmeticError("no numbers today")

        patch.setattr(served.loaded, "start", fail)
        assert refused(live, body) == 500
    assert reasons(kept) == [("infer net", "cancelled", "CANCELLED"), ("infer net", "internal", "INTERNAL")]
    left, _ = (span.attributes or {} for span in kept.get_finished_spans())
    assert left["weft.rows"] == 1 and "weft.deadline_met" not in left


def test_a_call_over_grpc_without_a_result_has_a_span_that_says_why(tmp_path: Path) -> None:
    kept = InMemorySpanExporter()
    with running(mlp(tmp_path / "net.onnx")) as live:
        live.server.service.telemetry = OpenTelemetry(exporter=kept)
        with grpc.insecure_channel(live.grpc_address) as channel:
            metadata, path = (("traceparent", PARENT),), "/inference.GRPCInferenceService"
            message = proto.CLASSES["ModelInferRequest"](model_name="nobody").SerializeToString()
            for data in (b"\xff", message):
                with pytest.raises(grpc.RpcError):
                    channel.unary_unary(f"{path}/ModelInfer")(data, metadata=metadata)
            message = proto.CLASSES["ModelInferRequest"](model_name="net").SerializeToString()
            assert list(channel.stream_stream(f"{path}/ModelStreamInfer")(iter([message]), metadata=metadata))
    bad = ("bad_request", "INVALID_ARGUMENT")
    assert reasons(kept) == [("infer", *bad), ("infer nobody", "not_found", "NOT_FOUND"), ("infer net", *bad)]


def test_a_request_without_a_valid_key_has_no_span(tmp_path: Path) -> None:
    kept = InMemorySpanExporter()
    with running(mlp(tmp_path / "net.onnx"), grpc_port=None, api_key="secret") as live:
        live.server.service.telemetry = OpenTelemetry(exporter=kept)
        assert refused(live, b"{}") == 401
    assert not kept.get_finished_spans()


def test_the_trace_rate_holds_for_requests_without_a_result(tmp_path: Path) -> None:
    kept = InMemorySpanExporter()
    with traced(tmp_path, kept) as live:
        live.server.service.trace.change({"trace_rate": "3"})
        for model in ("net", "nobody") * 3:
            refused(live, b"{", model)
        live.server.service.trace.change({"trace_level": "OFF"})
        refused(live, b"{")
    assert [span.name for span in kept.get_finished_spans()] == ["infer net", "infer nobody"]


def test_a_deadline_that_was_missed_shows(tmp_path: Path) -> None:
    (span,), _ = spans_of(tmp_path, {"weft_slo_ms": 1e-6})
    assert span.attributes and span.attributes["weft.deadline_met"] is False


def test_without_a_deadline_none_is_met_or_missed(tmp_path: Path) -> None:
    spans, _ = spans_of(tmp_path, {}, {"weft_best_effort": True})
    assert [(span.attributes or {})["weft.best_effort"] for span in spans] == [True, True]
    assert not any("weft.deadline_met" in (span.attributes or {}) for span in spans)


def test_a_span_lies_where_its_request_was_on_the_wall_clock(tmp_path: Path) -> None:
    before = time.time_ns()
    (span,), (told,) = spans_of(tmp_path, {})
    after = time.time_ns()
    assert span.start_time and span.end_time
    assert before <= span.start_time < span.end_time <= after
    lasted_us = (span.end_time - span.start_time) / 1e3
    assert lasted_us >= told["weft_queue_us"] + told["weft_compute_us"]


def test_the_sender_is_named_unless_the_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (span,), _ = spans_of(tmp_path, {})
    assert span.resource.attributes["service.name"] == "weft"
    assert span.resource.attributes["service.version"] == __version__
    monkeypatch.setenv("OTEL_SERVICE_NAME", "edge-3")
    (span,), _ = spans_of(tmp_path, {})
    assert span.resource.attributes["service.name"] == "edge-3"


def test_what_is_not_sampled_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    spans, told = spans_of(tmp_path, {})
    assert not spans and told


class Stuck(SpanExporter):
    """A collector that takes nothing until it is let."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.taken = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.let.wait()
        self.taken += len(spans)
        return SpanExportResult.SUCCESS


def test_nobody_waits_for_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    collector = Stuck()
    with traced(tmp_path, collector) as live:
        for _ in range(20):
            infer(live)
        assert collector.taken == 0
        collector.let.set()
    assert collector.taken == 20


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, ExportTraceServiceRequest]]]]:
    """A real collector's address, and what it was sent with the paths."""
    received: list[tuple[str, ExportTraceServiceRequest]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Nothing on the terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
def test_spans_reach_a_collector_before_the_server_has_ended(tmp_path: Path, suffix: str) -> None:
    with collector() as (address, received):
        with running(mlp(tmp_path / "net.onnx"), grpc_port=None, otlp=address + suffix) as live:
            infer(live)
            infer(live)
        assert {path for path, _ in received} == {"/v1/traces"}
        scopes = [scope for _, sent in received for resource in sent.resource_spans for scope in resource.scope_spans]
        assert [span.name for scope in scopes for span in scope.spans] == ["infer net"] * 2


def test_the_environment_may_name_the_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as (address, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        with running(mlp(tmp_path / "net.onnx"), grpc_port=None, otlp=True) as live:
            infer(live)
        assert [path for path, _ in received] == ["/v1/traces"]


@pytest.mark.parametrize("otlp", [None, False])
def test_without_the_setting_nothing_is_sent(otlp: bool | None) -> None:
    assert type(make_telemetry(otlp)) is Telemetry


@pytest.mark.parametrize(
    "missing", ["opentelemetry", "opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http"]
)
def test_a_missing_package_is_named_with_the_way_out(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name == missing or name.startswith(f"{missing}."):
            monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(InputError, match=r"^otlp needs opentelemetry\S*, .*pip install 'weft\[otel\]'$"):
        make_telemetry("http://127.0.0.1:4318")
