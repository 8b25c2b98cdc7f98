"""Simulation of a schedule: the engine's loop on a simulated SoC, with tasks as chains of steps and a plan as policy.

``simulate`` is the reference that the compiled kernels are compared with.

The SoC goes from event to event: the end of a move or of a step, or a planned start. Between two events every running
step progresses at 1/slow-down, which depends on its own demand and on the sum of the others' demands; so time needs no
fixed steps, and nothing is rounded except floats. Events closer than ``SAME_EVENT`` count as one, and a start that is
planned within ``SAME_START`` of an event happens at that event, because plans contain rounding errors of their planner.

A submitted step moves to its unit at once. After the move and after its planned start it waits in the queue of its
unit, which is served in order of arrival, and at equal arrivals in the order of the tasks. After its last step a task
leaves the SoC; only then is that step complete.
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
from weft.engine import Completion, Engine, Executor, Offer
from weft.engine.policies.base import NO_BUFFER, Candidate, Event, LaneState, Policy, Running, Setting, Start, View
from weft_map.problem import Problem
from weft_map.schedule import Outcome, RunInterval, Schedule, Transfer

TICKS_PER_S = 10**15
"""The engine counts in whole femtoseconds; within this module times are seconds."""
NEVER = 1 << 100
"""A tick after the end of all runs."""
SAME_EVENT = 1e-12
"""Events count as one if they differ by less than this share of the time."""
SAME_START = 1e-9
"""A planned start happens at an event that is earlier by less than this share of the time."""
OUTSIDE = -1
"""Index in place of a unit for the outside, where runs begin and end."""


def ticks(seconds: float) -> int:
    return round(seconds * TICKS_PER_S)


def seconds(tick: int) -> float:
    return tick / TICKS_PER_S


@dataclass(eq=False, slots=True)
class _Job:
    """A submitted step and its times: it moves, waits, runs, and perhaps leaves. Infinite: not known yet."""

    candidate: Candidate
    task: int
    step: int
    source: int
    """The unit that the task comes from; ``OUTSIDE`` in its first step."""
    unit: int
    demand_gb_s: float
    work_s: float
    """Stand-alone seconds that are left to run."""
    planned_s: float
    """Its planned start; 0: none."""
    submitted_s: float
    until_s: float
    """End of its move or its run at the present speeds."""
    arrived_s: float = inf
    """End of its move to the unit."""
    queued_s: float = inf
    """Time at which it entered the queue of its unit."""
    started_s: float = inf
    """Start of its run."""
    ended_s: float = inf
    instance: int = -1
    slow_down: float = 1.0


class SimulatedSoc(Executor):
    """A simulated executor: steps take the times of their profile, and longer under contention."""

    def __init__(self, problem: Problem, order: Sequence[int] | None = None) -> None:
        """order: tasks by priority, highest first, for steps that become ready at the same time; None: as listed."""
        self._problem, self._tables = problem, problem.tables
        priorities = {task: priority for priority, task in enumerate(order or ())}
        self._rank = [(priorities.get(task, len(priorities)), task) for task in range(len(problem.tasks))]
        """[task]: sort key; tasks that *order* does not name come last."""
        self._free = [list(range(unit.instances)) for unit in problem.soc.units]
        """Per unit, the numbers of its free instances, ascending."""
        self._unit_of_task = [OUTSIDE] * len(problem.tasks)
        """The unit that each task is on or moves to."""
        self._now_s = 0.0
        self._moving: list[_Job] = []
        self._waiting: list[_Job] = []
        """Jobs on their unit that wait for their planned start or a free instance."""
        self._running: list[_Job] = []
        self._leaving: list[_Job] = []
        self._done: list[Completion] = []
        """Completions that ``completions`` has not returned yet."""
        self._last_piece: dict[tuple[int, int], int] = {}
        """(task, step) -> index of the step's latest piece in ``pieces``."""
        self.pieces: list[RunInterval] = []
        self.moves: list[Transfer] = []
        self.finish_s = [0.0] * len(problem.tasks)
        """[task]: time at which its latest completed step was complete."""

    def outcome(self, schedule: Schedule) -> Outcome:
        """The outcome of the simulated *schedule*; call it after the engine's loop has ended."""
        pieces, moves = sorted(self.pieces, key=_by_start), sorted(self.moves, key=_by_start)
        return Outcome(self._problem, schedule, tuple(pieces), tuple(moves), tuple(self.finish_s))

    def now(self) -> int:
        return ticks(self._now_s)

    def ready(self) -> DeviceClocks:
        """Any number of steps may be in flight: those without a free unit wait in its queue."""
        return DeviceClocks.at(self.now())

    def held(self) -> tuple[LaneState, ...]:
        """Empty: the schedule chooses units, so the policy needs no state of lanes."""
        return ()

    def completions(self) -> list[Completion]:
        """Return the steps that were completed since the previous call."""
        done, self._done = self._done, []
        return done

    def abortable(self) -> tuple[Running, ...]:
        return ()

    def stop(self, stream: int, query: int) -> None:
        raise AssertionError("a step is never stopped half-way")

    def rests(self) -> list[tuple[Candidate, int]]:
        """Empty: only admission asks for the remaining time of running work, and no task is ever refused."""
        return []

    def submit(self, start: Start, batch: object = None) -> None:
        """Begin the move to the step's unit. A candidate's ``program`` is task * number of units + unit."""
        task, units = start.candidate.stream, len(self._problem.units)
        step = start.candidate.query * len(self._problem.tasks[task].groups) + start.candidate.layer
        unit, source = start.candidate.program - task * units, self._unit_of_task[task]
        move_s = float(self._tables.move[task, step, source, unit])
        time_s, demand = (float(table[task, step, unit]) for table in (self._tables.time, self._tables.demand))
        planned_s, arrived_s = seconds(start.not_before), self._now_s + move_s
        job = _Job(start.candidate, task, step, source, unit, demand, time_s, planned_s, self._now_s, arrived_s)
        self._unit_of_task[task] = unit
        if move_s:
            self._moving.append(job)
        else:
            self._arrive(job)

    def idle_until(self, tick: int) -> None:
        """Start queued steps, then advance to the next event, or to *tick* if that comes first."""
        self._start_queued_steps()
        self._update_slow_downs()
        limit_s = seconds(tick) if self.now() < tick < NEVER else inf
        to_s = self._next_event(limit_s)
        if to_s == inf:
            raise WorkloadError("a task waits for ever: nothing moves or runs, and no start is planned")
        self._advance(to_s)

    def _is_due(self, job: _Job) -> bool:
        """Whether the planned start of *job* has come, within ``SAME_START`` and the rounding to a tick."""
        return job.planned_s <= self._now_s * (1 + SAME_START) + seconds(1)

    def _start_queued_steps(self) -> None:
        """Put waiting steps whose planned start has come into the queues of their units, then start what is queued.

        A step starts if its unit has a free instance. ``_queue_key`` gives the order.
        """
        for job in self._waiting:
            if job.queued_s == inf and self._is_due(job):
                job.queued_s = self._now_s
        for job in sorted((job for job in self._waiting if job.queued_s < inf), key=self._queue_key):
            if self._free[job.unit]:
                job.instance, job.started_s = self._free[job.unit].pop(0), self._now_s
                self._waiting.remove(job)
                self._running.append(job)

    def _queue_key(self, job: _Job) -> tuple[float, bool, tuple[int, int]]:
        """Sort key of a queue: when a step entered it, then the task's rank.

        Planned steps that take no time go before other planned ones: a plan with two starts at one instant on one
        instance can be kept only if the first of the two takes no time.
        """
        goes_behind = job.planned_s > 0 and job.work_s > 0
        return job.queued_s, goes_behind, self._rank[job.task]

    def _update_slow_downs(self) -> None:
        """Set the slow-down and the expected end of each running step from the demands of all running steps."""
        for job in self._running:
            others = sum(other.demand_gb_s for other in self._running if other is not job)
            job.slow_down = self._problem.soc.slow_down(job.unit, job.demand_gb_s, others)
            job.until_s = self._now_s + job.work_s * job.slow_down

    def _next_event(self, limit_s: float) -> float:
        """The time of the next event (an end or a planned start), at most *limit_s*; infinite if there is neither."""
        ends = (job.until_s for job in chain(self._moving, self._running, self._leaving))
        end_s = min(ends, default=inf)
        planned_s = min((job.planned_s for job in self._waiting if not self._is_due(job)), default=inf)
        stop_s = min(planned_s, limit_s)
        return end_s if end_s <= stop_s * (1 + SAME_START) + seconds(1) else stop_s

    def _advance(self, to_s: float) -> None:
        """Set the time to *to_s*, and end the moves and steps that end then."""
        length_s, edge_s = to_s - self._now_s, to_s + SAME_EVENT * to_s  # ends up to edge_s count as this event
        for job in self._running:
            self._record(job, to_s)
            job.work_s -= length_s / job.slow_down
        self._now_s = to_s
        self._running = _end_jobs(self._running, edge_s, self._end_run)
        self._moving = _end_jobs(self._moving, edge_s, self._arrive)
        self._leaving = _end_jobs(self._leaving, edge_s, self._leave)

    def _record(self, job: _Job, to_s: float) -> None:
        """Record that *job* runs until *to_s*: extend its latest piece, or add one if the slow-down has changed."""
        key = job.task, job.step
        piece = RunInterval(job.task, job.step, job.unit, job.instance, self._now_s, to_s, job.slow_down)
        if key in self._last_piece:
            latest = self.pieces[self._last_piece[key]]
            if to_s == self._now_s:
                return
            if latest.slow_down == job.slow_down:
                self.pieces[self._last_piece[key]] = latest._replace(end_s=to_s)
                return
        self._last_piece[key] = len(self.pieces)
        self.pieces.append(piece)

    def _arrive(self, job: _Job) -> None:
        """End the move of *job*: it waits on its unit now."""
        job.arrived_s = self._now_s
        if job.arrived_s > job.submitted_s or OUTSIDE != job.source != job.unit:
            self.moves.append(Transfer(job.task, job.step, job.source, job.unit, job.submitted_s, job.arrived_s))
        self._waiting.append(job)

    def _end_run(self, job: _Job) -> None:
        """Free the instance of a step that has run; complete the step, unless its task must first leave the SoC."""
        insort(self._free[job.unit], job.instance)
        job.ended_s = self._now_s
        leave_s = float(self._tables.leave[job.task, job.unit])
        if job.step + 1 < self._tables.steps[job.task] or not leave_s:
            self._complete(job)
            return
        job.until_s = self._now_s + leave_s
        self._leaving.append(job)

    def _leave(self, job: _Job) -> None:
        """Complete the last step of a task that has left the SoC."""
        self.moves.append(Transfer(job.task, job.step + 1, job.unit, OUTSIDE, job.ended_s, self._now_s))
        self._complete(job)

    def _complete(self, job: _Job) -> None:
        self.finish_s[job.task] = self._now_s
        times = LayerTimes(ticks(job.submitted_s), ticks(job.arrived_s), ticks(job.started_s), ticks(job.ended_s))
        self._done.append(Completion(job.candidate, times))


def _by_start(entry: RunInterval | Transfer) -> tuple[float, int, int]:
    """Sort key: the start, then task and step."""
    return entry.start_s, entry.task, entry.step


def _end_jobs(jobs: list[_Job], edge_s: float, on_end: Callable[[_Job], None]) -> list[_Job]:
    """Call *on_end* for each of *jobs* that ends at *edge_s* or before; return the others."""
    not_ended = [job for job in jobs if job.until_s > edge_s]
    for job in jobs:
        if job.until_s <= edge_s:
            on_end(job)
    return not_ended


class Chains:
    """The engine's source of work: it offers the next step of every task that may begin.

    A step is offered on every unit that may run it and from which the rest of the task can be run.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._tables = problem, problem.tables
        tasks = len(problem.tasks)
        self._step, self._unit, self._last_issued = [0] * tasks, [OUTSIDE] * tasks, [-1] * tasks
        """[task]: its next step; the unit that it is on; the engine's step in which its latest step was issued."""
        self._busy = [False] * tasks
        self.events: list[Event] = []
        """Always empty: policies that follow events are not used for mapping."""
        self._usable = [_usable_units(problem, task) for task in range(tasks)]

    def at(self, now: int) -> Iterable[tuple[int, int]]:
        """Nothing to report to the engine: no task arrives later, and none is dropped."""
        return ()

    def done(self) -> bool:
        return all(self._has_ended(task) for task in range(len(self._step)))

    def offer(self, device: DeviceClocks) -> Offer:
        """Offer the next steps of all tasks that may begin; each is at the head of its task's chain."""
        free = (task for task in range(len(self._step)) if self._may_begin(task))
        candidates = tuple(candidate for task in free for candidate in self._candidates(task))
        return Offer(candidates, candidates)

    def next_event(self) -> int:
        return NEVER

    def place(self, stream: int, query: int, layer: int, *, running: bool, lane: int = -1) -> None:
        raise AssertionError("a SoC has no gates")

    def lane_awaited(self) -> bool:
        raise AssertionError("a SoC has no gates")

    def issued(self, candidate: Candidate, step: int) -> None:
        """Note that *candidate* was started in the engine's *step*; its task is busy until it completes."""
        task = candidate.stream
        self._busy[task], self._last_issued[task] = True, step
        self._unit[task] = candidate.program - task * len(self._problem.units)

    def completed(self, completion: Completion) -> None:
        self._busy[completion.candidate.stream] = False
        self._step[completion.candidate.stream] += 1

    def _has_ended(self, task: int) -> bool:
        return self._step[task] == int(self._tables.steps[task])

    def _may_begin(self, task: int) -> bool:
        """Whether the next step of *task* may begin: no step of it is in flight, and its predecessors have ended."""
        if self._busy[task] or self._has_ended(task):
            return False
        return all(self._has_ended(int(other)) for other in np.flatnonzero(self._tables.waits[task]))

    def _candidates(self, task: int) -> list[Candidate]:
        """The next step of *task* on each usable unit; its move is the candidate's fetch, its run the compute."""
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
            if isfinite(moves_s[unit]) and self._usable[task][step][unit]
        ]


def _usable_units(problem: Problem, task: int) -> list[list[bool]]:
    """[step][unit]: whether the unit may run the step of *task*, and allowed moves lead from it to the task's end."""
    tables, units = problem.tables, range(len(problem.units))
    usable = [[True for _ in units]]  # built backwards: the end of the task first, then its last step
    for step in reversed(range(int(tables.steps[task]))):
        is_last = len(usable) == 1
        usable.append(
            [
                isfinite(tables.time[task, step, unit])
                and (is_last or any(usable[-1][to] and isfinite(tables.move[task, step + 1, unit, to]) for to in units))
                for unit in units
            ]
        )
    return usable[:0:-1]  # in the order of steps, without the entry for the end


@dataclass(frozen=True)
class Planned(Policy):
    """A policy that starts every step on the unit of a schedule, and not before its planned start."""

    problem: Problem
    schedule: Schedule

    def __post_init__(self) -> None:
        check_schedule(self.problem, self.schedule)

    def decide(self, view: View) -> Start:
        return next(start for start in map(self._planned_start, view.candidates) if start)

    def _planned_start(self, candidate: Candidate) -> Start | None:
        """The start of *candidate*, with its planned time; None if the schedule puts the step on another unit."""
        task, starts_s = candidate.stream, self.schedule.starts_s
        step = candidate.query * len(self.problem.tasks[task].groups) + candidate.layer
        # ``program`` is task * number of units + unit, see ``Chains``
        if candidate.program != task * len(self.problem.units) + self.schedule.units[task][step]:
            return None
        return Start(candidate, max(1, ticks(starts_s[task][step])) if starts_s else 0)  # 0 means: no planned start


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


def _check_lengths(problem: Problem, what: str, values: Sequence[Sequence[object]]) -> None:
    """Refuse *values* (by [task][step], called *what* in messages) unless there is one per step of the problem."""
    if len(values) != len(problem.tasks):
        raise WorkloadError(f"the schedule has {what} for {len(values)} tasks; there are {len(problem.tasks)}")
    for task, steps, row in zip(problem.tasks, problem.tables.steps, values, strict=True):
        if len(row) != steps:
            raise WorkloadError(f"{task.name}: the schedule has {len(row)} {what}; the task has {steps} steps")


def _check_starts(problem: Problem, task: int, starts_s: Sequence[float]) -> None:
    for step, start_s in enumerate(starts_s):
        if not isfinite(start_s):
            raise WorkloadError(f"{_step_name(problem, task, step)} is to start at {start_s} s; plan a finite time")


def _step_name(problem: Problem, task: int, step: int) -> str:
    return f"{problem.tasks[task].name}: step {step} ({problem.step(task, step).name!r})"


def _check_units(problem: Problem, task: int, units: Sequence[int]) -> None:
    """Refuse *units* (one per step of *task*) with an unknown unit, one that may not run its step, or a wrong move."""
    source, names = OUTSIDE, problem.units
    for step, unit in enumerate(units):
        where = _step_name(problem, task, step)
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
