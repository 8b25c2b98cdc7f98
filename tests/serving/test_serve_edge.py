"""The edge of a real server, over HTTP and gRPC: who is let in by the head alone, and what large requests may cost."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import pytest
from onnx import helper

from tests.serving import live
from tests.support.concurrency import Background, until
from tests.support.inference import send
from weft.http.messages import ANYONE, ClientRank
from weft.serving import proto
from weft.serving.config import ServerConfig
from weft.serving.endpoints import RPCS

INFER = "/v2/models/mlp/infer"
KEYS = """
[[keys]]
name = "few"
key = "few-key"
requests_per_s = 0.001
[[keys]]
name = "single"
key = "single-key"
in_flight = 1
[[keys]]
name = "modest"
key = "modest-key"
priority = 1
top_priority = 2
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    live.mlp(folder / "mlp.onnx")
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.STRING, ["n"]) for name in ("s", "t")]
    graph = helper.make_graph([helper.make_node("Identity", ["s"], ["t"])], "echo", values[:1], values[1:])
    live.save(graph, folder / "echo.onnx")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    """An open one with room for 8 MiB; no body may have more."""
    settings = {"max_body_bytes": 8 << 20, "max_inflight_bytes": 8 << 20, "max_json_bytes": 4 << 20}
    with live.running(folder, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    """One with several keys, whose repository is read-only."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.write_text(KEYS)
    with live.running(folder / "mlp.onnx", keys_file=file, repository="read-only", api_key="own") as running:
        yield running


def rows(count: int, fill: float = 0.5) -> dict[str, Any]:
    return {"name": "x", "shape": [count, 64], "datatype": "FP32", "data": [fill] * (64 * count)}


def ask(count: int = 1, **more: Any) -> bytes:
    return json.dumps({"inputs": [rows(count)], **more}).encode()


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, "", ""]).encode()


def metric(server: live.Live, name: str, **headers: str) -> float:
    lines = send(server, "GET", "/metrics", headers=headers).body.decode().splitlines()
    (value,) = [line.split()[-1] for line in lines if line.startswith(f"{name} ")]
    return float(value)


# Paths


@pytest.mark.parametrize(
    "path",
    [
        "//v2", "/v2/", "/v2//health/live", "/v2/health/live/", "/v2%2fhealth%2flive", "/v2/health/%6cive",
        "/v2/health/../health/live", "/v2/./health/live", "/%76%32", "/v2/models/mlp/infer/", "//v2/models/mlp/infer",
        "/v2/models//infer", "/v2/models/mlp/versions//infer", "/metrics/", "//", "/./",
        "/v2/models/mlp/%69nfer", "/v2/repository/models/mlp/%6coad", "/weft//state",
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_path_is_taken_as_it_was_sent(server: live.Live, method: str, path: str) -> None:
    answer = server.raw(head(method, path, "Content-Length: 0", "Connection: close"))
    assert answer.split(b" ")[1] == b"404", answer


@pytest.mark.parametrize(("method", "path"), [("GET", "/v2/models/mlp%2finfer"), ("POST", "/v2/models/%2e%2e/infer")])
def test_a_name_is_one_segment_whatever_it_holds(server: live.Live, method: str, path: str) -> None:
    reply = send(server, method, path, ask() if method == "POST" else b"")
    assert reply.status == 404 and "model" in reply.json()["error"]


def test_a_name_may_be_escaped(server: live.Live) -> None:
    assert send(server, "POST", "/v2/models/m%6c%70/infer", ask()).status == 200
    assert send(server, "GET", "/v2/models/%6Dlp/ready").status == 200
    assert send(server, "POST", "/v2/models/%6dlp/versions/%31/infer", ask()).status == 200
    assert send(server, "POST", "/v2/repository/models/%6dlp/load").status == 200


# Heads


@pytest.mark.parametrize(
    ("lines", "path", "status"),
    [
        ((), "/v2/models/nobody/infer", b"404"),
        ((), "/v2/models/mlp/versions/9/infer", b"404"),
        ((), "/v2/nothing", b"404"),
        ((), "/v2/health/live", b"405"),
        (("Content-Encoding: br",), INFER, b"400"),
        (("Inference-Header-Content-Length: x",), INFER, b"400"),
        (("Inference-Header-Content-Length: 5000000",), INFER, b"413"),
        ((), "/v2/repository/index", b"413"),
        ((), INFER, b"413"),  # all of it would be JSON
        (("Origin: http://evil.example",), INFER, b"400"),
    ],
)
def test_what_the_head_says_is_judged_before_a_body_comes(
    server: live.Live, lines: tuple[str, ...], path: str, status: bytes
) -> None:
    answer = server.raw(head("POST", path, "Content-Length: 5000000", *lines))
    assert answer.split(b" ")[1] == status, answer
    assert server.server.service.budget.held_bytes == 0


def test_requests_under_another_name_are_not_taken(server: live.Live) -> None:
    both = {"Host": "evil.example", "Origin": "http://evil.example"}
    for path in ("/v2/repository/models/mlp/unload", INFER, "/metrics", "/"):
        answer = send(server, "POST" if "v2" in path else "GET", path, b"{}", both)
        assert answer.status == 403 and "allowed_hosts" in answer.json()["error"]
    assert send(server, "GET", "/v2/health/live", headers={"Host": "10.1.2.3:8000"}).status == 200
    assert send(server, "POST", INFER, ask()).status == 200


def test_ten_clients_without_a_key_hold_nothing(keyed: live.Live) -> None:
    piece = b"x" * (1 << 20)
    answers = []
    for _ in range(10):
        with socket.create_connection(("127.0.0.1", keyed.server.http_port or 0), timeout=live.PATIENCE_S) as client:
            client.sendall(head("POST", INFER, "Content-Length: 200000000"))
            client.sendall(piece)
            answers.append(client.recv(64))
            assert keyed.server.service.budget.held_bytes == 0
    assert all(answer.startswith(b"HTTP/1.1 401") for answer in answers)


def test_bodies_share_what_may_be_held(server: live.Live) -> None:
    budget = server.server.service.budget
    length = 6 << 20
    with socket.create_connection(("127.0.0.1", server.server.http_port or 0), timeout=live.PATIENCE_S) as client:
        client.sendall(head("POST", INFER, f"Content-Length: {length}", "Inference-Header-Content-Length: 0"))
        until(lambda: budget.held_bytes == length, "its bytes are counted")
        large = b"\0" * (2 << 20)
        refused = send(server, "POST", INFER, large, {"Inference-Header-Content-Length": "0"})
        assert refused.status == 503 and int(refused.headers["Retry-After"]) >= 1
        assert send(server, "POST", INFER, ask()).status == 200
        assert metric(server, "weft_held_bytes") == length
        with pytest.raises(grpc.RpcError) as error:
            call(server, "ModelInfer", raw_request(8192))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert call(server, "ModelInfer", raw_request(1)).model_name == "mlp"
    until(lambda: budget.held_bytes == 0, "who left holds nothing")
    assert call(server, "ModelInfer", raw_request(8192)).model_name == "mlp"
    until(lambda: budget.held_bytes == 0, "its bytes are given back")


def test_what_is_unpacked_counts(server: live.Live) -> None:
    budget = server.server.service.budget
    zeros = gzip.compress(b"\0" * (7 << 20))
    packed = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "0"}
    assert send(server, "POST", INFER, zeros, packed).status == 200
    budget.add(6 << 20)
    try:
        assert send(server, "POST", INFER, zeros, packed).status == 503
    finally:
        budget.release(6 << 20)
    until(lambda: budget.held_bytes == 0, "what was unpacked is let go of")
    assert send(server, "POST", INFER, gzip.compress(b"\0" * (9 << 20)), packed).status == 413


def test_a_packed_body_that_is_alone_has_all_the_room(server: live.Live) -> None:
    """Its own packed bytes are not somebody else's, who would be left half of the room."""
    rest = os.urandom(100_000) + b"\0" * (7 << 20)
    packed = {"Content-Encoding": "gzip", "Inference-Header-Content-Length": "0"}
    reply = send(server, "POST", INFER, gzip.compress(rest), packed)
    assert reply.status == 400, reply.body  # there was room for it, and it was read


# Large JSON


def test_large_json_is_read_and_written_elsewhere(server: live.Live) -> None:
    count = 4096
    reply = send(server, "POST", INFER, ask(count, id="large"))
    assert reply.status == 200 and reply.json()["id"] == "large"
    assert server.server.service.json.processes
    (output,) = reply.json()["outputs"]
    assert output["shape"] == [count, 10] and len(output["data"]) == 10 * count
    small = send(server, "POST", INFER, ask()).json()["outputs"][0]["data"]
    np.testing.assert_allclose(output["data"][:10], small, rtol=1e-5)
    before = server.server.service.json.processes
    binary = np.full((count * 2, 64), 0.5, np.float32).tobytes()
    reply = send(server, "POST", INFER, binary, {"Inference-Header-Content-Length": "0"})
    assert reply.status == 200 and server.server.service.json.processes == before


def test_large_json_that_is_wrong_or_too_large(server: live.Live) -> None:
    assert "not valid JSON" in send(server, "POST", INFER, ask(4096)[:-1]).json()["error"]
    before = failures_of(server, "bad_request")
    assert send(server, "POST", INFER, ask(4096).replace(b"FP32", b"FP64")).status == 400
    assert failures_of(server, "bad_request") == before + 1
    assert send(server, "POST", INFER, b"[" * (3 << 20)).status == 413  # more lists than are read
    packed = gzip.compress(b" " * (5 << 20))
    assert send(server, "POST", INFER, packed, {"Content-Encoding": "gzip"}).status == 413


def failures_of(server: live.Live, reason: str) -> int:
    return int(server.server.service.library.find("mlp").statistics.failures[reason])


@pytest.fixture
def stopped(server: live.Live) -> Iterator[list[int]]:
    """The processes for large JSON stand still until the test lets them go on."""
    assert send(server, "POST", INFER, ask(4096)).status == 200
    found = server.server.service.json.processes
    for process in found:
        os.kill(process, signal.SIGSTOP)
    yield found
    for process in found:
        os.kill(process, signal.SIGCONT)


def test_nobody_else_waits_for_large_json_and_who_left_is_dropped(server: live.Live, stopped: list[int]) -> None:
    service = server.server.service
    large, before = ask(4096), failures_of(server, "cancelled")
    with socket.create_connection(("127.0.0.1", server.server.http_port or 0), timeout=live.PATIENCE_S) as client:
        client.sendall(head("POST", INFER, f"Content-Length: {len(large)}") + large)
        until(lambda: service.json.busy == 1, "it is being read")
        assert send(server, "POST", INFER, ask()).status == 200
        assert send(server, "GET", "/v2/health/live").status == 200
        assert metric(server, "weft_large_json") == 1
        assert service.budget.held_bytes == len(large)
    until(lambda: failures_of(server, "cancelled") == before + 1, "its leaving is counted")
    until(lambda: service.budget.held_bytes == 0 and not service._tasks, "its bytes and its task are gone")


def test_a_server_that_goes_down_answers_what_is_being_read(folder: Path) -> None:
    with live.running(folder / "mlp.onnx", grpc_port=None, stop=False) as server:
        service = server.server.service
        assert send(server, "POST", INFER, ask(4096)).status == 200
        (process,) = service.json.processes
        os.kill(process, signal.SIGSTOP)
        waiting = Background(lambda: send(server, "POST", INFER, ask(4096)))
        until(lambda: bool(service._tasks), "it is being read")
        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(), server.loop)
        until(lambda: service.draining, "it goes down")
        os.kill(process, signal.SIGCONT)
        assert waiting.result().status == 200
        assert stopping.result(live.PATIENCE_S) is True
        until(lambda: not _exists(process), "its process has ended")


def test_who_was_let_in_before_the_server_went_down_is_computed_for(server: live.Live) -> None:
    service = server.server.service
    body = np.full((4096, 64), 0.5, np.float32).tobytes()
    packed = gzip.compress(body, 0)
    lines = "Content-Encoding: gzip", "Inference-Header-Content-Length: 0", "Connection: close"
    with socket.create_connection(("127.0.0.1", server.server.http_port or 0), timeout=live.PATIENCE_S) as client:
        client.sendall(head("POST", INFER, f"Content-Length: {len(packed)}", *lines))
        until(lambda: service.budget.held_bytes == len(packed), "it is let in")
        service.draining = True
        try:
            assert send(server, "POST", INFER, ask()).status == 503
            assert "going down" in refused("UNAVAILABLE", server, "ModelInfer", raw_request(1))
            client.sendall(packed)
            assert client.recv(64).startswith(b"HTTP/1.1 200 ")
        finally:
            service.draining = False


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_model_that_left_while_its_request_was_read(server: live.Live, stopped: list[int]) -> None:
    service = server.server.service
    waiting = Background(lambda: send(server, "POST", INFER, ask(4096)))
    until(lambda: service.json.busy == 1, "it is being read")
    assert send(server, "POST", "/v2/repository/models/mlp/unload").status == 200
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    reply = waiting.result()
    assert reply.status == 503 and "send it again" in reply.json()["error"]
    assert send(server, "POST", "/v2/repository/models/mlp/load").status == 200


def strings(count: int) -> bytes:
    return b"".join((1).to_bytes(4, "little") + b"x" for _ in range(count))


@pytest.fixture
def elsewhere(server: live.Live, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read and written by processes beside the server, call by call."""
    begun: list[str] = []
    helpers = server.server.service.json
    for name in ("decode", "encode", "decode_message", "encode_message"):
        begin = getattr(helpers, name)
        monkeypatch.setattr(
            helpers, name, lambda *args, name=name, begin=begin: (begun.append(name), begin(*args))[1], raising=False
        )
    return begun


def test_many_strings_are_cut_apart_elsewhere_also_in_binary(server: live.Live, elsewhere: list[str]) -> None:
    for count in (300_000, 3):
        data = strings(count)
        tensor = {"name": "s", "shape": [count], "datatype": "BYTES", "parameters": {"binary_data_size": len(data)}}
        begin = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"Inference-Header-Content-Length": str(len(begin))}
        reply = send(server, "POST", "/v2/models/echo/infer", begin + data, headers)
        assert reply.status == 200 and reply.body.endswith(data)
        assert elsewhere == ["decode", "encode"]


def test_many_strings_over_grpc_are_cut_apart_elsewhere(server: live.Live, elsewhere: list[str]) -> None:
    for count in (300_000, 3):
        request = proto.CLASSES["ModelInferRequest"](model_name="echo")
        request.inputs.add(name="s", datatype="BYTES", shape=[count])
        request.raw_input_contents.append(strings(count))
        assert call(server, "ModelInfer", request).raw_output_contents[0] == strings(count)
        assert elsewhere == ["decode_message", "encode_message"]


# gRPC


def call(server: live.Live, name: str, request: Any, key: str | None = None) -> Any:
    request_kind, response_kind, _ = proto.METHODS[name]
    with grpc.insecure_channel(server.grpc_address, [("grpc.max_receive_message_length", -1)]) as channel:
        method = channel.unary_unary(
            f"/{proto.SERVICE}/{name}", request_kind.SerializeToString, response_kind.FromString
        )
        metadata = [("authorization", f"Bearer {key}")] if key else []
        return method(request, metadata=metadata, timeout=live.PATIENCE_S)


def raw_request(count: int) -> Any:
    request = proto.CLASSES["ModelInferRequest"](model_name="mlp")
    request.inputs.add(name="x", datatype="FP32", shape=[count, 64])
    request.raw_input_contents.append(np.full((count, 64), 0.5, np.float32).tobytes())
    return request


def typed_request(count: int) -> Any:
    request = proto.CLASSES["ModelInferRequest"](model_name="mlp")
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[count, 64])
    tensor.contents.fp32_contents.extend([0.5] * 64 * count)
    return request


def refused(code: str, *args: Any, **more: Any) -> str:
    with pytest.raises(grpc.RpcError) as error:
        call(*args, **more)
    assert error.value.code() is grpc.StatusCode[code]
    return str(error.value.details())


def test_large_typed_contents_are_read_elsewhere_and_answered_raw(server: live.Live) -> None:
    count = 8192
    many, few = (
        np.frombuffer(call(server, "ModelInfer", typed_request(rows)).raw_output_contents[0], np.float32)
        for rows in (count, 1)
    )
    assert len(many) == 10 * count
    np.testing.assert_allclose(many[:10], few, rtol=1e-5)
    said = refused("RESOURCE_EXHAUSTED", server, "ModelInfer", typed_request(20_000))
    assert "send raw contents" in said
    assert server.server.service.budget.held_bytes == 0


def test_a_call_without_a_key_is_refused_before_its_message_is_read(keyed: live.Live) -> None:
    """A message that never comes to its end would keep the call for ever if anybody waited for it."""
    with grpc.insecure_channel(keyed.grpc_address) as channel:
        method = channel.stream_unary(f"/{proto.SERVICE}/ModelInfer", bytes, bytes)
        ended = threading.Event()

        def never() -> Iterator[bytes]:
            ended.wait(live.PATIENCE_S)
            yield from ()

        with pytest.raises(grpc.RpcError) as error:
            method(never(), timeout=live.PATIENCE_S)
        ended.set()
    assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("name", ["ServerLive", "ServerReady"])
def test_a_probe_is_answered_before_its_message_is_read(keyed: live.Live, name: str) -> None:
    """Nobody needs a key for it, so nobody may have the server gather a message, or keep a call, with it."""
    with grpc.insecure_channel(keyed.grpc_address) as channel:
        method = channel.stream_unary(f"/{proto.SERVICE}/{name}", bytes, proto.METHODS[name][1].FromString)
        ended = threading.Event()

        def never() -> Iterator[bytes]:
            ended.wait(live.PATIENCE_S)
            yield from ()

        answer = method(never(), timeout=live.PATIENCE_S)
        ended.set()
    assert answer.live if name == "ServerLive" else answer.ready


def test_a_call_that_has_nothing_computed_has_a_short_message(server: live.Live) -> None:
    request = proto.METHODS["ModelReady"][0](name="x" * (1 << 20))
    assert "limit of 1048576 bytes" in refused("RESOURCE_EXHAUSTED", server, "ModelReady", request)


# Keys


def with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_read_only_repository(keyed: live.Live) -> None:
    for verb in ("load", "unload"):
        reply = send(keyed, "POST", f"/v2/repository/models/mlp/{verb}", b"", with_key("own"))
        assert reply.status == 403 and 'repository = "open"' in reply.json()["error"]
        name = f"RepositoryModel{verb.capitalize()}"
        request = proto.METHODS[name][0](model_name="mlp")
        assert "read-only" in refused("PERMISSION_DENIED", keyed, name, request, key="own")
    assert send(keyed, "POST", "/v2/repository/index", b"", with_key("own")).status == 200
    assert send(keyed, "POST", INFER, ask(), with_key("own")).status == 200


def test_quotas_are_the_same_over_http_and_grpc(keyed: live.Live) -> None:
    caller = keyed.server.service.keys.callers["few"]
    assert send(keyed, "POST", INFER, ask(), with_key("few-key")).status == 200
    reply = send(keyed, "POST", INFER, ask(), with_key("few-key"))
    assert reply.status == 429 and int(reply.headers["Retry-After"]) > 1 and "'few'" in reply.json()["error"]
    assert "'few'" in refused("RESOURCE_EXHAUSTED", keyed, "ModelInfer", raw_request(1), key="few-key")
    assert send(keyed, "GET", "/v2/models/mlp", headers=with_key("few-key")).status == 200  # nothing is done for it
    assert (caller.requests, caller.in_flight, caller.refused["rate"]) == (1, 0, 2)
    text = send(keyed, "GET", "/metrics", headers=with_key("own")).body.decode()
    assert 'weft_key_requests_total{key="few"} 1' in text
    assert 'weft_key_refusals_total{key="few",reason="rate"} 2' in text
    assert "few-key" not in text


def test_requests_in_flight_of_a_key(keyed: live.Live) -> None:
    caller = keyed.server.service.keys.callers["single"]
    with live.Gate(keyed, "mlp", 1) as gate:
        first = Background(lambda: send(keyed, "POST", INFER, ask(), with_key("single-key")))
        gate.wait()
        assert caller.in_flight == 1
        assert send(keyed, "POST", INFER, ask(), with_key("single-key")).status == 429
        assert "in flight" in refused("RESOURCE_EXHAUSTED", keyed, "ModelInfer", raw_request(1), key="single-key")
        gate.open()
        assert first.result().status == 200
    until(lambda: caller.in_flight == 0, "it is over")
    assert call(keyed, "ModelInfer", raw_request(1), key="single-key").model_name == "mlp"
    assert caller.in_flight == 0


def test_calls_whose_messages_come_late_are_counted_when_they_come(keyed: live.Live) -> None:
    """Many heads are let in while nothing is in flight; of their messages only one is."""
    caller, come = keyed.server.service.keys.callers["single"], threading.Event()
    data, before = raw_request(1).SerializeToString(), caller.requests

    def late() -> Iterator[bytes]:
        come.wait(live.PATIENCE_S)
        yield data

    with live.Gate(keyed, "mlp", 1) as gate, grpc.insecure_channel(keyed.grpc_address) as channel:
        method = channel.stream_unary(f"/{proto.SERVICE}/ModelInfer", bytes, bytes)
        metadata = [("authorization", "Bearer single-key")]
        calls = [method.future(late(), metadata=metadata, timeout=live.PATIENCE_S) for _ in range(3)]
        until(lambda: caller.requests == before + 3, "their heads are let in")
        come.set()
        gate.wait()
        until(lambda: sum(each.done() for each in calls) == 2, "two are refused")
        assert caller.in_flight == 1
        gate.open()
        codes = sorted(each.code().name for each in calls)
    assert codes == ["OK", "RESOURCE_EXHAUSTED", "RESOURCE_EXHAUSTED"]
    assert caller.in_flight == 0


@pytest.mark.parametrize("name", ["RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload"])
def test_whatever_a_call_has_done_counts_for_its_key(
    keyed: live.Live, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = keyed.server.service.keys.callers["single"]
    seen: list[int] = []

    def spied(*_: Any) -> list[Any]:
        seen.append(caller.in_flight)
        return []

    monkeypatch.setitem(RPCS, name, replace(RPCS[name], handle=spied))
    call(keyed, name, proto.METHODS[name][0](), key="single-key")
    assert seen == [1] and caller.in_flight == 0


def test_a_key_caps_the_priority(keyed: live.Live) -> None:
    service = keyed.server.service
    slot, modest = service.library.find("mlp"), service.keys.callers["modest"]
    request = keyed_request()

    def weight(priority: int, rank: ClientRank) -> int:
        request.parameters = {"priority": priority} if priority else {}
        return int(service.ticket(slot, request, 0, None, lambda *_: None, rank).priority)

    assert [weight(priority, ANYONE) for priority in (0, 1, 2, 3)] == [1, 9, 3, 1]
    assert [weight(priority, modest.rank) for priority in (0, 1, 2, 3)] == [3, 3, 3, 1]


def keyed_request() -> Any:
    from weft.serving.wire import InferRequest

    return InferRequest({"x": np.zeros((1, 64), np.float32)}, "", {}, ())


def test_the_open_settings_are_the_default() -> None:
    config = ServerConfig()
    assert (config.loading.repository, config.network.allowed_hosts, config.network.keys_file) == ("open", None, None)
    assert config.inflight_bytes == 1 << 30 and ServerConfig(max_body_bytes=1 << 31).inflight_bytes == 1 << 31
