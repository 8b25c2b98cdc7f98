"""Which channels of which models are the same: ``Block``, ``Sharing``.

A *space* is a set of channels that one or more values carry in the same order (an addition puts its operands into one
space; a concatenation's value is several spaces after another). Across models the channels of a space fall into
*blocks*: a block of several tasks is computed by the same weights in each of them, a block of one task is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.base.errors import ModelError
from weft_stitch.net import Array


@dataclass(frozen=True, eq=False)
class Block:
    """Channels that the tasks of *members* share, or that one task has for itself."""

    members: Mapping[int, Array]
    """For each task, the channels of its own model that these are, in the block's order."""

    @cached_property
    def tasks(self) -> frozenset[int]:
        return frozenset(self.members)

    @cached_property
    def width(self) -> int:
        return len(next(iter(self.members.values())))


@dataclass(frozen=True, eq=False)
class ChannelSpace:
    """The channels of one space over all tasks; blocks of many tasks come first."""

    widths: tuple[int, ...]
    """Channels in each task."""
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        for task, width in enumerate(self.widths):
            mine = self.order(task)
            if len(mine) != width or len(np.unique(mine)) != width:
                raise ModelError(f"task {task}: its {width} channels are not each in one block ({len(mine)} are)")

    def of(self, task: int) -> Iterator[Block]:
        """The blocks of *task*, in the order in which its channels lie."""
        return (block for block in self.blocks if task in block.tasks)

    def order(self, task: int) -> Array:
        """The channels of the task's own model in the order in which they lie here."""
        return np.concatenate([np.asarray(block.members[task]) for block in self.of(task)] or [np.zeros(0, int)])

    @property
    def stitched_width(self) -> int:
        """Channels when every block is laid out once (the paper's form)."""
        return sum(block.width for block in self.blocks)

    @property
    def shared_width(self) -> int:
        """Channels that all tasks share."""
        return sum(block.width for block in self.blocks if len(block.tasks) == len(self.widths))

    def coarsen(self, min_width: int) -> ChannelSpace:
        """Leave blocks of some but not all tasks that are narrower than *min_width* to each task: fewer pieces."""
        tasks = len(self.widths)
        narrow = [block for block in self.blocks if 1 < len(block.tasks) < tasks and block.width < min_width]
        if not narrow:
            return self
        shared = [block for block in self.blocks if len(block.tasks) > 1 and block not in narrow]
        left = [np.ones(width, bool) for width in self.widths]
        for block in shared:
            for task, channels in block.members.items():
                left[task][channels] = False
        own = [Block({task: np.flatnonzero(mine)}) for task, mine in enumerate(left) if mine.any()]
        return ChannelSpace(self.widths, (*shared, *own))

    @staticmethod
    def exclusive(widths: tuple[int, ...]) -> ChannelSpace:
        """A space of which nothing is shared."""
        return ChannelSpace(
            widths, tuple(Block({task: np.arange(width)}) for task, width in enumerate(widths) if width)
        )

    @staticmethod
    def common(width: int, tasks: int) -> ChannelSpace:
        """All shared, in the same order."""
        return ChannelSpace((width,) * tasks, (Block({task: np.arange(width) for task in range(tasks)}),))


@dataclass(frozen=True, eq=False)
class Sharing:
    """The spaces of stitched models by name; the name is that of the first value (in task 0) that carries it."""

    spaces: Mapping[str, ChannelSpace]

    def __getitem__(self, space: str) -> ChannelSpace:
        return self.spaces[space]
