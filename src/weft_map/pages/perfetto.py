"""An outcome on a SoC as Chrome trace events, for https://ui.perfetto.dev and chrome://tracing.

One process is the SoC, with a thread per instance of a unit and a counter for the memory demand, and process "tasks"
has a thread per task that shows its moves and when it waits. Times are rounded to whole nanoseconds, as those of traces
are (``weft.reports.trace_exports``).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from weft.base.version import __version__
from weft.reports.trace_exports import Event, process_events, write_events
from weft_map.pages.numbers import RanStep, demand_of, lane_name, lanes_of, steps_of
from weft_map.problem import Problem
from weft_map.schedule import Outcome, Transfer

SOC, TASKS = 1, 2
"""Process ids."""


def write_outcome_perfetto(outcome: Outcome, path: Path | str) -> None:
    """Write *outcome* as one JSON object; each piece of a step carries its slow-down."""
    settings = {"soc": outcome.problem.soc.name, "made_by": outcome.schedule.made_by, "version": __version__}
    pieces, moves = _piece_events(outcome), _task_events(outcome)
    write_events(path, settings, chain(_soc_names(outcome.problem), pieces, moves, _demand_events(outcome)))


def _soc_names(problem: Problem) -> Iterator[Event]:
    lanes = {tid: lane_name(problem, *lane) for tid, lane in enumerate(lanes_of(problem), start=1)}
    yield from process_events(SOC, problem.soc.name, lanes)
    yield from process_events(TASKS, "tasks", {tid: task.name for tid, task in enumerate(problem.tasks, start=1)})


def _piece_events(outcome: Outcome) -> Iterator[Event]:
    problem, demand = outcome.problem, outcome.problem.tables.demand
    threads = {lane: tid for tid, lane in enumerate(lanes_of(problem), start=1)}
    for piece in outcome.pieces:
        task, name = problem.tasks[piece.task], problem.step(piece.task, piece.step).name
        about = {
            "task": task.name,
            "run": piece.step // len(task.groups),
            "group": name,
            "slow_down": round(piece.slow_down, 6),
            "demand_gb_s": float(demand[piece.task, piece.step, piece.unit]),
        }
        event = {"ph": "X", "pid": SOC, "tid": threads[piece.unit, piece.instance], "cat": "compute", "args": about}
        yield {**event, "name": f"{task.name}/{name}", **_stretch(piece.start_s, piece.end_s)}


def _task_events(outcome: Outcome) -> Iterator[Event]:
    for move in outcome.moves:
        yield _move_event(outcome.problem, move)
    for step in steps_of(outcome):
        yield from _step_events(outcome.problem, step)


def _move_event(problem: Problem, move: Transfer) -> Event:
    ends = [problem.units[unit] if unit >= 0 else "outside" for unit in (move.source, move.target)]
    event = {"ph": "X", "pid": TASKS, "tid": move.task + 1, "cat": "move", "name": f"move {ends[0]} to {ends[1]}"}
    return {**event, "args": {"from": ends[0], "to": ends[1]}, **_stretch(move.start_s, move.end_s)}


def _step_events(problem: Problem, step: RanStep) -> Iterator[Event]:
    """A step in the track of its task: when it waits for its unit and when it runs."""
    name, unit = problem.step(step.task, step.step).name, lane_name(problem, step.unit, step.instance)
    event = {"ph": "X", "pid": TASKS, "tid": step.task + 1}
    if step.start_s > step.ready_s:
        waits = {**event, "cat": "wait", "name": f"wait for {unit}", "args": {"group": name, "unit": unit}}
        yield {**waits, **_stretch(step.ready_s, step.start_s)}
    about = {"group": name, "unit": unit, "slow_down": round(step.slow_down, 6)}
    yield {**event, "cat": "compute", "name": f"{name} on {unit}", "args": about, **_stretch(step.start_s, step.end_s)}


def _demand_events(outcome: Outcome) -> Iterator[Event]:
    """Constant from one instant to the next, and nothing after the last."""
    demand, event = demand_of(outcome), {"ph": "C", "pid": SOC, "name": "memory demand (GB/s)"}
    levels = [*demand.gb_s.sum(axis=1).tolist(), 0.0]
    for time_s, gb_s in zip(demand.times_s.tolist(), levels, strict=True):
        yield {**event, "ts": round(time_s * 1e9) / 1000, "args": {"value": gb_s}}


def _stretch(start_s: float, end_s: float) -> dict[str, float]:
    """When a stretch begins and how long it lasts, in microseconds that are whole nanoseconds."""
    start_ns, end_ns = round(start_s * 1e9), round(end_s * 1e9)
    return {"ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000}
