"""Which sample of a batch the elements of a tensor belong to.

Owners are whole numbers in an array of the tensor's rank, of size 1 along axes on which they do not change: 0 is
nobody, and samples count from 1. None stands for a tensor that is nobody's: a weight, a size.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

Owners = npt.NDArray[np.int32]
Shape = tuple[int, ...]


class Mixed(Exception):
    """An element would belong to several samples; says what is wrong, or nothing."""


def joined(*parts: Owners | None) -> Owners | None:
    """Whom elements belong to that are computed from one element of each part, the shapes broadcast."""
    found: Owners | None = None
    for part in parts:
        if found is not None and part is not None:
            try:
                clash = (found != part) & (found != 0) & (part != 0)
            except ValueError as error:
                raise Mixed from error
            if np.any(clash):
                raise Mixed
            found = np.maximum(found, part)
        elif part is not None:
            found = part
    return found


def collapsed(owners: Owners, axes: Iterable[int]) -> Owners:
    """Whom elements belong to that are computed from all along these *axes*, which stay, of size 1."""
    places = tuple(axes)
    if any(not -owners.ndim <= axis < owners.ndim for axis in places):
        raise Mixed
    places = tuple({axis % owners.ndim for axis in places})
    largest: Any = owners.max(axis=places, keepdims=True, initial=0)
    if np.any((owners != 0) & (owners != largest)):
        raise Mixed
    return np.asarray(largest, np.int32)


def shrunk(owners: Owners) -> Owners | None:
    """The same, of size 1 along axes on which nothing changes; None where all is nobody's."""
    if not owners.any():
        return None
    for axis in range(owners.ndim):
        first = owners.take([0], axis)
        if np.array_equal(np.broadcast_to(first, owners.shape), owners):
            owners = first
    return owners


def along(axis: int, rank: int, owners: Owners) -> Owners:
    """The *owners*, in a row, along one axis of a tensor."""
    return owners.reshape([-1 if place == axis % rank else 1 for place in range(rank)])


def numbered(first: int, rows: int, rank: int) -> Owners:
    """One sample after another along the first axis."""
    return along(0, rank, np.arange(first, first + rows, dtype=np.int32))
