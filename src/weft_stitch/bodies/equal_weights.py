"""Weight sharing between models that were tuned from one base: ``Reference``, ``put_in_order``.

A product or table that differs from the reference's in few columns, rows or lines is replaced by the reference's weight
and its difference; with a tolerance, also one that differs by a scale or a low-rank part. Models are processed one
after another, so that only one whole model is in memory besides the shared weights. A step's *contents* are the keys of
each model's constants in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from weft_stitch.bodies.body import (
    Body,
    BodyStep,
    BodyValue,
    LowRank,
    OwnLines,
    low_rank,
    own_lines,
    replace_columns,
    scale_columns,
)
from weft_stitch.bodies.probing import BodyPlace
from weft_stitch.net import Array
from weft_stitch.reading.onnx_program import Constants


class Reference:
    """The weights that other models' are compared with: those of the base or of the first model, by step."""

    def __init__(self, steps: Sequence[BodyStep], task: int, constants: Constants) -> None:
        self._constants = constants
        # step -> the key of the reference's weight in it
        self._keys: Mapping[int, str] = {
            number: step.contents[task][input_index]
            for number, step in enumerate(steps)
            if (input_index := _weight_input(step, task)) is not None
        }
        self._differences: dict[tuple[str, str, int], LowRank | OwnLines | None] = {}
        """Reference's key, model's key and input index -> their difference; None if they differ too much."""

    def bring_near(self, steps: Sequence[BodyStep], task: int, tolerance: float) -> None:
        """Replace weights of *task* by the reference's and a difference, exact up to *tolerance* (relative)."""
        replaced = set()  # keys of the weights that the model no longer reads
        for number, step in enumerate(steps):
            input_index = _weight_input(step, task)
            if input_index is None or number not in self._keys:
                continue
            own_key, shared_key = step.contents[task][input_index], self._keys[number]
            difference = (
                self._difference(shared_key, own_key, input_index, tolerance) if own_key != shared_key else None
            )
            if difference is None:
                continue
            replaced.add(own_key)
            step.contents[task] = ("", shared_key) if input_index else (shared_key, "")
            if isinstance(difference, OwnLines):
                step.lines[task] = difference
            elif difference.rank or difference.kind != "low rank":  # else there is no difference left
                step.parts[task] = difference
        read = {key for step in steps for keys in step.contents.values() for key in keys}
        self._constants.forget(replaced - read - set(self._keys.values()))

    def _difference(
        self, shared_key: str, own_key: str, input_index: int, tolerance: float
    ) -> LowRank | OwnLines | None:
        """The difference between the constants with both keys; None if they differ too much."""
        key = shared_key, own_key, input_index
        if key not in self._differences:
            reference, weight = self._matrix(shared_key), self._matrix(own_key)
            self._differences[key] = (
                None
                if reference is None or weight is None
                else _find_difference(reference, weight, input_index, tolerance)
            )
        return self._differences[key]

    def _matrix(self, key: str) -> Array | None:
        """The constant with *key* if it is a float32 matrix; else None."""
        array = self._constants.arrays.get(key)
        return array if array is not None and array.ndim == 2 and array.dtype == np.float32 else None


def _find_difference(reference: Array, weight: Array, input_index: int, tolerance: float) -> LowRank | OwnLines | None:
    """The first kind of difference that turns *reference* into *weight*; None if they differ too much.

    *input_index*: of the step; 0 for a table to look up, 1 for the weight of a product.
    """
    if not input_index:
        return own_lines(reference, weight)
    if reference.shape != weight.shape:
        return None
    allowed = tolerance * float(np.linalg.norm(weight))
    difference = replace_columns(reference, weight)
    if difference is None and tolerance:
        difference = scale_columns(reference, weight, allowed) or low_rank(weight - reference, allowed)
    return difference


def _weight_input(step: BodyStep, task: int) -> int | None:
    """The index of a step's input that is a weight to multiply by, or a table to look up; None if no input is."""
    if task not in step.contents or len(step.inputs) != 2:
        return None
    input_index = {"MatMul": 1, "Gather": 0}.get(step.node.op)
    if input_index is None or step.inputs[input_index] is not None or step.inputs[1 - input_index] is None:
        return None
    is_other_lookup = not input_index and step.node.attributes.get("axis", 0)  # not of whole lines of the table
    return None if is_other_lookup else input_index


def put_in_order(body: Body, places: Mapping[BodyValue, BodyPlace], unchanged: Callable[[int], bool]) -> int:
    """Give models the weights of others that differ from theirs only in the order of channels.

    Return the number of products that then share a weight. *places*: the layout of each value. *unchanged*: checks
    whether a model still answers as its own file does; if not, its changes are undone.
    """
    count = 0
    for task in range(1, body.tasks):
        original = {number: step.contents[task] for number, step in enumerate(body.steps) if task in step.contents}
        changed = list(_reuse_weights(body, places, task))
        if changed and unchanged(task):
            count += sum(_weight(body, body.steps[number], task) is not None for number in set(changed))
        elif changed:
            for number in changed:
                body.steps[number].contents[task] = original[number]
    return count


def _reuse_weights(body: Body, places: Mapping[BodyValue, BodyPlace], task: int) -> Iterator[int]:
    """Replace constants of *task* by those of an earlier model; yield the indices of the changed steps."""
    for number, step in enumerate(body.steps):
        own_keys = step.contents.get(task)
        # of earlier models with equal constants, one is enough
        task_by_keys = {step.contents[other]: other for other in range(task) if other in step.contents}
        for other in (other for keys, other in task_by_keys.items() if own_keys and keys != own_keys):
            if changes := _reorder_changes(body, places, number, task, other):
                for changed, keys in changes.items():
                    body.steps[changed].contents[task] = keys
                yield from changes
                break


def _reorder_changes(
    body: Body, places: Mapping[BodyValue, BodyPlace], number: int, task: int, other: int
) -> dict[int, tuple[str, ...]] | None:
    """Step -> the constants that *task* gets if a product's input channels take the order of *other*.

    All steps that compute these channels must fit the new order; None if something else differs.
    """
    step = body.steps[number]
    own_weight, other_weight = _weight(body, step, task), _weight(body, step, other)
    order = None if own_weight is None or other_weight is None else _row_order(own_weight, other_weight)
    if order is None:
        return None
    changes = {number: step.contents[other]}
    unvisited, seen = [step.inputs[0]], set()
    while unvisited:
        value = unvisited.pop()
        if value is None or value.is_input or value in seen or places[value].row_axis is None:
            continue
        seen.add(value)
        writer = body.steps[value.step]
        if not _fits_order(body, writer, task, other, order):
            return None
        changes[value.step] = writer.contents[other]
        # behind a product with a weight of its own, channels have another order
        unvisited += [] if _weight(body, writer, task) is not None else list(writer.inputs)
    return changes


def _fits_order(body: Body, step: BodyStep, task: int, other: int, order: Array) -> bool:
    """Whether the constants of two models in a step are equal except for the order of the last axis."""
    if other not in step.contents or {task, other} & (step.parts.keys() | step.lines.keys()):
        return False
    arrays = body.constants.arrays
    for own_key, other_key in zip(step.contents[task], step.contents[other], strict=True):
        array, other_array = arrays.get(own_key), arrays.get(other_key)
        if own_key == other_key and (array is None or array.shape[-1:] != order.shape):
            continue  # a shared constant without the axis whose order changes
        if array is None or other_array is None or array.shape != other_array.shape or array.shape[-1:] != order.shape:
            return False
        if not np.array_equal(array[..., order], other_array):
            return False
    return True


def _weight(body: Body, step: BodyStep, task: int) -> Array | None:
    """The weight of a plain product with a stored matrix on the right; None for any other step."""
    if step.node.op != "MatMul" or step.inputs[0] is None or step.inputs[1] is not None or task in step.parts:
        return None
    array = body.constants.arrays.get(step.contents[task][1])
    return array if array is not None and array.ndim == 2 else None


def _row_order(weight: Array, other: Array) -> Array | None:
    """The permutation that sorts the rows of *weight* as in *other*; None if rows differ or are in order already."""
    # the last test is cheap: whether any row of *weight* begins like the first of *other*
    if weight.shape != other.shape or not len(weight) or not np.any(weight[:, 0] == other[0, 0]):
        return None
    row_index = {row.tobytes(): index for index, row in enumerate(np.ascontiguousarray(weight))}
    indices = [row_index.get(row.tobytes(), -1) for row in np.ascontiguousarray(other)]
    order = np.array(indices)
    if len(set(indices)) < len(indices) or order.min() < 0 or np.array_equal(order, np.arange(len(order))):
        return None
    return order
