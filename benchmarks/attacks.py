"""Attacks on a server, one kind at a time: the models that they need, and clients that attack until they are stopped.

Each attack keeps one hostile request at a time in flight (attacks by idle connections or uploads: as many as their
description says) and sends the next one as soon as it has ended. ``under_attack`` measures the effect on other clients.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
from chaos import infer_tensors, post, write_chain, write_mlp
from hostile_grpc import messages
from hostile_json import requests
from hostile_models import ENDLESS, products_for, write_expand, write_loop, write_slow_load
from processes import WorkerKiller

EXPANDED = (50_000, 30_000)
"""What the bomb makes of one number, where there is memory for it: 6 GB."""
LOAD_S = 46.0
JSON_BYTES = 30 << 20
IDLE, UPLOADS = 1024, 10
UPLOAD_BYTES, AT_ONCE_BYTES, DRIP_BYTES, DRIP_S = 200 << 20, 20 << 20, 1024, 0.1
KILL_S = 2.0
ALWAYS = ("T", "P")
LARGE_S, LARGEST_S = 0.25, 1.0
"""How long an answer about health may take while 60 MB come, and 256 MiB, in one piece."""
LARGEST_BYTES = (256 << 20) - 4096


class Attack(NamedTuple):
    """One kind, and what it does."""

    name: str
    what: str
    modes: tuple[str, ...] = ALWAYS
    health_s: float = 0.1
    """How long an answer about health may take meanwhile."""


ATTACKS = {
    attack.name: attack
    for attack in (
        Attack("loop", f"a Loop whose trip count is an input, sent {ENDLESS:.0e}"),
        Attack("expand", "an Expand to 50000 x 30000 (less where memory is short), then its mean"),
        Attack("warm-up", "loads a model of which no run ever ends"),
        Attack("load", f"loads a file of 2 kB that ONNX Runtime itself needs about {LOAD_S:g} s to open"),
        Attack("json", "30 MB of JSON numbers"),
        Attack("json-parts", "60 MB of JSON: small objects, lists and keys, many, nested or repeated", ALWAYS, LARGE_S),
        Attack("json-text", "60 MB of JSON: strings, escapes, spaces, bytes that are none of it", ALWAYS, LARGE_S),
        Attack("json-numbers", "60 MB of JSON: short numbers, one long number, NaN", ALWAYS, LARGE_S),
        Attack("grpc", "60 MB of gRPC: very many fields of every kind", ALWAYS, LARGE_S),
        Attack("largest", "256 MiB of JSON and of gRPC, of every kind in turn", ALWAYS, LARGEST_S),
        Attack("idle", f"{IDLE} connections that say nothing"),
        Attack("uploads", f"{UPLOADS} uploads of 200 MB: 20 MB at once, then 1 kB every 0.1 s"),
        Attack("kills", f"a worker killed every {KILL_S:g} s", modes=("P",)),
    )
}


# Models


def write_models(folder: Path) -> Path:
    """The others' models, those that are attacked, and those that come only when an attacker asks for them."""
    folder.mkdir(parents=True, exist_ok=True)
    write_mlp(folder / "mlp.onnx")
    write_chain(folder / "chain.onnx")
    write_mlp(folder / "wide.onnx")
    write_loop(folder / "loop.onnx")
    write_expand(folder / "expand.onnx")
    write_loop(folder / "warm-up.onnx", endless=True)
    write_slow_load(folder / "load.onnx", products_for(LOAD_S))
    settings = {"mlp": "slo_ms = 50", "chain": "slo_ms = 500", "warm-up": "preload = false", "load": "preload = false"}
    for name, text in settings.items():
        (folder / f"{name}.toml").write_text(text + "\n")
    return folder


# Requests


def loop_request(turns: int = ENDLESS, **parameters: Any) -> bytes:
    return infer_tensors("loop", {"turns": np.array([turns]), "x": np.arange(4, dtype=np.float32)}, **parameters)


def expand_request(shape: tuple[int, int], **parameters: Any) -> bytes:
    return infer_tensors("expand", {"x": np.ones(1, np.float32), "shape": np.array(shape)}, **parameters)


def json_request(size: int = JSON_BYTES) -> bytes:
    """Rows of 64 numbers in so many bytes of JSON, about."""
    row = ",".join(f"{number / 64:.6f}" for number in range(64))
    rows = max(1, size // (len(row) + 1))
    head = f'{{"inputs":[{{"name":"x","shape":[{rows},64],"datatype":"FP32","data":['
    return post("/v2/models/wide/infer", f"{head}{','.join([row] * rows)}]}}]}}".encode())


def expanded_shape() -> tuple[int, int]:
    """As large as said, or a quarter of the memory that is free."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    rows, columns = EXPANDED
    return min(rows, free // 4 // (columns * 4)), columns


# Attackers


@dataclass
class Attacker:
    """Clients of one kind, and what they were answered."""

    port: int
    grpc_port: int
    pid: int
    """The server's, for those that end its workers."""
    stopped: Callable[[], bool]
    tally: Counter[str] = field(default_factory=Counter)
    """What came back -> how often."""

    async def run(self, name: str) -> None:
        """Attack until it is told to stop."""
        attack = asyncio.create_task(getattr(self, name.replace("-", "_"))())
        while not self.stopped() and not attack.done():
            await asyncio.sleep(0.1)
        attack.cancel()
        await asyncio.gather(attack, return_exceptions=True)
        if not attack.cancelled() and (error := attack.exception()):
            self.tally[f"gave up: {error}"] += 1

    async def loop(self) -> None:
        await self._repeat(loop_request())

    async def expand(self) -> None:
        await self._repeat(expand_request(expanded_shape()))

    async def json(self) -> None:
        await self._repeat(json_request())

    async def json_parts(self) -> None:
        await self._send_in_turn(requests("json-parts"))

    async def json_text(self) -> None:
        await self._send_in_turn(requests("json-text"))

    async def json_numbers(self) -> None:
        await self._send_in_turn(requests("json-numbers"))

    async def grpc(self) -> None:
        async with self._channel() as call:
            for _, make in messages():
                await self._call(call, make())

    async def largest(self) -> None:
        bodies = [requests(kind, LARGEST_BYTES) for kind in ("json-parts", "json-text", "json-numbers")]
        async with self._channel() as call:
            for number, (_, make) in enumerate(messages(LARGEST_BYTES)):
                await self._call(call, make())
                await self._send(next(bodies[number % len(bodies)])())

    async def warm_up(self) -> None:
        await self._load("warm-up")

    async def load(self) -> None:
        await self._load("load")

    async def idle(self) -> None:
        """Keeps so many connections; whichever is closed is opened again."""
        lines: dict[int, asyncio.StreamWriter] = {}
        with contextlib.ExitStack() as stack:
            while True:
                for place in range(IDLE):
                    if place in lines and not lines[place].transport.is_closing():
                        continue
                    self.tally["closed by the server"] += place in lines
                    with contextlib.suppress(OSError):
                        _, lines[place] = await asyncio.open_connection("127.0.0.1", self.port)
                        stack.callback(lines[place].transport.abort)
                        self.tally["opened"] += 1
                await asyncio.sleep(1.0)

    async def uploads(self) -> None:
        """Announce much, send a part at once, and the rest a little at a time."""
        await asyncio.gather(*(self._upload() for _ in range(UPLOADS)))

    async def kills(self) -> None:
        """Ends one of the server's workers every now and then."""
        killer = WorkerKiller(self.pid)
        while True:
            await asyncio.sleep(KILL_S)
            killer.kill()
            self.tally["killed"] = len(killer.kills)

    async def _repeat(self, request: bytes) -> None:
        while True:
            await self._send(request)

    async def _send_in_turn(self, endless: Iterator[Callable[[], bytes]]) -> None:
        for make in endless:
            await self._send(make())

    async def _send(self, request: bytes) -> None:
        status = await self.ask(request)
        self.tally[str(status or "no answer")] += 1
        if not status:
            await asyncio.sleep(0.1)

    @contextlib.asynccontextmanager
    async def _channel(self) -> AsyncIterator[Any]:
        """Calls ``ModelInfer`` over one connection."""
        options = [("grpc.max_send_message_length", -1)]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}", options) as channel:
            yield channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

    async def _call(self, call: Any, message: bytes) -> None:
        try:
            await call(message)
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
        self.tally[code] += 1
        if code == "UNAVAILABLE":
            await asyncio.sleep(0.1)

    async def _load(self, model: str) -> None:
        while True:
            for verb in ("load", "unload"):
                status = await self.ask(post(f"/v2/repository/models/{model}/{verb}", b""))
                self.tally[f"{verb} {status or 'no answer'}"] += 1
            await asyncio.sleep(0.1)

    async def _upload(self) -> None:
        while True:
            request = post("/v2/models/wide/infer", b" " * AT_ONCE_BYTES, length=UPLOAD_BYTES)
            status = await self.ask(request, drip=True)
            self.tally[str(status or "no answer")] += 1
            await asyncio.sleep(0.1)

    async def ask(self, request: bytes, *, drip: bool = False) -> int:
        """The status of the answer; 0 where there is none. *drip*: go on sending until it comes."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)
        except OSError:
            return 0
        dripping = asyncio.create_task(_drip(writer)) if drip else None
        try:
            writer.write(request)
            return int((await reader.readuntil(b"\r\n\r\n"))[9:12])
        except (OSError, asyncio.IncompleteReadError):
            return 0
        finally:
            if dripping:
                dripping.cancel()
            writer.transport.abort()


async def _drip(writer: asyncio.StreamWriter) -> None:
    """Send a little more, again and again."""
    with contextlib.suppress(OSError):
        while True:
            await asyncio.sleep(DRIP_S)
            writer.write(b" " * DRIP_BYTES)
            await writer.drain()


def attack_process(name: str, ports: tuple[int, int], pid: int, begin: Any, stop: Any, results: Any) -> None:
    """One attack in a process of its own, so that it does not hold up those who measure; it waits to be told."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attacker = Attacker(*ports, pid, stop.is_set)
    results.put(None)
    begin.wait()
    asyncio.run(attacker.run(name))
    results.put(attacker.tally)
