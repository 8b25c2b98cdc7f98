"""``weft.Server``: a server inside a program, which is asked with arrays and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from tests.serving import live
from weft.base.errors import BadRequest, Expired, InputError, NotFound, Overloaded
from weft.runtime.tensors import TensorSpec
from weft.serving import in_process
from weft.serving.array_requests import answer_of, request_of
from weft.serving.in_process import PORTS, _ServerThread
from weft.serving.wire import InferResponse, ModelSpec

ROWS = np.ones((2, 64), np.float32)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return live.mlp(tmp_path_factory.mktemp("models") / "net.onnx")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[weft.Server]:
    with weft.Server(model, lanes=1, learn_first=True) as running:
        yield running


def own_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"weft-{os.getpid()}-*"))


# Asking


def test_arrays_go_in_and_come_out_as_over_http(server: weft.Server) -> None:
    answer = server.infer("net", {"x": ROWS})
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 64], "data": ROWS.reshape(-1).tolist()}]}
    with urllib.request.urlopen(f"{server.url}/v2/models/net/infer", json.dumps(body).encode()) as response:
        (told,) = json.load(response)["outputs"]
    assert answer["y"].dtype == np.float32 and answer["y"].shape == (2, 10)
    assert np.array_equal(answer["y"].reshape(-1), np.array(told["data"], np.float32))


def test_any_thread_may_ask(server: weft.Server) -> None:
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(server.infer("net", {"x": ROWS}))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 4 and all(np.array_equal(each["y"], answers[0]["y"]) for each in answers)


@pytest.mark.parametrize(
    ("asked", "kind", "said"),
    [
        ({"model": "nett"}, NotFound, "did you mean net"),
        ({"inputs": {"z": ROWS}}, BadRequest, "unknown input 'z'"),
        ({"inputs": {"x": ROWS[0]}}, BadRequest, "shape has 1 dimensions"),
        ({"outputs": ["z"]}, BadRequest, "unknown output 'z'"),
        ({"deadline_ms": 0}, BadRequest, "deadline_ms = 0 must be"),
        ({"deadline_ms": 1e-6}, Expired, "deadline"),
        ({"parameters": {"sequence_id": 3}}, BadRequest, "sequence_id"),
    ],
)
def test_a_refusal_is_the_error_a_client_would_be_told(
    server: weft.Server, asked: dict[str, Any], kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said):
        server.infer(**({"model": "net", "inputs": {"x": ROWS}} | asked))


def test_what_was_asked_is_in_the_metrics_and_in_the_state(server: weft.Server) -> None:
    name = 'nv_inference_request_success{model="net",version="1"}'
    before = server.metrics()[name]
    server.infer("net", {"x": ROWS})
    assert server.metrics()[name] == before + 1
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    names = {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names == server.metrics().keys()
    assert [each["name"] for each in server.state()["models"]] == ["net"]
    assert server.ready and server.grpc_address is None


def test_coroutines_ask_side_by_side(server: weft.Server) -> None:
    async def ask() -> list[dict[str, Any]]:
        return await asyncio.gather(*(server.infer_async("net", {"x": ROWS}) for _ in range(3)))

    assert [each["y"].shape for each in asyncio.run(ask())] == [(2, 10)] * 3


def test_a_request_nobody_waits_for_is_withdrawn(server: weft.Server) -> None:
    thread = server._running
    inner = live.Live(thread.server, None)  # type: ignore[arg-type]
    cancelled = 'nv_inference_request_failure{model="net",version="1",reason="CANCELED"}'
    before = server.metrics()[cancelled]

    async def leave(gate: live.Gate) -> None:
        asking = asyncio.create_task(server.infer_async("net", {"x": ROWS}))
        await asyncio.to_thread(gate.wait)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking

    with live.Gate(inner, "net", 2) as gate:
        asyncio.run(leave(gate))
        assert server.metrics()[cancelled] == before + 1


# Life


def test_nothing_is_left_behind(model: Path) -> None:
    threads, interval, folders = set(threading.enumerate()), sys.getswitchinterval(), own_folders()
    frozen = gc.get_freeze_count()
    server = weft.Server(model, lanes=1)
    with server:
        url, port = server.url, server._running.server.http_port
        assert len(own_folders() - folders) == 1
    assert set(threading.enumerate()) <= threads
    assert (sys.getswitchinterval(), own_folders()) == (interval, folders) and gc.get_freeze_count() <= frozen
    assert port and url.endswith(str(port)) and not server.ready and "not running" in repr(server)
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)
    for ask in (lambda: server.url, server.metrics, lambda: server.infer("net", {"x": ROWS})):
        with pytest.raises(Overloaded, match="not running"):
            ask()


def test_it_can_be_started_again_and_stopped_twice(model: Path) -> None:
    server = weft.Server(model, lanes=1, learn_s=0.0)
    for _ in range(2):
        assert server.start().ready
        with pytest.raises(InputError, match="runs already"):
            server.start()
        server.stop()
        server.stop()


def test_two_servers_in_one_process_keep_apart(server: weft.Server, model: Path) -> None:
    usual = sys.getswitchinterval()

    async def both() -> None:
        async with weft.Server(model, lanes=1, learn_s=0.0) as other:
            assert other.url != server.url
            ours, theirs = await asyncio.gather(*(s.infer_async("net", {"x": ROWS}) for s in (server, other)))
            assert np.array_equal(ours["y"], theirs["y"])

    asyncio.run(both())
    assert server.ready and sys.getswitchinterval() == usual


def test_what_was_asked_before_the_end_is_answered(model: Path) -> None:
    server = weft.Server(model, lanes=1, learn_first=True).start()
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(server.infer("net", {"x": ROWS})))
    ending = threading.Thread(target=server.stop)
    with live.Gate(live.Live(server._running.server, None), "net", 2) as gate:  # type: ignore[arg-type]
        asking.start()
        gate.wait()
        ending.start()
    ending.join()
    asking.join()
    assert answers[0]["y"].shape == (2, 10)


def test_who_asks_a_loop_that_has_ended_is_told(model: Path) -> None:
    thread = _ServerThread(weft.Server(model).config)
    answer = thread.start_call(lambda _: None)
    thread._fail_remaining()
    with pytest.raises(Overloaded, match="not running"):
        answer.result()
    with pytest.raises(Overloaded, match="not running"):
        thread.start_call(lambda _: None)
    thread._loop.close()


def test_ctrl_c_during_the_start_leaves_nothing(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    threads, folders = set(threading.enumerate()), own_folders()

    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    def end(thread: _ServerThread, *, at_once: bool) -> None:
        thread.request_stop(at_once=at_once)
        thread.join()

    server = weft.Server(model, lanes=1)
    monkeypatch.setattr(in_process, "_uncancellable_future", Interrupted)
    monkeypatch.setattr(_ServerThread, "end", end)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert set(threading.enumerate()) == threads and own_folders() == folders


def test_a_cancelled_start_ends_what_was_begun(model: Path) -> None:
    threads, folders = set(threading.enumerate()), own_folders()

    async def start() -> None:
        starting = asyncio.create_task(weft.Server(model, lanes=1).start_async())
        await asyncio.sleep(0)  # it has begun, and waits for its thread
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(start())
    assert own_folders() == folders
    assert [each for each in threading.enumerate() if isinstance(each, _ServerThread) and each not in threads] == []


@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="there is no Ctrl-C")
def test_who_forgets_to_stop_it_ends_all_the_same(model: Path, tmp_path: Path) -> None:
    code = f"import weft; server = weft.Server({str(model)!r}, lanes=1, learn_s=0.0).start(); print(server.ready)"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=600)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")
    assert list(tmp_path.glob("weft-*")) == []


# What cannot be


def test_a_server_that_is_not_ready_is_refused_in_a_line(tmp_path: Path, model: Path) -> None:
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    threads = set(threading.enumerate())
    with pytest.raises(InputError, match=r"^not ready: broken: broken.onnx: cannot be loaded"):
        weft.Server(broken, lanes=1).start()
    with pytest.raises(InputError, match=r"nowhere.onnx"):
        weft.Server(tmp_path / "nowhere.onnx").start()
    with weft.Server(broken, model, lanes=1, learn_s=0.0, ready_when="any") as server:
        assert server.ready
    assert set(threading.enumerate()) <= threads


def test_settings_are_those_of_a_file_and_unknown_ones_are_refused(tmp_path: Path, model: Path) -> None:
    file = tmp_path / "weft.toml"
    file.write_text(f'models = ["{model}"]\nlanes = 3\nhttp_port = 8123\npolicy = "edf"\n')
    config = weft.Server(config=file, lanes=2).config
    assert (config.execution.lanes, config.scheduling.policy, config.loading.models) == (2, "edf", (str(model),))
    assert {key: config.value_of(key) for key in PORTS} == PORTS, "the system chooses"
    assert weft.Server(config=file, http_port=8124).config.network.http_port == 8124
    assert weft.Server(config=config).config == config
    with pytest.raises(InputError, match="unknown setting 'lane'; did you mean lanes"):
        weft.Server(model, lane=2)
    with pytest.raises(InputError, match="nothing to serve"):
        weft.Server()
    with pytest.raises(InputError, match="lanes"):
        weft.Server(model, lanes=0)


def test_the_folder_of_a_plan_brings_its_settings(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "weft.toml").write_text('models = ["models/"]\npolicy = "edf"\nlanes = 2\n')
    config = weft.Server(tmp_path, lanes=1).config
    assert (config.scheduling.policy, config.execution.lanes, config.network.http_port) == ("edf", 1, 0)
    assert [Path(each) for each in config.loading.models] == [tmp_path / "models"]


# Arrays

SPEC = ModelSpec(
    "net",
    "1",
    (TensorSpec("a", "FP16", (-1,)), TensorSpec("b", "UINT8", (2,)), TensorSpec("c", "BYTES", (-1,))),
    (TensorSpec("y", "FP32", (-1,)), TensorSpec("z", "BYTES", (-1,))),
)
GIVEN: dict[str, Any] = {"a": [1, 2.5], "b": np.array([0, 255]), "c": ["ab", b"c"]}


def test_what_numpy_can_turn_into_the_models_types_is_turned() -> None:
    request = request_of(SPEC, {**GIVEN, "c": np.array(["ab", "c"])}, ["z"])
    assert [(array.dtype.str[1:], array.tolist()) for array in request.inputs.values()] == [
        ("f2", [1.0, 2.5]),
        ("u1", [0, 255]),
        ("O", [b"ab", b"c"]),
    ]
    assert [each.name for each in request.wanted] == ["z"]
    whole = {"y": np.arange(2, dtype=np.float32), "z": np.array([b"q"], object)}
    answer = answer_of(InferResponse(request, SPEC, whole))
    assert list(answer) == ["z"] and answer["z"] is not whole["z"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a": [1e6]}, "input 'a': an element is too large for FP16"),
        ({"a": ["1"]}, "input 'a': an array of <U1 does not fit, the model expects FP16"),
        ({"a": [[1], [1, 2]]}, "input 'a': no array can be made of it"),
        ({"b": [0, 256]}, "input 'b': an element is outside 0 to 255"),
        ({"b": [0.0, 1.0]}, "input 'b': an array of float64 does not fit"),
        ({"c": [1, 2]}, "input 'c': every element of BYTES is a string or bytes"),
    ],
)
def test_what_would_change_its_kind_or_its_value_is_refused(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(BadRequest) as error:
        request_of(SPEC, GIVEN | changed)
    assert str(error.value).startswith(said)


def test_inputs_that_are_missing_are_named() -> None:
    with pytest.raises(BadRequest, match="missing: b, c"):
        request_of(SPEC, {"a": [1.0]})
