"""What people do without a scheduler: all on one unit, or one model per unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain, product
from math import isfinite

from weft_map.baselines.chains import (
    ChainTimes,
    Mapping,
    alone_s,
    candidates,
    chains_of,
    fallback,
    in_series,
)
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule

MOST_ASSIGNMENTS = 4096
"""Above this many ways to give each model a unit, one is built greedily."""
KEPT = 8
"""Assignments handed to the simulator, the most promising first."""


def one_unit(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``gpu-only``: everything on the unit that is fastest for all of it, as vendors' tools do it.

    A stretch that may not run there falls back to the unit that is fastest for it. A unit that may run less than half
    of the stretches is not asked, unless none may run more.
    """
    chains = chains_of(problem)
    homes = _capable(chains) or list(chains.units)
    ways = [[fallback(chains, n, home) for n in chains.tasks] for home in homes]
    best = min(ways, key=lambda way: sum(alone_s(chains, n, way[n]) * chains.copies[n] for n in chains.tasks))
    return candidates("gpu-only", chains, [best]) + in_series("gpu-only", chains, best, objective)


def per_unit(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``per-unit``: each model on a unit of its own, in the best permutation; with more models than units, some share.

    A stretch that may not run on its model's unit falls back as in ``one_unit``.
    """
    chains = chains_of(problem)
    ways = [[fallback(chains, n, home) for home in chains.units] for n in chains.tasks]
    alone = [[alone_s(chains, n, way) * chains.copies[n] for way in ways[n]] for n in chains.tasks]
    chosen = sorted(_assignments(chains, alone), key=lambda homes: _estimate(chains, alone, homes))[:KEPT]
    mappings: list[Mapping] = [[ways[n][home] for n, home in enumerate(homes)] for homes in chosen]
    shared = len(chains.tasks) > sum(chains.instances)
    series = [in_series("per-unit", chains, mapping, objective) for mapping in mappings if shared]
    return tuple(dict.fromkeys(chain(candidates("per-unit", chains, mappings), *series)))


def _capable(chains: ChainTimes) -> list[int]:
    stretches = [times for task in chains.time for times in task]
    return [unit for unit in chains.units if 2 * sum(isfinite(times[unit]) for times in stretches) >= len(stretches)]


def _assignments(chains: ChainTimes, alone: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """A unit for each task: no unit shared while there is one for each, and none left out otherwise."""
    count = len(chains.tasks)
    if len(chains.units) ** count > MOST_ASSIGNMENTS:
        return [_greedy(chains, alone)]
    enough = count <= sum(chains.instances)
    return [homes for homes in product(chains.units, repeat=count) if _fair(chains, Counter(homes), enough)]


def _fair(chains: ChainTimes, used: Counter[int], enough: bool) -> bool:
    if enough:
        return all(used[unit] <= chains.instances[unit] for unit in used)
    return all(used[unit] >= chains.instances[unit] for unit in chains.units)


def _greedy(chains: ChainTimes, alone: Sequence[Sequence[float]]) -> tuple[int, ...]:
    """The longest task first, each where it is through first."""
    loads = [[0.0] * count for count in chains.instances]
    homes = [0] * len(alone)
    for n in sorted(chains.tasks, key=lambda n: -min(alone[n])):
        homes[n] = min(chains.units, key=lambda unit: min(loads[unit]) + alone[n][unit])
        lane = loads[homes[n]]
        lane[lane.index(min(lane))] += alone[n][homes[n]]
    return tuple(homes)


def _estimate(chains: ChainTimes, alone: Sequence[Sequence[float]], homes: Sequence[int]) -> tuple[float, float]:
    """The fullest unit's load per instance or the longest task, whichever is more; then the sum of all."""
    loads = [0.0] * len(chains.instances)
    for n, home in enumerate(homes):
        loads[home] += alone[n][home] / chains.instances[home]
    longest = max(alone[n][home] for n, home in enumerate(homes))
    return max(*loads, longest), sum(loads)
