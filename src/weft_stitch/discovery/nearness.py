"""Joining classes whose channels agree within a tolerance: ``merge_near``, the nearest first.

Candidates are found by *sketches*: the weights of a channel times a few random directions. Like fingerprints they are
sums that come apart by parts; the distance of two sketches is about that of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from weft_stitch.discovery.evidence import Evidence, flat_weights, mix, numbered
from weft_stitch.family import FamilyLayer, Writer
from weft_stitch.net import Array

_DIRECTIONS = 16
"""Numbers of a sketch: more make fewer false candidates, and cost time and memory."""
_FARTHEST = 5.0
"""Times the square of a distance that its sketch may show: with 16 directions, once in 10**9."""
_ROUNDING = 1e-5
"""How far off a squared distance may be, as a share: it is the small difference of large float32 numbers."""
_CHUNK = 1 << 20
"""Weights compared at a time: 4 MB."""


class WeightView(NamedTuple):
    """Weights of a space's channels that two tasks can compare, as one layer has them; sides: the first, the second."""

    sketches: tuple[Array, Array]
    """Sketches of the channels' weights: [channels, directions]."""
    weights: tuple[Array, Array]
    """[channels, other side's channels, taps], not yet narrowed to what is shared."""
    shared: tuple[Array, Array]
    """What is shared of the other side."""

    @property
    def size(self) -> int:
        """Weights of a channel."""
        return len(self.shared[0]) * int(self.weights[0].shape[2])

    def distances(self, left: Array, right: Array) -> Array:
        """The largest difference of each pair of channels."""
        step = max(1, _CHUNK // max(1, self.size))
        distances = [np.zeros(0)]
        for start in range(0, len(left), step):
            pair = (left[start : start + step], right[start : start + step])
            mine, theirs = (
                weight[rows].take(shared, axis=1)
                for weight, rows, shared in zip(self.weights, pair, self.shared, strict=True)
            )
            distances.append(np.abs(mine - theirs).max(axis=(1, 2), initial=0))
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
    """Join classes of which no two weights differ by more than *tolerance*.

    Only the two tasks at hand are compared, not the others of their classes. Without *ties*, channels of nothing but
    zeros (within the tolerance) are left alone. *strangers*: only tasks that share nothing yet, with ties.
    """
    partition = evidence.partitions[space]
    given = any(writer.role == "input" for writer in writers)
    filtered = [writer for writer in writers if writer.role in ("dense", "depthwise")]
    if len(filtered) + given < len(writers) or not filtered or (given and len(set(partition.widths)) > 1):
        return
    for two in range(1, evidence.tasks):
        for one in range(two):
            if strangers and len(partition.together(one, two)):
                continue
            mine, others = partition.apart(one, two), partition.apart(two, one)
            views = [*_written(evidence, filtered, one, two), *_read(evidence, space, readers, one, two)]
            if len(mine) and len(others) and all(view.size for view in views[: len(filtered)]):
                left, right = _nearest(views, mine, others, tolerance, ties=ties or strangers, in_place=given)
                these, those = partition.labels[one][left], partition.labels[two][right]
                good = partition.joinable(these, those)
                partition.join(these[good], those[good])


def _written(evidence: Evidence, writers: Sequence[Writer], one: int, two: int) -> Iterator[WeightView]:
    for writer in writers:
        assert writer.layer is not None
        cuts = [evidence.channels(writer.value, writer.position, task) for task in (one, two)]
        weights = flat_weights(writer.layer)
        if writer.role == "depthwise":
            only = np.zeros(1, np.int64)
            sketches = [row_sketches(weights[task], only, only, 1) for task in (one, two)]
            shared, both = (only, only), np.ones(1, bool)
        else:
            sums, parts = evidence.by_part(row_sketches, writer.layer, writer.layer.inputs[0])
            sketches, both = [sums[one], sums[two]], (parts[:, one] & parts[:, two]).astype(bool)
            inputs = evidence.common(writer.layer.inputs[0], one, two)
            shared = inputs.mine, inputs.theirs
        first, second = (sketch[cut][:, both].sum(axis=1) for sketch, cut in zip(sketches, cuts, strict=True))
        yield WeightView((first, second), (weights[one][cuts[0]], weights[two][cuts[1]]), shared)


def _read(evidence: Evidence, space: str, readers: Sequence[FamilyLayer], one: int, two: int) -> Iterator[WeightView]:
    for layer in readers:
        weights = [weight.swapaxes(0, 1) for weight in flat_weights(layer)]
        sums, parts = evidence.by_part(column_sketches, layer, layer.output)
        both = (parts[:, one] & parts[:, two]).astype(bool)
        outputs = evidence.common(layer.output, one, two)
        for position in evidence.positions(layer.inputs[0], space):
            cuts = [evidence.channels(layer.inputs[0], position, task) for task in (one, two)]
            first, second = (sums[task][cut][:, both].sum(axis=1) for task, cut in zip((one, two), cuts, strict=True))
            yield WeightView(
                (first, second), (weights[one][cuts[0]], weights[two][cuts[1]]), (outputs.mine, outputs.theirs)
            )


def row_sketches(weight: Array, labels: Array, parts: Array, count: int) -> Array:
    """For each output of *weight* [out, in, taps] its sketch over the inputs of each part: [out, parts, directions]."""
    directions = _directions(labels, weight.shape[2])
    result = np.zeros((len(weight), count, _DIRECTIONS), np.float32)
    for part in range(count):
        here = np.flatnonzero(parts == part)
        result[:, part] = weight[:, here].reshape(len(weight), -1) @ directions[here].reshape(-1, _DIRECTIONS)
    return result


def column_sketches(weight: Array, labels: Array, parts: Array, count: int) -> Array:
    """For each input of *weight* its sketch over the outputs of each part."""
    return row_sketches(weight.swapaxes(0, 1), labels, parts, count)


def _directions(labels: Array, taps: int) -> Array:
    """Random numbers of mean square one, the same for the same label: [labels, taps, directions]."""
    number = mix(numbered(labels, taps * _DIRECTIONS))
    uniform = (number >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    return (uniform * np.float32(12**0.5)).reshape(len(labels), taps, _DIRECTIONS)


def _nearest(
    views: list[WeightView], mine: Array, others: Array, tolerance: float, *, ties: bool, in_place: bool
) -> tuple[Array, Array]:
    """Pairs of *mine* and *others* that are near in every view, each in one pair, the nearest pairs first.

    *in_place*: only channels of the same number.
    """
    first, second = (np.sum([view.sketches[side] for view in views], axis=0) for side in (0, 1))
    mine, others = mine[np.isfinite(first[mine]).all(axis=1)], others[np.isfinite(second[others]).all(axis=1)]
    near = _candidates(first[mine], second[others], tolerance, sum(view.size for view in views))
    left, right = mine[near[0]], others[near[1]]
    distance = np.max([view.distances(left, right) for view in views], axis=0)
    kept = (distance <= tolerance) & ((left == right) | (not in_place))
    if not ties:
        sizes = [np.abs(view.weights[0].take(view.shared[0], axis=1)).max(axis=(1, 2), initial=0) for view in views]
        kept &= np.max(sizes, axis=0)[left] > tolerance
    order = np.flatnonzero(kept)[np.argsort(distance[kept], kind="stable")]
    used: tuple[set[int], set[int]] = set(), set()
    chosen = []
    for index in order.tolist():
        if left[index] not in used[0] and right[index] not in used[1]:
            used[0].add(left[index])
            used[1].add(right[index])
            chosen.append(index)
    return left[chosen], right[chosen]


def _candidates(mine: Array, theirs: Array, tolerance: float, count: int) -> tuple[Array, Array]:
    """Pairs of sketches that may be near: first those within reach along one direction, then those along all."""
    limit = _FARTHEST * tolerance**2 * count
    slack = _ROUNDING * max((mine * mine).max(initial=0), (theirs * theirs).max(initial=0))
    reach = np.sqrt(_DIRECTIONS * limit + slack)
    order = np.argsort(theirs[:, 0], kind="stable")
    start = np.searchsorted(theirs[order, 0], mine[:, 0] - reach, "left")
    end = np.searchsorted(theirs[order, 0], mine[:, 0] + reach, "right")
    pairs = [np.zeros((2, 0), np.int64)]
    for row in range(len(mine)):
        near = order[start[row] : end[row]]
        gap = theirs[near] - mine[row]
        near = near[(gap * gap).sum(axis=1) <= _DIRECTIONS * (limit + slack)]
        if len(near):
            pairs.append(np.stack([np.full(len(near), row), near]))
    left, right = np.concatenate(pairs, axis=1)
    return left, right
