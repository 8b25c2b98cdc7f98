"""Earliest deadline first, at every layer: the classic of real-time scheduling, blind to the two resources."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.engine.policies.base import Policy, Start, Traits, View
from weft.kernels import rules


@dataclass(frozen=True)
class EarliestDeadline(Policy):
    """Chooses the query that is due first; among equal deadlines, the query that arrived first."""

    traits: ClassVar[Traits] = Traits(for_deadlines=True)

    def decide(self, view: View) -> Start:
        return Start(min(view.candidates, key=lambda c: rules.edf_key(c.deadline, c.arrival)))
