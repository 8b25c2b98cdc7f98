"""Making a guess of the sharing true: ``repair`` takes channels out of classes until a layer's weights agree.

Where the weights of two tasks disagree, either the layer's output channel is not shared after all, or its input channel
is not. A filter that differs on most of its inputs was guessed wrongly; an input on which most filters differ was
guessed wrongly before (it looked shared in the layers that write it). The worse of the two goes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft_stitch.discovery.comparison import differ, mismatches
from weft_stitch.discovery.evidence import Common, Evidence, flat_weights
from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.family import FamilyLayer
from weft_stitch.net import Array
from weft_stitch.spaces import Writer, role

_SAMPLE = 64
"""Disagreeing filters looked at to find the inputs to blame."""
_CLOSE = 0.9
"""What disagrees nearly as much as the worst goes with it."""


class Claim(NamedTuple):
    """Channels of a value that tasks *one* and *two* do not share after all; the second is to leave the classes."""

    one: int
    two: int
    channels: Common


def repair(evidence: Evidence, layer: FamilyLayer, tolerance: float = 0.0) -> bool:
    """Take channels out of the classes of the layer's inputs and outputs until its weights agree; whether any were."""
    changed = False
    while wrong := _wrong(evidence, layer, tolerance):
        blamed = [_inputs_to_blame(evidence, layer, claim, tolerance) for claim in wrong]
        if any(len(claim.channels.classes) for claim in blamed):
            _take_out(evidence, layer.inputs[0], blamed)
        else:
            _take_out(evidence, layer.output, wrong)
        changed = True
    return changed


def _wrong(evidence: Evidence, layer: FamilyLayer, tolerance: float) -> list[Claim]:
    """What the weights of *layer* contradict in its outputs, by pairs of tasks."""
    bad: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for position, space in enumerate(evidence.wiring.carries[layer.output]):
        partition = evidence.partitions[space]
        shared = np.flatnonzero(partition.part_of != NONE)
        if not len(shared):
            continue
        if tolerance == 0:
            keys = evidence.pair_keys(space, [Writer(layer.output, position, layer)])
            table = keys.disagreeing(partition.members[shared])
        else:
            table = _far_apart(evidence, layer, position, tolerance)[shared]
        for index, one, two in np.argwhere(_firsts(table, partition.members[shared])).tolist():
            bad.setdefault((one, two), set()).add((position, int(shared[index])))
    return [_claim(evidence, layer.output, pair, places) for pair, places in bad.items()]


def _far_apart(evidence: Evidence, layer: FamilyLayer, position: int, tolerance: float) -> Array:
    """[classes, tasks, tasks] of a space that *layer* writes: which differ by more than *tolerance*."""
    partition = evidence.partitions[evidence.wiring.carries[layer.output][position]]
    table = np.zeros((len(partition.members), evidence.tasks, evidence.tasks), bool)
    for found in mismatches(evidence, layer, tolerance):
        if found.run.position == position:
            table[found.run.classes[found.rows], found.one, found.two] = True
    if role(layer) == "dense":
        parts = evidence.incidence(layer.inputs[0])
        table |= _both(partition) & (parts.T @ parts == 0)
    return table


def _both(partition: Partition) -> Array:
    present = partition.members != NONE
    return np.asarray(np.triu(present[:, :, None] & present[:, None, :], 1))


def _firsts(table: Array, members: Array) -> Array:
    """The pairs with a class's first task among those that disagree in it, if there are any."""
    first = np.argmax(members != NONE, axis=1)
    with_first = np.zeros_like(table)
    rows = np.arange(len(table))
    with_first[rows, first] = table[rows, first]
    return np.where(with_first.any(axis=(1, 2), keepdims=True), with_first, table)


def _claim(evidence: Evidence, value: str, pair: tuple[int, int], places: set[tuple[int, int]]) -> Claim:
    common = evidence.common(value, *pair)
    chosen = [each in places for each in zip(common.positions.tolist(), common.classes.tolist(), strict=True)]
    return Claim(*pair, Common(*(column[np.array(chosen, bool)] for column in common)))


def _take_out(evidence: Evidence, value: str, claims: list[Claim]) -> None:
    for position, space in enumerate(evidence.wiring.carries[value]):
        # The same space may come twice, so classes are looked up by a channel, which keeps its name
        partition = evidence.partitions[space]
        pairs: set[tuple[int, int]] = set()
        for claim in claims:
            here = claim.channels.positions == position
            start = evidence.channels(value, position, claim.two).start
            classes = partition.labels[claim.two][claim.channels.theirs[here] - start]
            pairs.update((each, claim.two) for each in classes.tolist())
        if pairs:
            partition.drop(*np.array(sorted(pairs), np.int64).T)


def _inputs_to_blame(evidence: Evidence, layer: FamilyLayer, claim: Claim, tolerance: float) -> Claim:
    """The input channels that are to go rather than the outputs of *claim*."""
    inputs = evidence.common(layer.inputs[0], claim.one, claim.two)
    nothing = Claim(claim.one, claim.two, Common(*(column[:0] for column in inputs)))
    if role(layer) != "dense" or not len(inputs.classes):  # the others' weights do not go by the input's channels
        return nothing
    rows = claim.channels
    some = np.unique(np.linspace(0, len(rows.classes) - 1, _SAMPLE).astype(int))
    weights = flat_weights(layer)
    mine = weights[claim.one][rows.mine[some][:, None], inputs.mine]
    theirs = weights[claim.two][rows.theirs[some][:, None], inputs.theirs]
    total = len(evidence.common(layer.output, claim.one, claim.two).classes)
    wrong = np.asarray(differ(mine, theirs, tolerance).any(axis=2))
    bad = _worst_columns(wrong, len(rows.classes) / total)
    return Claim(claim.one, claim.two, Common(*(column[bad] for column in inputs)))


def _worst_columns(wrong: Array, part: float) -> Array:
    """Columns that go when the worst row or column of *wrong* goes until nothing wrong is left.

    *wrong* has only rows with something wrong, *part* of all rows there are.
    """
    wrong = wrong.copy()
    bad = np.zeros(wrong.shape[1], bool)
    rows_left = len(wrong) / part
    while wrong.any():
        by_row = wrong.sum(axis=1) / (len(bad) - bad.sum())
        by_column = wrong.sum(axis=0) / rows_left
        if by_column.max() > by_row.max():
            worst = by_column >= _CLOSE * by_column.max()
            bad |= worst
            wrong[:, worst] = False
        else:
            worst = by_row >= _CLOSE * by_row.max()
            rows_left -= worst.sum()
            wrong[worst] = False
    return bad
