"""A schedule says which unit runs each step of each task, and when; an outcome is its run in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from weft_map.problem import Objective, Problem

Units = tuple[tuple[int, ...], ...]
"""[task][step]: index of the unit."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A mapping of steps to units, with planned starts if some steps wait although their unit is free."""

    units: Units
    starts_s: tuple[tuple[float, ...], ...] | None = None
    """[task][step]: the earliest start. None: every step starts as soon as its data is there and its unit is free,
    first come, first served."""
    order: tuple[int, ...] | None = None
    """Tasks by priority, highest first, for steps that become ready for a unit at once; None: as the problem lists
    them."""
    made_by: str = ""
    """The method that made the schedule, such as ``weft`` or the name of a baseline."""


class RunInterval(NamedTuple):
    """A part of a step's run during which no other step begins or ends, so that its slow-down is constant."""

    task: int
    step: int
    unit: int
    instance: int
    """Index of the unit's instance, from 0."""
    start_s: float
    end_s: float
    slow_down: float


class Transfer(NamedTuple):
    """The time in which a task moves to the unit of its next step, or leaves the SoC after its last step."""

    task: int
    step: int
    """The step after the transfer; the task's number of steps if it leaves the SoC."""
    source: int
    """Unit that the task comes from; -1 for the outside."""
    target: int
    """Unit that the task goes to; -1 for the outside."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated run of a schedule on its SoC: when every step ran, and how fast."""

    problem: Problem
    schedule: Schedule
    pieces: tuple[RunInterval, ...]
    """The run intervals of all steps, by start."""
    moves: tuple[Transfer, ...]
    """All transfers, by start."""
    finish_s: tuple[float, ...]
    """[task]: the end of its last run."""

    def __repr__(self) -> str:
        made_by = self.schedule.made_by or "a schedule"
        return f"Outcome({made_by} on {self.problem.soc.name}: {self.makespan_s * 1e3:.3f} ms)"

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s)

    @property
    def throughput(self) -> float:
        """Runs per second, summed over the tasks: the sum of 1/T in the HaX-CoNN paper."""
        return -value_to_minimise(self.problem, self.finish_s, "throughput")

    def value(self, objective: Objective) -> float:
        """The value to minimise: the makespan in seconds, or the negated throughput."""
        return value_to_minimise(self.problem, self.finish_s, objective)


def value_to_minimise(problem: Problem, finish_s: Sequence[float], objective: Objective) -> float:
    """The value to minimise if the tasks end at *finish_s*: the makespan in seconds, or the negated throughput.

    The throughput is the sum over the tasks of runs per second; it is infinite if a task takes no time.
    """
    if objective == "latency":
        return max(finish_s)
    return -sum(task.repeats / end if end else inf for task, end in zip(problem.tasks, finish_s, strict=True))
