"""A lane whose segment takes far longer than was expected does not count: another one has its place."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.hosts import PATIENCE_S
from tests.runtime.lane_bench import TICKS, Bench, Task, begun
from weft.engine.policies.base import NO_DEADLINE
from weft.runtime.lanes import OVERRUN_TICKS, OVERRUN_TIMES, UNSURE_TICKS
from weft.runtime.urgency import GENTLE

HOUR = 3600 * 10**9


class Clocked(Bench):
    """A bench whose clock stands until it is put forward."""

    def __init__(self, lanes: int) -> None:
        super().__init__(lanes)
        self.tick = 0
        self.lanes.now = lambda: self.tick

    def hang(self, *streams: int, ticks: int = TICKS, steady: bool = False) -> None:
        """Give work that has begun, and does not end by itself."""
        for stream in streams:
            self.give(stream, Task(steady=steady), ticks=ticks)
            begun(self, stream)


@pytest.fixture
def bench() -> Iterator[Any]:
    made: list[Clocked] = []

    def make(lanes: int = 1) -> Clocked:
        made.append(Clocked(lanes))
        return made[-1]

    yield make
    for each in made:
        each.close()


def urgency(thread: threading.Thread | None) -> int:
    assert thread is not None and thread.native_id is not None
    return os.getpriority(os.PRIO_PROCESS, thread.native_id)


def test_nothing_is_replaced_before_it_has_overrun(bench: Any) -> None:
    one = bench()
    one.hang(1)
    limit = OVERRUN_TIMES * TICKS + OVERRUN_TICKS
    assert one.lanes.replace_overrun() == limit and one.lanes.ready() is None
    one.tick = limit - 1
    assert one.lanes.replace_overrun() == limit and one.lanes.ready() is None
    one.tick = limit
    assert one.lanes.replace_overrun() == NO_DEADLINE
    assert one.lanes.ready() is not None and one.lanes.replacements == 1


def test_nobody_waits_for_what_has_overrun(bench: Any) -> None:
    """It was expected to take an hour, and nobody was sure: requests are not refused for that hour."""
    one = bench()
    one.hang(1, ticks=HOUR)
    one.tick = OVERRUN_TIMES * UNSURE_TICKS + OVERRUN_TICKS
    assert [rest for _, rest in one.lanes.rests()] == [HOUR - one.tick]
    one.lanes.replace_overrun()
    assert [rest for _, rest in one.lanes.rests()] == [0], "it runs, and takes no time of others"


def test_the_new_lane_computes_beside_and_stays_when_the_old_one_ends(bench: Any) -> None:
    one = bench()
    one.hang(1)
    old = one.works[1].thread
    one.tick = HOUR
    one.lanes.replace_overrun()
    one.hang(2)
    assert one.works[2].thread is not old
    assert [done.candidate.stream for done in one.end(2, 1)] == [2, 1]
    old.join(PATIENCE_S)
    assert not old.is_alive()
    assert [lane.index for lane in one.lanes.lanes] == [1] and one.lanes.ready() is not None
    one.hang(3)
    assert one.lanes.ready() is None


@pytest.mark.skipif(not hasattr(os, "setpriority"), reason="no priorities")
def test_what_has_overrun_gives_way_and_its_thread_computes_nothing_else(bench: Any) -> None:
    one = bench()
    before = urgency(threading.main_thread())
    one.hang(1)
    one.tick = HOUR
    one.lanes.replace_overrun()
    one.hang(2)
    assert urgency(one.works[1].thread) == max(before, GENTLE) and urgency(one.works[2].thread) == before


def test_no_more_are_replaced_at_a_time_than_there_are_to_be(bench: Any) -> None:
    two = bench(2)
    for streams in ((1, 2), (3, 4)):
        two.hang(*streams)
        two.tick += HOUR
        two.lanes.replace_overrun()
    assert two.lanes.ready() is None and two.lanes.replacements == 2
    two.end(1)
    two.lanes.replace_overrun()
    assert two.lanes.ready() is not None and two.lanes.replacements == 3
    two.end(2, 3, 4)
    assert len(two.lanes.lanes) == 2 and two.lanes.rests() == []


@pytest.mark.parametrize(("steady", "expected"), [(True, HOUR), (False, UNSURE_TICKS)])
def test_long_segments_are_waited_for_where_their_cost_is_sure(bench: Any, steady: bool, expected: int) -> None:
    one = bench()
    one.hang(1, ticks=HOUR, steady=steady)
    assert one.lanes.replace_overrun() == OVERRUN_TIMES * expected + OVERRUN_TICKS


def test_what_was_replaced_is_not_stopped_for_something_urgent(bench: Any) -> None:
    one = bench()
    one.hang(1, ticks=HOUR)
    assert [each.stoppable for each in one.lanes.abortable()] == [True]
    one.tick = HOUR
    one.lanes.replace_overrun()
    assert one.lanes.abortable() == ()


def test_lanes_come_and_go_beside_one_that_was_replaced(bench: Any) -> None:
    one = bench()
    one.hang(1)
    one.tick = HOUR
    one.lanes.replace_overrun()
    one.lanes.resize(2)
    one.hang(2, 3)
    assert one.lanes.ready() is None
    one.lanes.resize(1)
    one.end(3, 1, 2)
    assert len(one.lanes.lanes) == 1 and one.lanes.ready() is not None
    one.lanes.resize(2)
    assert sorted(lane.index for lane in one.lanes.lanes) == [0, 1]


def test_where_no_thread_can_be_started_the_lane_stays(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one = bench()
    one.hang(1)
    one.tick = HOUR

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        one.lanes.replace_overrun()
    assert one.lanes.ready() is None and one.lanes.replacements == 0
    one.end(1)
    assert one.lanes.ready() is not None
