"""Fluid Batching's scheduler: stop a batch at an exit and fill it up, if its oldest request can afford that.

Algorithm 1 of the paper, with the guards that its print lacks: an empty queue ends the refilling, and a batch
that all have left is not refilled.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.policies.base import Candidate
from weft.engine.policies.refilling import Flight, Refilling
from weft.kernels import rules


@dataclass(frozen=True)
class Fluid(Refilling):
    """Begins at once with all that waits; refills at exits, without stopping the newcomers for others in turn."""

    def propose(self, flight: Flight, now: int) -> Candidate:
        if not flight.batches:
            return flight.beginnings[-1]
        halted = flight.batches[0]
        if len(flight.batches) > 1 or not flight.beginnings or not self.at_exit(halted):
            return halted
        more = flight.beginnings[-1]
        return more if rules.slack(halted.deadline, now, self._overhead(halted, more), 100) > 0 else halted

    def _overhead(self, halted: Candidate, more: Candidate) -> int:
        """Ticks until the end: newcomers up to this exit, then all; nobody is expected to leave (equation 4)."""
        together = halted.size + more.size
        there = self.rest(more, halted.layer, more.size)
        return rules.fluid_overhead(self.rest(more, 0, more.size), there, self.rest(halted, halted.layer, together))
