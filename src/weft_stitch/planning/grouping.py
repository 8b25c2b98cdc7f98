"""Which models to stitch together: ``group`` cuts many into groups that run one after another.

Stitching all of them need not be best: some forms do more work the more models there are, and memory may be short.
The latencies of the groups add up, and so do their weights; of their activations the largest counts. This is Algorithm
1 of the paper (Wang et al., "Stitching Weight-Shared Deep Neural Networks for Efficient Multitask Inference on GPU",
SECON 2022) with its gaps filled: equal models are a dynamic program over group sizes that starts at one, few unequal
ones a dynamic program over what kinds are left, in which equal groups are costed once and hopeless ones not at all,
and many are dealt out in snake order into every number of groups.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from weft.base.errors import StitchError
from weft_stitch.planning.groups import NOTHING, Amounts, Cut, GroupCost, Unmet, Wish
from weft_stitch.planning.lattice import Lattice

FEW = 15
"""Up to so many unequal models all groupings are considered."""
SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Sizes of groups of equal models that are costed; those between are interpolated, and costed when they are chosen."""

Costs = Callable[[tuple[int, ...]], GroupCost]
"""What the models of these numbers take together."""


@dataclass(frozen=True, slots=True)
class Grouping:
    """Groups of models by their numbers, and what all of them take together."""

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
    """Cut the models into groups.

    Models of equal *kinds* (structure, widths, batch) are taken to be interchangeable, so that *costs* is asked once
    for equal groups. With *target_s* the grouping of fewest bytes that meets it is found, else that of least latency;
    *cap_bytes* bounds weights and activations.
    """
    if not kinds:
        raise StitchError("there are no models to group; give at least one")
    wish = Wish(cap_bytes, target_s)
    known = _CostedModels(kinds, costs)
    if len(known.members) == 1:
        found = _equal(known, wish)
    elif len(kinds) <= few:
        found = Lattice(known.all, known.cost).best(wish)
    else:
        found = _snake(known)
    return known.numbered(_best(found, wish))


def _best(found: Sequence[Cut], wish: Wish) -> Cut:
    fitting = [each for each in found if wish.met(each.cost)]
    if fitting:
        return min(fitting, key=lambda each: (wish.rank(each.cost), len(each.groups), each.groups))
    costs = [each.cost for each in found]
    raise Unmet(wish, min(costs, key=lambda each: each.bytes), min(costs, key=lambda each: each.seconds))


class _CostedModels:
    """Models by kind, and what has been costed."""

    def __init__(self, kinds: Sequence[Hashable], costs: Costs) -> None:
        names = dict.fromkeys(kinds)
        self.members = [[number for number, kind in enumerate(kinds) if kind == name] for name in names]
        self.all: Amounts = tuple(len(each) for each in self.members)
        self._costed: dict[Amounts, GroupCost] = {}
        self._costs = costs

    def cost(self, amounts: Amounts) -> GroupCost:
        if amounts not in self._costed:
            models = [number for mine, amount in zip(self.members, amounts, strict=True) for number in mine[:amount]]
            self._costed[amounts] = self._costs(tuple(sorted(models)))
        return self._costed[amounts]

    def numbered(self, cut: Cut) -> Grouping:
        """The grouping, with the models that each group gets."""
        left = [list(each) for each in self.members]
        groups = []
        for amounts in sorted(cut.groups, key=lambda each: (-sum(each), each)):
            mine = [left[kind].pop(0) for kind, amount in enumerate(amounts) for _ in range(amount)]
            groups.append(tuple(sorted(mine)))
        return Grouping(tuple(groups), cut.cost)


def _equal(known: _CostedModels, wish: Wish) -> list[Cut]:
    """The best way to cut equal models; what is interpolated and chosen is costed, and all is done again."""
    (models,) = known.all
    samples = {size: known.cost((size,)) for size in sorted({size for size in SIZES if size < models} | {models})}
    lattice = Lattice((models,), lambda amounts: interpolated(samples, *amounts))
    while True:
        found = lattice.best(wish)
        guessed = {size for cut in found for (size,) in cut.groups} - samples.keys()
        if not guessed:
            return found
        samples.update({size: known.cost((size,)) for size in sorted(guessed)})


def interpolated(samples: Mapping[int, GroupCost], size: int) -> GroupCost:
    """The cost of *size* models from those of the next smaller and the next larger group, on the line between them."""
    if size in samples:
        return samples[size]
    sizes = sorted(samples)
    after = bisect_left(sizes, size)
    low, high = sizes[after - 1], sizes[after]
    share = (size - low) / (high - low)
    pairs = zip(samples[low], samples[high], strict=True)
    return GroupCost(*(before + share * (then - before) for before, then in pairs))


def _snake(known: _CostedModels) -> list[Cut]:
    """Models dealt out by latency, to and fro over every number of groups."""
    alone = [known.cost(tuple(int(each == kind) for each in range(len(known.all)))) for kind in range(len(known.all))]
    kinds = [kind for kind, amount in enumerate(known.all) for _ in range(amount)]
    kinds.sort(key=lambda kind: (-alone[kind].seconds, kind))
    return [_dealt(known, kinds, count) for count in range(1, len(kinds) + 1)]


def _dealt(known: _CostedModels, kinds: Sequence[int], count: int) -> Cut:
    dealt: list[Counter[int]] = [Counter() for _ in range(count)]
    for number, kind in enumerate(kinds):
        turn, place = divmod(number, count)
        dealt[place if turn % 2 == 0 else count - 1 - place][kind] += 1
    groups = tuple(tuple(mine[kind] for kind in range(len(known.all))) for mine in dealt)
    cost = NOTHING
    for amounts in groups:
        cost = cost.then(known.cost(amounts))
    return Cut(cost, groups)
