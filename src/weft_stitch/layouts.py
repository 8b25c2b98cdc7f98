"""The arrangement of all tasks' channels in one tensor (``Channels``, ``Layout``), and of weights by it (``pieces``).

A value carries one or several *spaces*, sets of channels in one order (``family``). A *block* has channels of a space
that the same tasks share, or one task's own; a *part* is a block as channels of a value. A layout determines in which
columns the channels of a task lie (``Channels.columns``). All else that a form needs follows from that: weights,
tables, masks, gathers from one layout to another. Every pair of an input block and an output block that some task has
is one piece of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from weft_stitch.family import Block, ChannelSpace, FamilyLayer, Sharing, Wiring
from weft_stitch.net import Array
from weft_stitch.packing import align_up, columns, widest


@dataclass(frozen=True)
class Layout:
    """The arrangement of a value's channels in a tensor; see the constants below."""

    name: str
    align: int = 1
    """compact, fused: every block in a row begins at a multiple of this number of columns."""


COMPACT = Layout("compact")
"""[rows, widest task]: a row has its own task's blocks, and each space is padded with zeros to its widest task."""
STITCHED = Layout("stitched")
"""[rows, all blocks]: a row has every block, zeros in those of other tasks."""
STACKED = Layout("stacked")
"""[batch, tasks x widest task]: equal batches, the tasks side by side."""
FUSED = "fused"
"""Name of the layouts ``Layout(FUSED, align)``: like compact, with blocks in the columns that ``packing`` assigns."""
APART = Layout("apart")
"""One tensor per task, with that task's channels only."""


@dataclass(frozen=True, eq=False)
class Channels:
    """The channels of a value in all tasks: the spaces it carries, one after another."""

    spaces: tuple[ChannelSpace, ...]

    @property
    def tasks(self) -> int:
        return len(self.spaces[0].widths)

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Channels of each task."""
        return tuple(sum(space.widths[task] for space in self.spaces) for task in range(self.tasks))

    @cached_property
    def common(self) -> bool:
        """Whether all tasks share every block, so that the layouts stitched and compact are the same."""
        return all(len(block.tasks) == self.tasks for space in self.spaces for block in space.blocks)

    @cached_property
    def parts(self) -> tuple[BlockPart, ...]:
        """Every block, with its channels in the tasks' own models, in the order in which all layouts place blocks."""
        parts: list[BlockPart] = []
        firsts = np.zeros(self.tasks, int)  # the first channel of the space in each task
        for number, space in enumerate(self.spaces):
            for block in space.blocks:
                members = {task: firsts[task] + np.asarray(channels) for task, channels in block.members.items()}
                parts.append(BlockPart(number, block, members))
            firsts = firsts + np.array(space.widths)
        return tuple(parts)

    def parts_of(self, task: int) -> tuple[BlockPart, ...]:
        """The parts that *task* has, in order."""
        return tuple(part for part in self.parts if task in part.tasks)

    def order(self, task: int) -> Array:
        """The channels of the task's own model, in the order in which all layouts place them."""
        return np.concatenate([part.members[task] for part in self.parts_of(task)])

    def width(self, layout: Layout) -> int:
        """Number of columns of a tensor in *layout* (not ``APART``)."""
        if layout == STITCHED:
            return sum(space.stitched_width for space in self.spaces)
        if layout == STACKED:
            return self.tasks * self.width(COMPACT)
        if layout.name == FUSED:
            return widest(self.spaces, layout.align)
        return sum(compact_width(space, layout.align) for space in self.spaces)

    def starts(self, layout: Layout, task: int) -> dict[BlockPart, int]:
        """The first column of each part of *task*."""
        if layout.name == FUSED:
            runs = columns(self.spaces, task, layout.align)
            return {part: run.start for part, run in zip(self.parts_of(task), runs, strict=True)}
        starts: dict[BlockPart, int] = {}
        space_start = task * self.width(COMPACT) if layout == STACKED else 0
        for number, space in enumerate(self.spaces):
            part_start = space_start
            for part in self.parts:
                if part.space == number:
                    starts[part] = part_start
                    part_start += align_up(part.width, layout.align) if layout == STITCHED or task in part.tasks else 0
            # compact rows give a space the room of its widest task, so that it begins at one column in all tasks
            compact = layout not in (STITCHED, APART)
            space_start = space_start + compact_width(space, layout.align) if compact else part_start
        return {part: part_start for part, part_start in starts.items() if task in part.tasks}

    def columns(self, layout: Layout, task: int, parts: Iterable[BlockPart] | None = None) -> Array:
        """The columns of the channels ``order(task)``, or of the channels of *parts* only."""
        starts = self.starts(layout, task)
        selected = self.parts_of(task) if parts is None else parts
        return np.concatenate([starts[part] + np.arange(part.width) for part in selected])

    def owned(self, layout: Layout) -> Array:
        """A mask [tasks, columns]: whether a column holds a channel of that task in the task's rows."""
        mask = np.zeros((self.tasks, self.width(layout)), bool)
        for task in range(self.tasks):
            mask[task, self.columns(layout, task)] = True
        return mask

    def table(self, layout: Layout, values: Sequence[Array], fill: float = 0.0) -> Array:
        """A table [tasks, columns] of per-channel *values* in each task's own order; other columns have *fill*."""
        table = np.full((self.tasks, self.width(layout)), fill, values[0].dtype)
        for task in range(self.tasks):
            table[task, self.columns(layout, task)] = values[task][self.order(task)]
        return table


@dataclass(frozen=True, eq=False)
class BlockPart:
    """One block of a value, with the channels of the value that it covers."""

    space: int
    """Index of the space among those that the value carries."""
    block: Block
    members: Mapping[int, Array]
    """Task -> its channels of the value."""

    @property
    def tasks(self) -> frozenset[int]:
        return self.block.tasks

    @property
    def width(self) -> int:
        return self.block.width


def compact_width(space: ChannelSpace, align: int = 1) -> int:
    """Number of columns that *space* takes in the layout compact: those of its widest task."""
    return max(
        sum(align_up(block.width, align) for block in space.blocks_of(task)) for task in range(len(space.widths))
    )


def tidy(sharing: Sharing) -> Sharing:
    """The same sharing with one block per set of tasks, largest sets first, so that blocks are fewer and wider."""
    return Sharing({name: _tidy(space) for name, space in sharing.spaces.items()})


def _tidy(space: ChannelSpace) -> ChannelSpace:
    """*space* with one block per set of tasks; its channels are in the order of the set's first task."""
    sets = sorted({block.tasks for block in space.blocks}, key=lambda tasks: (-len(tasks), sorted(tasks)))
    blocks = []
    for tasks in sets:
        same_tasks = [block for block in space.blocks if block.tasks == tasks]
        joined = {task: np.concatenate([block.members[task] for block in same_tasks]) for task in sorted(tasks)}
        order = np.argsort(joined[min(tasks)], kind="stable")
        blocks.append(Block({task: channels[order] for task, channels in joined.items()}))
    return ChannelSpace(space.widths, tuple(block for block in blocks if block.width))


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
    """The weights of a convolution, cut by input and output blocks; a piece that several tasks share comes once."""
    return cut_kernels(layer, channels(layer.inputs[0], wiring, sharing), channels(layer.output, wiring, sharing))


def cut_kernels(layer: FamilyLayer, inputs: Channels, outputs: Channels) -> list[WeightPiece]:
    """The weight pieces of a convolution from *inputs* to *outputs*; each is read from the first task that has it."""
    weight_pieces = []
    if layer.op.depthwise:
        for out, inp in zip(outputs.parts, inputs.parts, strict=True):
            first = min(out.tasks)
            weight_pieces.append(WeightPiece(out, inp, out.tasks, kernel(layer, first)[out.members[first]]))
        return weight_pieces
    for out, inp in product(outputs.parts, inputs.parts):
        if tasks := out.tasks & inp.tasks:
            first = min(tasks)
            array = kernel(layer, first)[np.ix_(out.members[first], inp.members[first])]
            weight_pieces.append(WeightPiece(out, inp, tasks, array))
    return weight_pieces


def kernel(layer: FamilyLayer, task: int) -> Array:
    """The weights of one task's convolution; *layer* must be a convolution."""
    weight = layer.ops[task].weight
    assert weight is not None, layer.name
    return weight


@dataclass(frozen=True, eq=False)
class Affine:
    """x * scale + shift per channel, in the order of each task's own model."""

    scales: tuple[Array, ...]
    shifts: tuple[Array, ...]
    layers: int = 0
    """Number of affine layers that are combined in it."""

    def then(self, other: Affine) -> Affine:
        """The combination: this affine, then *other*."""
        scales = tuple(a * b for a, b in zip(self.scales, other.scales, strict=True))
        pairs = zip(self.shifts, other.scales, other.shifts, strict=True)
        shifts = tuple(shift * scale + later_shift for shift, scale, later_shift in pairs)
        return Affine(scales, shifts, self.layers + other.layers)

    @staticmethod
    def identity(widths: Sequence[int]) -> Affine:
        return Affine(tuple(np.ones(width) for width in widths), tuple(np.zeros(width) for width in widths))

    @staticmethod
    def from_layer(layer: FamilyLayer, widths: Sequence[int]) -> Affine:
        """The scales and shifts of an affine layer for each task; ones and zeros where the layer has none."""
        return Affine(
            tuple(_vector(op.scale, width, 1.0) for op, width in zip(layer.ops, widths, strict=True)),
            tuple(_vector(op.shift, width, 0.0) for op, width in zip(layer.ops, widths, strict=True)),
            layers=1,
        )


def _vector(values: Array | None, width: int, default: float) -> Array:
    """*values* as a float64 vector; *default* repeated *width* times if there are none."""
    return np.full(width, default) if values is None else np.asarray(values, np.float64).ravel()


def all_agree(channels: Channels, values: Sequence[Array]) -> bool:
    """Whether, for every block, all tasks that share it have the same *values*."""
    return all(tasks_agree(values, part, part.tasks) for part in channels.parts)


def tasks_agree(values: Sequence[Array], part: BlockPart, tasks: Iterable[int]) -> bool:
    """Whether *tasks* have the same *values* for the channels of *part*."""
    compared = [values[task][part.members[task]] for task in tasks]
    return all(np.array_equal(compared[0], other) for other in compared)


def merge_values(channels: Channels, values: Sequence[Array]) -> Array:
    """One array [stitched columns] of per-task *values*; a shared column is read from the first task that has it."""
    merged = np.zeros((channels.width(STITCHED), *values[0].shape[1:]), values[0].dtype)
    for task in reversed(range(channels.tasks)):  # the first task writes last
        merged[channels.columns(STITCHED, task)] = values[task][channels.order(task)]
    return merged
