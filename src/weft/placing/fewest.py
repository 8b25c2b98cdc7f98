"""The fewest machines, or the cheapest, that carry the demands: from the bound upwards until everything fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from weft.placing.bound import PlacingBound, placing_bound
from weft.placing.filling import Filling
from weft.placing.packing import pack
from weft.placing.placement import Objective
from weft.placing.problem import Bools, PlacingProblem

Content = Callable[[Filling], bool]
"""Whether a filling that carries the demands is also good enough."""


def fewest(problem: PlacingProblem, objective: Objective, content: Content = lambda filling: True) -> Filling | None:
    """The first filling that carries all and satisfies *content*; None: not with all machines."""
    levels = _Levels(problem, objective)
    found: dict[int, Filling | None] = {}

    def good(level: int) -> bool:
        if level not in found:
            filling, left = pack(problem, levels.opened(level))
            found[level] = None if left or not content(filling) else filling
        return found[level] is not None

    step = 1
    low, high = -1, 0
    while not good(high):
        if levels.opened(high).all():
            return None
        low, high, step = high, high + step, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if good(middle) else (middle, high)
    return found[high]


class _Levels:
    """Ever more machines: at level 0 as many as the bound says, at each next one about one more."""

    def __init__(self, problem: PlacingProblem, objective: Objective) -> None:
        self._problem, self._objective = problem, objective
        self._bound = placing_bound(problem, objective)
        self._opened: dict[int, Bools] = {}

    def opened(self, level: int) -> Bools:
        """(machine): whether it is open."""
        if level not in self._opened:
            self._opened[level] = self._open(level)
        return self._opened[level]

    def _open(self, level: int) -> Bools:
        everything = np.ones(len(self._problem.machines), np.bool_)
        bound = self._bound
        if bound is None:
            return everything
        if len(bound.groups) == 1:
            return self._first(bound, (math.ceil(bound.opened[0] - 1e-6) + level,))
        stretched = placing_bound(self._problem, self._objective, 1 + level / max(1.0, sum(bound.opened)))
        return everything if stretched is None else self._first(stretched, stretched.opened)

    def _first(self, bound: PlacingBound, counts: tuple[float, ...]) -> Bools:
        opened = np.zeros(len(self._problem.machines), np.bool_)
        for group, count in zip(bound.groups, counts, strict=True):
            opened[list(group.members[: math.ceil(count - 1e-6)])] = True
        return opened
