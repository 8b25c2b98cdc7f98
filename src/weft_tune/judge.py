"""Scores candidates and picks the best: known scores are reused, and candidates that cannot win are not fully scored.

A rule says which candidate is best. It has a ``floor`` below which no score is accepted, a ``key`` that is larger for a
better candidate and grows with its score, and ``needed``: the least score at which a candidate with a given objective
could still win.

A fast search scores candidates one after another, each only until it is known whether it is feasible and beats the best
so far; likely winners go first. A faithful search scores every candidate in full. Both pick the same candidate: ties
are broken by the place in the list, never by the order of scoring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from weft.base.errors import EvaluationError
from weft_tune.evaluation import Database, Evaluator, Score, Subset
from weft_tune.numbers.configuration import Configuration
from weft_tune.result import KeptPoint, OnSearchProgress, Phase, Progress, Step, Trial
from weft_tune.search_space import Move, SearchSpace, TuningSetting

OnFailure = Literal["stop", "skip"]
Key = tuple[float, ...]  # sort key of a candidate, compared from left to right
SLACK = 1e-9
"""Subtracted from a needed score, so that rounding errors never exclude a winner; relative for scores above 1."""


class Rule(Protocol):
    """The rule by which the best of several candidates is chosen."""

    @property
    def floor(self) -> float:
        """The least score that is accepted."""
        ...

    def key(self, objective: float, score: float) -> Key:
        """Sort key of a candidate; the largest wins."""
        ...

    def needed(self, objective: float, best: Key | None, later: bool) -> float:
        """The least score with which a candidate of this *objective* wins against *best*; infinite if none suffices.

        later: whether the candidate comes after the best in the list, so that it must beat it and not only equal it.
        """
        ...


@dataclass(frozen=True, slots=True)
class HighestScore:
    """Choose the most accurate candidate; the first one on a tie."""

    floor: float

    def key(self, objective: float, score: float) -> Key:
        return (score,)

    def needed(self, objective: float, best: Key | None, later: bool) -> float:
        if best is None:
            return self.floor
        return max(self.floor, math.nextafter(best[0], math.inf) if later else best[0])


@dataclass(frozen=True, slots=True)
class MostGainPerLoss:
    """Choose the candidate that lowers the objective most per lost score.

    Without a loss the ratio is infinite; such candidates are compared by their gain, then by their score. Candidates
    without a gain come last.
    """

    floor: float
    objective: float
    score: float
    """Score of the point whose neighbours the candidates are."""

    def key(self, objective: float, score: float) -> Key:
        """(rank, ratio, gain, score); rank 2: gain without loss, 1: gain with a loss, 0: no gain."""
        gain, loss = self.objective - objective, self.score - score
        if gain <= 0:
            return (0, 0, gain, score)
        return (2, 0, gain, score) if loss <= 0 else (1, gain / loss, gain, score)

    def needed(self, objective: float, best: Key | None, later: bool) -> float:
        gain = self.objective - objective
        rank = 0 if gain <= 0 else 1
        if best is None:
            return self.floor
        best_rank, best_ratio, *_ = best  # see ``key``
        if best_rank < rank:
            return self.floor
        if best_rank == 2:
            return self._needed_within_rank(gain, best, later, self.score) if rank else math.inf
        if rank == 0:
            return math.inf if best_rank == 1 else self._needed_within_rank(gain, best, later, self.floor)
        # a ratio above that of the best: gain / (self.score - score) > best_ratio, solved for the score
        return max(self.floor, self.score - gain / best_ratio - SLACK * max(1.0, abs(self.score)))

    def _needed_within_rank(self, gain: float, best: Key, later: bool, least: float) -> float:
        """The score that beats *best*, which has the same rank, by gain and then by score.

        least: the score above which the candidate belongs to that rank.
        """
        _, _, best_gain, best_score = best
        if gain != best_gain:
            return math.inf if gain < best_gain else max(self.floor, least)
        return max(self.floor, least, math.nextafter(best_score, math.inf) if later else best_score)


class Point(NamedTuple):
    """A setting with its configuration, objective and score."""

    setting: TuningSetting
    configuration: Configuration
    objective: float
    score: float = math.nan
    """Exact if the point is feasible; NaN if it was not scored."""


class TrialOutcome(NamedTuple):
    """The result of an evaluation, or its failure."""

    score: Score
    failure: str = ""


class Judge:
    """Scores settings for a search, and owns the scores, the trials and the kept points."""

    def __init__(
        self,
        space: SearchSpace,
        evaluator: Evaluator,
        objective: Callable[[Configuration], float],
        database: Database,
        *,
        faithful: bool = False,
        on_failure: OnFailure = "stop",
        on_progress: OnSearchProgress | None = None,
    ) -> None:
        self.space = space
        self.threshold = math.nan
        self.trials: list[Trial] = []
        self.path: list[KeptPoint] = []
        """The points from which the search continued."""
        self.samples: dict[Subset, int] = {"small": 0, "full": 0}
        self.reused = 0
        """Number of outcomes that came from the database."""
        self._evaluator, self._fingerprint = evaluator, evaluator.fingerprint
        self._database, self._on_progress = database, on_progress
        self._objective, self._objectives = objective, dict[Configuration, float]()
        self._in_full = faithful or not evaluator.stops_early
        """Whether every candidate is scored exactly, many in one call: evaluations are not stopped early."""
        self._skip_failures = on_failure == "skip"
        self.phase: Phase = 1
        self._subset: Subset = "small"
        self._known: dict[tuple[Subset, Configuration], TrialOutcome] = {}
        self._trial_index: dict[tuple[Subset, Configuration], int] = {}
        """Scored configuration -> its index in ``trials``."""
        self._score_changes: dict[str, float] = {}
        """Name of a move -> the change of the score that it caused last."""
        self._iteration = 0

    def measure_base(self, subset: Subset, configuration: Configuration) -> float:
        """Switch to a subset of the samples; return the score of *configuration*, with which others are compared."""
        self._subset, self.threshold = subset, -math.inf
        skip_failures, self._skip_failures = self._skip_failures, False  # a failure of the base must not be skipped
        outcome = self._outcome(configuration, "base", needed=-math.inf)
        self._skip_failures = skip_failures
        return outcome.score.value

    def point(self, setting: TuningSetting) -> Point:
        """Return the point of a setting, without scoring it."""
        configuration = self.space.configuration(setting)
        return Point(setting, configuration, self._objective_of(configuration))

    def feasible(self, setting: TuningSetting, step: Step) -> Point | None:
        """Score a setting as trial of *step*; None if the score does not reach the threshold."""
        point = self.point(setting)
        score = self._outcome(point.configuration, step, -math.inf if self._in_full else self.threshold).score
        return point._replace(score=score.value) if self._passes(score, self.threshold) else None

    def scored(self, setting: TuningSetting, step: Step) -> Point | None:
        """Score a setting exactly, feasible or not; None if the evaluation failed."""
        point = self.point(setting)
        score = self._outcome(point.configuration, step, needed=-math.inf).score
        return point._replace(score=score.value) if self._passes(score, -math.inf) else None

    def pick(self, moves: Sequence[Move], rule: Rule, step: Step, base_score: float = math.nan) -> Point | None:
        """Return the best of the neighbours that the rule accepts, None if it accepts none.

        base_score: the score of the point whose neighbours they are, if known, for the guess which of them may win.
        """
        points = [self.point(move.setting) for move in moves]
        self._score_together(points, step)
        best: tuple[Key, int] | None = None  # the best neighbour's key, and its index
        for index in self._order(moves, points, rule, base_score):
            needed = rule.needed(points[index].objective, best and best[0], best is not None and index > best[1])
            score = self._score(points[index], step, needed)
            if score is None:
                continue
            if not math.isnan(base_score):
                self._score_changes[moves[index].name] = score.value - base_score
            if not self._passes(score, rule.floor):
                continue
            points[index] = points[index]._replace(score=score.value)
            key = rule.key(points[index].objective, score.value)
            # Ties go to the earlier place, because the order of scoring differs between fast and faithful searches.
            if best is None or key > best[0] or (key == best[0] and index < best[1]):
                best = key, index
        return None if best is None else points[best[1]]

    def accepted(self, moves: Sequence[Move], rule: Rule, step: Step) -> list[Point]:
        """Return all neighbours that the rule accepts, the best first."""
        points = [self.point(move.setting) for move in moves]
        self._score_together(points, step)
        passing: list[Point] = []
        for point in points:
            score = self._outcome(point.configuration, step, -math.inf if self._in_full else rule.floor).score
            if self._passes(score, rule.floor):
                passing.append(point._replace(score=score.value))
        return sorted(passing, key=lambda point: rule.key(point.objective, point.score), reverse=True)

    def keep(self, point: Point, step: Step) -> None:
        """Record the point from which the search continues."""
        self.path.append(KeptPoint(self.phase, step, point.configuration, point.score, point.objective))
        index = self._trial_index[self._subset, point.configuration]
        self.trials[index] = self.trials[index]._replace(chosen=True)

    def _objective_of(self, configuration: Configuration) -> float:
        if configuration not in self._objectives:
            self._objectives[configuration] = self._objective(configuration)
        return self._objectives[configuration]

    def _passes(self, score: Score, floor: float) -> bool:
        """Whether *score* is exact, at least *floor*, and not that of a failure (-inf)."""
        return score.exact and score.value >= floor and score.value > -math.inf

    def _order(self, moves: Sequence[Move], points: Sequence[Point], rule: Rule, base_score: float) -> list[int]:
        """Indices of *moves* in the order of scoring: likely winners first, by the score changes they caused last.

        In the order of *moves* if all are scored in full, or without *base_score*.
        """
        indices = list(range(len(moves)))
        if self._in_full or math.isnan(base_score):
            return indices

        def expected_key(index: int) -> Key:
            return rule.key(points[index].objective, base_score + self._score_changes.get(moves[index].name, 0.0))

        return sorted(indices, key=expected_key, reverse=True)

    def _score(self, point: Point, step: Step, needed: float) -> Score | None:
        """Score a point, exactly if it reaches *needed*; None if no score could make it win (*needed* is infinite)."""
        if self._in_full:
            return self._outcome(point.configuration, step, needed=-math.inf).score
        return None if needed == math.inf else self._outcome(point.configuration, step, needed).score

    def _outcome(self, configuration: Configuration, step: Step, needed: float) -> TrialOutcome:
        """Get an outcome from memory, the database or the evaluator: an exact score, or a bound below *needed*."""
        key = self._subset, configuration
        if (known := self._known.get(key)) and (known.score.exact or known.score.value < needed):
            return known
        outcome = self._stored_outcome(configuration, needed)
        if outcome is None:
            outcome = self._evaluate(configuration, needed)
        return self._record(configuration, step, outcome)

    def _score_together(self, points: Sequence[Point], step: Step) -> None:
        """Score all new *points* in parallel, if all are scored in full; else ``_score`` scores one after another."""
        if not self._in_full:
            return
        distinct = dict.fromkeys(point.configuration for point in points)
        unknown = [configuration for configuration in distinct if (self._subset, configuration) not in self._known]
        # needed=-inf: no stored bound is below it, so that only exact scores count
        outcomes = {configuration: self._stored_outcome(configuration, needed=-math.inf) for configuration in unknown}
        missing = [configuration for configuration in unknown if outcomes[configuration] is None]
        if missing:
            outcomes |= dict(zip(missing, self._evaluate_many(missing, step), strict=True))
        for configuration in unknown:
            self._record(configuration, step, outcomes[configuration])

    def _stored_outcome(self, configuration: Configuration, needed: float) -> Score | EvaluationError | None:
        """Look up an exact score or a bound below *needed*; stored failures count only if failures are skipped."""
        outcome = self._database.find(self._fingerprint, self._subset, configuration, needed)
        if isinstance(outcome, EvaluationError) and not self._skip_failures:
            return None  # the search stopped at this failure before; the user may have mended its cause
        self.reused += outcome is not None
        return outcome

    def _evaluate(self, configuration: Configuration, needed: float) -> Score | EvaluationError:
        """Evaluate one configuration and store its score or failure."""
        outcome: Score | EvaluationError
        try:
            outcome = self._evaluator.evaluate(configuration, self._subset, needed)
        except EvaluationError as error:
            outcome = error
        self._store(configuration, needed, outcome)
        return outcome

    def _evaluate_many(self, missing: list[Configuration], step: Step) -> list[Score | EvaluationError]:
        """Evaluate configurations in parallel; scores are stored as soon as they are known."""
        stored: set[int] = set()

        def store_at_once(index: int, score: Score) -> None:
            stored.add(index)
            self._store(missing[index], -math.inf, score)
            self._report(step, self._iteration + len(stored), score.value)

        outcomes = self._evaluator.evaluate_many(missing, self._subset, store_at_once)
        not_stored = [index for index in range(len(outcomes)) if index not in stored]
        # failures last: they may raise, and scores must be stored before that
        for index in sorted(not_stored, key=lambda index: isinstance(outcomes[index], EvaluationError)):
            self._store(missing[index], -math.inf, outcomes[index])
        return outcomes

    def _store(self, configuration: Configuration, needed: float, outcome: Score | EvaluationError) -> None:
        """Write an outcome into the database; raise it if it is a failure and failures are not skipped."""
        if isinstance(outcome, EvaluationError) and not self._skip_failures:
            raise outcome
        if isinstance(outcome, Score) and math.isnan(outcome.value):
            raise EvaluationError("the score is not a number; check what the evaluation measures")
        self._database.keep(self._fingerprint, self._subset, configuration, needed, outcome)

    def _record(self, configuration: Configuration, step: Step, result: Score | EvaluationError | None) -> TrialOutcome:
        """Remember an outcome in memory, add its trial or update an earlier one, and report progress."""
        assert result is not None
        if isinstance(result, EvaluationError):
            outcome = TrialOutcome(Score(-math.inf), str(result))
        else:
            outcome = TrialOutcome(result)
        key = self._subset, configuration
        self._known[key] = outcome
        self.samples[self._subset] += outcome.score.samples
        if key in self._trial_index:
            self._rescore(self._trial_index[key], outcome.score)
        else:
            self._trial_index[key] = len(self.trials)
            self._iteration += step != "base"
            self.trials.append(self._trial(configuration, step, outcome))
        self._report(step, self._iteration, outcome.score.value)
        return outcome

    def _trial(self, configuration: Configuration, step: Step, outcome: TrialOutcome) -> Trial:
        """The record of an outcome that is new."""
        score = outcome.score
        return Trial(
            iteration=0 if step == "base" else self._iteration, phase=self.phase, step=step, subset=self._subset,
            configuration=configuration, score=score.value, exact=score.exact,
            feasible=self._passes(score, self.threshold), objective=self._objective_of(configuration),
            samples=score.samples, failure=outcome.failure,
        )  # fmt: skip

    def _rescore(self, index: int, score: Score) -> None:
        """Replace the bound of a trial by a better one or by the score."""
        old = self.trials[index]
        self.trials[index] = old._replace(
            score=score.value, exact=score.exact, feasible=self._passes(score, self.threshold),
            samples=old.samples + score.samples,
        )  # fmt: skip

    def _report(self, step: Step, iteration: int, score: float) -> None:
        if self._on_progress:
            best = self.path[-1].objective if self.path else math.inf
            self._on_progress(Progress(self.phase, step, iteration, score, self.threshold, best))
