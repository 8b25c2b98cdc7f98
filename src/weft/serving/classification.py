"""An output as classes: its largest elements as strings, ``value:index`` or ``value:index:label``.

This is the protocol's classification extension. Labels are read from a text file that the model's settings name: UTF-8,
one label per line, the first line for index 0. The file is in the model's folder, or in the folder of all its versions.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import BadRequest, ModelError, reason_of, unknown_name
from weft.runtime.tensors import Array, TensorSpec

MOST_LABEL_BYTES = 16 << 20
"""Limit on a label file, which is held in memory; a longer file is taken for something else and refused."""

_CLASSLESS = frozenset({"BOOL", "BYTES"})

Labels = Sequence[str]
"""The label of each index; where it is empty or missing, a class is written without a label."""


def class_count(requested: object, spec: TensorSpec) -> int:
    """Check the number of classes that a client requested of an output, and return it; 0: the tensor itself."""
    if isinstance(requested, bool) or not isinstance(requested, int) or requested < 0:
        raise BadRequest(
            f"output {spec.name!r}: classification must be a whole number from 0, not {str(requested)[:64]!r}"
        )
    if requested and spec.datatype in _CLASSLESS:
        raise BadRequest(f"output {spec.name!r}: {spec.datatype} has no classes; ask for the tensor itself")
    return requested


def classify(spec: TensorSpec, array: Array, count: int, labels: Labels = ()) -> tuple[TensorSpec, Array]:
    """Return the *count* largest elements of an output, the largest first: the spec and a tensor of strings.

    If the first dimension is free, each row has its own classes; otherwise all elements are one row. Of equal elements
    the lowest index comes first. NaN sorts last.
    """
    batched = spec.shape[:1] == (-1,)
    rows, classes = (len(array), array.shape[1:]) if batched else (1, array.shape)
    table = array.reshape(rows, math.prod(classes))
    order = _largest_first(table)[:, :count]
    values = np.take_along_axis(table, order, axis=1)
    classes_as_text = np.empty(order.size, np.object_)
    pairs = zip(values.reshape(-1).tolist(), order.reshape(-1).tolist(), strict=True)
    classes_as_text[:] = [_format_class(value, index, labels) for value, index in pairs]
    shape = order.shape if batched else order.shape[1:]
    return TensorSpec(spec.name, "BYTES", shape), classes_as_text.reshape(shape)


def _largest_first(table: Any) -> Any:
    """Return the column indices of each row, sorted by value in descending order and stable for equal values."""
    if table.dtype.kind == "f":
        return np.argsort(-table, axis=1, kind="stable")
    # integers cannot be negated without overflow: sort each row backwards in ascending order, and reverse the result
    return table.shape[1] - 1 - np.argsort(table[:, ::-1], axis=1, kind="stable")[:, ::-1]


def _format_class(value: float, index: int, labels: Labels) -> bytes:
    """Write a class as ``value:index`` or ``value:index:label``."""
    number = f"{value:f}" if isinstance(value, float) else str(value)
    label = labels[index] if index < len(labels) else ""
    return (f"{number}:{index}:{label}" if label else f"{number}:{index}").encode()


def read_labels(model: Path, files: Mapping[str, str], outputs: Collection[str]) -> dict[str, Labels]:
    """Read the label files of a model; return the labels by output.

    model: path of its file. files: output -> name of its label file. outputs: all outputs of the model. ModelError for
    unreadable files and unknown outputs.
    """
    for output in files:
        if output not in outputs:
            raise ModelError(f"labels: {unknown_name('output', output, outputs)}")
    return {output: _read_label_file(_label_file(model, name), name) for output, name in files.items()}


def _label_file(model: Path, name: str) -> Path:
    """Return the path of a label file: in the model's folder, or if it is not there, in the folder of all versions."""
    beside, above = model.parent / name, model.parent.parent / name
    return above if model.parent.name.isdigit() and not beside.exists() and above.exists() else beside


def _read_label_file(path: Path, name: str) -> Labels:
    """Read a label file, one label per line; ModelError with its *name* if it cannot be used."""
    try:
        if not path.is_file() or path.stat().st_size > MOST_LABEL_BYTES:
            raise ModelError(f"labels: {name} is no file of at most {MOST_LABEL_BYTES} bytes beside the model")
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"labels: {name} cannot be read as text: {reason_of(error)}") from error
    return tuple(line.strip() for line in lines)
