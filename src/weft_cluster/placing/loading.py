"""The most load: the largest multiple of all rates that the machines carry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from weft_cluster.placing.bound import PlacingBound
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.packing import pack_evenly
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.resharing import reshare_for_load

SCALES = (1.0, 0.97, 0.93, 0.85, 0.7)
"""Shares of the bound that are packed for, to be divided anew: the one leaves no room, the other no balance."""


def most_load(problem: PlacingProblem, bound: PlacingBound) -> tuple[float, Filling]:
    """The largest multiple of the rates that was found to fit, and its filling; 0 where not all models fit."""
    best, found = 0.0, Filling(problem)
    opened = np.ones(len(problem.machines), np.bool_)
    for scale in SCALES:
        packed, left = pack_evenly(replace(problem, cap=problem.cap / (scale * bound.value)), opened, bound)
        times, filling = reshare_for_load(Filling(problem, packed.shares))
        if not left:
            times = max(times, scale * bound.value)
        if times > best or not found.used.any():
            best, found = times, filling
    return best, found
