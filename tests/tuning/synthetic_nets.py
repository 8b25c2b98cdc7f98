"""Networks that are only arithmetic: a score that falls with the rounding errors of weights and inputs.

A sample is right if it tolerates the sum of the errors, so that there are hard and easy ones, as in a real data set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from weft.base.errors import EvaluationError
from weft_tune.evaluation import OnScore, Score, Subset
from weft_tune.network import Network, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import Format

CHUNK = 50


class SyntheticNet:
    """An ``Evaluator`` of *layers* layers; stops early where it may."""

    def __init__(self, seed: int = 0, layers: int = 2, *, stops_early: bool = True, samples: int = 400) -> None:
        rng = np.random.default_rng(seed)
        self.values: dict[str, np.ndarray] = {}
        targets = []
        for place in range(layers):
            name = f"l{place}"
            self.values[f"{name}.weight"] = weights = rng.normal(0, rng.uniform(0.01, 2), 60)
            self.values[f"{name}.input"] = inputs = np.abs(rng.normal(0, rng.uniform(0.1, 9), 60))
            sizes = (int(size) for size in rng.integers(50, 5000, 2))
            targets.append(Target(name, *sizes, float(np.abs(weights).max()), float(inputs.max()), macs=1000 * place))
        self.network = Network(f"synthetic{seed}", tuple(targets))
        self.tolerance: dict[Subset, np.ndarray] = {}
        for subset, count in (("small", samples // 4), ("full", samples)):
            self.tolerance[subset] = np.sort(rng.lognormal(-0.5, 1.5, count) - 0.02)
        self.fingerprint = f"synthetic {seed} {layers} {samples}"
        self.stops_early = stops_early
        self.asked: list[tuple[Configuration, Subset, float]] = []
        self._errors: dict[tuple[str, Format], float] = {}

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        self.asked.append((configuration, subset, needed))
        right = self.tolerance[subset] >= sum(self._error(name, configuration[name]) for name in self.values)
        if self.stops_early:
            for done in range(CHUNK, len(right), CHUNK):
                bound = (int(right[:done].sum()) + len(right) - done) / len(right)
                if bound < needed:
                    return Score(bound, False, done)
        return Score(float(right.mean()), True, len(right))

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        found: list[Score | EvaluationError] = []
        for place, each in enumerate(configurations):
            try:
                found.append(score := self.evaluate(each, subset))
                if scored is not None:
                    scored(place, score)
            except EvaluationError as error:
                found.append(error)
        return found

    def close(self) -> None:
        """Nothing was started."""

    def _error(self, name: str, form: Format) -> float:
        """Mean squared, of the size of the values."""
        if (name, form) not in self._errors:
            values = self.values[name]
            lost = rounded(values, form) - values
            self._errors[name, form] = float((lost**2).mean() / (values**2).mean())
        return self._errors[name, form]


def rounded(values: np.ndarray, form: Format) -> np.ndarray:
    """To the nearest value of the format; ties as they come."""
    size = np.minimum(np.abs(values), form.largest)
    binade = 2.0 ** np.floor(np.log2(np.maximum(size, 1e-300)))
    step = np.maximum(binade * 2.0**-form.fraction_bits, form.step) if form.exponent_bits else form.step
    return np.copysign(np.minimum(np.round(size / step) * step, form.largest), values)
