"""What is found: as few machines as trying everything finds, within every limit, for every objective."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.placing.problems import demand, fewest_by_enumeration, machines, random_problem
from weft.base.errors import PlacingError
from weft_cluster.placing.bound import placing_bound
from weft_cluster.placing.demand import Demand, Need
from weft_cluster.placing.filling import broken_limits
from weft_cluster.placing.machines import Machines, parse_machines
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.search import search
from weft_cluster.placing.summary import filled
from weft_cluster.routing.placing_run import place


def served(filling: object) -> bool:
    return bool((filling.served() > 1 - 1e-6).all())  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [2, 3, 5, 14, 70, *range(20, 32)])
def test_small_cases_equal_enumeration(seed: int) -> None:
    problem = random_problem(seed)
    best, found = fewest_by_enumeration(problem), search(problem, "machines", None)
    assert not list(broken_limits(found.filling))
    if best is None:
        assert not served(found.filling)
    else:
        assert served(found.filling)
        assert found.value == best
        assert found.bound is not None and found.bound.value <= best


needs = st.builds(
    Need,
    st.floats(1e-4, 0.02),
    st.floats(0, 0.02),
    st.floats(0, 0.002),
    st.integers(0, 6 * 2**30),
    st.integers(0, 2**30),
    st.sampled_from([0.001, 0.005, 0.02]),
    st.sampled_from([0.002, 0.01, 0.03]),
)


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Machines, list[Demand]]:
    """Two kinds in two zones, and models with rules of all sorts."""
    given = parse_machines(
        {
            "kinds": {"big": {"memory_gib": 12, "overlap": 0.45, "price": 3}, "small": {"memory_gib": 6, "speed": 0.5}},
            "machine": [{"kind": "big", "count": 3, "zone": "a"}, {"kind": "small", "count": 3, "zone": "b"}],
        }
    )
    demands = []
    for number in range(draw(st.integers(1, 7))):
        need, rule = draw(needs), draw(st.sampled_from(["", "", "pinned", "zone", "replicas", "zones"]))
        more = {
            "pinned": {"machine": "big-2"},
            "zone": {"zone": "b"},
            "replicas": {"replicas": 2},
            "zones": {"replicas": 2, "apart": "zone"},
        }.get(rule, {})
        kinds = {"big": need, "small": need.at_speed(0.5)}
        demands.append(Demand(f"m{number}", draw(st.floats(0.5, 60)), 0.1, kinds, **more))  # type: ignore[arg-type]
    return given, demands


@pytest.mark.parametrize("objective", ["machines", "cost", "load"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cluster=clusters())
def test_whatever_is_asked_limits_hold_and_every_rate_is_served_or_named(
    objective: str, cluster: tuple[Machines, list[Demand]]
) -> None:
    there, demands = cluster
    try:
        placement = place(demands, there, objective=objective, target=None)  # type: ignore[arg-type]
    except PlacingError as error:
        assert "\n" not in str(error)
        return
    rests = {each.model: each.share for each in placement.unserved}
    for each in demands:
        shares = placement.where(each.model)
        assert sum(shares.values()) + rests.get(each.model, 0.0) == pytest.approx(1.0, abs=1e-5)
        assert each.machine is None or set(shares) <= {each.machine}
        zones = {machine.name: machine.zone for machine in there.all_machines}
        assert each.zone is None or {zones[name] for name in shares} <= {each.zone}
    for machine in placement.machines:
        assert machine.memory_bytes <= machine.memory_limit_bytes
        assert machine.busy <= machine.busy_cap * 1.0001 or (objective == "load" and placement.value < 1)
    if objective != "load":
        broken = broken_limits(filled(placement, PlacingProblem.of(there, demands)))
        assert [line for line in broken if line.split()[0] not in rests] == []
    better = placement.bound - placement.value if objective == "load" else placement.value - placement.bound
    assert placement.unserved or better >= -1e-6


def test_opposites_share_machines_and_save_them() -> None:
    demands = [demand(f"c{n}", 0.7, 0.05, gib=0.1) for n in range(4)] + [
        demand(f"m{n}", 0.05, 0.7, gib=0.1) for n in range(4)
    ]
    woven = search(PlacingProblem.of(machines(8, overlap=1.0), demands), "machines", None)
    apart = search(PlacingProblem.of(machines(8, overlap=0.0), demands), "machines", None)
    assert (woven.value, apart.value) == (4, 8)


def test_the_cheapest_machines_are_not_the_fewest() -> None:
    there = parse_machines(
        {
            "kinds": {"big": {"memory_gib": 10, "price": 10}, "small": {"memory_gib": 10, "price": 1}},
            "machine": [{"kind": "big", "count": 4}, {"kind": "small", "count": 8}],
        }
    )
    demands = [
        Demand(f"m{n}", 10, 1.0, {"big": Need(0.02, 0, alone_s=0.02), "small": Need(0.04, 0, alone_s=0.04)})
        for n in range(6)
    ]
    few = search(PlacingProblem.of(there, demands), "machines", None)
    cheap = search(PlacingProblem.of(there, demands), "cost", None)
    assert few.filling.used[:4].sum() == 2 and few.value == 2  # 6 x .2 of 2 x .8
    assert cheap.filling.used[4:].sum() == 3 and cheap.value == 3.0  # 6 x .4 of 3 x .8
    assert few.bound is not None and few.bound.value == 2
    assert cheap.bound is not None and cheap.bound.value == pytest.approx(3.0)


def test_the_most_load_is_what_the_bound_allows_where_models_can_be_divided() -> None:
    demands = [demand(f"m{n}", 0.3, 0.0, gib=0.1) for n in range(5)]
    found = search(PlacingProblem.of(machines(3), demands), "load", None)
    assert found.value == pytest.approx(3 * 0.8 / (5 * 0.3), rel=1e-3)
    assert found.bound is not None and found.bound.value == pytest.approx(1.6)


def test_the_bound_counts_memory_and_copies() -> None:
    heavy = [demand(f"m{n}", 0.01, 0.0, gib=6) for n in range(5)]
    memory = placing_bound(PlacingProblem.of(machines(9), heavy), "machines")
    assert memory is not None and (memory.value, memory.by) == (3, "memory")
    copies = placing_bound(PlacingProblem.of(machines(9), [demand("m", 0.01, 0.0, replicas=4)]), "machines")
    assert copies is not None and (copies.value, copies.by) == (4, "copies")


def test_a_model_that_needs_three_machines_is_on_three() -> None:
    found = search(PlacingProblem.of(machines(4), [demand("m", 2.0, 0.0)]), "machines", None)
    assert found.value == 3
    assert np.isclose(found.filling.loads.sum(axis=0).max(), 2.0)
