"""PREMA (HPCA'20): tokens grow with priority and waiting; among those with enough, the shortest rest goes.

Tokens are priority x (1 + time waited / time alone), where waiting excludes being served. That is the
token's value at any moment, so it does not depend on how often anybody looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.policies.base import Candidate, Policy, Start, View

THRESHOLDS = (9, 3, 1)


@dataclass(frozen=True)
class Prema(Policy):
    """Preempts at every layer; thresholds are the priority levels 1, 3 and 9."""

    for_deadlines: ClassVar[bool] = True

    def decide(self, view: View) -> Start:
        now = view.device.channel_free
        reached = next(
            (t for t in THRESHOLDS if any(_tokens(c, now) >= t * c.whole for c in view.candidates)), THRESHOLDS[-1]
        )
        rich = [c for c in view.candidates if _tokens(c, now) >= reached * c.whole]
        return Start(min(rich, key=lambda c: c.remaining))


def _tokens(candidate: Candidate, now: int) -> int:
    """Tokens times the query's time alone, to stay in whole numbers."""
    waited = max(0, now - candidate.arrival - (candidate.whole - candidate.remaining))
    return candidate.priority * (candidate.whole + waited)
