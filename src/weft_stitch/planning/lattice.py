"""The best way to cut models into groups, exactly: ``Lattice``, over how many models of each kind are left.

Latency alone is a dynamic program over what is left, in which a group is costed only if it could still beat its own
best cut: a group takes no less than any part of it. Under limits three such programs (least latency, least weights,
least activations) are the bounds of a search that never follows what cannot meet the limits or beat the best so far.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft_stitch.planning.groups import NOTHING, Amounts, Cut, GroupCost, Wish


class Lattice:
    """All amounts up to *whole*; each has a number, and taking a group from what is left is a difference of numbers."""

    def __init__(self, whole: Amounts, cost: Callable[[Amounts], GroupCost]) -> None:
        self._whole, self._cost = whole, cost
        self._units = [math.prod(amount + 1 for amount in whole[:kind]) for kind in range(len(whole))]
        self._full = math.prod(amount + 1 for amount in whole) - 1

    def best(self, wish: Wish) -> list[Cut]:
        """The best cut; if none meets the wish, the fastest and the smallest."""
        if wish.latency_only:
            return [self._fastest()]
        known = _known(self)
        if (found := _LatticeSearch(self, wish, known).best()) is not None:
            return [found]
        extremes = (_LatticeSearch(self, each, known).best() for each in (Wish(), Wish(target_s=math.inf)))
        return [cut for cut in extremes if cut is not None]

    @property
    def full(self) -> int:
        return self._full

    def amounts(self, number: int) -> Amounts:
        return tuple(number // unit % (amount + 1) for unit, amount in zip(self._units, self._whole, strict=True))

    def cost(self, number: int) -> GroupCost:
        return self._cost(self.amounts(number))

    def groups(self, left: int) -> list[int]:
        """All groups out of *left* that have a model of its last kind."""
        amounts = self.amounts(left)
        last = max(kind for kind, amount in enumerate(amounts) if amount)
        found = [0]
        for kind in range(last):
            unit = self._units[kind]
            if amount := amounts[kind]:
                found = [group + taken for taken in range(0, (amount + 1) * unit, unit) for group in found]
        unit = self._units[last]
        return [group + taken for taken in range(unit, (amounts[last] + 1) * unit, unit) for group in found]

    def least(self, values: Sequence[float], join: Callable[[float, float], float]) -> list[float]:
        """The least value of a cut of all that may be left, given those of groups."""
        least = [0.0] * (self.full + 1)
        for left in range(1, self.full + 1):
            least[left] = min([join(values[group], least[left - group]) for group in self.groups(left)])
        return least

    def _fastest(self) -> Cut:
        least = [0.0] * (self.full + 1)
        taken = [0] * (self.full + 1)
        floors = [0.0] * (self.full + 1)
        seconds = [math.inf] * (self.full + 1)
        for left in range(1, self.full + 1):
            found = [(seconds[group] + least[left - group], group) for group in self.groups(left)]
            least[left], taken[left] = min(found)
            floors[left] = max(floors[part] for part in self._parts(left))
            if floors[left] < least[left]:
                floors[left] = self.cost(left).seconds
                if floors[left] < least[left]:
                    least[left], taken[left], seconds[left] = floors[left], left, floors[left]
        return self._traced(taken)

    def _parts(self, number: int) -> list[int]:
        """It without one of its models."""
        pairs = zip(self._units, self.amounts(number), strict=True)
        return [number - unit for unit, amount in pairs if amount]

    def _traced(self, taken: Sequence[int]) -> Cut:
        cut, left = Cut(NOTHING, ()), self.full
        while left:
            group = taken[left]
            cut = Cut(cut.cost.then(self.cost(group)), (*cut.groups, self.amounts(group)))
            left -= group
        return cut


class _GroupCosts(NamedTuple):
    """What each group costs, and the least that can be left to pay, by number."""

    costs: list[GroupCost]
    bounds: list[GroupCost]


def _known(lattice: Lattice) -> _GroupCosts:
    costs = [NOTHING, *(lattice.cost(number) for number in range(1, lattice.full + 1))]
    seconds, weights, activations = ([cost[field] for cost in costs] for field in range(3))
    bounds = zip(
        lattice.least(seconds, operator.add),
        lattice.least(weights, operator.add),
        lattice.least(activations, lambda one, other: max(one, other)),
        strict=True,
    )
    return _GroupCosts(costs, [GroupCost(*each) for each in bounds])


class _LatticeSearch:
    """Depth first, with bounds from programs over one number each."""

    def __init__(self, lattice: Lattice, wish: Wish, known: _GroupCosts) -> None:
        self._lattice, self._wish = lattice, wish
        self._costs, self._bounds = known
        self._ways: dict[int, list[int]] = {}
        self._seen: dict[int, list[GroupCost]] = {}
        self._found: tuple[GroupCost, tuple[int, ...]] | None = None

    def best(self) -> Cut | None:
        """None if no cut meets the wish."""
        self._follow(self._lattice.full, NOTHING, ())
        if self._found is None:
            return None
        cost, groups = self._found
        return Cut(cost, tuple(self._lattice.amounts(group) for group in groups))

    def _follow(self, left: int, cost: GroupCost, groups: tuple[int, ...]) -> None:
        if not left:
            self._found = cost, groups
            return
        seen = self._seen.setdefault(left, [])
        if any(other.covers(cost) for other in seen):
            return
        self._seen[left] = [*(other for other in seen if not cost.covers(other)), cost]
        for group in self._ordered(left):
            then = cost.then(self._costs[group])
            if self._promises(then.then(self._bounds[left - group])):
                self._follow(left - group, then, (*groups, group))

    def _promises(self, bound: GroupCost) -> bool:
        if not self._wish.met(bound):
            return False
        return self._found is None or self._wish.rank(bound) < self._wish.rank(self._found[0])

    def _ordered(self, left: int) -> list[int]:
        """The groups out of *left*, those that promise most first."""
        if left not in self._ways:
            ranked = [
                (self._wish.rank(self._costs[group].then(self._bounds[left - group])), group)
                for group in self._lattice.groups(left)
            ]
            self._ways[left] = [group for _, group in sorted(ranked)]
        return self._ways[left]
