"""What scores a configuration: the seam between the search and whatever runs the network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from weft.base.errors import EvaluationError
from weft_tune.numbers.configuration import Configuration

Subset = Literal["small", "full"]
"""Which labelled samples: those of the first pass, or all."""


class Score(NamedTuple):
    """How good a network is under a configuration; higher is better."""

    value: float
    """The score, or, where it is not exact, a bound: the true score is not above it."""
    exact: bool = True
    samples: int = 0
    """Evaluated for it; 0 where nobody counts them."""


Scored = Callable[[int, Score], None]
"""Told the position of a configuration and its score as soon as that is known."""


class Evaluator(Protocol):
    """Runs a network under configurations. Same configuration, same subset: same score."""

    @property
    def fingerprint(self) -> str:
        """Stands for all that scores depend on but the configuration: model, data, measure. A key of the database."""
        ...

    @property
    def stops_early(self) -> bool:
        """Whether ``needed`` saves anything; if not, configurations are best handed over many at a time."""
        ...

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """The score, exact if it is at least *needed*; below that a bound below *needed* will do.

        Raises ``EvaluationError`` where it cannot be had.
        """
        ...

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: Scored | None = None
    ) -> list[Score | EvaluationError]:
        """Exact scores in the given order, side by side where that is faster; failures in their place."""
        ...

    def close(self) -> None:
        """Stop what was started."""
        ...
