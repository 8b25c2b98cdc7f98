"""What only a client over gRPC sees: streams, calls that are cancelled, and the deadline of the call itself."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving import live
from tests.serving.chain import CHAIN_WIDTH, LONG_ROWS, computed, occupied
from tests.serving.clients import Blocking, Client, expected, utils, x
from tests.support.concurrency import Background, until
from tests.support.inference import failures, infer, model_state, state

triton = pytest.importorskip("tritonclient.grpc")


@pytest.fixture(params=["grpc", "grpc.aio"])
def client(request: pytest.FixtureRequest, server: live.Live) -> Iterator[Client]:
    with contextlib.closing(Client(request.param, server)) as made:
        yield made


@pytest.fixture
def blocking(server: live.Live) -> Iterator[Any]:
    with contextlib.closing(triton.InferenceServerClient(server.grpc_address)) as made:
        yield made


def tensor(name: str, array: np.ndarray) -> Any:
    made = triton.InferInput(name, list(array.shape), utils.np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def test_a_model_that_is_not_there_is_not_ready(client: Client) -> None:
    assert not client.is_model_ready("mlp", "7")
    assert not client.is_model_ready("nobody")


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

    with contextlib.closing(Client("grpc.aio", server)) as client:
        assert isinstance(client.inner, Blocking)
        got = client.inner.wait(answers(client.inner.inner))
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
        until(lambda: model_state(server, "mlp")["queued"] == 3, "three requests wait")
        blocking.stop_stream(cancel_requests=True)
        until(lambda: failures(server, "cancelled") == before + 3, "they are dropped")
        assert model_state(server, "mlp")["queued"] == 0


# Deadlines, and clients that go away


def test_the_clients_own_deadline_is_the_requests(client: Client, server: live.Live) -> None:
    """It counts where it is met; where a minute is left and more than that stands before it, it is refused."""
    totals = state(server)["totals"]
    client.infer("mlp", [tensor("x", x())], client_timeout=live.PATIENCE_S)
    now = state(server)["totals"]
    assert now["deadline_met"] + now["deadline_missed"] == totals["deadline_met"] + totals["deadline_missed"] + 1
    before = failures(server, "unmeetable")
    with occupied(server), client.refused(504, match="cannot be met"):
        client.infer("mlp", [tensor("x", x())], client_timeout=60)
    assert failures(server, "unmeetable") == before + 1
    assert model_state(server, "mlp")["queued"] == 0


def test_the_clients_own_deadline_may_pass_in_the_queue(client: Client, server: live.Live) -> None:
    """The lane is busy with what nobody could foresee, so the request is taken, and waits in vain."""
    before = failures(server, "expired")
    with live.Gate(server, "unmeasured", 1, foreseen=False) as gate:
        long = Background(lambda: infer(server, "unmeasured", {"x": np.ones((1, 2, 512), np.float32)}))
        gate.wait()
        waiting = Background(lambda: client.infer("mlp", [tensor("x", x())], client_timeout=live.PATIENCE_S))
        until(lambda: model_state(server, "mlp")["queued"] == 1, "it waits")
        with server.leapt(live.PATIENCE_S), client.refused(504, match="deadline passed"):
            waiting.result()
    assert long.result()["y"].tolist() == [1]
    assert failures(server, "expired") == before + 1


def test_a_call_that_is_cancelled_while_it_waits(blocking: Any, server: live.Live) -> None:
    before, answers = failures(server, "cancelled"), queue.Queue[Any]()
    with occupied(server):
        call = blocking.async_infer("mlp", [tensor("x", x())], lambda result, error: answers.put(error))
        until(lambda: model_state(server, "mlp")["queued"] == 1, "it waits")
        call.cancel()
        assert "CANCELLED" in answers.get(timeout=live.PATIENCE_S).status()
        until(lambda: failures(server, "cancelled") == before + 1, "it is counted")
        assert model_state(server, "mlp")["queued"] == 0


def test_a_call_that_is_cancelled_half_way(blocking: Any, server: live.Live) -> None:
    before, since = failures(server, "cancelled"), state(server)["now_s"]
    answers: queue.Queue[Any] = queue.Queue()
    long = tensor("x", np.full((LONG_ROWS, CHAIN_WIDTH), 0.5, np.float32))
    with live.Gate(server, "chain", LONG_ROWS, after=1) as gate:
        call = blocking.async_infer("chain", [long], lambda result, error: answers.put(error))
        gate.wait()
        call.cancel()
        assert "CANCELLED" in answers.get(timeout=live.PATIENCE_S).status()
        until(lambda: failures(server, "cancelled") == before + 1, "it is counted")
        until(lambda: not state(server)["lanes"][0]["busy"], "the lane is free")
    last = model_state(server, "chain")["segments"]
    assert 1 <= len(computed(server, since)) < last
    assert f"{last}/{last}" not in computed(server, since)


# Keys, TLS


def stream(guarded: live.Live, headers: dict[str, str] | None) -> tuple[Any, Any]:
    """The first that is heard on a stream: a result and no error, or the other way round."""
    answers: queue.Queue[Any] = queue.Queue()
    with contextlib.closing(triton.InferenceServerClient(guarded.grpc_address)) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), headers=headers)
        if headers:
            client.async_stream_infer("mlp", [tensor("x", x())])
        heard: tuple[Any, Any] = answers.get(timeout=live.PATIENCE_S)
        client.stop_stream()
    return heard


def test_a_stream_without_its_key(guarded: live.Live) -> None:
    assert "UNAUTHENTICATED" in stream(guarded, None)[1].status()


@pytest.mark.parametrize("headers", [{"authorization": "Bearer open-sesame"}, {"x-api-key": "open-sesame"}])
def test_a_stream_with_its_key(guarded: live.Live, headers: dict[str, str]) -> None:
    result, error = stream(guarded, headers)
    assert error is None and result.as_numpy("y").shape == (2, 10)


@pytest.mark.parametrize("options", [{}, {"ssl": True}])
def test_who_does_not_trust_the_certificate_or_does_not_encrypt_hears_nothing(
    encrypted: live.Live, options: dict[str, bool]
) -> None:
    with contextlib.closing(triton.InferenceServerClient(encrypted.grpc_address, **options)) as stranger:
        with pytest.raises(utils.InferenceServerException) as error:
            stranger.is_server_live(client_timeout=20)
        assert error.value.status() in ("StatusCode.UNAVAILABLE", "StatusCode.DEADLINE_EXCEEDED")
