"""The mapping problem: models as chains of groups, and the cost of each group on each unit of a SoC.

A ``Group`` is the smallest piece that is placed: layers that stay together. A ``Task`` is one model to be run, once
or several times in a row, perhaps after others. ``Problem.tables`` lays all of it out as arrays for the
simulator and the solver; a problem that cannot be solved is refused here, in one line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import ProfileError, WorkloadError, unknown_name
from weft.devices import Soc

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Objective = Literal["latency", "throughput"]
# Cap on times in profiles. Up to it the errors of float64 stay below a nanosecond; larger values are typing errors.
MAX_SECONDS = 1e6
MAX_STEPS = 4096
"""Cap on the groups of a task times its repeats."""
MOST_TASKS = 12
"""Cap on the tasks of a problem: with more tasks the search has too many combinations."""


@dataclass(frozen=True, slots=True)
class UnitCost:
    """The cost of a group on one unit, if nothing else runs on the SoC."""

    time_s: float
    demand_gb_s: float
    """Memory traffic that the group demands while it runs, in 10^9 bytes per second."""
    in_s: float = 0.0
    """Seconds before the group, if the previous group ran on another unit."""
    out_s: float = 0.0
    """Seconds after the group, if the next group runs on another unit."""
    energy_j: float | None = None

    def __post_init__(self) -> None:
        for key in ("time_s", "demand_gb_s", "in_s", "out_s", "energy_j"):
            value = getattr(self, key)
            if value is not None and not (isfinite(value) and 0 <= value <= MAX_SECONDS):
                raise ProfileError(f"{key} = {value} is not a number from 0 to {MAX_SECONDS:g}")


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that run together on one unit, with their cost on each unit that may run them."""

    name: str
    costs: Mapping[str, UnitCost]
    """The group's cost by unit; a unit that is not named may not run it."""
    leave: bool = True
    """Whether the model may change its unit after this group."""
    layers: tuple[str, ...] = ()
    """Names of the layers; one entry such as "0-9" where the profile numbers them."""


@dataclass(frozen=True, slots=True)
class Task:
    """One model to be run."""

    name: str
    groups: tuple[Group, ...]
    after: tuple[str, ...] = ()
    """Tasks that must end before this one begins."""
    repeats: int = 1
    """Runs in a row; each run may begin on any unit."""
    entry_s: Mapping[str, float] | None = None
    """Seconds before the first group of a run, by unit."""
    exit_s: Mapping[str, float] | None = None
    """Seconds after the last group of a run, by unit."""


class Tables(NamedTuple):
    """A problem as arrays by task, step and unit, in seconds and GB/s.

    A step is one group in one run; the steps of a task are those of its first run, then of its second run, and so on.
    """

    steps: Ints
    """[task]: number of steps."""
    time: Floats
    """[task, step, unit]: stand-alone seconds; infinite where the unit may not run the step."""
    demand: Floats
    """[task, step, unit]: memory traffic in GB/s."""
    energy: Floats
    """[task, step, unit]: joules; 0 where the profile does not give them."""
    move: Floats
    """[task, step, from, to]: seconds before the step if the task comes from unit *from*; infinite where the move is
    forbidden. The last index of *from* stands for the outside, where the first run begins."""
    begins: npt.NDArray[np.bool_]
    """[task, step]: whether the step is the first of a run."""
    leave: Floats
    """[task, unit]: seconds after the last step of the task."""
    waits: npt.NDArray[np.bool_]
    """[task, other]: whether the task may begin only after *other* has ended."""
    instances: Ints
    """[unit]: how many groups the unit can run at a time."""
    contention: Floats
    """[unit, parameter]: see ``Soc.contention_table``."""


@dataclass(frozen=True)
class Problem:
    """Tasks on a SoC."""

    soc: Soc
    tasks: tuple[Task, ...]

    def __repr__(self) -> str:
        return f"Problem({' + '.join(task.name for task in self.tasks)} on {self.soc.name})"

    def __post_init__(self) -> None:
        if not self.tasks:
            raise WorkloadError("there is nothing to map; name at least one model")
        if len(self.tasks) > MOST_TASKS:
            raise WorkloadError(f"{len(self.tasks)} tasks; at most {MOST_TASKS} can be mapped at once")
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise WorkloadError(f"tasks need names, each its own; got {', '.join(names)}")
        for task in self.tasks:
            _check_task(task, self.soc, names)
        _check_order(self.tasks)

    @property
    def units(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.soc.units)

    @cached_property
    def tables(self) -> Tables:
        return _build_tables(self)

    def step(self, task: int, step: int) -> Group:
        """The group that *task* runs at *step*; in repeated runs the groups come again."""
        groups = self.tasks[task].groups
        return groups[step % len(groups)]


def _check_task(task: Task, soc: Soc, names: Sequence[str]) -> None:
    """Refuse a task that cannot run on *soc*; *names*: of all tasks."""
    if not task.groups:
        raise ProfileError(f"{task.name}: a model needs at least one group")
    if task.repeats < 1 or task.repeats * len(task.groups) > MAX_STEPS:
        raise WorkloadError(
            f"{task.name}: repeats = {task.repeats} of {len(task.groups)} groups; must be at least 1 and "
            f"{MAX_STEPS} groups together at most"
        )
    for other in task.after:
        if other not in names:
            raise WorkloadError(f"{task.name} waits for " + unknown_name("task", other, names))
    for group in task.groups:
        _check_group(task.name, group, soc)
    _check_moves(task, soc)


def _check_group(model: str, group: Group, soc: Soc) -> None:
    units = [unit.name for unit in soc.units]
    runnable = [name for name in group.costs if name in units]
    if not runnable:
        known = ", ".join(group.costs) or "none"
        raise ProfileError(
            f"{model}: no unit of {soc.name} may run group {group.name!r} (it names {known}; "
            f"{soc.name} has {', '.join(units)}); add its cost on one of them"
        )
    for name in runnable:
        demand = group.costs[name].demand_gb_s
        if demand > soc.bandwidth_gb_s:
            raise ProfileError(
                f"{model}: group {group.name!r} asks for {demand:g} GB/s on {name} and the memory of {soc.name} "
                f"gives {soc.bandwidth_gb_s:g} at its peak; lower demand_gb_s"
            )


def _check_moves(task: Task, soc: Soc) -> None:
    """Refuse groups that must stay on one unit (``leave`` is false between them) if no unit may run all of them."""
    units = [unit.name for unit in soc.units]
    stretch: list[Group] = []
    for group in task.groups:
        stretch.append(group)
        if any(all(unit in other.costs for other in stretch) for unit in units):
            if group.leave:
                stretch = []
            continue
        raise ProfileError(
            f"{task.name}: no unit of {soc.name} may run groups {stretch[0].name!r} to {group.name!r}, which must stay "
            "together; let the model leave after one of them, or add a unit's cost"
        )


def _check_order(tasks: Sequence[Task]) -> None:
    """Refuse tasks that wait for each other in a cycle."""
    unordered = {task.name: set(task.after) for task in tasks}
    while ready := [name for name, waits in unordered.items() if not waits & unordered.keys()]:
        for name in ready:
            del unordered[name]
    if unordered:
        # Every task left waits for another task left, so following the waits leads into a cycle; the message names it.
        cycle = [min(unordered)]
        while (following := min(unordered[cycle[-1]] & unordered.keys())) not in cycle:
            cycle.append(following)
        cycle = cycle[cycle.index(following) :]
        raise WorkloadError(f"{' waits for '.join([*cycle, following])}: a circle; drop one 'after'")


def _build_tables(problem: Problem) -> Tables:
    """The arrays of *problem*; indices are n: task, i: step, u: unit, v: unit of the step before (-1: outside)."""
    tasks, units = problem.tasks, problem.units
    steps = np.array([len(task.groups) * task.repeats for task in tasks], dtype=np.int64)
    shape = (len(tasks), int(steps.max()), len(units))
    time, demand, energy = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
    move = np.full((*shape[:2], len(units) + 1, len(units)), np.inf)  # the last row of *from* is the outside
    leave = np.zeros((len(tasks), len(units)))
    for n, task in enumerate(tasks):
        entry, exit_ = task.entry_s or {}, task.exit_s or {}
        leave[n] = [exit_.get(unit, 0.0) for unit in units]
        for i in range(int(steps[n])):
            group = problem.step(n, i)
            previous = problem.step(n, i - 1) if i % len(task.groups) else None
            for u, unit in enumerate(units):
                if unit not in group.costs:
                    continue
                cost = group.costs[unit]
                time[n, i, u], demand[n, i, u], energy[n, i, u] = cost.time_s, cost.demand_gb_s, cost.energy_j or 0.0
                if previous is None:  # the first step of a run; a later run first leaves the unit of the run before
                    exit_s = leave[n] if i else np.zeros(len(units))
                    move[n, i, :-1, u], move[n, i, -1, u] = exit_s + entry.get(unit, 0.0), entry.get(unit, 0.0)
                    continue
                for v, other in enumerate(units):
                    if u == v:
                        move[n, i, v, u] = 0.0
                    elif previous.leave and other in previous.costs:
                        move[n, i, v, u] = previous.costs[other].out_s + cost.in_s
    begins = np.zeros(shape[:2], dtype=np.bool_)
    for n, task in enumerate(tasks):
        begins[n, : steps[n] : len(task.groups)] = True
    waits = np.array([[other.name in task.after for other in tasks] for task in tasks], dtype=np.bool_)
    instances = np.array([unit.instances for unit in problem.soc.units], dtype=np.int64)
    return Tables(steps, time, demand, energy, move, begins, leave, waits, instances, problem.soc.contention_table())
