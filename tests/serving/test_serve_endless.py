"""A request that never ends holds a lane, and nothing else: health, other models, its deadline, the server's end."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.serving import live
from tests.serving.test_serve_life import Background, process
from tests.serving.test_serve_models import Refused, infer, packed, send, state, until

ENDLESS = 10**12
"""Turns of a loop that nobody would wait for."""


def turning(path: Path) -> Path:
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


def asked(turns: int) -> dict[str, np.ndarray]:
    return {"turns": np.array([turns]), "x": np.arange(4, dtype=np.float32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    turning(tmp_path / "turning.onnx")
    live.mlp(tmp_path / "mlp.onnx")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder, grpc_port=None, lanes=2, drain_s=0.0) as running:
        yield running


def busy(server: live.Live) -> int:
    return sum(lane["busy"] for lane in state(server)["lanes"])


@contextlib.contextmanager
def one_that_never_ends(server: live.Live, **parameters: Any) -> Iterator[socket.socket]:
    """Its client, who waits until the block ends and then goes away."""
    body, headers = packed(asked(ENDLESS), **parameters)
    lines = [
        f"{name}: {value}" for name, value in {**headers, "Host": "localhost", "Content-Length": len(body)}.items()
    ]
    head = "\r\n".join(["POST /v2/models/turning/infer HTTP/1.1", *lines, "", ""])
    with socket.create_connection(("127.0.0.1", server.server.http_port or 0), timeout=60) as client:
        client.sendall(head.encode() + body)
        until(lambda: busy(server), "a lane has it")
        yield client


def answers(server: live.Live | str) -> bool:
    """Whether the other model is served."""
    y = infer(server, "mlp", {"x": np.ones((1, 64), np.float32)})["y"]
    return y.shape == (1, 10)


def test_a_loop_of_few_turns_is_answered(server: live.Live) -> None:
    for turns in (0, 1, 3):
        assert np.array_equal(infer(server, "turning", asked(turns))["y"], np.arange(4))


def test_beside_it_health_and_other_models_are_answered(server: live.Live) -> None:
    assert answers(server)
    with one_that_never_ends(server):
        assert send(server, "GET", "/v2/health/live").status == 200
        assert answers(server)
        assert busy(server) == 1


def test_it_is_stopped_when_its_client_goes_away(server: live.Live) -> None:
    with one_that_never_ends(server):
        assert busy(server) == 1
    until(lambda: busy(server) == 0, "the lane is free")
    assert np.array_equal(infer(server, "turning", asked(3))["y"], np.arange(4))


def test_it_is_stopped_at_its_deadline(server: live.Live) -> None:
    with pytest.raises(Refused) as refused:
        infer(server, "turning", asked(ENDLESS), timeout=200_000)
    assert refused.value.status == 504
    until(lambda: busy(server) == 0, "the lane is free")
    assert np.array_equal(infer(server, "turning", asked(3))["y"], np.arange(4))


def test_the_end_of_the_server_stops_it_and_it_hears_so(folder: Path) -> None:
    with live.running(folder, grpc_port=None, lanes=1, drain_s=0.0) as server:
        waiting = Background(lambda: infer(server, "turning", asked(ENDLESS)))
        until(lambda: busy(server), "the lane has it")
    with pytest.raises(Refused, match="went down") as refused:
        waiting.result()
    assert refused.value.status == 503


def test_sigterm_ends_a_process_that_computes_it(folder: Path) -> None:
    with process(folder, "--lanes", "2", "--drain-s", "0.1") as (server, address):
        waiting = Background(lambda: infer(address, "turning", asked(ENDLESS)))
        until(lambda: any(lane["busy"] for lane in send(address, "GET", "/weft/state").json()["lanes"]), "it runs")
        assert answers(address)
        server.send_signal(signal.SIGTERM)
        _, errors = server.communicate(timeout=120)
        with pytest.raises(Refused) as refused:
            waiting.result()
    assert refused.value.status == 503
    assert server.returncode == 1  # a request went without its result
    assert "Traceback" not in errors
