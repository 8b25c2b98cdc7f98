"""Requests that take far longer than was expected have no lane to themselves, in threads and in workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serving import live
from tests.serving.live import worker_group
from tests.support.concurrency import until
from tests.support.endless import busy_lanes, endless_request, loop_input, loop_model, other_model_answers
from tests.support.inference import infer, metric, state
from weft.runtime.urgency import GENTLE


@pytest.fixture(params=["threads", "process"])
def server(request: Any, tmp_path: Path) -> Iterator[live.Live]:
    loop_model(tmp_path / "turning.onnx")
    live.mlp(tmp_path / "mlp.onnx")
    with live.running(tmp_path, grpc_port=None, lanes=2, drain_s=0.0, isolation=request.param) as running:
        yield running


def replaced(server: live.Live) -> float:
    return metric(server, "weft_lanes_replaced_total")


def test_others_are_answered_while_hostile_requests_have_all_lanes(server: live.Live) -> None:
    assert other_model_answers(server) and replaced(server) == 0
    with endless_request(server), endless_request(server):
        for _ in range(3):
            assert other_model_answers(server)
        assert replaced(server) in (1, 2)
        assert busy_lanes(server) == 2
    until(lambda: busy_lanes(server) == 0, "they were stopped")
    assert len(state(server)["lanes"]) == 2
    assert np.array_equal(infer(server, "turning", loop_input(3))["y"], np.arange(4))


def test_it_can_be_done_again_and_again(server: live.Live) -> None:
    for turn in range(3):
        with contextlib.ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(endless_request(server))
            assert other_model_answers(server)
        until(lambda: busy_lanes(server) == 0 and len(state(server)["lanes"]) == 2, "all is as before")
        assert replaced(server) > turn


@pytest.mark.parametrize("server", ["process"], indirect=True)
def test_a_thread_of_a_worker_that_gave_way_is_used_no_more(server: live.Live) -> None:
    def urgencies() -> list[int]:
        worker = worker_group(server, "model:turning").worker
        assert worker is not None
        tasks = [int(each.name) for each in Path(f"/proc/{worker.pid}/task").iterdir()]
        return [os.getpriority(os.PRIO_PROCESS, task) for task in tasks]

    before = max(urgencies())
    with endless_request(server), endless_request(server):
        assert other_model_answers(server)
        until(lambda: max(urgencies()) == max(before, GENTLE), "it gives way")
    until(lambda: max(urgencies()) == before, "its thread has ended")
    for _ in range(8):
        assert np.array_equal(infer(server, "turning", loop_input(3))["y"], np.arange(4))
