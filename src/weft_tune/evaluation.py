"""Scoring configurations: the protocol between the search and the runtime of a network, and scores from a function.

Other evaluators are ``command_evaluator``, for any command line, and ``quantised.evaluator``, for ONNX models.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Literal, NamedTuple, Protocol

from weft.base.errors import EvaluationError, TuneError
from weft_tune.numbers.configuration import Configuration

Subset = Literal["small", "full"]
"""The labelled samples of the first pass, or all of them."""


class Score(NamedTuple):
    """How good a network is under a configuration; higher is better."""

    value: float
    """The score, or, where it is not exact, an upper bound of it."""
    exact: bool = True
    samples: int = 0
    """Samples evaluated for it; 0 where the evaluator does not count them."""


OnScore = Callable[[int, Score], None]
"""Called with the position of a configuration and its score as soon as that is known."""


class Evaluator(Protocol):
    """Runs a network under configurations. Same configuration, same subset: same score."""

    @property
    def fingerprint(self) -> str:
        """Identifies all that scores depend on but the configuration: model, data, measure. A key of the database."""
        ...

    @property
    def stops_early(self) -> bool:
        """Whether ``needed`` saves work; if not, many configurations in one call are faster than single ones."""
        ...

    def evaluate(self, configuration: Configuration, subset: Subset, needed: float = -math.inf) -> Score:
        """Score a configuration: exactly if the score is at least *needed*, else perhaps with a bound below *needed*.

        Raises ``EvaluationError`` where there is no score.
        """
        ...

    def evaluate_many(
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        """Exact scores in the given order, side by side where that is faster; failures in their place.

        *scored* is called with every score as soon as it is known.
        """
        ...

    def close(self) -> None:
        """Stop worker processes and running commands."""
        ...


ScoreFunction = Callable[[Configuration, Subset], float]
"""Scores a configuration on the ``"small"`` or ``"full"`` set: higher is better, and the same for the same call."""


class CallableEvaluator:
    """Scores from a Python function, so from any framework that can be called, in *workers* threads at a time.

    The database knows it by *name*, by default its module and name: give another one when its computation changes.
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
        """Call the function once; an exception of it becomes an ``EvaluationError`` that carries the traceback."""
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
        self, configurations: Sequence[Configuration], subset: Subset, scored: OnScore | None = None
    ) -> list[Score | EvaluationError]:
        """Score one after another, or in threads."""

        def attempt(configuration: Configuration) -> Score | EvaluationError:
            try:
                return self.evaluate(configuration, subset)
            except EvaluationError as error:
                return error

        def publish(place: int, outcome: Score | EvaluationError) -> Score | EvaluationError:
            if isinstance(outcome, Score) and scored is not None:
                scored(place, outcome)
            return outcome

        if self._workers == 1:  # in this thread: some frameworks work in the main thread only
            return [publish(place, attempt(configuration)) for place, configuration in enumerate(configurations)]
        with ThreadPoolExecutor(self._workers, "weft-callable") as pool:
            jobs = {pool.submit(attempt, configuration): place for place, configuration in enumerate(configurations)}
            try:
                for job in as_completed(jobs):
                    publish(jobs[job], job.result())
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return [job.result() for job in jobs]

    def close(self) -> None:
        """Do nothing: no process was started."""
