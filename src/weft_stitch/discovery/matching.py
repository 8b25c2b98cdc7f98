"""Joins classes with equal weights: ``merge`` (all are equal), ``vote`` (most are), ``merge_near`` (nearly equal).

A class has channels of a space that are taken to be the same, at most one of each task (``partition``). Weights are
compared by fingerprints, the *keys* (``evidence``).

A single input channel that is wrongly taken to be shared makes all filters of two tasks look different. So where two
tasks that share inputs have hardly an output in common, single kernels vote: filters that have the same kernel for many
inputs belong together, and ``comparison.repair`` finds the inputs on which they differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft_stitch.discovery.evidence import (
    Evidence,
    Keys,
    PairKeys,
    flat_weights,
    mix,
    multipliers,
    number_labels,
    scramble,
)
from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.family import FamilyLayer, Writer
from weft_stitch.net import Array


def merge(partition: Partition, evidence: PairKeys, *, ties: bool = False, one_pair_suffices: bool = False) -> None:
    """Join all classes whose weights agree, pair of tasks by pair of tasks.

    *ties*: channels of one task that look the same are paired in their order with those of the other task. Without it
    they are not joined, nor are channels whose known weights are all zero. *one_pair_suffices*: require agreement of
    only one task of each class; the others may disagree because too many input channels are taken to be shared.
    """
    common_keys = _keys_by_class(partition, evidence)
    if common_keys is not None and not ties:
        _merge_by_key(partition, common_keys)
        return
    for task_a, task_b in _pairs(partition, evidence):
        _merge_pair(partition, evidence, task_a, task_b, ties=ties, one_pair_suffices=one_pair_suffices)


def merge_strangers(partition: Partition, evidence: PairKeys) -> None:
    """``merge`` with ties, only for pairs of tasks that share nothing in the space yet."""
    for task_a, task_b in _pairs(partition, evidence):
        if not len(partition.together(task_a, task_b)):
            _merge_pair(partition, evidence, task_a, task_b, ties=True, one_pair_suffices=False)


def mergeable(partition: Partition, evidence: PairKeys) -> bool:
    """Whether any two classes may agree: a cheap check before ``merge``. True may be wrong, False is not."""
    common_keys = _keys_by_class(partition, evidence)
    if common_keys is not None:
        return len(np.unique(common_keys)) < len(common_keys)
    for task_a, task_b in _pairs(partition, evidence):
        channels_a, channels_b = partition.apart(task_a, task_b), partition.apart(task_b, task_a)
        if np.isin(evidence.keys[task_a, channels_a, task_b], evidence.keys[task_b, channels_b, task_a]).any():
            return True
    return False


def _keys_by_class(partition: Partition, evidence: PairKeys) -> Keys | None:
    """One fingerprint per class; None if a class's channels have different ones, or they depend on the other task."""
    keys = evidence.keys[:, :, 0]  # compared with task 0; they must be the same for all, and every pair be comparable
    if evidence.allowed.sum() != len(keys) * (len(keys) - 1) or (evidence.keys != keys[:, :, None]).any():
        return None
    present = partition.members != NONE
    table = keys[np.arange(len(keys)), np.maximum(partition.members, 0)]  # [classes, tasks]
    first = table[np.arange(len(table)), np.argmax(present, axis=1)]
    return None if (present & (table != first[:, None])).any() else first


def _merge_by_key(partition: Partition, keys: Keys) -> None:
    """Join all classes of equal *keys*, unless the key is zero or some task has several of these classes."""
    order = np.argsort(keys, kind="stable")
    # where each run of equal keys begins in *order* (which is empty without keys); a run is joined to its first class
    starts = np.flatnonzero(np.append(True, keys[order][1:] != keys[order][:-1])) if len(keys) else order
    present = (partition.members[order] != NONE).astype(np.int64)
    unambiguous = (np.add.reduceat(present, starts, axis=0) <= 1).all(axis=1) & (keys[order[starts]] != 0)
    lengths = np.diff(np.append(starts, len(order)))
    target = np.repeat(order[starts], lengths)
    joins_target = np.repeat(unambiguous, lengths) & (target != order)
    partition.join(target[joins_target], order[joins_target])


def _pairs(partition: Partition, evidence: PairKeys) -> Iterator[tuple[int, int]]:
    """All pairs of tasks that the evidence can compare."""
    tasks = range(len(partition.widths))
    return ((task_a, task_b) for task_b in tasks for task_a in range(task_b) if evidence.allowed[task_a, task_b])


def _merge_pair(
    partition: Partition, evidence: PairKeys, task_a: int, task_b: int, *, ties: bool, one_pair_suffices: bool
) -> None:
    """``merge`` for tasks *task_a* and *task_b*: join their classes that agree."""
    channels_a, channels_b = partition.apart(task_a, task_b), partition.apart(task_b, task_a)
    paired_a, paired_b = pair_up(
        evidence.keys[task_a, channels_a, task_b], evidence.keys[task_b, channels_b, task_a], ties=ties
    )
    if not len(paired_a):
        return
    classes_a = partition.labels[task_a][channels_a[paired_a]]
    classes_b = partition.labels[task_b][channels_b[paired_b]]
    joinable = partition.joinable(classes_a, classes_b)
    if not one_pair_suffices:
        joinable[joinable] = evidence.agree(
            partition.members[classes_a[joinable]], partition.members[classes_b[joinable]]
        )
    partition.join(classes_a[joinable], classes_b[joinable])


def pair_up(left: Keys, right: Keys, *, ties: bool) -> tuple[Array, Array]:
    """Pair up indices of *left* and of *right* that have equal keys; each index is used once.

    With *ties*, the n-th index of a key in *left* is paired with its n-th index in *right*. Without, only keys count
    that are not zero and that each side has once.
    """
    left_order, right_order = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    left_keys, right_keys = left[left_order], right[right_order]
    # for each key on the right: the first place of that key on either side, and which of its occurrences this is
    left_start, right_start = np.searchsorted(left_keys, right_keys), np.searchsorted(right_keys, right_keys)
    partner = left_start + np.arange(len(right_keys)) - right_start
    matched = partner < len(left_keys)
    matched[matched] = left_keys[partner[matched]] == right_keys[matched]
    if not ties:
        matched &= (np.searchsorted(left_keys, right_keys, "right") == left_start + 1) & (right_keys != 0)
        matched &= np.searchsorted(right_keys, right_keys, "right") == right_start + 1
    return left_order[partner[matched]], right_order[matched]


# --- voting -----------------------------------------------------------------------------------------------------------

_VOTERS = 8
"""Number of input channels whose kernels vote."""
_HARDLY = 0.1
"""A vote is held on two tasks that share less than this fraction of the outputs; it must find at least as many."""
_LEADERS = 6
"""Limit on the tasks with which each task is compared: one of each group of tasks that share channels."""

_COARSE = 64
"""Width of a rounding step, as a multiple of the tolerance: the narrower, the more near weights round differently."""

MAJORITY, MINORITY, NEVER = 0.5, 0.2, 1.0
"""Quorums of a vote: two filters are joined if more than this fraction of their compared kernels is equal."""


def vote(evidence: Evidence, space: str, writer: Writer, quorum: float, tolerance: float = 0.0) -> set[float]:
    """Join classes of *space* by a vote of the kernels of *writer*, a dense layer.

    Return the other quorums that would have joined a different number of classes.
    """
    others: set[float] = set()
    leaders: list[int] = []  # of each group of tasks that share something, only the first is compared with the rest
    for task_b in range(evidence.tasks):
        if any(_share_enough(evidence, space, task_a, task_b) for task_a in leaders):
            continue
        for task_a in leaders:
            others |= _vote_pair(evidence, space, writer, task_a, task_b, quorum, tolerance)
        if len(leaders) < _LEADERS:
            leaders.append(task_b)
    return others


def _share_enough(evidence: Evidence, space: str, task_a: int, task_b: int) -> bool:
    """Whether two tasks share enough of *space* to need no vote."""
    partition = evidence.partitions[space]
    return len(partition.together(task_a, task_b)) >= _few_channels(partition, task_a, task_b)


def _few_channels(partition: Partition, task_a: int, task_b: int) -> float:
    """The number of shared channels below which a vote is held, or its result ignored."""
    return max(1.0, _HARDLY * min(partition.widths[task_a], partition.widths[task_b]))


def _vote_pair(
    evidence: Evidence, space: str, writer: Writer, task_a: int, task_b: int, quorum: float, tolerance: float
) -> set[float]:
    """Join classes of two tasks by vote; return the quorums that would have joined a different number."""
    assert writer.layer is not None
    partition = evidence.partitions[space]
    inputs = evidence.common(writer.layer.inputs[0], task_a, task_b)
    if not len(inputs.classes):
        return set()
    voters = np.unique(np.linspace(0, len(inputs.classes) - 1, _VOTERS).astype(int))
    weights = flat_weights(writer.layer)
    free = partition.apart(task_a, task_b), partition.apart(task_b, task_a)  # channels that they do not share
    kernel_keys = [
        _kernel_keys(
            weights[task][evidence.channels(writer.value, writer.position, task)][rows][:, columns[voters]], tolerance
        )
        for task, rows, columns in zip((task_a, task_b), free, (inputs.channels_a, inputs.channels_b), strict=True)
    ]
    left, right, support = _count_votes(*kernel_keys)
    classes_a, classes_b = partition.labels[task_a][free[0][left]], partition.labels[task_b][free[1][right]]
    joinable = partition.joinable(classes_a, classes_b)
    # NEVER elects no pair
    elected = {fraction: joinable & (support > fraction) for fraction in (MAJORITY, MINORITY, NEVER)}
    least_shared = _few_channels(partition, task_a, task_b)
    counts = {fraction: pairs.sum() if pairs.sum() >= least_shared else 0 for fraction, pairs in elected.items()}
    if counts[quorum]:
        partition.join(classes_a[elected[quorum]], classes_b[elected[quorum]])
    return {fraction for fraction, count in counts.items() if count != counts[quorum]}


def _kernel_keys(weight: Array, tolerance: float) -> Keys:
    """The fingerprints [out, in] of the kernels of *weight* [out, in, taps]; they differ for different inputs."""
    if tolerance > 0:  # near weights mostly round to the same step
        weight = np.rint(weight / (_COARSE * tolerance)).astype(np.float32)
    factors = multipliers(np.arange(weight.shape[1]), weight.shape[2])
    return np.asarray(np.einsum("oit,it->oi", scramble(weight), factors))


def _count_votes(keys_a: Keys, keys_b: Keys) -> tuple[Array, Array, Array]:
    """Rows of *keys_a* and *keys_b* [filters, inputs] that are equal in some columns, and the fraction of such columns.

    Each row is in at most one pair: the one of most votes; of equal ones that of smaller rows, as sorting is stable.
    """
    left, right = pair_up(keys_a.ravel(), keys_b.ravel(), ties=False)
    voters = keys_a.shape[1]
    # a pair of rows as one number, counted once for every column in which the rows are equal
    pairs, votes = np.unique(left // voters * len(keys_b) + right // voters, return_counts=True)
    by_votes = np.argsort(-votes, kind="stable")
    pairs, votes = pairs[by_votes], votes[by_votes]
    rows, partners = pairs // len(keys_b), pairs % len(keys_b)
    best_of_row = np.zeros(len(pairs), bool)
    best_of_row[np.unique(rows, return_index=True)[1]] = True
    best_of_partner = np.zeros(len(pairs), bool)
    best_of_partner[np.unique(partners, return_index=True)[1]] = True
    chosen = best_of_row & best_of_partner
    return rows[chosen], partners[chosen], votes[chosen] / voters


_DIRECTIONS = 16
"""Length of a sketch: longer ones give fewer false candidates, and cost time and memory."""
_FARTHEST = 5.0
"""Limit on a sketch's squared distance, as a multiple of the true one: exceeded once in 10**9 with 16 directions."""
_ROUNDING = 1e-5
"""Relative error of squared distances: they are small differences of large float32 numbers."""
_CHUNK = 1 << 20
"""Weights compared at a time: 4 MB."""


class WeightView(NamedTuple):
    """The weights of one layer by which channels of two tasks are compared; a pair has an entry for each task."""

    sketches: tuple[Array, Array]
    """Sketches of the channels' weights (see ``merge_near``), [channels, directions]."""
    weights: tuple[Array, Array]
    """[channels, channels of the layer's other side, taps]; also the other side's channels that are not shared."""
    shared: tuple[Array, Array]
    """The channels of the layer's other side that the two tasks share."""

    @property
    def size(self) -> int:
        """Number of weights compared per channel."""
        return len(self.shared[0]) * int(self.weights[0].shape[2])

    def distances(self, left: Array, right: Array) -> Array:
        """The largest difference of weights for each pair of a channel of the first task and one of the second."""
        step = max(1, _CHUNK // max(1, self.size))
        distances = [np.zeros(0)]
        for start in range(0, len(left), step):
            pair = (left[start : start + step], right[start : start + step])
            weights_a, weights_b = (
                weight[rows].take(shared, axis=1)
                for weight, rows, shared in zip(self.weights, pair, self.shared, strict=True)
            )
            distances.append(np.abs(weights_a - weights_b).max(axis=(1, 2), initial=0))
        return np.concatenate(distances)


def merge_near(
    evidence: Evidence,
    space: str,
    writers: Sequence[Writer],
    readers: Sequence[FamilyLayer],
    tolerance: float,
    *,
    ties: bool = False,
    strangers: bool = False,
) -> None:
    """Join classes of *space* whose weights differ by at most *tolerance*, pair of tasks by pair of tasks.

    Compared are the weights of *writers*, which compute the channels, and of *readers*, which read them; only those of
    the two tasks, not of the others of their classes. Without *ties*, channels of nothing but zeros (within the
    tolerance) are left alone. *strangers*: only compare tasks that share nothing yet, with ties.

    Candidates are found by *sketches*: products of a channel's weights with a few random vectors (directions). Like
    fingerprints they are sums over the layer's other side, of which shared parts can be taken alone. The distance of
    two sketches is about that of the weights.
    """
    partition = evidence.partitions[space]
    is_input = any(writer.role == "input" for writer in writers)
    # grouped convolutions share nothing; inputs are paired by index, for which they need equal widths
    filtered = [writer for writer in writers if writer.role in ("dense", "depthwise")]
    if len(filtered) + is_input < len(writers) or not filtered or (is_input and len(set(partition.widths)) > 1):
        return
    for task_b in range(1, evidence.tasks):
        for task_a in range(task_b):
            if strangers and len(partition.together(task_a, task_b)):
                continue
            channels_a, channels_b = partition.apart(task_a, task_b), partition.apart(task_b, task_a)
            views = [
                *_writer_weights(evidence, filtered, task_a, task_b),
                *_reader_weights(evidence, space, readers, task_a, task_b),
            ]
            # every writer must share some inputs of the two tasks, or it could not tell channels apart
            if len(channels_a) and len(channels_b) and all(view.size for view in views[: len(filtered)]):
                paired_a, paired_b = _nearest(
                    views, channels_a, channels_b, tolerance, ties=ties or strangers, in_place=is_input
                )
                classes_a, classes_b = partition.labels[task_a][paired_a], partition.labels[task_b][paired_b]
                joinable = partition.joinable(classes_a, classes_b)
                partition.join(classes_a[joinable], classes_b[joinable])


def _writer_weights(evidence: Evidence, writers: Sequence[Writer], task_a: int, task_b: int) -> Iterator[WeightView]:
    """The weights with which *writers* compute the channels, for tasks *task_a* and *task_b*."""
    for writer in writers:
        assert writer.layer is not None
        ranges = [evidence.channels(writer.value, writer.position, task) for task in (task_a, task_b)]
        weights = flat_weights(writer.layer)
        if writer.role == "depthwise":
            single_channel = np.zeros(1, np.int64)  # a filter has one input, here of label 0 and in part 0
            sketches = [row_sketches(weights[task], single_channel, single_channel, 1) for task in (task_a, task_b)]
            shared, common_parts = (single_channel, single_channel), np.ones(1, bool)
        else:
            sums, incidence = evidence.by_part(row_sketches, writer.layer, writer.layer.inputs[0])
            sketches = [sums[task_a], sums[task_b]]
            common_parts = (incidence[:, task_a] & incidence[:, task_b]).astype(bool)
            inputs = evidence.common(writer.layer.inputs[0], task_a, task_b)
            shared = inputs.channels_a, inputs.channels_b
        sketch_a, sketch_b = (
            sketch[channel_range][:, common_parts].sum(axis=1)
            for sketch, channel_range in zip(sketches, ranges, strict=True)
        )
        yield WeightView((sketch_a, sketch_b), (weights[task_a][ranges[0]], weights[task_b][ranges[1]]), shared)


def _reader_weights(
    evidence: Evidence, space: str, readers: Sequence[FamilyLayer], task_a: int, task_b: int
) -> Iterator[WeightView]:
    """The weights with which *readers* read the channels of *space*, for tasks *task_a* and *task_b*."""
    for layer in readers:
        weights = [weight.swapaxes(0, 1) for weight in flat_weights(layer)]  # [in, out, taps]
        sums, incidence = evidence.by_part(column_sketches, layer, layer.output)
        common_parts = (incidence[:, task_a] & incidence[:, task_b]).astype(bool)
        outputs = evidence.common(layer.output, task_a, task_b)
        for position in evidence.positions(layer.inputs[0], space):
            ranges = [evidence.channels(layer.inputs[0], position, task) for task in (task_a, task_b)]
            sketch_a, sketch_b = (
                sums[task][channel_range][:, common_parts].sum(axis=1)
                for task, channel_range in zip((task_a, task_b), ranges, strict=True)
            )
            yield WeightView(
                (sketch_a, sketch_b),
                (weights[task_a][ranges[0]], weights[task_b][ranges[1]]),
                (outputs.channels_a, outputs.channels_b),
            )


def row_sketches(weight: Array, labels: Array, parts: Array, count: int) -> Array:
    """For each output of *weight* [out, in, taps], its sketch over the inputs of each of *count* parts.

    *labels*, *parts*: [in], the class and the part of each input. The result is [out, parts, directions].
    """
    directions = _directions(labels, weight.shape[2])
    result = np.zeros((len(weight), count, _DIRECTIONS), np.float32)
    for part in range(count):
        inputs = np.flatnonzero(parts == part)
        result[:, part] = weight[:, inputs].reshape(len(weight), -1) @ directions[inputs].reshape(-1, _DIRECTIONS)
    return result


def column_sketches(weight: Array, labels: Array, parts: Array, count: int) -> Array:
    """For each input of *weight*, its sketch over the outputs of each part: [in, parts, directions]."""
    return row_sketches(weight.swapaxes(0, 1), labels, parts, count)


def _directions(labels: Array, taps: int) -> Array:
    """Pseudo-random numbers of mean square one, [labels, taps, directions]; equal for equal labels."""
    hashes = mix(number_labels(labels, taps * _DIRECTIONS))
    # the upper 24 bits, which float32 holds exactly; a uniform number in [-0.5, 0.5) has variance 1/12
    uniform = (hashes >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    return (uniform * np.float32(12**0.5)).reshape(len(labels), taps, _DIRECTIONS)


def _nearest(
    views: list[WeightView], channels_a: Array, channels_b: Array, tolerance: float, *, ties: bool, in_place: bool
) -> tuple[Array, Array]:
    """Pairs of *channels_a* and *channels_b* that are within *tolerance* in every view; nearest pairs are chosen first.

    Each channel is in one pair at most. *in_place*: only pair channels of the same index.
    """
    sketches_a, sketches_b = (np.sum([view.sketches[side] for view in views], axis=0) for side in (0, 1))
    # NaN and infinities are near nothing
    channels_a = channels_a[np.isfinite(sketches_a[channels_a]).all(axis=1)]
    channels_b = channels_b[np.isfinite(sketches_b[channels_b]).all(axis=1)]
    size = sum(view.size for view in views)
    candidates = _candidates(sketches_a[channels_a], sketches_b[channels_b], tolerance, size)
    left, right = channels_a[candidates[0]], channels_b[candidates[1]]
    distance = np.max([view.distances(left, right) for view in views], axis=0)
    close = (distance <= tolerance) & ((left == right) | (not in_place))
    if not ties:  # leave out channels of nothing but zeros
        sizes = [np.abs(view.weights[0].take(view.shared[0], axis=1)).max(axis=(1, 2), initial=0) for view in views]
        close &= np.max(sizes, axis=0)[left] > tolerance
    order = np.flatnonzero(close)[np.argsort(distance[close], kind="stable")]
    paired: tuple[set[int], set[int]] = set(), set()
    chosen = []
    for index in order.tolist():
        if left[index] not in paired[0] and right[index] not in paired[1]:
            paired[0].add(left[index])
            paired[1].add(right[index])
            chosen.append(index)
    return left[chosen], right[chosen]


def _candidates(sketches_a: Array, sketches_b: Array, tolerance: float, count: int) -> tuple[Array, Array]:
    """Pairs of sketches [channels, directions] within *tolerance*: filtered by the first direction, then by all.

    *count*: the number of weights compared per channel.
    """
    limit = _FARTHEST * tolerance**2 * count  # on the squared distance per direction
    slack = _ROUNDING * max((sketches_a * sketches_a).max(initial=0), (sketches_b * sketches_b).max(initial=0))
    reach = np.sqrt(_DIRECTIONS * limit + slack)  # the largest distance in the first direction
    order = np.argsort(sketches_b[:, 0], kind="stable")
    first_near = np.searchsorted(sketches_b[order, 0], sketches_a[:, 0] - reach, "left")
    end_near = np.searchsorted(sketches_b[order, 0], sketches_a[:, 0] + reach, "right")
    pairs = [np.zeros((2, 0), np.int64)]
    for row in range(len(sketches_a)):
        nearby = order[first_near[row] : end_near[row]]
        difference = sketches_b[nearby] - sketches_a[row]
        nearby = nearby[(difference * difference).sum(axis=1) <= _DIRECTIONS * (limit + slack)]
        if len(nearby):
            pairs.append(np.stack([np.full(len(nearby), row), nearby]))
    left, right = np.concatenate(pairs, axis=1)
    return left, right
