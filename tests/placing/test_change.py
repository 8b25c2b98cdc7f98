"""Placements that change: what stays, what is loaded where and in which order, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import PlacingError
from weft_cluster.placing.adapting import PlacementChange, adapted, difference, in_order, parse_change
from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.filling import Filling, broken_limits
from weft_cluster.placing.machines import MachineGroup, MachineKind, Machines
from weft_cluster.placing.placement import Objective, Placement
from weft_cluster.placing.problem import PlacingProblem, Shares
from weft_cluster.placing.resharing import levelled
from weft_cluster.placing.summary import make_placement

GB = 10**9


def demand(name: str, load: float, gb: float = 1.0, **rules: object) -> Demand:
    """A model that takes this share of a machine with ten requests per second."""
    need = Need(load / 10, 0.0, weight_bytes=int(gb * GB), alone_s=load / 10)
    return Demand(name, 10.0, 10.0, {"gpu": need}, **rules)


def problem(demands: Sequence[Demand], machines: int = 2, first: int = 1) -> PlacingProblem:
    """Machines gpu-1, gpu-2, ... that load a gigabyte per second; *first*: those before are gone."""
    kind = MachineKind(memory_gib=20, load_gb_s=1.0)
    named = tuple(MachineGroup(kind="gpu", name=f"gpu-{number}") for number in range(first, machines + 1))
    return PlacingProblem.of(Machines(kinds={"gpu": kind}, machine=named), demands)


def placed(problem: PlacingProblem, shares: Shares, objective: Objective = "load") -> Placement:
    return make_placement(Filling(problem, shares), objective, value=1.0, bound=1.0, bound_by="load")


def changed(before: Placement, now: PlacingProblem, hysteresis: float = 0.0) -> tuple[Filling, PlacementChange]:
    filling = adapted(now, before, hysteresis)
    after = make_placement(filling, before.objective, value=1.0, bound=1.0, bound_by="load")
    return filling, difference(before, after, now)


def test_nothing_moves_while_nothing_is_over_its_cap():
    models = [demand("a", 0.5), demand("b", 0.2)]
    before = placed(problem(models), [{0: 1.0, 1: 1.0}, {}])
    filling, change = changed(before, problem([models[0].scaled(1.1), models[1]]))
    assert filling.shares == [{0: 1.0, 1: 1.0}, {}]
    assert change == PlacementChange(loads=(), drops=(), kept=2)


def test_a_machine_over_its_cap_sends_requests_where_the_model_is():
    models = [demand("a", 0.8), demand("b", 0.3)]
    before = placed(problem(models), [{0: 0.5, 1: 1.0}, {0: 0.5}])
    filling, change = changed(before, problem([models[0], models[1].scaled(2)]))
    assert not change.loads and not change.drops
    assert filling.loads.max(axis=1) == pytest.approx([0.8, 0.6])


def test_the_smallest_model_that_relieves_a_machine_is_the_one_that_goes():
    models = [demand("large", 0.4, gb=8), demand("small", 0.2, gb=2), demand("tiny", 0.01, gb=0.1)]
    before = placed(problem(models), [{0: 1.0, 1: 1.0, 2: 1.0}, {}])
    filling, change = changed(before, problem([models[0].scaled(1.7), *models[1:]]))
    assert [(load.model, load.machine, load.bytes, load.seconds) for load in change.loads] == [
        ("small", "gpu-2", 2 * GB, 2.0)
    ]
    assert filling.shares[1] == pytest.approx({1: (0.4 * 1.7 + 0.2 + 0.01 - 0.8) / 0.2})  # no more than has to go
    assert change.kept == 3 and (change.bytes, change.seconds) == (2 * GB, 2.0)
    assert not list(broken_limits(filling))


def test_hysteresis_spares_the_next_move():
    models = [demand("a", 0.5), demand("b", 0.29)]
    before = placed(problem(models), [{0: 1.0, 1: 1.0}, {}])
    grown = [models[0].scaled(1.05), models[1]]
    again = [models[0].scaled(1.1), models[1]]
    for hysteresis, loads in ((0.0, 1), (0.1, 0)):
        pinned = [each if each.model == "a" else demand("b", 0.29) for each in grown]
        filling, _ = changed(before, problem(pinned), hysteresis)
        middle = placed(problem(grown), filling.shares)
        split = [shares.get(1, 0.0) for shares in filling.shares]
        assert sum(split) == pytest.approx(1)
        _, second = changed(middle, problem(again), hysteresis)
        assert len(second.loads) <= loads


def test_a_lost_machine_is_loaded_elsewhere_what_most_requests_wait_for_first():
    models = [demand("slow", 0.1, gb=8), demand("quick", 0.1, gb=1), demand("mid", 0.1, gb=3), demand("stays", 0.1)]
    before = placed(problem(models), [{0: 1.0, 1: 1.0, 2: 1.0}, {3: 1.0}])
    filling, change = changed(before, problem(models, first=2))
    assert filling.served() == pytest.approx(np.ones(4))
    assert [(load.model, load.machine, load.ready_s) for load in change.loads] == [
        ("quick", "gpu-2", 1.0), ("mid", "gpu-2", 4.0), ("slow", "gpu-2", 12.0),
    ]  # fmt: skip
    assert not change.drops  # the lost machine has nothing to drop
    assert change.waiting == pytest.approx(10 * (1 + 4 + 12))


def test_machines_load_at_the_same_time():
    models = [demand("a", 0.1, gb=4), demand("b", 0.1, gb=4), demand("c", 0.1), demand("d", 0.1)]
    before = placed(problem(models, 3), [{0: 1.0, 1: 1.0}, {2: 1.0}, {3: 1.0}])
    _, change = changed(before, problem(models, 3, first=2))
    assert {load.machine for load in change.loads} == {"gpu-2", "gpu-3"}
    assert change.seconds == 4.0


@given(st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 50)), min_size=1, max_size=5))
@settings(max_examples=18, deadline=None)
def test_no_order_of_loads_has_fewer_requests_wait(sizes):
    models = [demand(f"m{n}", 0.01, gb=gb) for n, (gb, _) in enumerate(sizes)]
    loads = in_order([("gpu-1", f"m{n}", rate) for n, (_, rate) in enumerate(sizes)], problem(models))
    ours = PlacementChange(loads=tuple(loads), drops=(), kept=0).waiting
    best = min(
        sum(rate * sum(gb for gb, _ in order[: place + 1]) for place, (_, rate) in enumerate(order))
        for order in permutations(sizes)
    )
    assert ours == pytest.approx(best, rel=1e-6)


def test_a_machine_is_emptied_when_the_rest_have_room_and_a_margin():
    models = [demand("a", 0.5), demand("b", 0.4)]
    before = placed(problem(models), [{0: 1.0}, {1: 1.0}], "machines")
    fallen = [models[0].scaled(0.7), models[1]]
    assert changed(before, problem(fallen), 0.1)[0].used.sum() == 2  # 0.75 would fit, and not stay for long
    fallen = [models[0].scaled(0.6), models[1]]
    filling, change = changed(before, problem(fallen), 0.1)
    assert filling.used.sum() == 1
    assert len(change.loads) == 1


def test_a_model_that_wants_one_more_replica_gets_it():
    models = [demand("a", 0.4)]
    before = placed(problem(models), [{0: 1.0}, {}])
    filling, change = changed(before, problem([demand("a", 0.4, replicas=2)]))
    assert filling.shares == [{0: 0.5}, {0: 0.5}]
    assert [load.machine for load in change.loads] == ["gpu-2"]


def test_new_models_join_and_old_ones_leave():
    before = placed(problem([demand("a", 0.4), demand("b", 0.3)]), [{0: 1.0, 1: 1.0}, {}])
    filling, change = changed(before, problem([demand("a", 0.4), demand("c", 0.3)]))
    assert filling.used.sum() == 1
    assert [(load.model, load.machine) for load in change.loads] == [("c", "gpu-1")]
    assert [(drop.model, drop.machine) for drop in change.drops] == [("b", "gpu-1")]


def fewest_loads(before: Shares, now: PlacingProblem) -> int | None:
    """By trying all sets of copies, smallest first; None: everything everywhere is not enough."""
    machines, models = now.sizes
    missing = [(d, m) for d in range(machines) for m in range(models) if m not in before[d]]
    for count in range(len(missing) + 1):
        for added in combinations(missing, count):
            copies: list[dict[int, float]] = [dict(shares) for shares in before]
            for machine, model in added:
                copies[machine][model] = 1.0
            if len({model for shares in copies for model in shares}) == models:
                filling = levelled(Filling(now, copies))
                if not list(broken_limits(filling)) and filling.served() == pytest.approx(np.ones(models)):
                    return count
    return None


@pytest.mark.parametrize("seed", range(25))
def test_small_changes_load_as_little_as_can_be(seed):
    rng = np.random.default_rng(seed)
    models = [demand(f"m{n}", float(rng.uniform(0.1, 0.45)), float(rng.uniform(1, 4))) for n in range(4)]
    shares: list[dict[int, float]] = [{0: 1.0, 1: 1.0}, {2: 1.0}, {3: 1.0}]
    before = placed(problem(models, 3), shares)
    now = problem([each.scaled(float(rng.uniform(0.5, 2.0))) for each in models], 3)
    best = fewest_loads(shares, now)
    filling, change = changed(before, now)
    if best is None:
        assert filling.served().min() < 1
    else:
        assert filling.served() == pytest.approx(np.ones(4))
        assert len(change.loads) == best
    assert not list(broken_limits(filling))


@given(st.integers(0, 10_000), st.floats(0, 0.3))
@settings(max_examples=20, deadline=None)
def test_whatever_changes_limits_are_kept_and_pinned_models_stay(seed, hysteresis):
    rng = np.random.default_rng(seed)
    models = [demand(f"m{n}", float(rng.uniform(0.05, 0.5)), float(rng.uniform(1, 9))) for n in range(6)]
    models[0] = demand("m0", 0.3, machine="gpu-2")
    models[1] = demand("m1", 0.3, replicas=2)
    shares: list[dict[int, float]] = [{1: 0.5, 2: 1.0}, {0: 1.0, 3: 1.0}, {1: 0.5, 4: 1.0}, {}]
    before = placed(problem(models[:5], 4), shares, "machines")
    now = problem([each.scaled(float(rng.uniform(0.3, 3.0))) for each in models], 4, first=int(rng.integers(1, 3)))
    filling, change = changed(before, now, hysteresis)
    assert not [limit for limit in broken_limits(filling) if "must be in" not in limit]
    assert set(filling.machines_with(0)) <= {[machine.name for machine in now.machines].index("gpu-2")}
    assert filling.served().max() <= 1 + 1e-6
    assert {load.machine for load in change.loads} <= {machine.name for machine in now.machines}


def test_a_change_file_with_unknown_keys_is_one_line():
    with pytest.raises(PlacingError, match=r"^change.json: .*moves"):
        parse_change({"format": 1, "loads": [], "drops": [], "kept": 0, "moves": 3}, "change.json")
