"""Fluid Batching's scheduler: pause a batch at an exit and refill it, if its most urgent request has the slack.

Algorithm 1 of the paper, with two guards that the printed version lacks: an empty queue ends the refilling, and a batch
without requests is not refilled.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.policies.base import Candidate
from weft.engine.policies.refilling import Flight, Refilling
from weft.kernels import rules


@dataclass(frozen=True)
class Fluid(Refilling):
    """Begins with all waiting requests at once, and refills at exits; a batch that catches up is not paused again."""

    def propose(self, flight: Flight, now: int) -> Candidate:
        if not flight.batches:
            return flight.beginnings[-1]
        halted = flight.batches[0]
        if len(flight.batches) > 1 or not flight.beginnings or not self.at_exit(halted):
            return halted
        more = flight.beginnings[-1]
        return more if rules.slack(halted.deadline, now, self._overhead(halted, more), 100) > 0 else halted

    def _overhead(self, halted: Candidate, more: Candidate) -> int:
        """Return the ticks to the end if the newcomers *more* join the batch *halted* at its exit (equation 4)."""
        new_total = self.rest(more, 0, more.size)
        new_after_exit = self.rest(more, halted.layer, more.size)
        merged_after_exit = self.rest(halted, halted.layer, halted.size + more.size)
        return rules.fluid_overhead(new_total, new_after_exit, merged_after_exit)
