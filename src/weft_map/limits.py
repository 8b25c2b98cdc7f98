"""Limits that a user sets for schedules (switches, energy), and whether any schedule can keep them.

A *switch* is a change of unit between two groups of one run; a new run may begin on any unit. The least time and the
least energy of a task that runs alone are exact: a dynamic program from the end of its chain of steps finds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import ProfileError, WorkloadError
from weft_map.problem import Floats, Problem, Task
from weft_map.schedule import Schedule, Units


def shortest(problem: Problem, task: int, max_switches: int | None = None) -> tuple[float, tuple[int, ...]]:
    """The least duration in seconds of *task* without other tasks, and the unit of each of its steps then."""
    tables, steps = problem.tables, int(problem.tables.steps[task])
    costs_s = tables.move[task, :steps] + tables.time[task, :steps, None]
    return _cheapest_path(problem, task, costs_s, tables.leave[task], max_switches)


def least_energy_j(problem: Problem, task: int, max_switches: int | None = None) -> float:
    """The least energy of *task* in joules, at any duration; infinite if *max_switches* are too few."""
    tables, steps = problem.tables, int(problem.tables.steps[task])
    costs_j = np.where(np.isinf(tables.move[task, :steps]), np.inf, tables.energy[task, :steps, None])
    return _cheapest_path(problem, task, costs_j, np.zeros(len(problem.units)), max_switches)[0]


def _cheapest_path(
    problem: Problem, task: int, costs: Floats, leave: Floats, max_switches: int | None
) -> tuple[float, tuple[int, ...]]:
    """The cheapest sequence of units for the steps of *task*: its cost, and the units.

    costs[step, from, to]: cost of a step on unit *to* if the task comes from unit *from* (the last index: from
    outside). leave[unit]: cost after the last step.
    """
    steps = len(costs)
    # Without a limit, every step counts as the begin of a run, so no switch is ever counted.
    begins_run = np.ones(steps, dtype=np.bool_) if max_switches is None else problem.tables.begins[task, :steps]
    # No run can switch more often than between all of its groups.
    max_left = min(max_switches or 0, len(problem.tasks[task].groups) - 1)
    values, choices = _costs_to_end(costs, leave, begins_run, max_left)
    source, switches_left, units = -1, max_left, []  # -1: the task comes from outside
    for i in range(len(costs)):
        unit = int(choices[i][switches_left, source])
        switches_left = max_left if begins_run[i] else switches_left - (unit != source)
        units.append(unit)
        source = unit
    return float(values[max_left, -1]), tuple(units)  # the cost from outside, with all switches left


def _costs_to_end(
    costs: Floats, leave: Floats, begins_run: npt.NDArray[np.bool_], max_left: int
) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """The least cost of all steps, and the best unit at each step: dynamic programming from the last step backwards.

    Both are indexed by [switches left, unit before]. costs, leave: as in ``_cheapest_path``. begins_run[step]: a
    run begins there, so changing the unit before it is no switch, and *max_left* switches are allowed again.
    """
    units = len(leave)
    is_same_unit = np.eye(units + 1, units, dtype=np.bool_)
    values, choices = np.tile(np.append(leave, np.inf), (max_left + 1, 1)), []
    for i in reversed(range(len(costs))):
        values_after = values[:, None, :units]  # it and *onward*: [switches left, from, to]
        if begins_run[i]:
            onward = np.broadcast_to(values_after[max_left], (max_left + 1, units + 1, units))
        else:
            after_switch = np.concatenate([np.full((1, 1, units), np.inf), values_after[:-1]])
            onward = np.where(is_same_unit, values_after, after_switch)
        totals = costs[i] + onward
        choices.append(totals.argmin(axis=-1))
        values = totals.min(axis=-1)
    return values, choices[::-1]


def most_switches(problem: Problem, units: Units) -> int:
    """The largest number of switches in any run of any task; *units* is the mapping, [task][step]."""
    return max(
        sum(row[i] != row[i - 1] for i in range(begin + 1, begin + len(task.groups)))
        for task, row in zip(problem.tasks, units, strict=True)
        for begin in range(0, len(row), len(task.groups))
    )


def check_switches(problem: Problem, max_switches: int | None) -> None:
    """Raise WorkloadError if *max_switches* is too low for a task; the message says which groups force the switches."""
    if max_switches is None:
        return
    if max_switches < 0:
        raise WorkloadError(f"max_switches is {max_switches}; must be 0 or more")
    for task in problem.tasks:
        stretches = fewest_stretches(problem, task)
        needed = len(stretches) - 1
        if needed > max_switches:
            raise WorkloadError(
                f"{task.name} needs at least {_count(needed)} ({_reasons(stretches)}) and max_switches is "
                f"{max_switches}, {needed - max_switches} too few; allow {needed} or add costs on other units"
            )


class Stretch(NamedTuple):
    """A longest sequence of groups of one run that can stay on one unit."""

    groups: tuple[str, ...]
    units: tuple[str, ...]
    """The units that may run all of these groups."""


def fewest_stretches(problem: Problem, task: Task) -> tuple[Stretch, ...]:
    """The fewest stretches that make up a run of *task*; making each as long as possible from the front is optimal."""
    stretches: list[Stretch] = []
    names: list[str] = []
    units_so_far: tuple[str, ...] = problem.units
    for block in _blocks(task):
        units_of_block = tuple(unit for unit in problem.units if all(unit in task.groups[i].costs for i in block))
        common_units = tuple(unit for unit in units_so_far if unit in units_of_block)
        if not common_units:
            stretches.append(Stretch(tuple(names), units_so_far))
            names, common_units = [], units_of_block
        units_so_far = common_units
        names += [task.groups[i].name for i in block]
    return (*stretches, Stretch(tuple(names), units_so_far))


def _blocks(task: Task) -> list[range]:
    """Index ranges of groups that must run on one unit, because the model may not change units between them."""
    cuts = [i for i in range(len(task.groups)) if i == 0 or task.groups[i - 1].leave]
    return [range(begin, end) for begin, end in zip(cuts, [*cuts[1:], len(task.groups)], strict=True)]


def _count(switches: int) -> str:
    return f"{switches} switch" if switches == 1 else f"{switches} switches"


def _reasons(stretches: Sequence[Stretch]) -> str:
    """Text such as "group 'a' on dla only, then groups 'b' to 'd' on gpu only"; at most four stretches."""
    texts = [f"{_span(stretch.groups)} on {' or '.join(stretch.units)} only" for stretch in stretches[:4]]
    return ", then ".join(texts) + (", ..." if len(stretches) > 4 else "")


def _span(groups: Sequence[str]) -> str:
    return f"group {groups[0]!r}" if len(groups) == 1 else f"groups {groups[0]!r} to {groups[-1]!r}"


@dataclass(frozen=True, slots=True)
class TaskLimits:
    """Limits per task, or for all tasks together."""

    max_switches: int | None = None
    """Changes of unit within a run."""
    energy_budget_j: float | None = None
    """Joules that all tasks together may spend."""


def check_feasible(problem: Problem, limits: TaskLimits) -> None:
    """Raise WorkloadError if no schedule can keep *limits*; the message says by how much they are missed."""
    check_switches(problem, limits.max_switches)
    budget = limits.energy_budget_j
    if budget is None:
        return
    if not (isfinite(budget) and budget >= 0):
        raise WorkloadError(f"an energy budget of {budget} J; must be a number from 0")
    _check_energies(problem)
    least_j, least_uncapped_j = (_total_least_energy_j(problem, cap) for cap in (limits.max_switches, None))
    if least_j > budget:
        capped = f" with max_switches = {limits.max_switches}" if least_j > least_uncapped_j else ""
        advice = ", or allow more switches" if least_uncapped_j <= budget else ""
        raise WorkloadError(
            f"the tasks take at least {least_j:.6g} J{capped} and the budget is {budget:.6g} J, "
            f"{least_j - budget:.3g} J too few; raise it to {least_j:.6g} J at least{advice}"
        )


def _total_least_energy_j(problem: Problem, max_switches: int | None) -> float:
    return sum(least_energy_j(problem, n, max_switches) for n in range(len(problem.tasks)))


def _check_energies(problem: Problem) -> None:
    """Raise ProfileError if a group has no energy on a unit of the SoC: an energy budget needs all of them."""
    for task in problem.tasks:
        for group in task.groups:
            missing = [unit for unit in problem.units if unit in group.costs and group.costs[unit].energy_j is None]
            if missing:
                raise ProfileError(
                    f"{task.name}: an energy budget needs energy_j of group {group.name!r} on {missing[0]}; add it to "
                    "the profile, or power_w to the SoC's units for estimated profiles"
                )


def energy_j(problem: Problem, schedule: Schedule) -> float:
    """Joules of all steps of *schedule*."""
    return float(sum(problem.tables.energy[n, i, u] for n, row in enumerate(schedule.units) for i, u in enumerate(row)))


def keeps_to(problem: Problem, schedule: Schedule, limits: TaskLimits) -> bool:
    """Whether a schedule is within the limits."""
    switches, budget = limits.max_switches, limits.energy_budget_j
    return (switches is None or most_switches(problem, schedule.units) <= switches) and (
        budget is None or energy_j(problem, schedule) <= budget
    )
