"""Limits of a schedule beyond the SoC's, and whether any schedule can keep them.

A *switch* is a change of unit between two groups of one run; a new run begins where it likes. What a task takes at
least with the SoC to itself, in time or energy, is exact: a dynamic program from the end of its chain of steps.
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
    """The least duration of a task without other tasks, and the units it takes."""
    tables, steps = problem.tables, int(problem.tables.steps[task])
    ways_s = tables.move[task, :steps] + tables.time[task, :steps, None]
    return _cheapest(problem, task, ways_s, tables.leave[task], max_switches)


def least_energy_j(problem: Problem, task: int, max_switches: int | None = None) -> float:
    """The least energy of a task, at any duration; infinite if it needs more switches."""
    tables, steps = problem.tables, int(problem.tables.steps[task])
    ways_j = np.where(np.isinf(tables.move[task, :steps]), np.inf, tables.energy[task, :steps, None])
    return _cheapest(problem, task, ways_j, np.zeros(len(problem.units)), max_switches)[0]


def _cheapest(
    problem: Problem, task: int, ways: Floats, leave: Floats, max_switches: int | None
) -> tuple[float, tuple[int, ...]]:
    """The least sum of ways[step, from, to] and leave[unit], and its units."""
    free = np.ones(len(ways), dtype=np.bool_) if max_switches is None else problem.tables.begins[task, : len(ways)]
    # No run can switch more often than between all of its groups.
    cap = min(max_switches or 0, len(problem.tasks[task].groups) - 1)
    values, choices = _togo(ways, leave, free, cap)
    at, spare, units = -1, cap, []
    for i in range(len(ways)):
        unit = int(choices[i][spare, at])
        spare = cap if free[i] else spare - (unit != at)
        units.append(unit)
        at = unit
    return float(values[cap, -1]), tuple(units)


def _togo(
    ways: Floats, leave: Floats, free: npt.NDArray[np.bool_], cap: int
) -> tuple[Floats, list[npt.NDArray[np.intp]]]:
    """The least cost to the end, and the best unit at each step, by switches to spare and unit before.

    free[step]: whether a change of unit before that step counts for nothing, and those made before it no more.
    """
    units = len(leave)
    stays = np.eye(units + 1, units, dtype=np.bool_)
    values, choices = np.tile(np.append(leave, np.inf), (cap + 1, 1)), []
    for i in reversed(range(len(ways))):
        after = values[:, None, :units]
        if free[i]:
            onward = np.broadcast_to(after[cap], (cap + 1, units + 1, units))
        else:
            switched = np.concatenate([np.full((1, 1, units), np.inf), after[:-1]])
            onward = np.where(stays, after, switched)
        every = ways[i] + onward
        choices.append(every.argmin(axis=-1))
        values = every.min(axis=-1)
    return values, choices[::-1]


def most_switches(problem: Problem, units: Units) -> int:
    """The switches of the run, of any task, that has the most."""
    return max(
        sum(row[i] != row[i - 1] for i in range(begin + 1, begin + len(task.groups)))
        for task, row in zip(problem.tasks, units, strict=True)
        for begin in range(0, len(row), len(task.groups))
    )


def check_switches(problem: Problem, max_switches: int | None) -> None:
    """Refuse a cap on switches below what a task needs, and say why it needs them."""
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
    """Groups of one run that can stay on one unit, as many as possible."""

    groups: tuple[str, ...]
    units: tuple[str, ...]
    """The units that may run all of them."""


def fewest_stretches(problem: Problem, task: Task) -> tuple[Stretch, ...]:
    """A run in as few stretches as can be; taking each as long as possible is optimal."""
    stretches: list[Stretch] = []
    names: list[str] = []
    able: tuple[str, ...] = problem.units
    for block in _blocks(task):
        here = tuple(unit for unit in problem.units if all(unit in task.groups[i].costs for i in block))
        both = tuple(unit for unit in able if unit in here)
        if not both:
            stretches.append(Stretch(tuple(names), able))
            names, both = [], here
        able = both
        names += [task.groups[i].name for i in block]
    return (*stretches, Stretch(tuple(names), able))


def _blocks(task: Task) -> list[range]:
    """Groups that must stay together."""
    cuts = [i for i in range(len(task.groups)) if i == 0 or task.groups[i - 1].leave]
    return [range(begin, end) for begin, end in zip(cuts, [*cuts[1:], len(task.groups)], strict=True)]


def _count(switches: int) -> str:
    return f"{switches} switch" if switches == 1 else f"{switches} switches"


def _reasons(stretches: Sequence[Stretch]) -> str:
    shown = [f"{_span(stretch.groups)} on {' or '.join(stretch.units)} only" for stretch in stretches[:4]]
    return ", then ".join(shown) + (", ..." if len(stretches) > 4 else "")


def _span(groups: Sequence[str]) -> str:
    return f"group {groups[0]!r}" if len(groups) == 1 else f"groups {groups[0]!r} to {groups[-1]!r}"


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
