"""Which models to stitch together: ``group`` cuts many into groups that run one after another.

Stitching all of them is not always best: some forms do more work the more models there are, and memory may be short.
The latencies of the groups add up, and so do their weights; of their activations the largest counts. This is Algorithm
1 of the paper (Wang et al., "Stitching Weight-Shared Deep Neural Networks for Efficient Multitask Inference on GPU",
SECON 2022) with its gaps filled. Models of one *kind* are interchangeable: a set of models is given by how many it has
of each kind (``Amounts``), and a *cut* divides it into groups. Models of a single kind are grouped by dynamic
programming over group sizes, from one on. Few models of several kinds are grouped by dynamic programming over subsets,
in which equal groups are costed once, and groups that cannot be best not at all. Many models of several kinds are dealt
out in snake order, into every number of groups.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from weft.base.errors import StitchError

Amounts = tuple[int, ...]
"""How many models of each kind a set of models has. Models of one kind are interchangeable."""


class GroupCost(NamedTuple):
    """Latency and memory of a stitched group of models; groups run one after another."""

    seconds: float
    weight_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.activation_bytes

    def then(self, other: GroupCost) -> GroupCost:
        """The cost of both groups, run one after the other."""
        return GroupCost(
            self.seconds + other.seconds,
            self.weight_bytes + other.weight_bytes,
            max(self.activation_bytes, other.activation_bytes),
        )

    def covers(self, other: GroupCost) -> bool:
        """Whether this cost is at most *other*'s in every field (Pareto dominance)."""
        return self[0] <= other[0] and self[1] <= other[1] and self[2] <= other[2]


NOTHING = GroupCost(0.0, 0.0, 0.0)


class Cut(NamedTuple):
    """A division of models into groups, with the total cost."""

    cost: GroupCost
    groups: tuple[Amounts, ...]


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective: fewest bytes within a latency target, else least latency within a memory cap."""

    cap_bytes: float | None = None
    """Limit on weights and activations."""
    target_s: float | None = None
    """Limit on the latency."""

    def met(self, cost: GroupCost) -> bool:
        return (self.cap_bytes is None or cost.bytes <= self.cap_bytes) and (
            self.target_s is None or cost.seconds <= self.target_s
        )

    def rank(self, cost: GroupCost) -> tuple[float, float]:
        """The key by which costs are sorted; lower is better."""
        return (cost.seconds, cost.bytes) if self.target_s is None else (cost.bytes, cost.seconds)

    @property
    def latency_only(self) -> bool:
        return self.cap_bytes is None and self.target_s is None


class LimitsUnmet(StitchError):
    """No grouping is within the limits; the message names the smallest and the fastest grouping."""

    def __init__(self, objective: Objective, smallest: GroupCost, fastest: GroupCost) -> None:
        self.objective, self.smallest, self.fastest = objective, smallest, fastest
        cap, target = objective.cap_bytes, objective.target_s
        smallest_text = f"the smallest takes {size(smallest.bytes)} ({_ms(smallest.seconds)})"
        fastest_text = f"the fastest takes {_ms(fastest.seconds)} ({size(fastest.bytes)})"
        if cap is None or target is None:
            limit = f"fits {size(cap)}" if cap is not None else f"takes {_ms(target or 0)}"
            by_size = cap is not None
            way_out = (
                f"{smallest_text}: raise the memory cap" if by_size else f"{fastest_text}: raise the latency target"
            )
            super().__init__(f"no grouping {limit}; {way_out}")
            return
        super().__init__(
            f"no grouping fits {size(cap)} in {_ms(target)}; {smallest_text}, {fastest_text}: "
            "raise the memory cap or the latency target"
        )


def size(count: float) -> str:
    """Bytes as text in powers of 1024, rounded up so that a limit of the printed size suffices."""
    for unit, name in ((2**30, "g"), (2**20, "m"), (2**10, "k")):
        if count >= unit:
            return f"{ceil(count / unit * 100) / 100:g}{name}"
    return f"{ceil(count)} bytes"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


class Lattice:
    """All subsets of a set of models, each given as a count of each kind of model (``Amounts``).

    Each subset also has a number, whose digits in mixed radix are its counts. So removing a group from a subset
    subtracts the group's number from the subset's.
    """

    def __init__(self, all_amounts: Amounts, cost: Callable[[Amounts], GroupCost]) -> None:
        """*all_amounts*: the counts of all models. *cost*: returns the cost of a subset as one group."""
        self._all_amounts, self._cost = all_amounts, cost
        # kind -> the place value of its digit, by which a subset's number grows with one more model of the kind
        self._units = [math.prod(amount + 1 for amount in all_amounts[:kind]) for kind in range(len(all_amounts))]
        self._full = math.prod(amount + 1 for amount in all_amounts) - 1

    def best(self, objective: Objective) -> list[Cut]:
        """Return the best cut as a list of one; if none is within the limits, the smallest and the fastest cut."""
        if objective.latency_only:
            return [self._fastest_cut()]
        costed = _group_costs(self)
        if (best := _LatticeSearch(self, objective, costed).best()) is not None:
            return [best]
        # without limits: the first objective ranks by latency, the second by bytes
        extremes = (_LatticeSearch(self, goal, costed).best() for goal in (Objective(), Objective(target_s=math.inf)))
        return [cut for cut in extremes if cut is not None]

    @property
    def full(self) -> int:
        """The number of the set of all models."""
        return self._full

    def amounts(self, number: int) -> Amounts:
        """The amounts of the subset *number*."""
        return tuple(number // unit % (amount + 1) for unit, amount in zip(self._units, self._all_amounts, strict=True))

    def cost(self, number: int) -> GroupCost:
        """The cost of the subset *number* as one group."""
        return self._cost(self.amounts(number))

    def groups(self, remaining: int) -> list[int]:
        """Numbers of the groups to take from *remaining*: with a model of its last kind, so each cut is tried once."""
        amounts = self.amounts(remaining)
        last = max(kind for kind, amount in enumerate(amounts) if amount)
        groups = [0]
        for kind in range(last):
            unit = self._units[kind]
            if amount := amounts[kind]:  # each choice of 0 to *amount* models of this kind
                groups = [group + taken for taken in range(0, (amount + 1) * unit, unit) for group in groups]
        unit = self._units[last]
        return [group + taken for taken in range(unit, (amounts[last] + 1) * unit, unit) for group in groups]

    def least_cut_values(self, values: Sequence[float], join: Callable[[float, float], float]) -> list[float]:
        """For every subset, the least value of any division of it into groups, by dynamic programming.

        *values*: of each subset taken as one group. *join*: the value of a group and the value of the remaining groups
        -> the value of both.
        """
        least = [0.0] * (self.full + 1)
        for subset in range(1, self.full + 1):
            least[subset] = min([join(values[group], least[subset - group]) for group in self.groups(subset)])
        return least

    def _fastest_cut(self) -> Cut:
        """The cut of least latency, by dynamic programming.

        Groups are costed lazily: as one group, a subset takes at least as long as its slowest part (*floors*). If a cut
        of the subset is as fast as that, the subset need not be costed.
        """
        least = [0.0] * (self.full + 1)
        first_groups = [0] * (self.full + 1)  # the first group of the fastest cut
        floors = [0.0] * (self.full + 1)  # a lower bound on the latency as one group
        seconds = [math.inf] * (self.full + 1)  # the latency as one group, where that is the fastest cut
        for subset in range(1, self.full + 1):
            options = [(seconds[group] + least[subset - group], group) for group in self.groups(subset)]
            least[subset], first_groups[subset] = min(options)
            floors[subset] = max(floors[part] for part in self._parts(subset))
            if floors[subset] < least[subset]:
                floors[subset] = self.cost(subset).seconds
                if floors[subset] < least[subset]:
                    least[subset] = seconds[subset] = floors[subset]
                    first_groups[subset] = subset
        return self._trace_cut(first_groups)

    def _parts(self, number: int) -> list[int]:
        """The numbers of the subsets with one model fewer, one for each kind that is present."""
        pairs = zip(self._units, self.amounts(number), strict=True)
        return [number - unit for unit, amount in pairs if amount]

    def _trace_cut(self, first_groups: Sequence[int]) -> Cut:
        """Build the cut of all models from *first_groups*, the first group of the best cut of every subset."""
        cut, remaining = Cut(NOTHING, ()), self.full
        while remaining:
            group = first_groups[remaining]
            cut = Cut(cut.cost.then(self.cost(group)), (*cut.groups, self.amounts(group)))
            remaining -= group
        return cut


class _GroupCosts(NamedTuple):
    """The costs and bounds of all subsets, by number."""

    costs: list[GroupCost]
    """Subset -> its cost as one group."""
    bounds: list[GroupCost]
    """Subset -> a lower bound on the cost of any cut of it."""


def _group_costs(lattice: Lattice) -> _GroupCosts:
    """Cost every subset as one group, and bound the cost of its cuts, for each field of the cost independently."""
    costs = [NOTHING, *(lattice.cost(number) for number in range(1, lattice.full + 1))]
    seconds, weights, activations = zip(*costs, strict=True)
    bounds = zip(
        lattice.least_cut_values(seconds, operator.add),
        lattice.least_cut_values(weights, operator.add),
        lattice.least_cut_values(activations, lambda first, second: max(first, second)),
        strict=True,
    )
    return _GroupCosts(costs, [GroupCost(*bound) for bound in bounds])


class _LatticeSearch:
    """Depth-first search for the best cut, pruned by the bounds and by Pareto dominance."""

    def __init__(self, lattice: Lattice, objective: Objective, costed: _GroupCosts) -> None:
        self._lattice, self._objective = lattice, objective
        self._costs, self._bounds = costed.costs, costed.bounds
        self._ordered_groups: dict[int, list[int]] = {}
        """Subset -> its groups, the most promising first."""
        self._seen: dict[int, list[GroupCost]] = {}
        """Remaining subset -> the Pareto-optimal costs with which it was reached."""
        self._best_cut: tuple[GroupCost, tuple[int, ...]] | None = None
        """The best cut so far, as cost and groups; None before the first."""

    def best(self) -> Cut | None:
        """Return the best cut; None if none is within the limits."""
        self._extend(self._lattice.full, NOTHING, ())
        if self._best_cut is None:
            return None
        cost, groups = self._best_cut
        return Cut(cost, tuple(self._lattice.amounts(group) for group in groups))

    def _extend(self, remaining: int, cost: GroupCost, groups: tuple[int, ...]) -> None:
        """Add every group out of the subset *remaining* to the cut *groups*, which costs *cost*."""
        if not remaining:
            self._best_cut = cost, groups
            return
        seen = self._seen.setdefault(remaining, [])
        if any(other.covers(cost) for other in seen):
            return
        self._seen[remaining] = [*(other for other in seen if not cost.covers(other)), cost]
        for group in self._order_groups(remaining):
            extended = cost.then(self._costs[group])
            if self._can_improve(extended.then(self._bounds[remaining - group])):
                self._extend(remaining - group, extended, (*groups, group))

    def _can_improve(self, bound: GroupCost) -> bool:
        """Whether *bound* is within the limits and better than the best cut so far."""
        if not self._objective.met(bound):
            return False
        return self._best_cut is None or self._objective.rank(bound) < self._objective.rank(self._best_cut[0])

    def _order_groups(self, remaining: int) -> list[int]:
        """The groups out of *remaining*, those with the best bounds first."""
        if remaining not in self._ordered_groups:
            ranked = [
                (self._objective.rank(self._costs[group].then(self._bounds[remaining - group])), group)
                for group in self._lattice.groups(remaining)
            ]
            self._ordered_groups[remaining] = [group for _, group in sorted(ranked)]
        return self._ordered_groups[remaining]


FEW = 15
"""Up to this many unequal models all groupings are searched: memory and time grow as 2^n."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of groups of equal models that are costed; others are interpolated, and costed once they are chosen."""

Costs = Callable[[tuple[int, ...]], GroupCost]
"""Returns the cost of a group of models, given by their numbers."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of models, by the models' numbers, with the total cost."""

    groups: tuple[tuple[int, ...], ...]
    cost: GroupCost


def group(
    kinds: Sequence[Hashable],
    costs: Costs,
    *,
    cap_bytes: float | None = None,
    target_s: float | None = None,
    few: int = FEW,
) -> Grouping:
    """Divide models into groups; ``LimitsUnmet`` if no grouping is within the limits.

    *kinds*: a key for each model; models of equal keys (structure, widths, batch) are interchangeable, so that *costs*
    is called once for equal groups. With *target_s* the grouping of fewest bytes that meets it is chosen, else that of
    least latency. *cap_bytes* limits weights and activations. Above *few* unequal models, some groupings are tried.
    """
    if not kinds:
        raise StitchError("there are no models to group; give at least one")
    objective = Objective(cap_bytes, target_s)
    costed = _CostedModels(kinds, costs)
    if len(costed.members) == 1:
        cuts = _cut_equal_models(costed, objective)
    elif len(kinds) <= few:
        cuts = Lattice(costed.all_amounts, costed.cost).best(objective)
    else:
        cuts = _snake_cuts(costed)
    return costed.numbered(_choose_cut(cuts, objective))


def _choose_cut(cuts: Sequence[Cut], objective: Objective) -> Cut:
    """The best cut within the limits; of equal ones that of fewest groups. ``LimitsUnmet`` if there is none."""
    fitting = [cut for cut in cuts if objective.met(cut.cost)]
    if fitting:
        return min(fitting, key=lambda cut: (objective.rank(cut.cost), len(cut.groups), cut.groups))
    costs = [cut.cost for cut in cuts]
    raise LimitsUnmet(objective, min(costs, key=lambda cost: cost.bytes), min(costs, key=lambda cost: cost.seconds))


class _CostedModels:
    """Models by kind, with a cache of the costs of groups."""

    def __init__(self, kinds: Sequence[Hashable], costs: Costs) -> None:
        distinct = dict.fromkeys(kinds)
        self.members = [[number for number, other in enumerate(kinds) if other == kind] for kind in distinct]
        """For each kind, the numbers of its models."""
        self.all_amounts: Amounts = tuple(len(models) for models in self.members)
        """The amounts of all models."""
        self._costed: dict[Amounts, GroupCost] = {}
        """Amounts -> the cost of their group."""
        self._costs = costs

    def cost(self, amounts: Amounts) -> GroupCost:
        """The cost of a group with these amounts."""
        if amounts not in self._costed:
            pairs = zip(self.members, amounts, strict=True)
            models = [number for members, amount in pairs for number in members[:amount]]
            self._costed[amounts] = self._costs(tuple(sorted(models)))
        return self._costed[amounts]

    def numbered(self, cut: Cut) -> Grouping:
        """The grouping of *cut* by models' numbers, which are given out in ascending order, to larger groups first."""
        unassigned = [list(models) for models in self.members]
        groups = []
        for amounts in sorted(cut.groups, key=lambda counts: (-sum(counts), counts)):
            chosen = [unassigned[kind].pop(0) for kind, amount in enumerate(amounts) for _ in range(amount)]
            groups.append(tuple(sorted(chosen)))
        return Grouping(tuple(groups), cut.cost)


def _cut_equal_models(costed: _CostedModels, objective: Objective) -> list[Cut]:
    """The best cuts of equal models.

    Costs of most group sizes are interpolated. Chosen sizes are then costed, until no interpolated one is chosen.
    """
    (count,) = costed.all_amounts
    samples = {size: costed.cost((size,)) for size in sorted({size for size in SIZES if size < count} | {count})}
    lattice = Lattice((count,), lambda amounts: interpolate(samples, *amounts))
    while True:
        cuts = lattice.best(objective)
        interpolated = {size for cut in cuts for (size,) in cut.groups} - samples.keys()
        if not interpolated:
            return cuts
        samples.update({size: costed.cost((size,)) for size in sorted(interpolated)})


def interpolate(samples: Mapping[int, GroupCost], size: int) -> GroupCost:
    """The cost of a group of *size* models, on the line between the next smaller and the next larger sampled size."""
    if size in samples:
        return samples[size]
    sizes = sorted(samples)
    after = bisect_left(sizes, size)
    low, high = sizes[after - 1], sizes[after]
    fraction = (size - low) / (high - low)
    pairs = zip(samples[low], samples[high], strict=True)
    return GroupCost(*(smaller + fraction * (larger - smaller) for smaller, larger in pairs))


def _snake_cuts(costed: _CostedModels) -> list[Cut]:
    """One cut for every number of groups: models are dealt out by latency, back and forth over the groups."""
    all_kinds = range(len(costed.all_amounts))  # costed below: a group of one model, for each kind
    single_model_costs = [costed.cost(tuple(int(other == kind) for other in all_kinds)) for kind in all_kinds]
    kinds = [kind for kind, amount in enumerate(costed.all_amounts) for _ in range(amount)]
    kinds.sort(key=lambda kind: (-single_model_costs[kind].seconds, kind))
    return [_deal(costed, kinds, count) for count in range(1, len(kinds) + 1)]


def _deal(costed: _CostedModels, kinds: Sequence[int], count: int) -> Cut:
    """Deal *kinds*, one entry per model, out to *count* groups in snake order."""
    group_counts: list[Counter[int]] = [Counter() for _ in range(count)]
    for number, kind in enumerate(kinds):
        round_number, index = divmod(number, count)
        group_counts[index if round_number % 2 == 0 else count - 1 - index][kind] += 1
    groups = tuple(tuple(counts[kind] for kind in range(len(costed.all_amounts))) for counts in group_counts)
    cost = NOTHING
    for amounts in groups:
        cost = cost.then(costed.cost(amounts))
    return Cut(cost, groups)
