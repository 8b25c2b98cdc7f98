"""What weights say about which channels of two tasks are the same: ``Evidence``, fingerprints for every pair of tasks.

Two tasks agree on a channel if its filters agree on the inputs that the two share (and, seen from its readers, if what
they do with it agrees on the outputs that the two share). The fingerprint of a channel therefore depends on the task it
is compared with; it is the sum over those parts of the layer's other side that hold both tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from weft_stitch.discovery import fingerprint
from weft_stitch.discovery.fingerprint import Keys
from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.family import Family, FamilyLayer
from weft_stitch.net import Array
from weft_stitch.spaces import Wiring, Writer, role

ByPart = Callable[[Array, Array, Array, int], Array]
"""Sums over a weight [out, in, taps] by parts of one of its sides, given that side's labels, parts and their number."""


class Common(NamedTuple):
    """The channels of a value that two tasks share, side by side; all of one length."""

    positions: Array
    """Which of the spaces the value carries each is in."""
    classes: Array
    """The class of each channel in that space."""
    mine: Array
    """The first task's channel, counted through the value."""
    theirs: Array
    """The second task's."""


class PairKeys(NamedTuple):
    """Fingerprints of the channels of a space."""

    keys: Keys
    """[task, channel, other task]: equal if the two tasks' channels agree. Zero if there is nothing but zeros."""
    allowed: Array
    """[task, task]: whether every writer says something about the two tasks (they share some of its inputs)."""

    def agree(self, these: Array, those: Array) -> Array:
        """For classes given by their members ([n, tasks] each): do all tasks of one agree with all of the other?"""
        result = np.ones(len(these), bool)
        for one in np.flatnonzero((these != NONE).any(axis=0)):
            for two in np.flatnonzero((those != NONE).any(axis=0)):
                here = np.flatnonzero((these[:, one] != NONE) & (those[:, two] != NONE))
                mine, theirs = self.keys[one, these[here, one], two], self.keys[two, those[here, two], one]
                result[here] &= (mine == theirs) & self.allowed[one, two]
        return result

    def disagreeing(self, members: Array) -> Array:
        """For classes given by their members ([n, tasks]), which two tasks in them disagree: [n, tasks, tasks]."""
        tasks = np.arange(members.shape[1])
        present = members != NONE
        keys = self.keys[tasks, np.maximum(members, 0)]
        both = present[:, :, None] & present[:, None, :] & (tasks[:, None] < tasks)
        return np.asarray(both & ((keys != keys.transpose(0, 2, 1)) | ~self.allowed))


class Evidence:
    """The weights of a family seen through a partition of each of its spaces."""

    def __init__(self, family: Family, wiring: Wiring, partitions: Mapping[str, Partition]) -> None:
        self.family, self.wiring, self.partitions = family, wiring, partitions
        self.tasks = family.tasks
        self.layers = [layer for layer in family.layers if role(layer) in ("dense", "depthwise")]
        """The layers with weights to compare."""
        self._known: dict[tuple[ByPart, str], tuple[tuple[int, ...], list[Array], Array]] = {}

    def readers(self, space: str) -> list[FamilyLayer]:
        """The dense layers that read *space*."""
        carries = self.wiring.carries
        return [each for each in self.layers if role(each) == "dense" and space in carries[each.inputs[0]]]

    def pair_keys(self, space: str, writers: Iterable[Writer], readers: Iterable[FamilyLayer] = ()) -> PairKeys:
        """What *writers* and *readers* say about the channels of *space*."""
        keys = np.zeros((self.tasks, max(self.wiring.widths[space]), self.tasks), np.uint64)
        allowed = ~np.eye(self.tasks, dtype=bool)
        for writer in writers:
            allowed &= self._add_writer(keys, space, writer)
        for layer in readers:
            found, parts = self.by_part(fingerprint.columns, layer, layer.output)
            for position in self.positions(layer.inputs[0], space):
                self._add(keys, found, parts, layer.inputs[0], position, f"{layer.output} reads")
        return PairKeys(keys, allowed)

    def common(self, value: str, one: int, two: int) -> Common:
        """The channels of *value* that tasks *one* and *two* share."""
        rows = [np.zeros((4, 0), np.int64)]
        starts = np.zeros(2, np.int64)
        for position, space in enumerate(self.wiring.carries[value]):
            partition = self.partitions[space]
            classes = partition.together(one, two)
            mine, theirs = partition.members[classes][:, [one, two]].T + starts[:, None]
            rows.append(np.stack([np.full(len(classes), position), classes, mine, theirs]))
            starts += np.array([partition.widths[one], partition.widths[two]])
        return Common(*np.concatenate(rows, axis=1))

    def incidence(self, value: str) -> Array:
        """[parts of the value, tasks]: 1 where the task is in the part."""
        parts = [part.tasks for space in self.wiring.carries[value] for part in self.partitions[space].parts]
        return np.array(parts, np.int64).reshape(len(parts), self.tasks)

    @property
    def stored(self) -> int:
        """Weights of all layers when none that tasks share is stored twice."""
        return sum(self._stored(layer) for layer in self.layers)

    def _stored(self, layer: FamilyLayer) -> int:
        tasks, counts = self._sets(layer.output)
        taps = int(flat_weights(layer)[0].shape[2])
        if role(layer) == "depthwise":
            return int(counts.sum()) * taps
        sources, channels = self._sets(layer.inputs[0])
        return int(counts @ (tasks @ sources.T > 0) @ channels) * taps

    def _sets(self, value: str) -> tuple[Array, Array]:
        """The sets of tasks that have channels of *value* to themselves, [sets, tasks], and how many each has."""
        sets = [each for space in self.wiring.carries[value] for each in self.partitions[space].sets]
        return np.array([each.tasks for each in sets], np.int64), np.array([len(each.classes) for each in sets])

    def versions(self, value: str) -> tuple[int, ...]:
        return tuple(self.partitions[space].version for space in self.wiring.carries[value])

    def channels(self, value: str, position: int, task: int) -> slice:
        """The task's channels of one of the spaces that *value* carries."""
        return list(self.wiring.slices(value, task))[position][1]

    def positions(self, value: str, space: str) -> list[int]:
        """Where *space* stands among those that *value* carries."""
        return [position for position, name in enumerate(self.wiring.carries[value]) if name == space]

    def _add_writer(self, keys: Keys, space: str, writer: Writer) -> Array | bool:
        """Add what *writer* says; for which pairs of tasks it says anything."""
        if writer.role == "separate":
            return False
        if writer.layer is None:
            keys += fingerprint.mix(np.arange(keys.shape[1], dtype=np.uint64))[None, :, None]
            return len(set(self.wiring.widths[space])) == 1
        if writer.role == "depthwise":
            found = [fingerprint.filters(each)[:, None] for each in flat_weights(writer.layer)]
            parts = np.ones((1, self.tasks), np.int64)
        else:
            found, parts = self.by_part(fingerprint.rows, writer.layer, writer.layer.inputs[0])
        self._add(keys, found, parts, writer.value, writer.position, writer.value)
        return np.asarray(parts.T @ parts > 0)

    def _add(self, keys: Keys, found: list[Array], parts: Array, value: str, position: int, salt: str) -> None:
        """Add the fingerprints by part, *found*, of one of the spaces that *value* carries."""
        factor = _salt(f"{salt} {position}")
        for task, each in enumerate(found):
            mine = each[self.channels(value, position, task)] @ parts.astype(np.uint64)
            keys[task, : len(mine)] += mine * factor

    def by_part(self, compute: ByPart, layer: FamilyLayer, over: str) -> tuple[list[Array], Array]:
        """*compute* for each task, by part of *over*, which the layer reads or writes; the tasks of each part."""
        versions = self.versions(over)
        known = self._known.get((compute, layer.output))
        if known is None or known[0] != versions:
            parts = self.incidence(over)
            sides = (self._side(over, task) for task in range(self.tasks))
            found = [compute(each, *side, len(parts)) for each, side in zip(flat_weights(layer), sides, strict=True)]
            known = self._known[compute, layer.output] = versions, found, parts
        return known[1], known[2]

    def _side(self, value: str, task: int) -> tuple[Array, Array]:
        """The classes of the channels of *value* as *task* has them, and their parts, counted through its spaces."""
        labels, parts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        label = part = 0
        for space in self.wiring.carries[value]:
            partition = self.partitions[space]
            mine = partition.labels[task]
            labels.append(mine + label)
            parts.append(np.where(partition.part_of[mine] == NONE, NONE, partition.part_of[mine] + part))
            label += len(partition.members)
            part += len(partition.parts)
        return np.concatenate(labels), np.concatenate(parts)


def flat_weights(layer: FamilyLayer) -> list[Array]:
    """Each task's weight as [out, in, taps], all of one type."""
    weights = [op.weight for op in layer.ops if op.weight is not None]
    dtype = np.result_type(*weights)
    return [each.reshape(*each.shape[:2], -1).astype(dtype, copy=False) for each in weights]


def _salt(name: str) -> np.uint64:
    """An odd number of *name*'s own."""
    number = np.array([int.from_bytes(name.encode(), "little") % (2**61 - 1)], np.uint64)
    return np.uint64(fingerprint.mix(number)[0] | np.uint64(1))
