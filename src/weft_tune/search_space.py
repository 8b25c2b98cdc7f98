"""The points of the search and the moves between them.

A point has a type and width for each group of objects, and a bias for each object. A move changes one bias, one width
or one type.

Biases are kept as *scales*, which mean the same for every type: the exponent of the largest value is minus the
scale. So a change of width keeps the range as it is (FIXED keeps its bias, EXP moves it), and raising a bias by one
raises the scale by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

from weft.base.errors import TuneError
from weft_tune.network import ROLES, Network, Role, Target
from weft_tune.numbers.configuration import Configuration
from weft_tune.numbers.format import Format, Kind
from weft_tune.platform import KINDS, Platform, Unbiased

MOST_RAISED = 12
"""Limit of a bias above its start: beyond that a format holds less than 1/4096 of the largest value."""
MOST_LOWERED = 2
"""Limit of a bias below its start, which already holds all values that were seen."""

Value = TypeVar("Value")
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
    """The objects and groups of a network, in the order of the layers, weights before inputs."""

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
    layer_by_layer: dict[Role, bool] = {
        "weight": layerwise in ("BOTH", "WGT-ONLY"),
        "input": layerwise in ("BOTH", "ACT-ONLY"),
    }
    items: list[Item] = []
    groups: dict[str, ObjectGroup] = {}
    for target in network.targets:
        for role in ROLES:
            name = f"{target.name}.{role}" if layer_by_layer[role] else f"every {role}"
            groups.setdefault(name, ObjectGroup(name, platform.choices(role)))
            items.append(Item(target, role, list(groups).index(name), first_scale(target.largest(role))))
    return SearchSpace(tuple(items), tuple(groups.values()))


def first_scale(largest: float) -> int:
    """-ceil(log2(largest)), exactly; 0 where there is nothing but zeros."""
    if largest == 0:
        return 0
    mantissa, exponent = math.frexp(largest)  # log2 would round
    return -(exponent - 1 if mantissa == 0.5 else exponent)


class Move(NamedTuple):
    """A neighbour, and the step that leads there: the name is the same for the same step elsewhere."""

    name: str
    setting: TuningSetting


def bias_moves(space: SearchSpace, setting: TuningSetting, by: int, group: int | None = None) -> list[Move]:
    """Biases raised (*by* = 1) or lowered (*by* = -1), object by object; of one group or of all."""
    moves = []
    for position, (item, scale) in enumerate(zip(space.items, setting.scales, strict=True)):
        within = -MOST_LOWERED <= scale + by - item.start <= MOST_RAISED
        if setting.types[item.group].biased and within and group in (None, item.group):
            name = f"{by:+d} {item.target.name}.{item.role}"
            moves.append(Move(name, setting._replace(scales=_with_value(setting.scales, position, scale + by))))
    return moves


def width_moves(space: SearchSpace, setting: TuningSetting, *, narrower: bool) -> list[Move]:
    """The next narrower or the next wider width of the same type, group by group."""
    moves = []
    for position, (group, now) in enumerate(zip(space.groups, setting.types, strict=True)):
        alike = [choice.bits for choice in group.choices if choice.kind == now.kind]
        widths = [bits for bits in alike if (bits < now.bits if narrower else bits > now.bits)]
        if widths:
            new = now._replace(bits=max(widths) if narrower else min(widths))
            name = f"{'fewer' if narrower else 'more'} {group.name}"
            moves.append(Move(name, setting._replace(types=_with_value(setting.types, position, new))))
    return moves


def type_moves(space: SearchSpace, setting: TuningSetting) -> list[Move]:
    """Another type of the same width, or of the widest below that, group by group."""
    moves = []
    for position, (group, now) in enumerate(zip(space.groups, setting.types, strict=True)):
        for kind in (kind for kind in KINDS if kind != now.kind):
            if new := widest(group.choices, kind, now.bits):
                moves.append(Move(f"{kind} {group.name}", change_type(space, setting, position, new)))
    return moves


def narrowing_moves(space: SearchSpace, setting: TuningSetting) -> list[tuple[int, Move]]:
    """The widest format below the present one, of each type, with the position of its group."""
    moves = []
    for position, (group, now) in enumerate(zip(space.groups, setting.types, strict=True)):
        for kind in KINDS:
            if new := widest(group.choices, kind, now.bits - 1):
                moves.append((position, Move(f"{new} {group.name}", change_type(space, setting, position, new))))
    return moves


def widest(choices: tuple[Unbiased, ...], kind: Kind, bits: int) -> Unbiased | None:
    """The widest choice of a type with at most *bits*."""
    fitting = [choice for choice in choices if choice.kind == kind and choice.bits <= bits]
    return max(fitting, key=lambda choice: choice.bits, default=None)


def change_type(space: SearchSpace, setting: TuningSetting, group: int, new: Unbiased) -> TuningSetting:
    """The group in another type, with its largest values as near as possible to the old ones."""
    now = setting.types[group]
    # types whose largest value is a power of two reach half as far at the same scale
    shift = now.power_topped - new.power_topped if now.biased and new.biased and now.kind != new.kind else 0
    return shift_biases(space, setting._replace(types=_with_value(setting.types, group, new)), group, shift)


def shift_biases(space: SearchSpace, setting: TuningSetting, group: int, by: int) -> TuningSetting:
    """All biases of a group moved."""
    pairs = zip(space.items, setting.scales, strict=True)
    return setting._replace(scales=tuple(scale + by * (item.group == group) for item, scale in pairs))


def _with_value(values: tuple[Value, ...], position: int, value: Value) -> tuple[Value, ...]:
    return (*values[:position], value, *values[position + 1 :])
