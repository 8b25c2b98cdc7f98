"""A model that loops as often as its input says, and requests for it that never end."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from tests.serving import live
from tests.support.concurrency import until
from tests.support.inference import infer, packed, state

ENDLESS = 10**12
"""Turns of a loop that nobody would wait for."""


def loop_model(path: Path) -> Path:
    """A loop that turns as often as a request says, which is not at all or once when it is measured."""
    number = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("Add", ["last", "last"], ["twice"]),
            helper.make_node("Sub", ["twice", "last"], ["next"]),
        ],
        "body",
        [
            number("turn", TensorProto.INT64, []),
            number("go_on", TensorProto.BOOL, []),
            number("last", TensorProto.FLOAT, [4]),
        ],
        [number("still", TensorProto.BOOL, []), number("next", TensorProto.FLOAT, [4])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["turns", "", "x"], ["y"], body=body)],
        "turning",
        [number("turns", TensorProto.INT64, [1]), number("x", TensorProto.FLOAT, [4])],
        [number("y", TensorProto.FLOAT, [4])],
    )
    return live.save(graph, path)


def loop_input(turns: int) -> dict[str, np.ndarray]:
    """A request for so many turns, answered with the numbers 0 to 3."""
    return {"turns": np.array([turns]), "x": np.arange(4, dtype=np.float32)}


def busy_lanes(server: live.Live) -> int:
    """How many lanes compute."""
    return sum(lane["busy"] for lane in state(server)["lanes"])


@contextlib.contextmanager
def endless_request(server: live.Live, **parameters: Any) -> Iterator[socket.socket]:
    """Its client, who waits until the block ends and then goes away."""
    body, headers = packed(loop_input(ENDLESS), **parameters)
    lines = [
        f"{name}: {value}" for name, value in {**headers, "Host": "localhost", "Content-Length": len(body)}.items()
    ]
    head = "\r\n".join(["POST /v2/models/turning/infer HTTP/1.1", *lines, "", ""])
    with socket.create_connection(("127.0.0.1", server.server.http_port or 0), timeout=60) as client:
        client.sendall(head.encode() + body)
        until(lambda: busy_lanes(server), "a lane has it")
        yield client


def other_model_answers(server: live.Live | str) -> bool:
    """Whether the other model is served."""
    y = infer(server, "mlp", {"x": np.ones((1, 64), np.float32)})["y"]
    return y.shape == (1, 10)
