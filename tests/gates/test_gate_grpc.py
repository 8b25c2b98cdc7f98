"""A gate over gRPC: the same gate, asked by Triton's own client."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest

from tests.gates.cases import PAIR, answering, gated, scripted
from tests.serving import live
from weft.gates import board

client = pytest.importorskip("tritonclient.grpc", reason="tritonclient of .[dev] is the judge")
utils = pytest.importorskip("tritonclient.utils")

ROW = np.random.default_rng(3).normal(size=(1, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[live.Live]:
    with live.running(live.mlp(tmp_path_factory.mktemp("models") / "net.onnx"), api_key="inner") as running:
        yield running


@contextlib.contextmanager
def asked(gate) -> Iterator:
    with client.InferenceServerClient(f"127.0.0.1:{gate.gate.grpc_port}") as found:
        yield found


def image(rows: np.ndarray = ROW):
    found = client.InferInput("x", list(rows.shape), "FP32")
    found.set_data_from_numpy(rows)
    return found


def test_results_and_descriptions_come_through(server) -> None:
    with gated(PAIR, {"left": [server.url]}, key="inner", grpc_port=0) as gate, asked(gate) as calls:
        assert calls.is_server_live() and calls.is_server_ready() and calls.is_model_ready("net")
        assert [each.name for each in calls.get_model_metadata("net").inputs] == ["x"]
        assert calls.get_model_config("net").config.name == "net"
        assert calls.get_server_metadata().name == "weft"
        found = calls.infer("net", [image()], request_id="seven", outputs=[client.InferRequestedOutput("y")])
        assert found.get_response().id == "seven"
        with client.InferenceServerClient(server.grpc_address) as direct:
            alone = direct.infer("net", [image()], headers={"authorization": "Bearer inner"})
        assert np.array_equal(found.as_numpy("y"), alone.as_numpy("y"))
        assert np.array_equal(calls.infer("net", [image()]).as_numpy("y"), alone.as_numpy("y"))
        assert gate.told()["servers"][0]["ended"]["ok"] >= 2


def test_typed_contents_are_the_same_as_raw_ones(server) -> None:
    from weft.gates.grpc_face import _request
    from weft.serving import proto

    message = proto.CLASSES["ModelInferRequest"](model_name="net")
    message.inputs.add(name="x", datatype="FP32", shape=[1, 64]).contents.fp32_contents.extend(ROW[0].tolist())
    _, (typed,) = _request(message, None)
    assert typed == ROW.tobytes()
    message = proto.CLASSES["ModelInferRequest"](model_name="net")
    message.inputs.add(name="s", datatype="BYTES", shape=[2]).contents.bytes_contents.extend([b"a", b"bc"])
    head, (strings,) = _request(message, 0.25)
    assert strings == b"\x01\0\0\0a\x02\0\0\0bc" and head["parameters"]["timeout"] == 250_000


def test_errors_have_their_codes(server, monkeypatch) -> None:
    monkeypatch.setattr(board, "BELIEVED_NS", 10**15)
    with gated(PAIR, {"left": [server.url]}, key="inner", api_key="outer", grpc_port=0) as gate, asked(gate) as calls:
        key = {"authorization": "Bearer outer"}
        for code, call in (
            ("UNAUTHENTICATED", lambda: calls.infer("net", [image()])),
            ("NOT_FOUND", lambda: calls.infer("nett", [image()], headers=key)),
            ("INVALID_ARGUMENT", lambda: calls.infer("net", [image(ROW[:, :3])], headers=key)),
            ("UNIMPLEMENTED", lambda: calls.get_inference_statistics("net", headers=key)),
        ):
            with pytest.raises(utils.InferenceServerException) as caught:
                call()
            assert caught.value.status() == f"StatusCode.{code}"


def test_a_call_s_deadline_goes_on_as_what_is_left_of_it() -> None:
    with scripted(answering(503)) as (server,), gated(PAIR, {"left": [server.url]}, grpc_port=0) as gate:
        with asked(gate) as calls, pytest.raises(utils.InferenceServerException):
            calls.infer("net", [image()], client_timeout=500.0)
        assert b'"timeout":' in server.asked[0].body and int(server.asked[0].headers["weft-age-us"]) < 500_000_000
