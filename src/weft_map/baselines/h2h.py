"""H2H (Zhang et al., DAC 2022): map for computation first, then move layers next to their data where that helps.

Adapted from the paper and the behaviour of its public program (MIT). Its second step pins weights in a unit's own
memory; the units of a SoC share one, so nothing is left of it. Its third drops the transfer between layers of one
model on one unit; here such layers have no move to begin with. Contention is unknown to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import NamedTuple

from weft_map.baselines.chains import ChainTimes, Mapping, candidates, chains_of, finishes
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule

PASSES = 2
"""Rounds over all models in the last step, as in the published program."""
MOST_TUPLES = 256
"""Ways to place a frontier that are looked at; a larger frontier is placed in parts."""


class _State(NamedTuple):
    """How far the first step has come. Lists are copied, never changed."""

    free: list[list[float]]
    ready: list[float]
    at: list[int]

    @property
    def full(self) -> tuple[float, float]:
        """The criterion to minimise: the end of the last unit, then the sum over all units."""
        return max(max(lane) for lane in self.free), sum(self.ready)


def h2h(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``h2h``: one mapping, for the makespan whatever the objective."""
    chains = chains_of(problem)
    mapping, _ = data_locality(chains, *computation_first(chains))
    return candidates("h2h", chains, [mapping])


def computation_first(chains: ChainTimes) -> tuple[Mapping, list[int]]:
    """Step 1: place the frontier, the next stretch of every task, in the way that fills the last unit least.

    The mapping, and the order of tasks in which stretches were placed.
    """
    count = len(chains.tasks)
    state = _State([[0.0] * lanes for lanes in chains.instances], [0.0] * count, [-1] * count)
    mapping: Mapping = [[] for _ in chains.tasks]
    sequence: list[int] = []
    while frontier := _frontier(chains, mapping):
        width = min(len(frontier), len(chains.units))
        while width > 1 and len(chains.units) ** width > MOST_TUPLES:
            width -= 1
        ways = (
            (_placed(chains, state, mapping, chosen, units), chosen, units)
            for chosen in _parts(frontier, width, chains)
            for units in product(*(_able(chains, n, len(mapping[n])) for n in chosen))
        )
        state, chosen, units = min(ways, key=lambda way: way[0].full)
        for n, unit in zip(chosen, units, strict=True):
            mapping[n].append(unit)
        sequence += chosen
    return mapping, sequence


def data_locality(chains: ChainTimes, mapping: Mapping, sequence: Sequence[int]) -> tuple[Mapping, list[int]]:
    """Step 4: let stretches join their neighbours' unit wherever the makespan drops; the latest model first."""
    mapping, order = [list(units) for units in mapping], list(sequence)
    ends = finishes(chains, mapping, order)
    for _ in range(PASSES):
        before = max(ends)
        for n in sorted(chains.tasks, key=lambda n: -ends[n]):
            for i in range(len(mapping[n])):
                order, ends = _join(chains, mapping, order, ends, n, i)
        if max(ends) >= before:
            break
    return mapping, order


def _join(
    chains: ChainTimes, mapping: Mapping, order: list[int], ends: list[float], n: int, i: int
) -> tuple[list[int], list[float]]:
    """Try the unit of the stretch before, then of the one after; *mapping* is changed where that helps."""
    row = mapping[n]
    for other in (i - 1, i + 1):
        if not 0 <= other < len(row) or row[other] == row[i] or chains.time[n][i][row[other]] == float("inf"):
            continue
        was, row[i] = row[i], row[other]
        moved = _beside(order, n, i, other)
        tried = finishes(chains, mapping, moved)
        if max(tried) < max(ends):
            return moved, tried
        row[i] = was
    return order, ends


def _beside(order: Sequence[int], n: int, i: int, other: int) -> list[int]:
    """The order with stretch *i* of task *n* right after the one before, or right before the one after."""
    places = [place for place, task in enumerate(order) if task == n]
    moved = list(order)
    del moved[places[i]]
    moved.insert(places[other] + (1 if other < i else -1), n)
    return moved


def _frontier(chains: ChainTimes, mapping: Mapping) -> list[int]:
    done = [len(mapping[n]) == len(chains.time[n]) for n in chains.tasks]
    return [n for n in chains.tasks if not done[n] and all(done[m] for m in chains.waits[n])]


def _parts(frontier: Sequence[int], width: int, chains: ChainTimes) -> list[tuple[int, ...]]:
    parts = list(combinations(frontier, width))
    return parts[: max(1, MOST_TUPLES // len(chains.units) ** width)]


def _able(chains: ChainTimes, n: int, i: int) -> list[int]:
    return [unit for unit in chains.units if chains.time[n][i][unit] < float("inf")]


def _placed(chains: ChainTimes, state: _State, mapping: Mapping, chosen: Sequence[int], units: Sequence[int]) -> _State:
    free, ready, at = [list(lane) for lane in state.free], list(state.ready), list(state.at)
    for n, unit in zip(chosen, units, strict=True):
        i = len(mapping[n])
        if i == 0 and chains.waits[n]:
            ready[n] = max(ready[m] + chains.leave[m][at[m]] for m in chains.waits[n])
        lane = free[unit]
        slot = lane.index(min(lane))
        start = max(lane[slot], ready[n] + chains.move[n][i][at[n]][unit])
        ready[n] = lane[slot] = start + chains.time[n][i][unit]
        at[n] = unit
    return _State(free, ready, at)
