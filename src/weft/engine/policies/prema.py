"""PREMA (HPCA'20): tokens grow with priority and waiting; among those with enough, the shortest rest goes.

Tokens are priority x (1 + time waited / time alone), where time being served does not count as waiting. They are
computed from the clock, so their value does not depend on how often the policy is asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.engine.policies.base import Candidate, Policy, Start, Traits, View
from weft.kernels import rules


@dataclass(frozen=True)
class Prema(Policy):
    """Preempts at every layer; thresholds are the priority levels 1, 3 and 9."""

    traits: ClassVar[Traits] = Traits(for_deadlines=True)

    def decide(self, view: View) -> Start:
        now = view.device.channel_free
        tokens = [_tokens(c, now) for c in view.candidates]
        reached = max(rules.level(own, c.work.whole) for own, c in zip(tokens, view.candidates, strict=True))
        rich = [c for own, c in zip(tokens, view.candidates, strict=True) if own >= reached * c.work.whole]
        return Start(min(rich, key=lambda c: c.remaining))


def _tokens(candidate: Candidate, now: int) -> int:
    """Return the tokens times the query's time alone, which keeps them integers."""
    whole = candidate.work.whole
    return rules.tokens(candidate.priority, whole, rules.waited(now, candidate.arrival, whole, candidate.remaining))
