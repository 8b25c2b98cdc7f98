"""The weights of a layer over all tasks, each number once: ``pieces``; and what follows a convolution: ``Affine``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft_stitch.family import Family, FamilyLayer
from weft_stitch.layouts import STITCHED, BlockPart, Channels
from weft_stitch.net import Array
from weft_stitch.sharing import Sharing
from weft_stitch.spaces import Wiring, role


class WeightPiece(NamedTuple):
    """The kernels from one input block to one output block, the same in all of *tasks*."""

    out: BlockPart
    inp: BlockPart
    tasks: frozenset[int]
    array: Array
    """[channels of out, channels of inp (1 if depthwise), kernel height, kernel width]."""


def channels(value: str, wiring: Wiring, sharing: Sharing) -> Channels:
    """The channels of *value* in all tasks."""
    return Channels(tuple(sharing[space] for space in wiring.carries[value]))


def pieces(layer: FamilyLayer, wiring: Wiring, sharing: Sharing) -> list[WeightPiece]:
    """Every pair of blocks that some task has, once."""
    return cut(layer, channels(layer.inputs[0], wiring, sharing), channels(layer.output, wiring, sharing))


def cut(layer: FamilyLayer, inputs: Channels, outputs: Channels) -> list[WeightPiece]:
    """The pieces of a convolution between these channels; the first task that has a piece lends it."""
    found = []
    if layer.op.depthwise:
        for out, inp in zip(outputs.parts, inputs.parts, strict=True):
            first = min(out.tasks)
            found.append(WeightPiece(out, inp, out.tasks, kernel(layer, first)[out.members[first]]))
        return found
    for out in outputs.parts:
        for inp in inputs.parts:
            if tasks := out.tasks & inp.tasks:
                first = min(tasks)
                array = kernel(layer, first)[np.ix_(out.members[first], inp.members[first])]
                found.append(WeightPiece(out, inp, tasks, array))
    return found


def kernel(layer: FamilyLayer, task: int) -> Array:
    weight = layer.ops[task].weight
    assert weight is not None, layer.name
    return weight


def unique_weights(family: Family, wiring: Wiring, sharing: Sharing) -> int:
    """Numbers in the kernels of all tasks when none is stored twice; scales and shifts are not counted."""
    count = 0
    for layer in family.layers:
        if role(layer) in ("dense", "depthwise"):
            count += sum(piece.array.size for piece in pieces(layer, wiring, sharing))
        elif layer.op.kind == "conv":
            count += sum(kernel(layer, task).size for task in range(family.tasks))
    tails = (op.weight for tail in family.tails for op in tail if op.weight is not None)
    return count + sum(weight.size for weight in tails)


@dataclass(frozen=True, eq=False)
class Affine:
    """x * scale + shift per channel, each task's in its own order."""

    scales: tuple[Array, ...]
    shifts: tuple[Array, ...]
    layers: int = 0
    """Of how many it is made."""

    def then(self, other: Affine) -> Affine:
        scales = tuple(a * b for a, b in zip(self.scales, other.scales, strict=True))
        pairs = zip(self.shifts, other.scales, other.shifts, strict=True)
        shifts = tuple(shift * scale + after for shift, scale, after in pairs)
        return Affine(scales, shifts, self.layers + other.layers)

    @staticmethod
    def none(widths: Sequence[int]) -> Affine:
        return Affine(tuple(np.ones(width) for width in widths), tuple(np.zeros(width) for width in widths))

    @staticmethod
    def of(layer: FamilyLayer, widths: Sequence[int]) -> Affine:
        """What an affine layer does."""
        return Affine(
            tuple(_vector(op.scale, width, 1.0) for op, width in zip(layer.ops, widths, strict=True)),
            tuple(_vector(op.shift, width, 0.0) for op, width in zip(layer.ops, widths, strict=True)),
            1,
        )


def _vector(values: Array | None, width: int, default: float) -> Array:
    return np.full(width, default) if values is None else np.asarray(values, np.float64).ravel()


def agreed(channels: Channels, values: Sequence[Array]) -> bool:
    """Whether the tasks of every block have the same values on it."""
    return all(agree(values, part, part.tasks) for part in channels.parts)


def agree(values: Sequence[Array], part: BlockPart, tasks: Iterable[int]) -> bool:
    """Whether *tasks* have the same values on *part*."""
    mine = [values[task][part.members[task]] for task in tasks]
    return all(np.array_equal(mine[0], each) for each in mine)


def merged(channels: Channels, values: Sequence[Array]) -> Array:
    """[stitched columns] of values on which the tasks agree; the first task that has a column lends it."""
    merged = np.zeros((channels.width(STITCHED), *values[0].shape[1:]), values[0].dtype)
    for task in reversed(range(channels.tasks)):
        merged[channels.columns(STITCHED, task)] = values[task][channels.order(task)]
    return merged
