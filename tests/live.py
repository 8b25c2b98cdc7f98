"""A real server for tests: started on a thread of its own, on loopback, stopped by the end of the block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from weft.serving.config import ServerConfig
from weft.serving.server import Server


@dataclass
class Live:
    """A server that runs, and the loop it runs on."""

    server: Server
    loop: asyncio.AbstractEventLoop

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
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(60)

    def raw(self, request: bytes) -> bytes:
        """Send bytes, say nothing more, and read until the server closes."""
        with socket.create_connection(("127.0.0.1", self.server.http_port or 0), timeout=60) as connection:
            connection.sendall(request)
            pieces = []
            while piece := connection.recv(65536):
                pieces.append(piece)
            return b"".join(pieces)


@contextlib.contextmanager
def running(*models: str | Path, stop: bool = True, **settings: Any) -> Iterator[Live]:
    """A server over these models; ports are chosen by the system."""
    config = ServerConfig(
        models=tuple(map(str, models)), **({"http_port": 0, "grpc_port": 0, "lanes": 1, "drain_s": 60.0} | settings)
    )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server", daemon=True)
    thread.start()

    async def start() -> Server:
        server = Server(config)
        await server.start()
        return server

    try:
        server = asyncio.run_coroutine_threadsafe(start(), loop).result(120)
        try:
            yield Live(server, loop)
        finally:
            if stop:
                asyncio.run_coroutine_threadsafe(server.stop(), loop).result(120)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
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
