"""Priority classes: the highest class goes first, the earliest deadline first within it.

Ageing: a request that has waited ``patience`` times its own length counts as one class higher, so that a low class is
slow under load but never starves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.engine.policies.base import Candidate, LateWork, OptionRange, Policy, Start, Traits, View
from weft.kernels import rules


@dataclass(frozen=True)
class PriorityClasses(Policy):
    """Highest class first, with ageing; the classes have the priorities 9, 3 and 1."""

    traits: ClassVar[Traits] = Traits(for_deadlines=True, late_work=LateWork.AMONG_OTHERS)
    ranges: ClassVar = {"patience": OptionRange(1, 1_000_000)}

    patience: int = 20
    """A request counts as one class higher for every multiple of *patience* times its own length that it has waited."""

    def decide(self, view: View) -> Start:
        now = max(view.device.channel_free, view.device.array_free)
        return Start(min(view.candidates, key=lambda c: (-self._rank(c, now), rules.edf_key(c.deadline, c.arrival))))

    def _rank(self, candidate: Candidate, now: int) -> int:
        """Return the priority, times three for every class that a request has climbed by ageing."""
        waited = rules.waited(now, candidate.arrival, candidate.work.whole, candidate.remaining)
        return rules.rank(candidate.priority, waited, candidate.work.whole, self.patience)
