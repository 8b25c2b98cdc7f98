"""Exact comparison of weights that tasks are assumed to share: ``verify``, ``repair``.

Where the weights of two tasks disagree, either the layer's output channel is not shared after all, or its input channel
is not. If a filter differs on most of its inputs, the output was wrongly taken to be shared; if most filters differ on
an input, the input was (it looked shared in the layers that write it). ``repair`` takes out the worse of the two.

A *channel space* is a set of channels that layers pass on in one order; a value carries one or several. A *class* has
channels of a space that are taken to be the same, at most one of each task (``partition``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.discovery.evidence import Common, Evidence, flat_weights
from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.family import Family, FamilyLayer, Sharing, Writer, role, wire
from weft_stitch.net import Array

_CHUNK = 1 << 18
"""Weights compared at a time: 1 MB, so that both sides and the intermediate results stay in the cache."""


class SharedChannels(NamedTuple):
    """The channels of a value that one set of tasks shares."""

    position: int
    """Index of their space among those that the value carries."""
    tasks: tuple[int, ...]
    classes: Array
    """Indices of their classes in the space's partition."""
    channels: Array
    """[classes, tasks of the family]: the task's channel of the value."""


class Mismatch(NamedTuple):
    """Output channels of a layer whose weights differ between two tasks that share them."""

    outputs: SharedChannels
    """The shared output channels that were compared."""
    task_a: int
    task_b: int
    rows: Array
    """Indices into the classes of *outputs*."""
    largest: float
    """Largest difference of two weights."""


def verify(family: Family, sharing: Sharing, tolerance: float = 0.0) -> None:
    """Check that tasks have the same weights wherever *sharing* says so.

    Raises ``StitchError``, which names the first channels that differ.
    """
    wiring = wire(family)
    if unmatched := set(sharing.spaces) ^ set(wiring.widths):
        raise StitchError(f"space {min(unmatched)} is in the sharing or in the models, but not in both")
    for name, space in sharing.spaces.items():
        if space.widths != wiring.widths[name]:
            raise StitchError(
                f"space {name} has {space.widths} channels in the sharing, {wiring.widths[name]} in the models"
            )
    evidence = Evidence(family, wiring, {name: Partition.from_space(space) for name, space in sharing.spaces.items()})
    for layer in evidence.layers:
        for mismatch in mismatches(evidence, layer, tolerance):
            raise StitchError(_mismatch_message(evidence, layer, mismatch))


def _mismatch_message(evidence: Evidence, layer: FamilyLayer, mismatch: Mismatch) -> str:
    """Say which channels are not the same, and in which layer."""
    space = evidence.wiring.carries[layer.output][mismatch.outputs.position]
    members = evidence.partitions[space].members[mismatch.outputs.classes[mismatch.rows[0]]]
    first, second = (
        f"channel {members[task]} of {evidence.family.nets[task].name}" for task in (mismatch.task_a, mismatch.task_b)
    )
    return (
        f"space {space}: {first} and {second} are not the same in {layer.name}: weights that both have differ by up to "
        f"{mismatch.largest:g}; take the channels out of the block or allow a tolerance"
    )


def differ(weights_a: Array, weights_b: Array, tolerance: float) -> Array:
    """A mask of the weights that differ, by more than *tolerance* if it is above 0; NaN equals NaN."""
    different = np.asarray(weights_a != weights_b)
    if tolerance == 0 and different.any():
        different &= ~(np.isnan(weights_a) & np.isnan(weights_b))
    elif tolerance > 0:
        different &= ~(_distance(weights_a, weights_b) <= tolerance)
    return different


def _distance(weights_a: Array, weights_b: Array) -> Array:
    """The absolute differences; NaN between equal infinities."""
    with np.errstate(invalid="ignore"):  # infinities
        return np.asarray(np.abs(weights_a - weights_b))


def mismatches(evidence: Evidence, layer: FamilyLayer, tolerance: float = 0.0) -> Iterator[Mismatch]:
    """Compare the weights of *layer* (dense or depthwise) where the evidence says that they are shared.

    Every task is compared with the first task that has the weights.
    """
    weights = flat_weights(layer)
    shared_inputs = [None] if role(layer) == "depthwise" else list(shared_channels(evidence, layer.inputs[0]))
    for outputs in shared_channels(evidence, layer.output):
        for inputs in shared_inputs:
            tasks = outputs.tasks if inputs is None else tuple(sorted(set(outputs.tasks) & set(inputs.tasks)))
            if len(tasks) > 1:
                yield from _compare_tasks(weights, outputs, inputs, tasks, tolerance)


def shared_channels(evidence: Evidence, value: str) -> Iterator[SharedChannels]:
    """The channels of *value* that several tasks share: one entry for each space and set of tasks."""
    starts = np.zeros(evidence.tasks, np.int64)  # the first channel of the space in each task
    for position, space in enumerate(evidence.wiring.carries[value]):
        partition = evidence.partitions[space]
        for part in partition.parts:
            tasks = tuple(np.flatnonzero(part.tasks).tolist())
            yield SharedChannels(position, tasks, part.classes, partition.members[part.classes] + starts)
        starts += np.array(partition.widths)


def _compare_tasks(
    weights: list[Array],
    outputs: SharedChannels,
    inputs: SharedChannels | None,
    tasks: tuple[int, ...],
    tolerance: float,
) -> Iterator[Mismatch]:
    """Compare the weights of the first of *tasks* with those of each other task.

    *weights*: for each task, [out, in, taps]. *outputs*, *inputs*: the shared output and input channels of the layer;
    *inputs* is None for a depthwise layer.
    """
    first_task, *others = tasks
    differing = {task: np.zeros(len(outputs.classes), bool) for task in others}
    largest = dict.fromkeys(others, 0.0)
    input_count = weights[first_task].shape[1] if inputs is None else len(inputs.classes)
    step = max(1, _CHUNK // (input_count * weights[first_task].shape[2]))
    for start in range(0, len(outputs.classes), step):
        chunk = slice(start, start + step)  # of classes, the first axis of ``outputs.channels``
        reference = _take_rows(weights[first_task], outputs.channels[chunk, first_task], inputs, first_task)
        for task in others:
            compared = _take_rows(weights[task], outputs.channels[chunk, task], inputs, task)
            differs = differ(reference, compared, tolerance)
            if differs.any():
                differing[task][chunk] = differs.any(axis=(1, 2))
                largest[task] = max(largest[task], float(_distance(reference, compared).max()))
    for task in others:
        if differing[task].any():
            yield Mismatch(outputs, first_task, task, np.flatnonzero(differing[task]), largest[task])


def _take_rows(weight: Array, rows: Array, inputs: SharedChannels | None, task: int) -> Array:
    """The weights of output channels *rows* of *task*; with *inputs*, only of these input channels."""
    return weight[rows] if inputs is None else weight[rows].take(inputs.channels[:, task], axis=1)


# --- separating what disagrees ----------------------------------------------------------------------------------------

_SAMPLE = 64
"""Number of disagreeing filters that are searched for inputs at fault: more cost time, fewer miss inputs."""
_CLOSE = 0.9
"""Rows and columns at least this fraction as bad as the worst are taken out together with it, to save rounds."""


class Dispute(NamedTuple):
    """Channels of a value that two tasks do not share after all; *task_b* has to leave their classes."""

    task_a: int
    task_b: int
    channels: Common


def repair(evidence: Evidence, layer: FamilyLayer, tolerance: float = 0.0) -> bool:
    """Take channels out of the classes of the layer's inputs or outputs until its weights agree.

    Return whether any channel was taken out.
    """
    changed = False
    while disputes := _output_disputes(evidence, layer, tolerance):
        # inputs first: one input that is not shared makes many outputs disagree
        blamed = [_inputs_to_blame(evidence, layer, dispute, tolerance) for dispute in disputes]
        if any(len(dispute.channels.classes) for dispute in blamed):
            _take_out(evidence, layer.inputs[0], blamed)
        else:
            _take_out(evidence, layer.output, disputes)
        changed = True
    return changed


def _output_disputes(evidence: Evidence, layer: FamilyLayer, tolerance: float) -> list[Dispute]:
    """The shared output channels that the weights of *layer* contradict: one dispute for each pair of tasks."""
    places_by_pair: dict[tuple[int, int], set[tuple[int, int]]] = {}
    """Pair of tasks -> the places (position of the space, class) that they share although their weights differ."""
    for position, space in enumerate(evidence.wiring.carries[layer.output]):
        partition = evidence.partitions[space]
        shared = np.flatnonzero(partition.part_of != NONE)
        if not len(shared):
            continue
        if tolerance == 0:
            keys = evidence.pair_keys(space, [Writer(layer.output, position, layer)])
            disagreeing = keys.disagreeing(partition.members[shared])
        else:
            disagreeing = _contradictions(evidence, layer, position, tolerance)[shared]
        for index, task_a, task_b in np.argwhere(_pairs_with_first(disagreeing, partition.members[shared])).tolist():
            places_by_pair.setdefault((task_a, task_b), set()).add((position, int(shared[index])))
    return [_dispute(evidence, layer.output, pair, places) for pair, places in places_by_pair.items()]


def _contradictions(evidence: Evidence, layer: FamilyLayer, position: int, tolerance: float) -> Array:
    """A mask [classes, tasks, tasks] of a space that *layer* writes: which pairs of tasks it contradicts.

    Their weights differ by more than *tolerance*, or, in a dense layer, they share no input by which they could agree.
    """
    partition = evidence.partitions[evidence.wiring.carries[layer.output][position]]
    table = np.zeros((len(partition.members), evidence.tasks, evidence.tasks), bool)
    for mismatch in mismatches(evidence, layer, tolerance):
        if mismatch.outputs.position == position:
            table[mismatch.outputs.classes[mismatch.rows], mismatch.task_a, mismatch.task_b] = True
    if role(layer) == "dense":
        incidence = evidence.incidence(layer.inputs[0])
        table |= _present_pairs(partition) & (incidence.T @ incidence == 0)
    return table


def _present_pairs(partition: Partition) -> Array:
    """A mask [classes, tasks, tasks] of the pairs of tasks in each class."""
    present = partition.members != NONE
    return np.asarray(np.triu(present[:, :, None] & present[:, None, :], 1))


def _pairs_with_first(table: Array, members: Array) -> Array:
    """Of the disagreeing pairs of each class, those with its first task, from which the other tasks are then separated.

    All of the class if there are none. *table*: a mask [classes, tasks, tasks] of the pairs that disagree. *members*:
    each task's channel, [classes, tasks].
    """
    first = np.argmax(members != NONE, axis=1)
    with_first = np.zeros_like(table)
    rows = np.arange(len(table))
    with_first[rows, first] = table[rows, first]
    return np.where(with_first.any(axis=(1, 2), keepdims=True), with_first, table)


def _dispute(evidence: Evidence, value: str, pair: tuple[int, int], places: set[tuple[int, int]]) -> Dispute:
    """The channels of *value* that are at *places* (position of the space, class), for a pair of tasks."""
    common = evidence.common(value, *pair)
    chosen = [place in places for place in zip(common.positions.tolist(), common.classes.tolist(), strict=True)]
    return Dispute(*pair, Common(*(column[np.array(chosen, bool)] for column in common)))


def _take_out(evidence: Evidence, value: str, disputes: list[Dispute]) -> None:
    """Take ``task_b`` of each dispute out of the classes of its channels of *value*."""
    for position, space in enumerate(evidence.wiring.carries[value]):
        # a value may carry a space twice, and dropping renumbers classes: so classes are looked up by their channels
        partition = evidence.partitions[space]
        pairs: set[tuple[int, int]] = set()
        for dispute in disputes:
            at_position = dispute.channels.positions == position
            start = evidence.channels(value, position, dispute.task_b).start
            classes = partition.labels[dispute.task_b][dispute.channels.channels_b[at_position] - start]
            pairs.update((shared_class, dispute.task_b) for shared_class in classes.tolist())
        if pairs:
            partition.drop(*np.array(sorted(pairs), np.int64).T)


def _inputs_to_blame(evidence: Evidence, layer: FamilyLayer, dispute: Dispute, tolerance: float) -> Dispute:
    """The input channels to take out instead of the outputs of *dispute*, if they explain the differences better."""
    inputs = evidence.common(layer.inputs[0], dispute.task_a, dispute.task_b)
    no_inputs = Dispute(dispute.task_a, dispute.task_b, Common(*(column[:0] for column in inputs)))
    if role(layer) != "dense" or not len(inputs.classes):  # only dense layers have weights for each input channel
        return no_inputs
    outputs = dispute.channels
    # disputed outputs, evenly spread
    sample = np.unique(np.linspace(0, len(outputs.classes) - 1, _SAMPLE).astype(int))
    weights = flat_weights(layer)
    weights_a = weights[dispute.task_a][outputs.channels_a[sample][:, None], inputs.channels_a]
    weights_b = weights[dispute.task_b][outputs.channels_b[sample][:, None], inputs.channels_b]
    shared_rows = len(evidence.common(layer.output, dispute.task_a, dispute.task_b).classes)
    differs = np.asarray(differ(weights_a, weights_b, tolerance).any(axis=2))
    to_blame = _worst_columns(differs, len(outputs.classes) / shared_rows)
    return Dispute(dispute.task_a, dispute.task_b, Common(*(column[to_blame] for column in inputs)))


def _worst_columns(differs: Array, disputed_fraction: float) -> Array:
    """Take out the worst row or column of *differs* until no difference is left; return a mask of the columns taken.

    *differs*: a mask [disputed outputs, inputs] of the weights that differ. Disputed outputs, which have a difference
    each, are the fraction *disputed_fraction* of all shared outputs; a column's differences count relative to all.
    """
    differences = differs.copy()
    taken = np.zeros(differences.shape[1], bool)
    remaining_rows = len(differences) / disputed_fraction
    while differences.any():
        # the fraction that differs, of the remaining inputs and of the remaining shared outputs
        by_row = differences.sum(axis=1) / (len(taken) - taken.sum())
        by_column = differences.sum(axis=0) / remaining_rows
        if by_column.max() > by_row.max():
            worst = by_column >= _CLOSE * by_column.max()
            taken |= worst
            differences[:, worst] = False
        else:
            worst = by_row >= _CLOSE * by_row.max()
            remaining_rows -= worst.sum()
            differences[worst] = False
    return taken
