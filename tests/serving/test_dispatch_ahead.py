"""The dispatcher on lanes that take segments ahead: nobody is answered twice, and nothing is let go before it ended."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.engine.hosts import Machine, assert_at_rest
from weft.base.errors import WorkerDied
from weft.serving.streams import ServedModel

Make = Any


def held(machine: Machine, lane: int = 0) -> list[tuple[int, int]]:
    """Batch and segment of what a lane holds."""
    tasks = machine.dispatcher.lanes.lanes[lane].tasks
    return [(task.candidate.query, task.candidate.layer) for task in tasks]


def spans(machine: Machine) -> list[tuple[float, float, str]]:
    """What the recorder has of the only lane, in milliseconds."""
    found = machine.dispatcher.recorder.since(0)
    return [((s.start_ns - machine.start) / 1e6, (s.end_ns - machine.start) / 1e6, s.outcome) for s in found]


def test_the_next_segment_is_queued_while_one_runs_and_the_answer_is_the_same(machine: Make) -> None:
    one = machine(ahead=1)
    model = one.model([5, 4, 3])
    sent = one.send(model, value=21)
    one.run(1)
    assert held(one) == [(0, 0), (0, 1)] and spans(one) == []
    one.run(6)
    assert held(one) == [(0, 1), (0, 2)]
    one.run()
    assert sent.end_ms == 12 and np.array_equal(sent.outcome["y"], 2 * sent.inputs["x"])
    assert spans(one) == [(0, 5, "done"), (5, 9, "done"), (9, 12, "done")]
    assert model.statistics.segments == 3 and sent.ticket.compute_ns == 12_000_000
    assert one.dispatcher.lanes.lanes[0].busy_ticks == 12_000_000
    assert_at_rest(one, model)


def test_the_next_batch_is_queued_behind_the_last_segment_of_one(machine: Make) -> None:
    one = machine("fifo", ahead=1)
    model = one.model([5])
    sent = [one.send(model) for _ in range(3)]
    one.run(1)
    assert held(one) == [(0, 0), (1, 0)]
    one.run()
    assert [each.end_ms for each in sent] == [5, 10, 15]
    assert_at_rest(one, model)


def test_a_batch_that_fails_is_told_so_once_and_others_go_on(machine: Make) -> None:
    one = machine("fifo", ahead=1)
    model = one.model([5, 5, 5], poison=-1)
    bad, good = one.send(model, value=-1), one.send(model, value=1)
    one.run()
    assert bad.fate == "internal" and "poison" in str(bad.outcome)
    assert good.fate == "served"
    assert [outcome for _, _, outcome in spans(one)][:2] == ["failed", "failed"]
    assert_at_rest(one, model)


def test_a_request_whose_worker_dies_while_its_next_segment_is_queued_is_tried_again(machine: Make) -> None:
    one = machine(ahead=1)
    model = one.model([5, 5, 5])
    plain, deaths = model.loaded.run_segment, [WorkerDied("it died", suspects=0, again_s=0.002)]

    def run_segment(index: int, values: Any, options: Any = None) -> Any:
        made = plain(index, values, options)
        if index == 1 and deaths:
            raise deaths.pop()
        return made

    model.loaded.run_segment = run_segment
    sent = one.send(model, value=3)
    one.run()
    assert sent.fate == "served" and np.array_equal(sent.outcome["y"], 2 * sent.inputs["x"])
    assert sent.end_ms == 10 + 2 + 15 and sent.ticket.tries == 1
    assert_at_rest(one, model)


def given_up(machine: Machine, model: ServedModel) -> list[float]:
    """When nobody needs the model any more, which then closes."""
    times: list[float] = []

    def emptied(body: ServedModel) -> None:
        times.append(machine.now_ms)
        body.loaded.close()

    machine.dispatcher.feed.emptied = emptied
    return times


def test_a_client_that_leaves_while_a_segment_is_queued_takes_that_with_it(machine: Make) -> None:
    one = machine(ahead=1)
    model = one.model([5, 5, 5])
    emptied, sent = given_up(one, model), one.send(model)
    one.run(1)
    assert held(one) == [(0, 0), (0, 1)]
    one.dispatcher.withdraw(sent.ticket)
    one.run(2)
    assert sent.fate == "cancelled" and held(one) == [(0, 0)]
    assert emptied == [] and model.leases == 1  # a segment of it still runs
    one.run()
    assert emptied == [5.0] and model.loaded.ran == {0: 1}
    assert [outcome for _, _, outcome in spans(one)] == ["aborted", "done"]
    assert_at_rest(one, model)


def test_a_strict_request_that_expires_while_a_segment_is_queued_does_too(machine: Make) -> None:
    one = machine(ahead=1)
    model, other = one.model([5, 5, 5], factor=2), one.model([3])
    emptied, late = given_up(one, model), one.send(model, 16, strict=True)
    one.run(15)
    assert held(one) == [(0, 1), (0, 2)]
    after = one.send(other, 1000)
    one.run()
    assert late.fate == "expired" and late.end_ms == 16
    assert emptied[0] == 20.0 and model.loaded.ran == {0: 1, 1: 1}
    assert after.fate == "served" and after.end_ms == 23
    assert_at_rest(one, model, other)


def test_whoever_is_left_for_another_and_waits_behind_it_was_preempted(machine: Make) -> None:
    one = machine("edf", ahead=1)
    long, urgent = one.model([5, 5, 5, 5], name="long"), one.model([2], name="urgent")
    first = one.send(long, 1000)
    one.at(1, lambda: one.send(urgent, 20))
    one.run()
    assert first.end_ms == 22 and one.sent[1].end_ms == 12  # behind the segment that was queued when it came
    assert long.statistics.preemptions == 1 and urgent.statistics.preemptions == 0
    assert_at_rest(one, long, urgent)


def test_what_never_ends_is_stopped_though_its_end_was_told(machine: Make) -> None:
    one = machine(ahead=1)
    endless, other = one.model([5, 5], factor=1e6, max_compute_s=0.1), one.model([3])
    sent = one.send(endless, 10_000)
    one.run(50)
    after = one.send(other, 10_000)
    one.run()
    assert sent.fate == "too_long" and sent.end_ms == 100
    assert after.fate == "served" and after.end_ms == 103
    assert_at_rest(one, endless, other)


def test_it_is_stopped_though_whoever_waited_for_it_went_long_before(machine: Make) -> None:
    one = machine(ahead=1)
    endless, other = one.model([5, 5], factor=1e6, max_compute_s=0.1), one.model([3])
    sent = one.send(endless, 10_000)
    one.run(50)
    one.dispatcher.withdraw(sent.ticket)
    after = one.send(other, 10_000)
    one.run()
    assert sent.fate == "cancelled" and after.fate == "served" and after.end_ms == 103
    assert_at_rest(one, endless, other)


def test_exits_are_waited_for_and_who_stays_goes_on(machine: Make) -> None:
    from weft.engine.steering import Steering

    one = machine("fifo", ahead=1)
    model = one.model([5, 5, 5], [5, 5, 5], exits=(2,), steering=Steering(0.5))
    leaves, stays = one.send(model, sure=[1.0]), one.send(model, sure=[0.0])
    one.run(6)
    assert held(one) == [(0, 1)]  # nobody knows who goes on
    one.run()
    assert (leaves.end_ms, stays.end_ms) == (10, 15)
    assert_at_rest(one, model)
