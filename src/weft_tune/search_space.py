"""The points of the search and the moves between them.

A point (``TuningSetting``) has a type and width for each group of objects, and a bias for each object. A move changes
one bias, one width or one type.

Biases are stored as *scales*, which mean the same for every type: the exponent of the largest value is minus the
scale. So a change of width does not change the range (FIXED keeps its bias, that of EXP moves), and raising a bias by
one raises the scale by one.
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
"""Cap on raising a bias from its start: beyond it a format reaches less than 1/4096 of the largest value."""
MOST_LOWERED = 2
"""Cap on lowering a bias from its start, at which the format already holds all values that were seen."""

Value = TypeVar("Value")
Layerwise = Literal["BOTH", "WGT-ONLY", "ACT-ONLY", "NONE"]
"""Objects that may differ in type and width from layer to layer: weights and activations, only one kind, or none."""
LAYERWISE: tuple[Layerwise, ...] = get_args(Layerwise)


class Item(NamedTuple):
    """One object to tune: the weights or the inputs of a target."""

    target: Target
    role: Role
    group: int
    """Index of the object's group."""
    start: int
    """The largest scale at which a format holds the object's largest value."""


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
        """The setting in which every group has the format that *pick* chooses, and every scale is at its start."""
        return TuningSetting(tuple(pick(group) for group in self.groups), tuple(item.start for item in self.items))

    def configuration(self, setting: TuningSetting) -> Configuration:
        """The format of every object under *setting*."""
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
    """The largest scale at which a format holds the magnitude *largest*: -ceil(log2(largest)), exactly; 0 for zero."""
    if largest == 0:
        return 0
    mantissa, exponent = math.frexp(largest)  # log2 would round
    return -(exponent - 1 if mantissa == 0.5 else exponent)


class Move(NamedTuple):
    """A neighbouring setting, and the name of the change, which is the same for this change of any other setting."""

    name: str
    setting: TuningSetting


def bias_moves(space: SearchSpace, setting: TuningSetting, by: int, group: int | None = None) -> list[Move]:
    """Moves that raise (*by* = 1) or lower (*by* = -1) the bias of one object; of *group*, or of any if None."""
    moves = []
    for position, (item, scale) in enumerate(zip(space.items, setting.scales, strict=True)):
        in_range = -MOST_LOWERED <= scale + by - item.start <= MOST_RAISED
        if setting.types[item.group].biased and in_range and group in (None, item.group):
            name = f"{by:+d} {item.target.name}.{item.role}"
            moves.append(Move(name, setting._replace(scales=_with_value(setting.scales, position, scale + by))))
    return moves


def width_moves(space: SearchSpace, setting: TuningSetting, *, narrower: bool) -> list[Move]:
    """Moves of one group to the next narrower or the next wider width of the same type."""
    moves = []
    for position, (group, current) in enumerate(zip(space.groups, setting.types, strict=True)):
        widths_of_type = [choice.bits for choice in group.choices if choice.kind == current.kind]
        fitting = [bits for bits in widths_of_type if (bits < current.bits if narrower else bits > current.bits)]
        if fitting:
            new = current._replace(bits=max(fitting) if narrower else min(fitting))
            name = f"{'fewer' if narrower else 'more'} {group.name}"
            moves.append(Move(name, setting._replace(types=_with_value(setting.types, position, new))))
    return moves


def type_moves(space: SearchSpace, setting: TuningSetting) -> list[Move]:
    """Moves of one group to another type, of the same width or the widest below it."""
    moves = []
    for position, (group, current) in enumerate(zip(space.groups, setting.types, strict=True)):
        for kind in (kind for kind in KINDS if kind != current.kind):
            if new := widest(group.choices, kind, current.bits):
                moves.append(Move(f"{kind} {group.name}", change_type(space, setting, position, new)))
    return moves


def narrowing_moves(space: SearchSpace, setting: TuningSetting) -> list[tuple[int, Move]]:
    """Moves of one group to the widest narrower format of each type, each with the group's index."""
    moves = []
    for position, (group, current) in enumerate(zip(space.groups, setting.types, strict=True)):
        for kind in KINDS:
            if new := widest(group.choices, kind, current.bits - 1):
                moves.append((position, Move(f"{new} {group.name}", change_type(space, setting, position, new))))
    return moves


def widest(choices: tuple[Unbiased, ...], kind: Kind, bits: int) -> Unbiased | None:
    """The widest of *choices* of the type *kind* with at most *bits*; None if there is none."""
    fitting = [choice for choice in choices if choice.kind == kind and choice.bits <= bits]
    return max(fitting, key=lambda choice: choice.bits, default=None)


def change_type(space: SearchSpace, setting: TuningSetting, group: int, new: Unbiased) -> TuningSetting:
    """The setting with *group* in the format *new*, whose largest value is as near as possible to the old one."""
    current = setting.types[group]
    # At the same scale, a type whose largest value is a power of two reaches only half as far as another type.
    shift = current.power_topped - new.power_topped if current.biased and new.biased and current.kind != new.kind else 0
    return shift_biases(space, setting._replace(types=_with_value(setting.types, group, new)), group, shift)


def shift_biases(space: SearchSpace, setting: TuningSetting, group: int, by: int) -> TuningSetting:
    """The setting with all biases of *group* changed by *by*."""
    pairs = zip(space.items, setting.scales, strict=True)
    return setting._replace(scales=tuple(scale + by * (item.group == group) for item, scale in pairs))


def _with_value(values: tuple[Value, ...], position: int, value: Value) -> tuple[Value, ...]:
    return (*values[:position], value, *values[position + 1 :])
