"""Every configuration of a small space, in the order of the objective: the optimum that a search is compared with."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import TuneError
from weft_tune.evaluation import Database, Evaluator, Subset, open_database
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.objective import DEFAULT, Extras, Measure, objective_from
from weft_tune.platform import Platform, Unbiased, load_platform
from weft_tune.search_space import Layerwise, SearchSpace, TuningSetting, space_of
from weft_tune.tuner import threshold_of

MOST = 1_000_000
"""Limit of the size of a space: more configurations would take days."""


class Optimum(NamedTuple):
    """The best configuration of a space."""

    configuration: Configuration | None
    """None where nothing is feasible."""
    score: float
    objective: float
    base: float
    threshold: float
    scored: int
    """The number of configurations that were scored, the first that passes among them."""
    size: int
    """The number of configurations in the space."""


def exhaustive(
    network: Network,
    evaluator: Evaluator,
    *,
    platform: Platform | str,
    biases: Sequence[int] = (0,),
    margin: float = 0.01,
    objective: str | Measure = DEFAULT,
    extras: Extras | None = None,
    layerwise: Layerwise = "WGT-ONLY",
    subset: Subset = "full",
    database: Path | Database | None = None,
) -> Optimum:
    """The feasible configuration with the smallest objective.

    Every format of the platform for every group, and every one of *biases*, counted from where a search starts, for
    every object. The objective may depend on types and widths, not on biases.
    """
    machine = load_platform(platform) if isinstance(platform, str) else platform
    space = space_of(network, machine, layerwise)
    size = _size(space, len(biases))
    if size > MOST:
        raise TuneError(
            f"{size:.3g} configurations are too many to try; allow fewer formats or biases ({MOST} at most)"
        )
    measure = partial(objective_from(objective, extras), network)
    with open_database(database) as scores:
        score = partial(scores.score, evaluator, subset)
        base = score(Configuration({})).value
        threshold = threshold_of(base, margin)
        scored = 0
        for value, types in _by_objective(space, measure):
            for configuration in _biased(space, types, biases):
                scored += 1
                outcome = score(configuration, threshold)
                if outcome.exact and outcome.value >= threshold:
                    return Optimum(configuration, outcome.value, value, base, threshold, scored, size)
    return Optimum(None, math.nan, math.nan, base, threshold, scored, size)


def _size(space: SearchSpace, biases: int) -> int:
    """The number of configurations; a type without a bias counts once."""
    objects = Counter(item.group for item in space.items)
    return math.prod(
        sum(biases ** objects[position] if choice.biased else 1 for choice in group.choices)
        for position, group in enumerate(space.groups)
    )


def _by_objective(space: SearchSpace, measure: partial[float]) -> list[tuple[float, tuple[Unbiased, ...]]]:
    """All choices of types and widths, the smallest objective first, then in the order of the platform."""
    starts = tuple(item.start for item in space.items)
    choices = product(*(group.choices for group in space.groups))
    measured = [(measure(space.configuration(TuningSetting(types, starts))), types) for types in choices]
    return sorted(measured, key=lambda pair: pair[0])


def _biased(space: SearchSpace, types: tuple[Unbiased, ...], biases: Sequence[int]) -> Iterator[Configuration]:
    """The configurations of some types with all biases; objects whose type has no bias do not multiply them."""
    choices = [
        [item.start + bias for bias in biases] if types[item.group].biased else [item.start] for item in space.items
    ]
    for scales in product(*choices):
        yield space.configuration(TuningSetting(types, scales))
