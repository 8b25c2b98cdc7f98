"""The channels of one space sorted into classes, at most one channel of each task in a class: ``Partition``."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft_stitch.family import Block, ChannelSpace
from weft_stitch.net import Array

NONE = -1
"""Instead of a channel or a part: there is none. It has to be below every number, as ``join`` takes the maximum."""


class TaskClasses(NamedTuple):
    """The classes of one set of tasks."""

    tasks: Array
    """[tasks], whether each is in the set."""
    classes: Array


class Partition:
    """A space's classes. They only change through ``join`` and ``drop``, and each change makes a new *version*."""

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.version = 0
        self.members = np.full((sum(widths), len(widths)), NONE, np.int64)
        """[classes, tasks]: the task's channel in the class, or NONE."""
        start = 0
        for task, width in enumerate(widths):
            self.members[start : start + width, task] = np.arange(width)
            start += width
        self._renew()

    @staticmethod
    def from_space(space: ChannelSpace) -> Partition:
        """The classes of a known sharing."""
        result = Partition(space.widths)
        members = np.full((space.stitched_width, len(space.widths)), NONE, np.int64)
        start = 0
        for block in space.blocks:
            for task, channels in block.members.items():
                members[start : start + block.width, task] = channels
            start += block.width
        result.replace(members)
        return result

    @property
    def shared(self) -> int:
        """Channels that need not be stored again because another task's class has them."""
        return sum(self.widths) - len(self.members)

    def join(self, these: Array, those: Array) -> None:
        """Each class of *these* takes the members of its partners in *those*; no task may be in two of them."""
        if not len(these):
            return
        np.maximum.at(self.members, these, self.members[those])
        self.members = np.delete(self.members, those, axis=0)
        self._renew()

    def drop(self, classes: Array, tasks: Array) -> None:
        """Take tasks out of classes, pair by pair; each channel becomes a class of its own."""
        loners = np.full((len(classes), len(self.widths)), NONE, np.int64)
        loners[np.arange(len(classes)), tasks] = self.members[classes, tasks]
        self.members[classes, tasks] = NONE
        kept = self.members[(self.members != NONE).any(axis=1)]
        self.members = np.concatenate([kept, loners[(loners != NONE).any(axis=1)]])
        self._renew()

    def replace(self, members: Array) -> None:
        """Take other classes of the same channels."""
        self.members = members
        self._renew()

    def apart(self, one: int, two: int) -> Array:
        """The channels of task *one* in whose class *two* has none."""
        return np.flatnonzero(self.members[self.labels[one], two] == NONE)

    def joinable(self, these: Array, those: Array) -> Array:
        """Which pairs of classes have no task in common."""
        return np.asarray(~((self.members[these] != NONE) & (self.members[those] != NONE)).any(axis=1))

    def together(self, one: int, two: int) -> Array:
        """The classes that hold both tasks."""
        return np.flatnonzero((self.members[:, one] != NONE) & (self.members[:, two] != NONE))

    def space(self) -> ChannelSpace:
        """The blocks: classes of one set of tasks, in the first task's order; sets of many tasks come first."""
        ordered = sorted(self.sets, key=lambda part: (-part.tasks.sum(), np.flatnonzero(part.tasks).tolist()))
        return ChannelSpace(self.widths, tuple(self._block(part) for part in ordered))

    def _block(self, part: TaskClasses) -> Block:
        tasks = np.flatnonzero(part.tasks)
        table = self.members[part.classes][:, tasks]
        table = table[np.argsort(table[:, 0], kind="stable")]
        return Block({int(task): table[:, column] for column, task in enumerate(tasks)})

    def _sort(self) -> list[TaskClasses]:
        """All classes by the set of their tasks."""
        present = self.members != NONE
        packed = np.packbits(present, axis=1)
        keys = np.ascontiguousarray(packed).view(f"V{packed.shape[1]}")[:, 0]
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(first)))
        return [TaskClasses(present[at], group) for at, group in zip(first, np.split(order, ends[:-1]), strict=True)]

    def _renew(self) -> None:
        """Work out what follows from *members*."""
        self.version += 1
        self.labels = [np.zeros(width, np.int64) for width in self.widths]
        """The class of each channel, task by task."""
        for task, labels in enumerate(self.labels):
            present = np.flatnonzero(self.members[:, task] != NONE)
            labels[self.members[present, task]] = present
        self.sets = self._sort()
        self.parts = [part for part in self.sets if part.tasks.sum() > 1]
        """The sets of several tasks."""
        self.part_of = np.full(len(self.members), NONE, np.int64)
        """The part of each class, or NONE for a class of one task."""
        for number, part in enumerate(self.parts):
            self.part_of[part.classes] = number
