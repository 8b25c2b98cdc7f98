"""The steps from one setting to its neighbours: one bias, one width or one type at a time."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from weft_tune.numbers.format import Kind
from weft_tune.platform import KINDS, Unbiased
from weft_tune.search_space import SearchSpace, TuningSetting

MOST_RAISED = 12
"""How far a bias goes above its start: beyond that a format holds less than 1/4096 of the largest value."""
MOST_LOWERED = 2
"""How far a bias goes below its start, which already holds all that was seen."""

Value = TypeVar("Value")


class Move(NamedTuple):
    """A neighbour, and what was done to get there: the name is the same for the same step elsewhere."""

    name: str
    setting: TuningSetting


def biases_raised(space: SearchSpace, setting: TuningSetting, group: int | None = None) -> list[Move]:
    """One bias more, object by object; of one group or of all."""
    return _biases_moved(space, setting, 1, group)


def biases_lowered(space: SearchSpace, setting: TuningSetting, group: int | None = None) -> list[Move]:
    """One bias less, object by object; of one group or of all."""
    return _biases_moved(space, setting, -1, group)


def one_bit_fewer(space: SearchSpace, setting: TuningSetting) -> list[Move]:
    """The next narrower width of the same type, group by group."""
    return _widths_moved(space, setting, narrower=True)


def one_bit_more(space: SearchSpace, setting: TuningSetting) -> list[Move]:
    """The next wider width of the same type, group by group."""
    return _widths_moved(space, setting, narrower=False)


def types_changed(space: SearchSpace, setting: TuningSetting) -> list[Move]:
    """Another type of the same width, or of the widest below that, group by group."""
    moves = []
    for position, (group, now) in enumerate(zip(space.groups, setting.types, strict=True)):
        for kind in (kind for kind in KINDS if kind != now.kind):
            if new := widest(group.choices, kind, now.bits):
                moves.append(Move(f"{kind} {group.name}", retyped(space, setting, position, new)))
    return moves


def narrower_in_any_type(space: SearchSpace, setting: TuningSetting) -> list[tuple[int, Move]]:
    """The widest format below the present one, of each type, with the position of its group."""
    moves = []
    for position, (group, now) in enumerate(zip(space.groups, setting.types, strict=True)):
        for kind in KINDS:
            if new := widest(group.choices, kind, now.bits - 1):
                moves.append((position, Move(f"{new} {group.name}", retyped(space, setting, position, new))))
    return moves


def widest(choices: tuple[Unbiased, ...], kind: Kind, bits: int) -> Unbiased | None:
    """The widest choice of a type that is at most so wide."""
    fitting = [choice for choice in choices if choice.kind == kind and choice.bits <= bits]
    return max(fitting, key=lambda choice: choice.bits, default=None)


def retyped(space: SearchSpace, setting: TuningSetting, group: int, new: Unbiased) -> TuningSetting:
    """The group in another type, its largest values as near as they can be to what they were."""
    now = setting.types[group]
    shift = now.power_topped - new.power_topped if now.biased and new.biased and now.kind != new.kind else 0
    return shifted(space, setting._replace(types=_replaced(setting.types, group, new)), group, shift)


def shifted(space: SearchSpace, setting: TuningSetting, group: int, by: int) -> TuningSetting:
    """All biases of a group moved."""
    pairs = zip(space.items, setting.scales, strict=True)
    return setting._replace(scales=tuple(scale + by * (item.group == group) for item, scale in pairs))


def _biases_moved(space: SearchSpace, setting: TuningSetting, by: int, group: int | None = None) -> list[Move]:
    moves = []
    for position, (item, scale) in enumerate(zip(space.items, setting.scales, strict=True)):
        within = -MOST_LOWERED <= scale + by - item.start <= MOST_RAISED
        if setting.types[item.group].biased and within and group in (None, item.group):
            name = f"{by:+d} {item.target.name}.{item.role}"
            moves.append(Move(name, setting._replace(scales=_replaced(setting.scales, position, scale + by))))
    return moves


def _widths_moved(space: SearchSpace, setting: TuningSetting, *, narrower: bool) -> list[Move]:
    moves = []
    for position, (group, now) in enumerate(zip(space.groups, setting.types, strict=True)):
        alike = [choice.bits for choice in group.choices if choice.kind == now.kind]
        below, above = [bits for bits in alike if bits < now.bits], [bits for bits in alike if bits > now.bits]
        if found := below if narrower else above:
            new = now._replace(bits=max(found) if narrower else min(found))
            name = f"{'fewer' if narrower else 'more'} {group.name}"
            moves.append(Move(name, setting._replace(types=_replaced(setting.types, position, new))))
    return moves


def _replaced(values: tuple[Value, ...], position: int, value: Value) -> tuple[Value, ...]:
    return (*values[:position], value, *values[position + 1 :])
