"""Load on a real server: requests at their times, latencies from their times, and every request in exactly one bin.

The servers are small ones of our own on real sockets; what they do with a request is the test's business.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tests.engine.naive import small_npu
from tests.load.documented import documented
from tests.serving.live import LeapingLoop
from weft.base.errors import InputError, ModelError, ShapeNeeded, WeftError, WorkloadError
from weft.cli import bench
from weft.http.client import Answer, AnswerParser, NotHttp, parse_url
from weft.load import BROKEN, LOST, LoadResult, drive, run_load
from weft.load.payload import build_payload, input_shape, read_inputs
from weft.load.report import stream_load
from weft.runtime.tensors import TensorSpec
from weft.simulation.requests import prepare
from weft.workloads.requests import Stream, Workload, parse_workload

DROP = -1
HOUR_S = 3600.0
"""Longer than any test; where it passes, the test lets it."""
INPUTS = [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}, {"name": "ids", "datatype": "INT64", "shape": [2]}]


class Seen(NamedTuple):
    """A request as the server read it."""

    path: str
    headers: dict[str, str]
    body: bytes
    at_s: float
    number: int
    """Among those that want an inference."""

    @property
    def header(self) -> dict[str, Any]:
        """The JSON part."""
        length = int(self.headers.get("inference-header-content-length", len(self.body)))
        found: dict[str, Any] = json.loads(self.body[:length])
        return found


Behaviour = Callable[[Seen], Awaitable[int]]


async def _fine(_: Seen) -> int:
    return 200


def leap(seconds: float) -> None:
    """Time passes, for a stub and for whoever drives it: the run ends when it was to, whatever the machine does."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, LeapingLoop)
    loop.leap(seconds)


class Stub:
    """Speaks enough of the protocol to be driven; *behave* gives the status of an inference, or DROP."""

    def __init__(
        self, behave: Behaviour = _fine, *, binary: bool = True, inputs: Any = INPUTS, key: str | None = None
    ) -> None:
        self.behave = behave
        self.extensions = ["binary_tensor_data"] if binary else []
        self.inputs = inputs
        self.key = key
        self.profile: object = None
        self.config: object = None
        """Of the model net."""
        self.outputs: list[dict[str, object]] = []
        """What the metadata list."""
        self.good = lambda seen: (b"{}", "")
        """The body of a 200, and further header lines."""
        self.seen: list[Seen] = []
        self.given: Counter[tuple[str, int]] = Counter()
        self.under_way = self.most_under_way = 0
        self.writers: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}
        self.server: asyncio.Server
        self.url = ""

    @asynccontextmanager
    async def serving(self, context: ssl.SSLContext | None = None) -> Any:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0, ssl=context)
        scheme, host = ("https", "localhost") if context else ("http", "127.0.0.1")
        self.url = f"{scheme}://{host}:{self.server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            self.vanish()
            tasks = [task for task in self.writers.values() if task]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks)
            await self.server.wait_closed()

    def vanish(self) -> None:
        """Close the door and every connection."""
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers[writer] = asyncio.current_task()
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *rest = head.strip().split("\r\n")
                headers = {key.lower(): value.strip() for key, _, value in (each.partition(":") for each in rest)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                status, answer, *more = await self._answer(line.split()[1], headers, body)
                if status == DROP:
                    break
                lines = "".join(more) + f"Content-Length: {len(answer)}\r\n\r\n"
                writer.write(f"HTTP/1.1 {status} X\r\n{lines}".encode() + answer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return
        finally:
            writer.transport.abort()
            del self.writers[writer]

    async def _answer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[Any, ...]:
        if self.key and headers.get("authorization") != f"Bearer {self.key}":
            return 401, b'{"error": "no key"}'
        if path.endswith("/infer"):
            return await self._infer(path, headers, body)
        known: dict[str, object] = {
            "/v2": {"name": "stub", "version": "1", "extensions": self.extensions},
            "/v2/health/live": {},
            "/v2/repository/index": [{"name": "net"}, {"name": "other"}],
            "/v2/models/net": {"name": "net", "inputs": self.inputs, "outputs": self.outputs},
            "/v2/models/other": {"name": "other", "inputs": self.inputs},
        }
        if self.config is not None:
            known["/v2/models/net/config"] = self.config
        if self.profile is not None:
            known["/weft/profile"] = self.profile
        if path not in known:
            return 404, b'{"error": "there is nothing here"}'
        return 200, json.dumps(known[path]).encode()

    async def _infer(self, path: str, headers: dict[str, str], body: bytes) -> tuple[Any, ...]:
        self.seen.append(Seen(path, headers, body, asyncio.get_running_loop().time(), len(self.seen)))
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            status = await self.behave(self.seen[-1])
        finally:
            self.under_way -= 1
        self.given[path.split("/")[3], status] += 1
        if status == 200:
            return status, *self.good(self.seen[-1])
        return status, f'{{"error": "because of {status}"}}'.encode()


@contextmanager
def in_a_thread(stub: Stub) -> Iterator[Stub]:
    """Serve from another thread, for callers that run a loop of their own."""
    started, loop = threading.Event(), asyncio.new_event_loop()
    leaving: list[asyncio.Event] = []

    async def serve() -> None:
        leaving.append(asyncio.Event())
        async with stub.serving():
            started.set()
            await leaving[0].wait()

    def work() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve())

    thread = threading.Thread(target=work)
    thread.start()
    started.wait()
    try:
        yield stub
    finally:
        loop.call_soon_threadsafe(leaving[0].set)
        thread.join()


def load(*streams: dict[str, object], **settings: object) -> Workload:
    """A workload whose streams are for ``net``, 100 requests a second, within a minute, unless they say otherwise."""
    usual = {"model": "net", "rate": 100.0, "deadline_ms": 60_000.0}
    raw = {"duration_s": 0.2, "warmup_s": 0.0, "seed": 5, "stream": [usual | each for each in streams or ({},)]}
    return parse_workload(raw | settings, "test")


def driven(stub: Stub, workload: Workload, **options: Any) -> LoadResult:
    """A run against a stub in the same loop."""

    async def both() -> LoadResult:
        async with stub.serving():
            return await drive(workload, stub.url, **options)

    with asyncio.Runner(loop_factory=LeapingLoop) as runner:
        return runner.run(both())


def over_at(number: int, after_s: float = HOUR_S) -> Behaviour:
    """Every request is answered, and with one of this number so much time has passed."""

    async def behave(seen: Seen) -> int:
        if seen.number == number:
            leap(after_s)
        return 200

    return behave


def adds_up(result: LoadResult) -> None:
    """Every request is in exactly one bin, and the bins are those of the list of fates."""
    for each in result.streams:
        found = each.figures
        assert found.scheduled == len(each.status) == len(each.latency_s) == len(each.scheduled_s) == len(each.lag_s)
        assert found.scheduled == sum(found.statuses.values()) + found.broken + found.lost
        assert found.answered == found.statuses.get(200, 0)
        fates = Counter(each.status.tolist())
        assert fates.pop(BROKEN, 0) == found.broken
        assert fates.pop(LOST, 0) == found.lost
        assert fates == found.statuses
        assert np.isnan(each.latency_s).tolist() == (each.status <= 0).tolist()


# The schedule


@pytest.mark.parametrize("arrival", ["poisson", "uniform", "bursty"])
def test_requests_are_scheduled_as_a_simulation_would_draw_them(arrival):
    workload = load({"arrival": arrival}, {"arrival": arrival, "model": "other", "rate": 50.0})
    stub = Stub()
    result = driven(stub, workload)
    for index, each in enumerate(result.streams):
        drawn = np.concatenate(list(workload.arrivals(index)))
        assert each.scheduled_s.tolist() == drawn.tolist()
        assert (each.lag_s >= 0).all()
        assert (each.latency_s >= each.lag_s).all()
    assert len(stub.seen) == result.requests > 10
    adds_up(result)


def test_a_trace_is_replayed(tmp_path):
    (tmp_path / "times.csv").write_text("0\n0.05\n0.05\n0.1\n9\n")
    workload = load({"arrival": "trace", "trace": "times.csv", "rate": None}, folder=str(tmp_path))
    assert driven(Stub(), workload).streams[0].scheduled_s.tolist() == [0, 0.05, 0.05, 0.1]


def test_a_stream_that_never_sends_is_no_run():
    with pytest.raises(WorkloadError, match="nothing arrives within"):
        driven(Stub(), load({"rate": 1e-6}))


@pytest.mark.parametrize("connections", [2, 64])
def test_a_stall_is_charged_to_every_request_it_kept_waiting(connections):
    """With two connections only two requests reach the server while it stalls; all count from their time."""
    released: list[float] = []

    async def stall(seen: Seen) -> int:
        if not gate:
            gate.append(asyncio.Event())
            loop = asyncio.get_running_loop()
            loop.call_later(0.25, lambda: (released.append(loop.time()), gate[0].set()))
        await gate[0].wait()
        return 200

    gate: list[asyncio.Event] = []
    stub = Stub(stall)
    result = driven(stub, load({"arrival": "uniform"}, duration_s=0.5), connections=connections)
    (each,) = result.streams
    adds_up(result)
    # The first request reached the server after it was sent, so the run began no later than this:
    start_s = stub.seen[0].at_s - each.scheduled_s[0] - each.lag_s[0]
    waited_s = released[0] - start_s - each.scheduled_s
    assert np.count_nonzero(waited_s > 0) >= 25
    assert (each.latency_s >= waited_s).all()
    assert each.figures.answered == each.figures.scheduled
    if connections == 2:
        assert result.held_back >= 20
        assert any("--connections" in remark for remark in result.remarks)
        assert each.figures.lag_max_s >= waited_s[2]


# Every request is in exactly one bin


def test_statuses_and_dropped_connections_are_counted_exactly_and_the_run_goes_on():
    fates = [200, 503, 504, DROP, 200, 429, 200]

    async def mixed(seen: Seen) -> int:
        return fates[seen.number % len(fates)]

    stub = Stub(mixed)
    result = driven(stub, load({}, {"model": "other", "rate": 200.0}), grace_s=HOUR_S)
    adds_up(result)
    for each in result.streams:
        given = {status: n for (model, status), n in stub.given.items() if model == each.stream.model}
        assert each.figures.broken == given.pop(DROP, 0)
        assert each.figures.statuses == given
        assert each.figures.lost == 0
        assert each.figures.met == each.figures.answered
    assert sum(each.figures.broken for each in result.streams) >= 5
    assert result.streams[0].messages[503] == "because of 503"
    assert any("because of 504" in remark for remark in result.remarks)
    assert any("connection failed: the connection was lost" in remark for remark in result.remarks)


def test_what_is_never_answered_is_lost_and_its_neighbours_are_not():
    async def hang(seen: Seen) -> int:
        if "other" in seen.path:
            await asyncio.Event().wait()
        return 200

    workload = load({}, {"model": "other"})
    fine, _ = (sum(map(len, workload.arrivals(index))) for index in (0, 1))

    def told(gone_s: float, answers: int, under_way: int) -> None:
        if answers == fine and gone_s > workload.duration_s:
            leap(HOUR_S)

    result = driven(Stub(hang), workload, grace_s=HOUR_S, progress=told)
    adds_up(result)
    good, hung = (each.figures for each in result.streams)
    assert good.answered == good.scheduled > 0
    assert hung.lost == hung.scheduled > 0
    assert hung.met_share == 0
    assert hung.p50_s is None
    assert result.elapsed_s >= HOUR_S + workload.duration_s


def test_requests_that_never_found_a_connection_are_lost_and_late():
    async def hang(_: Seen) -> int:
        leap(2 * HOUR_S)
        await asyncio.Event().wait()
        return 200

    stub = Stub(hang)
    result = driven(stub, load({"arrival": "uniform"}, duration_s=0.2), grace_s=HOUR_S, connections=1)
    (each,) = result.streams
    assert len(stub.seen) == 1
    assert each.figures.lost == each.figures.scheduled == 20
    assert each.lag_s[1:].tolist() == pytest.approx(result.elapsed_s - each.scheduled_s[1:])


def test_a_server_that_goes_away_breaks_the_rest_and_the_run_ends():
    async def leave(seen: Seen) -> int:
        if seen.number == 9:
            stub.vanish()
            leap(HOUR_S)
        return 200

    stub = Stub(leave)
    workload = load({"rate": 0.01}, {"arrival": "closed", "clients": 2}, duration_s=HOUR_S)
    result = driven(stub, workload, grace_s=HOUR_S)
    adds_up(result)
    opened, closed = (each.figures for each in result.streams)
    assert opened.broken + opened.answered == opened.scheduled
    assert opened.broken > 0
    assert closed.broken > 0
    assert opened.lost == closed.lost == 0
    assert any("cannot connect" in text or "lost" in text for text in result.streams[0].messages.values())


def test_a_late_answer_misses_its_deadline_and_still_counts_as_answered():
    async def slow(seen: Seen) -> int:
        if seen.number % 2:
            await asyncio.sleep(0.02)
        return 200

    result = driven(Stub(slow), load({"deadline_ms": 19.0}))
    (each,) = result.streams
    assert each.figures.answered == each.figures.scheduled
    assert each.figures.met == np.count_nonzero(each.latency_s <= 0.019)
    assert each.figures.met <= (each.figures.scheduled + 1) // 2


def test_answers_that_are_no_http_break_the_request_only():
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await reader.read(100_000)
        writer.write(b"220 mail.example ESMTP\r\n\r\n")
        await writer.drain()
        writer.close()

    async def swap(_: Seen) -> int:
        return 200

    async def both() -> LoadResult:
        stub = Stub(swap)
        original = stub._connected

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            first[0] += 1  # the first connection asks about the model; the others send requests
            await (original if first[0] == 1 else odd)(reader, writer)

        first = [0]
        stub._connected = connected  # type: ignore[method-assign]
        async with stub.serving():
            return await drive(load(), stub.url)

    result = asyncio.run(both())
    adds_up(result)
    assert result.streams[0].figures.broken == result.streams[0].figures.scheduled
    assert "not HTTP" in result.streams[0].messages[BROKEN]


# Closed streams


def test_a_closed_stream_keeps_its_clients_requests_under_way():
    """No answer is given before three requests are there: fewer clients would hang, more would show."""

    async def together(_: Seen) -> int:
        while stub.under_way < 3 and len(stub.seen) < 12:
            await asyncio.sleep(0.001)
        if len(stub.seen) == 12:
            leap(HOUR_S)
        return 200

    stub = Stub(together)
    workload = load({"arrival": "closed", "clients": 3, "rate": None}, duration_s=HOUR_S)
    result = driven(stub, workload, grace_s=3 * HOUR_S)
    adds_up(result)
    assert stub.most_under_way == 3
    assert len(stub.seen) >= 12
    assert result.streams[0].scheduled_s[:3].tolist() == [0, 0, 0]
    assert (result.streams[0].scheduled_s < HOUR_S).all()


@pytest.mark.parametrize("think_ms", [0.0, 7.0])
def test_a_client_sends_again_when_it_has_its_answer_and_has_thought(think_ms):
    stub = Stub(over_at(9))
    result = driven(stub, load({"arrival": "closed", "think_ms": think_ms, "rate": None}, duration_s=HOUR_S))
    (each,) = result.streams
    ends_s = each.scheduled_s + each.latency_s
    assert len(each.status) == 10
    assert each.scheduled_s[1:].tolist() == pytest.approx((ends_s[:-1] + think_ms / 1e3).tolist())
    assert ends_s[-1] + think_ms / 1e3 >= HOUR_S
    assert stub.most_under_way == 1


# What is sent


@pytest.mark.parametrize(
    ("deadlines", "expected"),
    [("strict", {"timeout": 2500}), ("soft", {"weft_slo_ms": 2.5}), ("none", {})],
)
def test_deadlines_and_priorities_travel_as_parameters(deadlines, expected):
    stub = Stub()
    workload = load({"deadline_ms": 2.5, "priority": 9}, {"deadline_ms": 2.5, "model": "other"}, duration_s=0.1)
    driven(stub, workload, deadlines=deadlines)
    sent = {seen.path: seen.header["parameters"] for seen in stub.seen}
    assert sent["/v2/models/net/infer"] == {"binary_data_output": True, "priority": 1} | expected
    assert sent["/v2/models/other/infer"] == {"binary_data_output": True, "priority": 3} | expected


def test_binary_tensors_are_as_long_as_they_say_and_the_same_for_the_same_seed():
    first, second = Stub(), Stub()
    for stub in (first, second):
        driven(stub, load({"arrival": "closed"}, duration_s=0.05))
    seen = first.seen[0]
    x, ids = seen.header["inputs"]
    assert (x["shape"], x["parameters"]["binary_data_size"]) == ([1, 8], 32)
    assert (ids["shape"], ids["parameters"]["binary_data_size"]) == ([2], 16)
    start = int(seen.headers["inference-header-content-length"])
    assert len(seen.body) == start + 32 + 16
    assert set(np.frombuffer(seen.body[start + 32 :], "<i8").tolist()) <= {0, 1}
    assert {each.body for each in first.seen} == {each.body for each in second.seen} == {seen.body}


def test_a_server_without_binary_tensors_gets_json():
    stub = Stub(binary=False)
    result = driven(stub, load())
    x, ids = stub.seen[0].header["inputs"]
    assert (len(x["data"]), len(ids["data"])) == (8, 2)
    assert "inference-header-content-length" not in stub.seen[0].headers
    assert result.streams[0].figures.answered == result.streams[0].figures.scheduled


@pytest.mark.parametrize(
    ("datatype", "size"), [("BOOL", 3), ("UINT8", 3), ("INT32", 12), ("FP16", 6), ("FP64", 24), ("BYTES", 24)]
)
def test_every_data_type_can_be_sent(datatype, size):
    spec, target = TensorSpec("x", datatype, (3,)), parse_url("http://h")
    stream = Stream(model="net", deadline_ms=1)
    head, body = build_payload(stream, [spec], target).requests[0].split(b"\r\n\r\n", 1)
    length = int(re.search(rb"Inference-Header-Content-Length: (\d+)", head)[1])
    assert json.loads(body[:length])["inputs"][0]["parameters"]["binary_data_size"] == len(body) - length == size
    _, plain = build_payload(stream, [spec], target, binary=False).requests[0].split(b"\r\n\r\n", 1)
    assert len(json.loads(plain)["inputs"][0]["data"]) == 3


def test_free_dimensions_come_from_the_stream():
    spec = TensorSpec("ids", "INT64", (-1, -1))
    stream = Stream(model="net", deadline_ms=1, shapes={"ids": (2, 7)})
    assert input_shape(stream, spec) == (2, 7)
    with pytest.raises(ShapeNeeded, match=r"free shape \?x\?; pass --shape ids=1x128"):
        input_shape(Stream(model="net", deadline_ms=1), spec)
    with pytest.raises(WorkloadError, match=r"shape 2x7 does not fit its input 'ids', \?x8"):
        input_shape(stream, TensorSpec("ids", "INT64", (-1, 8)))
    with pytest.raises(WorkloadError, match="unknown input 'ids'; known: x"):
        build_payload(stream, [TensorSpec("x", "FP32", (1,))], parse_url("http://h"))
    huge = Stream(model="net", deadline_ms=1, shapes={"ids": (2, 1 << 40)})
    with pytest.raises(WorkloadError, match="too large to send"):
        build_payload(huge, [spec], parse_url("http://h"))


@pytest.mark.parametrize(
    "metadata",
    [None, [], {}, {"inputs": 3}, {"inputs": [{}]}, {"inputs": [{"name": "x", "datatype": "Q", "shape": []}]}],
)
def test_metadata_that_make_no_sense_are_refused(metadata):
    with pytest.raises(InputError, match=r"its metadata does not say|which is not known"):
        read_inputs("net", metadata)


def test_a_model_file_is_asked_for_by_its_name():
    stub = Stub()
    driven(stub, load({"model": "models/net.onnx"}))
    assert stub.seen[0].path == "/v2/models/net/infer"


# Samples, and what the answers to them say


def scores(label: int, *more: tuple[str, str, list[int]]) -> list[tuple[str, str, list[float] | list[int]]]:
    """Outputs of an answer: three classes, one of them the likeliest, and others."""
    return [("y", "FP32", [float(each == label) for each in range(3)]), *more]


def as_json(outputs: list[Any]) -> tuple[bytes, str]:
    told = [{"name": name, "datatype": kind, "shape": [1, len(data)], "data": data} for name, kind, data in outputs]
    return json.dumps({"outputs": told}).encode(), ""


def as_binary(outputs: list[Any]) -> tuple[bytes, str]:
    raw = [np.array(data, {"FP32": "<f4", "INT64": "<i8"}[kind]).tobytes() for _, kind, data in outputs]
    told = [
        {"name": name, "datatype": kind, "shape": [1, len(data)], "parameters": {"binary_data_size": len(part)}}
        for (name, kind, data), part in zip(outputs, raw, strict=True)
    ]
    head = json.dumps({"outputs": told}).encode()
    return head + b"".join(raw), f"Inference-Header-Content-Length: {len(head)}\r\n"


def knowing(binary: bool, reply: Callable[[int], list[Any]], behave: Behaviour = _fine) -> Stub:
    """A server that sees which sample it was sent, from the sample's first value."""
    stub = Stub(behave, binary=binary, inputs=[{"name": "x", "datatype": "FP32", "shape": [-1, 2]}])

    def good(seen: Seen) -> tuple[bytes, str]:
        (x,) = seen.header["inputs"]
        start = int(seen.headers.get("inference-header-content-length", 0))
        first = np.frombuffer(seen.body[start:], "<f4")[0] if binary else x["data"][0]
        return (as_binary if binary else as_json)(reply(int(first)))

    stub.good = good
    return stub


def saved(folder: Path, count: int = 5, **changes: Any) -> str:
    """A file of samples that can be told apart, labelled 0, 1, 2, 0, ..."""
    x = np.stack([np.arange(count), np.full(count, 7)], axis=1).astype(np.float32)
    stored = {"x": x, "label": np.arange(count) % 3} | changes
    np.savez(folder / "samples.npz", **{name: each for name, each in stored.items() if each is not None})
    return "samples.npz"


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("arrival", ["poisson", "closed"])
def test_samples_are_sent_as_they_are_and_answers_judged_by_their_labels(tmp_path, arrival, binary):
    # Sample 4 gets a wrong answer, and all say that they left at their number's exit.
    exits = ("weft_exit", "INT64", [1]), ("weft_exit", "INT64", [2])
    over = over_at(0 if arrival == "poisson" else 40)
    stub = knowing(binary, lambda at: scores(at % 3 if at < 4 else 0, exits[at % 2]), over)
    stub.outputs = [{"name": "y"}, {"name": "weft_exit"}]
    stub.profile = {"models": {"net": {"exits": [1, 2]}}}
    plain = {"arrival": arrival, "clients": 3}
    duration_s = 0.5 if arrival == "poisson" else HOUR_S
    workload = load(plain | {"samples": saved(tmp_path)}, folder=str(tmp_path), duration_s=duration_s)
    result = driven(stub, workload, grace_s=2 * HOUR_S)
    (each,) = result.streams
    rows, said = each.contents.sample, each.contents
    assert len(rows) == len(each.status) > 20 and set(rows.tolist()) == set(range(5))
    assert said.prediction.tolist() == [row % 3 if row < 4 else 0 for row in rows.tolist()]
    assert said.exit.tolist() == [1 + row % 2 for row in rows.tolist()]
    assert each.figures.accuracy == pytest.approx((rows < 4).mean())
    assert each.figures.exit_shares == pytest.approx(((rows % 2 == 0).mean(), (rows % 2 == 1).mean(), 0))
    if arrival == "poisson":
        without = driven(Stub(over), load(plain, duration_s=duration_s), grace_s=2 * HOUR_S)
        assert without.streams[0].scheduled_s.tolist() == each.scheduled_s.tolist()
        again, other = (
            driven(
                knowing(binary, lambda at: scores(at % 3), over),
                workload.model_copy(update={"seed": seed}),
                grace_s=2 * HOUR_S,
            ).streams[0]
            for seed in (workload.seed, workload.seed + 1)
        )
        assert again.contents.sample.tolist() == rows.tolist() != other.contents.sample.tolist()
    adds_up(result)


def test_only_counted_answers_are_judged(tmp_path):
    async def every_third_fails(seen: Seen) -> int:
        return 503 if seen.number % 3 == 0 else 200

    stub = knowing(True, lambda at: scores(at % 3), every_third_fails)
    workload = load({"samples": saved(tmp_path)}, folder=str(tmp_path), duration_s=0.4, warmup_s=0.1)
    (each,) = driven(stub, workload).streams
    assert each.figures.accuracy == 1.0 and each.figures.exit_shares is None
    assert [found == -1 for found in each.contents.prediction.tolist()] == [status == 503 for status in each.status]
    lists = each.as_dict(latencies=True)
    assert lists["sample"] == each.contents.sample.tolist() and "exit" not in lists
    assert [found is None for found in lists["prediction"]] == [status == 503 for status in each.status]
    assert "sample" not in each.as_dict(latencies=False)


def test_answers_are_not_kept_where_nothing_is_read_of_them(tmp_path):
    stub = knowing(True, lambda at: scores(0))
    (each,) = driven(stub, load({"samples": saved(tmp_path, label=None)}, folder=str(tmp_path))).streams
    assert each.contents.prediction is None and each.contents.exit is None and each.figures.accuracy is None
    assert each.contents.unreadable == 0 and len(each.contents.sample) == len(each.status)


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        ((b"{}", ""), "it is no answer of the protocol (KeyError: 'outputs')"),
        ((b"[", ""), "it is no answer of the protocol (JSONDecodeError"),
        ((b"{}", "Inference-Header-Content-Length: 3\r\n"), "it does not say where its tensors begin"),
        (as_json([]), "it has no outputs"),
        (as_json([("weft_exit", "INT64", [1])]), "it has no outputs"),
        (as_json([("y", "FP32", [1.0])]), "its output 'y' has the shape 1x1, which is no score for each class"),
        (as_json([("y", "BYTES", ["a", "b"])]), "its output 'y' is of the type 'BYTES'"),
        (as_json([("y", "FP32", [1.0, "b"])]), "its output 'y' does not hold 1x2 FP32"),
        (as_json([("y", "INT8", [1, 1000])]), "its output 'y' does not hold 1x2 INT8"),
        (as_json(scores(1)), "it has no output 'weft_exit'"),
        (as_json(scores(1, ("weft_exit", "INT64", [0]))), "its output 'weft_exit' holds no exits"),
        (as_json(scores(1, ("weft_exit", "FP32", [1.0]))), "its output 'weft_exit' holds no exits"),
        (as_json(scores(1, ("weft_exit", "INT64", [10**6]))), "its output 'weft_exit' holds no exits"),
        ((as_binary(scores(1))[0][:-1], as_binary(scores(1))[1]), "its output 'y' of 12 bytes is not in it"),
        ((b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 3], "data": []}]}', ""), "the shape [-1, 3]"),
        ((b'{"outputs": [{"name": "y", "datatype": "FP32", "shape": [1e999], "data": []}]}', ""), "OverflowError"),
        ((b" " * (1 << 24), ""), "it has 16777216 bytes or more"),
    ],
)
def test_answers_that_do_not_say_it_are_not_right_and_remarked(tmp_path, reply, why):
    stub = Stub(inputs=[{"name": "x", "datatype": "FP32", "shape": [-1, 2]}])
    stub.outputs = [{"name": "weft_exit"}]
    stub.good = lambda seen: reply
    closed = {"arrival": "closed", "samples": saved(tmp_path, label=np.full(5, 2))}
    result = driven(stub, load(closed, folder=str(tmp_path), duration_s=0.02))
    (each,) = result.streams
    assert (each.figures.accuracy, each.figures.exit_shares) == (0.0, None)
    assert each.contents.unreadable == len(each.status)
    remark = next(each for each in result.remarks if "could not be read" in each)
    assert why in remark and "\n" not in remark


@pytest.mark.parametrize("stated", [{}, {"exit_threshold": 0.9}, {"exit_threshold": 0.8}])
def test_a_threshold_is_sent_where_the_stream_states_it(tmp_path, stated):
    stub, file = Stub(), tmp_path / "w.toml"
    key = "".join(f"{name} = {value}\n" for name, value in stated.items())
    file.write_text(f'[[stream]]\nmodel = "net"\narrival = "closed"\ndeadline_ms = 60000\n{key}')
    with in_a_thread(stub):
        run_command(str(file), "--url", stub.url, "--duration", "0.05", "--warmup", "0", "--json", f"{tmp_path}/out")
    sent = stub.seen[0].header["parameters"]
    assert sent.get("weft_exit_threshold") == stated.get("exit_threshold")
    (found,) = json.loads((tmp_path / "out").read_text())["streams"]
    assert found["exit_threshold"] == stated.get("exit_threshold")


def test_a_threshold_that_no_server_takes_is_refused():
    with pytest.raises(WorkloadError, match="net: exit_threshold = 0 cannot be sent, must be above 0"):
        driven(Stub(), load({"exit_threshold": 0}))


def test_a_request_of_several_rows_counts_where_its_last_row_left():
    stub = Stub()
    stub.outputs = [{"name": "weft_exit"}]
    stub.good = lambda seen: as_json([("weft_exit", "INT64", [1, 3, 2])])
    (each,) = driven(stub, load()).streams
    assert each.figures.exit_shares == (0, 0, 1) and set(each.as_dict(latencies=True)["exit"]) == {3}


# What is refused before the run


def test_nobody_there_is_one_line():
    with socket.socket() as taken, pytest.raises(InputError, match="nothing listens at") as refused:
        taken.bind(("127.0.0.1", 0))  # nobody listens there, and nobody else will
        run_load(load(), f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert "\n" not in str(refused.value)


def test_an_unknown_model_is_one_line_with_a_near_name():
    with pytest.raises(InputError, match="unknown model 'nett'; did you mean net") as refused:
        driven(Stub(), load({"model": "nett"}))
    assert "\n" not in str(refused.value)


def test_a_key_is_sent_and_its_lack_is_one_line():
    with pytest.raises(InputError, match="--api-key"):
        driven(Stub(key="secret"), load())
    result = driven(Stub(key="secret"), load(), api_key="secret")
    assert result.streams[0].figures.answered == result.streams[0].figures.scheduled
    with pytest.raises(InputError, match="no HTTP header"):
        driven(Stub(), load(), api_key="a\r\nb: c")


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:99999", "http://a@h", "http://h/?q", "http://a..b"]
)
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(InputError, match="--url"):
        parse_url(url)


def test_an_address_may_hold_a_folder_and_leave_the_port_out():
    target = parse_url("http://[::1]/v/")
    assert (target.host, target.port, target.prefix, target.authority) == ("::1", 80, "/v", "[::1]")
    assert parse_url("https://host", ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)).port == 443


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"deadlines": "hard"}, "unknown rule"),
        ({"connections": 0}, "at least 1"),
        ({"grace_s": float("nan")}, "--grace"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        driven(Stub(), load(), **options)


# Figures


def figures_of(latency_ms: list[float], *, lag_ms: float = 0.0, deadline_ms: float = 50.0, status: int = 200) -> Any:
    workload = load({"deadline_ms": deadline_ms}, duration_s=10.0, warmup_s=1.0)
    count = len(latency_ms)
    return stream_load(
        workload,
        workload.stream[0],
        scheduled_s=np.linspace(9.0, 1.0, count),
        lag_s=np.full(count, lag_ms / 1e3),
        latency_s=np.array(latency_ms) / 1e3,
        status=np.full(count, status, np.int16),
        messages={},
    )


def result_of(*streams: Any) -> LoadResult:
    return LoadResult("http://h", {}, load(), "strict", streams, "now", 1.0, 1e-4, 0.1, 4, 0)


def test_percentiles_are_values_that_were_observed():
    values = list(range(1, 1001))
    found = figures_of([float(v) for v in values], deadline_ms=250).figures
    shown = (found.p50_s, found.p90_s, found.p95_s, found.p99_s, found.p999_s, found.max_s)
    assert shown == tuple(v / 1e3 for v in (500, 900, 950, 990, 999, 1000))
    assert found.mean_s == pytest.approx(0.5005)
    assert (found.met, found.met_share) == (250, 0.25)
    assert found.answered_per_s == pytest.approx(1000 / 9)


def test_the_warm_up_is_sent_but_not_counted():
    stub = Stub()
    result = driven(stub, load({"arrival": "uniform"}, duration_s=0.3, warmup_s=0.2))
    (each,) = result.streams
    assert len(stub.seen) == len(each.status) == 30
    assert each.figures.scheduled == np.count_nonzero(each.scheduled_s >= 0.2) == 10


@pytest.mark.parametrize(
    ("lag_ms", "latency_ms", "blamed"), [(0.9, 100, False), (1.1, 100, True), (0.4, 10, False), (0.6, 10, True)]
)
def test_a_generator_that_was_late_says_so(lag_ms, latency_ms, blamed):
    remarks = result_of(figures_of([latency_ms] * 100, lag_ms=lag_ms)).remarks
    assert bool(remarks) == blamed
    assert all("bottleneck" in remark for remark in remarks)


def test_a_stream_without_answers_has_figures_and_json():
    text = json.dumps(result_of(figures_of([np.nan] * 3, status=LOST), figures_of([])).as_dict(), allow_nan=False)
    lost, empty = json.loads(text)["streams"]
    assert (lost["lost"], lost["met_share"], lost["p50_s"], lost["latency_s"]) == (3, 0, None, [None] * 3)
    assert (empty["scheduled"], empty["met_share"], empty["lag_p99_s"]) == (0, None, None)


# Answers, however they come


def fed(data: bytes, cuts: list[int], *, keep_bytes: int = 1 << 20) -> list[Answer]:
    parser, found = AnswerParser(keep_bytes=keep_bytes), []
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for start, end in pairwise(edges):
        if start < end and (answer := parser.feed(data[start:end])):
            found.append(answer)
    if answer := parser.end():
        found.append(answer)
    assert all(each.head.startswith(b"HTTP/1.") and b"\r\n\r\n" not in each.head for each in found)
    return [each._replace(head=b"") for each in found]


def chunked(body: bytes, sizes: list[int]) -> bytes:
    parts, at = [], 0
    for size in sizes:
        piece = body[at : at + size]
        at += size
        if piece:
            parts.append(b"%X;note=1\r\n%b\r\n" % (len(piece), piece))
    rest = body[at:]
    if rest:
        parts.append(b"%x\r\n%b\r\n" % (len(rest), rest))
    return b"".join(parts) + b"0\r\nLast: 1\r\n\r\n"


CUTS = st.lists(st.integers(0, 400), max_size=8)


@given(
    st.binary(max_size=200), st.lists(st.integers(1, 60), max_size=5), CUTS, st.sampled_from(["n", "chunked", "end"])
)
@settings(max_examples=40, deadline=None)
def test_an_answer_is_the_same_however_it_is_cut(body, sizes, cuts, way):
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    head = b"HTTP/1.1 503 Busy\r\nX: content-length: 7\r\n"
    rest = {
        "n": b"CONTENT-length:  %d \r\n\r\n" % len(body) + body,
        "chunked": b"Transfer-Encoding: Chunked\r\n\r\n" + chunked(body, sizes),
        "end": b"\r\n" + body,
    }
    assert fed(interim + head + rest[way], cuts) == [Answer(503, body, way != "end")]


@given(st.binary(max_size=100), CUTS)
@settings(max_examples=40, deadline=None)
def test_garbage_is_an_answer_or_no_http(data, cuts):
    for start in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"):
        try:
            found = fed(start + data, cuts)
        except NotHttp:
            continue
        assert all(200 <= each.status <= 999 for each in found)


@pytest.mark.parametrize(
    "head",
    [b"HTTP/2 200", b"HTTP/1.1 000 X", b"HTTP/1.1 2000 X", b"HTTP/1.1 2x0 OK", b"A" * 70_000,
     b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2", b"HTTP/1.1 200 OK\r\nContent-Length: -1",
     b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip"],
)  # fmt: skip
def test_heads_that_mean_nothing_are_no_http(head):
    with pytest.raises(NotHttp):
        AnswerParser().feed(head + b"\r\n\r\n")


@pytest.mark.parametrize(("keep_bytes", "kept"), [(0, b""), (2, b"ab"), (3, b"abc"), (9, b"abc")])
def test_as_much_of_a_good_answer_is_kept_as_was_asked_for_and_an_errors_is_cut(keep_bytes, kept):
    good = b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"
    assert fed(good, [40], keep_bytes=keep_bytes) == [Answer(200, kept, True)]
    (long,) = fed(b"HTTP/1.1 500 X\r\nContent-Length: 90000\r\n\r\n" + b"x" * 90_000, [50_000], keep_bytes=keep_bytes)
    assert len(long.body) == 1 << 16


@pytest.mark.parametrize(("text", "bytes_"), [(b"17", 17), (b" 3 ", 3), (b"-1", -1), (b"x", -1), (b"9" * 19, -1)])
def test_an_answer_says_where_its_tensors_begin(text, bytes_):
    head = b"HTTP/1.1 200 OK\r\ninference-header-content-LENGTH:" + text + b"\r\nContent-Length: 0\r\n\r\n"
    assert fed(head, [30]) == [Answer(200, b"", True, bytes_)]


@pytest.mark.parametrize(
    "text",
    [b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n", b"HTTP/1.0 204 X\r\n\r\n",
     b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nab"],
)  # fmt: skip
def test_some_answers_are_the_last_of_their_connection(text):
    assert [each.reusable for each in fed(text, [])] == [False]


# The command line and its file


def run_command(*arguments: str) -> None:
    app = typer.Typer()
    app.command()(bench.command)
    app(args=list(arguments), standalone_mode=False)


def test_the_command_writes_what_the_docs_say(tmp_path, capsys):
    out = tmp_path / "load.json"
    stub = Stub()
    stub.profile = {"format": 1, "models": []}
    with in_a_thread(stub):
        run_command(
            "--url", stub.url, "--stream", "net:rate=100,deadline=60000", "--stream",
            "other:arrival=closed,clients=2,think=5,deadline=60000,priority=9", "--duration", "0.4", "--warmup", "0.1",
            "--seed", "1", "--json", str(out), "--save-latencies",
        )  # fmt: skip
    found = json.loads(out.read_text())
    each = found["streams"][0]
    only_with_samples = {"sample", "exit", "prediction"}
    assert set(found) | set(each) == documented("Load (`weft bench --json`)") - only_with_samples
    assert found["format"] == 1
    assert found["server"]["name"] == "stub"
    assert found["profile"] == {"format": 1, "models": []}
    assert found["transport_s"] > 0
    assert found["workload"]["stream"][1]["priority"] == 9
    again = parse_workload(found["workload"], "again")
    assert each["scheduled_s"] == np.concatenate(list(again.arrivals(0))).tolist()
    assert len(each["scheduled_s"]) == len(each["latency_s"]) == len(each["status"]) == len(each["lag_s"])
    assert set(each["status"]) == {200}
    shown = capsys.readouterr().out
    assert "deadlines met" in shown
    assert "100.00 %" in shown
    assert "us of processor time per request" in shown


def test_the_command_takes_a_file_and_leaves_the_lists_out(tmp_path, capsys):
    out, file = tmp_path / "load.json", tmp_path / "w.toml"
    file.write_text('duration_s = 9\nseed = 3\n[[stream]]\nmodel = "net"\nrate = 100\ndeadline_ms = 60000\n')
    inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, -1]}]
    stub = Stub(inputs=inputs)
    with in_a_thread(stub):
        run_command(
            str(file), "--url", stub.url, "--duration", "0.2", "--warmup", "0", "--shape", "x=1x5", "--json", str(out)
        )
    found = json.loads(out.read_text())
    assert (found["workload"]["seed"], found["workload"]["duration_s"]) == (3, 0.2)
    assert found["workload"]["stream"][0]["shapes"] == {"x": [1, 5]}
    assert stub.seen[0].header["inputs"][0]["shape"] == [1, 5]
    assert "latency_s" not in found["streams"][0]
    assert found["profile"] is None


def test_a_stream_needs_no_deadline_and_no_shapes_that_the_server_knows(tmp_path, capsys):
    out, stub = tmp_path / "load.json", Stub(inputs=[{"name": "x", "datatype": "FP32", "shape": [-1, -1]}])
    stub.config = {"parameters": {"weft_shapes": {"string_value": "{'x': [1, 6], 'y': [1, 2]}"}}}
    with in_a_thread(stub):
        run_command("--url", stub.url, "-s", "net:rate=100", "--duration", "0.2", "--warmup", "0", "--json", str(out))
    header = stub.seen[0].header
    assert header["inputs"][0]["shape"] == [1, 6]
    assert set(header["parameters"]) == {"priority", "binary_data_output"}
    (stream,) = (found := json.loads(out.read_text()))["streams"]
    assert stream["deadline_s"] is None and stream["met_share"] is None and stream["met"] == stream["answered"] > 0
    assert found["remarks"][0] == "net: no deadline was given, so none of its answers is late"
    assert re.search(r"net .* none +-", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "say what to send"),
        (("w.toml", "--stream", "net:rate=1,deadline=1"), "say what to send"),
        (("--stream", "net:rate"), "is not of the form"),
        (("--stream", "net:deadline=1"), "has no rate"),
        (("--stream", "net:rate=1,deadline=5,prority=9"), "did you mean 'priority'"),
        (("--stream", "net:rate=1,deadline=5", "--duration", "0.1"), "warmup_s"),
        (("--stream", "net:rate=1,deadline=5", "--shape", "y:x=1"), "not among the models"),
        (("no-such-file.toml",), "cannot read the workload"),
    ],
)
def test_a_wrong_command_is_one_line(arguments, message):
    with pytest.raises(WeftError, match=message) as refused:
        run_command(*arguments)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_https_checks_the_servers_certificate(tmp_path):
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    at_server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    at_server.load_cert_chain(certificate, key)

    async def both(context: ssl.SSLContext | None) -> LoadResult:
        async with Stub().serving(at_server) as stub:
            return await drive(load(), stub.url, context=context)

    result = asyncio.run(both(ssl.create_default_context(cafile=str(certificate))))
    adds_up(result)
    assert result.streams[0].figures.answered == result.streams[0].figures.scheduled > 0
    with pytest.raises(InputError, match=r"cannot connect: .*certificate"):
        asyncio.run(both(None))


# Shapes of a stream, for the simulator too


def test_shapes_are_positive_and_leave_a_stream_a_key():
    with pytest.raises(WorkloadError, match="greater than or equal to 1"):
        load({"shapes": {"x": [1, 0]}})
    one, same, other = (load({"shapes": {"x": shape}}) for shape in ([1, 4], [1, 4], [1, 5]))
    assert len({one, same, other}) == 2


def test_a_simulation_takes_the_shapes(tmp_path):
    sequence = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", "length", 64])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = onnx.numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", [sequence], [out], [weights])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), tmp_path / "net.onnx")

    def alone_s(shapes: dict[str, list[int]]) -> float:
        workload = load({"model": "net.onnx", "shapes": shapes, "max_batch": 1}, folder=str(tmp_path))
        return prepare(workload, small_npu(1 << 20)).alone_s[0]

    assert alone_s({"x": [1, 4096, 64]}) > alone_s({"x": [1, 16, 64]}) > 0
    with pytest.raises(ModelError, match="x"):
        alone_s({})
