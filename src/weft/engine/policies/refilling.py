"""Base of policies that refill batches: a step is proposed for each stream; the step with the first deadline is issued.

A step goes on with a batch in flight, or begins a batch of any size that could be merged with those in flight. A batch
that catches up with another is merged with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

from weft.engine.policies.base import Candidate, LateWork, Policy, Start, Traits, View
from weft.kernels import rules


class Flight(NamedTuple):
    """The candidates of one stream at one instant."""

    batches: tuple[Candidate, ...]
    """Its batches in flight that are not running, the batch at the earliest layer first."""
    beginnings: tuple[Candidate, ...]
    """The batches that could begin, by size: 1, 2, ..."""


@dataclass(frozen=True)
class Refilling(Policy):
    """Refills batches while they run; a subclass implements ``propose``."""

    traits: ClassVar[Traits] = Traits(
        refills=True,
        by_layer=False,
        by_events=False,  # batches meet where they have paused, and a batch that does not pause passes the others
        late_work=LateWork.AMONG_OTHERS,
        pointless_saturated="the first stream runs for ever, and the others starve",
    )

    def decide(self, view: View) -> Start:
        now = max(view.device.channel_free, view.device.array_free)
        proposals = [self.propose(flight, now) for flight in _flights(view)]
        return Start(min(proposals, key=lambda step: (rules.edf_key(step.deadline, step.arrival), step.stream)))

    def propose(self, flight: Flight, now: int) -> Candidate:
        """Choose the next step of one stream: one of its batches or beginnings."""
        raise TypeError(f"{type(self).__name__} does not say what to propose")

    def rest(self, candidate: Candidate, layer: int, size: int) -> int:
        """Return the ticks from a layer to the end if a candidate's batch had another size."""
        return self.setting.programs[candidate.program - candidate.size + size].remaining[layer]

    def at_exit(self, candidate: Candidate) -> bool:
        """Return whether a batch is at an early exit."""
        return candidate.layer in self.setting.programs[candidate.program].exits


def _flights(view: View) -> list[Flight]:
    """Return the candidates grouped by stream."""
    ordered = sorted(view.candidates, key=lambda head: (head.stream, head.layer == 0, head.layer, head.size))
    flights = []
    for _, group in groupby(ordered, key=lambda head: head.stream):
        heads = tuple(group)
        batches = tuple([head for head in heads if head.layer])
        flights.append(Flight(batches, heads[len(batches) :]))
    return flights
