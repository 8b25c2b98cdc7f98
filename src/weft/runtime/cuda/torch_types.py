"""torch's types of numbers by ONNX's, and numpy arrays as tensors of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from weft.models.element_types import ElementType
from weft.runtime.cuda.precision import BF16, FP16, FP32

TYPES: Mapping[int, Any] = {
    ElementType.FLOAT: torch.float32, ElementType.FLOAT16: torch.float16, ElementType.DOUBLE: torch.float64,
    ElementType.INT64: torch.int64, ElementType.INT32: torch.int32, ElementType.INT16: torch.int16,
    ElementType.INT8: torch.int8, ElementType.UINT8: torch.uint8, ElementType.BOOL: torch.bool,
    ElementType.UINT16: torch.uint16, ElementType.UINT32: torch.uint32, ElementType.UINT64: torch.uint64,
    ElementType.BFLOAT16: torch.bfloat16,
}  # fmt: skip
PRECISIONS: Mapping[str, Any] = {FP32: None, FP16: torch.float16, BF16: torch.bfloat16}
"""Precision of the options -> the type that floats are converted to; None: they stay."""
NUMBERED = {kind: int(number) for number, kind in TYPES.items()}
"""torch's type -> ONNX's number of it."""


def as_torch(tensor: Any) -> Any:
    """A numpy array as a tensor over the same memory; a tensor of torch is returned as it is."""
    if not isinstance(tensor, np.ndarray):
        return tensor
    if tensor.dtype.name == "bfloat16":  # numpy has it from another package, which torch does not know
        return torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensor)


def is_channels_last(tensor: Any) -> bool:
    """Whether the channels of an image come last in memory; False if its memory has both orders, as with one channel.

    A convolution's output has its weight's order, so a weight in both orders must not count as channels last.
    """
    is_image = tensor.dim() == 4 and not tensor.is_contiguous()
    return bool(is_image and tensor.is_contiguous(memory_format=torch.channels_last))
