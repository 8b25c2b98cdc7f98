"""One model alone: every trade of time against energy, the cheapest ways, the fewest switches, against brute force."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

from tests.mapping.test_baselines import group, model, pair, random_problem, soc
from tests.mapping.test_cpsat import rows
from weft.base.errors import ProfileError, WorkloadError
from weft_map.alone import least_energy_j, shortest
from weft_map.energy import least_latency, pareto
from weft_map.problem import Group, Problem, UnitCost
from weft_map.simulator import simulate
from weft_map.switches import check_switches, fewest_stretches, most_switches

SWITCH_J, MOVE_W = 2e-3, 5.0


def cost(problem: Problem, n: int, row: tuple[int, ...]) -> tuple[float, float]:
    """Seconds and joules of a task on these units, added up."""
    task, tables = problem.tasks[n], problem.tables
    time_s, energy_j, at = 0.0, 0.0, -1
    for i, unit in enumerate(row):
        move_s = float(tables.move[n, i, at, unit])
        time_s += move_s + float(tables.time[n, i, unit])
        energy_j += MOVE_W * move_s + problem.step(n, i).costs[problem.units[unit]].energy_j
        energy_j += SWITCH_J if i % len(task.groups) and at != unit else 0.0
        at = unit
    out_s = float(tables.leave[n, at])
    return time_s + out_s, energy_j + MOVE_W * out_s


def front(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Those no other beats in both."""
    kept: list[tuple[float, float]] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1] * (1 - 1e-12):
            kept.append(point)
    return kept


def lone(seed: int) -> Problem:
    return random_problem(seed, tasks=1, groups=6, plain=seed % 2 == 0)


def trades(problem: Problem, task: int | tuple[int, ...] = 0):
    return pareto(problem, task, switch_j=SWITCH_J, move_w=MOVE_W)


def test_every_trade_worth_making_is_found():
    sizes = []
    for seed in range(40):
        problem = lone(seed)
        if 3 ** int(problem.tables.steps[0]) > 60_000:
            continue
        truth = front([cost(problem, 0, row) for row in rows(problem, 0)])
        found = trades(problem)
        assert [each[:2] for each in found] == [pytest.approx(point) for point in truth]
        assert all(cost(problem, 0, each.units[0]) == pytest.approx(each[:2]) for each in found)
        sizes.append(len(found))
    assert len(sizes) > 25 and max(sizes) >= 5


def test_the_fastest_within_the_budget():
    for seed in range(40):
        problem = lone(seed)
        found = trades(problem)
        budget = (found[0].energy_j + found[-1].energy_j) / 2
        result = least_latency(problem, 0, budget, switch_j=SWITCH_J, move_w=MOVE_W)
        assert result.energy_j <= budget * (1 + 1e-12) and budget == result.budget_j
        assert not any(each.energy_j <= budget and each.latency_s < result.latency_s for each in found)
        assert simulate(result.problem, result.schedule).makespan_s == pytest.approx(result.latency_s, rel=1e-6)


def test_models_that_run_one_after_the_other_share_the_budget():
    for seed in range(10):
        problem = random_problem(seed, groups=3)
        sums = [
            (a[0] + b[0], a[1] + b[1])
            for a in (cost(problem, 1, row) for row in rows(problem, 1))
            for b in (cost(problem, 0, row) for row in rows(problem, 0))
        ]
        found = trades(problem, (1, 0))
        assert [each[:2] for each in found] == [pytest.approx(point) for point in front(sums)]
        result = least_latency(problem, (1, 0), found[-1].energy_j, switch_j=SWITCH_J, move_w=MOVE_W)
        assert [task.name for task in result.problem.tasks] == ["m1", "m0"]
        assert simulate(result.problem, result.schedule).makespan_s == pytest.approx(result.latency_s, rel=1e-6)


def dear(name: str, gpu: tuple[float, float], dla: tuple[float, float]) -> Group:
    """Milliseconds and millijoules on each."""
    costs = {u: UnitCost(ms / 1000, 10.0, energy_j=mj / 1000) for u, (ms, mj) in (("gpu", gpu), ("dla", dla))}
    return Group(name, costs)


def test_a_budget_by_hand():
    """The dla is slower and cheaper; with 12 mJ only the group that loses least there goes to it."""
    problem = pair(model("a", dear("x", (1, 10), (4, 2)), dear("y", (1, 10), (2, 2))))
    assert [(round(t.latency_s * 1e3), round(t.energy_j * 1e3), t.units[0]) for t in pareto(problem, 0)] == [
        (2, 20, (0, 0)),
        (3, 12, (0, 1)),
        (6, 4, (1, 1)),
    ]
    assert least_latency(problem, 0, 12.5e-3).schedule.units == ((0, 1),)
    assert least_latency(problem, 0, 12.5e-3, switch_j=1e-3).schedule.units == ((1, 1),)


def test_a_budget_nobody_can_keep_says_by_how_much():
    problem = pair(model("a", dear("x", (1, 10), (4, 2)), dear("y", (1, 10), (2, 2))))
    with pytest.raises(
        WorkloadError,
        match=re.escape("a: the energy budget is 0.003 J and the least possible is 0.004 J, 0.001 J more"),
    ):
        least_latency(problem, 0, 3e-3)


def test_energy_that_is_not_known_is_asked_for():
    with pytest.raises(ProfileError, match="a: group 'x' has no energy_j on gpu"):
        pareto(pair(model("a", group("x", 1, 2))), 0)


def test_the_shortest_way_under_a_cap():
    for seed in range(30):
        problem = lone(seed)
        every = rows(problem, 0)
        for cap in (None, 0, 1, 2):
            allowed = [row for row in every if cap is None or most_switches(problem, (row,)) <= cap]
            if not allowed:
                continue
            seconds, path = shortest(problem, 0, cap)
            assert seconds == pytest.approx(min(cost(problem, 0, row)[0] for row in allowed))
            assert path in allowed and cost(problem, 0, path)[0] == pytest.approx(seconds)


def test_the_least_energy_under_a_cap():
    """However many switches a run needs for it, and infinite where it cannot do with the cap."""
    dearer = 0
    for seed in range(30):
        problem = lone(seed)
        every = rows(problem, 0)
        joules = [sum(problem.tables.energy[0, i, unit] for i, unit in enumerate(row)) for row in every]
        free = least_energy_j(problem, 0)
        assert free == pytest.approx(min(joules))
        for cap in (0, 1, 2):
            within = [j for row, j in zip(every, joules, strict=True) if most_switches(problem, (row,)) <= cap]
            assert least_energy_j(problem, 0, cap) == pytest.approx(min(within, default=inf))
            dearer += bool(within) and min(within) > 1.01 * free
    assert dearer > 20


def test_the_fewest_switches():
    needed = set()
    for seed in range(60):
        problem = random_problem(seed, tasks=1, groups=5)
        task = problem.tasks[0]
        once = Problem(problem.soc, (replace(task, repeats=1),))
        fewest = min(most_switches(once, (row,)) for row in rows(once, 0))
        assert len(fewest_stretches(problem, task)) - 1 == fewest
        check_switches(problem, fewest)
        needed.add(fewest)
        if fewest:
            with pytest.raises(WorkloadError, match=f"m0 needs at least {fewest} switch"):
                check_switches(problem, fewest - 1)
    assert len(needed) > 1


def test_a_cap_below_that_names_the_groups_and_what_is_missing():
    groups = [group("a", 1, None), group("b", 1, 1), group("c", None, 1), group("d", 1, 1), group("e", 1, None)]
    problem = pair(model("net", *groups))
    message = (
        "net needs at least 2 switches (groups 'a' to 'b' on gpu only, then groups 'c' to 'd' on dla only, then "
        "group 'e' on gpu only) and max_switches is 1, 1 too few; allow 2 or add costs on other units"
    )
    with pytest.raises(WorkloadError, match=re.escape(message)):
        check_switches(problem, 1)
    check_switches(problem, 2)
    check_switches(problem, None)
    with pytest.raises(WorkloadError, match="max_switches is -1; must be 0 or more"):
        check_switches(problem, -1)


def test_groups_that_must_stay_together_count_as_one():
    groups = [group("a", 1, 1, leave=False), group("b", None, 1), group("c", 1, None)]
    problem = Problem(soc("gpu", "dla"), (model("net", *groups),))
    assert [stretch.groups for stretch in fewest_stretches(problem, problem.tasks[0])] == [("a", "b"), ("c",)]
