"""Weight sharing between models that were tuned from one base: ``Reference``, ``put_in_order``.

A product or table that differs from the reference's in few columns, rows or lines is replaced by the reference's weight
and its difference; with a tolerance, also one that differs by a scale or a low-rank part. Models are processed one
after another, so that only one whole model is in memory besides the shared weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from weft_stitch.bodies.body import Body, BodyStep, BodyValue, LowRank, OwnLines, low_rank, own_lines, replaced, scaled
from weft_stitch.bodies.probing import BodyPlace
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants


class Reference:
    """The weights that others are compared with: those of the base or of the first model, by step."""

    def __init__(self, steps: Sequence[BodyStep], task: int, constants: Constants) -> None:
        self._constants = constants
        self._keys: Mapping[int, str] = {
            number: step.contents[task][place]
            for number, step in enumerate(steps)
            if (place := _weight_place(step, task)) is not None
        }
        self._differences: dict[tuple[str, str, int], LowRank | OwnLines | None] = {}
        """Reference's key, model's key, place -> their difference; None where they are too different."""

    def bring_near(self, steps: Sequence[BodyStep], task: int, tolerance: float) -> None:
        """Replace weights of *task* by the reference's and a difference that is exact up to *tolerance* (relative)."""
        left = set()
        for number, step in enumerate(steps):
            place = _weight_place(step, task)
            if place is None or number not in self._keys:
                continue
            mine, near = step.contents[task][place], self._keys[number]
            part = self._part(near, mine, place, tolerance) if mine != near else None
            if part is None:
                continue
            left.add(mine)
            step.contents[task] = ("", near) if place else (near, "")
            if isinstance(part, OwnLines):
                step.lines[task] = part
            elif part.rank or part.kind != "low rank":
                step.parts[task] = part
        read = {key for step in steps for keys in step.contents.values() for key in keys}
        self._constants.forget(left - read - set(self._keys.values()))

    def _part(self, near: str, mine: str, place: int, tolerance: float) -> LowRank | OwnLines | None:
        key = near, mine, place
        if key not in self._differences:
            one, other = self._weight(near), self._weight(mine)
            self._differences[key] = None if one is None or other is None else _between(one, other, place, tolerance)
        return self._differences[key]

    def _weight(self, key: str) -> Array | None:
        array = self._constants.arrays.get(key)
        return array if array is not None and array.ndim == 2 and array.dtype == np.float32 else None


def _between(near: Array, mine: Array, place: int, tolerance: float) -> LowRank | OwnLines | None:
    """The first kind of difference that turns *near* into *mine*."""
    if not place:
        return own_lines(near, mine)
    if near.shape != mine.shape:
        return None
    allowed = tolerance * float(np.linalg.norm(mine))
    part = replaced(near, mine)
    if part is None and tolerance:
        part = scaled(near, mine, allowed) or low_rank(mine - near, allowed)
    return part


def _weight_place(step: BodyStep, task: int) -> int | None:
    """The input of a step that is a weight to multiply by or a table to look up; None if there is none."""
    if task not in step.contents or len(step.inputs) != 2:
        return None
    place = {"MatMul": 1, "Gather": 0}.get(step.node.op)
    if place is None or step.inputs[place] is not None or step.inputs[1 - place] is None:
        return None
    return None if not place and step.node.attributes.get("axis", 0) else place


def put_in_order(body: Body, places: Mapping[BodyValue, BodyPlace], unchanged: Callable[[int], bool]) -> int:
    """Give models the weights of others where only the order of channels differs; return the number of products.

    unchanged: checks whether a model still answers as it does alone.
    """
    count = 0
    for task in range(1, body.tasks):
        kept = {number: step.contents[task] for number, step in enumerate(body.steps) if task in step.contents}
        changed = list(_take_over(body, places, task))
        if changed and unchanged(task):
            count += sum(_weight(body, body.steps[number], task) is not None for number in set(changed))
        elif changed:
            for number in changed:
                body.steps[number].contents[task] = kept[number]
    return count


def _take_over(body: Body, places: Mapping[BodyValue, BodyPlace], task: int) -> Iterator[int]:
    """Replace constants of *task* by those of an earlier model; yield the numbers of the steps."""
    for number, step in enumerate(body.steps):
        mine = step.contents.get(task)
        others = {step.contents[other]: other for other in range(task) if other in step.contents}
        for other in (other for held, other in others.items() if mine and held != mine):
            if changes := _changes(body, places, number, task, other):
                for at, contents in changes.items():
                    body.steps[at].contents[task] = contents
                yield from changes
                break


def _changes(
    body: Body, places: Mapping[BodyValue, BodyPlace], number: int, task: int, other: int
) -> dict[int, tuple[str, ...]] | None:
    """The constants of *task* with a product's input channels in the order of *other*; None where more differs."""
    step = body.steps[number]
    mine, theirs = _weight(body, step, task), _weight(body, step, other)
    order = None if mine is None or theirs is None else _order(mine, theirs)
    if order is None:
        return None
    changes = {number: step.contents[other]}
    left, seen = [step.inputs[0]], set()
    while left:
        value = left.pop()
        if value is None or value.step < 0 or value in seen or places[value].rows is None:
            continue
        seen.add(value)
        writer = body.steps[value.step]
        if not _fits(body, writer, task, other, order):
            return None
        changes[value.step] = writer.contents[other]
        left += [] if _weight(body, writer, task) is not None else list(writer.inputs)
    return changes


def _fits(body: Body, step: BodyStep, task: int, other: int, order: Array) -> bool:
    """Whether the constants of two models in a step are equal except for the order of the last axis."""
    if other not in step.contents or {task, other} & (step.parts.keys() | step.lines.keys()):
        return False
    arrays = body.constants.arrays
    for mine, theirs in zip(step.contents[task], step.contents[other], strict=True):
        one, two = arrays.get(mine), arrays.get(theirs)
        if mine == theirs and (one is None or one.shape[-1:] != order.shape):
            continue
        if one is None or two is None or one.shape != two.shape or one.shape[-1:] != order.shape:
            return False
        if not np.array_equal(one[..., order], two):
            return False
    return True


def _weight(body: Body, step: BodyStep, task: int) -> Array | None:
    """The weight of a plain product with a stored matrix on the right; None for other steps."""
    if step.node.op != "MatMul" or step.inputs[0] is None or step.inputs[1] is not None or task in step.parts:
        return None
    array = body.constants.arrays.get(step.contents[task][1])
    return array if array is not None and array.ndim == 2 else None


def _order(mine: Array, theirs: Array) -> Array | None:
    """The permutation that sorts the rows of *mine* like *theirs*; None where rows differ or the order is equal."""
    if mine.shape != theirs.shape or not len(mine) or not np.any(mine[:, 0] == theirs[0, 0]):
        return None
    rows = {row.tobytes(): at for at, row in enumerate(np.ascontiguousarray(mine))}
    places = [rows.get(row.tobytes(), -1) for row in np.ascontiguousarray(theirs)]
    order = np.array(places)
    if len(set(places)) < len(places) or order.min() < 0 or np.array_equal(order, np.arange(len(order))):
        return None
    return order
