"""Common to the rivals: additive loads, division of models, and the search for the fewest machines.

All of them keep to memory, deadlines and rules as we do (``Filling.could_join``); they differ in what they believe
about time, and in where they put things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil

import numpy as np

from weft_cluster.placing.filling import Filling, broken_limits
from weft_cluster.placing.problem import Bools, Floats, PlacingProblem
from weft_cluster.placing.resharing import ALL_SERVED

Rival = Callable[[PlacingProblem], Filling]
"""A method that places models on machines."""


def serial_loads(problem: PlacingProblem) -> Floats:
    """(kind, model): the share of a machine's time that a model takes if nothing overlaps."""
    return problem.compute + problem.memory + problem.other


def free_to_go(problem: PlacingProblem) -> Bools:
    """(model): whether it may go to as many machines as any; those that may not are placed first."""
    places = problem.allowed.sum(axis=0)
    return np.asarray(places >= places.max(initial=0), np.bool_)


def parts(problem: PlacingProblem, loads: Floats) -> Iterator[tuple[int, float]]:
    """Models in equal shares that a machine can take, the largest first; *loads*: (kind, model)."""
    smallest, free = (loads / problem.cap[:, None]).max(axis=0), free_to_go(problem)
    counts = [max(demand.replicas, ceil(size)) for demand, size in zip(problem.demands, smallest, strict=True)]
    for model in sorted(range(len(counts)), key=lambda model: (free[model], -smallest[model] / counts[model])):
        yield from [(model, 1 / counts[model])] * counts[model]


def serves_all(filling: Filling) -> bool:
    """Whether every request goes somewhere, and all limits are kept."""
    return bool(filling.served().min(initial=1.0) >= ALL_SERVED) and not any(broken_limits(filling))


def on_fewest(method: Rival) -> Rival:
    """A method that uses all machines it is given, given as few as it needs to serve everything."""

    def fewest(problem: PlacingProblem) -> Filling:
        low, high = 1, len(problem.machines)
        best = method(problem)
        while low < high:
            middle = (low + high) // 2
            filling = method(problem.section(range(middle), range(len(problem.demands))))
            if serves_all(filling):
                best, high = filling, middle
            else:
                low = middle + 1
        return Filling(problem, best.shares + [{} for _ in problem.machines[len(best.shares) :]])

    return fewest
