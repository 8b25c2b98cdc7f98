"""What a model takes and gives, and made-up inputs for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import ValueInfoProto

from weft.base.errors import ModelError, unknown_name
from weft.base.shapes import Dimension, Shapes, one_sample, settle, written
from weft.runtime.tensors import DATATYPES, Array, TensorSpec

_DATATYPE_OF = {
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
    "tensor(string)": "BYTES",
    "tensor(float16)": "FP16",
    **{f"tensor({name.lower()})": name for name in DATATYPES if name not in ("FP16", "FP32", "FP64", "BYTES")},
}
"""A type as ONNX Runtime names it -> as the protocol does."""


def specs(arguments: Sequence[Any]) -> tuple[TensorSpec, ...]:
    """Name, type and shape of tensors, from what a session says of its inputs or outputs."""
    return tuple(TensorSpec(each.name, _datatype(each), tuple(map(_size, each.shape))) for each in arguments)


def check_ranks(inputs: Iterable[ValueInfoProto]) -> None:
    """Sessions say of an input without dimensions what they say of a single number; the graph tells them apart."""
    for each in inputs:
        if not each.type.tensor_type.HasField("shape"):
            raise ModelError(f"input {each.name!r} states no dimensions; export it with them, free ones by a name")


def _datatype(argument: Any) -> str:
    if argument.type not in _DATATYPE_OF:
        raise ModelError(f"{argument.name!r} is a {argument.type}, which cannot be served; export it as a plain tensor")
    return _DATATYPE_OF[argument.type]


def _size(dimension: Dimension) -> int:
    return dimension if isinstance(dimension, int) else -1


def warm_shapes(arguments: Sequence[Any], given: Shapes) -> tuple[dict[str, tuple[int, ...]], list[str]]:
    """The inputs' shapes at batch 1, and the names of those with a free dimension that nothing tells.

    A free first dimension is 1 unless *given* says otherwise; an axis has one size in all inputs.
    """
    declared: dict[str, tuple[Dimension, ...]] = {each.name: tuple(each.shape) for each in arguments}
    settled = settle(given, declared)
    for name, shape in settled.items():
        if 0 in shape:
            raise ModelError(f"shape {written(shape)} does not fit input {name!r}: a sample has sizes from 1")
    found = {name: settled.get(name) or one_sample(dimensions, declared) for name, dimensions in declared.items()}
    return found, [name for name, shape in found.items() if -1 in shape]


def sample(
    inputs: Sequence[TensorSpec], shapes: Shapes, seed: int, values: Mapping[str, float] | None = None
) -> dict[str, Array]:
    """Seeded inputs of a plausible kind: normal floats, and whole numbers of 0 and 1, which every table has.

    *values*: inputs that must hold a certain number, such as a sampling rate.
    """
    rng = np.random.default_rng([seed, 0x57454654])
    feed = {spec.name: _drawn(rng, spec.datatype, shapes[spec.name]) for spec in inputs}
    check_values(inputs, values or {})
    for name, value in (values or {}).items():
        feed[name] = np.full_like(feed[name], value)
    return feed


def check_values(inputs: Sequence[TensorSpec], values: Mapping[str, float]) -> None:
    """Refuse a number for what is no input, or one of text."""
    numbers = [spec.name for spec in inputs if spec.datatype != "BYTES"]
    for name in values:
        if name not in numbers:
            raise ModelError(unknown_name("number input", name, numbers))


def _drawn(rng: np.random.Generator, datatype: str, shape: tuple[int, ...]) -> Array:
    kind = DATATYPES[datatype]
    if datatype.startswith("FP"):
        return rng.standard_normal(shape).astype(kind)
    whole = rng.integers(0, 2, shape)
    if datatype == "BYTES":
        return np.array([str(each) for each in whole.ravel()], dtype=kind).reshape(shape)
    return np.asarray(whole).astype(kind)
