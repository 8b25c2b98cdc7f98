"""What is said of groups of models: ``GroupCost``, ``Cut``, ``Wish``, by which groupings are judged, and ``Unmet``."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from weft.base.errors import StitchError

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
        """What costs are sorted by: lower is better."""
        return (cost.seconds, cost.bytes) if self.target_s is None else (cost.bytes, cost.seconds)

    @property
    def latency_only(self) -> bool:
        return self.cap_bytes is None and self.target_s is None


class Unmet(StitchError):
    """No grouping does what was wished; what comes nearest is told."""

    def __init__(self, wish: Wish, smallest: GroupCost, fastest: GroupCost) -> None:
        self.wish, self.smallest, self.fastest = wish, smallest, fastest
        least = f"the smallest takes {size(smallest.bytes)} ({_ms(smallest.seconds)})"
        soonest = f"the fastest takes {_ms(fastest.seconds)} ({size(fastest.bytes)})"
        if wish.cap_bytes is None or wish.target_s is None:
            by_size = wish.cap_bytes is not None
            limit = f"fits {size(wish.cap_bytes)}" if wish.cap_bytes is not None else f"takes {_ms(wish.target_s or 0)}"
            way_out = f"{least}: raise the memory cap" if by_size else f"{soonest}: raise the latency target"
            super().__init__(f"no grouping {limit}; {way_out}")
            return
        super().__init__(
            f"no grouping fits {size(wish.cap_bytes)} in {_ms(wish.target_s)}; {least}, {soonest}: "
            "raise the memory cap or the latency target"
        )


def size(count: float) -> str:
    """Bytes in the units that sizes are given in, powers of 1024, rounded up so that what is named suffices."""
    for unit, name in ((2**30, "g"), (2**20, "m"), (2**10, "k")):
        if count >= unit:
            return f"{ceil(count / unit * 100) / 100:g}{name}"
    return f"{ceil(count)} bytes"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
