"""PREMA (HPCA'20): tokens grow with priority and waiting time; of the queries with enough tokens, the shortest goes.

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
        """Choose the shortest of the queries whose tokens reach the highest threshold that any reaches."""
        now = view.device.channel_free
        with_tokens = [(candidate, _tokens(candidate, now)) for candidate in view.candidates]
        threshold = max(rules.level(tokens, candidate.work.whole) for candidate, tokens in with_tokens)
        eligible = [candidate for candidate, tokens in with_tokens if tokens >= threshold * candidate.work.whole]
        return Start(min(eligible, key=lambda candidate: candidate.remaining))


def _tokens(candidate: Candidate, now: int) -> int:
    """Return a candidate's tokens times its time alone on the device: a product that is an integer."""
    whole = candidate.work.whole
    return rules.tokens(candidate.priority, whole, rules.waited(now, candidate.arrival, whole, candidate.remaining))
