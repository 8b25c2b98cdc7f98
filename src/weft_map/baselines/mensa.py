"""Mensa (Boroumand et al., PACT 2021): each layer where it runs best, unless going there costs more than it gains.

Recalled from the paper, and adapted. There the first phase looks layers up in families and the second compares a
layer's multiplications and parameters with the activations to be carried over; here both sides are measured, so both
phases compare times. As there: one model at a time, no look-ahead, no contention; models that meet on a unit queue.
"""

from __future__ import annotations

from weft_map.baselines.chains import ChainTimes, candidates, chains_of, in_series, quickest
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule


def mensa(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``mensa``: one mapping; for throughput also with the models in series."""
    chains = chains_of(problem)
    mapping = [_walk(chains, n) for n in chains.tasks]
    return candidates("mensa", chains, [mapping]) + in_series("mensa", chains, mapping, objective)


def _walk(chains: ChainTimes, task: int) -> list[int]:
    units: list[int] = []
    for times, move, fresh in zip(chains.time[task], chains.move[task], chains.fresh[task], strict=True):
        ideal = quickest(times)
        if fresh:
            units.append(ideal)
            continue
        here = units[-1]
        gain, cost = times[here] - times[ideal], move[here][ideal]
        units.append(ideal if gain > cost else here)
    return units
