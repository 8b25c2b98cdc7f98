"""An executor in which time jumps: the units of a SoC, whose running steps slow each other down at the memory.

Time stops at events: a move or a step ends, a planned start comes. Between two of them every running step
progresses at 1/slow-down, which depends on its own demand and on the sum of the others'; so nothing is stepped and
nothing is rounded but floats. Events closer than ``SAME`` count as one, and a start planned within ``NEARLY`` of an
event happens at it, because plans contain rounding errors of their planner.

A step that is submitted moves to its unit at once. When it is there and its planned start has come it stands in line;
the line of a unit is served in order of arrival, at one instant in the order of the tasks. A task's last step takes it
out again, and is only then complete.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

from weft.base.errors import WorkloadError
from weft.devices.decoupled import DeviceClocks, LayerTimes
from weft.engine import Completion
from weft.engine.policies.base import Candidate, LaneState, Running, Start
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
