"""The cheapest way of one task through the units with the SoC to itself: in time and in energy, with a cap on switches.

Exact, by a dynamic program from the end of the task's chain of steps.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft_map.problem import Floats, Problem


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
