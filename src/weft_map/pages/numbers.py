"""Statistics of an outcome on a SoC: each task's time by cause, each unit's load, the demand on the memory.

The time from when a task may begin to its finish is the sum of work (stand-alone time on the units chosen), contention,
moves and waiting. ``outcome_trace`` converts an outcome to a trace: a span's fetch is a move, its compute a run.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.version import __version__
from weft.reports.trace import Span, Trace
from weft_map.limits import shortest
from weft_map.problem import Problem
from weft_map.schedule import Outcome, RunInterval

Floats = npt.NDArray[np.float64]

CONTENDED = 1 + 1e-9
"""A slow-down above this is contention, below it rounding."""


class RanStep(NamedTuple):
    """The times of one simulated step."""

    task: int
    step: int
    unit: int
    instance: int
    moved_s: float
    """Begin of the move to its unit."""
    ready_s: float
    """End of that move."""
    start_s: float
    end_s: float
    work_s: float
    """Stand-alone seconds of the step on its unit."""
    pieces: tuple[RunInterval, ...]

    @property
    def slow_down(self) -> float:
        """Ratio of the step's duration to its stand-alone time."""
        return (self.end_s - self.start_s) / self.work_s if self.work_s else 1.0


class MemoryDemand(NamedTuple):
    """The bandwidth that running groups demand, constant between two instants."""

    times_s: Floats
    """[interval + 1]: begin of each interval, and the end of the last."""
    gb_s: Floats
    """[interval, task]: the demand of each task in each interval."""


@dataclass(frozen=True, slots=True)
class TaskReport:
    """The time of one task, split by cause."""

    name: str
    began_s: float
    """End of the last of the tasks that it waits for; 0 if it waits for none."""
    finish_s: float
    alone_s: float
    """The least possible duration of the task, alone on the SoC."""
    work_s: float
    """Stand-alone time on the units chosen."""
    contention_s: float
    slow_down: float
    """Ratio of the duration of its steps to their stand-alone time."""
    waiting_s: float
    moving_s: float
    moves: int
    """Number of its changes of unit."""


@dataclass(frozen=True, slots=True)
class UnitReport:
    """One instance of a unit."""

    name: str
    busy_s: float
    idle_s: float
    """Idle time before the end of the last task."""
    busy_share: float
    contention_s: float
    """The part of the busy time that contention adds to the stand-alone work."""


@dataclass(frozen=True, slots=True)
class MappingReport:
    """Report of a schedule. The field names are the keys of the JSON."""

    soc: str
    made_by: str
    makespan_s: float
    throughput: float
    """Runs per second, summed over the tasks."""
    work_s: float
    """Stand-alone time of all steps on their units. Together with contention_s and idle_s it is the makespan times the
    number of units' instances."""
    contention_s: float
    idle_s: float
    contended_share: float
    """The share of the makespan in which contention slows some step down."""
    moves: int
    moving_s: float
    waiting_s: float
    memory_peak_gb_s: float
    most_demand_gb_s: float
    mean_demand_gb_s: float
    above_peak_share: float
    """The share of the makespan in which demand exceeds the memory's bandwidth."""
    tasks: tuple[TaskReport, ...]
    units: tuple[UnitReport, ...]


def mapping_report(outcome: Outcome) -> dict[str, Any]:
    """The report of *outcome* as JSON, with the memory demand over time."""
    demand = demand_of(outcome)
    demand_over_time = {"times_s": demand.times_s.tolist(), "gb_s": demand.gb_s.sum(axis=1).tolist()}
    numbers = asdict(report_of(outcome))
    tables = {key: [dict(row) for row in numbers.pop(key)] for key in ("tasks", "units")}
    return {"format": 1, **numbers, **tables, "demand": demand_over_time}


def report_of(outcome: Outcome) -> MappingReport:
    """Compute the report of *outcome*."""
    problem, makespan_s = outcome.problem, outcome.makespan_s
    tasks, units, demand = _task_reports(outcome), _unit_reports(outcome), demand_of(outcome)
    durations_s, demand_gb_s = np.diff(demand.times_s), demand.gb_s.sum(axis=1)
    contended_s = _busy_s([piece for piece in outcome.pieces if piece.slow_down > CONTENDED])
    peak_gb_s = problem.soc.bandwidth_gb_s
    return MappingReport(
        soc=problem.soc.name,
        made_by=outcome.schedule.made_by,
        makespan_s=makespan_s,
        throughput=outcome.throughput if min(outcome.finish_s) > 0 else 0.0,
        work_s=sum(task.work_s for task in tasks),
        contention_s=sum(task.contention_s for task in tasks),
        idle_s=sum(unit.idle_s for unit in units),
        contended_share=_share(contended_s, makespan_s),
        moves=sum(task.moves for task in tasks),
        moving_s=sum(task.moving_s for task in tasks),
        waiting_s=sum(task.waiting_s for task in tasks),
        memory_peak_gb_s=peak_gb_s,
        most_demand_gb_s=float(demand_gb_s.max(initial=0.0)),
        mean_demand_gb_s=_share(float(demand_gb_s @ durations_s), makespan_s),
        above_peak_share=_share(float(durations_s[demand_gb_s > peak_gb_s * CONTENDED].sum()), makespan_s),
        tasks=tasks,
        units=units,
    )


def steps_of(outcome: Outcome) -> tuple[RanStep, ...]:
    """The times of every step, by task and step."""
    pieces_of_step: dict[tuple[int, int], list[RunInterval]] = defaultdict(list)
    for piece in outcome.pieces:
        pieces_of_step[piece.task, piece.step].append(piece)
    moves = {(move.task, move.step): move for move in outcome.moves}
    steps: list[RanStep] = []
    for (task, step), intervals in sorted(pieces_of_step.items()):
        moved_s = steps[-1].end_s if step else _began_s(outcome, task)
        ready_s = moves[task, step].end_s if (task, step) in moves else moved_s
        first, work_s = intervals[0], float(outcome.problem.tables.time[task, step, intervals[0].unit])
        times_s = moved_s, ready_s, first.start_s, intervals[-1].end_s, work_s
        steps.append(RanStep(task, step, first.unit, first.instance, *times_s, tuple(intervals)))
    return tuple(steps)


def demand_of(outcome: Outcome) -> MemoryDemand:
    """The memory demand of each task over time, from 0 to the makespan."""
    instants_s = {0.0, outcome.makespan_s, *(time_s for p in outcome.pieces for time_s in (p.start_s, p.end_s))}
    times_s = np.array(sorted(instants_s))
    gb_s = np.zeros((len(times_s) - 1, len(outcome.problem.tasks)))
    interval_ranges = np.searchsorted(times_s, [(piece.start_s, piece.end_s) for piece in outcome.pieces])
    for piece, (first, last) in zip(outcome.pieces, interval_ranges.tolist(), strict=True):
        gb_s[first:last, piece.task] += outcome.problem.tables.demand[piece.task, piece.step, piece.unit]
    return MemoryDemand(times_s, gb_s)


def lanes_of(problem: Problem) -> tuple[tuple[int, int], ...]:
    """Every instance of every unit, as pairs (unit, instance)."""
    return tuple(
        (unit, instance)
        for unit, description in enumerate(problem.soc.units)
        for instance in range(description.instances)
    )


def lane_name(problem: Problem, unit: int, instance: int) -> str:
    description = problem.soc.units[unit]
    return description.name if description.instances == 1 else f"{description.name} {instance}"


def outcome_trace(outcome: Outcome) -> Trace:
    """Convert *outcome* to a trace; the time in which a task leaves the SoC after its last step is not in it."""
    problem = outcome.problem
    steps = sorted(steps_of(outcome), key=lambda step: (step.moved_s, step.task, step.step))
    spans = [_span(problem, step) for step in steps]
    settings = {
        "device": problem.soc.name,
        "policy": outcome.schedule.made_by or "planned",
        "bandwidth_bytes_per_s": problem.soc.bandwidth_gb_s * 1e9,
        "units": list(problem.units),
        "unit_of_span": [step.unit for step in steps],
        "instance_of_span": [step.instance for step in steps],
        "slow_down_of_span": [step.slow_down for step in steps],
        "finish_s": list(outcome.finish_s),
        "version": __version__,
    }
    return Trace.from_spans(spans, [task.name for task in problem.tasks], settings)


def _span(problem: Problem, step: RanStep) -> Span:
    """A step as a span of a trace: its move is the fetch, its run the compute."""
    task = problem.tasks[step.task]
    times_s = step.moved_s, step.ready_s, step.start_s, step.end_s
    run, name = step.step // len(task.groups), problem.step(step.task, step.step).name
    return Span(task.name, run, name, *times_s, stream=step.task, weight_bytes=0)


def _began_s(outcome: Outcome, task: int) -> float:
    """The end of the last task that *task* waits for, in seconds; 0 if it waits for none."""
    waits = outcome.problem.tables.waits[task]
    return max((outcome.finish_s[other] for other in np.flatnonzero(waits).tolist()), default=0.0)


def _task_reports(outcome: Outcome) -> tuple[TaskReport, ...]:
    steps_of_task: list[list[RanStep]] = [[] for _ in outcome.problem.tasks]
    for step in steps_of(outcome):
        steps_of_task[step.task].append(step)
    return tuple(_task_report(outcome, task, row) for task, row in enumerate(steps_of_task))


def _task_report(outcome: Outcome, task: int, steps: list[RanStep]) -> TaskReport:
    moves = [move for move in outcome.moves if move.task == task]
    began_s, finish_s = _began_s(outcome, task), outcome.finish_s[task]
    work_s, run_s = sum(step.work_s for step in steps), sum(step.end_s - step.start_s for step in steps)
    return TaskReport(
        name=outcome.problem.tasks[task].name,
        began_s=began_s,
        finish_s=finish_s,
        alone_s=shortest(outcome.problem, task)[0],
        work_s=work_s,
        contention_s=run_s - work_s,
        slow_down=run_s / work_s if work_s else 1.0,
        waiting_s=sum(step.start_s - step.ready_s for step in steps),
        moving_s=sum((move.end_s - move.start_s for move in moves), 0.0),
        moves=sum(-1 != move.source != move.target != -1 for move in moves),  # -1: the outside
    )


def _unit_reports(outcome: Outcome) -> tuple[UnitReport, ...]:
    units = []
    for unit, instance in lanes_of(outcome.problem):
        pieces = [piece for piece in outcome.pieces if (piece.unit, piece.instance) == (unit, instance)]
        busy_s = sum((piece.end_s - piece.start_s for piece in pieces), 0.0)
        work_s = sum(((piece.end_s - piece.start_s) / piece.slow_down for piece in pieces), 0.0)
        idle_s, share = max(0.0, outcome.makespan_s - busy_s), _share(busy_s, outcome.makespan_s)
        units.append(UnitReport(lane_name(outcome.problem, unit, instance), busy_s, idle_s, share, busy_s - work_s))
    return tuple(units)


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _busy_s(pieces: list[RunInterval]) -> float:
    """Seconds in which at least one of *pieces* runs; they are sorted by start."""
    covered_s = until_s = 0.0
    for piece in pieces:
        covered_s += max(0.0, piece.end_s - max(piece.start_s, until_s))
        until_s = max(until_s, piece.end_s)
    return covered_s
