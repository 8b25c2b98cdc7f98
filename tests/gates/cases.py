"""Gates before servers: real ones, and ones that answer as a test has it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from tests.serving.live import PATIENCE_S
from tests.support.concurrency import until
from weft.http.messages import HttpExchange, HttpResponse
from weft.http.server import HttpServer
from weft.serving.config import ServerConfig
from weft_cluster.gates.gate import GateSettings
from weft_cluster.gates.thread import GateThread
from weft_cluster.placing.placement import PlacedMachine, PlacedModel, Placement

Script = Callable[[HttpExchange], "HttpResponse | None"]
"""What a server answers to a request for a result; nothing: it keeps its client waiting."""


def placement(**machines: dict[str, float]) -> Placement:
    """Machine -> model -> its share; a request takes 10 ms of computing and 4 ms of the channel, in turn."""
    placed = []
    for name, shares in machines.items():
        models = tuple(
            PlacedModel(model=model, share=share, rate=10.0 * share, compute=0.1 * share, bandwidth=0.04 * share)
            for model, share in shares.items()
        )
        placed.append(
            PlacedMachine(
                name=name, kind="host", zone="default", models=models, compute=0.1, bandwidth=0.04, other=0.0,
                overlap=1.0, busy=0.1, busy_cap=0.8, memory_bytes=0, memory_limit_bytes=1, limit="compute",
                limited_by=models[0].model,
            )
        )  # fmt: skip
    return Placement(machines=tuple(placed), value=1.0, bound=1.0)


PAIR = placement(left={"net": 0.5}, right={"net": 0.5})


class Scripted:
    """A server that is ready, and answers requests for results by a script; it keeps what it was sent."""

    def __init__(self, script: Script) -> None:
        self.script, self.asked, self.gone = script, list[HttpExchange](), threading.Event()
        self.url = ""
        self.came = threading.Event()
        self.terms: dict[str, Any] = {}
        self.ready, self.looks = 200, 0
        """What it says to who asks whether it is; 0: nothing."""
        self.loop: asyncio.AbstractEventLoop
        self._http: HttpServer

    async def start(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._http = HttpServer(self._handle)
        self.url = f"http://127.0.0.1:{await self._http.start('127.0.0.1', 0)}"

    def _handle(self, exchange: HttpExchange) -> None:
        if exchange.path == "/v2/health/ready":
            self.looks += 1
            if self.ready:
                exchange.respond(HttpResponse(self.ready))
            return
        if not exchange.path.endswith("/infer"):
            exchange.respond(HttpResponse(200, json.dumps({"parameters": self.terms, "path": exchange.path}).encode()))
            return
        self.asked.append(exchange)
        exchange.gone = self.gone.set
        self.came.set()
        answer = self.script(exchange)
        if answer is not None:
            exchange.respond(answer)

    def answer(self, exchange: HttpExchange, response: HttpResponse) -> None:
        """Answer a request that was kept waiting."""
        self.loop.call_soon_threadsafe(exchange.respond, response)

    def end(self) -> None:
        """Break every connection, as a process that is killed does, and listen no more."""
        ended = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (self._http.close(), ended.set()))
        assert ended.wait(PATIENCE_S)


def answering(status: int, body: str = "{}", ahead_us: int = 0, own_us: int = 0) -> Script:
    """Always the same answer."""
    told = (("Weft-Estimate", f"{ahead_us} {own_us} 1"),)
    return lambda exchange: HttpResponse(status, body.encode(), headers=told)


@contextlib.contextmanager
def scripted(*scripts: Script) -> Iterator[list[Scripted]]:
    """Servers on a thread of their own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    servers = [Scripted(script) for script in scripts]
    try:
        for server in servers:
            asyncio.run_coroutine_threadsafe(server.start(), loop).result(PATIENCE_S)
        yield servers
    finally:
        for server in servers:
            server.end()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


@contextlib.contextmanager
def gated(where: Placement, urls: dict[str, list[str]], **settings: Any) -> Iterator[GateThread]:
    """A gate that knows these servers, once it has seen them."""
    face = {"grpc_port": None} | {
        key: settings.pop(key) for key in ("api_key", "keys_file", "grpc_port") if key in settings
    }
    thread = GateThread(where.models, ServerConfig(http_port=0, **face), GateSettings(**settings))
    thread.start()
    try:
        thread.set_servers(known(where, urls))
        until(lambda: all(server["up"] for server in thread.status()["servers"]))
        yield thread
    finally:
        thread.stop()


GATE = """
import json, sys
from weft_cluster.gates.thread import GateThread
from weft_cluster.placing.placement import PlacedMachine
from weft.serving.config import ServerConfig
servers = {url: PlacedMachine.model_validate(each) for url, each in json.loads(sys.stdin.readline()).items()}
gate = GateThread([], ServerConfig(http_port=0, grpc_port=None))
port = gate.start()
gate.set_servers(servers)
print(port, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def gate_process(where: Placement, urls: dict[str, list[str]]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A gate in a process of its own, and its port."""
    process = subprocess.Popen([sys.executable, "-c", GATE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        told = {url: machine.model_dump(mode="json") for url, machine in known(where, urls).items()}
        process.stdin.write(json.dumps(told) + "\n")
        process.stdin.flush()
        port = int(process.stdout.readline())
        until(lambda: asked(port, "/v2/models/net")[0] == 200)
        yield process, port
    finally:
        process.kill()
        process.communicate()


def known(where: Placement, urls: dict[str, list[str]]) -> dict[str, PlacedMachine]:
    """What a gate is told: URL -> its machine."""
    machines = {machine.name: machine for machine in where.machines}
    return {url: machines[name] for name, each in urls.items() for url in each}


def ask(gate: GateThread, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, Any, Any]:
    """Status, JSON and headers of an answer."""
    return asked(gate.gate.port or 0, path, body, method, **headers)


def asked(port: int, path: str, body: Any = None, method: str = "", **headers: str) -> tuple[int, Any, Any]:
    """The same of whoever listens there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
        answer = connection.getresponse()
        text = answer.read()
        told = text and answer.headers["Content-Type"] == "application/json"
        return answer.status, json.loads(text) if told else text, answer.headers
    finally:
        connection.close()


def infer(gate: GateThread, model: str = "net", rows: Any = None, **parameters: Any) -> tuple[int, Any, Any]:
    """Ask for a result."""
    data = rows or [[0.0] * 64]
    inputs = [{"name": "x", "shape": [len(data), 64], "datatype": "FP32", "data": data}]
    return ask(gate, f"/v2/models/{model}/infer", {"inputs": inputs, "parameters": parameters})
