"""What work was seen to do beside other work, over what was predicted: small corrections, learned while serving."""

from __future__ import annotations

from typing import NamedTuple

LEAST, MOST = 0.5, 2.0
"""How far what was seen may move a prediction."""
LEARNING = 0.05
"""Least weight of the last observation; the first ones count alike."""
NOTICED, WAITS = 0.04, 32
"""A factor is told again when it has moved by more, and so often was seen since: whatever was worked out with it has to
be worked out again."""
HOPE = 1.1
"""What a pair that was not seen yet may do, over what was predicted: somewhat more than predictions are off. While
nobody is hurried it is taken to do so, and each way that may be the best is tried."""


class Pair(NamedTuple):
    """Work of a body on a lane, and of which body it ran beside, on another lane; streams of the whole are one lane."""

    body: int
    lane: int
    other: int
    others_lane: int


class SeenSpeeds:
    """A factor for each pair that was seen."""

    def __init__(self) -> None:
        self._now: dict[Pair, float] = {}
        self._waited: dict[Pair, int] = {}
        self._told: dict[Pair, float] = {}

    def __len__(self) -> int:
        return len(self._told)

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._told

    def factor(self, pair: Pair) -> float:
        """By what the predicted speed of a pair's first is multiplied."""
        return self._told.get(pair, 1.0)

    def learn(self, pair: Pair, ratio: float) -> bool:
        """It went so many times as fast as predicted without any factor; whether that changes the factor."""
        before, waited = self._now.get(pair, 1.0), self._waited.get(pair, 0) + 1
        weight = LEARNING if pair in self._told else max(LEARNING, 1 / waited)
        self._now[pair] = now = before + weight * (min(MOST, max(LEAST, ratio)) - before)
        self._waited[pair] = waited
        changes = waited >= WAITS and (pair not in self._told or abs(now - self._told[pair]) > NOTICED)
        if changes:
            self._told[pair], self._waited[pair] = now, 0
        return changes

    def forget(self, body: int) -> None:
        """It is gone, and its number is nobody's any more."""
        for pairs in (self._now, self._told, self._waited):
            for pair in [each for each in pairs if body in (each.body, each.other)]:
                del pairs[pair]
