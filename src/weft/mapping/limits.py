"""What a schedule must keep to beyond the SoC itself, and whether any schedule can."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from weft.errors import ProfileError, WorkloadError
from weft.mapping.energy import check_feasible as check_switches
from weft.mapping.energy import most_switches
from weft.mapping.problem import Problem
from weft.mapping.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Limits:
    """What is asked of every task, or of all together."""

    max_switches: int | None = None
    """Changes of unit within a run."""
    energy_budget_j: float | None = None
    """Of all tasks together."""


def check_feasible(problem: Problem, limits: Limits) -> None:
    """Refuse limits that no schedule can keep, and say by how much."""
    check_switches(problem, limits.max_switches)
    if limits.energy_budget_j is None:
        return
    if not (isfinite(limits.energy_budget_j) and limits.energy_budget_j >= 0):
        raise WorkloadError(f"an energy budget of {limits.energy_budget_j} J; must be a number from 0")
    _check_energies(problem)
    least = sum(least_energy_j(problem, n) for n in range(len(problem.tasks)))
    if least > limits.energy_budget_j:
        raise WorkloadError(
            f"the tasks take at least {least:.6g} J and the budget is {limits.energy_budget_j:.6g} J, "
            f"{least - limits.energy_budget_j:.3g} J too few; raise it to {least:.6g} J at least"
        )


def _check_energies(problem: Problem) -> None:
    for task in problem.tasks:
        for group in task.groups:
            missing = [unit for unit in problem.units if unit in group.costs and group.costs[unit].energy_j is None]
            if missing:
                raise ProfileError(
                    f"{task.name}: an energy budget needs energy_j of group {group.name!r} on {missing[0]}; add it to "
                    "the profile, or power_w to the SoC's units for estimated profiles"
                )


def least_energy_j(problem: Problem, task: int) -> float:
    """What a task takes at least, however long that takes."""
    tables = problem.tables
    allowed = np.where(np.isfinite(tables.move[task]), 0.0, np.inf)
    spent = np.full(allowed.shape[1], np.inf)
    spent[-1] = 0.0
    for i in range(int(tables.steps[task])):
        spent = np.append((spent[:, None] + allowed[i] + tables.energy[task, i]).min(axis=0), np.inf)
    return float(spent.min())


def energy_j(problem: Problem, schedule: Schedule) -> float:
    """What the steps of a schedule take together."""
    return float(sum(problem.tables.energy[n, i, u] for n, row in enumerate(schedule.units) for i, u in enumerate(row)))


def keeps_to(problem: Problem, schedule: Schedule, limits: Limits) -> bool:
    """Whether a schedule is within the limits."""
    switches, budget = limits.max_switches, limits.energy_budget_j
    return (switches is None or most_switches(problem, schedule.units) <= switches) and (
        budget is None or energy_j(problem, schedule) <= budget
    )
