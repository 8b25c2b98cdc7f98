"""The axes of rows and lengths in a body's values: ``locate_values`` runs models at several sizes, compares shapes.

There are no rules for operators. A model is run with more rows, and with longer ones; an axis that grows with the rows
holds them. Comparing the rows that two runs share shows whether they are consecutive or interleaved.
``find_padding`` looks for padding values in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from weft.base.errors import StitchError
from weft.runtime.tensors import Array
from weft_stitch.bodies.body import INPUT_STEP, Body, BodyValue
from weft_stitch.graph import DYNAMIC

SMALL, MORE, LONGER = (2, 5), (3, 5), (2, 7)
"""Rows and lengths of the runs. All are prime, so that the growth of an axis has one explanation."""


class BodyPlace(NamedTuple):
    """The observed layout of a value: which axes grow with the rows and the length."""

    sizes: tuple[int, ...]
    """Its shape in the first run (``SMALL``)."""
    dtype: str
    row_axis: int | None
    """The axis of the rows; None if the value has no rows, such as a shape."""
    per_row: int = 1
    """Entries along that axis per row, or, with *by_length*, per row and token."""
    by_length: bool = False
    """Whether the axis of the rows also grows with the length."""
    length_axes: tuple[int, ...] = ()
    """The other axes that grow with the length."""
    interleaved: bool = False
    """Whether rows are interleaved along their axis: it begins with the first entry of every row."""

    @property
    def as_long(self) -> bool:
        """Whether the axes *length_axes* are as long as the inputs."""
        return all(self.sizes[axis] == SMALL[1] for axis in self.length_axes)


Fill = Mapping[str, float]
"""Input -> its padding value."""
ValueRuns = Callable[[int, int, int], Mapping[BodyValue, Array]]
"""Runs a model, given its number, the number of rows and their length; returns all its values.

A run with more rows begins with the rows of the smaller run.
"""
OutputRuns = Callable[[int, int, int], Mapping[str, Array]]
"""The same for its outputs, by name."""


def locate_values(body: Body, runs: ValueRuns) -> dict[BodyValue, BodyPlace]:
    """Find the layout of every value. A model is only run if some of its values are in no earlier model."""
    places: dict[BodyValue, BodyPlace] = {}
    for task in range(body.tasks):
        if all(value in places for value in body.values(task)):
            continue
        small, more, longer = (runs(task, *sizes) for sizes in (SMALL, MORE, LONGER))
        for value, array in small.items():
            if value not in places:
                node = body.steps[value.step].node
                name, arrays = f"{node.label} ({node.op})", [array, more[value], longer[value]]
                place = _infer_place(name, [sample.shape for sample in arrays], str(array.dtype))
                places[value] = place._replace(interleaved=_is_interleaved(name, place, array, more[value]))
    return places


def locate_outputs(body: Body, task: int, runs: OutputRuns) -> dict[str, BodyPlace]:
    """Find the layouts of a model's outputs; ``StitchError`` if an output has not one row per input row."""
    small, more, longer = (runs(task, *sizes) for sizes in (SMALL, MORE, LONGER))
    places = {}  # output -> its layout
    for name, array in small.items():
        shapes = [outputs[name].shape for outputs in (small, more, longer)]
        place = _infer_place(f"output {name}", shapes, str(array.dtype))
        if (place.row_axis, place.per_row, place.by_length) != (0, 1, False):
            raise StitchError(f"{body.names[task]}: its output {name} has no row for each row that goes in")
        places[name] = place
    return places


def _infer_place(name: str, shapes: Sequence[tuple[int, ...]], dtype: str) -> BodyPlace:
    """The layout of a value, by its shapes in the runs ``SMALL``, ``MORE`` and ``LONGER``; else ``StitchError``."""
    small, more, longer = shapes
    if len(small) != len(more) or len(small) != len(longer):
        raise StitchError(f"{name} has other dimensions for other sizes; it cannot be stitched")
    row_axes = [axis for axis, pair in enumerate(zip(small, more, strict=True)) if pair[0] != pair[1]]
    long_axes = [axis for axis, pair in enumerate(zip(small, longer, strict=True)) if pair[0] != pair[1]]
    if not row_axes:
        return BodyPlace(small, dtype, None, length_axes=tuple(long_axes))
    axis = row_axes[0]
    # the axis must grow in proportion to the rows, and below to the length
    if len(row_axes) > 1 or small[axis] * MORE[0] != more[axis] * SMALL[0]:
        raise StitchError(f"{name} mixes rows: it is {small} for {SMALL[0]} of them, {more} for {MORE[0]}")
    per_row, by_length = small[axis] // SMALL[0], axis in long_axes
    if by_length and longer[axis] * SMALL[1] != small[axis] * LONGER[1]:
        raise StitchError(f"{name} is {small} and {longer} for rows of other lengths; it cannot be split by rows")
    other_long = tuple(other for other in long_axes if other != axis)
    return BodyPlace(small, dtype, axis, per_row // SMALL[1] if by_length else per_row, by_length, other_long)


def _is_interleaved(name: str, place: BodyPlace, small: Array, more: Array) -> bool:
    """Whether rows are interleaved along their axis, by comparing the rows that both runs have."""
    if place.row_axis is None or not small.size:
        return False
    axis, per_row = place.row_axis, small.shape[place.row_axis] // SMALL[0]
    if _nearly_equal(small, more.take(range(per_row * SMALL[0]), axis)):
        return False
    # interleaved rows alternate along the axis, so that the row is the inner of the two axes it splits into
    outer_sizes, inner_sizes = small.shape[:axis], small.shape[axis + 1 :]
    few_by_row, more_by_row = (array.reshape(*outer_sizes, per_row, -1, *inner_sizes) for array in (small, more))
    if _nearly_equal(few_by_row, more_by_row.take(range(SMALL[0]), axis + 1)):
        return True
    if small.dtype.kind == "f":
        raise StitchError(f"{name} mixes rows: the first ones are others where there are more; it cannot be stitched")
    return False


def _nearly_equal(one: Array, other: Array) -> bool:
    """Whether two arrays are equal up to rounding."""
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, other))
    finite = one[np.isfinite(one)]
    return bool(np.allclose(one, other, rtol=1e-3, atol=1e-3 * float(np.abs(finite).max(initial=0)), equal_nan=True))


ROWS, SHORT, LONG = 2, 5, 7
"""Rows, length and padded length of the runs by which padding values are found."""
_MASK_VALUES = ((1, 0), (0, 1), (0, 0), (1, 1))
"""Values that a mask may have at tokens and at padding, the usual ones first."""
_FEW_MASKS = 3
"""Up to 3 masks are tried in all combinations, in at most 4^3 runs; more masks must all use the same values."""

Feed = dict[str, Array]
Answers = Callable[[int, Feed], Mapping[str, Array]]
"""Runs a model, given its number, on inputs by name, and returns its outputs by name."""


@dataclass(frozen=True, eq=False)
class BodySamples:
    """Draws random inputs for the models of a body."""

    body: Body
    usual: Mapping[str, float]
    """Mask -> its value at tokens."""
    fill: Fill | None
    """Input -> its padding value; None if padding changes answers."""

    def draw(self, rng: np.random.Generator, task: int, rows: int, length: int) -> Feed:
        """Draw *rows* rows of inputs for model *task*: the first of *length*, others shorter if padding is possible."""
        ends = rng.integers(1, length + 1, rows) if self.fill else np.full(rows, length)
        ends[:1] = length
        return {name: self._draw_input(rng, task, name, ends, length) for name in self.body.ports[task]}

    def pad(self, task: int, feed: Feed, length: int) -> Feed:
        """Pad *feed* to *length*."""
        padded = {}
        for name, port in self.body.ports[task].items():
            widths = [(0, length - size if axis in port.long else 0) for axis, size in enumerate(feed[name].shape)]
            padded[name] = np.pad(feed[name], widths, constant_values=(self.fill or {}).get(name, 0))
        return padded

    def _draw_input(self, rng: np.random.Generator, task: int, name: str, ends: Array, length: int) -> Array:
        """Draw one input. *ends*: the length of each row, behind which a mask has its padding value."""
        port = self.body.ports[task][name]
        shape = [len(ends), *(length if size == DYNAMIC else size for size in port.shape[1:])]
        if port.dtype.startswith("float"):
            return np.asarray(rng.standard_normal(shape), port.dtype)
        if name not in self.usual:  # an index into a table, or any other integers that are no mask
            return np.asarray(rng.integers(0, tables(self.body, task).get(name, 2), shape), port.dtype)
        is_padding: Array = np.arange(shape[-1]) >= np.reshape(ends, (-1, *[1] * (len(shape) - 1))).astype(int)
        mask = np.where(np.broadcast_to(is_padding, shape), (self.fill or self.usual)[name], self.usual[name])
        return np.asarray(mask, port.dtype)


def tables(body: Body, task: int) -> dict[str, int]:
    """Input that is an index into a table of the model -> the number of the table's lines."""
    sizes: dict[str, int] = {}
    # value that equals an input, but for casts -> the input
    input_of = {BodyValue(INPUT_STEP, index): name for index, name in enumerate(body.inputs)}
    for number, step in enumerate(body.steps):
        if task not in step.contents:
            continue
        if step.node.op in ("Cast", "Identity") and step.inputs[0] in input_of:
            input_of[BodyValue(number, 0)] = input_of[step.inputs[0]]
        if step.node.op == "Gather" and step.inputs[1] in input_of and step.contents[task][0] in body.constants.arrays:
            own = step.lines.get(task)
            lines = own.count if own else len(body.constants.arrays[step.contents[task][0]])
            name = input_of[step.inputs[1]]
            sizes[name] = min(lines, sizes.get(name, lines))
    return sizes


def find_padding(body: Body, answers: Answers, close: Callable[[Array, Array], bool]) -> BodySamples:
    """Find the first padding values that change no answer of the first model; random inputs that use them.

    *answers*: runs a model. *close*: compares an answer with the expected one.
    """
    indices = tables(body, 0)
    integers = [name for name, port in body.ports[0].items() if not port.dtype.startswith("float")]
    masks = [name for name in {**dict.fromkeys(integers), **_new_integer_inputs(body)} if name not in indices]
    for pairs in _mask_values(len(masks)):
        usual = {name: float(at_tokens) for name, (at_tokens, _) in zip(masks, pairs, strict=True)}
        padding = {name: float(at_padding) for name, (_, at_padding) in zip(masks, pairs, strict=True)}
        samples = BodySamples(body, usual, dict.fromkeys(body.inputs, 0.0) | padding)
        if all(_unchanged_by_padding(samples, answers, close)):
            return samples
    return BodySamples(body, dict.fromkeys(masks, 1.0), fill=None)  # padding always changes answers


def _mask_values(masks: int) -> Iterator[tuple[tuple[int, int], ...]]:
    """Combinations of values for *masks* masks; for many masks only those in which all masks are alike."""
    return product(_MASK_VALUES, repeat=masks) if masks <= _FEW_MASKS else ((pair,) * masks for pair in _MASK_VALUES)


def _new_integer_inputs(body: Body) -> dict[str, None]:
    """The integer inputs that the first model does not have."""
    ports = [port for model_ports in body.ports[1:] for port in model_ports.values()]
    integers = [port.name for port in ports if not port.dtype.startswith("float")]
    return {name: None for name in integers if name not in body.ports[0]}


def _unchanged_by_padding(
    samples: BodySamples, answers: Answers, close: Callable[[Array, Array], bool]
) -> Iterator[bool]:
    """For each output, whether it stays the same when the inputs are padded."""
    rng = np.random.default_rng(0)
    full_rows = BodySamples(samples.body, samples.usual, fill=None)  # without padding, all rows have the same length
    feed = full_rows.draw(rng, 0, ROWS, SHORT)
    unpadded_answers, padded_answers = answers(0, feed), answers(0, samples.pad(0, feed, LONG))
    for name, expected in unpadded_answers.items():
        answer = padded_answers[name]
        unpadded_part = tuple(slice(0, size) for size in expected.shape)
        finite = bool(np.isfinite(expected).all())
        yield finite and answer.ndim == expected.ndim and close(answer[unpadded_part], expected)
