"""How the channels of all tasks lie in one tensor: ``Channels`` of a value, and the ``Layout``s it can take.

A layout says at which columns the channels of a task lie. Whatever else a form needs (weights, tables, masks, gathers
from one layout to another) follows from that: the channels of a task, in the order of its spaces, go to ``columns``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft_stitch.net import Array
from weft_stitch.packing import aligned, columns, widest
from weft_stitch.sharing import Block, ChannelSpace, Sharing


@dataclass(frozen=True)
class Layout:
    """A way to lay out a value; see the constants below."""

    name: str
    align: int = 1
    """compact, fused: the blocks of a row begin at multiples of this."""


COMPACT = Layout("compact")
"""[rows, widest task]: a row has its own task's blocks, each space filled up with zeros to its widest task."""
STITCHED = Layout("stitched")
"""[rows, all blocks]: a row has every block, zeros in those of other tasks."""
STACKED = Layout("stacked")
"""[batch, tasks x widest task]: equal batches, the tasks side by side."""
FUSED = "fused"
"""Like compact, for the one-kernel form: its blocks lie where ``packing`` wants them, ``Layout(FUSED, align)``."""
APART = Layout("apart")
"""A tensor per task, with its own channels and no others."""


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
        """All tasks share all of it, so that stitched and compact are the same."""
        return all(len(block.tasks) == self.tasks for space in self.spaces for block in space.blocks)

    @cached_property
    def parts(self) -> tuple[BlockPart, ...]:
        """Every block with the channels it stands for in the tasks' own models, in the order of every layout."""
        found: list[BlockPart] = []
        firsts = np.zeros(self.tasks, int)
        for number, space in enumerate(self.spaces):
            found += [
                BlockPart(
                    number, block, {task: firsts[task] + np.asarray(mine) for task, mine in block.members.items()}
                )
                for block in space.blocks
            ]
            firsts = firsts + np.array(space.widths)
        return tuple(found)

    def of(self, task: int) -> tuple[BlockPart, ...]:
        """The parts that *task* has."""
        return tuple(part for part in self.parts if task in part.tasks)

    def order(self, task: int) -> Array:
        """The channels of the task's own model, in the order in which every layout has them."""
        return np.concatenate([part.members[task] for part in self.of(task)])

    def width(self, layout: Layout) -> int:
        """Columns of a tensor in this layout (not of ``APART``)."""
        if layout == STITCHED:
            return sum(space.stitched_width for space in self.spaces)
        if layout == STACKED:
            return self.tasks * self.width(COMPACT)
        if layout.name == FUSED:
            return widest(self.spaces, layout.align)
        return sum(compact_width(space, layout.align) for space in self.spaces)

    def starts(self, layout: Layout, task: int) -> dict[BlockPart, int]:
        """Where the parts of *task* begin."""
        if layout.name == FUSED:
            runs = columns(self.spaces, task, layout.align)
            return {part: run.start for part, run in zip(self.of(task), runs, strict=True)}
        found: dict[BlockPart, int] = {}
        first = task * self.width(COMPACT) if layout == STACKED else 0
        for number, space in enumerate(self.spaces):
            start = first
            for part in (each for each in self.parts if each.space == number):
                found[part] = start
                start += aligned(part.width, layout.align) if layout == STITCHED or task in part.tasks else 0
            if layout in (STITCHED, APART):
                first = start
            else:
                first += compact_width(space, layout.align)
        return {part: start for part, start in found.items() if task in part.tasks}

    def columns(self, layout: Layout, task: int, parts: Iterable[BlockPart] | None = None) -> Array:
        """Where the channels ``order(task)`` lie, or those of some parts."""
        starts = self.starts(layout, task)
        wanted = self.of(task) if parts is None else parts
        return np.concatenate([starts[part] + np.arange(part.width) for part in wanted])

    def owned(self, layout: Layout) -> Array:
        """[tasks, columns]: whether a column of a row of that task holds one of its channels."""
        mask = np.zeros((self.tasks, self.width(layout)), bool)
        for task in range(self.tasks):
            mask[task, self.columns(layout, task)] = True
        return mask

    def table(self, layout: Layout, values: Sequence[Array], fill: float = 0.0) -> Array:
        """[tasks, columns] of per-channel values given in each task's own order."""
        table = np.full((self.tasks, self.width(layout)), fill, values[0].dtype)
        for task in range(self.tasks):
            table[task, self.columns(layout, task)] = values[task][self.order(task)]
        return table


@dataclass(frozen=True, eq=False)
class BlockPart:
    """One block of a value."""

    space: int
    """Which of the spaces the value carries."""
    block: Block
    members: Mapping[int, Array]
    """For each task, its own channels of the value."""

    @property
    def tasks(self) -> frozenset[int]:
        return self.block.tasks

    @property
    def width(self) -> int:
        return self.block.width


def compact_width(space: ChannelSpace, align: int = 1) -> int:
    return max(sum(aligned(block.width, align) for block in space.of(task)) for task in range(len(space.widths)))


def tidy(sharing: Sharing) -> Sharing:
    """The same sharing with one block for each set of tasks, the sets of many first: fewer and longer runs."""
    return Sharing({name: _tidy(space) for name, space in sharing.spaces.items()})


def _tidy(space: ChannelSpace) -> ChannelSpace:
    sets = sorted({block.tasks for block in space.blocks}, key=lambda tasks: (-len(tasks), sorted(tasks)))
    blocks = []
    for tasks in sets:
        same = [block for block in space.blocks if block.tasks == tasks]
        members = {task: np.concatenate([block.members[task] for block in same]) for task in sorted(tasks)}
        order = np.argsort(members[min(tasks)], kind="stable")
        blocks.append(Block({task: mine[order] for task, mine in members.items()}))
    return ChannelSpace(space.widths, tuple(block for block in blocks if block.width))
