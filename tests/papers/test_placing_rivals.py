"""Other people's placements: each rule worked by hand, and the limits that all keep to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import pytest

from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.filling import Filling, broken_limits
from weft_cluster.placing.machines import MachineGroup, MachineKind, Machines
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.resharing import levelled
from weft_cluster.routing.placing_run import fluid, greedy
from weft_papers.placing_rivals import RIVALS, SPREADERS
from weft_papers.placing_rivals.alpaserve import beam, integer_programme
from weft_papers.placing_rivals.gpulets import (
    BASE,
    OTHER_DRAM,
    OTHER_L2,
    OWN_DRAM,
    OWN_L2,
    Slice,
    Slices,
)
from weft_papers.placing_rivals.nexus import squishy
from weft_papers.placing_rivals.spreading import like_with_like, on_fewest, one_resource, round_robin, serves_all

GIB = 2**30
QUICK = RIVALS | {"alpaserve-ilp": on_fewest(partial(integer_programme, effort_s=0.03))}


def demand(name: str, compute: float, memory: float = 0.0, gib: float = 1.0, **rules: object) -> Demand:
    """A model that takes these shares of a machine with ten requests per second."""
    need = Need(compute / 10, memory / 10, 0.0, int(gib * GIB), 0, 0.0, (compute + memory) / 10)
    return Demand(name, 10.0, **{"deadline_s": 10.0, "needs": {"gpu": need}} | rules)


def problem(demands: Sequence[Demand], machines: int = 8, overlap: float = 1.0, gib: float = 80.0) -> PlacingProblem:
    kind = MachineKind(memory_gib=gib, overlap=overlap)
    group = MachineGroup(kind="gpu", count=machines)
    return PlacingProblem.of(Machines(kinds={"gpu": kind}, machine=(group,)), demands)


def drawn(seed: int, models: int = 10, machines: int = 12) -> PlacingProblem:
    """Models of all sorts: loads, sizes, deadlines; one is pinned and one wants two replicas."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(models):
        compute, memory, other, rate = *rng.dirichlet((2, 2, 0.5)) * rng.lognormal(-1.5, 0.8), rng.uniform(1, 50)
        need = Need(
            compute / rate, memory / rate, other / rate, int(rng.uniform(0.1, 9) * GIB), 0, 0.1 / rate, 1 / rate
        )
        rules = {0: {"machine": "gpu-3"}, 1: {"replicas": 2}}.get(number, {})
        found.append(Demand(f"m{number}", rate, rng.uniform(3, 20) / rate, {"gpu": need}, **rules))
    return problem(found, machines, overlap=0.45, gib=16)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("seed", range(3))
def test_every_rival_serves_everything_within_all_limits(name, seed):
    filling = QUICK[name](drawn(seed))
    limits = [limit for limit in broken_limits(filling) if name != "gpulets" or "busy" not in limit]
    assert not limits
    assert filling.served() == pytest.approx(np.ones(10), abs=2e-3)


@pytest.mark.parametrize("name", sorted(set(QUICK) - {"gpulets"}))
def test_what_does_not_fit_is_left_and_no_limit_is_broken(name):
    crowded = drawn(1, models=10, machines=3)
    filling = QUICK[name](crowded)
    unlimited = SPREADERS.get(name)  # these place everything, and a machine too many of it is late
    limits = [limit for limit in broken_limits(filling) if "must be in" not in limit]
    assert not [limit for limit in limits if "busy" not in limit or unlimited is None]
    assert filling.served().max() <= 1 + 1e-6


def test_round_robin_deals_the_largest_first():
    given = problem([demand("small", 0.1), demand("large", 0.5), demand("mid", 0.2)], machines=2)
    assert [sorted(shares) for shares in round_robin(given).shares] == [[0, 1], [2]]


def test_one_resource_adds_up_what_would_overlap():
    given = problem([demand("computes", 0.7), demand("waits", 0.0, 0.7)])
    assert one_resource(given).used.sum() == 2
    assert Filling(given, [{0: 1.0, 1: 1.0}] + [{}] * 7).loads[0].max() == pytest.approx(0.7)


def test_like_with_like_opens_a_pool_each():
    pairs = [demand(f"c{n}", 0.4) for n in range(2)] + [demand(f"w{n}", 0.0, 0.4) for n in range(2)]
    shares = like_with_like(problem(pairs)).shares
    assert [sorted(each) for each in shares[:3]] == [[0, 1], [2, 3], []]


def test_nexus_squeezes_batches_into_the_shorter_cycle():
    # a: 20 ms a request, 10/s; with a deadline of 1.2 s cycles of 1.0 s (10 requests, 200 ms)
    # b: 20 ms a request, 10/s; with a deadline of 240 ms cycles of 200 ms (2 requests, 40 ms)
    # together: 200 ms, 2 + 2 requests, 80 ms of the 160 that the cap leaves
    a, b = demand("a", 0.2, deadline_s=1.2), demand("b", 0.2, deadline_s=0.24)
    assert squishy(problem([a, b])).used.sum() == 1
    # c: 100 ms, once in a second, due after 150 ms: it fills 100 of every 50 ms, and needs a machine of its own
    need = Need(0.1, 0.0, alone_s=0.1)
    c = Demand("c", 1.0, 0.15, {"gpu": need})
    assert squishy(problem([a, b, c])).used.sum() == 2


def test_nexus_fills_whole_machines_first():
    filling = squishy(problem([demand("busy", 2.0)]))
    assert sorted((share for shares in filling.shares for share in shares.values()), reverse=True) == pytest.approx(
        [0.4, 0.4, 0.2]
    )


def test_gpulets_slow_each_other_by_the_published_function():
    given = problem([demand("computes", 0.4, 0.1), demand("waits", 0.1, 0.4)])
    slices = Slices(given, 0.2)
    one, other = Slice(0, 0.6, {0: 1.0}), Slice(0, 0.4, {1: 1.0})
    slices.on[0] = [one, other]
    slower = BASE + (OWN_L2 + OWN_DRAM) * 0.2 + (OTHER_L2 + OTHER_DRAM) * 0.8
    assert slices.busy(one) == pytest.approx((0.4 / 0.6 + 0.1) * slower)
    slices.on[0] = [one]
    assert slices.busy(one) == pytest.approx(0.4 / 0.6 + 0.1)


def test_the_greedy_replicates_who_is_served_worst():
    # 1.0 and 0.4 of a machine on two of them: the large one needs both, and the small one joins the emptier
    given = problem([demand("large", 1.0), demand("small", 0.4)], machines=2)
    filling = greedy(given)
    assert serves_all(filling)
    assert len(filling.where(0)) == 2


@pytest.mark.parametrize("seed", range(3))
def test_the_beam_is_no_worse_than_the_greedy(seed):
    given = drawn(seed, models=6, machines=2)
    rates = np.array([each.rate for each in given.demands])
    assert rates @ fluid(beam(given)) >= rates @ fluid(greedy(given)) - 1e-3 * rates.sum()


def test_the_integer_programme_is_the_best_of_all_replications():
    sizes, loads = (3.0, 5.0, 6.0), (0.5, 0.25, 0.2)
    models = [demand(f"m{n}", loads[n], gib=sizes[n]) for n in range(3)]
    given = problem(models, 2, gib=11)
    best = 0.0
    for bits in product((0, 1), repeat=6):
        chosen = np.array(bits).reshape(2, 3)
        if (chosen @ np.array(sizes) <= 11).all():
            best = max(best, float((chosen.sum(axis=0) / np.array(loads)).min()))
    filling = integer_programme(given, effort_s=5.0)
    assert min(len(filling.where(n)) / load for n, load in enumerate(loads)) == pytest.approx(best)


def test_levelled_shares_crowd_no_machine():
    given = problem([demand("both", 0.8), demand("left", 0.4)], machines=2, overlap=0.0)
    filling = levelled(Filling(given, [{0: 0.5, 1: 1.0}, {0: 0.5}]))
    assert filling.loads.max(axis=1) == pytest.approx([0.6, 0.6], abs=0.01)
    assert filling.served() == pytest.approx([1, 1])


def test_the_fewest_machines_are_searched_for_who_uses_all():
    given = problem([demand(f"m{n}", 0.4) for n in range(5)])
    assert on_fewest(round_robin)(given).used.sum() == 3
