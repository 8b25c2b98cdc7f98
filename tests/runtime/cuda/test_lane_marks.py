"""What the lane of a device waits for before it tells that a step has ended, on marks that the test reaches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from weft.runtime.backend import Step, StepEnd
from weft.runtime.cuda.device import HostDevice
from weft.runtime.cuda.lane import CudaLane, Launched

PATIENCE_S = 60.0
STEP = Step(0, (), 1)


class Reached:
    """A mark that is reached when the test says so."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        assert self.event.wait(PATIENCE_S)


class Marking(HostDevice):
    """Hands out marks."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: list[Reached] = []

    def mark(self, *, answers: bool = False) -> Any:
        self.marks.append(Reached())
        return self.marks[-1]


class Model:
    """Starts a step, or fails, and can move."""

    def __init__(self, device: Marking, error: Exception | None = None) -> None:
        self._device, self._error = device, error
        self.moved: list[str] = []

    def launch(self, step: Step, slot: int = 0) -> Launched:
        if self._error:
            raise self._error
        mark = self._device.mark()
        return Launched([], mark, mark, False)

    def evict(self) -> None:
        self.moved.append("left")

    def restore(self) -> None:
        self.moved.append("came")


@pytest.fixture
def device() -> Marking:
    return Marking()


@pytest.fixture
def now() -> Iterator[int]:
    return iter(range(0, 10**6, 10))


@pytest.fixture
def lane(device: Marking, now: Iterator[int]) -> Iterator[CudaLane]:
    found = CudaLane(0, device, lambda: next(now))
    yield found
    assert found.close(PATIENCE_S)


def is_told(ended: SimpleQueue[StepEnd]) -> bool:
    """Whether an end comes within a moment."""
    try:
        ended.get(timeout=0.05)
    except Empty:
        return False
    return True


def test_a_step_that_failed_half_way_ends_when_the_device_is_done_with_it(device: Marking, lane: CudaLane) -> None:
    ended: SimpleQueue[StepEnd] = SimpleQueue()
    lane.start(Model(device, RuntimeError("no")), STEP, ended.put)
    (mark,) = device.marks
    assert not is_told(ended)
    mark.event.set()
    assert str(ended.get(timeout=PATIENCE_S).error) == "no"


def test_the_time_in_which_a_model_comes_back_is_none_of_its_step(
    device: Marking, lane: CudaLane, now: Iterator[int]
) -> None:
    ended: SimpleQueue[StepEnd] = SimpleQueue()
    staying, coming = Model(device), Model(device)
    lane.move([staying], coming)
    assert (staying.moved, coming.moved) == (["left"], ["came"])
    lane.start(coming, STEP, ended.put)
    returned, computed = device.marks
    computed.event.set()
    assert not is_told(ended)
    back = next(now)
    returned.event.set()
    end = ended.get(timeout=PATIENCE_S)
    assert back < end.began <= end.ended
