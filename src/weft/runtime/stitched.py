"""Stitched files: several models, the *tasks*, with one shared backbone.

Each task has inputs and outputs of its own in the graph; the file's metadata lists them. All inputs have a free first
dimension, so that a run takes rows of several tasks at once; ``mixed`` joins them. If rows may have any length, the
metadata has the padding value, and rows of one task are padded to the longest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from weft.base.errors import ModelError
from weft.base.jsonfile import first_problem, printable
from weft.runtime.metadata import STITCHED_KEY, STITCHED_VERSION, Glance, metadata_value
from weft.runtime.tensors import Array, TensorSpec

_NO_PADDING: Mapping[str, float] = MappingProxyType({})

_Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
_Ports = Annotated[dict[_Name, _Name], Field(min_length=1)]  # a tensor's name in the model -> in the graph


class TaskSpec(BaseModel):
    """One of the models in a stitched file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: _Name
    inputs: _Ports
    """Names of its inputs in the model -> in the graph."""
    outputs: _Ports
    batch: int = 1
    """Rows it was stitched for."""
    length: Annotated[int, Field(ge=1)] | None = None
    """A usual length, if rows may have any: the size of all free dimensions of its inputs but the first."""
    exits: tuple[_Name, ...] = ()
    """Its outputs that are exits, shallow to deep, the end last; none where there is only the end."""
    fill: dict[_Name, float] | None = None
    """Input -> the padding value, which changes no answer; None: rows of a batch must have equal lengths."""


class _Stitched(BaseModel):
    """The JSON under ``STITCHED_KEY``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Annotated[int, Field(ge=STITCHED_VERSION, le=STITCHED_VERSION)]
    tasks: Annotated[tuple[TaskSpec, ...], Field(min_length=1)]


def read_tasks(text: str) -> tuple[TaskSpec, ...]:
    """The tasks in the JSON *text* of a file's metadata; none where it is empty. ``ModelError`` if it is not valid."""
    if not text:
        return ()
    try:
        tasks = _Stitched.model_validate_json(text).tasks
    except ValidationError as error:
        raise ModelError(f"its {STITCHED_KEY} cannot be read: {first_problem(error, _Stitched)}") from error
    for kind, names in (
        ("task", [task.name for task in tasks]),
        ("input", [name for task in tasks for name in task.inputs.values()]),
        ("output", [name for task in tasks for name in task.outputs.values()]),
    ):
        if repeated := [name for name, count in Counter(names).items() if count > 1]:
            raise ModelError(f"its {STITCHED_KEY} names {kind} {repeated[0]!r} twice; stitch it again")
    for task in tasks:
        if unknown := [name for name in task.exits if name not in task.outputs]:
            raise ModelError(f"its {STITCHED_KEY} names exit {unknown[0]!r}, no output of {task.name}; stitch it again")
    return tasks


def tasks_in(path: Path) -> tuple[TaskSpec, ...]:
    """The tasks of a file, read without its weights; none if the file is not stitched, or is no ONNX model."""
    with open(path, "rb") as file:
        try:
            return read_tasks(metadata_value(Glance(file), STITCHED_KEY))
        except IndexError:  # not a model, or truncated: loading it raises the error that users see
            return ()


def check(tasks: Sequence[TaskSpec], inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
    """Raise ``ModelError`` if tasks do not fit the graph's *inputs* and *outputs*, or their rows are fixed."""
    for kind, tensors, named_by_tasks in (
        ("input", inputs, {name for task in tasks for name in task.inputs.values()}),
        ("output", outputs, {name for task in tasks for name in task.outputs.values()}),
    ):
        shapes = {spec.name: spec.shape for spec in tensors}
        for name in sorted(named_by_tasks ^ shapes.keys()):
            problem = "is named by no task" if name in shapes else "of a task is not in the graph"
            raise ModelError(f"{kind} {name!r} {problem}; stitch it again")
        for name, shape in shapes.items():
            if shape[:1] != (-1,):
                raise ModelError(
                    f"{kind} {name!r} is stitched with a fixed number of rows, {shape}; stitch it with --dynamic, so "
                    "that requests of any of its models can run together"
                )
            if kind == "input" and -1 in shape[1:] and not any(task.length for task in tasks):
                raise ModelError(f"input {name!r} is {shape}; in a stitched model only the rows may be free")


def usual_shapes(tasks: Sequence[TaskSpec], inputs: Iterable[TensorSpec]) -> dict[str, tuple[int, ...]]:
    """Input -> the shape of one row of its task's usual length; only inputs with free dimensions besides the rows."""
    lengths = {name: task.length for task in tasks if task.length for name in task.inputs.values()}
    return {
        spec.name: (1, *(lengths[spec.name] if size < 0 else size for size in spec.shape[1:]))
        for spec in inputs
        if spec.name in lengths and -1 in spec.shape[1:]
    }


def fills(tasks: Sequence[TaskSpec]) -> dict[str, float]:
    """Input of the graph -> its padding value."""
    return {task.inputs[name]: number for task in tasks for name, number in (task.fill or {}).items()}


def mixed(
    samples: Sequence[Mapping[str, Any]], absent: Mapping[str, Array], fill: Mapping[str, float] = _NO_PADDING
) -> dict[str, Any]:
    """Join samples, each of which has the inputs of its own task only, into one batch of the whole model.

    *samples*: of each, input -> its array. *absent*: input -> the array that stands for it if no sample has it.
    *fill*: input -> padding value.
    """
    by_input: dict[str, list[Any]] = {}
    for sample in samples:
        for name, value in sample.items():
            by_input.setdefault(name, []).append(value)
    joined = {
        name: values[0] if len(values) == 1 else np.concatenate(_pad_arrays(values, fill.get(name, 0)))
        for name, values in by_input.items()
    }
    return {**absent, **joined}


def _pad_arrays(arrays: Sequence[Array], number: float) -> Sequence[Array]:
    """The arrays, padded with *number* to equal sizes in all dimensions but the first."""
    if all(array.shape[1:] == arrays[0].shape[1:] for array in arrays):
        return arrays
    largest = [max(sizes) for sizes in zip(*(array.shape[1:] for array in arrays), strict=True)]
    padded = []
    for array in arrays:
        enlarged = np.full((len(array), *largest), number, array.dtype)
        enlarged[tuple(slice(size) for size in array.shape)] = array
        padded.append(enlarged)
    return padded
