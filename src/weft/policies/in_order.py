"""Policies that never interleave layers: whole queries, one after another.

They differ in whose query is next and in how far fetching may run ahead.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.policies.base import UNBOUNDED_ROUNDS, Candidate, Policy, Start, View
from weft.policies.fairness import Band


def _continued(view: View) -> Candidate | None:
    """The query that was served last, if it is not done."""
    begun = [candidate for candidate in view.candidates if candidate.layer > 0]
    return max(begun, key=lambda candidate: candidate.last_issued) if begun else None


@dataclass(frozen=True)
class InOrder(Policy):
    """Whole queries: a mix is kept to the round, because no query is cut for it."""

    @property
    def band(self) -> Band | None:
        return Band(self.setting.mix, max(1.0, self.setting.max_lag)) if self.setting.mix else None


@dataclass(frozen=True)
class Fifo(InOrder):
    """One model at a time with eager prefetch: by arrival; where all queries wait from the start, model by model."""

    def decide(self, view: View) -> Start:
        return Start(_continued(view) or min(view.candidates, key=self._turn))

    def _turn(self, candidate: Candidate) -> tuple[int, int, int]:
        return candidate.arrival, candidate.query // self.setting.rounds, candidate.stream


@dataclass(frozen=True)
class Fair(InOrder):
    """One model at a time, every model the same share of the time (Layerweaver, section IV-B)."""

    def decide(self, view: View) -> Start:
        return Start(_continued(view) or min(view.candidates, key=self._turn))

    def _turn(self, candidate: Candidate) -> tuple[int, int]:
        if self.setting.rounds == UNBOUNDED_ROUNDS:  # requests come and go: whoever had least
            return candidate.served, candidate.stream
        programs = self.setting.programs
        served = candidate.query * programs[candidate.stream].total_work
        everything = self.setting.rounds * sum(program.total_work for program in programs)
        return served * len(programs) // everything, candidate.stream


@dataclass(frozen=True)
class RoundRobin(InOrder):
    """A query of every model in turn, with eager prefetch: the next model's weights arrive under this one's compute."""

    def decide(self, view: View) -> Start:
        return Start(_continued(view) or min(view.candidates, key=lambda c: (c.query, c.stream)))


@dataclass(frozen=True)
class DoubleBuffer(InOrder):
    """``fifo``, but a layer's fetch waits until the layer before it computes: AI-MT's baseline."""

    def decide(self, view: View) -> Start:
        return Start(Fifo(self.setting).decide(view).candidate, not_before=view.device.array_began)
