"""Some of the models of a family, with what they share: ``part``; and which of them are alike: ``kinds``."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

from weft_stitch.family import Family, FamilyLayer
from weft_stitch.sharing import Block, ChannelSpace, Sharing


def part(family: Family, sharing: Sharing, tasks: Sequence[int]) -> tuple[Family, Sharing]:
    """The family of *tasks* alone; values and spaces keep their names."""
    layers = tuple(
        FamilyLayer(tuple(layer.ops[task] for task in tasks), layer.inputs, layer.output) for layer in family.layers
    )
    fewer = replace(
        family,
        nets=tuple(family.nets[task] for task in tasks),
        layers=layers,
        values={name: tuple(sizes[task] for task in tasks) for name, sizes in family.values.items()},
        outputs={name: tuple(ports[task] for task in tasks) for name, ports in family.outputs.items()},
        tails=tuple(family.tails[task] for task in tasks) if family.tails else (),
        bridges=tuple(family.bridges[task] for task in tasks) if family.bridges else (),
    )
    return fewer, Sharing({name: _space(space, tasks) for name, space in sharing.spaces.items()})


def _space(space: ChannelSpace, tasks: Sequence[int]) -> ChannelSpace:
    blocks = [
        Block({new: block.members[old] for new, old in enumerate(tasks) if old in block.members})
        for block in space.blocks
        if not block.tasks.isdisjoint(tasks)
    ]
    return ChannelSpace(
        tuple(space.widths[task] for task in tasks), tuple(sorted(blocks, key=lambda each: -len(each.tasks)))
    )


def kinds(family: Family, sharing: Sharing) -> list[Hashable]:
    """Something for each model that is equal for models of equal sizes which share with the same others."""
    circles: set[frozenset[int]] = set()
    for space in sharing.spaces.values():
        circles |= {block.tasks for block in space.blocks if 1 < len(block.tasks) < family.tasks}
    found: list[Hashable] = []
    for task, net in enumerate(family.nets):
        sizes = tuple(value[task] for value in family.values.values())
        tail = tuple(op.weight.shape for op in family.tails[task] if op.weight is not None) if family.tails else ()
        found.append((net.batch, sizes, tail, frozenset(circle for circle in circles if task in circle)))
    return found
