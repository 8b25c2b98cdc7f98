"""What people do by habit, packed as well as we pack: one resource that adds up, and like models with like.

Both use our own search for the fewest machines, with as much freedom to divide models; only what they believe differs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft.placing.fewest import fewest
from weft.placing.filling import Filling
from weft.placing.problem import Bools, PlacingProblem
from weft.placing.rivals.spreading import section, serial_loads


def one_resource(problem: PlacingProblem) -> Filling:
    """Time is all that counts: models on a machine take turns, and their times add up."""
    loads = serial_loads(problem)
    found = fewest(replace(problem, rows=np.stack([loads, loads], axis=1)), "machines")
    return Filling(problem, found.shares if found else ())


def like_with_like(problem: PlacingProblem) -> Filling:
    """A pool for models that compute most of their time, and one for those that wait for memory most of it."""
    computing: Bools = problem.compute.sum(axis=0) >= problem.memory.sum(axis=0)
    filling = Filling(problem)
    for models in (np.flatnonzero(computing), np.flatnonzero(~computing)):
        free = np.flatnonzero(~filling.used)
        found = fewest(section(problem, free.tolist(), models.tolist()), "machines") if len(models) else None
        for machine, shares in zip(free.tolist(), found.shares if found else (), strict=False):
            for model, share in shares.items():
                filling.add(machine, int(models[model]), share)
    return filling
