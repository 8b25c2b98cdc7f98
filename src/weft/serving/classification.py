"""An output as classes: its largest elements as strings, ``value:index`` or ``value:index:label``.

That is the protocol's classification extension. Labels come from a text file that the model's settings name: UTF-8,
one label to a line, the first line for index 0. It lies beside the model, or beside the settings of all its versions.
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
"""A longer file is not one of labels."""

_CLASSLESS = frozenset({"BOOL", "BYTES"})

Labels = Sequence[str]
"""The label of each index; an empty one, or none, says nothing."""


def class_count(asked: object, spec: TensorSpec) -> int:
    """How many classes a request wants of an output; 0 is the tensor itself."""
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < 0:
        raise BadRequest(f"output {spec.name!r}: classification must be a whole number from 0, not {str(asked)[:64]!r}")
    if asked and spec.datatype in _CLASSLESS:
        raise BadRequest(f"output {spec.name!r}: {spec.datatype} has no classes; ask for the tensor itself")
    return asked


def classified(spec: TensorSpec, array: Array, count: int, labels: Labels = ()) -> tuple[TensorSpec, Array]:
    """The *count* largest elements of an output, as its description and its strings, the largest first.

    Where the first dimension is free each of its rows has classes of its own; else all elements are one row. Of equal
    elements the first one goes first. NaN goes last.
    """
    batched = spec.shape[:1] == (-1,)
    rows, classes = (len(array), array.shape[1:]) if batched else (1, array.shape)
    table = array.reshape(rows, math.prod(classes))
    order = _largest_first(table)[:, :count]
    values = np.take_along_axis(table, order, axis=1)
    found = np.empty(order.size, np.object_)
    pairs = zip(values.reshape(-1).tolist(), order.reshape(-1).tolist(), strict=True)
    found[:] = [_class(value, index, labels) for value, index in pairs]
    shape = order.shape if batched else order.shape[1:]
    return TensorSpec(spec.name, "BYTES", shape), found.reshape(shape)


def _largest_first(table: Any) -> Any:
    """The columns of each row in the order of their values, equal ones in their own."""
    if table.dtype.kind == "f":
        return np.argsort(-table, axis=1, kind="stable")
    return table.shape[1] - 1 - np.argsort(table[:, ::-1], axis=1, kind="stable")[:, ::-1]


def _class(value: float, index: int, labels: Labels) -> bytes:
    number = f"{value:f}" if isinstance(value, float) else str(value)
    label = labels[index] if index < len(labels) else ""
    return (f"{number}:{index}:{label}" if label else f"{number}:{index}").encode()


def labels_beside(model: Path, files: Mapping[str, str], outputs: Collection[str]) -> dict[str, Labels]:
    """Output -> its labels; ModelError where a file cannot be read, or there is no such output."""
    for output in files:
        if output not in outputs:
            raise ModelError(f"labels: {unknown_name('output', output, outputs)}")
    return {output: _read(_place(model, name), name) for output, name in files.items()}


def _place(model: Path, name: str) -> Path:
    """Where the file is: beside the model, or in the folder of all its versions."""
    beside, above = model.parent / name, model.parent.parent / name
    return above if model.parent.name.isdigit() and not beside.exists() and above.exists() else beside


def _read(path: Path, name: str) -> Labels:
    try:
        if not path.is_file() or path.stat().st_size > MOST_LABEL_BYTES:
            raise ModelError(f"labels: {name} is no file of at most {MOST_LABEL_BYTES} bytes beside the model")
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"labels: {name} cannot be read as text: {reason_of(error)}") from error
    return tuple(line.strip() for line in lines)
