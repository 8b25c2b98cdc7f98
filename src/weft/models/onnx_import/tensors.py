"""What the importer knows of a tensor: shape, type, and whether it is fixed before a query arrives.

Weights are never read: a constant is its shape and type. Only small values are kept, because shape
arithmetic needs them (the target of a Reshape, the scales of a Resize).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx.external_data_helper import load_external_data_for_tensor

from weft.base.errors import ModelError

MAX_ELEMENTS = 2**48
"""No machine holds a tensor of more values; a file that asks for one is damaged."""

MAX_INTEGERS = 4096
"""Integer and boolean values are kept up to this many: shapes, axes, indices."""

MAX_FLOATS = 16
"""Floating-point values are kept up to this many: scales and ranges, never weights."""

Array = np.ndarray[Any, Any]

_BITS = {
    **dict.fromkeys(("UINT2", "INT2"), 2),
    **dict.fromkeys(("UINT4", "INT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 6),
    **dict.fromkeys(("UINT8", "INT8", "BOOL", "STRING"), 8),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "FLOAT8E8M0"), 8),
    **dict.fromkeys(("UINT16", "INT16", "FLOAT16", "BFLOAT16"), 16),
    **dict.fromkeys(("UINT64", "INT64", "DOUBLE", "COMPLEX64"), 64),
    "COMPLEX128": 128,
}
_DTYPE_BITS = {number: _BITS.get(name, 32) for name, number in TensorProto.DataType.items()}

INTEGERS = frozenset(
    getattr(TensorProto, name) for name in ("BOOL", "INT64", "UINT64", "INT32", "UINT32", "INT16", "UINT16")
)
"""Types that hold indices and flags; 8 bits and fewer are quantised values instead."""


def dtype_bits(dtype: int) -> int:
    return _DTYPE_BITS.get(dtype, 32)


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """One tensor kept in the file. Compared by identity, so shared weights are counted once."""

    elements: int
    dtype: int

    @property
    def trained(self) -> bool:
        """Whether it can be a learned value where the operator does not say so: no index, no lone factor."""
        return self.elements > 1 and self.dtype not in INTEGERS and self.dtype != TensorProto.STRING


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor on its way through the graph."""

    shape: tuple[int, ...]
    dtype: int
    bits: int
    """Bits of one value as stored: a dequantised tensor keeps the bits it was quantised to."""
    exact: bool = True
    """False where a size had to be guessed, here or upstream."""
    constant: bool = False
    value: Array | None = None
    stored: tuple[Stored, ...] = ()
    """The tensors of the file a constant was made from."""
    view_of: Tensor | None = None
    """The tensor whose memory this one only looks at differently."""
    made_of: tuple[Tensor, ...] = ()
    """The tensors that live on in this one, where an operator without cost or a loop handed it out."""

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape) or self.elements > MAX_ELEMENTS:
            raise ModelError(f"a tensor cannot have the shape {'x'.join(map(str, self.shape))}")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def root(self) -> Tensor:
        return self.view_of or self

    @property
    def origins(self) -> tuple[Tensor, ...]:
        """The memory it needs, as layers wrote it."""
        return self.root.made_of or (self.root,)


def constant(shape: Sequence[int], dtype: int, value: Array | None = None) -> Tensor:
    """A tensor kept in the file."""
    sizes = tuple(int(size) for size in shape)
    origin = Stored(math.prod(sizes), dtype)
    return Tensor(sizes, dtype, dtype_bits(dtype), constant=True, value=value, stored=(origin,))


def computed(value: Array) -> Tensor:
    """A constant that follows from shapes; nothing of it is in the file."""
    dtype = int(onnx.helper.np_dtype_to_tensor_dtype(value.dtype))
    return Tensor(value.shape, dtype, dtype_bits(dtype), constant=True, value=value)


def from_proto(proto: onnx.TensorProto, folder: Path | None) -> Tensor:
    """A constant from the file; *folder* is where its external data would lie."""
    try:
        return constant(proto.dims, proto.data_type, small_value(proto, folder))
    except ModelError as error:
        raise ModelError(f"constant {proto.name!r}: {error}") from error


def small_value(proto: onnx.TensorProto, folder: Path | None) -> Array | None:
    """The values of a small tensor, or None where they are many, absent or unreadable."""
    if not keepable(proto.dims, proto.data_type):
        return None
    try:
        if proto.data_location == TensorProto.EXTERNAL:
            proto = _with_external_data(proto, folder)
        value: Array = np.asarray(onnx.numpy_helper.to_array(proto))
    except (ValueError, TypeError, KeyError, OSError, RuntimeError, onnx.checker.ValidationError):
        # A graph without its data is a normal input: only what depends on this value stays unknown.
        return None
    return value if value.dtype != object else None


def keepable(shape: Sequence[int], dtype: int) -> bool:
    """Whether a tensor is small enough for its values to be followed."""
    limit = MAX_INTEGERS if dtype in INTEGERS else MAX_FLOATS
    return dtype != TensorProto.STRING and 0 <= math.prod(shape) <= limit


def _with_external_data(proto: onnx.TensorProto, folder: Path | None) -> onnx.TensorProto:
    if folder is None:
        raise OSError("no folder to look for external data in")
    copy = onnx.TensorProto()
    copy.CopyFrom(proto)
    load_external_data_for_tensor(copy, str(folder))
    return copy
