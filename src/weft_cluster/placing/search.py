"""The search for a placement: one way for each objective, with the same packing, moves and judge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft_cluster.placing.bound import PlacingBound, placing_bound
from weft_cluster.placing.fewest import fewest
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.judging import OnTimeJudge
from weft_cluster.placing.moves import improve
from weft_cluster.placing.packing import most_load, pack
from weft_cluster.placing.placement import Objective
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.resharing import reshare_for_load

TRIALS = 1
"""How many changes are simulated for each machine."""
HOPELESS = 1.25
"""How many times as many late requests as the target allows are too many for moves to help."""
SAMPLE = 50
"""Machines that are simulated first; if their late requests are far above the target, the others are not simulated."""


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A filling, its value, and a bound that no filling exceeds."""

    filling: Filling
    value: float
    bound: PlacingBound | None
    carried: int
    """How many machines carry the load, whatever is on time; 0 where that was not the question."""


def search(problem: PlacingProblem, objective: Objective, target: float | None, seed: int = 0) -> Found:
    """The best filling found for an objective."""
    if objective in ("machines", "cost"):
        return _few_machines(problem, objective, target, seed)
    most = placing_bound(problem, "load")
    assert most is not None  # nothing at all can always be served
    scale, filling = most_load(problem, most)
    return Found(filling, scale, most, 0)


def _few_machines(problem: PlacingProblem, objective: Objective, target: float | None, seed: int) -> Found:
    bound = placing_bound(problem, objective)
    carrying = fewest(problem, objective)
    filling = carrying if target is None or carrying is None else fewest(problem, objective, _OnTime(target, seed))
    if filling is None:  # all machines are needed, and are not enough
        filling, _ = pack(problem, np.ones(len(problem.machines), np.bool_))
        if target is not None:
            improve(filling, OnTimeJudge(seed), target, TRIALS * len(problem.machines))
    prices = [problem.kinds[machine.kind].price for machine in problem.machines]
    value = float(filling.used.sum() if objective == "machines" else np.array(prices) @ filling.used)
    return Found(filling, value, bound, 0 if carrying is None else int(carrying.used.sum()))


class _OnTime:
    """Makes enough requests be on time: evens out the loads, then moves models; other arrivals say whether it did."""

    def __init__(self, target: float, seed: int) -> None:
        self._target, self._moving, self._judge = target, OnTimeJudge(seed), OnTimeJudge(seed + 1)

    def __call__(self, filling: Filling) -> Filling | None:
        _, even = reshare_for_load(filling)
        used = np.flatnonzero(even.used).tolist()
        if self._late(even, used[:: max(1, len(used) // SAMPLE)]) > 2 * HOPELESS:
            return None
        if 1 < self._late(even, used) < HOPELESS:
            improve(even, self._moving, self._target, TRIALS * len(used))
        return even if self._late(even, used) <= 1 else None

    def _late(self, filling: Filling, machines: list[int]) -> float:
        """How many times as many requests are late as the target allows."""
        return (1 - self._judge.attainment(filling, machines)) / (1 - self._target)
