"""Exact comparison of weights that tasks are assumed to share: ``verify``, ``repair``.

Where the weights of two tasks disagree, either the layer's output channel is not shared after all, or its input channel
is not. A filter that differs on most of its inputs was guessed wrongly; an input on which most filters differ was
guessed wrongly before (it looked shared in the layers that write it). ``repair`` takes out the worse of the two.
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

    run: SharedChannels
    """The shared output channels that were compared."""
    one: int
    two: int
    rows: Array
    """Indices into the run's classes."""
    largest: float
    """Largest difference of two weights."""


def verify(family: Family, sharing: Sharing, tolerance: float = 0.0) -> None:
    """Check that tasks have the same weights wherever *sharing* says so.

    Raises ``StitchError``, which names the first channels that differ.
    """
    wiring = wire(family)
    if strange := set(sharing.spaces) ^ set(wiring.widths):
        raise StitchError(f"space {min(strange)} is in the sharing or in the models, but not in both")
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
    """Say which channels are not the same in which layer."""
    space = evidence.wiring.carries[layer.output][mismatch.run.position]
    members = evidence.partitions[space].members[mismatch.run.classes[mismatch.rows[0]]]
    first, second = (
        f"channel {members[task]} of {evidence.family.nets[task].name}" for task in (mismatch.one, mismatch.two)
    )
    return (
        f"space {space}: {first} and {second} are not the same in {layer.name}: weights that both have differ by up to "
        f"{mismatch.largest:g}; take the channels out of the block or allow a tolerance"
    )


def differ(mine: Array, theirs: Array, tolerance: float) -> Array:
    """A mask of the weights that differ, by more than *tolerance* if it is above 0; NaN equals NaN."""
    different = np.asarray(mine != theirs)
    if tolerance == 0 and different.any():
        different &= ~(np.isnan(mine) & np.isnan(theirs))
    elif tolerance > 0:
        different &= ~(_distance(mine, theirs) <= tolerance)
    return different


def _distance(mine: Array, theirs: Array) -> Array:
    """The absolute differences; NaN between equal infinities."""
    with np.errstate(invalid="ignore"):  # infinities
        return np.asarray(np.abs(mine - theirs))


def mismatches(evidence: Evidence, layer: FamilyLayer, tolerance: float = 0.0) -> Iterator[Mismatch]:
    """Compare the weights of *layer* (dense or depthwise) where the evidence says that they are shared.

    Every task is compared with the first task that has the weights.
    """
    weights = flat_weights(layer)
    sources = [None] if role(layer) == "depthwise" else list(runs(evidence, layer.inputs[0]))
    for run in runs(evidence, layer.output):
        for source in sources:
            tasks = run.tasks if source is None else tuple(sorted(set(run.tasks) & set(source.tasks)))
            if len(tasks) > 1:
                yield from _compare_tasks(weights, run, source, tasks, tolerance)


def runs(evidence: Evidence, value: str) -> Iterator[SharedChannels]:
    """The channels of *value* that several tasks share, by the set of tasks."""
    starts = np.zeros(evidence.tasks, np.int64)
    for position, space in enumerate(evidence.wiring.carries[value]):
        partition = evidence.partitions[space]
        for part in partition.parts:
            tasks = tuple(np.flatnonzero(part.tasks).tolist())
            yield SharedChannels(position, tasks, part.classes, partition.members[part.classes] + starts)
        starts += np.array(partition.widths)


def _compare_tasks(
    weights: list[Array], run: SharedChannels, source: SharedChannels | None, tasks: tuple[int, ...], tolerance: float
) -> Iterator[Mismatch]:
    """Compare the weights of the first of *tasks* with those of each other.

    *run*, *source*: the shared output and input channels; *source* is None for a depthwise layer.
    """
    first, *others = tasks
    differing = {two: np.zeros(len(run.classes), bool) for two in others}
    largest = dict.fromkeys(others, 0.0)
    inputs = weights[first].shape[1] if source is None else len(source.classes)
    step = max(1, _CHUNK // (inputs * weights[first].shape[2]))
    for start in range(0, len(run.classes), step):
        chunk = slice(start, start + step)
        reference = _take_rows(weights[first], run.channels[chunk, first], source, first)
        for two in others:
            compared = _take_rows(weights[two], run.channels[chunk, two], source, two)
            differs = differ(reference, compared, tolerance)
            if differs.any():
                differing[two][chunk] = differs.any(axis=(1, 2))
                largest[two] = max(largest[two], float(_distance(reference, compared).max()))
    for two in others:
        if differing[two].any():
            yield Mismatch(run, first, two, np.flatnonzero(differing[two]), largest[two])


def _take_rows(weight: Array, rows: Array, source: SharedChannels | None, task: int) -> Array:
    """The weights of output channels *rows*, for the shared inputs of *source* as *task* has them."""
    return weight[rows] if source is None else weight[rows].take(source.channels[:, task], axis=1)


# --- separating what disagrees ----------------------------------------------------------------------------------------

_SAMPLE = 64
"""Disagreeing filters sampled to find the inputs at fault: more cost time in wide layers, fewer miss inputs."""
_CLOSE = 0.9
"""Rows and columns that disagree by at least this fraction of the worst are taken out with it, to save rounds."""


class Dispute(NamedTuple):
    """Channels of a value that tasks *one* and *two* do not share after all; task *two* leaves their classes."""

    one: int
    two: int
    channels: Common


def repair(evidence: Evidence, layer: FamilyLayer, tolerance: float = 0.0) -> bool:
    """Take channels out of the classes of the layer's inputs or outputs until its weights agree.

    Return whether any channel was taken out.
    """
    changed = False
    while disputes := _output_disputes(evidence, layer, tolerance):
        blamed = [_inputs_to_blame(evidence, layer, dispute, tolerance) for dispute in disputes]
        if any(len(dispute.channels.classes) for dispute in blamed):
            _take_out(evidence, layer.inputs[0], blamed)
        else:
            _take_out(evidence, layer.output, disputes)
        changed = True
    return changed


def _output_disputes(evidence: Evidence, layer: FamilyLayer, tolerance: float) -> list[Dispute]:
    """The shared output channels that the weights of *layer* contradict, by pairs of tasks."""
    places_by_pair: dict[tuple[int, int], set[tuple[int, int]]] = {}
    """Pair of tasks -> the places (position of the space, class) on which the weights contradict it."""
    for position, space in enumerate(evidence.wiring.carries[layer.output]):
        partition = evidence.partitions[space]
        shared = np.flatnonzero(partition.part_of != NONE)
        if not len(shared):
            continue
        if tolerance == 0:
            keys = evidence.pair_keys(space, [Writer(layer.output, position, layer)])
            table = keys.disagreeing(partition.members[shared])
        else:
            table = _contradictions(evidence, layer, position, tolerance)[shared]
        for index, one, two in np.argwhere(_pairs_with_first(table, partition.members[shared])).tolist():
            places_by_pair.setdefault((one, two), set()).add((position, int(shared[index])))
    return [_dispute(evidence, layer.output, pair, places) for pair, places in places_by_pair.items()]


def _contradictions(evidence: Evidence, layer: FamilyLayer, position: int, tolerance: float) -> Array:
    """A mask [classes, tasks, tasks] of a space that *layer* writes: which pairs of tasks it contradicts.

    Their weights differ by more than *tolerance*, or, in a dense layer, they share no input by which they could agree.
    """
    partition = evidence.partitions[evidence.wiring.carries[layer.output][position]]
    table = np.zeros((len(partition.members), evidence.tasks, evidence.tasks), bool)
    for mismatch in mismatches(evidence, layer, tolerance):
        if mismatch.run.position == position:
            table[mismatch.run.classes[mismatch.rows], mismatch.one, mismatch.two] = True
    if role(layer) == "dense":
        parts = evidence.incidence(layer.inputs[0])
        table |= _present_pairs(partition) & (parts.T @ parts == 0)
    return table


def _present_pairs(partition: Partition) -> Array:
    """A mask [classes, tasks, tasks] of the pairs of tasks in each class."""
    present = partition.members != NONE
    return np.asarray(np.triu(present[:, :, None] & present[:, None, :], 1))


def _pairs_with_first(table: Array, members: Array) -> Array:
    """Of the disagreeing pairs of each class in *table*, those with the class's first task; all if there are none."""
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
    """Take task *two* of each dispute out of the classes of its channels of *value*."""
    for position, space in enumerate(evidence.wiring.carries[value]):
        # a value may carry a space twice, and dropping renumbers classes: so classes are looked up by their channels
        partition = evidence.partitions[space]
        pairs: set[tuple[int, int]] = set()
        for dispute in disputes:
            here = dispute.channels.positions == position
            start = evidence.channels(value, position, dispute.two).start
            classes = partition.labels[dispute.two][dispute.channels.theirs[here] - start]
            pairs.update((shared_class, dispute.two) for shared_class in classes.tolist())
        if pairs:
            partition.drop(*np.array(sorted(pairs), np.int64).T)


def _inputs_to_blame(evidence: Evidence, layer: FamilyLayer, dispute: Dispute, tolerance: float) -> Dispute:
    """The input channels to take out instead of the outputs of *dispute*, if they explain the differences better."""
    inputs = evidence.common(layer.inputs[0], dispute.one, dispute.two)
    nothing = Dispute(dispute.one, dispute.two, Common(*(column[:0] for column in inputs)))
    if role(layer) != "dense" or not len(inputs.classes):  # only weights of dense layers go by input channels
        return nothing
    rows = dispute.channels
    sample = np.unique(np.linspace(0, len(rows.classes) - 1, _SAMPLE).astype(int))
    weights = flat_weights(layer)
    mine = weights[dispute.one][rows.mine[sample][:, None], inputs.mine]
    theirs = weights[dispute.two][rows.theirs[sample][:, None], inputs.theirs]
    shared_rows = len(evidence.common(layer.output, dispute.one, dispute.two).classes)
    differs = np.asarray(differ(mine, theirs, tolerance).any(axis=2))
    to_blame = _worst_columns(differs, len(rows.classes) / shared_rows)
    return Dispute(dispute.one, dispute.two, Common(*(column[to_blame] for column in inputs)))


def _worst_columns(differs: Array, disputed_fraction: float) -> Array:
    """Take out the worst row or column of *differs* until no difference is left; return a mask of the columns taken.

    *differs*: a mask [disputed outputs, inputs] of the weights that differ. Every row has a difference. The shared
    outputs without one are left out; those given are the fraction *disputed_fraction* of all.
    """
    left = differs.copy()
    taken = np.zeros(left.shape[1], bool)
    rows_left = len(left) / disputed_fraction
    while left.any():
        by_row = left.sum(axis=1) / (len(taken) - taken.sum())
        by_column = left.sum(axis=0) / rows_left
        if by_column.max() > by_row.max():
            worst = by_column >= _CLOSE * by_column.max()
            taken |= worst
            left[:, worst] = False
        else:
            worst = by_row >= _CLOSE * by_row.max()
            rows_left -= worst.sum()
            left[worst] = False
    return taken
