"""Which finalist a plan takes: compared criterion by criterion, and the simplest of those that are equal.

All finalists are simulated with the same sets of requests. One is better than another only if it is better with every
set that both were simulated with, by more than ``ERROR``: measured times of one machine differ by a few percent from
one measurement to the next, and runs with other requests differ as well. Without that, plans of one workload have
another winner each time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Criterion = Literal["missed", "load", "memory", "wait"]

ORDERS: dict[str, tuple[Criterion, ...]] = {
    "deadlines": ("missed", "load", "memory"),
    "load": ("load", "memory"),
    "memory": ("missed", "memory", "load"),
    "latency": ("missed", "wait", "memory"),
}
"""Objective -> criteria, the most important first."""

ERROR: Mapping[Criterion, float] = {"missed": 0.05, "load": 0.05, "wait": 0.05, "memory": 0.02}
"""Relative differences that do not count: a step of the load (``trials.STEP``), and what memory varies by."""


def criteria(objective: str, has_rates: bool) -> tuple[Criterion, ...]:
    """What decides; how long requests wait where no stream has a rate that could be turned up."""
    if has_rates:
        return ORDERS[objective]
    order = ORDERS["latency" if objective in ("deadlines", "load") else objective]
    return tuple(criterion for criterion in order if criterion != "load")


class Scores(NamedTuple):
    """What the runs of an option came to, a number for each set of requests; smaller is better."""

    missed: tuple[float, ...]
    """Share of deadlines missed by the stream that suffers most; 0 where the deadlines are kept."""
    load: tuple[float, ...]
    """One over the largest multiple of the asked load that keeps the deadlines."""
    memory: tuple[float, ...]
    wait: tuple[float, ...]
    """The p99 over the deadline of the stream where that is largest."""

    def better(self, criterion: Criterion, than: Scores) -> bool:
        """Whether it is better with every set of requests that both have, by more than the error."""
        margin = 1 + ERROR[criterion]
        pairs = zip(getattr(self, criterion), getattr(than, criterion), strict=False)
        return all(mine < theirs and mine * margin < theirs for mine, theirs in pairs)

    def first(self, order: Sequence[Criterion]) -> tuple[float, ...]:
        """What the first set of requests showed, the set that a plan's numbers are from."""
        return tuple(getattr(self, criterion)[0] for criterion in order)


class Loss(NamedTuple):
    """Why an option was not taken."""

    by: Criterion
    to: int
    """The place of an option that is better by that criterion: the winner, if it is."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order of some options, as places in the sequence that was compared."""

    winner: int
    equal: tuple[int, ...]
    """Others that no criterion tells from the winner, the simplest first."""
    losses: Mapping[int, Loss]
    """All others, those that came farthest first."""

    @property
    def order(self) -> list[int]:
        """All places, the best first."""
        return [self.winner, *self.equal, *self.losses]


def decide(order: Sequence[Criterion], scores: Sequence[Scores], simplicity: Callable[[int], Any]) -> Decision:
    """Compare options by each criterion in turn, leave out those that another beats, and take the simplest of the rest.

    simplicity: place -> sort key, the simplest first; keys are distinct or the earlier place wins.
    """
    remaining = list(range(len(scores)))
    beaten: list[tuple[Criterion, dict[int, list[int]]]] = []
    for criterion in order:
        by = {
            place: winners
            for place in remaining
            if (winners := [rival for rival in remaining if scores[rival].better(criterion, scores[place])])
        }
        beaten.append((criterion, by))
        remaining = [place for place in remaining if place not in by]
    winner, *equal = sorted(remaining, key=simplicity)
    losses = {}
    for criterion, by in reversed(beaten):
        for place in sorted(by, key=lambda place: (scores[place].first(order), simplicity(place))):
            rivals = sorted(by[place], key=lambda rival: (rival != winner, scores[rival].first(order)))
            losses[place] = Loss(criterion, rivals[0])
    return Decision(winner, tuple(equal), losses)
