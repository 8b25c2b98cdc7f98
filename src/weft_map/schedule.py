"""A decision: which unit runs each step of each task, and when; and what came of it, judged by the simulator."""

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
    """A mapping, and planned starts where waiting on purpose pays."""

    units: Units
    starts_s: tuple[tuple[float, ...], ...] | None = None
    """[task][step]: no earlier than this. None: as soon as the data is there and the unit free, first come, first
    served."""
    order: tuple[int, ...] | None = None
    """Tasks from the one that goes first to the last where two become ready for a unit at once; as listed if None."""
    made_by: str = ""


class RunInterval(NamedTuple):
    """A running group between two events; no other step begins or ends meanwhile, so its slow-down is constant."""

    task: int
    step: int
    unit: int
    instance: int
    """Which of the unit's instances, from 0."""
    start_s: float
    end_s: float
    slow_down: float


class Transfer(NamedTuple):
    """A task on its way to the unit of its next step, or out after its last."""

    task: int
    step: int
    """The step it leads to; the number of steps where it leads out."""
    source: int
    """Unit it comes from; -1 for the outside."""
    target: int
    """Unit it goes to; -1 for the outside."""
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """The simulated run of a schedule on its SoC: when every step ran, and how fast."""

    problem: Problem
    schedule: Schedule
    pieces: tuple[RunInterval, ...]
    """What ran, in order of its start."""
    moves: tuple[Transfer, ...]
    finish_s: tuple[float, ...]
    """When each task's last run is through."""

    def __repr__(self) -> str:
        made_by = self.schedule.made_by or "a schedule"
        return f"Outcome({made_by} on {self.problem.soc.name}: {self.makespan_s * 1e3:.3f} ms)"

    @property
    def makespan_s(self) -> float:
        return max(self.finish_s)

    @property
    def throughput(self) -> float:
        """Runs per second, summed over the tasks: the paper's sum of 1/T."""
        return -worth(self.problem, self.finish_s, "throughput")

    def value(self, objective: Objective) -> float:
        """The value to minimise: the makespan in seconds, or the negated throughput."""
        return worth(self.problem, self.finish_s, objective)


def worth(problem: Problem, finish_s: Sequence[float], objective: Objective) -> float:
    """What tasks that end at these times come to; less is better."""
    if objective == "latency":
        return max(finish_s)
    return -sum(task.repeats / end if end else inf for task, end in zip(problem.tasks, finish_s, strict=True))
