"""Every configuration of a small space, in the order of the objective: what a search can be measured against."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

from weft.base.errors import EvaluationError, TuneError
from weft_tune.database import Database, opened
from weft_tune.evaluation import Evaluator, Score, Subset
from weft_tune.network import Network
from weft_tune.numbers.configuration import Configuration
from weft_tune.objective import DEFAULT, Extras, Measure, objective_from
from weft_tune.platform import Platform, Unbiased, load_platform
from weft_tune.search_space import Layerwise, SearchSpace, TuningSetting, space_of
from weft_tune.tuner import threshold_of

MOST = 1_000_000
"""Configurations that may be asked for."""


class Optimum(NamedTuple):
    """The best of a space."""

    configuration: Configuration | None
    """None where nothing is feasible."""
    score: float
    objective: float
    base: float
    threshold: float
    scored: int
    """How many configurations were tried, the first that passes among them."""
    size: int
    """How many there are."""


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
    with opened(database) as scores:
        ask = partial(_score, evaluator, evaluator.fingerprint, scores, subset)
        base = ask(Configuration({}), -math.inf).value
        threshold = threshold_of(base, margin)
        scored = 0
        for value, types in _by_objective(space, measure):
            for configuration in _biased(space, types, biases):
                scored += 1
                score = ask(configuration, threshold)
                if score.exact and score.value >= threshold:
                    return Optimum(configuration, score.value, value, base, threshold, scored, size)
    return Optimum(None, math.nan, math.nan, base, threshold, scored, size)


def _size(space: SearchSpace, biases: int) -> int:
    """How large the space is; a type without a bias counts once."""
    objects = Counter(item.group for item in space.items)
    return math.prod(
        sum(biases ** objects[position] if choice.biased else 1 for choice in group.choices)
        for position, group in enumerate(space.groups)
    )


def _by_objective(space: SearchSpace, measure: partial[float]) -> list[tuple[float, tuple[Unbiased, ...]]]:
    """All choices of types and widths, the smallest objective first, then in the order of the platform."""
    starts = tuple(item.start for item in space.items)
    every = [(measure(space.configuration(TuningSetting(types, starts))), types) for types in _types(space)]
    return sorted(every, key=lambda each: each[0])


def _types(space: SearchSpace) -> Iterator[tuple[Unbiased, ...]]:
    return product(*(group.choices for group in space.groups))


def _biased(space: SearchSpace, types: tuple[Unbiased, ...], biases: Sequence[int]) -> Iterator[Configuration]:
    """Each set of biases once; objects whose type has none count for nothing."""
    choices = [
        [item.start + each for each in biases] if types[item.group].biased else [item.start] for item in space.items
    ]
    for scales in product(*choices):
        yield space.configuration(TuningSetting(types, scales))


def _score(
    evaluator: Evaluator,
    fingerprint: str,
    database: Database,
    subset: Subset,
    configuration: Configuration,
    needed: float,
) -> Score:
    found = database.find(fingerprint, subset, configuration, needed)
    if found is None or isinstance(found, EvaluationError):
        found = evaluator.evaluate(configuration, subset, needed)
        database.keep(fingerprint, subset, configuration, needed, found)
    return found
