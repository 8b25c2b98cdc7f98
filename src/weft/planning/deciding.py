"""The choice between finalists: a comparison criterion by criterion; of equal finalists, the simplest wins.

All finalists are simulated with the same sets of requests. A finalist is better than another only if it is better by
more than ``ERROR`` with every set with which both were simulated; and by more than ``DIVISION_ERROR`` if they divide
the cores differently, since the times of divisions were measured one after another. Without these margins, every plan
of a workload would have another winner: measured times of a machine differ between measurements, and so do runs with
different requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from weft.planning.divisions import MARGIN

Criterion = Literal["missed", "load", "memory", "wait"]

ORDERS: dict[str, tuple[Criterion, ...]] = {
    "deadlines": ("missed", "load", "memory"),
    "load": ("load", "memory"),
    "memory": ("missed", "memory", "load"),
    "latency": ("missed", "wait", "memory"),
}
"""Objective -> criteria, the most important first."""

ERROR: Mapping[Criterion, float] = {"missed": 0.05, "load": 0.05, "wait": 0.05, "memory": 0.02}
"""Criterion -> relative difference up to which results count as equal: a step of the load (``trials.STEP``), and for
memory its variation between measurements."""

DIVISION_ERROR = MARGIN
"""The same between divisions of the cores, for criteria that depend on times."""


def criteria(objective: str, has_rates: bool) -> tuple[Criterion, ...]:
    """The criteria of an objective; without rates, the load cannot be raised, so that waiting times decide instead."""
    if has_rates:
        return ORDERS[objective]
    order = ORDERS["latency" if objective in ("deadlines", "load") else objective]
    return tuple(criterion for criterion in order if criterion != "load")


class Scores(NamedTuple):
    """The results of an option by criterion, each with a number per set of requests; smaller is better."""

    missed: tuple[float, ...]
    """Share of deadlines missed by the stream that misses most; 0 if the deadlines are kept."""
    load: tuple[float, ...]
    """One over the largest multiple of the asked load that keeps the deadlines."""
    memory: tuple[float, ...]
    wait: tuple[float, ...]
    """The largest ratio of p99 to deadline over the streams."""
    division: tuple[int, int] = (1, 1)
    """Numbers of lanes and of threads per lane."""

    def better(self, criterion: Criterion, than: Scores) -> bool:
        """Whether this option is better by more than the error, with every set of requests that both have."""
        same_times = criterion == "memory" or self.division == than.division
        margin = 1 + (ERROR[criterion] if same_times else DIVISION_ERROR)
        pairs = zip(getattr(self, criterion), getattr(than, criterion), strict=False)
        return all(value < other and value * margin < other for value, other in pairs)

    def first(self, order: Sequence[Criterion]) -> tuple[float, ...]:
        """The results with the first set of requests, which a plan reports, in the order of the criteria."""
        return tuple(getattr(self, criterion)[0] for criterion in order)


class Loss(NamedTuple):
    """Why an option was not taken."""

    by: Criterion
    to: int
    """Index of an option that is better by this criterion, if possible the winner."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The order of options, as indices into the sequence that was compared."""

    winner: int
    equal: tuple[int, ...]
    """Options that are equal to the winner by all criteria, the simplest first."""
    losses: Mapping[int, Loss]
    """All other options; options that lost by a later criterion come first."""

    @property
    def order(self) -> list[int]:
        """All indices, the best option first."""
        return [self.winner, *self.equal, *self.losses]


def decide(order: Sequence[Criterion], scores: Sequence[Scores], simplicity: Callable[[int], Any]) -> Decision:
    """Compare options by each criterion in turn, each time leaving out beaten ones; the simplest that remains wins.

    simplicity: index -> sort key, the simplest first; of equal keys, the earlier index wins.
    """
    remaining = list(range(len(scores)))
    beaten: list[tuple[Criterion, dict[int, list[int]]]] = []  # criterion, and option -> options better by it
    for criterion in order:
        winners_of = {
            option: winners
            for option in remaining
            if (winners := [rival for rival in remaining if scores[rival].better(criterion, scores[option])])
        }
        beaten.append((criterion, winners_of))
        remaining = [option for option in remaining if option not in winners_of]
    winner, *equal = sorted(remaining, key=simplicity)
    losses = {}
    for criterion, winners_of in reversed(beaten):
        for loser in sorted(winners_of, key=lambda option: (scores[option].first(order), simplicity(option))):
            rivals = sorted(winners_of[loser], key=lambda rival: (rival != winner, scores[rival].first(order)))
            losses[loser] = Loss(criterion, rivals[0])
    return Decision(winner, tuple(equal), losses)
