"""Which candidate is best, and what a candidate must score to become it.

A rule has a ``floor`` below which nothing is accepted, a ``key`` that is larger for a better candidate and grows with
its score, and ``needed``: the least score at which a candidate with some objective could still win.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

Key = tuple[float, ...]
SLACK = 1e-9
"""Taken off what is needed, so that rounding in a division never stops a winner; relative to scores above one."""


class Rule(Protocol):
    """A way to choose."""

    @property
    def floor(self) -> float: ...

    def key(self, objective: float, score: float) -> Key: ...

    def needed(self, objective: float, best: Key | None, later: bool) -> float:
        """The score that beats *best*, or equals it if the candidate is not *later*; infinite where none would do."""
        ...


@dataclass(frozen=True, slots=True)
class HighestScore:
    """The most accurate one; ties go to the first."""

    floor: float

    def key(self, objective: float, score: float) -> Key:
        return (score,)

    def needed(self, objective: float, best: Key | None, later: bool) -> float:
        if best is None:
            return self.floor
        return max(self.floor, math.nextafter(best[0], math.inf) if later else best[0])


@dataclass(frozen=True, slots=True)
class MostGainPerLoss:
    """The one that lowers the objective most for what it costs in score.

    Where nothing is lost the ratio is infinite; those are told apart by their gain, then by their score. Candidates
    that gain nothing come last.
    """

    floor: float
    objective: float
    score: float
    """The score of where the candidates come from."""

    def key(self, objective: float, score: float) -> Key:
        gain, loss = self.objective - objective, self.score - score
        if gain <= 0:
            return (0, 0, gain, score)
        return (2, 0, gain, score) if loss <= 0 else (1, gain / loss, gain, score)

    def needed(self, objective: float, best: Key | None, later: bool) -> float:
        gain = self.objective - objective
        rank = 0 if gain <= 0 else 1
        if best is None or best[0] < rank:
            return self.floor
        if best[0] == 2:
            return self._beside(gain, best, later, self.score) if rank else math.inf
        if rank == 0:
            return math.inf if best[0] == 1 else self._beside(gain, best, later, self.floor)
        return max(self.floor, self.score - gain / best[1] - SLACK * max(1.0, abs(self.score)))

    def _beside(self, gain: float, best: Key, later: bool, enough: float) -> float:
        """Among equals but for gain and score."""
        if gain != best[2]:
            return math.inf if gain < best[2] else max(self.floor, enough)
        return max(self.floor, enough, math.nextafter(best[3], math.inf) if later else best[3])
