"""Lists of operations made shorter without changing what they compute: ``needed``, ``merged_affines``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from weft_stitch.net import Array, Op


def needed(ops: Iterable[Op], outputs: Iterable[str]) -> list[Op]:
    wanted, kept = set(outputs), []
    for op in reversed(list(ops)):
        if op.output in wanted:
            wanted.update(op.inputs)
            kept.append(op)
    return kept[::-1]


def merged_affines(ops: Sequence[Op], outputs: Sequence[str]) -> list[Op]:
    """A bias and the batch normalisation after it are one affine, so that models with and without the bias align."""
    readers = Counter(each for op in ops for each in op.inputs)
    readers.update(outputs)
    merged: dict[str, Op] = {}
    for op in ops:
        before = merged.get(op.inputs[0])
        if op.kind == "affine" and before is not None and before.kind == "affine" and readers[before.output] == 1:
            del merged[before.output]
            op = replace(op, inputs=before.inputs, scale=_product(before, op), shift=_joint_shift(before, op))
        merged[op.output] = op
    return list(merged.values())


def _product(before: Op, after: Op) -> Array | None:
    if before.scale is None or after.scale is None:
        return after.scale if before.scale is None else before.scale
    return (before.scale.astype(np.float64) * after.scale).astype(np.float32)


def _joint_shift(before: Op, after: Op) -> Array | None:
    if before.shift is None:
        return after.shift
    shift = before.shift.astype(np.float64)
    shift = shift if after.scale is None else shift * after.scale
    return (shift if after.shift is None else shift + after.shift).astype(np.float32)
