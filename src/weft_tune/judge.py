"""Scores candidates and picks the best: what is known is not asked again, what cannot win is not finished.

Fast, candidates are scored one after another, and each is asked only for what it needs to be feasible and to beat
the best so far; the likely winners of the last round go first. Faithfully, every candidate is scored in full. Both
pick the same one: equals are told apart by their place in the list, never by when they were scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from weft.base.errors import EvaluationError
from weft_tune.database import Database
from weft_tune.evaluation import Evaluator, Score, Subset
from weft_tune.moves import Move
from weft_tune.numbers.configuration import Configuration
from weft_tune.ranking import Key, Rule
from weft_tune.search_space import SearchSpace, TuningSetting
from weft_tune.trials import (
    Kept,
    Phase,
    Progress,
    Step,
    Told,
    Trial,
    TrialOutcome,
)

OnFailure = Literal["stop", "skip"]


class Point(NamedTuple):
    """A setting with all that is known of it."""

    setting: TuningSetting
    configuration: Configuration
    objective: float
    score: float = math.nan
    """Exact where the point is feasible."""


class Judge:
    """Owns what has been scored; a search asks it and decides nothing about scores itself."""

    def __init__(
        self,
        space: SearchSpace,
        evaluator: Evaluator,
        objective: Callable[[Configuration], float],
        database: Database,
        *,
        faithful: bool = False,
        on_failure: OnFailure = "stop",
        told: Told | None = None,
    ) -> None:
        self.space = space
        self.threshold = math.nan
        self.trials: list[Trial] = []
        self.path: list[Kept] = []
        self.samples: dict[Subset, int] = {"small": 0, "full": 0}
        self.reused = 0
        self._evaluator, self._fingerprint = evaluator, evaluator.fingerprint
        self._database, self._told = database, told
        self._objective, self._objectives = objective, dict[Configuration, float]()
        self._many = faithful or not evaluator.stops_early
        self._skip = on_failure == "skip"
        self.phase: Phase = 1
        self._subset: Subset = "small"
        self._known: dict[tuple[Subset, Configuration], TrialOutcome] = {}
        self._places: dict[tuple[Subset, Configuration], int] = {}
        self._drops: dict[str, float] = {}
        self._iteration = 0

    def base(self, subset: Subset, configuration: Configuration) -> float:
        """Begin to use a subset: the score to which all are compared."""
        self._subset, self.threshold = subset, -math.inf
        skip, self._skip = self._skip, False
        outcome = self._ask(configuration, "base", -math.inf)
        self._skip = skip
        return outcome.score.value

    def point(self, setting: TuningSetting) -> Point:
        """A setting, not yet scored."""
        configuration = self.space.configuration(setting)
        return Point(setting, configuration, self._objective_of(configuration))

    def feasible(self, setting: TuningSetting, step: Step) -> Point | None:
        """The setting with its score, if that reaches the threshold."""
        point = self.point(setting)
        score = self._ask(point.configuration, step, -math.inf if self._many else self.threshold).score
        return point._replace(score=score.value) if self._passes(score, self.threshold) else None

    def scored(self, setting: TuningSetting, step: Step) -> Point | None:
        """The setting with its score, whatever that is; None where there is none."""
        point = self.point(setting)
        score = self._ask(point.configuration, step, -math.inf).score
        return point._replace(score=score.value) if self._passes(score, -math.inf) else None

    def pick(self, moves: Sequence[Move], rule: Rule, step: Step, now: float = math.nan) -> Point | None:
        """The best of the neighbours that the rule accepts; *now* is the score they come from, where it is known."""
        points = [self.point(move.setting) for move in moves]
        self._ask_many(points, step)
        best: tuple[Key, int] | None = None
        for place in self._order(moves, points, rule, now):
            needed = rule.needed(points[place].objective, best and best[0], best is not None and place > best[1])
            score = self._score(points[place], step, needed)
            if score is None:
                continue
            if not math.isnan(now):
                self._drops[moves[place].name] = score.value - now
            if not self._passes(score, rule.floor):
                continue
            points[place] = points[place]._replace(score=score.value)
            key = rule.key(points[place].objective, score.value)
            if best is None or key > best[0] or (key == best[0] and place < best[1]):
                best = key, place
        return None if best is None else points[best[1]]

    def accepted(self, moves: Sequence[Move], rule: Rule, step: Step) -> list[Point]:
        """All neighbours that the rule accepts, the best first."""
        points = [self.point(move.setting) for move in moves]
        self._ask_many(points, step)
        found: list[Point] = []
        for point in points:
            score = self._ask(point.configuration, step, -math.inf if self._many else rule.floor).score
            if self._passes(score, rule.floor):
                found.append(point._replace(score=score.value))
        return sorted(found, key=lambda point: rule.key(point.objective, point.score), reverse=True)

    def keep(self, point: Point, step: Step) -> None:
        """The search goes on from here."""
        self.path.append(Kept(self.phase, step, point.configuration, point.score, point.objective))
        place = self._places[self._subset, point.configuration]
        self.trials[place] = self.trials[place]._replace(chosen=True)

    def _objective_of(self, configuration: Configuration) -> float:
        if configuration not in self._objectives:
            self._objectives[configuration] = self._objective(configuration)
        return self._objectives[configuration]

    def _passes(self, score: Score, floor: float) -> bool:
        return score.exact and score.value >= floor and score.value > -math.inf

    def _order(self, moves: Sequence[Move], points: Sequence[Point], rule: Rule, now: float) -> list[int]:
        """Likely winners first, by what the same moves did last time."""
        places = list(range(len(moves)))
        if self._many or math.isnan(now):
            return places

        def likely(place: int) -> Key:
            return rule.key(points[place].objective, now + self._drops.get(moves[place].name, 0.0))

        return sorted(places, key=likely, reverse=True)

    def _score(self, point: Point, step: Step, needed: float) -> Score | None:
        """None where it need not be known."""
        if self._many:
            return self._ask(point.configuration, step, -math.inf).score
        return None if needed == math.inf else self._ask(point.configuration, step, needed).score

    def _ask(self, configuration: Configuration, step: Step, needed: float) -> TrialOutcome:
        """Get an outcome from memory, from the database, or from the evaluator."""
        key = self._subset, configuration
        if (known := self._known.get(key)) and (known.score.exact or known.score.value < needed):
            return known
        found = self._stored(configuration, needed)
        if found is None:
            found = self._evaluated(configuration, needed)
        return self._noted(configuration, step, found)

    def _ask_many(self, points: Sequence[Point], step: Step) -> None:
        """Score in full and side by side what would otherwise be asked for one by one."""
        if not self._many:
            return
        asked = list(dict.fromkeys(point.configuration for point in points))
        asked = [each for each in asked if (self._subset, each) not in self._known]
        stored = {each: self._stored(each, -math.inf) for each in asked}
        missing = [each for each in asked if stored[each] is None]
        if missing:
            stored |= dict(zip(missing, self._evaluated_many(missing, step), strict=True))
        for each in asked:
            self._noted(each, step, stored[each])

    def _stored(self, configuration: Configuration, needed: float) -> Score | EvaluationError | None:
        found = self._database.find(self._fingerprint, self._subset, configuration, needed)
        if isinstance(found, EvaluationError) and not self._skip:
            return None  # it may work now: the user has had the message
        self.reused += found is not None
        return found

    def _evaluated(self, configuration: Configuration, needed: float) -> Score | EvaluationError:
        found: Score | EvaluationError
        try:
            found = self._evaluator.evaluate(configuration, self._subset, needed)
        except EvaluationError as error:
            found = error
        self._store(configuration, needed, found)
        return found

    def _evaluated_many(self, missing: list[Configuration], step: Step) -> list[Score | EvaluationError]:
        ready: set[int] = set()

        def scored(place: int, score: Score) -> None:
            ready.add(place)
            self._store(missing[place], -math.inf, score)
            self._tell(step, self._iteration + len(ready), score.value)

        found = self._evaluator.evaluate_many(missing, self._subset, scored)
        untold = [place for place in range(len(found)) if place not in ready]
        for place in sorted(untold, key=lambda place: isinstance(found[place], EvaluationError)):
            self._store(missing[place], -math.inf, found[place])  # failures last: they may raise
        return found

    def _store(self, configuration: Configuration, needed: float, found: Score | EvaluationError) -> None:
        if isinstance(found, EvaluationError) and not self._skip:
            raise found
        if isinstance(found, Score) and math.isnan(found.value):
            raise EvaluationError("the score is not a number; check what the evaluation measures")
        self._database.keep(self._fingerprint, self._subset, configuration, needed, found)

    def _noted(self, configuration: Configuration, step: Step, found: Score | EvaluationError | None) -> TrialOutcome:
        """Remember it for this search, and write its trial."""
        assert found is not None
        outcome = (
            TrialOutcome(Score(-math.inf), str(found)) if isinstance(found, EvaluationError) else TrialOutcome(found)
        )
        key = self._subset, configuration
        self._known[key] = outcome
        self.samples[self._subset] += outcome.score.samples
        if key in self._places:
            self._rescored(self._places[key], outcome.score)
        else:
            self._places[key] = len(self.trials)
            self._iteration += step != "base"
            self.trials.append(self._trial(configuration, step, outcome))
        self._tell(step, self._iteration, outcome.score.value)
        return outcome

    def _trial(self, configuration: Configuration, step: Step, outcome: TrialOutcome) -> Trial:
        score = outcome.score
        return Trial(
            iteration=0 if step == "base" else self._iteration, phase=self.phase, step=step, subset=self._subset,
            configuration=configuration, score=score.value, exact=score.exact,
            feasible=self._passes(score, self.threshold), objective=self._objective_of(configuration),
            samples=score.samples, failure=outcome.failure,
        )  # fmt: skip

    def _rescored(self, place: int, score: Score) -> None:
        """What was only bounded before is known better now."""
        old = self.trials[place]
        self.trials[place] = old._replace(
            score=score.value, exact=score.exact, feasible=self._passes(score, self.threshold),
            samples=old.samples + score.samples,
        )  # fmt: skip

    def _tell(self, step: Step, iteration: int, score: float) -> None:
        if self._told:
            best = self.path[-1].objective if self.path else math.inf
            self._told(Progress(self.phase, step, iteration, score, self.threshold, best))
