"""Row ownership: the sample of a batch that each element of a tensor belongs to.

Owners are whole numbers in an array of the tensor's rank, of size 1 along axes on which they do not change: 0 means no
sample, and samples count from 1. None stands for a tensor that belongs to no sample: a weight, a size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Owners = npt.NDArray[np.int32]
Shape = tuple[int, ...]


class Mixed(Exception):
    """An element would belong to several samples; the text may say why."""


def joined(*parts: Owners | None) -> Owners | None:
    """Owners of elements that are computed from one element of each part, the shapes broadcast."""
    owners: Owners | None = None
    for part in parts:
        if owners is not None and part is not None:
            try:
                clash = (owners != part) & (owners != 0) & (part != 0)
            except ValueError as error:
                raise Mixed from error
            if np.any(clash):
                raise Mixed
            owners = np.maximum(owners, part)
        elif part is not None:
            owners = part
    return owners


def collapsed(owners: Owners, axes: Iterable[int]) -> Owners:
    """Owners of elements that are computed from all elements along these *axes*, which stay, of size 1."""
    places = tuple(axes)
    if any(not -owners.ndim <= axis < owners.ndim for axis in places):
        raise Mixed
    places = tuple({axis % owners.ndim for axis in places})
    largest: Any = owners.max(axis=places, keepdims=True, initial=0)
    if np.any((owners != 0) & (owners != largest)):
        raise Mixed
    return np.asarray(largest, np.int32)


def shrunk(owners: Owners) -> Owners | None:
    """The same owners, of size 1 along axes on which nothing changes; None if no element belongs to a sample."""
    if not owners.any():
        return None
    for axis in range(owners.ndim):
        first = owners.take([0], axis)
        if np.array_equal(np.broadcast_to(first, owners.shape), owners):
            owners = first
    return owners


def along(axis: int, rank: int, owners: Owners) -> Owners:
    """Reshape a vector of *owners* so that it lies along one axis of a tensor."""
    return owners.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def numbered(first: int, rows: int, rank: int) -> Owners:
    """Owners of *rows* consecutive samples, one row each, along the first axis."""
    return along(0, rank, np.arange(first, first + rows, dtype=np.int32))
