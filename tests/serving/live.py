"""A real server for tests: started on a thread of its own, on loopback, stopped by the end of the block.

Time is the test's own where it matters: ``LeapingLoop`` has a clock that can be put forward, and a ``Gate`` holds what
a server computes until the test has seen what it wants to see. ``PATIENCE_S`` is for what must come: only a hang
reaches it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from weft.engine.policies.base import NO_DEADLINE
from weft.runtime.backend import DeviceLane, Ended, StartedStep, Step, StepEnd
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.facets import SegmentTiming
from weft.runtime.isolated.backend import IsolatingBackend
from weft.runtime.isolated.group import WorkerGroup
from weft.serving.config import ServerConfig
from weft.serving.server import Server

BACKEND = "onnxruntime"
"""What the servers of the tests run on (``pytest --backend``)."""

PATIENCE_S = 600.0
"""After that a test that hangs fails instead; none is meant to come near it."""


class LeapingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward: what was to happen until then is due at once, in its order."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        super().__init__()

    def time(self) -> float:
        return super().time() + self._ahead_s

    def leap(self, seconds: float) -> None:
        self._ahead_s += seconds


@dataclass
class Live:
    """A server that runs, and the loop it runs on."""

    server: Server
    loop: LeapingLoop

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.http_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    def call(self, coroutine: Any) -> Any:
        """Run something on the server's loop, and wait for it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    @contextlib.contextmanager
    def leapt(self, seconds: float) -> Iterator[None]:
        """Let the server's timers think that so much time has passed, and its scheduler until the block ends."""
        service = self.server.service
        lanes, before = service.dispatcher.lanes, service.now
        service.now = lanes.now = lambda: before() + round(seconds * 1e9)
        self.loop.call_soon_threadsafe(self.loop.leap, seconds)
        try:
            yield
        finally:
            service.now = lanes.now = before

    def raw(self, request: bytes) -> bytes:
        """Send bytes, say nothing more, and read until the server closes."""
        with socket.create_connection(("127.0.0.1", self.server.http_port or 0), timeout=PATIENCE_S) as connection:
            connection.sendall(request)
            pieces = []
            while piece := connection.recv(65536):
                pieces.append(piece)
            return b"".join(pieces)


@contextlib.contextmanager
def same_lanes(live: Live) -> Iterator[None]:
    """No lane is replaced, however long its segment takes: others wait for it."""
    lanes = live.server.service.dispatcher.lanes
    before = lanes.replace_overrun
    lanes.replace_overrun = lambda: NO_DEADLINE  # type: ignore[method-assign]
    try:
        yield
    finally:
        lanes.replace_overrun = before  # type: ignore[method-assign]


class _Held:
    """A step that begins when a gate opens, if nobody stops it before."""

    onward = None

    def __init__(
        self, opened: threading.Event, begin: Callable[[], StartedStep], end: Callable[[Exception], None]
    ) -> None:
        self._opened, self._begin, self._end = opened, begin, end
        self._run: StartedStep | None = None
        self._stopped = False
        threading.Thread(target=self._wait, name="gate", daemon=True).start()

    def stop(self) -> None:
        self._stopped = True
        if self._run:
            self._run.stop()

    def _wait(self) -> None:
        while not self._opened.wait(0.01):
            if self._stopped:
                self._end(InterruptedError("stopped"))
                return
        self._run = self._begin()
        if self._stopped:
            self._run.stop()


class Gate:
    """Holds batches of so many rows of a loaded model on their lane until it is opened, or until they are stopped.

    To the server they are segments that take very long, and were measured to; with ``foreseen=False`` they were not.
    Meanwhile no lane is replaced: how long a test takes decides nothing.
    """

    def __init__(self, live: Live, model: str, rows: int, *, after: int = 0, foreseen: bool = True) -> None:
        """*after*: so many segments pass."""
        served = live.server.service.library.find(model).served
        assert served is not None
        self._body, self._loaded, self._timing = served.body, served.loaded, served.body.timing
        self._rows, self._after, self._foreseen = rows, after, foreseen
        self._reached, self._opened = threading.Event(), threading.Event()
        self._now, self._same_lanes = live.server.backend.now, same_lanes(live)

    def __enter__(self) -> Gate:
        self._loaded.start = self._start  # type: ignore[method-assign]
        if self._foreseen:
            self._body.timing = self._said_long()
        self._same_lanes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
        self._same_lanes.__exit__(None, None, None)
        del self._loaded.start
        self._body.timing = self._timing

    def wait(self) -> None:
        """Return when something is held."""
        assert self._reached.wait(PATIENCE_S)

    def open(self) -> None:
        self._opened.set()

    def _start(self, step: Step, lane: DeviceLane, ended: Ended, *, here: bool = False) -> StartedStep:
        begin = partial(type(self._loaded).start, self._loaded, step, lane, ended)
        if step.segment < self._after or step.rows != self._rows:
            return begin(here=here)
        self._reached.set()
        return _Held(self._opened, begin, lambda error: ended(StepEnd(self._now(), self._now(), error=error)))

    def _said_long(self) -> SegmentTiming:
        """The timing of the model, with very long segments at the batch size that is held."""
        sizes = range(1, max(self._rows, self._loaded.batching.max_batch) + 2)
        times_s = {size: self._timing.times_at(size) for size in sizes}
        return replace(self._timing, times_s=times_s | {self._rows: (100.0,) * len(self._loaded.segments)})


@contextlib.contextmanager
def running(*models: str | Path, stop: bool = True, **settings: Any) -> Iterator[Live]:
    """A server over these models, which are cut and measured first; ports are chosen by the system."""
    usual = {
        "http_port": 0,
        "grpc_port": 0,
        "lanes": 1,
        "drain_s": PATIENCE_S,
        "backend": BACKEND,
        "learn_s": PATIENCE_S,
        "learn_first": settings.get("learn_s", PATIENCE_S) > 0,
        "max_compute_s": 0.0,
    }
    config = ServerConfig(models=tuple(map(str, models)), **(usual | settings))
    loop = LeapingLoop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()

    async def start() -> Server:
        server = Server(config)
        await server.start()
        return server

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(PATIENCE_S)
        try:
            yield Live(server, loop)
        finally:
            if stop:
                asyncio.run_coroutine_threadsafe(server.stop(), loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


def save(graph: onnx.GraphProto, path: Path) -> Path:
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    return path


def mlp(path: Path, *, features: int = 64, hidden: int = 128, classes: int = 10, seed: int = 0) -> Path:
    """A small network with a free batch dimension and random weights: x -> y."""
    rng = np.random.default_rng(seed)
    weights = {
        "w1": rng.normal(size=(features, hidden)).astype(np.float32) / 8,
        "b1": rng.normal(size=hidden).astype(np.float32),
        "w2": rng.normal(size=(hidden, classes)).astype(np.float32) / 8,
    }
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h1"]),
        helper.make_node("Add", ["h1", "b1"], ["h2"]),
        helper.make_node("Relu", ["h2"], ["h3"]),
        helper.make_node("MatMul", ["h3", "w2"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "mlp",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", features])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", classes])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return save(graph, path)


def heavy(path: Path, *, layers: int = 24, width: int = 512, rows: int = 64, seed: int = 0) -> Path:
    """A chain of matrix products that takes tens of milliseconds and cuts well: x -> y."""
    rng = np.random.default_rng(seed)
    nodes, weights, last = [], [], "x"
    for layer in range(layers):
        name = "y" if layer == layers - 1 else f"h{layer}"
        weight = rng.normal(size=(width, width)).astype(np.float32) / np.sqrt(width).astype(np.float32)
        weights.append(numpy_helper.from_array(weight, f"w{layer}"))
        nodes += [
            helper.make_node("MatMul", [last, f"w{layer}"], [f"p{layer}"]),
            helper.make_node("Tanh", [f"p{layer}"], [name]),
        ]
        last = name
    shape = [rows, width]
    graph = helper.make_graph(
        nodes,
        "heavy",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        weights,
    )
    return save(graph, path)


@contextlib.contextmanager
def serve_process(folder: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """``weft serve`` as users run it, once it is ready, and its address."""
    command = [sys.executable, "-c", "from weft.cli.main import main; main()", "serve", str(folder)]
    command += ["--http-port", "0", "--grpc-port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        for line in server.stdout:
            if found := re.search(r"http://(\S+)", line):
                break
        else:
            raise AssertionError(server.stderr.read() if server.stderr else "")
        yield server, found[1]
    finally:
        server.kill()
        server.communicate()


def worker_group(server: Live, name: str) -> WorkerGroup:
    """The worker processes that an isolation group of a server runs in."""
    backend = server.server.backend
    assert isinstance(backend, IsolatingBackend)
    return backend.groups()[name]


def device_worker(server: Live) -> Any:
    """The worker process of the device's twin."""
    return server.server.service.library.backend.groups()[TWIN].worker
