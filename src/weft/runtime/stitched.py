"""Stitched files: several models, its tasks, with one body.

Each task has inputs and outputs of its own in the graph; the file's metadata tells which. All inputs have a free
first dimension, so that a run takes rows of any of the tasks at once, which ``mixed`` puts together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from weft.errors import ModelError
from weft.jsonfile import first_problem, printable
from weft.runtime.metadata import STITCHED_KEY, STITCHED_VERSION
from weft.runtime.tensors import Array, TensorSpec
from weft.runtime.wire_format import Glance, fields

_METADATA_FIELD = 14
"""The field of an ONNX model that holds its metadata: entries with a key (1) and a value (2)."""

_MOST_BYTES = 1 << 24
"""More than any file says of its tasks."""

_Name = Annotated[str, Field(min_length=1), AfterValidator(printable)]
_Ports = Annotated[dict[_Name, _Name], Field(min_length=1)]


class TaskSpec(BaseModel):
    """One of the models."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: _Name
    inputs: _Ports
    """Names of its inputs in the model -> in the graph."""
    outputs: _Ports
    batch: int = 1
    """Rows it was stitched for."""


class _Stitched(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    version: Annotated[int, Field(ge=STITCHED_VERSION, le=STITCHED_VERSION)]
    tasks: Annotated[tuple[TaskSpec, ...], Field(min_length=1)]


def read_tasks(text: str) -> tuple[TaskSpec, ...]:
    """The tasks that a file's metadata names; none where *text* is empty."""
    if not text:
        return ()
    try:
        tasks = _Stitched.model_validate_json(text).tasks
    except ValidationError as error:
        raise ModelError(f"its {STITCHED_KEY} cannot be read: {first_problem(error, _Stitched)}") from error
    for what, names in (
        ("task", [task.name for task in tasks]),
        ("input", [name for task in tasks for name in task.inputs.values()]),
        ("output", [name for task in tasks for name in task.outputs.values()]),
    ):
        if again := [name for name, count in Counter(names).items() if count > 1]:
            raise ModelError(f"its {STITCHED_KEY} names {what} {again[0]!r} twice; stitch it again")
    return tasks


def tasks_in(path: Path) -> tuple[TaskSpec, ...]:
    """The tasks of a file, whose weights are stepped over; none of one that is not stitched, or no model at all."""
    with open(path, "rb") as file:
        try:
            return read_tasks(_said(Glance(file)))
        except IndexError:  # not a model, or not written to its end, which loading it will tell
            return ()


def _said(data: Glance) -> str:
    """The value of our key in a model's metadata; empty where there is none."""
    for number, start, end in fields(data, 0, len(data)):
        if number == _METADATA_FIELD and end - start <= _MOST_BYTES:
            entry = {key: data[first:last] for key, first, last in fields(data, start, end)}
            if entry.get(1) == STITCHED_KEY.encode():
                return entry.get(2, b"").decode("utf-8", "replace")
    return ""


def check(tasks: Sequence[TaskSpec], inputs: Iterable[TensorSpec], outputs: Iterable[TensorSpec]) -> None:
    """Refuse tasks that do not fit the graph, and graphs that take a fixed number of rows."""
    for what, tensors, named in (
        ("input", inputs, {name for task in tasks for name in task.inputs.values()}),
        ("output", outputs, {name for task in tasks for name in task.outputs.values()}),
    ):
        shapes = {spec.name: spec.shape for spec in tensors}
        for name in sorted(named ^ shapes.keys()):
            whose = "is named by no task" if name in shapes else "of a task is not in the graph"
            raise ModelError(f"{what} {name!r} {whose}; stitch it again")
        for name, shape in shapes.items():
            if shape[:1] != (-1,):
                raise ModelError(
                    f"{what} {name!r} is stitched with a fixed number of rows, {shape}; stitch it with --dynamic, so "
                    "that requests of any of its models can run together"
                )
            if what == "input" and -1 in shape[1:]:
                raise ModelError(f"input {name!r} is {shape}; in a stitched model only the rows may be free")


def mixed(samples: Sequence[Mapping[str, Any]], absent: Mapping[str, Array]) -> dict[str, Any]:
    """The inputs of several samples, each with those of its own task, as one batch; *absent* stands for all others."""
    found: dict[str, list[Any]] = {}
    for sample in samples:
        for name, value in sample.items():
            found.setdefault(name, []).append(value)
    joined = {name: each[0] if len(each) == 1 else np.concatenate(each) for name, each in found.items()}
    return {**absent, **joined}
