"""Promises of the server's documentation that are easily broken: who is refused, who is waited for, who leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.hosts import Machine
from tests.serving import live
from tests.serving.factors import multiplying_model
from tests.support.concurrency import until
from tests.support.inference import Refused, infer, model_state, send, state
from weft.base.errors import Expired, InputError
from weft.http.messages import HttpExchange
from weft.serving import library
from weft.serving.config import ServerConfig
from weft.serving.server import Server


def ask(server: live.Live, name: str, **parameters: Any) -> Any:
    return infer(server, name, {"x": np.ones((1, 2), np.float32)}, **parameters)


@pytest.mark.parametrize("policy", ["punctual", "edf", "fifo"])
def test_late_traffic_without_strict_deadlines_does_not_shut_out_strict_requests(monkeypatch, policy):
    one = Machine(monkeypatch, policy)
    slow, fast = one.model([40]), one.model([5])
    for _ in range(20):
        one.send(slow, 1)
    one.run(100)
    urgent = one.send(fast, 60, strict=True)
    one.run()
    assert urgent.fate == "served"
    one.close()


def test_under_edf_what_is_late_goes_first_where_it_is_kept_and_admission_knows(monkeypatch):
    one = Machine(monkeypatch, "edf", late="keep")
    slow, fast = one.model([40]), one.model([5])
    for _ in range(20):
        one.send(slow, 1)
    one.run(100)
    with pytest.raises(Expired, match="cannot be met"):
        one.send(fast, 60, strict=True)
    one.run()
    one.close()


def test_a_batch_does_not_wait_for_others_beyond_its_deadline(monkeypatch):
    one = Machine(monkeypatch, "punctual")
    batched = one.model([10], [12], batch_timeout_ms=200)
    sent = one.send(batched, 50, strict=True)
    one.run()
    assert sent.fate == "served"
    one.close()


def test_a_policy_that_does_not_serve_requests_is_refused_at_the_start(tmp_path: Path) -> None:
    async def start() -> None:
        Server(ServerConfig(models=(str(multiplying_model(tmp_path / "times.onnx", 2)),), policy="weft"))

    with pytest.raises(InputError, match="never run dry"):
        asyncio.run(start())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b", "c"):
        multiplying_model(tmp_path / f"{name}.onnx", 2)
    return tmp_path


def test_models_that_do_not_fit_are_left_for_later_and_send_nobody_away(folder: Path) -> None:
    with live.running(folder, grpc_port=None) as server:
        size = model_state(server, "a")["memory_bytes"]
    with live.running(folder, grpc_port=None, memory_budget_bytes=size + size // 2) as server:
        assert [each["state"] for each in state(server)["models"]] == ["ready", "unloaded", "unloaded"]
        assert server.server.service.library.evictions == 0


def test_one_model_larger_than_the_budget_sends_nobody_away(folder: Path) -> None:
    live.heavy(folder / "large.onnx", layers=2, rows=1)
    (folder / "large.toml").write_text("preload = false\n")
    with live.running(folder, grpc_port=None, memory_budget_bytes=1 << 20) as server:
        before = [each["state"] for each in state(server)["models"]]
        with pytest.raises(Refused, match="memory budget"):
            ask(server, "large")
        assert [each["state"] for each in state(server)["models"]] == before
        assert before.count("ready") == 3


def test_a_model_whose_file_is_gone_leaves_when_the_disk_is_looked_at(folder: Path) -> None:
    with live.running(folder, grpc_port=None) as server:
        ask(server, "c")
        used = state(server)["memory"]["used_bytes"]
        assert state(server)["memory"]["held_bytes"] > used  # the process has more than its models
        (folder / "c.onnx").unlink()
        assert send(server, "POST", "/v2/repository/index").status == 200
        assert state(server)["memory"]["used_bytes"] < used
        with pytest.raises(Refused):
            ask(server, "c")
        ask(server, "a")


def test_a_file_that_cannot_be_loaded_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    multiplying_model(tmp_path / "good.onnx", 2)
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    tried: list[Path] = []
    prepare = library.Library._open
    monkeypatch.setattr(library.Library, "_open", lambda self, entry: tried.append(entry.path) or prepare(self, entry))
    with live.running(tmp_path, grpc_port=None) as server:
        for _ in range(3):
            with pytest.raises(Refused) as refused:
                ask(server, "bad")
            assert refused.value.status == 503
            assert str(tmp_path) not in str(refused.value)
        assert [path.name for path in tried].count("bad.onnx") == 1
        multiplying_model(tmp_path / "bad.onnx", 3)
        assert send(server, "POST", "/v2/repository/models/bad/load").status == 200
        ask(server, "bad")


def test_a_strict_request_does_not_wait_for_a_model_longer_than_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    multiplying_model(tmp_path / "times.onnx", 2)
    (tmp_path / "times.toml").write_text("preload = false\n")
    opened, may_go_on = library.Library._open, threading.Event()

    def held(self: library.Library, entry: Any) -> Any:
        assert may_go_on.wait(live.PATIENCE_S)
        return opened(self, entry)

    monkeypatch.setattr(library.Library, "_open", held)
    with live.running(tmp_path, grpc_port=None) as server:
        with pytest.raises(Refused, match="loading") as refused:
            ask(server, "times", timeout=20_000)
        assert refused.value.status == 504
        may_go_on.set()
        ask(server, "times")


@pytest.mark.parametrize("since", ["1e300", "-1e300", "0", "1e9"])
def test_any_number_of_seconds_is_a_time(folder: Path, since: str) -> None:
    with live.running(folder / "a.onnx", grpc_port=None) as server:
        assert send(server, "GET", f"/weft/timeline?since={since}").status == 200


def test_pages_of_others_cannot_unload_a_model(folder: Path) -> None:
    with live.running(folder / "a.onnx", grpc_port=None) as server:
        path = "/v2/repository/models/a/unload"
        assert send(server, "POST", path, headers={"Origin": "http://elsewhere.example"}).status == 400
        assert model_state(server, "a")["state"] == "ready"
        assert send(server, "POST", path, headers={"Origin": f"http://{server.address}"}).status == 200


@pytest.mark.parametrize(
    ("asked", "host", "origin", "status"),
    [
        ("http://elsewhere.example", "{own}", "", 403),
        ("http://elsewhere.example", "{own}", "http://{own}", 403),
        ("HTTP://user@{own}", "{own}", "", 400),
        ("http://{own}", "elsewhere.example", "http://elsewhere.example", 400),
        ("http://{own}", "elsewhere.example", "http://{own}", 200),
    ],
)
def test_a_target_with_a_host_is_judged_by_it_and_not_by_the_header(
    folder: Path, asked: str, host: str, origin: str, status: int
) -> None:
    with live.running(folder / "a.onnx", grpc_port=None) as server:
        lines = f"POST {asked}/v2/repository/index HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\n"
        lines += (f"Origin: {origin}\r\n" if origin else "") + "Connection: close\r\n\r\n"
        answer = server.raw(lines.format(own=server.address).encode())
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer


def test_a_large_body_that_was_refused_is_not_kept_until_garbage_is_collected(folder: Path) -> None:
    def exchanges() -> list[object]:
        return [
            each for each in gc.get_objects() if type(each) is HttpExchange
        ]  # isinstance looks through weak proxies

    body = b"[" + b" " * (2 << 20) + b"]"
    with live.running(folder / "a.onnx", grpc_port=None) as server:
        gc.collect()
        before = len(exchanges())
        gc.disable()
        try:
            assert send(server, "POST", "/v2/models/a/infer", body).status == 400
            until(lambda: len(exchanges()) <= before, "the body to be let go")
        finally:
            gc.enable()
