"""The fewest machines, or the cheapest, that carry the demands: from the bound upwards until everything fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from weft_cluster.placing.bound import ALMOST, PlacingBound, placing_bound
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.packing import pack
from weft_cluster.placing.placement import Objective
from weft_cluster.placing.problem import Bools, PlacingProblem

PRECISION = 0.01
"""How near to the fewest the search goes, as a share of them; it is exact below a hundred machines."""
Refine = Callable[[Filling], Filling | None]
"""Makes a filling that carries the demands good enough; None where that cannot be."""


def fewest(problem: PlacingProblem, objective: Objective, refine: Refine = lambda filling: filling) -> Filling | None:
    """The first filling that carries all and can be refined; None: not with all machines."""
    levels = _Levels(problem, objective)
    fillings: dict[int, Filling | None] = {}

    def good(level: int) -> bool:
        if level not in fillings:
            filling, left = pack(problem, *levels[level])
            fillings[level] = None if left else refine(filling)
        return fillings[level] is not None

    low, high = -1, 0
    near = max(1, int(PRECISION * levels[0][0].sum()))
    step = near
    while not good(high):
        if levels[high][0].all():
            return None
        low, high, step = high, high + step, 2 * step
    while high - low > near:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return fillings[high]


class _Levels:
    """Increasing sets of machines: at level 0 as many as the bound, at each further level about one more."""

    def __init__(self, problem: PlacingProblem, objective: Objective) -> None:
        self._problem, self._objective = problem, objective
        self._bound = placing_bound(problem, objective)
        self._known: dict[int, tuple[Bools, PlacingBound | None]] = {}

    def __getitem__(self, level: int) -> tuple[Bools, PlacingBound | None]:
        """(machine): whether it is open; and the bound by which it is."""
        if level not in self._known:
            self._known[level] = self._open(level)
        return self._known[level]

    def _open(self, level: int) -> tuple[Bools, PlacingBound | None]:
        bound = self._bound
        if bound is not None and len(bound.groups) == 1:
            return _first(self._problem, bound, level), None
        if bound is not None and level:
            bound = placing_bound(self._problem, self._objective, 1 + level / max(1.0, sum(bound.opened)))
        if bound is None:
            return np.ones(len(self._problem.machines), np.bool_), None
        return _first(self._problem, bound), bound


def _first(problem: PlacingProblem, bound: PlacingBound, more: int = 0) -> Bools:
    """(machine): whether it is among as many of its like as a bound opens, and *more*."""
    opened = np.zeros(len(problem.machines), np.bool_)
    for group, count in zip(bound.groups, bound.opened, strict=True):
        opened[list(group.members[: math.ceil(count - ALMOST) + more])] = True
    return opened
