"""What work was seen to do beside other work, over what was predicted: small corrections, learned while serving."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

LEAST, MOST = 0.5, 2.0
"""How far what was seen may move a prediction."""
LEARNING = 0.1
"""Weight of the last observation."""
NOTICED = 0.03
"""A factor that has moved by less since it was last told changes nothing."""


class Pair(NamedTuple):
    """Some work on a lane, and what ran beside it on another; streams of the whole are one lane."""

    kind: int
    lane: int
    other: int
    others_lane: int


class SeenSpeeds:
    """A factor for each pair that was seen."""

    def __init__(self) -> None:
        self.version = 0
        """Another number whenever something changed that decisions were made by."""
        self._now: dict[Pair, float] = {}
        self._told: dict[Pair, float] = {}

    def __len__(self) -> int:
        return len(self._told)

    def factor(self, pair: Pair) -> float:
        """By what the predicted speed of a pair's first is multiplied."""
        return self._told.get(pair, 1.0)

    def learn(self, pair: Pair, ratio: float) -> None:
        """It went so many times as fast as predicted without any factor."""
        before = self._now.get(pair, 1.0)
        self._now[pair] = now = before + LEARNING * (min(MOST, max(LEAST, ratio)) - before)
        if abs(now - self._told.get(pair, 1.0)) > NOTICED:
            self._told[pair] = now
            self.version += 1

    def forget(self, kinds: Collection[int]) -> None:
        """These numbers mean other work from now on."""
        for pairs in (self._now, self._told):
            for pair in [each for each in pairs if each.kind in kinds or each.other in kinds]:
                del pairs[pair]
        self.version += 1
