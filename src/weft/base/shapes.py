"""Tensor shapes as users write them: ``NAME=1x3x640x640``, one grammar for options, streams and files.

A NAME that is an input takes a size for each of its dimensions. A NAME that is an axis (a free dimension that has a
name in the model file, such as ``batch`` or ``seq``) takes one number, for all inputs that have the axis.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.base.errors import ModelError

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Input -> its sizes, or axis -> its one size."""
Dimension = int | str | None
"""A dimension in a model file: its size, the name of its axis, or None."""
NAMELESS = (None, "", "?")
"""Names of free dimensions without a name of their own; two of them may differ in size."""
EXAMPLE = "1x3x224x224"
FREE_SIZE = 128
"""The size of a free dimension in examples; any value would do."""

_SIZES = re.compile(r"[0-9]{1,18}(?:x[0-9]{1,18})*")
"""Sizes joined by ``x``, each of at most 18 digits, which 64 bits hold."""
_TENSOR_NUMBER = re.compile(r"[0-9]+")
"""The part after the colon in TensorFlow's tensor names, as in ``image:0``."""


def parse_sizes(text: str) -> Shape:
    """Parse ``1x3x640x640``; ModelError for any other text."""
    if not _SIZES.fullmatch(sizes := text.strip()):
        raise ModelError(f"{text!r} is not a shape like {EXAMPLE}, nor the size of an axis like {FREE_SIZE}")
    return tuple(map(int, sizes.split("x")))


def parse_shape(text: str) -> tuple[str, Shape]:
    """Parse ``NAME=1x3x640x640``; ModelError for any other text."""
    name, equals, sizes = text.rpartition("=")
    if not equals or not name.strip():
        raise ModelError(f"{text!r} is not of the form NAME={EXAMPLE}")
    return name.strip(), parse_sizes(sizes)


def parse_shapes(
    texts: Sequence[str], models: Sequence[str], aliases: Mapping[str, str] | None = None
) -> dict[str, dict[str, Shape]]:
    """Return model -> name -> sizes, from texts of the form ``[MODEL:]NAME=1x3x640x640``.

    models: the names of the models; with several of them, a text must name its model. aliases: other name -> model.
    Texts of another form, and two different shapes for one name, raise ModelError.
    """
    shapes: dict[str, dict[str, Shape]] = {}
    for text in texts:
        target, sizes = parse_shape(text)
        model, name = _split_target(target, text, models, aliases or {})
        first_sizes = shapes.setdefault(model, {}).setdefault(name, sizes)
        if first_sizes != sizes:
            raise ModelError(f"{name} is given as {written(first_sizes)} and as {written(sizes)}; keep one of them")
    return shapes


def _split_target(target: str, text: str, models: Sequence[str], aliases: Mapping[str, str]) -> tuple[str, str]:
    """Return the model and the name in *target*, ``[MODEL:]NAME``; names may contain colons.

    text: the whole text, for messages. ModelError if the model is not known, or not named where there are several.
    """
    for alias, model in (*((model, model) for model in models), *aliases.items()):
        if target.startswith(f"{alias}:") and len(target) > len(alias) + 1:
            return model, target[len(alias) + 1 :]
    model_text, colon, name = target.rpartition(":")
    if colon and not _TENSOR_NUMBER.fullmatch(name):
        raise ModelError(f"{text!r}: {model_text!r} is not among the models {', '.join(models)}")
    if len(models) != 1:
        raise ModelError(f"{text!r}: say which model, as {models[0] if models else 'MODEL'}:{text}")
    return models[0], target


def sizes_of(value: Any) -> Any:
    """Return a shape from a file as a list of sizes: the text ``1x3``, a whole number, or an array of sizes.

    Other values are returned unchanged, for the schema of the file to refuse; a text that is no shape raises
    ValueError.
    """
    if isinstance(value, str):
        try:
            return list(parse_sizes(value))
        except ModelError as error:
            raise ValueError(str(error)) from error
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def settle(stated: Mapping[str, Sequence[int]], inputs: Mapping[str, Sequence[Dimension] | None]) -> dict[str, Shape]:
    """Derive the full shapes of inputs from the sizes *stated* for inputs and axes.

    inputs: name -> dimensions in the model file; None if the file has none. A free first dimension of unknown size is
    the batch, 1. Inputs that still have a dimension of unknown size, and inputs of which no size is stated, are left
    out of the result. Shapes that do not fit the model raise ModelError.
    """
    axes = {axis for dimensions in inputs.values() for axis in _axes(dimensions)}
    shapes: dict[str, Shape] = {}
    sizes: dict[str, int] = {}
    for name, shape in stated.items():
        if name in inputs:
            shapes[name] = _check_fits(name, tuple(shape), inputs)
        elif name not in axes:
            raise ModelError(f"unknown input {name!r}; the inputs are: {describe_inputs(inputs)}")
        elif len(shape) != 1:
            raise ModelError(f"{name} is an axis and takes one number, as {name}={FREE_SIZE}, not {written(shape)}")
        else:
            sizes[name] = shape[0]
    sizes = _complete_sizes(shapes, inputs, sizes)
    full_shapes = {name: one_sample(dimensions or (), inputs, sizes) for name, dimensions in inputs.items()}
    with_stated_size = {name for name, dimensions in inputs.items() if not sizes.keys().isdisjoint(_axes(dimensions))}
    return {
        name: full_shapes[name] for name in inputs if name in with_stated_size and -1 not in full_shapes[name]
    } | shapes


def one_sample(
    dimensions: Sequence[Dimension],
    inputs: Mapping[str, Sequence[Dimension] | None],
    sizes: Mapping[str, int] | None = None,
) -> Shape:
    """Return the sizes of an input's dimensions, -1 where unknown; *sizes*: axis -> size.

    A free first dimension is the batch, of size 1; so is every dimension with the name of the first dimension of any
    of the *inputs*.
    """
    first_axes = [shape[0] for shape in inputs.values() if shape]
    batch = {axis: 1 for axis in first_axes if isinstance(axis, str) and axis not in NAMELESS}
    known = {**batch, **(sizes or {})}
    sizes_or_free = [size if isinstance(size, int) else known.get(size or "", -1) for size in dimensions]
    return tuple(1 if index == 0 and size < 0 else size for index, size in enumerate(sizes_or_free))


def _complete_sizes(
    shapes: Shapes, inputs: Mapping[str, Sequence[Dimension] | None], stated: Mapping[str, int]
) -> dict[str, int]:
    """Return axis -> size: the *stated* sizes, and the sizes that follow from the *shapes* of inputs.

    An axis with two sizes in *shapes* is a name that an exporter used twice; it is left out. ModelError if a stated
    size and a shape disagree.
    """
    sizes_by_axis: dict[str, set[int]] = {}
    for name, shape in shapes.items():
        for axis, size in zip(inputs[name] or (), shape, strict=False):
            if isinstance(axis, str) and axis not in NAMELESS:
                sizes_by_axis.setdefault(axis, set()).add(size)
                if stated.get(axis, size) != size:
                    raise ModelError(f"{axis}={stated[axis]} and {name}={written(shape)} disagree; keep one of them")
    return {axis: min(sizes) for axis, sizes in sizes_by_axis.items() if len(sizes) == 1} | dict(stated)


def _check_fits(name: str, shape: Shape, inputs: Mapping[str, Sequence[Dimension] | None]) -> Shape:
    """Return *shape* if it fits the dimensions of the input in the model file; ModelError if not."""
    dimensions = inputs[name]
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ModelError(
            f"input {name!r}: sizes must be at least 0, got {written(shape)}; the inputs are: {describe_inputs(inputs)}"
        )
    if dimensions is not None and (
        len(shape) != len(dimensions)
        or any(isinstance(want, int) and want != size for want, size in zip(dimensions, shape, strict=True))
    ):
        raise ModelError(
            f"shape {written(shape)} does not fit input {name!r}; the inputs are: {describe_inputs(inputs)}"
        )
    return shape


def _axes(dimensions: Sequence[Dimension] | None) -> Iterator[str]:
    """Return the names of the free dimensions that have one."""
    return (axis for axis in dimensions or () if isinstance(axis, str) and axis not in NAMELESS)


def describe_inputs(inputs: Mapping[str, Sequence[Dimension] | None]) -> str:
    """Return inputs for a message, with the names of their axes: ``ids [batch, seq]; mask [batch, seq]``."""
    return "; ".join(f"{name} {describe_dimensions(dimensions)}" for name, dimensions in inputs.items()) or "none"


def describe_dimensions(dimensions: Sequence[Dimension] | None) -> str:
    """Return dimensions for a message: ``[batch, 3, ?, 224]``."""
    if dimensions is None:
        return "of any shape"
    return f"[{', '.join('?' if size in NAMELESS else str(size) for size in dimensions)}]"


def example(dimensions: Sequence[Dimension]) -> str:
    """Return a shape that would fit, for advice in messages: ``1x128`` for ``[batch, seq]``."""
    sizes = [size if isinstance(size, int) and size >= 0 else FREE_SIZE for size in dimensions]
    if dimensions and (not isinstance(dimensions[0], int) or dimensions[0] < 0):
        sizes[0] = 1
    return written(sizes)


def written(shape: Sequence[int]) -> str:
    """Return a shape as users write it; free dimensions (-1) are question marks."""
    return "x".join("?" if size == -1 else str(size) for size in shape) or "()"
