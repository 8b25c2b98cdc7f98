"""The order of what a worker's lane does with a step: its values are stored before its end is reported."""

from __future__ import annotations

import select
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.runtime.backend import StepEnd, StepOutput
from weft.runtime.isolated import packets
from weft.runtime.isolated.lane import LaneLine, SocketReader
from weft.runtime.isolated.packets import Line, TensorLayout
from weft.runtime.isolated.worker_lane import WorkerLane

NUMBER, KEEP = 7, 7 << 20


@pytest.fixture
def server() -> Any:
    """The server's end of a lane's connection, with the worker's end as ``theirs``."""
    line, theirs = packets.pair()
    reader = SocketReader()
    yield SimpleNamespace(connection=LaneLine(line, reader), theirs=Line(theirs))
    reader.close()
    line.close()
    theirs.close()


def is_readable(line: Line) -> bool:
    poll = select.poll()
    poll.register(line.file, select.POLLIN)
    return bool(poll.poll(0))


def test_a_device_that_ends_a_step_early_does_not_show_its_end_before_its_values(server: Any) -> None:
    outputs = [StepOutput({"x": np.ones(3, np.float32)}, {})]
    early = []

    def start(step: Any, lane: Any, ended: Any, *, here: bool) -> Any:
        ended(StepEnd(1, 2, outputs))  # as a lane of a device may, on a thread of its own
        early.append(is_readable(server.connection.line))
        return SimpleNamespace(onward=outputs, error=None)

    engine = SimpleNamespace(lane=lambda index: None, here=False, kept_bytes=1 << 20)
    worker: Any = SimpleNamespace(engine=engine, models={1: SimpleNamespace(start=start)}, values={}, regions={})
    head = ["run", NUMBER, 1, 0, [], 1, False, (), KEEP, True, (), None, 1, 0, []]
    server.connection.send(head, TensorLayout())
    WorkerLane(worker, 0, server.theirs, None)._run(server.theirs.receive())
    assert early == [False]
    report = server.connection.receive_report()
    assert (report.number, report.outputs[0][0], report.problem) == (NUMBER, KEEP, None)
    np.testing.assert_array_equal(worker.values[KEEP]["x"], np.ones(3))
