"""Ten minutes among the worst of clients: does the server keep its promises to the good ones, and its books?

Healthy clients send about 80 % of what one lane can do, first alone, then beside clients that leave half-way, send
garbage, lie about shapes, stall, flood a queue, never read, and load and unload a model all the time. Then:
nothing was a 500, every request has an answer or a known end, what clients saw is what the server counted, memory
does not grow, healthy latencies stay within a factor of the calm ones, nothing is left over, SIGTERM ends it with 0.
Run: python benchmarks/soak.py [--minutes 10].
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import multiprocessing
import os
import random
import re
import socket
import statistics
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import onnx
from machine import machine
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from weft.jsonfile import write_json
from weft.load import LoadResult, run_load
from weft.serving.process import ServerProcess
from weft.workloads.online import parse_workload

LOAD = {"chain": 0.55, "pp-ocr-cls": 0.3}
"""Model -> share of the time a request takes alone, nine tenths of it on the lane; chaos comes on top."""
MLP_PER_S = 30.0
DEADLINES_MS = {"mlp": 50.0, "pp-ocr-cls": 100.0, "chain": 500.0}
OCR_SHAPE = (1, 3, 48, 192)
MOST_GROWTH, MOST_TIMES = 0.05, 3.0
SETTLED_S, SAMPLE_S = 60.0, 2.0
PATIENCE_S = 60.0
"""No answer may take a chaotic client longer; a stalled request is ended by the server after half of it."""
RESULTS = Path(__file__).parent / "results" / "soak.json"


# Models


def write_mlp(path: Path) -> None:
    """x [n, 64] -> y [n, 10]."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.normal(size=(64, 10)).astype(np.float32), "w")
    _write(path, [helper.make_node("MatMul", ["x", "w"], ["y"])], [weight], ["n", 64], ["n", 10])


def write_chain(path: Path, *, layers: int = 24, width: int = 512, rows: int = 64) -> None:
    """Products of matrices, one after another, which cut well: tens of milliseconds."""
    rng = np.random.default_rng(0)
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        made = "y" if layer == layers - 1 else f"h{layer}"
        value = rng.normal(size=(width, width)) / np.sqrt(width)
        weights.append(numpy_helper.from_array(value.astype(np.float32), f"w{layer}"))
        nodes.append(helper.make_node("MatMul", [last, f"w{layer}"], [f"p{layer}"]))
        nodes.append(helper.make_node("Tanh", [f"p{layer}"], [made]))
        last = made
    _write(path, nodes, weights, [rows, width], [rows, width])


def _write(path: Path, nodes: list[Any], weights: list[Any], taken: list[Any], made: list[Any]) -> None:
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", taken), ("y", made))
    )
    graph = helper.make_graph(nodes, path.stem, [x], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), str(path))


def write_repository(folder: Path) -> Path:
    """The healthy clients' models, one with a short queue to flood, and one that comes and goes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("mlp", "flooded", "guest"):
        write_mlp(folder / f"{name}.onnx")
    (folder / "flooded.toml").write_text("queue_size = 16\n")
    write_chain(folder / "chain.onnx")
    return folder


SHAPES = {"mlp": (1, 64), "flooded": (1, 64), "guest": (1, 64), "chain": (64, 512)}


# Requests of chaotic clients


def post(path: str, body: bytes, head: str = "", length: int | None = None) -> bytes:
    """A request, whose stated length may be a lie."""
    stated = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: soak\r\n{head}Content-Length: {stated}\r\n\r\n".encode() + body


def infer(model: str, **parameters: Any) -> bytes:
    """A request that is as it should be, with binary tensors both ways."""
    raw = np.zeros(SHAPES[model], np.float32).tobytes()
    tensor = {"name": "x", "shape": SHAPES[model], "datatype": "FP32", "parameters": {"binary_data_size": len(raw)}}
    text = json.dumps({"parameters": {"binary_data_output": True, **parameters}, "inputs": [tensor]}).encode()
    return post(f"/v2/models/{model}/infer", text + raw, f"Inference-Header-Content-Length: {len(text)}\r\n")


def _tensor(**changes: Any) -> bytes:
    tensor = {"name": "x", "shape": [1, 64], "datatype": "FP32", "data": [0.5] * 64} | changes
    return json.dumps({"inputs": [tensor]}).encode()


UNFIT = (
    b"",
    b"{",
    b"[]",
    b"null",
    b'{"inputs": {}}',
    b'{"inputs": []}',
    b'{"inputs": [1]}',
    b'{"inputs": [' * 2000,
    b"\xff\xfe{}",
    _tensor(name="nobody"),
    _tensor(name=None),
    _tensor(shape=[1, 63]),
    _tensor(shape=[64]),
    _tensor(shape=[-1, 64]),
    _tensor(shape=[2**62, 64]),
    _tensor(shape="1x64"),
    _tensor(datatype="INT64"),
    _tensor(datatype="FP7"),
    _tensor(data=[0.5] * 63),
    _tensor(data=["a"] * 64),
    _tensor(data=[[0.5] * 32] * 2),
    _tensor(data=[1e300] * 64),
    _tensor(data=None),
    _tensor(parameters={"binary_data_size": 256}),
    _tensor(parameters={"shared_memory_region": "r"}),
    json.dumps({"parameters": {"timeout": -1}, "inputs": json.loads(_tensor())["inputs"]}).encode(),
    json.dumps({"parameters": {"priority": "high"}, "inputs": json.loads(_tensor())["inputs"]}).encode(),
    json.dumps({"parameters": {"weft_slo_ms": 0}, "inputs": json.loads(_tensor())["inputs"]}).encode(),
    json.dumps({"id": 7, "inputs": json.loads(_tensor())["inputs"]}).encode(),
    json.dumps({"outputs": [{"name": "z"}], "inputs": json.loads(_tensor())["inputs"]}).encode(),
)
"""Bodies that reach the model and do not fit it."""

MALFORMED = (
    b"\x00\x01\x02\x03\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: soak\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: soak\r\nContent-Length: -1\r\n\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: soak\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: soak\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: soak\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET /%zz HTTP/1.1\r\nHost: soak\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: soak\r\nExpect: money\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
"""Bytes that never become a request."""

MISTAKEN = (
    post("/v2/models/mlp/infer", _tensor(), "Inference-Header-Content-Length: many\r\n"),
    post("/v2/models/mlp/infer", _tensor(), "Content-Encoding: br\r\n"),
    post("/v2/models/mlp/infer", b"not packed", "Content-Encoding: gzip\r\n"),
    post("/v2/models/mlp/infer", gzip.compress(_tensor())[:-9], "Content-Encoding: gzip\r\n"),
    b"GET /v2/models/mlp/infer HTTP/1.1\r\nHost: soak\r\n\r\n",
    b"GET /v2/models/mlp/other HTTP/1.1\r\nHost: soak\r\n\r\n",
    b"GET /weft/timeline?since=never HTTP/1.1\r\nHost: soak\r\n\r\n",
    b"DELETE /v2 HTTP/1.1\r\nHost: soak\r\n\r\n",
    post("/v2/repository/index", b"{"),
    post("/v2/repository/models/nobody/load", b""),
    post("/v2/repository/models/nobody/unload", b""),
)
"""Requests that are turned down before they meet a model."""

GRPC_GARBAGE = (
    b"\x00" * 64,
    b"GET / HTTP/1.1\r\nHost: soak\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    + bytes((0, 0, 9, 1, 5, 0, 0, 0, 1))
    + b"\x80" * 9,
)
GRPC_INFER = "/inference.GRPCInferenceService/ModelInfer"


# Chaotic clients


@dataclass
class Ledger:
    """What chaotic clients saw."""

    answers: Counter[str] = field(default_factory=Counter)
    """``kind status`` -> how many."""
    counted: Counter[str] = field(default_factory=Counter)
    """``model reason`` under which the server must have counted a request -> how many; ``success`` is a reason."""
    abandoned: Counter[str] = field(default_factory=Counter)
    """Model -> whole requests whose client left before the answer: the server may have counted them, as whatever."""
    problems: list[str] = field(default_factory=list)

    def count(self, model: str, status: int) -> None:
        self.counted[f"{model} {REASONS.get(status, status)}"] += 1

    def note(self, kind: str, status: int, allowed: tuple[int, ...]) -> None:
        """An answer; 0 is an end of the connection without one."""
        self.answers[f"{kind} {status}"] += 1
        if status not in allowed and len(self.problems) < 100:
            self.problems.append(f"{kind}: status {status}, expected {' or '.join(map(str, allowed))}")


REASONS = {200: "success", 400: "bad_request", 404: "not_found", 503: "queue_full", 504: "deadline"}
"""Status -> what the server calls it; both of its words for deadlines are one here."""
NO_MODEL = "-"
"""Stands for the model of requests that met none."""


class Client:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(OSError):  # whoever was refused may find the line closed
            await self.writer.drain()

    async def answer(self, pause_s: float = 0.0) -> int:
        """The status of the next answer, read to its end; 0 if the connection ends first. *pause_s*: per 4 KiB."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await self.reader.readuntil(b"\r\n\r\n")
                status = int(head[9:12])
                length = re.search(rb"content-length: (\d+)", head.lower())
                left = int(length[1]) if length else 0
                while left:
                    piece = await self.reader.readexactly(min(left, 4096 if pause_s else left))
                    left -= len(piece)
                    await asyncio.sleep(pause_s)
                return status
        except (asyncio.IncompleteReadError, OSError):
            return 0

    def leave(self) -> None:
        """Go without a word."""
        self.writer.transport.abort()


@dataclass
class Chaos:
    """Clients that behave in every wrong way, and what they saw."""

    host: str
    port: int
    grpc_port: int | None
    rng: random.Random
    stall: bool = True
    """Whether to wait until the server gives up a request that stalls."""
    ledger: Ledger = field(default_factory=Ledger)

    @contextlib.asynccontextmanager
    async def client(self, receive_bytes: int | None = None) -> Any:
        line = socket.socket()
        line.setblocking(False)
        if receive_bytes is not None:
            line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        await asyncio.get_running_loop().sock_connect(line, (self.host, self.port))
        client = Client(*await asyncio.open_connection(sock=line, limit=1 << 16))
        try:
            yield client
        finally:
            client.leave()

    async def asked(self, kind: str, request: bytes, *allowed: int, model: str | None = None) -> int:
        """Send one request on a connection of its own, and note its answer; *model* is whose books it belongs in."""
        async with self.client() as client:
            await client.send(request)
            status: int = await client.answer()
        self.ledger.note(kind, status, allowed)
        if model is not None:
            self.ledger.count(model, status)
        return status

    # The kinds

    async def leaves(self) -> None:
        """Goes away while its request is computed, or has just been answered."""
        async with self.client() as client:
            await client.send(infer("chain"))
            await asyncio.sleep(self.rng.random() * 0.05)
        self.ledger.abandoned["chain"] += 1

    async def leaves_early(self) -> None:
        """Goes away in the middle of what it says."""
        whole = infer("chain")
        async with self.client() as client:
            await client.send(whole[: self.rng.randrange(1, len(whole))])
            await asyncio.sleep(self.rng.random() * 0.01)

    async def pipelines(self) -> None:
        """Sends three at once, reads one answer and leaves."""
        async with self.client() as client:
            await client.send(infer("mlp") * 3)
            status = await client.answer()
        self.ledger.note("pipelines", status, (200,))
        self.ledger.count("mlp", status)
        self.ledger.abandoned["mlp"] += 2

    async def garbage(self) -> None:
        """Sends what is no HTTP at all."""
        blob = self.rng.choice((*MALFORMED, self.rng.randbytes(self.rng.randrange(1, 5000)) + b"\r\n\r\n"))
        async with self.client() as client:
            await client.send(blob)
            client.writer.write_eof()
            self.ledger.note("garbage", await client.answer(), (0, 400, 417, 431, 501, 505))

    async def unfit(self) -> None:
        """Sends what does not fit the model."""
        await self.asked("unfit", post("/v2/models/mlp/infer", self.rng.choice(UNFIT)), 400, model="mlp")

    async def mistaken(self) -> None:
        """Asks for what there is not."""
        await self.asked("mistaken", self.rng.choice(MISTAKEN), 400, 404, 405)

    async def unknown(self) -> None:
        """Wants a model that is not there."""
        model = self.rng.choice(("nobody", "mlp/versions/99", "%2e%2e", "x" * 300))
        await self.asked("unknown", post(f"/v2/models/{model}/infer", _tensor()), 404, model=NO_MODEL)

    async def boasts(self) -> None:
        """Sends headers, or announces a body, beyond all limits."""
        if self.rng.random() < 0.5:
            request, status = b"GET / HTTP/1.1\r\nHost: soak\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431
        else:
            request, status = post("/v2/models/mlp/infer", b"", length=10**11), 413
        await self.asked("boasts", request, status)

    async def stalls(self) -> None:
        """Sends half a body and waits."""
        whole = infer("chain")
        async with self.client() as client:
            await client.send(whole[: len(whole) // 2])
            if self.stall:
                self.ledger.note("stalls", await client.answer(), (408,))

    async def floods(self) -> None:
        """Sends more at once than the queue has places, behind work that keeps the lane busy."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self.client()) for _ in range(48)]
            for client in clients:
                client.writer.write(infer("flooded"))
            for client in clients:
                status = await client.answer()
                self.ledger.note("floods", status, (200, 503))
                self.ledger.count("flooded", status)

    async def reads_slowly(self) -> None:
        """Takes a large answer a little at a time."""
        async with self.client(receive_bytes=4096) as client:
            await client.send(infer("chain"))
            status = await client.answer(pause_s=0.005)
        self.ledger.note("reads slowly", status, (200, 503))
        self.ledger.count("chain", status)

    async def hurries(self) -> None:
        """Wants a result within less time than it takes."""
        await self.asked("hurries", infer("chain", timeout=self.rng.choice((1, 500, 5000))), 503, 504, model="chain")

    async def comes_and_goes(self) -> None:
        """Unloads a model and loads it again, while others ask for it."""
        asking = [asyncio.create_task(self._guest()) for _ in range(4)]
        await self.asked("unloads", post("/v2/repository/models/guest/unload", b""), 200)
        asking += [asyncio.create_task(self._guest()) for _ in range(4)]
        await self.asked("loads", post("/v2/repository/models/guest/load", b""), 200)
        await asyncio.gather(*asking)
        await self.asked("guest after", infer("guest"), 200, model="guest")

    async def _guest(self) -> None:
        status = await self.asked("guest", infer("guest"), 200, 404, 503)
        self.ledger.counted["guest unloaded" if status == 503 else f"guest {REASONS.get(status, status)}"] += 1

    async def garbles_grpc(self) -> None:
        """Sends garbage to the gRPC port: to the port itself, and as a message."""
        if self.grpc_port is None:
            return
        reader, writer = await asyncio.open_connection(self.host, self.grpc_port)
        try:
            writer.write(self.rng.choice((*GRPC_GARBAGE, self.rng.randbytes(300))))
            with contextlib.suppress(OSError, TimeoutError):
                await writer.drain()
                async with asyncio.timeout(1):
                    await reader.read(1 << 16)
        finally:
            writer.transport.abort()
        await self._calls(GRPC_INFER, b"\xff" * 40, "INVALID_ARGUMENT")
        await self._calls(GRPC_INFER, b"\x0a\x06nobody", "NOT_FOUND")
        await self._calls(
            self.rng.choice(("/inference.GRPCInferenceService/Nothing", "/no/Thing")), b"", "UNIMPLEMENTED"
        )
        self.ledger.count(NO_MODEL, 404)

    async def _calls(self, method: str, message: bytes, expected: str) -> None:
        async with grpc.aio.insecure_channel(f"{self.host}:{self.grpc_port}") as channel:
            call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            try:
                await call(message, timeout=PATIENCE_S)
                found = "OK"
            except grpc.aio.AioRpcError as error:
                found = error.code().name
        self.ledger.answers[f"grpc {found}"] += 1
        if found != expected and len(self.ledger.problems) < 100:
            self.ledger.problems.append(f"grpc: {found}, expected {expected}")


PAUSES_S: dict[str, float] = {
    "leaves": 1.0,
    "leaves_early": 0.2,
    "pipelines": 0.5,
    "garbage": 0.1,
    "unfit": 0.1,
    "mistaken": 0.2,
    "unknown": 0.2,
    "boasts": 0.5,
    "stalls": 1.0,
    "floods": 3.0,
    "reads_slowly": 3.0,
    "hurries": 0.5,
    "comes_and_goes": 3.0,
    "garbles_grpc": 0.5,
}
"""Kind of chaotic client -> how long it rests, on average, before it tries again."""


async def run_chaos(chaos: Chaos, *, seconds: float | None = None, rounds: int | None = None) -> Ledger:
    """Every kind of client at once, for so long or so often; whoever waits for an answer then gets it."""
    until_s = time.monotonic() + (seconds or 0.0)

    async def repeat(action: Callable[[], Awaitable[None]], pause_s: float) -> None:
        done = 0
        while done < rounds if rounds is not None else time.monotonic() < until_s:
            await action()
            done += 1
            await asyncio.sleep(chaos.rng.expovariate(1 / pause_s) if rounds is None else 0)

    async with asyncio.TaskGroup() as group:
        for kind, pause_s in PAUSES_S.items():
            group.create_task(repeat(getattr(chaos, kind), pause_s))
    return chaos.ledger


def chaos_process(port: int, grpc_port: int, seconds: float, begin: Any, results: Any) -> None:
    """Chaos in a process of its own, so that it does not hold up the healthy clients; it waits to be told."""
    results.put(None)
    begin.wait()
    ledger = asyncio.run(run_chaos(Chaos("127.0.0.1", port, grpc_port, random.Random(0)), seconds=seconds))
    results.put(ledger)


# The server's side of it


class Books(NamedTuple):
    """What the server counted."""

    counted: Counter[str]
    """``model reason`` -> how many, as in the ledger."""
    internal: int
    in_flight: int
    queued: int


def read_books(url: str) -> Books:
    state = get(url, "/weft/state")
    counted: Counter[str] = Counter()
    refused = Counter(state["totals"]["failures"])
    for model in state["models"]:
        refused -= Counter(model["failures"])
        counted[f"{model['name']} success"] = model["requests"] - sum(model["failures"].values())
        counted += _by_reason(model["name"], model["failures"])
    counted += _by_reason(NO_MODEL, refused)
    queued = sum(model["queued"] for model in state["models"])
    return Books(counted, state["totals"]["failures"].get("internal", 0), state["in_flight"], queued)


def _by_reason(model: str, failures: Mapping[str, int]) -> Counter[str]:
    found: Counter[str] = Counter()
    for reason, count in failures.items():
        found[f"{model} {'deadline' if reason in ('expired', 'unmeetable') else reason}"] += count
    return found


def get(url: str, path: str) -> Any:
    with urllib.request.urlopen(url + path, timeout=PATIENCE_S) as answer:
        return json.loads(answer.read())


def read_metrics(url: str) -> dict[str, float]:
    """Sample with its labels -> value."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines) if name[:1] not in ("", "#")
    }


def metric_sum(metrics: dict[str, float], name: str) -> int:
    return round(sum(value for key, value in metrics.items() if key.partition("{")[0] == name))


class Watch:
    """Samples the server's memory until told to stop."""

    def __init__(self, pid: int) -> None:
        self._file = Path(f"/proc/{pid}/statm")
        self._stop = threading.Event()
        self.samples: list[tuple[float, int]] = []
        """Seconds since the start, bytes."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        began_s, page = time.monotonic(), os.sysconf("SC_PAGE_SIZE")
        while not self._stop.wait(SAMPLE_S):
            self.samples.append((time.monotonic() - began_s, int(self._file.read_text().split()[1]) * page))

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def growth(self, settled_s: float) -> float:
        """From what it had when it had settled to what it has at the end, as a share; medians of a tenth each."""
        later = [size for at_s, size in self.samples if at_s >= settled_s] or [size for _, size in self.samples]
        few = max(1, len(later) // 10)
        return statistics.median(later[-few:]) / statistics.median(later[:few]) - 1


# Healthy clients


def alone(url: str, model: str) -> LoadResult:
    """One request at a time, for a moment: what it takes on this machine today."""
    stream = {"model": model, "arrival": "closed", "deadline_ms": DEADLINES_MS[model], "shapes": _shapes(model)}
    workload = {"duration_s": 3.0, "warmup_s": 1.0, "stream": [stream]}
    return run_load(parse_workload(workload, "soak"), url, deadlines="none")


def healthy(url: str, rates: dict[str, float], seconds: float, seed: int) -> LoadResult:
    """Requests at random times, all of them with soft deadlines."""
    streams = [
        {"model": model, "rate": rate, "deadline_ms": DEADLINES_MS[model], "shapes": _shapes(model)}
        for model, rate in rates.items()
    ]
    workload = {"duration_s": seconds, "warmup_s": min(2.0, seconds / 10), "seed": seed, "stream": streams}
    return run_load(parse_workload(workload, "soak"), url, deadlines="soft")


def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    return {"x": OCR_SHAPE} if model == "pp-ocr-cls" else {}


def answers(*results: LoadResult) -> Counter[str]:
    """``model reason`` of all requests, the warm-up's too."""
    return Counter(
        f"{stream.stream.model} {REASONS.get(int(status), status)}"
        for result in results
        for stream in result.streams
        for status in stream.status
    )


# The report


@dataclass(frozen=True)
class Verdict:
    """A promise, whether it was kept, and the figures."""

    promise: str
    kept: bool
    figures: str


def judge_latencies(calm: LoadResult, stormy: LoadResult) -> list[Verdict]:
    found = []
    for before, after in zip(calm.streams, stormy.streams, strict=True):
        a, b = before.figures.p99_s, after.figures.p99_s
        times = b / a if a and b else float("nan")
        figures = f"{(a or 0) * 1e3:.1f} -> {(b or 0) * 1e3:.1f} ms, {times:.2f} times"
        promise = f"p99 of {before.stream.model} within {MOST_TIMES:g} times of the calm one"
        found.append(Verdict(promise, times <= MOST_TIMES, figures))
    return found


def judge_books(ledger: Ledger, healthy_ones: Counter[str], books: Books, metrics: dict[str, float]) -> list[Verdict]:
    """Client and server must agree on every model and reason; only abandoned requests may have ended either way."""
    saw, counted = ledger.counted + healthy_ones, books.counted
    gaps = {key: counted[key] - saw[key] for key in sorted({*saw, *counted}) if counted[key] != saw[key]}
    spread = {model: sum(gap for key, gap in gaps.items() if key.split()[0] == model) for model in ledger.abandoned}
    wrong = [
        f"{key}: clients {saw[key]}, server {counted[key]}"
        for key, gap in gaps.items()
        if gap < 0 or key.split()[0] not in ledger.abandoned
    ]
    known = sum(saw.values())
    success = sum(count for key, count in counted.items() if key.endswith(" success"))
    others = sum(counted.values()) - success
    told = (
        metric_sum(metrics, "nv_inference_request_success"),
        metric_sum(metrics, "nv_inference_request_failure") + metric_sum(metrics, "weft_requests_refused_total"),
    )
    return [
        Verdict(
            "clients and server agree on every model and reason", not wrong, "; ".join(wrong) or f"{known} requests"
        ),
        Verdict(
            "abandoned requests were counted at most once",
            all(0 <= spread[model] <= most for model, most in ledger.abandoned.items()),
            ", ".join(f"{model} {spread[model]} of {most}" for model, most in ledger.abandoned.items()),
        ),
        Verdict("/metrics and /weft/state agree", told == (success, others), f"{told} and {(success, others)}"),
    ]


def judge_run(healthy_ones: Counter[str], ledger: Ledger, books: Books) -> list[Verdict]:
    """What holds at any time, however long it ran."""
    internal = books.internal + sum(
        count for key, count in ledger.answers.items() if key.endswith((" 500", " INTERNAL"))
    )
    odd = {key: count for key, count in healthy_ones.items() if not key.endswith(" success")}
    left = f"{books.in_flight} in flight, {books.queued} queued"
    return [
        Verdict("nothing was a 500", internal == 0, f"{internal} internal errors"),
        Verdict("every healthy request has its result", not odd, str(odd or f"{sum(healthy_ones.values())} requests")),
        Verdict(
            "chaotic clients saw only what they should", not ledger.problems, "; ".join(ledger.problems[:3]) or "-"
        ),
        Verdict("nothing is left over", books.in_flight == books.queued == 0, left),
    ]


def judge_memory(watch: Watch, settled_s: float) -> Verdict:
    growth, sizes = watch.growth(settled_s), [size / 2**20 for _, size in watch.samples]
    promise = f"memory grew at most {MOST_GROWTH:.0%} after the first {settled_s:.0f} s"
    return Verdict(promise, growth <= MOST_GROWTH, f"{growth:+.1%}, {min(sizes):.0f} to {max(sizes):.0f} MiB")


def _mean_s(result: LoadResult) -> float:
    found = result.streams[0].figures.mean_s
    assert found is not None, "a model was never answered"
    return found


def settled_books(url: str) -> Books:
    """The books once nothing is under way, or after a while."""
    until_s = time.monotonic() + PATIENCE_S
    while (books := read_books(url)).in_flight and time.monotonic() < until_s:
        time.sleep(0.1)
    return books


def soak(minutes: float) -> dict[str, Any]:
    """The whole run."""
    total_s = minutes * 60
    calm_s = min(60.0, total_s / 4)
    settled_s = min(SETTLED_S, total_s / 4)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        grpc_port = int(probe.getsockname()[1])
    context = multiprocessing.get_context("spawn")
    begin, results = context.Event(), context.Queue()
    with tempfile.TemporaryDirectory() as scratch:
        repository = write_repository(Path(scratch) / "models")
        with ServerProcess(str(repository), "pp-ocr-cls", "--lanes", "1", f"--grpc-port={grpc_port}") as server:
            port = int(server.url.rpartition(":")[2])
            before = [alone(server.url, model) for model in LOAD]
            rates = {model: share / _mean_s(each) for (model, share), each in zip(LOAD.items(), before, strict=True)}
            rates["mlp"] = MLP_PER_S
            storm = context.Process(target=chaos_process, args=(port, grpc_port, total_s - calm_s, begin, results))
            storm.start()
            results.get(timeout=PATIENCE_S)
            calm = healthy(server.url, rates, calm_s, seed=0)
            averages = [os.getloadavg()[0]]
            watch = Watch(server.pid)
            begin.set()
            stormy = healthy(server.url, rates, total_s - calm_s, seed=1)
            averages.append(os.getloadavg()[0])
            ledger: Ledger = results.get(timeout=2 * PATIENCE_S)
            storm.join()
            watch.stop()
            books, metrics = settled_books(server.url), read_metrics(server.url)
            code = server.stop()
    healthy_ones = answers(*before, calm, stormy)
    verdicts = judge_run(healthy_ones, ledger, books) + judge_books(ledger, healthy_ones, books, metrics)
    verdicts += [*judge_latencies(calm, stormy), judge_memory(watch, settled_s)]
    faults = [line for line in server.output if "Traceback" in line]
    told = f"exit {code}, {len(faults)} tracebacks"
    verdicts.append(Verdict("SIGTERM ends it with 0, and its log has no traceback", code == 0 and not faults, told))
    show(ledger, verdicts, list(server.output) if faults else [])
    print("load averages of the machine after the calm and after the storm:", *(f"{each:.2f}" for each in averages))
    return {
        "minutes": minutes,
        "rates_per_s": rates,
        "load_averages": averages,
        "verdicts": [asdict(each) for each in verdicts],
        "answers": dict(sorted(ledger.answers.items())),
        "problems": ledger.problems,
        "calm": calm.as_dict(latencies=False),
        "stormy": stormy.as_dict(latencies=False),
        "memory_bytes": watch.samples,
    }


def show(ledger: Ledger, verdicts: list[Verdict], log: list[str]) -> None:
    console = Console(width=150)
    saw = Table(title="what chaotic clients saw", title_justify="left", box=None, pad_edge=False)
    for column in ("kind", "status", "times"):
        saw.add_column(column, justify="left" if column == "kind" else "right")
    for key, count in sorted(ledger.answers.items()):
        kind, _, status = key.rpartition(" ")
        saw.add_row(kind, status if status != "0" else "none", str(count))
    console.print(saw)
    table = Table(title="verdicts", title_justify="left", box=None, pad_edge=False)
    for column in ("", "promise", "figures"):
        table.add_column(column, overflow="fold")
    for each in verdicts:
        table.add_row("yes" if each.kept else "NO", each.promise, each.figures)
    console.print(table)
    for line in log[-60:]:
        console.print(line, markup=False, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--save", action="store_true", help=f"write benchmarks/results/{RESULTS.name}")
    arguments = parser.parse_args()
    about = machine("onnxruntime")
    found = soak(arguments.minutes)
    if arguments.save:
        write_json(RESULTS, {"machine": about, **found})
    raise SystemExit(0 if all(each["kept"] for each in found["verdicts"]) else 1)


if __name__ == "__main__":
    main()
