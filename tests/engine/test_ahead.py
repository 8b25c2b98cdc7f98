"""Hosts whose lanes take segments ahead, worked out by hand."""

from __future__ import annotations

import pytest

from tests.engine.hosts import Kind, Load, Order, kind, run_load
from weft.devices.costs.program import Program
from weft.devices.lanes import Lanes
from weft.engine.policies import Candidate, Setting, Start
from weft.engine.policies.base import NO_BUFFER
from weft.engine.simulated_host import Crowd, DrawnWork, SimulatedHost


def test_the_next_segment_of_a_batch_is_decided_on_while_one_runs():
    load = Load((kind(5, 5), kind(3)), (Order(0, 0, 100), Order(1, 1, 20)))
    assert run_load("edf", load).ends == [13, 8]
    ahead = run_load("edf", Load(load.kinds, load.orders, ahead=1))
    assert ahead.letters == "AaB" and ahead.ends == [10, 13]


def test_an_exit_is_waited_for():
    net = Kind(((5, 5, 5),), exits=(1,))
    load = Load((net, kind(3)), (Order(0, 0, 100, leaves=3), Order(1, 1, 20)), ahead=1)
    assert run_load("edf", load).letters == "ABaa"  # the other was queued behind the exit


def test_the_next_batch_begins_behind_the_last_segment_of_one():
    load = Load((kind(5),), tuple(Order(0, 0, 100) for _ in range(3)), ahead=1)
    ran = run_load("fifo", load)
    assert ran.ends == [5, 10, 15]
    assert [piece.begin for piece in sorted(ran.host.pieces, key=lambda piece: piece.begin)] == [0, 5, 10]


def test_what_is_stopped_for_another_of_its_stream_is_not_begun_again_for_ever():
    load = Load(
        (kind(10),),
        (Order(0, 0, 1), Order(0, 0, 11, priority=3)),
        late="weave",
        abortable=frozenset({0}),
        ahead=1,
    )
    assert len(run_load("punctual", load).ends) == 2


@pytest.mark.parametrize(("due", "fate"), [(13, "served"), (12, "refused")])
def test_a_lane_is_free_for_a_request_when_all_that_it_holds_has_ended(due, fate):
    load = Load((kind(5, 5), kind(3)), (Order(0, 0, 100), Order(1, 1, due, strict=True)), ahead=1)
    (_, (what, _)) = run_load("edf", load).fates
    assert what == fate


def test_segments_take_their_turns_at_the_speed_that_others_allow():
    """Two lanes that halve each other's speed; the second segment begins when the first has really ended, and at once,
    since it waited there."""
    program = Program("m", ("a", "b"), (0, 0), (10, 10), (0, 0))
    other = Program("n", ("c",), (0,), (15,), (0,))
    crowd = Crowd(
        Lanes(("lane 0", "lane 1"), 2, ((0.5, 0.5), (0.5, 0.5))),
        (0, 1),
        lambda candidate: DrawnWork(1, float(candidate.compute)),
    )
    host = SimulatedHost(Setting((program, other), NO_BUFFER, lanes=2, ahead=1), crowd=crowd)
    first = Candidate(0, 0, 0, 0, 10, -1, program=0)
    host.submit(Start(first))
    (known,) = host.completions()
    assert (known.candidate, known.times.compute_end) == (first, 10)
    host.submit(Start(first._replace(layer=1)))
    host.submit(Start(Candidate(1, 0, 0, 0, 15, -1, program=1)))
    ends = []
    while host.rests():
        host.idle_until(10**9)
        ends += [(done.candidate.program, done.candidate.layer) for done in host.completions()]
    assert ends == [(1, 0), (0, 1)]
    times = {(candidate.program, candidate.layer): (t.compute_start, t.compute_end) for candidate, t in host.log}
    assert times[0, 0] == (1, 21) and times[0, 1][0] == 21
    assert [candidate.layer for candidate, _ in host.log if candidate.program == 0] == [0, 1]
