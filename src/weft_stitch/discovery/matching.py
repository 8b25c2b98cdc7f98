"""Joining classes of a partition whose channels agree: ``merge``."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from weft_stitch.discovery.evidence import PairKeys
from weft_stitch.discovery.fingerprint import Keys
from weft_stitch.discovery.partition import NONE, Partition
from weft_stitch.net import Array


def merge(partition: Partition, evidence: PairKeys, *, ties: bool = False, hopeful: bool = False) -> None:
    """Join all classes that agree, task after task.

    With *ties*, channels of one task that look the same are matched first with first; without, they are left alone, and
    so are channels of which only zeros are known. *hopeful*: of two classes only one task each must agree; the others
    may disagree because too much is held to be shared at the inputs.
    """
    alike = _alike(partition, evidence)
    if alike is not None and not ties:
        _merge_alike(partition, alike)
        return
    for one, two in _pairs(partition, evidence):
        _merge_pair(partition, evidence, one, two, ties, hopeful)


def merge_strangers(partition: Partition, evidence: PairKeys) -> None:
    """Join what agrees, ties and zeros too, of tasks that share nothing yet."""
    for one, two in _pairs(partition, evidence):
        if not len(partition.together(one, two)):
            _merge_pair(partition, evidence, one, two, ties=True, hopeful=False)


def mergeable(partition: Partition, evidence: PairKeys) -> bool:
    """Whether any two classes may agree."""
    alike = _alike(partition, evidence)
    if alike is not None:
        return len(np.unique(alike)) < len(alike)
    for one, two in _pairs(partition, evidence):
        mine, others = partition.apart(one, two), partition.apart(two, one)
        if np.isin(evidence.keys[one, mine, two], evidence.keys[two, others, one]).any():
            return True
    return False


def _alike(partition: Partition, evidence: PairKeys) -> Keys | None:
    """One key for each class, where a channel has the same key for all other tasks and a class for all its channels."""
    keys = evidence.keys[:, :, 0]
    if evidence.allowed.sum() != len(keys) * (len(keys) - 1) or (evidence.keys != keys[:, :, None]).any():
        return None
    present = partition.members != NONE
    table = keys[np.arange(len(keys)), np.maximum(partition.members, 0)]
    first = table[np.arange(len(table)), np.argmax(present, axis=1)]
    return None if (present & (table != first[:, None])).any() else first


def _merge_alike(partition: Partition, keys: Keys) -> None:
    """Join all classes of one key, unless it is zero or some task has it twice."""
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.append(True, keys[order][1:] != keys[order][:-1])) if len(keys) else order
    present = (partition.members[order] != NONE).astype(np.int64)
    clear = (np.add.reduceat(present, starts, axis=0) <= 1).all(axis=1) & (keys[order[starts]] != 0)
    lengths = np.diff(np.append(starts, len(order)))
    target = np.repeat(order[starts], lengths)
    moved = np.repeat(clear, lengths) & (target != order)
    partition.join(target[moved], order[moved])


def _pairs(partition: Partition, evidence: PairKeys) -> Iterator[tuple[int, int]]:
    tasks = range(len(partition.widths))
    return ((one, two) for two in tasks for one in range(two) if evidence.allowed[one, two])


def _merge_pair(partition: Partition, evidence: PairKeys, one: int, two: int, ties: bool, hopeful: bool) -> None:
    mine, others = partition.apart(one, two), partition.apart(two, one)
    left, right = pair_up(evidence.keys[one, mine, two], evidence.keys[two, others, one], ties)
    if not len(left):
        return
    these, those = partition.labels[one][mine[left]], partition.labels[two][others[right]]
    good = partition.joinable(these, those)
    if not hopeful:
        good[good] = evidence.agree(partition.members[these[good]], partition.members[those[good]])
    partition.join(these[good], those[good])


def pair_up(left: Keys, right: Keys, ties: bool) -> tuple[Array, Array]:
    """Indices of equal keys on both sides, each used once: the n-th of a key with the n-th, or only those alone."""
    order, back = np.argsort(left, kind="stable"), np.argsort(right, kind="stable")
    ours, theirs = left[order], right[back]
    start, rank = np.searchsorted(ours, theirs), np.arange(len(theirs)) - np.searchsorted(theirs, theirs)
    place = start + rank
    found = place < len(ours)
    found[found] = ours[place[found]] == theirs[found]
    if not ties:
        found &= (np.searchsorted(ours, theirs, "right") == start + 1) & (theirs != 0)
        found &= np.searchsorted(theirs, theirs, "right") == np.searchsorted(theirs, theirs) + 1
    return order[place[found]], back[found]
