"""Real samples for the requests of a stream: an .npz file with a row of every input per sample, and labels if known.

Values are sent as they are. They are widened to the input's data type where that loses nothing, never scaled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError, WorkloadError
from weft.base.shapes import written
from weft.runtime.archive import array_names, read_arrays
from weft.runtime.tensors import DATATYPES, Array, TensorSpec

Ints = npt.NDArray[np.int64]

LABEL = "label"
MAX_ARRAY_BYTES = 1 << 30
"""Unpacked; more is a damaged file, or cannot be kept ready to send."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """What the requests of a stream may hold: one sample each."""

    inputs: Mapping[str, Array]
    """Input -> (samples, shape of one request's tensor)."""
    labels: Ints | None
    """The right class of each sample."""

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


def read_samples(path: str | Path, inputs: Sequence[TensorSpec]) -> Samples:
    """The samples in an .npz file, checked against what the model takes."""
    try:
        held, needed = array_names(path), [spec.name for spec in inputs]
        if missing := [name for name in needed if name not in held]:
            shown = ", ".join(held[:8]) or "nothing"
            raise WorkloadError(f"has no array for the input {missing[0]!r} of the model; it holds {shown}")
        return _checked(read_arrays(path, {*needed, *({LABEL} & {*held})}, MAX_ARRAY_BYTES), inputs)
    except InputError as error:
        raise WorkloadError(f"{path}: {error}") from error


def _checked(stored: Mapping[str, npt.NDArray[Any]], inputs: Sequence[TensorSpec]) -> Samples:
    if not inputs:
        raise WorkloadError("the model takes no input that a sample could fill")
    tensors = {spec.name: _tensors(spec, stored[spec.name]) for spec in inputs}
    first = inputs[0].name
    count = len(tensors[first])
    if not count:
        raise WorkloadError(f"{first} holds no sample")
    for name, each in tensors.items():
        if len(each) != count:
            raise WorkloadError(f"{name} holds {len(each)} samples, {first} {count}")
    known = {spec.name for spec in inputs}
    return Samples(tensors, _labels(stored[LABEL], count) if LABEL in stored and LABEL not in known else None)


def _tensors(spec: TensorSpec, array: npt.NDArray[Any]) -> Array:
    """The array as tensors to send; where the input has a dimension for the batch, each is a batch of one."""
    whole = array[:, None] if 0 < array.ndim == len(spec.shape) else array
    one = whole.shape[1:]
    if whole.ndim != len(spec.shape) + 1 or any(
        want not in (-1, have) for have, want in zip(one, spec.shape, strict=True)
    ):
        raise WorkloadError(
            f"{spec.name} has the shape {written(array.shape)}, whose rows do not fit the input's {written(spec.shape)}"
        )
    return _cast(spec, whole)


def _cast(spec: TensorSpec, array: npt.NDArray[Any]) -> Array:
    kind = DATATYPES[spec.datatype]
    if kind == np.object_:
        if array.dtype.kind not in "SU":
            raise WorkloadError(f"{spec.name} is of type {array.dtype}, must be text, as the input is BYTES")
        texts = [each.encode() if isinstance(each, str) else each for each in array.ravel().tolist()]
        found = np.empty(len(texts), np.object_)
        found[:] = texts
        return found.reshape(array.shape)
    if not np.can_cast(array.dtype, kind, "safe"):
        raise WorkloadError(
            f"{spec.name} is of type {array.dtype}, which does not fit into the input's {spec.datatype}; "
            f"save it as {kind}"
        )
    return array.astype(kind, copy=False)


def _labels(array: npt.NDArray[Any], count: int) -> Ints:
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64, "safe"):
        raise WorkloadError(f"{LABEL} is of type {array.dtype}, must be whole numbers of at most 63 bits")
    if array.shape != (count,):
        raise WorkloadError(f"{LABEL} has the shape {written(array.shape)}, must be one for each of {count} samples")
    return array.astype(np.int64)
