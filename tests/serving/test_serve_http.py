"""Every call of Triton's own HTTP clients, blocking and asynchronous, against a running server; and what it refuses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gzip
import http.client
import inspect
import json
import shutil
import socket
import ssl
import subprocess
import threading
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from tests.serving import live
from tests.serving.test_serve_models import (
    chain,
    chain_request,
    computed,
    failures,
    model,
    occupied,
    send,
    state,
    until,
)

triton = pytest.importorskip("tritonclient.http")
triton_aio = pytest.importorskip("tritonclient.http.aio")
utils = pytest.importorskip("tritonclient.utils")

KINDS = {
    "BOOL": (TensorProto.BOOL, np.bool_),
    "INT8": (TensorProto.INT8, np.int8),
    "INT16": (TensorProto.INT16, np.int16),
    "INT32": (TensorProto.INT32, np.int32),
    "INT64": (TensorProto.INT64, np.int64),
    "UINT8": (TensorProto.UINT8, np.uint8),
    "UINT16": (TensorProto.UINT16, np.uint16),
    "UINT32": (TensorProto.UINT32, np.uint32),
    "UINT64": (TensorProto.UINT64, np.uint64),
    "FP16": (TensorProto.FLOAT16, np.float16),
    "FP32": (TensorProto.FLOAT, np.float32),
    "FP64": (TensorProto.DOUBLE, np.float64),
    "BYTES": (TensorProto.STRING, np.object_),
}


# Models


def echo(path: Path) -> Path:
    """Gives back one input of every type there is."""
    nodes, ins, outs = [], [], []
    for name, (kind, _) in KINDS.items():
        ins.append(helper.make_tensor_value_info(name.lower(), kind, ["n", 3]))
        outs.append(helper.make_tensor_value_info(f"same_{name.lower()}", kind, ["n", 3]))
        nodes.append(helper.make_node("Identity", [ins[-1].name], [outs[-1].name]))
    return live.save(helper.make_graph(nodes, "echo", ins, outs), path)


def unmeasured(path: Path) -> Path:
    """Runs in one piece; with no shapes given, the server cannot foresee how long."""
    graph = helper.make_graph(
        [helper.make_node("ReduceMean", ["x"], ["y"], axes=[1, 2], keepdims=0)],
        "unmeasured",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "rows", 512])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n"])],
    )
    return live.save(graph, path)


def repository(folder: Path) -> Path:
    """mlp, echo, unmeasured, and chain: cut into several segments, with room for one request that waits."""
    live.mlp(folder / "mlp.onnx")
    (folder / "mlp.toml").write_text("max_batch = 8\n")
    echo(folder / "echo.onnx")
    unmeasured(folder / "unmeasured.onnx")
    chain(folder / "chain.onnx", "queue_size = 1\n")
    return folder


def one(data: Any, shape: list[int] | None = None, **parameters: Any) -> Any:
    """A request in JSON for a model with the input x."""
    array = np.asarray(data, np.float32)
    x = {"name": "x", "shape": shape or array.shape, "datatype": "FP32", "data": array.ravel().tolist()}
    return {"inputs": [x], "parameters": parameters}


# Clients


class Blocking:
    """An asynchronous client that waits for every answer, so that the same tests go for both kinds."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self.inner = self.wait(self._made(make))

    @staticmethod
    async def _made(make: Callable[[], Any]) -> Any:
        return make()

    def wait(self, awaitable: Any) -> Any:
        return self._loop.run_until_complete(awaitable)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self.inner, name)

        @functools.wraps(attribute)
        def call(*args: Any, **kwargs: Any) -> Any:
            answer = attribute(*args, **kwargs)
            return self.wait(answer) if inspect.isawaitable(answer) else answer

        return call

    def close(self) -> None:
        self.wait(self.inner.close())
        self.wait(self._loop.shutdown_asyncgens())
        self._loop.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return repository(tmp_path_factory.mktemp("repository"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder, policy="edf", late="keep") as running:
        yield running


@pytest.fixture(params=["sync", "aio"])
def client(request: pytest.FixtureRequest, server: live.Live) -> Iterator[Any]:
    if request.param == "sync":
        made = triton.InferenceServerClient(server.address)
    else:
        made = Blocking(lambda: triton_aio.InferenceServerClient(server.address))
    yield made
    made.close()


def tensor(name: str, array: np.ndarray, datatype: str | None = None, *, binary: bool = True) -> Any:
    kind = datatype or utils.np_to_triton_dtype(array.dtype)
    made = triton.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def x(rows: int = 2, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 64)).astype(np.float32)


def expected(folder: Path, array: np.ndarray) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return np.asarray(ort.InferenceSession(str(folder / "mlp.onnx"), options).run(["y"], {"x": array})[0])


def values(kind: str) -> np.ndarray:
    """Two rows of a type, its limits among them."""
    dtype = np.dtype(KINDS[kind][1])
    if kind == "BYTES":
        return np.array([[b"", b"a", "grüß".encode()], [b"\x00", b"x" * 300, b"end"]], np.object_)
    if kind == "BOOL":
        return np.array([[True, False, True], [False, False, True]])
    limits = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    return np.array([[limits.min, 0, limits.max], [1, 2, 3]], dtype)


# What a client asks


def test_health_and_readiness(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert client.is_model_ready("mlp", "1")
    assert not client.is_model_ready("mlp", "7")
    assert not client.is_model_ready("nobody")


def test_server_metadata(client: Any) -> None:
    told = client.get_server_metadata()
    assert told["name"] == "weft"
    assert {"binary_tensor_data", "model_repository", "statistics", "schedule_policy"} <= set(told["extensions"])


@pytest.mark.parametrize("version", ["", "1"])
def test_model_metadata(client: Any, version: str) -> None:
    told = client.get_model_metadata("mlp", version)
    assert told["name"] == "mlp" and told["versions"] == ["1"]
    assert told["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]
    assert told["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 10]}]


def test_metadata_names_every_datatype(client: Any) -> None:
    told = client.get_model_metadata("echo")
    assert [each["datatype"] for each in told["inputs"]] == list(KINDS)


def test_model_config(client: Any) -> None:
    told = client.get_model_config("chain")
    assert told["name"] == "chain" and told["backend"] == "onnxruntime"
    assert told["input"][0]["data_type"] == "TYPE_FP32"
    assert told["parameters"]["weft_queue_size"]["string_value"] == "1"
    assert client.get_model_config("mlp", "1")["max_batch_size"] == 8


def test_repository_index(client: Any) -> None:
    rows = {row["name"]: row for row in client.get_model_repository_index()}
    assert set(rows) == {"mlp", "echo", "unmeasured", "chain"}
    assert {row["state"] for row in rows.values()} == {"READY"}


def test_load_and_unload(client: Any) -> None:
    client.unload_model("echo")
    assert not client.is_model_ready("echo")
    rows = {row["name"]: row for row in client.get_model_repository_index()}
    assert rows["echo"]["state"] == "UNAVAILABLE" and "unloaded" in rows["echo"]["reason"]
    with pytest.raises(utils.InferenceServerException) as refused:
        client.infer("echo", [tensor("bool", values("BOOL"))])
    assert refused.value.status() == "404"
    client.load_model("echo")
    assert client.is_model_ready("echo")
    with pytest.raises(utils.InferenceServerException) as refused:
        client.load_model("nobody")
    assert refused.value.status() in ("400", "404")
    with pytest.raises(utils.InferenceServerException) as refused:
        client.unload_model("nobody")
    assert refused.value.status() in ("400", "404")


def test_loading_with_a_configuration_of_the_clients_is_refused(client: Any) -> None:
    with pytest.raises(utils.InferenceServerException, match="parameters") as refused:
        client.load_model("mlp", config='{"backend": "python"}')
    assert refused.value.status() == "400"
    assert client.is_model_ready("mlp")


def test_statistics(client: Any) -> None:
    before = client.get_inference_statistics("mlp")["model_stats"][0]
    client.infer("mlp", [tensor("x", x(3))])
    after = client.get_inference_statistics("mlp", "1")["model_stats"][0]
    assert after["name"] == "mlp" and after["version"] == "1"
    assert after["inference_count"] == before["inference_count"] + 3
    assert after["execution_count"] == before["execution_count"] + 1
    assert after["inference_stats"]["success"]["count"] == before["inference_stats"]["success"]["count"] + 1
    assert after["inference_stats"]["compute_infer"]["ns"] > before["inference_stats"]["compute_infer"]["ns"]
    assert after["last_inference"] > 0
    assert {each["name"] for each in client.get_inference_statistics()["model_stats"]} >= {"mlp", "chain"}


def test_failures_are_in_the_statistics(client: Any) -> None:
    def failed() -> int:
        return int(client.get_inference_statistics("mlp")["model_stats"][0]["inference_stats"]["fail"]["count"])

    before = failed()
    with pytest.raises(utils.InferenceServerException):
        client.infer("mlp", [tensor("x", np.zeros((1, 65), np.float32))])
    assert failed() == before + 1


# Inference


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_infer_gives_what_onnxruntime_gives(client: Any, folder: Path, binary_in: bool, binary_out: bool) -> None:
    wanted = [triton.InferRequestedOutput("y", binary_data=binary_out)]
    answer = client.infer(
        "mlp", [tensor("x", x(), binary=binary_in)], outputs=wanted, request_id="a-17", model_version="1"
    )
    told = answer.get_response()
    assert (told["model_name"], told["model_version"], told["id"]) == ("mlp", "1", "a-17")
    assert told["parameters"]["weft_batch"] >= 1
    assert ("binary_data_size" in answer.get_output("y").get("parameters", {})) is binary_out
    assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_every_datatype_comes_back_as_it_went(client: Any, binary_in: bool, binary_out: bool) -> None:
    inputs = [tensor(kind.lower(), values(kind), kind, binary=binary_in) for kind in KINDS]
    outputs = [triton.InferRequestedOutput(f"same_{kind.lower()}", binary_data=binary_out) for kind in KINDS]
    answer = client.infer("echo", inputs, outputs=outputs)
    for kind in KINDS:
        got = answer.as_numpy(f"same_{kind.lower()}")
        if kind == "BYTES" and not binary_out:
            got = np.array([str(each).encode() for each in got.ravel()], np.object_).reshape(got.shape)
        assert got.dtype == KINDS[kind][1] and got.shape == (2, 3), kind
        assert got.tolist() == values(kind).tolist(), kind


def test_only_the_outputs_asked_for_come_and_in_that_order(client: Any) -> None:
    inputs = [tensor(kind.lower(), values(kind), kind) for kind in KINDS]
    outputs = [triton.InferRequestedOutput(name) for name in ("same_int64", "same_bool")]
    told = client.infer("echo", inputs, outputs=outputs).get_response()
    assert [each["name"] for each in told["outputs"]] == ["same_int64", "same_bool"]


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: Any, folder: Path, algorithm: str) -> None:
    answer = client.infer(
        "mlp",
        [tensor("x", x(8))],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    assert answer.as_numpy("y").tobytes() == expected(folder, x(8)).tobytes()


def test_a_deadline_a_priority_and_best_effort(client: Any, server: live.Live) -> None:
    def counted() -> int:
        totals = state(server)["totals"]
        return int(totals["deadline_met"] + totals["deadline_missed"])

    before = counted()
    client.infer("mlp", [tensor("x", x())], parameters={"weft_best_effort": True})
    client.infer("mlp", [tensor("x", x())], priority=3)
    assert counted() == before
    client.infer("mlp", [tensor("x", x())], parameters={"weft_slo_ms": 60000})
    client.infer("mlp", [tensor("x", x())], priority=1, timeout=600_000_000)
    assert counted() == before + 2


def test_an_async_infer_of_the_blocking_client(server: live.Live, folder: Path) -> None:
    with contextlib.closing(triton.InferenceServerClient(server.address, concurrency=4)) as client:
        handles = [client.async_infer("mlp", [tensor("x", x(1, seed))], request_id=str(seed)) for seed in range(12)]
        for seed, handle in enumerate(handles):
            answer = handle.get_result()
            assert answer.get_response()["id"] == str(seed)
            np.testing.assert_allclose(answer.as_numpy("y"), expected(folder, x(1, seed)), rtol=1e-4, atol=1e-5)


def test_a_body_made_and_read_by_the_client_library(server: live.Live, folder: Path) -> None:
    body, length = triton.InferenceServerClient.generate_request_body([tensor("x", x())], request_id="made")
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


# What is not there


UNSUPPORTED: dict[str, Callable[[Any], Any]] = {
    "trace settings": lambda client: client.get_trace_settings(),
    "trace settings of a model": lambda client: client.get_trace_settings("mlp"),
    "update trace settings": lambda client: client.update_trace_settings(settings={"trace_rate": "1"}),
    "update trace settings of a model": lambda client: client.update_trace_settings("mlp", {"trace_rate": "1"}),
    "log settings": lambda client: client.get_log_settings(),
    "update log settings": lambda client: client.update_log_settings({"log_info": False}),
    "shared memory": lambda client: client.get_system_shared_memory_status(),
    "shared memory of a name": lambda client: client.get_system_shared_memory_status("part"),
    "register shared memory": lambda client: client.register_system_shared_memory("part", "/part", 64),
    "unregister shared memory": lambda client: client.unregister_system_shared_memory("part"),
    "CUDA memory": lambda client: client.get_cuda_shared_memory_status(),
    "register CUDA memory": lambda client: client.register_cuda_shared_memory("part", b"aGFuZGxl", 0, 64),
    "unregister CUDA memory": lambda client: client.unregister_cuda_shared_memory(),
}


@pytest.mark.parametrize("call", UNSUPPORTED)
def test_what_is_not_supported_says_so(client: Any, call: str) -> None:
    with pytest.raises(utils.InferenceServerException, match="not supported") as refused:
        UNSUPPORTED[call](client)
    assert refused.value.status() == "501"


def test_tensors_in_shared_memory_and_classes_are_refused(client: Any) -> None:
    shared = triton.InferInput("x", [1, 64], "FP32")
    shared.set_shared_memory("part", 256)
    with pytest.raises(utils.InferenceServerException, match="shared") as refused:
        client.infer("mlp", [shared])
    assert refused.value.status() in ("400", "501")
    with pytest.raises(utils.InferenceServerException, match="classif") as refused:
        client.infer("mlp", [tensor("x", x())], outputs=[triton.InferRequestedOutput("y", class_count=3)])
    assert refused.value.status() in ("400", "501")


# What is wrong


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: tensor("x", np.zeros((1, 63), np.float32)), "63"),
    "rank": (lambda: tensor("x", np.zeros(64, np.float32)), "shape"),
    "datatype": (lambda: tensor("x", np.zeros((1, 64), np.int32)), "INT32"),
    "name": (lambda: tensor("z", np.zeros((1, 64), np.float32)), "'z'"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_request_that_does_not_fit_the_model(client: Any, what: str) -> None:
    make, word = WRONG[what]
    with pytest.raises(utils.InferenceServerException, match=word) as refused:
        client.infer("mlp", [make()])
    assert refused.value.status() == "400"


def test_an_output_or_a_parameter_that_is_not_there(client: Any) -> None:
    with pytest.raises(utils.InferenceServerException, match="nothing") as refused:
        client.infer("mlp", [tensor("x", x())], outputs=[triton.InferRequestedOutput("nothing")])
    assert refused.value.status() == "400"
    for parameters in ({"weft_slo_ms": -1}, {"weft_slo_ms": "soon"}, {"weft_best_effort": 1}):
        with pytest.raises(utils.InferenceServerException, match="weft_") as refused:
            client.infer("mlp", [tensor("x", x())], parameters=parameters)
        assert refused.value.status() == "400"


def test_unknown_models_and_versions(client: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: client.infer("nobody", [tensor("x", x())]),
        lambda: client.infer("mlp", [tensor("x", x())], model_version="9"),
        lambda: client.get_model_metadata("nobody"),
        lambda: client.get_model_config("mlp", "9"),
        lambda: client.get_inference_statistics("nobody"),
    ]
    for call in calls:
        with pytest.raises(utils.InferenceServerException) as refused:
            call()
        assert refused.value.status() == "404"


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


# Deadlines and queues


def test_a_deadline_that_cannot_be_met_is_refused_at_once(client: Any, server: live.Live) -> None:
    before = failures(server, "unmeetable")
    with pytest.raises(utils.InferenceServerException, match="deadline") as refused:
        client.infer("mlp", [tensor("x", x())], timeout=1)
    assert refused.value.status() == "504"
    assert failures(server, "unmeetable") == before + 1


def test_a_deadline_behind_much_work_is_refused_at_once(server: live.Live) -> None:
    client = triton.InferenceServerClient(server.address)
    with contextlib.closing(client), occupied(server):
        before = failures(server, "unmeetable")
        with pytest.raises(utils.InferenceServerException, match="deadline") as refused:
            client.infer("mlp", [tensor("x", x())], timeout=50_000)
        assert refused.value.status() == "504"
        assert failures(server, "unmeetable") == before + 1


def test_a_deadline_that_passes_in_the_queue(server: live.Live) -> None:
    """The lane is busy with what nobody could foresee, so the request is taken, and waits in vain."""
    before = failures(server, "expired")
    with live.Gate(server, "unmeasured", 1, foreseen=False) as gate, ThreadPoolExecutor(1) as pool:
        thread, answers = _in_background(server, "unmeasured", np.ones((1, 2, 512), np.float32))
        gate.wait()
        waiting = pool.submit(send, server, "POST", "/v2/models/mlp/infer", one(x(), timeout=600_000_000))
        until(lambda: model(server, "mlp")["queued"] == 1, "it waits")
        with server.leapt(600):
            reply = waiting.result()
    thread.join()
    assert answers == [200]
    assert reply.status == 504 and "deadline passed" in reply.json()["error"]
    assert failures(server, "expired") == before + 1


def _in_background(server: live.Live, model: str, array: np.ndarray) -> tuple[threading.Thread, list[int]]:
    """Send a request from a thread; its status is in the list once the thread ended."""
    body, length = triton.InferenceServerClient.generate_request_body([tensor("x", array)])
    answers: list[int] = []

    def run() -> None:
        headers = {"Inference-Header-Content-Length": str(length)}
        answers.append(send(server, "POST", f"/v2/models/{model}/infer", bytes(body), headers).status)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, answers


def test_a_full_queue_refuses_and_says_when_to_come_again(client: Any, server: live.Live) -> None:
    before = failures(server, "queue_full")
    with occupied(server):
        thread, answers = _in_background(server, "chain", np.ones((1, 512), np.float32))
        until(lambda: model(server, "chain")["queued"] == 1, "one request waits")
        with pytest.raises(utils.InferenceServerException, match="queue size") as refused:
            client.infer("chain", [tensor("x", np.ones((1, 512), np.float32))])
        assert refused.value.status() == "503"
        reply = send(server, "POST", "/v2/models/chain/infer", one(np.ones((1, 512))))
        assert reply.status == 503
        assert 1 <= int(reply.headers["Retry-After"]) <= 3600
        assert failures(server, "queue_full") == before + 2
    thread.join()
    assert answers == [200]


# Clients that go away


def test_who_leaves_the_queue_is_counted_and_frees_its_place(server: live.Live) -> None:
    before = failures(server, "cancelled")
    with occupied(server):
        with socket.create_connection(("127.0.0.1", server.server.http_port or 0)) as leaver:
            leaver.sendall(chain_request(1))
            until(lambda: model(server, "chain")["queued"] == 1, "one request waits")
        until(lambda: failures(server, "cancelled") == before + 1, "its leaving is counted")
        assert model(server, "chain")["queued"] == 0
    assert failures(server, "cancelled") == before + 2  # whoever occupied the lane has left, too


def test_who_leaves_half_way_has_its_other_segments_dropped(server: live.Live) -> None:
    before, since = failures(server, "cancelled"), state(server)["now_s"]
    with occupied(server):
        until(lambda: computed(server, since), "a segment is done")
    assert failures(server, "cancelled") == before + 1
    last = model(server, "chain")["segments"]
    assert f"{last}/{last}" not in computed(server, since)
    assert 1 <= len(computed(server, since)) < last


# Keys, limits, TLS


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[live.Live]:
    with live.running(folder / "mlp.onnx", api_key="open-sesame", max_body_bytes=1 << 16) as running:
        yield running


def test_without_its_key_nobody_gets_in(guarded: live.Live) -> None:
    with contextlib.closing(triton.InferenceServerClient(guarded.address)) as client:
        assert client.is_server_live() and client.is_server_ready()
        for headers in (None, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "Basic x"}):
            for call in (client.infer, client.get_model_metadata, client.get_model_repository_index):
                args = ["mlp", [tensor("x", x())]] if call == client.infer else ["mlp"]
                args = [] if call == client.get_model_repository_index else args
                with pytest.raises(utils.InferenceServerException) as refused:
                    call(*args, headers=headers)
                assert refused.value.status() == "401"
    assert send(guarded, "GET", "/weft/state").status == 401
    assert send(guarded, "GET", "/metrics").status == 401
    assert send(guarded, "GET", "/v2").headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("headers", [{"authorization": "Bearer open-sesame"}, {"x-api-key": "open-sesame"}])
def test_with_its_key_everything_works(guarded: live.Live, folder: Path, headers: dict[str, str]) -> None:
    with contextlib.closing(triton.InferenceServerClient(guarded.address)) as client:
        answer = client.infer("mlp", [tensor("x", x())], headers=headers)
        assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()
        assert client.is_model_ready("mlp", headers=headers)
        assert client.get_server_metadata(headers=headers)["name"] == "weft"


def test_a_body_beyond_the_limit(guarded: live.Live) -> None:
    key = {"x-api-key": "open-sesame"}
    with contextlib.closing(triton.InferenceServerClient(guarded.address)) as client:
        client.infer("mlp", [tensor("x", x(100))], headers=key)
        with pytest.raises(utils.InferenceServerException, match="limit") as refused:
            client.infer("mlp", [tensor("x", x(1000))], headers=key)
        assert refused.value.status() == "413"
        with pytest.raises(utils.InferenceServerException, match="limit") as refused:
            zeros = tensor("x", np.zeros((10000, 64), np.float32))  # a few kB, until it is unpacked
            client.infer("mlp", [zeros], headers=key, request_compression_algorithm="gzip")
        assert refused.value.status() == "413"


def certificate(place: Path) -> tuple[Path, Path]:
    """A certificate that signs itself, for the loopback address, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("the openssl command is not installed")
    cert, key = place / "cert.pem", place / "key.pem"
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


def test_tls(folder: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with live.running(folder / "mlp.onnx", tls_cert=cert, tls_key=key) as server:
        trusting = ssl.create_default_context(cafile=str(cert))
        client = triton.InferenceServerClient(server.address, ssl=True, ssl_options={"ca_certs": str(cert)})
        aio = Blocking(lambda: triton_aio.InferenceServerClient(server.address, ssl=True, ssl_context=trusting))
        for each in (client, aio):
            assert each.is_server_live()
            assert each.infer("mlp", [tensor("x", x())]).as_numpy("y").tobytes() == expected(folder, x()).tobytes()
            each.close()
        strict = http.client.HTTPSConnection(
            server.address, timeout=live.PATIENCE_S, context=ssl.create_default_context()
        )
        with contextlib.closing(strict), pytest.raises(ssl.SSLCertVerificationError):
            strict.request("GET", "/v2/health/live")
        plain = server.raw(b"GET /v2/health/live HTTP/1.1\r\nHost: test\r\n\r\n")
        assert b"200" not in plain
