"""What only a client over HTTP sees: bodies in JSON and in bytes, addresses, headers, connections that end."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import ssl
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving import live
from tests.serving.chain import CHAIN_WIDTH, chain_request, computed, occupied
from tests.serving.clients import KINDS, Client, assert_every_datatype, expected, values, x
from tests.support.concurrency import Background, until
from tests.support.inference import failures, infer, model_state, send, state

triton = pytest.importorskip("tritonclient.http")


@pytest.fixture(params=["http", "http.aio"])
def client(request: pytest.FixtureRequest, server: live.Live) -> Iterator[Client]:
    with contextlib.closing(Client(request.param, server)) as made:
        yield made


@pytest.fixture
def blocking(server: live.Live) -> Iterator[Client]:
    with contextlib.closing(Client("http", server)) as made:
        yield made


def one(data: Any, shape: list[int] | None = None, **parameters: Any) -> Any:
    """A request in JSON for a model with the input x."""
    array = np.asarray(data, np.float32)
    x = {"name": "x", "shape": shape or array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
    return {"inputs": [x], "parameters": parameters}


def test_a_model_that_is_not_there_is_not_ready(client: Client) -> None:
    assert not client.is_model_ready("mlp", "7")
    assert not client.is_model_ready("nobody")


# Inference


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tensors_go_and_come_as_numbers_or_as_bytes(
    client: Client, folder: Path, binary_in: bool, binary_out: bool
) -> None:
    outputs = [client.output("y", binary_data=binary_out)]
    answer = client.infer("mlp", [client.tensor("x", x(), binary_data=binary_in)], outputs=outputs)
    assert ("binary_data_size" in answer.get_output("y").get("parameters", {})) is binary_out
    assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_every_datatype_goes_and_comes_as_numbers_or_as_bytes(
    client: Client, binary_in: bool, binary_out: bool
) -> None:
    def encoded(strings: np.ndarray) -> np.ndarray:
        return np.array([str(each).encode() for each in strings.ravel()], np.object_).reshape(strings.shape)

    inputs = [client.tensor(kind.lower(), values(kind), kind, binary_data=binary_in) for kind in KINDS]
    outputs = [client.output(f"same_{kind.lower()}", binary_data=binary_out) for kind in KINDS]
    answer = client.infer("echo", inputs, outputs=outputs)
    assert_every_datatype(answer, (lambda strings: strings) if binary_out else encoded)


def test_an_async_infer_of_the_blocking_client(blocking: Client, server: live.Live, folder: Path) -> None:
    with contextlib.closing(triton.InferenceServerClient(server.address, concurrency=4)) as client:
        asked = [[blocking.tensor("x", x(1, seed))] for seed in range(12)]
        handles = [client.async_infer("mlp", inputs, request_id=str(seed)) for seed, inputs in enumerate(asked)]
        for seed, handle in enumerate(handles):
            answer = handle.get_result()
            assert answer.get_response()["id"] == str(seed)
            np.testing.assert_allclose(answer.as_numpy("y"), expected(folder, x(1, seed)), rtol=1e-4, atol=1e-5)


def test_a_body_made_and_read_by_the_client_library(blocking: Client, server: live.Live, folder: Path) -> None:
    body, length = triton.InferenceServerClient.generate_request_body([blocking.tensor("x", x())], request_id="made")
    headers = {"Inference-Header-Content-Length": str(length)}
    reply = send(server, "POST", "/v2/models/mlp/infer", body, headers)
    assert reply.status == 200
    told = reply.headers["Inference-Header-Content-Length"]
    answer = triton.InferenceServerClient.parse_response_body(reply.body, header_length=told and int(told))
    assert answer.get_response()["id"] == "made"
    np.testing.assert_allclose(answer.as_numpy("y"), expected(folder, x()), rtol=1e-6)


def test_a_raw_body_without_any_json(server: live.Live, folder: Path) -> None:
    reply = send(server, "POST", "/v2/models/mlp/infer", x(1).tobytes(), {"Inference-Header-Content-Length": "0"})
    assert reply.status == 200
    length = int(reply.headers["Inference-Header-Content-Length"])
    assert reply.body[length:] == expected(folder, x(1)).tobytes()


# What is wrong


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v2/models/mlp/infer", b"{", 400),
        ("POST", "/v2/models/mlp/infer", b"", 400),
        ("POST", "/v2/models/mlp/infer", b"[]", 400),
        ("POST", "/v2/models/mlp/infer", b'{"inputs": []}', 400),
        ("POST", "/v2/models/mlp/infer", b"\xff\xfe", 400),
        ("POST", "/v2/models/nobody/infer", b"{", 404),
        ("POST", "/v2/models/../../etc/passwd/infer", b"{}", 404),
        ("POST", "/v2/models/mlp/versions/x/infer", b"{}", 404),
        ("POST", "/v2/repository/index", b"{", 400),
        ("POST", "/v2/repository/models/mlp/load", b"[1]", 400),
        ("GET", "/v2/models/mlp/infer", b"", 405),
        ("POST", "/v2/models/mlp", b"", 405),
        ("DELETE", "/v2/health/live", b"", 405),
        ("GET", "/v2/repository/index", b"", 405),
        ("GET", "/v2/repository/models/mlp/load", b"", 405),
        ("POST", "/v2/models/mlp/stats", b"", 405),
        ("GET", "/v1/models/mlp", b"", 404),
        ("GET", "/v2/nothing", b"", 404),
        ("GET", "/v2/models/mlp/nothing", b"", 404),
        ("GET", "/v2/models/mlp/versions", b"", 404),
        ("GET", "/favicon.ico", b"", 404),
        ("GET", "/weft/nothing", b"", 404),
        ("GET", "/weft/timeline?since=soon", b"", 400),
    ],
)
def test_requests_that_cannot_be_answered(server: live.Live, method: str, path: str, body: bytes, status: int) -> None:
    reply = send(server, method, path, body)
    assert reply.status == status
    message = reply.json()
    assert list(message) == ["error"] and message["error"] and "\n" not in message["error"]


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [("gzip", gzip.compress), ("deflate", zlib.compress)],
)
def test_compressed_bodies_that_are_broken(server: live.Live, encoding: str, pack: Callable[[bytes], bytes]) -> None:
    whole = pack(json.dumps(one(x())).encode())
    path, header = "/v2/models/mlp/infer", {"Content-Encoding": encoding}
    assert send(server, "POST", path, whole, header).status == 200
    assert send(server, "POST", path, whole[:-9], header).status == 400
    assert send(server, "POST", path, b"plain", header).status == 400
    assert send(server, "POST", path, whole, {"Content-Encoding": "br"}).status in (400, 415)


# Clients that are sent away, and clients that go


def test_a_full_queue_says_when_to_come_again(server: live.Live) -> None:
    before = failures(server, "queue_full")
    with occupied(server):
        waiting = Background(lambda: infer(server, "chain", {"x": np.ones((1, CHAIN_WIDTH), np.float32)}))
        until(lambda: model_state(server, "chain")["queued"] == 1, "one request waits")
        reply = send(server, "POST", "/v2/models/chain/infer", one(np.ones((1, CHAIN_WIDTH))))
        assert reply.status == 503
        assert 1 <= int(reply.headers["Retry-After"]) <= 3600
        assert failures(server, "queue_full") == before + 1
    assert waiting.result()["y"].shape == (1, CHAIN_WIDTH)


def test_who_leaves_the_queue_is_counted_and_frees_its_place(server: live.Live) -> None:
    before = failures(server, "cancelled")
    with occupied(server):
        with socket.create_connection(("127.0.0.1", server.server.http_port or 0)) as leaver:
            leaver.sendall(chain_request(1))
            until(lambda: model_state(server, "chain")["queued"] == 1, "one request waits")
        until(lambda: failures(server, "cancelled") == before + 1, "its leaving is counted")
        assert model_state(server, "chain")["queued"] == 0
    assert failures(server, "cancelled") == before + 2  # whoever occupied the lane has left, too


def test_who_leaves_half_way_has_its_other_segments_dropped(server: live.Live) -> None:
    before, since = failures(server, "cancelled"), state(server)["now_s"]
    with occupied(server):
        until(lambda: computed(server, since), "a segment is done")
    assert failures(server, "cancelled") == before + 1
    last = model_state(server, "chain")["segments"]
    assert f"{last}/{last}" not in computed(server, since)
    assert 1 <= len(computed(server, since)) < last


# Keys, TLS


def test_pages_and_figures_want_a_key_too(guarded: live.Live) -> None:
    assert send(guarded, "GET", "/weft/state").status == 401
    assert send(guarded, "GET", "/metrics").status == 401
    assert send(guarded, "GET", "/v2").headers["WWW-Authenticate"] == "Bearer"


def test_who_does_not_trust_the_certificate_or_does_not_encrypt_hears_nothing(encrypted: live.Live) -> None:
    context = ssl.create_default_context()
    strict = http.client.HTTPSConnection(encrypted.address, timeout=live.PATIENCE_S, context=context)
    with contextlib.closing(strict), pytest.raises(ssl.SSLCertVerificationError):
        strict.request("GET", "/v2/health/live")
    assert b"200" not in encrypted.raw(b"GET /v2/health/live HTTP/1.1\r\nHost: test\r\n\r\n")
