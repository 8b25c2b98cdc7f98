"""Inputs and outputs of a model: names, data types and shapes, in the terms of the Open Inference Protocol."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

DATATYPES: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}
"""Data types of the protocol that ONNX Runtime takes from numpy; BYTES are objects of type ``bytes``."""


_ALIGNED_BYTES = 16
"""Alignment of numpy arrays that own their memory."""


def aligned(array: Array) -> Array:
    """The array, or a copy if its memory is not aligned, as in an array that is a part of a larger message.

    Kernels sum the elements before the first aligned one separately: the result would differ in its last bits.
    """
    if array.base is None:  # it owns its memory, which numpy aligned
        return array
    address: int = array.__array_interface__["data"][0]
    return array.copy() if address % _ALIGNED_BYTES else array


class TensorSpec(NamedTuple):
    """One input or output."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    """-1 where a dimension is free."""
