"""When a request's outcome is decided and counted: after encoding, right before its answer is sent, and once.

The tests put the server's clock an hour forward at the end of the step that makes the result late, so that no machine
is too fast or too slow for them.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import weft
from tests.serving.live import PATIENCE_S, Live, mlp, running
from tests.support.concurrency import until
from weft.base.errors import Expired
from weft.http import bodies
from weft.serving import grpc_wire, in_process, proto, routes
from weft.serving.region_tensors import RequestRegions
from weft.serving.service import Service
from weft.serving.shared_memory import FOLDER
from weft.serving.statistics import Statistics

HOUR_NS = 3600 * 10**9
STRICT = {"timeout": 60_000_000}
SOFT = {"weft_slo_ms": 60_000}
ROWS = np.zeros((1, 64), np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mlp(tmp_path_factory.mktemp("models") / "net.onnx").parent


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Live]:
    with running(folder / "net.onnx") as live:
        yield live


@pytest.fixture
def service(server: Live) -> Service:
    """The server's, with fresh books."""
    found = server.server.service
    slot = found.library.find("net")
    assert slot.served
    slot.statistics = slot.served.statistics = Statistics()
    return found


@pytest.fixture
def made_late(monkeypatch: pytest.MonkeyPatch) -> Callable[[Service, Any, str], None]:
    """Has the server's clock jump by an hour whenever a function returns."""

    def patch(service: Service, place: Any, name: str) -> None:
        now, work, passed_ns = service.now, getattr(place, name), [0]

        def slow(*args: Any, **kwargs: Any) -> Any:
            try:
                return work(*args, **kwargs)
            finally:
                passed_ns[0] = HOUR_NS

        async def slow_async(*args: Any, **kwargs: Any) -> Any:
            result = await work(*args, **kwargs)
            passed_ns[0] = HOUR_NS
            return result

        monkeypatch.setattr(place, name, slow_async if asyncio.iscoroutinefunction(work) else slow)
        monkeypatch.setattr(service, "now", lambda: now() + passed_ns[0])

    return patch


def books(service: Service) -> dict[str, Any]:
    seen = service.library.find("net").statistics
    return {
        "success": seen.success,
        "failures": dict(seen.failures),
        "deadlines": (seen.met, seen.missed),
        "latencies": sum(seen.latencies),
        "window": [answer.met for answer in seen.recent],
    }


TOO_LATE = {"success": 0, "failures": {"expired": 1}, "deadlines": (0, 1), "latencies": 0, "window": [False]}
LATE_BUT_WANTED = {"success": 1, "failures": {}, "deadlines": (0, 1), "latencies": 1, "window": [False]}


def http(live: Live, parameters: dict[str, Any], rows: int = 1, **more: Any) -> tuple[int, dict[str, Any]]:
    """Status and answer of a request; *more* is more of its JSON."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [rows, 64], "data": [0.5] * 64 * rows}
    body = json.dumps({"inputs": [tensor], "parameters": parameters, **more}).encode()
    request = urllib.request.Request(f"{live.url}/v2/models/net/infer", body, {"Accept-Encoding": "gzip"})
    try:
        with urllib.request.urlopen(request) as answer:
            data = answer.read()
            return answer.status, json.loads(gzip.decompress(data) if answer.headers["Content-Encoding"] else data)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def message(parameters: dict[str, int]) -> bytes:
    """A request over gRPC."""
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 64]}
    request = proto.CLASSES["ModelInferRequest"](model_name="net", inputs=[tensor], raw_input_contents=[bytes(256)])
    for key, value in parameters.items():
        request.parameters[key].int64_param = value
    return bytes(request.SerializeToString())


def unary(live: Live, parameters: dict[str, int]) -> str:
    """Why a call has no result; empty where it has one."""
    with grpc.insecure_channel(live.grpc_address) as channel:
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message(parameters))
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()}"
        return ""


def streamed(live: Live, parameters: dict[str, int]) -> str:
    """The same for a request of a stream."""
    with grpc.insecure_channel(live.grpc_address) as channel:
        call = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        (answer,) = call(iter([message(parameters)]))
        return str(proto.CLASSES["ModelStreamInferResponse"].FromString(answer).error_message)


# Too late by the time it is encoded


def test_a_result_whose_json_is_there_too_late_is_a_504(server, service, made_late):
    made_late(service, routes, "encode")
    status, body = http(server, STRICT)
    assert status == 504 and "after its deadline" in body["error"]
    assert books(service) == TOO_LATE


def test_a_result_that_is_packed_too_late_is_a_504(server, service, made_late):
    made_late(service, bodies, "packed")
    assert http(server, STRICT, rows=200)[0] == 504
    assert books(service) == TOO_LATE


def test_a_large_result_that_a_helper_process_writes_too_late_is_a_504(server, service, made_late, monkeypatch):
    monkeypatch.setattr(routes, "is_large", lambda _: True)
    made_late(service, service.json, "encode")
    assert http(server, STRICT)[0] == 504
    assert books(service) == TOO_LATE


@pytest.fixture
def region(server: Live, service: Service) -> Iterator[str]:
    """A region of 40 bytes, as many as an answer has."""
    path = Path(f"{FOLDER}/weft-settling-{os.getpid()}")
    if sys.platform != "linux" or not os.access(FOLDER, os.W_OK):
        pytest.skip(f"the system keeps no shared memory in {FOLDER}")
    path.write_bytes(bytes(40))
    base, about = f"{server.url}/v2/systemsharedmemory/region/out", {"key": f"/{path.name}", "byte_size": 40}
    try:
        with urllib.request.urlopen(f"{base}/register", json.dumps(about).encode()):
            pass
        yield "out"
        with urllib.request.urlopen(f"{base}/unregister", b"{}"):
            pass
    finally:
        path.unlink()


def into(region: str, size: int) -> list[dict[str, Any]]:
    return [{"name": "y", "parameters": {"shared_memory_region": region, "shared_memory_byte_size": size}}]


def test_a_result_that_reaches_its_region_too_late_is_a_504(server, service, region, made_late):
    made_late(service, RequestRegions, "write_outputs")
    assert http(server, STRICT, outputs=into(region, 40))[0] == 504
    assert books(service) == TOO_LATE


def test_a_result_that_is_late_already_is_neither_written_nor_encoded(server, service, monkeypatch):
    submit, late, encoded = service.dispatcher.submit, service.now() + HOUR_NS, list[object]()

    def submit_late(ticket: Any) -> None:
        submit(ticket)
        monkeypatch.setattr(service, "now", lambda: late)

    monkeypatch.setattr(service.dispatcher, "submit", submit_late)
    monkeypatch.setattr(routes, "encode", encoded.append)
    assert http(server, STRICT)[0] == 504
    assert not encoded and books(service) == TOO_LATE


@pytest.mark.parametrize("send", [unary, streamed])
def test_a_result_whose_message_is_there_too_late_exceeds_its_deadline(server, service, made_late, send):
    made_late(service, grpc_wire, "encode_infer")
    why = send(server, STRICT)
    assert "after its deadline" in why and (send is streamed or why.startswith("DEADLINE_EXCEEDED"))
    assert books(service) == TOO_LATE


def test_a_result_that_is_copied_too_late_for_the_calling_program_is_an_error(folder, made_late):
    with weft.Server(folder / "net.onnx", learn_s=0) as program:
        service = program._running.server.service
        made_late(service, in_process, "answer_of")
        with pytest.raises(Expired, match="after its deadline"):
            program.infer("net", {"x": ROWS}, deadline_ms=60_000)
        assert books(service) == TOO_LATE


def test_a_late_result_is_sent_where_the_deadline_is_soft(server, service, made_late):
    made_late(service, routes, "encode")
    assert http(server, SOFT)[0] == 200
    assert books(service) == LATE_BUT_WANTED


def test_a_strict_result_in_time_is_met_once(server, service):
    assert (http(server, STRICT)[0], unary(server, STRICT), streamed(server, STRICT)) == (200, "", "")
    assert books(service) == {
        "success": 3, "failures": {}, "deadlines": (3, 0), "latencies": 3, "window": [True] * 3,
    }  # fmt: skip


# Counted once, however it ends


def test_a_result_that_its_region_does_not_take_is_counted_as_refused_alone(server, service, region):
    assert http(server, STRICT, outputs=into(region, 39))[0] == 400
    assert books(service) == {
        "success": 0, "failures": {"bad_request": 1}, "deadlines": (0, 0), "latencies": 0, "window": [],
    }  # fmt: skip


@pytest.mark.parametrize("send", [http, unary])
def test_a_result_that_cannot_be_encoded_is_counted_as_failed_alone(server, service, monkeypatch, caplog, send):
    def break_down(_: object) -> None:
        raise ArithmeticError("no bytes today")

    monkeypatch.setattr(routes, "encode", break_down)
    monkeypatch.setattr(grpc_wire, "encode_infer", break_down)
    told = http(server, {})[1]["error"] if send is http else unary(server, {}).removeprefix("INTERNAL ")
    assert told == "internal error: ArithmeticError"
    assert "no bytes today" in caplog.text
    assert (books(service)["success"], books(service)["failures"]) == (0, {"internal": 1})


def test_a_client_that_leaves_while_its_result_is_packed_is_counted_as_cancelled_alone(server, service, monkeypatch):
    packing, packed, reached = bodies.packed, threading.Event(), threading.Event()

    def pack(*args: Any) -> Any:
        reached.set()
        assert packed.wait(PATIENCE_S)
        return packing(*args)

    monkeypatch.setattr(bodies, "packed", pack)
    tensor = {"name": "x", "datatype": "FP32", "shape": [200, 64], "data": [0.5] * 64 * 200}
    body = json.dumps({"inputs": [tensor]}).encode()
    head = (
        f"POST /v2/models/net/infer HTTP/1.1\r\nHost: localhost\r\nAccept-Encoding: gzip\r\nContent-Length: {len(body)}"
    )
    with socket.create_connection(("127.0.0.1", server.server.http_port)) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode() + body)
        assert reached.wait(PATIENCE_S)
    until(lambda: books(service)["failures"], "the client is seen to leave")
    packed.set()
    until(
        lambda: not any("Routes._run_in_task" in repr(task) for task in asyncio.all_tasks(server.loop)), "it is packed"
    )
    assert (books(service)["success"], books(service)["failures"]) == (0, {"cancelled": 1})
