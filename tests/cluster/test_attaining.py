"""Placements for a router: what is left out when not everything can be on time, and copies where they help."""

from __future__ import annotations

import numpy as np
import pytest

from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.filling import Filling, broken_limits
from weft_cluster.placing.machines import MachineGroup, MachineKind, Machines
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.routing.placing_run import Attaining, greedy, place_to_attain, with_copies

GIB = 2**30
MACHINES = Machines(
    kinds={"gpu": MachineKind(memory_gib=8)}, machine=(MachineGroup(kind="gpu", count=2),)
)  # fmt: skip


def demand(name: str, rate: float, ms: float, gib: float = 1.0) -> Demand:
    need = Need(ms / 1e3, 0.0, weight_bytes=int(gib * GIB), segment_s=ms / 4e3, alone_s=ms / 1e3)
    return Demand(name, rate, 8 * ms / 1e3, {"gpu": need})


CHEAP, DEAR = [demand(f"cheap{n}", 100, 2) for n in range(3)], demand("dear", 20, 100, gib=3)


def test_where_not_all_can_be_on_time_the_dearest_requests_are_left_out():
    placement = place_to_attain(
        PlacingProblem.of(MACHINES, [*CHEAP, DEAR]), requests=1500
    )  # 0.6 and 2.0 of two machines
    unserved = {each.model: each.share for each in placement.unserved}
    assert set(unserved) == {"dear"} and unserved["dear"] > 0.2
    assert placement.value > 0.94  # 300 of 320 requests are cheap
    assert placement.value <= placement.bound


def test_nothing_is_left_out_where_everything_can_be_on_time():
    placement = place_to_attain(PlacingProblem.of(MACHINES, CHEAP), requests=1500)
    assert not placement.unserved
    assert placement.value > 0.99


def test_copies_fill_the_memory_and_break_no_limit():
    problem = PlacingProblem.of(MACHINES, [*CHEAP, demand("large", 1, 5, gib=6)])
    filling = Filling(problem, [{0: 1.0, 1: 1.0, 2: 1.0}, {3: 1.0}])
    found = with_copies(filling)
    assert [set(models) for models in found.shares] == [{0, 1, 2}, {3, 0, 1}]  # a third gigabyte is not free
    assert found.served() == pytest.approx(np.ones(4))
    assert not list(broken_limits(found))
    assert filling.shares == [{0: 1.0, 1: 1.0, 2: 1.0}, {3: 1.0}]


def test_replicas_by_greed_are_a_floor():
    search = Attaining(PlacingProblem.of(MACHINES, [*CHEAP, demand("mid", 30, 20)]), requests=1500)
    plain = greedy(search.problem, lambda filling: search.run(filling).on_time)
    assert search.confirmed(search.best()) >= search.confirmed(plain)
