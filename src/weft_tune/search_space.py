"""The points of the search: a type and width for each group of objects, a bias for each object.

Biases are kept as *scales*, which mean the same for every type: the exponent of the largest value is minus the
scale. So a change of width keeps the range as it is (FIXED keeps its bias, EXP moves it), and raising a bias by one
raises the scale by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from weft.base.errors import TuneError
from weft_tune.network import ROLES, Network, Role, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import Format
from weft_tune.platform import Platform, Unbiased

Layerwise = Literal["BOTH", "WGT-ONLY", "ACT-ONLY", "NONE"]
"""Whether layers may differ in type and width: in weights and activations, in either, or not at all."""
LAYERWISE: tuple[Layerwise, ...] = get_args(Layerwise)


class Item(NamedTuple):
    """One object to tune: the weights or the inputs of a target."""

    target: Target
    role: Role
    group: int
    """Position of its group."""
    start: int
    """The scale that just holds its largest value."""


class ObjectGroup(NamedTuple):
    """Objects that share type and width."""

    name: str
    choices: tuple[Unbiased, ...]


class TuningSetting(NamedTuple):
    """One point of the search space."""

    types: tuple[Unbiased, ...]
    """One for each group."""
    scales: tuple[int, ...]
    """One for each item."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """What may be set, in the order of the layers, weights before inputs."""

    items: tuple[Item, ...]
    groups: tuple[ObjectGroup, ...]

    def uniform(self, pick: Callable[[ObjectGroup], Unbiased]) -> TuningSetting:
        """Every group as *pick* says, every scale where it starts."""
        return TuningSetting(tuple(pick(group) for group in self.groups), tuple(item.start for item in self.items))

    def configuration(self, setting: TuningSetting) -> Configuration:
        """*setting* as formats of objects."""
        formats: dict[str, Format] = {}
        for item, scale in zip(self.items, setting.scales, strict=True):
            chosen = setting.types[item.group].at(scale)
            formats.update(dict.fromkeys(item.target.objects(item.role), chosen))
        return Configuration(formats)


def space_of(network: Network, platform: Platform, layerwise: Layerwise) -> SearchSpace:
    """The search space of a network on a platform."""
    if layerwise not in LAYERWISE:
        raise TuneError(f"layerwise = {layerwise!r} must be one of {', '.join(LAYERWISE)}")
    own: dict[Role, bool] = {
        "weight": layerwise in ("BOTH", "WGT-ONLY"),
        "input": layerwise in ("BOTH", "ACT-ONLY"),
    }
    items: list[Item] = []
    groups: dict[str, ObjectGroup] = {}
    for target in network.targets:
        for role in ROLES:
            name = f"{target.name}.{role}" if own[role] else f"every {role}"
            groups.setdefault(name, ObjectGroup(name, platform.choices(role)))
            items.append(Item(target, role, list(groups).index(name), first_scale(target.largest(role))))
    return SearchSpace(tuple(items), tuple(groups.values()))


def first_scale(largest: float) -> int:
    """-ceil(log2(largest)), exactly; 0 where there is nothing but zeros."""
    if largest == 0:
        return 0
    mantissa, exponent = math.frexp(largest)
    return -(exponent - 1 if mantissa == 0.5 else exponent)
