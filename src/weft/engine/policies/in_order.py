"""Policies that never interleave layers: whole queries, one after another.

They differ in whose query is next and in how far fetching may run ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.engine.policies.base import UNBOUNDED_ROUNDS, Candidate, Policy, Start, View
from weft.engine.policies.fairness import Band
from weft.kernels import rules


@dataclass(frozen=True)
class InOrder(Policy):
    """Base of policies that run whole queries; a band is at least a round wide, because no query is interrupted."""

    @property
    def band(self) -> Band | None:
        return Band(self.setting.mix, max(1.0, self.setting.max_lag)) if self.setting.mix else None


@dataclass(frozen=True)
class Fifo(InOrder):
    """One model at a time with eager prefetch: requests by arrival; saturated streams one after another."""

    def decide(self, view: View) -> Start:
        return Start(min(view.candidates, key=self._turn))

    def _turn(self, candidate: Candidate) -> tuple[int, int, int, int]:
        turn = candidate.query // self.setting.rounds
        return rules.fifo_key(_resumes(candidate), candidate.arrival, turn, candidate.stream)


@dataclass(frozen=True)
class Fair(InOrder):
    """One model at a time; every model gets the same share of the time (Layerweaver, section IV-B)."""

    def decide(self, view: View) -> Start:
        return Start(min(view.candidates, key=lambda c: (_resumes(c), self._share(c), c.stream)))

    def _share(self, candidate: Candidate) -> int:
        """Return how much service the candidate's stream has had; the stream with the least is next."""
        if self.setting.rounds == UNBOUNDED_ROUNDS:  # requests, not saturated streams
            return candidate.work.served
        return self.share(candidate.stream, candidate.query)

    def share(self, stream: int, queries: int) -> int:
        """Return how often a saturated stream has used up its equal part of a run's time, after *queries* queries."""
        programs = self.setting.programs
        served = queries * programs[stream].total_work
        run_work = self.setting.rounds * sum(program.total_work for program in programs)
        return served * len(programs) // run_work


@dataclass(frozen=True)
class RoundRobin(InOrder):
    """A query of every model in turn, with eager prefetch: weights of the next model are fetched while one computes."""

    def decide(self, view: View) -> Start:
        return Start(min(view.candidates, key=lambda c: (_resumes(c), c.query, c.stream)))


@dataclass(frozen=True)
class DoubleBuffer(InOrder):
    """``fifo``, but the fetch of a layer waits until the previous layer begins to compute: AI-MT's baseline."""

    def decide(self, view: View) -> Start:
        return Start(Fifo(self.setting).decide(view).candidate, not_before=view.device.array_began)


def _resumes(candidate: Candidate) -> int:
    """Return the sort key that puts begun queries first, the one served last before all others."""
    return rules.resumes(candidate.layer, candidate.last_issued)
