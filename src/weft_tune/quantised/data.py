"""Labelled samples for a model: an .npz file with a row of every input per sample, and the right class of each.

Values are widened to the input's data type, and scaled only if that is asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.base.errors import InputError, TuneError
from weft.base.shapes import written
from weft.runtime.samples import array_names, fits, read_arrays, require_arrays
from weft.runtime.tensors import DATATYPES, Array, TensorSpec

Labels = npt.NDArray[Any]
"""The right class of each sample; for measures of a user's own, anything."""

LABELS = ("label", "labels", "y")
"""Possible names of the array of right classes."""
FEWEST = 10
"""Least number of samples; with fewer, a single one outweighs any margin."""
MAX_ARRAY_BYTES = 1 << 35
"""Limit of an unpacked array; more is a damaged file."""


class LabelledData(NamedTuple):
    """Samples as a model takes them, and their labels."""

    inputs: Mapping[str, Array]
    """Input -> one row per sample."""
    labels: Labels


def read_data(path: str | Path, inputs: Sequence[TensorSpec], scale: float | None = None) -> LabelledData:
    """Read the samples in a file, checked against the inputs of the model.

    *scale* multiplies the values of float inputs. Integers above 1 need it, because nothing in the file says whether
    the model was trained on values up to 255 or up to 1. Raises TuneError.
    """
    try:
        label, names = _array_names(array_names(path), [spec.name for spec in inputs])
        stored = read_arrays(path, {label, *names.values()}, MAX_ARRAY_BYTES)
        tensors = {spec.name: _convert(spec, names[spec.name], stored[names[spec.name]], scale) for spec in inputs}
        return LabelledData(tensors, check_labels(stored[label], _check_counts(tensors), label, classes=False))
    except InputError as error:
        raise TuneError(f"{path}: {error}") from error


def read_samples(path: str | Path, inputs: Sequence[TensorSpec], scale: float | None = None) -> dict[str, Array]:
    """Read the samples in a file without their labels, which may be missing; *scale* as in ``read_data``."""
    try:
        stored_names = array_names(path)
        unlabelled = [name for name in stored_names if name not in LABELS or name in {spec.name for spec in inputs}]
        names = _input_names(unlabelled, [spec.name for spec in inputs], unlabelled)
        stored = read_arrays(path, set(names.values()), MAX_ARRAY_BYTES)
        tensors = {spec.name: _convert(spec, names[spec.name], stored[names[spec.name]], scale) for spec in inputs}
        _check_counts(tensors)
    except InputError as error:
        raise TuneError(f"{path}: {error}") from error
    return tensors


def _array_names(stored: Sequence[str], inputs: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The array of the labels, and input -> its array."""
    listed = ", ".join(stored[:8]) or "nothing"
    labels = [name for name in LABELS if name in stored and name not in inputs]
    if not labels:
        raise TuneError(f"has no array called {' or '.join(LABELS)} with the right classes; it holds {listed}")
    return labels[0], _input_names([name for name in stored if name != labels[0]], inputs, stored)


def _input_names(unlabelled: Sequence[str], inputs: Sequence[str], stored: Sequence[str]) -> dict[str, str]:
    """Input -> its array, by name; a single input also takes the only array without labels under any name.

    unlabelled: names of the arrays without labels; stored: names of all arrays, for messages.
    """
    if len(inputs) == 1 and inputs[0] not in unlabelled and len(unlabelled) == 1:
        return {inputs[0]: unlabelled[0]}
    require_arrays(stored, inputs)
    return {name: name for name in inputs}


def _check_counts(tensors: Mapping[str, Array]) -> int:
    """Return the number of samples; raises TuneError if tensors differ in it or have too few."""
    (first, count), *rest = ((name, len(rows)) for name, rows in tensors.items())
    for name, other in rest:
        if other != count:
            raise TuneError(f"{name} holds {other} samples, {first} {count}")
    if count < FEWEST:
        raise TuneError(f"{count} samples are too few to measure anything; give at least {FEWEST}")
    return count


def check_inputs(inputs: Mapping[str, Array], specs: Sequence[TensorSpec]) -> dict[str, Array]:
    """Check samples in memory against the inputs of the model, and convert them to its data types."""
    if missing := [spec.name for spec in specs if spec.name not in inputs]:
        given = ", ".join(inputs) or "nothing"
        raise TuneError(f"no samples for the input {missing[0]!r} of the model; given: {given}")
    tensors = {spec.name: _convert(spec, spec.name, np.asarray(inputs[spec.name]), None) for spec in specs}
    _check_counts(tensors)
    return tensors


def check_labels(labels: npt.ArrayLike, count: int, name: str = "label", *, classes: bool = True) -> Labels:
    """Check labels: a row for each sample; if they are *classes*, one whole number each, flat or in a column."""
    try:
        array = np.asarray(labels)
    except ValueError:
        raise TuneError(f"{name} has rows of different lengths; give an array") from None
    if array.dtype.hasobject:
        raise TuneError(f"{name} is of Python objects; give an array of numbers or text")
    if array.ndim == 0 or len(array) != count:
        raise TuneError(f"{name} has the shape {written(array.shape)}, must have a row for each of {count} samples")
    if not classes:
        return array
    if array.dtype.kind not in "iu" or not np.can_cast(array.dtype, np.int64, "safe"):
        raise TuneError(f"{name} is of type {array.dtype}, must be whole numbers, the class of each sample")
    if array.ndim > 2 or array.size != count:
        raise TuneError(f"{name} has the shape {written(array.shape)}, must be one class for each of {count} samples")
    return array.reshape(-1).astype(np.int64)


def _convert(spec: TensorSpec, name: str, array: npt.NDArray[Any], scale: float | None) -> Array:
    """Convert an array to the data type of the input *spec*; *name* is the array's, for messages."""
    _check_shape(spec, name, array)
    kind = DATATYPES[spec.datatype]
    if kind.kind == "f":
        return _convert_floats(spec, name, array, kind, scale)
    if not np.can_cast(array.dtype, kind, "safe"):
        raise TuneError(
            f"{name} is of type {array.dtype}, which does not fit into the input's {spec.datatype}; save it as {kind}"
        )
    return array.astype(kind, copy=False)


def _convert_floats(
    spec: TensorSpec, name: str, array: npt.NDArray[Any], kind: np.dtype[Any], scale: float | None
) -> Array:
    """Convert an array to the float type *kind*, times *scale*; refuses unscaled integers, NaN and infinities."""
    if array.dtype.kind not in "uifb":
        raise TuneError(f"{name} is of type {array.dtype}, must be numbers, as the input is {spec.datatype}")
    if array.dtype.kind in "ui" and scale is None and array.size and (largest := int(array.max())) > 1:
        raise TuneError(
            f"{name} holds {array.dtype} up to {largest} for a float input; "
            f"give scale = 1/{255 if largest <= 255 else largest}, or scale = 1 if the model takes such numbers"
        )
    with np.errstate(over="ignore"):  # infinities are refused below
        values = array.astype(kind, copy=False)
        if scale is not None and scale != 1:
            values = values * kind.type(scale)
    if not np.isfinite(values).all():
        sample = int(np.argwhere(~np.isfinite(values.reshape(len(values), -1)).all(axis=1))[0, 0])
        raise TuneError(
            f"{name} holds NaN or infinity, first in sample {sample}, once it is {spec.datatype}; take such samples out"
        )
    return np.ascontiguousarray(values)


def _check_shape(spec: TensorSpec, name: str, array: npt.NDArray[Any]) -> None:
    """Compare all dimensions but the first, which counts samples; advise a transposition or reshaping that fits."""
    wanted = spec.shape[1:]
    if fits(array.shape[1:], wanted) and array.ndim > 0:
        return
    shapes = f"{name} has the shape {written(array.shape)}, the input {spec.name!r} {written(spec.shape)}"
    # up to five dimensions: more have too many permutations
    for order in itertools.permutations(range(1, array.ndim)) if 2 < array.ndim <= 5 else ():
        if fits([array.shape[axis] for axis in order], wanted):
            raise TuneError(f"{shapes}; store it transposed: array.transpose{(0, *order)}")
    if array.ndim and -1 not in wanted and np.prod(array.shape[1:]) == np.prod(wanted):
        raise TuneError(f"{shapes}; store it reshaped: array.reshape{(-1, *wanted)}")
    raise TuneError(f"{shapes}; all but the first dimension must agree")
