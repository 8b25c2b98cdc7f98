"""The borrowed solvers against brute force: CP-SAT without contention, and Z3 with it on the smallest of cases."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from tests.mapping.small_problems import TIGHT, group, legal_mappings, model, pair, random_problem, soc
from weft.base.errors import InputError, WorkloadError
from weft_map.cpsat import BlindResult, contention_free, first_come_order, placed
from weft_map.limits import most_switches
from weft_map.problem import Problem, UnitCost
from weft_map.schedule import Schedule, Units
from weft_map.simulator import simulate
from weft_map.z3_model import solve_z3

NEAR = 2e-5
"""Part of a value that may be lost to whole ticks."""
PATIENCE_S = 600
"""For proofs that take a part of a second."""


def calm(problem: Problem) -> Problem:
    """The same, but nobody draws on the memory."""
    tasks = []
    for task in problem.tasks:
        groups = [
            replace(each, costs={u: replace(cost, demand_gb_s=0.0) for u, cost in each.costs.items()})
            for each in task.groups
        ]
        tasks.append(replace(task, groups=tuple(groups)))
    return Problem(problem.soc, tuple(tasks))


def every_mapping(problem: Problem) -> Iterator[Units]:
    return product(*(legal_mappings(problem, n) for n in range(len(problem.tasks))))


def every_sequence(problem: Problem) -> list[tuple[int, ...]]:
    """Every order of tasks in which their steps can be placed."""
    waits, counts = problem.tables.waits, tuple(int(count) for count in problem.tables.steps)

    def rest(left: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not any(left):
            yield ()
        for n, count in enumerate(left):
            if count and not any(left[m] for m in waits[n].nonzero()[0]):
                after = tuple(k - (m == n) for m, k in enumerate(left))
                yield from ((n, *tail) for tail in rest(after))

    return list(rest(counts))


def value(problem: Problem, finish: tuple[float, ...], objective: str) -> float:
    if objective == "latency":
        return max(finish)
    return -sum(task.repeats / end for task, end in zip(problem.tasks, finish, strict=True))


def brute(problem: Problem, objective: str, max_switches: int | None = None) -> float:
    """The best value without contention."""
    sequences = every_sequence(problem)
    return min(
        value(problem, placed(problem, units, sequence)[1], objective)
        for units in every_mapping(problem)
        if max_switches is None or most_switches(problem, units) <= max_switches
        for sequence in sequences
    )


def small(problem: Problem) -> bool:
    ways = 1
    for n in range(len(problem.tasks)):
        ways *= len(legal_mappings(problem, n))
    return ways * len(every_sequence(problem)) <= 3000


SMALL = [
    problem
    for seed in range(40)
    for problem in [random_problem(seed, tasks=2 + (seed % 4 == 0), groups=2 + (seed % 2))]
    if int(problem.tables.steps.sum()) <= 7 and small(problem)
]


@cache
def solved(index: int, objective: str) -> BlindResult:
    return contention_free(SMALL[index], objective, time_limit_s=PATIENCE_S)


def test_the_small_problems_have_what_makes_mapping_hard():
    assert len(SMALL) >= 20
    assert any(problem.tables.waits.any() for problem in SMALL)
    assert any(task.repeats > 1 for problem in SMALL for task in problem.tasks)
    assert any(problem.tables.instances.max() > 1 for problem in SMALL)
    assert any(not group.leave for problem in SMALL for task in problem.tasks for group in task.groups[:-1])
    assert any(len(problem.tasks) == 3 for problem in SMALL) and any(len(problem.units) == 3 for problem in SMALL)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_without_contention_it_finds_what_brute_force_finds(objective):
    for index, problem in list(enumerate(SMALL))[:: 1 if objective == "latency" else 2]:
        result = solved(index, objective)
        truth = brute(problem, objective)
        assert result.proved
        assert result.value_s == pytest.approx(truth, rel=NEAR if objective == "latency" else 1e-4)
        assert result.bound_s <= truth * (1 + 1e-12 if truth > 0 else 1 - 1e-12)
        assert result.bound_s == pytest.approx(truth, rel=NEAR if objective == "latency" else 1e-3)


def test_a_cap_on_switches_is_kept():
    tighter = 0
    for problem in SMALL[:12]:
        try:
            result = contention_free(problem, "latency", time_limit_s=PATIENCE_S, max_switches=0)
        except WorkloadError:
            continue
        assert most_switches(problem, result.schedule.units) == 0
        assert result.value_s == pytest.approx(brute(problem, "latency", 0), rel=NEAR)
        tighter += result.value_s > brute(problem, "latency") * 1.001
    assert tighter


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_the_plan_comes_to_its_value_in_the_simulator(objective):
    for index, problem in list(enumerate(SMALL))[::2]:
        result = solved(index, objective)
        assert simulate(calm(problem), result.schedule).value(objective) == pytest.approx(result.value_s, rel=1e-6)


@pytest.mark.parametrize("objective", ["latency", "throughput"])
def test_no_contended_schedule_beats_the_bound(objective):
    slowed = 0
    for index, problem in list(enumerate(SMALL))[::4]:
        bound = solved(index, objective).bound_s
        best = min(
            simulate(problem, schedule).value(objective)
            for units in every_mapping(problem)
            for schedule in [Schedule(units), *(planned(problem, units, s) for s in every_sequence(problem)[::7])]
        )
        assert bound <= best
        slowed += best > bound + 0.001 * abs(bound)
    assert slowed > 2


def planned(problem: Problem, units: Units, sequence: tuple[int, ...]) -> Schedule:
    return Schedule(units, starts_s=placed(problem, units, sequence)[0])


def test_whoever_can_begin_first_does():
    problem = pair(model("a", group("x", 1, 9), group("y", 1, 9)), model("b", group("x", 2, 9)))
    assert first_come_order(problem, ((0, 0), (0,))) == [0, 1, 0]  # b has waited longer than a's second group
    assert first_come_order(problem, ((0, 0), (1,))) == [0, 1, 0]
    assert placed(problem, ((0, 0), (0,)), [0, 1, 0])[1] == pytest.approx((4e-3, 3e-3))


def test_a_hint_does_no_harm_even_if_it_has_too_many_switches():
    problem = pair(model("a", *(group(f"g{i}", 1, 2) for i in range(3))), model("b", group("x", 1, 2)))
    hint = Schedule(((0, 1, 0), (0,)))
    result = contention_free(problem, "latency", time_limit_s=PATIENCE_S, max_switches=0, hint=hint)
    assert result.value_s == pytest.approx(3e-3) and most_switches(problem, result.schedule.units) == 0


def test_without_time_there_is_still_a_plan_and_a_bound():
    problem = random_problem(3, tasks=3, groups=12)
    result = contention_free(problem, "latency", time_limit_s=1e-6)
    assert 0 < result.bound_s <= result.value_s
    assert simulate(calm(problem), result.schedule).makespan_s == pytest.approx(result.value_s, rel=1e-6)


def test_groups_that_take_no_time_are_no_trouble():
    problem = pair(model("a", group("x", 0, 0), group("y", 0, 0)), model("b", group("x", 1, 0)))
    result = contention_free(problem, "latency", time_limit_s=PATIENCE_S)
    assert result.proved and result.value_s == result.bound_s == 0


def test_the_same_seed_gives_the_same_plan():
    problem = random_problem(5, groups=6, plain=True)
    first, second = (contention_free(problem, "latency", time_limit_s=PATIENCE_S, seed=7) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("package", ["ortools", "z3"])
def test_a_solver_that_is_not_there_is_named(package, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    problem = pair(model("a", group("x", 1, 2)))
    with pytest.raises(InputError, match=f"needs {package}.* pip install"):
        if package == "z3":
            solve_z3(problem, time_limit_s=1)
        else:
            contention_free(problem, "latency", time_limit_s=1)


def test_z3_is_for_two_units_only():
    problem = Problem(soc("gpu", "dla", "dsp"), (model("a", group("x", 1, 2, 3)),))
    with pytest.raises(WorkloadError, match="two units with one instance each; board has 1 gpu, 1 dla, 1 dsp"):
        solve_z3(problem, time_limit_s=1)
    with pytest.raises(WorkloadError, match="1 gpu, 2 dla"):
        solve_z3(Problem(soc("gpu", "dla", instances=2), (model("a", group("x", 1, 2)),)), time_limit_s=1)


def two_groups(seed: int) -> Problem:
    return random_problem(seed, groups=2, plain=True)


def test_z3_finds_the_best_of_all_schedules():
    pytest.importorskip("z3")
    for seed in range(6):
        problem = two_groups(seed)
        result = solve_z3(problem, time_limit_s=PATIENCE_S)
        assert result.proved and result.schedule
        ways = [
            schedule
            for units in every_mapping(problem)
            for schedule in [Schedule(units), *(planned(problem, units, each) for each in every_sequence(problem))]
        ]
        best = min(simulate(problem, schedule).makespan_s for schedule in ways)
        assert result.makespan_s <= best * 1.0005  # starts are free there, and times rounded
        assert simulate(problem, result.schedule).makespan_s == pytest.approx(result.makespan_s, rel=1e-3)
        assert contention_free(problem, "latency", time_limit_s=PATIENCE_S).bound_s <= result.makespan_s * 1.0005


def test_z3_knows_contention_by_hand():
    """Two groups that draw 80 of 120 GB/s each: side by side and slowed, or one after the other."""
    pytest.importorskip("z3")
    heavy = [replace(group("x", 1, 1), costs={u: UnitCost(1e-3, 80.0) for u in ("gpu", "dla")}) for _ in range(2)]
    problem = Problem(soc("gpu", "dla", contention=TIGHT), (model("a", heavy[0]), model("b", heavy[1])))
    slow = problem.soc.slow_down(0, 80.0, 80.0)
    result = solve_z3(problem, time_limit_s=PATIENCE_S)
    assert result.proved and result.makespan_s == pytest.approx(min(2.0, slow) * 1e-3, rel=1e-3)


def test_z3_keeps_pipelines_stretches_and_caps():
    pytest.importorskip("z3")
    groups = (group("x", 1, 9, leave=False), group("y", None, 2), group("z", 1, None))
    problem = pair(model("a", *groups), model("b", group("x", 1, 2), after=("a",)))
    result = solve_z3(problem, time_limit_s=PATIENCE_S, max_switches=1)
    assert result.proved and result.schedule
    assert result.schedule.units == ((1, 1, 0), (0,))
    assert result.makespan_s == pytest.approx(13e-3, rel=1e-3)
    with pytest.raises(WorkloadError, match="a needs at least 1 switch"):
        solve_z3(problem, time_limit_s=PATIENCE_S, max_switches=0)
