"""gRPC calls keep nothing of a request after its answer, and every answer is counted once."""

from __future__ import annotations

import contextlib
import gc
import http.client
import json
import logging
import queue
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.serving import live
from tests.support.concurrency import until
from weft.serving import proto
from weft.serving.grpc_calls import NOT_RECEIVED, LostAnswers
from weft.serving.held_memory import IDLE_BYTES

ROWS = 4096
"""Rows of a large request for the model of 64 inputs: 1 MiB."""
LARGE = ROWS * 64 * 4
LIMIT = 8 << 20


@pytest.fixture(scope="module")
def small(folder: Path) -> Iterator[live.Live]:
    with live.running(folder / "mlp.onnx", max_body_bytes=LIMIT, api_key="sesame", access_log=True) as running:
        yield running


@pytest.fixture
def ask(small: live.Live) -> Iterator[Callable[..., str]]:
    """Sends the bytes of a message, or several in a stream; returns the code of the call."""
    with grpc.insecure_channel(small.grpc_address, [("grpc.max_send_message_length", -1)]) as channel:

        def send(data: bytes, method: str = "ModelInfer", key: str = "sesame", timeout: float = live.PATIENCE_S) -> str:
            path = method if "/" in method else f"/{proto.SERVICE}/{method}"
            more = {"metadata": [("authorization", f"Bearer {key}")], "timeout": timeout}
            try:
                if method == "ModelStreamInfer":
                    list(channel.stream_stream(path)(iter([data, data]), **more))
                else:
                    channel.unary_unary(path)(data, **more)
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

        yield send


def message(rows: int = ROWS, typed: bool = False, **changes: Any) -> bytes:
    request = proto.CLASSES["ModelInferRequest"](model_name="mlp", **changes)
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[rows, 64])
    values = np.full((rows, 64), 0.5, np.float32)
    if typed:
        tensor.contents.fp32_contents.extend(values.reshape(-1).tolist())
    else:
        request.raw_input_contents.append(values.tobytes())
    return bytes(request.SerializeToString())


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """What only the garbage collector can free stays; memory is traced."""
    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        yield
    finally:
        tracemalloc.stop()
        gc.enable()


WAYS = {
    "valid": ("ModelInfer", message(), "OK"),
    "typed": ("ModelInfer", message(typed=True), "OK"),
    "of another model": ("ModelInfer", message(model_version="7"), "NOT_FOUND"),
    "of another shape": ("ModelInfer", message() + message(1), "INVALID_ARGUMENT"),
    "unreadable": ("ModelInfer", message()[:-1], "INVALID_ARGUMENT"),
    "too many fields": ("ModelInfer", b"\x3a\x00" * (LARGE // 2), "RESOURCE_EXHAUSTED"),
    "for a small call": ("ModelMetadata", bytes(LARGE * 2), "RESOURCE_EXHAUSTED"),
    "in a stream": ("ModelStreamInfer", message(), "OK"),
    "refused in a stream": ("ModelStreamInfer", message(model_version="7"), "OK"),
    "malformed in a stream": ("ModelStreamInfer", message() + message(1), "OK"),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_call_that_is_over_holds_nothing_of_its_message(ask: Callable[..., str], small: live.Live, way: str) -> None:
    method, data, code = WAYS[way]
    assert ask(data, method) == code  # whatever is made once is made
    face = small.server._grpc
    assert face is not None
    with no_collector():
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(6):
            assert ask(data, method) == code
        until(lambda: face.in_flight == 0, "all is sent")
        left = tracemalloc.get_traced_memory()[0] - before
    assert left < LARGE  # one of six messages, and each would be kept


def test_a_call_whose_client_went_away_holds_nothing(small: live.Live) -> None:
    """They wait behind a request that is being computed, and their clients give them up."""
    data, service = message(), small.server.service
    answers, face = service.grpc_answers, small.server._grpc
    assert face is not None
    metadata = [("authorization", "Bearer sesame")]
    with (
        live.Gate(small, "mlp", ROWS) as gate,
        grpc.insecure_channel(small.grpc_address) as channel,
        no_collector(),
    ):
        method = channel.unary_unary(f"/{proto.SERVICE}/ModelInfer")
        first = method.future(data, metadata=metadata)
        gate.wait()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(6):
            cancelled = answers["ModelInfer", "CANCELLED"]
            waiting = method.future(data, metadata=metadata)
            until(lambda: service.budget.held_bytes == 2 * len(data), "it has come")
            waiting.cancel()
            until(lambda known=cancelled: answers["ModelInfer", "CANCELLED"] > known, "it is withdrawn")
        until(lambda: face.in_flight == 1 and service.budget.held_bytes == len(data), "the others are over")
        left = tracemalloc.get_traced_memory()[0] - before
        gate.open()
        assert first.code().name == "OK"
    assert left < LARGE


def test_a_stream_that_waits_holds_nothing_of_its_last_request(small: live.Live) -> None:
    service, metadata = small.server.service, [("authorization", "Bearer sesame")]
    ends = [threading.Event() for _ in range(6)]

    data = message()

    def once(end: threading.Event) -> Iterator[bytes]:
        yield data
        end.wait(live.PATIENCE_S)

    with grpc.insecure_channel(small.grpc_address, [("grpc.max_receive_message_length", -1)]) as channel:
        method = channel.stream_stream(f"/{proto.SERVICE}/ModelStreamInfer")
        with no_collector():
            before, _ = tracemalloc.get_traced_memory()
            streams = [method(once(end), metadata=metadata) for end in ends]
            for stream in streams:
                next(stream)
            until(lambda: service.budget.held_bytes == 0, "all is answered")
            left = tracemalloc.get_traced_memory()[0] - before
        for end in ends:
            end.set()
        assert [list(stream) for stream in streams] == [[]] * len(ends)
    assert left < 2 * LARGE  # of six, and of as many answers


def test_a_fault_in_one_request_of_a_stream_is_its_answer(small: live.Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.serving import grpc_messages

    read, service = grpc_messages.read_infer, small.server.service

    def faulty(data: bytes, limit: int) -> Any:
        if len(data) > LARGE:
            raise MemoryError("no room")
        return read(data, limit)

    monkeypatch.setattr(grpc_messages, "read_infer", faulty)
    reply = proto.CLASSES["ModelStreamInferResponse"]
    with grpc.insecure_channel(small.grpc_address) as channel:
        method = channel.stream_stream(f"/{proto.SERVICE}/ModelStreamInfer", None, reply.FromString)
        sent = iter([message(1), message(), message(1)])
        answers = list(method(sent, metadata=[("authorization", "Bearer sesame")]))
    assert [answer.error_message for answer in answers] == ["", "internal error: MemoryError", ""]
    until(lambda: service.budget.held_bytes == 0, "nothing is held")


@pytest.mark.parametrize("columns", [64, 65])
def test_a_request_over_http_that_is_over_holds_nothing_of_its_body(small: live.Live, columns: int) -> None:
    values = np.full((ROWS, 64), 0.5, np.float32)
    head: dict[str, Any] = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [ROWS, columns]}]}
    head["inputs"][0]["parameters"] = {"binary_data_size": values.nbytes}
    text = json.dumps(head).encode()
    headers = {"Inference-Header-Content-Length": str(len(text)), "Authorization": "Bearer sesame"}
    service = small.server.service

    def send() -> int:
        connection = http.client.HTTPConnection(small.address, timeout=live.PATIENCE_S)
        with contextlib.closing(connection):
            connection.request("POST", "/v2/models/mlp/infer", text + values.tobytes(), headers)
            answer = connection.getresponse()
            answer.read()
            return answer.status

    assert send() == (200 if columns == 64 else 400)
    with no_collector():
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(6):
            send()
        until(lambda: service.budget.held_bytes == 0, "all is sent")
        left = tracemalloc.get_traced_memory()[0] - before
    assert left < 2 * LARGE  # of six


def test_memory_is_given_back_once_large_requests_are_over(small: live.Live, monkeypatch: pytest.MonkeyPatch) -> None:
    trims: queue.Queue[bool] = queue.Queue()
    monkeypatch.setattr("weft.serving.server.give_freed_memory_back", lambda: trims.put(True))
    budget = small.server.service.budget

    async def look() -> None:
        budget.add(IDLE_BYTES + 1)
        small.server._sample()
        budget.release(IDLE_BYTES + 1)
        assert trims.empty()  # not while one is under way
        small.server._sample()

    small.call(look())
    assert trims.get(timeout=live.PATIENCE_S) and budget.peak_bytes == 0


# Books


REFUSALS = {
    "wrong key": (message(1), {"key": "other"}, "UNAUTHENTICATED", ("ModelInfer", "UNAUTHENTICATED")),
    "unknown method": (b"", {"method": "/a.b/C"}, "UNIMPLEMENTED", ("unknown", "UNIMPLEMENTED")),
    "too large": (bytes(LIMIT + 1), {}, "RESOURCE_EXHAUSTED", ("ModelInfer", NOT_RECEIVED)),
    "unreadable": (b"\xff", {}, "INVALID_ARGUMENT", ("ModelInfer", "INVALID_ARGUMENT")),
    "unknown model": (message(1, model_version="7"), {}, "NOT_FOUND", ("ModelInfer", "NOT_FOUND")),
    "no body for metadata": (bytes(2 << 20), {"method": "ModelConfig"}, "RESOURCE_EXHAUSTED", ("ModelConfig",)),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_a_refusal_is_counted_once_and_logged_once(
    ask: Callable[..., str], small: live.Live, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, how, code, counted = REFUSALS[what]
    counted = (*counted, code)[:2]
    answers = small.server.service.grpc_answers
    before = answers.copy()
    with caplog.at_level(logging.INFO, "weft.access"):
        assert ask(data, **how) == code
        until(lambda: answers != before, "it is counted")
    assert answers - before == {counted: 1}
    assert [record.getMessage().split()[2:4] for record in caplog.records if record.name == "weft.access"] == [
        [*counted]
    ]


def test_answers_over_grpc_are_in_the_metrics(ask: Callable[..., str], small: live.Live) -> None:
    from weft.serving import metrics

    assert ask(message(1)) == "OK"
    assert ask(b"", "/a.b/C") == "UNIMPLEMENTED"
    answers = small.server.service.grpc_answers
    until(lambda: answers["ModelInfer", "OK"] and answers["unknown", "UNIMPLEMENTED"], "both are counted")
    page = metrics.text(small.server.service)
    assert f'weft_grpc_answers_total{{method="ModelInfer",code="OK"}} {answers["ModelInfer", "OK"]}' in page
    assert 'weft_grpc_answers_total{method="unknown",code="UNIMPLEMENTED"} ' in page


def test_the_end_of_a_call_while_its_answer_is_written_is_no_traceback() -> None:
    class ExecuteBatchError(Exception):
        """Named as gRPC names it."""

    record = logging.LogRecord("grpc", logging.ERROR, "", 0, "raised in core", (), (ExecuteBatchError, None, None))
    assert not LostAnswers().filter(record)
    record.exc_info = (ValueError, None, None)
    assert LostAnswers().filter(record)
