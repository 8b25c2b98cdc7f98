"""Fingerprints of weights for every pair of tasks, by which channels are found to be the same: ``Evidence``.

A 64-bit fingerprint of a row or column of a convolution's weight is a sum over its weights, each scrambled and
multiplied by a random odd number that depends on its tap and on the *label* of its channel. Channels of two models that
were matched have the same label, wherever they lie in either model. So equal fingerprints mean equal weights under this
matching (but for a chance of about 2**-60). Sums are exact (modulo 2**64), so that sums over parts can be added up.
Minus zero counts as zero.

A *channel space* is a set of channels that layers pass on in one order (``family``); a value carries one or several. A
*class* has channels of a space that are the same, one for each of some tasks; its number is their label. A *part* has
the classes of one set of at least two tasks. The *incidence* of a value, [parts, tasks], is 1 where a task has a part.

Two tasks agree on a channel if its filters agree on the inputs that the two share (and, seen from its readers, if their
weights for it agree on the outputs that the two share). The fingerprint of a channel therefore depends on the task it
is compared with; it is the sum over those parts of the layer's other side that hold both tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.family import Family, FamilyLayer, Wiring, Writer, role
from weft_stitch.net import Array

Keys = NDArray[np.uint64]
"""Fingerprints: sums modulo 2**64."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: the multiplier of splitmix64 and of Fibonacci hashing."""
_CHUNK = 1 << 17
"""Weights scrambled at a time: 1 MB, which stays in a core's cache."""


def row_keys(weight: Array, labels: Array, parts: Array, count: int) -> Keys:
    """Fingerprints [out, count] of each output of *weight* [out, in, taps] over the inputs of each of *count* parts.

    *labels*, *parts*: [in], the label and the part of each input; part -1 for inputs that are left out.
    """
    taps = weight.shape[2]
    factors = multipliers(labels, taps)
    factors[parts < 0] = 0
    result = np.zeros((len(weight), count), np.uint64)
    for chunk in _chunks(weight):
        words = scramble(weight[chunk])
        if count == 1:
            result[chunk, 0] = np.einsum("oit,it->o", words, factors)
        elif count > 1:
            result[chunk] = _sum_by_part(np.einsum("oit,it->oi", words, factors), parts, count)
    return result


def column_keys(weight: Array, labels: Array, parts: Array, count: int) -> Keys:
    """Fingerprints [in, count] of each input of *weight*, over the outputs of each part: ``row_keys`` transposed.

    *labels*, *parts*: [out].
    """
    factors = multipliers(labels, weight.shape[2])
    factors[parts < 0] = 0
    result = np.zeros((weight.shape[1], count), np.uint64)
    for chunk in _chunks(weight):
        words = scramble(weight[chunk])
        if count == 1:
            result[:, 0] += np.einsum("oit,ot->i", words, factors[chunk])
        elif count > 1:
            result += _sum_by_part(np.einsum("oit,ot->io", words, factors[chunk]), parts[chunk], count)
    return result


def filter_keys(weight: Array) -> Keys:
    """For each channel of a depthwise *weight* [channels, 1, taps], the fingerprint of its filter."""
    return np.asarray(np.einsum("oit,it->o", scramble(weight), multipliers(np.zeros(1, np.int64), weight.shape[2])))


def multipliers(labels: Array, taps: int) -> Keys:
    """A random odd number for each label and tap: [labels, taps]."""
    return mix(number_labels(labels, taps)) | np.uint64(1)


def number_labels(labels: Array, count: int) -> Keys:
    """*count* numbers for each label, [labels, count]; all are different if the labels are."""
    return np.asarray(labels[:, None] * count + np.arange(count), np.uint64)


def mix(number: Keys) -> Keys:
    """A pseudo-random number for each *number* (the finaliser of splitmix64, by Steele, Lea and Flood)."""
    number = (number + np.uint64(1)) * _GOLDEN
    number = (number ^ (number >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    number = (number ^ (number >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(number ^ (number >> np.uint64(31)))


def scramble(weight: Array) -> Keys:
    """The bits of each weight as a 64-bit number whose low bits depend on all of them; 0 for zero.

    Without scrambling, weights that differ only in their signs would differ by multiples of 2**31. The multiplication
    by the golden ratio keeps different 32-bit words different even after the shift.
    """
    # adding zero turns -0 into 0, whose bits are zero
    words: Keys = (weight + weight.dtype.type(0)).view(f"u{weight.dtype.itemsize}").astype(np.uint64)
    if weight.dtype.itemsize > 4:  # 64-bit words are too long for the shift below
        words ^= words >> np.uint64(29)
        return words * _GOLDEN
    words *= _GOLDEN
    words >>= np.uint64(30)
    return words


def _sum_by_part(products: Keys, parts: Array, count: int) -> Keys:
    """The sums of the columns of *products* that belong to each of *count* parts: [rows, count]."""
    order = np.argsort(parts, kind="stable")
    present, starts = np.unique(parts[order], return_index=True)
    sums = np.add.reduceat(products[:, order], starts, axis=1)
    result = np.zeros((len(products), count), np.uint64)
    is_part = present >= 0
    result[:, present[is_part]] = sums[:, is_part]
    return result


def _chunks(weight: Array) -> Iterator[slice]:
    """Slices of the outputs of *weight* that have at most ``_CHUNK`` weights each."""
    step = max(1, _CHUNK // max(1, weight[0].size)) if len(weight) else 1
    return (slice(start, start + step) for start in range(0, len(weight), step))


# --- what pairs of tasks share ----------------------------------------------------------------------------------------

ByPart = Callable[[Array, Array, Array, int], Array]
"""A function that sums over a weight [out, in, taps], by parts of its input or output side, such as ``row_keys``.

Arguments: the weight, the label and the part of each channel of that side, and the number of parts.
"""


class Common(NamedTuple):
    """The channels of a value that two tasks share; each array has an entry for every such channel."""

    positions: Array
    """Index of each channel's space among those that the value carries."""
    classes: Array
    """The class of each channel in its space."""
    channels_a: Array
    """The first task's channel of the value."""
    channels_b: Array
    """The second task's channel of the value."""


class PairKeys(NamedTuple):
    """Fingerprints of the channels of a space."""

    keys: Keys
    """[task, channel, other task]: equal if the channels of the two tasks agree; zero if only zeros are compared."""
    allowed: Array
    """[task, task]: whether every writer can compare the two tasks, which must share some of its inputs."""

    def agree(self, members_a: Array, members_b: Array) -> Array:
        """A mask [pairs of classes]: whether all tasks of one class agree with all tasks of the other.

        *members_a*, *members_b*: the first and the second class of each pair, as each task's channel [pairs, tasks].
        """
        result = np.ones(len(members_a), bool)
        for task_a in np.flatnonzero((members_a != NONE).any(axis=0)):
            for task_b in np.flatnonzero((members_b != NONE).any(axis=0)):
                pairs = np.flatnonzero((members_a[:, task_a] != NONE) & (members_b[:, task_b] != NONE))
                keys_a = self.keys[task_a, members_a[pairs, task_a], task_b]
                keys_b = self.keys[task_b, members_b[pairs, task_b], task_a]
                result[pairs] &= (keys_a == keys_b) & self.allowed[task_a, task_b]
        return result

    def disagreeing(self, members: Array) -> Array:
        """A mask [classes, tasks, tasks] of the pairs of tasks that disagree in a class.

        *members*: each task's channel, [classes, tasks].
        """
        tasks = np.arange(members.shape[1])
        present = members != NONE
        keys = self.keys[tasks, np.maximum(members, 0)]
        both = present[:, :, None] & present[:, None, :] & (tasks[:, None] < tasks)  # each pair once
        return np.asarray(both & ((keys != keys.transpose(0, 2, 1)) | ~self.allowed))


class _CachedSums(NamedTuple):
    """A result of ``Evidence.by_part``, and the versions of the partitions that it is for."""

    versions: tuple[int, ...]
    sums: list[Array]
    """For each task, the sums over the parts of the value."""
    incidence: Array
    """[parts, tasks]."""


class Evidence:
    """Compares tasks by the fingerprints of their weights, given a partition of each channel space."""

    def __init__(self, family: Family, wiring: Wiring, partitions: Mapping[str, Partition]) -> None:
        self.family, self.wiring, self.partitions = family, wiring, partitions
        self.tasks = family.tasks
        self.layers = [layer for layer in family.layers if role(layer) in ("dense", "depthwise")]
        """The layers whose weights are compared: dense and depthwise convolutions."""
        self._cached: dict[tuple[ByPart, str], _CachedSums] = {}
        """Function and layer output -> its last result."""

    def readers(self, space: str) -> list[FamilyLayer]:
        """The dense layers that read *space*."""
        carries = self.wiring.carries
        return [layer for layer in self.layers if role(layer) == "dense" and space in carries[layer.inputs[0]]]

    def pair_keys(self, space: str, writers: Iterable[Writer], readers: Iterable[FamilyLayer] = ()) -> PairKeys:
        """The fingerprints of the channels of *space*, in the weights of *writers* and *readers*."""
        keys = np.zeros((self.tasks, max(self.wiring.widths[space]), self.tasks), np.uint64)
        allowed = ~np.eye(self.tasks, dtype=bool)
        for writer in writers:
            allowed &= self._add_writer(keys, space, writer)
        for layer in readers:
            sums, incidence = self.by_part(column_keys, layer, layer.output)
            for position in self.positions(layer.inputs[0], space):
                self._add_keys(keys, sums, incidence, layer.inputs[0], position, use=f"{layer.output} reads")
        return PairKeys(keys, allowed)

    def common(self, value: str, task_a: int, task_b: int) -> Common:
        """The channels of *value* that tasks *task_a* and *task_b* share."""
        fields = [np.zeros((4, 0), np.int64)]  # one row for each field of ``Common``
        starts = np.zeros(2, np.int64)  # the first channel of the space in each of the two tasks
        for position, space in enumerate(self.wiring.carries[value]):
            partition = self.partitions[space]
            classes = partition.together(task_a, task_b)
            channels_a, channels_b = partition.members[classes][:, [task_a, task_b]].T + starts[:, None]
            fields.append(np.stack([np.full(len(classes), position), classes, channels_a, channels_b]))
            starts += np.array([partition.widths[task_a], partition.widths[task_b]])
        return Common(*np.concatenate(fields, axis=1))

    def incidence(self, value: str) -> Array:
        """[parts of the value, tasks]: 1 if the task has the part, else 0."""
        parts = [part.tasks for space in self.wiring.carries[value] for part in self.partitions[space].parts]
        return np.array(parts, np.int64).reshape(len(parts), self.tasks)

    @property
    def stored(self) -> int:
        """Number of weights of all layers if shared weights are stored once."""
        return sum(self._count_stored(layer) for layer in self.layers)

    def _count_stored(self, layer: FamilyLayer) -> int:
        """Number of weights of *layer* if shared weights are stored once."""
        tasks, counts = self._class_counts(layer.output)
        taps = int(flat_weights(layer)[0].shape[2])
        if role(layer) == "depthwise":
            return int(counts.sum()) * taps
        input_tasks, input_counts = self._class_counts(layer.inputs[0])
        # two sets of tasks have weights between them if some task is in both
        return int(counts @ (tasks @ input_tasks.T > 0) @ input_counts) * taps

    def _class_counts(self, value: str) -> tuple[Array, Array]:
        """Each set of tasks with classes of *value*, as a mask [sets, tasks], and its number of classes."""
        sets = [task_classes for space in self.wiring.carries[value] for task_classes in self.partitions[space].sets]
        counts = np.array([len(task_classes.classes) for task_classes in sets])
        return np.array([task_classes.tasks for task_classes in sets], np.int64), counts

    def versions(self, value: str) -> tuple[int, ...]:
        """The versions of the partitions of the spaces that *value* carries."""
        return tuple(self.partitions[space].version for space in self.wiring.carries[value])

    def channels(self, value: str, position: int, task: int) -> slice:
        """The range of *task*'s channels of *value* that belong to the space at *position*."""
        return list(self.wiring.slices(value, task))[position][1]

    def positions(self, value: str, space: str) -> list[int]:
        """The indices of *space* among those that *value* carries."""
        return [position for position, name in enumerate(self.wiring.carries[value]) if name == space]

    def _add_writer(self, keys: Keys, space: str, writer: Writer) -> Array | bool:
        """Add the fingerprints of *writer* to *keys* (``PairKeys.keys``).

        Return a mask [task, task] of the pairs of tasks that it can compare, or one answer for all pairs.
        """
        if writer.role == "separate":  # each task runs it alone, so nothing of its output is shared
            return False
        if writer.layer is None:  # an input: its channels are the same if their indices are
            keys += mix(np.arange(keys.shape[1], dtype=np.uint64))[None, :, None]
            return len(set(self.wiring.widths[space])) == 1
        if writer.role == "depthwise":
            sums = [filter_keys(weight)[:, None] for weight in flat_weights(writer.layer)]
            incidence = np.ones((1, self.tasks), np.int64)  # a filter is one part, which all tasks have
        else:
            sums, incidence = self.by_part(row_keys, writer.layer, writer.layer.inputs[0])
        self._add_keys(keys, sums, incidence, writer.value, writer.position, use=writer.value)
        return np.asarray(incidence.T @ incidence > 0)

    def _add_keys(
        self, keys: Keys, sums: list[Array], incidence: Array, value: str, position: int, *, use: str
    ) -> None:
        """Add the fingerprints of a space in the weights of one layer to *keys* [task, channel, other task].

        The layer writes or reads *value*; the space is at *position* among those that *value* carries. *sums*: for each
        task, fingerprints [channels of *value*, parts], over the parts of what is on the layer's other side.
        *incidence*: of that side, [parts, tasks]. *use*: a name for this use of the space. From it follows an odd
        factor on these fingerprints, so that those of several uses do not cancel.
        """
        factor = _odd_factor(f"{use} {position}")
        for task, task_sums in enumerate(sums):
            # [channels of the space, other task]: the sum over the parts that both tasks have
            pair_sums = task_sums[self.channels(value, position, task)] @ incidence.astype(np.uint64)
            keys[task, : len(pair_sums)] += pair_sums * factor

    def by_part(self, compute: ByPart, layer: FamilyLayer, over: str) -> tuple[list[Array], Array]:
        """The result of *compute* for each task, by part of the value *over*, and ``incidence(over)``.

        *over*: the value that the layer reads or writes. Results are cached until a partition of *over* changes.
        """
        versions = self.versions(over)
        cached = self._cached.get((compute, layer.output))
        if cached is None or cached.versions != versions:
            incidence, sums = self.incidence(over), list[Array]()
            for task, weight in enumerate(flat_weights(layer)):
                labels, part_of = self._labels_and_parts(over, task)
                sums.append(compute(weight, labels, part_of, len(incidence)))
            cached = self._cached[compute, layer.output] = _CachedSums(versions, sums, incidence)
        return cached.sums, cached.incidence

    def _labels_and_parts(self, value: str, task: int) -> tuple[Array, Array]:
        """For each channel of *value* in *task*: the number of its class (its label), and that of its part or ``NONE``.

        A class has channels that are the same in several tasks; a part has the classes of one set of tasks. A partition
        numbers both within its space. Here the numbers go on from one space to the next, so that they differ.
        """
        labels, parts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        first_class = first_part = 0
        for space in self.wiring.carries[value]:
            partition = self.partitions[space]
            classes = partition.labels[task]
            space_parts = partition.part_of[classes]
            labels.append(classes + first_class)
            parts.append(np.where(space_parts == NONE, NONE, space_parts + first_part))
            first_class += len(partition.members)
            first_part += len(partition.parts)
        return np.concatenate(labels), np.concatenate(parts)


def flat_weights(layer: FamilyLayer) -> list[Array]:
    """Each task's weight as [out, in, taps], all of one number type."""
    weights = [op.weight for op in layer.ops if op.weight is not None]
    dtype = np.result_type(*weights)
    return [weight.reshape(*weight.shape[:2], -1).astype(dtype, copy=False) for weight in weights]


def _odd_factor(name: str) -> np.uint64:
    """A pseudo-random odd number that depends on *name*."""
    # modulo a prime, so that all letters of a long name count
    number = np.array([int.from_bytes(name.encode(), "little") % (2**61 - 1)], np.uint64)
    return np.uint64(mix(number)[0] | np.uint64(1))
