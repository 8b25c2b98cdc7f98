"""Work that yields to a request does not stand before it; work that does not, does."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.engine.hosts import Kind, Load, Machine, Order, run_load
from weft.base.errors import Expired

URGENT = {"strict": True, "priority": 9}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: list[Machine] = []

    def make(policy: str = "punctual", **settings: Any) -> Machine:
        made.append(Machine(monkeypatch, policy, **settings))
        return made[-1]

    yield make
    for each in made:
        each.close()


Make = Callable[..., Machine]


def test_a_layer_that_would_be_stopped_for_it_does_not_stand_before_it(machine: Make) -> None:
    one = machine()
    heavy, light = one.model([40]), one.model([5])
    long = one.send(heavy, 1000, best_effort=True)
    one.run(2)
    urgent = one.send(light, 20, **URGENT)
    one.run()
    assert urgent.fate == "served" and urgent.end_ms == 7
    assert long.fate == "served" and long.end_ms == 47


def test_one_that_cannot_be_stopped_does(machine: Make) -> None:
    one = machine()
    heavy, light = one.model([9]), one.model([5])
    one.send(heavy, 1000)
    one.run(2)
    with pytest.raises(Expired, match=r"7\.0 ms of work stand before it, and it takes 5\.0 ms"):
        one.send(light, 11, **URGENT)
    one.run()


def test_neither_does_one_under_a_policy_that_stops_nothing(machine: Make) -> None:
    one = machine("edf")
    heavy, light = one.model([40]), one.model([5])
    one.send(heavy, 1000)
    one.run(2)
    with pytest.raises(Expired, match=r"38\.0 ms of work stand before it"):
        one.send(light, 20, **URGENT)
    one.run()


def test_what_was_promised_to_another_is_not_taken_from_it(machine: Make) -> None:
    one = machine()
    heavy, light = one.model([40]), one.model([5])
    promised = one.send(heavy, 45, strict=True)
    one.run(2)
    with pytest.raises(Expired, match=r"38\.0 ms of work stand before it"):
        one.send(light, 20, **URGENT)
    one.run()
    assert promised.fate == "served"


@pytest.mark.parametrize("waiting", [0, 3])
def test_requests_that_take_more_for_what_they_are_worth_give_way(machine: Make, waiting: int) -> None:
    """Though they are due before it: they may be late, and it may not."""
    one = machine()
    heavy, light = one.model([5] * 8), one.model([5])
    for _ in range(1 + waiting):
        one.send(heavy, 20)
    one.run(2)
    urgent = one.send(light, 22, **URGENT)
    one.run()
    assert urgent.fate == "served" and urgent.end_ms <= 24
    assert {sent.fate for sent in one.sent} == {"served"}


def test_strict_ones_do_not(machine: Make) -> None:
    one = machine()
    heavy, light = one.model([5] * 4), one.model([5])
    kept = [one.send(heavy, due, strict=True) for due in (21, 42)]
    one.run(1)
    with pytest.raises(Expired, match="stand before it"):
        one.send(light, 43, **URGENT)
    one.run()
    assert [sent.fate for sent in kept] == ["served", "served"]


def test_a_cheaper_request_goes_first_and_so_it_counts(machine: Make) -> None:
    one = machine()
    heavy, light = one.model([5] * 4), one.model([5])
    for _ in range(3):
        one.send(light, 30)
    with pytest.raises(Expired, match=r"15\.0 ms of work stand before it, and it takes 20\.0 ms"):
        one.send(heavy, 31, strict=True)
    one.run()


@pytest.mark.parametrize("segments", [(5,) * 6, (30,)])
def test_beside_a_heavy_load_without_deadlines_no_urgent_request_is_refused(segments: tuple[int, ...]) -> None:
    """80 % of the only lane for requests due in a second; urgent ones of 3 ms, due in 25 ms, five in a second."""
    random.seed(1)
    orders, at = list[Order](), 0.0
    while at < 20_000:
        at += random.expovariate(0.8 / 30)
        orders.append(Order(0, round(at), round(at) + 1000))
    orders += [Order(1, at, at + 25, 9, strict=True) for at in range(100, 20_000, 200)]
    load = Load((Kind((segments,)), Kind(((3,),))), tuple(orders), late="weave", abortable=frozenset({0}))
    ran = run_load("punctual", load)
    fates = [
        fate.what for ticket in ran.feed.tickets if ticket.strict for fate in ran.feed.fates[ticket] if ticket.stream
    ]
    assert fates == ["served"] * 100
    assert all(fate[0] == "served" for fate in ran.fates)
