"""Weights that are another model's in another order, as permuted heads of an attention: ``put_in_order``.

A product reads channels that products before it made. Where its rows are those of another model, in some order, and the
columns and biases of all that made the channels are in the same order, both models compute the same: one takes over
what the other holds. Whether all that lies between may be reordered so (heads as a whole, the inner channels of a
layer one by one) is not understood but tried: a model that answers otherwise keeps its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np

from weft_stitch.bodies.body import Body, BodyStep, BodyValue
from weft_stitch.bodies.places import BodyPlace
from weft_stitch.net import Array

Contents = Mapping[int, tuple[str, ...]]
"""Step -> what a model holds there."""


def put_in_order(body: Body, places: Mapping[BodyValue, BodyPlace], unchanged: Callable[[int], bool]) -> int:
    """Let models hold what others do, where only the order differs; for how many products.

    unchanged: whether a model still answers as it does alone.
    """
    count = 0
    for task in range(1, body.tasks):
        kept = {number: step.contents[task] for number, step in enumerate(body.steps) if task in step.contents}
        found = list(_taken_over(body, places, task))
        if found and unchanged(task):
            count += sum(_weight(body, body.steps[number], task) is not None for number in set(found))
        elif found:
            for number in found:
                body.steps[number].contents[task] = kept[number]
    return count


def _taken_over(body: Body, places: Mapping[BodyValue, BodyPlace], task: int) -> Iterator[int]:
    """Have *task* hold what a model before it does, at the steps that are told."""
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
    """What *task* would hold if the channels that a product reads were in the order of *other*; None: they differ."""
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
    """Whether both models hold the same in a step, but for the order of the last axis."""
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
    """The matrix that a product multiplies by from the right, and nothing else."""
    if step.node.op != "MatMul" or step.inputs[0] is None or step.inputs[1] is not None or task in step.parts:
        return None
    found = body.constants.arrays.get(step.contents[task][1])
    return found if found is not None and found.ndim == 2 else None


def _order(mine: Array, theirs: Array) -> Array | None:
    """The rows of *mine* in the order of *theirs*; None where they are others, or in that order already."""
    if mine.shape != theirs.shape or not len(mine) or not np.any(mine[:, 0] == theirs[0, 0]):
        return None
    rows = {row.tobytes(): at for at, row in enumerate(np.ascontiguousarray(mine))}
    found = [rows.get(row.tobytes(), -1) for row in np.ascontiguousarray(theirs)]
    order = np.array(found)
    if len(set(found)) < len(found) or order.min() < 0 or np.array_equal(order, np.arange(len(order))):
        return None
    return order
