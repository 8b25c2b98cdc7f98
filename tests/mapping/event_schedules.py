"""Every event-aligned schedule, one after the other, in plain Python: what the compiled search must agree with."""

from __future__ import annotations

from itertools import product
from math import inf, isfinite
from typing import NamedTuple

from weft_map.problem import Problem

TINY_S = 1e-13


class Place(NamedTuple):
    """Where a task is: what it does, at which step, on (or coming from) which unit, and how much of that is left."""

    does: str  # waits, chooses, moves, stands, runs, leaves, rests
    step: int = 0
    unit: int = -1
    left: float = 0.0
    switches: int = 0
    joules: float = 0.0
    ended: float = 0.0


def best_value(
    problem: Problem,
    objective: str = "latency",
    max_switches: int | None = None,
    budget_j: float = inf,
    below: float = inf,
) -> float:
    """The least makespan, or the negated greatest throughput, over all mappings and all starts at events.

    It is infinite where no schedule has a value less than *below*.
    """
    cap = inf if max_switches is None else max_switches
    best, seen = below, set[tuple[float, tuple[Place, ...]]]()

    def value(ends: list[float]) -> float:
        if objective == "latency":
            return max(ends)
        return -sum(task.repeats / end if end else inf for task, end in zip(problem.tasks, ends, strict=True))

    def search(now: float, places: tuple[Place, ...]) -> None:
        nonlocal best
        places = released(problem, places)
        if (now, places) in seen:  # it goes on as it did before
            return
        seen.add((now, places))
        if value([soonest(problem, n, place, now) for n, place in enumerate(places)]) >= best:
            return
        if all(place.does == "rests" for place in places):
            best = value([place.ended for place in places])
            return
        for choice in product(*(choices(problem, n, place, cap) for n, place in enumerate(places))):
            if possible(problem, choice) and sum(place.joules for place in choice) <= budget_j:
                search(*passed(problem, now, choice))

    search(0.0, tuple(Place("waits") for _ in problem.tasks))
    return best if best < below else inf


def soonest(problem: Problem, n: int, place: Place, now: float) -> float:
    """When a task ends if it has the SoC to itself, moves for nothing and always runs where it is fastest."""
    if place.does == "rests":
        return place.ended
    steps = len(problem.tasks[n].groups) * problem.tasks[n].repeats
    ahead = range(place.step + (place.does in ("runs", "leaves")), steps)
    return now + place.left + sum(min(cost.time_s for cost in problem.step(n, i).costs.values()) for i in ahead)


def released(problem: Problem, places: tuple[Place, ...]) -> tuple[Place, ...]:
    through = {task.name for task, place in zip(problem.tasks, places, strict=True) if place.does == "rests"}
    return tuple(
        place._replace(does="chooses") if place.does == "waits" and set(task.after) <= through else place
        for task, place in zip(problem.tasks, places, strict=True)
    )


def choices(problem: Problem, n: int, place: Place, cap: float) -> list[Place]:
    """What a task may do at an event: choose a unit, start, or wait."""
    task = problem.tasks[n]
    if place.does == "stands":
        return [place._replace(does="runs", left=cost(problem, n, place.step, place.unit).time_s), place]
    if place.does != "chooses":
        return [place]
    group, fresh = problem.step(n, place.step), place.step % len(task.groups) == 0
    found: list[Place] = []
    for unit, name in enumerate(problem.units):
        if name not in group.costs:
            continue
        way, switches = way_s(problem, n, place, unit, fresh), 0 if fresh else place.switches + (unit != place.unit)
        if not isfinite(way) or switches > cap:
            continue
        joules = place.joules + (group.costs[name].energy_j or 0.0)
        there = Place("stands", place.step, unit, 0.0, switches, joules)
        if way > 0:
            found.append(there._replace(does="moves", left=way))
        else:
            found += [there._replace(does="runs", left=group.costs[name].time_s), there]
    return found


def way_s(problem: Problem, n: int, place: Place, unit: int, fresh: bool) -> float:
    task, name = problem.tasks[n], problem.units[unit]
    if fresh:
        left = (task.exit_s or {}).get(problem.units[place.unit], 0.0) if place.step else 0.0
        return left + (task.entry_s or {}).get(name, 0.0)
    if unit == place.unit:
        return 0.0
    before = problem.step(n, place.step - 1)
    if not before.leave:
        return inf
    return before.costs[problem.units[place.unit]].out_s + problem.step(n, place.step).costs[name].in_s


def cost(problem: Problem, n: int, step: int, unit: int):
    return problem.step(n, step).costs[problem.units[unit]]


def possible(problem: Problem, places: tuple[Place, ...]) -> bool:
    runs = [place.unit for place in places if place.does == "runs"]
    fits = all(runs.count(u) <= unit.instances for u, unit in enumerate(problem.soc.units))
    return fits and any(place.does in ("runs", "moves", "leaves") for place in places)


def passed(problem: Problem, now: float, places: tuple[Place, ...]) -> tuple[float, tuple[Place, ...]]:
    """Go to the next event."""
    draws = [
        cost(problem, n, place.step, place.unit).demand_gb_s if place.does == "runs" else 0.0
        for n, place in enumerate(places)
    ]
    paces = [
        problem.soc.slow_down(place.unit, draws[n], sum(draws[:n]) + sum(draws[n + 1 :]))
        if place.does == "runs"
        else 1.0
        for n, place in enumerate(places)
    ]
    busy = [place.does in ("runs", "moves", "leaves") for place in places]
    wait = min(place.left * pace for place, pace, on in zip(places, paces, busy, strict=True) if on)
    after = [
        place._replace(left=place.left - wait / pace) if on else place
        for place, pace, on in zip(places, paces, busy, strict=True)
    ]
    ends = [on and place.left * pace <= TINY_S for place, pace, on in zip(after, paces, busy, strict=True)]
    then = now + wait
    return then, tuple(
        arrived(problem, n, place, then) if end else place
        for n, (place, end) in enumerate(zip(after, ends, strict=True))
    )


def arrived(problem: Problem, n: int, place: Place, now: float) -> Place:
    task, steps = problem.tasks[n], len(problem.tasks[n].groups) * problem.tasks[n].repeats
    if place.does == "moves":
        return place._replace(does="stands", left=0.0)
    if place.does == "runs" and place.step + 1 < steps:
        return place._replace(does="chooses", step=place.step + 1, left=0.0)
    out = (task.exit_s or {}).get(problem.units[place.unit], 0.0)
    if place.does == "runs" and out > 0:
        return place._replace(does="leaves", left=out)
    return place._replace(does="rests", left=0.0, ended=now)
