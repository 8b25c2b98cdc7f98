"""Limits of a schedule beyond the SoC's, and whether any schedule can keep them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from weft.base.errors import ProfileError, WorkloadError
from weft_map.problem import Problem
from weft_map.schedule import Schedule
from weft_map.single_task import least_energy_j
from weft_map.switches import check_switches, most_switches


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Limits per task, or for all tasks together."""

    max_switches: int | None = None
    """Changes of unit within a run."""
    energy_budget_j: float | None = None
    """What all tasks together may spend."""


def check_feasible(problem: Problem, limits: TaskLimits) -> None:
    """Refuse limits that no schedule can keep, and say by how much."""
    check_switches(problem, limits.max_switches)
    budget = limits.energy_budget_j
    if budget is None:
        return
    if not (isfinite(budget) and budget >= 0):
        raise WorkloadError(f"an energy budget of {budget} J; must be a number from 0")
    _check_energies(problem)
    least, free = (_least_energy_j(problem, cap) for cap in (limits.max_switches, None))
    if least > budget:
        capped = f" with max_switches = {limits.max_switches}" if least > free else ""
        other = ", or allow more switches" if free <= budget else ""
        raise WorkloadError(
            f"the tasks take at least {least:.6g} J{capped} and the budget is {budget:.6g} J, "
            f"{least - budget:.3g} J too few; raise it to {least:.6g} J at least{other}"
        )


def _least_energy_j(problem: Problem, max_switches: int | None) -> float:
    return sum(least_energy_j(problem, n, max_switches) for n in range(len(problem.tasks)))


def _check_energies(problem: Problem) -> None:
    for task in problem.tasks:
        for group in task.groups:
            missing = [unit for unit in problem.units if unit in group.costs and group.costs[unit].energy_j is None]
            if missing:
                raise ProfileError(
                    f"{task.name}: an energy budget needs energy_j of group {group.name!r} on {missing[0]}; add it to "
                    "the profile, or power_w to the SoC's units for estimated profiles"
                )


def energy_j(problem: Problem, schedule: Schedule) -> float:
    """What the steps of a schedule take together."""
    return float(sum(problem.tables.energy[n, i, u] for n, row in enumerate(schedule.units) for i, u in enumerate(row)))


def keeps_to(problem: Problem, schedule: Schedule, limits: TaskLimits) -> bool:
    """Whether a schedule is within the limits."""
    switches, budget = limits.max_switches, limits.energy_budget_j
    return (switches is None or most_switches(problem, schedule.units) <= switches) and (
        budget is None or energy_j(problem, schedule) <= budget
    )
