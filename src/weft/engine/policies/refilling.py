"""What policies that refill batches have in common: each stream proposes one step, and the one due first goes.

A stream proposes to go on with a batch in flight, or to begin another one, of any size that fits beside those.
A batch that catches up with another joins it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, NamedTuple

from weft.engine.policies.base import Candidate, LateWork, Policy, Start, Traits, View
from weft.kernels import rules


class Flight(NamedTuple):
    """One stream at one instant."""

    batches: tuple[Candidate, ...]
    """Its batches in flight that stand still, the one that is least far first."""
    beginnings: tuple[Candidate, ...]
    """What could begin, by size: 1, 2, ..."""


@dataclass(frozen=True)
class Refilling(Policy):
    """Fills batches up while they run."""

    traits: ClassVar[Traits] = Traits(
        refills=True,
        by_layer=False,
        late_work=LateWork.AMONG_OTHERS,
        pointless_saturated="the first stream runs for ever, and the others starve",
    )

    def decide(self, view: View) -> Start:
        now = max(view.device.channel_free, view.device.array_free)
        proposals = [self.propose(flight, now) for flight in _flights(view)]
        return Start(min(proposals, key=lambda each: (rules.edf_key(each.deadline, each.arrival), each.stream)))

    def propose(self, flight: Flight, now: int) -> Candidate:
        """The next step of one stream: one of its batches or beginnings."""
        raise TypeError(f"{type(self).__name__} does not say what to propose")

    def rest(self, candidate: Candidate, layer: int, size: int) -> int:
        """Ticks from a layer to the end at a batch size."""
        return self.setting.programs[candidate.program - candidate.size + size].remaining[layer]

    def at_exit(self, candidate: Candidate) -> bool:
        """Whether a batch stands where samples could leave."""
        return candidate.layer in self.setting.programs[candidate.program].exits


def _flights(view: View) -> list[Flight]:
    ordered = sorted(view.candidates, key=lambda each: (each.stream, each.layer == 0, each.layer, each.size))
    flights = []
    for _, group in groupby(ordered, key=lambda each: each.stream):
        found = tuple(group)
        batches = tuple([each for each in found if each.layer])
        flights.append(Flight(batches, found[len(batches) :]))
    return flights
