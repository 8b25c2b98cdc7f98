"""What the baselines have in common: how a configuration is scored and remembered, and what a method comes to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

from weft.base.errors import EvaluationError, TuneError
from weft_tune.database import Database
from weft_tune.evaluation import Evaluator, Score, Subset
from weft_tune.numbers.configuration import Configuration
from weft_tune.tuner import threshold_of

Progress = Callable[[int, Configuration, Score], None]
"""Called after every new score: its number, what was scored, and how good it is."""


class Scored(NamedTuple):
    """One scored configuration of a baseline's search."""

    step: str
    """What was tried: ``conv weights``, ``inputs``, ``combined``, ``start``, ``drop`` or ``repair``."""
    configuration: Configuration
    score: Score


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a method found, and what that took."""

    method: str
    configuration: Configuration
    score: float
    """The configuration's score, exact."""
    base: float
    """The score that the margin is taken from."""
    threshold: float
    trials: tuple[Scored, ...]
    """Every configuration that was scored, in order."""
    repaired: bool = False
    """Whether the method's own answer failed and was widened until it passed."""

    @property
    def feasible(self) -> bool:
        return self.score >= self.threshold

    @property
    def evaluations(self) -> int:
        return len(self.trials)

    @property
    def samples(self) -> int:
        return sum(trial.score.samples for trial in self.trials)


class Referee:
    """Scores configurations on one subset, each one once, and keeps the list.

    The database is the one of our own search: what that scored need not be scored again.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        margin: float,
        subset: Subset,
        *,
        database: Path | None = None,
        progress: Progress | None = None,
    ) -> None:
        if not 0 <= margin < 1:
            raise TuneError(f"margin = {margin} must be at least 0 and below 1; 0.01 lets 1 % of the score go")
        self._evaluator, self._margin, self._subset, self._progress = evaluator, margin, subset, progress
        self._database = Database(database)
        self._trials: dict[Configuration, Scored] = {}
        self.base = self.threshold = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def measure_base(self, configuration: Configuration) -> None:
        """Score what the margin is taken from."""
        self.base = self.score(configuration, "base").value
        self.threshold = threshold_of(self.base, self._margin)

    def score(self, configuration: Configuration, step: str, needed: float = -math.inf) -> Score:
        """Exact, unless it lies below *needed*."""
        known = self._trials.get(configuration)
        if known and (known.score.exact or known.score.value < needed):
            return known.score
        score = self._found(configuration, needed)
        samples = score.samples + (known.score.samples if known else 0)
        self._trials[configuration] = Scored(step, configuration, score._replace(samples=samples))
        if self._progress:
            self._progress(len(self._trials), configuration, score)
        return score

    def prepare(self, configurations: Sequence[Configuration]) -> None:
        """Score all of them side by side, if the evaluator saves nothing by being told what is needed."""
        if self._evaluator.stops_early:
            return
        new = [each for each in configurations if self._known(each, -math.inf) is None]
        for each, found in zip(new, self._evaluator.evaluate_many(new, self._subset), strict=True):
            if isinstance(found, EvaluationError):
                raise found
            self._database.keep(self._evaluator.fingerprint, self._subset, each, -math.inf, found)

    def passes(self, configuration: Configuration, step: str) -> bool:
        return self.score(configuration, step, self.threshold).value >= self.threshold

    def verdict(self, method: str, configuration: Configuration, step: str, repaired: bool = False) -> Baseline:
        """The result, of what a method ends with."""
        value, trials = self.score(configuration, step).value, tuple(self._trials.values())
        return Baseline(method, configuration, value, self.base, self.threshold, trials, repaired)

    def _found(self, configuration: Configuration, needed: float) -> Score:
        found = self._known(configuration, needed)
        if found is None:
            found = self._evaluator.evaluate(configuration, self._subset, needed)
            self._database.keep(self._evaluator.fingerprint, self._subset, configuration, needed, found)
        return found

    def _known(self, configuration: Configuration, needed: float) -> Score | None:
        """Failures that were kept are tried again."""
        found = self._database.find(self._evaluator.fingerprint, self._subset, configuration, needed)
        return found if isinstance(found, Score) else None
