"""A server whose models share a device, on its twin on the CPU: the same answers, several at once, and nothing lost."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, choosing, drawn, leaving, wanted
from tests.serving import live
from tests.serving.live import device_worker
from tests.support.concurrency import until
from tests.support.inference import infer_fp32, infer_json, send
from weft.base.errors import BadRequest, InputError
from weft.runtime.backend import LoadOptions
from weft.runtime.cuda.cpu_twins import TWIN, UNCUT_TWIN
from weft.runtime.cuda.device import TWIN_CUTS
from weft.runtime.cuda.engine import CudaEngine
from weft.runtime.isolated.device import DeviceBackend
from weft.serving import isolation
from weft.serving.config import ServerConfig
from weft.serving.gpu_sharing import UNMEASURED

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
CHAINS = ("short", "middle", "long")
LARGE = (64, 8)
"""A sample of a model that takes more memory than it has nodes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    for layers, name in enumerate(CHAINS, 2):
        chain(found / name / "1" / "model.onnx", layers)
        (found / name / "weft.toml").write_text("max_batch = 4\ngrain_ms = 0.0001\n")
    leaving(found / "leaving" / "1" / "model.onnx")
    (found / "leaving" / "weft.toml").write_text('exits = ["early", "late"]\nexit_threshold = 0.9\nmax_batch = 2\n')
    choosing(found / "choosing" / "1" / "model.onnx")
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("two")
    for layers, name in enumerate(("short", "middle"), 2):
        chain(found / name / "1" / "model.onnx", layers)
        (found / name / "weft.toml").write_text("max_batch = 2\ngrain_ms = 0.0001\n")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder, device=TWIN, policy="abreast") as found:
        yield found


def infer_each(server: live.Live, model: str, feeds: list[dict[str, Any]]) -> list[Any]:
    """The outputs of a model, one request after another."""
    return [infer_json(server, model, feed) for feed in feeds]


def dispatcher_of(server: live.Live) -> Any:
    return server.server.service.dispatcher


def test_processors_and_several_devices_have_no_shares(folder: Path) -> None:
    several = f"{TWIN},{TWIN}"
    with pytest.raises(InputError, match="models run on processors here"), live.running(folder, policy="abreast"):
        pass
    with (
        pytest.raises(InputError, match=f"abreast chooses shares of one GPU, and {several} are several; name one"),
        live.running(folder, policy="abreast", device=several),
    ):
        pass


def test_models_that_share_a_device_say_the_same_as_when_they_do_not(server: live.Live, folder: Path) -> None:
    models = [*CHAINS, "leaving", "choosing"]
    feeds = {name: [drawn(1 if name == "choosing" else 1 + at % 3, at) for at in range(8)] for name in models}
    with live.running(folder, device=TWIN) as unshared:
        right = {name: infer_each(unshared, name, feeds[name]) for name in models}
    with ThreadPoolExecutor(len(models)) as clients:
        found = dict(zip(models, clients.map(lambda name: infer_each(server, name, feeds[name]), models), strict=True))
    assert found == right, "bit for bit"


def test_batches_of_all_models_at_once_are_answered_right(server: live.Live, folder: Path) -> None:
    tasks = [(CHAINS[at % 3], drawn(1 + at % 2, at)) for at in range(48)]
    with ThreadPoolExecutor(12) as clients:
        found = list(clients.map(lambda task: infer_fp32(server, *task), tasks))
    for (name, feed), answer in zip(tasks, found, strict=True):
        right = wanted(folder / name / "1" / "model.onnx", feed)
        np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-6)


def test_there_is_a_lane_for_every_share_and_a_kind_for_every_program(server: live.Live) -> None:
    for rows in (1, 2, 3):
        infer_fp32(server, "short", drawn(rows))
    dispatcher = dispatcher_of(server)
    shares, programs = dispatcher.policy.setting.shares, dispatcher.streams.programs
    assert shares.sms == TWIN_CUTS.sms and len(shares.cuts) >= 2
    assert len(dispatcher.lanes.lanes) == len(shares.lanes) == TWIN_CUTS.streams + 1 + len(TWIN_CUTS.parts)
    assert len(shares.kinds) == len(shares.bodies) == len(programs)
    by_model: dict[str, set[int]] = {}
    for program, body, like in zip(programs, shares.bodies, shares.kinds, strict=True):
        by_model.setdefault(program.model, set()).add(body)
        if program.model == "short":
            assert set(TWIN_CUTS.parts) < like.speeds.keys()
        if program.model == "choosing":
            assert like == UNMEASURED
    assert all(len(bodies) == 1 for bodies in by_model.values())
    assert len(set().union(*by_model.values())) == len(by_model), "no two models have one body"


def test_kinds_follow_the_programs_as_streams_come_and_go(server: live.Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.serving.streams.STREAMS", 4)
    dispatcher, models = dispatcher_of(server), set[str]()
    before = len(dispatcher.streams)
    for at in range(20):
        name, rows = CHAINS[at % 3], 1 + at * 7 % 6
        infer_fp32(server, name, drawn(rows))
        shares = dispatcher.policy.setting.shares
        assert len(shares.kinds) == len(shares.bodies) == len(dispatcher.streams.programs)
        for model in [server.server.service.library.find(each).served for each in CHAINS]:
            for stream in model.streams.values():
                own = range(stream.first_program, stream.first_program + stream.max_batch)
                like = [
                    model.loaded.shares.like.get(stream.rows * size, UNMEASURED)
                    for size in range(1, stream.max_batch + 1)
                ]
                assert [shares.kinds[program] for program in own] == like
                assert len({shares.bodies[program] for program in own}) == 1
                models.add(model.name)
    assert models == set(CHAINS) and len(dispatcher.streams) <= max(4, before)


def test_one_model_is_answered_while_another_one_is_held_on_its_lane(server: live.Live, folder: Path) -> None:
    with live.Gate(server, "long", 1, foreseen=False) as gate, ThreadPoolExecutor(1) as clients:
        held = clients.submit(infer_fp32, server, "long", drawn(1))
        gate.wait()
        answer = infer_fp32(server, "short", drawn(1))
        assert not held.done()
        gate.open()
        np.testing.assert_allclose(held.result(), wanted(folder / "long/1/model.onnx", drawn(1)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(answer, wanted(folder / "short/1/model.onnx", drawn(1)), rtol=1e-4, atol=1e-6)


def test_a_client_that_leaves_takes_nothing_with_it(server: live.Live, folder: Path) -> None:
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [0.5] * 8}]}).encode()
    head = f"POST /v2/models/long/infer HTTP/1.1\r\nHost: {server.address}\r\nContent-Length: {len(body)}\r\n\r\n"
    with live.Gate(server, "long", 1, foreseen=False) as gate:
        with socket.create_connection(("127.0.0.1", server.server.http_port or 0)) as connection:
            connection.sendall(head.encode() + body)
            gate.wait()
        until(lambda: not dispatcher_of(server).pending, "a forgotten request")
        infer_fp32(server, "short", drawn(1))
    np.testing.assert_allclose(
        infer_fp32(server, "long", drawn(2)), wanted(folder / "long/1/model.onnx", drawn(2)), rtol=1e-4, atol=1e-6
    )
    until(lambda: not any(lane.tasks for lane in dispatcher_of(server).lanes.lanes), "idle lanes")


def test_a_worker_that_is_killed_loses_no_request_on_any_lane(server: live.Live, folder: Path) -> None:
    tasks = [(CHAINS[at % 3], drawn(1, at)) for at in range(60)]

    def asks(task: tuple[int, tuple[str, Any]]) -> Any:
        if task[0] == 20:
            device_worker(server).kill("a test")
        return infer_fp32(server, *task[1])

    with ThreadPoolExecutor(6) as clients:
        found = list(clients.map(asks, enumerate(tasks)))
    for (name, feed), answer in zip(tasks, found, strict=True):
        right = wanted(folder / name / "1" / "model.onnx", feed)
        np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-6)
    assert server.server.service.library.backend.counts().deaths >= 1


def test_who_had_which_share_is_told(two: Path) -> None:
    with live.running(two, device=TWIN, policy="split") as found:
        for at in range(6):
            infer_fp32(found, ("short", "middle")[at % 2], drawn(1))
        lines = dict(
            line.rsplit(" ", 1)
            for line in send(found, "GET", "/metrics").body.decode().splitlines()
            if not line.startswith("#")
        )
        seconds = {name: float(each) for name, each in lines.items() if name.startswith("weft_share_seconds_total")}
        assert {each.split("share=")[1] for each in seconds if seconds[each]} == {'"5"}', '"3"}'}
        assert float(lines[f'weft_device_busy_seconds_total{{device="{TWIN}"}}']) > 0
        events = send(found, "GET", "/weft/trace").json()["traceEvents"]
        assert {each["args"]["name"] for each in events if each["ph"] == "M"} == {"lane 5: 5 SMs", "lane 6: 3 SMs"}
        state = send(found, "GET", "/weft/state").json()
        assert [lane["share"] for lane in state["lanes"]] == ["8", "8", "8", "8", "8 high", "5", "3", "4", "4"]
        assert {share for model in state["models"] for share in model["shares"]} == {"5", "3"}


def test_a_device_that_cannot_be_cut_is_shared_on_plain_streams_and_that_is_said(
    two: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "on_device", lambda device, limits, most: DeviceBackend(UNCUT_TWIN, limits, most))
    with live.running(two, device="cuda:0", policy="abreast") as found:
        shares = dispatcher_of(found).policy.setting.shares
        assert not shares.cuts and len(dispatcher_of(found).lanes.lanes) == len(shares.lanes) == 5
        slot = found.server.service.library.find("short")
        assert "shares the device on plain streams: this is a twin" in slot.message
        with ThreadPoolExecutor(3) as clients:
            answered = list(clients.map(lambda name: infer_fp32(found, name, drawn(2)), CHAINS[:2] * 6))
        for name, answer in zip(CHAINS[:2] * 6, answered, strict=True):
            right = wanted(two / name / "1" / "model.onnx", drawn(2))
            np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-6)
    assert sum("cannot be cut" in each for each in caplog.messages) == 1


def test_models_that_take_turns_in_the_memory_share_the_device_all_the_same(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(4)]
    for name in names:
        path = chain(tmp_path / name / "1" / "model.onnx", sizes=("n", *LARGE))
        (tmp_path / name / "weft.toml").write_text("max_batch = 1\ngrain_ms = 0.0001\n")
    feed = {"x": np.random.default_rng(1).standard_normal((1, *LARGE)).astype(np.float32)}
    right = wanted(path, feed)
    alone = CudaEngine(TWIN).open(path, LoadOptions(grain_s=1e-7, max_batch=1, rests=True), None, learn=True)
    most = alone.residency.moving_bytes * 5 // 2
    with live.running(tmp_path, device=TWIN, policy="abreast", device_memory_bytes=most) as found:
        backend = found.server.service.library.backend
        with ThreadPoolExecutor(4) as clients:
            answered = list(clients.map(lambda turn: infer_fp32(found, names[turn * 7 % 4], feed), range(24)))
        for answer in answered:
            np.testing.assert_allclose(answer, right, rtol=1e-4, atol=1e-5)
        assert backend.returns[TWIN] > 4 and backend.counts().deaths == 0


def test_whether_models_share_is_settled_at_the_start(server: live.Live) -> None:
    service = server.server.service
    service.reread_settings = lambda: ServerConfig(models=service.config.loading.models, device=TWIN, policy="punctual")
    with pytest.raises(BadRequest, match="policy = punctual: whether models share a GPU is settled at the start"):
        server.call(service.renew())
