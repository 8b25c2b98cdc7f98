"""Herald (Kwon et al., HPCA 2021): each layer on the unit that suits it best, unless that upsets the balance.

Recalled from the paper, and adapted. Layers are taken breadth first (one of each model in turn) or depth first. The
units are ranked by the layer's cost, here its latency; the first is taken after which the fullest unit holds no more
than a factor of the emptiest one's load, and the best if there is none. Moves and contention cost nothing. The
paper's last pass, which pulls layers forward into gaps, is left to the simulator: it lets no unit idle while a
step is ready for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf, isfinite

from weft_map.baselines.chains import ChainTimes, Mapping, candidates, chains_of, in_turn
from weft_map.problem import Objective, Problem
from weft_map.schedule import Schedule

FACTORS = (1.1, 1.25, 1.5, 2.0, 3.0, inf)
"""How much fuller one unit may be than another; the best is kept, since the paper tunes it as well."""


def herald(problem: Problem, objective: Objective) -> tuple[Schedule, ...]:
    """``herald``: every order of layers with every factor."""
    chains = chains_of(problem)
    ranked, units = _ranked(chains), len(chains.units)
    sequences = (breadth_first(chains), depth_first(chains))
    ways = (_assign(ranked, sequence, factor, units) for sequence in sequences for factor in FACTORS)
    return candidates("herald", chains, ways)


def breadth_first(chains: ChainTimes) -> list[int]:
    """One stretch of each task in turn; a task that waits joins once the others are through."""
    left = [len(stretches) for stretches in chains.time]
    sequence: list[int] = []
    while any(left):
        turn = [n for n in chains.tasks if left[n] and not any(left[m] for m in chains.waits[n])]
        for n in turn:
            left[n] -= 1
        sequence += turn
    return sequence


def depth_first(chains: ChainTimes) -> list[int]:
    """The schedule of one task after the other."""
    return [n for n in in_turn(chains) for _ in chains.time[n]]


def _ranked(chains: ChainTimes) -> list[list[list[tuple[int, float]]]]:
    """[task][stretch]: the units that may run it, the fastest first, and the load it puts on each."""
    return [
        [
            [
                (unit, times[unit] / chains.instances[unit])
                for unit in sorted(chains.units, key=times.__getitem__)
                if isfinite(times[unit])
            ]
            for times in stretches
        ]
        for stretches in chains.time
    ]


def _assign(
    ranked: Sequence[Sequence[Sequence[tuple[int, float]]]], sequence: Iterable[int], factor: float, units: int
) -> Mapping:
    loads = [0.0] * units
    mapping: Mapping = [[] for _ in ranked]
    for n in sequence:
        choices = ranked[n][len(mapping[n])]
        unit, load = choices[0]
        if factor < inf:
            unit, load = next((choice for choice in choices if _even(loads, *choice, factor)), choices[0])
        loads[unit] += load
        mapping[n].append(unit)
    return mapping


def _even(loads: list[float], unit: int, load: float, factor: float) -> bool:
    before = loads[unit]
    loads[unit] = before + load
    even = max(loads) <= factor * min(loads)
    loads[unit] = before
    return even
