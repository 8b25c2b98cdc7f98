"""What a gate knows and chooses by, worked by hand."""

from __future__ import annotations

import pytest

from tests.gates.cases import PAIR, placement
from weft.base.errors import InputError
from weft.http.messages import ServerEstimate, age_of, estimate_in
from weft_cluster.gates.board import BELIEVED_NS, UNHEARD_NS, RoutingBoard
from weft_cluster.routing.router import Replica

MS = 1_000_000


def board(where=PAIR, **settings) -> RoutingBoard:
    made = RoutingBoard(where.models, seed=1, **settings)
    for machine in where.machines:
        made.set_up(made.add(machine), up=True)
    return made


def chosen(made: RoutingBoard, now: int = 0, excluded: int | None = None) -> int:
    found = made.choose("net", now, excluded)
    assert found is not None
    return found.replica.machine


def test_before_a_server_has_spoken_requests_cost_what_the_placement_says():
    found = board().choose("net", 0)
    assert found is not None and found.expected == 10 * MS
    assert (found.replica.compute, found.replica.fetch) == (10 * MS, 4 * MS)


def test_what_was_sent_counts_until_it_is_done():
    made = board()
    first = made.choose("net", 0)
    made.sent("net", first.replica, 0)
    assert chosen(made) == 1 - first.replica.machine
    made.sent("net", made.choose("net", 0).replica, 0)
    made.sent("net", made.choose("net", 0).replica, 0)
    assert made.choose("net", 5 * MS).expected == (5 + 5 + 10) * MS
    assert sorted(each.in_flight for each in made.estimates) == [1, 2]
    made.ended(0)
    made.ended(1)
    assert sum(each.in_flight for each in made.estimates) == 1


def test_gates_take_each_other_to_do_the_same():
    made = board(gates=3)
    replica = made.choose("net", 0).replica
    made.sent("net", replica, 0)
    assert made.estimates[replica.machine].array == 30 * MS


def test_a_server_s_own_word_replaces_all_that_was_thought():
    made = board()
    made.heard(0, "net", ServerEstimate(40 * MS, 6 * MS, 3), 100 * MS, way=1 * MS)
    assert chosen(made, 100 * MS) == 1
    assert chosen(made, 100 * MS, excluded=1) == 0
    assert made.choose("net", 100 * MS, excluded=1).expected == (100 + 40 + 6 + 1) * MS
    assert made.choose("net", 100 * MS, excluded=1).replica == Replica(
        0, 2 * MS, 0, overhead=5 * MS, cumulative_share=0.5
    )
    assert chosen(made, 200 * MS) == 0  # the work is done, and it is faster


def test_nobody_is_asked_who_is_down_and_who_comes_back_has_nothing_to_do():
    made = board()
    made.heard(0, "net", ServerEstimate(900 * MS, MS, 1), 0, 0)
    made.set_up(1, up=False)
    assert {chosen(made) for _ in range(4)} == {0}
    made.set_up(0, up=False)
    assert made.choose("net", 0) is None and made.missing == ["net"]
    made.set_up(0, up=True)
    assert made.choose("net", 0).expected == MS


def test_a_request_is_hopeless_only_by_what_was_said_a_moment_ago():
    made = board()
    assert not made.unmeetable("net", 5 * MS, 0)  # nobody has said anything
    for place in (0, 1):
        made.heard(place, "net", ServerEstimate(0, 8 * MS, 1), 0, 0)
    assert made.unmeetable("net", 7 * MS, 0) and not made.unmeetable("net", 8 * MS, 0)
    assert not made.unmeetable("net", BELIEVED_NS + 1, BELIEVED_NS + 1)


def test_a_server_of_which_nothing_was_heard_is_tried_with_a_request_that_can_wait():
    made = board()
    for place, own in enumerate((5 * MS, 50 * MS)):
        made.sent("net", Replica(place, 0, 0), 0)
        made.heard(place, "net", ServerEstimate(0, own, 1), 0, 0)
    long = UNHEARD_NS + 1
    made.sent("net", Replica(0, 0, 0), long - 1)
    assert made.choose("net", long, due=long + 49 * MS).replica.machine == 0
    assert made.choose("net", long).replica.machine == 0
    assert made.choose("net", long, due=long + 50 * MS).replica.machine == 1
    made.sent("net", Replica(1, 0, 0), long)
    assert made.choose("net", long + 1, due=2 * long).replica.machine == 0


def test_copies_of_a_machine_divide_its_share_and_a_place_is_given_again():
    where = placement(left={"net": 0.75, "other": 1.0}, right={"net": 0.25})
    left, right = where.machines
    made = RoutingBoard(where.models, router="round-robin", seed=1)
    places = [made.add(machine) for machine in (left, left, right)]
    for place in places:
        made.set_up(place, up=True)
    counts = [0, 0, 0]
    for _ in range(800):
        counts[chosen(made)] += 1
    assert counts == pytest.approx([300, 300, 200], abs=8)
    made.remove(1)
    assert {chosen(made) for _ in range(50)} == {0, 2}
    assert made.add(right) == 1 and made.choose("other", 0).replica.machine == 0


def test_models_are_known_as_long_as_they_shall_be_there_or_are():
    before, after = placement(left={"old": 1.0, "kept": 0.5}), placement(right={"kept": 0.5, "new": 1.0})
    made = RoutingBoard(before.models, seed=1)
    old = made.add(before.machines[0])
    made.expect(after.models)
    assert set(made.models) == {"old", "kept", "new"} and set(made.missing) == {"old", "kept", "new"}
    made.set_up(old, up=True)
    made.set_up(made.add(after.machines[0]), up=True)
    assert made.choose("old", 0).replica.machine == old and not made.missing
    made.remove(old)
    assert set(made.models) == {"kept", "new"} and made.choose("kept", 0).replica.machine == 1


def test_an_unknown_router_is_refused():
    with pytest.raises(InputError, match="router"):
        RoutingBoard(PAIR.models, router="slak")


def test_what_servers_say_of_themselves_is_read_as_it_is_written():
    told = ServerEstimate(1_234_000, 5_000, 2)
    name, value = told.header()
    assert estimate_in(f"HTTP/1.1 200 OK\r\n{name.lower()}: {value}\r\nServer: x".encode()) == told
    assert estimate_in(f"HTTP/1.1 200 OK\r\n{name}: {value}".encode()) == told
    assert estimate_in(b"HTTP/1.1 200 OK\r\nWeft-Estimate: 1 2") is None
    assert age_of({"weft-age-us": "15"}) == 15_000 and age_of({}) is None
