"""Simulation of a schedule: the engine's loop on a simulated SoC, with tasks as chains of steps and a plan as policy.

``simulate`` is the definition that faster ways are compared with.

On the SoC time stops at events: a move or a step ends, a planned start comes. Between two of them every running step
progresses at 1/slow-down, which depends on its own demand and on the sum of the others'; so nothing is stepped and
nothing is rounded but floats. Events closer than ``SAME`` count as one, and a start planned within ``NEARLY`` of an
event happens at it, because plans contain rounding errors of their planner.

A step that is submitted moves to its unit at once. When it is there and its planned start has come it stands in line;
the line of a unit is served in order of arrival, at one instant in the order of the tasks. A task's last step takes it
out again, and is only then complete.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf, isfinite

import numpy as np

from weft.base.errors import WorkloadError
from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine import Completion, Engine, Offer
from weft.engine.policies.base import NO_BUFFER, Candidate, Event, LaneState, Policy, Running, Setting, Start, View
from weft_map.problem import Problem
from weft_map.schedule import Outcome, RunInterval, Schedule, Transfer

TICKS_PER_S = 10**15
"""The engine counts in whole femtoseconds; inside, times are seconds."""
NEVER = 1 << 100
"""A tick after the end of all runs."""
SAME = 1e-12
"""Events this close, in parts of the time, are one event."""
NEARLY = 1e-9
"""How far before its planned start, in parts of the time, an event still is that start."""
OUTSIDE = -1
"""Index in place of a unit for the outside, where runs begin and end."""


def ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def seconds(tick: int) -> float:
    return tick / TICKS_PER_S


@dataclass(eq=False, slots=True)
class _Job:
    """A submitted step."""

    candidate: Candidate
    task: int
    step: int
    source: int
    unit: int
    demand_gb_s: float
    work_s: float
    """The rest of its stand-alone time."""
    planned_s: float
    began_s: float
    """When it was submitted."""
    until_s: float
    """When its move or its running step ends at the present speeds."""
    there_s: float = inf
    """When it came to its unit."""
    came_s: float = inf
    """When it stood in line."""
    ran_s: float = inf
    ended_s: float = inf
    instance: int = -1
    slow_down: float = 1.0


class SimulatedSoc:
    """Units whose steps take their profile's times, and longer under contention."""

    def __init__(self, problem: Problem, order: Sequence[int] | None = None) -> None:
        """order: tasks from the one that goes first to the last where two are ready for a unit at once."""
        self._problem, self._tables = problem, problem.tables
        places = {task: place for place, task in enumerate(order or ())}
        self._rank = [(places.get(task, len(places)), task) for task in range(len(problem.tasks))]
        self._free = [list(range(unit.instances)) for unit in problem.soc.units]
        self._at = [OUTSIDE] * len(problem.tasks)
        """Unit each task is on."""
        self._now_s = 0.0
        self._moving: list[_Job] = []
        self._waiting: list[_Job] = []
        """Jobs that wait on their unit, for their time or an instance."""
        self._running: list[_Job] = []
        self._leaving: list[_Job] = []
        self._done: list[Completion] = []
        self._last: dict[tuple[int, int], int] = {}
        """Where the latest piece of a step lies in ``pieces``."""
        self.pieces: list[RunInterval] = []
        self.moves: list[Transfer] = []
        self.finish_s = [0.0] * len(problem.tasks)
        """When the last step of each task that is through was through."""

    def outcome(self, schedule: Schedule) -> Outcome:
        """What came of it, once all tasks are through."""
        pieces, moves = sorted(self.pieces, key=_place), sorted(self.moves, key=_place)
        return Outcome(self._problem, schedule, tuple(pieces), tuple(moves), tuple(self.finish_s))

    def now(self) -> int:
        return ticks(self._now_s)

    def ready(self) -> DeviceClocks:
        """Any number of steps may be in flight: those without a free unit wait in its queue."""
        return DeviceClocks.at(self.now())

    def held(self) -> tuple[LaneState, ...]:
        """Its units are chosen beforehand."""
        return ()

    def completions(self) -> list[Completion]:
        done, self._done = self._done, []
        return done

    def abortable(self) -> tuple[Running, ...]:
        return ()

    def stop(self, stream: int, query: int) -> None:
        raise AssertionError("a step is never stopped half-way")

    def rests(self) -> list[tuple[Candidate, int]]:
        """Not used: tasks are never refused, so the running ones are not needed."""
        return []

    def submit(self, start: Start, batch: object = None) -> None:
        """Begin the move to the step's unit."""
        task, units = start.candidate.stream, len(self._problem.units)
        step = start.candidate.query * len(self._problem.tasks[task].groups) + start.candidate.layer
        unit, source = start.candidate.program - task * units, self._at[task]
        move_s = float(self._tables.move[task, step, source, unit])
        time_s, demand = (float(table[task, step, unit]) for table in (self._tables.time, self._tables.demand))
        planned_s, there_s = seconds(start.not_before), self._now_s + move_s
        job = _Job(start.candidate, task, step, source, unit, demand, time_s, planned_s, self._now_s, there_s)
        self._at[task] = unit
        if move_s:
            self._moving.append(job)
        else:
            self._arrive(job)

    def idle_until(self, tick: int) -> None:
        """Serve the lines, then go to the next event, or to *tick* if that comes first."""
        self._serve()
        self._set_pace()
        limit_s = seconds(tick) if self.now() < tick < NEVER else inf
        to_s = self._next_event(limit_s)
        if to_s == inf:
            raise WorkloadError("a task waits for ever: nothing moves or runs, and no start is planned")
        self._go(to_s)

    def _due(self, job: _Job) -> bool:
        return job.planned_s <= self._now_s * (1 + NEARLY) + seconds(1)

    def _serve(self) -> None:
        """Start queued steps whose unit has a free instance."""
        for job in self._waiting:
            if job.came_s == inf and self._due(job):
                job.came_s = self._now_s
        line = sorted((job for job in self._waiting if job.came_s < inf), key=self._turn)
        for job in line:
            if self._free[job.unit]:
                job.instance, job.ran_s = self._free[job.unit].pop(0), self._now_s
                self._waiting.remove(job)
                self._running.append(job)

    def _turn(self, job: _Job) -> tuple[float, bool, tuple[int, int]]:
        """Two planned to start at one instant on one instance can only be meant so if the first takes no time."""
        return job.came_s, job.planned_s > 0 < job.work_s, self._rank[job.task]

    def _set_pace(self) -> None:
        """How fast each running step goes from now on."""
        for job in self._running:
            others = sum(other.demand_gb_s for other in self._running if other is not job)
            job.slow_down = self._problem.soc.slow_down(job.unit, job.demand_gb_s, others)
            job.until_s = self._now_s + job.work_s * job.slow_down

    def _next_event(self, limit_s: float) -> float:
        ends = (job.until_s for job in chain(self._moving, self._running, self._leaving))
        natural_s = min(ends, default=inf)
        planned_s = min((job.planned_s for job in self._waiting if not self._due(job)), default=inf)
        stop_s = min(planned_s, limit_s)
        return natural_s if natural_s <= stop_s * (1 + NEARLY) + seconds(1) else stop_s

    def _go(self, to_s: float) -> None:
        """Let time pass, and end what ends then."""
        length_s, edge_s = to_s - self._now_s, to_s + SAME * to_s
        for job in self._running:
            self._record(job, to_s)
            job.work_s -= length_s / job.slow_down
        self._now_s = to_s
        self._running = _sift(self._running, edge_s, self._end)
        self._moving = _sift(self._moving, edge_s, self._arrive)
        self._leaving = _sift(self._leaving, edge_s, self._leave)

    def _record(self, job: _Job, to_s: float) -> None:
        """Another piece of a step, or a longer one where its pace did not change."""
        key = job.task, job.step
        piece = RunInterval(job.task, job.step, job.unit, job.instance, self._now_s, to_s, job.slow_down)
        if key in self._last:
            before = self.pieces[self._last[key]]
            if to_s == self._now_s:
                return
            if before.slow_down == job.slow_down:
                self.pieces[self._last[key]] = before._replace(end_s=to_s)
                return
        self._last[key] = len(self.pieces)
        self.pieces.append(piece)

    def _arrive(self, job: _Job) -> None:
        job.there_s = self._now_s
        if job.there_s > job.began_s or OUTSIDE != job.source != job.unit:
            self.moves.append(Transfer(job.task, job.step, job.source, job.unit, job.began_s, job.there_s))
        self._waiting.append(job)

    def _end(self, job: _Job) -> None:
        """A step has run; a task's last one is on its way out."""
        insort(self._free[job.unit], job.instance)
        job.ended_s = self._now_s
        out_s = float(self._tables.leave[job.task, job.unit])
        if job.step + 1 < self._tables.steps[job.task] or not out_s:
            self._complete(job)
            return
        job.until_s = self._now_s + out_s
        self._leaving.append(job)

    def _leave(self, job: _Job) -> None:
        self.moves.append(Transfer(job.task, job.step + 1, job.unit, OUTSIDE, job.ended_s, self._now_s))
        self._complete(job)

    def _complete(self, job: _Job) -> None:
        self.finish_s[job.task] = self._now_s
        times = LayerTimes(ticks(job.began_s), ticks(job.there_s), ticks(job.ran_s), ticks(job.ended_s))
        self._done.append(Completion(job.candidate, times))


def _place(entry: RunInterval | Transfer) -> tuple[float, int, int]:
    return entry.start_s, entry.task, entry.step


def _sift(jobs: list[_Job], edge_s: float, ended: Callable[[_Job], None]) -> list[_Job]:
    """Report the steps that end by then; return the others."""
    kept = [job for job in jobs if job.until_s > edge_s]
    for job in jobs:
        if job.until_s <= edge_s:
            ended(job)
    return kept


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
