"""Lanes: real threads that compute one segment at a time, report it once and survive what models do."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from tests.engine.hosts import PATIENCE_S
from tests.runtime.lane_bench import TICKS, Bench, Task, Work, begun
from weft.runtime.backend import Step, StepOutput
from weft.runtime.lanes import ABORT_FROM_TICKS, INLINE_TICKS


@pytest.fixture
def bench():
    """Makes benches and closes them."""
    made: list[Bench] = []

    def make(*args: Any, **settings: Any) -> Bench:
        made.append(Bench(*args, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


# One at a time


def test_a_lane_computes_one_segment_and_says_so_once(bench):
    one = bench()
    assert one.lanes.ready() is not None
    candidate = one.give(4, layer=2)
    task = begun(one, 4)
    assert task.thread is not threading.current_thread()
    assert task.segments == [2]
    assert one.lanes.ready() is None
    assert one.lanes.completions() == []
    (done,) = one.end(4)
    assert (done.candidate, done.aborted, done.error) == (candidate, False, None)
    assert done.times.fetch_start == done.times.compute_start <= done.times.compute_end
    assert one.lanes.completions() == []
    assert one.lanes.ready() is not None


def test_as_many_segments_run_at_once_as_there_are_lanes(bench):
    three = bench(3)
    for stream in range(3):
        assert three.lanes.ready() is not None
        three.give(stream)
    threads = {begun(three, stream).thread for stream in range(3)}
    assert len(threads) == 3
    assert three.lanes.ready() is None
    assert [done.candidate.stream for done in three.end(1)] == [1]
    assert three.lanes.ready() is not None
    assert [done.candidate.stream for done in three.end(2, 0)] == [2, 0]


def test_segments_that_ended_together_are_reported_together(bench):
    two = bench(2)
    two.give(0), two.give(1)
    begun(two, 0), begun(two, 1)
    for stream in range(2):
        two.works[stream].go_on.set()
    for _ in range(2):
        two.woken.get(timeout=PATIENCE_S)
    assert sorted(done.candidate.stream for done in two.lanes.completions()) == [0, 1]
    assert two.lanes.completions() == []


def test_the_clock_is_that_of_the_lanes(bench):
    one = bench()
    before = one.lanes.now()
    device = one.lanes.ready()
    assert before <= device.channel_free == device.array_free == device.array_began <= one.lanes.now()
    one.lanes.idle_until(before + 10**15)  # does not wait
    one.give(0)
    begun(one, 0)
    (done,) = one.end(0)
    assert before <= done.times.compute_start <= done.times.compute_end <= one.lanes.now()


def test_whoever_watches_hears_of_every_segment_with_its_lane(bench):
    two, heard = bench(2), []
    two.lanes.watch = lambda lane, completion: heard.append((lane, completion.candidate.stream))
    two.give(0), two.give(1)
    lanes = {begun(two, stream).thread.name: stream for stream in range(2)}
    two.end(0, 1)
    assert heard == [
        (int(name.removeprefix("lane-")), stream) for name, stream in sorted(lanes.items(), key=lambda e: e[1])
    ]


def test_busy_time_adds_up(bench):
    one = bench()
    took = 0
    for stream in range(3):
        one.give(stream)
        (done,) = one.end(stream)
        took += done.times.compute_end - done.times.compute_start
    assert one.lanes.lanes[0].busy_ticks == took > 0


def test_how_long_what_runs_is_expected_to_run_on(bench):
    two = bench(2)
    assert two.lanes.rests() == []
    first = two.give(0, ticks=10**12)
    second = two.give(1, ticks=10**13)
    rests = dict(two.lanes.rests())
    assert rests.keys() == {first, second}
    assert 0 < rests[first] <= 10**12 < rests[second] <= 10**13
    two.end(0)
    assert [candidate for candidate, _ in two.lanes.rests()] == [second]


def test_a_segment_that_takes_longer_than_expected_is_expected_to_end_now(bench):
    one = bench()
    candidate = one.give(0)
    begun(one, 0)
    since = one.lanes.now()
    while one.lanes.now() < since + TICKS:
        pass
    assert one.lanes.rests() == [(candidate, 0)]


# What goes wrong


def test_an_error_becomes_part_of_the_completion_and_the_lane_lives_on(bench):
    one, error = bench(), ValueError("no")
    one.give(0, Task(error))
    (done,) = one.end(0)
    assert (done.error, done.aborted) == (error, False)
    one.give(1)
    (done,) = one.end(1)
    assert done.error is None
    assert done.candidate.stream == 1


def test_closing_waits_for_what_runs(bench):
    one = bench()
    one.give(0)
    task = begun(one, 0)
    closing = threading.Thread(target=one.lanes.close)
    closing.start()
    assert closing.is_alive()
    task.go_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert not one.lanes.lanes[0].device.thread.is_alive()
    (done,) = one.reported()
    assert done.error is None


def test_closing_twice_does_no_harm(bench):
    two = bench(2)
    two.lanes.close()
    two.lanes.close()
    assert not any(lane.device.thread.is_alive() for lane in two.lanes.lanes)


# On the engine's own thread


def test_short_segments_run_on_the_thread_that_submits_them(bench):
    one, task = bench(), Task()
    task.go_on.set()
    one.give(0, task, ticks=INLINE_TICKS - 1)
    assert task.thread is threading.current_thread()
    assert one.lanes.ready() is None  # until somebody asks what became of it
    (done,) = one.lanes.completions()
    assert done.candidate.stream == 0
    assert one.lanes.ready() is not None
    assert one.woken.empty()


def test_longer_ones_do_not(bench):
    one = bench()
    one.give(0, ticks=INLINE_TICKS)
    assert begun(one, 0).thread is one.lanes.lanes[0].device.thread


def test_a_short_one_whose_cost_depends_on_values_does_not_either(bench):
    one = bench()
    one.give(0, Task(steady=False), ticks=1)
    assert begun(one, 0).thread is one.lanes.lanes[0].device.thread


def test_an_error_on_the_own_thread_is_a_completion_too(bench):
    one, task = bench(), Task(KeyError("no"))
    task.go_on.set()
    one.give(0, task, ticks=1)
    (done,) = one.lanes.completions()
    assert isinstance(done.error, KeyError)


# Cores


@pytest.mark.skipif(sys.platform != "linux", reason="threads are bound to cores on Linux only")
@pytest.mark.parametrize("pin", [True, False])
def test_lanes_are_bound_to_cores_if_asked_to(bench, pin):
    class Where(Work):
        cores: frozenset[int] = frozenset()

        def compute(self, step: Step, options: Any) -> list[StepOutput]:
            self.cores = frozenset(os.sched_getaffinity(0))
            return []

    mine = os.sched_getaffinity(0)
    some, places = bench(3, pin=pin), [Where() for _ in range(3)]
    for stream, place in enumerate(places):
        some.give(stream, place)
    for _ in range(3):
        some.reported()
    ordered = sorted(mine)
    expected = [{ordered[index % len(ordered)]} if pin else mine for index in range(3)]
    assert sorted(map(sorted, (place.cores for place in places))) == sorted(map(sorted, expected))
    assert os.sched_getaffinity(0) == mine  # the engine's own thread is not


# Stopping half-way


def test_only_long_segments_are_stopped_for_others(bench):
    three = bench(3)
    three.give(0, ticks=ABORT_FROM_TICKS - 1)
    long_one = three.give(1, ticks=ABORT_FROM_TICKS)
    longer = three.give(2, ticks=10**13)
    running = {each.candidate: each.rest for each in three.lanes.abortable() if each.stoppable}
    assert running.keys() == {long_one, longer}
    assert running[long_one] <= ABORT_FROM_TICKS < running[longer] <= 10**13


def test_stopping_tells_the_run_and_is_not_offered_twice(bench):
    two = bench(2)
    first, second = (two.give(stream, Task(RuntimeError("stopped")), ticks=ABORT_FROM_TICKS) for stream in range(2))
    options = [begun(two, stream).options for stream in range(2)]
    two.lanes.stop(first.stream, first.query)
    assert [each.terminate for each in options] == [True, False]
    assert [(each.candidate, each.stoppable) for each in two.lanes.abortable()] == [(first, False), (second, True)]
    two.lanes.stop(second.stream, second.query)
    assert two.lanes.abortable() == ()
    (done,) = two.end(0)
    assert (done.candidate, done.aborted, done.error) == (first, True, None)
    (done,) = two.end(1)
    assert (done.candidate, done.aborted, done.error) == (second, True, None)


def test_a_lane_that_is_being_stopped_is_expected_to_be_free_at_once(bench):
    one = bench()
    candidate = one.give(0, ticks=10**13)
    begun(one, 0)
    assert one.lanes.rests()[0][1] > 0
    one.lanes.stop(candidate.stream, candidate.query)
    assert one.lanes.rests() == [(candidate, 0)]


def test_one_that_ends_before_it_could_be_stopped_has_ended(bench):
    one = bench()
    candidate = one.give(0, ticks=ABORT_FROM_TICKS)
    begun(one, 0)
    one.lanes.stop(candidate.stream, candidate.query)
    (done,) = one.end(0)
    assert (done.aborted, done.error) == (False, None)


def test_stopping_what_does_not_run_does_nothing(bench):
    one = bench()
    candidate = one.give(0, ticks=ABORT_FROM_TICKS)
    begun(one, 0)
    one.lanes.stop(candidate.stream, 9)
    assert not one.works[0].options.terminate
    (done,) = one.end(0)
    assert not done.aborted
    one.lanes.stop(candidate.stream, candidate.query)  # it is over
    assert one.lanes.completions() == []


def test_a_short_segment_can_be_stopped_and_the_next_on_its_lane_is_not(bench):
    one = bench()
    candidate = one.give(0, Task(RuntimeError("stopped")))
    first = begun(one, 0).options
    one.lanes.stop(candidate.stream, candidate.query)
    assert first.terminate
    (done,) = one.end(0)
    assert (done.aborted, done.error) == (True, None)
    one.give(1)
    assert not begun(one, 1).options.terminate


def test_closing_does_not_wait_longer_than_it_may_for_what_cannot_be_stopped(bench):
    one = bench()
    one.give(0)
    task = begun(one, 0)
    assert not one.lanes.close(0.0)
    task.go_on.set()
    assert one.lanes.close(PATIENCE_S)


def endless() -> ort.InferenceSession:
    """A loop of matrix products that nobody would wait for."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go_on"], ["still"]),
            helper.make_node("MatMul", ["last", "last"], ["next"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("last", TensorProto.FLOAT, [128, 128]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, [128, 128]),
        ],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["turns", "", "x"], ["y"], body=body)],
        "endless",
        [
            helper.make_tensor_value_info("turns", TensorProto.INT64, []),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, [128, 128]),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [128, 128])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class Model(Work):
    """A real model on a lane."""

    def __init__(self, session: ort.InferenceSession, turns: int) -> None:
        self._session, self._turns = session, turns
        self.begun = threading.Event()
        self.result: np.ndarray | None = None

    def compute(self, step: Step, options: Any) -> list[StepOutput]:
        self.begun.set()
        feed = {"turns": np.array(self._turns, np.int64), "x": np.eye(128, dtype=np.float32)}
        (self.result,) = self._session.run(None, feed, options)
        return []


def test_a_real_model_is_stopped_half_way_and_can_be_run_again(bench):
    session = endless()
    one, work = bench(), Model(session, 10**9)
    candidate = one.give(0, work, ticks=10**12)
    assert work.begun.wait(PATIENCE_S)
    one.lanes.stop(candidate.stream, candidate.query)
    (done,) = one.reported()
    assert (done.aborted, done.error, work.result) == (True, None, None)
    work._turns = 3
    one.give(0, ticks=10**12)
    (done,) = one.reported()
    assert (done.aborted, done.error) == (False, None)
    assert np.array_equal(work.result, np.eye(128, dtype=np.float32))


def test_a_model_that_fails_by_itself_is_not_taken_for_a_stopped_one(bench):
    class Wrong(Model):
        def compute(self, step: Step, options: Any) -> list[StepOutput]:
            self._session.run(None, {"x": np.eye(3, dtype=np.float32)}, options)
            return []

    one = bench()
    one.give(0, Wrong(endless(), 1), ticks=10**12)
    (done,) = one.reported()
    assert not done.aborted
    assert done.error is not None


# More and fewer


def test_lanes_that_come_take_work_at_once(bench):
    one = bench(1)
    one.give(1)
    assert one.lanes.ready() is None
    one.lanes.resize(3)
    one.give(2)
    one.give(3)
    assert one.lanes.ready() is None and [lane.index for lane in one.lanes.lanes] == [0, 1, 2]
    assert [completion.candidate.stream for completion in one.end(3, 1, 2)] == [3, 1, 2]


def test_lanes_that_go_finish_what_they_compute_and_end(bench):
    one = bench(3)
    for stream in (1, 2):
        one.give(stream)
    threads = [begun(one, stream).thread for stream in (1, 2)]
    idle = one.lanes.lanes[2].device.thread
    one.lanes.resize(1)
    idle.join(PATIENCE_S)
    assert not idle.is_alive() and len(one.lanes.rests()) == 2
    one.end(1)
    assert one.lanes.ready() is not None
    (completion,) = one.end(2)
    threads[1].join(PATIENCE_S)
    assert completion.candidate.stream == 2 and not threads[1].is_alive() and threads[0].is_alive()
    one.give(3)
    assert one.lanes.ready() is None and [lane.index for lane in one.lanes.lanes] == [0]


def test_a_lane_that_was_to_go_may_stay(bench):
    one = bench(2)
    one.give(1)
    one.give(2)
    one.lanes.resize(1)
    one.lanes.resize(2)
    one.end(1, 2)
    one.give(3)
    one.give(4)
    assert one.lanes.ready() is None and [lane.index for lane in one.lanes.lanes] == [0, 1]


def test_a_lane_has_a_number_that_no_other_has(bench):
    one = bench(3)
    for stream in (1, 2, 3):
        one.give(stream)
    one.lanes.resize(1)
    one.end(2)  # the one in the middle ends first
    one.lanes.resize(3)
    assert sorted(lane.index for lane in one.lanes.lanes) == [0, 1, 2]
