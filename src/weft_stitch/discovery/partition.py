"""``Partition``: the channels of one space in classes of shared channels, with at most one channel of each task."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft_stitch.family import Block, ChannelSpace
from weft_stitch.net import Array

NONE = -1
"""Stands for no channel, or no part. It must be below every index, as ``join`` takes maxima."""


class TaskClasses(NamedTuple):
    """The classes whose channels belong to one set of tasks."""

    tasks: Array
    """A mask [tasks]: which tasks are in the set."""
    classes: Array
    """The indices of the classes."""


class Partition:
    """The classes of a space's channels. *widths*: the number of its channels in each task.

    They only change by ``join``, ``drop`` and ``replace``, which raise *version*.
    """

    def __init__(self, widths: tuple[int, ...]) -> None:
        self.widths = widths
        self.version = 0
        self.members = np.full((sum(widths), len(widths)), NONE, np.int64)
        """[classes, tasks]: the task's channel in the class, or ``NONE``."""
        start = 0
        for task, width in enumerate(widths):
            self.members[start : start + width, task] = np.arange(width)
            start += width
        self._update_indices()

    @staticmethod
    def from_space(space: ChannelSpace) -> Partition:
        """The partition of a known sharing."""
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
        """Number of channels that need not be stored, as another task's channel is in the same class."""
        return sum(self.widths) - len(self.members)

    def join(self, targets: Array, sources: Array) -> None:
        """Merge each class of *sources* into the class at the same index of *targets*.

        *targets* may contain a class several times, if no task is in two of the classes that are merged into it.
        """
        if not len(targets):
            return
        np.maximum.at(self.members, targets, self.members[sources])
        self.members = np.delete(self.members, sources, axis=0)
        self._update_indices()

    def drop(self, classes: Array, tasks: Array) -> None:
        """Take each of *tasks* out of the class at the same index of *classes*; its channel gets a class of its own."""
        singles = np.full((len(classes), len(self.widths)), NONE, np.int64)
        singles[np.arange(len(classes)), tasks] = self.members[classes, tasks]
        self.members[classes, tasks] = NONE
        remaining = self.members[(self.members != NONE).any(axis=1)]
        self.members = np.concatenate([remaining, singles[(singles != NONE).any(axis=1)]])
        self._update_indices()

    def replace(self, members: Array) -> None:
        """Replace the classes by those in *members* [classes, tasks], which must have the same channels."""
        self.members = members
        self._update_indices()

    def apart(self, task: int, other: int) -> Array:
        """The channels of *task* whose class has no channel of the task *other*."""
        return np.flatnonzero(self.members[self.labels[task], other] == NONE)

    def joinable(self, classes_a: Array, classes_b: Array) -> Array:
        """A mask of the pairs of classes that have no task in common."""
        return np.asarray(~((self.members[classes_a] != NONE) & (self.members[classes_b] != NONE)).any(axis=1))

    def together(self, task: int, other: int) -> Array:
        """The classes with channels of both tasks."""
        return np.flatnonzero((self.members[:, task] != NONE) & (self.members[:, other] != NONE))

    def space(self) -> ChannelSpace:
        """The space with a block for each set of tasks, larger sets first, in the order of the set's first task."""
        ordered = sorted(self.sets, key=lambda part: (-part.tasks.sum(), np.flatnonzero(part.tasks).tolist()))
        return ChannelSpace(self.widths, tuple(self._block(part) for part in ordered))

    def _block(self, part: TaskClasses) -> Block:
        """The block of the classes of one set of tasks, in the order of the first task's channels."""
        tasks = np.flatnonzero(part.tasks)
        table = self.members[part.classes][:, tasks]
        table = table[np.argsort(table[:, 0], kind="stable")]
        return Block({int(task): table[:, column] for column, task in enumerate(tasks)})

    def _group_by_tasks(self) -> list[TaskClasses]:
        """All classes, by the set of their tasks."""
        present = self.members != NONE
        packed = np.packbits(present, axis=1)
        keys = np.ascontiguousarray(packed).view(f"V{packed.shape[1]}")[:, 0]  # a row as one item, for ``np.unique``
        _, first, set_of_class = np.unique(keys, return_index=True, return_inverse=True)
        order = np.argsort(set_of_class, kind="stable")
        ends = np.cumsum(np.bincount(set_of_class, minlength=len(first)))
        return [TaskClasses(present[row], group) for row, group in zip(first, np.split(order, ends[:-1]), strict=True)]

    def _update_indices(self) -> None:
        """Derive the other tables from *members*."""
        self.version += 1
        self.labels = [np.zeros(width, np.int64) for width in self.widths]
        """For each task, the class of each channel."""
        for task, labels in enumerate(self.labels):
            present = np.flatnonzero(self.members[:, task] != NONE)
            labels[self.members[present, task]] = present
        self.sets = self._group_by_tasks()
        """All classes, by the set of their tasks."""
        self.parts = [part for part in self.sets if part.tasks.sum() > 1]
        """The sets of at least two tasks, with their classes."""
        self.part_of = np.full(len(self.members), NONE, np.int64)
        """For each class, the index of its set in *parts*; ``NONE`` for a class of one task."""
        for number, part in enumerate(self.parts):
            self.part_of[part.classes] = number
