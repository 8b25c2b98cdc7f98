"""One model alone: the shortest and the cheapest ways, the fewest switches, against brute force."""

from __future__ import annotations

import re
from dataclasses import replace
from math import inf

import pytest

from tests.mapping.small_problems import group, legal_mappings, model, pair, random_problem, soc
from weft.base.errors import WorkloadError
from weft_map.limits import check_switches, fewest_stretches, least_energy_j, most_switches, shortest
from weft_map.problem import Problem

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


def test_the_shortest_way_under_a_cap():
    for seed in range(30):
        problem = lone(seed)
        every = legal_mappings(problem, 0)
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
        every = legal_mappings(problem, 0)
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
        fewest = min(most_switches(once, (row,)) for row in legal_mappings(once, 0))
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
