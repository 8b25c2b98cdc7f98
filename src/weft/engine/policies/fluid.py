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
        """Refill the batch at an exit if it has the slack for that; otherwise go on with the earliest batch."""
        if not flight.batches:
            return flight.beginnings[-1]
        paused = flight.batches[0]
        if len(flight.batches) > 1 or not flight.beginnings or not self.at_exit(paused):
            return paused
        newcomers = flight.beginnings[-1]
        slack = rules.slack(paused.deadline, now, self._overhead(paused, newcomers), percent=100)
        return newcomers if slack > 0 else paused

    def _overhead(self, paused: Candidate, newcomers: Candidate) -> int:
        """Return the ticks to the end if *newcomers* join the batch *paused* at its exit (equation 4)."""
        new_total = self.rest(newcomers, 0, newcomers.size)
        new_after_exit = self.rest(newcomers, paused.layer, newcomers.size)
        merged_after_exit = self.rest(paused, paused.layer, paused.size + newcomers.size)
        return rules.fluid_overhead(new_total, new_after_exit, merged_after_exit)
