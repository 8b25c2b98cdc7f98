"""Shapes as users write them: ``NAME=1x3x640x640``, one grammar for options, streams and files.

A NAME that is an input takes a size for each of its dimensions. A NAME that is an axis, which is what model files call
a free dimension (``batch``, ``seq``), takes one number, for all inputs that have the axis.
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
"""What a model file says of a dimension: its size, the name of its axis, or nothing."""
NAMELESS = (None, "", "?")
"""What free dimensions are called that have no name; two of them need not have one size."""
EXAMPLE = "1x3x224x224"
FREE_SIZE = 128
"""The size that stands for a free one in examples."""

_SIZES = re.compile(r"[0-9]{1,18}(?:x[0-9]{1,18})*")
"""At most 18 digits, which 64 bits hold."""
_TENSOR_NUMBER = re.compile(r"[0-9]+")
"""What follows the colon in the name of a tensor of TensorFlow, as in ``image:0``."""


def parse_sizes(text: str) -> Shape:
    """The sizes in ``1x3x640x640``; ModelError where it is nothing like that."""
    if not _SIZES.fullmatch(sizes := text.strip()):
        raise ModelError(f"{text!r} is not a shape like {EXAMPLE}, nor the size of an axis like {FREE_SIZE}")
    return tuple(map(int, sizes.split("x")))


def parse_shape(text: str) -> tuple[str, Shape]:
    """The name and the sizes in ``NAME=1x3x640x640``; ModelError where it is nothing like that."""
    name, equals, sizes = text.rpartition("=")
    if not equals or not name.strip():
        raise ModelError(f"{text!r} is not of the form NAME={EXAMPLE}")
    return name.strip(), parse_sizes(sizes)


def parse_shapes(
    texts: Sequence[str], models: Sequence[str], aliases: Mapping[str, str] | None = None
) -> dict[str, dict[str, Shape]]:
    """Model -> name -> sizes, from texts of the form ``[MODEL:]NAME=1x3x640x640``.

    Where there are several models, a text has to say which it means. aliases: other names of the models.
    Anything else raises ModelError.
    """
    found: dict[str, dict[str, Shape]] = {}
    for text in texts:
        target, sizes = parse_shape(text)
        model, name = _split_target(target, text, models, aliases or {})
        known = found.setdefault(model, {}).setdefault(name, sizes)
        if known != sizes:
            raise ModelError(f"{name} is given as {written(known)} and as {written(sizes)}; keep one of them")
    return found


def _split_target(target: str, text: str, models: Sequence[str], aliases: Mapping[str, str]) -> tuple[str, str]:
    """The model and the name of ``[MODEL:]NAME``; names may have colons of their own."""
    for called, model in (*((model, model) for model in models), *aliases.items()):
        if target.startswith(f"{called}:") and len(target) > len(called) + 1:
            return model, target[len(called) + 1 :]
    other, colon, name = target.rpartition(":")
    if colon and not _TENSOR_NUMBER.fullmatch(name):
        raise ModelError(f"{text!r}: {other!r} is not among the models {', '.join(models)}")
    if len(models) != 1:
        raise ModelError(f"{text!r}: say which model, as {models[0] if models else 'MODEL'}:{text}")
    return models[0], target


def sizes_of(value: Any) -> Any:
    """What a file gives as a shape: the text ``1x3``, a whole number, or an array of sizes, as a list of sizes.

    Anything else is handed back for the file's schema to refuse; a text that is no shape raises ValueError.
    """
    if isinstance(value, str):
        try:
            return list(parse_sizes(value))
        except ModelError as error:
            raise ValueError(str(error)) from error
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def settle(given: Mapping[str, Sequence[int]], inputs: Mapping[str, Sequence[Dimension] | None]) -> dict[str, Shape]:
    """The full shapes of all inputs that follow from what is *given* for inputs and axes.

    inputs: what the model file says of each; None where it says nothing. A free first dimension that nothing tells is
    the batch, 1. Inputs that still have a dimension of unknown size are left out, and so are those of which nothing is
    given. What does not fit the model raises ModelError.
    """
    axes = {each for dimensions in inputs.values() for each in _axes(dimensions)}
    shapes: dict[str, Shape] = {}
    sizes: dict[str, int] = {}
    for name, shape in given.items():
        if name in inputs:
            shapes[name] = _fitting(name, tuple(shape), inputs)
        elif name not in axes:
            raise ModelError(f"unknown input {name!r}; the inputs are: {described(inputs)}")
        elif len(shape) != 1:
            raise ModelError(f"{name} is an axis and takes one number, as {name}={FREE_SIZE}, not {written(shape)}")
        else:
            sizes[name] = shape[0]
    sizes = _with_sizes_of(shapes, inputs, sizes)
    filled = {name: one_sample(dimensions or (), inputs, sizes) for name, dimensions in inputs.items()}
    carried = {name for name, dimensions in inputs.items() if not sizes.keys().isdisjoint(_axes(dimensions))}
    return {name: filled[name] for name in inputs if name in carried and -1 not in filled[name]} | shapes


def one_sample(
    dimensions: Sequence[Dimension],
    inputs: Mapping[str, Sequence[Dimension] | None],
    sizes: Mapping[str, int] | None = None,
) -> Shape:
    """The sizes of an input's dimensions, -1 where nothing tells them; *sizes*: axis -> size.

    A free first dimension is the batch, 1, and so are others that have its name in any of the *inputs*.
    """
    batch = {each[0]: 1 for each in inputs.values() if each and isinstance(each[0], str) and each[0] not in NAMELESS}
    known = {**batch, **(sizes or {})}
    filled = [each if isinstance(each, int) else known.get(each or "", -1) for each in dimensions]
    return tuple(1 if place == 0 and size < 0 else size for place, size in enumerate(filled))


def _with_sizes_of(
    shapes: Shapes, inputs: Mapping[str, Sequence[Dimension] | None], stated: Mapping[str, int]
) -> dict[str, int]:
    """Axis -> size: those *stated*, and those that follow from the shapes of inputs.

    An axis with two sizes in *shapes* is a name that an exporter used twice, and tells nothing of other inputs.
    """
    seen: dict[str, set[int]] = {}
    for name, shape in shapes.items():
        for axis, size in zip(inputs[name] or (), shape, strict=False):
            if isinstance(axis, str) and axis not in NAMELESS:
                seen.setdefault(axis, set()).add(size)
                if stated.get(axis, size) != size:
                    raise ModelError(f"{axis}={stated[axis]} and {name}={written(shape)} disagree; keep one of them")
    return {axis: min(sizes) for axis, sizes in seen.items() if len(sizes) == 1} | dict(stated)


def _fitting(name: str, shape: Shape, inputs: Mapping[str, Sequence[Dimension] | None]) -> Shape:
    """A shape, once it is shown to fit what the file says of the input."""
    dimensions = inputs[name]
    if any(not isinstance(size, int) or size < 0 for size in shape):
        raise ModelError(
            f"input {name!r}: sizes must be at least 0, got {written(shape)}; the inputs are: {described(inputs)}"
        )
    if dimensions is not None and (
        len(shape) != len(dimensions)
        or any(isinstance(want, int) and want != size for want, size in zip(dimensions, shape, strict=True))
    ):
        raise ModelError(f"shape {written(shape)} does not fit input {name!r}; the inputs are: {described(inputs)}")
    return shape


def _axes(dimensions: Sequence[Dimension] | None) -> Iterator[str]:
    return (each for each in dimensions or () if isinstance(each, str) and each not in NAMELESS)


def described(inputs: Mapping[str, Sequence[Dimension] | None]) -> str:
    """Inputs for messages, with the names of their axes: ``ids [batch, seq]; mask [batch, seq]``."""
    return "; ".join(f"{name} {describe_dimensions(dimensions)}" for name, dimensions in inputs.items()) or "none"


def describe_dimensions(dimensions: Sequence[Dimension] | None) -> str:
    """Dimensions for messages: ``[batch, 3, ?, 224]``."""
    if dimensions is None:
        return "of any shape"
    return f"[{', '.join('?' if each in NAMELESS else str(each) for each in dimensions)}]"


def example(dimensions: Sequence[Dimension]) -> str:
    """Sizes that would fit, for advice: ``1x128`` for ``[batch, seq]``."""
    sizes = [each if isinstance(each, int) and each >= 0 else FREE_SIZE for each in dimensions]
    if dimensions and (not isinstance(dimensions[0], int) or dimensions[0] < 0):
        sizes[0] = 1
    return written(sizes)


def written(shape: Sequence[int]) -> str:
    """A shape as users write it; free dimensions (-1) have a question mark."""
    return "x".join("?" if size == -1 else str(size) for size in shape) or "()"
