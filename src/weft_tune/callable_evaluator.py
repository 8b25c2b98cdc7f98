"""Scores from a Python function: any framework that can be called."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from weft.base.errors import EvaluationError, TuneError
from weft_tune.evaluation import Score, Scored, Subset
from weft_tune.numbers.configuration import Configuration

ScoreFunction = Callable[[Configuration, Subset], float]
"""Scores a configuration on the ``"small"`` or ``"full"`` set: higher is better, and the same for the same call."""


class CallableEvaluator:
    """Calls *function*, in *workers* threads at a time.

    The database knows it by *name*, by default its module and name: give another one when what it computes changes.
    """

    stops_early = False

    def __init__(self, function: ScoreFunction, *, name: str | None = None, workers: int = 1) -> None:
        if workers < 1:
            raise TuneError(f"workers = {workers}: call the function at least once at a time")
        plain = getattr(function, "__qualname__", type(function).__qualname__)
        self._name = name if name is not None else f"{getattr(function, '__module__', '')}.{plain}"
        self._function, self._workers = function, workers

    @property
    def fingerprint(self) -> str:
        return f"callable-{self._name}"

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """Call the function once; what it raises becomes an ``EvaluationError`` that carries the traceback."""
        try:
            value = float(self._function(configuration, subset))
        except EvaluationError:
            raise
        except Exception as error:
            text = str(error).splitlines()
            why = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
            raise EvaluationError(f"{self._name} failed: {why}", traceback.format_exc()) from error
        if not math.isfinite(value):
            raise EvaluationError(f"{self._name} returned {value}; a score is finite")
        return Score(value)

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: Scored | None = None
    ) -> list[Score | EvaluationError]:
        """One after another, or in threads."""
        if self._workers == 1:
            return [self._told(place, self._tried(each, subset), scored) for place, each in enumerate(configurations)]
        with ThreadPoolExecutor(self._workers, "weft-callable") as pool:
            jobs = {pool.submit(self._tried, each, subset): place for place, each in enumerate(configurations)}
            try:
                for job in as_completed(jobs):
                    self._told(jobs[job], job.result(), scored)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [job.result() for job in jobs]

    def _tried(self, configuration: Configuration, subset: Subset) -> Score | EvaluationError:
        try:
            return self.evaluate(configuration, subset)
        except EvaluationError as error:
            return error

    @staticmethod
    def _told(place: int, found: Score | EvaluationError, scored: Scored | None) -> Score | EvaluationError:
        if isinstance(found, Score) and scored is not None:
            scored(place, found)
        return found

    def close(self) -> None:
        """Do nothing: no process was started."""
