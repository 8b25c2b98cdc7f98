"""Outcomes on a SoC as one self-contained page: schedules above each other on one time axis, and why the first wins.

The page is ``mapping.html`` beside this module, which holds all markup, style and script. This module makes its data
and the sentences that compare schedules. The makespan times the number of units is the sum of stand-alone work,
contention and idle time, so the differences of these three explain where a schedule gains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.base.errors import InputError
from weft.reports.page import json_ready, write_page
from weft.reports.words import group_meaning
from weft_map.pages.numbers import (
    MappingReport,
    RanStep,
    demand_of,
    lane_name,
    lanes_of,
    mapping_report,
    report_of,
    steps_of,
)
from weft_map.problem import Objective, Problem
from weft_map.schedule import Outcome, Transfer

MENTIONED_SHARE = 0.005
"""Differences by a smaller share of the makespan are not put into words."""
EQUAL_SHARE = 5e-4
"""Values that differ by a smaller share are called equal."""


def write_mapping_page(
    path: Path | str,
    outcomes: Sequence[Outcome],
    *,
    objective: Objective = "latency",
    title: str | None = None,
    notes: Mapping[str, Any] | None = None,
    certificate: Mapping[str, Any] | None = None,
) -> None:
    """Write the page of *outcomes*: the schedule of interest first, then those to compare it with.

    objective: the value that is compared. notes: facts about their origin, listed at the end. certificate: that of the
    first schedule; ``proved``, ``bound`` and ``gap`` are shown on top.
    """
    extras = {"notes": json_ready(notes or {}), "certificate": json_ready(certificate or {})}
    write_page(path, "mapping.html", {**page_data(outcomes, objective, title), **extras}, "weft_map.pages")


def page_data(
    outcomes: Sequence[Outcome], objective: Objective = "latency", title: str | None = None
) -> dict[str, Any]:
    """The data of the page; times in microseconds."""
    if not outcomes:
        raise InputError("there is no outcome to draw; give at least one")
    problem = outcomes[0].problem
    for outcome in outcomes[1:]:
        _check_same(problem, outcome.problem)
    return {
        "title": title or " + ".join(task.name for task in problem.tasks),
        "objective": objective,
        "soc": problem.soc.name,
        "peak_gb_s": problem.soc.bandwidth_gb_s,
        "lanes": [lane_name(problem, *lane) for lane in lanes_of(problem)],
        "tasks": [task.name for task in problem.tasks],
        "runs": [task.repeats for task in problem.tasks],
        "groups": [[group.name for group in task.groups] for task in problem.tasks],
        "words": {group.name: group_meaning(group.name) for task in problem.tasks for group in task.groups},
        "outcomes": [_outcome(outcome) for outcome in outcomes],
        "why": explain(outcomes, objective),
    }


def explain(outcomes: Sequence[Outcome], objective: Objective = "latency") -> list[str]:
    """Explain how the first schedule spends its time, and how it differs from the best of the others."""
    first = report_of(outcomes[0])
    if len(outcomes) == 1:
        return [_describe(first)]
    rival = report_of(min(outcomes[1:], key=lambda outcome: outcome.value(objective)))
    return [_describe(first), _verdict(first, rival, objective), *_reasons(first, rival)]


def _describe(report: MappingReport) -> str:
    """Two sentences about a schedule: its end, and the busy, contended, moving and waiting times."""
    busy = ", ".join(f"{unit.name} {_percent(unit.busy_share)}" for unit in report.units)
    moves = f"{report.moves} {'move' if report.moves == 1 else 'moves'} between units"
    return (
        f"{_name(report)} ends at {_time(report.makespan_s)}. Units are busy for {busy} of that; contention takes "
        f"{_time(report.contention_s)} over all units, moving {_time(report.moving_s)} ({moves}), waiting "
        f"{_time(report.waiting_s)}."
    )


def _verdict(first: MappingReport, rival: MappingReport, objective: Objective) -> str:
    """A sentence that compares the value of *first* with that of *rival*, the best of the other schedules."""
    if objective == "latency":
        values, texts = (first.makespan_s, rival.makespan_s), (_time(first.makespan_s), _time(rival.makespan_s))
    else:
        values = first.throughput, rival.throughput
        texts = f"{values[0]:.4g} runs a second", f"{values[1]:.4g}"
    change = values[0] - values[1]
    if abs(change) <= EQUAL_SHARE * values[1]:
        return f"The best of the others, {_name(rival)}, is equal."
    share = f"{_percent(abs(change) / values[1])} {'more' if change > 0 else 'less'}"
    return f"{texts[0]} is {share} than {_name(rival)}, the best of the others, with {texts[1]}."


def _reasons(first: MappingReport, rival: MappingReport) -> list[str]:
    """A sentence that splits the difference of the makespans into work, contention and idle time, per average unit.

    Empty if all differences are small.
    """
    units = len(first.units)
    changes = [
        (first.work_s - rival.work_s, "work"),
        (first.contention_s - rival.contention_s, "lost to contention"),
        (first.idle_s - rival.idle_s, "idle"),
    ]
    differences = [
        f"{_time(abs(change_s) / units)} {'more' if change_s > 0 else 'less'} {what}"
        for change_s, what in changes
        if abs(change_s) / units > MENTIONED_SHARE * first.makespan_s
    ]
    return [f"Compared with that, an average unit has {', '.join(differences)}."] if differences else []


def _name(report: MappingReport) -> str:
    return report.made_by or "the schedule"


def _time(time_s: float) -> str:
    return f"{time_s * 1e3:.3g} ms" if time_s < 1 else f"{time_s:.3g} s"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _check_same(problem: Problem, other: Problem) -> None:
    """Raise InputError unless both problems have the same SoC, tasks and numbers of groups."""
    expected, actual = [(p.soc.name, p.units, [(t.name, len(t.groups)) for t in p.tasks]) for p in (problem, other)]
    if expected != actual:
        raise InputError(
            f"outcomes of other tasks, groups or units than the first's ({problem.soc.name}; {other.soc.name}) "
            "do not share its page; draw each alone"
        )


def _outcome(outcome: Outcome) -> dict[str, Any]:
    """The page's data of one outcome; times in microseconds, lanes by index.

    A piece is [task, step, lane, start, end, slow-down], a move [task, step, from lane, to lane, start, end].
    """
    problem, demand, steps = outcome.problem, demand_of(outcome), steps_of(outcome)
    lanes = {lane: index for index, lane in enumerate(lanes_of(problem))}
    lane_of_step = {(step.task, step.step): lanes[step.unit, step.instance] for step in steps}
    numbers = mapping_report(outcome)
    del numbers["demand"]
    return {
        "name": outcome.schedule.made_by or "schedule",
        "report": numbers,
        "finish": _all_us(*outcome.finish_s),
        "pieces": [
            [p.task, p.step, lane_of_step[p.task, p.step], *_all_us(p.start_s, p.end_s), p.slow_down]
            for p in outcome.pieces
        ],
        "steps": [_step(problem, step, lane_of_step) for step in steps],
        "moves": [[m.task, m.step, *_move_lanes(m, lane_of_step), *_all_us(m.start_s, m.end_s)] for m in outcome.moves],
        "times": _all_us(*demand.times_s.tolist()),
        "demand": demand.gb_s.tolist(),
    }


def _step(problem: Problem, step: RanStep, lane_of_step: Mapping[tuple[int, int], int]) -> list[float]:
    """A step as [task, step, lane, ready, start, end, stand-alone work, demand in GB/s]."""
    times_us = _all_us(step.ready_s, step.start_s, step.end_s, step.work_s)
    demand = float(problem.tables.demand[step.task, step.step, step.unit])
    return [step.task, step.step, lane_of_step[step.task, step.step], *times_us, demand]


def _move_lanes(move: Transfer, lane_of_step: Mapping[tuple[int, int], int]) -> tuple[int, int]:
    """The lanes from and to which a task moves; -1 for the outside. *lane_of_step*: (task, step) -> lane."""
    return lane_of_step.get((move.task, move.step - 1), -1), lane_of_step.get((move.task, move.step), -1)


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 6)


def _all_us(*times_s: float) -> list[float]:
    return [_us(time_s) for time_s in times_s]
