"""Helpers of the rivals, and methods of common practice: round robin, packing by one resource, pools of similar models.

The helpers are additive loads, division of models, and the search for the fewest machines. All rivals respect memory,
deadlines and placement rules as weft does (``Filling.could_join``); they differ in how they model time and where they
place models. Packing by one resource and pools use weft's own search for the fewest machines.
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
    """Shares of a machine's time that models take if computing and fetching do not overlap; shape (kinds, models)."""
    return problem.compute + problem.memory + problem.other


def free_to_go(problem: PlacingProblem) -> Bools:
    """Whether each model is allowed on as many machines as any; the others are placed first. Shape (models,)."""
    machine_counts = problem.allowed.sum(axis=0)
    return np.asarray(machine_counts >= machine_counts.max(initial=0), np.bool_)


def parts(problem: PlacingProblem, loads: Floats) -> Iterator[tuple[int, float]]:
    """Yield (model, share): every model divided into equal shares that any machine can take, the largest first.

    loads: share of a machine's time that all requests of a model take; (kinds, models).
    """
    # On the slowest kind, so that a share fits everywhere.
    machines_needed, free = (loads / problem.cap[:, None]).max(axis=0), free_to_go(problem)
    counts = [max(demand.replicas, ceil(size)) for demand, size in zip(problem.demands, machines_needed, strict=True)]
    for model in sorted(range(len(counts)), key=lambda model: (free[model], -machines_needed[model] / counts[model])):
        yield from [(model, 1 / counts[model])] * counts[model]


def serves_all(filling: Filling) -> bool:
    """Whether every request has a machine, and no limit is broken."""
    return bool(filling.served().min(initial=1.0) >= ALL_SERVED) and not any(broken_limits(filling))


def on_fewest(method: Rival) -> Rival:
    """Turn a method that uses all machines into one that uses the fewest with which it serves all requests.

    Their number is found by bisection; if all machines are not enough, the method's result on all is returned.
    """

    def search_fewest(problem: PlacingProblem) -> Filling:
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

    return search_fewest


def one_resource(problem: PlacingProblem) -> Filling:
    """Pack by time only: models on a machine take turns, and their times add up."""
    loads = serial_loads(problem)
    # Our packing fills machines by two loads (``rows``); with both equal, they act as one resource.
    return Filling(problem, _pack(replace(problem, model_loads=np.stack([loads, loads], axis=1))).shares)


def like_with_like(problem: PlacingProblem) -> Filling:
    """Pack two pools of machines: one for models that mainly compute, one for those that mainly wait for memory."""
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
    """Pack with our own method on as few machines as it needs; if all are not enough, place what fits on all."""
    filling = fewest(problem, "machines")
    return filling if filling is not None else pack(problem, np.ones(len(problem.machines), np.bool_))[0]


def round_robin(problem: PlacingProblem) -> Filling:
    """Round robin: place each model on the next allowed machine, the largest first; divide those too large for one."""
    filling, next_machine = Filling(problem), 0
    for model, share in parts(problem, serial_loads(problem)):
        homes = np.flatnonzero(new_homes(filling, model))
        if len(homes):
            machine = int(homes[np.argmin((homes - next_machine) % len(problem.machines))])
            filling.add(machine, model, share)
            next_machine = machine + 1
    return filling
