"""Matching filters that agree on most of their shared inputs, but not on all: ``vote``.

One input that is wrongly held to be shared is enough to make every filter of two tasks look different. So where two
tasks that share inputs have hardly an output in common, single kernels vote: filters that have the same kernel for many
inputs belong together, and ``repair`` finds the inputs on which they differ.
"""

from __future__ import annotations

import numpy as np

from weft_stitch.discovery import fingerprint
from weft_stitch.discovery.evidence import Evidence, flat_weights
from weft_stitch.discovery.fingerprint import Keys
from weft_stitch.discovery.matching import pair_up
from weft_stitch.discovery.partition import Partition
from weft_stitch.net import Array
from weft_stitch.spaces import Writer

_VOTERS = 8
"""Inputs whose kernels are compared."""
_HARDLY = 0.1
"""Less than this part of the outputs in common is suspicious, and elects nobody."""
_LEADERS = 6
"""A task is compared with at most so many that have hardly anything in common with each other."""

_COARSE = 64
"""Tolerances to a step when weights are rounded."""

MAJORITY, MINORITY, NOBODY = 0.5, 0.2, 1.0
"""Quorums: filters belong together if more than this part of their kernels is the same."""


def vote(evidence: Evidence, space: str, writer: Writer, quorum: float, tolerance: float = 0.0) -> set[float]:
    """Join classes of *space* that the kernels of *writer*, a dense layer, vote for.

    The other quorums under which the outcome would have been different are returned.
    """
    others: set[float] = set()
    leaders: list[int] = []
    for two in range(evidence.tasks):
        if any(_acquainted(evidence, space, one, two) for one in leaders):
            continue
        for one in leaders:
            others |= _vote_pair(evidence, space, writer, one, two, quorum, tolerance)
        if len(leaders) < _LEADERS:
            leaders.append(two)
    return others


def _acquainted(evidence: Evidence, space: str, one: int, two: int) -> bool:
    partition = evidence.partitions[space]
    return len(partition.together(one, two)) >= _few(partition, one, two)


def _few(partition: Partition, one: int, two: int) -> float:
    return max(1.0, _HARDLY * min(partition.widths[one], partition.widths[two]))


def _vote_pair(
    evidence: Evidence, space: str, writer: Writer, one: int, two: int, quorum: float, tolerance: float
) -> set[float]:
    assert writer.layer is not None
    partition = evidence.partitions[space]
    inputs = evidence.common(writer.layer.inputs[0], one, two)
    if not len(inputs.classes):
        return set()
    some = np.unique(np.linspace(0, len(inputs.classes) - 1, _VOTERS).astype(int))
    weights = flat_weights(writer.layer)
    free = partition.apart(one, two), partition.apart(two, one)
    kernels = [
        _kernels(
            weights[task][evidence.channels(writer.value, writer.position, task)][rows][:, columns[some]], tolerance
        )
        for task, rows, columns in zip((one, two), free, (inputs.mine, inputs.theirs), strict=True)
    ]
    mine, theirs, support = _count(*kernels)
    these, those = partition.labels[one][free[0][mine]], partition.labels[two][free[1][theirs]]
    good = partition.joinable(these, those)
    elected = {each: good & (support > each) for each in (MAJORITY, MINORITY, NOBODY)}
    few = _few(partition, one, two)
    counts = {each: rows.sum() if rows.sum() >= few else 0 for each, rows in elected.items()}
    if counts[quorum]:
        partition.join(these[elected[quorum]], those[elected[quorum]])
    return {each for each, count in counts.items() if count != counts[quorum]}


def _kernels(weight: Array, tolerance: float) -> Keys:
    """The fingerprint of every kernel of *weight* [out, in, taps]; it is its own in every column."""
    if tolerance > 0:  # neighbours mostly round to the same
        weight = np.rint(weight / (_COARSE * tolerance)).astype(np.float32)
    taps = fingerprint.multipliers(np.arange(weight.shape[1]), weight.shape[2])
    return np.asarray(np.einsum("oit,it->oi", fingerprint.scramble(weight), taps))


def _count(mine: Keys, theirs: Keys) -> tuple[Array, Array, Array]:
    """Rows of both that have columns in common, each row once, and the part of the columns they have in common."""
    left, right = pair_up(mine.ravel(), theirs.ravel(), ties=False)
    voters = mine.shape[1]
    pairs, votes = np.unique(left // voters * len(theirs) + right // voters, return_counts=True)
    best = np.argsort(-votes, kind="stable")
    pairs, votes = pairs[best], votes[best]
    rows, partners = pairs // len(theirs), pairs % len(theirs)
    first = np.zeros(len(pairs), bool)
    first[np.unique(rows, return_index=True)[1]] = True
    alone = np.zeros(len(pairs), bool)
    alone[np.unique(partners, return_index=True)[1]] = True
    kept = first & alone
    return rows[kept], partners[kept], votes[kept] / voters
