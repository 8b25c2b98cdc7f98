"""KServe's own clients against a running server; only where the package kserve is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

from tests.serving import live

kserve = pytest.importorskip("kserve")

X = np.random.default_rng(1).normal(size=(2, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    live.mlp(place / "mlp.onnx")
    return place


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder) as running:
        yield running


def rest(call: Callable[[Any], Awaitable[Any]]) -> Any:
    """Call the REST client, wait, and close it."""

    async def run() -> Any:
        async with kserve.InferenceRESTClient(kserve.RESTConfig(protocol="v2", retries=0)) as client:
            return await call(client)

    return asyncio.run(run())


def rpc(server: live.Live, call: Callable[[Any], Awaitable[Any]]) -> Any:
    """Call the gRPC client, wait, and close it."""

    async def run() -> Any:
        async with kserve.InferenceGRPCClient(server.grpc_address, retries=0) as client:
            return await call(client)

    return asyncio.run(run())


def request(name: str = "mlp", array: np.ndarray = X, *, binary: bool = True) -> Any:
    x = kserve.InferInput("x", list(array.shape), "FP32")
    x.set_data_from_numpy(array, binary_data=binary)
    return kserve.InferRequest(model_name=name, infer_inputs=[x], request_id="k-1")


def expected(folder: Path) -> np.ndarray:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return np.asarray(ort.InferenceSession(str(folder / "mlp.onnx"), options).run(["y"], {"x": X})[0])


def test_rest_health_and_readiness(server: live.Live) -> None:
    assert rest(lambda client: client.is_server_live(server.url)) is True
    assert rest(lambda client: client.is_server_ready(server.url)) is True
    assert rest(lambda client: client.is_model_ready(server.url, "mlp")) is True
    assert rest(lambda client: client.is_model_ready(server.url, "nobody")) is False


@pytest.mark.parametrize("binary", [True, False])
def test_rest_infer(server: live.Live, folder: Path, binary: bool) -> None:
    answer = rest(lambda client: client.infer(server.url, request(binary=binary), model_name="mlp"))
    assert (answer.model_name, answer.id) == ("mlp", "k-1")
    assert answer.outputs[0].as_numpy().tobytes() == expected(folder).tobytes()


def test_rest_errors(server: live.Live) -> None:
    httpx = pytest.importorskip("httpx")
    with pytest.raises(httpx.HTTPStatusError, match="nobody") as error:
        rest(lambda client: client.infer(server.url, request("nobody"), model_name="nobody"))
    assert error.value.response.status_code == 404
    with pytest.raises(httpx.HTTPStatusError, match="shape") as error:
        wrong = request(array=np.zeros(64, np.float32), binary=False)
        rest(lambda client: client.infer(server.url, wrong, model_name="mlp"))
    assert error.value.response.status_code == 400


def test_grpc_health_and_readiness(server: live.Live) -> None:
    assert rpc(server, lambda client: client.is_server_live()) is True
    assert rpc(server, lambda client: client.is_server_ready()) is True
    assert rpc(server, lambda client: client.is_model_ready("mlp")) is True


@pytest.mark.parametrize("binary", [True, False])
def test_grpc_infer(server: live.Live, folder: Path, binary: bool) -> None:
    answer = rpc(server, lambda client: client.infer(request(binary=binary)))
    assert (answer.model_name, answer.id) == ("mlp", "k-1")
    assert answer.outputs[0].as_numpy().tobytes() == expected(folder).tobytes()


def test_grpc_errors(server: live.Live) -> None:
    grpc = pytest.importorskip("grpc")
    with pytest.raises(grpc.RpcError) as error:
        rpc(server, lambda client: client.infer(request("nobody")))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND
    with pytest.raises(grpc.RpcError) as error:
        rpc(server, lambda client: client.infer(request(array=np.zeros(64, np.float32))))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
