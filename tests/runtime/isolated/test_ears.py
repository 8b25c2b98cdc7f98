"""Who hears of the ends of steps, and where workers come from."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.runtime.isolated.workers import NoModel, kill_worker, liar, opened, pid, running, until_it_computes
from tests.runtime.steps import Heard, run_step
from tests.serving import live
from tests.support.concurrency import until
from tests.support.endless import ENDLESS, loop_input, loop_model
from weft.runtime.backend import BatchPart, Step
from weft.runtime.isolated import packets
from weft.runtime.isolated.backend import IsolatingBackend
from weft.runtime.isolated.limits import WorkerLimits
from weft.runtime.onnxruntime_cpu.backend import CpuBackend

DONE = '["over", 1, 0, 0, [[0, [], null]], false, null, null]'


@pytest.fixture
def one() -> Iterator[IsolatingBackend]:
    made = IsolatingBackend(CpuBackend(), WorkerLimits(spare=False, kill_s=600.0))
    yield made
    made.close()


def template_pid(one: IsolatingBackend) -> int:
    process = one._template._process
    assert process is not None
    return process.pid


def parent_of(process: int) -> int:
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_loop_hears_of_the_steps_on_lanes_that_it_opened(one: IsolatingBackend, tmp_path: Path) -> None:
    model = opened(one, loop_model(tmp_path / "turning.onnx"))

    async def served() -> tuple[list[int], int]:
        lane, heard, over = one.lane(0), Heard(), asyncio.Event()

        def tell(end: Any) -> None:
            heard(end)
            over.set()

        model.start(Step(0, (BatchPart(loop_input(3)),), 1), lane, tell)
        await over.wait()
        assert heard.end().error is None and lane.close(live.PATIENCE_S)
        return heard.threads, threading.get_ident()

    threads, loop = asyncio.run(served())
    assert threads == [loop]


def test_a_lane_that_is_closed_on_the_loop_hears_of_its_last_step_itself(one: IsolatingBackend, tmp_path: Path) -> None:
    model = opened(one, loop_model(tmp_path / "turning.onnx"))

    async def served() -> None:
        lane, heard = one.lane(0), Heard()
        run = model.start(Step(0, (BatchPart(loop_input(ENDLESS)),), 1), lane, heard)
        until_it_computes(pid(model.group))
        assert not lane.close(0.0)
        run.stop()
        assert lane.close(live.PATIENCE_S)
        assert heard.end().error is not None

    asyncio.run(served())
    model.close()


def test_what_a_worker_finished_before_it_died_is_not_lost(one: IsolatingBackend) -> None:
    lane, blocked, heard = one.lane(0), threading.Event(), Heard()
    lane.socket_reader._loop.call_soon_threadsafe(blocked.wait)
    with ThreadPoolExecutor(1) as spawner:
        worker, deaths = liar(spawner, "lane", DONE)
        worker.begin(lane, NoModel(), Step(0, (BatchPart({"x": np.zeros(4, np.float32)}),), 1), heard)
        worker._line.send(["bye"], wait=True)  # it has said what it had to say, and ends
        end = heard.end()
        until(lambda: deaths, "it is dead")
        worker.close()
    blocked.set()
    assert end.error is None and len(deaths) == 1 and deaths[0][1] == set()


def test_workers_are_children_of_the_server_and_outlive_what_they_were_forked_from(
    one: IsolatingBackend, tmp_path: Path
) -> None:
    model = opened(one, loop_model(tmp_path / "turning.onnx"))
    lane, first = one.lane(0), template_pid(one)
    assert parent_of(pid(model.group)) == os.getpid() and pid(model.group) != first
    os.kill(first, signal.SIGKILL)
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None
    kill_worker(model.group)
    assert run_step(model, lane, 0, BatchPart(loop_input(3))).error is None
    assert template_pid(one) != first and one.counts().deaths == 1


def test_how_a_forked_worker_ended_is_known(one: IsolatingBackend, tmp_path: Path) -> None:
    model, lane = opened(one, loop_model(tmp_path / "turning.onnx")), one.lane(0)
    heard = running(model, lane, loop_input(ENDLESS))
    os.kill(pid(model.group), signal.SIGSEGV)
    assert "SIGSEGV" in str(heard.end().error)


def test_a_lane_that_a_dead_worker_does_not_take_leaves_nothing_open(
    one: IsolatingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as spawner:
        worker, deaths = liar(spawner)
        made: list[Any] = []

        def pair() -> Any:
            made.append(packets_pair())
            return made[-1]

        def send(*_: Any, **__: Any) -> None:
            raise BrokenPipeError("it is gone")

        packets_pair = packets.pair
        monkeypatch.setattr(packets, "pair", pair)
        monkeypatch.setattr(worker._line, "send", send)
        heard = Heard()
        worker.begin(one.lane(0), NoModel(), Step(0, (BatchPart({"x": np.zeros(4, np.float32)}),), 1), heard)
        assert "the worker that computed it died: SIGKILL" in str(heard.end().error)
        ((line, theirs),) = made
        assert line.file == -1 and theirs.fileno() == -1
        worker.close()
    assert len(deaths) == 1
