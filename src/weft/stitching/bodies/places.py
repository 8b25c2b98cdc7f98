"""Where rows and the length lie in the values of a body: ``see`` runs its models at several sizes and looks.

No operator has a rule here. A model is run with more rows, and longer, and an axis that grows with the rows holds them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from weft.errors import StitchError
from weft.runtime.tensors import Array
from weft.stitching.bodies.body import Body, BodyValue

SMALL, MORE, LONGER = (2, 5), (3, 5), (2, 7)
"""Rows and lengths of the runs."""


class BodyPlace(NamedTuple):
    """What was seen of a value."""

    sizes: tuple[int, ...]
    """In the first run."""
    dtype: str
    rows: int | None
    """The axis that the rows lie along, outermost; None where the value has none, as a shape."""
    each: int = 1
    """Numbers along that axis for each row, and for each of its positions with *by_length*."""
    by_length: bool = False
    length: int | None = None
    """The axis that is as long as the inputs; None where there is none, or not only one."""


Runs = Callable[[int, int, int], Mapping[BodyValue, Array]]
"""A model, rows, a length -> all its values."""


def see(body: Body, runs: Runs) -> dict[BodyValue, BodyPlace]:
    """The place of every value; models are run as long as they have values that others lack."""
    found: dict[BodyValue, BodyPlace] = {}
    for task in range(body.tasks):
        if all(value in found for value in body.values(task)):
            continue
        small, more, longer = (runs(task, *sizes) for sizes in (SMALL, MORE, LONGER))
        for value, array in small.items():
            shapes = [each[value].shape for each in (small, more, longer)]
            if value not in found:
                found[value] = _place(body, value, shapes, str(array.dtype))
    return found


def _place(body: Body, value: BodyValue, shapes: Sequence[tuple[int, ...]], dtype: str) -> BodyPlace:
    one, more, longer = shapes
    if len(one) != len(more) or len(one) != len(longer):
        raise StitchError(f"{_named(body, value)} has other dimensions for other sizes; it cannot be stitched")
    grown = [axis for axis, pair in enumerate(zip(one, more, strict=True)) if pair[0] != pair[1]]
    long = [axis for axis, pair in enumerate(zip(one, longer, strict=True)) if pair[0] != pair[1]]
    length = long[0] if len(long) == 1 and (one[long[0]], longer[long[0]]) == (SMALL[1], LONGER[1]) else None
    if not grown:
        return BodyPlace(one, dtype, None, length=length)
    axis = grown[0]
    if len(grown) > 1 or one[axis] * MORE[0] != more[axis] * SMALL[0]:
        raise StitchError(f"{_named(body, value)} mixes rows: it is {one} for {SMALL[0]} of them, {more} for {MORE[0]}")
    each = one[axis] // SMALL[0]
    by_length = axis in long
    if by_length and longer[axis] * SMALL[1] != one[axis] * LONGER[1]:
        raise StitchError(f"{_named(body, value)} has {one} and {longer} numbers for rows of other lengths")
    return BodyPlace(one, dtype, axis, each // SMALL[1] if by_length else each, by_length, length)


def _named(body: Body, value: BodyValue) -> str:
    node = body.steps[value.step].node
    return f"{node.name} ({node.op})"
