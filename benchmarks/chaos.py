"""Eighteen kinds of misbehaving clients, the small models that they need, and the answers that each may get.

They disconnect half-way, send garbage, declare wrong shapes, stall, flood a queue, never read, send numbers that make a
model large or let it run for ever, values that no network was trained for and new shapes, and load and unload a model
all the time. ``Ledger`` records their answers; ``soak`` compares it with the server's counters.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
from hostile_models import ENDLESS, write_expand, write_loop, write_shapes
from onnx import TensorProto, helper, numpy_helper

PATIENCE_S = 60.0
"""No answer may take a chaotic client longer; a stalled request is ended by the server after half of it."""


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
    """The healthy clients' models, one with a short queue to flood, one that comes and goes, and the hostile ones."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("mlp", "flooded", "guest"):
        write_mlp(folder / f"{name}.onnx")
    (folder / "flooded.toml").write_text("queue_size = 16\n")
    write_chain(folder / "chain.onnx")
    write_loop(folder / "loop.onnx")
    write_expand(folder / "expand.onnx")
    write_shapes(folder / "shapes.onnx")
    return folder


SHAPES = {"mlp": (1, 64), "flooded": (1, 64), "guest": (1, 64), "chain": (64, 512)}


# Requests of chaotic clients


def post(path: str, body: bytes, head: str = "", length: int | None = None) -> bytes:
    """A request, whose stated length may be a lie."""
    stated = len(body) if length is None else length
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{head}Content-Length: {stated}\r\n\r\n".encode() + body


def infer(model: str, **parameters: Any) -> bytes:
    """A request that is as it should be, with binary tensors both ways."""
    return infer_tensors(model, {"x": np.zeros(SHAPES[model], np.float32)}, **parameters)


def infer_tensors(model: str, tensors: dict[str, Any], **parameters: Any) -> bytes:
    """A request for a model with these inputs, as binary tensors both ways."""
    inputs = [
        {
            "name": name,
            "shape": list(value.shape),
            "datatype": {"float32": "FP32", "int64": "INT64"}[str(value.dtype)],
            "parameters": {"binary_data_size": value.nbytes},
        }
        for name, value in tensors.items()
    ]
    text = json.dumps({"parameters": {"binary_data_output": True, **parameters}, "inputs": inputs}).encode()
    raw = b"".join(value.tobytes() for value in tensors.values())
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
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"POST /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
    b"GET /%zz HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nExpect: money\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200) + b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
"""Bytes that never become a request."""

MISTAKEN = (
    post("/v2/models/mlp/infer", _tensor(), "Inference-Header-Content-Length: many\r\n"),
    post("/v2/models/mlp/infer", _tensor(), "Content-Encoding: br\r\n"),
    post("/v2/models/mlp/infer", b"not packed", "Content-Encoding: gzip\r\n"),
    post("/v2/models/mlp/infer", gzip.compress(_tensor())[:-9], "Content-Encoding: gzip\r\n"),
    b"GET /v2/models/mlp/infer HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v2/models/mlp/other HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /weft/timeline?since=never HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"DELETE /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    post("/v2/repository/index", b"{"),
    post("/v2/repository/models/nobody/load", b""),
)
"""Requests that are turned down before they meet a model."""

GRPC_GARBAGE = (
    b"\x00" * 64,
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
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
    killed: list[tuple[float, float]] = field(default_factory=list)
    """When requests were sent and answered that a worker took with it, as the answer says; on the system's clock."""

    def count(self, model: str, status: int, said: str = "") -> None:
        self.counted[f"{model} {reason(status, said)}"] += 1

    def note(self, kind: str, client: Client, status: int, allowed: tuple[int, ...]) -> None:
        """An answer; 0 is an end of the connection without one."""
        killed = reason(status, client.said) == KILLED
        self.answers[f"{kind} {KILLED if killed else status}"] += 1
        if killed:
            self.killed.append((client.began_s, time.time()))
        elif status not in allowed and len(self.problems) < 100:
            self.problems.append(f"{kind}: status {status}, expected {' or '.join(map(str, allowed))}")


REASONS = {200: "success", 400: "bad_request", 404: "not_found", 503: "queue_full", 504: "deadline"}
"""Status -> what the server calls it; both of its words for deadlines are one here."""
KILLED = "killed"
"""The reason of requests that were on a worker when it ended."""
NO_MODEL = "-"
"""Stands for the model of requests that met none."""


def reason(status: int, said: str = "") -> str:
    """What the server calls it when it answers so, and *said* this."""
    if status >= 500 and "worker" in said:
        return KILLED
    return REASONS.get(status, str(status))


class Client:
    """One connection to the server."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.began_s, self.said = time.time(), ""

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with contextlib.suppress(OSError):  # whoever was refused may find the line closed
            await self.writer.drain()

    async def answer(self, pause_s: float = 0.0) -> int:
        """The status of the next answer, read to its end; 0 if the connection ends first. *pause_s*: per 4 KiB.

        What an answer says that is not a 200 is in ``said``.
        """
        try:
            async with asyncio.timeout(PATIENCE_S):
                head = await self.reader.readuntil(b"\r\n\r\n")
                status = int(head[9:12])
                length = re.search(rb"content-length: (\d+)", head.lower())
                left = int(length[1]) if length else 0
                while left:
                    piece = await self.reader.readexactly(min(left, 4096 if pause_s else left))
                    left -= len(piece)
                    self.said = "" if status == 200 else piece.decode("utf-8", "replace")
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

    async def exchange(self, kind: str, request: bytes, *allowed: int, model: str | None = None) -> int:
        """Send one request on a connection of its own, and note its answer; *model* is whose books it belongs in."""
        async with self.client() as client:
            await client.send(request)
            status: int = await client.answer()
        self.ledger.note(kind, client, status, allowed)
        if model is not None:
            self.ledger.count(model, status, client.said)
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
        self.ledger.note("pipelines", client, status, (200,))
        self.ledger.count("mlp", status, client.said)
        self.ledger.abandoned["mlp"] += 2

    async def garbage(self) -> None:
        """Sends what is no HTTP at all."""
        blob = self.rng.choice((*MALFORMED, self.rng.randbytes(self.rng.randrange(1, 5000)) + b"\r\n\r\n"))
        async with self.client() as client:
            await client.send(blob)
            client.writer.write_eof()
            self.ledger.note("garbage", client, await client.answer(), (0, 400, 417, 431, 501, 505))

    async def unfit(self) -> None:
        """Sends what does not fit the model."""
        await self.exchange("unfit", post("/v2/models/mlp/infer", self.rng.choice(UNFIT)), 400, model="mlp")

    async def mistaken(self) -> None:
        """Asks for what there is not."""
        await self.exchange("mistaken", self.rng.choice(MISTAKEN), 400, 404, 405)

    async def unknown(self) -> None:
        """Wants a model that is not there."""
        model = self.rng.choice(("nobody", "mlp/versions/99", "%2e%2e", "x" * 300))
        await self.exchange("unknown", post(f"/v2/models/{model}/infer", _tensor()), 404, model=NO_MODEL)

    async def boasts(self) -> None:
        """Sends headers, or announces a body, beyond all limits."""
        if self.rng.random() < 0.5:
            request, status = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", 431
        else:
            request, status = post("/v2/models/mlp/infer", b"", length=10**11), 413
        await self.exchange("boasts", request, status)

    async def stalls(self) -> None:
        """Sends half a body and waits."""
        whole = infer("chain")
        async with self.client() as client:
            await client.send(whole[: len(whole) // 2])
            if self.stall:
                self.ledger.note("stalls", client, await client.answer(), (408,))

    async def floods(self) -> None:
        """Sends more at once than the queue has places, behind work that keeps the lane busy."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self.client()) for _ in range(48)]
            for client in clients:
                client.writer.write(infer("flooded"))
            for client in clients:
                status = await client.answer()
                self.ledger.note("floods", client, status, (200, 503))
                self.ledger.count("flooded", status, client.said)

    async def reads_slowly(self) -> None:
        """Takes a large answer a little at a time."""
        async with self.client(receive_bytes=4096) as client:
            await client.send(infer("chain"))
            status = await client.answer(pause_s=0.005)
        self.ledger.note("reads slowly", client, status, (200, 503))
        self.ledger.count("chain", status, client.said)

    async def hurries(self) -> None:
        """Wants a result within less time than it takes on any machine."""
        await self.exchange("hurries", infer("chain", timeout=self.rng.choice((1, 50, 500))), 503, 504, model="chain")

    async def loops(self) -> None:
        """Asks for turns without end, and a result very soon."""
        tensors = {"turns": np.array([ENDLESS]), "x": np.zeros(4, np.float32)}
        request = infer_tensors("loop", tensors, timeout=self.rng.randrange(10_000, 40_000))
        await self.exchange("loops", request, 504, model="loop")

    async def swells(self) -> None:
        """Has a number made as large as some megabytes."""
        shape = np.array([self.rng.randrange(1, 4000), self.rng.randrange(1, 2000)])
        request = infer_tensors("expand", {"x": np.ones(1, np.float32), "shape": shape})
        await self.exchange("swells", request, 200, model="expand")

    async def poisons(self) -> None:
        """Sends values that no network was trained for, to a model that others are asking too."""
        value = self.rng.choice((np.nan, np.inf, -np.inf, 3e38, 1e-45, 200.0))
        request = infer_tensors("mlp", {"x": np.full((self.rng.randrange(1, 9), 64), value, np.float32)})
        await self.exchange("poisons", request, 200, model="mlp")

    async def new_shapes(self) -> None:
        """Sends an image of a size that nobody has sent before."""
        shape = (self.rng.randrange(1, 4), 3, self.rng.randrange(1, 200), self.rng.randrange(1, 200))
        request = infer_tensors("shapes", {"x": np.zeros(shape, np.float32)})
        await self.exchange("new shapes", request, 200, model="shapes")

    async def comes_and_goes(self) -> None:
        """Unloads a model and loads it again, while others ask for it."""
        asking = [asyncio.create_task(self._guest()) for _ in range(4)]
        await self.exchange("unloads", post("/v2/repository/models/guest/unload", b""), 200)
        asking += [asyncio.create_task(self._guest()) for _ in range(4)]
        await self.exchange("loads", post("/v2/repository/models/guest/load", b""), 200)
        await asyncio.gather(*asking)
        await self.exchange("guest after", infer("guest"), 200, model="guest")

    async def _guest(self) -> None:
        async with self.client() as client:
            await client.send(infer("guest"))
            status: int = await client.answer()
        self.ledger.note("guest", client, status, (200, 404, 503))
        why = reason(status, client.said)
        self.ledger.counted[f"guest {'unloaded' if why == 'queue_full' else why}"] += 1

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
    "loops": 5.0,
    "swells": 2.0,
    "poisons": 0.2,
    "new_shapes": 0.5,
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
