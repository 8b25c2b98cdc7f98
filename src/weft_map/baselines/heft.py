"""HEFT (Topcuoglu et al., TPDS 2002): by urgency, each on the unit where it ends first, gaps included.

A stretch's urgency is the way from it to the end of everything that depends on it, with times and moves averaged
over the units (or, tried as well, the smallest of them). Contention is unknown to it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from math import inf, isfinite

from weft_map.baselines.chains import ChainTimes, Mapping, candidates, chains_of, in_turn
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule

Lane = list[tuple[float, float]]
"""What one instance of a unit is busy with: starts and ends, in order."""


def heft(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``heft``: one mapping per way to measure urgency, for the makespan whatever the objective."""
    chains = chains_of(problem)
    return candidates("heft", chains, [_schedule(chains, _urgency(chains, measure)) for measure in (_mean, min)])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _urgency(chains: ChainTimes, measure: Callable[[Sequence[float]], float]) -> list[list[float]]:
    ranks: list[list[float]] = [[] for _ in chains.tasks]
    for n in reversed(in_turn(chains)):
        after = [measure(_finite(chains.move[m][0][-1])) + ranks[m][0] for m in chains.tasks if n in chains.waits[m]]
        rank = measure(chains.leave[n]) + max(after, default=0.0)
        for i in reversed(range(len(chains.time[n]))):
            rank += measure(_finite(chains.time[n][i]))
            ranks[n].append(rank)
            sources = range(-1, 0) if i == 0 else chains.units
            rank += measure([cost for source in sources for cost in _finite(chains.move[n][i][source])])
        ranks[n].reverse()
    return ranks


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if isfinite(value)]


def _schedule(chains: ChainTimes, ranks: Sequence[Sequence[float]]) -> Mapping:
    lanes: list[list[Lane]] = [[[] for _ in range(count)] for count in chains.instances]
    mapping: Mapping = [[] for _ in chains.tasks]
    ready = [0.0] * len(mapping)
    left = {n: len(chains.time[n]) for n in chains.tasks}
    while left:
        n = max((n for n in left if not any(m in left for m in chains.waits[n])), key=lambda n: ranks[n][-left[n]])
        i, at = len(mapping[n]), mapping[n][-1] if mapping[n] else -1
        if i == 0:
            ready[n] = max((ready[m] for m in chains.waits[n]), default=0.0)
        end, start, unit, lane = _earliest(chains, lanes, n, i, at, ready[n])
        insort(lanes[unit][lane], (start, end))
        mapping[n].append(unit)
        left[n] -= 1
        ready[n] = end if left[n] else end + chains.leave[n][unit]
        if not left[n]:
            del left[n]
    return mapping


def _earliest(
    chains: ChainTimes, lanes: Sequence[Sequence[Lane]], n: int, i: int, at: int, ready_s: float
) -> tuple[float, float, int, int]:
    """End, start, unit and instance of the placement that ends first."""
    best: tuple[float, float, int, int] = (inf, inf, 0, 0)
    last = i + 1 == len(chains.time[n])
    for unit in chains.units:
        time_s = chains.time[n][i][unit]
        if not isfinite(time_s):
            continue
        for number, lane in enumerate(lanes[unit]):
            start = _gap(lane, ready_s + chains.move[n][i][at][unit], time_s)
            best = min(best, (start + time_s + (chains.leave[n][unit] if last else 0.0), start, unit, number))
    _, start, unit, number = best
    return start + chains.time[n][i][unit], start, unit, number


def _gap(lane: Lane, ready_s: float, time_s: float) -> float:
    """The first moment from which the instance is free for long enough."""
    start = ready_s
    if not lane or lane[-1][1] <= ready_s:
        return start
    for begin, end in lane:
        if start + time_s <= begin:
            return start
        start = max(start, end)
    return start
