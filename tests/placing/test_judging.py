"""Simulated machines: what fills a real one fills the simulated one, and moves make fewer requests late."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.placing.problems import demand, machines
from weft.base.errors import InputError
from weft_cluster.placing.demand import Demand
from weft_cluster.placing.filling import Filling, broken_limits
from weft_cluster.placing.judging import OnTimeJudge, improve
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.routing.placing_run import place


def model(name: str, compute: float, memory: float, *, rate: float = 50.0, deadline_s: float = 0.2) -> Demand:
    alone = (compute + memory) / rate
    return demand(name, compute, memory, rate=rate, alone_s=alone, segment_s=alone / 4, deadline_s=deadline_s, gib=0.1)


def on_one(*demands: Demand, overlap: float) -> Filling:
    return Filling(PlacingProblem.of(machines(1, overlap=overlap), demands), [{n: 1.0 for n in range(len(demands))}])


@pytest.mark.parametrize(("overlap", "on_time"), [(1.0, True), (0.0, False)])
def test_opposites_are_on_time_only_where_they_overlap(overlap: float, on_time: bool) -> None:
    """Loads of .75 and .75: a machine that overlaps is .75 busy, one that does not 1.5."""
    found = on_one(model("c", 0.7, 0.05), model("m", 0.05, 0.7), overlap=overlap)
    assert (OnTimeJudge(0).attainment(found, [0]) > 0.99) == on_time


def test_the_same_seed_gives_the_same_and_another_does_not() -> None:
    found = on_one(model("c", 0.5, 0.4), model("m", 0.4, 0.5), overlap=0.9)
    first, again, other = (OnTimeJudge(seed).machine(found, 0) for seed in (1, 1, 2))
    assert first == again != other
    assert all(counted.arrived > 500 for counted in first.values())


def test_moves_relieve_a_machine_that_is_late_and_keep_every_limit() -> None:
    demands = [model(f"m{n}", 0.25, 0.05, deadline_s=0.03) for n in range(4)]
    found = Filling(PlacingProblem.of(machines(3, busy_cap=1.0), demands), [{n: 1.0 for n in range(4)}])
    before = OnTimeJudge(5).attainment(found, [0])
    improve(found, OnTimeJudge(0), 0.99, trials=20)
    assert OnTimeJudge(5).attainment(found, [0, 1, 2]) > before + 0.05
    assert found.served() == pytest.approx([1.0] * 4)
    assert not list(broken_limits(found))


def test_a_pinned_model_is_never_moved() -> None:
    demands = [demand(f"m{n}", 0.3, 0.05, deadline_s=0.02, machine="gpu-1", gib=0.1) for n in range(3)]
    found = Filling(PlacingProblem.of(machines(3, busy_cap=1.0), demands), [{n: 1.0 for n in range(3)}])
    improve(found, OnTimeJudge(0), 0.999, trials=20)
    assert found.shares == [{0: 1.0, 1: 1.0, 2: 1.0}, {}, {}]


def test_a_target_takes_more_machines_than_the_load() -> None:
    demands = [model(f"m{n}", 0.2, 0.1, deadline_s=0.025) for n in range(8)]
    loads = place(demands, machines(8), target=None)
    on_time = place(demands, machines(8), target=0.995)
    assert on_time.value > loads.value
    assert on_time.attainment is not None and on_time.attainment > 0.99
    assert any("machines carry the load" in note for note in on_time.notes)


def test_the_best_attainment_uses_all_machines() -> None:
    found = place([model(f"m{n}", 0.2, 0.1) for n in range(4)], machines(3), objective="attainment")
    assert len(found.machines) == 3
    assert found.bound == pytest.approx(1.0)
    assert found.value == pytest.approx(1.0, abs=0.01)


def test_attainment_without_a_simulation_is_refused() -> None:
    with pytest.raises(InputError, match="needs a target, and no --fluid"):
        place([model("m", 0.2, 0.1)], machines(1), objective="attainment", target=None)


def test_bursts_make_more_requests_late() -> None:
    calm, bursty = (
        OnTimeJudge(0).attainment(on_one(replace(model("c", 0.6, 0.1), deadline_s=0.06, cv=cv), overlap=0.5), [0])
        for cv in (1.0, 4.0)
    )
    assert bursty < calm - 0.05


def test_where_not_all_can_be_on_time_most_of_what_can_be_computed_is() -> None:
    """Half more load than the machines can compute: requests that cannot be on time take nothing from the others."""
    found = place([model(f"m{n}", 0.7, 0.05) for n in range(6)], machines(3), objective="attainment")
    assert found.bound == pytest.approx(3 / (6 * 0.725), rel=0.01)
    assert 0.8 * found.bound < found.value <= found.bound
