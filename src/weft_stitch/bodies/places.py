"""Where rows and the length lie in the values of a body: ``see`` runs its models at several sizes and looks.

No operator has a rule here. A model is run with more rows, and longer, and an axis that grows with the rows holds them.
Which rows are whose is seen from what the first of them hold in both runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.tensors import Array
from weft_stitch.bodies.body import Body, BodyValue

SMALL, MORE, LONGER = (2, 5), (3, 5), (2, 7)
"""Rows and lengths of the runs."""


class BodyPlace(NamedTuple):
    """What was seen of a value."""

    sizes: tuple[int, ...]
    """In the first run."""
    dtype: str
    rows: int | None
    """The axis that the rows lie along; None where the value has none, as a shape."""
    each: int = 1
    """Numbers along that axis for each row, and for each of its positions with *by_length*."""
    by_length: bool = False
    long: tuple[int, ...] = ()
    """All other axes that grow with the length of the inputs."""
    inner: bool = False
    """Whether the first numbers along that axis are those of all rows, and not of the first row."""

    @property
    def as_long(self) -> bool:
        """Whether those axes are as long as the inputs."""
        return all(self.sizes[axis] == SMALL[1] for axis in self.long)


ValueRuns = Callable[[int, int, int], Mapping[BodyValue, Array]]
"""A model, rows, a length -> all its values; more rows begin with the same ones as fewer."""
OutputRuns = Callable[[int, int, int], Mapping[str, Array]]
"""The same for its outputs."""


def see(body: Body, runs: ValueRuns) -> dict[BodyValue, BodyPlace]:
    """The place of every value; models are run as long as they have values that others lack."""
    found: dict[BodyValue, BodyPlace] = {}
    for task in range(body.tasks):
        if all(value in found for value in body.values(task)):
            continue
        small, more, longer = (runs(task, *sizes) for sizes in (SMALL, MORE, LONGER))
        for value, array in small.items():
            if value not in found:
                node = body.steps[value.step].node
                name, arrays = f"{node.where} ({node.op})", [array, more[value], longer[value]]
                place = _place(name, [each.shape for each in arrays], str(array.dtype))
                found[value] = place._replace(inner=_is_inner(name, place, array, more[value]))
    return found


def see_outputs(body: Body, task: int, runs: OutputRuns) -> dict[str, BodyPlace]:
    """The places of a model's outputs, whose sizes may be its own; each must have a row for each that goes in."""
    small, more, longer = (runs(task, *sizes) for sizes in (SMALL, MORE, LONGER))
    found = {}
    for name, array in small.items():
        place = _place(f"output {name}", [each[name].shape for each in (small, more, longer)], str(array.dtype))
        if place[2:5] != (0, 1, False):
            raise StitchError(f"{body.names[task]}: its output {name} has no row for each row that goes in")
        found[name] = place
    return found


def _place(name: str, shapes: Sequence[tuple[int, ...]], dtype: str) -> BodyPlace:
    one, more, longer = shapes
    if len(one) != len(more) or len(one) != len(longer):
        raise StitchError(f"{name} has other dimensions for other sizes; it cannot be stitched")
    grown = [axis for axis, pair in enumerate(zip(one, more, strict=True)) if pair[0] != pair[1]]
    long = [axis for axis, pair in enumerate(zip(one, longer, strict=True)) if pair[0] != pair[1]]
    if not grown:
        return BodyPlace(one, dtype, None, long=tuple(long))
    axis = grown[0]
    if len(grown) > 1 or one[axis] * MORE[0] != more[axis] * SMALL[0]:
        raise StitchError(f"{name} mixes rows: it is {one} for {SMALL[0]} of them, {more} for {MORE[0]}")
    each, by_length = one[axis] // SMALL[0], axis in long
    if by_length and longer[axis] * SMALL[1] != one[axis] * LONGER[1]:
        raise StitchError(f"{name} is {one} and {longer} for rows of other lengths; it cannot be split by rows")
    rest = tuple(at for at in long if at != axis)
    return BodyPlace(one, dtype, axis, each // SMALL[1] if by_length else each, by_length, rest)


def _is_inner(name: str, place: BodyPlace, few: Array, more: Array) -> bool:
    """Whether rows lie side by side along their axis, and not one after another, as the first ones tell."""
    if place.rows is None or not few.size:
        return False
    axis, each = place.rows, few.shape[place.rows] // SMALL[0]
    if _same(few, more.take(range(each * SMALL[0]), axis)):
        return False
    before, after = few.shape[:axis], few.shape[axis + 1 :]
    apart = [array.reshape(*before, each, -1, *after) for array in (few, more)]
    if _same(apart[0], apart[1].take(range(SMALL[0]), axis + 1)):
        return True
    if few.dtype.kind == "f":
        raise StitchError(f"{name} mixes rows: the first ones are others where there are more; it cannot be stitched")
    return False


def _same(one: Array, other: Array) -> bool:
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    seen = one[np.isfinite(one)]
    return bool(np.allclose(one, other, 1e-3, 1e-3 * float(np.abs(seen).max(initial=0)), equal_nan=True))
