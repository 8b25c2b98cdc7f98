"""Scratch memory is returned when it has not been needed for a while, and kept where it is needed repeatedly."""

from __future__ import annotations

import os
import threading
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

from tests.runtime.steps import Heard
from tests.serving import live
from weft.runtime.backend import BatchPart, LoadOptions, Step
from weft.runtime.onnxruntime_cpu import lane as scratches
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.lane import KEPT_BYTES, LONG_NS, CpuLane, ScratchMemory

SECOND = 10**9


class Process:
    """Its clock and its memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.resident, self.shrunk = 0, 10 * KEPT_BYTES, 0
        self.scratch = ScratchMemory(lambda: self.now, lambda: self.resident)
        monkeypatch.setattr(scratches, "shrink_arena", self._shrink)

    def _shrink(self) -> None:
        self.shrunk += 1
        self.resident = 10 * KEPT_BYTES

    def run(self, grows: int, took: int = LONG_NS) -> None:
        self.resident += grows
        self.scratch.ran(took)

    def wait(self, seconds: float, *, idle: bool = True) -> bool:
        """Let time pass, and shrink if that is due."""
        self.now += round(seconds * SECOND)
        due = self.scratch.is_due(idle=idle)
        if due:
            self.scratch.shrink()
        return due


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_it_is_counted_and_returned_once_nobody_needs_it(process: Process) -> None:
    process.run(3 * KEPT_BYTES)
    assert process.scratch.bytes == 3 * KEPT_BYTES
    assert not process.wait(0.5)
    assert process.wait(0.6)
    assert process.scratch.bytes == 0 and process.shrunk == 1
    assert not process.wait(100)


def test_little_is_kept_and_short_runs_are_not_looked_at(process: Process) -> None:
    process.run(KEPT_BYTES - 1)
    assert not process.wait(100)
    process.run(KEPT_BYTES, took=LONG_NS - 1)
    assert process.scratch.bytes == KEPT_BYTES - 1
    assert not process.wait(100)


def test_beside_steady_work_it_is_returned_after_a_while(process: Process) -> None:
    process.run(3 * KEPT_BYTES)
    assert not process.wait(9, idle=False)
    assert process.wait(1, idle=False)


def test_what_is_needed_again_and_again_is_kept_for_longer(process: Process) -> None:
    waits = []
    for _ in range(4):
        process.run(3 * KEPT_BYTES)
        seconds = 1
        while not process.wait(1):
            seconds += 1
        waits.append(seconds)
        process.now += SECOND
    assert waits == [1, 1, 2, 4]
    process.now += 10_000 * SECOND
    process.run(3 * KEPT_BYTES)
    while not process.wait(1):
        pass
    process.now += 10_000 * SECOND
    process.run(3 * KEPT_BYTES)
    assert process.wait(1)


def widening(path: Path) -> Path:
    """x, a number, made as wide as it says, and its mean."""
    number = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Expand", ["x", "n"], ["wide"]), helper.make_node("ReduceMean", ["wide"], ["y"])],
        "widening",
        [number("x", TensorProto.FLOAT, [1]), number("n", TensorProto.INT64, [1])],
        [number("y", TensorProto.FLOAT, [1])],
    )
    return live.save(graph, path)


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux tells the memory of a process this way")
def test_an_idle_lane_returns_what_a_large_request_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shrunk, shrink = threading.Event(), ScratchMemory.shrink

    def noticed(self: ScratchMemory) -> None:
        shrink(self)
        shrunk.set()

    monkeypatch.setattr(ScratchMemory, "shrink", noticed)
    monkeypatch.setattr(scratches, "LONG_NS", 0)
    backend = CpuBackend()
    model, lane, heard = backend.open(widening(tmp_path / "w.onnx"), LoadOptions()), backend.lane(0), Heard()
    inputs = {"x": np.ones(1, np.float32), "n": np.array([3 * KEPT_BYTES // 4])}
    model.start(Step(0, (BatchPart(inputs),), 1), lane, heard)
    assert heard.end().error is None
    assert backend.scratch_bytes >= 2 * KEPT_BYTES
    assert shrunk.wait(live.PATIENCE_S)
    assert backend.scratch_bytes == 0
    assert lane.close(live.PATIENCE_S)
    model.close()


def test_what_is_computed_on_the_thread_that_starts_it_is_looked_at_too(process: Process) -> None:
    ticks = count(0, LONG_NS)
    lane = CpuLane(0, lambda: next(ticks), scratch=process.scratch)
    process.resident += 2 * KEPT_BYTES
    heard = Heard()
    lane.start(Idle(), Step(0, (), 0), heard, here=True)
    assert heard.end().error is None and process.scratch.is_large
    assert lane.close(live.PATIENCE_S)


class Idle:
    def compute(self, *_: object) -> tuple[()]:
        return ()
