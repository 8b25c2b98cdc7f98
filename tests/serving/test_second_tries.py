"""Requests whose worker dies: who is tried again, who is not, and who is kept out for a while."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.engine.hosts import MS, assert_at_rest
from weft.base.errors import BadRequest, Expired, Overloaded, WorkerDied
from weft.runtime.breaker import Breaker, BreakerLimits
from weft.runtime.client_memory import LendingTerms, LentTensor
from weft.serving import client_feed
from weft.serving.client_feed import MOST_TRIES, QUARANTINE_S
from weft.serving.tickets import BatchWork

POISON = 13.0


def dying(model: Any, *errors: WorkerDied, poison: float | None = None) -> None:
    """Have the worker of a scripted model die of these, one after another, or of a value as often as it comes."""
    run, left = model.loaded.run_segment, list(errors)

    def run_segment(index: int, values: dict[str, Any], options: Any = None) -> dict[str, Any]:
        made: dict[str, Any] = run(index, values, options)
        if poison is not None and (values["x"] == poison).any():
            raise WorkerDied("the worker that computed it died: SIGSEGV", suspects=1)
        if left and poison is None:
            raise left.pop(0)
        return made

    model.loaded.run_segment = run_segment


def died(suspects: int = 1, again_s: float = 0.0) -> WorkerDied:
    return WorkerDied("the worker that computed it died: SIGKILL", suspects=suspects, again_s=again_s)


def test_a_request_whose_worker_died_has_one_more_try(machine):
    one = machine()
    model = one.model([5])
    dying(model, died())
    sent = one.send(model, value=4)
    one.run()
    assert sent.outcome["y"].tolist() == [[8]] and sent.end_ms == 10
    assert_at_rest(one, model)


def test_it_has_no_third_try(machine, caplog):
    one = machine()
    model = one.model([5], name="net")
    dying(model, died(), died(suspects=2))
    sent = one.send(model)
    one.run()
    assert isinstance(sent.outcome, WorkerDied) and sent.fate == "worker_died"
    assert str(sent.outcome) == "net: the worker that computed it died: SIGKILL"
    assert "net: a request was on 2 workers when they died" in caplog.text
    assert one.dispatcher.feed.retries.quarantines == 0  # another one may have been why
    assert_at_rest(one, model)


def test_members_of_a_batch_are_tried_singly_and_only_the_one_to_blame_fails(machine):
    one = machine()
    model = one.model([5], [6], [7], [8], name="net")
    dying(model, poison=POISON)
    sent = [one.send(model, value=value) for value in (1, POISON, 2)]
    one.run()
    assert [each.fate for each in sent] == ["served", "worker_died", "served"]
    assert [each.ticket.batch_size for each in sent] == [1, 1, 1]
    assert_at_rest(one, model)


def test_inputs_that_killed_twice_are_refused_for_a_while_and_others_are_not(machine):
    one = machine()
    model = one.model([5], name="net")
    dying(model, poison=POISON)
    one.send(model, value=POISON)
    one.run()
    assert one.dispatcher.feed.retries.quarantines == 1
    with pytest.raises(Overloaded, match="net: the same inputs killed their worker twice; refused for 60 s") as refused:
        one.send(model, value=POISON)
    assert refused.value.reason == "quarantined" and refused.value.retry_after_s == QUARANTINE_S
    calm = one.send(model, value=1)
    one.run()
    assert calm.fate == "served"
    one.clock.ticks += round(QUARANTINE_S * 1e9)
    again = one.send(model, value=POISON)
    one.run()
    assert again.fate == "worker_died"
    assert_at_rest(one, model)


def test_texts_are_told_apart_by_what_they_say(machine):
    one = machine()
    tries, model = one.dispatcher.feed.retries, one.model([5])
    tickets = [one.send(model).ticket for _ in range(2)]
    for ticket, text in zip(tickets, (b"a", b"b"), strict=True):
        ticket.inputs = {"x": np.array([[text]], np.object_)}
    tries._quarantine(tickets[0], died())
    with pytest.raises(Overloaded):
        tries.check_quarantine(tickets[0])
    tries.check_quarantine(tickets[1])


class Paper:
    """A region that the server can read, or cannot."""

    def __init__(self, data: bytes | None, number: int = 1) -> None:
        self.data, self.terms = data, LendingTerms(number, "cuda", 0, 8)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        if self.data is None:
            raise BadRequest("it lies on a GPU")
        buffer[:] = self.data[offset : offset + len(buffer)]


def test_lent_inputs_are_told_apart_by_what_lies_there_and_unseen_ones_by_where(machine):
    one = machine()
    tries, model = one.dispatcher.feed.retries, one.model([5])
    tickets = [one.send(model).ticket for _ in range(4)]
    papers = [Paper(b"aaaaaaaa"), Paper(b"aaaabbbb"), Paper(None), Paper(None, 2)]
    for ticket, paper, offset in zip(tickets, papers, (0, 4, 0, 0), strict=True):
        ticket.inputs = {"x": LentTensor(paper, offset, (1, 1), np.dtype(np.float32))}
    for poison in (tickets[0], tickets[2]):
        tries._quarantine(poison, died())
    for ticket in (tickets[0], tickets[2]):
        with pytest.raises(Overloaded):
            tries.check_quarantine(ticket)
    for ticket in (tickets[1], tickets[3]):
        tries.check_quarantine(ticket)


def test_a_strict_request_without_time_for_another_try_is_told_at_once(machine):
    one = machine()
    model = one.model([5])
    dying(model, died(), died())
    late, early = one.send(model, due_ms=8, strict=True), one.send(model, due_ms=30, strict=True)
    one.run()
    assert late.fate == "worker_died"
    assert early.fate == "served"
    assert_at_rest(one, model)


def test_a_strict_request_that_meets_no_worker_is_told_to_come_again_and_that_it_is_no_fault_of_ours(machine):
    one = machine()
    model = one.model([5])
    dying(model, died(suspects=0, again_s=0.05))
    sent = one.send(model, due_ms=30, strict=True)
    one.run()
    assert isinstance(sent.outcome, Overloaded) and sent.fate == "worker_starting"
    assert (sent.outcome.status, sent.outcome.retry_after_s) == (503, 1.0)
    assert_at_rest(one, model)


def test_one_whose_worker_died_before_is_told_the_same_when_it_meets_none(machine):
    one = machine()
    model = one.model([5], name="net")
    dying(model, died(), WorkerDied("its worker is being started", again_s=0.05))
    sent = one.send(model, due_ms=30, strict=True)
    one.run()
    assert sent.fate == "worker_starting" and sent.ticket.deaths == 1
    assert (sent.outcome.status, sent.outcome.code) == (503, "UNAVAILABLE")
    assert str(sent.outcome) == "net: its worker is being started; send it again in 1 s"
    assert_at_rest(one, model)


def test_who_is_not_to_blame_waits_for_another_worker_as_long_as_it_takes_without_holding_a_lane(machine):
    one = machine()
    model, other = one.model([5], name="net"), one.model([5], name="other")
    dying(model, *[died(suspects=0, again_s=0.05)] * 20)
    waiting = one.send(model, due_ms=100_000)
    one.at(120, lambda: one.send(other, due_ms=10_000))
    one.run()
    assert waiting.fate == "served" and waiting.end_ms > 20 * 50
    assert one.sent[1].fate == "served" and one.sent[1].end_ms < 140
    assert_at_rest(one, model, other)


def test_but_not_for_ever(machine):
    one = machine()
    model = one.model([0.1], name="net")
    dying(model, *[died(suspects=0, again_s=0.05)] * (MOST_TRIES + 1))
    sent = one.send(model, due_ms=100_000)
    one.run()
    assert sent.fate == "worker_starting" and sent.ticket.deaths == 0


def test_one_that_waits_for_another_worker_may_be_withdrawn_or_expire(machine):
    one = machine()
    model = one.model([5])
    dying(model, *[died(suspects=0, again_s=0.05)] * 100)
    gone, strict = one.send(model, due_ms=10_000), one.send(model, due_ms=200, strict=True)
    one.at(100, lambda: one.dispatcher.withdraw(gone.ticket))
    one.run()
    assert gone.fate == "cancelled" and strict.fate in ("expired", "worker_starting")
    assert_at_rest(one, model)


def test_a_model_that_was_taken_out_refuses_requests(machine):
    one = machine()
    model = one.model([5], name="net")
    breaker = model.loaded.breaker = Breaker(BreakerLimits(deaths=1), one.clock.monotonic_ns)
    breaker.died()
    breaker.died()
    with pytest.raises(Overloaded, match=r"tried again in 10\.0 s"):
        one.send(model)
    one.clock.ticks += 10_000 * MS
    tried = one.send(model, due_ms=1000)
    with pytest.raises(Overloaded):
        one.send(model)
    breaker.succeeded()
    one.run()
    assert tried.fate == "served"
    one.send(model)
    one.run()


def test_one_that_is_refused_for_another_reason_is_not_the_one_that_is_tried(machine):
    one = machine()
    model = one.model([5], name="net")
    breaker = model.loaded.breaker = Breaker(BreakerLimits(deaths=0), one.clock.monotonic_ns)
    breaker.died()
    one.clock.ticks += 10_000 * MS
    with pytest.raises(Expired):
        one.send(model, due_ms=1, strict=True)
    assert breaker.state == "open"
    tried = one.send(model, due_ms=1000)
    assert breaker.state == "trying"
    one.run()
    assert tried.fate == "served"


def test_only_inputs_that_look_like_quarantined_ones_are_read(machine, monkeypatch):
    one = machine()
    model, other = one.model([5], name="net"), one.model([5], name="other")
    dying(model, poison=POISON)
    one.send(model, value=POISON)
    one.run()
    read = []
    digest = client_feed._digest
    monkeypatch.setattr(client_feed, "_digest", lambda ticket: read.append(ticket.model.name) or digest(ticket))
    one.send(other, value=POISON)
    one.send(model, value=1)
    one.run()
    assert read == ["net"]
    assert_at_rest(one, model, other)


def test_outputs_that_do_not_fit_a_batch_are_told_to_its_requests_and_nobody_else(machine, caplog, monkeypatch):
    one = machine()
    model, other = one.model([5], [6], name="net"), one.model([5], name="other")
    results = BatchWork.results

    def unfit(work):
        return results(work) if work.model is other else iter([work.tickets[len(work.tickets)]])

    monkeypatch.setattr(BatchWork, "results", unfit)
    sent, calm = [one.send(model), one.send(model)], one.send(other)
    one.run()
    assert [each.fate for each in sent] == ["internal", "internal"] and calm.fate == "served"
    assert "do not fit its requests" in caplog.text
    assert_at_rest(one, model, other)
