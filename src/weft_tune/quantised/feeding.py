"""Rows of samples as the batches that a model takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from weft.runtime.tensors import Array

Ints = npt.NDArray[np.int64]


def count_rows(inputs: Mapping[str, Array]) -> int:
    """How many samples there are."""
    return len(next(iter(inputs.values())))


def feed(inputs: Mapping[str, Array], rows: Ints, fixed: int | None = None) -> dict[str, Array]:
    """The rows as a batch, filled up with copies of the last one if the model takes *fixed* at a time."""
    if fixed is not None and len(rows) < fixed:
        rows = np.concatenate([rows, np.full(fixed - len(rows), rows[-1])])
    return {name: np.ascontiguousarray(array[rows]) for name, array in inputs.items()}


def batches(inputs: Mapping[str, Array], size: int, fixed: int | None) -> Iterator[dict[str, Array]]:
    """All rows in turn."""
    count = count_rows(inputs)
    for start in range(0, count, size):
        yield feed(inputs, np.arange(start, min(start + size, count)), fixed)
