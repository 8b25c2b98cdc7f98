"""Which channels of trained models to share, and what they become: the arithmetic of zipping.

He, Zhou and Thiele, Multi-Task Zipping via Layer-wise Neuron Sharing, NeurIPS 2018 (arXiv 1805.09791). A filter w of a
layer whose inputs have the second moments H costs (v - w)' H (v - w) / 2 when v takes its place. Of two filters the
best common v is (Ha + Hb)^-1 (Ha a + Hb b), and it costs d' (Ha^-1 + Hb^-1)^-1 d / 2 with d = a - b: their
*functional difference*. The taps of a convolution's kernel add up, each with the same H.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft_stitch.net import Array

DAMPING = 1e-3
"""Part of the mean second moment that every input has beside its own, so that dead inputs have an inverse."""


@dataclass(frozen=True, eq=False)
class Filters:
    """The filters of one task in one layer, from inputs that all tasks share."""

    vectors: Array
    """[channels, inputs, taps], float64; of a depthwise convolution [channels, 1, taps]."""
    moments: Array
    """[inputs, inputs]: means of products of inputs; of a depthwise convolution [channels], the mean squares."""

    @property
    def depthwise(self) -> bool:
        return self.moments.ndim == 1

    def take(self, channels: Array) -> Filters:
        """Some of the filters, in this order."""
        moments = self.moments[channels] if self.depthwise else self.moments
        return replace(self, vectors=self.vectors[channels], moments=moments)


def damped(moments: Array) -> Array:
    """*moments* made safe to invert."""
    if moments.ndim == 1:
        return moments + DAMPING * (moments.mean() or 1.0)
    return moments + DAMPING * (np.trace(moments) / len(moments) or 1.0) * np.eye(len(moments))


def difference(ours: Filters, theirs: Filters) -> Array:
    """The functional difference of each of our filters and each of theirs, [our channels, their channels]."""
    if ours.depthwise:
        mine, other = ours.moments[:, None], theirs.moments[None, :]
        return np.asarray(0.5 * mine * other / (mine + other) * _distances(ours.vectors, theirs.vectors))
    parallel = np.linalg.inv(np.linalg.inv(ours.moments) + np.linalg.inv(theirs.moments))
    root = np.linalg.cholesky((parallel + parallel.T) / 2).T
    return np.asarray(0.5 * _distances(_times(root, ours.vectors), _times(root, theirs.vectors)))


def common(ours: Filters, theirs: Filters) -> Filters:
    """The best filters in place of ours and theirs, pair by pair; they weigh as much as both."""
    total = ours.moments + theirs.moments
    if ours.depthwise:
        mine, other = (side.moments[:, None, None] * side.vectors for side in (ours, theirs))
        return Filters((mine + other) / total[:, None, None], total)
    pulled = _times(ours.moments, ours.vectors) + _times(theirs.moments, theirs.vectors)
    return Filters(_times(np.linalg.inv(total), pulled), total)


def greedy(cost: Array, count: int) -> tuple[Array, Array]:
    """*count* pairs of a row and a column, the cheapest first, none used twice."""
    rows: list[int] = []
    columns: list[int] = []
    free_row, free_column = np.ones(cost.shape[0], bool), np.ones(cost.shape[1], bool)
    for place in np.argsort(cost, axis=None, kind="stable"):
        row, column = divmod(int(place), cost.shape[1])
        if len(rows) < count and free_row[row] and free_column[column]:
            free_row[row] = free_column[column] = False
            rows.append(row)
            columns.append(column)
    return np.array(rows, int), np.array(columns, int)


def pair(layers: Sequence[Sequence[Filters]], count: int) -> list[Array]:
    """The *count* channels to share of each task; those at one place go together.

    *layers* are all that write the space, each with its filters per task. The first two tasks choose the pairs; every
    further task finds a channel for each of them.
    """
    sets = [layer[0] for layer in layers]
    chosen = [np.arange(len(sets[0].vectors))]
    for task in range(1, len(layers[0])):
        cost = sum(difference(mine, layer[task]) for mine, layer in zip(sets, layers, strict=True))
        rows, columns = greedy(np.asarray(cost), count)
        chosen = [*(each[rows] for each in chosen), columns]
        sets = [common(mine.take(rows), layer[task].take(columns)) for mine, layer in zip(sets, layers, strict=True)]
    return chosen


def merge(filters: Sequence[Filters]) -> Array:
    """The best filters in place of every task's, [channels, inputs, taps]."""
    result = filters[0]
    for each in filters[1:]:
        result = common(result, each)
    return result.vectors


def _times(matrix: Array, vectors: Array) -> Array:
    return np.asarray(np.matmul(matrix, vectors))


def _distances(ours: Array, theirs: Array) -> Array:
    """Squared, [our channels, their channels]."""
    mine, other = ours.reshape(len(ours), -1), theirs.reshape(len(theirs), -1)
    squares = (mine**2).sum(1)[:, None] + (other**2).sum(1)[None, :]
    return np.asarray(np.maximum(squares - 2 * mine @ other.T, 0.0))
