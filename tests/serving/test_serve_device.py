"""A server on a device, on its twin on the CPU: what clients get, and what is told of it."""

from __future__ import annotations

import json
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, choosing, drawn, wanted
from tests.serving import live
from weft.errors import InputError
from weft.runtime import backends
from weft.runtime.isolated.device import DeviceBackend
from weft.runtime.isolated.engines import TWIN
from weft.runtime.isolated.limits import WorkerLimits
from weft.serving import isolation

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    chain(found / "chain" / "1" / "model.onnx")
    (found / "chain" / "weft.toml").write_text("max_batch = 4\ngrain_ms = 0.0001\n")
    choosing(found / "choosing" / "1" / "model.onnx")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(isolation, "on_device", lambda device, limits, most: DeviceBackend(TWIN, limits, most))
        with live.running(folder, device="cuda:0") as found:
            yield found


def asked(server: live.Live, model: str, feed: dict[str, Any]) -> Any:
    inputs = [
        {"name": name, "shape": each.shape, "datatype": "FP32", "data": each.ravel().tolist()}
        for name, each in feed.items()
    ]
    request = urllib.request.Request(
        f"{server.url}/v2/models/{model}/infer", json.dumps({"inputs": inputs}).encode(), method="POST"
    )
    with urllib.request.urlopen(request, timeout=live.PATIENCE_S) as answer:
        (output,) = json.load(answer)["outputs"]
    return np.array(output["data"], np.float32).reshape(output["shape"])


def test_requests_are_answered_from_a_device_one_step_ahead(server: live.Live, folder: Path) -> None:
    path, feeds = folder / "chain" / "1" / "model.onnx", [drawn(1 + seed % 3, seed) for seed in range(12)]
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda feed: asked(server, "chain", feed), feeds))
    for feed, answer in zip(feeds, answers, strict=True):
        np.testing.assert_allclose(answer, wanted(path, feed), rtol=1e-4, atol=1e-6)
    lanes = server.server.service.dispatcher.lanes
    assert lanes.ahead == 1 and len(lanes.lanes) == 1


def test_what_the_device_does_not_take_is_answered_all_the_same_and_told(server: live.Live, folder: Path) -> None:
    answer = asked(server, "choosing", drawn(1))
    np.testing.assert_allclose(answer, wanted(folder / "choosing" / "1" / "model.onnx", drawn(1)), rtol=1e-6)
    slot = server.server.service.library.find("choosing")
    assert slot is not None and "runs on the CPU: it has control flow (If)" in slot.message


def test_metrics_tell_of_the_device(server: live.Live) -> None:
    asked(server, "chain", drawn(1))
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=live.PATIENCE_S) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    assert float(lines["weft_device_busy_seconds_total"]) > 0 and "weft_device_memory_bytes" in lines


def test_a_machine_without_a_gpu_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(InputError, match=r"^cuda:0: onnxruntime .* has no CUDA"):
        backends.on_device("cuda:0", WorkerLimits())


def test_precision_without_a_device_is_refused(tmp_path: Path) -> None:
    chain(tmp_path / "chain" / "1" / "model.onnx")
    (tmp_path / "chain" / "weft.toml").write_text('precision = "fp16"\n')
    with live.running(tmp_path) as found:
        assert 'precision = "fp16" needs a device' in found.server.service.why_not_ready()
