"""What is said of groups of models: ``GroupCost``, ``Cut``, and ``Wish``, by which groupings are judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

Amounts = tuple[int, ...]
"""How many models of each kind."""


class GroupCost(NamedTuple):
    """What a group of models takes when it is stitched."""

    seconds: float
    weight_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes

    def then(self, other: GroupCost) -> GroupCost:
        """Both groups, one after the other."""
        return GroupCost(
            self.seconds + other.seconds,
            self.weight_bytes + other.weight_bytes,
            max(self.activation_bytes, other.activation_bytes),
        )

    def covers(self, other: GroupCost) -> bool:
        """Nothing of it is worse than the other's."""
        return self[0] <= other[0] and self[1] <= other[1] and self[2] <= other[2]


NOTHING = GroupCost(0.0, 0.0, 0.0)


class Cut(NamedTuple):
    """Models cut into groups."""

    cost: GroupCost
    groups: tuple[Amounts, ...]


@dataclass(frozen=True, slots=True)
class Wish:
    """Fewest bytes that meet a target, else least latency under a cap."""

    cap_bytes: float | None = None
    target_s: float | None = None

    def met(self, cost: GroupCost) -> bool:
        return (self.cap_bytes is None or cost.bytes <= self.cap_bytes) and (
            self.target_s is None or cost.seconds <= self.target_s
        )

    def rank(self, cost: GroupCost) -> tuple[float, float]:
        """Lower is better."""
        return (cost.seconds, cost.bytes) if self.target_s is None else (cost.bytes, cost.seconds)

    @property
    def latency_only(self) -> bool:
        return self.cap_bytes is None and self.target_s is None
