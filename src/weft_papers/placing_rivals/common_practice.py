"""Common practice: round robin by hand; packing by one resource; pools of similar models.

The last two use our own search for the fewest machines, with as much freedom to divide models; only what they believe
differs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import Bools, PlacingProblem
from weft_cluster.placing.resharing import new_homes
from weft_cluster.placing.search import fewest, pack
from weft_papers.placing_rivals.spreading import parts, serial_loads


def one_resource(problem: PlacingProblem) -> Filling:
    """Time is all that counts: models on a machine take turns, and their times add up."""
    loads = serial_loads(problem)
    return Filling(problem, _packed(replace(problem, rows=np.stack([loads, loads], axis=1))).shares)


def like_with_like(problem: PlacingProblem) -> Filling:
    """A pool for models that compute most of their time, and one for those that wait for memory most of it."""
    computing: Bools = problem.compute.sum(axis=0) >= problem.memory.sum(axis=0)
    filling = Filling(problem)
    for pool in (computing, ~computing):
        free = np.flatnonzero(~filling.used)
        models = np.flatnonzero(pool & problem.allowed[free].any(axis=0))
        packed = _packed(problem.section(free.tolist(), models.tolist())) if len(models) else Filling(problem)
        for machine, shares in zip(free.tolist(), packed.shares, strict=False):
            for model, share in shares.items():
                filling.add(machine, int(models[model]), share)
    return filling


def _packed(problem: PlacingProblem) -> Filling:
    """Pack on as few machines as our method needs; on all of them, as far as they go, if they are not enough."""
    filling = fewest(problem, "machines")
    return filling if filling is not None else pack(problem, np.ones(len(problem.machines), np.bool_))[0]


def round_robin(problem: PlacingProblem) -> Filling:
    """Round robin: each model on the next allowed machine, largest models first.

    Models that are too large for one machine are divided.
    """
    filling, turn = Filling(problem), 0
    for model, share in parts(problem, serial_loads(problem)):
        homes = np.flatnonzero(new_homes(filling, model))
        if len(homes):
            machine = int(homes[np.argmin((homes - turn) % len(problem.machines))])
            filling.add(machine, model, share)
            turn = machine + 1
    return filling
