"""The dispatcher: batches, limits, deadlines, clients that leave, models that fail, and what is counted of it all.

Most tests drive it from instant to instant (``host.Machine``); those at the end run real models on a real loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.engine.hosts import MS, PATIENCE_S, Machine, Sent, assert_at_rest, count
from tests.runtime.clocks import ANY_LENGTH_S, said_times
from tests.runtime.steps import draw
from tests.serving.live import heavy, mlp, save
from weft.base.errors import BadRequest, Cancelled, Expired, Failed, Overloaded
from weft.engine.policies import POLICIES, Candidate
from weft.runtime.onnxruntime_cpu.backend import CpuBackend
from weft.runtime.onnxruntime_cpu.model import CpuModel
from weft.runtime.onnxruntime_cpu.preparing import LoadOptions, prepare
from weft.serving import segment_observer, streams
from weft.serving.dispatch import Dispatcher
from weft.serving.segment_observer import LaneSpan, Recorder
from weft.serving.statistics import LATENCY_BOUNDS_NS, WINDOW_NS, Statistics
from weft.serving.streams import ServedModel
from weft.serving.tickets import ClientTicket

# Results and batches


def test_a_request_is_answered_with_its_result(machine):
    one = machine()
    model = one.model([3, 4])
    sent = one.send(model, value=21)
    assert sent.replies == []  # not before the loop's next turn
    one.run()
    assert sent.outcome["y"].tolist() == [[42]]
    assert sent.end_ms == 7
    assert_at_rest(one, model)


def test_requests_of_one_turn_share_a_batch_and_each_gets_its_own_rows(machine):
    one = machine()
    model = one.model([5], [6], [7], [8])
    sent = [one.send(model, value=value) for value in (1, 2, 3)]
    one.run()
    assert [each.outcome["y"].tolist() for each in sent] == [[[2]], [[4]], [[6]]]
    assert [each.ticket.batch_size for each in sent] == [3, 3, 3]
    assert [each.end_ms for each in sent] == [7, 7, 7]
    statistics = model.statistics
    assert (statistics.executions, statistics.inferences, statistics.mean_batch) == (1, 3, 3.0)
    assert statistics.batches == {3: [1, 7 * MS]}
    assert_at_rest(one, model)


def test_a_batch_takes_no_more_than_the_model_can(machine):
    one = machine("edf")
    model = one.model([5], [6])
    sent = [one.send(model, due_ms=1000 + value, value=value) for value in range(5)]
    one.run()
    assert [each.ticket.batch_size for each in sent] == [2, 2, 2, 2, 1]
    assert [each.outcome["y"].item() for each in sent] == [0, 2, 4, 6, 8]


def test_several_rows_of_one_request_stay_together(machine):
    one = machine()
    model = one.model([5], [6], [7], [8])
    pair = [one.send(model, rows=2, value=value) for value in (1, 2)]
    one.run()
    assert [each.outcome["y"].tolist() for each in pair] == [[[2], [2]], [[4], [4]]]
    assert [each.ticket.batch_size for each in pair] == [2, 2]
    assert model.statistics.inferences == 4


def test_more_rows_than_a_batch_holds_run_alone(machine):
    one = machine()
    model = one.model([5], [6])
    sent = [one.send(model, rows=3, value=value) for value in (1, 2)]
    one.run()
    assert [each.ticket.batch_size for each in sent] == [1, 1]
    assert sent[1].outcome["y"].tolist() == [[4]] * 3


def test_different_shapes_are_not_mixed(machine):
    one = machine()
    model = one.model([5], [6], [7], [8])
    sent = [one.send(model, rows=rows) for rows in (1, 2, 1, 2)]
    one.run()
    assert [each.ticket.batch_size for each in sent] == [2, 2, 2, 2]
    assert [len(each.outcome["y"]) for each in sent] == [1, 2, 1, 2]
    assert model.statistics.executions == 2


def test_inputs_whose_rows_differ_are_refused(machine):
    one = machine()
    model = one.model([5], [6])
    inputs = {"x": np.zeros((2, 1), np.float32), "z": np.zeros((3, 1), np.float32)}
    with pytest.raises(BadRequest, match=r"m0: its inputs must have the same first dimension, not \[2, 3\]"):
        one.dispatcher.submit(ClientTicket(model, inputs, lambda *_: None, one.clock.ticks + MS))
    assert_at_rest(one, model)


def test_a_batch_that_is_not_full_goes_when_its_time_is_up(machine):
    one = machine()
    model = one.model([5], [6], [7], batch_timeout_ms=10)
    sent = [one.send(model)]
    one.at(4, lambda: sent.append(one.send(model)))
    one.run()
    assert [each.end_ms for each in sent] == [16, 16]
    assert [each.ticket.batch_size for each in sent] == [2, 2]


def test_a_full_batch_does_not_wait(machine):
    one = machine()
    model = one.model([5], [6], batch_timeout_ms=10)
    sent = [one.send(model)]
    one.at(4, lambda: sent.append(one.send(model)))
    one.run()
    assert [each.end_ms for each in sent] == [10, 10]


def test_a_batch_whose_time_is_up_while_the_dispatcher_looks_is_not_forgotten(machine):
    one = machine()
    model = one.model([5], [6], batch_timeout_ms=10)
    sent = one.send(model)
    ready = one.dispatcher.lanes.ready

    def slow() -> Any:
        """The last nanosecond passes between seeing what could go and setting the timer."""
        device = ready()
        if one.now_ms < 10:
            one.clock.ticks = one.start + 10 * MS
        return device

    one.dispatcher.lanes.ready = slow
    one.run()
    assert sent.fate == "served"


# Limits


def test_a_model_with_a_full_queue_refuses_and_others_do_not(machine):
    one = machine()
    model, other = one.model([5], name="small", queue_size=2), one.model([5], name="other")
    for _ in range(2):
        one.send(model)
    with pytest.raises(Overloaded, match="small: exceeds its maximum queue size of 2") as caught:
        one.send(model)
    assert (caught.value.reason, caught.value.status) == ("queue_full", 503)
    assert caught.value.retry_after_s == pytest.approx(0.010)
    one.send(other)
    one.run()
    assert_at_rest(one, model, other)
    assert model.statistics.success == 2


def test_what_runs_is_not_in_the_queue(machine):
    one = machine()
    model = one.model([5], queue_size=1)
    one.send(model)
    one.run(1)
    one.send(model)
    with pytest.raises(Overloaded):
        one.send(model)
    one.run()
    one.send(model)
    one.run()
    assert_at_rest(one, model)


def test_all_queues_together_have_a_limit(machine):
    one = machine(most_waiting=3)
    models = [one.model([5], name=f"m{index}") for index in range(4)]
    for model in models[:3]:
        one.send(model)
    with pytest.raises(Overloaded, match="3 requests are waiting, which is the limit") as caught:
        one.send(models[3])
    assert caught.value.reason == "queue_full"
    one.run()
    assert_at_rest(one, *models)


# Deadlines


def test_a_strict_deadline_that_cannot_be_met_is_refused_at_once(machine):
    one = machine()
    model = one.model([5, 5])
    with pytest.raises(Expired, match=r"its deadline cannot be met: .* it takes 10\.0 ms") as caught:
        one.send(model, 9.9, strict=True)
    assert (caught.value.reason, caught.value.status) == ("unmeetable", 504)
    one.run()
    assert one.issues == []
    assert_at_rest(one, model)
    assert one.send(model, 10, strict=True)
    one.run()
    assert (model.statistics.met, model.statistics.missed) == (1, 0)


def test_the_way_back_of_a_model_that_has_left_the_device_counts(machine):
    one = machine()
    model = one.model([5, 5], away_s=0.004)
    with pytest.raises(Expired, match=r"its deadline cannot be met: .* it takes 14\.0 ms"):
        one.send(model, 13.9, strict=True)
    assert one.send(model, 14, strict=True)
    one.run()


@pytest.mark.parametrize(("looked_ms", "needed"), [(None, 45), (0, 45), (5, 40)], ids=["inbox", "queued", "running"])
def test_work_that_stands_before_it_counts(machine, looked_ms, needed):
    one = machine("edf")
    model, short = one.model([9, 11], name="model"), one.model([5], name="short")
    for _ in range(2):
        one.send(model, 30)
    if looked_ms is not None:
        one.run(looked_ms)
    with pytest.raises(Expired) as caught:
        one.send(short, needed - 0.1, strict=True)
    assert caught.value.reason == "unmeetable"
    taken = one.send(short, needed, strict=True)
    one.run()
    assert (taken.fate, taken.end_ms) == ("served", 45)


def test_what_is_due_later_does_not_stand_before_it(machine):
    one = machine()
    model, short = one.model([9, 9], name="model"), one.model([5], name="short")
    late = [one.send(model, 500) for _ in range(3)]
    one.run(1)
    urgent = one.send(short, 14, strict=True)  # 8 ms are left of the running segment
    one.run()
    assert (urgent.fate, urgent.end_ms) == ("served", 14)
    assert all(each.fate == "served" for each in late)
    assert (short.statistics.met, model.statistics.met) == (1, 3)


@pytest.mark.parametrize("beside", [[], [4]], ids=["free", "soon"])
def test_a_free_lane_takes_what_a_busy_one_could_not(machine, beside):
    two = machine(lanes=2)
    model, short = two.model([50, 50], name="model"), two.model([5], name="short")
    two.send(model, 5)  # late from the start, and running
    if beside:
        two.send(two.model(beside, name="beside"), 5)
    two.run(1)
    urgent = two.send(short, 9, strict=True)
    two.run()
    assert urgent.end_ms == (9 if beside else 6)


def test_a_strict_one_whose_time_runs_out_in_the_queue_is_answered_then_and_never_computed(machine):
    one = machine()
    slow, model = one.model([10], name="slow", factor=10), one.model([5], name="model")
    one.send(slow, 1000)
    one.run(1)
    sent = one.send(model, 30, strict=True)
    one.run()
    assert (sent.fate, sent.end_ms) == ("expired", 31)
    assert sent.outcome.status == 504
    assert model.loaded.ran == {}
    assert (model.statistics.missed, model.statistics.failures) == (1, {"expired": 1})
    assert_at_rest(one, slow, model)


def test_a_strict_one_that_falls_behind_is_given_up_between_segments(machine):
    one = machine("punctual")  # looks ahead
    model = one.model([10, 10, 10], factor=2)
    sent = one.send(model, 35, strict=True)
    one.run()
    assert (sent.fate, sent.end_ms) == ("expired", 20)
    assert model.loaded.ran == {0: 1}
    assert_at_rest(one, model)


def test_a_strict_one_whose_time_runs_out_while_it_runs_is_answered_then_and_not_continued(machine):
    one = machine("edf")  # does not look ahead
    model = one.model([10, 10, 10], factor=2)
    sent = one.send(model, 35, strict=True)
    one.run()
    assert (sent.fate, sent.end_ms) == ("expired", 35)
    assert model.loaded.ran == {0: 1, 1: 1}
    assert (model.statistics.segments, model.statistics.aborts) == (1, 1)  # nobody wants the second any more
    assert_at_rest(one, model)


def test_the_others_of_its_batch_go_on(machine):
    one = machine("edf")
    model = one.model([10, 10], [10, 10], factor=2)
    strict, soft = one.send(model, 25, strict=True), one.send(model, 30)
    one.run()
    assert (strict.fate, strict.end_ms) == ("expired", 25)
    assert (soft.fate, soft.end_ms) == ("served", 40)
    assert (model.statistics.met, model.statistics.missed) == (0, 2)
    assert_at_rest(one, model)


def test_a_strict_one_in_time_is_not_disturbed_by_its_timer(machine):
    one = machine()
    model = one.model([10])
    sent = one.send(model, 30, strict=True)
    one.run()
    assert (sent.fate, sent.end_ms, one.now_ms) == ("served", 10, 10)  # no timer is left that time could jump to


def test_soft_deadlines_are_missed_and_served_all_the_same(machine):
    one = machine()
    model = one.model([10])
    sent = one.send(model, 5)
    one.run()
    assert (sent.fate, sent.end_ms) == ("served", 10)
    assert (model.statistics.met, model.statistics.missed, model.statistics.success) == (0, 1, 1)


def test_an_answer_on_the_deadline_is_in_time(machine):
    one = machine()
    model = one.model([10])
    one.send(model, 10)
    one.run()
    assert (model.statistics.met, model.statistics.missed) == (1, 0)


def test_best_effort_is_not_counted(machine):
    one = machine()
    model = one.model([10])
    for due in (5, 100):
        one.send(model, due, best_effort=True)
    one.run()
    assert (model.statistics.met, model.statistics.missed, model.statistics.success) == (0, 0, 2)
    assert model.statistics.window(one.clock.ticks)[-2:] == (0, 0)


# Clients that leave


def test_one_that_leaves_before_anybody_looked(machine):
    one = machine()
    model = one.model([5], [5])
    gone, stays = one.send(model), one.send(model, value=4)
    one.dispatcher.withdraw(gone.ticket)
    assert isinstance(gone.outcome, Cancelled)
    one.run()
    assert (stays.outcome["y"].item(), stays.ticket.batch_size) == (8, 1)
    assert model.loaded.ran == {0: 1}
    assert_at_rest(one, model)


def test_one_that_leaves_the_queue(machine):
    one = machine()
    model = one.model([5])
    first, gone, last = (one.send(model, 100 + due) for due in range(3))
    one.run(1)
    one.dispatcher.withdraw(gone.ticket)
    assert gone.fate == "cancelled"
    one.run()
    assert [first.end_ms, last.end_ms] == [5, 10]
    assert model.loaded.ran == {0: 2}
    assert_at_rest(one, model)


def test_one_that_leaves_while_it_runs_is_not_continued(machine):
    one = machine()
    model, other = one.model([5, 5, 5], name="model"), one.model([3], name="other")
    gone, waits = one.send(model, 50), one.send(other, 900)
    one.run(2)
    assert one.issues == [(1, 0, 0)]  # the shorter one first
    one.run(4)
    one.dispatcher.withdraw(gone.ticket)
    assert gone.end_ms == 4
    one.run()
    assert waits.fate == "served"
    assert model.loaded.ran == {0: 1}
    assert_at_rest(one, model, other)


def test_one_of_a_batch_that_leaves_takes_nothing_from_the_others(machine):
    one = machine()
    model = one.model([5, 5], [6, 6], [7, 7])
    gone, second, third = (one.send(model, value=value) for value in (1, 2, 3))
    one.run(3)
    one.dispatcher.withdraw(gone.ticket)
    one.run()
    assert [gone.fate, second.outcome["y"].item(), third.outcome["y"].item()] == ["cancelled", 4, 6]
    assert model.statistics.success == 2
    assert_at_rest(one, model)


def test_leaving_twice_or_after_the_answer_changes_nothing(machine):
    one = machine()
    model = one.model([5])
    sent = one.send(model)
    one.run()
    one.dispatcher.withdraw(sent.ticket)
    gone = one.send(model)
    one.dispatcher.withdraw(gone.ticket)
    one.dispatcher.withdraw(gone.ticket)
    one.run()
    assert [sent.fate, gone.fate] == ["served", "cancelled"]
    assert model.statistics.failures == {"cancelled": 1}
    assert_at_rest(one, model)


def test_one_that_leaves_after_it_was_put_behind_the_others_is_not_computed(machine):
    one = machine("top-up")
    model = one.model([10])
    sent = [one.send(model, 100)]
    one.at(1, lambda: sent.extend([one.send(model, 11), one.send(model, 200)]))
    one.run(15)
    assert [each.ticket.began > 0 for each in sent] == [True, False, True]  # the second was late, the third is on time
    one.dispatcher.withdraw(sent[1].ticket)
    one.run()
    assert [each.fate for each in sent] == ["served", "cancelled", "served"]
    assert model.loaded.ran == {0: 2}
    assert_at_rest(one, model)


def test_who_leaves_is_not_counted_against_the_deadlines(machine):
    one = machine()
    model = one.model([5])
    one.dispatcher.withdraw(one.send(model).ticket)
    assert (model.statistics.met, model.statistics.missed) == (0, 0)


def test_an_answer_may_take_others_back_and_send_new_ones(machine):
    one = machine("edf")
    model = one.model([5])
    others: list[Sent] = []

    def replied(ticket: ClientTicket, outcome: Any) -> None:
        one.dispatcher.withdraw(others[0].ticket)
        others.append(one.send(model, value=9))

    first = one.send(model, 50, reply=replied)
    others += [one.send(model, 60), one.send(model, 70)]
    one.run()
    assert [first.fate, *(each.fate for each in others)] == ["served", "cancelled", "served", "served"]
    assert_at_rest(one, model)


@pytest.mark.parametrize("policy", ["fifo", "punctual", "fluid", "top-up"])
def test_where_work_waits_the_lane_has_its_next_segment_before_the_answer_goes_out(machine, policy):
    one = machine(policy)
    model, other = one.model([5, 5], name="model"), one.model([5], name="other")
    (lane,) = one.dispatcher.lanes.lanes
    given: list[tuple[int, int, int] | None] = []

    def replied(ticket: ClientTicket, outcome: Any) -> None:
        task = lane.task and lane.task.candidate
        given.append(task and (task.stream, task.query, task.layer))

    sent = [one.send(model, 100, reply=replied), one.send(model, 200, reply=replied)]
    one.at(12, lambda: sent.append(one.send(other, 900, reply=replied)))
    one.run()
    assert given == [(0, 1, 0), (1, 0, 0), None]
    assert [each.end_ms for each in sent] == [10, 20, 25]  # and goes out at the same instant all the same
    assert_at_rest(one, model, other)


def test_answers_do_not_wait_for_a_short_segment_that_takes_no_lane(machine):
    one = machine("fifo")
    model, short = one.model([5], name="model"), one.model([0.1, 0.1], name="short")
    sent = [one.send(model), one.send(short)]
    one.run()
    assert [each.end_ms for each in sent] == [5, 5.2]
    assert_at_rest(one, model, short)


def test_an_answer_goes_out_though_the_scheduler_fails_at_what_comes_next(machine, monkeypatch, caplog):
    class Weary(POLICIES["fifo"]):
        def decide(self, view):
            if one.issues:
                raise ZeroDivisionError("weary")
            return super().decide(view)

    monkeypatch.setitem(POLICIES, "fifo", Weary)
    one = machine("fifo")
    model, stopped = one.model([5]), []
    sent = [one.send(model, reply=lambda *_: stopped.append("the engine stopped" in caplog.text)) for _ in range(3)]
    with caplog.at_level(logging.ERROR):
        one.run()
    assert [each.fate for each in sent] == ["served", "internal", "internal"]
    assert stopped == [False, True, True]
    assert_at_rest(one, model)


def test_an_answer_that_cannot_be_given_does_not_keep_the_others_from_theirs(machine, caplog):
    one = machine()
    model = one.model([5], [5])

    def broken(ticket: ClientTicket, outcome: Any) -> None:
        raise OSError("the socket is gone")

    first, second = one.send(model, reply=broken), one.send(model)
    with caplog.at_level(logging.ERROR):
        one.run()
    assert second.fate == "served"
    assert len(first.replies) == 1
    assert "an answer could not be given" in caplog.text
    assert_at_rest(one, model)


# Models that leave


def leaving(machine: Machine) -> list[ServedModel]:
    """Close models as a library does, as soon as nobody needs them; returns those that were."""
    closed: list[ServedModel] = []

    def emptied(model: ServedModel) -> None:
        machine.dispatcher.forget(model)
        model.loaded.close()
        closed.append(model)

    machine.dispatcher.feed.emptied = emptied
    return closed


def test_a_model_is_let_go_when_its_last_request_is_answered(machine):
    one = machine()
    closed, model = leaving(one), one.model([5])
    one.send(model, 10), one.send(model, 20)
    one.run(7)
    assert closed == []
    one.run()
    assert closed == [model]
    assert_at_rest(one, model)


def test_a_model_whose_clients_all_left_stays_until_what_runs_has_ended(machine):
    one = machine()
    closed, model = leaving(one), one.model([5, 5])
    sent = one.send(model)
    one.run(2)
    one.dispatcher.withdraw(sent.ticket)
    assert closed == []
    one.run()
    assert closed == [model]
    assert model.loaded.ran == {0: 1}


def test_the_place_of_a_model_that_left_is_good_for_another(machine):
    one = machine()
    closed = leaving(one)
    for turn in range(5):
        model = one.model([5, 5], name=f"turn{turn}")
        sent = one.send(model, value=turn)
        one.run()
        assert sent.outcome["y"].item() == 2 * turn
    assert len(closed) == 5
    assert {stream for stream, _, _ in one.issues} == {0}


# Models that fail


def test_a_request_that_fails_alone_is_told_so(machine):
    one = machine()
    model = one.model([5], name="picky", poison=13)
    sent = one.send(model, value=13)
    one.run()
    assert isinstance(sent.outcome, Failed)
    assert str(sent.outcome) == "picky: ValueError: 13 is poison"
    assert model.statistics.failures == {"internal": 1}
    assert_at_rest(one, model)


def test_the_others_of_a_poisoned_batch_get_their_results(machine):
    one = machine("edf")
    model = one.model([5], [5], [5], [5], poison=13)
    sent = [one.send(model, 100 + value, value=value) for value in (12, 13, 14)]
    one.run()
    assert [each.fate for each in sent] == ["served", "internal", "served"]
    assert [sent[0].outcome["y"].item(), sent[2].outcome["y"].item()] == [24, 28]
    assert [each.ticket.batch_size for each in sent] == [1, 1, 1]  # tried again, each alone
    assert model.statistics.success == 2
    assert_at_rest(one, model)


def test_one_that_left_a_poisoned_batch_is_not_tried_again(machine):
    one = machine("edf")
    model = one.model([5], [5], poison=13)
    gone, poisonous = one.send(model, 100), one.send(model, 200, value=13)
    one.run(2)
    one.dispatcher.withdraw(gone.ticket)
    one.run()
    assert [gone.fate, poisonous.fate] == ["cancelled", "internal"]
    assert model.loaded.ran == {0: 2}
    assert_at_rest(one, model)


def test_requests_that_are_tried_again_can_leave_and_run_out_of_time(machine):
    one = machine("edf")
    model = one.model([5], [5], [5], poison=13, factor=2)
    sent = [one.send(model, due, value=13, strict=due == 16) for due in (15, 16, 17)]
    one.at(12, lambda: one.dispatcher.withdraw(sent[2].ticket))
    one.run()
    assert [(each.fate, each.end_ms) for each in sent] == [("internal", 20), ("expired", 16), ("cancelled", 12)]
    assert_at_rest(one, model)


def test_a_scheduler_that_fails_answers_everybody_and_tries_again(machine, monkeypatch, caplog):
    class Moody(POLICIES["fifo"]):
        moods = ["bad", "good"]  # noqa: RUF012 - shared on purpose

        def decide(self, view):
            if self.moods and self.moods.pop(0) == "bad":
                raise ZeroDivisionError("moody")
            return super().decide(view)

    monkeypatch.setitem(POLICIES, "fifo", Moody)
    one = machine("fifo")
    model = one.model([5])
    sent = [one.send(model, 100) for _ in range(3)]
    with caplog.at_level(logging.CRITICAL):
        one.run()
    assert {str(each.outcome) for each in sent} == {"the scheduler failed: ZeroDivisionError: moody"}
    later = one.send(model)
    one.run()
    assert later.fate == "served"
    assert_at_rest(one, model)


# Estimates


def expected_ms(machine: Machine, model: ServedModel, batch: int = 1) -> list[float]:
    return [1e3 * each for each in machine.dispatcher.streams.expected_s(model)[str(batch)]]


def test_expected_times_begin_with_what_was_measured_and_approach_what_is_seen(machine):
    one = machine()
    model = one.model([10, 4], factor=1.5)
    assert one.dispatcher.streams.expected_s(model) == {}
    errors = []
    for _ in range(25):
        one.send(model)
        one.run()
        errors.append(abs(expected_ms(one, model)[0] - 15))
    assert errors[0] < 5
    assert errors == sorted(errors, reverse=True)
    assert expected_ms(one, model) == pytest.approx([15, 6], rel=0.06)


def test_a_single_slow_run_does_not_change_much(machine):
    one = machine()
    model = one.model([10], factor=100)
    one.send(model)
    one.run()
    assert expected_ms(one, model) == pytest.approx([10 + 0.15 * 20], rel=1e-3)


def test_times_that_are_near_enough_change_nothing(machine):
    one = machine()
    model = one.model([10], factor=1.04)
    one.send(model)
    one.run()
    assert expected_ms(one, model) == [10]


def test_a_model_that_was_never_measured_is_taken_at_its_first_word(machine):
    one = machine()
    model = one.model([40, 8], [44, 9], measured=False)
    sent = one.send(model, 3, strict=True)  # who knows
    one.run()
    assert sent.fate == "expired"
    one.send(model)
    one.run()
    assert expected_ms(one, model) == [40, 8]
    assert expected_ms(one, model, 2) == [80, 16]
    with pytest.raises(Expired):
        one.send(model, 47, strict=True)


@pytest.mark.parametrize(("width", "guess"), [(3, 40), (12, 40)])
def test_shapes_never_seen_are_guessed_cautiously_and_then_known(machine, width, guess):
    one = machine()
    model = one.model([40], factor=3, batchable=False)
    inputs = {"x": np.zeros((1, width), np.float32)}
    one.dispatcher.submit(ClientTicket(model, inputs, lambda *_: None, one.clock.ticks + 1000 * MS))
    assert expected_ms(one, model) == [guess]
    one.run()
    assert expected_ms(one, model) == [120]


def test_the_error_of_the_estimates_is_reported(machine):
    one = machine()
    model = one.model([10], factor=1.25)
    one.send(model)
    one.run()
    assert model.statistics.prediction_error == pytest.approx(2.5 / 12.5)


@pytest.mark.parametrize("policy", ["fluid", "top-up", "lazy-batching", "punctual", "adaptive"])
def test_hand_overs_are_expected_where_batches_are_refilled_and_measured_apart(machine, monkeypatch, policy):
    one = machine(policy)
    kind, decide = type(one.dispatcher.policy), type(one.dispatcher.policy).decide

    def slowly(self, view):
        one.clock.ticks += 5 * MS
        return decide(self, view)

    monkeypatch.setattr(kind, "decide", slowly)
    model = one.model([10, 20])
    errors_ms = [0.0]
    for _ in range(25):
        one.send(model)
        one.run()
        errors_ms.append(model.statistics.segment_error_ns / MS)
    assert one.dispatcher.observer.hand_over_s == pytest.approx(0.005)
    assert one.dispatcher.streams.mean_s(model) == {"1": pytest.approx([0.010, 0.020])}
    if kind.traits.refills:
        assert expected_ms(one, model) == pytest.approx([15, 25], rel=0.06)
        assert errors_ms[-1] - errors_ms[-2] < 0.06 * (15 + 25)
        with pytest.raises(Expired):
            one.send(model, 35, strict=True)
    else:
        assert expected_ms(one, model) == [10, 20]
        assert errors_ms[-1] == 0


def test_the_first_word_of_a_model_that_was_never_measured_holds_its_hand_overs(machine):
    one = machine("fluid")
    model = one.model([40, 8], measured=False)
    stream = one.dispatcher.streams.stream_for(model, {"x": np.zeros((1, 1), np.float32)})
    for layer, took in enumerate((40, 8)):
        head = Candidate(stream.index, 0, layer, 0, MS, -1, stream.first_program, size=1)
        one.dispatcher.streams.learn(stream, head, took * MS, gap_ticks=2 * MS)
    assert expected_ms(one, model) == [42, 10]
    assert one.dispatcher.streams.mean_s(model) == {"1": [0.040, 0.008]}


def test_the_time_of_segments_that_were_started_together_is_divided_among_them(machine):
    one = machine()
    model, streams = one.model([10, 20, 30]), one.dispatcher.streams
    stream = streams.stream_for(model, {"x": np.zeros((1, 1), np.float32)})
    head = Candidate(stream.index, 0, 1, 0, 50 * MS, -1, stream.first_program, size=1)
    streams.learn(stream, head, 100 * MS, layers=2)
    assert expected_ms(one, model) == [10, 23, 34.5]  # LEARNING of the difference, in the ratio of 20 to 30
    assert streams.mean_s(model) == {}
    streams.learn(stream, head._replace(layer=0, compute=10 * MS), 10 * MS)
    assert streams.mean_s(model) == {"1": pytest.approx([0.010, 0.040, 0.060])}


def test_estimates_that_keep_requests_out_are_doubted(machine):
    one = machine()
    model = one.model([10], factor=3)
    for _ in range(20):
        one.send(model)
        one.run()
    assert expected_ms(one, model)[0] > 25
    refused = 0
    while True:
        try:
            one.send(model, 15, strict=True)
            break
        except Expired:
            refused += 1
            assert refused < 50
    assert refused > 1
    one.run()


# Shapes


@pytest.fixture
def few_streams(monkeypatch):
    monkeypatch.setattr(streams, "STREAMS", 8)


def test_the_number_of_shapes_told_apart_is_bounded(machine, few_streams):
    one = machine()
    model = one.model([1])
    for rows in range(1, 200):
        sent = one.send(model, rows=rows)
        one.run()
        assert len(sent.outcome["y"]) == rows
        assert len(model.streams) <= 8
    assert len({stream for stream, _, _ in one.issues}) <= 9
    assert len(one.dispatcher.streams.programs) <= 9


def test_shapes_that_are_in_use_are_kept(machine, few_streams):
    one = machine()
    model = one.model([1])
    sent = [one.send(model, 10_000, rows=rows) for rows in range(1, 40)]
    one.run()
    assert [len(each.outcome["y"]) for each in sent] == list(range(1, 40))
    for rows in range(100, 140):
        one.send(model, rows=rows)
        one.run()
    assert len(model.streams) <= 8  # what is idle makes room in time
    assert_at_rest(one, model)


def test_the_bound_holds_for_shapes_that_batch_differently(machine, few_streams):
    one = machine()
    model = one.model(*[[1]] * 64)
    for rows in np.random.default_rng(1).integers(1, 65, 800):
        one.send(model, rows=int(rows))
        one.run()
    assert len({stream for stream, _, _ in one.issues}) <= 24
    assert len(one.dispatcher.streams.programs) <= 400


def test_models_that_come_and_go_do_not_add_up(machine):
    one = machine()
    leaving(one)
    for turn in range(60):
        model = one.model(*[[1]] * (1, 8)[turn % 2], name=f"turn{turn}")
        one.send(model)
        one.run()
    assert len({stream for stream, _, _ in one.issues}) <= 4
    assert len(one.dispatcher.streams.programs) <= 4 * 8


# Counting


def test_a_batch_left_half_way_for_another_is_a_preemption(machine):
    one = machine()
    model, short = one.model(*[[5, 5, 5]], name="model"), one.model([2], name="short")
    long_one = one.send(model, 900)
    one.at(6, lambda: one.send(short, 10))
    one.run()
    assert (model.statistics.preemptions, short.statistics.preemptions) == (1, 0)
    assert one.issues == [(0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 2)]
    assert long_one.end_ms == 17


def test_one_batch_after_another_is_none(machine):
    one = machine()
    model, short = one.model([5, 5], name="model"), one.model([2], name="short")
    for _ in range(3):
        one.send(model), one.send(short)
    one.run()
    assert (model.statistics.preemptions, short.statistics.preemptions) == (0, 0)


def test_a_batch_that_goes_on_beside_another_is_none(machine):
    two = machine(lanes=2)
    model, short = two.model([5, 5, 5], name="model"), two.model([2, 2], name="short")
    two.send(model), two.send(short), two.send(short)
    two.run()
    assert (model.statistics.preemptions, short.statistics.preemptions) == (0, 0)


def test_a_segment_stopped_half_way_is_counted_and_done_again(machine):
    one = machine()
    model, short = one.model([100], name="model"), one.model([5], name="short")
    long_one = one.send(model, 1000)
    one.at(10, lambda: one.send(short, 10))
    one.run()
    assert long_one.end_ms == 115
    assert (model.statistics.aborts, short.statistics.aborts) == (1, 0)
    assert (model.statistics.segments, model.statistics.success) == (1, 1)
    assert [span.outcome for span in one.dispatcher.recorder.since(0)] == ["aborted", "done", "done"]
    assert expected_ms(one, model) == [100]  # nothing is learned from it


def test_times_are_accounted_to_queue_and_compute(machine):
    one = machine("fifo")
    model = one.model([5, 3])
    one.send(model), one.send(model)
    one.run()
    statistics = model.statistics
    assert (statistics.queue_ns, statistics.infer_ns) == (8 * MS, 16 * MS)
    assert statistics.total_ns == 24 * MS
    assert (statistics.segments, statistics.segment_ns) == (4, 16 * MS)
    assert statistics.last_ms > 0
    assert sum(statistics.latencies) == 2


def test_short_segments_take_no_lane(machine):
    one = machine()
    model = one.model([0.1, 0.1])
    sent = [one.send(model, value=value) for value in (1, 2)]
    one.run()
    assert [each.outcome["y"].item() for each in sent] == [2, 4]
    assert [each.end_ms for each in sent] == [0.2, 0.4]
    assert one.stage.begun.empty()
    assert_at_rest(one, model)


def test_the_recorder_shows_what_ran_where(machine):
    two = machine(lanes=2)
    model = two.model([5, 6], name="model")
    two.send(model, 50), two.send(model, 60)
    two.run()
    spans = two.dispatcher.recorder.since(0)
    assert sorted({span.lane for span in spans}) == [0, 1]
    assert Counter(span.segment for span in spans) == {"1/2": 2, "2/2": 2}
    assert all((span.model, span.rows, span.outcome) == ("model", 1, "done") for span in spans)
    assert all(span.end_ns - span.start_ns == span.predicted_ns for span in spans)


def span(end_ns: int, lane: int = 0) -> LaneSpan:
    return LaneSpan(lane, "m", "1/1", end_ns - 1000, end_ns, 900, 1, 0, "done")


def test_the_recorder_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(segment_observer, "SPANS", 5)
    memory = Recorder()
    for end in range(1, 100):
        memory.spans.append(span(end))
    assert [each.end_ns for each in memory.since(0)] == [95, 96, 97, 98, 99]
    assert [each.end_ns for each in memory.since(97)] == [98, 99]
    assert memory.since(99) == []


def test_segments_that_were_started_together_are_shown_one_by_one(monkeypatch):
    memory = Recorder()
    memory.spans.append(LaneSpan(0, "m", "2/4", 1000, 1600, 400, 1, 0, "done", parts_ns=(100, 100, 200)))
    shown = [(each.segment, each.start_ns, each.end_ns, each.predicted_ns) for each in memory.since(0)]
    assert shown == [("2/4", 1000, 1150, 100), ("3/4", 1150, 1300, 100), ("4/4", 1300, 1600, 200)]
    assert [each.segment for each in memory.since(1300)] == ["4/4"]
    assert [event["ts"] for event in memory.as_perfetto()["traceEvents"][1:]] == [1.0, 1.15, 1.3]
    monkeypatch.setattr(segment_observer, "SPANS", 2)
    assert [each.segment for each in memory.since(0)] == ["3/4", "4/4"]


def test_the_recorder_is_a_trace():
    memory = Recorder()
    assert memory.as_perfetto() == {"displayTimeUnit": "ms", "traceEvents": []}
    memory.spans.append(span(5_000, lane=1))
    name, event = memory.as_perfetto()["traceEvents"]
    assert (name["ph"], name["args"]) == ("M", {"name": "lane 1"})
    assert (event["ph"], event["tid"], event["name"], event["ts"], event["dur"]) == ("X", 1, "m", 4.0, 1.0)


def test_the_window_is_the_last_seconds():
    statistics = Statistics()
    assert statistics.window(0) == (0.0, None, None, None, 0, 0)
    for second in range(30):
        statistics.answered(second * 10**9, 2 * MS, second % 2 == 0)
    statistics.failed(29 * 10**9, MS, "expired", True)
    statistics.failed(29 * 10**9, MS, "cancelled", True)
    window = statistics.window(29 * 10**9)
    kept = 1 + WINDOW_NS // 10**9
    assert window.rate == pytest.approx(kept / 10)
    assert (window.p50_ms, window.p99_ms) == (2.0, 2.0)
    assert (window.met, window.missed) == (5, 7)
    assert (statistics.met, statistics.missed) == (15, 16)
    assert len(statistics.recent) == kept + 1, "nothing older is held"


def test_latencies_are_counted_by_their_bounds():
    statistics = Statistics()
    for latency in (
        0,
        LATENCY_BOUNDS_NS[0],
        LATENCY_BOUNDS_NS[0] + 1,
        LATENCY_BOUNDS_NS[-1],
        LATENCY_BOUNDS_NS[-1] + 1,
    ):
        statistics.answered(0, latency, None)
    assert statistics.latencies[:2] == [2, 1]
    assert statistics.latencies[-2:] == [1, 1]
    assert list(LATENCY_BOUNDS_NS) == sorted(LATENCY_BOUNDS_NS)


# Whatever clients do


@st.composite
def happenings(draw: st.DrawFn) -> list[tuple[float, Any]]:
    """Requests and withdrawals at random instants."""
    send = st.tuples(
        st.just("send"),
        st.integers(0, 2),
        st.integers(1, 3),
        st.integers(1, 60) | st.just(1000),
        st.sampled_from(["soft", "soft", "strict", "best_effort"]),
        st.sampled_from([1, 3, 9]),
        st.sampled_from([1.0, 2.0, 13.0]),
    )
    leave = st.tuples(st.just("leave"), st.integers(0, 30))
    return draw(st.lists(st.tuples(st.integers(0, 80), send | send | leave), min_size=1, max_size=30))


@pytest.mark.parametrize("policy", ["punctual", "fifo", "edf", "priority", "prema"])
@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    story=happenings(),
    lanes=st.integers(1, 2),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
    timeout=st.sampled_from([0, 4]),
)
@example(  # the first ends at the very moment at which the second is sent
    story=[(28, ("send", 0, 3, 1000, "soft", 1, 1.0)), (35, ("send", 0, 1, 1000, "soft", 1, 1.0))],
    lanes=1,
    factor=0.5,
    timeout=0,
)
def test_whatever_happens_everybody_is_answered_once_and_all_adds_up(
    policy, story, lanes, factor, timeout, monkeypatch
):
    machine = Machine(monkeypatch, policy, lanes=lanes, most_waiting=12)
    try:
        models = [
            machine.model([4, 6], [5, 7], [6, 8], name="a", factor=factor, queue_size=6, batch_timeout_ms=timeout),
            machine.model([25], name="b", factor=factor, poison=13),
            machine.model([0.1, 3, 0.1], [0.1, 4, 0.1], name="c", factor=factor, poison=13),
        ]
        refused: Counter[str] = Counter()
        for at, what in story:
            machine.at(at, lambda what=what: happen(machine, models, what, refused))
        machine.run()
        check_books(machine, models, refused, sum(what[0] == "send" for _, what in story))
    finally:
        machine.close()


def happen(machine: Machine, models: list[ServedModel], what: Any, refused: Counter[str]) -> None:
    if what[0] == "leave":
        if what[1] < len(machine.sent):
            machine.dispatcher.withdraw(machine.sent[what[1]].ticket)
        return
    _, model, rows, due, kind, priority, value = what
    terms = {} if kind == "soft" else {kind: True}
    try:
        machine.send(models[model], due, rows=rows, value=value, priority=priority, **terms)
    except (Overloaded, Expired) as error:
        refused[error.reason] += 1
    waiting = sum(not each.replies and not each.ticket.began for each in machine.sent)
    assert machine.dispatcher.waiting == waiting == sum(each.line.waiting for each in models)
    assert machine.dispatcher.pending == sum(not each.replies for each in machine.sent)


def check_books(machine: Machine, models: list[ServedModel], refused: Counter[str], asked: int) -> None:
    assert_at_rest(machine, *models)
    assert len(machine.sent) + refused.total() == asked
    assert refused.keys() <= {"queue_full", "unmeetable"}
    for sent in machine.sent:
        if sent.fate == "served":
            assert np.array_equal(sent.outcome["y"], sent.inputs["x"] * 2)
        elif sent.fate == "internal":
            assert sent.inputs["x"][0, 0] == 13
        elif sent.fate == "expired":
            assert sent.ticket.strict
        else:
            assert sent.fate == "cancelled"
    spans = machine.dispatcher.recorder.since(0)
    for model in models:
        mine = [sent for sent in machine.sent if sent.ticket.model is model]
        counted, fates = model.statistics, Counter(sent.fate for sent in mine)
        assert counted.success == fates.pop("served", 0) == sum(counted.latencies)
        assert counted.failures == fates
        judged = [sent for sent in mine if not sent.ticket.best_effort and sent.fate != "cancelled"]
        met = [s for s in judged if s.fate == "served" and s.replies[0][0] + machine.start <= s.ticket.due]
        assert (counted.met, counted.missed) == (len(met), len(judged) - len(met))
        assert counted.inferences == sum(rows * count for rows, (count, _) in counted.batches.items())
        assert counted.executions == sum(count for count, _ in counted.batches.values())
        outcomes = Counter(span.outcome for span in spans if span.model == model.name)
        assert (counted.segments, counted.aborts) == (outcomes["done"], outcomes["aborted"])
        done = [span for span in spans if span.model == model.name and span.outcome == "done"]
        assert counted.segment_ns == sum(span.end_ns - span.start_ns for span in done)


# Real models on a real loop


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def small(folder) -> CpuModel:
    return prepare(mlp(folder / "mlp.onnx"), LoadOptions(max_batch=4))


@pytest.fixture(scope="module")
def large(folder) -> CpuModel:
    with said_times():
        return prepare(
            heavy(folder / "heavy.onnx", layers=12, width=256), LoadOptions(grain_s=ANY_LENGTH_S, max_pieces=8)
        )


@pytest.fixture(scope="module")
def table(folder) -> CpuModel:
    """Looks numbers up: y = t[i]; one beyond its end is an error."""
    graph = helper.make_graph(
        [helper.make_node("Gather", ["t", "i"], ["y"])],
        "table",
        [helper.make_tensor_value_info("i", TensorProto.INT64, ["n", 1])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 1])],
        [numpy_helper.from_array(np.arange(0, 100, 10, dtype=np.float32), "t")],
    )
    return prepare(save(graph, folder / "table.onnx"), LoadOptions(max_batch=8))


@pytest.fixture(scope="module")
def free(folder) -> CpuModel:
    """Doubles what has any length."""
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])],
        "free",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "length"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "length"])],
    )
    return prepare(save(graph, folder / "free.onnx"), LoadOptions(max_batch=4, shapes={"x": (1, 8)}))


class Client:
    """Sends requests to a dispatcher on the running loop."""

    def __init__(self, policy: str = "punctual", **settings: Any) -> None:
        self.dispatcher = Dispatcher(asyncio.get_running_loop(), policy, backend=CpuBackend(), **settings)
        self.replies: Counter[ClientTicket] = Counter()

    def send(self, model: ServedModel, due_s: float = 3600, **ask: Any) -> Callable[..., asyncio.Future[Any]]:
        def with_inputs(**inputs: np.ndarray) -> asyncio.Future[Any]:
            future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

            def replied(ticket: ClientTicket, outcome: Any) -> None:
                count(ticket, outcome, self.dispatcher.lanes.now())
                self.replies[ticket] += 1
                future.set_result((ticket, outcome))

            due = self.dispatcher.lanes.now() + round(due_s * 1e9)
            self.dispatcher.submit(ClientTicket(model, inputs, replied, due, **ask))
            return future

        return with_inputs


def on_loop(test: Callable[[Client], Any], **settings: Any) -> Any:
    """Run a coroutine with a client, and see that nothing is left over."""

    async def run() -> Any:
        client = Client(**settings)
        try:
            result = await test(client)
            assert (client.dispatcher.pending, client.dispatcher.waiting) == (0, 0)
            assert set(client.replies.values()) <= {1}
            return result
        finally:
            client.dispatcher.close()

    return asyncio.run(run())


@pytest.mark.parametrize("lanes", [1, 2])
def test_real_results_are_those_of_onnx_runtime(small, large, folder, lanes):
    async def test(client: Client) -> list[Any]:
        light, big = ServedModel("small", small), ServedModel("large", large)
        futures = [client.send(light)(x=draw(2, 64, seed=seed)) for seed in range(12)]
        futures += [client.send(big)(x=draw(64, 256, seed=seed)) for seed in range(3)]
        answers = [await future for future in futures]
        assert (light.leases, big.leases) == (0, 0)
        return answers

    answers = on_loop(test, lanes=lanes)
    plain = {
        name: ort.InferenceSession(str(folder / f"{name}.onnx"), providers=["CPUExecutionProvider"])
        for name in ("mlp", "heavy")
    }
    for index, (_, outputs) in enumerate(answers[:12]):
        (expected,) = plain["mlp"].run(None, {"x": draw(2, 64, seed=index)})
        np.testing.assert_allclose(outputs["y"], expected, rtol=1e-5, atol=1e-5)
    for index, (_, outputs) in enumerate(answers[12:]):
        (expected,) = plain["heavy"].run(None, {"x": draw(64, 256, seed=index)})
        np.testing.assert_allclose(outputs["y"], expected, rtol=1e-4, atol=1e-5)


def test_requests_of_one_turn_of_a_real_loop_are_one_batch(small):
    async def test(client: Client) -> None:
        model = ServedModel("small", small)
        answers = [await each for each in [client.send(model)(x=draw(1, 64, seed=seed)) for seed in range(4)]]
        assert [ticket.batch_size for ticket, _ in answers] == [4] * 4
        assert [outputs["y"].shape for _, outputs in answers] == [(1, 10)] * 4
        alone = [await client.send(model)(x=draw(1, 64, seed=seed)) for seed in range(4)]
        for (_, together), (ticket, by_itself) in zip(answers, alone, strict=True):
            assert ticket.batch_size == 1
            np.testing.assert_allclose(together["y"], by_itself["y"], rtol=1e-5, atol=1e-5)

    on_loop(test)


def test_a_real_batch_with_a_poisonous_member(table):
    async def test(client: Client) -> None:
        model = ServedModel("table", table)
        wanted = [3, 99, 0, 9, 7]
        futures = [client.send(model)(i=np.array([[index]])) for index in wanted]
        outcomes = [outcome for _, outcome in [await future for future in futures]]
        for index, outcome in zip(wanted, outcomes, strict=True):
            if index == 99:
                assert isinstance(outcome, BadRequest)
                assert "table cannot compute these inputs" in str(outcome)
                assert "\n" not in str(outcome)
            else:
                assert outcome["y"].tolist() == [[10.0 * index]]
        assert model.statistics.failures == {"bad_request": 1}
        assert model.statistics.missed == 0  # it is the client's fault
        assert model.leases == 0

    on_loop(test)


def test_real_inputs_of_every_length(free, monkeypatch):
    monkeypatch.setattr(streams, "STREAMS", 8)

    async def test(client: Client) -> None:
        model = ServedModel("free", free)
        for length in range(1, 60):
            futures = [client.send(model)(x=draw(1, length, seed=seed)) for seed in range(2)]
            for seed, future in enumerate(futures):
                ticket, outputs = await future
                assert ticket.batch_size == 2
                assert np.array_equal(outputs["y"], 2 * draw(1, length, seed=seed))
            assert len(model.streams) <= 8

    on_loop(test)


def test_a_real_urgent_request_overtakes_a_long_one_between_segments(small, large):
    async def test(client: Client) -> None:
        light, big = ServedModel("small", small), ServedModel("large", large)
        watch, urgent = client.dispatcher.lanes.watch, []

        def first_segment_ended(lane: int, completion: Any) -> None:
            assert watch
            watch(lane, completion)
            if not urgent:
                urgent.append(client.send(light, 1800)(x=draw(1, 64)))

        client.dispatcher.lanes.watch = first_segment_ended
        long_one = client.send(big)(x=draw(64, 256))
        order = []
        long_one.add_done_callback(lambda _: order.append("long"))
        while not urgent:
            await asyncio.sleep(0)
        urgent[0].add_done_callback(lambda _: order.append("urgent"))
        await long_one
        await urgent[0]
        assert order == ["urgent", "long"]
        assert big.statistics.preemptions == 1

    assert len(large.segments) > 3
    on_loop(test)


class Held(CpuModel):
    """A model whose segments wait on their lane until the test lets them go on."""

    def __init__(self, model: CpuModel) -> None:
        super().__init__(model.blueprint, model.sessions)
        self.go_on = threading.Event()

    def run_segment(self, index: int, values: dict[str, Any], options: Any = None) -> dict[str, Any]:
        assert self.go_on.wait(PATIENCE_S)
        return super().run_segment(index, values, options)


def test_a_real_deadline_runs_out(large):
    held = Held(large)

    def admitted(client: Client, model: ServedModel) -> asyncio.Future[Any]:
        """A machine may be too busy to take a request before its deadline is too near; then it gets a later one."""
        for due_s in (0.05, 0.5, 5):
            with contextlib.suppress(Expired):
                return client.send(model, due_s, strict=True)(x=draw(64, 256))
        return client.send(model, 50, strict=True)(x=draw(64, 256))

    async def test(client: Client) -> None:
        model = ServedModel("held", held)
        before = client.send(model)(x=draw(64, 256))
        _, outcome = await admitted(client, model)
        assert isinstance(outcome, Expired)
        assert outcome.reason == "expired"
        held.go_on.set()
        await before
        assert model.leases == 0
        assert model.statistics.executions == 1

    on_loop(test, policy="edf")


def test_a_real_client_leaves_while_its_request_runs(large):
    async def test(client: Client) -> None:
        model, tickets = ServedModel("large", large), []
        watch = client.dispatcher.lanes.watch

        def leave(lane: int, completion: Any) -> None:
            assert watch
            watch(lane, completion)
            if tickets and not tickets[0].gone:
                client.dispatcher.withdraw(tickets[0])

        client.dispatcher.lanes.watch = leave
        emptied = asyncio.Event()
        client.dispatcher.feed.emptied = lambda _: emptied.set()
        future = client.send(model)(x=draw(64, 256))
        tickets += client.dispatcher.feed.unanswered
        _, outcome = await future
        await emptied.wait()
        assert isinstance(outcome, Cancelled)
        assert model.statistics.segments == 1  # it was not continued
        assert model.leases == 0

    on_loop(test)


def test_closing_finishes_what_runs(large):
    async def test() -> None:
        client = Client()
        model = ServedModel("large", large)
        client.send(model)(x=draw(64, 256))
        await asyncio.sleep(0)  # the lane has it
        await asyncio.sleep(0)
        client.dispatcher.close()
        assert not any(lane.device.thread.is_alive() for lane in client.dispatcher.lanes.lanes)

    asyncio.run(test())


# Requests nobody waits for, and engines that stumble


@pytest.mark.parametrize("policy", ["edf", "fifo", "layerweaver+"])
def test_a_late_batch_whose_client_went_away_is_not_computed_again(machine, policy):
    one = machine(policy)
    model = one.model([30, 30])
    first, late = one.send(model, 1000), one.send(model, 10)
    one.at(70, lambda: one.dispatcher.withdraw(late.ticket))
    one.run()
    assert (first.fate, late.fate) == ("served", "cancelled")
    assert len(one.issues) == 3  # two segments of the first, one of the other
    assert_at_rest(one, model)


def test_an_answered_request_keeps_no_inputs(machine):
    one = machine()
    sent = one.send(one.model([5]), 1000, strict=True)
    one.run()
    assert sent.fate == "served"
    assert sent.ticket.inputs == {}


def test_a_deadline_that_passed_since_the_last_step_is_seen_though_no_lane_is_free(machine):
    one = machine("fifo")
    one.send(one.model([100]), 1000)
    strict = one.send(one.model([1], name="other"), 110, strict=True)
    one.run(50)
    one.clock.ticks = one.start + 120 * MS
    one.dispatcher._set_batch_timer()
    one.loop.turn()
    assert strict.fate == "expired"
    one.run()


def test_who_comes_when_the_engine_stumbles_is_told_and_so_are_the_others(machine, monkeypatch):
    one = machine()
    model = one.model([10])
    waiting = one.send(model, 1000)

    def stumble() -> None:
        raise ValueError("no way")

    with monkeypatch.context() as stumbling:
        stumbling.setattr(one.dispatcher._engine, "account", stumble)
        one.dispatcher.lanes.ended.append(None)
        with pytest.raises(Failed, match="the scheduler failed: ValueError: no way"):
            one.send(model, 1000)
    one.run()
    assert waiting.fate == "internal"
    assert_at_rest(one, model)
