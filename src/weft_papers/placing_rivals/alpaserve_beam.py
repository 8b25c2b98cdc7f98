"""AlpaServe's beam search (Li et al., OSDI 2023), which its greedy stands for in ``weft place``."""

from __future__ import annotations

import numpy as np

from weft_cluster.placing.alpaserve import OnTime, fluid, lacking, replicate
from weft_cluster.placing.filling import Filling
from weft_cluster.placing.problem import PlacingProblem
from weft_cluster.placing.spreading import levelled, new_homes


def beam(problem: PlacingProblem, on_time_of: OnTime = fluid, width: int = 3) -> Filling:
    """The beam search: every replica of every badly served model on every machine that differs, the best three kept."""
    rates = np.array([demand.rate for demand in problem.demands])

    def score(filling: Filling) -> float:
        return float(rates @ on_time_of(filling) / rates.sum()) + sum(map(len, filling.shares)) / 1e6

    kept = [Filling(problem)]
    best = kept[0]
    while kept:
        grown: dict[tuple[frozenset[int], ...], Filling] = {}
        for filling in kept:
            for model in lacking(filling, on_time_of(filling)):
                for machine in _distinct(filling, model):
                    found = Filling(problem, filling.shares)
                    replicate(found, model, machine)
                    grown.setdefault(tuple(sorted((frozenset(each) for each in found.shares), key=sorted)), found)
        kept = sorted(grown.values(), key=score, reverse=True)[:width]
        best = max([best, *kept], key=score)
    return levelled(best)


def _distinct(filling: Filling, model: int) -> list[int]:
    """Machines where one more replica may go, only one of those that are empty and of one kind."""
    homes = np.flatnonzero(new_homes(filling, model)).tolist()
    kinds = filling.problem.kind_of
    seen = {(int(kinds[home]), home if filling.shares[home] else -1): home for home in reversed(homes)}
    return sorted(seen.values())
