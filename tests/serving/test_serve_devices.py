"""A server on several devices, on twins of one on the CPU: who computes, and what the death of one's worker means."""

from __future__ import annotations

import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.cuda.nets import chain, drawn, wanted
from tests.serving import live
from tests.support.concurrency import until
from tests.support.inference import infer_fp32
from weft.runtime.cuda.cpu_twins import TWIN

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are processes of Linux")
BOTH = (TWIN, f"{TWIN}#2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("models")
    chain(found / "chain" / "1" / "model.onnx")
    (found / "chain" / "weft.toml").write_text("max_batch = 2\ngrain_ms = 0.0001\n")
    return found


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[live.Live]:
    with live.running(folder, device=f"{TWIN},{TWIN}") as found:
        yield found


def all_asked(server: live.Live, folder: Path, count: int) -> None:
    """Ask from several clients at a time, and see that all answers are right."""
    path, feeds = folder / "chain" / "1" / "model.onnx", [drawn(1 + seed % 2, seed) for seed in range(count)]
    with ThreadPoolExecutor(6) as clients:
        answers = list(clients.map(lambda feed: infer_fp32(server, "chain", feed), feeds))
    for feed, answer in zip(feeds, answers, strict=True):
        np.testing.assert_allclose(answer, wanted(path, feed), rtol=1e-4, atol=1e-6)


def busy_s(server: live.Live) -> list[float]:
    """How long each device has computed, as the metrics say."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=live.PATIENCE_S) as answer:
        lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if not line.startswith("#"))
    assert all(f'weft_device_memory_bytes{{device="{name}"}}' in lines for name in BOTH)
    return [float(lines[f'weft_device_busy_seconds_total{{device="{name}"}}']) for name in BOTH]


def backend_of(server: live.Live) -> Any:
    return server.server.service.library.backend


def test_every_device_computes_and_all_answers_are_right(server: live.Live, folder: Path) -> None:
    until(lambda: all_asked(server, folder, 24) or all(busy_s(server)), "work of both")
    slot = server.server.service.library.find("chain")
    assert f"runs on each of {', '.join(BOTH)}" in slot.message
    setting = server.server.service.dispatcher.policy.setting
    assert (setting.lanes, setting.ahead, setting.apart) == (2, 1, True)


def test_the_devices_are_cut_once_and_alike(server: live.Live) -> None:
    groups = backend_of(server).groups()
    assert tuple(groups) == BOTH and len({group.folder for group in groups.values()}) == 1


@pytest.mark.parametrize("name", BOTH)
def test_the_others_go_on_while_one_has_no_worker(server: live.Live, folder: Path, name: str) -> None:
    group, lanes = backend_of(server).groups()[name], server.server.service.dispatcher.lanes.lanes
    with group._preparing:  # so nobody can take its place
        group.worker.kill("a test")
        until(lambda: group.worker is None, "its death")
        assert [lane.device.able for lane in lanes] == [name != each for each in BOTH]
        all_asked(server, folder, 12)
    until(lambda: group.has_worker, "another worker")
    before = busy_s(server)
    until(lambda: all_asked(server, folder, 12) or busy_s(server)[BOTH.index(name)] > before[BOTH.index(name)], "work")
