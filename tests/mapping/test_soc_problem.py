"""What cannot be mapped is refused in one line that names the thing, the value and the way out."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from tests.mapping.event_schedules import best_value
from tests.mapping.soc_problems import XAVIER, arbitrary, synthetic
from weft.base.errors import ProfileError, WeftError, WorkloadError
from weft_map.limits import TaskLimits, check_feasible, energy_j, least_energy_j
from weft_map.problem import Group, Problem, Task, UnitCost
from weft_map.solver import Options, solve

MS = 1e-3


def group(name="g", *, leave=True, **costs):
    return Group(name, {unit: UnitCost(time_ms * MS, 10.0) for unit, time_ms in costs.items()}, leave=leave)


def problem(*tasks):
    return Problem(XAVIER, tasks)


@pytest.mark.parametrize("key", ["time_s", "demand_gb_s", "in_s", "out_s", "energy_j"])
@pytest.mark.parametrize("value", [-1e-9, float("nan"), float("inf"), 1e7])
def test_a_cost_that_is_no_cost_is_refused(key, value):
    given = {"time_s": 1.0, "demand_gb_s": 1.0, key: value}
    with pytest.raises(ProfileError, match=f"{key} = "):
        UnitCost(**given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: problem(), "nothing to map"),
        (lambda: problem(Task("a", (group(gpu=1),)), Task("a", (group(gpu=1),))), "each its own; got a, a"),
        (lambda: problem(Task("a", ())), "a: a model needs at least one group"),
        (lambda: problem(Task("a", (group(npu=1),))), r"no unit of xavier-like may run group 'g' \(it names npu"),
        (lambda: problem(Task("a", (Group("g", {}),))), r"may run group 'g' \(it names none"),
        (
            lambda: problem(Task("a", (Group("g", {"gpu": UnitCost(1.0, 140.0)}),))),
            "asks for 140 GB/s on gpu and the memory of xavier-like gives 136.5",
        ),
        (
            lambda: problem(Task("a", (group("x", leave=False, gpu=1), group("y", dla=1)))),
            "no unit of xavier-like may run groups 'x' to 'y', which must stay together",
        ),
        (lambda: problem(Task("a", (group(gpu=1),), repeats=0)), "a: repeats = 0 of 1 groups"),
        (lambda: problem(Task("a", (group(gpu=1),), repeats=5000)), "4096 groups together at most"),
        (lambda: problem(Task("a", (group(gpu=1),), after=("b",))), "a waits for unknown task 'b'"),
        (lambda: problem(Task("a", (group(gpu=1),), after=("a",))), "a waits for a: a circle"),
        (
            lambda: problem(Task("a", (group(gpu=1),), after=("b",)), Task("b", (group(gpu=1),), after=("a",))),
            "a waits for b waits for a: a circle; drop one 'after'",
        ),
    ],
)
def test_a_problem_that_cannot_be_is_refused_in_one_line(make, message):
    with pytest.raises(WeftError, match=message) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_an_energy_budget_no_schedule_keeps_says_by_how_much():
    given = arbitrary(3)
    least = sum(least_energy_j(given, n) for n in range(len(given.tasks)))
    with pytest.raises(WorkloadError, match=r"take at least .* J and the budget is .* J, .* J too few; raise it to"):
        solve(given, Options(limits=TaskLimits(energy_budget_j=0.5 * least)))
    kept = solve(given, Options(limits=TaskLimits(energy_budget_j=1.001 * least)))
    assert energy_j(given, kept.schedule) <= 1.001 * least


def test_limits_that_no_schedule_keeps_together_are_refused_up_front():
    """Each limit can be kept alone; both cannot, and brute force over all schedules agrees on where that begins."""
    tried = 0
    for seed in range(40):
        given = arbitrary(seed)
        if max(len(task.groups) for task in given.tasks) < 2 or int(given.tables.steps.sum()) > 6:
            continue
        free, capped = (sum(least_energy_j(given, n, cap) for n in range(len(given.tasks))) for cap in (None, 0))
        if not 1.01 * free < capped < inf:
            continue
        tried += 1
        below, above = (1 - 1e-6) * capped, (1 + 1e-6) * capped
        check_feasible(given, TaskLimits(max_switches=0))
        check_feasible(given, TaskLimits(energy_budget_j=below))
        message = rf"{capped:.6g} J with max_switches = 0 and the budget is .* J too few; .*, or allow more switches"
        with pytest.raises(WorkloadError, match=message):
            check_feasible(given, TaskLimits(0, below))
        assert best_value(given, max_switches=0, budget_j=below) == inf
        check_feasible(given, TaskLimits(0, above))
        assert best_value(given, max_switches=0, budget_j=above) < inf
    assert tried >= 5


@pytest.mark.parametrize("budget", [-1.0, float("nan"), float("inf")])
def test_a_budget_that_is_no_number_is_refused(budget):
    with pytest.raises(WorkloadError, match="energy budget of"):
        solve(arbitrary(3), Options(limits=TaskLimits(energy_budget_j=budget)))


def test_a_budget_needs_the_energy_of_every_group():
    with pytest.raises(ProfileError, match="m0: an energy budget needs energy_j of group 'g0' on gpu"):
        solve(synthetic(1, 2, 2), Options(limits=TaskLimits(energy_budget_j=1.0)))


def test_the_tables_hold_every_run_of_a_task_and_where_it_begins():
    costs = {"gpu": UnitCost(1 * MS, 5.0, 0.1 * MS, 0.2 * MS), "dla": UnitCost(2 * MS, 4.0, 0.3 * MS, 0.4 * MS)}
    chain = (Group("x", costs), Group("y", costs, leave=False), Group("z", {"gpu": costs["gpu"]}))
    tables = problem(Task("a", chain, repeats=2, entry_s={"dla": 7 * MS}, exit_s={"gpu": 9 * MS})).tables
    assert tables.steps.tolist() == [6] and tables.begins[0].tolist() == [True, False, False, True, False, False]
    assert tables.move[0, 1, 0].tolist() == pytest.approx([0, 0.5 * MS])  # out of the gpu, into the dla
    assert tables.move[0, 1, 1].tolist() == pytest.approx([0.5 * MS, 0])
    assert np.isinf(tables.move[0, 2, 1, 0]) and tables.move[0, 2, 0, 0] == 0  # y must not be left
    assert np.isinf(tables.time[0, 2, 1])
    assert tables.move[0, 0, -1].tolist() == pytest.approx([0, 7 * MS])
    assert tables.move[0, 3, 0].tolist() == pytest.approx([9 * MS, 16 * MS])  # out of the first run, into the second
    assert tables.leave[0].tolist() == pytest.approx([9 * MS, 0])
