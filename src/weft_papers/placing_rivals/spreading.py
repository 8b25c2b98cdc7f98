"""Common to the rivals: additive loads, division of models, the search for the fewest machines; and common practice.

All of them keep to memory, deadlines and rules as we do (``Filling.could_join``); they differ in what they believe
about time, and in where they put things. Common practice is round robin by hand, packing by one resource, and pools of
similar models. The last two use our own search for the fewest machines, with as much freedom to divide models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from math import ceil

import numpy as np

from weft_cluster.placing.filling import Filling, broken_limits
from weft_cluster.placing.problem import Bools, Floats, PlacingProblem
from weft_cluster.placing.resharing import ALL_SERVED, new_homes
from weft_cluster.placing.search import fewest, pack

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


def one_resource(problem: PlacingProblem) -> Filling:
    """Time is all that counts: models on a machine take turns, and their times add up."""
    loads = serial_loads(problem)
    return Filling(problem, _pack(replace(problem, rows=np.stack([loads, loads], axis=1))).shares)


def like_with_like(problem: PlacingProblem) -> Filling:
    """A pool for models that compute most of their time, and one for those that wait for memory most of it."""
    computing: Bools = problem.compute.sum(axis=0) >= problem.memory.sum(axis=0)
    filling = Filling(problem)
    for pool in (computing, ~computing):
        free = np.flatnonzero(~filling.used)
        models = np.flatnonzero(pool & problem.allowed[free].any(axis=0))
        packed = _pack(problem.section(free.tolist(), models.tolist())) if len(models) else Filling(problem)
        for machine, shares in zip(free.tolist(), packed.shares, strict=False):
            for model, share in shares.items():
                filling.add(machine, int(models[model]), share)
    return filling


def _pack(problem: PlacingProblem) -> Filling:
    """Pack on as few machines as our method needs; on all of them, as far as they go, if they are not enough."""
    filling = fewest(problem, "machines")
    return filling if filling is not None else pack(problem, np.ones(len(problem.machines), np.bool_))[0]


def round_robin(problem: PlacingProblem) -> Filling:
    """Round robin: each model on the next allowed machine, largest first.

    A model that is too large for one machine is divided.
    """
    filling, turn = Filling(problem), 0
    for model, share in parts(problem, serial_loads(problem)):
        homes = np.flatnonzero(new_homes(filling, model))
        if len(homes):
            machine = int(homes[np.argmin((homes - turn) % len(problem.machines))])
            filling.add(machine, model, share)
            turn = machine + 1
    return filling
