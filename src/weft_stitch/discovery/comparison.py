"""Comparing the weights of tasks that are said to share them, number by number: ``verify``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft_stitch.discovery.evidence import Evidence, flat_weights
from weft_stitch.discovery.partition import Partition
from weft_stitch.family import Family, FamilyLayer
from weft_stitch.net import Array
from weft_stitch.sharing import Sharing
from weft_stitch.spaces import role, wire

_CHUNK = 1 << 18
"""Weights compared at a time."""


class SharedChannels(NamedTuple):
    """The channels of a value that one set of tasks shares."""

    position: int
    """Which of the spaces the value carries they are in."""
    tasks: tuple[int, ...]
    classes: Array
    channels: Array
    """[classes, tasks of the family]: where each task has them in its value."""


class Mismatch(NamedTuple):
    """Output channels of a layer whose weights differ between two tasks that share them."""

    run: SharedChannels
    one: int
    two: int
    rows: Array
    """Which of the run's classes."""
    largest: float
    """Largest difference of two weights."""


def verify(family: Family, sharing: Sharing, tolerance: float = 0.0) -> None:
    """Check that tasks which share channels have the same weights for them, or say where the first are that differ."""
    wiring = wire(family)
    if strange := set(sharing.spaces) ^ set(wiring.widths):
        raise StitchError(f"space {min(strange)} is in the sharing or in the models, but not in both")
    for name, space in sharing.spaces.items():
        if space.widths != wiring.widths[name]:
            raise StitchError(
                f"space {name} has {space.widths} channels in the sharing, {wiring.widths[name]} in the models"
            )
    evidence = Evidence(family, wiring, {name: Partition.of(space) for name, space in sharing.spaces.items()})
    for layer in evidence.layers:
        for found in mismatches(evidence, layer, tolerance):
            raise StitchError(_difference(evidence, layer, found))


def _difference(evidence: Evidence, layer: FamilyLayer, found: Mismatch) -> str:
    space = evidence.wiring.carries[layer.output][found.run.position]
    members = evidence.partitions[space].members[found.run.classes[found.rows[0]]]
    one, two = (f"channel {members[task]} of {evidence.family.nets[task].name}" for task in (found.one, found.two))
    return (
        f"space {space}: {one} and {two} are not the same in {layer.name}: weights that both have differ by up to "
        f"{found.largest:g}; take the channels out of the block or allow a tolerance"
    )


def differ(mine: Array, theirs: Array, tolerance: float) -> Array:
    """Where weights are not the same, or by more than *tolerance* if that is not zero."""
    different = np.asarray(mine != theirs)
    if tolerance == 0 and different.any():
        different &= ~(np.isnan(mine) & np.isnan(theirs))
    elif tolerance > 0:
        different &= ~(_gap(mine, theirs) <= tolerance)
    return different


def _gap(mine: Array, theirs: Array) -> Array:
    with np.errstate(invalid="ignore"):  # infinities
        return np.asarray(np.abs(mine - theirs))


def mismatches(evidence: Evidence, layer: FamilyLayer, tolerance: float = 0.0) -> Iterator[Mismatch]:
    """Where *layer* (dense or depthwise) contradicts the sharing: every task against the first that has the weights."""
    weights = flat_weights(layer)
    sources = [None] if role(layer) == "depthwise" else list(runs(evidence, layer.inputs[0]))
    for run in runs(evidence, layer.output):
        for source in sources:
            tasks = run.tasks if source is None else tuple(sorted(set(run.tasks) & set(source.tasks)))
            if len(tasks) > 1:
                yield from _compare(weights, run, source, tasks, tolerance)


def runs(evidence: Evidence, value: str) -> Iterator[SharedChannels]:
    """The parts of *value* that several tasks share."""
    starts = np.zeros(evidence.tasks, np.int64)
    for position, space in enumerate(evidence.wiring.carries[value]):
        partition = evidence.partitions[space]
        for part in partition.parts:
            tasks = tuple(np.flatnonzero(part.tasks).tolist())
            yield SharedChannels(position, tasks, part.classes, partition.members[part.classes] + starts)
        starts += np.array(partition.widths)


def _compare(
    weights: list[Array], run: SharedChannels, source: SharedChannels | None, tasks: tuple[int, ...], tolerance: float
) -> Iterator[Mismatch]:
    """The first of *tasks* against the others."""
    first, *others = tasks
    wrong = {two: np.zeros(len(run.classes), bool) for two in others}
    largest = dict.fromkeys(others, 0.0)
    inputs = weights[first].shape[1] if source is None else len(source.classes)
    step = max(1, _CHUNK // (inputs * weights[first].shape[2]))
    for start in range(0, len(run.classes), step):
        chunk = slice(start, start + step)
        mine = _taken(weights[first], run.channels[chunk, first], source, first)
        for two in others:
            theirs = _taken(weights[two], run.channels[chunk, two], source, two)
            bad = differ(mine, theirs, tolerance)
            if bad.any():
                wrong[two][chunk] = bad.any(axis=(1, 2))
                largest[two] = max(largest[two], float(_gap(mine, theirs).max()))
    for two in others:
        if wrong[two].any():
            yield Mismatch(run, first, two, np.flatnonzero(wrong[two]), largest[two])


def _taken(weight: Array, rows: Array, source: SharedChannels | None, task: int) -> Array:
    return weight[rows] if source is None else weight[rows].take(source.channels[:, task], axis=1)
