"""Simulation of a schedule: the engine's loop on a simulated SoC, with tasks as chains of steps and a plan as policy.

``simulate`` is the definition that faster ways are compared with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from weft.base.errors import WorkloadError
from weft.devices.decoupled import DeviceClocks
from weft.engine import Completion, Engine, Offer
from weft.engine.policies.base import NO_BUFFER, Candidate, Event, Policy, Setting, Start, View
from weft_map.executor import NEVER, OUTSIDE, SimulatedSoc, ticks
from weft_map.problem import Problem
from weft_map.schedule import Outcome, Schedule


class Chains:
    """Offers the next step of every task that may begin, on every unit from which the task can go on to its end."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._tables = problem, problem.tables
        tasks = len(problem.tasks)
        self._step, self._unit, self._last_issued = [0] * tasks, [OUTSIDE] * tasks, [-1] * tasks
        self._busy = [False] * tasks
        self.events: list[Event] = []
        """What happened since the last decision; tasks are placed by what is free, so nothing is recorded."""
        self._passable = [_passable(problem, task) for task in range(tasks)]

    def at(self, now: int) -> Iterable[tuple[int, int]]:
        """Tasks come by themselves, and none is given up."""
        return ()

    def done(self) -> bool:
        return all(self._through(task) for task in range(len(self._step)))

    def offer(self, device: DeviceClocks) -> Offer:
        free = (task for task in range(len(self._step)) if self._may_begin(task))
        candidates = tuple(candidate for task in free for candidate in self._candidates(task))
        return Offer(candidates, candidates)

    def next_event(self) -> int:
        return NEVER

    def issued(self, candidate: Candidate, step: int) -> None:
        task = candidate.stream
        self._busy[task], self._last_issued[task] = True, step
        self._unit[task] = candidate.program - task * len(self._problem.units)

    def completed(self, completion: Completion) -> None:
        self._busy[completion.candidate.stream] = False
        self._step[completion.candidate.stream] += 1

    def _through(self, task: int) -> bool:
        return self._step[task] == int(self._tables.steps[task])

    def _may_begin(self, task: int) -> bool:
        if self._busy[task] or self._through(task):
            return False
        return all(self._through(int(other)) for other in np.flatnonzero(self._tables.waits[task]))

    def _candidates(self, task: int) -> list[Candidate]:
        step, groups = self._step[task], len(self._problem.tasks[task].groups)
        moves_s, times_s = self._tables.move[task, step, self._unit[task]], self._tables.time[task, step]
        return [
            Candidate(
                stream=task,
                query=step // groups,
                layer=step % groups,
                fetch=ticks(float(moves_s[unit])),
                compute=ticks(float(times_s[unit])),
                last_issued=self._last_issued[task],
                program=task * len(times_s) + unit,
            )
            for unit in range(len(times_s))
            if isfinite(moves_s[unit]) and self._passable[task][step][unit]
        ]


def _passable(problem: Problem, task: int) -> list[list[bool]]:
    """[step][unit]: whether the task can go on to its end from there."""
    tables, units = problem.tables, range(len(problem.units))
    passable = [[True for _ in units]]
    for step in reversed(range(int(tables.steps[task]))):
        last = len(passable) == 1
        passable.append(
            [
                isfinite(tables.time[task, step, unit])
                and (last or any(passable[-1][to] and isfinite(tables.move[task, step + 1, unit, to]) for to in units))
                for unit in units
            ]
        )
    return passable[:0:-1]


@dataclass(frozen=True)
class Planned(Policy):
    """A policy that starts every step on the unit of a schedule, and not before its planned start."""

    problem: Problem
    schedule: Schedule

    def __post_init__(self) -> None:
        check_schedule(self.problem, self.schedule)

    def decide(self, view: View) -> Start:
        return next(start for start in map(self._start, view.candidates) if start)

    def _start(self, candidate: Candidate) -> Start | None:
        task, starts_s = candidate.stream, self.schedule.starts_s
        step = candidate.query * len(self.problem.tasks[task].groups) + candidate.layer
        if candidate.program != task * len(self.problem.units) + self.schedule.units[task][step]:
            return None
        return Start(candidate, max(1, ticks(starts_s[task][step])) if starts_s else 0)  # 0 would be no plan


def simulate(problem: Problem, schedule: Schedule) -> Outcome:
    """Simulate *schedule* and return its outcome."""
    policy = Planned(Setting((), NO_BUFFER), problem, schedule)
    soc = SimulatedSoc(problem, schedule.order)
    Engine(Chains(problem), policy, soc).run()
    return soc.outcome(schedule)


def check_schedule(problem: Problem, schedule: Schedule) -> None:
    """Refuse a schedule that does not fit its problem."""
    tasks = len(problem.tasks)
    if schedule.order is not None and sorted(schedule.order) != list(range(tasks)):
        raise WorkloadError(f"order = {schedule.order} must name each of the tasks 0 to {tasks - 1} once")
    _check_lengths(problem, "units", schedule.units)
    for task, units in enumerate(schedule.units):
        _check_units(problem, task, units)
    if schedule.starts_s is not None:
        _check_lengths(problem, "starts", schedule.starts_s)
        for task, starts_s in enumerate(schedule.starts_s):
            _check_starts(problem, task, starts_s)


def _check_lengths(problem: Problem, what: str, given: Sequence[Sequence[object]]) -> None:
    if len(given) != len(problem.tasks):
        raise WorkloadError(f"the schedule has {what} for {len(given)} tasks; there are {len(problem.tasks)}")
    for task, steps, row in zip(problem.tasks, problem.tables.steps, given, strict=True):
        if len(row) != steps:
            raise WorkloadError(f"{task.name}: the schedule has {len(row)} {what}; the task has {steps} steps")


def _check_starts(problem: Problem, task: int, starts_s: Sequence[float]) -> None:
    for step, start_s in enumerate(starts_s):
        if not isfinite(start_s):
            raise WorkloadError(f"{_name(problem, task, step)} is to start at {start_s} s; plan a finite time")


def _name(problem: Problem, task: int, step: int) -> str:
    return f"{problem.tasks[task].name}: step {step} ({problem.step(task, step).name!r})"


def _check_units(problem: Problem, task: int, units: Sequence[int]) -> None:
    source, names = OUTSIDE, problem.units
    for step, unit in enumerate(units):
        where = _name(problem, task, step)
        if not 0 <= unit < len(names):
            raise WorkloadError(f"{where} is put on unit {unit}; {problem.soc.name} has 0 to {len(names) - 1}")
        if not isfinite(problem.tables.time[task, step, unit]):
            allowed = ", ".join(name for name in names if name in problem.step(task, step).costs)
            raise WorkloadError(f"{where} may not run on {names[unit]}; it may on {allowed}")
        if not isfinite(problem.tables.move[task, step, source, unit]):
            raise WorkloadError(
                f"{where} may not come from {names[source]} to {names[unit]}; keep it on {names[source]}"
            )
        source = unit
