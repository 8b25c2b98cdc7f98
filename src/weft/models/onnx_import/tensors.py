"""A tensor of the importer: shape, type, and whether it is constant.

Weights are never read: of a constant, only shape and type are known. Only small values are kept, since shape
arithmetic needs them (the target of a Reshape, the scales of a Resize).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from weft.base.errors import ModelError
from weft.models.element_types import ElementType, element_type
from weft.models.element_types import dtype_bits as dtype_bits
from weft.models.onnx_graph import UNREADABLE, Array, read_tensor

MAX_ELEMENTS = 2**48
"""Largest number of values of a tensor: more than any machine holds; a file with a larger tensor is damaged."""

MAX_INTEGERS = 4096
"""Largest number of integers or booleans of a tensor whose values are kept: shapes, axes, indices."""

MAX_FLOATS = 16
"""Largest number of floats of a tensor whose values are kept: scales and ranges, never weights."""

INTEGERS = frozenset(ElementType[name] for name in ("BOOL", "INT64", "UINT64", "INT32", "UINT32", "INT16", "UINT16"))
"""Types of indices and flags; integer types of 8 bits and fewer hold quantised values instead."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A tensor stored in the file. Compared by identity, so that shared weights are counted once."""

    elements: int
    dtype: int

    @property
    def trained(self) -> bool:
        """Whether the tensor looks like a parameter: not an index, a text or a single factor."""
        return self.elements > 1 and self.dtype not in INTEGERS and self.dtype != ElementType.STRING


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of the graph during the import."""

    shape: tuple[int, ...]
    dtype: int
    bits: int
    """Bits of a value as stored; a dequantised tensor keeps the bits of its quantised values."""
    exact: bool = True
    """False if a size of this tensor, or of a tensor that it was computed from, is a guess."""
    constant: bool = False
    value: Array | None = None
    """The values of a small constant, if they are known."""
    stored: tuple[Stored, ...] = ()
    """The tensors of the file from which a constant was computed."""
    view_of: Tensor | None = None
    """The tensor of which this tensor is a view."""
    made_of: tuple[Tensor, ...] = ()
    """The tensors written by layers that this tensor consists of, if an operator without a layer or a loop made it."""

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.shape) or self.elements > MAX_ELEMENTS:
            raise ModelError(f"a tensor cannot have the shape {'x'.join(map(str, self.shape))}")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def root(self) -> Tensor:
        """The tensor in whose memory a view is; the tensor itself if it is no view."""
        return self.view_of or self

    @property
    def origins(self) -> tuple[Tensor, ...]:
        """The tensors written by layers in whose memory this tensor is."""
        return self.root.made_of or (self.root,)


def constant(shape: Sequence[int], dtype: int, value: Array | None = None) -> Tensor:
    """A tensor that is stored in the file."""
    sizes = tuple(int(size) for size in shape)
    origin = Stored(math.prod(sizes), dtype)
    return Tensor(sizes, dtype, dtype_bits(dtype), constant=True, value=value, stored=(origin,))


def computed(value: Array) -> Tensor:
    """A constant with known values that is not stored in the file."""
    dtype = element_type(value.dtype)
    return Tensor(value.shape, dtype, dtype_bits(dtype), constant=True, value=value)


def from_proto(proto: Any, folder: Path | None) -> Tensor:
    """A constant from the file; *folder*: the folder of external data."""
    try:
        return constant(proto.dims, proto.data_type, small_value(proto, folder))
    except ModelError as error:
        raise ModelError(f"constant {proto.name!r}: {error}") from error


def small_value(proto: Any, folder: Path | None) -> Array | None:
    """The values of a small tensor; None if the tensor is large or not readable."""
    if not keepable(proto.dims, proto.data_type):
        return None
    try:
        value = np.asarray(read_tensor(proto, folder))
    except UNREADABLE:
        # A graph without its data is a valid input: only shapes that depend on this value stay unknown.
        return None
    return value if value.dtype != object else None


def keepable(shape: Sequence[int], dtype: int) -> bool:
    """Whether a tensor is so small that its values are kept."""
    limit = MAX_INTEGERS if dtype in INTEGERS else MAX_FLOATS
    return dtype != ElementType.STRING and 0 <= math.prod(shape) <= limit
