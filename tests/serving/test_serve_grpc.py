"""Every call of Triton's own gRPC clients, blocking, asynchronous and streaming, against a running server."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving import live
from tests.serving.test_serve_http import (
    KINDS,
    Blocking,
    certificate,
    expected,
    repository,
    values,
    x,
)
from tests.serving.test_serve_models import LONG_ROWS, computed, failures, model, occupied, state, until

triton = pytest.importorskip("tritonclient.grpc")
triton_aio = pytest.importorskip("tritonclient.grpc.aio")
utils = pytest.importorskip("tritonclient.utils")


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
        made = triton.InferenceServerClient(server.grpc_address)
    else:
        made = Blocking(lambda: triton_aio.InferenceServerClient(server.grpc_address))
    yield made
    made.close()


@pytest.fixture
def blocking(server: live.Live) -> Iterator[Any]:
    with contextlib.closing(triton.InferenceServerClient(server.grpc_address)) as made:
        yield made


def tensor(name: str, array: np.ndarray, datatype: str | None = None) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype or utils.np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


@contextlib.contextmanager
def refused(code: str, match: str | None = None) -> Iterator[None]:
    """What happens inside is answered with this status."""
    with pytest.raises(utils.InferenceServerException, match=match) as error:
        yield
    assert error.value.status() == f"StatusCode.{code}"


# What a client asks


def test_health_and_readiness(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("mlp")
    assert client.is_model_ready("mlp", "1")
    with refused("NOT_FOUND"):
        client.is_model_ready("mlp", "7")
    with refused("NOT_FOUND"):
        client.is_model_ready("nobody")


def test_server_metadata(client: Any) -> None:
    told = client.get_server_metadata(as_json=True)
    assert told["name"] == "weft"
    assert {"binary_tensor_data", "model_repository", "statistics", "schedule_policy"} <= set(told["extensions"])


@pytest.mark.parametrize("version", ["", "1"])
def test_model_metadata(client: Any, version: str) -> None:
    told = client.get_model_metadata("mlp", version)
    assert told.name == "mlp" and list(told.versions) == ["1"]
    assert [(each.name, each.datatype, list(each.shape)) for each in told.inputs] == [("x", "FP32", [-1, 64])]
    assert [(each.name, each.datatype, list(each.shape)) for each in told.outputs] == [("y", "FP32", [-1, 10])]
    assert [each.datatype for each in client.get_model_metadata("echo").inputs] == list(KINDS)


def test_model_config(client: Any) -> None:
    told = client.get_model_config("chain").config
    assert told.name == "chain" and told.backend == "onnxruntime"
    assert [each.name for each in told.input] == ["x"] and [each.name for each in told.output] == ["y"]
    assert told.parameters["weft_queue_size"].string_value == "1"
    as_json = client.get_model_config("mlp", "1", as_json=True)["config"]
    assert as_json["input"][0]["data_type"] == "TYPE_FP32" and as_json["max_batch_size"] == 8


def test_repository_index(client: Any) -> None:
    rows = {row.name: row for row in client.get_model_repository_index().models}
    assert set(rows) == {"mlp", "echo", "unmeasured", "chain"}
    assert {row.state for row in rows.values()} == {"READY"}
    assert {row.version for row in rows.values()} == {"1"}


def test_load_and_unload(client: Any) -> None:
    client.unload_model("echo")
    assert not client.is_model_ready("echo")
    rows = {row.name: row for row in client.get_model_repository_index().models}
    assert rows["echo"].state == "UNAVAILABLE" and "unloaded" in rows["echo"].reason
    with refused("NOT_FOUND"):
        client.infer("echo", [tensor("bool", values("BOOL"))])
    client.load_model("echo")
    assert client.is_model_ready("echo")
    for call in (client.load_model, client.unload_model):
        with pytest.raises(utils.InferenceServerException, match="nobody") as error:
            call("nobody")
        assert error.value.status() in ("StatusCode.NOT_FOUND", "StatusCode.INVALID_ARGUMENT")
    with refused("INVALID_ARGUMENT", "parameters"):
        client.load_model("mlp", config='{"backend": "python"}')


def test_statistics(client: Any) -> None:
    before = client.get_inference_statistics("mlp").model_stats[0]
    client.infer("mlp", [tensor("x", x(3))])
    after = client.get_inference_statistics("mlp", "1").model_stats[0]
    assert (after.name, after.version) == ("mlp", "1")
    assert after.inference_count == before.inference_count + 3
    assert after.execution_count == before.execution_count + 1
    assert after.inference_stats.success.count == before.inference_stats.success.count + 1
    assert after.inference_stats.compute_infer.ns > before.inference_stats.compute_infer.ns
    assert after.last_inference > 0
    assert {each.name for each in client.get_inference_statistics().model_stats} >= {"mlp", "chain"}


# Inference


def test_infer_gives_what_onnxruntime_gives(client: Any, folder: Path) -> None:
    wanted = [triton.InferRequestedOutput("y")]
    answer = client.infer("mlp", [tensor("x", x())], outputs=wanted, request_id="a-17", model_version="1")
    told = answer.get_response()
    assert (told.model_name, told.model_version, told.id) == ("mlp", "1", "a-17")
    assert told.parameters["weft_batch"].int64_param >= 1
    assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()


def test_every_datatype_comes_back_as_it_went(client: Any) -> None:
    answer = client.infer("echo", [tensor(kind.lower(), values(kind), kind) for kind in KINDS])
    for kind in KINDS:
        got = answer.as_numpy(f"same_{kind.lower()}")
        assert got.dtype == KINDS[kind][1] and got.shape == (2, 3), kind
        assert got.tolist() == values(kind).tolist(), kind


def test_only_the_outputs_asked_for_come_and_in_that_order(client: Any) -> None:
    inputs = [tensor(kind.lower(), values(kind), kind) for kind in KINDS]
    outputs = [triton.InferRequestedOutput(name) for name in ("same_int64", "same_bytes")]
    answer = client.infer("echo", inputs, outputs=outputs)
    assert [each.name for each in answer.get_response().outputs] == ["same_int64", "same_bytes"]
    assert answer.as_numpy("same_int64").tolist() == values("INT64").tolist()
    assert answer.as_numpy("same_bytes").tolist() == values("BYTES").tolist()
    assert answer.as_numpy("same_bool") is None


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_requests(client: Any, folder: Path, algorithm: str) -> None:
    answer = client.infer("mlp", [tensor("x", x(8))], compression_algorithm=algorithm)
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
    client.infer("mlp", [tensor("x", x())], client_timeout=live.PATIENCE_S)
    assert counted() == before + 3


def test_async_infer_calls_back(blocking: Any, folder: Path) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    for seed in range(8):
        blocking.async_infer(
            "mlp",
            [tensor("x", x(1, seed))],
            lambda result, error, seed=seed: answers.put((seed, result, error)),
            request_id=str(seed),
        )
    for _ in range(8):
        seed, result, error = answers.get(timeout=live.PATIENCE_S)
        assert error is None
        assert result.get_response().id == str(seed)
        np.testing.assert_allclose(result.as_numpy("y"), expected(folder, x(1, seed)), rtol=1e-4, atol=1e-5)


# Streams


def test_a_stream_answers_in_order_and_goes_on_after_an_error(blocking: Any, folder: Path) -> None:
    answers: queue.Queue[Any] = queue.Queue()
    blocking.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(40):
        name, rows = ("nobody", 1) if number == 7 else ("mlp", 1 + number % 3)
        blocking.async_stream_infer(name, [tensor("x", x(rows, number))], request_id=str(number))
    for number in range(40):
        result, error = answers.get(timeout=live.PATIENCE_S)
        if number == 7:
            assert result is None and "nobody" in error.message()
            continue
        assert error is None and result.get_response().id == str(number)
        wanted = expected(folder, x(1 + number % 3, number))
        np.testing.assert_allclose(result.as_numpy("y"), wanted, rtol=1e-4, atol=1e-5)
    blocking.stop_stream()


def test_a_stream_of_the_asynchronous_client(server: live.Live, folder: Path) -> None:
    async def requests() -> AsyncIterator[Any]:
        for seed in range(5):
            yield {"model_name": "mlp", "inputs": [tensor("x", x(2, seed))], "request_id": str(seed)}

    async def answers(client: Any) -> list[Any]:
        return [each async for each in client.stream_infer(requests())]

    client = Blocking(lambda: triton_aio.InferenceServerClient(server.grpc_address))
    with contextlib.closing(client):
        got = client.wait(answers(client.inner))
    assert [error for _, error in got] == [None] * 5
    for seed, (result, _) in enumerate(got):
        assert result.get_response().id == str(seed)
        np.testing.assert_allclose(result.as_numpy("y"), expected(folder, x(2, seed)), rtol=1e-4, atol=1e-5)


def test_a_stream_that_is_cancelled_drops_what_it_asked_for(blocking: Any, server: live.Live) -> None:
    before = failures(server, "cancelled")
    with occupied(server):
        blocking.start_stream(lambda result, error: None)
        for _ in range(3):
            blocking.async_stream_infer("mlp", [tensor("x", x())])
        until(lambda: model(server, "mlp")["queued"] == 3, "three requests wait")
        blocking.stop_stream(cancel_requests=True)
        until(lambda: failures(server, "cancelled") == before + 3, "they are dropped")
        assert model(server, "mlp")["queued"] == 0


# What is not there


UNSUPPORTED: dict[str, Callable[[Any], Any]] = {
    "trace settings": lambda client: client.get_trace_settings(),
    "trace settings of a model": lambda client: client.get_trace_settings("mlp"),
    "update trace settings": lambda client: client.update_trace_settings(settings={"trace_rate": "1"}),
    "log settings": lambda client: client.get_log_settings(),
    "update log settings": lambda client: client.update_log_settings({"log_info": False}),
    "shared memory": lambda client: client.get_system_shared_memory_status(),
    "register shared memory": lambda client: client.register_system_shared_memory("part", "/part", 64),
    "unregister shared memory": lambda client: client.unregister_system_shared_memory("part"),
    "CUDA memory": lambda client: client.get_cuda_shared_memory_status(),
    "register CUDA memory": lambda client: client.register_cuda_shared_memory("part", b"aGFuZGxl", 0, 64),
    "unregister CUDA memory": lambda client: client.unregister_cuda_shared_memory(),
}


@pytest.mark.parametrize("call", UNSUPPORTED)
def test_what_is_not_supported_says_so(client: Any, call: str) -> None:
    with refused("UNIMPLEMENTED"):
        UNSUPPORTED[call](client)


def test_tensors_in_shared_memory_and_classes_are_refused(client: Any) -> None:
    shared = triton.InferInput("x", [1, 64], "FP32")
    shared.set_shared_memory("part", 256)
    with pytest.raises(utils.InferenceServerException, match="shared") as error:
        client.infer("mlp", [shared])
    assert error.value.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.UNIMPLEMENTED")
    with pytest.raises(utils.InferenceServerException, match="classif") as error:
        client.infer("mlp", [tensor("x", x())], outputs=[triton.InferRequestedOutput("y", class_count=3)])
    assert error.value.status() in ("StatusCode.INVALID_ARGUMENT", "StatusCode.UNIMPLEMENTED")


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
    with refused("INVALID_ARGUMENT", word):
        client.infer("mlp", [make()])


def test_inputs_outputs_and_parameters_that_cannot_be(client: Any) -> None:
    with refused("INVALID_ARGUMENT"):
        client.infer("mlp", [])
    with refused("INVALID_ARGUMENT", "nothing"):
        client.infer("mlp", [tensor("x", x())], outputs=[triton.InferRequestedOutput("nothing")])
    for parameters in ({"weft_slo_ms": -1}, {"weft_slo_ms": "soon"}, {"weft_best_effort": 1}):
        with refused("INVALID_ARGUMENT", "weft_"):
            client.infer("mlp", [tensor("x", x())], parameters=parameters)


def test_unknown_models_and_versions(client: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: client.infer("nobody", [tensor("x", x())]),
        lambda: client.infer("mlp", [tensor("x", x())], model_version="9"),
        lambda: client.get_model_metadata("nobody"),
        lambda: client.get_model_config("mlp", "9"),
        lambda: client.get_inference_statistics("nobody"),
    ]
    for call in calls:
        with refused("NOT_FOUND"):
            call()


# Deadlines, queues, and clients that go away


def test_a_deadline_that_cannot_be_met_is_refused_at_once(client: Any, server: live.Live) -> None:
    before = failures(server, "unmeetable")
    with refused("DEADLINE_EXCEEDED", "cannot be met"):
        client.infer("mlp", [tensor("x", x())], timeout=1)
    with occupied(server), refused("DEADLINE_EXCEEDED", "cannot be met"):
        client.infer("mlp", [tensor("x", x())], timeout=50_000)
    assert failures(server, "unmeetable") == before + 2


def test_the_clients_own_deadline_is_the_requests(client: Any, server: live.Live) -> None:
    """The server sees that it cannot be met: less than a minute is left, and more than that stands before it."""
    before = failures(server, "unmeetable")
    with occupied(server), refused("DEADLINE_EXCEEDED", "cannot be met"):
        client.infer("mlp", [tensor("x", x())], client_timeout=60)
    assert failures(server, "unmeetable") == before + 1
    assert model(server, "mlp")["queued"] == 0


def test_the_clients_own_deadline_may_pass_in_the_queue(client: Any, server: live.Live) -> None:
    """The lane is busy with what nobody could foresee, so the request is taken, and waits in vain."""
    before, answers = failures(server, "expired"), queue.Queue[Any]()
    long = tensor("x", np.ones((1, 2, 512), np.float32))
    with contextlib.closing(triton.InferenceServerClient(server.grpc_address)) as other:
        with live.Gate(server, "unmeasured", 1, foreseen=False) as gate, ThreadPoolExecutor(1) as pool:
            other.async_infer("unmeasured", [long], lambda result, error: answers.put(error))
            gate.wait()
            waiting = pool.submit(client.infer, "mlp", [tensor("x", x())], client_timeout=live.PATIENCE_S)
            until(lambda: model(server, "mlp")["queued"] == 1, "it waits")
            with server.leapt(live.PATIENCE_S), refused("DEADLINE_EXCEEDED", "deadline passed"):
                waiting.result()
        assert answers.get(timeout=live.PATIENCE_S) is None
    assert failures(server, "expired") == before + 1


def test_a_full_queue_refuses(client: Any, server: live.Live) -> None:
    before, answers = failures(server, "queue_full"), queue.Queue[Any]()
    ones = tensor("x", np.ones((1, 512), np.float32))
    with contextlib.closing(triton.InferenceServerClient(server.grpc_address)) as other:
        with occupied(server):
            other.async_infer("chain", [ones], lambda result, error: answers.put((result, error)))
            until(lambda: model(server, "chain")["queued"] == 1, "one request waits")
            with refused("UNAVAILABLE", "queue size"):
                client.infer("chain", [ones])
            assert failures(server, "queue_full") == before + 1
        result, error = answers.get(timeout=live.PATIENCE_S)
        assert error is None and result.as_numpy("y").shape == (1, 512)


def test_a_call_that_is_cancelled_while_it_waits(blocking: Any, server: live.Live) -> None:
    before, answers = failures(server, "cancelled"), queue.Queue[Any]()
    with occupied(server):
        call = blocking.async_infer("mlp", [tensor("x", x())], lambda result, error: answers.put(error))
        until(lambda: model(server, "mlp")["queued"] == 1, "it waits")
        call.cancel()
        assert "CANCELLED" in answers.get(timeout=live.PATIENCE_S).status()
        until(lambda: failures(server, "cancelled") == before + 1, "it is counted")
        assert model(server, "mlp")["queued"] == 0


def test_a_call_that_is_cancelled_half_way(blocking: Any, server: live.Live) -> None:
    before, since = failures(server, "cancelled"), state(server)["now_s"]
    answers: queue.Queue[Any] = queue.Queue()
    long = tensor("x", np.full((LONG_ROWS, 512), 0.5, np.float32))
    with live.Gate(server, "chain", LONG_ROWS, after=1) as gate:
        call = blocking.async_infer("chain", [long], lambda result, error: answers.put(error))
        gate.wait()
        call.cancel()
        assert "CANCELLED" in answers.get(timeout=live.PATIENCE_S).status()
        until(lambda: failures(server, "cancelled") == before + 1, "it is counted")
        until(lambda: not state(server)["lanes"][0]["busy"], "the lane is free")
    last = model(server, "chain")["segments"]
    assert 1 <= len(computed(server, since)) < last
    assert f"{last}/{last}" not in computed(server, since)


# Keys, limits, TLS


@pytest.fixture(scope="module")
def guarded(folder: Path) -> Iterator[live.Live]:
    with live.running(folder / "mlp.onnx", api_key="open-sesame", max_body_bytes=1 << 16) as running:
        yield running


def test_without_its_key_nobody_gets_in(guarded: live.Live) -> None:
    with contextlib.closing(triton.InferenceServerClient(guarded.grpc_address)) as client:
        assert client.is_server_live() and client.is_server_ready()
        for headers in (None, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": "Basic x"}):
            with refused("UNAUTHENTICATED"):
                client.infer("mlp", [tensor("x", x())], headers=headers)
            with refused("UNAUTHENTICATED"):
                client.get_model_repository_index(headers=headers)
            with refused("UNAUTHENTICATED"):
                client.unload_model("mlp", headers=headers)
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put(error))
        assert "UNAUTHENTICATED" in answers.get(timeout=live.PATIENCE_S).status()
        client.stop_stream()


@pytest.mark.parametrize("headers", [{"authorization": "Bearer open-sesame"}, {"x-api-key": "open-sesame"}])
def test_with_its_key_everything_works(guarded: live.Live, folder: Path, headers: dict[str, str]) -> None:
    with contextlib.closing(triton.InferenceServerClient(guarded.grpc_address)) as client:
        answer = client.infer("mlp", [tensor("x", x())], headers=headers)
        assert answer.as_numpy("y").tobytes() == expected(folder, x()).tobytes()
        assert client.is_model_ready("mlp", headers=headers)
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
        client.async_stream_infer("mlp", [tensor("x", x())])
        result, error = answers.get(timeout=live.PATIENCE_S)
        assert error is None and result.as_numpy("y").shape == (2, 10)
        client.stop_stream()


def test_a_message_beyond_the_limit(guarded: live.Live) -> None:
    key = {"x-api-key": "open-sesame"}
    with contextlib.closing(triton.InferenceServerClient(guarded.grpc_address)) as client:
        client.infer("mlp", [tensor("x", x(100))], headers=key)
        with refused("RESOURCE_EXHAUSTED"):
            client.infer("mlp", [tensor("x", x(1000))], headers=key)
        with refused("RESOURCE_EXHAUSTED"):
            zeros = tensor("x", np.zeros((10000, 64), np.float32))
            client.infer("mlp", [zeros], headers=key, compression_algorithm="gzip")


def test_tls(folder: Path, tmp_path: Path) -> None:
    cert, key = certificate(tmp_path)
    with live.running(folder / "mlp.onnx", tls_cert=cert, tls_key=key) as server:
        address, trusted = server.grpc_address, str(cert)
        clients = (
            triton.InferenceServerClient(address, ssl=True, root_certificates=trusted),
            Blocking(lambda: triton_aio.InferenceServerClient(address, ssl=True, root_certificates=trusted)),
        )
        for client in clients:
            assert client.is_server_live()
            assert client.infer("mlp", [tensor("x", x())]).as_numpy("y").tobytes() == expected(folder, x()).tobytes()
            client.close()
        for options in ({}, {"ssl": True}):
            with contextlib.closing(triton.InferenceServerClient(address, **options)) as stranger:
                with pytest.raises(utils.InferenceServerException) as error:
                    stranger.is_server_live(client_timeout=20)
                assert error.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
