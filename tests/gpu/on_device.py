"""What only a GPU can show: captured graphs, copies beside computing, faults. ``make test-gpu`` runs it.

The name keeps it out of ``make test``; without a GPU, or what it needs, everything is skipped.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, choosing, drawn, leaving, wanted
from weft.errors import InputError
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.cuda.requirements import check
from weft.runtime.isolated.device import DeviceBackend
from weft.runtime.isolated.limits import WorkerLimits

try:
    check("cuda:0")
    MISSING = ""
except InputError as error:
    MISSING = str(error)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)
FINE = LoadOptions(grain_s=1e-9, max_batch=4)


@pytest.fixture(scope="module")
def gpu() -> Any:
    from weft.runtime.cuda.gpu import Gpu

    return Gpu(0)


def opened(gpu: Any, path: Path, options: LoadOptions = FINE) -> Any:
    from weft.runtime.cuda.preparing import prepare_on

    return prepare_on(gpu, path, options)


def through(gpu: Any, model: Any, feeds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Batches in turns, segment by segment."""
    values: list[Any] = list(feeds)
    with gpu.on():
        for segment in range(len(model.segments)):
            launched = [model.launch(Step(segment, [BatchPart(each)], len(feeds[0]["x"]))) for each in values]
            values = [each.made[0].values for each in launched]
        for each in launched:
            each.answered.wait()
    return [each.made[0].answers for each in launched]


def test_captured_segments_give_what_the_cpu_gives(gpu: Any, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    model = opened(gpu, path)
    assert len(model.segments) == 6 and not model.uncaptured()
    for rows in (1, 3, 4, 9):
        (found,) = through(gpu, model, [drawn(rows)])
        np.testing.assert_allclose(found["y"], wanted(path, drawn(rows)), rtol=1e-4, atol=1e-5)


def test_batches_in_turns_keep_what_is_theirs(gpu: Any, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    feeds = [drawn(3, seed) for seed in range(4)]
    for feed, found in zip(feeds, through(gpu, opened(gpu, path), feeds), strict=True):
        np.testing.assert_allclose(found["y"], wanted(path, feed), rtol=1e-4, atol=1e-5)


def test_float32_means_float32(gpu: Any, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    assert not any("differs" in each for each in opened(gpu, path).remarks)
    half = opened(gpu, path, LoadOptions(max_batch=2, precision="fp16"))
    assert any(each.startswith("fp16: differs from float32") for each in half.remarks)


def test_samples_leave_at_exits_on_the_device(gpu: Any, tmp_path: Path) -> None:
    path = leaving(tmp_path / "leaving.onnx")
    model = opened(gpu, path, LoadOptions(grain_s=1.0, max_batch=4, exits=("early", "late")))
    feed = drawn(3)
    with gpu.on():
        first = model.launch(Step(0, [BatchPart(feed)], 3))
        first.answered.wait()
        np.testing.assert_allclose(first.made[0].answers["early"], wanted(path, feed, "early"), rtol=1e-4, atol=1e-5)
        last = model.launch(Step(1, [BatchPart(first.made[0].values, [1])], 1))
        last.answered.wait()
    np.testing.assert_allclose(last.made[0].answers["late"], wanted(path, feed, "late")[1:2], rtol=1e-4, atol=1e-5)


def test_control_flow_runs_on_the_cpu(gpu: Any, tmp_path: Path) -> None:
    model = opened(gpu, choosing(tmp_path / "choosing.onnx"), LoadOptions())
    assert any("runs on the CPU" in each for each in model.remarks)


@pytest.fixture(scope="module")
def backend() -> Iterator[DeviceBackend]:
    found = DeviceBackend("cuda:0", WorkerLimits())
    yield found
    found.close()


def test_a_confined_worker_has_the_device_and_is_replaced(backend: DeviceBackend, tmp_path: Path) -> None:
    path = chain(tmp_path / "chain.onnx")
    model: Any = backend.open(path, FINE, tmp_path / "cache", learn=False)
    lane = backend.lane(0)

    def once() -> Any:
        values: Any = drawn(2)
        for segment in range(len(model.segments)):
            ended, end = threading.Event(), []
            model.start(Step(segment, [BatchPart(values)], 2), lane, lambda e, k=end, d=ended: (k.append(e), d.set()))
            assert ended.wait(120.0)
            if end[0].error:
                return end[0]
            values = end[0].made[0].values
        return end[0]

    np.testing.assert_allclose(once().made[0].answers["y"], wanted(path, drawn(2)), rtol=1e-4, atol=1e-5)
    worker = backend.groups()["cuda:0"].worker
    assert worker is not None
    worker.kill("a test")
    for _ in range(600):
        if (end := once()).error is None:
            break
        threading.Event().wait(0.1)
    np.testing.assert_allclose(end.made[0].answers["y"], wanted(path, drawn(2)), rtol=1e-4, atol=1e-5)
    assert lane.close(60.0)


FAULT = """
import torch, time
from weft.runtime.cuda.engine import CudaEngine
from weft.runtime.cuda.lane import Launched
from weft.runtime.backend import Step
engine = CudaEngine("cuda:0")
class Bad:
    def launch(self, step):
        torch.zeros(4, device="cuda")[torch.tensor([1 << 40], device="cuda")]
        mark = engine.device.mark()
        return Launched([], mark, mark, False)
engine.lane(0).start(Bad(), Step(0, [], 1), print)
time.sleep(60)
"""


def test_a_fault_of_the_device_ends_the_process(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FAULT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 70 and "weft: cuda:0 was lost: " in done.stderr
