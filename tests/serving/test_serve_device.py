"""A server on a device, on its twin on the CPU: what clients get, and what is told of it."""

from __future__ import annotations

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, choosing, drawn, wanted
from tests.serving import live
from tests.serving.live import device_worker
from tests.support.concurrency import until
from tests.support.inference import infer_fp32, send
from weft.base.errors import InputError
from weft.devices.host import Gates
from weft.runtime import device_kinds
from weft.runtime.cuda.cpu_twins import TWIN
from weft.runtime.isolated.device import DeviceBackend
from weft.runtime.isolated.limits import WorkerLimits
from weft.serving import isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


WIDE = (4096, 8)
"""A sample that is long enough to be lent."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    chain(found / "chain" / "1" / "model.onnx")
    (found / "chain" / "weft.toml").write_text("max_batch = 4\ngrain_ms = 0.0001\n")
    choosing(found / "choosing" / "1" / "model.onnx")
    chain(found / "wide" / "1" / "model.onnx", sizes=("n", *WIDE))
    (found / "wide" / "weft.toml").write_text("max_batch = 4\n")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "on_device", lambda device, limits, most: DeviceBackend(TWIN, limits, most))
        with live.running(folder, device="cuda:0") as found:
            yield found


def test_requests_are_answered_from_a_device_one_step_ahead(server: live.Live, folder: Path) -> None:
    path, feeds = folder / "chain" / "1" / "model.onnx", [drawn(1 + seed % 3, seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda feed: infer_fp32(server, "chain", feed), feeds))
    for feed, answer in zip(feeds, answers, strict=True):
        np.testing.assert_allclose(answer, wanted(path, feed), rtol=1e-4, atol=1e-6)
    lanes = server.server.service.dispatcher.lanes
    assert lanes.ahead == 1 and len(lanes.lanes) == 1


def test_with_gates_a_batch_is_one_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "on_device", lambda device, limits, most: DeviceBackend(TWIN, limits, most))
    path, feeds = folder / "chain" / "1" / "model.onnx", [drawn(1 + seed % 3, seed) for seed in range(24)]
    with live.running(folder, device="cuda:0", gates=True, policy="edf") as server:
        slot = server.server.service.library.find("chain")
        model = slot.served.loaded
        assert model.timing.gated and len(model.segments) > 1
        sent, start = [], type(model).start

        def recorded(self: Any, step: Any, *rest: Any, **options: Any) -> Any:
            sent.append(step)
            return start(self, step, *rest, **options)

        monkeypatch.setattr(type(model), "start", recorded)
        with ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(lambda feed: infer_fp32(server, "chain", feed), feeds))
        gates = server.server.service.dispatcher.streams.programs[0], model.timing.gates
        profile = send(server, "GET", "/weft/profile").json()["models"]["chain"]
    for feed, answer in zip(feeds, answers, strict=True):
        np.testing.assert_allclose(answer, wanted(path, feed), rtol=1e-4, atol=1e-5)
    program, costs = gates
    assert (program.launch, program.leave) == (round(costs.launch_us * 1e3), round(costs.leave_us * 1e3)) > (0, 0)
    assert Gates(**profile["gates"]) == costs
    assert sent and all(step.segment + step.segments == len(model.segments) for step in sent)


def test_a_device_has_one_worker_for_models_in_many_folders(server: live.Live, folder: Path) -> None:
    groups = server.server.service.library.backend.groups()
    assert str(folder) in device_worker(server).readable and not groups[TWIN]._building


def test_what_the_device_does_not_take_is_answered_all_the_same_and_told(server: live.Live, folder: Path) -> None:
    answer = infer_fp32(server, "choosing", drawn(1))
    np.testing.assert_allclose(answer, wanted(folder / "choosing" / "1" / "model.onnx", drawn(1)), rtol=1e-6)
    slot = server.server.service.library.find("choosing")
    assert slot is not None and "runs on the CPU: it has control flow (If)" in slot.message


class Lent:
    """An image in a region of a client's."""

    def __init__(self, server: live.Live, seed: int, rows: int = 1) -> None:
        self.array = np.random.default_rng(seed).standard_normal((rows, *WIDE)).astype(np.float32)
        self.memory = SharedMemory(create=True, size=64 + self.array.nbytes)
        self.memory.buf[64:][: self.array.nbytes] = self.array.tobytes()
        self._url = f"{server.url}/v2/systemsharedmemory/region/{self.memory.name}"
        self._models = f"{server.url}/v2/models"
        self.post(f"{self._url}/register", {"key": self.memory.name, "byte_size": self.memory.size})

    def post(self, url: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(url, json.dumps(body).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=live.PATIENCE_S) as answer:
            return json.loads(answer.read() or b"null")

    def asked(self) -> Any:
        where = {"shared_memory_region": self.memory.name, "shared_memory_offset": 64}
        told = {"name": "x", "shape": self.array.shape, "datatype": "FP32"}
        parameters = where | {"shared_memory_byte_size": self.array.nbytes}
        (output,) = self.post(f"{self._models}/wide/infer", {"inputs": [told | {"parameters": parameters}]})["outputs"]
        return np.array(output["data"], np.float32).reshape(output["shape"])

    def close(self) -> None:
        self.post(f"{self._url}/unregister", {})
        self.memory.close()
        self.memory.unlink()


def test_long_inputs_in_regions_are_lent_to_the_device(server: live.Live, folder: Path) -> None:
    path, images = folder / "wide" / "1" / "model.onnx", [Lent(server, seed, 1 + seed % 2) for seed in range(6)]
    for _ in range(2):
        with ThreadPoolExecutor(6) as clients:
            answers = list(clients.map(Lent.asked, images))
        for image, answer in zip(images, answers, strict=True):
            np.testing.assert_allclose(answer, wanted(path, {"x": image.array}), rtol=1e-4, atol=1e-5)
    assert len(device_worker(server)._lent) == 6
    device_worker(server).kill("a test")
    until(
        lambda: device_worker(server) is not None and device_worker(server).alive and device_worker(server).opened,
        "a worker",
    )
    np.testing.assert_allclose(images[0].asked(), answers[0], rtol=1e-6)
    assert len(device_worker(server)._lent) == 1
    for image in images:
        image.close()
    until(lambda: not device_worker(server)._lent, "forgotten regions")
    assert device_worker(server).call("borrowed") == 0


def test_a_region_that_is_cut_off_fails_its_own_requests(server: live.Live) -> None:
    image = Lent(server, 1)
    image.asked()
    os.truncate(f"/dev/shm/{image.memory.name}", 1000)
    with pytest.raises(urllib.error.HTTPError) as refused:
        image.asked()
    assert refused.value.code == 400 and "cut off" in json.load(refused.value)["error"]
    os.truncate(f"/dev/shm/{image.memory.name}", image.memory.size)
    image.asked()
    image.close()


def test_a_region_that_is_cut_off_does_not_hurt_who_is_in_the_same_batch(server: live.Live) -> None:
    images = [Lent(server, seed) for seed in range(4)]
    os.truncate(f"/dev/shm/{images[0].memory.name}", 1000)
    with ThreadPoolExecutor(4) as clients:
        bad, *good = [clients.submit(image.asked) for image in images * 3]
        assert isinstance(bad.exception(), urllib.error.HTTPError)
        answered = [each.exception() is None for each in good]
    assert answered == [(1 + at) % 4 != 0 for at in range(len(good))]
    for image in images:
        image.close()


def test_metrics_tell_of_the_device(server: live.Live) -> None:
    infer_fp32(server, "chain", drawn(1))
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=live.PATIENCE_S) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    assert float(lines[f'weft_device_busy_seconds_total{{device="{TWIN}"}}']) > 0
    assert f'weft_device_memory_bytes{{device="{TWIN}"}}' in lines


def test_a_machine_without_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    monkeypatch.setattr("weft.runtime.cuda.requirements.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"^cuda:0: torch is not installed; pip install 'weft"):
        device_kinds.on_device("cuda:0", WorkerLimits())


def test_precision_without_a_device_is_refused(tmp_path: Path) -> None:
    chain(tmp_path / "chain" / "1" / "model.onnx")
    (tmp_path / "chain" / "weft.toml").write_text('precision = "fp16"\n')
    with live.running(tmp_path) as found:
        assert 'precision = "fp16" needs a device' in found.server.service.why_not_ready()


def test_more_models_than_fit_take_turns_and_nothing_is_lost(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(3)]
    for name in names:
        chain(tmp_path / "models" / name / "1" / "model.onnx", sizes=("n", *WIDE))
        (tmp_path / "models" / name / "weft.toml").write_text("max_batch = 2\ngrain_ms = 0.0001\n")
    feeds = [{"x": np.random.default_rng(seed).standard_normal((1, *WIDE)).astype(np.float32)} for seed in range(2)]
    answers = [wanted(tmp_path / "models" / "m0" / "1" / "model.onnx", feed) for feed in feeds]

    def right(turn: int) -> bool:
        answer = infer_fp32(found, names[turn * 7 % 3], feeds[turn % 2])
        return bool(np.allclose(answer, answers[turn % 2], rtol=1e-4, atol=1e-5))

    with live.running(tmp_path / "models", device=TWIN, device_memory_bytes=1 << 40, cache=tmp_path / "cache") as found:
        one = _loaded(found, names)[0].residency.moving_bytes
        assert one > 1 << 20
    with live.running(
        tmp_path / "models", device=TWIN, device_memory_bytes=one * 3 // 2, cache=tmp_path / "cache"
    ) as found:
        backend = found.server.service.library.backend
        with ThreadPoolExecutor(4) as clients:
            assert all(clients.map(right, range(18)))
        assert backend.returns[TWIN] > 3 and backend.counts().deaths == 0
        there = [backend.group.worker.residency.is_there(each.number) for each in _loaded(found, names)]
        assert sum(there) == 1


def _loaded(server: live.Live, names: list[str]) -> list[Any]:
    slots = [server.server.service.library.find(name) for name in names]
    return [slot.served.loaded for slot in slots if slot.served]
